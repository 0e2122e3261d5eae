//! The links of a group: where they are kept, which ports they join, what follows when one fails
//! (RFC 2.2.1, 2.2.4, 2.3).

use super::exchange::Exchange;
use super::{Action, LinkGroup, Phase, Role};
use crate::limits::LINKS_MAX;
use crate::link::{self, Cause, Event, Link};
use crate::time::Instant;
use crate::vocabulary::{LinkNumber, LinkUserId, QpAddress};
use crate::wire::llc::{DeleteReason, Llc, TestLink};

/// Where links are kept: the symmetric ones, and one asymmetric link that does not count.
// RFC 7609 2.2.2-1, 2.2.2-12
pub(super) const PLACES: usize = LINKS_MAX as usize + 1;

/// That a link must go, and why.
#[derive(Clone, Copy, Debug)]
pub(super) struct Doom {
    pub(super) reason: DeleteReason,
    pub(super) orderly: bool,
    pub(super) cause: Cause,
    /// Client: the request is out, over this link, until then.
    pub(super) asked: Option<(LinkNumber, Instant)>,
}

/// One link and what the group knows of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member {
    pub(super) number: LinkNumber,
    pub(super) link: Link,
    pub(super) ours: QpAddress,
    /// Unknown while the peer has not answered our offer.
    pub(super) theirs: Option<QpAddress>,
    pub(super) user_id: LinkUserId,
    /// Grows from link to link.
    pub(super) serial: u32,
    /// TEST LINKs that were sent and not answered.
    pub(super) unanswered: u32,
    pub(super) doom: Option<Doom>,
    /// Both sides are done with it. Its keys stay readable until the place is needed: connections
    /// that move off it must find out what their RMBs are called elsewhere.
    pub(super) gone: bool,
}

impl Member {
    fn is_down(&self) -> bool {
        matches!(self.link.state(), link::State::Down(_))
    }

    /// Whether messages and connections may use it.
    pub(super) fn is_up(&self) -> bool {
        !self.gone && self.link.is_up()
    }

    /// Whether it is up and meant to stay.
    fn is_staying(&self) -> bool {
        self.is_up() && self.doom.is_none()
    }

    fn joins(&self) -> Option<(QpAddress, QpAddress)> {
        self.theirs.map(|theirs| (self.ours, theirs))
    }
}

/// What a link would be among those that are there (RFC 2.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// Joins the same two ports as another one.
    Parallel,
    /// Shares a port with another one.
    Asymmetric,
    /// Shares none.
    Symmetric,
}

/// How much redundancy a group has (RFC 2.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Symmetry {
    /// No link carries connections.
    None,
    /// One link.
    Single,
    /// Several links, all through one port of ours.
    AsymmetricLocal,
    /// Several links, all through one port of the peer.
    AsymmetricPeer,
    /// At least two links that share no port.
    Symmetric,
}

fn same_port(one: QpAddress, other: QpAddress) -> bool {
    (one.gid, one.mac) == (other.gid, other.mac)
}

impl LinkGroup {
    /// Keeps a new link. `None` if there is no place for it.
    pub(super) fn admit(&mut self, member: Member) -> Option<usize> {
        let free = |(_, slot): &(usize, &Option<Member>)| slot.is_none_or(|old| old.gone);
        let age = |(_, slot): &(usize, &Option<Member>)| slot.map_or(0, |old| old.serial);
        let place = self.members.iter().enumerate().filter(free).min_by_key(age)?.0;
        self.members[place] = Some(member);
        self.peer_rmbs.clear(place);
        self.own_rmbs.clear(place);
        Some(place)
    }

    /// A member for a queue pair of ours that is new to the group.
    pub(super) fn new_member(
        &mut self,
        deadline: Instant,
        number: LinkNumber,
        ours: QpAddress,
        theirs: Option<QpAddress>,
        user_id: LinkUserId,
    ) -> Member {
        self.serial += 1;
        Member {
            number,
            link: Link::new(self.setup.keepalive, deadline),
            ours,
            theirs,
            user_id,
            serial: self.serial,
            unanswered: 0,
            doom: None,
            gone: false,
        }
    }

    pub(super) fn present(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().flatten().filter(|member| !member.gone)
    }

    pub(super) fn find(&self, number: LinkNumber) -> Option<&Member> {
        self.present().find(|member| member.number == number)
    }

    pub(super) fn find_mut(&mut self, number: LinkNumber) -> Option<&mut Member> {
        let mut members = self.members.iter_mut().flatten();
        members.find(|member| !member.gone && member.number == number)
    }

    /// Where a link is kept, or was until lately.
    pub(super) fn place(&self, number: LinkNumber) -> Option<usize> {
        let known = self.members.iter().enumerate();
        let named = known.filter_map(|(place, slot)| Some((place, (*slot)?)));
        let named = named.filter(|(_, member)| member.number == number);
        named.max_by_key(|(_, member)| member.serial).map(|(place, _)| place)
    }

