//! Models of what `dataplane/engine/src/sync.rs` provides.

use std::io;

use loom::sync::{Condvar, Mutex};

pub use loom::sync::Arc;
pub use loom::sync::atomic::{
    AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
pub use loom::thread::yield_now;

pub use crate::queue::Queue;

/// A model has nothing for epoll; who sleeps waits for the bell itself.
pub type Descriptor<'a> = &'a Bell;

/// The model of an eventfd.
#[derive(Debug, Default)]
pub struct Bell {
    rung: Mutex<u64>,
    rings: Condvar,
}

impl Bell {
    /// One that nobody has rung.
    ///
    /// # Errors
    ///
    /// Never; the real one may fail.
    pub fn new() -> io::Result<Self> {
        Ok(Self::default())
    }

    /// Itself.
    pub fn descriptor(&self) -> Descriptor<'_> {
        self
    }

    /// Ends the sleep of who waits.
    pub fn ring(&self) {
        *self.rung.lock().expect("nobody panics with it") += 1;
        self.rings.notify_all();
    }

    /// How often it was rung since it was last counted.
    pub fn count(&self) -> u64 {
        std::mem::take(&mut *self.rung.lock().expect("nobody panics with it"))
    }

    /// Sleeps until it is readable, like epoll.
    pub fn wait(&self) {
        let mut rung = self.rung.lock().expect("nobody panics with it");
        while *rung == 0 {
            rung = self.rings.wait(rung).expect("nobody panics with it");
        }
    }

    /// Whether epoll would not sleep at all.
    pub fn is_readable(&self) -> bool {
        *self.rung.lock().expect("nobody panics with it") > 0
    }
}
