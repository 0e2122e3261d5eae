//! One process has a port at a time. Some drivers would open a port that another process has, and
//! both would then receive a part of its packets. A locked file shows who was first.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
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
        let folder = folder().map_err(|error| Error::Unlockable(error.to_string()))?;
        Self::take_in(&folder, name)
    }

    fn take_in(folder: &Path, name: &str) -> Result<Self, Error> {
        let path = folder.join(name);
        let unlockable =
            |error: io::Error| Error::Unlockable(format!("{}: {error}", path.display()));
        loop {
            let options = OpenOptions::new().write(true).create(true).mode(0o600).clone();
            let file = options.open(&path).map_err(unlockable)?;
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

/// Where the files are: the same place for all processes of a user.
fn folder() -> io::Result<PathBuf> {
    let make =
        |path: PathBuf| DirBuilder::new().recursive(true).mode(0o700).create(&path).map(|()| path);
    make(PathBuf::from("/run/smcgate")).or_else(|_| {
        let user = rustix::process::getuid().as_raw();
        make(std::env::temp_dir().join(format!("smcgate-{user}")))
    })
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
        _ => device.into(),
    };
    let letter = |letter: char| match letter {
        '/' => "%2F".to_owned(),
        '%' => "%25".to_owned(),
        other => other.to_string(),
    };
    let subject: String = subject.chars().map(letter).collect();
    format!("dpdk-{subject}.lock")
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
}
