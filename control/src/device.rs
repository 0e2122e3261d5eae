//! The network devices of this host: which one a connection uses, and what CLC says about it.
//!
//! A snapshot, because asking the kernel costs more than a rendezvous: take it again when an
//! address is in no device, or when something changed.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};

use smcr_os::netdev::{NetworkDevice, network_devices};
use smcr_proto::wire::clc::proposal::{Ipv4Subnet, Ipv6Prefix, PREFIXES_MAX, Proposal};

/// The network devices of this namespace, as they were when it was taken.
#[derive(Clone, Debug, Default)]
pub struct Devices {
    devices: Vec<NetworkDevice>,
}

impl Devices {
    /// Asks the kernel.
    ///
    /// # Errors
    ///
    /// When the kernel does not answer; rare enough to mean that descriptors have run out.
    pub fn read() -> io::Result<Self> {
        Ok(Self { devices: network_devices()? })
    }

    /// All of them, in the kernel's order.
    pub fn all(&self) -> &[NetworkDevice] {
        &self.devices
    }

    /// The addresses of this host now; none where the kernel does not say. That is enough to find
    /// what is wrong with a configuration, and not to act on.
    pub fn addresses_here() -> Vec<IpAddr> {
        Self::read().unwrap_or_default().addresses()
    }

    /// The addresses of all of them.
    pub fn addresses(&self) -> Vec<IpAddr> {
        let all = self.devices.iter().flat_map(|device| &device.addresses);
        all.map(|(address, _)| *address).collect()
    }

    /// The device called `name`.
    pub fn named(&self, name: &str) -> Option<&NetworkDevice> {
        self.devices.iter().find(|device| device.name == name)
    }

    /// The device that owns a local address. That of an established connection is the one its
    /// packets use, or an alias on it.
    ///
    /// All of 127.0.0.0/8 is local to the loopback device, whichever of it is written there.
    pub fn owner_of(&self, address: IpAddr) -> Option<&NetworkDevice> {
        let address = address.to_canonical();
        let has = |device: &&NetworkDevice, wanted: IpAddr| {
            device.addresses.iter().any(|(own, _)| *own == wanted)
        };
        let exact = self.devices.iter().find(|device| has(device, address));
        match address {
            IpAddr::V4(v4) if v4.is_loopback() => exact.or_else(|| {
                self.devices.iter().find(|device| has(device, Ipv4Addr::LOCALHOST.into()))
            }),
            IpAddr::V4(_) | IpAddr::V6(_) => exact,
        }
    }

    /// The device whose address the kernel would use towards `peer`, and that address.
    ///
    /// # Errors
    ///
    /// As [`local_address_towards`]; `NotFound` if the address has no device in this snapshot.
    pub fn towards(&self, peer: IpAddr) -> io::Result<(&NetworkDevice, IpAddr)> {
        let local = local_address_towards(peer)?;
        let device = self.owner_of(local).ok_or(io::ErrorKind::NotFound)?;
        Ok((device, local))
    }
}

/// The local address of a connection to `peer`, by the kernel's routes. Sends nothing.
///
/// # Errors
///
/// `NetworkUnreachable` and the like when there is no route.
pub fn local_address_towards(peer: IpAddr) -> io::Result<IpAddr> {
    let any: IpAddr = match peer {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0))?;
    // Any port does: connecting a datagram socket only looks up the route.
    socket.connect((peer, 9))?;
    socket.local_addr().map(|local| local.ip())
}

/// What a CLC Proposal says about the network that it comes from: a subnet over IPv4, prefixes over
/// IPv6.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Subnets {
    /// The IPv4 subnet; all zero over IPv6.
    pub ipv4: Ipv4Subnet,
    /// The IPv6 prefixes, of which the first `prefix_count` are meant.
    pub prefixes: [Ipv6Prefix; PREFIXES_MAX],
    /// How many there are; zero over IPv4.
    pub prefix_count: u8,
}

/// The VLAN of a network device; none of one that is no VLAN's.
pub fn vlan(device: &str) -> Option<u16> {
    // Without VLANs the kernel has no such file.
    vlan_in(&std::fs::read_to_string(format!("/proc/net/vlan/{device}")).ok()?)
}

/// The VLAN in what the kernel says about a device.
fn vlan_in(text: &str) -> Option<u16> {
    let mut words = text.split_whitespace();
    words.find(|word| *word == "VID:")?;
    words.next()?.parse().ok()
}

