//! Whether a network device can carry packets now.

use std::ffi::c_char;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::netdevice::{index_to_name_inlined, name_to_index};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// The state of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// It carries packets.
    Up,
    /// It carries none now.
    Down,
    /// The device was removed. Nothing more will come.
    Gone,
}

/// A network device of the namespace in which it was found.
#[derive(Debug)]
pub struct NetDevice {
    socket: OwnedFd,
    index: u32,
}

impl NetDevice {
    /// Finds a device by name.
    ///
    /// # Errors
    ///
    /// When there is none, or when there are no descriptors left.
    pub fn named(name: &str) -> io::Result<Self> {
        let (family, kind) = (AddressFamily::INET, SocketType::DGRAM);
        let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
        let index = name_to_index(&socket, name)?;
        Ok(Self { socket, index })
    }

    /// Whether it can carry packets now.
    pub fn link(&self) -> Link {
        // By index, because another device may have its name by now. Inlined, because pollers ask,
        // and take nothing from the heap while they carry bytes.
        let name = index_to_name_inlined(&self.socket, self.index);
        let Ok(name) = name.as_ref().map(|name| name.as_bytes()) else { return Link::Gone };
        let Some(flags) = self.flags(name) else { return Link::Gone };
        let has_carrier = || {
            // IFF_RUNNING lags up to a second behind; but some drivers say nothing else.
            self.has_carrier(name).unwrap_or(flags & libc::IFF_RUNNING != 0)
        };
        if flags & libc::IFF_UP != 0 && has_carrier() { Link::Up } else { Link::Down }
    }

    /// The flags of the device; none if it is gone.
    fn flags(&self, name: &[u8]) -> Option<i32> {
        let mut request = request(name);
        // SAFETY: SIOCGIFFLAGS asks for an open socket and for an `ifreq` that it may write.
        let status =
            unsafe { libc::ioctl(self.socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request) };
        // SAFETY: all bytes are a value of this field of the union.
        let flags = unsafe { request.ifr_ifru.ifru_flags };
        (status == 0).then_some(flags.into())
    }

    /// What the driver says of its carrier; none if it does not.
    fn has_carrier(&self, name: &[u8]) -> Option<bool> {
        // `ethtool_value`: the command, and what the kernel writes.
        let mut value: [u32; 2] = [ETHTOOL_GLINK, 0];
        let mut request = request(name);
        request.ifr_ifru.ifru_data = (&raw mut value).cast();
        // SAFETY: SIOCETHTOOL asks for an open socket, for an `ifreq`, and that its data is valid
        // for what the command reads and writes: eight bytes, a live local.
        let status =
            unsafe { libc::ioctl(self.socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) };
        (status == 0).then_some(value[1] != 0)
    }
}

/// A request about the device with this name.
fn request(name: &[u8]) -> libc::ifreq {
    // SAFETY: all zeros are an `ifreq` with an empty name.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    // The kernel's names leave room for the zero that ends them.
    for (to, from) in request.ifr_name.iter_mut().zip(name) {
        *to = c_char::from_ne_bytes([*from]);
    }
    request
}

/// From linux/ethtool.h.
const ETHTOOL_GLINK: u32 = 10;
