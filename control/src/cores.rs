//! Which core each poller is pinned to.
//!
//! Two pollers on one core take turns where each should have been running all the time, so a
//! poller gets a core that no other poller of the machine holds. To hold a core is to hold the lock
//! (`flock`) of a file named after it, in a directory that all gateways of the machine share,
//! whatever their users and their network namespaces. The kernel releases a lock with its process,
//! however that ends. The files stay, because two gateways must never lock two files for one core.
//! Containers see each other's files where they share the directory with the host.
//!
//! A lock protects nothing. Somebody who takes one for fun makes a gateway leave a core alone.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, OFlags, fchmod, flock, open};
use smcr_engine::affinity::Affinity;

use crate::config::Poll;

/// Directories for the files; the first one that exists is used. Every user may write to them, and
/// a restart of the machine empties them.
const PLACES: [&str; 2] = ["/dev/shm", "/run/lock"];

/// Where gateways of one machine see which cores are held.
#[derive(Clone, Debug)]
pub struct Board {
    folder: PathBuf,
}

/// What an attempt to hold a core led to.
#[derive(Debug)]
enum Claim {
    /// It is ours until this is dropped.
    Ours(OwnedFd),
    /// A poller of somebody else holds it.
    Theirs,
    /// Nobody can say: there is no place for the file.
    Unknown,
}

/// Where one poller runs.
#[derive(Debug)]
pub struct Assignment {
    /// Its core; none if the scheduler places it.
    pub core: Option<usize>,
    /// Why it runs there.
    pub reason: Reason,
    /// Keeps others from the core.
    _hold: Option<OwnedFd>,
}

/// Why a poller has the core it has, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// No other poller holds it.
    Free,
    /// The operator says so.
    Configured,
    /// The operator says so, although a poller of another gateway holds it.
    Shared,
    /// The operator wants none to be pinned.
    Off,
    /// So many cores are free, for so many pollers.
    TooFew {
        /// Cores that no poller holds.
        free: usize,
        /// Pollers that need one.
        pollers: usize,
    },
}

impl Assignment {
    /// No core, for `reason`.
    pub fn unpinned(reason: Reason) -> Self {
        Self { core: None, reason, _hold: None }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Free => f.write_str("no other poller holds this core"),
            Self::Configured => f.write_str("configured"),
            Self::Shared => {
                f.write_str("configured, although another gateway's poller holds this core")
            }
            Self::Off => f.write_str("poll.pin is false"),
            Self::TooFew { free, pollers } => {
                write!(f, "too few free cores: {free} for {pollers} pollers")
            }
        }
    }
}

impl Board {
    /// The board of this machine.
    pub fn of_this_machine() -> Self {
        let mut places = PLACES.iter().map(Path::new);
        let folder = places.find(|place| place.is_dir()).unwrap_or(Path::new(PLACES[0]));
        Self { folder: folder.to_owned() }
    }

