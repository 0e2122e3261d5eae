//! TCP between two hosts: what either side sends arrives in order, late, and cut anywhere. Urgent
//! bytes are known as such at the other end.

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
    /// One byte, which is urgent.
    Urgent(u8),
    End,
    Reset,
}

/// What has arrived at one side, and was not read.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    bytes: VecDeque<u8>,
    /// Where urgent bytes stand among these.
    marks: VecDeque<usize>,
    pub(crate) ended: bool,
    pub(crate) reset: bool,
}

impl Inbox {
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Whether the next byte is urgent.
    pub(crate) fn is_urgent(&self) -> bool {
        self.marks.front() == Some(&0)
    }

    /// What a read may bring: bytes up to the next urgent one, or that one alone.
    pub(crate) fn readable(&self) -> &[u8] {
        let (bytes, _) = self.bytes.as_slices();
        let most = match self.marks.front() {
            Some(0) => 1,
            Some(before) => *before,
            None => bytes.len(),
        };
        &bytes[..most.min(bytes.len())]
    }

    /// Takes so many bytes of what is readable.
    pub(crate) fn take(&mut self, len: usize) -> Vec<u8> {
        self.marks.pop_front_if(|mark| *mark < len);
        self.marks.iter_mut().for_each(|mark| *mark -= len);
        self.bytes.drain(..len).collect()
    }

    /// Nobody will read what is there.
    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
        self.marks.clear();
    }
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
        self.over |= matches!(what, Segment::End | Segment::Reset);
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

    /// Shows all bytes that are about to arrive to `tap`, which may replace them.
    pub(crate) fn tap(&mut self, now: Instant, tap: impl Fn(&mut Vec<u8>)) {
        for (at, segment) in &mut self.segments {
            if *at <= now
                && let Segment::Bytes(bytes) = segment
            {
                tap(bytes);
            }
        }
    }

    /// What is on its way takes so much longer.
    pub(crate) fn delay(&mut self, by: Duration) {
        self.segments.iter_mut().for_each(|(at, _)| *at = *at + by);
    }

    /// Whether nothing is on its way.
    pub(crate) fn is_empty(&self) -> bool {
        self.segments.is_empty()
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
                Segment::Urgent(byte) => {
                    inbox.marks.push_back(inbox.bytes.len());
                    inbox.bytes.push_back(byte);
                }
                Segment::End => inbox.ended = true,
                Segment::Reset => inbox.reset = true,
            }
        }
        moved
    }
}
