//! Network devices and routes, as the kernel tells them.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;

use libc::{c_int, sockaddr_in};

use crate::udp::{check, from_sockaddr, option};

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
        std::fs::metadata(format!("/sys/class/net/{name}"))
            .map_err(|_| io::Error::new(io::ErrorKind::NotFound, "no such network device"))?;
        Self::find(|other, _| other == name)
    }

    /// The device that has `address`. Every address of 127.0.0.0/8 belongs to the loopback device.
    ///
    /// # Errors
    ///
    /// `AddrNotAvailable` when no device has it.
    pub fn with_address(address: Ipv4Addr) -> io::Result<Self> {
        if address.is_loopback() {
            let loopback = Self::find(|_, other| other.is_loopback())?;
            return Ok(Self { address, ..loopback });
        }
        Self::find(|_, other| other == address)
    }

    fn find(wanted: impl Fn(&str, Ipv4Addr) -> bool) -> io::Result<Self> {
        let found = addresses()?.into_iter().find(|(name, address)| wanted(name, *address));
        let (name, address) = found.ok_or_else(|| {
            io::Error::new(io::ErrorKind::AddrNotAvailable, "no network device has the address")
        })?;
        let read = |what| std::fs::read_to_string(format!("/sys/class/net/{name}/{what}"));
        let mtu = read("mtu")?.trim().parse().map_err(|_| io::ErrorKind::InvalidData)?;
        let mut mac = [0; 6];
        let digits = read("address")?;
        for (byte, text) in mac.iter_mut().zip(digits.trim().split(':')) {
            *byte = u8::from_str_radix(text, 16).map_err(|_| io::ErrorKind::InvalidData)?;
        }
        Ok(Self { name, address, mac, mtu })
    }
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
    let mtu = option(socket.as_fd(), libc::IPPROTO_IP, libc::IP_MTU)?;
    u32::try_from(mtu).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// The names and IPv4 addresses of all network devices.
fn addresses() -> io::Result<Vec<(String, Ipv4Addr)>> {
    let mut list = std::ptr::null_mut();
    // SAFETY: `getifaddrs` asks for a place to store the list: a live local.
    check(unsafe { libc::getifaddrs(&raw mut list) })?;
    let mut found = Vec::new();
    let mut next = list;
    // SAFETY: the list is null-terminated and valid until `freeifaddrs`, which comes after the
    // loop.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        // SAFETY: an entry's address is null or a valid socket address of at least a family.
        let family = unsafe { entry.ifa_addr.as_ref() }.map(|address| address.sa_family);
        if family.map(c_int::from) != Some(libc::AF_INET) {
            continue;
        }
        // SAFETY: an address of that family is a `sockaddr_in`, which the allocator of the list
        // aligned for every type.
        let Some(address) = (unsafe { entry.ifa_addr.cast::<sockaddr_in>().as_ref() }) else {
            continue;
        };
        // SAFETY: the name of an entry is a null-terminated string in the list.
        let name = unsafe { std::ffi::CStr::from_ptr(entry.ifa_name) };
        found.push((name.to_string_lossy().into_owned(), *from_sockaddr(address).ip()));
    }
    // SAFETY: `freeifaddrs` asks for a list of `getifaddrs` that nobody uses any more: names and
    // addresses were copied.
    unsafe { libc::freeifaddrs(list) };
    Ok(found)
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
