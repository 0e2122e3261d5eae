//! The rings that a poller looks at by itself.
//!
//! A program that shares memory with us wakes us by its socket, if we say that we are asleep. For a
//! while afterwards we look at its rings in every turn, so that neither side makes a system call.
//! There are few of these, so a turn costs no more with thousands of connections. Those that are
//! quiet for a while, or have to make room, are left alone again.
//!
//! Whoever is left alone is told first, and looked at once more afterwards: what came meanwhile,
//! came without a kick.
//!
//! A program that says that it watches its ring gets no token. If it does not read for a while, it
//! gets one all the same: the thread that has said so may be gone.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use smcgate_rings::{Gateway, News};
use smcr_proto::Instant;

use crate::limits::HOT_RINGS_MAX;
use crate::streams::{Event, Key};

/// The rings that are looked at.
#[derive(Debug, Default)]
pub(crate) struct Hot {
    entries: Vec<Entry>,
    /// Which one makes room next.
    hand: usize,
    /// What was found when one was left alone.
    owed: Vec<Event>,
    /// Whether a program has bytes to read that we have gone to sleep over.
    has_unread: bool,
    /// How often we have looked.
    looks: u32,
}

#[derive(Debug)]
struct Entry {
    rings: Arc<Gateway>,
    /// Something has happened since the last sleep.
    is_active: bool,
    /// Since when nothing has.
    since: Instant,
    /// What the program had not read when it was checked last, by where that begins.
    unread_at: Option<u32>,
}

impl Hot {
    /// Looks at these from now on.
    pub(crate) fn insert(&mut self, rings: &Arc<Gateway>) {
        if rings.is_awake() {
            return;
        }
        rings.wake_up();
        let entry =
            Entry { rings: Arc::clone(rings), is_active: true, since: Instant(0), unread_at: None };
        if self.entries.len() < HOT_RINGS_MAX {
            self.entries.push(entry);
            return;
        }
        self.hand = (self.hand + 1) % HOT_RINGS_MAX;
        let displaced = std::mem::replace(&mut self.entries[self.hand], entry);
        displaced.rings.fall_asleep();
        fence(Ordering::SeqCst);
        self.owed.extend(last_look(&displaced.rings));
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// These belong to another poller from now on, which looks at them first.
    pub(crate) fn remove(&mut self, rings: &Arc<Gateway>) {
        self.entries.retain(|entry| !Arc::ptr_eq(&entry.rings, rings));
        rings.fall_asleep();
    }

    /// Appends what is new.
    pub(crate) fn poll(&mut self, events: &mut Vec<Event>) {
        events.append(&mut self.owed);
        self.looks = self.looks.wrapping_add(1);
        let checks = self.looks.is_multiple_of(CHECKED_EACH);
        self.entries.retain_mut(|entry| {
            let mut news = entry.rings.look();
            news.wants_token |= checks && entry.is_abandoned();
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
        let (owed, has_unread) = (&mut self.owed, &mut self.has_unread);
        *has_unread = false;
        self.entries.retain_mut(|entry| {
            let news = entry.rings.look();
            if news.is_any() {
                owed.push(event(&entry.rings, news));
            }
            if news.is_any() || std::mem::take(&mut entry.is_active) {
                (entry.is_active, entry.since) = (news.is_any(), now);
                *has_unread |= entry.rings.has_unread();
                return true;
            }
            let stays = now.since(entry.since) < QUIET && !entry.rings.is_closed();
            if !stays {
                owed.extend(last_look(&entry.rings));
            }
            *has_unread |= stays && entry.rings.has_unread();
            stays
        });
        let may_sleep = self.owed.is_empty();
        if !may_sleep {
            self.wake_up();
        }
        may_sleep
    }

    /// When a sleep that begins at `now` must end, so that those who do not read get a token.
    pub(crate) fn deadline(&self, now: Instant) -> Option<Instant> {
        self.has_unread.then(|| now + QUIET)
    }

    /// Tells all programs that somebody looks again.
    pub(crate) fn wake_up(&mut self) {
        self.entries.iter().for_each(|entry| entry.rings.wake_up());
    }
}

impl Entry {
    /// Whether the program has read nothing since the last check, although there is something. It
    /// gets a token then.
    fn is_abandoned(&mut self) -> bool {
        let unread_at = self.rings.unread_at();
        let is_same = unread_at.is_some() && unread_at == self.unread_at;
        self.unread_at = unread_at;
        if is_same {
            self.rings.miss();
        }
        is_same
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
/// So often those who have bytes to read are checked: every few milliseconds, of a poller that
/// never sleeps.
const CHECKED_EACH: u32 = 2048;
#[cfg(test)]
mod tests;
