//! What to do after a turn: take the next one, offer the core to others first, or sleep.
//!
//! A sleeping thread costs nothing but is slow to wake: on the machines we measured, 70 µs where a
//! spinning one needs 4. A spinning thread answers at once but takes the core from whoever else
//! needs it. The adaptive policy does both: it goes on for a short while after work, and offers the
//! core (`sched_yield`) after every turn, also after those that moved something. Where cores are
//! free, an offer costs half a microsecond. Where they are not, applications run between our turns
//! as if we slept, and what they produce meanwhile makes the next turn's batch larger. (Spinning
//! less when offers were taken up was tried: it doubled the latency of a single connection and
//! halved the rate of a single stream, because the thread then slept while its peer was busy on the
//! same core.)
//!
//! How short a while depends on what the last sleep was worth. If work came soon after it began,
//! the thread had better gone on: both who wakes it and itself pay some 15 µs for that, once per
//! batch, and a stream moved a fifth slower. So it then goes on for longer. After a pause that no
//! patience would have bridged, it is back at the short while. Such a pause is that of a connection
//! that has carried as much as it may: patience never lasts as long, unless the short while does.
//!
//! Applications give the core back within microseconds, because they wait for us. Programs that
//! have nothing to do with us do not: the scheduler lets them have it for a whole slice, which is
//! milliseconds, for each offer. So an offer that takes a millisecond is a loss, and when losses
//! make up a good part of the time in which we are awake, the core is contended. As long as that
//! lasts, the adaptive policy sleeps as soon as there is nothing to do and lets the scheduler place
//! the thread: who sleeps most of the time runs at once when it wakes, and on whichever core is
//! free. Now and then it offers the core on which it happens to be for a while. The first loss ends
//! the attempt, and the next one is made after twice the time, or soon if there was nothing to do
//! for long. If nobody keeps that core, the contention is over, as far as the thread can know, and
//! it goes on as on its own core, but stays where it is. When that has been well for a moment it
//! tries its own core; if that is kept, the moment is twice as long the next time. (Going back at
//! once, and right after the attempt, took the threads of a connection apart that the scheduler had
//! put on one core, where they wake each other without an interrupt: beside one busy loop a request
//! and its answer then took 70 µs, and 61 when the threads stayed. Going back after ten seconds was
//! too late: after a burst a request took 190 µs elsewhere, and 90 at home.) After a second of
//! rest, in which nothing is learnt, it tries its own core once the first work is done.
//!
//! There, others that use an offer are most likely the threads of that connection, and the other
//! cores are kept. A sleep costs little then, because whoever wakes the thread is on the same core,
//! while each turn that finds nothing keeps the others waiting: a request took eight offers, and
//! half of the turns after them were for nothing. So after an offer that was used the thread sleeps
//! a few times, and then makes the next one. (Beside one busy loop a request and its answer took
//! 50 µs, and 54 without this.)
//!
//! To share a core is well for threads which wait for each other. Those that carry a stream work at
//! the same time, and on one core they take it from each other while a busy loop has the other one
//! to itself: the scheduler leaves them there, as both cores are busy. So such a thread, if it may
//! become real-time ([`Priority`](crate::priority::Priority)), tries its own core; another one only
//! if attempts there have failed for long, and only if hardly anybody uses that one. (Beside one
//! busy loop a stream moved 11.5 Gbit/s, and 8.9 without this. Requests of 16 KiB are no stream:
//! apart they took 78 µs instead of 55.)
//!
//! If it waits for a quarter of the time even on its own core, that counts as contended, whoever
//! has it, and the thread becomes real-time: offers would not show that, since applications use
//! them for moments only. (A stream through two such threads, with its two applications alone on
//! two cores, moved 11.1 Gbit/s, and 9.8 where they offered their cores. Short connections beside a
//! stream became fewer, 890 per second instead of 1,600, as the stream then had more of the cores.)
//!
//! A thread without a core of its own is always where the scheduler has put it, and has none to
//! try. It sleeps after offers only if it waits for its core half of the time, or has done so a
//! moment ago. (Where nobody else needed the cores, a request took 37 µs, and 66 if it always slept
//! so.) If it had better keep apart and waits for a quarter of the time, the core where it is
//! counts as contended as well. Then it becomes real-time, and the scheduler puts real-time threads
//! on different cores as long as there are enough. Here, too, offers would not show that: one of
//! two pollers on a core that is real-time already preempts the other one while that works. (Beside
//! one busy loop a stream moved 12.1 Gbit/s, and 8.4 without this.)
//!
//! Applications that always have something to do use an offer for longer than those that wait for
//! us: 70 to 400 µs where requests come as they like, instead of 10 to 55. Work piles up
//! meanwhile, and near the limit of the cores the thread falls behind. So if offers that somebody
//! uses take long on average, and a good part of the time in which we are awake, the thread
//! refrains from them for a while: it works as long as there is work, sleeps as soon as there is
//! none, and leaves the rest to the scheduler. It stays where it is. Then it offers the core
//! again, to learn whether uses are short by now. While it refrains it does not see that somebody
//! keeps the core, so that comes to light up to a second later. (Of 40,000 requests per second,
//! on 32 connections and two cores, 27,800 were answered without this, and 39,700 with it. An
//! application that computes for 100 or 200 µs before it answers a single connection looks the
//! same, and is answered up to 8 % later. To offer the core a second time now and then, and to
//! refrain only if that is used as well, tells the two apart, but it noticed too little of the
//! former.)

mod gathering;
mod homecoming;
mod naps;
mod shares;

use std::time::Duration;

use smcr_proto::Instant;

use self::gathering::Gathering;
use self::homecoming::Homecoming;
use self::naps::Naps;
pub use self::shares::Taken;
use self::shares::{Limit, Share, Shares};
use crate::allowance::PAUSE;

/// How a poller idles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Never sleep, never offer the core: for cores that belong to the poller alone.
    Spin,
    /// Go on for a while, offering the core after every turn; then sleep. Where others need the
    /// core, or use each offer for long, sleep at once.
    Adaptive,
    /// Sleep as soon as there is nothing to do.
    Block,
}

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// Take the next turn.
    Turn,
    /// Offer the core to others, then call [`Idle::after_offer`], then take the next turn.
    Yield,
    /// Sleep until something happens.
    Sleep,
}

/// The state of the policy.
///
/// After each turn call `after_turn`, and after each offer of the core `after_offer`; then look at
/// [`wants_core`](Self::wants_core). Time must not go back.
#[derive(Debug)]
pub struct Idle {
    policy: Policy,
    /// How long to go on after work, at least.
    spin: Duration,
    /// How long to go on after work now: `spin`, or `PATIENCE` times that.
    patience: Duration,
    /// Whether we have slept since we last worked, because patience had run out.
    gave_up: bool,
    worked_at: Instant,
    state: State,
    /// When the last offer of the core was advised, or ended; none if the last advice was another
    /// one. The time since then is that of the offer, or of the turn after it.
    seen_at: Option<Instant>,
    /// How long the next retreat from the core lasts, at least.
    retreat: Duration,
    /// How long the thread refrains from offers the next time.
    refrain: Duration,
    /// When it last began to make them again.
    offers_again_at: Instant,
    /// Whether there is a core of its own.
    has_core: bool,
    /// See [`Self::keep_apart`].
    apart: bool,
    /// See [`Self::note_waits`].
    waits: u8,
    gathering: Gathering,
    /// Whether its own core is kept for long, as far as attempts have shown.
    home_kept: bool,
    homecoming: Homecoming,
    naps: Naps,
}

