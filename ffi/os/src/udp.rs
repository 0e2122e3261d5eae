//! UDP sockets that send and receive many datagrams per call: GSO, GRO, and bursts of both.

use std::io;
use std::mem;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use libc::{c_int, cmsghdr, iovec, mmsghdr, msghdr, sockaddr_in, socklen_t};

use crate::option;

/// A nonblocking IPv4 socket, bound and never connected, that coalesces what it receives.
#[derive(Debug)]
pub struct UdpSocket {
    descriptor: OwnedFd,
}

/// Datagrams of one size, the last of which may be shorter, on their way to one address.
#[derive(Clone, Copy, Debug)]
pub struct Departing<'a> {
    /// Where to. Only IPv4 is implemented; others are refused as unreachable.
    pub target: SocketAddr,
    /// The datagrams, end to end.
    pub bytes: &'a [u8],
    /// The size of all but the last.
    pub segment_len: usize,
}

/// Datagrams of one size, the last of which may be shorter, that came from one address.
#[derive(Clone, Copy, Debug)]
pub struct Arrived<'a> {
    /// Where from.
    pub source: SocketAddrV4,
    /// The datagrams, end to end.
    pub bytes: &'a [u8],
    /// The size of all but the last.
    pub segment_len: usize,
}

/// Why the first of some datagrams was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// No room now: try again.
    Full,
    /// Too large for the path, or the device cannot split it: try smaller or fewer.
    Unable,
    /// No way to the target.
    Unreachable,
}

/// Buffers for bursts of datagrams.
#[derive(Debug)]
pub struct ReceiveRing {
    buffers: Vec<Buffer>,
}

/// What the kernel fills for one element of a burst.
#[derive(Debug)]
struct Buffer {
    bytes: Box<[u8]>,
    len: usize,
    source: SocketAddrV4,
    segment_len: usize,
}

impl UdpSocket {
    /// Binds to `local`, with room for `buffer_len` bytes in each direction, or as much as the
    /// kernel grants.
    ///
    /// # Errors
    ///
    /// As `socket(2)`, `setsockopt(2)` and `bind(2)`: the address is not ours, or the port is
    /// taken.
    pub fn bind(local: SocketAddrV4, buffer_len: usize) -> io::Result<Self> {
        let descriptor = open_socket()?;
        let socket = Self { descriptor };
        socket.enlarge(libc::SO_RCVBUFFORCE, libc::SO_RCVBUF, buffer_len)?;
        socket.enlarge(libc::SO_SNDBUFFORCE, libc::SO_SNDBUF, buffer_len)?;
        // DF on every packet, and identifications that can be known in advance. PROBE and not DO:
        // with DO anybody who forges an ICMP message lowers the path MTU below our packets, and the
        // kernel refuses them all from then on.
        socket.set(libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE)?;
        socket.set(libc::IPPROTO_UDP, libc::UDP_GRO, 1)?;
        let address = to_sockaddr(local);
        // SAFETY: `bind` asks for an open descriptor and an address valid for its length: a live
        // local of exactly that type.
        let result = unsafe {
            libc::bind(socket.descriptor.as_raw_fd(), (&raw const address).cast(), SOCKADDR_LEN)
        };
        check(result)?;
        Ok(socket)
    }

    /// How many bytes of buffer the kernel granted for receiving, overhead included.
    ///
    /// # Errors
    ///
    /// As `getsockopt(2)`.
    pub fn receive_buffer(&self) -> io::Result<usize> {
        let value = option::get(self.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF)?;
        Ok(usize::try_from(value).unwrap_or(0))
    }

    /// Sends as many of `departing` as go with one system call, and returns how many were taken.
    ///
    /// # Errors
    ///
    /// When the first was not taken.
    ///
    /// # Panics
    ///
    /// If the length of a segment is zero or does not fit 16 bits.
    pub fn send<'a>(
        &self,
        departing: impl Iterator<Item = Departing<'a>>,
    ) -> Result<usize, Refusal> {
        let mut targets = [NO_ADDRESS; SEND_BURST];
        let mut vectors = [NO_VECTOR; SEND_BURST];
        let mut controls = [Control::default(); SEND_BURST];
        let mut messages = [NO_MESSAGE; SEND_BURST];
        let mut count = 0;
        for departing in departing.take(SEND_BURST) {
            let SocketAddr::V4(target) = departing.target else { break };
            targets[count] = to_sockaddr(target);
            vectors[count] = iovec {
                iov_base: departing.bytes.as_ptr().cast_mut().cast(),
                iov_len: departing.bytes.len(),
            };
            assert!(departing.segment_len > 0);
            let header = &mut messages[count].msg_hdr;
            if departing.bytes.len() > departing.segment_len {
                let len = u16::try_from(departing.segment_len).expect("no packet is that long");
                controls[count] = Control::segment(len);
                header.msg_control = (&raw mut controls[count]).cast();
                header.msg_controllen = Control::SEGMENT_LEN;
            }
            header.msg_name = (&raw mut targets[count]).cast();
            header.msg_namelen = SOCKADDR_LEN;
            header.msg_iov = &raw mut vectors[count];
            header.msg_iovlen = 1;
            count += 1;
        }
        if count == 0 {
            return Err(Refusal::Unreachable);
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
        usize::try_from(sent).map_err(|_| Refusal::from(io::Error::last_os_error()))
    }

    fn set(&self, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
        option::set(self.as_fd(), level, name, value)
    }

    /// Asks for a buffer beyond the system's limit, or else for one up to it.
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

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM | libc::EINTR) => Self::Full,
            Some(libc::EMSGSIZE | libc::EINVAL | libc::EIO) => Self::Unable,
            Some(_) | None => Self::Unreachable,
        }
    }
}

