//! What the owner of an endpoint must do, and what it may look at.

use std::fmt;

use smcr_engine::ConnectionId;
use smcr_engine::handoff::{Ending, Tally};
use smcr_memory::Rmbe;
use smcr_proto::wire::clc::{Diagnosis, Frame};

use crate::groups::{GroupId, PortId};
use crate::slab::Key;

/// What the owner must do next. After [`HandOver`](Self::HandOver),
/// [`NextStream`](Self::NextStream), [`StayTcp`](Self::StayTcp) and [`Reset`](Self::Reset) the
/// endpoint knows nothing of the connection any more.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "few exist, and each for a moment")]
pub enum Effect {
    /// Connect to the upstream, and report the outcome to the endpoint.
    Connect {
        /// For this connection.
        key: Key,
        /// With the SMC option in the SYN.
        offer: bool,
        /// Whether to pass the peer's bytes to the endpoint. If not, they must stay in the socket.
        hear: bool,
    },
    /// The upstream has not answered. Try another one, and
    /// [say so](super::Endpoint::redirected), or say that there is
    /// [none](super::Endpoint::unanswered).
    Unanswered {
        /// For this connection.
        key: Key,
    },
    /// Look at the network around the connection to the peer, and report what is there to the
    /// endpoint, at once: what it does next rests on the report.
    Survey {
        /// Of this connection.
        key: Key,
    },
    /// Write this message to the TCP connection to the peer, and report a failure to the endpoint.
    Send {
        /// Of this connection.
        key: Key,
        /// The message.
        frame: Frame,
    },
    /// The connection has become SMC-R: hand the application's socket to the link group.
    HandOver {
        /// Which connection.
        key: Key,
        /// Its slot.
        connection: ConnectionId,
        /// Its link group.
        group: GroupId,
        /// Its element.
        rmbe: Rmbe,
        /// The peer has already ended its direction of the TCP connection.
        ended: bool,
    },
    /// The upstream of another stream is there: hand its socket to the connection.
    NextStream {
        /// Which rendezvous.
        key: Key,
        /// The connection.
        connection: ConnectionId,
    },
    /// The connection stays TCP: hand both sockets to the poller of a port.
    StayTcp {
        /// Which connection.
        key: Key,
        /// Its slot.
        connection: ConnectionId,
        /// The port.
        port: PortId,
        /// Why it is not SMC-R; none if nobody asked for SMC-R.
        reason: Option<Diagnosis>,
        /// Bytes of the peer's application that the rendezvous has read already.
        leftover: Vec<u8>,
        /// We have sent a Decline, so one of the peer may still be on its way.
        declined: bool,
    },
    /// Reset both sockets.
    Reset {
        /// Of this connection.
        key: Key,
        /// Why.
        why: Why,
    },
    /// Something has run out.
    Exhausted {
        /// For a connection of this listener.
        listener: u16,
        /// What.
        limit: Limit,
    },
}

/// Why both sockets of a connection are reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The upstream refused.
    Refused,
    /// The upstream did not answer in time.
    Unanswered,
    /// The TCP connection to the peer broke.
    Broke,
    /// The peer ended the TCP connection too early.
    Ended,
    /// The handshake failed when it could no longer be declined.
    Failed,
    /// The client's Confirm cannot be used, but the client believes that the connection is SMC-R.
    BadConfirm,
    /// Too many peers have sent no Proposal, and this one had to make room.
    Displaced,
    /// No poller has room for it.
    NoSlot,
    /// The gateway stops, and the connection has not been served yet.
    Stopping,
    /// The owner gave it up.
    Aborted,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Refused => "the upstream refused",
            Self::Unanswered => "the upstream did not answer in time",
            Self::Broke => "the TCP connection broke during the rendezvous",
            Self::Ended => "the peer closed the connection during the rendezvous",
            Self::Failed => "the rendezvous failed",
            Self::BadConfirm => "the Confirm names no link of the group",
            Self::Displaced => "too many peers send no Proposal",
            Self::NoSlot => "the pollers serve as many connections as they can",
            Self::Stopping => "the gateway stops",
            Self::Aborted => "the gateway gave the rendezvous up",
        })
    }
}

/// What can run out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Memory for RMBs.
    Memory,
    /// Slots of pollers.
    Slots,
    /// Places for rendezvous: none became free while a connection waited for one.
    Places,
}

impl fmt::Display for Limit {
    /// What has run out, and what follows for new connections.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Memory => "memory for SMC-R: new connections stay TCP",
            Self::Slots => "room in the pollers: new connections are refused",
            Self::Places => "places for rendezvous: connections that waited stay TCP",
        })
    }
}

/// What a poller has told of a connection.
#[derive(Debug)]
pub enum Told<S> {
    /// It has ended.
    Closed(Closed<S>),
    /// Its stream has, and it is kept.
    StreamEnded {
        /// Which connection.
        connection: ConnectionId,
        /// What the stream has carried.
        tally: Tally,
        /// Its socket.
        near: S,
    },
    /// The peer has begun another stream.
    StreamBegun {
        /// Of this connection.
        connection: ConnectionId,
    },
    /// A stream came too late for it.
    StreamRefused {
        /// Which connection.
        connection: ConnectionId,
        /// The socket of that stream.
        near: S,
        /// The connection has another poller now, and goes on.
        moved: bool,
    },
}

/// A connection that a poller had has ended.
#[derive(Debug)]
pub struct Closed<S> {
    /// Its slot.
    pub connection: ConnectionId,
    /// How it ended.
    pub ending: Ending,
    /// What it has carried.
    pub tally: Tally,
    /// Its sockets.
    pub streams: [Option<S>; 2],
    /// It was kept: what its streams have carried was told before.
    pub kept: bool,
}

/// How far a rendezvous is, as operators see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It waits for a place.
    Waiting,
    /// It is under way.
    Connecting,
}

/// How many rendezvous have ended so far, by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Connections that became SMC-R, and streams that followed on one of them.
    pub connections_smc: u64,
    /// Those streams.
    pub streams_followed: u64,
    /// Connections that stayed TCP.
    pub connections_tcp: u64,
    /// Handshakes that ended in an error.
    pub handshakes_failed: u64,
    /// Peers that were reset because too many kept silent.
    pub silent_cut_short: u64,
}
