//! Connections that are over.

use smcr_proto::Instant;
use smcr_rnic::Fabric;

use super::Poller;
use crate::handoff::Report;
use crate::names::Ending;
use crate::relay::Far;
use crate::streams::Streams;

impl<F: Fabric, S: Streams> Poller<F, S> {
    /// Frees the slot and tells the control thread.
    pub(super) fn retire(&mut self, now: Instant, slot: u16) {
        let mut relay = *self.connections.remove(slot).expect("it has just had its turn");
        let tally = relay.last_tally(now, &self.streams, &self.shared.counters);
        self.mail.disown(relay.id);
        let counters = &self.shared.counters;
        counters.connections.set(self.connections.busy() as u64);
        let ending = relay.ending.unwrap_or(Ending::Graceful);
        let kept = relay.is_kept();
        match ending {
            Ending::Stalled => counters.closes_stalled.add(1),
            _ if kept && !relay.is_called() => {}
            Ending::Graceful | Ending::Aborted => {}
            Ending::ResetByApplication => counters.resets_application.add(1),
            Ending::ResetByPeer | Ending::PeerMisbehaved => counters.resets_peer.add(1),
            Ending::DataLost => counters.resets_data_lost.add(1),
            Ending::LinkLost => counters.resets_link.add(1),
        }
        let (rmbe, settled, far) = match relay.far {
            Far::Smc(mut smc) => {
                let settled = smc.is_settled();
                smc.kept.release(&mut self.pool);
                if let Some(route) = smc.connection.into_route() {
                    self.left(&route);
                }
                (Some(smc.rmbe), settled, None)
            }
            Far::Tcp(tcp) => {
                self.backlog_bytes -= tcp.held;
                (None, true, Some(tcp.socket.stream))
            }
        };
        let streams = [relay.near.map(|near| near.stream), far];
        streams.iter().flatten().for_each(|stream| self.streams.release(stream));
        let connection = relay.id;
        self.report(Report::Closed { connection, ending, tally, rmbe, settled, streams, kept });
    }
}
