//! Descriptors that a process has not made itself: from before `exec`, or from another process.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd as _, RawFd};

use rustix::fs::{Mode, OFlags, RawDir, open};
use rustix::net::sockopt::socket_acceptconn;

use crate::accept::is_chosen;
use crate::connect::is_tcp;
use crate::epoll::REGISTRATIONS;
use crate::sys::{self, Own};
use crate::table::{Flag, Kind, TABLE};
use crate::{name, ringed};

/// Finds out what a descriptor is.
pub(crate) fn adopt(fd: RawFd) {
    let Some(socket) = sys::borrow(fd) else { return };
    REGISTRATIONS.clear(fd);
    if let Some(name) = name::of(socket) {
        TABLE.set(fd, Kind::Switched);
        if name.rings {
            // The gateway is asked for them when they are needed.
            TABLE.raise(fd, Flag::Ringed);
            TABLE.set_buffers(fd, 0);
            ringed::note_low_water(fd);
        }
    } else if socket_acceptconn(socket) == Ok(true) && is_tcp(socket) && is_chosen(socket) {
        TABLE.set(fd, Kind::Listening);
        TABLE.set_due(fd, 0);
    } else {
        TABLE.forget(fd);
    }
}

/// Those that were there before this program.
pub(crate) fn adopt_inherited() {
    if each_open(adopt).is_err() {
        // Without that file system: most have the lowest numbers.
        (0..LOWEST).for_each(adopt);
    }
}

/// Calls `act` for all descriptors that are open. Uses no heap.
fn each_open(act: impl Fn(RawFd)) -> rustix::io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = Own::new(open("/proc/self/fd", flags, Mode::empty())?);
    let mut room = [MaybeUninit::uninit(); 2048];
    let mut entries = RawDir::new(folder.as_fd(), &mut room);
    while let Some(entry) = entries.next() {
        let number = entry?.file_name().to_str().ok().and_then(|name| name.parse().ok());
        if let Some(fd) = number.filter(|fd| *fd != folder.as_fd().as_raw_fd()) {
            act(fd);
        }
    }
    Ok(())
}

const LOWEST: RawFd = 256;

/// The descriptors in the control messages of `recvmsg`.
pub(crate) fn rights(mut control: &[u8]) -> impl Iterator<Item = RawFd> {
    let messages = std::iter::from_fn(move || {
        let length = usize::from_ne_bytes(*control.first_chunk()?);
        let level = i32::from_ne_bytes(*control.get(8..)?.first_chunk()?);
        let kind = i32::from_ne_bytes(*control.get(12..)?.first_chunk()?);
        let message = control.get(HEADER..length)?;
        control = control.get(length.next_multiple_of(HEADER / 2)..).unwrap_or_default();
        let are_rights = (level, kind) == (libc::SOL_SOCKET, libc::SCM_RIGHTS);
        Some(if are_rights { message } else { &[] })
    });
    messages.flat_map(|message| {
        message
            .chunks_exact(4)
            .filter_map(|fd| fd.first_chunk().map(|fd| RawFd::from_ne_bytes(*fd)))
    })
}

/// Length, level and type.
const HEADER: usize = size_of::<libc::cmsghdr>();
const _: () = assert!(HEADER == 16, "as it is on every 64-bit Linux");

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use rustix::net::{SocketAddrUnix, bind};
    use smcgate_door::Name;

    use super::*;

    fn message(level: i32, kind: i32, content: &[u8]) -> Vec<u8> {
        let mut bytes = (HEADER + content.len()).to_ne_bytes().to_vec();
        bytes.extend(level.to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(content);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    }

    #[test]
    fn descriptors_are_found_among_other_messages() {
        let fds = [7_i32, 9].map(i32::to_ne_bytes).concat();
        let one = message(libc::SOL_SOCKET, libc::SCM_RIGHTS, &fds[..4]);
        let other = message(libc::SOL_SOCKET, libc::SCM_CREDENTIALS, &[5; 12]);
        let two = message(libc::SOL_SOCKET, libc::SCM_RIGHTS, &fds);
        let all = [one, other, two].concat();
        assert_eq!(rights(&all).collect::<Vec<_>>(), [7, 7, 9]);
        for length in 0..all.len() {
            assert!(rights(&all[..length]).count() < 3);
        }
        assert_eq!(rights(&message(0, 0, &[])[..8]).count(), 0);
        let lies = [usize::MAX.to_ne_bytes().as_slice(), &[0; 24]].concat();
        assert_eq!(rights(&lies).count(), 0);
    }

    #[test]
    fn what_is_not_ours_is_forgotten() {
        let file = std::fs::File::open("/dev/null").unwrap();
        // Nobody has said that listening sockets are ours.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        for fd in [file.as_raw_fd(), listener.as_raw_fd()] {
            TABLE.set(fd, Kind::Switched);
            adopt(fd);
            assert_eq!(TABLE.of(fd).kind(), Kind::Other);
        }
    }

    #[test]
    fn a_switched_socket_from_before_is_known() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let address = "127.0.0.1:1".parse().unwrap();
        let connection = u64::from(std::process::id()) << 32 | 99;
        let name = Name { connection, local: address, peer: address, rings: false }.encode();
        bind(&ours, &SocketAddrUnix::new_abstract_name(&name[1..]).unwrap()).unwrap();
        adopt(ours.as_raw_fd());
        assert_eq!(TABLE.of(ours.as_raw_fd()).kind(), Kind::Switched);
        TABLE.forget(ours.as_raw_fd());
    }
}
