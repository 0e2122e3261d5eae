//! A connection: a socket and SMC-R, or two sockets, both directions.
//!
//! A [`Relay`] is a value. Its methods borrow a [`Turn`], and return requests that only the poller
//! can fulfil as an [`Outcome`]. `fill` carries bytes away from the near socket, `drain` towards
//! it, `receive` takes in CDC messages, and `settle` passes on the ends of the two directions: FIN
//! becomes the D flag, both FINs become C, RST becomes A, and the reverse. Urgent bytes keep their
//! place in the stream and their urgency (see `urgent`).
//!
//! - `smc` and `tcp` are the two kinds of far sides; `socket` is the near side.
//! - `pump` carries bytes between two sockets;
//! - `kept` and `replay`: bytes that are written again on another link (RFC 4.6.2).
//! - `resets`: how a connection is reset, or lost.
//! - `held`: CDC messages that came too early.
//! - `pace`: how fast it may carry bytes.
//! - `dormancy`: when it gives memory back.
//! - `between`: streams that follow one another on an SMC-R connection.

mod between;
mod bypassed;
mod crossing;
mod dormancy;
mod drain;
mod fill;
mod held;
mod kept;
pub(crate) mod pace;
mod pump;
mod replay;
mod resets;
pub(crate) mod route;
pub(crate) mod smc;
pub(crate) mod socket;
pub(crate) mod tcp;
mod urgent;

use std::sync::Arc;

use smcr_memory::{Lease, Rmbe};
use smcr_proto::connection::{AfterStream, Half, Progress};
use smcr_proto::wire::cdc::Cdc;
use smcr_rnic::{Status, Work};

use crate::gauges::{Reading, Stage};
use crate::names::{ConnectionId, Ending, GroupId, Tally};
use crate::parked::{Parked, Waiting};
use crate::requests::{Request, Said};
use crate::streams::Streams;
use crate::turn::{List, Queued, Turn};
use between::LastStream;
use pace::Pace;
use route::Route;
use smc::Smc;
use socket::Socket;
use tcp::Tcp;

/// A connection that is being relayed. `T` is what a TCP socket is.
#[derive(Debug)]
pub(crate) struct Relay<T> {
    pub(crate) id: ConnectionId,
    /// The application's socket; gone once it was reset, and between two streams.
    pub(crate) near: Option<Socket<T>>,
    /// A stream that has ended, of which the control thread was not told yet.
    pub(crate) last: Option<Box<LastStream<T>>>,
    pub(crate) far: Far<T>,
    /// Why it ends, if it is not because both applications have finished.
    pub(crate) ending: Option<Ending>,
    pub(crate) tally: Tally,
    /// What has passed us by, at the last look: from the near socket's application, and to it.
    pub(crate) bypassed: (u64, u64),
    /// How often it changed its link.
    pub(crate) failovers: u32,
    pub(crate) pace: Pace,
    pub(crate) queued: Queued,
}

/// The other side of a relay.
#[derive(Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "relays are boxed: a fallback wastes two hundred bytes"
)]
pub(crate) enum Far<T> {
    Smc(Smc),
    Tcp(Tcp<T>),
}

/// What a relay requests of the poller after its turn.
#[derive(Debug)]
#[must_use = "only the poller can change its tables"]
pub(crate) enum Outcome {
    /// Nothing happened.
    Rests,
    /// Something happened.
    Moved,
    /// Both sides have ended and no work request is outstanding: the slot can serve others.
    Over,
    /// A stream has ended or begun, and the control thread must be told.
    News,
    /// It has left its link, and continues at the other end of this route.
    Left(Arc<Route>),
}

/// A connection between two pollers, with its socket, its element and the bytes that must be
/// written again.
#[derive(Debug)]
pub struct Migrant<T> {
    pub(crate) relay: Box<Relay<T>>,
}

impl<T> Far<T> {
    /// The link group that it belongs to, if it is SMC-R.
    pub(crate) fn group(&self) -> Option<GroupId> {
        match self {
            Self::Smc(smc) => Some(smc.group),
            Self::Tcp(_) => None,
        }
    }

    /// The SMC-R side, for callers that know that there is one.
    pub(crate) fn smc(&mut self) -> &mut Smc {
        match self {
            Self::Smc(smc) => smc,
            Self::Tcp(_) => {
                panic!("two sockets have no link, and no link brings anything for them")
            }
        }
    }
}

