//! What is said on the TCP connection of a rendezvous, and when it is the application's again.
//!
//! Bytes and results go in, effects come out; nothing here knows a socket or a clock. The gateway
//! runs it over a socket, the simulator over a network that delays and cuts as a seed dictates.

use std::collections::VecDeque;

use smcr_proto::handshake::{ClientAction, HandshakeError, ServerAction, Verdict};
use smcr_proto::wire::clc::{Decline, Diagnosis, FRAME_MAX, Frame, Framer};
use smcr_proto::{Instant, PeerId};

use crate::sessions::Talk;

/// What the owner of a conversation must do.
#[derive(Debug)]
pub enum Effect {
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
    Close(&'static str),
}

/// One side of a rendezvous.
///
/// - `feed`, `end`, `link_confirmed`, `link_failed`, `handle_timeout` and `decline` feed what
///   happened; so do the methods of the machine in `talk`.
/// - `poll_effect` drains what must be done. Call it until `None` after every input.
///
/// When the connection stays TCP, `leftover` are the peer's first bytes behind the rendezvous; and
/// if we `have_declined`, a Decline of the peer may stand before them.
pub struct Conversation {
    /// Who talks.
    pub talk: Talk,
    framer: Framer,
    /// The peer has ended its direction of the TCP connection.
    ended: bool,
    /// We have said Decline, which one of the peer's may cross.
    declined: bool,
    /// What comes now is not for us.
    over: bool,
    effects: VecDeque<Effect>,
}

impl Conversation {
    /// Nothing was said yet.
    pub fn new(talk: Talk) -> Self {
        Self {
            talk,
            framer: Framer::new(),
            ended: false,
            declined: false,
            over: false,
            effects: VecDeque::new(),
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
        if self.talk.may_have_ended() {
            self.ended = true;
        } else {
            self.close("the peer closed the connection during the rendezvous");
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
        match &mut self.talk {
            Talk::Client(client) => client.link_confirmed(),
            Talk::Server(server) => server.link_confirmed(),
            Talk::Plain(_) | Talk::Connecting | Talk::Pending(..) => {}
        }
    }

    /// The first contact of this rendezvous failed.
    pub fn link_failed(&mut self, committed: bool) {
        // A peer that has ended its stream believes that its application has said all it had, by
        // SMC-R.
        let committed = committed || self.ended;
        let result = match &mut self.talk {
            Talk::Client(client) => client.link_failed(committed),
            Talk::Server(server) => server.link_failed(committed),
            Talk::Plain(_) | Talk::Connecting | Talk::Pending(..) => Ok(()),
        };
        if let Err(error) = result {
            self.fail(error);
        }
    }

    /// It may be time for something.
    pub fn handle_timeout(&mut self, now: Instant) {
        let result = match &mut self.talk {
            Talk::Client(client) => client.handle_timeout(now),
            Talk::Server(server) | Talk::Pending(server, _) => server.handle_timeout(now),
            Talk::Plain(_) | Talk::Connecting => Ok(()),
        };
        if let Err(error) = result {
            self.fail(error);
        }
    }

    /// The rendezvous ends in an error: falls back, or closes.
    pub fn fail(&mut self, error: HandshakeError) {
        self.effects.push_back(Effect::Failed(error));
        match error.verdict() {
            Verdict::Close => self.close("the rendezvous failed"),
            Verdict::FallBack(None) => self.effects.push_back(Effect::FallBack(None)),
            Verdict::FallBack(Some(diagnosis)) => self.decline(PeerId::default(), diagnosis),
        }
        self.over = true;
    }

    /// Says Decline, in place of a message that the peer waits for, and falls back.
    ///
    /// `peer_id` is ours, for a client that has not come to its Proposal.
    pub fn decline(&mut self, peer_id: PeerId, diagnosis: Diagnosis) {
        let decline = match &self.talk {
            Talk::Client(client) => client.decline_frame(diagnosis),
            Talk::Server(server) | Talk::Pending(server, _) => server.decline_frame(diagnosis),
            Talk::Plain(_) | Talk::Connecting => {
                Frame::Decline(Decline { out_of_sync: false, peer_id, diagnosis })
            }
        };
        self.effects.push_back(Effect::Say(decline));
        self.effects.push_back(Effect::FallBack(Some(diagnosis)));
        self.over = true;
    }

    /// What must be done next, oldest first.
    #[must_use]
    pub fn poll_effect(&mut self) -> Option<Effect> {
        let effect = self.next_effect()?;
        match &effect {
            Effect::Say(frame)
            | Effect::Client(ClientAction::Send(frame))
            | Effect::Server(ServerAction::Send(frame)) => {
                self.declined |= matches!(frame, Frame::Decline(_) | Frame::DeclineV2(_));
            }
            Effect::Client(ClientAction::FallBack | ClientAction::Done)
            | Effect::Server(ServerAction::FallBack | ServerAction::Done)
            | Effect::FallBack(_)
            | Effect::Close(_) => self.over = true,
            Effect::Client(_) | Effect::Server(_) | Effect::Failed(_) => {}
        }
        Some(effect)
    }

    fn next_effect(&mut self) -> Option<Effect> {
        loop {
            if let Some(effect) = self.effects.pop_front() {
                return Some(effect);
            }
            if self.over {
                return None;
            }
            let action = match &mut self.talk {
                Talk::Client(client) => client.poll_action().map(Effect::Client),
                Talk::Server(server) | Talk::Pending(server, _) => {
                    server.poll_action().map(Effect::Server)
                }
                Talk::Plain(_) | Talk::Connecting => return None,
            };
            if action.is_some() {
                return action;
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
        let result = match &mut self.talk {
            Talk::Client(client) => client.handle_frame(frame),
            Talk::Server(server) | Talk::Pending(server, _) => server.handle_frame(frame),
            Talk::Plain(_) | Talk::Connecting => unreachable!("nobody talks yet"),
        };
        if let Err(error) = result {
            self.fail(error);
        }
    }

    fn close(&mut self, why: &'static str) {
        self.effects.push_back(Effect::Close(why));
        self.over = true;
    }
}
