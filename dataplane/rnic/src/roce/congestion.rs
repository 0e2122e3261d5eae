//! How much may be in flight, and how long to wait for an answer.
//!
//! Local to the sender: the peer cannot tell. Loss is the only signal, since neither Linux
//! `rdma_rxe` nor plain Ethernet gives another. The window is what the peer's socket buffer can
//! hold at most.

use std::time::Duration;

/// The window and the round-trip time of one queue pair.
#[derive(Clone, Debug)]
pub(super) struct Congestion {
    window: u32,
    /// Below it the window doubles each round trip, above it grows by one packet.
    threshold: u32,
    window_max: u32,
    mtu: u32,
    /// Window and threshold before the last timeout, to return to if it was hasty.
    before_timeout: Option<(u32, u32)>,
    /// Smoothed round-trip time and its variation, once one was measured.
    round_trip: Option<(Duration, Duration)>,
    /// Timeouts in a row.
    backoff: u32,
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
        }
    }

    /// Bytes that may be in flight.
    pub(super) fn window(&self) -> u32 {
        self.window
    }

    /// How long to wait for an acknowledgement.
    pub(super) fn timeout(&self) -> Duration {
        let base = self.round_trip.map_or(TIMEOUT_FIRST, |(smooth, vary)| smooth + 4 * vary);
        let base = base.clamp(TIMEOUT_MIN, TIMEOUT_MAX);
        base.saturating_mul(1 << self.backoff.min(BACKOFF_MAX)).min(TIMEOUT_MAX)
    }

    /// How long an answer takes at most, if it comes: as [`timeout`](Self::timeout), but for what
    /// was waited in vain.
    pub(super) fn patience(&self) -> Duration {
        Self { backoff: 0, ..self.clone() }.timeout().max(2 * TIMEOUT_MIN)
    }

    /// From now on packets have up to `mtu` bytes of payload. Silence that was due to their size
    /// tells nothing of how long answers take.
    pub(super) fn resized(&mut self, mtu: u32) {
        self.mtu = mtu;
        self.backoff = 0;
    }

    /// A round trip as measured, or the shortest timeout if none was.
    pub(super) fn round_trip(&self) -> Duration {
        self.round_trip.map_or(TIMEOUT_MIN, |(smooth, _)| smooth)
    }

    /// A round trip took this long. Only packets that were sent once tell (Karn's rule).
    pub(super) fn measured(&mut self, sample: Duration) {
        self.round_trip = Some(match self.round_trip {
            None => (sample, sample / 2),
            Some((smooth, vary)) => {
                (smooth * 7 / 8 + sample / 8, vary * 3 / 4 + smooth.abs_diff(sample) / 4)
            }
        });
    }

    /// This many bytes in flight have arrived.
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

    /// Something was lost, for the first time in this round trip; the peer has told.
    pub(super) fn lost(&mut self) {
        self.window = (self.window / 2).max(WINDOW_MIN);
        self.threshold = self.window;
    }

    /// Nothing was heard for [`timeout`](Self::timeout).
    pub(super) fn timed_out(&mut self) {
        self.before_timeout.get_or_insert((self.window, self.threshold));
        self.threshold = (self.window / 2).max(WINDOW_MIN);
        self.window = WINDOW_MIN;
        self.backoff = self.backoff.saturating_add(1);
    }

    /// The timeout was hasty: what it took for lost had arrived. Returns whether there was one.
    pub(super) fn was_hasty(&mut self) -> bool {
        let before = self.before_timeout.take();
        if let Some((window, threshold)) = before {
            self.window = window;
            self.threshold = threshold;
        }
        before.is_some()
    }
}

/// One full run: less would not use the system call.
const WINDOW_FIRST: u32 = 65_536;
/// Four of the largest packets, so that a gap is noticed while something still moves.
pub(super) const WINDOW_MIN: u32 = 16_384;
/// While nothing was measured.
const TIMEOUT_FIRST: Duration = Duration::from_millis(4);
/// At 1 % loss a shorter one gains nothing, and a longer one costs half of the throughput.
const TIMEOUT_MIN: Duration = Duration::from_millis(1);
/// What Linux SMC gives a hardware NIC: code 15, 4.096 us * 2^15.
pub(super) const TIMEOUT_MAX: Duration = Duration::from_micros(134_218);
const BACKOFF_MAX: u32 = 8;

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

    /// A poller that was not scheduled for some milliseconds must not slow the stream down.
    #[test]
    fn a_hasty_timeout_is_undone() {
        let mut congestion = Congestion::new(1024, MIB);
        congestion.acknowledged(MIB);
        congestion.timed_out();
        congestion.timed_out();
        assert_eq!(congestion.window(), WINDOW_MIN);
        assert!(congestion.was_hasty());
        assert_eq!(congestion.window(), MIB);
        assert!(!congestion.was_hasty(), "nothing is left to undo");
        congestion.timed_out();
        congestion.acknowledged(1);
        assert!(!congestion.was_hasty(), "progress has shown that the loss was real");
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