/// What the Proposal of a connection from `local`, an address of `device`, says.
///
/// A v4-mapped address is the IPv4 address it maps.
pub fn subnets(device: &NetworkDevice, local: IpAddr) -> Subnets {
    // RFC 7609 3.5.1.2 #3: Proposal with subnet or prefixes
    match local.to_canonical() {
        // RFC 7609 A.2.2 #12: no IPv6 prefixes for IPv4
        IpAddr::V4(local) => Subnets { ipv4: ipv4_subnet(device, local), ..Subnets::default() },
        IpAddr::V6(_) => {
            // RFC 7609 A.2.2 #10: zero IPv4 subnet for IPv6
            // RFC 7609 A.2.2 #11: at most eight IPv6 prefixes
            let (prefixes, prefix_count) = ipv6_prefixes(device);
            Subnets { ipv4: Ipv4Subnet::default(), prefixes, prefix_count }
        }
    }
}

/// The subnet of `local` on `device`; that of loopback for all of 127.0.0.0/8.
fn ipv4_subnet(device: &NetworkDevice, local: Ipv4Addr) -> Ipv4Subnet {
    let is_it = |own: Ipv4Addr| own == local || own.is_loopback() && local.is_loopback();
    ipv4_addresses(device)
        .find(|(own, _)| is_it(*own))
        .map(|(own, prefix_bits)| subnet(own, prefix_bits))
        .unwrap_or_default()
}

/// The prefixes of `device`, and how many there are. Link-local ones are the same on every link, so
/// they prove nothing and stay out.
fn ipv6_prefixes(device: &NetworkDevice) -> ([Ipv6Prefix; PREFIXES_MAX], u8) {
    let mut prefixes = [Ipv6Prefix::default(); PREFIXES_MAX];
    let mut count = 0;
    for prefix in global_prefixes(device) {
        if usize::from(count) < PREFIXES_MAX && !prefixes[..usize::from(count)].contains(&prefix) {
            prefixes[usize::from(count)] = prefix;
            count += 1;
        }
    }
    (prefixes, count)
}

/// The networks that a server is in, which decide whether it shares one with a client. They are of
/// the IP version of the rendezvous.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Networks {
    /// Over IPv4.
    pub subnets: Vec<Ipv4Subnet>,
    /// Over IPv6.
    pub prefixes: Vec<Ipv6Prefix>,
}

impl Networks {
    /// Those of `device`, whose address the server's end of the rendezvous, `local`, is.
    pub fn of(device: &NetworkDevice, local: IpAddr) -> Self {
        match local.to_canonical() {
            IpAddr::V4(_) => {
                let real = ipv4_addresses(device).filter(|(_, bits)| *bits > 0);
                let subnets = real.map(|(address, bits)| subnet(address, bits)).collect();
                Self { subnets, prefixes: Vec::new() }
            }
            IpAddr::V6(_) => {
                Self { subnets: Vec::new(), prefixes: global_prefixes(device).collect() }
            }
        }
    }

    /// Whether client and server share a subnet, as SMC-Rv1 demands: its packets cross no router.
    ///
    /// Over IPv4 one subnet must have the same mask and network number as the client's; over IPv6
    /// one prefix must be one of the client's. If not, the rendezvous is declined with
    /// `NO_COMMON_SUBNET`.
    ///
    /// # Specification
    ///
    /// RFC 7609, 3.5.1 and A.2.2; the exact rule is that of deployed peers.
    pub fn are_shared_with(&self, proposal: &Proposal) -> bool {
        let count = usize::from(proposal.prefix_count).min(PREFIXES_MAX);
        let theirs = &proposal.prefixes[..count];
        // RFC 7609 3.5.1.2 #7: match IPv4 subnet with an interface
        // RFC 7609 3.5.1.2 #8: match one of the IPv6 prefixes
        self.subnets.contains(&proposal.subnet)
            || self.prefixes.iter().any(|own| theirs.contains(own))
    }
}

impl FromIterator<NetworkDevice> for Devices {
    fn from_iter<I: IntoIterator<Item = NetworkDevice>>(devices: I) -> Self {
        Self { devices: devices.into_iter().collect() }
    }
}

