//! What is said to the peer, and when.

use super::failover::{self, Failover};
use super::state::Event;
use super::{Connection, State, Streams};
use crate::wire::cdc::Cdc;

impl<R> Connection<R> {
    /// The next CDC message to send, if one is due: post it behind the writes it announces.
    ///
    /// Every message carries both cursors and all flags, whatever it was due for.
    pub fn poll_cdc(&mut self) -> Option<Cdc> {
        if !self.owes() {
            return None;
        }
        let repeats = matches!(self.failover, Failover::Repeating);
        match self.failover {
            Failover::Flowing => {}
            // RFC 7609 4.6.1 #4: F message first on new link
            Failover::Validating { .. } => {
                self.relocate(failover::Event::Said);
                return Some(Cdc {
                    // RFC 7609 4.6.1 #5: F message carries SS
                    sequence: self.outgoing.acknowledged,
                    token: self.peer_token,
                    failover_validation: true,
                    ..Cdc::default()
                });
            }
            // RFC 7609 2.3 #9: repeat failed writes in order
            // RFC 7609 2.3 #10: repeat uncompleted writes before new data
            // RFC 7609 4.6.2 #1: repeat pending messages before new data
            Failover::Leaving { .. } | Failover::Replaying { .. } | Failover::Lost { .. } => {
                return None;
            }
            // RFC 7609 4.6.2 #3: combine repeated writes
            Failover::Repeating => {
                self.relocate(failover::Event::Said);
            }
        }
        self.flags_due = false;
        let sequence = self.outgoing.next;
        // RFC 7609 4.3 #2: begin numbering messages at 1
        // RFC 7609 A.4 #4: do not number failover validation
        // RFC 7609 4.6.2 #4: higher number for combined writes
        // RFC 7609 4.3 #3: number messages, not bytes
        self.outgoing.next = sequence.wrapping_add(1);
        let urgent_pending = self.say_urgent(sequence, repeats);
        let message = Cdc {
            sequence,
            token: self.peer_token,
            producer: self.sender.announce(),
            // RFC 7609 4.5.1 #5: consumer cursor in every message
            // RFC 7609 4.7.2 #1: response carries the consumer cursor
            consumer: self.receiver.announce(),
            // RFC 7609 4.7.4 #4: set B when bytes are left
            // RFC 7609 4.7.4 #9: set B when element is full
            writer_blocked: self.state.may_write()
                && (self.sender.has_waiting() || self.sender.is_full()),
            urgent_pending,
            urgent_present: self.sender.is_urgent_present(),
            // We diagnose nothing by it, as no deployed peer does: Linux answers with its next
            // read, which tells no more than its silence.
            // RFC 7609 4.5.1 #10: set R only for diagnosis
            update_requested: false,
            failover_validation: false,
            sending_done: self.said.done,
            connection_closed: self.said.closed,
            abnormal_close: self.said.abnormal,
            odd_stream: self.odd_stream,
            keeps: self.streams == Streams::Follows,
        };
        if self.said.abnormal {
            self.step(Event::AbortSent);
        }
        assert!(!self.owes(), "one message says everything");
        Some(message)
    }

    /// P of the message with this number, which may be one that repeats all that was said.
    ///
    /// Linux takes P without new bytes for the promise of an urgent byte, and forgets the one that
    /// it has. So of an urgent byte that was written, only the message that brings it says P, or
    /// the one that repeats it because that one may be lost. U is in all of them: Linux looks at it
    /// where bytes are new, and messages may overtake the one that brought the byte.
    fn say_urgent(&mut self, sequence: u16, repeats: bool) -> bool {
        let may_be_lost = repeats && self.outgoing.urgent.is_some();
        let brings = self.sender.is_urgent_news() || may_be_lost && self.sender.is_urgent_present();
        if brings {
            self.outgoing.urgent = Some(sequence);
        }
        // RFC 7609 4.7.6 #1: P alone while window is closed
        brings || self.sender.is_urgent_pending()
    }

    /// Whether there is something to say, now or as soon as the link allows it.
    pub(super) fn owes(&self) -> bool {
        // RFC 7609 A.4 #25: send nothing after C or A
        let speaks = !matches!(self.state, State::Closed | State::PeerAbortWait);
        let consumed = || self.reading && (self.receiver.is_update_due() || self.is_end_due());
        let has_news = || self.sender.is_due() || consumed();
        !self.given_up && (self.flags_due || self.failover.owes() || (speaks && has_news()))
    }
}
