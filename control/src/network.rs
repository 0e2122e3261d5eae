//! The network this gateway is in, as far as it changes while it runs: which devices there are,
//! which of its RNICs can be used, and which of them a connection goes through.
//!
//! The kernel says over a netlink socket that something about devices or addresses changed. What it
//! says is not read: the state is looked at afresh, so that nothing is lost when many things change
//! at once.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};
use smcr_os::netdev::NetworkDevice;
use smcr_proto::wire::clc::proposal::Ipv4Subnet;

use crate::config::{Config, RnicKind};
use crate::confine::needs::Needs;
use crate::device::{self, Devices, Networks, Subnets};
use crate::groups::PortId;
use crate::ipsec::Policies;
use crate::pnet::PnetTable;

/// Where a port is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The RNIC it belongs to, by the operator's name. All ports of one RNIC are alike to peers.
    pub rnic: String,
    /// The network device below it; none if the kernel has no device for it.
    pub device: Option<String>,
    /// The address it lives at; none where there is no RNIC.
    pub address: Option<IpAddr>,
    /// The configuration still has it.
    pub wanted: bool,
}

impl Place {
    /// The place of a port of `rnic`, which is of this kind and stands on this device.
    pub fn of(rnic: &str, (kind, device): (&RnicKind, &str), address: Option<IpAddr>) -> Self {
        // A GID of RoCE v1 is not among the addresses of the device. The NIC says itself when it is
        // down.
        let device = kind.network_device(device).filter(|_| !kind.carries_roce_v1());
        let (rnic, device) = (rnic.to_owned(), device.map(str::to_owned));
        Self { rnic, device, address, wanted: true }
    }
}

/// The ports of an RNIC.
#[derive(Debug, Default)]
struct Ports {
    /// Those that new connections may use now.
    usable: Vec<PortId>,
    /// The first of those that the configuration has.
    first: Option<PortId>,
}

/// Devices, ports, and who goes with whom.
#[derive(Debug)]
pub struct Network {
    devices: Devices,
    pnet: PnetTable,
    places: Vec<Place>,
    /// Whether each port can be used.
    up: Vec<bool>,
    /// The ports for connections of each network device, by its name.
    by_device: HashMap<String, Ports>,
    /// Readable when something changed; none where the kernel does not say.
    changes: Option<OwnedFd>,
    /// Which connections are protected.
    pub(crate) policies: Policies,
}

impl Network {
    /// The network as `devices` has it, with a port at each of `places`.
    pub fn new(devices: Devices, pnet: PnetTable, places: Vec<Place>) -> Self {
        let changes = watch()
            .inspect_err(|error| tracing::warn!(%error, "failures of devices will not be noticed"))
            .ok();
        let up = vec![false; places.len()];
        let (by_device, policies) = (HashMap::new(), Policies::of_this_host());
        let mut network = Self { devices, pnet, places, up, by_device, changes, policies };
        network.judge();
        network
    }

    /// Warns if `config` may lead to SMC-R, and the policies of IPsec cannot be known.
    pub fn need_policies(&mut self, config: &Config) {
        if Needs::of(config).network {
            self.policies.need();
        }
    }

    /// One more port.
    pub fn add(&mut self, place: Place) -> PortId {
        self.places.push(place);
        self.judge();
        PortId(self.places.len() - 1)
    }

    /// The configuration has a port no more, or again.
    pub fn set_wanted(&mut self, port: PortId, wanted: bool) {
        self.places[port.0].wanted = wanted;
        self.judge();
    }

    /// From now on `pnet` says which devices go with which RNICs.
    pub fn change(&mut self, pnet: PnetTable) {
        self.pnet = pnet;
        self.judge();
    }

    /// The ports for a connection whose local address is `local`: those of the RNIC that goes with
    /// the device of the connection.
    fn ports_for(&self, local: IpAddr) -> Option<&Ports> {
        let device = self.devices.owner_of(local)?;
        self.by_device.get(&device.name)
    }

    /// The port, with its poller, for a connection whose local address is `local`; none if no RNIC
    /// goes with its device. If that is down, another one of its physical network may stand in:
    /// link groups know which.
    pub fn port_for(&self, local: IpAddr) -> Option<PortId> {
        let ports = self.ports_for(local)?;
        ports.usable.first().copied().or(ports.first)
    }

