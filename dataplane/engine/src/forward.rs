//! Mail for other pollers: CDC messages of their connections, and connections that change hands.
//!
//! A message follows the one sent before it to the same neighbour, also where that one still waits
//! for room: an outbox is a queue in front of a full queue.

use std::collections::VecDeque;

use smcr_proto::Instant;
use smcr_proto::wire::cdc::Cdc;
use smcr_rnic::Fabric;

use crate::handoff::{Command, ConnectionId};
use crate::limits::COMMANDS_MAX;
use crate::poller::{CommandOf, Poller};
use crate::streams::Streams;

/// What a neighbour must be told.
#[derive(Debug)]
pub(crate) struct Outbox<Qp, Stream> {
    waiting: VecDeque<Command<Qp, Stream>>,
    /// The neighbour has new mail, and may sleep.
    posted: bool,
}

impl<Qp, Stream> Default for Outbox<Qp, Stream> {
    fn default() -> Self {
        Self { waiting: VecDeque::new(), posted: false }
    }
}

impl<Qp, Stream> Outbox<Qp, Stream> {
    /// Whether a connection waits here to be handed over.
    fn holds(&self, id: ConnectionId) -> bool {
        let mut waiting = self.waiting.iter();
        waiting.any(|one| matches!(one, Command::Adopt(migrant) if migrant.id() == id))
    }

    /// Puts a message behind all others. Of a long queue, it replaces the one before it of the same
    /// connection: each says everything the ones before it said. So no queue grows beyond one
    /// message per connection.
    fn put_message(&mut self, message: Cdc) {
        if self.waiting.len() >= COMMANDS_MAX {
            let last = self.waiting.iter_mut().rev().find_map(|one| match one {
                Command::Deliver { message: last } if last.token == message.token => Some(last),
                Command::Deliver { .. }
                | Command::Adopt(_)
                | Command::AddLink { .. }
                | Command::SendLlc { .. }
                | Command::FailConnections { .. }
                | Command::FailLink { .. }
                | Command::RetireLink { .. }
                | Command::Expect { .. }
                | Command::Forget { .. }
                | Command::Relay { .. }
                | Command::Abort { .. }
                | Command::MoveConnections { .. }
                | Command::Stop => None,
            });
            if let Some(last) = last
                && !last.failover_validation
                && !message.failover_validation
            {
                *last = message;
                return;
            }
        }
        self.waiting.push_back(Command::Deliver { message });
    }
}

impl<F: Fabric, S: Streams> Poller<F, S> {
    /// Which neighbour has `id`, or is about to; none if this poller has, or nobody.
    pub(crate) fn elsewhere(&mut self, id: ConnectionId) -> Option<usize> {
        if self.connections.lookup(id).is_some() {
            return None;
        }
        let owner = self.ends.owners.of(id.slot)?;
        let neighbour = usize::from(owner);
        if owner != self.ends.index {
            return (neighbour < self.outboxes.len()).then_some(neighbour);
        }
        self.outboxes.iter().position(|outbox| outbox.holds(id))
    }

    /// Takes in a CDC message that came on any link of the process.
    pub(crate) fn deliver(&mut self, now: Instant, message: &Cdc) {
        // RFC 7609 4.7.1-3
        let id = ConnectionId::from_token(message.token);
        match self.elsewhere(id) {
            Some(neighbour) => {
                self.ends.counters.cdc_forwarded.add(1);
                self.outboxes[neighbour].put_message(*message);
                self.post_to(neighbour);
            }
            // RFC 7609 A.4-2
            None => self.receive_cdc(now, id, message),
        }
    }

    /// Tells a neighbour, as soon as it has room.
    pub(crate) fn send_mail(&mut self, neighbour: usize, command: CommandOf<F, S>) {
        self.outboxes[neighbour].waiting.push_back(command);
        self.post_to(neighbour);
    }

    /// Whether something waits for a neighbour to have room.
    pub(crate) fn has_mail(&self) -> bool {
        self.outboxes.iter().any(|outbox| !outbox.waiting.is_empty())
    }

    /// Posts what waits, and wakes whoever has new mail. Returns whether anything moved.
    pub(crate) fn post_mail(&mut self) -> bool {
        let mut moved = false;
        for neighbour in 0..self.outboxes.len() {
            moved |= self.post_to(neighbour);
            if std::mem::take(&mut self.outboxes[neighbour].posted) {
                self.ends.neighbours[neighbour].wake();
            }
        }
        moved
    }

    fn post_to(&mut self, neighbour: usize) -> bool {
        let outbox = &mut self.outboxes[neighbour];
        let mut moved = false;
        while let Some(command) = outbox.waiting.pop_front() {
            let adopted = match &command {
                Command::Adopt(migrant) => Some(migrant.id()),
                Command::Deliver { .. }
                | Command::AddLink { .. }
                | Command::SendLlc { .. }
                | Command::FailConnections { .. }
                | Command::FailLink { .. }
                | Command::RetireLink { .. }
                | Command::Expect { .. }
                | Command::Forget { .. }
                | Command::Relay { .. }
                | Command::Abort { .. }
                | Command::MoveConnections { .. }
                | Command::Stop => None,
            };
            if let Err(command) = self.ends.neighbours[neighbour].push(command) {
                outbox.waiting.push_front(command);
                break;
            }
            if let Some(id) = adopted {
                // Behind the push: whoever reads this sends behind it too.
                let index = u8::try_from(neighbour).expect("owners have eight bits");
                self.ends.owners.set(id.slot, index);
            }
            moved = true;
        }
        outbox.posted |= moved;
        moved
    }
}

#[cfg(test)]
mod tests {
    use smcr_proto::AlertToken;

    use super::*;

    fn message(token: u32, sequence: u16, failover_validation: bool) -> Cdc {
        Cdc { token: AlertToken(token), sequence, failover_validation, ..Cdc::default() }
    }

    /// A poller that is stuck must not cost its neighbours all memory, nor lose the last word of
    /// any connection: its bytes would never be read.
    #[test]
    fn a_long_queue_keeps_the_newest_message_of_each_connection() {
        let mut outbox = Outbox::<(), ()>::default();
        let most = u32::try_from(COMMANDS_MAX).unwrap();
        for token in 0..most {
            outbox.put_message(message(token, 1, false));
        }
        outbox.put_message(message(7, 2, false));
        outbox.put_message(message(7, 3, false));
        outbox.put_message(message(most, 1, false));
        assert_eq!(outbox.waiting.len(), COMMANDS_MAX + 1);
        let seventh = &outbox.waiting[7];
        assert!(matches!(seventh, Command::Deliver { message } if message.sequence == 3));
    }

    /// What is lost is asked by one message and would be overwritten by the next: both must come.
    // RFC 7609 4.6.1-1
    #[test]
    fn a_validation_is_never_replaced() {
        let mut outbox = Outbox::<(), ()>::default();
        for _ in 0..COMMANDS_MAX {
            outbox.put_message(message(1, 1, false));
        }
        outbox.put_message(message(1, 2, true));
        outbox.put_message(message(1, 3, false));
        outbox.put_message(message(1, 4, false));
        let last: Vec<_> = outbox.waiting.iter().skip(COMMANDS_MAX).collect();
        let [Command::Deliver { message: second }, Command::Deliver { message: fourth }] = last[..]
        else {
            panic!("{last:?}")
        };
        assert_eq!((second.sequence, fourth.sequence), (2, 4));
    }
}