/// Whether others need our core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Others do not need the core on which we are, as far as we know: our own, if we are at
    /// `home`, or the one where the scheduler has put us.
    Free { home: bool, shares: Shares, since: Instant },
    /// Others needed it. At `until` we try again.
    Contended { until: Instant },
    /// As in `Free`, but others used our offers for long. At `until` we make some again.
    Refraining { home: bool, shares: Shares, since: Instant, until: Instant },
    /// We are trying, where the scheduler has put us or at `home`: this many more offers must end
    /// quickly. So many were used so far.
    Trying { home: bool, offers: u32, uses: u32, since: Instant },
}

impl Idle {
    /// A policy that, if adaptive, goes on for `spin` after work; for a thread with a core of its
    /// own.
    pub fn new(policy: Policy, spin: Duration) -> Self {
        let state = State::Free { home: true, shares: Shares::default(), since: Instant(0) };
        Self {
            policy,
            spin,
            patience: spin,
            gave_up: false,
            worked_at: Instant(0),
            state,
            seen_at: None,
            retreat: RETREAT_MIN,
            refrain: REFRAIN_MIN,
            offers_again_at: Instant(0),
            has_core: true,
            apart: false,
            waits: 0,
            gathering: Gathering::default(),
            home_kept: false,
            homecoming: Homecoming::default(),
            naps: Naps::default(),
        }
    }

    /// This policy for a thread without a core of its own, which is always where the scheduler has
    /// put it. To be called before its first turn.
    #[must_use]
    pub fn without_core(self) -> Self {
        let state = State::Free { home: false, shares: Shares::default(), since: Instant(0) };
        Self { state, has_core: false, ..self }
    }

    /// Whether the thread had better not share a core with its applications and the threads that it
    /// talks to. If others need its own core, it tries that one again; if it is kept for long, also
    /// another one, but stays there only if hardly anybody uses that. It leaves its own core if it
    /// waits there for a good part of the time. A thread without one takes the core where it is for
    /// its own in this.
    pub fn keep_apart(&mut self, apart: bool) {
        self.apart = apart;
    }

    /// For how much of the time the thread has waited for a core lately, in percent: in offers,
    /// after it was woken, or because another thread was put before it.
    pub fn note_waits(&mut self, percent: u8) {
        self.waits = percent;
    }

    /// Whether most of what the load costs is the work of others: see [`Self::gathers`].
    pub fn gather(&mut self, worth_it: bool) {
        self.gathering.worth_it = worth_it;
    }

    /// Whether the thread sleeps when there is nothing to do, and lets others go on when it wakes.
    pub fn gathers(&self, now: Instant) -> bool {
        self.gathering.goes_on(now)
    }

    /// Whether it makes any difference what [`note_waits`](Self::note_waits) says.
    pub fn heeds_waits(&self) -> bool {
        self.policy == Policy::Adaptive && (self.apart || self.gathering.worth_it || !self.has_core)
    }

    /// A turn ended at `now`, and `moved` something or nothing.
    pub fn after_turn(&mut self, now: Instant, moved: bool) -> Advice {
        let rested = moved && now.since(self.worked_at) >= REST;
        if moved {
            self.learn(now);
            if now.since(self.worked_at) >= RETREAT_MAX {
                // What others did then says little of what they do now.
                (self.retreat, self.home_kept) = (RETREAT_MIN, false);
            }
            self.worked_at = now;
        }
        let advice = match self.policy {
            Policy::Spin => Advice::Turn,
            Policy::Block if moved => Advice::Turn,
            Policy::Block => Advice::Sleep,
            Policy::Adaptive => self.adapt(now, moved, rested),
        };
        self.seen_at = (advice == Advice::Yield).then_some(now);
        advice
    }

    /// Work has come. If we slept before it, would patience have saved us the sleep?
    fn learn(&mut self, now: Instant) {
        if std::mem::take(&mut self.gave_up) {
            let most = self.spin.max(self.spin.saturating_mul(PATIENCE).min(PATIENCE_MAX));
            self.patience = if now.since(self.worked_at) < most { most } else { self.spin };
        }
    }

    fn adapt(&mut self, now: Instant, moved: bool, rested: bool) -> Advice {
        if self.gathering.look(now, self.waits) {
            if !self.is_contended() {
                // Without offers, it would not be noticed if somebody keeps the core.
                self.state = State::Contended { until: now + RETREAT_MIN };
            }
            return if moved { Advice::Turn } else { Advice::Sleep };
        }
        if rested && self.has_core && !self.wants_core() && self.homecoming.is_open(now) {
            return self.attempt(true, now);
        }
        let tries_core = self.apart && self.has_core && !self.home_kept;
        let crowded = self.apart && self.waits >= CROWD;
        match &mut self.state {
            State::Contended { until } if now < *until => return Advice::Sleep,
            State::Free { home, since, .. } | State::Refraining { home, since, .. }
                if crowded && (*home || !tries_core) && now.since(*since) >= FRESH =>
            {
                self.home_kept = false;
                self.contend(now);
                return Advice::Sleep;
            }
            State::Trying { home, since, .. }
                if crowded && (*home || !self.has_core) && now.since(*since) >= FRESH =>
            {
                self.contend(now);
                return Advice::Sleep;
            }
            State::Refraining { until, .. } if now < *until => {
                return if moved { Advice::Turn } else { Advice::Sleep };
            }
            State::Refraining { home, shares, since, until } => {
                self.offers_again_at = *until;
                let shares = Shares { used: Share::default(), ..*shares };
                self.state = State::Free { home: *home, shares, since: *since };
            }
            State::Contended { .. } => return self.attempt(tries_core, now),
            State::Free { home: false, since, .. }
                if self.has_core && self.homecoming.is_due(now, *since) =>
            {
                if now.since(*since) > CALM {
                    self.retreat = RETREAT_MIN;
                }
                return self.attempt(true, now);
            }
            State::Free { home: false, .. } if tries_core => return self.attempt(true, now),
            State::Free { .. } if self.naps.take() => return Advice::Sleep,
            State::Free { shares, .. } => {
                let turn = self.seen_at.map(|before| now.since(before));
                shares.awake(turn.unwrap_or_default());
            }
            State::Trying { .. } => {}
        }
        self.gave_up = now.since(self.worked_at) >= self.patience;
        if self.gave_up { Advice::Sleep } else { Advice::Yield }
    }

    /// Begins to find out whether a core is free: its own one, or that where the scheduler has put
    /// the thread. The first offer is that of the next turn: to move, and to give the priority
    /// back, takes time that nobody had.
    fn attempt(&mut self, home: bool, now: Instant) -> Advice {
        let offers = OFFERS_TO_TRUST;
        self.state = State::Trying { home, offers, uses: 0, since: now };
        Advice::Turn
    }