    /// Whether a port that goes with the device of this address is up.
    pub fn is_served(&self, local: IpAddr) -> bool {
        self.ports_for(local).is_some_and(|ports| !ports.usable.is_empty())
    }

    /// Our address on the route to `there`; none if there is no route now.
    pub fn towards(&self, there: IpAddr) -> Option<IpAddr> {
        self.devices.towards(there).ok().map(|(_, local)| local)
    }

    /// The devices, as they were when they were looked at last.
    pub(crate) fn devices(&self) -> &Devices {
        &self.devices
    }

    /// Whether an address is this host's.
    pub fn is_here(&self, address: IpAddr) -> bool {
        self.devices.owner_of(address).is_some()
    }

    /// Whether a port can be used.
    pub fn is_up(&self, port: PortId) -> bool {
        self.up[port.0]
    }

    /// A port has another address now. Returns its subnet there.
    pub fn readdressed(&mut self, port: PortId, address: IpAddr) -> Ipv4Subnet {
        self.places[port.0].address = Some(address);
        self.judge();
        self.subnets(address).ipv4
    }

    /// What a Proposal says about the network of a connection whose local address is `local`.
    pub fn subnets(&self, local: IpAddr) -> Subnets {
        let device = self.devices.owner_of(local);
        device.map_or_else(Subnets::default, |device| device::subnets(device, local))
    }

    /// The networks that a server is in, for a connection whose local address is `local`.
    pub fn networks(&self, local: IpAddr) -> Networks {
        let device = self.devices.owner_of(local);
        device.map_or_else(Networks::default, |device| Networks::of(device, local))
    }

    /// Readable when [`refresh`](Self::refresh) would find something.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.changes.as_ref().map(AsFd::as_fd)
    }

    /// Looks at the devices afresh. Returns the ports that came up or went down.
    ///
    /// # Errors
    ///
    /// When the kernel does not answer: the state is as before.
    pub fn refresh(&mut self) -> io::Result<Vec<PortId>> {
        let mut bytes = [0; 8192];
        // That messages were lost is one more reason to look, and all there is to know of them.
        while let Some(changes) = &self.changes
            && !matches!(
                recv(changes, &mut bytes, RecvFlags::DONTWAIT),
                Err(rustix::io::Errno::AGAIN)
            )
        {}
        self.devices = Devices::read()?;
        let before = self.up.clone();
        self.judge();
        let ports = (0..self.up.len()).map(PortId);
        Ok(ports.filter(|port| before[port.0] != self.up[port.0]).collect())
    }

    /// Which ports are up, and who may use them.
    fn judge(&mut self) {
        let devices = &self.devices;
        // What has no device of the kernel says itself when it is down.
        let carries =
            |device: &str, ip| devices.named(device).is_some_and(|device| carries(device, ip));
        let is_up = |place: &Place| {
            let device = place.device.as_deref();
            place.address.is_some_and(|ip| device.is_none_or(|device| carries(device, ip)))
        };
        self.up = self.places.iter().map(is_up).collect();
        let ports_for = |device: &NetworkDevice| {
            let rnic = self.pnet.rnic_for(&device.name).name;
            let ports = (0..).map(PortId).zip(&self.places);
            let wanted = ports.filter(|(_, place)| place.wanted && place.rnic == rnic);
            let mut wanted = wanted.map(|(port, _)| port).peekable();
            let first = wanted.peek().copied();
            let usable = wanted.filter(|port| self.up[port.0]).collect();
            (device.name.clone(), Ports { usable, first })
        };
        self.by_device = self.devices.all().iter().map(ports_for).collect();
    }
}

/// Whether packets from `address` can leave through `device` now.
fn carries(device: &NetworkDevice, address: IpAddr) -> bool {
    let has = device.addresses.iter().any(|(own, _)| *own == address);
    let is_local = |own: IpAddr| own.is_ipv4() && own.is_loopback();
    let loopback = is_local(address) && device.addresses.iter().any(|(own, _)| is_local(*own));
    device.running && (has || loopback)
}

/// A socket that hears of devices and addresses.
fn watch() -> io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let family = AddressFamily::NETLINK;
    // Protocol zero of this family is NETLINK_ROUTE.
    let socket = socket_with(family, SocketType::RAW, flags, None)?;
    bind(&socket, &SocketAddrNetlink::new(0, LINK | IPV4_ADDRESS | IPV6_ADDRESS))?;
    Ok(socket)
}

