//! Proof that a link still carries what we send, before a new connection depends on it.
//!
//! A network that no longer carries RoCE says nothing, and a queue pair finds out only by sending
//! for a second or more. By then a new connection could not go back to TCP.

use std::time::Duration;

use smcr_engine::LinkId;
use smcr_proto::Instant;
use smcr_rnic::Rnic;

use super::Groups;
use super::group::{GroupId, Link};
use super::ports::{Pollers, QpOf};

/// Whether a link has proved that it carries what we send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proof {
    /// In time.
    Given,
    /// Not yet, but it may.
    Awaited,
    /// It has not, and it will not: it is being given up, or gone.
    Impossible,
}

impl<N: Rnic, P: Pollers<QpOf<N>>> Groups<N, P> {
    /// The link that a new connection of a group should use, of those on which the peer's RNIC has
    /// acknowledged something in the last `age`, or the peer has answered TEST LINK: the one with
    /// the fewest connections.
    pub fn proven_link(&self, now: Instant, age: Duration, id: GroupId) -> Option<LinkId> {
        let group = self.at(id)?;
        let proven = |link: &&Link<N::Opening>| group.is_usable(link) && is_proven(now, age, link);
        let usable = group.links.iter().filter(proven);
        // RFC 7609 2.2 #2: spread connections over active links
        // RFC 7609 2.3 #1: treat all active links alike
        // RFC 7609 2.3 #2: each side chooses its own link
        // RFC 7609 3.5.2.1 #6: server may choose another link
        group.least_used(usable)
    }

    /// Whether the peer's RNIC has acknowledged something on this link in the last `age`, or the
    /// peer has answered TEST LINK.
    pub fn proof_of(&self, now: Instant, age: Duration, id: GroupId, link: LinkId) -> Proof {
        match self.at(id).and_then(|group| group.link(link)) {
            Some(link) if is_proven(now, age, link) => Proof::Given,
            Some(link) if link.is_alive() => Proof::Awaited,
            Some(_) | None => Proof::Impossible,
        }
    }
}

fn is_proven<O>(now: Instant, age: Duration, link: &Link<O>) -> bool {
    now.since(link.activity.proven()) < age
}