    /// The oldest link that can carry a message; rather none of those that are to go.
    // RFC 7609 2.3-1, 3.3-5, 3.5.5.1.3-5
    pub(super) fn carrier(&self) -> Option<LinkNumber> {
        self.carrier_beside(None)
    }

    /// As `carrier`, and not this one unless there is no other.
    // RFC 7609 A.3.4-8
    pub(super) fn carrier_beside(&self, avoid: Option<LinkNumber>) -> Option<LinkNumber> {
        let up = self.present().filter(|member| member.is_up());
        let rank =
            |member: &&Member| (Some(member.number) == avoid, member.doom.is_some(), member.serial);
        up.min_by_key(rank).map(|member| member.number)
    }

    /// The places of the links that carry connections, as a mask.
    pub(super) fn places_up(&self) -> u16 {
        let up = |slot: &Option<Member>| slot.is_some_and(|member| member.is_up());
        self.places(up)
    }

    /// The places of the links that will go on carrying connections.
    pub(super) fn places_staying(&self) -> u16 {
        self.places(|slot| slot.is_some_and(|member| member.is_staying()))
    }

    fn places(&self, chosen: impl Fn(&Option<Member>) -> bool) -> u16 {
        let places = self.members.iter().enumerate().filter(|(_, slot)| chosen(slot));
        places.fold(0, |mask, (place, _)| mask | 1 << place)
    }

    /// Whether another link could take over what this one carries.
    pub(super) fn has_link_beside(&self, number: LinkNumber) -> bool {
        self.present().any(|member| member.is_staying() && member.number != number)
    }

    /// The links that stay, oldest first.
    fn staying(&self) -> ([Option<Member>; PLACES], usize) {
        let mut sorted = [None; PLACES];
        let mut count = 0;
        for member in self.present().filter(|member| member.is_staying()) {
            sorted[count] = Some(*member);
            count += 1;
        }
        sorted[..count].sort_unstable_by_key(|slot| slot.map(|member| member.serial));
        (sorted, count)
    }

    /// The links that stay, each with its shape among the older ones.
    fn shapes(&self) -> [Option<(Member, Shape)>; PLACES] {
        let (sorted, _) = self.staying();
        let mut shapes: [Option<(Member, Shape)>; PLACES] = [None; PLACES];
        for (place, member) in sorted.into_iter().enumerate() {
            let Some(member) = member else { break };
            let Some(ends) = member.joins() else { continue };
            shapes[place] = Some((member, shape_among(&shapes, ends)));
        }
        shapes
    }

    /// What a link between these ends would be.
    // RFC 7609 3.5.1.6.1-1
    pub(super) fn shape(&self, ours: QpAddress, theirs: QpAddress) -> Shape {
        shape_among(&self.shapes(), (ours, theirs))
    }

    /// Whether a link between these ends may join the group.
    pub(super) fn admits(&self, ours: QpAddress, theirs: QpAddress) -> bool {
        match self.shape(ours, theirs) {
            // RFC 7609 2.2.1-2
            Shape::Parallel => false,
            // RFC 7609 2.2.1-3, 2.2.2-11, 3.5.1.6.1-3, 3.5.1.6.1-6, 3.5.5.1.1-2
            Shape::Asymmetric => self.asymmetric().is_none(),
            // RFC 7609 2.2.2-10, 3.5.1.6.1-4
            Shape::Symmetric => self.has_room(),
        }
    }

    /// The asymmetric link, if the group has one.
    pub(super) fn asymmetric(&self) -> Option<LinkNumber> {
        let shapes = self.shapes();
        let mut found = shapes.iter().flatten().filter(|(_, shape)| *shape == Shape::Asymmetric);
        found.next().map(|(member, _)| member.number)
    }

    fn symmetric_count(&self) -> usize {
        let shapes = self.shapes();
        shapes.iter().flatten().filter(|(_, shape)| *shape == Shape::Symmetric).count()
    }

    /// Whether one more symmetric link is within the agreed limit.
    // RFC 7609 2.2.2-9, 2.2.2-10, 2.2.2-12, 3.5.5.1.1-4
    pub(super) fn has_room(&self) -> bool {
        self.symmetric_count() < usize::from(self.links_limit)
    }

    /// Whether the loss of one port would leave the group without a link.
    pub(super) fn lacks_redundancy(&self) -> bool {
        self.symmetric_count() < 2
    }

    /// How much redundancy the group has.
    pub fn symmetry(&self) -> Symmetry {
        let (sorted, count) = self.staying();
        let [Some(first), ..] = sorted else { return Symmetry::None };
        if count == 1 {
            return Symmetry::Single;
        }
        if self.symmetric_count() >= 2 {
            return Symmetry::Symmetric;
        }
        let ours = |slot: &Option<Member>| slot.is_some_and(|it| same_port(it.ours, first.ours));
        if sorted[..count].iter().all(ours) {
            Symmetry::AsymmetricLocal
        } else {
            Symmetry::AsymmetricPeer
        }
    }

