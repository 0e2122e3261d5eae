//! What is said on the TCP connection of a rendezvous, and when it is the application's again.

use std::collections::VecDeque;

use smcr_proto::Instant;
use smcr_proto::handshake::{
    Agreement, Client, ClientAction, HandshakeError, Server, ServerAction, Verdict,
};
use smcr_proto::wire::clc::{Diagnosis, FRAME_MAX, Frame, Framer};

/// What the owner of a conversation must do.
#[derive(Debug)]
pub enum Demand {
    /// What a client demands.
    Client(ClientAction),
    /// What a server demands.
    Server(ServerAction),
    /// Write this message to the TCP connection.
    Say(Frame),
    /// The rendezvous failed, for this reason. What becomes of the connection follows.
    Failed(HandshakeError),
    /// The connection stays TCP; with a reason of ours, if we declined.
    FallBack(Option<Diagnosis>),
    /// Both sides must hear that the connection is over.
    Close(Ended),
}

/// Why both sides must hear that the connection is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The handshake failed when it could no longer be declined.
    Failed,
    /// The peer ended the TCP connection when something was still to be said.
    ByPeer,
}

/// The handshake, on either side.
#[derive(Debug)]
pub enum Machine {
    /// We propose.
    Client(Client),
    /// The peer proposes.
    Server(Server),
}

impl Machine {
    /// Which version the rendezvous has come to.
    pub fn agreement(&self) -> Option<Agreement> {
        match self {
            Self::Client(client) => client.agreement().copied(),
            Self::Server(server) => server.agreement().copied(),
        }
    }

    /// When [`Conversation::handle_timeout`] must be called, at the latest.
    pub fn poll_timeout(&self) -> Option<Instant> {
        match self {
            Self::Client(client) => client.poll_timeout(),
            Self::Server(server) => server.poll_timeout(),
        }
    }

    /// Whether the peer may have ended TCP by now, because its program has nothing more to say. A
    /// client knows of its first contact before we do; a server never.
    fn may_have_ended(&self) -> bool {
        match self {
            Self::Server(server) => server.is_awaiting_link(),
            Self::Client(_) => false,
        }
    }

    fn handle_frame(&mut self, frame: Frame) -> Result<(), HandshakeError> {
        match self {
            Self::Client(client) => client.handle_frame(frame),
            Self::Server(server) => server.handle_frame(frame),
        }
    }

    fn poll_action(&mut self) -> Option<Demand> {
        match self {
            Self::Client(client) => client.poll_action().map(Demand::Client),
            Self::Server(server) => server.poll_action().map(Demand::Server),
        }
    }
}

/// One side of a rendezvous.
///
/// - `feed`, `end`, `link_confirmed`, `link_failed`, `handle_timeout` and `decline` feed what
///   happened; so do the methods of `machine` that answer what it asks.
/// - `poll_demand` drains what must be done. Call it until `None` after every input.
///
/// When the connection stays TCP, `leftover` are the peer's first bytes behind the rendezvous; and
/// if we `have_declined`, a Decline of the peer may stand before them.
#[derive(Debug)]
pub struct Conversation {
    /// The handshake.
    pub machine: Machine,
    framer: Framer,
    /// The peer has ended its direction of the TCP connection.
    ended: bool,
    /// We have said Decline, which one of the peer's may cross.
    declined: bool,
    /// What comes now is not for us.
    over: bool,
    demands: VecDeque<Demand>,
}

impl Conversation {
    /// Nothing was said yet.
    pub fn new(machine: Machine) -> Self {
        Self {
            machine,
            framer: Framer::new(),
            ended: false,
            declined: false,
            over: false,
            demands: VecDeque::new(),
        }
    }

    /// How many bytes of the peer can be taken in now.
    pub fn room(&self) -> usize {
        FRAME_MAX - self.framer.leftover().len()
    }

    /// Takes in bytes of the peer, no more than there is room for.
    pub fn feed(&mut self, bytes: &[u8]) {
        let taken = self.framer.feed(bytes);
        assert_eq!(taken, bytes.len(), "no more was read than there is room for");
    }

