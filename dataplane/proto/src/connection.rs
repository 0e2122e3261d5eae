//! One TCP connection carried by a link: window, cursors, half-close, reset (RFC 4).
//!
//! ```text
//!   socket ── window(), produce() ──► peer's element      announced by poll_cdc()
//!   socket ◄── readable(), consume() ── our element       announced to handle_cdc()
//! ```
//!
//! Numbers only: the bytes themselves move in `engine`, between the calls. The order is always
//! *write, then announce*: the RDMA writes for what was produced are posted before the message that
//! `poll_cdc` returns, on the same queue pair.
//!
//! - `sender` counts what we write into the peer's element;
//! - `receiver` counts what the peer writes into ours, and decides when to say so (4.5.1);
//! - `speaking` makes the messages;
//! - `state` is Figures 22 and 23 as a table;
//! - `failover` is the way from one link to another (4.6);
//! - `streams`: one connection carries several TCP connections, one after the other;
//! - `view` is what a connection shows of itself.
//!
//! What is not here: the choice of a link, and the bytes that a failover must write again.

use core::time::Duration;

use crate::error::PeerMisbehaved;
use crate::limits::CDC_SEQUENCE_FIRST;
use crate::ring::{Ring, Span};
use crate::time::Instant;
use crate::vocabulary::AlertToken;
use crate::wire::cdc::Cdc;

mod failover;
mod progress;
mod receiver;
mod sender;
mod speaking;
mod state;
mod streams;
mod view;

use receiver::Receiver;
use sender::Sender;
use state::{Action, Event, Orderly};
use streams::About;

pub use failover::{Arrival, Failover, Replay};
pub use progress::Progress;
pub use state::{Half, State};
pub use streams::{AfterStream, Streams};

/// How long we wait for the peer's part of a close or abort before we give it up (RFC 4.8.1).
///
/// As long as TCP waits for the FIN of a peer whose connection nobody owns any more.
pub const CLOSE_WAIT: Duration = Duration::from_secs(60);

/// What the rendezvous found out about a new connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionSetup {
    /// The alert token the peer chose; it goes into every message we send.
    pub peer_token: AlertToken,
    /// Our element, written by the peer.
    pub element: Ring,
    /// The peer's element, written by us.
    pub peer_element: Ring,
    /// How long to wait for the peer once we have closed or aborted; see [`CLOSE_WAIT`].
    pub close_wait: Duration,
    /// How many streams it may carry. More than one only if both sides have agreed on it.
    pub streams: Streams,
}

/// Both directions of one TCP connection over SMC-R.
///
/// - `handle_cdc` feeds the messages that carry our alert token; `handle_timeout` feeds time.
/// - `poll_cdc` returns the message that is due, after the writes it announces were posted.
/// - `poll_timeout` says when to call `handle_timeout`, at the latest.
/// - `produce` and `consume` count what the caller moved.
/// - `leave`, `depart`, `replayed` and `lose` take it from link to link. `R` is the way to another
///   link, as the caller describes it.
///
/// Inputs carry non-decreasing `now`. Given the same inputs the same messages come out.
#[derive(Clone, Debug)]
pub struct Connection<R = ()> {
    peer_token: AlertToken,
    close_wait: Duration,
    streams: Streams,
    /// The present stream is the second one, or the fourth, and so on.
    odd_stream: bool,
    /// The peer follows: K of its last message.
    peer_keeps: bool,
    state: State,
    sender: Sender,
    receiver: Receiver,
    said: Said,
    /// How much of its side the peer has ended, as far as it has told us.
    heard: Option<Half>,
    /// The peer has said C or A: it writes no more.
    peer_left: bool,
    /// The application still wants bytes: neither closed nor aborted here.
    reading: bool,
    /// D, C or A, or P, is news to the peer.
    flags_due: bool,
    /// Where it is between two links, and what it may say there.
    failover: Failover<R>,
    outgoing: Outgoing,
    incoming: Incoming,
    /// When we stop waiting for the peer to do its part of the end.
    deadline: Option<Instant>,
    /// We have stopped waiting for the peer, and send nothing any more.
    given_up: bool,
}

/// D, C and A as every message from now on carries them: levels, never taken back.
#[derive(Clone, Copy, Debug, Default)]
struct Said {
    done: bool,
    closed: bool,
    abnormal: bool,
}

