//! What peers claim about link groups, and of whom it is believed.
//!
//! Who somebody is in CLC is a claim: anybody can send the peer id or the GID of somebody else.
//! What cannot be claimed is the address that a TCP connection was made from or to. So a link group
//! belongs to the address that it was founded from, and nobody else joins it, learns its keys or
//! ends it. To be called out of sync does not end it either, but has its links tested: a peer that
//! is there answers.

use std::net::IpAddr;

use smcr_proto::Instant;
use smcr_proto::link_group::Role;
use smcr_proto::wire::clc::Offer;
use smcr_proto::wire::llc::DeleteReason;
use smcr_rnic::{Exhausted, Rnic};

use super::Groups;
use super::group::{Group, GroupId, Link, Peer};
use super::ports::{Pollers, QpOf};
use crate::config::Peers;

impl<O> Group<O> {
    /// Whether the group belongs to that address, or whoever speaks from another one has shown
    /// that it is the same host: it names an RMB by the key and address that were made known on
    /// this very link. A Linux server puts a connection into the group that it has with us,
    /// whichever of its addresses we connected to.
    pub(super) fn shows_same_host(&self, source: IpAddr, link: &Link<O>, offer: &Offer) -> bool {
        let token = (offer.rkey, offer.rmb_address);
        let known = || self.machine()?.peer_rmb_at(link.number, token, link.number);
        self.peer.source == source || known().is_some()
    }
}

impl<N: Rnic, P: Pollers<QpOf<N>>> Groups<N, P> {
    /// Whether connections for which `peers` holds may use this group. From then on no link is
    /// added to it that leads elsewhere: a connection may move to any link of its group.
    pub fn admit(&mut self, id: GroupId, peers: &Peers) -> bool {
        // A group that is gone admits nobody.
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
            let carries = group.members.values().any(|member| member.relayed);
            group.role == Role::Server && !group.is_over() && !carries
        };
        let spare = self.founded_by(source).filter(|(_, group)| is_spare(group));
        let spare: Vec<_> = spare
            .map(|(id, group)| (id, group.is_established() && group.members.is_empty()))
            .collect();
        if spare.len() < SPARE_MAX {
            return Ok(());
        }
        self.shared.counts.crowded_sources += 1;
        let (oldest, _) = spare.iter().find(|(_, idle)| *idle).ok_or(Exhausted)?;
        self.shut_down(now, *oldest, DeleteReason::PROGRAM);
        Ok(())
    }

    /// Counts a first contact by somebody who claims to be the peer of another's group.
    pub(super) fn note_claim(&mut self, now: Instant, role: Role, peer: Peer) {
        let claimed = |group: &&Group<N::Opening>| {
            let foreign = group.peer.source != peer.source;
            group.role == role && !group.is_over() && foreign && group.claims(peer)
        };
        if let Some(group) = self.groups.values().find(claimed) {
            self.shared.foreign_claim(now, group.id, group.peer.source, peer.source);
        }
    }

    /// The peer says that it does not know this group, for a connection that `source` wanted in it.
    ///
    /// The group takes no new connections any more. Where others are on it, its links are tested,
    /// and only those that do not answer go: a connection that is well has no part in this.
    pub fn called_out_of_sync(&mut self, now: Instant, id: GroupId, source: IpAddr) {
        self.input(now, id, |it| {
            let (founder, others) = (it.group.peer.source, it.group.members.len() > 1);
            if founder != source {
                it.shared.foreign_claim(now, id, founder, source);
                return;
            }
            it.shared.counts.out_of_sync += 1;
            it.group.out_of_sync = true;
            if let Some(left_out) = it.shared.offences.out_of_sync.pass(now) {
                let (group, why) = (id.0, "the peer says that it does not know this link group");
                tracing::warn!(group, %source, others, left_out, "{why}");
            }
            if others {
                it.probe(now);
            } else {
                it.feed(|machine| machine.shutdown(now, DeleteReason::PROTOCOL_VIOLATION));
            }
        });
    }
}

/// Link groups of one client that carry no connection: those whose first contact goes on, and those
/// that are idle. A host has one, or a few with several RNICs or after it was restarted.
const SPARE_MAX: usize = 16;