fn ipv4_addresses(device: &NetworkDevice) -> impl Iterator<Item = (Ipv4Addr, u8)> {
    device.addresses.iter().filter_map(|(address, prefix_bits)| match address {
        IpAddr::V4(address) => Some((*address, *prefix_bits)),
        IpAddr::V6(_) => None,
    })
}

fn global_prefixes(device: &NetworkDevice) -> impl Iterator<Item = Ipv6Prefix> {
    device.addresses.iter().filter_map(|(address, prefix_bits)| match address {
        IpAddr::V6(address) if !address.is_unicast_link_local() => {
            let mask = u128::MAX.checked_shl(128 - u32::from(*prefix_bits)).unwrap_or(0);
            let prefix = (address.to_bits() & mask).to_be_bytes();
            Some(Ipv6Prefix { prefix, prefix_bits: *prefix_bits })
        }
        IpAddr::V4(_) | IpAddr::V6(_) => None,
    })
}

/// The IPv4 subnet of `address`, whose network has this prefix; all zero for an IPv6 address.
pub fn subnet_of(address: IpAddr, prefix_bits: u8) -> Ipv4Subnet {
    match address {
        IpAddr::V4(address) => subnet(address, prefix_bits),
        IpAddr::V6(_) => Ipv4Subnet::default(),
    }
}

fn subnet(address: Ipv4Addr, prefix_bits: u8) -> Ipv4Subnet {
    let mask = u32::MAX.checked_shl(32 - u32::from(prefix_bits)).unwrap_or(0);
    Ipv4Subnet { network: (address.to_bits() & mask).to_be_bytes(), prefix_bits }
}

#[cfg(test)]
pub(crate) mod tests {
    use smcr_proto::{Gid, MacAddress, PeerId};

    use super::*;

    /// A device that is up, and has these addresses.
    pub(crate) fn device(name: &str, addresses: &[(&str, u8)]) -> NetworkDevice {
        let addresses =
            addresses.iter().map(|(address, bits)| (address.parse().unwrap(), *bits)).collect();
        NetworkDevice {
            name: name.into(),
            mac: None,
            mtu: 1500,
            index: 2,
            up: true,
            running: true,
            addresses,
        }
    }

    fn proposal(network: [u8; 4], prefix_bits: u8, prefix: &str) -> Proposal {
        let mut prefixes = [Ipv6Prefix::default(); PREFIXES_MAX];
        let prefix: Ipv6Addr = prefix.parse().unwrap();
        prefixes[1] = Ipv6Prefix { prefix: prefix.octets(), prefix_bits: 64 };
        Proposal {
            peer_id: PeerId::default(),
            gid: Gid::default(),
            mac: MacAddress::default(),
            subnet: Ipv4Subnet { network, prefix_bits },
            prefixes,
            prefix_count: 2,
            offers_smc_r_v1: true,
        }
    }

    #[test]
    fn a_connection_belongs_to_the_device_that_owns_its_local_address() {
        let devices = Devices {
            devices: vec![
                device("lo", &[("127.0.0.1", 8), ("::1", 128)]),
                device("va", &[("10.8.0.1", 24), ("fd00::1", 64)]),
            ],
        };
        let owner = |address: &str| {
            devices.owner_of(address.parse().unwrap()).map(|device| device.name.as_str())
        };
        assert_eq!(owner("10.8.0.1"), Some("va"));
        assert_eq!(owner("::ffff:10.8.0.1"), Some("va"), "a listener on [::]");
        assert_eq!(owner("fd00::1"), Some("va"));
        assert_eq!(owner("127.3.2.1"), Some("lo"));
        assert_eq!(owner("10.8.0.2"), None);
    }

    /// The route of this very host: loopback is everywhere.
    #[test]
    fn the_route_to_ourselves_is_the_loopback_device() {
        let devices = Devices::read().unwrap();
        let (device, local) = devices.towards(Ipv4Addr::LOCALHOST.into()).unwrap();
        assert_eq!((device.name.as_str(), local), ("lo", Ipv4Addr::LOCALHOST.into()));
        assert_eq!(devices.named("lo"), Some(device));
    }

