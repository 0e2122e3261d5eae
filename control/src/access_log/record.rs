//! What is known of a connection that is over.

use std::net::SocketAddr;
use std::time::Duration;

use smcr_engine::handoff::Tally;
use smcr_proto::Instant;
use smcr_proto::wire::clc::Diagnosis;

use crate::config::Protocol;
use crate::groups::GroupId;
use crate::sessions::{Carried, Negotiating, Open};
use crate::stats::Transport;
use crate::termination::{Party, Termination};

/// A connection that is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The name of its listener.
    pub listener: String,
    /// When it was accepted.
    pub accepted: Instant,
    /// When it ended.
    pub ended: Instant,
    /// Who connected to us.
    pub source: Option<SocketAddr>,
    /// Where that client wanted to go, if somebody has said so.
    pub original: Option<SocketAddr>,
    /// Where we connected to, or tried to last.
    pub target: Option<SocketAddr>,
    /// How it travelled; none if it never opened.
    pub transport: Option<Transport>,
    /// Why it stayed TCP.
    pub reason: Option<Diagnosis>,
    /// Its link group.
    pub group: Option<GroupId>,
    /// How long it took to open.
    pub setup: Option<Duration>,
    /// How long it took until the first byte of the server was here.
    pub first_byte: Option<Duration>,
    /// Read from the application.
    pub bytes_in: u64,
    /// Written to the application.
    pub bytes_out: u64,
    /// How it ended.
    pub end: Termination,
    /// Who ended it; none if that is not known.
    pub by: Option<Party>,
}

impl Record {
    /// A connection that was reset as soon as it was accepted.
    pub fn turned_away(
        now: Instant,
        listener: &str,
        source: Option<SocketAddr>,
        end: Termination,
    ) -> Self {
        Self {
            listener: listener.to_owned(),
            accepted: now,
            ended: now,
            source,
            original: None,
            target: None,
            transport: None,
            reason: None,
            group: None,
            setup: None,
            first_byte: None,
            bytes_in: 0,
            bytes_out: 0,
            end,
            by: end.by(),
        }
    }

    /// A connection whose rendezvous has failed.
    pub fn failed(now: Instant, listener: &str, one: &Negotiating, end: Termination) -> Self {
        Self {
            accepted: one.came,
            original: one.wanted,
            target: Some(one.target),
            ..Self::turned_away(now, listener, Some(one.source), end)
        }
    }

    /// A connection that a poller had, and that has carried `tally`.
    pub fn closed(
        now: Instant,
        listener: &str,
        open: &Open,
        tally: &Tally,
        (end, by): (Termination, Option<Party>),
    ) -> Self {
        let (reason, group) = match &open.transport {
            Carried::Smc { group, .. } => (None, Some(*group)),
            Carried::Tcp { reason, .. } => (*reason, None),
        };
        Self {
            accepted: open.came,
            original: open.original,
            target: Some(open.target),
            transport: Some(open.transport.name()),
            reason,
            group,
            setup: Some(open.since.since(open.came)),
            first_byte: first_byte(open, tally),
            bytes_in: tally.bytes_in,
            bytes_out: tally.bytes_out,
            by,
            ..Self::turned_away(now, listener, Some(open.source), end)
        }
    }
}

/// How long it took until the first byte of the server was here: written to the client's socket if
/// that is the near one, else read from the server's.
pub fn first_byte(open: &Open, tally: &Tally) -> Option<Duration> {
    let first = match open.accepts {
        Protocol::Tcp => tally.first_out,
        Protocol::Smc => tally.first_in,
    };
    first.map(|at| at.since(open.came))
}
