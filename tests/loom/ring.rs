//! One direction of a queue pair in shared memory, of which only the counters and the sleep of its
//! two ends are left.

use crate::nap::{NEWS, ROOM, announce, awake, must_wake};
use crate::sync::{AtomicUsize, Bell, Ordering};

/// What both ends share.
#[derive(Debug)]
pub struct Ring {
    slots: usize,
    tail: AtomicUsize,
    head: AtomicUsize,
    /// Of the sender, and of the receiver.
    ends: [End; 2],
}

#[derive(Debug)]
struct End {
    sleep: AtomicUsize,
    bell: Bell,
}

impl End {
    fn new() -> Self {
        Self { sleep: AtomicUsize::new(0), bell: Bell::default() }
    }

    fn wake_for(&self, what: usize) {
        if must_wake(&self.sleep, what) {
            self.bell.ring();
        }
    }

    /// Sleeps until there is something of `wanted`, unless there is already.
    fn sleep_for(&self, wanted: usize, has_news: impl Fn() -> bool) {
        announce(&self.sleep, wanted);
        if !has_news() {
            self.bell.wait();
        }
        self.bell.count();
        awake(&self.sleep);
    }
}

impl Ring {
    /// An empty ring with room for so many messages.
    pub fn new(slots: usize) -> Self {
        let [tail, head] = [0, 0].map(AtomicUsize::new);
        Self { slots, tail, head, ends: [End::new(), End::new()] }
    }

    /// Sends so many messages, and sleeps while there is no room.
    pub fn send(&self, count: usize) {
        let [own, peer] = &self.ends;
        let mut emptied = 0;
        for sent in 0..count {
            while sent - emptied == self.slots {
                emptied = self.head.load(Ordering::Acquire);
                if sent - emptied == self.slots {
                    let seen = emptied;
                    let has_room = || self.head.load(Ordering::Acquire) != seen;
                    own.sleep_for(NEWS | ROOM, has_room);
                }
            }
            self.tail.store(sent + 1, Ordering::Release);
            peer.wake_for(NEWS);
        }
    }

    /// Receives so many messages, and sleeps while there is none.
    pub fn receive(&self, count: usize) {
        let [peer, own] = &self.ends;
        let mut read = 0;
        while read < count {
            let tail = self.tail.load(Ordering::Acquire);
            assert!(read <= tail && tail <= read + self.slots);
            if tail == read {
                own.sleep_for(NEWS, || self.tail.load(Ordering::Acquire) != read);
                continue;
            }
            read = tail;
            self.head.store(read, Ordering::Release);
            peer.wake_for(ROOM);
        }
    }
}
