//! One rendezvous: its state, and the resources that it holds.

use std::net::{IpAddr, SocketAddr};

use smcr_engine::ConnectionId;
use smcr_proto::Instant;
use smcr_proto::wire::clc::Diagnosis;

use super::conversation::{Conversation, Machine};
use super::effect::{Stage, Why};
use super::facts::{Arrival, Surroundings};
use super::path::PathCheck;
use super::resources::Resources;
use super::waiting::{Asked, Wait};
use crate::slab::Key;

/// A connection on its way to SMC-R or TCP.
pub(super) struct Rendezvous {
    pub(super) key: Key,
    /// The listener that accepted it.
    pub(super) listener: u16,
    /// Who connected to us.
    pub(super) source: SocketAddr,
    /// Whom we connect to.
    pub(super) upstream: IpAddr,
    pub(super) surroundings: Surroundings,
    /// The surroundings are those of now; otherwise the owner must look at them before they are
    /// used.
    pub(super) surveyed: bool,
    pub(super) state: State,
    /// Both of its sockets are connected.
    pub(super) connected: bool,
    /// When we give up: at first the connect to the upstream, then the rendezvous as a whole.
    pub(super) deadline: Option<Instant>,
    /// What it holds of a link group, and must give back if it fails.
    pub(super) resources: Option<Resources>,
    /// It has one of the places for rendezvous.
    pub(super) has_place: bool,
    /// The peer has offered SMC-R before we could decide whether we do, and waits for a Proposal.
    pub(super) dialled: bool,
    /// It is one of those that wait for a Proposal, which may never come.
    pub(super) silent: bool,
    pub(super) path: PathCheck,
    /// Why it is about to stay TCP.
    pub(super) reason: Option<Diagnosis>,
    /// The connection of which it is another stream.
    pub(super) follows: Option<ConnectionId>,
}

/// The state of a rendezvous.
pub(super) enum State {
    /// It waits for a place; the connect to its upstream has not begun.
    Queued,
    /// No CLC messages are exchanged, or none any more: once both sockets are connected it stays
    /// TCP.
    Plain(PlainTcp),
    /// Our connect to the peer is under way; we propose then.
    Connecting,
    /// The handshake is under way.
    Talking(Box<Talking>),
    /// Nothing is left to agree on: once the upstream is connected, this connection carries it.
    Following(ConnectionId),
    /// We send a Decline in place of a Proposal: it stays TCP for this reason.
    Declined(Diagnosis),
    /// Both sockets must be reset.
    Failed(Why),
}

/// How a connection stays TCP.
#[derive(Default)]
pub(super) struct PlainTcp {
    /// Why, if it was to be SMC-R.
    pub(super) reason: Option<Diagnosis>,
    /// Bytes of the application that came behind the peer's last CLC message.
    pub(super) leftover: Vec<u8>,
    /// We have sent a Decline, so one of the peer may still come before further bytes.
    pub(super) declined: bool,
}

/// A handshake that is under way.
pub(super) struct Talking {
    pub(super) conversation: Conversation,
    /// The machine's question, as long as it has no answer.
    pub(super) asked: Option<Asked>,
    /// What must happen before the question is answered; or, at a server that has the Confirm,
    /// before the connection becomes SMC-R.
    pub(super) wait: Option<Wait>,
}

impl Rendezvous {
    /// A connection that was accepted, and for which nothing was done yet.
    pub(super) fn new(now: Instant, key: Key, arrival: Arrival) -> Self {
        let Arrival { listener, source, upstream, offered, port, dialled, stays, follows } =
            arrival;
        Self {
            key,
            listener,
            source,
            upstream,
            surroundings: Surroundings { offered, port, ..Surroundings::default() },
            surveyed: false,
            state: State::Queued,
            connected: false,
            deadline: None,
            resources: None,
            has_place: false,
            dialled,
            silent: false,
            path: PathCheck::new(now),
            reason: stays,
            follows,
        }
    }

    /// The handshake, if it is under way.
    pub(super) fn talking(&self) -> Option<&Talking> {
        match &self.state {
            State::Talking(talking) => Some(talking),
            State::Queued
            | State::Plain(_)
            | State::Connecting
            | State::Following(_)
            | State::Declined(_)
            | State::Failed(_) => None,
        }
    }

    /// The handshake, if it is under way.
    pub(super) fn talking_mut(&mut self) -> Option<&mut Talking> {
        match &mut self.state {
            State::Talking(talking) => Some(talking),
            State::Queued
            | State::Plain(_)
            | State::Connecting
            | State::Following(_)
            | State::Declined(_)
            | State::Failed(_) => None,
        }
    }

    /// Keeps the resources that it has taken from a link group.
    pub(super) fn hold(&mut self, resources: Resources) {
        let before = self.resources.replace(resources);
        assert!(before.is_none(), "a rendezvous takes one element");
    }

    /// What it waits for, other than messages of the peer.
    pub(super) fn wait(&self) -> Option<&Wait> {
        self.talking()?.wait.as_ref()
    }

    /// How far it is, as operators see it.
    pub(super) fn stage(&self) -> Stage {
        let waits = matches!(self.state, State::Queued) || matches!(self.wait(), Some(Wait::Place));
        if waits { Stage::Waiting } else { Stage::Connecting }
    }

    /// Its next deadline.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        let talking = self.talking();
        let answer_by = talking.and_then(|talking| match talking.asked {
            Some(Asked::Proposal(_, by)) if self.connected => Some(by),
            Some(Asked::Proposal(..) | Asked::Accept(_) | Asked::Confirm { .. }) | None => None,
        });
        let wait = self.wait().and_then(Wait::until);
        let machine = talking.and_then(|talking| talking.conversation.machine.poll_timeout());
        [self.deadline, answer_by, wait, machine].into_iter().flatten().min()
    }
}

impl State {
    /// TCP without any CLC message, for this reason.
    pub(super) fn plain(reason: Option<Diagnosis>) -> Self {
        Self::Plain(PlainTcp { reason, ..PlainTcp::default() })
    }

    /// A handshake in which no message was exchanged yet.
    pub(super) fn talk(machine: Machine) -> Self {
        let conversation = Conversation::new(machine);
        Self::Talking(Box::new(Talking { conversation, asked: None, wait: None }))
    }
}

impl Talking {
    /// Whether the machine has asked a question whose answer has nothing to wait for.
    pub(super) fn must_answer(&self) -> bool {
        self.asked.is_some() && self.wait.is_none()
    }
}
