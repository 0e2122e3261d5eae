//! The PROXY protocol, towards servers: the first bytes of a connection say who is at its other
//! end.

use std::io::Write;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use ppp::v2::{Builder, Command, Protocol, Version};
use ppp::{v1, v2};

use crate::config::SourceAddress;

/// What a server is told of a connection from `source` to `destination`; none unless `kind` is a
/// header.
///
/// Both addresses are of the same family in a header, so if they differ, the IPv4 address goes in
/// its IPv6-mapped form. It is at most [`LEN_MAX`] bytes long.
pub(crate) fn header(
    kind: SourceAddress,
    source: SocketAddr,
    destination: SocketAddr,
) -> Option<Vec<u8>> {
    match kind {
        SourceAddress::Gateway | SourceAddress::Client => None,
        SourceAddress::ProxyV1 => Some(text(source, destination)),
        SourceAddress::ProxyV2 => Some(binary(source, destination)),
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

/// The longest header, that of version 1 with two IPv6 addresses.
pub(crate) const LEN_MAX: usize = 107;

#[cfg(test)]
mod tests {
    use super::*;

    fn header_of(kind: SourceAddress, source: &str, destination: &str) -> Vec<u8> {
        header(kind, source.parse().unwrap(), destination.parse().unwrap()).unwrap()
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
}
