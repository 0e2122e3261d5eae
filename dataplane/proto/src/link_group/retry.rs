//! When a further link is tried: upon news of a port, and after a failure (RFC 3.5.5.1.2, C.8).

use super::exchange::Exchange;
use super::group_link::is_down;
use super::openings::Wanted;
use super::{LinkGroup, Phase, Role};
use crate::limits::LINKS_PER_GROUP_MAX;
use crate::time::Instant;
use crate::vocabulary::{Gid, LinkNumber, MacAddress, Mtu, Psn, Qpn};
use crate::wire::llc::{AddLink, Llc};

/// How many links in a row may fail soon after they came, and be replaced at once.
pub(super) const SHORT_LIVED_MAX: u8 = 3;

/// A port of ours that works, as far as we know.
#[derive(Clone, Copy, Debug)]
struct KnownPort {
    port: (Gid, MacAddress),
    /// It has had no link since we heard of it.
    is_new: bool,
}

/// What the server is to be told as soon as it has time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Untold {
    #[default]
    Nothing,
    /// A port that has had no link yet.
    NewPort,
    /// Any port without a link. The link that it had may have failed just now, and would fail
    /// again, so only a timer says so.
    AnyPort,
}

/// Client: ports of ours that work, whether links use them or not.
#[derive(Clone, Debug, Default)]
pub(super) struct KnownPorts {
    /// The next to tell of comes first, and no gap between two.
    ports: [Option<KnownPort>; LINKS_PER_GROUP_MAX as usize],
    untold: Untold,
}

impl KnownPorts {
    /// Where a port is, or could be.
    fn place_of(&self, port: (Gid, MacAddress)) -> Option<usize> {
        self.ports.iter().position(|known| known.is_none_or(|known| known.port == port))
    }

    /// Adds a port, which is the next to tell of. If there is no room, the last one is forgotten.
    fn note(&mut self, port: (Gid, MacAddress)) {
        let place = self.place_of(port).unwrap_or(self.ports.len() - 1);
        self.ports[place] = Some(KnownPort { port, is_new: true });
        self.ports[..=place].rotate_right(1);
        self.tell_of_new();
    }

    /// Adds a port that gets a link. Should the link fail one day, the server is told of the port.
    pub(super) fn note_used(&mut self, port: (Gid, MacAddress)) {
        if let Some(place) = self.place_of(port) {
            self.ports[place] = Some(KnownPort { port, is_new: false });
        }
    }

    /// The server ignores what its client says of a port while it adds a link, so it is told again.
    pub(super) fn tell_of_new(&mut self) {
        self.untold = self.untold.max(Untold::NewPort);
    }

    pub(super) fn is_untold(&self) -> bool {
        self.untold != Untold::Nothing
    }

    /// Forgets all other ports.
    fn retain(&mut self, stays: impl Fn((Gid, MacAddress)) -> bool) {
        let known = core::mem::take(&mut self.ports);
        let kept = known.into_iter().flatten().filter(|known| stays(known.port));
        for (place, known) in self.ports.iter_mut().zip(kept) {
            *place = Some(known);
        }
    }

    /// The port to tell of, if there is one.
    fn next(&self, is_unused: impl Fn((Gid, MacAddress)) -> bool) -> Option<(Gid, MacAddress)> {
        let counts = |known: &KnownPort| known.is_new || self.untold == Untold::AnyPort;
        let mut ports = self.ports.iter().flatten().filter(|known| counts(known));
        ports.find(|known| is_unused(known.port)).map(|known| known.port)
    }

    /// The server was told of this port. It may not heed that, so the others have their turn before
    /// it is told again.
    fn told(&mut self, port: (Gid, MacAddress)) {
        let count = self.ports.iter().flatten().count();
        if let Some(place) = self.place_of(port) {
            self.ports[place..count].rotate_left(1);
        }
        self.untold = Untold::Nothing;
    }
}

impl LinkGroup {
    /// Says that a port of ours has come up, or has no link. A server offers a link for it, a
    /// client tells its server. Nothing happens if the group has as many links as it may have.
    pub fn want_link(&mut self, now: Instant, port: (Gid, MacAddress)) {
        match (self.role, self.phase) {
            (Role::Server, Phase::Founding { .. } | Phase::Established) => {
                // RFC 7609 C.8 #4: retry when server RNIC appears
                self.want(Wanted::ByUs);
                self.advance(now);
            }
            (Role::Client, Phase::Established) => {
                self.known_ports.note(port);
                self.tell_of_port(now);
            }
            (Role::Client, Phase::Founding { .. }) => {
                self.known_ports.note(port);
            }
            (Role::Server | Role::Client, Phase::Opening | Phase::Confirming { .. })
            | (Role::Server | Role::Client, Phase::Terminated) => {}
        }
    }

    /// Says that ports of ours have gone: the peer is no longer told of those that are not up. What
    /// becomes of their links is another matter.
    pub fn forget_ports(&mut self, is_up: impl Fn((Gid, MacAddress)) -> bool) {
        self.known_ports.retain(is_up);
    }

