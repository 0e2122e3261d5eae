//! The kind of load that a poller carries: whether it gains by running before everybody else.
//!
//! A thread that runs at once whenever it has something to do is never late, but it interrupts the
//! application that gives it something to do. One that reads many small requests from many
//! connections is then interrupted after each of the answers that it writes, and batches become
//! small. So such a load is left to the scheduler, which lets the application go on for a while.
//! Few connections have nothing to gather, and large pieces cost what they cost, in batches or not.
//! (Where hundreds of connections always have something to do, that is not so: see `crowd`.)
//!
//! Short connections are the other extreme. Most of what they cost is the work of others, above all
//! of the control threads, and each of them needs a poller a few times, for a moment. A poller that
//! runs at once each time interrupts others thousands of times a second.
//!
//! (Beside two busy loops, each program in a session of its own, with real-time pollers for every
//! load: a stream 9.6 Gbit/s instead of 4.2, sixteen streams 7.4 instead of 5.0, requests of 16 KiB
//! on eight connections 15.0 thousand per second instead of 9.7, of 64 bytes on two 24.2 instead of
//! 14.6, on four as before; but on sixteen 27.4 instead of 36.9. To pause for 50 µs between turns
//! brought the batches back, and 46 to 54 thousand per second on 32 connections in most runs, but
//! 11 to 18 in the others.)

use std::time::Duration;

use smcr_proto::Instant;

use crate::crowd::{self, Crowd};

/// What a poller carries in one window of time, and what that said in those before it.
#[derive(Debug, Default)]
pub(crate) struct Load {
    since: Instant,
    /// How many bytes had moved inward and outward when the window began, and at the last look.
    bytes: [u64; 2],
    seen: [u64; 2],
    /// How many looks in it saw that something has moved, and how many of these another direction
    /// than the one before, or both.
    looks: u32,
    turns: u32,
    /// The direction in which something moved last: inward or not.
    inward: bool,
    /// How often something has moved in it, and how often for another connection than before.
    times: u32,
    others: u32,
    /// The slot of the connection for which something has moved last.
    slot: u16,
    /// The slots of the connections for which it has, a bit for each of 64 groups of slots. In a
    /// table of thousands, few connections are hardly ever of one group.
    slots: u64,
    /// How long the thread has slept in it.
    slept: Duration,
    /// How many windows in a row were those of a load that gains.
    gaining: u32,
    stream: Settled,
    /// How many connections had come when the window began.
    came: u64,
    short: Settled,
    /// How long the thread had waited for a core when the window began, if that was asked, and what
    /// part of each of the windows before, in percent.
    waited: Option<Duration>,
    waits: [u8; STEADY as usize],
    crowd: Crowd,
}

/// What is believed of a load, and how many windows in a row have said the opposite.
#[derive(Clone, Copy, Debug, Default)]
struct Settled {
    is: bool,
    opposite: u32,
}

impl Settled {
    fn after(self, says: bool) -> Self {
        let opposite = if says == self.is { 0 } else { self.opposite + 1 };
        if opposite == STEADY { Self { is: says, opposite: 0 } } else { Self { opposite, ..self } }
    }
}

impl Load {
    /// Something moved for the connection in this slot.
    pub(crate) fn note(&mut self, slot: u16) {
        self.times = self.times.saturating_add(1);
        let last = std::mem::replace(&mut self.slot, slot);
        self.others = self.others.saturating_add(u32::from(slot != last));
        self.slots |= 1 << crowd::group_of::<64>(slot);
        self.crowd.note(slot);
    }

    /// The thread slept from `before` until `now`.
    pub(crate) fn slept(&mut self, before: Instant, now: Instant) {
        let time = now.since(before);
        if time >= SLEEP_MIN {
            self.slept += time;
        }
    }

