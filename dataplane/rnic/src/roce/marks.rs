//! What a queue pair knows of congestion on the way from its peer, and whether its own packets may
//! be marked (RFC 3168; IBTA Annex A17).
//!
//! A router that is congested marks packets instead of dropping them, if their IP headers say that
//! their sender reacts to it. The receiver of a marked packet tells the sender by a congestion
//! notification packet (CNP), and the sender reduces its window.
//!
//! Linux `rdma_rxe` neither marks its packets nor tells of marks. If our packets to it could be
//! marked, we would not notice the congestion, and crowd out everybody else. So a queue pair begins
//! with packets that may be marked, and stays with them if the peer's first packet may be marked
//! too. A path that loses such packets is noticed by their timeouts.

use std::time::Duration;

use smcr_proto::Instant;

use super::batch::Ecn;

/// The state of one queue pair.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Marks {
    peer: Peer,
    /// Timeouts before anything came from the peer.
    timeouts: u8,
    /// The peer must be told that packets of its were marked.
    owed: bool,
    /// When it was told last.
    told: Option<Instant>,
}

/// What the peer does about marks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Peer {
    /// Nothing has come from it.
    #[default]
    Unknown,
    /// It reacts, and tells us.
    Reacts,
    /// It does neither, or routers clear what packets say of it.
    Ignores,
}

impl Marks {
    /// Whether our packets may be marked.
    pub(super) fn reacts(&self) -> bool {
        self.peer != Peer::Ignores
    }

    /// Notes what the IP header of a packet said that the peer may have sent.
    pub(super) fn note(&mut self, now: Instant, ecn: Ecn) {
        match (self.peer, ecn) {
            (Peer::Unknown, Ecn::NotCapable) => self.peer = Peer::Ignores,
            (Peer::Unknown, Ecn::Capable | Ecn::Congested) => self.peer = Peer::Reacts,
            (Peer::Reacts | Peer::Ignores, _) => {}
        }
        let is_news = self.told.is_none_or(|told| now.since(told) >= NOTICE_INTERVAL);
        self.owed |= ecn == Ecn::Congested && is_news;
    }

    /// A packet of ours was not acknowledged in time.
    pub(super) fn timed_out(&mut self) {
        if self.peer == Peer::Unknown {
            self.timeouts += 1;
            if self.timeouts == TIMEOUTS_MAX {
                self.peer = Peer::Ignores;
            }
        }
    }

    /// Whether the peer must be told of marks.
    pub(super) fn is_owed(&self) -> bool {
        self.owed
    }

    /// It is told now.
    pub(super) fn told(&mut self, now: Instant) {
        self.owed = false;
        self.told = Some(now);
    }
}

/// How often the peer is told at most.
const NOTICE_INTERVAL: Duration = Duration::from_micros(50);
/// After so many timeouts without a word of the peer, the path may lose packets that can be marked.
const TIMEOUTS_MAX: u8 = 3;

#[cfg(test)]
mod tests {
    use super::*;

    fn at(us: u64) -> Instant {
        Instant(us * 1_000)
    }

    #[test]
    fn packets_may_be_marked_as_long_as_those_of_the_peer_may() {
        for (first, reacts) in
            [(Ecn::NotCapable, false), (Ecn::Capable, true), (Ecn::Congested, true)]
        {
            let mut marks = Marks::default();
            assert!(marks.reacts());
            marks.note(at(0), first);
            assert_eq!(marks.reacts(), reacts);
            // Somebody who forges packets changes nothing any more.
            marks.note(at(1), if reacts { Ecn::NotCapable } else { Ecn::Capable });
            (0..9).for_each(|_| marks.timed_out());
            assert_eq!(marks.reacts(), reacts);
        }
    }

    /// Some firewalls drop what may be marked.
    #[test]
    fn a_path_that_loses_such_packets_gets_others() {
        let mut marks = Marks::default();
        marks.timed_out();
        marks.timed_out();
        assert!(marks.reacts(), "packets get lost everywhere");
        marks.timed_out();
        assert!(!marks.reacts());
    }

    /// A notice for each marked packet would double the packets where there are too many.
    #[test]
    fn the_peer_is_told_once_in_a_while() {
        let mut marks = Marks::default();
        let mut told = 0;
        for us in 0..1_000 {
            marks.note(at(us), Ecn::Congested);
            if marks.is_owed() {
                marks.told(at(us));
                told += 1;
            }
        }
        assert_eq!(told, 20);
        marks.note(at(2_000), Ecn::Capable);
        assert!(!marks.is_owed());
    }
}
