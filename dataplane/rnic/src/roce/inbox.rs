//! What a fabric took in and its poller has not heard of yet.
//!
//! All queue pairs share it, so one peer could fill it and have all others told to wait. Half of it
//! is for whoever comes first; of the other half each queue pair has a small share.

use std::collections::VecDeque;

use super::pairs::Pairs;
use super::responder::Received;
use super::{INBOX_MAX, QUEUE_PAIRS_MAX};
use crate::{QpError, QpId};

/// What `poll` could not yet tell, in the order it happened.
#[derive(Debug)]
pub(super) struct Inbox {
    events: VecDeque<Event>,
    /// Messages among them, by the slot of their queue pair.
    waiting: Box<[u16]>,
}

#[derive(Debug)]
pub(super) enum Event {
    Received(QpId, Received),
    Broke(QpId, QpError),
}

impl Inbox {
    pub(super) fn new() -> Self {
        Self {
            // More than one burst brings, unless its packets are dense and of messages alone. A
            // ring that is larger is one that is never warm.
            events: VecDeque::with_capacity(1024),
            waiting: vec![0; QUEUE_PAIRS_MAX as usize].into(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Whether another message of this queue pair can be taken in.
    pub(super) fn has_room(&self, qp: QpId) -> bool {
        let len = self.events.len();
        let fair = len < INBOX_MAX / 2 || self.waiting[Pairs::at(qp)] < SHARE;
        len < INBOX_MAX && fair
    }

    pub(super) fn push(&mut self, event: Event) {
        if let Event::Received(qp, _) = &event {
            self.waiting[Pairs::at(*qp)] += 1;
        }
        self.events.push_back(event);
    }

    pub(super) fn pop(&mut self) -> Option<Event> {
        let event = self.events.pop_front()?;
        if let Event::Received(qp, _) = &event {
            self.waiting[Pairs::at(*qp)] -= 1;
        }
        Some(event)
    }
}

/// Messages of one queue pair in the second half: those of many connections in dialogue, and 64
/// peers that flood us leave room for others.
const SHARE: u16 = 64;
const _: () = assert!(INBOX_MAX <= u16::MAX as usize);

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(inbox: &mut Inbox, qp: QpId) -> usize {
        let mut taken = 0;
        while inbox.has_room(qp) {
            inbox.push(Event::Received(qp, Received::Short([0; 44])));
            taken += 1;
        }
        taken
    }

    /// A peer that sends as fast as it can, while our poller is busy, had everybody else's messages
    /// refused until it was.
    #[test]
    fn a_flood_leaves_room_for_others() {
        let mut inbox = Inbox::new();
        let flooding = QpId(7);
        assert_eq!(fill(&mut inbox, flooding), INBOX_MAX / 2);
        for other in 8..12 {
            assert_eq!(fill(&mut inbox, QpId(other)), usize::from(SHARE));
        }
        while inbox.pop().is_some() {}
        assert!(inbox.waiting.iter().all(|count| *count == 0));
        assert_eq!(fill(&mut inbox, flooding), INBOX_MAX / 2);
    }

    /// Many peers together may fill it, and no more.
    #[test]
    fn it_has_an_end() {
        let mut inbox = Inbox::new();
        let taken: usize = (0..200).map(|number| fill(&mut inbox, QpId(number))).sum();
        assert_eq!(taken, INBOX_MAX);
    }
}
