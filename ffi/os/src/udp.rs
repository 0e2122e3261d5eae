//! UDP sockets that send and receive many datagrams per system call, with GSO, GRO, `sendmmsg` and
//! `recvmmsg`.

mod address;
mod steering;

use std::io;
use std::mem;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use libc::{c_int, cmsghdr, iovec, mmsghdr, msghdr};

use crate::option;
use crate::placed::Placed;
use address::Name;
pub use steering::Steering;

/// A nonblocking socket that is bound, never connected, and coalesces received datagrams.
#[derive(Debug)]
pub struct UdpSocket {
    descriptor: OwnedFd,
    is_ipv4: bool,
    /// The index of the network device for link-local targets; zero if the socket has none.
    scope_id: u32,
}

/// Datagrams to send to one address: all of one size, but the last may be shorter.
#[derive(Clone, Copy, Debug)]
pub struct Departing<'a> {
    /// The destination. An address of another family than the socket's is refused as unreachable.
    /// Link-local addresses get the scope of the socket.
    pub target: SocketAddr,
    /// The datagrams, one behind the other.
    pub bytes: &'a [u8],
    /// The size of all but the last.
    pub segment_len: usize,
    /// The type of service in their IPv4 headers, or the traffic class in their IPv6 headers.
    pub traffic_class: u8,
}

/// Datagrams received from one address: all of one size, but the last may be shorter.
#[derive(Clone, Copy, Debug)]
pub struct Arrived<'a> {
    /// The source address.
    pub source: SocketAddr,
    /// The datagrams, one behind the other.
    pub bytes: &'a [u8],
    /// The size of all but the last.
    pub segment_len: usize,
    /// The type of service in their IPv4 headers, or the traffic class in their IPv6 headers.
    pub traffic_class: u8,
}

/// Why the kernel did not send the first of some datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsent {
    /// The socket buffer is full now: try again later.
    Full,
    /// A datagram is too large for the path, or the device cannot split them: send smaller ones, or
    /// fewer at once.
    Unable,
    /// There is no route to the target.
    Unreachable,
}

/// Buffers for bursts of datagrams.
#[derive(Debug)]
pub struct ReceiveRing {
    buffers: Vec<Buffer>,
}

/// The memory that the kernel fills for one element of a burst.
#[derive(Debug)]
struct Buffer {
    bytes: Placed,
    len: usize,
    source: SocketAddr,
    segment_len: usize,
    traffic_class: u8,
}

impl UdpSocket {
    /// Binds to `local`. Requests buffers of `buffer_len` bytes for each direction; the kernel may
    /// grant less. A link-local address needs its scope.
    ///
    /// # Errors
    ///
    /// As `socket(2)`, `setsockopt(2)` and `bind(2)`: the address is not ours, or the port is
    /// taken.
    pub fn bind(local: SocketAddr, buffer_len: usize) -> io::Result<Self> {
        let socket = Self::open(local, buffer_len)?;
        socket.bind_to(local)?;
        Ok(socket)
    }

    /// Binds one socket for each share of `steering`, otherwise as [`UdpSocket::bind`].
    ///
    /// # Errors
    ///
    /// As [`UdpSocket::bind`].
    pub fn bind_shares(
        local: SocketAddr,
        buffer_len: usize,
        steering: Steering,
    ) -> io::Result<Vec<Self>> {
        // If another process has the port, we must not share it. Binding with SO_REUSEPORT would
        // not reveal that, so a socket without it is bound first.
        drop(Self::bind(local, 0)?);
        let mut sockets = Vec::new();
        for _ in 0..steering.shares {
            let socket = Self::open(local, buffer_len)?;
            socket.set(libc::SOL_SOCKET, libc::SO_REUSEPORT, 1)?;
            socket.bind_to(local)?;
            sockets.push(socket);
        }
        if let Some(socket) = sockets.first() {
            steering.attach(socket.as_fd())?;
        }
        Ok(sockets)
    }

