//! The network device below a port of `net_af_packet`. That driver says that its link is up when
//! its device is down, and even when it is gone.

use std::ffi::c_char;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::netdevice::{index_to_name, name_to_index};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::Link;

/// A network device of the namespace in which it was found.
#[derive(Debug)]
pub(crate) struct NetDevice {
    socket: OwnedFd,
    index: u32,
}

impl NetDevice {
    /// Finds a device by name.
    ///
    /// # Errors
    ///
    /// When there is none, or when there are no descriptors left.
    pub(crate) fn named(name: &str) -> io::Result<Self> {
        let (family, kind) = (AddressFamily::INET, SocketType::DGRAM);
        let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
        let index = name_to_index(&socket, name)?;
        Ok(Self { socket, index })
    }

    /// Whether it can carry packets now.
    pub(crate) fn link(&self) -> Link {
        // By index, because another device may have its name by now.
        let Ok(name) = index_to_name(&self.socket, self.index) else { return Link::Gone };
        // SAFETY: all zeros are an `ifreq` with an empty name.
        let mut request: libc::ifreq = unsafe { mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *to = c_char::from_ne_bytes([from]);
        }
        // SAFETY: SIOCGIFFLAGS asks for an open socket and for an `ifreq` that it may write. The
        // kernel's names leave room for the zero that ends them.
        let status =
            unsafe { libc::ioctl(self.socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request) };
        if status != 0 {
            return Link::Gone;
        }
        // SAFETY: SIOCGIFFLAGS has written this field of the union.
        let flags = i32::from(unsafe { request.ifr_ifru.ifru_flags });
        let carries = libc::IFF_UP | libc::IFF_RUNNING;
        if flags & carries == carries { Link::Up } else { Link::Down }
    }
}
