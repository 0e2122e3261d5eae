//! Congestion control: how many bytes may be in flight, and how long to wait for an
//! acknowledgement.
//!
//! It is local to the sender and changes nothing on the wire. Its signals are loss and, from peers
//! that tell us, marks of congested routers; neither Linux `rdma_rxe` nor plain Ethernet gives the
//! latter. The window never exceeds what we expect the peer's socket buffer to hold.

use std::time::Duration;

use smcr_proto::Instant;

/// The window and the round-trip time of one queue pair.
#[derive(Clone, Debug)]
pub(super) struct Congestion {
    window: u32,
    /// Below this threshold the window doubles each round trip (slow start); above it, it grows by
    /// one packet.
    threshold: u32,
    window_max: u32,
    mtu: u32,
    /// Window and threshold before the last timeout. They are restored if it was spurious.
    before_timeout: Option<(u32, u32)>,
    /// Smoothed round-trip time and its variation, once one was measured.
    round_trip: Option<(Duration, Duration)>,
    /// Consecutive timeouts.
    backoff: u32,
    /// Which part of the round trips lately had marks, in 1024ths, and when the last of these began
    /// (RFC 8257).
    marked: (u32, Option<Instant>),
}

impl Congestion {
    /// The state of a new queue pair, whose window may grow to `window_max` bytes.
    pub(super) fn new(mtu: u32, window_max: u32) -> Self {
        let window_max = window_max.max(WINDOW_MIN);
        Self {
            window: WINDOW_FIRST.min(window_max),
            threshold: window_max,
            window_max,
            mtu,
            before_timeout: None,
            round_trip: None,
            backoff: 0,
            marked: (WHOLE, None),
        }
    }

    /// How many bytes may be in flight.
    pub(super) fn window(&self) -> u32 {
        self.window
    }

    /// How long to wait for an acknowledgement that the peer does not hold back.
    pub(super) fn timeout(&self) -> Duration {
        let base = self.round_trip.map_or(TIMEOUT_FIRST, |(smooth, vary)| smooth + 4 * vary);
        let base = base.clamp(TIMEOUT_MIN, TIMEOUT_MAX);
        base.saturating_mul(1 << self.backoff.min(BACKOFF_MAX)).min(TIMEOUT_MAX)
    }

    /// The [`timeout`](Self::timeout) without exponential backoff.
    pub(super) fn base_timeout(&self) -> Duration {
        Self { backoff: 0, ..self.clone() }.timeout().max(2 * TIMEOUT_MIN)
    }

    /// Changes the payload of full packets to `mtu` bytes. Resets the backoff: timeouts that were
    /// due to the packet size say nothing about the round trip.
    pub(super) fn resized(&mut self, mtu: u32) {
        self.mtu = mtu;
        self.backoff = 0;
    }

    /// The smoothed round-trip time, or the shortest timeout if none was measured.
    pub(super) fn round_trip(&self) -> Duration {
        self.round_trip.map_or(TIMEOUT_MIN, |(smooth, _)| smooth)
    }

    /// Adds a round-trip sample. The caller takes samples only of packets whose acknowledgement is
    /// unambiguous (Karn's algorithm).
    ///
    /// While messages come and go, most of a sample is the time for which the peer holds
    /// acknowledgements back. It belongs there: the timeout must allow for it. A stream that begins
    /// then replaces it within some round trips, because its acknowledgements are not held back.
    pub(super) fn measured(&mut self, sample: Duration) {
        self.round_trip = Some(match self.round_trip {
            None => (sample, sample / 2),
            Some((smooth, vary)) => {
                (smooth * 7 / 8 + sample / 8, vary * 3 / 4 + smooth.abs_diff(sample) / 4)
            }
        });
    }

    /// The peer has acknowledged this many bytes.
    pub(super) fn acknowledged(&mut self, bytes: u32) {
        self.backoff = 0;
        self.before_timeout = None;
        let gain = if self.window < self.threshold {
            bytes
        } else {
            let share = u64::from(self.mtu) * u64::from(bytes) / u64::from(self.window);
            u32::try_from(share).unwrap_or(self.mtu).max(1)
        };
        self.window = self.window.saturating_add(gain).min(self.window_max);
    }

    /// The peer reported a loss, the first in this round trip.
    pub(super) fn lost(&mut self) {
        self.window = (self.window / 2).max(WINDOW_MIN);
        self.threshold = self.window;
    }

    /// The peer says that a router has marked our packets. Only the first one in a round trip
    /// counts: the others tell of the same congestion. The window shrinks by half of the part of
    /// round trips that had marks: by half if all have some, and little if few do.
    pub(super) fn notified(&mut self, now: Instant) {
        let round_trip = self.round_trip().max(Duration::from_micros(1));
        let (mut part, began) = self.marked;
        if let Some(began) = began {
            let rounds = now.since(began).as_nanos() / round_trip.as_nanos();
            if rounds == 0 {
                return;
            }
            for _ in 1..rounds.min(ROUNDS_MAX) {
                part -= part / FORGETS;
            }
            part += (WHOLE - part) / FORGETS;
        }
        self.marked = (part, Some(now));
        let cut = u64::from(self.window) * u64::from(part) / u64::from(2 * WHOLE);
        let cut = u32::try_from(cut).expect("a part of the window");
        self.window = (self.window - cut).max(WINDOW_MIN.min(self.window));
        self.threshold = self.window;
    }

