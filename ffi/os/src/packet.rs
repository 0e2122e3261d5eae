//! Packet sockets: whole frames of an Ethernet device, beside whatever the kernel does with them.
//!
//! A train of UDP datagrams is one frame here, as long as it stays in this host: a header in front
//! of it (`virtio_net_hdr`) says where the kernel, or the NIC, cuts it.

use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use libc::{c_int, iovec, mmsghdr, msghdr, sock_filter, sock_fprog, socklen_t};

use crate::option;
use crate::udp::Unsent;

/// A nonblocking socket for some frames of one device. It does not see what this host sends.
#[derive(Debug)]
pub struct PacketSocket {
    descriptor: OwnedFd,
}

/// Which frames come to a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carries {
    /// Those that carry UDP to this port, and those by which neighbours find each other (ARP, and
    /// ICMPv6).
    Udp(u16),
    /// Those of this Ethernet type.
    Type(u16),
}

/// A frame to send: headers, and the datagrams behind them, all of one size but the last, which may
/// be shorter.
#[derive(Clone, Copy, Debug)]
pub struct Departing<'a> {
    /// The headers of Ethernet, IP and UDP, as if the bytes were one datagram. The checksum of UDP
    /// is that of the pseudo-header only: the kernel, or the NIC, completes it.
    pub headers: &'a [u8],
    /// The datagrams, one behind the other, without headers.
    pub bytes: &'a [u8],
    /// The size of all but the last. `None` if this is no UDP, but a frame to send as it is.
    pub segment_len: Option<usize>,
}

/// A frame of the last burst.
#[derive(Clone, Copy, Debug)]
pub struct Arrived<'a> {
    /// The frame, headers included.
    pub bytes: &'a [u8],
    /// The size of the datagrams in it, except for the last, if it is a train of several.
    pub segment_len: Option<usize>,
}

/// Buffers for bursts of frames.
#[derive(Debug)]
pub struct FrameRing {
    buffers: Vec<Buffer>,
}

/// The memory that the kernel fills for one frame.
#[derive(Debug)]
struct Buffer {
    header: VirtioHeader,
    bytes: Box<[u8]>,
    len: usize,
}

/// What is in front of each frame: `virtio_net_hdr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct VirtioHeader {
    flags: u8,
    gso_type: u8,
    header_len: u16,
    segment_len: u16,
    sum_start: u16,
    sum_offset: u16,
}

const _: () = assert!(size_of::<VirtioHeader>() == VIRTIO_LEN);

impl PacketSocket {
    /// A socket on the device with this index, for such frames. Requests buffers of `buffer_len`
    /// bytes for each direction; the kernel may grant less.
    ///
    /// # Errors
    ///
    /// As `socket(2)`, `setsockopt(2)` and `bind(2)`: without `CAP_NET_RAW` there is no such
    /// socket.
    pub fn open(index: u32, carries: Carries, buffer_len: usize) -> io::Result<Self> {
        let kind = libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        // Of no protocol yet: nothing may come before the filter is there.
        // SAFETY: `socket` asks for nothing that could be violated.
        let descriptor = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
        check(descriptor)?;
        // SAFETY: `from_raw_fd` asks for a descriptor that is open and nobody else's: just made.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        let socket = Self { descriptor };
        match carries {
            Carries::Udp(port) => attach(socket.as_fd(), &mut filter(port))?,
            Carries::Type(kind) => attach(socket.as_fd(), &mut filter_type(kind))?,
        }
        option::set(socket.as_fd(), libc::SOL_PACKET, PACKET_VNET_HDR, 1)?;
        option::set(socket.as_fd(), libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)?;
        let len = c_int::try_from(buffer_len).unwrap_or(c_int::MAX);
        for (force, modest) in
            [(libc::SO_RCVBUFFORCE, libc::SO_RCVBUF), (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF)]
        {
            option::set(socket.as_fd(), libc::SOL_SOCKET, force, len)
                .or_else(|_| option::set(socket.as_fd(), libc::SOL_SOCKET, modest, len))?;
        }
        socket.bind(index)?;
        Ok(socket)
    }

