//! The directory in which NICs meet, and the addresses that they have there.
//!
//! ```text
//!   GID   | fd | hash of directory and form: 56 bits | random: 48 bits | instance: 16 bits |
//!   MAC   | 02 | the first 40 bits of that hash |
//!   mark  | instance: 16 bits | MAC |
//! ```
//!
//! A GID has the form of an IPv6 address, and this is one of those that everybody may make up for
//! use at home (RFC 4193). The first half is the same for all NICs of one directory of one host,
//! and for no others: containers see the same device and inode for a directory that they share, and
//! all of a host see the same boot. It depends on the form of messages, too: processes that would
//! not understand each other, as an older version, are far from each other, and do not try. The
//! second half is the NIC's own. Its instance is that of no other NIC in the directory, and the
//! name of its socket.
//!
//! The mark has the form that RFC 7609 gives to a peer id, an instance and the MAC address of a NIC
//! (A.2.1). So whoever is told the mark as a peer id learns whether that peer is near, before any
//! NIC was chosen.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;

use rustix::fs::{CWD, Mode, OFlags, RenameFlags, fstat, open, renameat_with, stat};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use smcr_proto::{Gid, MacAddress};

use super::doubtful::Doubtful;
use super::wire::FORM;

/// An open directory, and the half of a GID that stands for it.
#[derive(Debug)]
pub(super) struct Directory {
    /// The directory itself, whatever its path is by now.
    handle: OwnedFd,
    prefix: [u8; 8],
}

impl Directory {
    /// Opens a directory, and removes the sockets of NICs that have ended without doing so.
    pub(super) fn open(path: &str) -> io::Result<Self> {
        Self::open_for(path, FORM)
    }

    /// The same for processes whose messages have this form.
    fn open_for(path: &str, form: u32) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let handle = open(path, flags, Mode::empty())?;
        let state = fstat(&handle)?;
        let boot = fs::read(BOOT)?;
        let [device, inode] = [state.st_dev, state.st_ino].map(u64::to_le_bytes);
        let mut prefix = fnv(&[&boot, &device, &inode, &form.to_le_bytes()]).to_be_bytes();
        prefix[0] = LOCAL;
        let directory = Self { handle, prefix };
        directory.sweep();
        Ok(directory)
    }

    /// An address that no other NIC has.
    pub(super) fn new_gid(&self) -> io::Result<Gid> {
        let mut gid = [0; 16];
        let (prefix, own) = gid.split_at_mut(8);
        prefix.copy_from_slice(&self.prefix);
        getrandom::fill(own).map_err(|_| io::ErrorKind::Other)?;
        Ok(Gid(gid))
    }

    /// Whether a NIC with this address is in this directory now.
    pub(super) fn has(&self, gid: Gid) -> bool {
        gid.0[..8] == self.prefix && stat(self.path(&name_of(gid))).is_ok()
    }

    /// Whether a NIC with this mark is in this directory now.
    pub(super) fn has_marked(&self, mark: [u8; 8]) -> bool {
        let [first, second, mac @ ..] = mark;
        let mut gid = [0; 16];
        gid[..8].copy_from_slice(&self.prefix);
        gid[14..].copy_from_slice(&[first, second]);
        mac_of(Gid(gid)).0 == mac && self.has(Gid(gid))
    }

    /// A socket to which those who look for `gid` connect.
    ///
    /// # Errors
    ///
    /// `EEXIST` if a NIC of the same instance is there. Another address may be free.
    pub(super) fn listen(&self, gid: Gid) -> io::Result<OwnedFd> {
        let socket = new_socket()?;
        // Until it listens, others would take it for one that was left behind.
        let [.., a, b, c, d, e, f, g, h] = gid.0;
        let own = u64::from_be_bytes([a, b, c, d, e, f, g, h]);
        let unfinished = self.path(&format!("{UNFINISHED}{own:016x}"));
        bind(&socket, &SocketAddrUnix::new(&unfinished)?)?;
        let done = listen(&socket, BACKLOG).and_then(|()| {
            let done = self.path(&name_of(gid));
            renameat_with(CWD, &unfinished, CWD, &done, RenameFlags::NOREPLACE)
        });
        if done.is_err() {
            // Nobody looks for it there.
            let _ = fs::remove_file(&unfinished);
        }
        Ok(done.map(|()| socket)?)
    }

    /// Connects to the NIC with this address.
    ///
    /// # Errors
    ///
    /// `AGAIN` if too many others do the same. Everything else means that there is no such NIC.
    pub(super) fn call(&self, gid: Gid) -> Result<OwnedFd, Errno> {
        let socket = new_socket()?;
        connect(&socket, &SocketAddrUnix::new(self.path(&name_of(gid)))?)?;
        Ok(socket)
    }

    /// Removes the socket of `gid`.
    pub(super) fn remove(&self, gid: Gid) {
        // It may be gone already, with the whole directory.
        let _ = fs::remove_file(self.path(&name_of(gid)));
    }

    /// Removes sockets on which nobody listens any more.
    fn sweep(&self) {
        let Ok(entries) = fs::read_dir(self.path("")) else { return };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let Some(gid) = name.to_str().and_then(|name| self.gid_of(name)) else { continue };
            match self.call(gid) {
                Err(Errno::CONNREFUSED) => self.remove(gid),
                // Whoever listens there may have sent something already.
                Ok(socket) => drop(Doubtful::from(socket)),
                Err(_) => {}
            }
        }
    }

    /// An address whose socket has this name.
    fn gid_of(&self, name: &str) -> Option<Gid> {
        let digits = name.strip_prefix(PREFIX).filter(|digits| digits.len() == 4)?;
        let instance = u16::from_str_radix(digits, 16).ok()?;
        let mut gid = [0; 16];
        gid[..8].copy_from_slice(&self.prefix);
        gid[14..].copy_from_slice(&instance.to_be_bytes());
        Some(Gid(gid))
    }

    /// A path to what has that name in the directory. It is short however long that of the
    /// directory is: an address has room for 107 characters.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        format!("/proc/self/fd/{}/{name}", self.handle.as_raw_fd()).into()
    }
}

