//! The PROXY protocol: the first bytes of a connection say who is at its other end. Written to
//! servers, and read where a proxy is in front of us.

use std::io::Write;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use ppp::v2::{Builder, Command, Protocol, Version};
use ppp::{PartialResult as _, v1, v2};

use crate::config::SourceAddress;

/// What a server is told of a connection from `source` to `destination`; none unless `kind` is a
/// header. Only for a header `destination` is asked.
///
/// Both addresses are of the same family in a header, so if they differ, the IPv4 address goes in
/// its IPv6-mapped form. It is at most [`LEN_MAX`] bytes long.
pub(crate) fn header(
    kind: SourceAddress,
    source: SocketAddr,
    destination: impl FnOnce() -> SocketAddr,
) -> Option<Vec<u8>> {
    match kind {
        SourceAddress::Gateway | SourceAddress::Client => None,
        SourceAddress::ProxyV1 => Some(text(source, destination())),
        SourceAddress::ProxyV2 => Some(binary(source, destination())),
    }
}

fn text(source: SocketAddr, destination: SocketAddr) -> Vec<u8> {
    let ports = (source.port(), destination.port());
    let addresses = match (source.ip().to_canonical(), destination.ip().to_canonical()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => v1::Addresses::new_tcp4(from, to, ports.0, ports.1),
        (from, to) => v1::Addresses::new_tcp6(v6(from), v6(to), ports.0, ports.1),
    };
    let mut bytes = Vec::with_capacity(LEN_MAX);
    write!(bytes, "{addresses}").expect("memory can be written to");
    bytes
}

fn binary(source: SocketAddr, destination: SocketAddr) -> Vec<u8> {
    let ports = (source.port(), destination.port());
    let addresses: v2::Addresses =
        match (source.ip().to_canonical(), destination.ip().to_canonical()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => v2::IPv4::new(from, to, ports.0, ports.1).into(),
            (from, to) => v2::IPv6::new(v6(from), v6(to), ports.0, ports.1).into(),
        };
    let kind = Version::Two | Command::Proxy;
    let header = Builder::with_addresses(kind, Protocol::Stream, addresses).build();
    header.expect("a header without further values is short")
}

fn v6(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}

/// What the first bytes of a connection say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Said {
    /// Too few of them have come.
    More,
    /// A header.
    Header {
        /// Its length.
        len: usize,
        /// Who connected, and where to; none if the proxy speaks for itself, or of what has no
        /// address.
        ends: Option<(SocketAddr, SocketAddr)>,
    },
    /// No header that could be understood, for this reason.
    Nonsense(&'static str),
}

/// Reads the header with which `bytes` begin, of either version.
pub(crate) fn read(bytes: &[u8]) -> Said {
    let starts = |with: &[u8]| bytes.iter().zip(with).all(|(byte, expected)| byte == expected);
    match (starts(&V2), starts(V1)) {
        (true, _) => read_binary(bytes),
        (false, true) => read_text(bytes),
        (false, false) => Said::Nonsense("it does not begin with a PROXY header"),
    }
}

fn read_text(bytes: &[u8]) -> Said {
    let line = &bytes[..bytes.len().min(LEN_MAX)];
    let Some(end) = line.windows(2).position(|pair| pair == b"\r\n") else {
        return match line.len() {
            LEN_MAX => Said::Nonsense("its PROXY header does not end within 107 bytes"),
            _ => Said::More,
        };
    };
    let len = end + 2;
    let ends = match v1::Header::try_from(&line[..len]).map(|header| header.addresses) {
        Ok(v1::Addresses::Tcp4(it)) => Some((
            SocketAddr::new(it.source_address.into(), it.source_port),
            SocketAddr::new(it.destination_address.into(), it.destination_port),
        )),
        Ok(v1::Addresses::Tcp6(it)) => Some((
            SocketAddr::new(it.source_address.into(), it.source_port),
            SocketAddr::new(it.destination_address.into(), it.destination_port),
        )),
        Ok(v1::Addresses::Unknown) => None,
        Err(_) => return Said::Nonsense("its PROXY header of version 1 cannot be understood"),
    };
    Said::Header { len, ends }
}

fn read_binary(bytes: &[u8]) -> Said {
    let long = "its PROXY header is longer than 4096 bytes";
    let header = match v2::Header::try_from(bytes) {
        Ok(header) => header,
        Err(v2::ParseError::Partial(_, whole)) if whole > READ_MAX => return Said::Nonsense(long),
        Err(error) if error.is_incomplete() => return Said::More,
        Err(_) => return Said::Nonsense("its PROXY header of version 2 cannot be understood"),
    };
    if header.len() > READ_MAX {
        return Said::Nonsense(long);
    }
    let ends = match (header.command, header.addresses) {
        (Command::Proxy, v2::Addresses::IPv4(it)) => Some((
            SocketAddr::new(it.source_address.into(), it.source_port),
            SocketAddr::new(it.destination_address.into(), it.destination_port),
        )),
        (Command::Proxy, v2::Addresses::IPv6(it)) => Some((
            SocketAddr::new(it.source_address.into(), it.source_port),
            SocketAddr::new(it.destination_address.into(), it.destination_port),
        )),
        (Command::Local, _)
        | (Command::Proxy, v2::Addresses::Unspecified | v2::Addresses::Unix(_)) => None,
    };
    Said::Header { len: header.len(), ends }
}

