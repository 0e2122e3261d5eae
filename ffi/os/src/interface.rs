//! Network devices and routes, as the kernel reports them.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::AsFd;

use crate::netdev::{NetworkDevice, network_devices};
use crate::option;

/// A network device that has an IP address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Its interface index.
    pub index: u32,
    /// The address.
    pub address: IpAddr,
    /// Its Ethernet address; zeros if it has none.
    pub mac: [u8; 6],
    /// The largest IP packet in bytes.
    pub mtu: u32,
}

impl Interface {
    /// The device called `name`, with its [`preferred_address`].
    ///
    /// # Errors
    ///
    /// `NotFound` when there is no such device, `AddrNotAvailable` when it has no IP address.
    pub fn named(name: &str) -> io::Result<Self> {
        let device = network_devices()?.into_iter().find(|device| device.name == name);
        let device = device.ok_or_else(|| {
            io::Error::new(io::ErrorKind::NotFound, "there is no such network device")
        })?;
        let address = preferred_address(&device).ok_or_else(|| {
            io::Error::new(io::ErrorKind::AddrNotAvailable, "the device has no address")
        })?;
        Ok(Self::new(device, address))
    }

    /// The device that has `address`. Every address of 127.0.0.0/8 belongs to the loopback device.
    ///
    /// # Errors
    ///
    /// `AddrNotAvailable` when no device has it.
    pub fn with_address(address: IpAddr) -> io::Result<Self> {
        let is_local = |own: IpAddr| {
            let v4 = own.is_ipv4() && address.is_ipv4();
            own == address || v4 && own.is_loopback() && address.is_loopback()
        };
        let owns = |device: &NetworkDevice| device.addresses.iter().any(|(own, _)| is_local(*own));
        let device = network_devices()?.into_iter().find(owns);
        let device = device.ok_or_else(|| {
            let why = format!("no network device has the address {address}");
            io::Error::new(io::ErrorKind::AddrNotAvailable, why)
        })?;
        Ok(Self::new(device, address))
    }

    /// The address with `port`, and with the scope that a link-local one needs.
    pub fn at(&self, port: u16) -> SocketAddr {
        scoped(self.address, port, self.index)
    }

    fn new(device: NetworkDevice, address: IpAddr) -> Self {
        let mac = device.mac.unwrap_or_default();
        Self { name: device.name, index: device.index, address, mac, mtu: device.mtu }
    }
}

/// The address of a device that most peers can reach: its first IPv4 address, or else its first
/// IPv6 address that is valid beyond the link, or else its link-local one.
pub fn preferred_address(device: &NetworkDevice) -> Option<IpAddr> {
    let rank = |address: &IpAddr| match address {
        IpAddr::V4(_) => 0,
        IpAddr::V6(address) if !address.is_unicast_link_local() => 1,
        IpAddr::V6(_) => 2,
    };
    device.addresses.iter().map(|(address, _)| *address).min_by_key(rank)
}

fn scoped(address: IpAddr, port: u16, index: u32) -> SocketAddr {
    match address {
        IpAddr::V6(address) if address.is_unicast_link_local() => {
            SocketAddrV6::new(address, port, 0, index).into()
        }
        IpAddr::V4(_) | IpAddr::V6(_) => SocketAddr::new(address, port),
    }
}

/// The largest IP packet that can go from `here` to `there` without fragmentation, as far as the
/// kernel knows.
///
/// # Errors
///
/// When there is no route.
pub fn path_mtu(here: IpAddr, there: IpAddr) -> io::Result<u32> {
    let is_scoped = |address: &Ipv6Addr| address.is_unicast_link_local();
    let index = match here {
        IpAddr::V6(v6) if is_scoped(&v6) => Interface::with_address(here)?.index,
        IpAddr::V4(_) | IpAddr::V6(_) => 0,
    };
    let socket = std::net::UdpSocket::bind(scoped(here, 0, index))?;
    // Connecting a UDP socket looks up the route and sends nothing.
    socket.connect(scoped(there, 9, index))?;
    let mtu = match here {
        IpAddr::V4(_) => option::get(socket.as_fd(), libc::IPPROTO_IP, libc::IP_MTU)?,
        IpAddr::V6(_) => option::get(socket.as_fd(), libc::IPPROTO_IPV6, libc::IPV6_MTU)?,
    };
    u32::try_from(mtu).map_err(|_| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn loopback_is_a_device_with_every_address_of_its_network() {
        let named = Interface::named("lo").unwrap();
        assert_eq!((named.address, named.mac), (Ipv4Addr::LOCALHOST.into(), [0; 6]));
        let other = Interface::with_address(Ipv4Addr::new(127, 9, 9, 9).into()).unwrap();
        assert_eq!(other.address, Ipv4Addr::new(127, 9, 9, 9));
        assert_eq!((&other.name, other.mtu), (&named.name, named.mtu));
        let missing = Interface::named("no-such-device").unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        let missing = Interface::with_address(Ipv4Addr::new(192, 0, 2, 77).into()).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::AddrNotAvailable);
        assert_eq!(missing.to_string(), "no network device has the address 192.0.2.77");
        let path = path_mtu(named.address, other.address).unwrap();
        assert_eq!(path, named.mtu.min(65_535), "no IP packet is longer");
        let v6 = IpAddr::from(Ipv6Addr::LOCALHOST);
        assert_eq!(Interface::with_address(v6).unwrap().name, "lo");
        assert!(path_mtu(v6, v6).unwrap() >= 65_535);
    }

    /// Peers behind a router cannot reach a link-local address, so it is only the last choice.
    #[test]
    fn the_address_that_reaches_farthest_is_preferred() {
        let mut device = network_devices().unwrap().swap_remove(0);
        let mut preferred = |addresses: &[&str]| {
            device.addresses =
                addresses.iter().map(|address| (address.parse().unwrap(), 64)).collect();
            preferred_address(&device).map(|address| address.to_string())
        };
        assert_eq!(preferred(&["fe80::1", "fd00::1", "10.0.0.1"]).as_deref(), Some("10.0.0.1"));
        assert_eq!(preferred(&["fe80::1", "fd00::1", "fd00::2"]).as_deref(), Some("fd00::1"));
        assert_eq!(preferred(&["fe80::1"]).as_deref(), Some("fe80::1"));
        assert_eq!(preferred(&[]), None);
    }
}