    /// Whether the poller gains by running before everybody else, by what it carried lately, and
    /// leaves them some of its core. So many bytes have moved inward (read from applications) and
    /// outward so far, and so many connections have come. If somebody wants to know how much the
    /// thread waits for a core, `waited` says for how long it has so far. To be asked after each
    /// turn of the poller.
    pub(crate) fn gains_by_haste(
        &mut self,
        now: Instant,
        bytes: [u64; 2],
        came: u64,
        waited: impl FnOnce() -> Option<Duration>,
    ) -> bool {
        self.look(bytes);
        let window = now.since(self.since);
        if window >= WINDOW {
            let waited = waited();
            let [_, before, last] = self.waits;
            let in_it = waited.zip(self.waited).map(|(now, then)| now.saturating_sub(then));
            let waits = [before, last, percent(in_it.unwrap_or_default(), window)];
            let few = self.slots.count_ones() <= FEW;
            let moved = bytes[0].wrapping_sub(self.bytes[0]) + bytes[1].wrapping_sub(self.bytes[1]);
            let large = moved >= LARGE * u64::from(self.times);
            let stream = large && self.turns * ONE_WAY <= self.looks;
            let gaining = match self.times {
                _ if self.slept * PART < window => 0,
                0 => self.gaining,
                _ if few || large => (self.gaining + 1).min(STEADY),
                _ => 0,
            };
            let newcomers = came.wrapping_sub(self.came);
            let short = !large && self.is_short(newcomers, window);
            *self = Self {
                since: now,
                bytes,
                seen: bytes,
                inward: self.inward,
                gaining,
                stream: if self.times == 0 { self.stream } else { self.stream.after(stream) },
                came,
                slot: self.slot,
                short: self.short.after(short),
                waited,
                waits,
                crowd: std::mem::take(&mut self.crowd),
                ..Self::default()
            };
        }
        self.gaining == STEADY
    }

    /// Whether it carries streams: large pieces, which go on and on in one direction. Then the
    /// threads between which they go work at the same time, if they have a core each. Requests of
    /// the same size go to and fro: one thread works after another, and they had better share one.
    /// So it looks where streams go in both directions at once, which this calls none.
    pub(crate) fn is_stream(&self) -> bool {
        self.stream.is
    }

    /// Whether nearly all that it carries is that of many short connections.
    pub(crate) fn is_short_connections(&self) -> bool {
        self.short.is
    }

    /// Whether it carries requests of so many lasting connections that there is always something to
    /// do: see [`Crowd::is_there`]. To be asked after each turn of the poller.
    pub(crate) fn is_crowd(
        &mut self,
        now: Instant,
        awake: impl FnOnce() -> Option<Duration>,
    ) -> bool {
        self.crowd.is_there(now, awake) && !self.is_stream() && !self.is_short_connections()
    }

    /// Whether the window, of this length, was one of many short connections: so many have come.
    fn is_short(&self, newcomers: u64, window: Duration) -> bool {
        let least = if self.short.is { NEWCOMERS / 2 } else { NEWCOMERS };
        let many = Duration::from_millis(newcomers.saturating_mul(1000)) >= window * least;
        let little_else = u64::from(self.times) <= newcomers * PIECES;
        // One after another, each has all its pieces in a row.
        let mixed = u64::from(self.others) * 2 >= newcomers * 3;
        many && little_else && mixed
    }

    /// For how much of the time the thread has waited for a core lately, in percent: for as much in
    /// each of the last windows, or more. Nothing until somebody has asked for some windows.
    pub(crate) fn waits(&self) -> u8 {
        self.waits.into_iter().min().unwrap_or_default()
    }

    fn look(&mut self, bytes: [u64; 2]) {
        let moved = [bytes[0] != self.seen[0], bytes[1] != self.seen[1]];
        self.seen = bytes;
        let [inward, outward] = moved;
        if inward || outward {
            self.looks += 1;
            self.turns += u32::from(inward && outward || inward != self.inward);
            self.inward = inward;
        }
    }
}

fn percent(part: Duration, whole: Duration) -> u8 {
    // A wait that began long ago counts where it ends.
    let percent = part.min(whole).as_nanos() * 100 / whole.as_nanos();
    u8::try_from(percent).expect("a part of the whole")
}

