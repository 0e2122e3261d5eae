//! What peers claim about link groups, and of whom it is believed.
//!
//! Who somebody is in CLC is a claim: anybody can send the peer id or the GID of somebody else.
//! What cannot be claimed is the address that a TCP connection was made from or to. So a link group
//! belongs to the address that it was founded from, and nobody else joins it, learns its keys or
//! ends it. To be called out of sync does not end it either, but has its links tested: a peer that
//! is there answers.

use std::net::IpAddr;
use std::time::Duration;

use smcr_proto::Instant;
use smcr_proto::link_group::Role;
use smcr_proto::wire::clc::Offer;
use smcr_proto::wire::llc::DeleteReason;
use smcr_rnic::{Exhausted, Rnic};

use super::Groups;
use super::group::{Group, GroupId, Link, Peer, Phase};
use super::ports::{Pollers, QpOf};
use crate::config::Peers;

/// When what peers do wrong was last logged, by kind: a peer must not fill the disk.
#[derive(Debug, Default)]
pub(super) struct Offences {
    claims: Throttle,
    out_of_sync: Throttle,
    pub(super) llc: Throttle,
}

/// Says when an event may be logged again.
#[derive(Debug, Default)]
pub struct Throttle {
    last: Option<Instant>,
    left_out: u64,
}

impl Throttle {
    /// Whether to log an event; then how many were not since the last one.
    pub fn pass(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.since(last) < LOG_EVERY) {
            self.left_out += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.left_out))
    }
}

impl<O> Group<O> {
    /// Whether the group belongs to that address, or whoever speaks from another one has shown
    /// that it is the same host: it names an RMB by the key and address that were made known on
    /// this very link. A Linux server puts a connection into the group that it has with us,
    /// whichever of its addresses we connected to.
    pub(super) fn vouches_for(&self, source: IpAddr, link: &Link<O>, offer: &Offer) -> bool {
        let known = || {
            let known = self.machine()?.peer_rmb(link.number, offer.rkey, link.number)?;
            Some(known == (offer.rkey, offer.rmb_address))
        };
        self.peer.source == source || known().unwrap_or(false)
    }
}

impl<N: Rnic, P: Pollers<QpOf<N>>> Groups<N, P> {
    /// Whether connections for which `peers` holds may use this group. From then on no link is
    /// added to it that leads elsewhere: a connection may move to any link of its group.
    pub fn admit(&mut self, id: GroupId, peers: &Peers) -> bool {
        let Some(group) = self.groups.get_mut(&id) else { return false };
        if group.admitted.contains(peers) {
            return true;
        }
        let mut ends = group.links.iter().filter_map(|link| link.theirs.map(|theirs| theirs.gid));
        let admitted = peers.admit_gid(group.peer.gid) && ends.all(|gid| peers.admit_gid(gid));
        if admitted {
            group.admitted.push(peers.clone());
        }
        admitted
    }

    /// Makes sure that a client does not take the queue pairs and the memory of others with first
    /// contacts, each in the name of another peer: beside the groups that carry its connections it
    /// has so many others, and the one that has been without a connection for longest goes for a
    /// new one.
    ///
    /// # Errors
    ///
    /// [`Exhausted`] if all others are first contacts that have not come to an end.
    pub(super) fn limit_spare(&mut self, now: Instant, source: IpAddr) -> Result<(), Exhausted> {
        let is_spare = |group: &Group<N::Opening>| {
            let over = matches!(group.phase, Phase::Ending);
            group.role == Role::Server && !over && !group.members.values().any(|one| one.relayed)
        };
        let spare = self.founded_by(source).filter(|(_, group)| is_spare(group));
        let spare: Vec<_> = spare
            .map(|(id, group)| (id, group.is_established() && group.members.is_empty()))
            .collect();
        if spare.len() < SPARE_MAX {
            return Ok(());
        }
        self.counts.crowded_sources += 1;
        let (oldest, _) = spare.iter().find(|(_, idle)| *idle).ok_or(Exhausted)?;
        self.shut_down(now, *oldest, DeleteReason::PROGRAM);
        Ok(())
    }

    /// Counts a first contact by somebody who claims to be the peer of another's group.
    pub(super) fn note_claim(&mut self, now: Instant, role: Role, peer: Peer) {
        let claimed = |group: &Group<N::Opening>| {
            let over = matches!(group.phase, Phase::Ending);
            group.role == role && !over && group.peer.source != peer.source && group.claims(peer)
        };
        let Some((id, group)) = self.groups.iter().find(|(_, group)| claimed(group)) else {
            return;
        };
        let (id, founder) = (*id, group.peer.source);
        self.foreign_claim(now, id, founder, peer.source);
    }

    /// Counts somebody who is not the founder of a group and would like to be taken for him.
    pub(super) fn foreign_claim(
        &mut self,
        now: Instant,
        id: GroupId,
        founder: IpAddr,
        source: IpAddr,
    ) {
        self.counts.foreign_claims += 1;
        if let Some(left_out) = self.offences.claims.pass(now) {
            tracing::warn!(
                group = id.0,
                %founder,
                %source,
                left_out,
                "another address claims to be the peer of this group; it does not join the group"
            );
        }
    }

    /// The peer says that it does not know this group, for a connection that `source` wanted in it.
    ///
    /// The group takes no new connections any more. Where others are on it, its links are tested,
    /// and only those that do not answer go: a connection that is well has no part in this.
    pub fn called_out_of_sync(&mut self, now: Instant, id: GroupId, source: IpAddr) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        let (founder, others) = (group.peer.source, group.members.len() > 1);
        if founder != source {
            self.foreign_claim(now, id, founder, source);
            return;
        }
        self.counts.out_of_sync += 1;
        group.disowned = true;
        if let Some(left_out) = self.offences.out_of_sync.pass(now) {
            tracing::warn!(group = id.0, %source, others, left_out, "the peer knows no such group");
        }
        if others {
            self.probe(now, id);
        } else {
            self.shut_down(now, id, DeleteReason::PROTOCOL_VIOLATION);
        }
    }

    /// A group that its peer does not know ends with its last connection.
    pub(super) fn end_if_disowned(&mut self, now: Instant, id: GroupId) {
        let Some(group) = self.groups.get(&id) else { return };
        if group.disowned && group.members.is_empty() {
            self.shut_down(now, id, DeleteReason::PROTOCOL_VIOLATION);
        }
    }
}

/// Link groups of one client that carry no connection: those whose first contact goes on, and those
/// that are idle. A host has one, or a few with several RNICs or after it was restarted.
const SPARE_MAX: usize = 16;
/// How often one kind of offence is logged at most.
const LOG_EVERY: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_offences_is_a_line_now_and_then() {
        let mut throttle = Throttle::default();
        let at = |ms: u64| Instant(ms * 1_000_000);
        assert_eq!(throttle.pass(at(1)), Some(0));
        let lines: Vec<_> = (2..6_000).filter_map(|ms| throttle.pass(at(ms))).collect();
        assert_eq!(lines, [4_999], "how many were left out is said");
    }
}
