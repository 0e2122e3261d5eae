//! The links that all connections of a group were told to leave: a Confirm may still name one.
//!
//! A client that has sent its Confirm is committed to SMC-R, and the link that it names may be
//! deleted while the Confirm is on its way by TCP. The RFC lets a server break the connection then,
//! or fail it over (C.1). Linux does not look at the link that such a Confirm names. It takes the
//! key for one on the link that the connection has come to meanwhile, where it opens nothing or
//! another RMB. We fail over: the poller sends whoever comes late after those that have left, and
//! the keys of both links tell us whether the element is free.

use std::collections::VecDeque;

use smcr_engine::LinkId;
use smcr_engine::handoff::KeyChange;
use smcr_proto::Rkey;
use smcr_proto::limits::LINKS_PER_GROUP_MAX;
use smcr_proto::wire::clc::Offer;
use smcr_rnic::QpAddress;

/// A link that all connections were told to leave.
#[derive(Clone, Debug)]
pub(super) struct Left {
    pub(super) link: LinkId,
    /// The peer's end of it.
    pub(super) theirs: QpAddress,
    /// The link to which they go, or have gone on since.
    pub(super) to: LinkId,
    /// What the RMBs of the peer are called on both; where connections have gone on to a third
    /// link, what they are called there.
    pub(super) keys: Vec<KeyChange>,
}

/// The links of a group that were left, the latest last.
#[derive(Clone, Debug, Default)]
pub(super) struct LeftLinks(VecDeque<Left>);

impl LeftLinks {
    /// Notes that a link is left, in place of what was said of it before. Whoever left another link
    /// for this one goes on with the others.
    pub(super) fn note(&mut self, left: Left) {
        for earlier in self.0.iter_mut().filter(|earlier| earlier.to == left.link) {
            earlier.to = left.to;
            let on = |key: &KeyChange| {
                let next = left.key((key.new, key.new_base))?;
                Some(KeyChange { new: next.new, new_base: next.new_base, ..*key })
            };
            earlier.keys = earlier.keys.iter().filter_map(on).collect();
        }
        self.0.retain(|other| other.link != left.link);
        self.0.push_back(left);
        if self.0.len() > LINKS_PER_GROUP_MAX.into() {
            self.0.pop_front();
        }
    }

    /// The link that led to the queue pair of this offer.
    // RFC 7609 2 #1: identify a link by both ends
    pub(super) fn named_by(&self, offer: &Offer) -> Option<&Left> {
        let end = (offer.gid, offer.mac, offer.qpn);
        let leads_there = |left: &&Left| (left.theirs.gid, left.theirs.mac, left.theirs.qpn) == end;
        self.0.iter().rev().find(leads_there)
    }

    /// Where the connections of a link have gone, by however many moves.
    pub(super) fn way_from(&self, link: LinkId) -> Option<LinkId> {
        self.of(link).map(|left| left.to)
    }

    /// The link to which the connections of `on` have gone, and an offer that names its RMB as on
    /// `on`, with the name that the RMB has there.
    pub(super) fn forth(&self, offer: &Offer, on: LinkId) -> Option<(LinkId, Offer)> {
        let left = self.of(on)?;
        let key = left.key((offer.rkey, offer.rmb_address))?;
        Some((left.to, Offer { rkey: key.new, rmb_address: key.new_base, ..*offer }))
    }

    /// The way back: an offer that names its RMB as on the link to which the connections of `from`
    /// have gone, with the name that the RMB has on `from`.
    pub(super) fn back(&self, offer: &Offer, from: LinkId) -> Option<Offer> {
        let token = (offer.rkey, offer.rmb_address);
        let mut keys = self.of(from)?.keys.iter();
        let key = keys.find(|key| (key.new, key.new_base) == token)?;
        Some(Offer { rkey: key.old, rmb_address: key.old_base, ..*offer })
    }

    /// What is known of a link that was left.
    pub(super) fn of(&self, link: LinkId) -> Option<&Left> {
        self.0.iter().find(|left| left.link == link)
    }
}

impl Left {
    /// What the RMB with this rkey and address is called where the connections go.
    fn key(&self, token: (Rkey, u64)) -> Option<&KeyChange> {
        self.keys.iter().find(|key| (key.old, key.old_base) == token)
    }
}
