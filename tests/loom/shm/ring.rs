//! One direction of a queue pair in shared memory, of which only the counters and the sleep of its
//! two ends are left.

use super::nap::{NEWS, ROOM, announce, awake, before_last_look, must_wake};
use super::sync::AtomicUsize as Word;
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
    sleep: Word,
    bell: Bell,
}

impl End {
    fn new() -> Self {
        Self { sleep: Word::new(0), bell: Bell::default() }
    }

    fn wake_for(&self, what: usize) {
        if must_wake(&self.sleep, what) {
            self.bell.ring();
        }
    }

    /// Sleeps until there is something of `wanted`, unless there is already.
    fn sleep_for(&self, wanted: usize, has_news: impl Fn() -> bool) {
        announce(&self.sleep, wanted);
        before_last_look();
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

    /// Waits for room, and then for the answer to what was sent there: what is waited for changes
    /// from one sleep to the next.
    pub fn ask(&self) {
        let own = &self.ends[0];
        let has_room = || self.head.load(Ordering::Acquire) != 0;
        while !has_room() {
            own.sleep_for(NEWS | ROOM, has_room);
        }
        let is_answered = || self.tail.load(Ordering::Acquire) != 0;
        while !is_answered() {
            own.sleep_for(NEWS, is_answered);
        }
    }

    /// Makes room, and answers.
    pub fn answer(&self) {
        let peer = &self.ends[0];
        self.head.store(1, Ordering::Release);
        peer.wake_for(ROOM);
        self.tail.store(1, Ordering::Release);
        peer.wake_for(NEWS);
    }
}