    /// The offer advised last ended at `now`. Returns whether somebody took it up.
    pub fn after_offer(&mut self, now: Instant) -> Taken {
        let took = self.seen_at.map(|before| now.since(before)).unwrap_or_default();
        self.seen_at = Some(now);
        let taken = match took {
            loss if loss >= LOSS => Taken::Lost,
            short if short > TAKEN_UP => Taken::Used,
            _ => Taken::No,
        };
        let elsewhere = matches!(self.state, State::Free { home: false, .. });
        self.naps.after_offer(now, elsewhere && taken == Taken::Used, self.has_core, self.waits);
        match &mut self.state {
            State::Free { home, shares, since } => {
                shares.awake(took);
                match taken {
                    Taken::Lost if shares.lost.add(took, LOSSES) => {
                        self.contend(now);
                    }
                    Taken::Used if shares.used.add(took, LONG_USES) => {
                        let (home, shares, since) = (*home, *shares, *since);
                        let until = now + self.refrain_for(now);
                        self.state = State::Refraining { home, shares, since, until };
                    }
                    Taken::No | Taken::Used | Taken::Lost => {}
                }
            }
            State::Trying { .. } if taken == Taken::Lost => self.contend(now),
            State::Trying { home: false, uses: USES.., .. } if self.apart && self.has_core => {
                self.contend(now);
            }
            State::Trying { home, offers: 0, .. } => {
                self.home_kept &= !*home;
                self.state = State::Free { home: *home, shares: Shares::default(), since: now };
            }
            State::Trying { offers, uses, .. } => {
                *offers -= 1;
                *uses += u32::from(taken == Taken::Used);
            }
            State::Contended { .. } | State::Refraining { .. } => {}
        }
        taken
    }

    /// Others need the core.
    fn contend(&mut self, now: Instant) {
        match self.state {
            State::Trying { home: true, .. } => {
                self.home_kept |= self.retreat == RETREAT_MAX;
                self.homecoming.failed(now);
                if !self.apart {
                    // That says nothing of the core where it was.
                    self.state = State::Contended { until: now + RETREAT_MIN };
                    return;
                }
            }
            // Neither is free: they take turns.
            State::Trying { home: false, .. } => self.home_kept = false,
            // If it was free for less, we trusted it too soon, and the retreat stays long.
            State::Free { home, since, .. } | State::Refraining { home, since, .. } => {
                let trusted = now.since(since) > CALM;
                if trusted {
                    self.retreat = RETREAT_MIN;
                }
                match home {
                    true if trusted => self.homecoming.lasted(),
                    true => self.homecoming.did_not_last(),
                    false => {}
                }
            }
            State::Contended { .. } => {}
        }
        self.state = State::Contended { until: now + self.retreat };
        self.retreat = (self.retreat * 2).min(RETREAT_MAX);
    }

    /// How long to refrain from offers now.
    fn refrain_for(&mut self, now: Instant) -> Duration {
        if now.since(self.offers_again_at) > REFRAIN_MAX {
            self.refrain = REFRAIN_MIN;
        }
        let next = (self.refrain * 2).min(REFRAIN_MAX);
        std::mem::replace(&mut self.refrain, next)
    }

    /// Whether others need our core, and we sleep instead of offering it. While we try to return,
    /// offers must show whether somebody wants the core: then a thread with a raised priority would
    /// get it back at once, and learn nothing.
    pub fn is_contended(&self) -> bool {
        match self.state {
            State::Contended { .. } => true,
            State::Free { .. } | State::Refraining { .. } | State::Trying { .. } => false,
        }
    }

    /// Whether the thread refrains from offers of its core, because others used them for long.
    pub fn is_refraining(&self) -> bool {
        matches!(self.state, State::Refraining { .. })
    }

    /// Whether the thread has no core to itself, as far as it knows (others need the one on which
    /// it is, or it is finding out whether they still do), and may be drawn to its applications.
    pub fn is_in_retreat(&self, now: Instant) -> bool {
        match self.state {
            _ if self.gathers(now) => false,
            State::Contended { .. } | State::Trying { home: false, .. } => !self.apart,
            State::Free { .. } | State::Refraining { .. } | State::Trying { home: true, .. } => {
                false
            }
        }
    }

    /// Whether the thread is to be on its own core. If not, the scheduler should place it.
    pub fn wants_core(&self) -> bool {
        match self.state {
            State::Free { home, .. }
            | State::Refraining { home, .. }
            | State::Trying { home, .. } => home,
            State::Contended { .. } => false,
        }
    }
}

/// How many times longer a thread goes on after work, if the last sleep was too short to be worth
/// it. A batch of a stream keeps the next poller busy for 100 to 200 µs.
const PATIENCE: u32 = 8;
/// How long that is at most, where the operator has not said more.
const PATIENCE_MAX: Duration = Duration::from_micros(800);
/// An offer that took longer was taken up: without another thread to switch to, it takes a tenth of
/// this.
const TAKEN_UP: Duration = Duration::from_micros(5);
/// In an offer that took this long, another thread kept the core. Slices are 1.4 to 4 ms;
/// applications that wait for us are done sooner.
const LOSS: Duration = Duration::from_millis(1);
/// Losses that make a core contended: one or two are everyday life.
const LOSSES: Limit = Limit { offers: 3, each: LOSS, part: 3 };
/// So many uses in one attempt are those of somebody who goes on using the core. One or two may be
/// interrupts.
const USES: u32 = 32;
/// A thread that had better keep apart does not share its core if it waits for so much of the time,
/// in percent.
const CROWD: u8 = 25;
/// So long after an attempt began or ended, what is known of waits is of the time since.
const FRESH: Duration = Duration::from_millis(40);
/// Uses that are too long. Where applications waited for us, they took 11 µs with one connection,
/// 35 with 32, and 24 to 55 with a stream.
const LONG_USES: Limit = Limit { offers: 32, each: Duration::from_micros(80), part: 8 };
/// How long the thread refrains from offers at first. To learn that uses are still long takes 32 of
/// them, 2.6 ms or longer.
const REFRAIN_MIN: Duration = Duration::from_millis(100);
/// How long it does at most, when uses were long each time it made offers again. After it has made
/// some for longer than this, it begins anew.
const REFRAIN_MAX: Duration = Duration::from_secs(1);
/// How many offers must end quickly before a core counts as free again. On a free core, that many
/// take about a millisecond.
const OFFERS_TO_TRUST: u32 = 1000;
/// How long a contention lasts at least. An attempt to return costs a slice, so at most 4 % of the
/// time is lost.
const RETREAT_MIN: Duration = Duration::from_millis(100);
/// How long it lasts at most, after one attempt to return has failed after another. Whoever has had
/// nothing to do for as long begins anew.
const RETREAT_MAX: Duration = Duration::from_secs(5);
/// After a core was free for this long, the next retreat is as short as the first one.
const CALM: Duration = Duration::from_secs(10);
/// Who has had nothing to do for so long tries its own core at once, unless it was kept just now.
const REST: Duration = Duration::from_secs(1);

