//! The rings that a poller looks at by itself.
//!
//! A program that shares memory with us wakes us by its socket, if we say that we are asleep. For a
//! while afterwards we look at its rings in every turn, so that neither side makes a system call.
//! There are few of these, so a turn costs no more with thousands of connections. Those that are
//! quiet for a while, or have to make room, are left alone again.
//!
//! Whoever is left alone is told first, and looked at once more afterwards: what came meanwhile,
//! came without a kick. If he stays quiet for seconds, the memory of his rings is given back.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use smcgate_rings::{Gateway, News};
use smcr_proto::Instant;

use crate::limits::HOT_RINGS_MAX;
use crate::resting::Resting;
use crate::streams::{Event, Key};

/// The rings that are looked at.
#[derive(Debug, Default)]
pub(crate) struct Hot {
    entries: Vec<Entry>,
    /// Which one makes room next.
    hand: usize,
    /// What was found when one was left alone.
    owed: Vec<Event>,
    resting: Resting,
}

#[derive(Debug)]
struct Entry {
    rings: Arc<Gateway>,
    /// Something has happened since the last sleep.
    is_active: bool,
    /// Since when nothing has.
    since: Instant,
}

impl Hot {
    /// Looks at these from now on.
    pub(crate) fn insert(&mut self, rings: &Arc<Gateway>) {
        if rings.is_awake() {
            return;
        }
        rings.wake_up();
        let entry = Entry { rings: Arc::clone(rings), is_active: true, since: Instant(0) };
        if self.entries.len() < HOT_RINGS_MAX {
            self.entries.push(entry);
            return;
        }
        self.hand = (self.hand + 1) % HOT_RINGS_MAX;
        let displaced = std::mem::replace(&mut self.entries[self.hand], entry);
        displaced.rings.fall_asleep();
        fence(Ordering::SeqCst);
        self.owed.extend(last_look(&displaced.rings));
        self.resting.insert(&displaced.rings);
    }

    /// These belong to another poller from now on, which looks at them first.
    pub(crate) fn remove(&mut self, rings: &Arc<Gateway>) {
        self.entries.retain(|entry| !Arc::ptr_eq(&entry.rings, rings));
        self.resting.remove(rings);
        rings.fall_asleep();
    }

    /// Appends what is new.
    pub(crate) fn poll(&mut self, events: &mut Vec<Event>) {
        events.append(&mut self.owed);
        self.entries.retain_mut(|entry| {
            let news = entry.rings.look();
            if news.is_any() {
                entry.is_active = true;
                events.push(event(&entry.rings, news));
            }
            !entry.rings.is_closed()
        });
    }

    /// Tells all programs that nobody looks any more. Returns false if something has come: then
    /// the poller must not sleep.
    pub(crate) fn fall_asleep(&mut self, now: Instant) -> bool {
        self.entries.iter().for_each(|entry| entry.rings.fall_asleep());
        fence(Ordering::SeqCst);
        self.resting.serve(now);
        let (owed, resting) = (&mut self.owed, &mut self.resting);
        self.entries.retain_mut(|entry| {
            let news = entry.rings.look();
            if news.is_any() {
                owed.push(event(&entry.rings, news));
            }
            if news.is_any() || std::mem::take(&mut entry.is_active) {
                (entry.is_active, entry.since) = (news.is_any(), now);
                return true;
            }
            let stays = now.since(entry.since) < QUIET && !entry.rings.is_closed();
            if !stays {
                owed.extend(last_look(&entry.rings));
                resting.insert(&entry.rings);
            }
            stays
        });
        let may_sleep = self.owed.is_empty();
        if !may_sleep {
            self.wake_up();
        }
        may_sleep
    }

    /// When there is something to do, if nobody says anything.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.resting.deadline()
    }

    /// Tells all programs that somebody looks again.
    pub(crate) fn wake_up(&mut self) {
        self.entries.iter().for_each(|entry| entry.rings.wake_up());
    }
}

/// What is new of rings that are left alone.
fn last_look(rings: &Arc<Gateway>) -> Option<Event> {
    if rings.is_closed() {
        return None;
    }
    let mut news = rings.look();
    // The thread that watched the ring, or took the token, may have been killed.
    news.wants_token |= rings.has_unread();
    news.is_any().then(|| event(rings, news))
}

fn event(rings: &Gateway, news: News) -> Event {
    Event {
        key: Key::unpack(rings.key()),
        readable: news.readable,
        writable: news.writable,
        ending: false,
        urgent: false,
        failed: false,
        by_rings: true,
    }
}

/// After so long without news, rings are left alone.
const QUIET: Duration = Duration::from_millis(1);
#[cfg(test)]
mod tests;