    fn bind(&self, index: u32) -> io::Result<()> {
        // SAFETY: `sockaddr_ll` is integers, all of which may be zero.
        let mut name: libc::sockaddr_ll = unsafe { mem::zeroed() };
        name.sll_family = u16::try_from(libc::AF_PACKET).expect("a short number");
        name.sll_protocol = ALL_PROTOCOLS.to_be();
        name.sll_ifindex = c_int::try_from(index).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: `bind` asks for an open descriptor and an address valid for its length: a live
        // local of that size.
        let result =
            unsafe { libc::bind(self.descriptor.as_raw_fd(), (&raw const name).cast(), NAME_LEN) };
        check(result)
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

    /// Sends `departing`, as far as one system call can, and returns how many frames were sent.
    ///
    /// # Errors
    ///
    /// When the first was not sent.
    ///
    /// # Panics
    ///
    /// If the length of a segment is zero or does not fit 16 bits, or there are no headers of UDP.
    pub fn send<'a>(
        &self,
        departing: impl Iterator<Item = Departing<'a>>,
    ) -> Result<usize, Unsent> {
        let mut headers = [VirtioHeader::default(); SEND_BURST];
        let mut vectors = [[NO_VECTOR; 3]; SEND_BURST];
        let mut messages = [NO_MESSAGE; SEND_BURST];
        let mut count = 0;
        for departing in departing.take(SEND_BURST) {
            if let Some(segment_len) = departing.segment_len {
                let len = departing.bytes.len();
                headers[count] = VirtioHeader::of_udp(departing.headers, len, segment_len);
            }
            let header = (&raw mut headers[count]).cast();
            vectors[count] = [
                iovec { iov_base: header, iov_len: VIRTIO_LEN },
                vector(departing.headers),
                vector(departing.bytes),
            ];
            messages[count].msg_hdr.msg_iov = vectors[count].as_mut_ptr();
            messages[count].msg_hdr.msg_iovlen = 3;
            count += 1;
        }
        let burst = u32::try_from(count).expect("a burst is short");
        // SAFETY: `sendmmsg` asks for
        // - an open descriptor: ours;
        // - `burst` headers valid for reads and writes: the first elements of a live array;
        // - that their vectors are valid for reads: elements of live arrays, and the slices of
        //   `departing`, which outlive the call. Sending writes to none of them.
        let sent = unsafe {
            libc::sendmmsg(
                self.descriptor.as_raw_fd(),
                messages.as_mut_ptr(),
                burst,
                libc::MSG_DONTWAIT,
            )
        };
        usize::try_from(sent).map_err(|_| Unsent::from(io::Error::last_os_error()))
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl VirtioHeader {
    /// A frame of `len` bytes behind `headers`, which is cut into datagrams of `segment_len` bytes.
    fn of_udp(headers: &[u8], len: usize, segment_len: usize) -> Self {
        assert!(segment_len > 0 && headers.len() > UDP_LEN);
        let short = |len: usize| u16::try_from(len).expect("headers and packets are short");
        let is_train = len > segment_len;
        Self {
            flags: NEEDS_SUM,
            gso_type: if is_train { GSO_UDP } else { 0 },
            header_len: short(headers.len()),
            segment_len: if is_train { short(segment_len) } else { 0 },
            sum_start: short(headers.len() - UDP_LEN),
            sum_offset: UDP_SUM_AT,
        }
    }
}

impl FrameRing {
    /// Allocates buffers for bursts of up to `count` frames.
    ///
    /// # Panics
    ///
    /// If `count` is zero or more than 32.
    pub fn new(count: usize) -> Self {
        assert!(0 < count && count <= RECEIVE_BURST);
        let buffer =
            || Buffer { header: VirtioHeader::default(), bytes: vec![0; FRAME_MAX].into(), len: 0 };
        Self { buffers: (0..count).map(|_| buffer()).collect() }
    }

    /// Receives at most one burst, which replaces the previous one. Returns the number of its
    /// frames, which is zero if nothing has arrived.
    ///
    /// # Errors
    ///
    /// As `recvmmsg(2)`: `ENETDOWN` once when the device goes down.
    pub fn receive(&mut self, socket: &PacketSocket) -> io::Result<usize> {
        let mut vectors = [[NO_VECTOR; 2]; RECEIVE_BURST];
        let mut messages = [NO_MESSAGE; RECEIVE_BURST];
        for (index, buffer) in self.buffers.iter_mut().enumerate() {
            vectors[index] = [
                iovec { iov_base: (&raw mut buffer.header).cast(), iov_len: VIRTIO_LEN },
                iovec { iov_base: buffer.bytes.as_mut_ptr().cast(), iov_len: buffer.bytes.len() },
            ];
            messages[index].msg_hdr.msg_iov = vectors[index].as_mut_ptr();
            messages[index].msg_hdr.msg_iovlen = 2;
        }
        let burst = u32::try_from(self.buffers.len()).expect("a burst is short");
        // SAFETY: `recvmmsg` asks for
        // - an open descriptor: `socket` is one;
        // - `burst` headers valid for reads and writes: as many of a live array were filled in;
        // - that their vectors are valid for writes of the lengths in them: headers, for which any
        //   bytes are a value, and buffers that `self` owns and `&mut self` guards;
        // - no timeout, or a valid one: null is none.
        let count = unsafe {
            libc::recvmmsg(
                socket.descriptor.as_raw_fd(),
                messages.as_mut_ptr(),
                burst,
                libc::MSG_DONTWAIT,
                std::ptr::null_mut(),
            )
        };
        let Ok(count) = usize::try_from(count) else {
            let error = io::Error::last_os_error();
            let nothing = error.kind() == io::ErrorKind::WouldBlock;
            return if nothing { Ok(0) } else { Err(error) };
        };
        for (buffer, message) in self.buffers[..count].iter_mut().zip(&messages) {
            buffer.len = (message.msg_len as usize).saturating_sub(VIRTIO_LEN);
        }
        Ok(count)
    }

    /// Returns one frame of the last burst.
    ///
    /// # Panics
    ///
    /// If `index` is not below the number of buffers.
    pub fn arrived(&self, index: usize) -> Arrived<'_> {
        let Buffer { header, bytes, len } = &self.buffers[index];
        let is_train = header.gso_type == GSO_UDP && header.segment_len > 0;
        Arrived {
            bytes: &bytes[..*len],
            segment_len: is_train.then_some(usize::from(header.segment_len)),
        }
    }
}

/// Makes the kernel drop all that `socket` receives, before it costs anything.
///
/// # Errors
///
/// As `setsockopt(2)`.
pub fn drop_all(socket: BorrowedFd<'_>) -> io::Result<()> {
    attach(socket, &mut [step(libc::BPF_RET | libc::BPF_K, 0)])
}

fn attach(socket: BorrowedFd<'_>, program: &mut [sock_filter]) -> io::Result<()> {
    let len = u16::try_from(program.len()).expect("a short program");
    let filter = sock_fprog { len, filter: program.as_mut_ptr() };
    // SAFETY: `setsockopt` asks for
    // - an open descriptor: `BorrowedFd`;
    // - a `sock_fprog` valid for reads: a live local of that size;
    // - whose program is valid for `len` reads: a live slice of so many instructions.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const filter).cast(),
            FPROG_LEN,
        )
    };
    check(result)
}

