//! Messages of a peer that changed the link, in front of which others must be taken in.

use std::time::Duration;

use smcr_proto::Instant;
use smcr_proto::connection::{Arrival, Connection};
use smcr_proto::wire::cdc::Cdc;

use crate::limits::PARKED_MAX;

/// A message that came before others that must be taken in first, failover validation above all,
/// and what came behind it.
#[derive(Debug)]
pub(crate) struct Held {
    /// Never empty.
    pub(super) messages: Vec<Cdc>,
    /// Then they are taken in, whatever has come.
    pub(super) until: Instant,
}

/// Keeps a message that must wait for one which another completion queue still has, or which
/// another poller is about to pass on: what the peer's NIC saw delivered on the old link may reach
/// us behind what follows on the new one. Returns whether it must.
pub(super) fn hold<R>(
    held: &mut Option<Held>,
    connection: &Connection<R>,
    now: Instant,
    cdc: &Cdc,
) -> bool {
    let first = held.as_ref().map(|held| &held.messages[0]);
    match (connection.arrival(cdc, first), held) {
        (Arrival::InOrder, _) => return false,
        (Arrival::Waits | Arrival::WaitsFirst, held @ None) => {
            *held = Some(Held { messages: vec![*cdc], until: now + HOLD });
        }
        (Arrival::WaitsFirst, Some(held)) => {
            held.messages.insert(0, *cdc);
            held.messages.truncate(PARKED_MAX);
        }
        (Arrival::Waits, Some(held)) if held.messages.len() < PARKED_MAX => {
            held.messages.push(*cdc);
        }
        // Each says everything that the ones before it said.
        (Arrival::Waits, Some(held)) => held.messages[PARKED_MAX - 1] = *cdc,
    }
    true
}

/// How long messages on a new link wait for what was delivered on the old one: far longer than any
/// poller needs to empty its completion queue and its mailbox, far shorter than users wait.
const HOLD: Duration = Duration::from_millis(250);
