//! A bounded queue between threads of different priority.
//!
//! Most queues wait, spinning, for a thread that was interrupted between the two steps of a push or
//! a pop. A real-time thread that spins keeps its core from an ordinary thread of the same core for
//! which it waits, and so never stops waiting. Here neither end waits. What is not quite there yet
//! is not there, and a slot that is not quite free yet is not free; a thread begins again only
//! after another one has got further. The price: whoever is interrupted delays what is behind it.
//!
//! It is Vyukov's queue: the stamp of a slot says to whom it belongs.

use std::fmt;
use std::sync::Mutex;

use crate::sync::{AtomicUsize, Ordering};

/// The queue. Any thread may send and receive.
pub struct Queue<T> {
    /// A power of two, so that a division is none.
    slots: Box<[Slot<T>]>,
    /// The place of the next value to be received, and to be sent. Its slot is the remainder.
    head: Padded,
    tail: Padded,
}

struct Slot<T> {
    /// Twice the place for which the slot is free, or one more, once that has its value.
    stamp: AtomicUsize,
    /// Never contended: the stamp says whose it is.
    value: Mutex<Option<T>>,
}

/// In a cache line of its own: senders and the receiver do not slow each other.
#[derive(Debug)]
#[repr(align(128))]
struct Padded(AtomicUsize);

impl<T> Queue<T> {
    /// An empty queue with room for so many values, rounded up to a power of two.
    pub fn new(capacity: usize) -> Self {
        let capacity = capacity.next_power_of_two();
        let slot = |at| Slot { stamp: AtomicUsize::new(2 * at), value: Mutex::new(None) };
        let [head, tail] = [(); 2].map(|()| Padded(AtomicUsize::new(0)));
        Self { slots: (0..capacity).map(slot).collect(), head, tail }
    }

    /// Puts `value` behind all others.
    ///
    /// # Errors
    ///
    /// The value, when the queue is full, or whoever received the value that was in this place
    /// before has not finished.
    pub fn push(&self, value: T) -> Result<(), T> {
        let tail = loop {
            let tail = self.tail.0.load(Ordering::Acquire);
            let stamp = self.slot(tail).stamp.load(Ordering::Acquire);
            if stamp == 2 * tail && advance(&self.tail, tail) {
                break tail;
            }
            if stamp < 2 * tail {
                return Err(value);
            }
            // Another sender has taken the place.
        };
        let slot = self.slot(tail);
        *slot.value.try_lock().expect(OWNED) = Some(value);
        slot.stamp.store(2 * tail + 1, Ordering::Release);
        Ok(())
    }

    /// The oldest value; none if its sender has not finished. That sender must wake the receiver
    /// afterwards, or the receiver must look again.
    pub fn pop(&self) -> Option<T> {
        self.begin_pop().and_then(|head| self.end_pop(head))
    }

    /// The first step: takes the place of the oldest value, if that is there.
    pub(crate) fn begin_pop(&self) -> Option<usize> {
        loop {
            let head = self.head.0.load(Ordering::Acquire);
            let stamp = self.slot(head).stamp.load(Ordering::Acquire);
            if stamp == 2 * head + 1 && advance(&self.head, head) {
                return Some(head);
            }
            if stamp <= 2 * head {
                return None;
            }
            // Another receiver has taken it.
        }
    }

    /// The second step: takes the value and leaves the slot to the next one.
    pub(crate) fn end_pop(&self, head: usize) -> Option<T> {
        let slot = self.slot(head);
        let value = slot.value.try_lock().expect(OWNED).take();
        slot.stamp.store(2 * (head + self.slots.len()), Ordering::Release);
        value
    }

    /// Whether nothing is there to be received.
    pub fn is_empty(&self) -> bool {
        let head = self.head.0.load(Ordering::Relaxed);
        self.slot(head).stamp.load(Ordering::Acquire) <= 2 * head
    }

    /// How many values there are, some of which may not be quite there yet.
    pub fn len(&self) -> usize {
        let head = self.head.0.load(Ordering::Acquire);
        self.tail.0.load(Ordering::Acquire).saturating_sub(head)
    }

    fn slot(&self, place: usize) -> &Slot<T> {
        &self.slots[place & (self.slots.len() - 1)]
    }
}

impl<T> fmt::Debug for Queue<T> {
    /// Without the values, which belong to those who send and receive.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("head", &self.head).field("tail", &self.tail).finish()
    }
}

fn advance(end: &Padded, from: usize) -> bool {
    end.0.compare_exchange(from, from + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
}

/// Why nobody else has a value.
const OWNED: &str = "the stamp says whose it is";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_keep_their_order_and_a_full_queue_gives_them_back() {
        for (wanted, capacity) in [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4)] {
            let queue = Queue::new(wanted);
            for round in 0..10 {
                assert!(queue.is_empty() && queue.pop().is_none());
                for value in 0..capacity {
                    assert_eq!(queue.push((round, value)), Ok(()));
                    assert!(!queue.is_empty());
                }
                assert_eq!(queue.push((round, 9)), Err((round, 9)));
                assert_eq!(queue.pop(), Some((round, 0)));
                assert_eq!(queue.push((round, 9)), Ok(()));
                let rest: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
                let expected: Vec<_> = (1..capacity).chain([9]).map(|it| (round, it)).collect();
                assert_eq!(rest, expected);
            }
        }
    }

    /// Whoever receives would have to wait here, for as long as the sender is interrupted.
    #[test]
    fn nobody_waits_for_a_push_that_is_under_way() {
        let queue = Queue::new(2);
        assert!(advance(&queue.tail, 0), "a sender has its place");
        assert!(queue.is_empty() && queue.pop().is_none());
        assert_eq!(queue.push(2), Ok(()), "another one is not held up");
        assert!(queue.is_empty() && queue.pop().is_none(), "but comes after it");
        assert_eq!(queue.push(3), Err(3));
        *queue.slots[0].value.try_lock().unwrap() = Some(1);
        queue.slots[0].stamp.store(1, Ordering::Release);
        assert_eq!([(); 3].map(|()| queue.pop()), [Some(1), Some(2), None]);
    }

    /// Whoever sends would have to wait here, for as long as the receiver is interrupted.
    #[test]
    fn nobody_waits_for_a_pop_that_is_under_way() {
        let queue = Queue::new(2);
        queue.push(1).unwrap();
        queue.push(2).unwrap();
        let place = queue.begin_pop().unwrap();
        assert_eq!(queue.push(3), Err(3));
        assert_eq!(queue.pop(), Some(2), "another one is not held up");
        assert_eq!((queue.pop(), queue.push(3)), (None, Err(3)), "it is empty, and has no room");
        assert_eq!(queue.end_pop(place), Some(1));
        assert_eq!((queue.push(3), queue.push(4)), (Ok(()), Ok(())));
    }

    #[test]
    fn nothing_is_lost_between_threads() {
        let queue = Queue::new(8);
        let mut last = [None; 3];
        std::thread::scope(|scope| {
            for sender in 0..3_usize {
                let queue = &queue;
                scope.spawn(move || {
                    for value in 0..10_000 {
                        while queue.push((sender, value)).is_err() {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            for _ in 0..30_000 {
                let (sender, value) = loop {
                    if let Some(value) = queue.pop() {
                        break value;
                    }
                    std::thread::yield_now();
                };
                let expected = last[sender].map_or(0, |last| last + 1);
                assert_eq!(value, expected, "each sender's order");
                last[sender] = Some(value);
            }
        });
        assert!(queue.is_empty());
        assert_eq!(last, [Some(9_999); 3]);
    }
}
