//! Network devices and routes, as the kernel tells them.
//!
//! Everything is asked of sockets, so that the answers are those of the calling thread's network
//! namespace. `/sys/class/net` would show the devices of whoever mounted it.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd};

use libc::{c_char, c_int, sockaddr_in};

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
        mtu_of(name)
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
        let (mtu, mac) = (mtu_of(&name)?, mac_of(&name)?);
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

/// The largest IP packet of the device called `name`, in bytes.
fn mtu_of(name: &str) -> io::Result<u32> {
    let answer = ask(name, libc::SIOCGIFMTU)?;
    // SAFETY: reading a field of the union asks that its bytes be an integer: all patterns are, and
    // the kernel has filled this one.
    let mtu = unsafe { answer.ifr_ifru.ifru_mtu };
    u32::try_from(mtu).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// The Ethernet address of the device called `name`.
fn mac_of(name: &str) -> io::Result<[u8; 6]> {
    let answer = ask(name, libc::SIOCGIFHWADDR)?;
    // SAFETY: reading a field of the union asks that its bytes be integers: all patterns are, and
    // the kernel has filled this one.
    let address = unsafe { answer.ifr_ifru.ifru_hwaddr };
    let [a, b, c, d, e, f, ..] = address.sa_data;
    Ok([a, b, c, d, e, f].map(|byte| u8::from_ne_bytes(byte.to_ne_bytes())))
}

/// Asks the kernel about the device called `name`.
fn ask(name: &str, what: libc::Ioctl) -> io::Result<libc::ifreq> {
    let mut label: [c_char; libc::IFNAMSIZ] = [0; libc::IFNAMSIZ];
    // The last byte stays zero and ends the name.
    if name.len() >= label.len() {
        return Err(io::ErrorKind::NotFound.into());
    }
    for (target, byte) in label.iter_mut().zip(name.bytes()) {
        *target = c_char::from_ne_bytes([byte]);
    }
    let ifr_ifru = libc::__c_anonymous_ifr_ifru { ifru_flags: 0 };
    let mut request = libc::ifreq { ifr_name: label, ifr_ifru };
    let socket = std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    // SAFETY: these requests ask for an open socket and a live `ifreq` with a terminated name,
    // whose union they fill.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), what, &raw mut request) })?;
    Ok(request)
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
        let missing = Interface::named("a-name-that-is-too-long").unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        let missing = Interface::with_address(Ipv4Addr::new(192, 0, 2, 77)).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::AddrNotAvailable);
        let path = path_mtu(named.address, other.address).unwrap();
        assert_eq!(path, named.mtu.min(65_535), "no IP packet is longer");
    }
}
