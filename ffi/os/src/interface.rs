//! Network devices and routes, as the kernel tells them.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsFd;

use crate::netdev::{NetworkDevice, network_devices};
use crate::option;

/// A network device that has an IPv4 address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// The address.
    pub address: Ipv4Addr,
    /// Its Ethernet address; zeros if it has none.
    pub mac: [u8; 6],
    /// The largest IP packet in bytes.
    pub mtu: u32,
}

impl Interface {
    /// The device called `name`, with its first IPv4 address.
    ///
    /// # Errors
    ///
    /// `NotFound` when there is no such device, `AddrNotAvailable` when it has no IPv4 address.
    pub fn named(name: &str) -> io::Result<Self> {
        let device = network_devices()?.into_iter().find(|device| device.name == name);
        let device = device
            .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "no such network device"))?;
        let address = ipv4_addresses(&device).next().ok_or_else(no_address)?;
        Ok(Self::new(device, address))
    }

    /// The device that has `address`. Every address of 127.0.0.0/8 belongs to the loopback device.
    ///
    /// # Errors
    ///
    /// `AddrNotAvailable` when no device has it.
    pub fn with_address(address: Ipv4Addr) -> io::Result<Self> {
        let owns = |device: &NetworkDevice| {
            ipv4_addresses(device)
                .any(|other| other == address || other.is_loopback() && address.is_loopback())
        };
        let device = network_devices()?.into_iter().find(owns).ok_or_else(no_address)?;
        Ok(Self::new(device, address))
    }

    fn new(device: NetworkDevice, address: Ipv4Addr) -> Self {
        let mac = device.mac.unwrap_or_default();
        Self { name: device.name, address, mac, mtu: device.mtu }
    }
}

fn ipv4_addresses(device: &NetworkDevice) -> impl Iterator<Item = Ipv4Addr> {
    device.addresses.iter().filter_map(|(address, _)| match address {
        IpAddr::V4(address) => Some(*address),
        IpAddr::V6(_) => None,
    })
}

fn no_address() -> io::Error {
    io::Error::new(io::ErrorKind::AddrNotAvailable, "no network device has the address")
}

/// The largest IP packet that reaches `there` from `here` without being cut, as the kernel knows
/// it.
///
/// # Errors
///
/// When there is no route.
pub fn path_mtu(here: Ipv4Addr, there: Ipv4Addr) -> io::Result<u32> {
    let socket = std::net::UdpSocket::bind((here, 0))?;
    // Connecting a UDP socket looks up the route and sends nothing.
    socket.connect((there, 9))?;
    let mtu = option::get(socket.as_fd(), libc::IPPROTO_IP, libc::IP_MTU)?;
    u32::try_from(mtu).map_err(|_| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_a_device_with_every_address_of_its_network() {
        let named = Interface::named("lo").unwrap();
        assert_eq!((named.address, named.mac), (Ipv4Addr::LOCALHOST, [0; 6]));
        let other = Interface::with_address(Ipv4Addr::new(127, 9, 9, 9)).unwrap();
        assert_eq!(other.address, Ipv4Addr::new(127, 9, 9, 9));
        assert_eq!((&other.name, other.mtu), (&named.name, named.mtu));
        let missing = Interface::named("no-such-device").unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        let missing = Interface::with_address(Ipv4Addr::new(192, 0, 2, 77)).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::AddrNotAvailable);
        let path = path_mtu(named.address, other.address).unwrap();
        assert_eq!(path, named.mtu.min(65_535), "no IP packet is longer");
    }
}