// Whoever waits for its pace sleeps.
const _: () = assert!(PATIENCE_MAX.as_nanos() < PAUSE.as_nanos());

#[cfg(test)]
mod tests {
    use super::gathering::{COMPETES, GATHERS_FOR};
    use super::homecoming::{WAIT_MAX, WAIT_MIN};
    use super::naps::{NAPS, NARROW, NARROW_FOR};
    use super::shares::MEMORY;
    use super::*;

    const SPIN: Duration = Duration::from_micros(50);
    const START: Instant = Instant(1_000_000);

    #[test]
    fn adaptive_offers_the_core_after_work_and_then_sleeps() {
        let mut idle = Idle::new(Policy::Adaptive, SPIN);
        assert_eq!(idle.after_turn(START, true), Advice::Yield);
        assert_eq!(idle.after_turn(START + SPIN / 2, false), Advice::Yield);
        assert_eq!(idle.after_turn(START + SPIN, false), Advice::Sleep);
        assert_eq!(idle.after_turn(START + SPIN, true), Advice::Yield);
    }

    /// Work that comes back soon is waited for; after a longer pause, as briefly as at first.
    #[test]
    fn a_sleep_that_was_too_short_makes_patient() {
        let mut idle = Idle::new(Policy::Adaptive, SPIN);
        let (mut now, mut waits, most) = (START, SPIN, SPIN * PATIENCE);
        for (pause, waits_then) in [
            (SECOND, SPIN),
            (most / 2, most),
            (most / 2, most),
            (most, SPIN),
            (SPIN / 2, SPIN),
            (most / 2, most),
        ] {
            // A turn halfway, and one at the very end, show whether it sleeps.
            for quiet in [pause / 2, pause] {
                let sleeps = idle.after_turn(now + quiet, false) == Advice::Sleep;
                assert_eq!(sleeps, quiet >= waits, "{quiet:?} after work, patient for {waits:?}");
            }
            now = now + pause;
            idle.after_turn(now, true);
            waits = waits_then;
        }
    }

    /// A connection that has a limit carries something each millisecond: between two of these times
    /// a poller kept a core busy where it may go on for an eighth of that.
    #[test]
    fn between_two_reads_of_a_limited_connection_it_sleeps() {
        for spin in [50, 125, 300, 700].map(Duration::from_micros) {
            let (mut idle, mut now) = (Idle::new(Policy::Adaptive, spin), START);
            for pause in [PAUSE / 2, PAUSE / 2].into_iter().chain([PAUSE; 8]) {
                let almost = Duration::from_micros(1);
                idle.after_turn(now + (pause - almost), false);
                now = now + pause;
                idle.after_turn(now, true);
            }
            assert_eq!(idle.after_turn(now + spin, false), Advice::Sleep, "{spin:?}");
        }
    }

    /// Who is told not to wait does not learn to.
    #[test]
    fn without_spinning_there_is_no_patience() {
        let mut idle = Idle::new(Policy::Adaptive, Duration::ZERO);
        for turn in 0..10 {
            let now = START + SPIN * turn;
            assert_eq!(idle.after_turn(now, true), Advice::Sleep);
        }
    }

    /// A process that nobody talks to must not use a core.
    #[test]
    fn adaptive_sleeps_from_the_start() {
        let mut idle = Idle::new(Policy::Adaptive, SPIN);
        assert_eq!(idle.after_turn(START, false), Advice::Sleep);
    }

    #[test]
    fn spin_never_sleeps_and_block_does_when_nothing_moved() {
        let late = Instant(u64::MAX / 2);
        assert_eq!(Idle::new(Policy::Spin, SPIN).after_turn(late, false), Advice::Turn);
        let mut block = Idle::new(Policy::Block, SPIN);
        assert_eq!(block.after_turn(Instant(1), true), Advice::Turn);
        assert_eq!(block.after_turn(Instant(2), false), Advice::Sleep);
    }

    /// Whatever it was doing about its core, it leaves that, and tries one again afterwards.
    #[test]
    fn with_short_connections_a_thread_that_waits_for_its_core_gathers() {
        let shares = Shares::default();
        for state in [
            State::Free { home: true, shares, since: START },
            State::Contended { until: START + SECOND / 2 },
            State::Refraining { home: true, shares, since: START, until: START + SECOND },
            State::Trying { home: true, offers: 7, uses: 0, since: START },
        ] {
            for (short, waits, gathers) in [
                (true, COMPETES, true),
                (true, 100, true),
                (true, COMPETES - 1, false),
                (false, 100, false),
            ] {
                let mut idle = Idle { state, ..Idle::new(Policy::Adaptive, SPIN) };
                idle.gather(short);
                idle.note_waits(waits);
                let advice = idle.after_turn(START, true);
                let what = (state, short, waits, advice);
                assert_eq!(idle.gathers(START), gathers, "{what:?}");
                if gathers {
                    assert_eq!(advice, Advice::Turn, "{what:?}");
                    assert_eq!(idle.after_turn(START, false), Advice::Sleep, "{what:?}");
                    assert!(idle.heeds_waits() && idle.is_contended() && !idle.wants_core());
                    assert!(!idle.is_in_retreat(START), "the scheduler places it");
                    idle.gather(false);
                    idle.after_turn(START + SECOND / 2, true);
                    assert!(matches!(idle.state, State::Trying { home: false, .. }), "{what:?}");
                    assert_eq!(idle.retreat, RETREAT_MIN, "nobody has kept it: {what:?}");
                }
            }
        }
        for policy in [Policy::Spin, Policy::Block] {
            let mut idle = Idle::new(policy, SPIN);
            idle.gather(true);
            idle.note_waits(100);
            idle.after_turn(START, true);
            assert!(!idle.gathers(START), "the operator has decided");
        }
    }

    /// It stops when it has waited no more for a while, or when the short connections are over.
    #[test]
    fn a_thread_gathers_no_longer_than_that_helps() {
        let mut idle = Idle::new(Policy::Adaptive, SPIN);
        idle.gather(true);
        idle.note_waits(COMPETES);
        assert_eq!(idle.after_turn(START, true), Advice::Turn);
        idle.note_waits(COMPETES - 1);
        let almost = START + (GATHERS_FOR - Duration::from_nanos(1));
        assert_eq!(idle.after_turn(almost, true), Advice::Turn);
        assert_eq!(idle.after_turn(START + GATHERS_FOR, true), Advice::Turn, "an attempt begins");
        assert!(!idle.gathers(START + GATHERS_FOR) && !idle.is_contended());
        assert_eq!(idle.after_turn(START + GATHERS_FOR, true), Advice::Yield);
        idle.note_waits(COMPETES);
        assert_eq!(idle.after_turn(START + GATHERS_FOR, true), Advice::Turn);
        assert!(idle.gathers(START + GATHERS_FOR));
        idle.gather(false);
        assert!(!idle.gathers(START + GATHERS_FOR));
    }

