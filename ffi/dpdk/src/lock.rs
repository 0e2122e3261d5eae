//! One process has a port at a time. Some drivers would open a port that another process has, and
//! both would then receive a part of its packets. A locked file shows who was first.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::Error;

/// The right to open a port. It ends when this is dropped, or with the process.
#[derive(Debug)]
pub(crate) struct Lock {
    path: PathBuf,
    /// The open file has the lock.
    _file: File,
}

impl Lock {
    /// Takes the port of this name, which [`name`] made.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`], [`Error::Unlockable`].
    pub(crate) fn take(name: &str) -> Result<Self, Error> {
        Self::take_in(folder(), name)
    }

    fn take_in(folder: &Path, name: &str) -> Result<Self, Error> {
        let path = folder.join(name);
        let unlockable =
            |error: io::Error| Error::Unlockable(format!("{}: {error}", path.display()));
        loop {
            let Some(file) = open(&path).map_err(unlockable)? else { continue };
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => return Err(Error::Busy),
                Err(error) => return Err(unlockable(error.into())),
            }
            // Whoever had the lock may have removed the file after we opened it. Then the name is
            // free for another file, and our lock excludes nobody.
            let ours = file.metadata().map_err(unlockable)?.ino();
            if fs::metadata(&path).is_ok_and(|named| named.ino() == ours) {
                return Ok(Self { path, _file: file });
            }
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Still locked: nobody else can have taken it. If it stays, the next process reuses it.
        drop(fs::remove_file(&self.path));
    }
}

/// Opens the file, or makes it; `None` if it came or went meanwhile.
///
/// Whoever may read a file may lock it. So that processes of several users exclude each other, the
/// file of another user is opened without the wish to make it, which the kernel would refuse in a
/// folder that all may write.
fn open(path: &Path) -> io::Result<Option<File>> {
    let flags = libc::O_NOFOLLOW;
    match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        opened => return opened.map(Some),
    }
    match OpenOptions::new().write(true).create_new(true).custom_flags(flags).open(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
        Err(error) => Err(error),
        Ok(file) => {
            // Whatever the umask: others must be able to find out that the port is busy.
            file.set_permissions(Permissions::from_mode(0o644))?;
            Ok(Some(file))
        }
    }
}

/// Where the files are: the same place for all processes, whoever runs them.
fn folder() -> &'static Path {
    let locks = Path::new("/run/lock");
    let all_may_write =
        |folder: &Path| fs::metadata(folder).is_ok_and(|found| found.mode() & 0o002 != 0);
    if all_may_write(locks) { locks } else { Path::new("/tmp") }
}

/// A device as DPDK calls it: a PCI address in full, in small letters. Others stay as they are.
pub(crate) fn canonical(device: &str) -> String {
    let (name, rest) = match device.split_once(',') {
        Some((name, rest)) => (name, format!(",{rest}")),
        None => (device, String::new()),
    };
    match pci_address(name.strip_prefix("pci:").unwrap_or(name)) {
        Some(address) => address + &rest,
        None => device.to_owned(),
    }
}

/// Whether a device, as [`canonical`] writes it, is one of hardware.
pub(crate) fn is_pci(device: &str) -> bool {
    device.split(',').next().is_some_and(|name| pci_address(name).is_some())
}

/// The full form of `03:00.0` or `0000:03:00.0`.
fn pci_address(name: &str) -> Option<String> {
    let (slot, function) = name.rsplit_once('.')?;
    let mut fields = slot.rsplit(':');
    let (device, bus) = (fields.next()?, fields.next()?);
    let domain = fields.next().unwrap_or("0");
    let number = |text: &str, digits: usize| {
        let fits = !text.is_empty() && text.len() <= digits;
        u32::from_str_radix(text, 16).ok().filter(|_| fits && !text.starts_with('+'))
    };
    let (domain, bus) = (number(domain, 8)?, number(bus, 2)?);
    let (device, function) = (number(device, 2)?, number(function, 1)?);
    let is_it = fields.next().is_none() && device < 32 && function < 8;
    is_it.then(|| format!("{domain:04x}:{bus:02x}:{device:02x}.{function}"))
}

