//! The name of a Unix socket that stands for a TCP connection.
//!
//! ```text
//!   0   1         8         9       10         12           20              44             68
//!   | 0 | smcgate | version | level | reserved | connection | local address | peer address |
//! ```
//! Level is 0 where the bytes go by the socket, and 2 where they go by shared memory.

use core::net::SocketAddr;

use crate::{VERSION, address};

/// Which TCP connection a Unix socket of an application stands for.
///
/// The application may give a socket of its own such a name; it then deceives nobody but itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name {
    /// The gateway's number of the connection.
    pub connection: u64,
    /// What `getsockname` says of the TCP socket.
    pub local: SocketAddr,
    /// What `getpeername` says of the TCP socket.
    pub peer: SocketAddr,
    /// The bytes go by shared memory.
    pub rings: bool,
}

impl Name {
    /// The bytes of every name, with the zero by which abstract names begin.
    pub const LEN: usize = 68;

    /// The name as `sun_path` has it.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(PREFIX);
        bytes[8] = VERSION;
        bytes[9] = if self.rings { RINGS } else { 0 };
        bytes[12..20].copy_from_slice(&self.connection.to_be_bytes());
        bytes[20..44].copy_from_slice(&address::encode(self.local));
        bytes[44..].copy_from_slice(&address::encode(self.peer));
        bytes
    }

    /// Reads `sun_path`; none if the name is not one of ours.
    pub fn decode(path: &[u8]) -> Option<Self> {
        let path: &[u8; Self::LEN] = path.try_into().ok()?;
        if path[..8] != *PREFIX || path[8] != VERSION {
            return None;
        }
        Some(Self {
            connection: u64::from_be_bytes(*path[12..20].first_chunk()?),
            local: address::decode(path[20..44].first_chunk()?).ok()?,
            peer: address::decode(path[44..].first_chunk()?).ok()?,
            rings: path[9] == RINGS,
        })
    }
}

/// The level where the bytes go by shared memory.
const RINGS: u8 = 2;
const PREFIX: &[u8; 8] = b"\0smcgate";
/// `sun_path` has 108 bytes.
const _: () = assert!(Name::LEN <= 108);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_what_it_stands_for() {
        let addresses = ["10.8.0.1:4711", "[fe80::1%3]:80", "[::ffff:10.8.0.2]:7010"];
        for (local, peer) in addresses.iter().zip(addresses.iter().rev()) {
            let (local, peer) = (local.parse().unwrap(), peer.parse().unwrap());
            for rings in [false, true] {
                let name = Name { connection: 0x0102_0304_0506, local, peer, rings };
                assert_eq!(Name::decode(&name.encode()), Some(name));
            }
        }
    }

    #[test]
    fn other_names_are_not_ours() {
        let nowhere = address::NOWHERE;
        let name = Name { connection: 1, local: nowhere, peer: nowhere, rings: false };
        let mut bytes = name.encode();
        assert_eq!(Name::decode(&bytes[..67]), None);
        assert_eq!(Name::decode(b"/run/postgresql/.s.PGSQL.5432"), None);
        bytes[1] = b'S';
        assert_eq!(Name::decode(&bytes), None);
    }
}