    /// A poller that is always at work, and the time.
    struct Busy {
        idle: Idle,
        now: Instant,
        /// Offers so far.
        offers: u32,
        /// How often it has slept, and begun to refrain from offers.
        sleeps: u32,
        refrainings: u32,
        /// How often somebody kept its core, and for how long in all.
        losses: u32,
        lost: Duration,
    }

    impl Busy {
        fn new() -> Self {
            Self {
                idle: Idle::new(Policy::Adaptive, SPIN),
                now: START,
                offers: 0,
                sleeps: 0,
                refrainings: 0,
                losses: 0,
                lost: Duration::ZERO,
            }
        }

        /// Works for `span`, 20 µs each turn, while every `nth` offer of the core takes `took` and
        /// the others half a microsecond. Returns how often it left its core or came back to it.
        fn work(&mut self, span: Duration, nth: u32, took: Duration) -> u32 {
            let (end, mut changes) = (self.now + span, 0);
            while self.now < end {
                let (before, refrained) = (self.idle.wants_core(), self.idle.is_refraining());
                self.now = self.now + Duration::from_micros(20);
                match self.idle.after_turn(self.now, true) {
                    Advice::Turn => {}
                    Advice::Sleep => {
                        self.sleeps += 1;
                        self.now = self.now + Duration::from_micros(30);
                    }
                    Advice::Yield => {
                        self.offers += 1;
                        let is_taken = self.offers.is_multiple_of(nth);
                        let took = if is_taken { took } else { Duration::from_nanos(500) };
                        self.now = self.now + took;
                        if self.idle.after_offer(self.now) == Taken::Lost {
                            self.losses += 1;
                            self.lost += took;
                        }
                    }
                }
                changes += u32::from(before != self.idle.wants_core());
                self.refrainings += u32::from(self.idle.is_refraining() && !refrained);
            }
            changes
        }

        /// One turn, which nobody disturbs.
        fn turn(&mut self) {
            self.work(Duration::from_micros(20), 1, Duration::ZERO);
        }
    }

    const SECOND: Duration = Duration::from_secs(1);
    const SLICE: Duration = Duration::from_millis(4);

    /// What others do on our core, and whether we stay there.
    #[test]
    fn a_core_is_left_to_those_who_keep_it() {
        let ms = Duration::from_millis;
        let us = Duration::from_micros;
        for (what, nth, took, stays) in [
            ("nobody else", 1, us(0), true),
            ("an application that answers", 1, us(15), true),
            ("32 connections of one", 1, us(75), true),
            ("a daemon that runs for 2 ms, thirty times a second", 1500, ms(2), true),
            ("a busy loop where the clock ticks 250 times a second", 1, SLICE, false),
            ("a busy loop with short slices", 1, us(1400), false),
            ("a busy loop that takes up one offer in ten", 10, SLICE, false),
        ] {
            let mut busy = Busy::new();
            let changes = busy.work(ms(60), nth, took);
            assert_eq!(busy.idle.wants_core(), stays, "{what}");
            assert_eq!(changes, u32::from(!stays), "{what}");
        }
    }

    /// While somebody uses our offers for long, we make none; the core stays ours.
    #[test]
    fn offers_that_are_used_for_long_are_not_made() {
        for (what, nth, took, makes) in [
            ("nobody else", 1, 0, true),
            ("an application that answers", 1, 15, true),
            ("a stream", 3, 55, true),
            ("a crowd that waits for answers", 1, 79, true),
            ("requests that come as they like", 1, 110, false),
            ("the same, where half of the offers find nobody", 2, 110, false),
            ("a daemon that has something to do now and then", 100, 100, true),
        ] {
            let mut busy = Busy::new();
            // Longer than its memory.
            busy.work(MEMORY * 5 / 2, nth, Duration::from_micros(took));
            let (before, tries) = (busy.offers, busy.refrainings);
            assert_eq!(tries > 0, !makes, "{what}");
            assert!(busy.idle.wants_core() && !busy.idle.is_contended(), "{what}");
            assert_eq!((busy.sleeps, busy.losses), (0, 0), "{what}");
            if makes {
                let turn = Duration::from_micros(21 + took / u64::from(nth));
                assert!(turn * before > MEMORY * 2, "{what}: {before} offers");
            } else {
                assert_eq!(before, tries * nth * LONG_USES.offers, "{what}");
                assert_eq!(busy.idle.after_turn(busy.now, false), Advice::Sleep, "{what}");
            }
        }
    }

    const LONG: Duration = Duration::from_micros(110);

    /// As long as uses are long, hardly any offers are made; and soon after uses have become short,
    /// they are made as if nothing had been.
    #[test]
    fn offers_are_tried_again() {
        let mut busy = Busy::new();
        busy.work(30 * SECOND, 1, LONG);
        // After 0.1, 0.2, 0.4 and 0.8 s, then after each second.
        assert_eq!((busy.refrainings, busy.offers), (33, 33 * LONG_USES.offers));
        busy.work(REFRAIN_MAX, 1, Duration::ZERO);
        let before = busy.offers;
        busy.work(2 * REFRAIN_MAX, 1, Duration::ZERO);
        assert!(busy.offers - before > 90_000, "{} offers", busy.offers - before);
        busy.work(REFRAIN_MIN / 2, 1, LONG);
        let State::Refraining { until, .. } = busy.idle.state else { panic!("{:?}", busy.idle) };
        assert!(until < busy.now + REFRAIN_MIN, "what was long ago does not count");
    }

    /// Nor does it after an hour without work.
    #[test]
    fn it_is_not_held_against_new_work() {
        let mut busy = Busy::new();
        busy.work(30 * SECOND, 1, LONG);
        busy.now = busy.now + 3600 * SECOND;
        busy.work(REFRAIN_MIN / 2, 1, LONG);
        let State::Refraining { until, .. } = busy.idle.state else { panic!("{:?}", busy.idle) };
        assert!(until < busy.now + REFRAIN_MIN);
    }

    /// Applications that use the core for long do not hide a program that keeps it, whether that
    /// was there before or comes meanwhile. And they do not keep a thread from its own core.
    #[test]
    fn long_uses_do_not_hide_losses() {
        for alone in [Duration::ZERO, SECOND] {
            let mut busy = Busy::new();
            busy.work(alone, 1, LONG);
            let begun = busy.now;
            while !busy.idle.is_contended() && busy.now < begun + 10 * SECOND {
                let is_lost = busy.offers.is_multiple_of(20);
                busy.work(Duration::from_micros(20), 1, if is_lost { SLICE } else { LONG });
            }
            assert!(busy.now < begun + 4 * SECOND, "{:?}", busy.now.since(begun));
            while !busy.idle.wants_core() {
                busy.work(Duration::from_micros(20), 1, LONG);
            }
            let back = busy.now.since(begun);
            assert!((WAIT_MIN..5 * SECOND).contains(&back), "at home after {back:?}");
        }
    }