impl ReceiveRing {
    /// Room for bursts of up to `count` datagrams, or trains of them.
    ///
    /// # Panics
    ///
    /// If `count` is zero or more than 8.
    pub fn new(count: usize) -> Self {
        assert!(0 < count && count <= RECEIVE_BURST);
        let buffer = || Buffer {
            bytes: vec![0; DATAGRAM_MAX].into(),
            len: 0,
            source: SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0),
            segment_len: 0,
        };
        Self { buffers: (0..count).map(|_| buffer()).collect() }
    }

    /// Takes in at most one burst, which replaces the one before; returns how many elements it has.
    ///
    /// # Errors
    ///
    /// As `recvmmsg(2)`; that there is nothing is not an error but zero.
    pub fn receive(&mut self, socket: &UdpSocket) -> io::Result<usize> {
        let mut sources = [NO_ADDRESS; RECEIVE_BURST];
        let mut vectors = [NO_VECTOR; RECEIVE_BURST];
        let mut controls = [Control::default(); RECEIVE_BURST];
        let mut messages = [NO_MESSAGE; RECEIVE_BURST];
        for (index, buffer) in self.buffers.iter_mut().enumerate() {
            vectors[index] =
                iovec { iov_base: buffer.bytes.as_mut_ptr().cast(), iov_len: buffer.bytes.len() };
            let header = &mut messages[index].msg_hdr;
            header.msg_name = (&raw mut sources[index]).cast();
            header.msg_namelen = SOCKADDR_LEN;
            header.msg_iov = &raw mut vectors[index];
            header.msg_iovlen = 1;
            header.msg_control = (&raw mut controls[index]).cast();
            header.msg_controllen = size_of::<Control>();
        }
        let burst = u32::try_from(self.buffers.len()).expect("a burst is short");
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
            buffer.source = from_sockaddr(&sources[index]);
            let control_len = messages[index].msg_hdr.msg_controllen;
            let segment_len = controls[index].coalesced(control_len);
            buffer.segment_len = segment_len.unwrap_or(buffer.len).max(1);
        }
        Ok(count)
    }

    /// An element of the last burst.
    ///
    /// # Panics
    ///
    /// If `index` is not below the number of buffers.
    pub fn arrived(&self, index: usize) -> Arrived<'_> {
        let Buffer { bytes, len, source, segment_len } = &self.buffers[index];
        Arrived { source: *source, bytes: &bytes[..*len], segment_len: *segment_len }
    }
}

/// Room for ancillary data, aligned as the kernel wants it: one header and up to 16 bytes.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Control {
    len: usize,
    level: c_int,
    kind: c_int,
    data: [u8; 16],
}

// The layout of `cmsghdr` on 64-bit Linux, followed by its data.
const _: () = assert!(mem::offset_of!(Control, data) == size_of::<cmsghdr>());
const _: () = assert!(mem::offset_of!(Control, level) == mem::offset_of!(cmsghdr, cmsg_level));
const _: () = assert!(mem::offset_of!(Control, kind) == mem::offset_of!(cmsghdr, cmsg_type));
const _: () = assert!(align_of::<Control>() >= align_of::<cmsghdr>());

impl Control {
    const HEADER_LEN: usize = size_of::<cmsghdr>();
    /// What a `u16` takes, padding included.
    const SEGMENT_LEN: usize = Self::HEADER_LEN + 8;

    /// Asks the kernel to cut a datagram into segments.
    fn segment(len: u16) -> Self {
        let mut data = [0; 16];
        data[..2].copy_from_slice(&len.to_ne_bytes());
        Self { len: Self::HEADER_LEN + 2, level: libc::IPPROTO_UDP, kind: libc::UDP_SEGMENT, data }
    }

    /// The size of the datagrams that the kernel joined, if it wrote so. `written` is how many
    /// bytes of `self` it wrote.
    fn coalesced(&self, written: usize) -> Option<usize> {
        let tells = written >= Self::HEADER_LEN + size_of::<c_int>()
            && self.level == libc::IPPROTO_UDP
            && self.kind == libc::UDP_GRO;
        let (bytes, _) = self.data.split_first_chunk().expect("16 is more than 4");
        if tells { usize::try_from(c_int::from_ne_bytes(*bytes)).ok() } else { None }
    }
}

