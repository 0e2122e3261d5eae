//! The atomics of `nap`, which a model checker replaces by its own: see `tests/loom`.

pub(super) use std::sync::atomic::{AtomicUsize, Ordering, fence};
