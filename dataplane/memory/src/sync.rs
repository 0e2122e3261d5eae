//! The atomics of `occupants`, which takes them from here, so that `tests/loom` can put models of
//! them in their place.

pub(crate) use std::sync::atomic::{AtomicU32, Ordering, fence};
pub(crate) use std::thread::yield_now;