/// Takes ARP, ICMPv6, and UDP to `port` that is not a later part of a datagram, outside of VLANs:
/// those have devices of their own.
fn filter(port: u16) -> [sock_filter; 20] {
    const HALF_AT: u32 = libc::BPF_LD | libc::BPF_H | libc::BPF_ABS;
    const BYTE_AT: u32 = libc::BPF_LD | libc::BPF_B | libc::BPF_ABS;
    const EQUALS: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    const HAS_BITS: u32 = libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K;
    const IPV4_HEADER_LEN: u32 = libc::BPF_LDX | libc::BPF_B | BPF_MSH;
    const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
    let port = port.into();
    let jump = |code: u32, k: u32, jt: u8, jf: u8| sock_filter { jt, jf, ..step(code, k) };
    [
        /* -2 */ step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, VLAN_TAG_PRESENT),
        /* -1 */ jump(EQUALS, 0, 0, 17),
        /*  0 */ step(HALF_AT, 12),
        /*  1 */ jump(EQUALS, 0x0806, 14, 0), // ARP: take it
        /*  2 */ jump(EQUALS, 0x0800, 1, 0),
        /*  3 */ jump(EQUALS, 0x86dd, 7, 13), // neither: drop it
        /*  4 */ step(BYTE_AT, 23),
        /*  5 */ jump(EQUALS, 17, 0, 11),
        /*  6 */ step(HALF_AT, 20),
        /*  7 */ jump(HAS_BITS, 0x1fff, 9, 0), // a later fragment
        /*  8 */ step(IPV4_HEADER_LEN, 14),
        /*  9 */ step(libc::BPF_LD | libc::BPF_H | libc::BPF_IND, 16),
        /* 10 */ jump(EQUALS, port, 5, 6),
        /* 11 */ step(BYTE_AT, 20),
        /* 12 */ jump(EQUALS, 58, 3, 0),
        /* 13 */ jump(EQUALS, 17, 0, 3),
        /* 14 */ step(HALF_AT, 56),
        /* 15 */ jump(EQUALS, port, 0, 1),
        /* 16 */ step(RETURN, u32::MAX),
        /* 17 */ step(RETURN, 0),
    ]
}