/// The name of the file for a device, which names what two devices must not share. Network devices
/// and abstract sockets belong to a network namespace; PCI devices belong to the host.
pub(crate) fn name(device: &str, namespace: u64) -> String {
    let mut parts = device.split(',');
    let driver = parts.next().unwrap_or_default();
    let argument =
        |key: &str| device.split(',').find_map(|part| part.strip_prefix(key)?.strip_prefix('='));
    let kind = driver.trim_end_matches(|letter: char| letter.is_ascii_digit());
    let subject = match kind {
        "net_af_packet" | "net_tap" => {
            format!("{kind},{},{namespace}", argument("iface").unwrap_or(driver))
        }
        "net_memif" => {
            let socket = argument("socket").unwrap_or("/run/memif.sock");
            let place = if argument("socket-abstract") == Some("no") { 0 } else { namespace };
            let (id, role) = (argument("id").unwrap_or("0"), argument("role").unwrap_or("client"));
            format!("{kind},{socket},{id},{role},{place}")
        }
        // What follows are settings of the same device.
        _ => driver.into(),
    };
    let letter = |letter: char| match letter {
        '/' => "%2F".to_owned(),
        '%' => "%25".to_owned(),
        other => other.to_string(),
    };
    let subject: String = subject.chars().map(letter).collect();
    format!("smcgate-dpdk-{subject}.lock")
}

/// The network namespace of this thread.
pub(crate) fn namespace() -> u64 {
    // Without /proc, all processes count as being in one namespace.
    fs::metadata("/proc/thread-self/ns/net").map_or(0, |file| file.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_one_is_told_that_the_port_is_busy() {
        let folder = std::env::temp_dir().join(format!("smcgate-lock-{}", std::process::id()));
        fs::create_dir(&folder).expect("a folder of our own");
        let first = Lock::take_in(&folder, "port").expect("nobody has it");
        assert_eq!(Lock::take_in(&folder, "port").map(drop), Err(Error::Busy));
        Lock::take_in(&folder, "other").expect("another port");
        drop(first);
        drop(Lock::take_in(&folder, "port").expect("free again"));
        fs::remove_dir(&folder).expect("no file is left");
    }

    /// A gateway of root and one of another user would share a port, and each would receive a part
    /// of its packets.
    #[test]
    fn the_processes_of_all_users_look_in_the_same_place() {
        let mode = fs::metadata(folder()).expect("every host has it").mode();
        assert_eq!(mode & 0o1777, 0o1777, "all may write, and nobody removes what others made");
        let folder = std::env::temp_dir().join(format!("smcgate-lock-all-{}", std::process::id()));
        fs::create_dir(&folder).expect("a folder of our own");
        let first = Lock::take_in(&folder, "port").expect("nobody has it");
        let mode = fs::metadata(folder.join("port")).expect("it is there").mode();
        assert_eq!(mode & 0o777, 0o644, "readable, which is enough to ask for the lock");
        drop(first);
        fs::remove_dir(&folder).expect("no file is left");
    }

    #[test]
    fn a_pci_address_has_one_form() {
        for written in ["03:00.0", "0000:03:00.0", "pci:0000:03:00.0", "0:3:0.0"] {
            assert_eq!(canonical(written), "0000:03:00.0", "{written}");
        }
        assert_eq!(canonical("0000:AF:1f.7,mac=1"), "0000:af:1f.7,mac=1");
        for other in ["net_tap0,iface=a.b", "net_memif0", "03:20.0", "1:2:3:4.0", "3:0.8", "+3:0.0"]
        {
            assert_eq!(canonical(other), other);
        }
        assert_eq!(name("0000:03:00.0,a=1", 1), name("0000:03:00.0", 1));
    }

    #[test]
    fn devices_that_share_something_have_one_name() {
        let packet = |device| name(device, 1);
        assert_eq!(packet("net_af_packet0,iface=va"), packet("net_af_packet1,iface=va,qpairs=1"));
        assert_ne!(packet("net_af_packet0,iface=va"), packet("net_af_packet0,iface=vb"));
        assert_ne!(name("net_af_packet0,iface=va", 1), name("net_af_packet0,iface=va", 2));
        assert_eq!(name("0000:03:00.0", 1), name("0000:03:00.0", 2));

        let path = "net_memif0,socket=/a/b,socket-abstract=no,role=";
        let (server, client) = (format!("{path}server"), format!("{path}client"));
        assert_ne!(packet(&server), packet(&client));
        assert_eq!(name(&server, 1), name(&server, 2));
        assert_ne!(name("net_memif0", 1), name("net_memif0", 2));
        assert!(!packet(&server).contains('/'));
    }

    #[test]
    fn hardware_is_named_by_its_address() {
        assert!(is_pci("0000:03:00.0") && is_pci(&canonical("03:00.0,key=1")));
        assert!(!is_pci("net_af_packet0,iface=03:00.0") && !is_pci(""));
    }
}
