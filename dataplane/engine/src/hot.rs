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
//!
//! Programs that pass their bytes by a shortcut, without us, wake us only for each other. What one
//! of them says is news of the other, so both ends are looked at, or none. And now and then all of
//! them are: a program does not wake us for another one that watches, and the thread that does may
//! be gone.

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Arc, Weak};
use std::time::Duration;

use smcgate_rings::{Gateway, News};
use smcr_proto::Instant;

use crate::limits::HOT_RINGS_MAX;
use crate::streams::{Event, Key};

/// The rings that are looked at.
#[derive(Debug)]
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
    /// The number of the poller, not zero.
    poller: u32,
    /// Those that were offered a shortcut.
    shortcuts: Vec<Checked>,
    /// Which of them is checked next.
    short_hand: usize,
    /// When.
    check_at: Instant,
}

/// Rings that are looked at, with those at the other end of their shortcut: who writes there says
/// that to the one end, and it is news of the other.
#[derive(Debug)]
struct Entry {
    ends: [Option<End>; 2],
    /// Something has happened since the last sleep.
    is_active: bool,
    /// Since when nothing has.
    since: Instant,
}

/// What is checked now and then. It keeps no memory of a connection that is over.
#[derive(Debug)]
struct Checked {
    rings: Weak<Gateway>,
    unread_at: Option<u32>,
}

/// One end of a connection.
#[derive(Debug)]
struct End {
    rings: Arc<Gateway>,
    /// What the program had not read when it was checked last, by where that begins.
    unread_at: Option<u32>,
}

impl Default for Hot {
    fn default() -> Self {
        static POLLERS: AtomicU32 = AtomicU32::new(1);
        Self {
            entries: Vec::new(),
            hand: 0,
            owed: Vec::new(),
            has_unread: false,
            looks: 0,
            poller: POLLERS.fetch_add(1, Ordering::Relaxed),
            shortcuts: Vec::new(),
            short_hand: 0,
            check_at: Instant(0),
        }
    }
}

impl Hot {
    /// These are a stream of this poller from now on, which it calls `key`.
    pub(crate) fn adopt(&mut self, rings: &Arc<Gateway>, key: Key) {
        rings.set_key(self.poller, key.pack());
        self.attend(rings);
    }

    /// Looks at these from now on, and at those at the other end of their shortcut.
    pub(crate) fn attend(&mut self, rings: &Arc<Gateway>) {
        self.know(rings);
        // Those of another poller are checked there, now and then.
        let is_ours = |other: &Arc<Gateway>| other.is_watched_by(self.poller);
        let other = if rings.has_shortcut() { rings.other_end().filter(is_ours) } else { None };
        let has_both =
            |other: &Arc<Gateway>| self.entries.iter().any(|it| it.has(rings) && it.has(other));
        if rings.is_awake() && other.as_ref().is_none_or(has_both) {
            return;
        }
        let both = [Some(Arc::clone(rings)), other];
        both.iter().flatten().for_each(|end| self.know(end));
        // One that is here already stays awake: what comes meanwhile comes without a kick.
        self.entries.retain(|entry| !both.iter().flatten().any(|end| entry.has(end)));
        self.insert(Entry::new(both));
    }

    /// Looks at one more, in place of another if there is no room.
    fn insert(&mut self, entry: Entry) {
        entry.wake_up();
        if self.entries.len() < HOT_RINGS_MAX {
            self.entries.push(entry);
            return;
        }
        self.hand = (self.hand + 1) % HOT_RINGS_MAX;
        let displaced = std::mem::replace(&mut self.entries[self.hand], entry);
        displaced.fall_asleep();
        fence(Ordering::SeqCst);
        displaced.last_look(&mut self.owed);
    }

    /// Checks these now and then from now on, if their program may leave us out.
    fn know(&mut self, rings: &Arc<Gateway>) {
        if rings.is_new_to_checks() {
            // Each that comes makes room for itself.
            (0..2).for_each(|_| drop(self.next_checked()));
            self.shortcuts.push(Checked { rings: Arc::downgrade(rings), unread_at: None });
        }
    }

    /// The next one that is to be checked, and its place. Those that are over are forgotten.
    fn next_checked(&mut self) -> Option<(usize, Arc<Gateway>)> {
        if self.shortcuts.is_empty() {
            return None;
        }
        self.short_hand = (self.short_hand + 1) % self.shortcuts.len();
        let rings = self.shortcuts[self.short_hand].rings.upgrade();
        let rings = rings.filter(|it| !it.is_closed() && it.is_watched_by(self.poller));
        if rings.is_none() {
            self.shortcuts.swap_remove(self.short_hand);
        }
        rings.map(|rings| (self.short_hand, rings))
    }

