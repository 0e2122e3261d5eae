//! Addresses as configuration writes them: networks in CIDR notation, and upstreams.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::str::FromStr;

/// An address, or all addresses that share its first bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cidr {
    base: IpAddr,
    prefix_bits: u8,
}

impl Cidr {
    /// One of its addresses; usually the first.
    pub const fn base(&self) -> IpAddr {
        self.base
    }

    /// How many bits its addresses have in common.
    pub const fn prefix_bits(&self) -> u8 {
        self.prefix_bits
    }

    /// Whether `address` lies inside. An IPv4 address in its IPv6-mapped form counts as IPv4.
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.base, address.to_canonical()) {
            (IpAddr::V4(base), IpAddr::V4(address)) => {
                let differ = base.to_bits() ^ address.to_bits();
                differ.checked_shr(32 - u32::from(self.prefix_bits)).unwrap_or(0) == 0
            }
            (IpAddr::V6(base), IpAddr::V6(address)) => {
                let differ = base.to_bits() ^ address.to_bits();
                differ.checked_shr(128 - u32::from(self.prefix_bits)).unwrap_or(0) == 0
            }
            (IpAddr::V4(_), IpAddr::V6(_)) | (IpAddr::V6(_), IpAddr::V4(_)) => false,
        }
    }
}

impl FromStr for Cidr {
    type Err = String;

    /// Reads `10.8.0.2`, `10.8.0.0/24` or `fd00::/64`.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!("\"{text}\" is no address; write one such as \"10.8.0.2\" or \"10.8.0.0/24\"")
        };
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits)),
            None => (text, None),
        };
        let base: IpAddr = address.parse().map_err(|_| wrong())?;
        let bits_max: u8 = if base.is_ipv4() { 32 } else { 128 };
        let prefix_bits = match bits {
            None => bits_max,
            Some(bits) => bits.parse().map_err(|_| wrong())?,
        };
        if prefix_bits > bits_max {
            return Err(wrong());
        }
        Ok(Self { base, prefix_bits })
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.base, self.prefix_bits)
    }
}

/// Where a listener's connections go.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Upstream {
    /// A literal address.
    Address(SocketAddr),
    /// A name, which the system's resolver turns into addresses when the gateway starts.
    Name {
        /// The host's name, without the port.
        host: String,
        /// The port.
        port: u16,
    },
    /// Wherever they wanted to go before they were intercepted.
    OriginalDst,
    /// The gateway's own server for measurements.
    Measure,
}

impl Upstream {
    /// The addresses meant, best first; none if each connection has its own. Asks the resolver for
    /// names, which may take seconds.
    ///
    /// # Errors
    ///
    /// What the resolver says. A name without any address is `NotFound`.
    pub fn resolve(&self) -> io::Result<Vec<SocketAddr>> {
        let found: Vec<_> = match self {
            Self::Address(address) => vec![*address],
            Self::Name { host, port } => (host.as_str(), *port).to_socket_addrs()?.collect(),
            Self::OriginalDst | Self::Measure => return Ok(Vec::new()),
        };
        if found.is_empty() {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
        }
        Ok(best_first(found))
    }
}

/// IPv4 before IPv6, each in the resolver's order: a server on the loopback device more often
/// listens on 127.0.0.1 than on the address that `localhost` has first.
fn best_first(mut addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    addresses.sort_by_key(SocketAddr::is_ipv6);
    addresses
}

impl FromStr for Upstream {
    type Err = String;

    /// Reads `10.8.0.2:7002`, `[fd00::2]:7002`, `redis.example:6379`, `original-dst` or `measure`.
    fn from_str(text: &str) -> Result<Self, String> {
        if text == ORIGINAL_DST {
            return Ok(Self::OriginalDst);
        }
        if text == MEASURE {
            return Ok(Self::Measure);
        }
        if let Ok(address) = text.parse() {
            return port_is_set(text, address).map(Self::Address);
        }
        let wrong =
            || format!("\"{text}\" is no address; write \"10.8.0.2:7002\" or \"host.name:7002\"");
        let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
        let port: u16 = port.parse().map_err(|_| wrong())?;
        let name_like = |c: char| c.is_alphanumeric() || matches!(c, '.' | '-' | '_');
        if host.is_empty() || port == 0 || !host.chars().all(name_like) {
            return Err(wrong());
        }
        Ok(Self::Name { host: host.to_owned(), port })
    }
}