    fn open(local: SocketAddr, buffer_len: usize) -> io::Result<Self> {
        let (domain, scope_id) = match local {
            SocketAddr::V4(_) => (libc::AF_INET, 0),
            SocketAddr::V6(local) => (libc::AF_INET6, local.scope_id()),
        };
        let descriptor = open_socket_of(domain)?;
        let socket = Self { descriptor, is_ipv4: local.is_ipv4(), scope_id };
        socket.enlarge(libc::SO_RCVBUFFORCE, libc::SO_RCVBUF, buffer_len)?;
        socket.enlarge(libc::SO_SNDBUFFORCE, libc::SO_SNDBUF, buffer_len)?;
        // This sets DF on every packet and makes identifications predictable. PROBE, not DO: with
        // DO a forged ICMP message could lower the path MTU below our packets, and the kernel would
        // refuse all of them from then on.
        if socket.is_ipv4 {
            socket.set(libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE)?;
            socket.set(libc::IPPROTO_IP, libc::IP_RECVTOS, 1)?;
            socket.set(libc::IPPROTO_IP, libc::IP_TOS, TRAFFIC_CLASS.into())?;
        } else {
            let probe = libc::IPV6_PMTUDISC_PROBE;
            socket.set(libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, probe)?;
            socket.set(libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 1)?;
            socket.set(libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1)?;
            socket.set(libc::IPPROTO_IPV6, libc::IPV6_TCLASS, TRAFFIC_CLASS.into())?;
            // RNICs send UDP without a checksum over IPv6 too, since the ICRC is stronger.
            socket.set(libc::IPPROTO_UDP, libc::UDP_NO_CHECK6_RX, 1)?;
        }
        socket.set(libc::IPPROTO_UDP, libc::UDP_GRO, 1)?;
        Ok(socket)
    }

    fn bind_to(&self, local: SocketAddr) -> io::Result<()> {
        let (name, len) = Name::of(local);
        // SAFETY: `bind` asks for an open descriptor and an address valid for its length: a live
        // local with at least so many bytes.
        let result =
            unsafe { libc::bind(self.descriptor.as_raw_fd(), (&raw const name).cast(), len) };
        check(result)
    }

    /// The address by which this socket can send to `target`, if it can.
    fn reachable(&self, target: SocketAddr) -> Option<SocketAddr> {
        match target {
            SocketAddr::V4(_) => self.is_ipv4.then_some(target),
            SocketAddr::V6(target) => {
                let (ip, port) = (*target.ip(), target.port());
                (!self.is_ipv4).then(|| SocketAddrV6::new(ip, port, 0, self.scope_id).into())
            }
        }
    }

    /// The size in bytes of the receive buffer that the kernel granted, overhead included.
    ///
    /// # Errors
    ///
    /// As `getsockopt(2)`.
    pub fn receive_buffer(&self) -> io::Result<usize> {
        let value = option::get(self.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF)?;
        Ok(usize::try_from(value).unwrap_or(0))
    }