/// The numbers of our messages.
#[derive(Clone, Copy, Debug)]
struct Outgoing {
    /// That of the next one.
    next: u16,
    /// SS: the last one that the NIC reported as delivered.
    acknowledged: u16,
    /// The one that brought an urgent byte, until it or a later one is reported as delivered.
    urgent: Option<u16>,
}

/// The numbers of the peer's messages.
#[derive(Clone, Copy, Debug, Default)]
struct Incoming {
    /// SR: the last one that we took in.
    received: u16,
    /// Messages may be missing once, and nothing is lost by it.
    gap_expected: bool,
    /// None behind this one was under way when the peer changed the link.
    last_excused: u16,
    /// The peer has changed the link.
    moved: bool,
}

impl<R> Connection<R> {
    /// A connection on which nothing has been said yet.
    pub fn new(setup: ConnectionSetup) -> Self {
        Self {
            peer_token: setup.peer_token,
            close_wait: setup.close_wait,
            streams: setup.streams,
            odd_stream: false,
            peer_keeps: false,
            // RFC 7609 4.8.1 #2: Active after the rendezvous
            state: State::Active,
            sender: Sender::new(setup.peer_element),
            receiver: Receiver::new(setup.element),
            said: Said::default(),
            heard: None,
            peer_left: false,
            reading: true,
            flags_due: false,
            failover: Failover::Flowing,
            // RFC 7609 A.4 #3: sequence number at byte 2, from 1
            // RFC 7609 4.3 #2: begin numbering messages at 1
            outgoing: Outgoing { next: CDC_SEQUENCE_FIRST, acknowledged: 0, urgent: None },
            incoming: Incoming::default(),
            deadline: None,
            given_up: false,
        }
    }

    /// Whether both sides are done with both elements and nothing is left to say: our element and
    /// our alert token may serve another connection (RFC 4.4.2), once the owner has read what it
    /// wants of [`Self::readable`].
    pub fn is_closed(&self) -> bool {
        // RFC 7609 3.5.4 #2: reuse element when both are done
        // RFC 7609 4.4.2 #1: reuse only after both say done
        // RFC 7609 4.8.1 #1: begin and end as Closed
        // RFC 7609 4.8.1 #20: reuse element once Closed
        self.state == State::Closed && !self.owes()
    }

    /// How many bytes may be written to the peer now.
    ///
    /// Zero also while the peer has not consumed an urgent byte (4.7.5), and once either side's
    /// word forbids more: ours (D, C, A) or the peer's (C, A).
    pub fn window(&self) -> u32 {
        // RFC 7609 4.8.1 #12: write nothing after C
        if self.state.may_write() { self.sender.window() } else { 0 }
    }

    /// Counts `len` bytes as written, and says where in the peer's element they belong. A CDC
    /// message becomes due.
    ///
    /// # Panics
    ///
    /// If `len` exceeds [`Self::window`].
    pub fn produce(&mut self, len: u32) -> Span {
        assert!(len <= self.window(), "the window is the caller's to respect");
        assert!(self.failover.may_write_on(), "what is new comes behind what is repeated");
        self.sender.produce(len)
    }

    /// Like [`Self::produce`], the last byte being urgent. Nothing more may be written until the
    /// peer has consumed it.
    ///
    /// # Panics
    ///
    /// If `len` is zero or exceeds [`Self::window`].
    ///
    /// # Specification
    ///
    /// RFC 7609, 4.7.5.
    pub fn produce_urgent(&mut self, len: u32) -> Span {
        assert!(len > 0, "one byte is urgent");
        assert!(len <= self.window(), "the window is the caller's to respect");
        assert!(self.failover.may_write_on(), "what is new comes behind what is repeated");
        self.sender.produce_urgent(len)
    }

    /// Tells the peer that an urgent byte is on its way behind what does not fit yet: P, in a
    /// message of its own if need be. Ends with the next [`Self::produce_urgent`].
    ///
    /// # Specification
    ///
    /// RFC 7609, 4.7.6.
    pub fn announce_urgent(&mut self) {
        if self.state.may_write() && self.sender.announce_urgent() {
            self.flags_due = true;
        }
    }

    /// Says whether the application has bytes for which there is no window. If the peer closes
    /// meanwhile, those bytes are lost and the connection is reset (4.8.1, 4A).
    ///
    /// The B bit of the messages to come is set then, and also while the peer's element is full: a
    /// byte that comes later could not be announced any more. B travels with other news, as
    /// deployed peers send it; no message becomes due by it.
    pub fn set_bytes_waiting(&mut self, waiting: bool) {
        self.sender.set_waiting(waiting);
    }