    /// Checks some of those that have a shortcut.
    fn check_shortcuts(&mut self) {
        for _ in 0..self.shortcuts.len().min(CHECKED_AT_ONCE) {
            let Some((place, rings)) = self.next_checked() else { continue };
            rings.agree();
            let is_abandoned = is_abandoned(&rings, &mut self.shortcuts[place].unread_at);
            let mut news = rings.look();
            news.wants_token |= is_abandoned;
            if news.is_any() {
                self.owed.push(event(&rings, news));
            }
        }
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// These belong to another poller from now on, which looks at them first.
    pub(crate) fn remove(&mut self, rings: &Arc<Gateway>) {
        self.release(rings);
        if rings.has_shortcut() {
            self.shortcuts.retain(|end| !std::ptr::eq(end.rings.as_ptr(), Arc::as_ptr(rings)));
        }
        rings.is_new_again_to_checks();
        rings.fall_asleep();
    }

    /// The stream of these is over: their memory is kept for nobody.
    pub(crate) fn release(&mut self, rings: &Arc<Gateway>) {
        for entry in &mut self.entries {
            entry.remove(rings);
        }
        self.entries.retain(|entry| !entry.is_empty());
        // The other end of a shortcut does not bring them back.
        rings.forget_key();
    }

    /// Appends what is new.
    pub(crate) fn poll(&mut self, events: &mut Vec<Event>) {
        self.looks = self.looks.wrapping_add(1);
        let checks = self.looks.is_multiple_of(CHECKED_EACH);
        if checks {
            self.check_shortcuts();
        }
        events.append(&mut self.owed);
        self.entries.retain_mut(|entry| {
            entry.is_active |= entry.look(checks, events);
            !entry.is_over()
        });
    }

    /// Tells all programs that nobody looks any more. Returns false if something has come: then
    /// the poller must not sleep.
    pub(crate) fn fall_asleep(&mut self, now: Instant) -> bool {
        self.entries.iter().for_each(Entry::fall_asleep);
        fence(Ordering::SeqCst);
        if !self.shortcuts.is_empty() && now >= self.check_at {
            self.check_at = now + CHECK_PERIOD;
            self.check_shortcuts();
        }
        let (owed, has_unread) = (&mut self.owed, &mut self.has_unread);
        *has_unread = false;
        self.entries.retain_mut(|entry| {
            let is_any = entry.look(false, owed);
            if is_any || std::mem::take(&mut entry.is_active) {
                (entry.is_active, entry.since) = (is_any, now);
                *has_unread |= entry.has_unread();
                return true;
            }
            let stays = now.since(entry.since) < QUIET && !entry.is_over();
            if !stays {
                entry.last_look(owed);
            }
            *has_unread |= stays && entry.has_unread();
            stays
        });
        let may_sleep = self.owed.is_empty();
        if !may_sleep {
            self.wake_up();
        }
        may_sleep
    }

    /// When a sleep that begins at `now` must end, so that those who do not read get a token, and
    /// shortcuts are checked.
    pub(crate) fn deadline(&self, now: Instant) -> Option<Instant> {
        let check_at = (!self.shortcuts.is_empty()).then_some(self.check_at);
        self.has_unread.then(|| now + QUIET).into_iter().chain(check_at).min()
    }

    /// Tells all programs that somebody looks again.
    pub(crate) fn wake_up(&mut self) {
        self.entries.iter().for_each(Entry::wake_up);
    }
}

impl Entry {
    fn new(ends: [Option<Arc<Gateway>>; 2]) -> Self {
        Self { ends: ends.map(|rings| rings.map(End::new)), is_active: true, since: Instant(0) }
    }

    fn rings(&self) -> impl Iterator<Item = &Arc<Gateway>> {
        self.ends.iter().flatten().map(|end| &end.rings)
    }

    fn has(&self, rings: &Arc<Gateway>) -> bool {
        self.rings().any(|it| Arc::ptr_eq(it, rings))
    }

    fn remove(&mut self, rings: &Arc<Gateway>) {
        for end in &mut self.ends {
            end.take_if(|end| Arc::ptr_eq(&end.rings, rings));
        }
    }

    fn is_empty(&self) -> bool {
        self.rings().next().is_none()
    }

    /// Whether the connection is over.
    fn is_over(&self) -> bool {
        self.rings().all(|rings| rings.is_closed())
    }

    fn wake_up(&self) {
        self.rings().for_each(|rings| rings.wake_up());
    }

    fn fall_asleep(&self) {
        self.rings().for_each(|rings| rings.fall_asleep());
    }

    fn has_unread(&self) -> bool {
        self.rings().any(|rings| rings.has_unread())
    }

    /// Appends what is new, and if that is to be checked, who does not read. Returns whether there
    /// is something.
    fn look(&mut self, checks: bool, events: &mut Vec<Event>) -> bool {
        let before = events.len();
        for end in self.ends.iter_mut().flatten().filter(|end| !end.rings.is_closed()) {
            let mut news = end.rings.look();
            news.wants_token |= checks && is_abandoned(&end.rings, &mut end.unread_at);
            if news.is_any() {
                events.push(event(&end.rings, news));
            }
        }
        events.len() > before
    }

    /// Appends what is new of rings that are left alone.
    fn last_look(&self, events: &mut Vec<Event>) {
        events.extend(self.rings().filter_map(last_look));
    }
}

impl End {
    fn new(rings: Arc<Gateway>) -> Self {
        Self { rings, unread_at: None }
    }
}

/// Whether the program has read nothing since the last check, although there is something. It gets
/// a token then.
fn is_abandoned(rings: &Gateway, before: &mut Option<u32>) -> bool {
    let unread_at = rings.unread_at();
    let is_same = unread_at.is_some() && unread_at == *before;
    *before = unread_at;
    if is_same {
        rings.miss();
    }
    is_same
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
/// How often some shortcuts are checked, and how many of them.
const CHECK_PERIOD: Duration = Duration::from_millis(50);
const CHECKED_AT_ONCE: usize = 128;
#[cfg(test)]
mod tests;