    /// The next link number: none comes again before all have been used.
    // RFC 7609 2.2.4-1, 2.2.4-2
    pub(super) fn take_number(&mut self) -> LinkNumber {
        loop {
            self.last_number = self.last_number.wrapping_add(1);
            let number = LinkNumber(self.last_number);
            if number != super::UNNUMBERED && self.find(number).is_none() {
                return number;
            }
        }
    }

    /// One event for one link, and what follows for the group.
    pub(super) fn link_event(&mut self, now: Instant, number: LinkNumber, event: Event) {
        let test = TestLink { reply: false, user_data: self.setup.ours.gid.0 };
        let Some(member) = self.find_mut(number) else { return };
        match member.link.handle(now, event) {
            Some(link::Action::SendTestLink) => {
                member.unanswered += 1;
                self.send(number, Llc::TestLink(test));
            }
            Some(link::Action::Fail(cause)) => self.link_went_down(now, number, cause),
            None => {}
        }
    }

    /// A link is down: whatever rested on it is undone, and the peer must hear of it.
    fn link_went_down(&mut self, now: Instant, number: LinkNumber, cause: Cause) {
        // RFC 7609 2.3-4, 3.5.5.1-1, 3.5.5.1.3-4
        self.actions.push(Action::LinkFailed(number, cause));
        let violated = cause == Cause::PeerMisbehaved;
        let reason =
            if violated { DeleteReason::PROTOCOL_VIOLATION } else { DeleteReason::LOST_PATH };
        if let Some(member) = self.find_mut(number) {
            let doom = Doom { reason, orderly: false, cause, asked: None };
            // What was asked for in order is now without.
            let asked = member.doom.and_then(|doom| doom.asked);
            member.doom = Some(Doom { asked, ..doom });
        }
        let founding = matches!(self.phase, Phase::Opening | Phase::Confirming { .. });
        let alive = self.present().any(|it| it.is_up() || (founding && !it.is_down()));
        if alive {
            self.undo_what_rests_on(now, number);
        } else {
            self.terminate(now, cause);
        }
    }

    fn undo_what_rests_on(&mut self, now: Instant, number: LinkNumber) {
        match self.exchange {
            Exchange::Adding(adding) if adding.number == number || adding.carrier == number => {
                self.abort_add(now, Cause::ExchangeFailed, true);
            }
            Exchange::Deleting { carrier, .. } if carrier == number => {
                self.exchange = Exchange::Idle;
            }
            Exchange::Vacating { link, .. } if link == number => self.vacated(now, number),
            // RFC 7609 2.3-11
            Exchange::Vacating { answer: Some((carrier, _)), .. } if carrier == number => {
                self.exchange = Exchange::Idle;
            }
            Exchange::Idle
            | Exchange::Adding(_)
            | Exchange::Deleting { .. }
            | Exchange::Vacating { .. } => {}
        }
        self.undo_rkeys_on(number);
        for member in self.members.iter_mut().flatten() {
            if let Some(doom) = &mut member.doom
                && doom.asked.is_some_and(|(carrier, _)| carrier == number)
            {
                doom.asked = None;
            }
        }
    }

    /// No link is left that could carry anything.
    pub(super) fn terminate(&mut self, now: Instant, cause: Cause) {
        self.phase = Phase::Terminated;
        self.exchange = Exchange::Idle;
        self.rkey_exchange = None;
        self.incoming = None;
        self.retry_at = None;
        self.idle_deadline = None;
        for member in self.members.iter_mut().flatten().filter(|member| !member.gone) {
            if let Some(link::Action::Fail(cause)) = member.link.handle(now, Event::Fail(cause)) {
                self.actions.push(Action::LinkFailed(member.number, cause));
            }
        }
        // RFC 7609 4.5.3-5, 4.8.3-3, C.7.1-17, C.7.1-21
        self.actions.push(Action::Terminate(cause));
    }

    /// Both sides know that the link is over.
    pub(super) fn bury(&mut self, now: Instant, number: LinkNumber, cause: Cause) {
        let doom = self.find(number).and_then(|member| member.doom);
        self.link_event(now, number, Event::Fail(cause));
        if self.phase == Phase::Terminated {
            return;
        }
        let Some(member) = self.find_mut(number) else { return };
        member.gone = true;
        let wanted = doom.is_none_or(|doom| doom.reason != DeleteReason::OPERATOR);
        if self.lacks_redundancy() && self.role == Role::Server {
            // RFC 7609 C.8-2
            self.retry_at = wanted.then(|| now + self.setup.retry_link);
        }
    }
}

fn shape_among(
    older: &[Option<(Member, Shape)>; PLACES],
    (ours, theirs): (QpAddress, QpAddress),
) -> Shape {
    let mut shape = Shape::Symmetric;
    for (member, kind) in older.iter().flatten() {
        let Some((near, far)) = member.joins() else { continue };
        match (same_port(near, ours), same_port(far, theirs)) {
            (true, true) => return Shape::Parallel,
            (false, false) => {}
            (true, false) | (false, true) if *kind == Shape::Symmetric => {
                shape = Shape::Asymmetric;
            }
            (true, false) | (false, true) => {}
        }
    }
    shape
}
