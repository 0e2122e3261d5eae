//! What a poller lends to one of its relays.

use smcr_memory::SendPool;
use smcr_proto::Instant;

use crate::counters::Counters;
use crate::links::Links;
use crate::names::LinkId;
use crate::paced::Paced;
use crate::stages::Sampler;

/// What a relay may use while it is its turn.
///
/// Everything here belongs to the poller and serves all relays. What a relay cannot change from
/// here, the tables and the queues towards other threads, it asks for by its
/// [`Outcome`](crate::relay::Outcome).
pub(crate) struct Turn<'a, S> {
    pub(crate) now: Instant,
    pub(crate) streams: &'a mut S,
    pub(crate) pool: &'a mut SendPool,
    pub(crate) links: &'a mut Links,
    pub(crate) work: &'a mut WorkLists,
    /// A buffer for bytes on their way from one socket to another.
    pub(crate) scratch: &'a mut [u8],
    /// Bytes that sockets have not taken yet, of all connections over TCP.
    pub(crate) backlog_bytes: &'a mut usize,
    pub(crate) counters: &'a Counters,
    /// Follows some of the bytes, to find out how long they stay here.
    pub(crate) sampler: &'a mut Sampler,
}

/// Connections with something to do, each at most once per list.
#[derive(Debug, Default)]
pub(crate) struct WorkLists {
    pub(crate) drain: Vec<u16>,
    pub(crate) fill: Vec<u16>,
    pub(crate) flush: Vec<u16>,
    /// Connections that have something to do, but have carried as much as they may.
    pub(crate) paced: Paced,
    /// The memory of the list that was worked off last.
    spare: Vec<u16>,
}

/// In which work lists a connection stands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Queued {
    slot: u16,
    drain: bool,
    fill: bool,
    flush: bool,
    /// The link among whose waiting connections it stands. It may stand among those of others as
    /// well, where it does not count any more.
    waits_for: Option<LinkId>,
    /// It was filled because its link took more, before its turn in the list that is worked off.
    resumed: bool,
}

/// One of the lists.
#[derive(Clone, Copy, Debug)]
pub(crate) enum List {
    /// RMB elements have bytes, or sockets take more.
    Drain,
    /// Sockets have bytes, or peers take more.
    Fill,
    /// CDC messages may be due.
    Flush,
}

impl WorkLists {
    /// Whether a turn had to leave something to the next one.
    pub(crate) fn is_left(&self) -> bool {
        !(self.drain.is_empty() && self.fill.is_empty() && self.flush.is_empty())
    }

    /// Takes a list to work it off, and leaves an empty one for work that must wait for the next
    /// turn.
    pub(crate) fn take(&mut self, list: List) -> Vec<u16> {
        let spare = std::mem::take(&mut self.spare);
        let list = match list {
            List::Drain => &mut self.drain,
            List::Fill => &mut self.fill,
            List::Flush => &mut self.flush,
        };
        std::mem::replace(list, spare)
    }

    /// Gives the memory of a list back that was worked off.
    pub(crate) fn give_back(&mut self, spare: Vec<u16>) {
        assert!(spare.is_empty(), "it was worked off");
        self.spare = spare;
    }

    pub(crate) fn queue_drain(&mut self, queued: &mut Queued) {
        if !std::mem::replace(&mut queued.drain, true) {
            self.drain.push(queued.slot);
        }
    }

    pub(crate) fn queue_fill(&mut self, queued: &mut Queued) {
        if !std::mem::replace(&mut queued.fill, true) {
            self.fill.push(queued.slot);
        }
    }

    pub(crate) fn queue_flush(&mut self, queued: &mut Queued) {
        if !std::mem::replace(&mut queued.flush, true) {
            self.flush.push(queued.slot);
        }
    }
}

impl Queued {
    /// A connection that stands in no list.
    pub(crate) fn nowhere(slot: u16) -> Self {
        Self { slot, drain: false, fill: false, flush: false, waits_for: None, resumed: false }
    }

    /// The connection waits until its link takes more. Returns its slot, which the link is to note,
    /// unless it waits for it already.
    pub(crate) fn wait_for(&mut self, link: LinkId) -> Option<u16> {
        let before = self.waits_for.replace(link);
        (before != Some(link)).then_some(self.slot)
    }

    /// The connection is the next one of those that wait for a link. Returns whether it is to be
    /// filled: not if it went on elsewhere.
    pub(crate) fn resume(&mut self, link: LinkId) -> bool {
        let waits = self.waits_for == Some(link);
        if waits {
            self.waits_for = None;
            // Something has happened to it meanwhile. Its turn for that comes behind all who wait,
            // when there may be no more room.
            self.resumed = self.fill;
        }
        waits
    }

    /// Whether the turn that it has now has been used when its link took more.
    pub(crate) fn was_resumed(&mut self) -> bool {
        std::mem::take(&mut self.resumed)
    }

    /// Whether it will be filled in this turn or the next one.
    pub(crate) fn is_in_fill(self) -> bool {
        self.fill
    }

    /// Whether it will be drained in this turn or the next one.
    pub(crate) fn is_in_drain(self) -> bool {
        self.drain
    }

    /// Notes that the connection has been taken off this list.
    pub(crate) fn take_out(&mut self, list: List) {
        match list {
            List::Drain => self.drain = false,
            List::Fill => self.fill = false,
            List::Flush => self.flush = false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A connection that stood in a list twice would have two turns where others have one; one that
    /// could not be queued while its list is worked off would be forgotten.
    #[test]
    fn a_connection_stands_in_a_list_once_and_may_come_back() {
        let mut work = WorkLists::default();
        let mut queued = Queued::nowhere(7);
        for _ in 0..2 {
            work.queue_fill(&mut queued);
            work.queue_drain(&mut queued);
        }
        assert!(work.is_left());
        let mut slots = work.take(List::Fill);
        assert_eq!(slots, [7]);
        queued.take_out(List::Fill);
        work.queue_fill(&mut queued);
        slots.clear();
        work.give_back(slots);
        assert_eq!((work.take(List::Fill), work.take(List::Drain)), (vec![7], vec![7]));
        assert!(!work.is_left() && work.take(List::Flush).is_empty());
    }

    /// Who waits for a link is noted there once, and filled once when the link takes more, before
    /// all others: an event that came meanwhile neither takes its place away nor gives it two.
    #[test]
    fn who_waits_for_a_link_has_one_turn_when_it_takes_more() {
        let mut work = WorkLists::default();
        let mut queued = Queued::nowhere(7);
        let (one, other) = (LinkId(1), LinkId(2));
        assert_eq!(queued.wait_for(one), Some(7));
        assert_eq!(queued.wait_for(one), None, "it is noted there");
        assert!(queued.resume(one));
        assert!(!queued.resume(one), "it does not wait any more");
        assert!(!queued.was_resumed(), "it stands in no list");

        assert_eq!(queued.wait_for(one), Some(7));
        work.queue_fill(&mut queued);
        assert_eq!(work.take(List::Fill), [7]);
        assert!(queued.resume(one));
        queued.take_out(List::Fill);
        work.queue_fill(&mut queued);
        assert!(queued.was_resumed(), "its place in the list has been used");
        assert!(queued.is_in_fill(), "it has one in the next list");
        assert_eq!(work.take(List::Fill), [7]);
        assert!(!queued.was_resumed());

        assert_eq!(queued.wait_for(one), Some(7));
        assert_eq!(queued.wait_for(other), Some(7), "it went on over another link");
        assert!(!queued.resume(one));
        assert!(queued.resume(other));
    }
}
