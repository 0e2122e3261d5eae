//! One connection carries several streams, one after the other: ours, and not in the RFC.
//!
//! A rendezvous takes a TCP connection and three CLC messages, which is most of what a short
//! connection costs. Two sides that have agreed on it do without for the next TCP connection
//! between the same addresses:
//!
//! ```text
//!   the side that begins                        the side that follows
//!      bytes, then D ──────────────────────────►
//!              ◄────────────────────────────────  bytes, then D; everything is consumed
//!      S changes, D is taken back, bytes ──────►  the next stream
//!              ◄────────────────────────────────  S changes, too
//!      C ──────────────────────────────────────►  the end of the connection, as in RFC 4.8.1
//! ```
//!
//! - A stream has ended when both sides have said D. Neither says C, so both elements stay where
//!   they are, and each side may still say C or A, as the RFC has it.
//! - D and C of a message are about the stream that its S names. Cursors and numbers run on.
//! - The next stream begins only when the side that follows has consumed everything and has said
//!   so, and when its RNIC has all of our messages. So no byte can be taken for one of another
//!   stream, and a failover in between loses no boundary. If it has not consumed everything by
//!   then, the side that begins closes the connection.
//! - The side that follows says K in all of its messages, if this connection can carry another
//!   stream. It may not: if it ends in a program, for example, instead of a gateway.
//! - A side that follows may say C while the next stream is on its way to it: then it takes the C
//!   back. The side that begins never begins anything after its own C.

use super::failover::Failover;
use super::{Connection, Half, Said, State};
use crate::error::PeerMisbehaved;
use crate::wire::cdc::Cdc;

/// How many streams a connection may carry, and which side begins them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Streams {
    /// One, as in the RFC.
    #[default]
    One,
    /// Any number. This side begins each.
    Begins,
    /// Any number. The peer begins each.
    Follows,
}

/// Which stream a message is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum About {
    /// The one that we know of.
    Present,
    /// The next one.
    Next,
    /// The one before.
    Last,
}

/// What to do with a connection whose stream is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterStream {
    /// [Close](Connection::close) it: no other stream will follow.
    Close,
    /// Wait: the peer may not know yet that the stream is over, and somebody will tell it.
    Wait,
    /// Keep it: the next stream may begin, for the side that begins at once.
    Keep,
}

impl<R> Connection<R> {
    /// What to do with the connection, once the caller has ended what it has of the stream, as it
    /// would have to before [`Self::close`].
    pub fn after_stream(&self) -> AfterStream {
        if self.streams == Streams::One || !self.is_over() {
            return AfterStream::Close;
        }
        if self.owes() || !self.is_heard() || !matches!(self.failover, Failover::Flowing) {
            return AfterStream::Wait;
        }
        match self.streams {
            Streams::Follows => AfterStream::Keep,
            Streams::Begins if self.peer_keeps && self.sender.is_all_consumed() => {
                AfterStream::Keep
            }
            // It follows never, or has bytes that nobody may ever read.
            Streams::Begins | Streams::One => AfterStream::Close,
        }
    }

    /// Whether both sides have said D, neither has closed, and nothing is left to read.
    fn is_over(&self) -> bool {
        let ended = matches!(self.state, State::PeerCloseWait2(Half::Done) | State::AppCloseWait2);
        ended && self.readable().is_empty()
    }

    /// Begins the next stream: a message is due that tells the peer so.
    ///
    /// # Panics
    ///
    /// If [`Self::after_stream`] does not say [`AfterStream::Keep`], or the peer is to begin.
    pub fn begin_stream(&mut self) {
        assert!(self.streams == Streams::Begins && self.after_stream() == AfterStream::Keep);
        self.next_stream();
        self.flags_due = true;
    }

    /// Which stream a message is about.
    ///
    /// # Errors
    ///
    /// If it begins a stream that must not begin.
    pub(super) fn about(&self, message: &Cdc) -> Result<About, PeerMisbehaved> {
        if message.odd_stream == self.odd_stream {
            return Ok(About::Present);
        }
        match self.streams {
            Streams::One => Ok(About::Present),
            Streams::Begins => Ok(About::Last),
            Streams::Follows => match self.state {
                // Its D may have been in a message that was replaced by this one.
                State::PeerCloseWait1(Half::Done)
                | State::PeerCloseWait2(_)
                | State::AppCloseWait2
                | State::PeerFinCloseWait
                    if self.receiver.is_all_told() =>
                {
                    Ok(About::Next)
                }
                // It has not heard our A yet, and any word of it about the end will do.
                State::PeerAbortWait | State::ProcessAbort | State::Closed => Ok(About::Present),
                State::Active
                | State::PeerCloseWait1(_)
                | State::PeerCloseWait2(_)
                | State::AppFinCloseWait
                | State::AppCloseWait1(_)
                | State::AppCloseWait2
                | State::PeerFinCloseWait => Err(PeerMisbehaved::UnexpectedMessage),
            },
        }
    }

    /// Forgets what was said of the stream that has ended.
    pub(super) fn next_stream(&mut self) {
        self.odd_stream = !self.odd_stream;
        self.state = State::Active;
        self.said = Said::default();
        self.heard = None;
        self.reading = true;
        self.flags_due = false;
        self.deadline = None;
        self.sender.begin_stream();
    }

    /// Whether the peer waits for us to say that everything is consumed.
    pub(super) fn is_end_due(&self) -> bool {
        self.streams == Streams::Follows && self.is_over() && !self.receiver.is_all_told()
    }
}