impl<T> Relay<T> {
    /// A connection that has carried nothing yet.
    pub(crate) fn new(id: ConnectionId, near: T, far: Far<T>, pace: Pace) -> Self {
        Self {
            id,
            near: Some(Socket::new(near)),
            last: None,
            far,
            ending: None,
            tally: Tally::default(),
            bypassed: (0, 0),
            failovers: 0,
            pace,
            queued: Queued::nowhere(id.slot),
        }
    }

    /// The gauges of this connection, which other threads may read.
    pub(crate) fn reading(&self) -> Reading {
        let stage = match &self.near {
            None => Stage::Closing,
            Some(near) if near.is_done() => Stage::Closing,
            Some(near) if near.eof || near.finished => Stage::HalfClosed,
            Some(_) => Stage::Active,
        };
        let Tally { bytes_in, bytes_out, .. } = self.whole_tally();
        let (failovers, paced) = (self.failovers, self.pace.is_waiting());
        Reading { bytes_in, bytes_out, failovers, stage, paced }
    }

    /// The near socket, or the `far` one; none if it was reset, or if there was never a second one.
    pub(crate) fn socket(&mut self, far: bool) -> Option<&mut Socket<T>> {
        match (&mut self.far, far) {
            (Far::Tcp(tcp), true) => Some(&mut tcp.socket),
            (Far::Smc(_), true) => None,
            (Far::Smc(_) | Far::Tcp(_), false) => self.near.as_mut(),
        }
    }

    /// Takes in a CDC message, or keeps it until the messages before it have come.
    pub(crate) fn receive(
        &mut self,
        turn: &mut Turn<'_, impl Streams<Stream = T>>,
        waiting: Waiting,
    ) -> Outcome {
        let smc = self.far.smc();
        if smc.holds(turn.now, waiting) {
            turn.counters.cdc_held.add(1);
            return match smc.doomed() {
                None => Outcome::Rests,
                Some(ending) => self.reset(turn, ending),
            };
        }
        self.expect_gap_before(waiting);
        let outcome = self.take_in(turn, &waiting.message);
        match self.far.smc().is_gap_filled() {
            true if !matches!(outcome, Outcome::Over) => self.release_held(turn),
            true | false => outcome,
        }
    }

    /// Takes in CDC messages that came before this poller had the connection.
    pub(crate) fn receive_parked(
        &mut self,
        turn: &mut Turn<'_, impl Streams<Stream = T>>,
        parked: Parked,
    ) -> Outcome {
        if let Some(ending) = parked.doomed() {
            return self.reset(turn, ending);
        }
        for waiting in parked.into_messages() {
            if matches!(self.receive(turn, waiting), Outcome::Over) {
                return Outcome::Over;
            }
        }
        self.moved()
    }

    /// Takes in messages that were held back: what they waited for has come, or never will.
    fn release_held(&mut self, turn: &mut Turn<'_, impl Streams<Stream = T>>) -> Outcome {
        let held = self.far.smc().held.take().expect("whoever calls has looked");
        for waiting in held.messages.into_messages() {
            self.expect_gap_before(waiting);
            if matches!(self.take_in(turn, &waiting.message), Outcome::Over) {
                return Outcome::Over;
            }
        }
        self.moved()
    }

    /// Notes that messages before this one are missing because we have dropped them.
    ///
    /// We note the gap only here: an earlier gap may be the one that the F flag announces.
    fn expect_gap_before(&mut self, waiting: Waiting) {
        let connection = &mut self.far.smc().connection;
        if waiting.fills_gap_of(connection) {
            connection.expect_gap();
        }
    }

    fn take_in(&mut self, turn: &mut Turn<'_, impl Streams<Stream = T>>, cdc: &Cdc) -> Outcome {
        match self.far.smc().take_in(turn.now, cdc) {
            // RFC 7609 2.3 #8: reset when failover validation fails
            Ok(progress) if progress.reset && cdc.failover_validation => {
                self.reset(turn, Ending::DataLost)
            }
            Ok(progress) => self.progress(turn, progress),
            Err(_) => {
                turn.counters.cdc_misbehaved.add(1);
                self.reset(turn, Ending::PeerMisbehaved)
            }
        }
    }