    /// The retransmission timer expired.
    pub(super) fn timed_out(&mut self) {
        self.before_timeout.get_or_insert((self.window, self.threshold));
        self.threshold = (self.window / 2).max(WINDOW_MIN);
        self.window = WINDOW_MIN;
        self.backoff = self.backoff.saturating_add(1);
    }

    /// Restores the window, because the packets had arrived and the timeout was spurious. Returns
    /// whether there was a timeout to undo.
    pub(super) fn undo_timeout(&mut self) -> bool {
        let before = self.before_timeout.take();
        if let Some((window, threshold)) = before {
            self.window = window;
            self.threshold = threshold;
        }
        before.is_some()
    }
}

/// The first window is one full run, the most that one system call can send.
const WINDOW_FIRST: u32 = 65_536;
/// Four of the largest packets, so that packets behind a lost one arrive and reveal the gap.
pub(super) const WINDOW_MIN: u32 = 16_384;
/// The timeout until a round trip was measured.
const TIMEOUT_FIRST: Duration = Duration::from_millis(4);
/// At 1 % loss a shorter minimum gains nothing, and a longer one costs half of the throughput.
const TIMEOUT_MIN: Duration = Duration::from_millis(1);
/// The timeout that Linux SMC sets for a hardware NIC: code 15, 4.096 us * 2^15.
pub(super) const TIMEOUT_MAX: Duration = Duration::from_micros(134_218);
const BACKOFF_MAX: u32 = 8;
/// All round trips.
const WHOLE: u32 = 1024;
/// Of what is known about marks, this part is forgotten in each round trip.
const FORGETS: u32 = 16;
/// After so many round trips without a mark nothing is left of it.
const ROUNDS_MAX: u128 = 128;

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u32 = 1 << 20;

    #[test]
    fn the_window_doubles_each_round_trip_up_to_its_maximum() {
        let mut congestion = Congestion::new(1024, MIB);
        for expected in [65_536, 131_072, 262_144, 524_288, MIB, MIB] {
            assert_eq!(congestion.window(), expected);
            congestion.acknowledged(congestion.window());
        }
    }

    /// After a loss the window halves and then probes by one packet per round trip.
    #[test]
    fn loss_halves_the_window() {
        let mut congestion = Congestion::new(1024, MIB);
        congestion.acknowledged(MIB);
        congestion.lost();
        assert_eq!(congestion.window(), MIB / 2);
        congestion.acknowledged(MIB / 2);
        assert_eq!(congestion.window(), MIB / 2 + 1024);
        for _ in 0..10 {
            congestion.lost();
        }
        assert_eq!(congestion.window(), WINDOW_MIN);
    }

    #[test]
    fn a_small_socket_buffer_bounds_the_window() {
        let mut congestion = Congestion::new(1024, 50_000);
        assert_eq!(congestion.window(), 50_000);
        congestion.acknowledged(MIB);
        assert_eq!(congestion.window(), 50_000);
        assert_eq!(Congestion::new(1024, 0).window(), WINDOW_MIN);
    }

    /// A queue that is marked now and then must not cost half of the throughput, and one that is
    /// marked all the time must be drained.
    #[test]
    fn marks_shrink_the_window_as_often_as_there_are_some() {
        let at = |us: u64| Instant(us * 1_000);
        let mut congestion = Congestion::new(1024, MIB);
        congestion.measured(Duration::from_micros(100));
        congestion.acknowledged(MIB);
        for us in 0..100 {
            congestion.notified(at(us));
        }
        assert_eq!(congestion.window(), MIB / 2, "once in a round trip");
        let mut now = 1_000_000;
        for _ in 0..20 {
            congestion.acknowledged(MIB);
            let before = congestion.window();
            congestion.notified(at(now));
            assert!(congestion.window() > before * 9 / 10, "rare marks cost little");
            now += 100_000;
        }
        for _ in 0..200 {
            now += 100;
            congestion.notified(at(now));
        }
        assert_eq!(congestion.window(), WINDOW_MIN);
    }

    /// A poller that was not scheduled for some milliseconds must not slow the stream down.
    #[test]
    fn a_spurious_timeout_is_undone() {
        let mut congestion = Congestion::new(1024, MIB);
        congestion.acknowledged(MIB);
        congestion.timed_out();
        congestion.timed_out();
        assert_eq!(congestion.window(), WINDOW_MIN);
        assert!(congestion.undo_timeout());
        assert_eq!(congestion.window(), MIB);
        assert!(!congestion.undo_timeout(), "nothing is left to undo");
        congestion.timed_out();
        congestion.acknowledged(1);
        assert!(!congestion.undo_timeout(), "progress has shown that the loss was real");
    }

    #[test]
    fn the_timeout_follows_the_round_trip_and_doubles_when_nothing_is_heard() {
        let mut congestion = Congestion::new(1024, MIB);
        assert_eq!(congestion.timeout(), TIMEOUT_FIRST);
        congestion.measured(Duration::from_micros(20));
        assert_eq!(congestion.timeout(), TIMEOUT_MIN);
        for _ in 0..100 {
            congestion.measured(Duration::from_millis(10));
        }
        let steady = congestion.timeout();
        assert!(Duration::from_millis(9) < steady && steady < Duration::from_millis(12));
        congestion.timed_out();
        assert_eq!(congestion.timeout(), 2 * steady);
        for _ in 0..40 {
            congestion.timed_out();
        }
        assert_eq!(congestion.timeout(), TIMEOUT_MAX);
        congestion.acknowledged(1);
        assert_eq!(congestion.timeout(), steady);
    }
}