/// How often to decide.
const WINDOW: Duration = Duration::from_millis(10);
/// After so many windows in a row we believe it: where a core is kept by others, a window of many
/// connections may see few.
const STEADY: u32 = 3;
/// A thread that sleeps for less than one part in this many of a window leaves others too little:
/// of the core, and of what it may wait for itself without knowing. (It counts as sleep, too, when
/// another real-time thread keeps it from the core. Several pollers on one core are bounded only by
/// the kernel, which keeps as much for ordinary threads, but once in a second. To subtract such
/// waits was tried: an application in a system call makes a real-time thread wait as well, so the
/// priority came and went, and beside one busy loop a stream moved a fifth less.)
const PART: u32 = 20;
/// Not to sleep after all takes a microsecond or two.
const SLEEP_MIN: Duration = Duration::from_micros(5);
/// So many connections have nothing to gather.
const FEW: u32 = 4;
/// Bytes at a time that are as many as one can wish, on average.
const LARGE: u64 = 4096;
/// So many connections must come in a second, or half as many once that has been so, with no more
/// pieces than this for each of them: with a request and its answer there are two to four.
const NEWCOMERS: u32 = 1000;
const PIECES: u64 = 8;
/// What goes on in one direction turns at most once in so many times.
const ONE_WAY: u32 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    /// What a window carries: so many pieces of so many bytes for each of these slots.
    #[derive(Clone, Copy)]
    struct Window {
        slots: (u16, u16),
        pieces: u32,
        bytes: u64,
        /// Each so manieth piece goes outward; none if 0.
        turns_after: u32,
        slept: Duration,
        /// How many connections come.
        came: u64,
    }

    /// One with so many connections, of a thread that sleeps half of the time.
    fn window(connections: u16, pieces: u32, bytes: u64) -> Window {
        let (slots, slept) = ((connections, 1), WINDOW / 2);
        Window { slots, pieces, bytes, turns_after: 0, slept, came: 0 }
    }

    fn carry(load: &mut Load, at: Instant, window: Window) -> bool {
        let mut moved = load.bytes;
        let (connections, stride) = window.slots;
        for piece in 0..window.pieces {
            for slot in 0..connections {
                load.note(slot * stride);
                let outward = piece.checked_rem(window.turns_after) == Some(0);
                moved[usize::from(outward)] += window.bytes;
                load.look(moved);
            }
        }
        load.slept(at, at + window.slept);
        load.gains_by_haste(at, moved, load.came + window.came, || None)
    }

    /// Three windows of this kind, which follow those before, and what is said after each.
    fn carry_three(load: &mut Load, window: Window, says: fn(&Load) -> bool) -> [bool; 3] {
        [(); 3].map(|()| {
            let at = load.since + WINDOW;
            carry(load, at, window);
            says(load)
        })
    }

    #[test]
    fn each_load_gains_or_not() {
        for (window, gains) in [
            (window(1, 100, 64), true),
            (window(4, 100, 64), true),
            (window(5, 100, 64), false),
            (window(32, 10, 64), false),
            (window(5, 100, 4095), false),
            (window(5, 100, 4096), true),
            (window(16, 10, 131_072), true),
            // One thousand, of which a window sees each once.
            (window(1000, 1, 64), false),
            // Those of one poller of sixteen.
            (Window { slots: (8, 16), ..window(8, 10, 64) }, false),
            // Others must have some of the core.
            (Window { slept: WINDOW / PART, ..window(1, 100, 64) }, true),
            (Window { slept: WINDOW / (PART + 1), ..window(1, 100, 64) }, false),
            (Window { slept: Duration::ZERO, ..window(16, 10, 131_072) }, false),
        ] {
            let mut load = Load::default();
            let said = [1, 2, 3, 4].map(|at| carry(&mut load, Instant(0) + WINDOW * at, window));
            let Window { slots, bytes, slept, .. } = window;
            assert_eq!(said, [false, false, gains, gains], "{:?}", (slots, bytes, slept));
        }
    }

    /// Whether or not anybody gains by haste, and however many connections there are.
    #[test]
    fn what_goes_on_in_one_direction_is_a_stream() {
        let large = window(1, 100, LARGE);
        for (what, window, stream) in [
            ("a stream", large, true),
            ("that comes from the peer", Window { turns_after: 1, ..large }, true),
            ("some of them", Window { slots: (16, 1), ..large }, true),
            ("nobody sleeps", Window { slept: Duration::ZERO, ..large }, true),
            ("something else now and then", Window { turns_after: 20, ..large }, true),
            ("requests and answers", Window { turns_after: 2, ..large }, false),
            ("requests of some pieces", Window { turns_after: 8, ..large }, false),
            ("small pieces", window(1, 100, LARGE - 1), false),
        ] {
            let mut load = Load::default();
            let mut run = |window| carry_three(&mut load, window, Load::is_stream);
            assert_eq!(run(window), [false, false, stream], "{what}");
            // One window that says something else, or nothing, changes nothing.
            assert_eq!(run(Window { pieces: 0, ..window }), [stream; 3], "{what}");
            let other = Window { bytes: 1, turns_after: 2, ..large };
            assert_eq!(run(other), [stream, stream, false], "{what}");
        }
    }

    #[test]
    fn many_short_connections_are_told_from_others() {
        let short = Window { came: 10, turns_after: 2, ..window(10, 2, 64) };
        for (what, window, is_short) in [
            ("a thousand a second", short, true),
            ("at the peer, where another turns first", Window { turns_after: 1, ..short }, true),
            ("fewer", Window { came: 9, ..short }, false),
            ("mostly another one's turn", Window { slots: (16, 1), pieces: 1, ..short }, true),
            ("one after another", Window { slots: (14, 1), pieces: 1, ..short }, false),
            ("as much as that for each", Window { pieces: 8, ..short }, true),
            ("beside others that carry more", Window { pieces: 9, ..short }, false),
            ("beside a stream", Window { bytes: 2 * LARGE, ..short }, false),
        ] {
            let mut load = Load::default();
            let mut run = |window| carry_three(&mut load, window, Load::is_short_connections);
            assert_eq!(run(window), [false, false, is_short], "{what}");
            assert_eq!(run(window), [is_short; 3], "{what}");
            // Half as many are enough to go on, and three windows in a row end it, also of silence.
            assert_eq!(
                run(Window { came: window.came / 2, pieces: 1, ..window }),
                [is_short; 3],
                "{what}"
            );
            let quiet = Window { pieces: 0, came: 0, ..window };
            assert_eq!(run(quiet), [is_short, is_short, false], "{what}");
        }
    }

    /// Streams are left to what makes them faster, and short connections to the threads that do
    /// most of the work for them.
    #[test]
    fn only_requests_over_lasting_connections_are_those_of_a_crowd() {
        for (what, bytes, both_ways, came, is_crowd) in [
            ("requests", 64, true, 0, true),
            ("large ones", 4 * LARGE, true, 0, true),
            ("streams in one direction", 4 * LARGE, false, 0, false),
            ("short connections", 64, true, 256, false),
        ] {
            let mut load = Load::default();
            let (mut now, mut is) = (Instant(0), false);
            for _ in 0..60 {
                let mut moved = load.bytes;
                for slot in 0..512 {
                    load.note(slot);
                    moved[usize::from(both_ways && slot % 2 == 0)] += bytes;
                    load.look(moved);
                }
                now = now + WINDOW;
                load.slept(now, now + WINDOW / 4);
                load.gains_by_haste(now, moved, load.came + came, || None);
                is = load.is_crowd(now, || Some(now.since(Instant(0))));
            }
            assert_eq!(is, is_crowd, "{what}");
        }
    }

    /// Each wait counts in the window in which it ends; one that is too long for it is all of it.
    #[test]
    fn how_much_it_waits() {
        for (waited, percent) in [(0, 0), (25, 25), (60, 60), (100, 100), (250, 100)] {
            let mut load = Load::default();
            let (mut at, mut total) = (Instant(0), Duration::from_secs(1));
            let mut run = |waited: u32, asked: bool| {
                (at, total) = (at + WINDOW, total + WINDOW * waited / 100);
                load.gains_by_haste(at, [0, 0], 0, || asked.then_some(total));
                load.waits()
            };
            run(0, true);
            run(0, true);
            let said = [(); 4].map(|()| run(waited, true));
            assert_eq!(said, [0, 0, percent, percent], "{waited}");
            assert_eq!(run(waited / 2, true), (waited / 2).min(100) as u8, "the least counts");
            // What nobody asked for is not known when somebody asks again.
            assert_eq!(run(waited, false), 0);
            let said = [(); 5].map(|()| run(waited, true));
            assert_eq!(said, [0, 0, 0, percent, percent], "{waited}");
        }
    }

    #[test]
    fn what_was_said_holds_until_a_window_with_something_in_it_ends() {
        let mut load = Load { gaining: STEADY, ..Load::default() };
        let mut now = Instant(0) + WINDOW;
        assert!(carry(&mut load, now, window(1, 1, 64)));
        assert!(carry(&mut load, now + WINDOW / 2, window(9, 1, 64)), "it has not ended");
        now = now + WINDOW;
        assert!(!carry(&mut load, now, window(1, 1, 64)), "there were many in it");
        let silence = Window { slept: WINDOW, ..window(1, 0, 0) };
        for gains in [false, false, true] {
            now = now + WINDOW;
            assert!(!carry(&mut load, now, silence), "nothing has moved");
            now = now + WINDOW;
            assert_eq!(carry(&mut load, now, window(1, 1, 64)), gains);
        }
        now = now + WINDOW;
        assert!(carry(&mut load, now, silence), "nothing has moved");
        // A thread that waits for somebody and does not sleep may keep him from his core.
        now = now + WINDOW;
        assert!(!carry(&mut load, now, Window { slept: Duration::ZERO, ..silence }));
    }
}
