//! TCP between two hosts: what either side sends arrives in order, late, and cut anywhere.

use std::collections::VecDeque;
use std::time::Duration;

use smcr_proto::Instant;
use smcr_rnic::dice::{Chance, Dice};

/// One direction.
#[derive(Debug, Default)]
pub(crate) struct Lane {
    segments: VecDeque<(Instant, Segment)>,
    /// FIN or RST was sent: nothing follows.
    over: bool,
}

/// What TCP carries.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Segment {
    Bytes(Vec<u8>),
    End,
    Reset,
}

/// What has arrived at one side, and was not read.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    pub(crate) bytes: VecDeque<u8>,
    pub(crate) ended: bool,
    pub(crate) reset: bool,
}

impl Lane {
    /// Sends; `slow` is the longest that a segment takes. Nothing but a reset is sent behind an
    /// end.
    pub(crate) fn send(&mut self, now: Instant, slow: Duration, dice: &mut Dice, what: Segment) {
        let is_reset = what == Segment::Reset;
        let was_reset = matches!(self.segments.back(), Some((_, Segment::Reset)));
        if was_reset || self.over && !is_reset {
            return;
        }
        self.over |= !matches!(what, Segment::Bytes(_));
        let mut pieces = VecDeque::from([what]);
        if let Some(Segment::Bytes(bytes)) = pieces.front_mut()
            && bytes.len() > 1
            && dice.roll(Chance::percent(30))
        {
            let tail = bytes.split_off(1 + dice.index(bytes.len() - 1));
            pieces.push_back(Segment::Bytes(tail));
        }
        for piece in pieces {
            let last = self.segments.back().map_or(now, |(at, _)| *at);
            let at = now + dice.duration(&(slow / 20..=slow));
            self.segments.push_back((at.max(last), piece));
        }
    }

    /// When the next segment arrives.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.segments.front().map(|(at, _)| *at)
    }

    /// Puts what has arrived into the inbox at the other end. Returns whether anything has.
    pub(crate) fn deliver(&mut self, now: Instant, inbox: &mut Inbox) -> bool {
        let mut moved = false;
        while let Some((_, segment)) = self.segments.pop_front_if(|(at, _)| *at <= now) {
            moved = true;
            match segment {
                Segment::Bytes(bytes) => inbox.bytes.extend(bytes),
                Segment::End => inbox.ended = true,
                Segment::Reset => inbox.reset = true,
            }
        }
        moved
    }
}