    /// A single request per second, each answered 4 ms late, is contention as well: what counts is
    /// the time in which we are awake.
    #[test]
    fn contention_is_noticed_at_a_low_rate() {
        let mut busy = Busy::new();
        for request in 1..=LOSSES.offers {
            busy.work(Duration::from_micros(20), 1, SLICE);
            assert_eq!(busy.idle.wants_core(), request < LOSSES.offers);
            busy.now = busy.now + SPIN;
            assert_eq!(busy.idle.after_turn(busy.now, false), Advice::Sleep);
            busy.now = busy.now + SECOND;
        }
    }

    /// A crowd that left keeps all cores busy for a moment, and then there is quiet. Whoever comes
    /// afterwards must not find a thread that sleeps for seconds because of the crowd.
    #[test]
    fn old_contention_is_forgotten() {
        for (quiet, soon) in [(RETREAT_MAX, true), (REST, true), (REST / 2, false)] {
            let mut busy = Busy::new();
            busy.work(20 * SECOND, 1, SLICE);
            assert!(busy.idle.is_contended());
            busy.now = busy.now + quiet;
            // The first attempt meets somebody who begins at the same time.
            busy.work(SLICE, 1, SLICE);
            busy.work(2 * RETREAT_MIN, 1, Duration::ZERO);
            assert_eq!(!busy.idle.is_contended(), soon, "{quiet:?}");
            let forgotten = busy.idle.retreat == RETREAT_MIN;
            assert_eq!(forgotten, quiet >= RETREAT_MAX, "{quiet:?}: {:?}", busy.idle.retreat);
        }
    }

    /// Trying costs a slice each time, so it becomes rare; and as long as the others are there, the
    /// thread stays where the scheduler has put it.
    #[test]
    fn attempts_to_return_become_rare() {
        let mut busy = Busy::new();
        busy.work(SECOND / 10, 1, SLICE);
        (busy.losses, busy.lost) = (0, Duration::ZERO);
        assert_eq!(busy.work(60 * SECOND, 1, SLICE), 0);
        assert!((10..=20).contains(&busy.losses), "{} attempts in a minute", busy.losses);
        assert!(busy.lost < SECOND / 4, "{:?} of a minute lost", busy.lost);
    }

    /// Where the scheduler has put it, the core may be free while its own one is not. It finds out
    /// by going there, but ever more rarely, and does not stay.
    #[test]
    fn a_core_of_its_own_that_others_need_is_left_again() {
        let mut busy = Busy::new();
        busy.work(SECOND / 10, 1, SLICE);
        for (attempt, retreat) in [2, 2, 2, 2, 2, 1, 1].into_iter().enumerate() {
            while busy.idle.is_contended() {
                busy.turn();
            }
            let begun = busy.now;
            while !busy.idle.wants_core() {
                busy.turn();
            }
            let (stayed, at_least) =
                (busy.now.since(begun), (WAIT_MIN * (2 << attempt)).min(WAIT_MAX));
            let expected = at_least..at_least + SECOND / 10;
            assert!(expected.contains(&stayed), "it stays where it is well: {attempt}, {stayed:?}");
            assert_eq!(busy.work(SECOND / 20, 1, SLICE), 1, "it leaves at the first loss");
            assert!(busy.idle.is_contended() && busy.idle.retreat == retreat * RETREAT_MIN);
        }
    }

    /// When the others are gone, it goes on wherever it is within the time of the last retreat, and
    /// takes its own core back a moment later.
    #[test]
    fn a_free_core_is_taken_back_and_kept() {
        let mut busy = Busy::new();
        busy.work(SECOND / 2, 1, SLICE);
        assert!(busy.idle.is_contended());
        while busy.idle.is_contended() {
            busy.turn();
        }
        // It was there for a moment only before it left.
        busy.work(WAIT_MIN, 1, Duration::ZERO);
        assert!(!busy.idle.is_contended() && !busy.idle.wants_core());
        assert_eq!(busy.work(2 * WAIT_MIN, 1, Duration::ZERO), 1);
        assert!(busy.idle.wants_core());
        assert_eq!(busy.work(60 * SECOND, 1, Duration::ZERO), 0);
        while busy.idle.wants_core() {
            busy.work(SECOND / 100, 1, SLICE);
        }
        let since = Instant(0);
        let is_due = |after| busy.idle.homecoming.is_due(since + after, since);
        assert!(!is_due(WAIT_MIN) && is_due(2 * WAIT_MIN), "it was well there");
    }

    /// A burst makes it leave, and then there is quiet, in which it makes no offers and learns
    /// nothing. Who comes afterwards finds it on its own core, and not asleep elsewhere, whether it
    /// has looked at its timers meanwhile or not.
    #[test]
    fn after_a_rest_it_is_on_its_own_core() {
        for timers in [false, true] {
            for (quiet, home) in [(REST, true), (REST - SECOND / 100, false)] {
                let mut busy = Busy::new();
                busy.work(SECOND / 10, 1, SLICE);
                assert!(busy.idle.is_contended());
                let until = busy.now + quiet;
                while timers && busy.now < until {
                    busy.idle.after_turn(busy.now, false);
                    busy.now = busy.now + SECOND / 10;
                }
                busy.now = until;
                assert!(!busy.idle.wants_core(), "the first work is done wherever a core is free");
                busy.idle.after_turn(busy.now, true);
                assert_eq!(busy.idle.wants_core(), home, "{timers}, {quiet:?}");
                busy.work(SECOND / 10, 1, Duration::ZERO);
                let is_there = matches!(busy.idle.state, State::Free { home: true, .. });
                assert_eq!(is_there, home, "{timers}, {quiet:?}");
            }
            let mut busy = Busy::new();
            busy.idle = Idle::new(Policy::Adaptive, SPIN).without_core();
            busy.now = busy.now + 2 * RETREAT_MAX;
            busy.idle.after_turn(busy.now, !timers);
            assert!(!busy.idle.wants_core(), "it has none");
        }
    }

    /// After a long rest it has forgotten that its own core was kept for long; after a short one it
    /// has not.
    #[test]
    fn a_long_rest_makes_forget() {
        for (quiet, forgets) in [(RETREAT_MAX, true), (RETREAT_MAX - SECOND / 100, false)] {
            let mut busy = Busy::new();
            busy.idle.keep_apart(true);
            busy.work(20 * SECOND, 1, SLICE);
            busy.idle.home_kept = true;
            busy.now = busy.now + quiet;
            busy.idle.after_turn(busy.now, true);
            assert_eq!(busy.idle.home_kept, !forgets, "{quiet:?}");
        }
    }

    /// Requests so far apart that each of them finds a thread that has rested must not cost a slice
    /// each, where somebody keeps its core.
    #[test]
    fn rare_requests_lose_little() {
        let mut busy = Busy::new();
        busy.work(SECOND / 10, 1, SLICE);
        busy.losses = 0;
        let mut attempts = 0;
        for _ in 0..60 {
            busy.now = busy.now + REST + SECOND / 10;
            busy.idle.after_turn(busy.now, true);
            attempts += u32::from(busy.idle.wants_core());
            let took = if busy.idle.wants_core() { SLICE } else { Duration::ZERO };
            busy.work(Duration::from_micros(100), 1, took);
        }
        assert!((6..=12).contains(&attempts) && busy.losses <= attempts, "{attempts}");
    }