    /// The bytes of our element that were announced and not consumed yet.
    ///
    /// Empty after we have closed or aborted. After a reset by the peer, what had been announced
    /// can still be read; the owner may as well purge it (4.8.2, 2A).
    pub fn readable(&self) -> Span {
        self.receiver.readable(self.reading)
    }

    /// Counts the first `len` readable bytes as consumed: the peer may write over them once it
    /// hears of it. A CDC message becomes due if 4.5.1 says so.
    ///
    /// # Panics
    ///
    /// If fewer than `len` bytes are readable.
    pub fn consume(&mut self, len: u32) {
        assert!(len <= self.readable().len(), "only readable bytes can be consumed");
        self.receiver.consume(len);
    }

    /// No byte follows: D becomes due. Call it when all bytes were produced.
    ///
    /// Returns whether that is news: not if D, C or A was said before.
    pub fn shutdown_write(&mut self) -> bool {
        self.step(Event::Orderly(Orderly::ShutdownWrite))
    }

    /// The application has closed in both directions, everything was produced and everything
    /// readable was consumed: C becomes due.
    ///
    /// Returns whether that is news: not if C or A was said before.
    ///
    /// # Panics
    ///
    /// If bytes are readable and the connection was not reset: it must then be aborted (4.8.1, 3A).
    pub fn close(&mut self, now: Instant) -> bool {
        let unread = !self.readable().is_empty() && !self.state.is_ending_abnormally();
        // RFC 7609 4.8.1 #3: closing with unread data aborts
        assert!(!unread, "unread bytes mean abort, not close");
        self.advance(now, Event::Orderly(Orderly::Close))
    }

    /// The application, or its connection to us, was reset: A becomes due, unless we have closed
    /// already. What was not announced is lost.
    ///
    /// Returns whether that is news: not if C or A was said before.
    ///
    /// # Specification
    ///
    /// RFC 7609, 4.8.2.
    pub fn abort(&mut self, now: Instant) -> bool {
        self.advance(now, Event::Abort)
    }

    /// Takes in a CDC message that the link matched to this connection by its alert token.
    ///
    /// A message older than one we took in is dropped; the same number again is not (dialect of
    /// the deployed peers). Bytes announced behind a D or a C are readable until we have closed:
    /// a Linux peer that lost patience says C before its last bytes are written.
    ///
    /// # Errors
    ///
    /// [`PeerMisbehaved`], with the connection unchanged. The caller aborts this connection and
    /// keeps the link: the others on it have done nothing wrong.
    ///
    /// # Specification
    ///
    /// RFC 7609, 4.5 (cursors), 4.6.1 (failover validation), 4.8 (the end), A.4 (format).
    pub fn handle_cdc(&mut self, now: Instant, message: &Cdc) -> Result<Progress, PeerMisbehaved> {
        // RFC 7609 4.6.1 #6: ignore other fields of F message
        if message.failover_validation {
            return Ok(self.validate_failover(now, message.sequence));
        }
        // RFC 7609 A.4 #5: discard messages with lower number
        // RFC 7609 A.4 #7: repeated number changes nothing
        if is_before(message.sequence, self.incoming.received) || self.state == State::Closed {
            return Ok(Progress::default());
        }
        let about = self.about(message)?;
        let produced = self.receiver.resolve(message.producer)?;
        let consumed = self.sender.resolve(message.consumer)?;
        let begun = about == About::Next;
        let is_late = about == About::Last && self.receiver.is_news(produced);
        if is_late || begun && !self.sender.is_all(consumed) {
            return Err(PeerMisbehaved::UnexpectedMessage);
        }
        if !begun && self.is_behind_gap(message) {
            return Err(PeerMisbehaved::MessagesMissing);
        }
        self.incoming.gap_expected &= !self.ends_excuse(message);
        if begun {
            self.next_stream();
        }

        let window_before = self.window();
        let readable_before = self.readable().len();
        // RFC 7609 4.6.1 #3: keep SR of arrived writes
        self.incoming.received = message.sequence;
        self.sender.peer_consumed(consumed);
        self.peer_keeps = message.keeps;
        let urgent = self.receiver.peer_produced(produced, message);
        let mut progress = match about {
            About::Present | About::Next => self.handle_flags(now, message),
            // Of what it says there, only a reset is about more than that stream.
            About::Last => self.handle_flags(
                now,
                &Cdc { sending_done: false, connection_closed: false, ..*message },
            ),
        };
        progress.begun = begun;
        progress.urgent = urgent && self.reading;
        progress.readable_bytes = self.readable().len().saturating_sub(readable_before);
        progress.writable_bytes = self.window().saturating_sub(window_before);
        Ok(progress)
    }

