//! What a group knows of one of its links.

use super::LinkGroup;
use crate::limits::LINKS_PER_GROUP_MAX;
use crate::link::{Link, State};
use crate::time::Instant;
use crate::vocabulary::{Gid, LinkNumber, LinkUserId, MacAddress, QpAddress, Qpn};

use super::delete::{Asked, Order};

/// One link and what the group knows of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupLink {
    pub(super) number: LinkNumber,
    pub(super) link: Link,
    /// TEST LINKs that were sent and not answered.
    pub(super) unanswered: u32,
    pub(super) ours: QpAddress,
    /// All zero while the peer has not answered our offer.
    pub(super) theirs: QpAddress,
    pub(super) user_id: LinkUserId,
    /// It shares an RNIC with another link, as it was meant to when it was made.
    pub(super) asymmetric: bool,
    /// When it proved that it carries messages.
    pub(super) confirmed_at: Option<Instant>,
    /// Server: it is to be deleted, or is being deleted. Client: the server has sent DELETE LINK.
    pub(super) delete: Option<Order>,
    /// Client: the server was asked to delete it.
    pub(super) asked: Option<Asked>,
}

impl GroupLink {
    pub(super) fn view(&self) -> LinkView {
        let Self { number, ours, theirs, asymmetric, .. } = *self;
        LinkView { number, state: self.link.state(), ours, theirs, asymmetric }
    }

    /// Whether it goes through this port of ours.
    pub(super) fn is_from(&self, port: (Gid, MacAddress)) -> bool {
        (self.ours.gid, self.ours.mac) == port
    }

    /// Whether it leads to this port of the peer.
    pub(super) fn is_to(&self, port: (Gid, MacAddress)) -> bool {
        (self.theirs.gid, self.theirs.mac) == port
    }

    // RFC 7609 2.3 #1: treat all active links alike
    // RFC 7609 3.5.5.1.1 #3: data goes on during ADD LINK
    /// Whether it may carry messages and connections, and is not to be deleted.
    pub(super) fn is_of_use(&self) -> bool {
        self.link.is_up() && self.delete.is_none()
    }
}

/// One link of a group, for others to see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkView {
    /// Its number.
    pub number: LinkNumber,
    /// Where it is in its life.
    pub state: State,
    /// Our end.
    pub ours: QpAddress,
    /// The peer's end; all zero while it is not known.
    pub theirs: QpAddress,
    /// Whether it was made to share an RNIC with another link, and still does (RFC 2.2.1).
    pub asymmetric: bool,
}

/// The port of one end of a link.
pub(super) fn port_of(address: QpAddress) -> (Gid, MacAddress) {
    (address.gid, address.mac)
}

/// The queue pair of one end of a link.
pub(super) fn end_of(address: QpAddress) -> (Gid, MacAddress, Qpn) {
    (address.gid, address.mac, address.qpn)
}

pub(super) fn is_down(group_link: &GroupLink) -> bool {
    match group_link.link.state() {
        State::Down(_) => true,
        State::Confirming { .. } | State::Active { .. } | State::Probing { .. } => false,
    }
}

impl LinkGroup {
    /// Whether messages on this link count.
    pub(super) fn is_alive(&self, number: LinkNumber) -> bool {
        !self.is_terminated() && self.find(number).is_some_and(|group_link| !is_down(group_link))
    }

    /// A link that carries messages and is not to be deleted.
    pub(super) fn link_of_use(&self) -> Option<LinkNumber> {
        let of_use = { self.group_links() }.filter(|one| one.is_of_use() && one.asked.is_none());
        // Linux takes the link over which ADD LINK of a client comes for the one that the new link
        // is to stand beside. If that one is asymmetric, Linux offers the RNIC that is shared
        // already.
        of_use.min_by_key(|group_link| group_link.asymmetric).map(|group_link| group_link.number)
    }

    pub(super) fn group_links(&self) -> impl Iterator<Item = &GroupLink> {
        self.group_links.iter().flatten()
    }

    pub(super) fn numbers(&self) -> [Option<LinkNumber>; LINKS_PER_GROUP_MAX as usize] {
        self.group_links.map(|group_link| group_link.map(|group_link| group_link.number))
    }

    pub(super) fn slot(&self, number: LinkNumber) -> Option<usize> {
        let is_it = |group_link: &Option<GroupLink>| {
            group_link.is_some_and(|group_link| group_link.number == number)
        };
        self.group_links.iter().position(is_it)
    }

    pub(super) fn find(&self, number: LinkNumber) -> Option<&GroupLink> {
        self.group_links().find(|group_link| group_link.number == number)
    }

    pub(super) fn find_mut(&mut self, number: LinkNumber) -> Option<&mut GroupLink> {
        self.group_links.iter_mut().flatten().find(|group_link| group_link.number == number)
    }

    /// The place of a link that there is, or of which the caller does not know yet that it is gone.
    pub(super) fn place_of(&self, number: LinkNumber) -> Option<usize> {
        let gone = || self.gone.iter().position(|gone| *gone == Some(number));
        self.slot(number).or_else(gone)
    }

    /// A place for another link.
    pub(super) fn free_place(&self) -> Option<usize> {
        let mut places = self.group_links.iter().zip(&self.gone);
        places.position(|(group_link, gone)| group_link.is_none() && gone.is_none())
    }

    /// An asymmetric link is as good as any other once it shares no RNIC any more.
    fn judge_symmetry(&mut self) {
        let group_links = self.group_links;
        for group_link in self.group_links.iter_mut().flatten() {
            let shares = |other: &GroupLink| {
                other.number != group_link.number
                    && (other.is_from(port_of(group_link.ours))
                        || other.is_to(port_of(group_link.theirs)))
            };
            // RFC 7609 2.2.1 #3: support asymmetric links
            // RFC 7609 2.2.1 #4: become symmetric with two RNICs each
            group_link.asymmetric &= group_links.iter().flatten().any(shares);
        }
    }

    /// Forgets a link. Its rkeys are kept until the caller has taken all actions, because it moves
    /// connections away from that link.
    pub(super) fn remove_group_link(&mut self, number: LinkNumber) {
        if let Some(slot) = self.slot(number) {
            if let Some(group_link) = self.group_links[slot].take() {
                self.past.rotate_right(1);
                self.past[0] = Some(end_of(group_link.theirs));
            }
            self.gone[slot] = Some(number);
            self.place_lost(slot);
            self.judge_symmetry();
        }
    }

    /// The caller has taken all actions: forgets the rkeys on links that are gone.
    pub(super) fn forget_gone(&mut self) {
        for slot in 0..self.gone.len() {
            if self.gone[slot].take().is_some() {
                self.our_rmbs.clear(slot);
                self.peer_rmbs.clear(slot);
            }
        }
    }
}
