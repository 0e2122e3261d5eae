//! CDC messages of a peer that has changed its link, and that must wait for earlier ones.

use std::time::Duration;

use smcr_proto::Instant;
use smcr_proto::connection::{Arrival, Connection};
use smcr_proto::wire::cdc::Cdc;

use crate::parked::{Parked, Waiting};

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
    waiting: Waiting,
) -> bool {
    let first = held.as_ref().map(Held::first);
    // Nobody can explain a gap that we have made, and what F asks for may be in it.
    let explains = first.is_none_or(|first| first.failover_validation);
    if explains && waiting.fills_gap_of(connection) {
        return false;
    }
    let arrival = connection.arrival(&waiting.message, first);
    if arrival == Arrival::InOrder {
        return false;
    }
    match held {
        Some(held) if arrival == Arrival::WaitsFirst => held.messages.push_first(waiting.message),
        Some(held) => {
            held.messages.push(waiting);
        }
        None => {
            let mut messages = Parked::default();
            messages.push(waiting);
            *held = Some(Held { messages, until: now + HOLD });
        }
    }
    true
}

/// How long messages on a new link wait for those that were delivered on the old one: far longer
/// than any poller needs to empty its completion queue and its mailbox, and too short for users to
/// notice.
const HOLD: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use smcr_proto::AlertToken;
    use smcr_proto::connection::{ConnectionSetup, Streams};
    use smcr_proto::ring::Ring;
    use smcr_proto::wire::cdc::Cursor;

    use super::*;

    const T0: Instant = Instant(0);

    fn connection() -> Connection<()> {
        Connection::new(ConnectionSetup {
            peer_token: AlertToken(1),
            element: Ring::new(65_536),
            peer_element: Ring::new(65_536),
            close_wait: Duration::from_secs(5),
            streams: Streams::One,
        })
    }

    fn said(sequence: u16, count: u32) -> Cdc {
        Cdc { sequence, producer: Cursor { wrap: 0, count }, ..Cdc::default() }
    }

    /// A poller that was far behind has dropped a message in favour of the next one. It waited for
    /// the first, and then reset a connection that was ending in order.
    #[test]
    fn a_gap_of_our_own_making_is_not_waited_for() {
        let mut us = connection();
        us.handle_cdc(T0, &said(1, 100)).unwrap();
        let last = Cdc { sending_done: true, ..said(3, 300) };
        assert!(hold(&mut None, &us, T0, last.into()));
        let last = Waiting { message: last, replaces: Some(2) };
        assert!(!hold(&mut None, &us, T0, last));
        // Of a gap that is larger, only a part is of our making.
        let later = Cdc { sequence: 4, ..last.message };
        assert!(hold(&mut None, &us, T0, Waiting { message: later, replaces: Some(3) }));
        // Behind others that wait it is in order, and is still one of ours when its turn comes.
        let mut held = None;
        assert!(hold(&mut held, &us, T0, Cdc { sending_done: true, ..said(3, 200) }.into()));
        let last = Waiting { message: Cdc { sequence: 5, ..last.message }, replaces: Some(4) };
        assert!(hold(&mut held, &us, T0, last));
        assert_eq!(held.unwrap().messages.into_messages().last(), Some(last));
    }

    /// It has also put into one message what F asks for and what is behind that. F waited for it in
    /// vain, and reset the connection.
    // RFC 7609 4.6.1 #8: validate before resuming
    #[test]
    fn a_message_with_what_a_validation_waits_for_does_not_wait_behind_it() {
        let mut us = connection();
        us.handle_cdc(T0, &said(1, 100)).unwrap();
        let mut held = None;
        let validation = Cdc { failover_validation: true, ..said(2, 0) };
        assert!(hold(&mut held, &us, T0, validation.into()));
        assert!(hold(&mut held, &us, T0, said(5, 500).into()));
        // What is missing before this one is not of our making.
        assert!(hold(&mut held, &us, T0, Waiting { message: said(4, 400), replaces: Some(3) }));
        let both = Waiting { message: said(4, 400), replaces: Some(2) };
        assert!(!hold(&mut held, &us, T0, both));
        assert!(!us.is_gap_filled(&validation));
        us.handle_cdc(T0, &both.message).unwrap();
        assert!(us.is_gap_filled(held.unwrap().first()));
    }
}
