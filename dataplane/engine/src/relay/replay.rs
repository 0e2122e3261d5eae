//! Bytes that another link lost, written again to the places they were meant for (RFC 4.6.2).

use smcr_rnic::{Fabric, Work};

use crate::connections::Far;
use crate::limits::{FILL_PER_TURN_MAX, WORK_PER_FLUSH};
use crate::poller::Poller;
use crate::reap::tag_of_replay;
use crate::streams::Streams;

impl<F: Fabric, S: Streams> Poller<F, S> {
    /// Writes again what the connection in `slot` must repeat, as far as this turn goes. Returns
    /// whether anything was posted; none if the connection is free to write what is new.
    pub(super) fn replay(&mut self, slot: u16) -> Option<bool> {
        let relay = self.connections.at(slot)?;
        let id = relay.id;
        let Far::Smc(smc) = &mut relay.far else { return None };
        if smc.condemned {
            return None;
        }
        if smc.moving.is_some() || smc.connection.is_validation_due() {
            // Its turn comes with the new link, behind the message that begins there.
            return Some(false);
        }
        if smc.replay.is_empty() {
            return None;
        }
        let Some(link) = self.links.by_id(smc.link).filter(|link| !link.broken) else {
            return Some(false);
        };
        let mut posted = 0;
        // RFC 7609 2.3-9, 4.6.2-1
        while posted < FILL_PER_TURN_MAX && link.budget >= WORK_PER_FLUSH {
            let Some(piece) = smc.replay.front_mut() else { break };
            let rest = &piece.bytes[piece.done..];
            let most = u32::try_from(rest.len()).expect("no larger than the lease it was");
            let filled = self.pool.fill(most.min(FILL_PER_TURN_MAX), |room| {
                room.copy_in(&rest[..room.len()]);
                Ok::<_, std::convert::Infallible>(room.len())
            });
            let Some(filled) = filled else {
                self.ends.counters.blocked_on_pool.add(1);
                break;
            };
            let Ok(Some(lease)) = filled else { unreachable!("a piece is never empty") };
            let at = piece.at + u32::try_from(piece.done).expect("no larger than its lease was");
            posted += lease.len();
            piece.done += lease.len() as usize;
            if piece.done == piece.bytes.len() {
                smc.repeated.extend(smc.replay.pop_front());
            }
            let address = smc.peer.address.wrapping_add(at.into());
            let (rkey, tag) = (smc.peer.rkey, tag_of_replay(id, at));
            link.writes.push(Work::Write { lease, rkey, address, tag });
            link.budget -= 1;
            smc.outstanding += 1;
        }
        if link.budget < WORK_PER_FLUSH {
            self.ends.counters.blocked_on_queue.add(1);
        }
        self.ends.counters.bytes_replayed.add(posted.into());
        // What is left, or else what is new; and the message that announces it.
        self.queue_fill(slot);
        self.queue_flush(slot);
        Some(posted > 0)
    }
}