    /// Sends `departing`, as far as one system call can, and returns how many elements were sent.
    ///
    /// # Errors
    ///
    /// When the first was not sent.
    ///
    /// # Panics
    ///
    /// If the length of a segment is zero or does not fit 16 bits.
    pub fn send<'a>(
        &self,
        departing: impl Iterator<Item = Departing<'a>>,
    ) -> Result<usize, Unsent> {
        // What one call needs is made anew for each call, and most calls are for one element.
        match departing.size_hint() {
            (_, Some(1)) => self.send_burst::<1>(departing),
            _ => self.send_burst::<SEND_BURST>(departing),
        }
    }

    fn send_burst<'a, const BURST: usize>(
        &self,
        departing: impl Iterator<Item = Departing<'a>>,
    ) -> Result<usize, Unsent> {
        let mut targets = [Name::NONE; BURST];
        let mut vectors = [NO_VECTOR; BURST];
        let mut controls = [Control::default(); BURST];
        let mut messages = [NO_MESSAGE; BURST];
        let mut count = 0;
        for departing in departing.take(BURST) {
            let Some(target) = self.reachable(departing.target) else { break };
            let (name, name_len) = Name::of(target);
            targets[count] = name;
            vectors[count] = iovec {
                iov_base: departing.bytes.as_ptr().cast_mut().cast(),
                iov_len: departing.bytes.len(),
            };
            assert!(departing.segment_len > 0);
            let header = &mut messages[count].msg_hdr;
            if departing.bytes.len() > departing.segment_len {
                let len = u16::try_from(departing.segment_len).expect("a packet is that short");
                controls[count].push(libc::IPPROTO_UDP, libc::UDP_SEGMENT, &len.to_ne_bytes());
            }
            if departing.traffic_class != TRAFFIC_CLASS {
                let (level, kind) = match self.is_ipv4 {
                    true => (libc::IPPROTO_IP, libc::IP_TOS),
                    false => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
                };
                let class = c_int::from(departing.traffic_class);
                controls[count].push(level, kind, &class.to_ne_bytes());
            }
            if controls[count].used > 0 {
                header.msg_control = (&raw mut controls[count].items).cast();
                header.msg_controllen = controls[count].used * size_of::<Item>();
            }
            header.msg_name = (&raw mut targets[count]).cast();
            header.msg_namelen = name_len;
            header.msg_iov = &raw mut vectors[count];
            header.msg_iovlen = 1;
            count += 1;
        }
        if count == 0 {
            return Err(Unsent::Unreachable);
        }
        let burst = u32::try_from(count).expect("a burst is short");
        // SAFETY: `sendmmsg` asks for
        // - an open descriptor: ours;
        // - `burst` headers valid for reads and writes: the first elements of a live array;
        // - that their names, vectors and controls are valid for reads: elements of live arrays
        //   with the lengths written next to them, and the slices of `departing`, which outlive
        //   the call. Sending writes to none of them.
        let sent = unsafe {
            libc::sendmmsg(self.descriptor.as_raw_fd(), messages.as_mut_ptr(), burst, NONBLOCKING)
        };
        usize::try_from(sent).map_err(|_| Unsent::from(io::Error::last_os_error()))
    }

    fn set(&self, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
        option::set(self.as_fd(), level, name, value)
    }

    /// Requests a buffer beyond the system's limit, or up to the limit if that is not permitted.
    fn enlarge(&self, force: c_int, modest: c_int, len: usize) -> io::Result<()> {
        let len = c_int::try_from(len).unwrap_or(c_int::MAX);
        match self.set(libc::SOL_SOCKET, force, len) {
            Ok(()) => Ok(()),
            Err(_) => self.set(libc::SOL_SOCKET, modest, len),
        }
    }
}

impl AsFd for UdpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl From<io::Error> for Unsent {
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM | libc::EINTR) => Self::Full,
            Some(libc::EMSGSIZE | libc::EINVAL | libc::EIO) => Self::Unable,
            Some(_) | None => Self::Unreachable,
        }
    }
}

impl ReceiveRing {
    /// Allocates buffers for bursts of up to `count` datagrams, or trains of them.
    ///
    /// # Panics
    ///
    /// If `count` is zero or more than 8.
    pub fn new(count: usize) -> Self {
        assert!(0 < count && count <= RECEIVE_BURST);
        let buffer = || Buffer {
            bytes: Placed::for_received(DATAGRAM_MAX),
            len: 0,
            source: NO_SOURCE,
            segment_len: 0,
            traffic_class: 0,
        };
        Self { buffers: (0..count).map(|_| buffer()).collect() }
    }