    /// Tries to hold `core`.
    fn claim(&self, core: usize) -> Claim {
        let Some(file) = self.open(core) else { return Claim::Unknown };
        let Ok(file) = file else { return Claim::Theirs };
        // A process that only looks whether the core is held has the lock for microseconds.
        for pause in [Duration::from_millis(1), Duration::from_millis(5), Duration::ZERO] {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Claim::Ours(file),
                Err(rustix::io::Errno::WOULDBLOCK) => std::thread::sleep(pause),
                Err(_) => return Claim::Unknown,
            }
        }
        Claim::Theirs
    }

    /// Whether a poller holds `core`.
    pub fn is_held(&self, core: usize) -> bool {
        let file = match open(self.file(core), FLAGS, Mode::empty()) {
            Ok(file) => file,
            // A file that we may not open belongs to another user's poller.
            Err(error) => return error != rustix::io::Errno::NOENT,
        };
        flock(&file, FlockOperation::NonBlockingLockShared) == Err(rustix::io::Errno::WOULDBLOCK)
    }

    fn file(&self, core: usize) -> PathBuf {
        self.folder.join(format!("smcgate-core-{core}"))
    }

    /// Opens the file of `core`, and creates it if it does not exist. `None` if it cannot be
    /// created; an error if somebody else has created it and we may not open it.
    ///
    /// Reading is enough for a lock, so files of other users serve as well. They are opened without
    /// `O_CREAT`, which kernels refuse on other users' files in such directories.
    fn open(&self, core: usize) -> Option<io::Result<OwnedFd>> {
        let path = self.file(core);
        for _ in 0..2 {
            match open(&path, FLAGS, Mode::empty()) {
                Ok(file) => return Some(Ok(file)),
                Err(rustix::io::Errno::NOENT) => {}
                Err(error) => return Some(Err(error.into())),
            }
            let everybody = Mode::RUSR | Mode::RGRP | Mode::ROTH;
            match open(&path, FLAGS | OFlags::CREATE | OFlags::EXCL, everybody) {
                Ok(file) => {
                    // The umask may have taken permissions away. If this fails, others cannot open
                    // the file and treat the core as held, which is true as long as we run.
                    let _ = fchmod(&file, everybody);
                    return Some(Ok(file));
                }
                // Another gateway was quicker.
                Err(rustix::io::Errno::EXIST) => {}
                Err(_) => return None,
            }
        }
        None
    }
}

const FLAGS: OFlags = OFlags::RDONLY
    .union(OFlags::CLOEXEC)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY);

/// Decides where each poller runs. `wanted` has the core that the operator chose for each of them,
/// if any; `allowed` has the cores that this process may use.
///
/// Each poller without a chosen core gets one that nobody holds. If fewer cores are free than such
/// pollers need, none of these pollers is pinned: the scheduler sees better which core is free at
/// the moment.
pub fn assign(
    poll: &Poll,
    wanted: &[Option<usize>],
    allowed: &[usize],
    board: &Board,
) -> Vec<Assignment> {
    if !poll.pin {
        return wanted.iter().map(|_| Assignment::unpinned(Reason::Off)).collect();
    }
    let mut listed = poll.cores.iter().copied();
    let configured: Vec<_> = wanted.iter().map(|core| core.or_else(|| listed.next())).collect();
    let pollers = configured.iter().filter(|core| core.is_none()).count();
    let mut free = free_cores(pollers, &configured, allowed, board);
    let too_few = Reason::TooFew { free: free.len(), pollers };
    if free.len() < pollers {
        free.clear();
    }
    let mut free = free.into_iter();
    let assign = |core: Option<usize>| match core {
        Some(core) => {
            let (reason, hold) = match board.claim(core) {
                Claim::Ours(hold) => (Reason::Configured, Some(hold)),
                Claim::Unknown => (Reason::Configured, None),
                Claim::Theirs => (Reason::Shared, None),
            };
            Assignment { core: Some(core), reason, _hold: hold }
        }
        None => free.next().unwrap_or_else(|| Assignment::unpinned(too_few)),
    };
    configured.into_iter().map(assign).collect()
}

/// The cores of this process that no poller of the machine holds.
pub fn free(board: &Board) -> Vec<usize> {
    let affinity = Affinity::of_this_thread();
    let cores = affinity.iter().flat_map(Affinity::cores);
    cores.filter(|core| !board.is_held(*core)).collect()
}