    /// Only a thread that has retreated may raise its priority, and only one that has not stays on
    /// its core.
    #[test]
    fn what_each_state_allows() {
        let (shares, since, until) = (Shares::default(), START, START);
        // Is it on its own core, without one, contended, refraining?
        for (state, expected) in [
            (State::Free { home: true, shares, since }, [true, false, false, false]),
            (State::Free { home: false, shares, since }, [false, false, false, false]),
            (State::Contended { until }, [false, true, true, false]),
            (State::Refraining { home: true, shares, since, until }, [true, false, false, true]),
            (State::Refraining { home: false, shares, since, until }, [false, false, false, true]),
            (State::Trying { home: false, offers: 9, uses: 0, since }, [false, true, false, false]),
            (State::Trying { home: true, offers: 9, uses: 0, since }, [true, false, false, false]),
        ] {
            // One that keeps apart is not drawn to its applications meanwhile.
            for apart in [false, true] {
                let idle = Idle { state, apart, ..Idle::new(Policy::Adaptive, SPIN) };
                let [own, retreat, contended, refraining] = expected;
                let expected = [own, retreat && !apart, contended, refraining];
                let is = [
                    idle.wants_core(),
                    idle.is_in_retreat(START),
                    idle.is_contended(),
                    idle.is_refraining(),
                ];
                assert_eq!(is, expected, "{state:?}, apart: {apart}");
            }
        }
    }

    /// Away from its own core, a thread sleeps beside those who use its offers, and only there. It
    /// still notices when somebody keeps that core, too.
    #[test]
    fn away_from_its_core_a_thread_naps_beside_those_who_use_it() {
        let use_for = Duration::from_micros(15);
        for (home, took, naps) in
            [(false, use_for, NAPS), (false, Duration::ZERO, 0), (true, use_for, 0)]
        {
            let mut busy = Busy::new();
            busy.idle.state = State::Free { home, shares: Shares::default(), since: START };
            busy.work(SECOND / 10, 1, took);
            let (offers, sleeps) = (busy.offers, busy.sleeps);
            let naps = naps * (offers - 1)..=naps * offers;
            assert!(offers > 100 && naps.contains(&sleeps), "{took:?}: {offers}, {sleeps}");
            busy.work(SECOND / 10, 1, SLICE);
            assert!(busy.idle.is_contended() && busy.losses <= 10, "{took:?}: {}", busy.losses);
        }
    }

    /// One without a core of its own begins that only where it waits for half of the time, and goes
    /// on until nobody uses its offers. For a while it then begins again without waiting for as
    /// much.
    #[test]
    fn a_thread_without_a_core_naps_where_it_is_narrow() {
        let use_for = Duration::from_micros(15);
        let mut busy = Busy::new();
        busy.idle = Idle::new(Policy::Adaptive, SPIN).without_core();
        for (waits, took, naps) in [
            (NARROW - 1, use_for, false),
            (NARROW, Duration::ZERO, false),
            (NARROW, use_for, true),
            (0, use_for, true),
            (0, Duration::ZERO, false),
            (0, use_for, true),
            (0, Duration::ZERO, false),
            (NARROW - 1, Duration::ZERO, false),
            (NARROW - 1, use_for, false),
        ] {
            busy.idle.note_waits(waits);
            // What has begun ends with the next offer.
            busy.work(SECOND / 100, 1, took);
            let before = busy.sleeps;
            busy.work(SECOND / 10, 1, took);
            assert_eq!(busy.sleeps - before > 1000, naps, "{waits}, {took:?}");
        }
        let since = busy.now.since(busy.idle.naps.narrow_at().unwrap());
        assert!((NARROW_FOR..2 * NARROW_FOR).contains(&since), "{since:?}");
    }

    /// One without a core of its own does not sleep beside them, and is drawn to no core.
    #[test]
    fn a_thread_without_a_core_stays_where_it_is() {
        let mut busy = Busy::new();
        busy.idle = Idle::new(Policy::Adaptive, SPIN).without_core();
        let mut run = |span, took| {
            let changes = busy.work(span, 1, took);
            assert!(changes == 0 && !busy.idle.wants_core());
            (busy.idle.is_contended(), busy.sleeps)
        };
        assert_eq!(run(2 * CALM, Duration::from_micros(15)), (false, 0), "others use its offers");
        assert!(run(SECOND / 2, SLICE).0, "they keep the core");
        assert!(!run(2 * SECOND, Duration::ZERO).0);
        let (contended, sleeps) = run(2 * CALM, Duration::ZERO);
        assert_eq!((contended, run(SECOND, Duration::ZERO)), (false, (false, sleeps)));
    }

    /// One that keeps apart takes its core for contended if others have much of it, as long as they
    /// do; but it tries rarely.
    #[test]
    fn a_thread_without_a_core_that_keeps_apart_leaves_a_crowd() {
        for (apart, crowded, leaves) in
            [(false, true, false), (true, false, false), (true, true, true)]
        {
            let mut busy = Busy::new();
            busy.idle = Idle::new(Policy::Adaptive, SPIN).without_core();
            busy.idle.keep_apart(apart);
            busy.work(FRESH, 1, Duration::ZERO);
            busy.idle.note_waits(if crowded { CROWD } else { CROWD - 1 });
            busy.turn();
            assert_eq!(busy.idle.is_contended(), leaves, "{apart}, {crowded}");
            let (mut contentions, mut contended) = (0, leaves);
            for _ in 0..1_000_000 {
                busy.turn();
                let before = std::mem::replace(&mut contended, busy.idle.is_contended());
                contentions += u32::from(contended && !before);
            }
            let seconds = u32::try_from(busy.now.since(START).as_secs()).unwrap();
            let at_most = if leaves { 6 + seconds / 5 } else { 0 };
            assert!(contentions <= at_most, "{contentions} in {seconds} s");
            busy.idle.note_waits(0);
            busy.work(RETREAT_MAX + SECOND, 1, Duration::ZERO);
            assert!(!busy.idle.is_contended(), "nobody is there any more");
        }
    }

    /// It leaves a crowd also while it makes no offers. That its applications use those does not
    /// keep it from trying again.
    #[test]
    fn a_crowd_is_noticed_in_other_ways_than_by_offers() {
        let mut busy = Busy::new();
        busy.idle = Idle::new(Policy::Adaptive, SPIN).without_core();
        busy.idle.keep_apart(true);
        busy.work(FRESH, 1, LONG);
        assert!(busy.idle.is_refraining());
        busy.idle.note_waits(CROWD);
        busy.turn();
        assert!(busy.idle.is_contended());
        // It tries again, and learns within 40 ms that they are still there.
        for _ in 0..5 {
            while busy.idle.is_contended() {
                busy.turn();
            }
            let begun = busy.now;
            while !busy.idle.is_contended() {
                busy.work(Duration::from_micros(20), 1, Duration::from_micros(80));
            }
            let tried = busy.now.since(begun);
            assert!((FRESH..FRESH + SECOND / 1000).contains(&tried), "{tried:?}");
        }
        busy.idle.note_waits(0);
        busy.work(RETREAT_MAX + SECOND, 1, Duration::from_micros(15));
        assert!(!busy.idle.is_contended());
    }

