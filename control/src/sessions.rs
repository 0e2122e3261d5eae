//! Every connection the control thread knows, from accept to close.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use smcr_engine::ConnectionId;
use smcr_memory::Rmbe;
use smcr_proto::Instant;
use smcr_proto::handshake::{Client, Server};
use smcr_proto::wire::clc::{Diagnosis, Offer, Proposal};

use crate::groups::{GroupId, PortId};
use crate::paths::Far;
use crate::places::Place;
use crate::reactor::Key;
use crate::rendezvous::conversation::Conversation;

/// A connection on its way through this process.
pub enum Session {
    /// Accepted, and waiting for its rendezvous to begin.
    Waiting(Newcomer),
    /// The rendezvous is going on.
    Shaking(Box<Rendezvous>),
    /// A poller relays it.
    Open(Open),
}

/// A connection that an application has made, and nothing more.
#[derive(Debug)]
pub struct Newcomer {
    /// The listener that accepted it.
    pub listener: u16,
    /// The accepted socket.
    pub socket: OwnedFd,
    /// Who connected to us.
    pub source: SocketAddr,
}

/// A rendezvous: two sockets that are to be joined, and the talk about how.
pub struct Rendezvous {
    /// The listener that accepted it.
    pub listener: u16,
    /// The socket towards the application; on the server side, being connected at first.
    pub app: OwnedFd,
    /// The socket towards the SMC-R peer, or towards what turned out to be none.
    pub peer: OwnedFd,
    /// Who connected to us.
    pub source: SocketAddr,
    /// The socket that we connect is connected.
    pub connected: bool,
    /// When we give up: connecting at first, then the rendezvous as a whole.
    pub deadline: Instant,
    /// What is said on it.
    pub conversation: Conversation,
    /// The peer's element, as long as another connection has it. Everything else is said.
    pub held: Option<Held>,
    /// What it waits for.
    pub waiting: Option<Waiting>,
    /// When a client must have an answer to its Proposal.
    pub answer_by: Option<Instant>,
    /// What this rendezvous holds, and must give back if it fails.
    pub resources: Option<Resources>,
    /// It waits for the Proposal of a peer that may never send one.
    pub silent: bool,
    /// Whether it is one of those that are limited.
    pub place: Place,
    /// Who is at the other end, once that decides whether there is SMC-R.
    pub far: Option<Far>,
    /// It finds out whether RoCE gets through again.
    pub trial: bool,
    /// When we last said something.
    pub said_at: Instant,
    /// Until when a link must have shown that it carries.
    pub proof_by: Option<Instant>,
}

/// The CLC side of a rendezvous.
pub enum Talk {
    /// Nobody has anything to say: the connection stays TCP for this reason.
    Plain(Option<Diagnosis>),
    /// Our connect to the peer is under way.
    Connecting,
    /// We proposed.
    Client(Client),
    /// The peer proposes.
    Server(Server),
    /// The peer proposed this, but the application's side is not connected yet.
    Pending(Server, Proposal),
}

impl Talk {
    /// Whether the peer may have ended TCP by now, because its program has nothing more to say. A
    /// client knows of its first contact before we do; a server never.
    pub fn may_have_ended(&self) -> bool {
        match self {
            Self::Server(server) => server.is_awaiting_link(),
            Self::Client(_) | Self::Plain(_) | Self::Connecting | Self::Pending(..) => false,
        }
    }
}

/// What a rendezvous holds of a link group.
#[derive(Debug)]
pub struct Resources {
    /// Whose element.
    pub group: GroupId,
    /// Its slot.
    pub connection: ConnectionId,
    /// Its element, until the poller has it.
    pub rmbe: Rmbe,
}

/// A rendezvous that waits for the peer to know another RMB, or to show that a link carries.
#[derive(Debug)]
pub struct Waiting {
    /// In which group.
    pub group: GroupId,
    /// For how long.
    pub until: Instant,
    /// What the server offered, where we are the client.
    pub accept: Option<Offer>,
    /// It waits for a link to show that it carries, not for an element.
    pub for_proof: bool,
}

/// An element that a peer offered, and that another connection still has.
#[derive(Debug)]
pub struct Held {
    /// In which group.
    pub group: GroupId,
    /// How long we wait for the end of that connection.
    pub until: Instant,
    /// What the peer said.
    pub offer: Offer,
    /// What we answer, where we are the client.
    pub answer: Option<Offer>,
}

/// Who waits for the outcome of a first contact.
#[derive(Debug, Default)]
pub struct Founding {
    /// The rendezvous that it is part of.
    pub founder: Option<Key>,
    /// Rendezvous of the same peer, which shall not begin another.
    pub waiting: Vec<Key>,
}

/// A connection that a poller relays.
#[derive(Debug)]
pub struct Open {
    /// The listener that accepted it.
    pub listener: u16,
    /// Its slot.
    pub connection: ConnectionId,
    /// Who connected to us.
    pub source: SocketAddr,
    /// Since when.
    pub since: Instant,
    /// Bytes that had moved at the last look, and since when no more have.
    pub moved: (u64, Instant),
    /// How it travels.
    pub transport: Carried,
}

/// How an open connection travels.
#[derive(Debug)]
pub enum Carried {
    /// Over SMC-R, in this group. The TCP connection of the rendezvous stands idle beside it.
    Smc {
        /// The group.
        group: GroupId,
        /// The TCP connection. Its kernel answers keepalive probes, and nobody reads it.
        // RFC 7609 4.5.3-8
        tcp: OwnedFd,
        /// The peer has ended its direction of it.
        ended: bool,
    },
    /// Over TCP.
    Tcp {
        /// Whose poller relays.
        port: PortId,
        /// Why; none where nobody asked for SMC-R.
        reason: Option<Diagnosis>,
    },
}