/// Up to `count` cores that nobody holds, held from now on.
fn free_cores(
    count: usize,
    configured: &[Option<usize>],
    allowed: &[usize],
    board: &Board,
) -> Vec<Assignment> {
    // The last cores come first in our choice: interrupts, and programs that do not choose, use the
    // first ones.
    let candidates = allowed.iter().rev().filter(|core| !configured.contains(&Some(**core)));
    let hold = |&core: &usize| {
        let hold = match board.claim(core) {
            Claim::Ours(hold) => Some(hold),
            Claim::Unknown => None,
            Claim::Theirs => return None,
        };
        Some(Assignment { core: Some(core), reason: Reason::Free, _hold: hold })
    };
    candidates.filter_map(hold).take(count).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::time::Duration;

    use super::*;
    use crate::config::IdlePolicy;

    fn poll(cores: &[usize]) -> Poll {
        Poll {
            policy: IdlePolicy::Adaptive,
            spin: Duration::ZERO,
            cores: cores.to_vec(),
            pin: true,
            boost: 10,
            realtime: true,
        }
    }

    fn cores(assigned: &[Assignment]) -> Vec<Option<usize>> {
        assigned.iter().map(|one| one.core).collect()
    }

    fn board() -> (tempfile::TempDir, Board) {
        let folder = tempfile::tempdir().unwrap();
        let board = Board { folder: folder.path().to_owned() };
        (folder, board)
    }

    /// Two gateways of one machine used to share its last core and leave the others idle.
    #[test]
    fn gateways_of_one_machine_hold_different_cores_while_there_are_some() {
        let (_folder, board) = board();
        let start = |pollers| assign(&poll(&[]), &vec![None; pollers], &[0, 1, 2], &board);
        let first = start(1);
        let second = start(1);
        assert_eq!([cores(&first), cores(&second)], [[Some(2)], [Some(1)]]);
        // One core is left: for neither of two pollers, and it is not kept from others.
        let third = start(2);
        assert_eq!(cores(&third), [None, None]);
        assert_eq!(third[0].reason, Reason::TooFew { free: 1, pollers: 2 });
        assert_eq!(cores(&start(1)), [Some(0)]);
        drop(second);
        assert_eq!(cores(&start(2)), [Some(1), Some(0)]);
    }

    /// What operators say counts, and their cores are nobody's who chooses.
    #[test]
    fn configured_cores_are_taken_and_held() {
        let (_folder, board) = board();
        let start = |wanted: &[_], listed: &[_]| assign(&poll(listed), wanted, &[0, 1, 2], &board);
        let first = start(&[None, Some(2), None], &[1]);
        assert_eq!(cores(&first), [Some(1), Some(2), Some(0)]);
        let reasons: Vec<_> = first.iter().map(|one| one.reason).collect();
        assert_eq!(reasons, [Reason::Configured, Reason::Configured, Reason::Free]);
        let second = start(&[None], &[2]);
        assert_eq!((second[0].core, second[0].reason), (Some(2), Reason::Shared));
        assert_eq!(cores(&start(&[None], &[])), [None]);
    }

    /// A cpuset or `taskset` is obeyed.
    #[test]
    fn only_cores_of_the_process_are_chosen() {
        let (_folder, board) = board();
        let assigned = assign(&poll(&[]), &[None], &[5], &board);
        assert_eq!(cores(&assigned), [Some(5)]);
        let assigned = assign(&poll(&[]), &[None], &[], &board);
        assert_eq!(assigned[0].reason, Reason::TooFew { free: 0, pollers: 1 });
        let off = Poll { pin: false, ..poll(&[3]) };
        assert_eq!(assign(&off, &[Some(1)], &[0, 1], &board)[0].reason, Reason::Off);
    }

    /// Without a place for locks, a gateway pins as if it were alone.
    #[test]
    fn a_read_only_file_system_is_no_obstacle() {
        let board = Board { folder: PathBuf::from("/nonexistent") };
        assert_eq!(cores(&assign(&poll(&[]), &[None], &[0, 1], &board)), [Some(1)]);
        assert!(!board.is_held(1));
    }

    /// Gateways run as different users, with careful umasks.
    #[test]
    fn everybody_may_look_at_a_lock() {
        let (folder, board) = board();
        assert!(!board.is_held(0));
        let assigned = assign(&poll(&[]), &[None], &[0], &board);
        assert!(board.is_held(0));
        let mode = folder.path().join("smcgate-core-0").metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o444);
        drop(assigned);
        assert!(!board.is_held(0));
    }

    /// A file that is no file, or leads elsewhere, is somebody's doing: the core is left alone.
    #[test]
    fn a_link_is_not_followed() {
        let (folder, board) = board();
        std::os::unix::fs::symlink("/etc/passwd", folder.path().join("smcgate-core-1")).unwrap();
        assert_eq!(cores(&assign(&poll(&[]), &[None], &[0, 1], &board)), [Some(0)]);
    }
}
