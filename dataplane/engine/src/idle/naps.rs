//! Sleeps beside those who use offers of the core.

use std::time::Duration;

use smcr_proto::Instant;

/// Whether a thread sleeps after offers that were used.
#[derive(Debug, Default)]
pub(super) struct Naps {
    is_on: bool,
    /// So many times more it sleeps where it would make the next offer.
    left: u32,
    /// When it last waited for so much of the time that others need the core: see [`NARROW`].
    narrow_at: Option<Instant>,
}

impl Naps {
    /// An offer ended at `now`. Of somebody else's core, somebody has `used` it; the thread has
    /// waited for `waits` percent of the time.
    pub(super) fn after_offer(&mut self, now: Instant, used: bool, has_core: bool, waits: u8) {
        self.is_on = used && {
            if waits >= NARROW {
                self.narrow_at = Some(now);
            }
            let narrow = self.narrow_at.is_some_and(|at| now.since(at) < NARROW_FOR);
            has_core || self.is_on || narrow
        };
        self.left = if self.is_on { NAPS } else { 0 };
    }

    /// Whether it sleeps now, instead of offering the core.
    pub(super) fn take(&mut self) -> bool {
        let takes = self.left > 0;
        self.left -= u32::from(takes);
        takes
    }

    #[cfg(test)]
    pub(super) fn narrow_at(&self) -> Option<Instant> {
        self.narrow_at
    }
}

/// After an offer that somebody used, away from its own core, a thread sleeps so often before it
/// makes the next one. (Without a core of its own: see `NARROW`.)
pub(super) const NAPS: u32 = 15;
/// A thread without a core of its own begins to sleep after offers if it waits for as much as this,
/// and ends it with the first offer that nobody uses. (With one connection it waited for up to 36
/// percent of three windows in a row where nobody else needed the cores, and mostly for 45 to 65
/// beside one busy loop; but for 11 to 60 while it slept so.)
pub(super) const NARROW: u8 = 50;
/// For so long it then begins again at each offer that is used: while it sleeps after offers, waits
/// say little. (A request and its answer took 4 to 8 % longer beside one busy loop where it had to
/// wait anew for as much each time, and as long as without where nobody else needs the cores. When
/// others leave, it may sleep so by mistake for this time.)
pub(super) const NARROW_FOR: Duration = Duration::from_millis(500);
