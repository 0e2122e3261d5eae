//! What the owner of an endpoint tells it: settings once, facts about each connection.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use smcr_engine::ConnectionId;
use smcr_proto::handshake::PolicyV2;
use smcr_proto::wire::clc::Diagnosis;
use smcr_proto::{PeerId, RmbeSize};

use crate::config::Peers;
use crate::device::{Networks, Subnets};
use crate::groups::PortId;

/// What an operator decides about rendezvous.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Who we are.
    pub peer_id: PeerId,
    /// Over which ports SMC-Rv1 is spoken, by [`PortId`].
    pub v1: Vec<bool>,
    /// Our terms of SMC-Rv2; none if we do not speak it.
    pub v2: Option<PolicyV2>,
    /// Servers take us to offer SMC-R whatever our SYN says, so that each of those that are assumed
    /// to have it awaits a CLC message.
    pub is_assumed: bool,
    /// How long a rendezvous may take, once both of its sockets are connected.
    pub handshake_timeout: Duration,
    /// How many rendezvous may be under way at once; others wait for one of these places.
    pub handshakes_max: usize,
    /// How many connections there may be at once whose peers have not sent a Proposal.
    pub silent_max: usize,
    /// The terms of each listener.
    pub listeners: Vec<Terms>,
}

/// What the configuration of a listener says about its connections.
#[derive(Clone, Debug)]
pub struct Terms {
    /// On which side of it SMC-R is spoken.
    pub side: Side,
    /// Who may be an SMC-R peer.
    pub peers: Peers,
    /// The size of RMB elements.
    pub rmbe_size: RmbeSize,
    /// How long the upstream may take to answer a SYN.
    pub connect_timeout: Duration,
}

/// On which side of a listener SMC-R is spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// On neither.
    Neither,
    /// We connect to a server, and propose.
    Client,
    /// Whoever connects to us proposes.
    Server,
}

impl Terms {
    /// Whether new connections to `upstream` offer SMC-R in their SYN.
    pub(super) fn offers_to(&self, upstream: IpAddr) -> bool {
        self.side == Side::Client && self.peers.admit_source(upstream)
    }

    /// Whether connections may need one of the places for rendezvous.
    pub(super) fn contends(&self) -> bool {
        self.side != Side::Neither
    }
}

/// A connection that was accepted.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// By which listener.
    pub listener: u16,
    /// Who connected to us.
    pub source: SocketAddr,
    /// Whom we connect to; at a client, the server.
    pub upstream: IpAddr,
    /// At a server: the client's SYN carried the SMC option, and so did our answer.
    pub offered: bool,
    /// At a server: the RNIC port that belongs to our address of the connection.
    pub port: Option<PortId>,
    /// At a client: the application has connected by itself, and both SYNs carried the SMC option.
    pub dialled: bool,
    /// Why it stays TCP, if the owner has decided so: a client offers nothing, a server declines.
    pub stays: Option<Diagnosis>,
    /// At a server: it is another stream of this connection, which is SMC-R already.
    pub follows: Option<ConnectionId>,
}

impl Arrival {
    /// A connection from `source` to `upstream` of which nothing else is known.
    pub fn new(listener: u16, source: SocketAddr, upstream: IpAddr) -> Self {
        let (offered, port, dialled, stays, follows) = (false, None, false, None, None);
        Self { listener, source, upstream, offered, port, dialled, stays, follows }
    }
}

/// What the owner knows of the TCP connection to the peer.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// At a client: both SYNs carried the SMC option, so that a CLC message must follow.
    pub offered: bool,
    /// The RNIC port, with its poller, that belongs to our address of the connection; none if there
    /// is no such port.
    pub port: Option<PortId>,
    /// At a client: what a Proposal says about our network.
    pub subnets: Subnets,
    /// At a server: the networks in which a client of SMC-Rv1 must be.
    pub networks: Networks,
    /// IPsec protects it.
    pub protected: bool,
}