    /// When to call [`Self::handle_timeout`], at the latest.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.deadline
    }

    /// Gives up waiting for the peer's part of a close or abort, if it is time: the connection is
    /// then closed without it (RFC 4.8.1, last note). Returns whether that happened.
    pub fn handle_timeout(&mut self, now: Instant) -> bool {
        if self.deadline.is_none_or(|deadline| now < deadline) {
            return false;
        }
        self.advance(now, Event::Timeout);
        assert!(self.is_closed(), "only waits for the end have a deadline");
        true
    }

    /// The NIC reported the message with this number as delivered.
    pub fn cdc_acknowledged(&mut self, sequence: u16) {
        // RFC 7609 4.6.1 #2: keep SS of delivered writes
        if !is_before(sequence, self.outgoing.acknowledged) {
            self.outgoing.acknowledged = sequence;
            self.outgoing.urgent = self.outgoing.urgent.filter(|said| is_before(sequence, *said));
        }
    }

    /// Takes in D, C and A. They are levels in every message, so only a change is an event.
    fn handle_flags(&mut self, now: Instant, message: &Cdc) -> Progress {
        let before = self.state;
        self.peer_left |= message.connection_closed || message.abnormal_close;
        if message.sending_done {
            self.advance(now, Event::Orderly(Orderly::PeerDone));
        }
        if message.connection_closed {
            self.advance(now, Event::Orderly(Orderly::PeerClosed));
        }
        if message.abnormal_close {
            self.advance(now, Event::PeerAborted);
        }
        let said = match (message.connection_closed, message.sending_done) {
            (true, _) => Some(Half::Closed),
            (false, true) => Some(Half::Done),
            (false, false) => None,
        };
        let peer_done = said.is_some() && self.heard.is_none();
        let peer_closed = said == Some(Half::Closed) && self.heard != said;
        self.heard = self.heard.max(said);
        let mut reset = message.abnormal_close && !before.is_ending_abnormally();
        // RFC 7609 4.8.1 #15: reset if C meets pending data
        if peer_closed && before.may_write() && self.sender.has_waiting() {
            self.advance(now, Event::Abort);
            reset = true;
        }
        Progress { peer_done, peer_closed, reset, ..Progress::default() }
    }

    /// One event, and the clock that may start or stop with it. Returns whether the peer is to be
    /// told.
    fn advance(&mut self, now: Instant, event: Event) -> bool {
        let waited = self.state.waits_for_peer();
        let speaks = self.step(event);
        match (waited, self.state.waits_for_peer()) {
            // RFC 7609 4.8.1 #21: limit closing by a timer
            // RFC 7609 4.8.2 #7: limit PeerAbortWait by a timer
            (false, true) => self.deadline = Some(now + self.close_wait),
            (_, false) => self.deadline = None,
            (true, true) => {}
        }
        speaks
    }

    /// One event through the table, and what it demands. Returns whether the peer is to be told.
    fn step(&mut self, event: Event) -> bool {
        let (next, action) = self.state.after(event);
        self.state = next;
        match action {
            Some(Action::SayDone) => self.said.done = true,
            Some(Action::SayClosed) => self.said.closed = true,
            Some(Action::SayAbort) => self.said.abnormal = true,
            Some(Action::GiveUp) | None => {}
        }
        let speaks = action.is_some_and(|action| action != Action::GiveUp);
        self.given_up |= action == Some(Action::GiveUp);
        self.flags_due |= speaks;
        if matches!(event, Event::Orderly(Orderly::Close) | Event::Abort | Event::Timeout) {
            self.reading = false;
        }
        speaks
    }
}

/// Whether message `a` was sent before message `b`: a signed difference, for numbers that wrap.
pub fn is_before(a: u16, b: u16) -> bool {
    // RFC 7609 A.4 #6: compare numbers that wrap
    a.wrapping_sub(b).cast_signed() < 0
}

#[cfg(test)]
mod tests;
