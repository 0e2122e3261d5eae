//! CDC messages of a peer that has changed its link, and that must wait for earlier ones.

use std::time::Duration;

use smcr_proto::Instant;
use smcr_proto::connection::{Arrival, Connection};
use smcr_proto::wire::cdc::Cdc;

use crate::parked::Parked;

/// A CDC message that must wait for earlier ones, mostly a failover validation, and the messages
/// that came after it.
#[derive(Debug)]
pub(crate) struct Held {
    /// Never empty.
    pub(super) messages: Parked,
    /// When they are taken in, even if what they wait for has not come.
    pub(super) until: Instant,
}

impl Held {
    /// The first of the messages, which the others follow.
    pub(super) fn first(&self) -> &Cdc {
        self.messages.first().expect("it was made for a message")
    }
}

/// Keeps a message if it must wait for an earlier one. Returns whether it must. When the peer
/// changes its link, messages that were delivered on the old link may reach us after those on the
/// new one: they may still be in another completion queue, or another poller may be about to pass
/// them on.
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
/// than any poller needs to empty its completion queue and its mailbox, and too short for users to
/// notice.
const HOLD: Duration = Duration::from_millis(250);
