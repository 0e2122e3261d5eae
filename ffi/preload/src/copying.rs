//! `sendfile` and `splice` where an end is a connection whose bytes go by shared memory: the kernel
//! does not see them, so they are copied.

use std::os::fd::{BorrowedFd, RawFd};

use libc::{c_uint, iovec, ssize_t};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, SeekFrom, fstat, seek};
use rustix::io::{Errno, pread, read, write};

use crate::attach::rings_of;
use crate::ringed::{await_room, many, many_or, receive, send, waits};
use crate::{stream, sys};

/// Bytes of a file, from its position or from `offset`, go to a connection. Returns how many, and
/// how far the offset has come.
pub(crate) fn send_file(
    to: RawFd,
    from: RawFd,
    offset: Option<i64>,
    length: usize,
) -> (ssize_t, Option<i64>) {
    let Some(file) = sys::borrow(from) else { return (sys::fail(libc::EBADF), offset) };
    let start = match offset.map_or_else(
        || seek(file, SeekFrom::Current(0)),
        |at| u64::try_from(at).map_err(|_| Errno::INVAL),
    ) {
        Ok(start) => start,
        Err(_) => return (sys::fail(libc::EINVAL), offset),
    };
    let (result, moved) = send_from(to, file, start, length);
    let end = start + moved;
    if offset.is_none() {
        // The position could be asked for, so it can be set.
        seek(file, SeekFrom::Start(end)).ok();
    }
    (result, offset.map(|_| i64::try_from(end).unwrap_or(i64::MAX)))
}

fn send_from(to: RawFd, file: BorrowedFd<'_>, start: u64, length: usize) -> (ssize_t, u64) {
    let mut room = [0_u8; CHUNK];
    let mut moved = 0_usize;
    while moved < length {
        let part = room.len().min(length - moved);
        let count = match pread(file, &mut room[..part], start + moved as u64) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) => return (many_or(moved, error.raw_os_error()), moved as u64),
        };
        let result = write_stream(to, &room[..count]);
        let Ok(sent) = usize::try_from(result) else {
            return (many_or(moved, sys::errno()), moved as u64);
        };
        moved += sent;
        if sent < count {
            break;
        }
    }
    (many(moved), moved as u64)
}

/// Bytes of a pipe go to a connection, or the reverse.
pub(crate) fn splice(from: RawFd, to: RawFd, length: usize, flags: c_uint) -> ssize_t {
    let (Some(source), Some(target)) = (sys::borrow(from), sys::borrow(to)) else {
        return sys::fail(libc::EBADF);
    };
    match [source, target].map(is_pipe) {
        [true, false] => from_pipe(source, to, length, flags),
        [false, true] => into_pipe(from, target, length, flags),
        [true, true] | [false, false] => sys::fail(libc::EINVAL),
    }
}

/// No more is taken out of the pipe than the ring has room for: it could not be put back.
fn from_pipe(pipe: BorrowedFd<'_>, to: RawFd, length: usize, flags: c_uint) -> ssize_t {
    let (mut bytes, mut moved) = ([0_u8; CHUNK], 0_usize);
    while moved < length {
        let (used, socket) = match rings_of(to) {
            Ok(found) => found,
            Err(error) => return many_or(moved, error),
        };
        let room = usize::try_from(used.rings.room()).unwrap_or(0);
        if room == 0 {
            if moved > 0 {
                break;
            }
            if let Err(error) = await_room(used, socket, to, 0) {
                return sys::fail(error);
            }
            continue;
        }
        drop(used);
        if !is_ready(pipe, PollFlags::IN, moved == 0 && waits_for_pipe(pipe, flags)) {
            return many_or(moved, libc::EAGAIN);
        }
        let part = bytes.len().min(length - moved).min(room);
        let count = match read(pipe, &mut bytes[..part]) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) => return many_or(moved, error.raw_os_error()),
        };
        // Another thread may have filled the room meanwhile. What was taken out must go.
        let mut sent = 0;
        while sent < count {
            let result = write_stream(to, &bytes[sent..count]);
            match (usize::try_from(result), sys::errno()) {
                (Ok(more), _) => sent += more,
                (Err(_), libc::EAGAIN | libc::EINTR) => wait_for_room(to),
                (Err(_), error) => return many_or(moved + sent, error),
            }
        }
        moved += sent;
    }
    many(moved)
}

fn wait_for_room(to: RawFd) {
    if let Some(socket) = sys::borrow(to) {
        is_ready(socket, PollFlags::OUT, true);
    }
}

/// What does not fit into the pipe stays in the ring.
fn into_pipe(from: RawFd, pipe: BorrowedFd<'_>, length: usize, flags: c_uint) -> ssize_t {
    let (mut bytes, mut moved) = ([0_u8; PIPE_BUF], 0_usize);
    while moved < length {
        let later = if moved == 0 { 0 } else { libc::MSG_DONTWAIT };
        let nowait = if flags & libc::SPLICE_F_NONBLOCK == 0 { 0 } else { libc::MSG_DONTWAIT };
        let part = bytes.len().min(length - moved);
        let place = [iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: part }];
        let peek = |flags| {
            // SAFETY: `receive` asks for parts that can be written: it is a part of `bytes`.
            unsafe { receive(from, &place, flags) }
        };
        let seen =
            stream::read(from, part, |more| peek(libc::MSG_PEEK | later | nowait | more), || 0);
        let count = match usize::try_from(seen) {
            Ok(0) => break,
            Ok(count) => count,
            Err(_) => return many_or(moved, sys::errno()),
        };
        // So many bytes at most are written at once or not at all.
        if !is_ready(pipe, PollFlags::OUT, moved == 0 && waits_for_pipe(pipe, flags)) {
            return many_or(moved, libc::EAGAIN);
        }
        let written = match write(pipe, &bytes[..count]) {
            Ok(written) => written,
            Err(error) => return many_or(moved, error.raw_os_error()),
        };
        let drop = [iovec { iov_base: std::ptr::null_mut(), iov_len: written }];
        // SAFETY: `receive` asks for nothing with MSG_TRUNC.
        unsafe { receive(from, &drop, libc::MSG_TRUNC | libc::MSG_DONTWAIT) };
        moved += written;
    }
    many(moved)
}

/// Writes to a connection, which may say that it is over.
fn write_stream(to: RawFd, bytes: &[u8]) -> ssize_t {
    let part = [iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }];
    // SAFETY: `send` asks for parts that can be read: it is a live slice.
    let switched = |more| unsafe { send(to, &part, more) };
    stream::write(to, 0, switched, || sys::fail(libc::EBADF))
}

fn is_pipe(fd: BorrowedFd<'_>) -> bool {
    fstat(fd).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Fifo)
}

fn waits_for_pipe(pipe: BorrowedFd<'_>, flags: c_uint) -> bool {
    flags & libc::SPLICE_F_NONBLOCK == 0 && waits(pipe, 0)
}

/// Whether a pipe is ready, after waiting for it.
fn is_ready(pipe: BorrowedFd<'_>, events: PollFlags, waits: bool) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(pipe, events)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    // After a signal nothing is ready, and the caller says so.
    poll(&mut fds, if waits { None } else { Some(&at_once) }).is_ok_and(|ready| ready > 0)
}

/// On the stack of the program.
const CHUNK: usize = 16_384;
/// A pipe that is writable takes so many bytes at once.
const PIPE_BUF: usize = 4096;