    /// A core of its own that was kept for long is tried again if the other one is crowded.
    #[test]
    fn a_thread_in_a_crowd_goes_back_to_its_own_core() {
        let mut busy = Busy::new();
        busy.idle.keep_apart(true);
        busy.idle.state = State::Free { home: false, shares: Shares::default(), since: START };
        (busy.idle.home_kept, busy.idle.retreat) = (true, RETREAT_MAX);
        busy.work(FRESH, 1, Duration::ZERO);
        busy.idle.note_waits(CROWD);
        busy.turn();
        assert!(busy.idle.is_contended(), "it leaves the crowd");
        while !busy.idle.wants_core() {
            busy.turn();
        }
        busy.idle.note_waits(0);
        assert_eq!(busy.work(2 * RETREAT_MAX, 1, Duration::ZERO), 0);
        assert!(!busy.idle.is_contended() && busy.idle.wants_core());
    }

    /// One on its own core leaves it to a crowd, and tries it again, ever more rarely.
    #[test]
    fn a_thread_leaves_its_own_core_to_a_crowd() {
        // Moments, in which an attempt ends before much is known; longer ones; and so long that the
        // thread makes no offers.
        for (use_for, refrains) in [(6, false), (50, false), (80, true)] {
            let use_for = Duration::from_micros(use_for);
            let mut busy = Busy::new();
            busy.idle.keep_apart(true);
            busy.work(SECOND / 10, 1, use_for);
            assert_eq!((busy.idle.is_refraining(), busy.idle.wants_core()), (refrains, true));
            busy.idle.note_waits(CROWD - 1);
            busy.turn();
            assert!(busy.idle.wants_core(), "that is no crowd yet");
            busy.idle.note_waits(CROWD);
            busy.turn();
            assert!(busy.idle.is_contended() && !busy.idle.wants_core());
            let begun = busy.now;
            for _ in 0..5 {
                while busy.idle.is_contended() {
                    busy.turn();
                }
                assert!(busy.idle.wants_core());
                let tried_at = busy.now;
                while busy.idle.wants_core() {
                    busy.work(Duration::from_micros(20), 1, use_for);
                }
                let tried = busy.now.since(tried_at);
                assert!(tried >= FRESH && tried < 3 * FRESH, "{use_for:?}: {tried:?}");
            }
            assert!(busy.now.since(begun) > 31 * RETREAT_MIN, "it tries ever more rarely");
            busy.idle.note_waits(0);
            busy.work(RETREAT_MAX + CALM + SECOND, 1, use_for);
            assert!(busy.idle.wants_core() && !busy.idle.is_contended());
        }
    }

    /// Who keeps apart comes back to its own core as soon as it tries any, and goes back there if
    /// another one is free. If others still need it, it leaves it at the first loss.
    #[test]
    fn a_thread_that_keeps_apart_tries_its_own_core() {
        let mut busy = Busy::new();
        busy.idle.keep_apart(true);
        assert_eq!(busy.work(SECOND / 10, 1, SLICE), 1, "it leaves");
        while busy.idle.is_contended() {
            busy.turn();
        }
        assert!(busy.idle.wants_core(), "it tries its own");
        assert_eq!(busy.work(SECOND / 20, 1, SLICE), 1, "and leaves it");
        assert!(busy.idle.is_contended() && busy.lost <= 5 * SLICE, "{:?}", busy.lost);
        // Elsewhere it is free, and does not care.
        busy.idle.keep_apart(false);
        while busy.idle.is_contended() {
            busy.turn();
        }
        busy.work(WAIT_MIN / 2, 1, Duration::ZERO);
        assert!(!busy.idle.is_contended() && !busy.idle.wants_core());
        busy.idle.keep_apart(true);
        busy.turn();
        assert!(busy.idle.wants_core(), "it goes back at once");
        assert_eq!(busy.work(SECOND, 1, Duration::ZERO), 0);
        assert!(!busy.idle.is_contended());
    }

    /// If its own core is kept for good, it goes on elsewhere, but only where nobody uses the core.
    #[test]
    fn a_thread_that_keeps_apart_finds_a_core_that_nobody_uses() {
        for (used, finds) in [(Duration::ZERO, true), (Duration::from_micros(50), false)] {
            let mut busy = Busy::new();
            busy.idle.keep_apart(true);
            let mut run = |seconds, home, at_least| {
                let (end, mut elsewhere) = (busy.now + seconds * SECOND, 0);
                while busy.now < end {
                    let took = if busy.idle.wants_core() { home } else { used };
                    busy.work(Duration::from_micros(20), 1, took);
                    elsewhere += u32::from(!busy.idle.is_contended() && !busy.idle.wants_core());
                }
                (elsewhere > at_least, busy.idle.is_contended(), busy.idle.wants_core())
            };
            assert_eq!(run(4, SLICE, 0), (false, true, false), "it tries its own core first");
            assert_eq!(run(26, SLICE, 10_000).0, finds);
            // Three quarters of the turns there are room for.
            let (found, losses) = (run(40, SLICE, 1_500_000).0, busy.losses);
            assert!(found == finds && losses <= 20, "{losses}: once found, it is found again");
            let mut run = |seconds, home| busy.work(seconds * SECOND, 1, home);
            run(60, Duration::ZERO);
            let idle = &busy.idle;
            assert!(!idle.is_contended() && idle.wants_core(), "it goes home when that is free");
        }
    }

    /// A load that is large in one moment and small in the next, where others need the thread's own
    /// core and no other.
    #[test]
    fn a_load_that_changes_makes_attempts_no_more_frequent() {
        let mut busy = Busy::new();
        for turn in 0..1_000_000 {
            busy.idle.keep_apart(turn / 5000 % 2 == 0);
            let took = if busy.idle.wants_core() { SLICE } else { Duration::ZERO };
            busy.work(Duration::from_micros(20), 1, took);
        }
        let seconds = u32::try_from(busy.now.since(START).as_secs()).unwrap();
        assert!(seconds >= 20 && busy.losses <= 10 + seconds / 5, "{} in {seconds} s", busy.losses);
    }

    /// Somebody who comes and goes every second must not make us come and go with him for ever.
    #[test]
    fn returning_does_not_oscillate() {
        let mut busy = Busy::new();
        let changes: u32 = (0..60)
            .map(|second| {
                let took = if second % 2 == 0 { SLICE } else { Duration::ZERO };
                busy.work(SECOND, 1, took)
            })
            .sum();
        assert!(changes <= 50, "{changes} in a minute");
        // But he who comes once an hour finds us as ready to return as the first time.
        let mut busy = Busy::new();
        for _ in 0..5 {
            busy.work(SECOND, 1, SLICE);
            busy.work(60 * SECOND, 1, Duration::ZERO);
            assert!(busy.idle.wants_core());
            assert!(busy.idle.retreat <= 16 * RETREAT_MIN);
        }
    }
}