/// The Ethernet address of a NIC that is in no Ethernet. It is that of the directory, and marked as
/// one that no manufacturer has assigned.
pub(super) fn mac_of(gid: Gid) -> MacAddress {
    let [_, a, b, c, d, e, ..] = gid.0;
    MacAddress([2, a, b, c, d, e])
}

/// The mark of a NIC.
pub(super) fn mark_of(gid: Gid) -> [u8; 8] {
    let [.., first, second] = gid.0;
    let MacAddress([a, b, c, d, e, f]) = mac_of(gid);
    [first, second, a, b, c, d, e, f]
}

/// The name of the socket of a NIC.
pub(super) fn name_of(gid: Gid) -> String {
    let [.., first, second] = gid.0;
    format!("{PREFIX}{:04x}", u16::from_be_bytes([first, second]))
}

fn new_socket() -> Result<OwnedFd, Errno> {
    // Messages stay whole, and a peer cannot make us wait.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// The hash called FNV-1a. All builds must find the same one, and nobody gains by a collision who
/// could not connect to the sockets in the directory anyway.
fn fnv(parts: &[&[u8]]) -> u64 {
    let bytes = parts.iter().flat_map(|part| part.iter());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// The kernel's name for the time since it was started.
const BOOT: &str = "/proc/sys/kernel/random/boot_id";
/// The first byte of IPv6 addresses that everybody may make up.
const LOCAL: u8 = 0xfd;
/// What the names of sockets begin with.
const PREFIX: &str = "smcgate-";
/// What the names of sockets begin with on which nobody listens yet.
const UNFINISHED: &str = ".new-";
/// Connections that wait until the worker accepts them, two for each queue pair.
const BACKLOG: i32 = 512;

#[cfg(test)]
mod tests {
    use super::*;

    /// Two processes see that they are near, and nobody else does.
    #[test]
    fn addresses_of_one_directory_begin_alike() {
        let [one, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let open = |place: &tempfile::TempDir| Directory::open(place.path().to_str().unwrap());
        let [first, second, far] = [&one, &one, &other].map(|place| open(place).unwrap());
        let gid = first.new_gid().unwrap();
        assert_ne!(gid, second.new_gid().unwrap());
        assert!(!second.has(gid), "nobody listens there yet");
        let listener = first.listen(gid).unwrap();
        assert!(second.has(gid) && !far.has(gid));
        let mark = mark_of(gid);
        assert!(second.has_marked(mark) && !far.has_marked(mark));
        let other = first.listen(Gid(std::array::from_fn(|at| gid.0[at] ^ u8::from(at == 9))));
        assert_eq!(other.unwrap_err().kind(), io::ErrorKind::AlreadyExists, "one per instance");
        assert!(second.call(gid).is_ok());
        assert_eq!(gid.0[0], 0xfd);
        assert_eq!(gid.0[..8], second.new_gid().unwrap().0[..8]);
        assert_ne!(gid.0[..8], far.new_gid().unwrap().0[..8]);
        assert!(gid.to_ipv4().is_none());
        drop(listener);
        first.remove(gid);
        assert!(!second.has(gid) && !second.has_marked(mark));
    }

    /// A gateway of an older version must not be chosen as a peer, and then not understood.
    #[test]
    fn who_speaks_otherwise_is_far() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().to_str().unwrap();
        let [older, own] = [FORM - 0x100, FORM].map(|form| Directory::open_for(path, form));
        let (older, own) = (older.unwrap(), own.unwrap());
        let [theirs, ours] = [&older, &own].map(|directory| directory.new_gid().unwrap());
        let _both = (older.listen(theirs).unwrap(), own.listen(ours).unwrap());
        assert!(older.has(theirs) && own.has(ours) && own.has_marked(mark_of(ours)));
        assert!(!own.has(theirs) && !own.has_marked(mark_of(theirs)));
        assert!(!older.has(ours) && !older.has_marked(mark_of(ours)));
    }

    /// Who was killed leaves his socket behind. The directory must not fill up with them.
    #[test]
    fn sockets_of_the_dead_are_removed() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().to_str().unwrap();
        let directory = Directory::open(path).unwrap();
        let [dead, alive] = [(); 2].map(|()| directory.new_gid().unwrap());
        drop(directory.listen(dead).unwrap());
        let _listener = directory.listen(alive).unwrap();
        fs::write(place.path().join("smcgate-notes"), "of somebody").unwrap();
        let again = Directory::open(path).unwrap();
        assert!(!again.has(dead) && again.has(alive));
        assert!(place.path().join("smcgate-notes").exists());
    }

    #[test]
    fn a_path_may_be_long() {
        let place = tempfile::tempdir().unwrap();
        let deep = place.path().join("a".repeat(200));
        fs::create_dir(&deep).unwrap();
        let directory = Directory::open(deep.to_str().unwrap()).unwrap();
        let gid = directory.new_gid().unwrap();
        let _listener = directory.listen(gid).unwrap();
        assert!(directory.call(gid).is_ok());
        let missing = Directory::open("/no/such/place").unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}