    /// Acts on what a CDC message brought.
    fn progress(
        &mut self,
        turn: &mut Turn<'_, impl Streams<Stream = T>>,
        progress: Progress,
    ) -> Outcome {
        turn.counters.rdma_in.add(progress.readable_bytes.into());
        if progress.begun {
            self.stream_begun(turn);
        }
        if progress.reset {
            return self.reset(turn, Ending::ResetByPeer);
        }
        if self.has_stray_bytes() {
            turn.counters.cdc_misbehaved.add(1);
            return self.reset(turn, Ending::PeerMisbehaved);
        }
        // RFC 7609 4.7.1 #2: CDC message wakes the receiver
        if progress.readable_bytes > 0 {
            turn.work.queue_drain(&mut self.queued);
            let unread = self.far.smc().connection.readable().len();
            let came = (self.id, self.carried_out() + u64::from(unread));
            turn.sampler.came(turn.now, came, || turn.streams.time(turn.now));
        }
        // RFC 7609 4.7.4 #8: resume writing when window opens
        if progress.writable_bytes > 0 || progress.peer_closed {
            turn.work.queue_fill(&mut self.queued);
        }
        // An update may be owed, or our own close may have been waiting for this message.
        turn.work.queue_flush(&mut self.queued);
        self.settle(turn)
    }

    /// An RDMA write has completed, successfully or not.
    pub(crate) fn wrote(
        &mut self,
        turn: &mut Turn<'_, impl Streams<Stream = T>>,
        request: Request,
        lease: Lease,
    ) -> Outcome {
        match request {
            Request::Write(_) => self.far.smc().kept.keep(lease),
            Request::Replay(_) => turn.pool.take_back(lease),
            Request::Llc | Request::Cdc(..) => panic!("a message has no lease"),
        }
        self.completed(turn)
    }

    /// The send of a CDC message has completed, successfully or not.
    pub(crate) fn sent(
        &mut self,
        turn: &mut Turn<'_, impl Streams<Stream = T>>,
        said: Said,
        status: Status,
    ) -> Outcome {
        match (status, said) {
            (Status::Done, Said::All(sequence)) => {
                let smc = self.far.smc();
                // RFC 7609 4.6.1 #2: keep SS of delivered writes
                smc.connection.cdc_acknowledged(sequence);
                // A queue pair completes work requests in order: exactly the writes that have
                // completed so far were posted before this message.
                smc.kept.release(turn.pool);
                let (message, stages) = ((self.id, sequence), &turn.counters.stages);
                turn.sampler.acknowledged(message, stages, || turn.streams.time(turn.now));
            }
            (Status::Done, Said::Validation)
            | (Status::Flushed, Said::All(_) | Said::Validation) => {}
        }
        self.completed(turn)
    }

    /// One work request of the connection has completed.
    fn completed(&mut self, turn: &mut Turn<'_, impl Streams<Stream = T>>) -> Outcome {
        let smc = self.far.smc();
        assert!(smc.outstanding > 0, "each request completes once");
        smc.outstanding -= 1;
        if smc.outstanding > 0 {
            return Outcome::Rests;
        }
        let settled = self.settle(turn);
        match settled {
            Outcome::Over => Outcome::Over,
            Outcome::Rests | Outcome::Moved | Outcome::News | Outcome::Left(_) => {
                let departed = self.depart(turn);
                let stays = matches!(departed, Outcome::Rests);
                if stays && self.has_news() { settled } else { departed }
            }
        }
    }

    /// Queues the CDC message that is due, if one is.
    pub(crate) fn announce<S>(&mut self, turn: &mut Turn<'_, S>) {
        self.queued.take_out(List::Flush);
        // The connection that was queued may be over, and two sockets may have its slot now.
        let Far::Smc(smc) = &mut self.far else { return };
        if !smc.connection.failover().may_speak() {
            return;
        }
        // A broken link takes no work requests; its connections wait until they are moved or ended.
        let Some(link) = turn.links.by_id(smc.link).filter(|link| !link.broken) else { return };
        if link.budget == 0 {
            turn.counters.blocked_on_queue.add(1);
            turn.work.queue_flush(&mut self.queued);
            return;
        }
        if let Some(cdc) = smc.connection.poll_cdc() {
            link.budget -= 1;
            smc.outstanding += 1;
            let tag = Request::of_cdc(self.id, &cdc).tag();
            link.sends.push(Work::Send { message: cdc.encode(), tag });
            turn.counters.cdc_out.add(1);
            if !cdc.failover_validation {
                turn.sampler.announced(self.id, cdc.sequence);
            } else {
                // RFC 7609 4.6.1 #7: send on, F needs no answer
                turn.work.queue_fill(&mut self.queued);
                turn.work.queue_flush(&mut self.queued);
            }
        }
    }

