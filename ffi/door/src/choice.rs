//! Which connections of a program are taken: those to some ports and networks, or all but some.

use core::fmt;
use core::net::{IpAddr, Ipv6Addr, SocketAddr};
use core::str::FromStr;

/// Which peers and which listening sockets are taken.
///
/// All, unless something is listed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Choice {
    /// Only these ports, if there are any.
    pub ports: Ports,
    /// Only these networks, if there are any.
    pub networks: Networks,
    /// Ports that are left alone.
    pub not_ports: Ports,
    /// Networks that are left alone.
    pub not_networks: Networks,
}

impl Choice {
    /// Whether a connection to `peer` is taken.
    pub fn takes(&self, peer: SocketAddr) -> bool {
        let (ip, port) = (peer.ip().to_canonical(), peer.port());
        (self.ports.is_empty() || self.ports.contain(port))
            && (self.networks.is_empty() || self.networks.contain(ip))
            && !self.not_ports.contain(port)
            && !self.not_networks.contain(ip)
    }

    /// Whether a socket that listens on `local` is taken. Who listens on all addresses is in every
    /// network.
    pub fn takes_listener(&self, local: SocketAddr) -> bool {
        let everywhere = local.ip().to_canonical().is_unspecified();
        let networks = |networks| if everywhere { Networks::default() } else { networks };
        let choice = Self {
            networks: networks(self.networks),
            not_networks: networks(self.not_networks),
            ..*self
        };
        choice.takes(local)
    }
}

/// So many ports or networks may be listed.
const ENTRIES_MAX: usize = 32;

/// A list of ports, written as `7010,8000-8099`.
#[derive(Clone, Copy, Debug)]
pub struct Ports(List<(u16, u16)>);

impl Ports {
    fn is_empty(&self) -> bool {
        self.0.entries().is_empty()
    }

    fn contain(&self, port: u16) -> bool {
        self.0.entries().iter().any(|&(first, last)| (first..=last).contains(&port))
    }
}

impl Default for Ports {
    fn default() -> Self {
        Self(List { all: [(0, 0); ENTRIES_MAX], count: 0 })
    }
}

impl FromStr for Ports {
    type Err = NoChoice;

    fn from_str(text: &str) -> Result<Self, NoChoice> {
        let mut ports = Self::default();
        for part in parts(text) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |text: &str| text.trim().parse().map_err(|_| NoChoice::Port);
            let (first, last) = (number(first)?, number(last)?);
            if first == 0 || first > last {
                return Err(NoChoice::Port);
            }
            ports.0.add((first, last))?;
        }
        Ok(ports)
    }
}

/// A list of networks, written as `10.8.0.0/24,fd00::/8`. A single address is a network, too.
#[derive(Clone, Copy, Debug)]
pub struct Networks(List<(IpAddr, u8)>);

impl Networks {
    fn is_empty(&self) -> bool {
        self.0.entries().is_empty()
    }

    fn contain(&self, ip: IpAddr) -> bool {
        self.0.entries().iter().any(|&(network, bits)| {
            network.is_ipv4() == ip.is_ipv4() && masked(network, bits) == masked(ip, bits)
        })
    }
}

impl Default for Networks {
    fn default() -> Self {
        Self(List { all: [(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0); ENTRIES_MAX], count: 0 })
    }
}

impl FromStr for Networks {
    type Err = NoChoice;

    fn from_str(text: &str) -> Result<Self, NoChoice> {
        let mut networks = Self::default();
        for part in parts(text) {
            let (ip, bits) = match part.split_once('/') {
                Some((ip, bits)) => (ip, bits.parse().map_err(|_| NoChoice::Network)?),
                None => (part, u8::MAX),
            };
            let ip: IpAddr = ip.parse().map_err(|_| NoChoice::Network)?;
            let width = if ip.is_ipv4() { 32 } else { 128 };
            let bits = if part.contains('/') { bits } else { width };
            if bits > width {
                return Err(NoChoice::Network);
            }
            networks.0.add((ip, bits))?;
        }
        Ok(networks)
    }
}

