//! Paths that carry packets but no trains of them.
//!
//! The kernel joins packets of one destination to a train, which a NIC cuts. Where no NIC cuts it,
//! such as between two ends of a `veth`, it arrives as it left, and not everybody can receive one.
//! Then each train is lost as a whole, again and again, while packets alone pass.

use std::time::Duration;

use smcr_proto::Instant;

use super::super::PACKET_COST;
use super::Requester;

/// What a requester knows of trains on its path.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Trains {
    /// A train has passed, and none was suspected since.
    carried: bool,
    /// How much speaks for it that trains are lost.
    suspicion: u32,
    /// Until when packets leave alone.
    alone_until: Option<Instant>,
    /// For how long they did the last time.
    hold: Duration,
}

/// What an acknowledgement tells of trains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Evidence {
    /// The oldest packet did not pass before, and passed alone. What was sent behind it did not.
    OnlyAlone,
    /// So many packets have passed that a train must have been among them.
    Many,
    /// Neither.
    None,
}

impl Trains {
    /// Whether packets must leave alone.
    pub(super) fn are_split(&self, now: Instant) -> bool {
        self.alone_until.is_some_and(|until| now < until)
    }

    /// Whether it is worth an attempt to ask, after such a silence of the peer. Where much is lost,
    /// an attempt with one packet is often lost too.
    pub(super) fn may_ask(&self, silence: Duration) -> bool {
        !self.carried || silence >= DOUBT_AFTER
    }

    /// Packets were acknowledged.
    pub(super) fn progress(&mut self, now: Instant, evidence: Evidence) {
        match evidence {
            Evidence::OnlyAlone | Evidence::Many if self.are_split(now) => {}
            Evidence::None => self.suspicion = self.suspicion.saturating_sub(1),
            Evidence::Many => {
                self.carried = true;
                self.suspicion = self.suspicion.saturating_sub(1);
            }
            Evidence::OnlyAlone => self.suspicion += WEIGHT,
        }
        if self.suspicion >= SUSPICION_MAX {
            self.suspicion = 0;
            self.carried = false;
            // A path that carried trains for as long as it was not asked to is a new one.
            let lasts = self.alone_until.is_some_and(|until| now.since(until) < self.hold);
            self.hold = if lasts { (2 * self.hold).min(HOLD_MAX) } else { HOLD_MIN };
            self.alone_until = Some(now + self.hold);
        }
    }
}

impl Requester {
    /// Whether an acknowledgement of all packets before `sequence` is for the one that was sent
    /// alone, and not for what was sent behind it before.
    pub(super) fn passed_alone(&self, sequence: u64) -> bool {
        self.is_asking() && sequence == self.next.mark.sequence && sequence < self.sent_end
    }

    /// What an acknowledgement of so many packets, which have taken so much of the window, tells
    /// if they were not sent alone.
    pub(super) fn evidence(&self, packets: u64, cost: u64) -> Evidence {
        // Dense packets have many in one, but no more than a full one holds.
        let payload = cost - packets * u64::from(PACKET_COST);
        let were_many = !self.dense || payload >= MANY * u64::from(self.segments.write);
        if packets >= MANY && were_many { Evidence::Many } else { Evidence::None }
    }
}

/// At which attempt only the oldest packet is sent, alone. Whether the answer covers it, or also
/// what was sent behind it, tells whether trains arrive. Black hole detection begins later.
pub(super) const ASKING_AT: u32 = 2;
/// Of so many attempts. In the others, each packet that arrives causes an answer, which tells that
/// the peer lives where much is lost.
pub(super) const ASKING_OF: u32 = 4;
/// An acknowledgement of so many packets is one of a train: of packets that follow each other, few
/// differ in length.
const MANY: u64 = 4;
/// After such a silence a path that has carried trains may be another one.
const DOUBT_AFTER: Duration = Duration::from_millis(100);
/// So many acknowledgements without trouble weigh as much as one that only a packet alone brought:
/// where one packet of a hundred is lost, one of ten thousand is lost twice.
const WEIGHT: u32 = 16;
/// From here on packets leave alone.
const SUSPICION_MAX: u32 = 2 * WEIGHT - 8;
/// How long packets leave alone at first, until trains are tried again.
const HOLD_MIN: Duration = Duration::from_secs(1);
/// How long they do at most.
const HOLD_MAX: Duration = Duration::from_secs(600);

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Instant {
        Instant(ms * 1_000_000)
    }

    #[test]
    fn trains_are_tried_less_and_less_often_on_a_path_that_never_carries_them() {
        let mut trains = Trains::default();
        let (mut ms, mut tries) = (0, 0);
        while ms < 3_600_000 {
            trains.progress(at(ms), Evidence::OnlyAlone);
            assert!(!trains.are_split(at(ms)), "it may be bad luck");
            trains.progress(at(ms), Evidence::None);
            trains.progress(at(ms), Evidence::OnlyAlone);
            tries += 1;
            assert!(trains.are_split(at(ms)));
            while trains.are_split(at(ms)) {
                trains.progress(at(ms), Evidence::OnlyAlone);
                ms += 1;
            }
        }
        assert_eq!(tries, 15);
        ms += 600_000;
        trains.progress(at(ms), Evidence::OnlyAlone);
        trains.progress(at(ms), Evidence::OnlyAlone);
        assert!(trains.are_split(at(ms)) && !trains.are_split(at(ms + 1_000)));
    }

    #[test]
    fn where_trains_passed_nobody_asks_soon() {
        let mut trains = Trains::default();
        assert!(trains.may_ask(Duration::ZERO));
        trains.progress(at(0), Evidence::Many);
        assert!(!trains.may_ask(DOUBT_AFTER / 2) && trains.may_ask(DOUBT_AFTER));
        trains.progress(at(1), Evidence::OnlyAlone);
        trains.progress(at(2), Evidence::OnlyAlone);
        assert!(trains.may_ask(Duration::ZERO) && trains.are_split(at(2)));
        trains.progress(at(3), Evidence::Many);
        assert!(trains.may_ask(Duration::ZERO), "they left alone");
    }

    #[test]
    fn bad_luck_now_and_then_is_no_reason() {
        let mut trains = Trains::default();
        for ms in 0..10_000 {
            let unlucky = ms % 20 == 0;
            trains.progress(at(ms), if unlucky { Evidence::OnlyAlone } else { Evidence::None });
            assert!(!trains.are_split(at(ms)));
        }
    }
}
