//! What a rendezvous takes of a link group: an element and a slot, and what the peer offers for it.

use smcr_engine::{ConnectionId, LinkId};
use smcr_memory::Rmbe;
use smcr_proto::Instant;
use smcr_proto::link_group::Role;
use smcr_proto::wire::clc::{Diagnosis, Offer};
use smcr_rnic::{Exhausted, Rnic};

use super::effect::Limit;
use super::shared::Shared;
use crate::groups::{BadOffer, GroupId, Peer, Pollers, PortId, QpOf, Refusal, Taken};
use crate::slab::Key;

/// What a rendezvous holds of a link group.
#[derive(Debug)]
pub(super) struct Resources {
    /// The link group that has the element.
    pub(super) group: GroupId,
    /// The slot of the connection.
    pub(super) connection: ConnectionId,
    /// Our element for the connection, until the poller gets it.
    pub(super) rmbe: Rmbe,
}

/// Why a rendezvous gets no element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shortage {
    /// The group has no free element now; it gets more when the peer confirms another RMB.
    Passing(GroupId),
    /// This link of the group must prove first that it works, or any if none is named.
    Unproven(GroupId, Option<LinkId>),
    /// It gets none, and stays TCP for this reason.
    Final(Diagnosis),
}

impl Resources {
    /// Takes an element and a slot for a connection of `listener`, and makes the offer that names
    /// them.
    pub(super) fn reserve<N: Rnic, P: Pollers<QpOf<N>>>(
        now: Instant,
        shared: &mut Shared<N, P>,
        listener: u16,
        (group, link): (GroupId, LinkId),
    ) -> Result<(Self, Offer), Shortage> {
        let terms = &shared.settings.listeners[usize::from(listener)];
        if !shared.groups.admit(group, &terms.peers) {
            return Err(Shortage::Final(Diagnosis::PEER_NOT_LISTED));
        }
        match shared.groups.join(now, group, link, terms.rmbe_size) {
            Ok(joined) => {
                let resources = Self { group, connection: joined.connection, rmbe: joined.rmbe };
                Ok((resources, joined.offer))
            }
            Err(Refusal::NotYet) => Err(Shortage::Passing(group)),
            Err(Refusal::NoMemory) => {
                shared.exhausted(listener, Limit::Memory);
                Err(Shortage::Final(Diagnosis::OUT_OF_MEMORY))
            }
            Err(Refusal::NoSlot | Refusal::NoLink) => {
                Err(Shortage::Final(Diagnosis::OUT_OF_MEMORY))
            }
        }
    }

    /// Creates a group for the first contact of the rendezvous `key`, and takes an element in it.
    pub(super) fn found<N: Rnic, P: Pollers<QpOf<N>>>(
        now: Instant,
        shared: &mut Shared<N, P>,
        (listener, key): (u16, Key),
        (port, role, peer): (PortId, Role, Peer),
    ) -> Result<(Self, Offer), Shortage> {
        let opened = shared.groups.open(now, port, role, peer);
        let group = opened.map_err(|Exhausted| Shortage::Final(Diagnosis::OUT_OF_MEMORY))?;
        shared.first_contacts.begin(group, key);
        let link = shared.groups.best_link(group).expect("a new group has a link");
        match Self::reserve(now, shared, listener, (group, link)) {
            Ok((resources, offer)) => Ok((resources, Offer { first_contact: true, ..offer })),
            Err(shortage) => {
                give_up_founding(now, shared, group, key);
                Err(shortage)
            }
        }
    }

    /// Notes the element that the peer offers.
    pub(super) fn take_offer<N: Rnic, P: Pollers<QpOf<N>>>(
        &self,
        now: Instant,
        shared: &mut Shared<N, P>,
        offer: &Offer,
    ) -> Result<Taken, BadOffer> {
        shared.groups.accept_offer(now, self.connection, offer)
    }

    /// Notes the element that the peer offers, although another connection still has it: the peer
    /// has forgotten that one.
    pub(super) fn insist_on_offer<N: Rnic, P: Pollers<QpOf<N>>>(
        &self,
        now: Instant,
        shared: &mut Shared<N, P>,
        offer: &Offer,
    ) -> Result<Taken, BadOffer> {
        shared.groups.insist_on_offer(now, self.connection, offer).map(|()| Taken::Noted)
    }

    /// Gives everything back after the rendezvous `key` has failed.
    pub(super) fn release<N: Rnic, P: Pollers<QpOf<N>>>(
        self,
        now: Instant,
        shared: &mut Shared<N, P>,
        key: Key,
    ) {
        shared.groups.leave(now, self.connection, self.rmbe);
        // RFC 7609 3.5.1.6.4 #4: release group resources on fallback
        give_up_founding(now, shared, self.group, key);
    }
}

/// Ends the group, if the rendezvous `key` is founding it.
fn give_up_founding<N: Rnic, P: Pollers<QpOf<N>>>(
    now: Instant,
    shared: &mut Shared<N, P>,
    group: GroupId,
    key: Key,
) {
    if shared.first_contacts.leave(group, key) {
        shared.groups.give_up(now, group);
    }
}