/// The first bits of an address, with zeros behind them.
fn masked(ip: IpAddr, bits: u8) -> u128 {
    let (number, width) = match ip {
        IpAddr::V4(v4) => (u128::from(v4.to_bits()), 32),
        IpAddr::V6(v6) => (v6.to_bits(), 128),
    };
    number.checked_shr(width - u32::from(bits)).unwrap_or(0)
}

/// The parts of a list. An empty text has none.
fn parts(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|part| !part.is_empty())
}

/// Why a text is no list of ports or networks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoChoice {
    /// A part of it is neither a port nor a range of ports.
    Port,
    /// A part of it is neither an address nor a network.
    Network,
    /// It has too many parts.
    Length,
}

impl fmt::Display for NoChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Port => f.write_str("must be ports, such as 7010,8000-8099"),
            Self::Network => f.write_str("must be networks, such as 10.8.0.0/24,fd00::/8"),
            Self::Length => write!(f, "must have at most {ENTRIES_MAX} parts"),
        }
    }
}

impl core::error::Error for NoChoice {}

/// A list of limited length, without a heap.
#[derive(Clone, Copy, Debug)]
struct List<T> {
    all: [T; ENTRIES_MAX],
    count: usize,
}

impl<T> List<T> {
    fn entries(&self) -> &[T] {
        &self.all[..self.count]
    }

    fn add(&mut self, entry: T) -> Result<(), NoChoice> {
        *self.all.get_mut(self.count).ok_or(NoChoice::Length)? = entry;
        self.count += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn without_a_list_everything_is_taken() {
        let all = Choice { ports: "".parse().unwrap(), ..Choice::default() };
        assert!(all.takes(at("127.0.0.1:1")) && all.takes(at("[::]:65535")));
    }

    #[test]
    fn what_is_listed_is_taken_and_the_rest_is_not() {
        let choice = Choice {
            ports: "7010, 8000-8099".parse().unwrap(),
            networks: "10.8.0.0/24,fd00::/8,192.0.2.7".parse().unwrap(),
            not_ports: "8001".parse().unwrap(),
            not_networks: "10.8.0.128/25".parse().unwrap(),
        };
        for (address, taken) in [
            ("10.8.0.1:7010", true),
            ("10.8.0.1:8099", true),
            ("10.8.0.1:8001", false),
            ("10.8.0.1:8100", false),
            ("10.8.1.1:7010", false),
            ("10.8.0.129:7010", false),
            ("192.0.2.7:7010", true),
            ("192.0.2.8:7010", false),
            ("[fd12::1]:8000", true),
            ("[fe80::1]:8000", false),
            ("[::ffff:10.8.0.1]:8000", true),
        ] {
            assert_eq!(choice.takes(at(address)), taken, "{address}");
        }
        assert!(choice.takes_listener(at("0.0.0.0:7010")));
        assert!(choice.takes_listener(at("[::]:7010")));
        assert!(!choice.takes_listener(at("0.0.0.0:8001")));
        assert!(!choice.takes_listener(at("10.9.0.1:7010")));
    }

    #[test]
    fn what_is_no_list_is_refused() {
        for text in ["x", "0", "65536", "9-8", "1-", "80;81"] {
            assert_eq!(text.parse::<Ports>().unwrap_err(), NoChoice::Port, "{text}");
        }
        for text in ["10.8.0.0/33", "fd00::/129", "host", "10.8.0/24", "10.8.0.0/"] {
            assert_eq!(text.parse::<Networks>().unwrap_err(), NoChoice::Network, "{text}");
        }
        let many = "1,".repeat(33);
        assert_eq!(many.parse::<Ports>().unwrap_err(), NoChoice::Length);
        assert!("0.0.0.0/0,::/0".parse::<Networks>().unwrap().contain(at("1.2.3.4:5").ip()));
    }
}
