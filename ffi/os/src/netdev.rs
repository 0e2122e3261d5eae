//! Network devices of this network namespace: names, addresses, MTU.
//!
//! They are read by `getifaddrs` and one `ioctl`. `/sys` would show the network namespace in which
//! it was mounted, which may be another one.

use std::ffi::{CStr, CString};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::NonNull;

use crate::udp::open_socket;

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkDevice {
    /// Its name, such as `eth0`.
    pub name: String,
    /// Its Ethernet address, if it is that kind of device.
    pub mac: Option<[u8; 6]>,
    /// The largest IP packet it carries, in bytes.
    pub mtu: u32,
    /// Its interface index, which is also the scope of link-local addresses on it.
    pub index: u32,
    /// Whether it is up.
    pub up: bool,
    /// Whether it can carry packets now: it is up, and has a carrier if it is of a kind that has.
    pub running: bool,
    /// Its addresses, each with the bits of its mask.
    pub addresses: Vec<(IpAddr, u8)>,
}

impl NetworkDevice {
    /// Whether it carries Ethernet frames. Loopback and tunnels do not.
    pub fn is_ethernet(&self) -> bool {
        self.mac.is_some_and(|mac| mac != [0; 6])
    }
}

/// All devices of the network namespace of the calling thread, in the kernel's order.
///
/// # Errors
///
/// As `getifaddrs(3)` and the `SIOCGIFMTU` ioctl.
pub fn network_devices() -> io::Result<Vec<NetworkDevice>> {
    let list = List::read()?;
    let socket = open_socket()?;
    let mut devices: Vec<NetworkDevice> = Vec::new();
    for entry in list.entries() {
        let name = entry.name.to_string_lossy();
        let position = match devices.iter().position(|device| device.name == name) {
            Some(position) => position,
            None => {
                let Some(mtu) = mtu(socket.as_fd(), &entry.name)? else { continue };
                devices.push(NetworkDevice {
                    name: name.into_owned(),
                    mac: None,
                    mtu,
                    index: 0,
                    up: entry.has(libc::IFF_UP),
                    // IFF_RUNNING lags up to a second behind.
                    running: entry.has(libc::IFF_UP) && entry.has(libc::IFF_LOWER_UP),
                    addresses: Vec::new(),
                });
                devices.len() - 1
            }
        };
        let device = &mut devices[position];
        device.mac = device.mac.or(entry.mac);
        device.index = device.index.max(entry.index);
        device.addresses.extend(entry.address);
    }
    Ok(devices)
}

/// What `getifaddrs` returned.
///
/// # Invariants
///
/// - **LIST** `head` came from `getifaddrs` and only `Drop` frees it: until then it is null or a
///   list, linked by `ifa_next`, whose nodes, names and socket addresses stay valid and unchanged.
struct List {
    head: *mut libc::ifaddrs,
}

/// A copy of one node of the list. A device has one node per address, and one more for its
/// hardware address.
struct Entry {
    /// The name of the device. The kernel allows almost any bytes in it.
    name: CString,
    flags: libc::c_uint,
    mac: Option<[u8; 6]>,
    /// The index of the device; zero in nodes of IP addresses.
    index: u32,
    address: Option<(IpAddr, u8)>,
}

impl Entry {
    fn has(&self, flag: libc::c_int) -> bool {
        libc::c_uint::try_from(flag).is_ok_and(|flag| self.flags & flag != 0)
    }
}

impl List {
    fn read() -> io::Result<Self> {
        let mut head = std::ptr::null_mut();
        // SAFETY: `getifaddrs` asks for a place to store a pointer: `head` is a live local.
        let result = unsafe { libc::getifaddrs(&mut head) };
        if result == 0 { Ok(Self { head }) } else { Err(io::Error::last_os_error()) }
    }

    fn entries(&self) -> Vec<Entry> {
        let mut entries = Vec::new();
        let mut next = self.head;
        // SAFETY: `next` is the head or the `ifa_next` of a node: null or valid, by LIST.
        while let Some(node) = unsafe { next.as_ref() } {
            next = node.ifa_next;
            // SAFETY: the name of a node is a null-terminated string that stays valid, by LIST.
            let name = unsafe { CStr::from_ptr(node.ifa_name) };
            let address = NonNull::new(node.ifa_addr);
            let mask = NonNull::new(node.ifa_netmask);
            let link = address.and_then(|address| self.link(address));
            let of_ip = address.and_then(|address| self.internet(address)).map(|address| {
                let mask = mask.and_then(|mask| self.internet(mask));
                (address, mask.map_or(0, ones))
            });
            entries.push(Entry {
                name: device_name(name),
                flags: node.ifa_flags,
                mac: link.and_then(|link| ethernet(&link)),
                index: link.map_or(0, |link| u32::try_from(link.sll_ifindex).unwrap_or(0)),
                address: of_ip,
            });
        }
        entries
    }

