//! An address of a TCP connection.
//!
//! ```text
//!   0        1          2      4          8       24
//!   | family | reserved | port | scope id | address |
//! ```
//! Family is 4 or 6. An address of IPv4 has its bytes first, and zeros behind them. All integers
//! are big-endian. The scope id is that of link-local addresses of IPv6.

use core::net::{IpAddr, SocketAddr, SocketAddrV4, SocketAddrV6};

use crate::Malformed;

pub(crate) const LEN: usize = 24;

pub(crate) fn encode(address: SocketAddr) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
    match address {
        SocketAddr::V4(v4) => {
            bytes[0] = 4;
            bytes[8..12].copy_from_slice(&v4.ip().octets());
        }
        SocketAddr::V6(v6) => {
            bytes[0] = 6;
            bytes[4..8].copy_from_slice(&v6.scope_id().to_be_bytes());
            bytes[8..24].copy_from_slice(&v6.ip().octets());
        }
    }
    bytes
}

pub(crate) fn decode(bytes: &[u8; LEN]) -> Result<SocketAddr, Malformed> {
    let &[family, _, p0, p1, s0, s1, s2, s3, ip @ ..] = bytes;
    let port = u16::from_be_bytes([p0, p1]);
    match family {
        4 => {
            let [a, b, c, d, ..] = ip;
            Ok(SocketAddrV4::new([a, b, c, d].into(), port).into())
        }
        6 => {
            let scope = u32::from_be_bytes([s0, s1, s2, s3]);
            Ok(SocketAddrV6::new(ip.into(), port, 0, scope).into())
        }
        other => Err(Malformed::Address(other)),
    }
}

/// The address that stands for none.
pub(crate) const NOWHERE: SocketAddr =
    SocketAddr::new(IpAddr::V4(core::net::Ipv4Addr::UNSPECIFIED), 0);
