//! Streams that follow one another on an SMC-R connection.
//!
//! ```text
//!   a stream ── both sides have said D ──► kept, without a socket ──► the next stream
//!                                               └── C, or a link is lost ──► over
//! ```
//!
//! The control thread is told of each stream that has ended, and gets its socket. It brings the
//! socket of the next one, which it begins, or which the peer has begun.

use std::sync::Arc;

use smcr_proto::connection::AfterStream;

use super::socket::Socket;
use super::{Far, Outcome, Relay};
use crate::allowance::Allowance;
use crate::names::Tally;
use crate::streams::Streams;
use crate::turn::Turn;

/// What an SMC-R connection knows of the streams that it has carried.
#[derive(Debug, Default)]
pub(crate) struct Between {
    /// It has no stream, or one whose socket has not come yet.
    pub(super) is_kept: bool,
    /// The peer has begun a stream whose socket has not come yet.
    calls: bool,
    /// The control thread was not told of that yet.
    is_news: bool,
    /// How many streams it has carried, modulo 256: events of their sockets are none of the next.
    turn: u8,
    /// Written to sockets, of all streams before the present one.
    carried_out: u64,
}

/// What is left of a stream.
#[derive(Debug)]
pub(crate) struct LastStream<T> {
    pub(crate) near: T,
    pub(crate) tally: Tally,
}

/// What the control thread must be told: a stream that has ended, and whether another has begun.
pub(crate) type News<T> = (Option<Box<LastStream<T>>>, bool);

impl<T> Relay<T> {
    /// The stream is over in good order, and its connection is kept for another one.
    pub(super) fn end_stream(&mut self, turn: &mut Turn<'_, impl Streams<Stream = T>>) {
        let tally = self.last_tally(turn.now, turn.streams, turn.counters);
        let near = self.near.take().expect("a stream that ends in good order has its socket");
        turn.streams.release(&near.stream);
        assert!(self.last.is_none(), "of each stream the control thread is told before the next");
        self.last = Some(Box::new(LastStream { near: near.stream, tally }));
        let carried_out = self.carried_out();
        let smc = self.far.smc();
        smc.between.is_kept = true;
        smc.between.turn = smc.between.turn.wrapping_add(1);
        smc.between.carried_out = carried_out;
        (smc.late_until, smc.room_until) = (None, None);
        (self.tally, self.bypassed, self.failovers) = (Tally::default(), (0, 0), 0);
        self.pace.leave();
    }

    /// The peer has begun the next stream. So the one before is over, although we may not have
    /// noticed everything that it takes to say so.
    pub(super) fn stream_begun(&mut self, turn: &mut Turn<'_, impl Streams<Stream = T>>) {
        if let Some(near) = &mut self.near {
            if !near.finished {
                turn.streams.finish(&near.stream);
                near.finished = true;
            }
            self.end_stream(turn);
        }
        let between = &mut self.far.smc().between;
        (between.calls, between.is_news) = (true, true);
    }

    /// How many streams it has carried before, modulo 256.
    pub(crate) fn turn(&self) -> u8 {
        match &self.far {
            Far::Smc(smc) => smc.between.turn,
            Far::Tcp(_) => 0,
        }
    }

    /// Whether bytes have come of which no stream is. An honest peer begins one before.
    pub(super) fn has_stray_bytes(&mut self) -> bool {
        let smc = self.far.smc();
        let Between { is_kept, calls, .. } = smc.between;
        is_kept && !calls && !smc.connection.readable().is_empty()
    }

    /// Whether the peer has begun a stream whose socket has not come yet.
    pub(crate) fn is_called(&self) -> bool {
        matches!(&self.far, Far::Smc(smc) if smc.between.calls)
    }

    /// Whether it is kept for another stream, or waits for the socket of one.
    pub(crate) fn is_kept(&self) -> bool {
        match &self.far {
            Far::Smc(smc) => smc.between.is_kept,
            Far::Tcp(_) => false,
        }
    }

    /// Whether the next stream may have its socket: it is ours to begin, or the peer has begun it.
    pub(crate) fn may_go_on(&self) -> bool {
        let Far::Smc(smc) = &self.far else { return false };
        let may_begin = || smc.connection.after_stream() == AfterStream::Keep;
        let is_over = smc.connection.is_lost() || smc.connection.state().is_ending_abnormally();
        smc.between.is_kept && !is_over && (smc.between.calls || may_begin())
    }

    /// The socket of the next stream has come.
    pub(crate) fn go_on(
        &mut self,
        turn: &mut Turn<'_, impl Streams<Stream = T>>,
        near: T,
        allowance: Option<Arc<Allowance>>,
    ) -> Outcome {
        let smc = self.far.smc();
        let calls = std::mem::take(&mut smc.between.calls);
        smc.between.is_kept = false;
        if !calls {
            smc.connection.begin_stream();
        }
        self.near = Some(Socket::new(near));
        self.pace.begin_anew(allowance);
        turn.work.queue_drain(&mut self.queued);
        turn.work.queue_fill(&mut self.queued);
        turn.work.queue_flush(&mut self.queued);
        self.settle(turn)
    }

    /// No other stream shall follow.
    pub(crate) fn close_kept(&mut self, turn: &mut Turn<'_, impl Streams<Stream = T>>) -> Outcome {
        let smc = self.far.smc();
        let is_due = smc.between.is_kept && !smc.between.calls && !smc.connection.is_lost();
        if !is_due || !smc.connection.close(turn.now) {
            return Outcome::Rests;
        }
        turn.work.queue_flush(&mut self.queued);
        self.settle(turn)
    }

    /// Written to sockets, of all streams.
    pub(super) fn carried_out(&self) -> u64 {
        let before = match &self.far {
            Far::Smc(smc) => smc.between.carried_out,
            Far::Tcp(_) => 0,
        };
        before + self.tally.bytes_out
    }

    /// Whether the control thread must be told something.
    pub(super) fn has_news(&self) -> bool {
        let begun = matches!(&self.far, Far::Smc(smc) if smc.between.is_news);
        begun || self.last.is_some()
    }

    /// What the control thread must be told.
    pub(crate) fn take_news(&mut self) -> News<T> {
        let last = self.last.take();
        let begun = match &mut self.far {
            Far::Smc(smc) => std::mem::take(&mut smc.between.is_news),
            Far::Tcp(_) => false,
        };
        (last, begun)
    }

    /// The outcome of something that happened.
    pub(super) fn moved(&self) -> Outcome {
        if self.has_news() { Outcome::News } else { Outcome::Moved }
    }
}
