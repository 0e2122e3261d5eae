//! Addresses as the socket calls have them.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// An address in the layout of `sockaddr_in` or `sockaddr_in6`.
pub(crate) struct Raw {
    bytes: [u8; V6_LEN],
    length: usize,
}

const V4_LEN: usize = 16;
const V6_LEN: usize = 28;

impl Raw {
    pub(crate) fn of(address: SocketAddr) -> Self {
        let mut bytes = [0; V6_LEN];
        bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
        let (family, length) = match address {
            SocketAddr::V4(v4) => {
                bytes[4..8].copy_from_slice(&v4.ip().octets());
                (libc::AF_INET, V4_LEN)
            }
            SocketAddr::V6(v6) => {
                bytes[4..8].copy_from_slice(&v6.flowinfo().to_ne_bytes());
                bytes[8..24].copy_from_slice(&v6.ip().octets());
                bytes[24..].copy_from_slice(&v6.scope_id().to_ne_bytes());
                (libc::AF_INET6, V6_LEN)
            }
        };
        let family = u16::try_from(family).expect("families are small numbers");
        bytes[..2].copy_from_slice(&family.to_ne_bytes());
        Self { bytes, length }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

/// The address of IP that these bytes are, if they are one.
pub(crate) fn decode(bytes: &[u8]) -> Option<SocketAddr> {
    let family = i32::from(u16::from_ne_bytes(*bytes.first_chunk()?));
    let port = u16::from_be_bytes(*bytes.get(2..)?.first_chunk()?);
    match family {
        libc::AF_INET if bytes.len() >= V4_LEN => {
            let ip: [u8; 4] = *bytes.get(4..)?.first_chunk()?;
            Some(SocketAddrV4::new(Ipv4Addr::from(ip), port).into())
        }
        // Older programs leave the scope out.
        libc::AF_INET6 if bytes.len() >= V6_LEN - 4 => {
            let ip: [u8; 16] = *bytes.get(8..)?.first_chunk()?;
            let scope = bytes.get(24..28).and_then(|scope| scope.first_chunk());
            let scope = scope.map_or(0, |scope| u32::from_ne_bytes(*scope));
            Some(SocketAddrV6::new(Ipv6Addr::from(ip), port, 0, scope).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_back_as_they_were() {
        for text in ["10.8.0.1:80", "[fd00::2]:7010", "[fe80::1%7]:1", "[::ffff:1.2.3.4]:5"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(decode(Raw::of(address).bytes()), Some(address), "{text}");
        }
    }

    #[test]
    fn what_is_no_address_of_ip_is_none() {
        let whole = Raw::of("10.8.0.1:80".parse().unwrap());
        for length in 0..V4_LEN {
            assert_eq!(decode(&whole.bytes()[..length]), None);
        }
        assert_eq!(decode(&[0; V6_LEN]), None, "AF_UNSPEC");
        assert_eq!(decode(b"\x01\x00/run/postgresql/.s.PGSQL.5432"), None, "AF_UNIX");
    }
}
