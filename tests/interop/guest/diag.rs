//! What `smcss` shows: the kernel's AF_SMC sockets, through `smc_diag`.
//!
//! Numbers are those of `linux/smc_diag.h`.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};

use crate::netlink::{Attributes, Netlink};
use crate::stream::Stream;

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const AF_SMC: u8 = 43;
/// Number of the extension that says why a connection uses TCP.
const FALLBACK: u16 = 5;
/// Fixed part of a request: family, padding, extensions, then which socket (all of them).
const REQUEST_BYTES: usize = 52;
/// Fixed part of a message; its extensions follow.
const MESSAGE_BYTES: usize = 64;

/// An AF_SMC socket that is connected.
pub(crate) struct Connection {
    source: SocketAddrV4,
    target: SocketAddrV4,
    mode: Mode,
}

/// What carries a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Smcr,
    Smcd,
    /// TCP, with this side's reason and that of the peer's Decline, or zero.
    Tcp {
        reason: u32,
        diagnosis: u32,
    },
    /// The kernel has forgotten it, or it never used SMC.
    Unlisted,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Smcr => f.write_str("SMCR"),
            Self::Smcd => f.write_str("SMCD"),
            Self::Tcp { reason, diagnosis } => write!(f, "TCP 0x{reason:08x}/0x{diagnosis:08x}"),
            Self::Unlisted => f.write_str("UNLISTED"),
        }
    }
}

impl fmt::Display for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} > {} {}", self.source, self.target, self.mode)
    }
}

/// All connections of AF_SMC sockets.
pub(crate) fn sockets() -> io::Result<Vec<Connection>> {
    let mut request = [0; REQUEST_BYTES];
    request[0] = AF_SMC;
    request[3] = 1 << (FALLBACK - 1);
    let messages = Netlink::diagnosis(SOCK_DIAG_BY_FAMILY)?.dump(&request)?;
    let connections = messages.iter().filter_map(|message| connection(message));
    Ok(connections.filter(|connection| connection.target.port() != 0).collect())
}

/// What carries `stream`.
pub(crate) fn mode_of(stream: &Stream) -> io::Result<Mode> {
    let (source, target) = stream.addresses()?;
    let mut connections = sockets()?.into_iter();
    let found = connections.find(|found| (found.source, found.target) == (source, target));
    Ok(found.map_or(Mode::Unlisted, |connection| connection.mode))
}

/// Reads a message. Returns none if it is too short.
fn connection(message: &[u8]) -> Option<Connection> {
    let (fixed, extensions) = message.split_first_chunk::<MESSAGE_BYTES>()?;
    let port = |at: usize| u16::from_be_bytes([fixed[at], fixed[at + 1]]);
    // The rig speaks only IPv4, as Linux's SMC-Rv2 does.
    let address =
        |at: usize| Ipv4Addr::from([fixed[at], fixed[at + 1], fixed[at + 2], fixed[at + 3]]);
    let fallback = Attributes(extensions).find(FALLBACK).unwrap_or_default();
    let word = |at: usize| {
        let bytes = fallback.get(at..).and_then(|bytes| bytes.first_chunk());
        bytes.map_or(0, |bytes| u32::from_ne_bytes(*bytes))
    };
    let mode = match fixed[2] {
        0 => Mode::Smcr,
        1 => Mode::Tcp { reason: word(0), diagnosis: word(4) },
        _ => Mode::Smcd,
    };
    let source = SocketAddrV4::new(address(8), port(4));
    let target = SocketAddrV4::new(address(24), port(6));
    Some(Connection { source, target, mode })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::attribute;

    /// The rig learns here whether a connection uses SMC-R or TCP, and why.
    #[test]
    fn tells_smc_r_from_tcp() {
        let mut message = vec![0; MESSAGE_BYTES];
        message[0] = AF_SMC;
        message[4..8].copy_from_slice(&[0x1B, 0x62, 0xA5, 0x50]);
        message[8..12].copy_from_slice(&[10, 9, 0, 12]);
        message[24..28].copy_from_slice(&[10, 9, 0, 11]);
        let shown = |message: &[u8]| connection(message).map(|found| found.to_string());
        let smcr = "10.9.0.12:7010 > 10.9.0.11:42320 SMCR";
        assert_eq!(shown(&message).as_deref(), Some(smcr));

        message[2] = 1;
        let reasons = [0x0301_0000_u32.to_ne_bytes(), 0_u32.to_ne_bytes()].concat();
        message.extend(attribute(FALLBACK, &reasons));
        let tcp = "10.9.0.12:7010 > 10.9.0.11:42320 TCP 0x03010000/0x00000000";
        assert_eq!(shown(&message).as_deref(), Some(tcp));
        assert_eq!(shown(&message[..MESSAGE_BYTES - 1]), None);
    }
}