    /// The peer sends no more.
    pub fn end(&mut self) {
        // A Linux program that half-closes at once ends TCP before we have heard, on the link, that
        // the first contact succeeded. No message is missing.
        if self.machine.may_have_ended() {
            self.ended = true;
        } else {
            self.close(Ended::ByPeer);
        }
    }

    /// The peer sends no more, and nothing that it should have said is missing.
    pub fn end_in_order(&mut self) {
        self.ended = true;
    }

    /// Whether the peer has ended its direction.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Whether we have said Decline.
    pub fn has_declined(&self) -> bool {
        self.declined
    }

    /// Bytes of the peer that belong to no message.
    pub fn leftover(&self) -> &[u8] {
        self.framer.leftover()
    }

    /// The first contact of this rendezvous succeeded.
    pub fn link_confirmed(&mut self) {
        match &mut self.machine {
            Machine::Client(client) => client.link_confirmed(),
            Machine::Server(server) => server.link_confirmed(),
        }
    }

    /// The first contact of this rendezvous failed.
    pub fn link_failed(&mut self, committed: bool) {
        // A peer that has ended its stream believes that its application has said all it had, by
        // SMC-R.
        let committed = committed || self.ended;
        let result = match &mut self.machine {
            Machine::Client(client) => client.link_failed(committed),
            Machine::Server(server) => server.link_failed(committed),
        };
        if let Err(error) = result {
            self.fail(error);
        }
    }

    /// It may be time for something.
    pub fn handle_timeout(&mut self, now: Instant) {
        let result = match &mut self.machine {
            Machine::Client(client) => client.handle_timeout(now),
            Machine::Server(server) => server.handle_timeout(now),
        };
        if let Err(error) = result {
            self.fail(error);
        }
    }

    /// The rendezvous ends in an error: falls back, or closes.
    pub fn fail(&mut self, error: HandshakeError) {
        self.demands.push_back(Demand::Failed(error));
        match error.verdict() {
            Verdict::Close => self.close(Ended::Failed),
            Verdict::FallBack(None) => self.demands.push_back(Demand::FallBack(None)),
            Verdict::FallBack(Some(diagnosis)) => self.decline(diagnosis),
        }
        self.over = true;
    }

    /// Says Decline, in place of a message that the peer waits for, and falls back.
    pub fn decline(&mut self, diagnosis: Diagnosis) {
        let decline = match &self.machine {
            Machine::Client(client) => client.decline_frame(diagnosis),
            Machine::Server(server) => server.decline_frame(diagnosis),
        };
        self.demands.push_back(Demand::Say(decline));
        self.demands.push_back(Demand::FallBack(Some(diagnosis)));
        self.over = true;
    }

    /// What must be done next, oldest first.
    #[must_use]
    pub fn poll_demand(&mut self) -> Option<Demand> {
        let demand = self.next_demand()?;
        match &demand {
            Demand::Say(frame)
            | Demand::Client(ClientAction::Send(frame))
            | Demand::Server(ServerAction::Send(frame)) => {
                self.declined |= matches!(frame, Frame::Decline(_) | Frame::DeclineV2(_));
            }
            Demand::Client(ClientAction::FallBack | ClientAction::Done)
            | Demand::Server(ServerAction::FallBack | ServerAction::Done)
            | Demand::FallBack(_)
            | Demand::Close(_) => self.over = true,
            Demand::Client(_) | Demand::Server(_) | Demand::Failed(_) => {}
        }
        Some(demand)
    }

    fn next_demand(&mut self) -> Option<Demand> {
        loop {
            if let Some(demand) = self.demands.pop_front() {
                return Some(demand);
            }
            if self.over {
                return None;
            }
            if let Some(demand) = self.machine.poll_action() {
                return Some(demand);
            }
            match self.framer.next_frame() {
                Ok(None) => return None,
                Ok(Some(frame)) => self.hear(frame),
                Err(malformed) => self.fail(malformed.into()),
            }
        }
    }

    fn hear(&mut self, frame: Frame) {
        tracing::trace!(?frame, "received");
        if let Err(error) = self.machine.handle_frame(frame) {
            self.fail(error);
        }
    }

    fn close(&mut self, why: Ended) {
        self.demands.push_back(Demand::Close(why));
        self.over = true;
    }
}