    /// Client: tells the server of a port without a link, unless a link is being added anyway.
    pub(super) fn tell_of_port(&mut self, now: Instant) {
        let group_links = self.group_links;
        let uses = |port| {
            let mut alive = group_links.iter().flatten().filter(|group_link| !is_down(group_link));
            alive.any(|group_link| group_link.is_from(port))
        };
        // The timer for another attempt also runs where every port has a link.
        let Some((gid, mac)) = self.known_ports.next(|port| !uses(port)) else {
            self.known_ports.untold = Untold::Nothing;
            return;
        };
        let busy = self.exchange.is_some_and(Exchange::adds);
        // All links may be about to be deleted.
        let Some(on) = self.link_of_use() else { return };
        // RFC 7609 2.2.2 #9: client requests no link beyond limit
        // RFC 7609 3.5.5.1.2 #1: client announces a new RNIC
        // RFC 7609 3.5.5.1.2 #5: client expects no ADD LINK answer
        if busy || !self.may_add() {
            return;
        }
        let notice = AddLink {
            reply: false,
            rejected: false,
            reason: 0,
            mac,
            gid,
            qpn: Qpn(0),
            link: LinkNumber(0),
            mtu: Mtu(0),
            psn: Psn(0),
        };
        self.known_ports.told((gid, mac));
        self.send(on, Llc::AddLink(notice));
        // RFC 7609 C.7.1 #11: client asks again by timer
        // RFC 7609 C.7.1 #36: announce unused RNIC again by timer
        self.retry_at = Some(now + self.setup.retry_link);
    }

    /// Whether the agreement leaves room for another link.
    pub(super) fn may_add(&self) -> bool {
        let up = || self.group_links().filter(|group_link| group_link.is_of_use());
        // An asymmetric link does not count, because it goes when a symmetric one comes.
        // RFC 7609 2.2.2 #2: support at least two links
        // RFC 7609 2.2.2 #12: do not count the asymmetric link
        let symmetric = up().filter(|group_link| !group_link.asymmetric).count();
        let room = self.free_place().is_some();
        room && symmetric < usize::from(self.max_links)
    }

    /// Server: the client says that it has another port.
    pub(super) fn client_has_port(&mut self, now: Instant) {
        // RFC 7609 3.5.5.1.2 #4: ignore client's ADD LINK at limit
        // RFC 7609 3.5.5.3 #2: client's ADD LINK at any time
        // RFC 7609 3.5.5.3.1 #2: ignore client's crossing ADD LINK
        let adding = self.exchange.is_some_and(Exchange::adds);
        if self.phase != Phase::Established || adding || !self.may_add() {
            self.dropped += 1;
            return;
        }
        // RFC 7609 3.5.5.1.1 #1: offer link when resources appear
        // RFC 7609 3.5.5.1.2 #2: begin ADD LINK to gain redundancy
        // RFC 7609 3.5.5.1.2 #3: may add link despite redundancy
        // RFC 7609 3.5.5.3.2 #2: client's ADD LINK waits for DELETE LINK
        // RFC 7609 3.5.5.3.3 #2: client's ADD LINK waits for CONFIRM RKEY
        // RFC 7609 A.3.2 #11: client's ADD LINK is a request
        // RFC 7609 C.8 #5: retry when client announces RNIC
        self.want(Wanted::ByPeer);
        self.advance(now);
    }

    /// Sets the timer for another attempt, if the group still lacks a link.
    pub(super) fn retry_later(&mut self, now: Instant) {
        if self.lacks_redundancy() {
            // RFC 7609 C.7.1 #4: clean up unconfirmed link, retry later
            // RFC 7609 C.7.1 #11: client asks again by timer
            // RFC 7609 C.7.1 #36: announce unused RNIC again by timer
            // RFC 7609 C.8 #2: timer for the second link
            self.retry_at = Some(now + self.setup.retry_link);
        }
    }

    fn lacks_redundancy(&self) -> bool {
        let alone = self.group_links().filter(|group_link| group_link.is_of_use()).count() < 2;
        alone || self.group_links().any(|group_link| group_link.asymmetric)
    }

    /// Server: a link that failed is deleted. Another one is offered at once, as Linux servers do.
    /// After several links that failed soon the next one is offered later: over a path that carries
    /// CONFIRM LINK and no larger packet, links would come and go without end.
    pub(super) fn replace_lost(&mut self, now: Instant, confirmed_at: Option<Instant>) {
        let served = |at| at + self.setup.retry_link <= now;
        self.short_lived = match confirmed_at {
            Some(at) if served(at) => 0,
            Some(_) => self.short_lived.saturating_add(1),
            None => self.short_lived,
        };
        let lasting = confirmed_at.is_some() && self.short_lived <= SHORT_LIVED_MAX;
        if lasting && self.lacks_redundancy() {
            // A client can make links fail whenever it likes.
            // RFC 7609 C.7.1 #8: try ADD LINK over another link
            self.want(Wanted::ByPeer);
        } else {
            self.retry_later(now);
        }
    }

    /// Another attempt at a further link.
    pub(super) fn retry_link(&mut self, now: Instant) {
        match self.role {
            // RFC 7609 C.8 #3: retry second link by timer
            Role::Server => {
                self.want(Wanted::ByUs);
                self.advance(now);
            }
            Role::Client => {
                // If a link is being added at this moment, the server is told after it.
                self.known_ports.untold = Untold::AnyPort;
                self.tell_of_port(now);
            }
        }
    }
}