/// Takes frames of one Ethernet type, outside of VLANs.
fn filter_type(kind: u16) -> [sock_filter; 6] {
    const EQUALS: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
    let jump = |k: u32, jt: u8, jf: u8| sock_filter { jt, jf, ..step(EQUALS, k) };
    [
        /* 0 */ step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, VLAN_TAG_PRESENT),
        /* 1 */ jump(0, 0, 3),
        /* 2 */ step(libc::BPF_LD | libc::BPF_H | libc::BPF_ABS, 12),
        /* 3 */ jump(kind.into(), 0, 1),
        /* 4 */ step(RETURN, u32::MAX),
        /* 5 */ step(RETURN, 0),
    ]
}

fn step(code: u32, k: u32) -> sock_filter {
    let code = u16::try_from(code).expect("operation codes are short");
    sock_filter { code, jt: 0, jf: 0, k }
}

fn vector(bytes: &[u8]) -> iovec {
    iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

const NO_VECTOR: iovec = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
// SAFETY: `msghdr` is pointers and integers (and private padding on some targets), all of which may
// be zero.
const NO_HEADER: msghdr = unsafe { mem::zeroed() };
const NO_MESSAGE: mmsghdr = mmsghdr { msg_hdr: NO_HEADER, msg_len: 0 };

/// The most frames that one system call sends.
const SEND_BURST: usize = 16;
/// The most frames that one system call receives.
const RECEIVE_BURST: usize = 32;
/// The longest train with its headers, rounded up.
const FRAME_MAX: usize = 65_536 + 64;
const VIRTIO_LEN: usize = 10;
const UDP_LEN: usize = 8;
/// Where the checksum is in the header of UDP.
const UDP_SUM_AT: u16 = 6;
#[allow(clippy::cast_possible_truncation, reason = "20")]
const NAME_LEN: socklen_t = size_of::<libc::sockaddr_ll>() as socklen_t;
#[allow(clippy::cast_possible_truncation, reason = "16")]
const FPROG_LEN: socklen_t = size_of::<sock_fprog>() as socklen_t;
// From linux/if_packet.h, linux/if_ether.h, linux/virtio_net.h, linux/bpf_common.h, linux/filter.h.
const PACKET_VNET_HDR: c_int = 15;
const PACKET_IGNORE_OUTGOING: c_int = 23;
const ALL_PROTOCOLS: u16 = 0x0003;
const NEEDS_SUM: u8 = 1;
const GSO_UDP: u8 = 5;
const BPF_MSH: u32 = 0xa0;
/// An address that means: whether the frame came with a VLAN tag, which is not among its bytes.
const VLAN_TAG_PRESENT: u32 = 0xffff_f000 + 48;

#[cfg(test)]
mod tests {
    use super::*;

    /// What the program of [`filter`] makes of a frame.
    fn takes(program: &[sock_filter], is_tagged: bool, frame: &[u8]) -> bool {
        let half = |at: usize| u32::from(u16::from_be_bytes([frame[at], frame[at + 1]]));
        let (mut at, mut a, mut x) = (0, 0, 0);
        loop {
            let sock_filter { code, jt, jf, k } = program[at];
            at += 1;
            let k_at = usize::try_from(k).unwrap();
            match code {
                0x20 if k == VLAN_TAG_PRESENT => a = is_tagged.into(),
                0x28 => a = half(k_at),
                0x30 => a = frame[k_at].into(),
                0x48 => a = half(x + k_at),
                0xb1 => x = usize::from(frame[k_at] & 0xf) * 4,
                0x15 => at += usize::from(if a == k { jt } else { jf }),
                0x45 => at += usize::from(if a & k != 0 { jt } else { jf }),
                0x06 => return k > 0,
                _ => panic!("{code:#x}"),
            }
        }
    }

    #[test]
    fn the_filter_takes_what_is_for_the_port() {
        let program = filter(4791);
        let frame = |kind: [u8; 2], fields: &[(usize, &[u8])]| {
            let mut frame = [0; 100];
            frame[12..14].copy_from_slice(&kind);
            for (at, bytes) in fields {
                frame[*at..at + bytes.len()].copy_from_slice(bytes);
            }
            let taken = takes(&program, false, &frame);
            assert!(!takes(&program, true, &frame), "another network");
            taken
        };
        let port = 4791_u16.to_be_bytes();
        let (arp, ipv4, ipv6) = ([8, 6], [8, 0], [0x86, 0xdd]);
        assert!(frame(arp, &[]));
        assert!(frame(ipv4, &[(14, &[0x45]), (23, &[17]), (36, &port)]));
        assert!(frame(ipv4, &[(14, &[0x46]), (23, &[17]), (40, &port)]), "options");
        assert!(!frame(ipv4, &[(14, &[0x45]), (23, &[17]), (36, &[0, 53])]), "another port");
        assert!(!frame(ipv4, &[(14, &[0x45]), (23, &[6]), (36, &port)]), "TCP");
        assert!(!frame(ipv4, &[(14, &[0x45]), (20, &[0, 9]), (23, &[17]), (36, &port)]), "a part");
        assert!(frame(ipv6, &[(20, &[17]), (56, &port)]));
        assert!(frame(ipv6, &[(20, &[58])]), "neighbour discovery");
        assert!(!frame(ipv6, &[(20, &[17]), (56, &[0, 53])]));
        assert!(!frame([0x88, 0xcc], &[]));
    }

    #[test]
    fn a_train_says_where_its_checksums_are() {
        let header = VirtioHeader::of_udp(&[0; 42], 1053, 1052);
        assert_eq!((header.sum_start, header.sum_offset, header.flags), (34, 6, NEEDS_SUM));
        assert_eq!((header.gso_type, header.segment_len), (GSO_UDP, 1052));
        let header = VirtioHeader::of_udp(&[0; 62], 1052, 1052);
        assert_eq!((header.gso_type, header.segment_len, header.sum_start), (0, 0, 54));
    }
}
