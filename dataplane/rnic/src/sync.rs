//! What `queue` takes from here and from nowhere else, so that `tests/loom` can put models of them
//! in their place.

pub(crate) use std::sync::atomic::{AtomicUsize, Ordering};