    /// The IP address in a socket address of this list.
    fn internet(&self, address: NonNull<libc::sockaddr>) -> Option<IpAddr> {
        match self.family(address) {
            libc::AF_INET => {
                // SAFETY: a pointer of this list is valid by LIST, and its family says that it
                // points to a `sockaddr_in`; read unaligned, as the list promises no alignment.
                let v4 = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
                Some(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).into())
            }
            libc::AF_INET6 => {
                // SAFETY: as above, for `sockaddr_in6`.
                let v6 = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
                Some(Ipv6Addr::from(v6.sin6_addr.s6_addr).into())
            }
            _ => None,
        }
    }

    /// The device in a socket address of this list, if it is one of the link layer.
    fn link(&self, address: NonNull<libc::sockaddr>) -> Option<libc::sockaddr_ll> {
        if self.family(address) != libc::AF_PACKET {
            return None;
        }
        // SAFETY: a pointer of this list is valid by LIST, and its family says that it points to
        // a `sockaddr_ll`; read unaligned, as the list promises no alignment.
        Some(unsafe { address.cast::<libc::sockaddr_ll>().read_unaligned() })
    }

    fn family(&self, address: NonNull<libc::sockaddr>) -> libc::c_int {
        // SAFETY: a pointer of this list is valid by LIST, and every socket address begins with
        // its family.
        let family = unsafe { address.cast::<libc::sa_family_t>().read_unaligned() };
        libc::c_int::from(family)
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: `freeifaddrs` asks for what `getifaddrs` returned, once: LIST.
        unsafe { libc::freeifaddrs(self.head) };
    }
}

fn ethernet(link: &libc::sockaddr_ll) -> Option<[u8; 6]> {
    let [a, b, c, d, e, f, ..] = link.sll_addr;
    (link.sll_hatype == libc::ARPHRD_ETHER && link.sll_halen == 6).then_some([a, b, c, d, e, f])
}

fn ones(mask: IpAddr) -> u8 {
    let ones = match mask {
        IpAddr::V4(mask) => mask.to_bits().count_ones(),
        IpAddr::V6(mask) => mask.to_bits().count_ones(),
    };
    u8::try_from(ones).expect("at most 128")
}

/// The device in the label of an address: an alias such as `eth0:1` is an address on `eth0`.
fn device_name(label: &CStr) -> CString {
    let mut parts = label.to_bytes().split(|byte| *byte == b':');
    let device = parts.next().expect("`split` yields at least one part");
    CString::new(device).expect("a part of a C string has no null bytes")
}

/// The MTU of a device; `None` if the device is gone, as those of containers come and go.
fn mtu(socket: BorrowedFd<'_>, device: &CStr) -> io::Result<Option<u32>> {
    // SAFETY: `ifreq` is a plain C structure of integers and arrays, for which zero is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let name = device.to_bytes();
    assert!(name.len() < request.ifr_name.len(), "the kernel's own names and a null byte fit");
    for (target, source) in request.ifr_name.iter_mut().zip(name) {
        *target = libc::c_char::from_ne_bytes([*source]);
    }
    // SAFETY: SIOCGIFMTU asks for
    // - an open socket: `socket` lives past the call;
    // - an `ifreq` that begins with a null-terminated name and may be written: the loop above
    //   filled less than the zeroed array, and `request` is a live exclusive local.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU, &mut request) };
    if result != 0 {
        let error = io::Error::last_os_error();
        return if error.raw_os_error() == Some(libc::ENODEV) { Ok(None) } else { Err(error) };
    }
    // SAFETY: SIOCGIFMTU has filled this member of the union, an integer.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    u32::try_from(mtu).map(Some).map_err(|_| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every network namespace has a loopback device with known properties.
    #[test]
    fn the_loopback_device_has_its_usual_properties() {
        let devices = network_devices().unwrap();
        let lo = devices.iter().find(|device| device.name == "lo").expect("a loopback device");
        assert_eq!((lo.mac, lo.mtu, lo.running), (None, 65_536, lo.up));
        assert_eq!(lo.index, 1, "the first device of every namespace");
        if lo.up {
            assert!(lo.addresses.contains(&(Ipv4Addr::LOCALHOST.into(), 8)), "{lo:?}");
        }
    }

    /// On a host with containers a device may disappear at any time. The others must be found.
    #[test]
    fn a_device_that_has_gone_is_not_an_error() {
        let socket = open_socket().unwrap();
        assert_eq!(mtu(socket.as_fd(), c"lo").unwrap(), Some(65_536));
        assert_eq!(mtu(socket.as_fd(), c"no-such-device").unwrap(), None);
    }

    /// If an alias counted as a device, it would have no Ethernet address to announce to peers.
    #[test]
    fn an_alias_is_an_address_of_its_device() {
        assert_eq!(device_name(c"eth0:1").as_c_str(), c"eth0");
        assert_eq!(device_name(c"eth0").as_c_str(), c"eth0");
    }
}
