//! What a handshake machine asks, and what the answer may have to wait for.

use std::time::Duration;

use smcr_engine::LinkId;
use smcr_proto::Instant;
use smcr_proto::wire::clc::{Diagnosis, Offer, Proposal};

use crate::groups::GroupId;

/// A question that the machine of a rendezvous has asked, and to which it waits for the answer.
#[derive(Clone, Copy, Debug)]
pub(super) enum Asked {
    /// What to answer to this Proposal, and by when the client must have an answer.
    Proposal(Proposal, Instant),
    /// What to answer to this Accept.
    Accept(Offer),
    /// Whether a Confirm may leave, now that the element is free that the Accept named, or that the
    /// wait for it is over.
    Confirm {
        /// Our offer in it.
        ours: Offer,
        /// The offer of the Accept, if another connection has that element still.
        insisted: Option<Offer>,
    },
}

/// The answer to such a question.
#[derive(Debug)]
pub(super) enum Answer {
    /// An element, or the reason why there is none.
    Now(Result<Offer, Diagnosis>),
    /// None yet: this must happen first.
    Later(Wait),
}

/// What a rendezvous waits for.
#[derive(Debug)]
pub(super) enum Wait {
    /// One of the places for rendezvous.
    Place,
    /// The outcome of another connection's first contact with the same peer.
    FirstContact(GroupId),
    /// The peer's confirmation of another RMB of ours.
    Element {
        /// In which group.
        group: GroupId,
        /// Until when at the latest.
        until: Instant,
    },
    /// The proof that a link works.
    Proof {
        /// In which group.
        group: GroupId,
        /// Which link. None: any of the group will do, because we choose the link, as a server.
        link: Option<LinkId>,
        /// Until when at the latest.
        until: Instant,
    },
    /// The end of the other connection that has the element that the peer offers.
    Holder(Held),
}

/// An element that a peer offered, and that another connection still has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    /// In which group.
    pub(super) group: GroupId,
    /// Until when we wait for the end of that connection.
    pub(super) until: Instant,
    /// The peer's offer of the element.
    pub(super) offer: Offer,
    /// The offer of our Confirm, where we are the client. A server has nothing left to send.
    pub(super) answer: Option<Offer>,
}

impl Wait {
    /// When it ends at the latest, if this wait has a deadline of its own.
    pub(super) fn until(&self) -> Option<Instant> {
        match self {
            Self::Place | Self::FirstContact(_) => None,
            Self::Element { until, .. } | Self::Proof { until, .. } => Some(*until),
            Self::Holder(held) => Some(held.until),
        }
    }
}

/// How long a rendezvous waits for the peer to confirm another RMB: as long as deployed peers let
/// two LLC exchanges take, and less than the six seconds after which they give up the CLC
/// handshake.
pub(super) const ELEMENT_WAIT: Duration = Duration::from_secs(4);

/// How long a rendezvous waits for the end of a connection that the peer believes to have ended.
/// The missing messages are on their way, and take milliseconds if our pollers are busy.
pub(super) const END_WAIT: Duration = Duration::from_millis(200);
