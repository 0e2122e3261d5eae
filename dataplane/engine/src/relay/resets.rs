//! How a connection is reset, or lost.

use super::{Far, Outcome, Relay};
use crate::names::Ending;
use crate::streams::Streams;
use crate::turn::Turn;

impl<T> Relay<T> {
    /// Resets both sides.
    pub(crate) fn reset(
        &mut self,
        turn: &mut Turn<'_, impl Streams<Stream = T>>,
        ending: Ending,
    ) -> Outcome {
        self.ending.get_or_insert(ending);
        // RFC 7609 4.4.2 #5: free element that conflicts, show reset
        // RFC 7609 4.8.2 #5: fail calls on aborted socket
        // RFC 7609 4.8.2 #8: tell application of the abort
        // RFC 7609 4.8.2 #9: discard data on abort
        // RFC 7609 A.4 #24: A flushes unread data
        self.drop_near(turn);
        match &mut self.far {
            Far::Smc(smc) => {
                // After a reset the peer may still write anywhere within its window.
                smc.touch_all();
                smc.forget_replay();
                // RFC 7609 4.4.2 #4: abort without writing the element
                // RFC 7609 4.8.2 #1: TCP reset aborts the connection
                smc.connection.abort(turn.now);
                turn.work.queue_flush(&mut self.queued);
                self.settle(turn)
            }
            Far::Tcp(tcp) => {
                turn.streams.reset_on_close(&tcp.socket.stream);
                Outcome::Over
            }
        }
    }

    /// Ends a connection that has no link, without telling the peer.
    pub(crate) fn lose(&mut self, turn: &mut Turn<'_, impl Streams<Stream = T>>) -> Outcome {
        // RFC 7609 4.8.3 #3: reset connections without any link
        self.far.smc().lose();
        self.ending.get_or_insert(Ending::LinkLost);
        self.drop_near(turn);
        self.settle(turn)
    }

    /// Lets the application see a reset, unless it has seen the end of both directions: then it has
    /// lost nothing.
    fn drop_near(&mut self, turn: &mut Turn<'_, impl Streams<Stream = T>>) {
        self.note_bypassed(turn.now, turn.streams, turn.counters);
        if let Some(near) = self.near.take() {
            turn.streams.release(&near.stream);
            if !near.is_done() {
                turn.streams.reset_on_close(&near.stream);
            }
        }
    }
}
