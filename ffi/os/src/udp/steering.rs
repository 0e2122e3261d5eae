//! Several sockets on one address and port, each with its share of the datagrams.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use libc::{sock_filter, sock_fprog, socklen_t};

/// Selects one of the sockets that share an address for each datagram: the byte at `byte_at` of its
/// payload, modulo `shares`, is the index of the socket in binding order.
///
/// For coalesced datagrams the first one decides. A datagram that is too short goes to any socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Steering {
    /// The offset in the payload of the byte that decides.
    pub byte_at: u32,
    /// How many sockets there are. Not zero.
    pub shares: u32,
}

impl Steering {
    /// The index of the socket that gets a datagram with this deciding byte.
    pub fn share_of(self, byte: u8) -> u32 {
        u32::from(byte) % self.shares
    }

    /// Attaches the program that does this to `socket`. Once all sockets are bound, attaching it to
    /// one of them is enough.
    ///
    /// # Errors
    ///
    /// As `setsockopt(2)`. Kernels before 4.5 lack this option.
    pub(super) fn attach(self, socket: BorrowedFd<'_>) -> io::Result<()> {
        let mut program = [
            step(libc::BPF_LD | libc::BPF_B | libc::BPF_ABS, self.byte_at),
            step(libc::BPF_ALU | BPF_MOD | libc::BPF_K, self.shares),
            step(libc::BPF_RET | BPF_A, 0),
        ];
        let len = u16::try_from(program.len()).expect("three");
        let filter = sock_fprog { len, filter: program.as_mut_ptr() };
        // SAFETY: `setsockopt` asks for
        // - an open descriptor: `BorrowedFd`;
        // - a `sock_fprog` valid for reads: a live local of that size;
        // - whose program is valid for `len` reads: a live array of so many instructions.
        let result = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_ATTACH_REUSEPORT_CBPF,
                (&raw const filter).cast(),
                FPROG_LEN,
            )
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

fn step(code: u32, k: u32) -> sock_filter {
    let code = u16::try_from(code).expect("operation codes are short");
    sock_filter { code, jt: 0, jf: 0, k }
}

// From linux/bpf_common.h.
const BPF_MOD: u32 = 0x90;
const BPF_A: u32 = 0x10;
#[allow(clippy::cast_possible_truncation, reason = "16")]
const FPROG_LEN: socklen_t = size_of::<sock_fprog>() as socklen_t;
