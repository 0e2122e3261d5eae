//! Models of what `dataplane/rnic/src/shm/sync.rs` provides.

pub(super) use loom::sync::atomic::{Ordering, fence};

/// The word in which an end says that it sleeps.
///
/// To the checker, a store may come before an exchange by another thread that was made earlier, if
/// the storing thread has not seen its result. What is in the word in the end is then up to each
/// thread, and an end sleeps for ever by what no processor does. So a store is an exchange here,
/// too; as it is relaxed, it orders nothing else.
#[derive(Debug)]
pub(super) struct AtomicUsize(loom::sync::atomic::AtomicUsize);

impl AtomicUsize {
    pub(super) fn new(value: usize) -> Self {
        Self(loom::sync::atomic::AtomicUsize::new(value))
    }

    pub(super) fn load(&self, order: Ordering) -> usize {
        self.0.load(order)
    }

    pub(super) fn store(&self, value: usize, order: Ordering) {
        self.0.swap(value, order);
    }

    pub(super) fn swap(&self, value: usize, order: Ordering) -> usize {
        self.0.swap(value, order)
    }
}