    /// Ends each direction that is complete, and the connection if nothing of it is left. Call it
    /// after every event that may be the last one.
    pub(crate) fn settle(&mut self, turn: &mut Turn<'_, impl Streams<Stream = T>>) -> Outcome {
        let smc = self.far.smc();
        let mut speaks = false;
        if let Some(near) = &mut self.near
            && !smc.connection.is_lost()
        {
            let drained = smc.connection.readable().is_empty();
            self.tally.note_ends(near.eof, smc.connection.has_peer_said(Half::Done));
            if smc.connection.has_peer_said(Half::Done)
                && drained
                && !near.finished
                && !smc.has_late_bytes(turn.now)
            {
                // RFC 7609 4.8.1 #9: peer's D wakes a reader
                // RFC 7609 4.8.1 #14: end reads behind all data
                turn.streams.finish(&near.stream);
                near.finished = true;
            }
            // Only a FIN ends a direction. If an application reads no more (SHUT_RD), only its own
            // kernel knows, until a byte comes that nobody reads.
            // RFC 7609 4.8.1 #6: end of writing sends D
            // RFC 7609 4.8.1 #25: shutdown for reading sends nothing
            if near.eof {
                speaks |= smc.connection.shutdown_write();
            }
            // The peer may free its element when it hears C: no byte may be left to be written
            // again, whatever becomes of the link. D needs no such care, as it comes behind its
            // bytes and frees nothing.
            // RFC 7609 4.8.1 #4: send pending data before the end
            // RFC 7609 4.8.1 #12: write nothing after C
            if near.is_done() && drained && smc.is_delivered() {
                match smc.connection.after_stream() {
                    AfterStream::Close => speaks |= smc.connection.close(turn.now),
                    AfterStream::Wait => {}
                    AfterStream::Keep => {
                        self.end_stream(turn);
                        return Outcome::News;
                    }
                }
            }
        }
        speaks |= smc.close_after_peer(turn.now, self.near.is_some());
        if smc.is_over() {
            return Outcome::Over;
        }
        if speaks {
            turn.work.queue_flush(&mut self.queued);
        }
        self.moved()
    }

    /// Leaves the link, if the relay was told to and no work request is outstanding there.
    pub(crate) fn depart<S>(&mut self, turn: &mut Turn<'_, S>) -> Outcome {
        let smc = self.far.smc();
        // RFC 7609 2.3 #6: let old writes end before moving
        if smc.outstanding > 0 || !smc.connection.is_leaving() {
            return Outcome::Rests;
        }
        let route = smc.depart(self.near.is_some(), turn.pool);
        self.failovers += 1;
        turn.counters.failovers.add(1);
        Outcome::Left(route)
    }

    /// The sweep asks whether it is dormant. Then it returns its element, in which nothing is
    /// unread, and how many bytes the peer has announced, modulo 2^32.
    pub(crate) fn dormant_element(&mut self) -> Option<(&mut Rmbe, u32)> {
        let announced = self.carried_out();
        let Far::Smc(smc) = &mut self.far else { return None };
        let is_dormant = smc.connection.readable().is_empty() && smc.dormancy.look(announced);
        let modulo = announced & u64::from(u32::MAX);
        is_dormant.then(|| (&mut smc.rmbe, u32::try_from(modulo).expect("half of a word")))
    }

    /// Acts on deadlines that have passed.
    pub(crate) fn expire(&mut self, turn: &mut Turn<'_, impl Streams<Stream = T>>) -> Outcome {
        let now = turn.now;
        if self.pace.refresh() {
            turn.work.queue_fill(&mut self.queued);
            turn.work.queue_drain(&mut self.queued);
        }
        let smc = match &mut self.far {
            Far::Smc(smc) => smc,
            Far::Tcp(tcp) => {
                if !tcp.is_due(now) {
                    return Outcome::Rests;
                }
                turn.work.queue_fill(&mut self.queued);
                return Outcome::Moved;
            }
        };
        if smc.held.as_ref().is_some_and(|held| held.until <= now) {
            return self.release_held(turn);
        }
        let waits = self.near.as_ref().is_some_and(|near| !near.finished);
        if waits && smc.late_until.is_some_and(|until| until <= now) {
            return self.settle(turn);
        }
        let has_bytes = self.near.as_ref().is_some_and(|near| near.readable && !near.eof);
        if has_bytes && smc.room_until.is_some_and(|until| until <= now) {
            turn.work.queue_fill(&mut self.queued);
            return Outcome::Moved;
        }
        if !smc.connection.handle_timeout(now) {
            return Outcome::Rests;
        }
        // We have stopped waiting. RFC 4.8.1 says that nobody may write our element any more.
        // RFC 7609 4.8.2 #2: abort an end that stalls
        smc.touch_all();
        self.ending.get_or_insert(Ending::Stalled);
        self.settle(turn)
    }
}
