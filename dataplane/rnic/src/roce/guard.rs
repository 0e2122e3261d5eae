//! What a queue pair does about packets that its peer cannot have sent.
//!
//! RoCE has no authentication. Somebody who can send from the peer's address and knows the number
//! of a queue pair lacks only the PSN, and can try all 2^24 of them. The queue pair cannot tell the
//! packet that hits from the peer's own. But it notices the packets that miss, and limits what they
//! do:
//!
//! - A packet whose PSN is far from the expected one is counted ([`psn::is_near`]).
//! - Of these packets, a few in each [`INTERVAL`] are answered, and no more. Without this limit,
//!   each of them could have us send a NAK, and the peer would go back and halve its window. The
//!   few are for a peer that has more packets in flight than any that we know: one answer tells it
//!   where we are.
//! - If there are more, the queue pair is *swept*. Then it reports a gap only if several packets
//!   came behind it ([`Responder::handle`](super::responder::Responder::handle)), because some of
//!   the guessed PSNs are near ones.
//! - The control thread hears of it once in each interval, and logs the address and the number.
//!
//! No packet with a near PSN is dropped because of the others. If it were, wrong PSNs would stop
//! the connection. As it is, a peer that sends few packets at once may pay a timeout for one that
//! was lost.
//!
//! Who forges an answer has an easier task than who forges a request: its PSN is right if it is
//! that of any packet in flight. A NAK that refuses a request then breaks the queue pair; so does
//! an acknowledgement, when the retries are exceeded, if a packet that it covers was lost. We
//! cannot tell either from the peer's. Beside the PSN an answer has only the number of messages
//! completed, which begins at zero on each queue pair, and for which we cannot rely on every peer.

use std::time::Duration;

use smcr_proto::Instant;

use super::psn;
use super::udp::WINDOW_MAX;

/// What one queue pair remembers of packets with far PSNs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Guard {
    /// When the present interval began.
    since: Instant,
    /// How many came in the present interval.
    count: u32,
    /// Until when the queue pair counts as swept.
    swept_until: Instant,
    /// How many came since the last report.
    unreported: u64,
}

/// What to do about a packet with a far PSN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Far {
    /// Process it like any other: it may be answered.
    Answer,
    /// Drop it.
    Drop,
    /// Drop it, and report what came since the last report.
    Report,
}

impl Guard {
    /// Notes a packet with a far PSN.
    pub(super) fn note(&mut self, now: Instant) -> Far {
        if now.since(self.since) >= INTERVAL {
            self.since = now;
            self.count = 0;
        }
        self.count = self.count.saturating_add(1);
        self.unreported += 1;
        if self.count <= ANSWERED_MAX {
            return Far::Answer;
        }
        self.swept_until = now + INTERVAL;
        if self.count > ANSWERED_MAX + 1 {
            return Far::Drop;
        }
        Far::Report
    }

    /// How many came since the last report.
    pub(super) fn unreported(&self) -> u64 {
        self.unreported
    }

    /// They are reported now.
    pub(super) fn reported(&mut self) {
        self.unreported = 0;
    }

    /// Whether more packets with far PSNs came lately than a good peer could account for.
    pub(super) fn is_swept(&self, now: Instant) -> bool {
        now < self.swept_until
    }
}

/// How long it takes until a few more are answered, and until the next report. Whoever stays below
/// that number needs two months for half of all PSNs.
pub(super) const INTERVAL: Duration = Duration::from_secs(10);
/// How many packets with far PSNs are answered in one interval.
pub(super) const ANSWERED_MAX: u32 = 16;

// Everything that a requester like ours has in flight is near.
const _: () = assert!(WINDOW_MAX / super::PACKET_COST < psn::NEAR);

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Instant {
        Instant(ms * 1_000_000)
    }

    /// A log that has one line for each forged packet is an attack of its own; one that has none
    /// hides the attack.
    #[test]
    fn a_sweep_is_reported_once_in_each_interval() {
        let mut guard = Guard::default();
        let (mut answered, mut reports) = (0, Vec::new());
        for ms in 0..25_000 {
            match guard.note(at(ms)) {
                Far::Answer => answered += 1,
                Far::Drop => {}
                Far::Report => {
                    reports.push(guard.unreported());
                    guard.reported();
                }
            }
        }
        assert_eq!(answered, 3 * ANSWERED_MAX, "there are three intervals");
        assert_eq!(reports, [17, 10_000, 10_000], "each has what came since the last one");
        assert!(guard.is_swept(at(25_000)));
        assert!(!guard.is_swept(at(35_000)), "it is over");
    }

    /// A network may deliver a packet after minutes, and that is no attack.
    #[test]
    fn a_few_are_no_sweep() {
        let mut guard = Guard::default();
        for second in 0..1_000 {
            let now = at(second * 1_000);
            assert_eq!(guard.note(now), Far::Answer);
            assert!(!guard.is_swept(now));
        }
    }
}