/// An IPv4 socket without an address.
pub(crate) fn open_socket() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_DGRAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: `socket` asks for nothing that could be violated.
    let descriptor = unsafe { libc::socket(libc::AF_INET, kind, 0) };
    check(descriptor.min(0))?;
    // SAFETY: `from_raw_fd` asks for a descriptor that is open and nobody else's: it was just made.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn to_sockaddr(address: SocketAddrV4) -> sockaddr_in {
    sockaddr_in {
        sin_port: address.port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from(*address.ip()).to_be() },
        ..NO_ADDRESS
    }
}

fn from_sockaddr(address: &sockaddr_in) -> SocketAddrV4 {
    let ip = Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr));
    SocketAddrV4::new(ip, u16::from_be(address.sin_port))
}

const NO_ADDRESS: sockaddr_in = sockaddr_in {
    #[allow(clippy::cast_possible_truncation, reason = "the number of a family is small")]
    sin_family: libc::AF_INET as libc::sa_family_t,
    sin_port: 0,
    sin_addr: libc::in_addr { s_addr: 0 },
    sin_zero: [0; 8],
};
const NO_VECTOR: iovec = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
// SAFETY: `msghdr` is pointers and integers (and private padding on some targets), all of which may
// be zero.
const NO_HEADER: msghdr = unsafe { mem::zeroed() };
const NO_MESSAGE: mmsghdr = mmsghdr { msg_hdr: NO_HEADER, msg_len: 0 };

/// Elements of one sending system call.
const SEND_BURST: usize = 16;
/// Elements of one receiving system call, at most.
const RECEIVE_BURST: usize = 8;
/// The largest payload of a UDP datagram, rounded up.
const DATAGRAM_MAX: usize = 65_536;
#[allow(clippy::cast_possible_truncation, reason = "16")]
const SOCKADDR_LEN: socklen_t = size_of::<sockaddr_in>() as socklen_t;
const NONBLOCKING: c_int = libc::MSG_DONTWAIT;

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(last: u8) -> (UdpSocket, UdpSocket, SocketAddr) {
        let at = |last| SocketAddrV4::new(Ipv4Addr::new(127, 0, 3, last), 4791);
        let target = at(last + 1);
        let sender = UdpSocket::bind(at(last), 1 << 20).unwrap();
        (sender, UdpSocket::bind(target, 1 << 20).unwrap(), target.into())
    }

    /// Waits for a burst, in turns of the scheduler; loopback loses nothing.
    fn receive(ring: &mut ReceiveRing, socket: &UdpSocket) -> usize {
        loop {
            match ring.receive(socket).unwrap() {
                0 => std::thread::yield_now(),
                count => return count,
            }
        }
    }

    /// If this fails, every packet costs a trip through the stack and throughput is a tenth.
    #[test]
    fn a_run_is_sent_and_received_whole() {
        let (sender, receiver, target) = pair(1);
        let bytes: Vec<u8> = (0..10_250_u32).map(|n| n.to_le_bytes()[0]).collect();
        let run = Departing { target, bytes: &bytes, segment_len: 1000 };
        let short = Departing { target, bytes: &[1, 2, 3], segment_len: 3 };
        assert_eq!(sender.send([run, short].into_iter()), Ok(2));
        let mut ring = ReceiveRing::new(8);
        assert_eq!(receive(&mut ring, &receiver), 2);
        let arrived = ring.arrived(0);
        assert_eq!(arrived.bytes, bytes);
        assert_eq!(arrived.segment_len, 1000);
        assert_eq!(*arrived.source.ip(), Ipv4Addr::new(127, 0, 3, 1));
        let arrived = ring.arrived(1);
        assert_eq!((arrived.bytes, arrived.segment_len), (&[1, 2, 3][..], 3));
        assert_eq!(ring.receive(&receiver).unwrap(), 0, "nothing is not an error");
    }

    #[test]
    fn what_cannot_be_sent_says_why() {
        let (sender, _receiver, target) = pair(11);
        let bytes = [0; 65_000];
        let many = Departing { target, bytes: &bytes, segment_len: 100 };
        assert_eq!(sender.send([many].into_iter()), Err(Refusal::Unable), "650 segments");
        let multicast = SocketAddr::from(([255, 255, 255, 255], 4791));
        let nowhere = Departing { target: multicast, bytes: &[1], segment_len: 1 };
        assert_eq!(sender.send([nowhere].into_iter()), Err(Refusal::Unreachable));
    }

    #[test]
    fn the_kernel_grants_some_buffer() {
        let (sender, ..) = pair(21);
        assert!(sender.receive_buffer().unwrap() >= 65_536);
    }
}
