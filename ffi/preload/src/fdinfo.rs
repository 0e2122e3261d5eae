//! What the kernel tells of an epoll descriptor: what is registered there, and how.

use std::io::Write as _;
use std::os::fd::{BorrowedFd, RawFd};

use rustix::fs::{Mode, OFlags, fstat, open};
use rustix::io::read;

use crate::epoll::Registration;
use crate::sys::Own;

/// How the socket at the number `fd` is registered in this epoll set. None if it is not, or if the
/// kernel does not tell.
///
/// That takes 10 microseconds, and one more for each registration of the whole set.
pub(crate) fn registration(
    epoll: RawFd,
    fd: RawFd,
    socket: BorrowedFd<'_>,
) -> Option<Registration> {
    let inode = fstat(socket).ok()?.st_ino;
    let mut path = [0; PATH_MAX];
    // The thread's own: what the process has is gone when its first thread has ended.
    write!(path.as_mut_slice(), "/proc/thread-self/fdinfo/{epoll}\0").ok()?;
    let path = std::ffi::CStr::from_bytes_until_nul(&path).ok()?;
    let info = Own::new(open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?);
    let is_ours = |line: &Line| line.fd == fd && line.inode == inode;
    let (mut room, mut kept) = ([0; ROOM], 0);
    loop {
        // A line that has no room ends it, too: then nothing more is read.
        let length = kept + read(&info, &mut room[kept..]).ok().filter(|count| *count > 0)?;
        let lines = &room[..length];
        let whole = lines.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        let found = lines[..whole].split(|byte| *byte == b'\n').filter_map(Line::parse);
        if let Some(Line { events, data, .. }) = { found }.find(is_ours) {
            return Some(Registration { epoll, events, data });
        }
        room.copy_within(whole..length, 0);
        kept = length - whole;
    }
}

/// Room for the path, with any number.
const PATH_MAX: usize = 48;
/// So much is read at a time. Signal handlers may have small stacks.
const ROOM: usize = 2048;

/// One registration.
#[derive(Debug, PartialEq, Eq)]
struct Line {
    /// The number by which it was made. What has that number now may be another file.
    fd: RawFd,
    events: u32,
    data: u64,
    /// That of the file for which it was made.
    inode: u64,
}

impl Line {
    /// `tfd:        5 events:       19 data:               7b  pos:0 ino:2f sdev:9`
    fn parse(line: &[u8]) -> Option<Self> {
        let mut words = std::str::from_utf8(line).ok()?.split_ascii_whitespace();
        let mut after = |name| words.next().filter(|word| *word == name).and(words.next());
        let fd = after("tfd:")?.parse().ok()?;
        let events = u32::from_str_radix(after("events:")?, 16).ok()?;
        let data = u64::from_str_radix(after("data:")?, 16).ok()?;
        let inode = words.find_map(|word| word.strip_prefix("ino:"))?;
        Some(Self { fd, events, data, inode: u64::from_str_radix(inode, 16).ok()? })
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd as _, AsRawFd as _};

    use rustix::event::epoll::{CreateFlags, EventData, EventFlags, add, create};
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn a_line_is_read_as_the_kernel_writes_it() {
        let line = b"tfd:      147 events: 40000000 data: ffffffff00000093  pos:0 ino:2b51c sdev:9";
        let wanted = Line { fd: 147, events: 1 << 30, data: 0xffff_ffff_0000_0093, inode: 0x2b51c };
        assert_eq!(Line::parse(line), Some(wanted));
        for length in 0..line.len() - b"2b51c sdev:9".len() {
            assert_eq!(Line::parse(&line[..length]), None);
        }
        assert_eq!(Line::parse(b"flags:\t02000002"), None);
        assert_eq!(Line::parse(b"tfd: x events: 1 data: 1 pos:0 ino:1 sdev:9"), None);
    }

    /// Their lines are longer than what is read at a time.
    #[test]
    fn each_of_many_is_found() {
        let all: Vec<_> = (0..100).map(|_| eventfd(0, EventfdFlags::CLOEXEC).unwrap()).collect();
        let (set, other) = (create(CreateFlags::CLOEXEC).unwrap(), &all[99]);
        for (data, one) in (7..).zip(&all[..99]) {
            add(&set, one, EventData::new_u64(data), EventFlags::IN).unwrap();
        }
        let epoll = set.as_raw_fd();
        let find = |fd, one: &std::os::fd::OwnedFd| registration(epoll, fd, one.as_fd());
        for (data, one) in (7..).zip(&all[..99]) {
            // All of them are one anonymous inode, so the number tells them apart.
            let found = find(one.as_raw_fd(), one).unwrap();
            assert_eq!((found.epoll, found.data, found.events & 0x7), (epoll, data, 1));
        }
        assert_eq!(find(other.as_raw_fd(), other), None);
        let first = all[0].as_raw_fd();
        assert_eq!(registration(epoll, first, set.as_fd()), find(first, &all[0]), "an inode alike");
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(registration(epoll, first, file.as_fd()), None, "another file");
        assert_eq!(registration(file.as_raw_fd(), first, all[0].as_fd()), None, "no epoll set");
        assert_eq!(registration(-1, first, all[0].as_fd()), None);
    }
}
