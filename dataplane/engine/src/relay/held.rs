//! Messages of a peer that changed the link, before which others must be taken in.

use std::time::Duration;

use smcr_proto::Instant;
use smcr_proto::connection::{Arrival, Connection};
use smcr_proto::wire::cdc::Cdc;

use crate::parked::Parked;

/// A message before which others must be taken in, failover validation above all, and the messages
/// that came behind it.
#[derive(Debug)]
pub(crate) struct Held {
    /// Never empty.
    pub(super) messages: Parked,
    /// When they are taken in, even if what they wait for has not come.
    pub(super) until: Instant,
}

impl Held {
    /// The message that the others stand behind.
    pub(super) fn first(&self) -> &Cdc {
        self.messages.first().expect("it was made for a message")
    }
}

/// Keeps a message that must wait for one which another completion queue still has, or which
/// another poller is about to pass on: messages that the peer's NIC saw delivered on the old link
/// may reach us behind those that follow on the new one. Returns whether it must.
pub(super) fn hold<R>(
    held: &mut Option<Held>,
    connection: &Connection<R>,
    now: Instant,
    cdc: &Cdc,
) -> bool {
    let arrival = connection.arrival(cdc, held.as_ref().map(Held::first));
    if arrival == Arrival::InOrder {
        return false;
    }
    match held {
        Some(held) if arrival == Arrival::WaitsFirst => held.messages.push_first(*cdc),
        Some(held) => {
            held.messages.push(*cdc);
        }
        None => {
            let mut messages = Parked::default();
            messages.push(*cdc);
            *held = Some(Held { messages, until: now + HOLD });
        }
    }
    true
}

/// How long messages on a new link wait for those that were delivered on the old one: far longer
/// than any poller needs to empty its completion queue and its mailbox, far shorter than users
/// wait.
const HOLD: Duration = Duration::from_millis(250);