    /// Deployed peers expect the network number where the RFC's figure says "mask".
    // RFC 7609 3.5.1.2 #3: Proposal with subnet or prefixes
    // RFC 7609 A.2.2 #10: zero IPv4 subnet for IPv6
    // RFC 7609 A.2.2 #12: no IPv6 prefixes for IPv4
    #[test]
    fn a_proposal_carries_the_network_number_and_the_prefixes() {
        let va = device(
            "va",
            &[("10.1.2.3", 24), ("10.9.9.9", 31), ("fe80::1", 64), ("fd00:0:0:7::1", 64)],
        );
        let of = |address: &str| subnets(&va, address.parse().unwrap());
        let expected = Ipv4Subnet { network: [10, 1, 2, 0], prefix_bits: 24 };
        assert_eq!((of("10.1.2.3").ipv4, of("10.1.2.3").prefix_count), (expected, 0));
        let second = Ipv4Subnet { network: [10, 9, 9, 8], prefix_bits: 31 };
        let mapped = of("::ffff:10.9.9.9");
        assert_eq!((mapped.ipv4, mapped.prefix_count), (second, 0), "the IPv4 rule");
        let Subnets { ipv4, prefixes, prefix_count } = of("fd00:0:0:7::1");
        let prefix: Ipv6Addr = "fd00:0:0:7::".parse().unwrap();
        assert_eq!(ipv4, Ipv4Subnet::default());
        assert_eq!((prefix_count, prefixes[0].prefix_bits), (1, 64));
        assert_eq!(prefixes[0].prefix, prefix.octets());
    }

    /// A server takes no more than eight, and two addresses in one prefix are one.
    // RFC 7609 A.2.2 #11: at most eight IPv6 prefixes
    #[test]
    fn a_proposal_carries_eight_prefixes_at_most() {
        let addresses: Vec<_> = (0..24).map(|n| format!("fd00:0:0:{}::{n}", n / 2)).collect();
        let addresses: Vec<_> = addresses.iter().map(|text| (text.as_str(), 64)).collect();
        let Subnets { prefixes, prefix_count, .. } =
            subnets(&device("va", &addresses), "fd00::1".parse().unwrap());
        assert_eq!(usize::from(prefix_count), PREFIXES_MAX);
        let last: Ipv6Addr = "fd00:0:0:7::".parse().unwrap();
        assert_eq!(prefixes[7].prefix, last.octets());
    }

    #[test]
    fn a_vlan_is_known_by_what_the_kernel_says_of_it() {
        let text = "eth0.20  VID: 20\t REORDER_HDR: 1  dev->priv_flags: 1021\n\
                    total frames received            0\nDevice: eth0\n";
        assert_eq!(vlan_in(text), Some(20));
        assert_eq!((vlan_in(""), vlan_in("VID: much")), (None, None));
        assert_eq!(vlan("lo"), None);
    }

    /// With a client that no packet can reach a link would come up never.
    // RFC 7609 3.5.1.2 #7: match IPv4 subnet with an interface
    // RFC 7609 3.5.1.2 #8: match one of the IPv6 prefixes
    #[test]
    fn subnets_match_by_network_number_and_mask_or_by_any_prefix() {
        let vb = device(
            "vb",
            &[("192.168.0.1", 16), ("10.8.0.2", 24), ("fe80::2", 64), ("fd00::2", 64)],
        );
        let v4 = "10.8.0.2".parse().unwrap();
        let v6 = "fd00::2".parse().unwrap();
        let mapped = "::ffff:10.8.0.2".parse().unwrap();
        let subnets_match = |proposal: &Proposal, local, device: &NetworkDevice| {
            Networks::of(device, local).are_shared_with(proposal)
        };
        let same = proposal([10, 8, 0, 0], 24, "fd00::");
        assert!(subnets_match(&same, v4, &vb));
        assert!(subnets_match(&same, v6, &vb));
        assert!(subnets_match(&same, mapped, &vb));
        assert!(subnets_match(&proposal([192, 168, 0, 0], 16, "fd01::"), v4, &vb), "an alias");
        let other_mask = proposal([10, 8, 0, 0], 23, "fe80::");
        assert!(!subnets_match(&other_mask, v4, &vb));
        assert!(!subnets_match(&other_mask, v6, &vb), "link-local prefixes prove nothing");
        assert!(!subnets_match(&proposal([10, 8, 1, 0], 24, "fd01::"), v4, &vb));
        assert!(!subnets_match(&proposal([10, 8, 0, 0], 24, "fd01::"), v6, &vb));
    }
}
