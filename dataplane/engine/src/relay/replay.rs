//! Bytes that another link lost, written again to the places they were meant for (RFC 4.6.2).

use std::convert::Infallible;

use smcr_proto::connection::Replay;

use super::smc::Smc;
use crate::limits::{FILL_PER_TURN_MAX, WORK_PER_FLUSH};
use crate::names::ConnectionId;
use crate::requests::Request;
use crate::turn::Turn;

impl Smc {
    /// Writes bytes again, as many as are allowed in one turn. Returns how many, or `None` if the
    /// link is broken or gone.
    pub(super) fn replay<S>(&mut self, id: ConnectionId, turn: &mut Turn<'_, S>) -> Option<u32> {
        let link = turn.links.by_id(self.link).filter(|link| !link.broken)?;
        let mut posted = 0;
        // RFC 7609 2.3 #9: repeat failed writes in order
        // RFC 7609 4.6.2 #1: repeat pending messages before new data
        while posted < FILL_PER_TURN_MAX
            && link.budget >= WORK_PER_FLUSH
            && let Some(Replay { done, rest }) = self.connection.replay()
        {
            let [head, _] = rest.pieces();
            let bytes = &self.kept.copied()[done as usize..][..head.len()];
            let most = FILL_PER_TURN_MAX.min(head.end - head.start);
            let filled = turn.pool.fill(most, |room| {
                room.copy_in(&bytes[..room.len()]);
                Ok::<_, Infallible>(room.len())
            });
            let Some(Ok(lease)) = filled else { break };
            let lease = lease.expect("the rest is never empty");
            posted += lease.len();
            self.connection.replayed(lease.len());
            self.write(link, lease, head.start, Request::Replay(id));
        }
        turn.counters.bytes_replayed.add(posted.into());
        Some(posted)
    }
}