// Groups of messages, of linux/rtnetlink.h.
const LINK: u32 = 0x1;
const IPV4_ADDRESS: u32 = 0x10;
const IPV6_ADDRESS: u32 = 0x100;

#[cfg(test)]
mod tests {
    use super::*;

    fn device(name: &str, addresses: &[&str]) -> NetworkDevice {
        let addresses: Vec<_> = addresses.iter().map(|text| (*text, 64)).collect();
        device::tests::device(name, &addresses)
    }

    fn place(rnic: &str, device: &str, address: &str) -> Place {
        Place {
            rnic: rnic.into(),
            device: Some(device.into()),
            address: address.parse().ok(),
            wanted: true,
        }
    }

    fn network() -> Network {
        let text = "[[rnic]]\nname='r0'\ndevice='va'\n[[pnet]]\ndevice='vlan7'\nrnic='r0'\n\
                    [[listener]]\nname='a'\nbind='127.0.0.1:1'\nupstream='x:2'\n";
        let pnet = PnetTable::new(&Config::parse(text, "gate.toml").unwrap());
        let devices = [device("va", &["10.8.0.1", "fd00::1"]), device("vlan7", &["10.9.0.1"])];
        let places = vec![place("r0", "va", "fd00::1"), place("r0", "va", "fd00::1")];
        Network::new(Devices::from_iter(devices), pnet, places)
    }

    /// Two pollers of one RNIC share its connections, whatever the family of their addresses.
    #[test]
    fn connections_use_the_ports_of_the_rnic_of_their_device() {
        let network = network();
        let ports = |address: &str| network.ports_for(address.parse().unwrap());
        for address in ["10.8.0.1", "::ffff:10.8.0.1", "fd00::1", "10.9.0.1"] {
            assert_eq!(ports(address).unwrap().usable, [PortId(0), PortId(1)], "{address}");
        }
        assert!(ports("10.7.0.1").is_none());
    }

    /// A connection over a dead port would wait for ten seconds and then fail. But link groups are
    /// told which it is, as others may stand in for it.
    #[test]
    fn a_port_without_carrier_or_address_takes_no_connections() {
        let mut network = network();
        network.devices = Devices::from_iter([
            NetworkDevice { running: false, ..device("va", &["fd00::1"]) },
            device("vlan7", &["10.9.0.1"]),
        ]);
        network.judge();
        let address = "10.9.0.1".parse().unwrap();
        let ports = |network: &Network| network.ports_for(address).unwrap().usable.len();
        assert_eq!((network.is_up(PortId(0)), ports(&network)), (false, 0));
        assert_eq!(
            (network.is_served(address), network.port_for(address)),
            (false, Some(PortId(0)))
        );
        network.devices =
            Devices::from_iter([device("va", &["fd00::2"]), device("vlan7", &["10.9.0.1"])]);
        network.judge();
        assert_eq!((network.is_up(PortId(0)), ports(&network)), (false, 0), "another address");
        network.devices =
            Devices::from_iter([device("va", &["fd00::1"]), device("vlan7", &["10.9.0.1"])]);
        network.judge();
        assert_eq!((network.is_up(PortId(1)), ports(&network)), (true, 2), "it is back");
    }

    /// A port of DPDK has no device that could lose its carrier; and an RNIC may get another
    /// address while connections to the old one are still to come.
    #[test]
    fn a_port_is_up_without_a_device_and_moves_with_its_address() {
        let mut network = network();
        network.places[1].device = None;
        network.devices = Devices::from_iter([device("va", &["fd00::7"])]);
        network.judge();
        let up = |network: &Network| [0, 1].map(|port| network.is_up(PortId(port)));
        assert_eq!(up(&network), [false, true]);
        let subnet = network.readdressed(PortId(0), "fd00::7".parse().unwrap());
        assert_eq!(subnet, Ipv4Subnet::default());
        assert_eq!(up(&network), [true, true]);
    }

    /// Nothing happens in this namespace, and refreshing it must find just that.
    #[test]
    fn without_changes_there_is_nothing_to_tell() {
        let pnet = PnetTable::default();
        let places = vec![place("soft-lo", "lo", "127.0.0.1"), place("soft-lo", "lo", "::2")];
        let mut network = Network::new(Devices::read().unwrap(), pnet, places);
        assert!(network.descriptor().is_some());
        assert_eq!(network.refresh().unwrap(), []);
        assert!(network.is_up(PortId(0)) && !network.is_up(PortId(1)));
    }
}
