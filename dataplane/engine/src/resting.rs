//! Rings that nobody looks at, and whose memory is given back when they stay quiet.
//!
//! A program that was busy once has touched all pages of its rings. Thousands of them that have
//! nothing to say would keep gigabytes.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;

use smcgate_rings::Gateway;
use smcr_proto::Instant;

/// The rings that were left alone, each once, in the order in which that is looked at again.
#[derive(Debug)]
pub(crate) struct Resting {
    entries: VecDeque<Entry>,
    /// When we were asked last.
    now: Instant,
}

#[derive(Debug)]
struct Entry {
    rings: Weak<Gateway>,
    since: Instant,
    /// How often somebody had ceased to look at them by then.
    sleeps: u32,
}

impl Default for Resting {
    fn default() -> Self {
        Self { entries: VecDeque::new(), now: Instant(0) }
    }
}

impl Resting {
    /// These are left alone.
    pub(crate) fn insert(&mut self, rings: &Arc<Gateway>) {
        if !rings.is_listed() {
            rings.set_listed(true);
            self.push(rings);
        }
    }

    fn push(&mut self, rings: &Arc<Gateway>) {
        let (weak, sleeps) = (Arc::downgrade(rings), rings.sleeps());
        self.entries.push_back(Entry { rings: weak, since: self.now, sleeps });
    }

    /// These belong to another poller from now on.
    pub(crate) fn remove(&mut self, rings: &Arc<Gateway>) {
        if rings.is_listed() {
            rings.set_listed(false);
            let weak = Arc::downgrade(rings);
            self.entries.retain(|entry| !entry.rings.ptr_eq(&weak));
        }
    }

    /// Gives the memory of a few back that have been quiet for long.
    pub(crate) fn serve(&mut self, now: Instant) {
        self.now = now;
        for _ in 0..SERVED_MAX {
            let Some(entry) = self.entries.pop_front_if(|entry| entry.since + REST <= now) else {
                return;
            };
            let Some(rings) = entry.rings.upgrade() else { continue };
            if rings.sleeps() == entry.sleeps && !rings.is_awake() {
                rings.set_listed(false);
                rings.rest();
            } else {
                self.push(&rings);
            }
        }
    }

    /// When there is something to do.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.entries.front().map(|entry| entry.since + REST)
    }
}

/// After so long the memory is given back.
const REST: Duration = Duration::from_secs(5);
/// Of so many at once. Each takes some ten microseconds.
const SERVED_MAX: usize = 4;

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use rustix::fs::fstat;
    use smcgate_rings::{Application, thread};

    use super::*;

    #[test]
    fn memory_is_given_back_by_those_that_stay_quiet() {
        let mut resting = Resting::default();
        let (_near, app) = UnixStream::pair().unwrap();
        let rings = Arc::new(Gateway::create().unwrap());
        let program = Application::map(rings.memory()).unwrap();
        let pages = || fstat(rings.memory()).unwrap().st_blocks / 8;
        let at = |seconds| Instant(0) + Duration::from_secs(seconds);
        program.write_slice(std::os::fd::AsFd::as_fd(&app), &[7; 9000], thread()).unwrap();
        rings.read(std::os::fd::AsFd::as_fd(&app), 9000, |span| span.len()).unwrap();
        assert_eq!((pages(), resting.deadline()), (4, None));
        rings.fall_asleep();
        resting.serve(at(1));
        resting.insert(&rings);
        resting.insert(&rings);
        assert_eq!(resting.deadline(), Some(at(6)));
        rings.wake_up();
        resting.serve(at(6));
        assert_eq!((pages(), resting.deadline()), (4, Some(at(11))), "somebody looks");
        rings.fall_asleep();
        resting.serve(at(11));
        assert_eq!((pages(), resting.deadline()), (4, Some(at(16))), "somebody has looked");
        resting.serve(at(16));
        assert_eq!((pages(), resting.deadline()), (1, None));
        resting.insert(&rings);
        resting.remove(&rings);
        assert!(resting.deadline().is_none() && !rings.is_listed(), "another one looks after them");
        resting.insert(&rings);
        drop(rings);
        resting.serve(at(99));
        assert_eq!(resting.deadline(), None);
    }
}
