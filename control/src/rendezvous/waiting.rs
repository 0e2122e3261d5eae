//! What an answer may have to wait for.

use std::time::Duration;

use smcr_proto::Instant;
use smcr_proto::wire::clc::{Diagnosis, Offer, Proposal};

use crate::groups::GroupId;

/// What the machine of a rendezvous has asked, and waits for the answer to.
#[derive(Clone, Copy, Debug)]
pub(super) enum Asked {
    /// What to answer to this Proposal, and by when the client must have an answer.
    Proposal(Proposal, Instant),
    /// What to answer to this Accept.
    Accept(Offer),
}

/// What is answered.
#[derive(Debug)]
pub(super) enum Answer {
    /// An element, or the reason why there is none.
    Now(Result<Offer, Diagnosis>),
    /// Nothing yet.
    Later(Wait),
}

/// What a rendezvous waits for.
#[derive(Debug)]
pub(super) enum Wait {
    /// One of the places for rendezvous.
    Place,
    /// The outcome of another connection's first contact with the same peer.
    FirstContact(GroupId),
    /// The peer knows another RMB of ours.
    Element {
        /// In which group.
        group: GroupId,
        /// For how long.
        until: Instant,
    },
    /// A link shows that it carries.
    Proof {
        /// In which group.
        group: GroupId,
        /// For how long.
        until: Instant,
    },
    /// Another connection ends that has the element that the peer offers.
    Holder(Held),
}

/// An element that a peer offered, and that another connection still has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    /// In which group.
    pub(super) group: GroupId,
    /// How long we wait for the end of that connection.
    pub(super) until: Instant,
    /// What the peer said.
    pub(super) offer: Offer,
    /// What we answer, where we are the client. The server has nothing left to say.
    pub(super) answer: Option<Offer>,
}

impl Wait {
    /// How long it takes at most, if that is not the same for all rendezvous.
    pub(super) fn until(&self) -> Option<Instant> {
        match self {
            Self::Place | Self::FirstContact(_) => None,
            Self::Element { until, .. } | Self::Proof { until, .. } => Some(*until),
            Self::Holder(held) => Some(held.until),
        }
    }
}

/// How long a rendezvous waits for the peer to know another RMB: two exchanges of as long as
/// deployed peers give one, and less than the six seconds after which they give up CLC.
pub(super) const ELEMENT_WAIT: Duration = Duration::from_secs(4);

/// How long a rendezvous waits for the end of a connection that the peer takes to have ended. What
/// is missing is on its way: milliseconds, if our pollers are busy.
pub(super) const END_WAIT: Duration = Duration::from_millis(200);