    /// Receives one burst of at most `most` elements, which replaces the previous one. Returns the
    /// number of its elements, which is zero if nothing has arrived.
    ///
    /// # Errors
    ///
    /// As `recvmmsg(2)`.
    pub fn receive(&mut self, socket: &UdpSocket, most: usize) -> io::Result<usize> {
        match most {
            1 => self.receive_burst::<1>(socket, most),
            _ => self.receive_burst::<RECEIVE_BURST>(socket, most),
        }
    }

    fn receive_burst<const BURST: usize>(
        &mut self,
        socket: &UdpSocket,
        most: usize,
    ) -> io::Result<usize> {
        let mut sources = [Name::NONE; BURST];
        let mut vectors = [NO_VECTOR; BURST];
        let mut controls = [Control::default(); BURST];
        let mut messages = [NO_MESSAGE; BURST];
        let burst = self.buffers.len().min(BURST).min(most);
        for (index, buffer) in self.buffers[..burst].iter_mut().enumerate() {
            vectors[index] =
                iovec { iov_base: buffer.bytes.as_mut_ptr().cast(), iov_len: buffer.bytes.len() };
            let header = &mut messages[index].msg_hdr;
            header.msg_name = (&raw mut sources[index]).cast();
            header.msg_namelen = Name::LEN;
            header.msg_iov = &raw mut vectors[index];
            header.msg_iovlen = 1;
            header.msg_control = (&raw mut controls[index].items).cast();
            header.msg_controllen = size_of::<[Item; ITEMS_MAX]>();
        }
        let burst = u32::try_from(burst).expect("a burst is short");
        // SAFETY: `recvmmsg` asks for
        // - an open descriptor: `socket` is one;
        // - `burst` headers valid for reads and writes: as many of a live array were filled in;
        // - that their names, vectors and controls are valid for writes of the lengths next to
        //   them: elements of live arrays, and buffers that `self` owns and `&mut self` guards;
        // - no timeout, or a valid one: null is none.
        let count = unsafe {
            libc::recvmmsg(
                socket.descriptor.as_raw_fd(),
                messages.as_mut_ptr(),
                burst,
                NONBLOCKING,
                std::ptr::null_mut(),
            )
        };
        let Ok(count) = usize::try_from(count) else {
            let error = io::Error::last_os_error();
            let nothing = error.kind() == io::ErrorKind::WouldBlock;
            return if nothing { Ok(0) } else { Err(error) };
        };
        for (index, buffer) in self.buffers[..count].iter_mut().enumerate() {
            buffer.len = messages[index].msg_len as usize;
            buffer.source = sources[index].address().unwrap_or(NO_SOURCE);
            let control_len = messages[index].msg_hdr.msg_controllen;
            let segment_len = controls[index].coalesced(control_len);
            buffer.segment_len = segment_len.unwrap_or(buffer.len).max(1);
            buffer.traffic_class = controls[index].traffic_class(control_len).unwrap_or(0);
        }
        Ok(count)
    }

    /// Returns one element of the last burst.
    ///
    /// # Panics
    ///
    /// If `index` is not below the number of buffers.
    pub fn arrived(&self, index: usize) -> Arrived<'_> {
        let Buffer { bytes, len, source, segment_len, traffic_class } = &self.buffers[index];
        Arrived {
            source: *source,
            bytes: &bytes[..*len],
            segment_len: *segment_len,
            traffic_class: *traffic_class,
        }
    }
}

/// A buffer for ancillary data, aligned as the kernel requires.
#[derive(Clone, Copy, Default)]
struct Control {
    items: [Item; ITEMS_MAX],
    /// How many of them are to be sent.
    used: usize,
}

/// A header and up to eight bytes of data.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Item {
    len: usize,
    level: c_int,
    kind: c_int,
    data: [u8; 8],
}

