//! The CLC messages on the TCP connection of a rendezvous, and when its bytes are the application's
//! again.

use std::collections::VecDeque;

use smcr_proto::Instant;
use smcr_proto::handshake::{
    Agreement, Client, ClientAction, HandshakeError, Server, ServerAction, Verdict,
};
use smcr_proto::wire::clc::{Diagnosis, FRAME_MAX, Frame, Framer};

/// What the owner of a conversation must do.
#[derive(Debug)]
pub enum Demand {
    /// An action of the client's handshake machine.
    Client(ClientAction),
    /// An action of the server's handshake machine.
    Server(ServerAction),
    /// Write this message to the TCP connection.
    Say(Frame),
    /// The handshake failed, for this reason. The next demand says what becomes of the connection.
    Failed(HandshakeError),
    /// The connection stays TCP. If we declined, this is our reason.
    FallBack(Option<Diagnosis>),
    /// Both sockets must be reset.
    Close(Ended),
}

/// Why both sockets must be reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The handshake failed when it could no longer be declined.
    Failed,
    /// The peer ended the TCP connection before the handshake was complete.
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
    /// The SMC-R version that the two sides have agreed on.
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

    /// Whether the peer may have ended TCP by now, because its program has sent all that it had. A
    /// client learns before we do that the first contact has succeeded; a server never does.
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
/// When the connection stays TCP, `leftover` returns the bytes that followed the peer's last CLC
/// message. If `has_declined`, a Decline of the peer may still come before the application's bytes.
#[derive(Debug)]
pub struct Conversation {
    /// The handshake.
    pub machine: Machine,
    framer: Framer,
    /// The peer has ended its direction of the TCP connection.
    ended: bool,
    /// We have sent a Decline, so one of the peer may still be on its way.
    declined: bool,
    /// The handshake has ended: we take in no further message.
    over: bool,
    demands: VecDeque<Demand>,
}

impl Conversation {
    /// A conversation in which no message was exchanged yet.
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

    /// The peer has ended its direction of the TCP connection.
    pub fn end(&mut self) {
        // A Linux program that half-closes at once ends TCP before we have heard, on the link, that
        // the first contact succeeded. No message is missing.
        if self.machine.may_have_ended() {
            self.ended = true;
        } else {
            self.close(Ended::ByPeer);
        }
    }

    /// The peer has ended its direction after its last CLC message.
    pub fn end_in_order(&mut self) {
        self.ended = true;
    }

    /// Whether the peer has ended its direction.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Whether we have sent a Decline.
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
        // A peer that has ended its stream believes that SMC-R has carried all bytes of its
        // application.
        let committed = committed || self.ended;
        let result = match &mut self.machine {
            Machine::Client(client) => client.link_failed(committed),
            Machine::Server(server) => server.link_failed(committed),
        };
        if let Err(error) = result {
            self.fail(error);
        }
    }

    /// Acts on a deadline of the handshake machine that has passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        let result = match &mut self.machine {
            Machine::Client(client) => client.handle_timeout(now),
            Machine::Server(server) => server.handle_timeout(now),
        };
        if let Err(error) = result {
            self.fail(error);
        }
    }

    /// Ends the handshake with an error: the connection falls back to TCP, or is reset.
    pub fn fail(&mut self, error: HandshakeError) {
        self.demands.push_back(Demand::Failed(error));
        match error.verdict() {
            Verdict::Close => self.close(Ended::Failed),
            Verdict::FallBack(None) => self.demands.push_back(Demand::FallBack(None)),
            Verdict::FallBack(Some(diagnosis)) => self.decline(diagnosis),
        }
        self.over = true;
    }

    /// Sends a Decline in place of the message that the peer waits for, and falls back to TCP.
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
