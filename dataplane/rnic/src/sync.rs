//! The atomics of `queue`, which takes them from here, so that `tests/loom` can put models of them
//! in their place.

pub(crate) use std::sync::atomic::{AtomicUsize, Ordering};