// The layout of `cmsghdr` on 64-bit Linux, followed by its data. Data of one to eight bytes is
// padded to eight, so items follow one another as elements of an array do.
const _: () = assert!(mem::offset_of!(Item, data) == size_of::<cmsghdr>());
const _: () = assert!(mem::offset_of!(Item, level) == mem::offset_of!(cmsghdr, cmsg_level));
const _: () = assert!(mem::offset_of!(Item, kind) == mem::offset_of!(cmsghdr, cmsg_type));
const _: () = assert!(align_of::<Item>() >= align_of::<cmsghdr>());
const _: () = assert!(size_of::<Item>() == size_of::<cmsghdr>() + 8);

impl Control {
    /// Appends a message to the kernel with up to eight bytes of data.
    fn push(&mut self, level: c_int, kind: c_int, bytes: &[u8]) {
        let mut data = [0; 8];
        data[..bytes.len()].copy_from_slice(bytes);
        let len = size_of::<cmsghdr>() + bytes.len();
        self.items[self.used] = Item { len, level, kind, data };
        self.used += 1;
    }

    /// The integer in the message of this kind, if the kernel wrote one. `written` is how many
    /// bytes of `self` it wrote. Some integers have one byte, others four.
    fn integer(&self, written: usize, wanted: &[(c_int, c_int)]) -> Option<c_int> {
        let items = self.items[..written.div_ceil(size_of::<Item>()).min(ITEMS_MAX)].iter();
        let mut found = items.filter(|item| wanted.contains(&(item.level, item.kind)));
        let item = found.next()?;
        let (bytes, _) = item.data.split_first_chunk().expect("8 is more than 4");
        match item.len.checked_sub(size_of::<cmsghdr>())? {
            1 => Some(item.data[0].into()),
            4 => Some(c_int::from_ne_bytes(*bytes)),
            _ => None,
        }
    }

    /// The size of the datagrams that the kernel coalesced, if it reported one.
    fn coalesced(&self, written: usize) -> Option<usize> {
        let len = self.integer(written, &[(libc::IPPROTO_UDP, libc::UDP_GRO)])?;
        usize::try_from(len).ok()
    }

    /// The type of service or traffic class in the IP headers, if the kernel reported it.
    fn traffic_class(&self, written: usize) -> Option<u8> {
        let kinds = [(libc::IPPROTO_IP, libc::IP_TOS), (libc::IPPROTO_IPV6, libc::IPV6_TCLASS)];
        u8::try_from(self.integer(written, &kinds)?).ok()
    }
}

/// The most messages beside a datagram.
const ITEMS_MAX: usize = 2;
/// What the sockets send unless they are told otherwise, which costs a message to the kernel:
/// ECT(0), so that routers mark packets instead of dropping them.
const TRAFFIC_CLASS: u8 = 2;

/// Opens an IPv4 socket without an address.
pub(crate) fn open_socket() -> io::Result<OwnedFd> {
    open_socket_of(libc::AF_INET)
}

fn open_socket_of(domain: c_int) -> io::Result<OwnedFd> {
    let kind = libc::SOCK_DGRAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: `socket` asks for nothing that could be violated.
    let descriptor = unsafe { libc::socket(domain, kind, 0) };
    check(descriptor.min(0))?;
    // SAFETY: `from_raw_fd` asks for a descriptor that is open and nobody else's: it was just made.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The source address of a datagram if the kernel did not report one.
const NO_SOURCE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
const NO_VECTOR: iovec = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
// SAFETY: `msghdr` is pointers and integers (and private padding on some targets), all of which may
// be zero.
const NO_HEADER: msghdr = unsafe { mem::zeroed() };
const NO_MESSAGE: mmsghdr = mmsghdr { msg_hdr: NO_HEADER, msg_len: 0 };

/// The most elements that one system call sends.
const SEND_BURST: usize = 16;
/// The most elements that one system call receives.
const RECEIVE_BURST: usize = 8;
/// The largest payload of a UDP datagram, rounded up.
const DATAGRAM_MAX: usize = 65_536;
const NONBLOCKING: c_int = libc::MSG_DONTWAIT;

#[cfg(test)]
mod tests;