const V1: &[u8] = b"PROXY ";
const V2: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";
/// The longest header of version 1, that with two IPv6 addresses.
pub(crate) const LEN_MAX: usize = 107;
/// The longest header that is read: version 2 may have values of its own behind the addresses.
pub(crate) const READ_MAX: usize = 4_096;

#[cfg(test)]
mod tests {
    use super::*;

    fn header_of(kind: SourceAddress, source: &str, destination: &str) -> Vec<u8> {
        header(kind, source.parse().unwrap(), || destination.parse().unwrap()).unwrap()
    }

    /// The bytes are those that the specification describes, written out by hand.
    #[test]
    fn headers_are_as_specified() {
        let v1 = |source, destination| header_of(SourceAddress::ProxyV1, source, destination);
        let expected = b"PROXY TCP4 10.8.0.1 10.8.0.2 50000 7010\r\n";
        assert_eq!(v1("10.8.0.1:50000", "10.8.0.2:7010"), expected);
        assert_eq!(v1("[::ffff:10.8.0.1]:50000", "10.8.0.2:7010"), expected);
        let mixed = v1("[fd00::1]:50000", "10.8.0.2:7010");
        assert_eq!(mixed, b"PROXY TCP6 fd00::1 ::ffff:10.8.0.2 50000 7010\r\n");
        let all = "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535";
        assert!(v1(all, all).len() <= LEN_MAX);

        let v2 = |source, destination| header_of(SourceAddress::ProxyV2, source, destination);
        let mut expected = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\x00\x0c".to_vec();
        expected.extend([10, 8, 0, 1, 10, 8, 0, 2, 0xc3, 0x50, 0x1b, 0x62]);
        assert_eq!(v2("10.8.0.1:50000", "10.8.0.2:7010"), expected);
        let six = v2("[fd00::1]:50000", "[fd00::2]:7010");
        assert_eq!(six[12..16], [0x21, 0x21, 0, 36]);
        assert_eq!(six[47..], [2, 0xc3, 0x50, 0x1b, 0x62]);
    }

    /// What one gateway writes, and what HAProxy does, the other reads, byte by byte as it comes,
    /// and not a byte of what follows.
    #[test]
    fn what_is_written_is_read() {
        let ends = ["[fd00::1]:50000", "[fd00::2]:7010"];
        let parsed: Vec<SocketAddr> = ends.iter().map(|end| end.parse().unwrap()).collect();
        for kind in [SourceAddress::ProxyV1, SourceAddress::ProxyV2] {
            let mut bytes = header_of(kind, ends[0], ends[1]);
            let len = bytes.len();
            for cut in 0..len {
                assert_eq!(read(&bytes[..cut]), Said::More, "{cut} bytes of {kind:?}");
            }
            bytes.extend(b"\r\nPROXY \xff");
            let expected = Said::Header { len, ends: Some((parsed[0], parsed[1])) };
            assert_eq!(read(&bytes), expected, "{kind:?}");
        }
        let unknown = b"PROXY UNKNOWN and anything\r\nx";
        assert_eq!(read(unknown), Said::Header { len: unknown.len() - 1, ends: None });
        // A health check of HAProxy, with a value that nobody knows behind the addresses.
        let mut local = V2.to_vec();
        local.extend(b"\x20\x11\x00\x10\0\0\0\0\0\0\0\0\0\0\0\0\xee\0\x01x");
        assert_eq!(read(&local), Said::Header { len: local.len(), ends: None });
    }

    /// Whoever is trusted to say who the client is must say it in words that can be trusted.
    #[test]
    fn nonsense_is_no_header() {
        let mut long = V2.to_vec();
        long.extend(b"\x21\x11\xff\xff");
        let endless = [b"PROXY TCP6 ".as_slice(), &[b'f'; 100]].concat();
        for bytes in [
            b"GET / HTTP/1.1\r\n".as_slice(),
            b"PROXY TCP4 10.8.0.1\r\n",
            b"PROXY TCP4 10.8.0.1 10.8.0.2 70000 1\r\n",
            b"\r\n\r\n\0\r\nQUIT\n\x31\x11\x00\x0c",
            &long,
            &endless,
        ] {
            assert!(matches!(read(bytes), Said::Nonsense(_)), "{bytes:?}");
        }
    }
}
