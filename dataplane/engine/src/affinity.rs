//! On which cores a thread may run.

use std::io;

use core_affinity::CoreId;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Where a thread may run, and on which of these cores it runs best.
#[derive(Clone, Debug)]
pub struct Affinity {
    all: CpuSet,
    core: Option<usize>,
}

impl Affinity {
    /// That of the calling thread: everywhere its process may run, as long as nobody has pinned it.
    ///
    /// # Errors
    ///
    /// On a machine with more cores than the kernel's interface has room for.
    pub fn of_this_thread() -> io::Result<Self> {
        Ok(Self { all: sched_getaffinity(None)?, core: None })
    }

    /// The same, with `core` of its own.
    #[must_use]
    pub fn with_core(&self, core: Option<usize>) -> Self {
        Self { all: self.all, core }
    }

    /// The cores on which it may run, the lowest first.
    pub fn cores(&self) -> impl DoubleEndedIterator<Item = usize> {
        (0..CpuSet::MAX_CPU).filter(|&core| self.all.is_set(core))
    }

    /// Whether there is a core of its own.
    pub fn has_core(&self) -> bool {
        self.core.is_some()
    }

    /// Pins the calling thread to its core. Does nothing without one.
    ///
    /// # Errors
    ///
    /// When there is no such core, or the process may not use it.
    pub fn pin(&self) -> io::Result<()> {
        // Fewer cores are free than pollers need, or the operator wants none pinned.
        let Some(core) = self.core else { return Ok(()) };
        if core >= CpuSet::MAX_CPU {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        match core_affinity::set_for_current(CoreId { id: core }) {
            true => Ok(()),
            false => Err(io::Error::other(format!("core {core} is not there, or not allowed"))),
        }
    }

    /// Binds the calling thread to some core, if it may run there.
    ///
    /// # Errors
    ///
    /// When it may not, or no longer.
    pub fn move_to(&self, core: usize) -> io::Result<()> {
        if core >= CpuSet::MAX_CPU || !self.all.is_set(core) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut set = CpuSet::new();
        set.set(core);
        Ok(sched_setaffinity(None, &set)?)
    }

    /// Lets the scheduler place the calling thread.
    ///
    /// # Errors
    ///
    /// When the process lost the right to each of its cores.
    pub fn unpin(&self) -> io::Result<()> {
        Ok(sched_setaffinity(None, &self.all)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_pinned_and_released() {
        let before = Affinity::of_this_thread().unwrap();
        let core = before.cores().next_back().unwrap();
        let affinity = before.with_core(Some(core));
        affinity.pin().unwrap();
        let pinned = Affinity::of_this_thread().unwrap();
        assert_eq!(pinned.cores().collect::<Vec<_>>(), [core]);
        affinity.unpin().unwrap();
        assert_eq!(Affinity::of_this_thread().unwrap().all, before.all);
        assert!(before.with_core(Some(100_000)).pin().is_err());
    }
}
