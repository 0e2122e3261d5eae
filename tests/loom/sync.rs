//! Models of what `dataplane/engine/src/sync.rs` provides.

use std::io;

use loom::sync::{Condvar, Mutex};
use loom::thread;

pub use loom::sync::Arc;
pub use loom::sync::atomic::{
    AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};

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

/// The weakest queue that is still one: Vyukov's, as the real one is, but for the orders of its
/// accesses, of which only those are left that bring a value across.
#[derive(Debug)]
pub struct ArrayQueue<T> {
    slots: Box<[Slot<T>]>,
    head: AtomicUsize,
    tail: AtomicUsize,
}

#[derive(Debug)]
struct Slot<T> {
    /// Equal to the tail: free. One more than the head: taken.
    stamp: AtomicUsize,
    /// Never contended: the stamp says whose it is. A lock of the model checker would order more
    /// than the stamps do.
    value: std::sync::Mutex<Option<T>>,
}

impl<T> ArrayQueue<T> {
    /// An empty queue.
    ///
    /// # Panics
    ///
    /// If it had room for less than two: stamps would mean two things.
    pub fn new(capacity: usize) -> Self {
        assert!(capacity >= 2);
        let slot = |at| Slot { stamp: AtomicUsize::new(at), value: std::sync::Mutex::new(None) };
        let (head, tail) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { slots: (0..capacity).map(slot).collect(), head, tail }
    }

    /// Puts `value` behind all others.
    ///
    /// # Errors
    ///
    /// The value, when the queue is full.
    pub fn push(&self, value: T) -> Result<(), T> {
        loop {
            let tail = self.tail.load(Ordering::Relaxed);
            let slot = &self.slots[tail % self.slots.len()];
            let stamp = slot.stamp.load(Ordering::Acquire);
            if stamp == tail && advance(&self.tail, tail) {
                *slot.value.lock().expect("nobody panics with it") = Some(value);
                slot.stamp.store(tail + 1, Ordering::Release);
                return Ok(());
            }
            if stamp + self.slots.len() == tail + 1 {
                return Err(value);
            }
            thread::yield_now();
        }
    }

    /// The oldest value.
    pub fn pop(&self) -> Option<T> {
        loop {
            let head = self.head.load(Ordering::Relaxed);
            let slot = &self.slots[head % self.slots.len()];
            let stamp = slot.stamp.load(Ordering::Acquire);
            if stamp == head + 1 && advance(&self.head, head) {
                let value = slot.value.lock().expect("nobody panics with it").take();
                slot.stamp.store(head + self.slots.len(), Ordering::Release);
                return value;
            }
            if stamp == head && self.tail.load(Ordering::Relaxed) == head {
                return None;
            }
            thread::yield_now();
        }
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.head.load(Ordering::Relaxed) == self.tail.load(Ordering::Relaxed)
    }
}

fn advance(end: &AtomicUsize, from: usize) -> bool {
    end.compare_exchange(from, from + 1, Ordering::Relaxed, Ordering::Relaxed).is_ok()
}