impl fmt::Display for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Name { host, port } => write!(f, "{host}:{port}"),
            Self::OriginalDst => f.write_str(ORIGINAL_DST),
            Self::Measure => f.write_str(MEASURE),
        }
    }
}

/// How configuration writes [`Upstream::OriginalDst`].
const ORIGINAL_DST: &str = "original-dst";
/// How configuration writes [`Upstream::Measure`].
const MEASURE: &str = "measure";

/// Reads an address to bind, such as `127.0.0.1:7001`.
pub(super) fn bind_address(text: &str) -> Result<SocketAddr, String> {
    let address = text.parse().map_err(|_| {
        format!("\"{text}\" is no address to bind; write one such as \"127.0.0.1:7001\"")
    })?;
    port_is_set(text, address)
}

fn port_is_set(text: &str, address: SocketAddr) -> Result<SocketAddr, String> {
    if address.port() == 0 {
        return Err(format!("\"{text}\" has port 0; write the port that is meant"));
    }
    Ok(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contains(network: &str, address: &str) -> bool {
        network.parse::<Cidr>().unwrap().contains(address.parse().unwrap())
    }

    /// `upstream = "localhost:80"` must find the server that listens on 127.0.0.1.
    #[test]
    fn names_lead_to_ipv4_first() {
        let addresses = ["[::1]:80", "127.0.0.1:80", "[fd00::1]:80", "10.0.0.1:80"];
        let sorted = best_first(addresses.map(|text| text.parse().unwrap()).into());
        let sorted: Vec<_> = sorted.iter().map(SocketAddr::to_string).collect();
        assert_eq!(sorted, ["127.0.0.1:80", "10.0.0.1:80", "[::1]:80", "[fd00::1]:80"]);
    }

    #[test]
    fn a_network_contains_what_shares_its_first_bits() {
        assert!(contains("10.8.0.2", "10.8.0.2"));
        assert!(!contains("10.8.0.2", "10.8.0.3"));
        assert!(contains("10.8.1.0/23", "10.8.0.255"));
        assert!(!contains("10.8.0.0/23", "10.8.2.0"));
        assert!(contains("0.0.0.0/0", "255.1.2.3"));
        assert!(contains("fd00::/64", "fd00::ffff"));
        assert!(!contains("fd00::/64", "fd00:0:0:1::"));
        assert!(contains("::/0", "1::2"));
    }

    /// A listener on `[::]` sees IPv4 peers in their mapped form; the list means them all the same.
    #[test]
    fn a_mapped_address_is_the_ipv4_address_and_families_do_not_mix() {
        assert!(contains("10.8.0.0/24", "::ffff:10.8.0.2"));
        assert!(!contains("0.0.0.0/0", "fd00::1"));
        assert!(!contains("::/0", "10.0.0.1"));
    }

    #[test]
    fn what_is_no_network_is_refused() {
        for text in ["", "10.8.0", "10.8.0.0/33", "fd00::/129", "10.8.0.0/", "host"] {
            assert!(text.parse::<Cidr>().is_err(), "{text}");
        }
    }

    #[test]
    fn upstreams_are_addresses_or_names_with_a_port() {
        let name = Upstream::Name { host: "redis.example".into(), port: 6379 };
        assert_eq!("redis.example:6379".parse(), Ok(name));
        let address: Upstream = "[fd00::2]:7002".parse().unwrap();
        assert_eq!(address, Upstream::Address("[fd00::2]:7002".parse().unwrap()));
        for text in ["", ":1", "host", "host:", "host:0", "host:65536", "1.2.3.4:0", "fd00::2:1"] {
            assert!(text.parse::<Upstream>().is_err(), "{text}");
        }
    }
}
