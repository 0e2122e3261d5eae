//! The links and rkeys shared with one peer: add, test, delete, end (RFC 2.2, 3.5).
//!
//! ```text
//!   server                                        client
//!     │ ── CONFIRM LINK ───────────────────────────► │
//!     │ ◄────────────────────── CONFIRM LINK reply ─ │
//!     │ ── ADD LINK ───────────────────────────────► │   a second queue pair on either side
//!     │ ◄────────────────────────── ADD LINK reply ─ │   or a rejection
//!     │ ── ADD LINK CONTINUATION ──────────────────► │   what RMBs are called there
//!     │ ◄───────────── ADD LINK CONTINUATION reply ─ │
//!     │ ── CONFIRM LINK, on the new link ──────────► │
//!     │ ◄────────────────────── CONFIRM LINK reply ─ │   the link group is established
//! ```
//!
//! Links and rkeys change by exchanges of messages, and a group has one exchange under way at a
//! time (RFC 3.5.5.3). Whatever has to wait is noted on the link or the RMB that it concerns: a
//! link notes that it is to be deleted, an RMB that it is to be announced. So no queue can
//! overflow.
//!
//! - `dispatch` hands each message to its handler. The handlers are `confirm`, `add` with `pairs`
//!   and `retry`, `delete`, and `rkeys`, named after the LLC messages;
//! - `exchange` tracks the exchange under way, `group_link` one link, `rmbs` the rkeys of all RMBs;
//! - `openings` bounds how often the peer makes us open queue pairs;
//! - `ports` decides which port of ours may carry a further link;
//! - `version` encodes the same messages for SMC-Rv2;
//! - `timers` has the deadlines, `view` has what callers may read.
//!
//! Other places decide when a link sends TEST LINK ([`link`]), which port a link uses (`control`),
//! and what happens to connections when a link or a group ends (`engine`).

use core::time::Duration;

use crate::limits::{
    CLIENT_GOES_ON, CONFIRM_LINK_REPLY_WAIT, CONFIRM_LINK_WAIT, LINKS_PER_GROUP_MAX,
};
use crate::link::{self, Cause, Event, Keepalive, Link};
use crate::outbox::Outbox;
use crate::time::Instant;
use crate::vocabulary::{Gid, LinkNumber, LinkUserId, MacAddress, PeerId, QpAddress, Qpn};
use crate::wire::llc::{Llc, TestLink};

mod add;
mod confirm;
mod delete;
mod dispatch;
mod exchange;
mod group_link;
mod openings;
mod pairs;
mod ports;
mod retry;
mod rkeys;
mod rmbs;
mod timers;
mod version;
mod view;

pub use add::NoQueuePair;
use exchange::Exchange;
pub use group_link::LinkView;
use group_link::{GroupLink, is_down, port_of};
use openings::{Openings, Wanted};
use retry::KnownPorts;
use rkeys::{Announcement, Continuing};
pub use rmbs::{Full, RmbIndex};
use rmbs::{OurRmbs, PeerRmbs};
pub use version::Version;
pub use view::Symmetry;

/// Which side of the first contact we were. As long as the group lives, the server adds and deletes
/// its links (RFC 3.5.5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// We accepted the TCP connection.
    Server,
    /// We opened it.
    Client,
}

/// What both sides know of the first link when the group begins, and what we want.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setup {
    /// The peer.
    pub peer_id: PeerId,
    /// What was agreed on.
    pub version: Version,
    /// Our end of the first link.
    pub ours: QpAddress,
    /// The peer's end, as its Accept or Confirm named it.
    pub theirs: QpAddress,
    /// Our own name for the link.
    pub user_id: LinkUserId,
    /// Whether our RMB elements begin with an eye catcher. Linux peers decline that.
    pub eye_catcher: bool,
    /// When links are probed.
    pub keepalive: Keepalive,
    /// How long the group stays without connections. Deployed peers wait for
    /// [`IDLE_GROUP_SERVER`](crate::limits::IDLE_GROUP_SERVER) or
    /// [`IDLE_GROUP_CLIENT`](crate::limits::IDLE_GROUP_CLIENT).
    pub idle_wait: Duration,
    /// How many symmetric links we are willing to have, 2 to 8, in version 2 also 1; the smaller
    /// number of both sides counts. Deployed peers say 2.
    pub max_links: u8,
    /// How long after a failed attempt a further link is tried again (RFC C.8).
    pub retry_link: Duration,
    /// How long the first link may take to be confirmed, if the caller doubts that it will be;
    /// `None` for the usual time. Applications wait meanwhile.
    pub confirm_wait: Option<Duration>,
}

/// What the caller must do next on behalf of a link group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send this message over that link, as [`LinkGroup::encode`] puts it.
    Send(LinkNumber, Llc),
    /// The server has named our first link, which was [`UNNUMBERED`] so far.
    LinkNumbered(LinkNumber),
    /// The link carries connections. For the first link: tell the handshake that waits for it.
    LinkConfirmed(LinkNumber),
    /// The peer has answered all that we have asked on this link by TEST LINK: it carries messages
    /// in both directions.
    LinkProven(LinkNumber),
    /// Choose a port of ours for a further link, open a queue pair there, register every RMB for
    /// it, and answer with [`LinkGroup::link_opened`] or [`LinkGroup::link_refused`]. It replaces
    /// an earlier demand for the same number that the caller has not answered yet.
    OpenLink {
        /// What the link is called.
        number: LinkNumber,
        /// The port of the peer that it will lead to, if that is known: we are the client.
        peer: Option<(Gid, MacAddress)>,
    },
    /// Bring the queue pair to RTS and hand it to its poller, and answer with
    /// [`LinkGroup::link_connected`] or [`LinkGroup::link_unreachable`].
    ConnectLink {
        /// Which link.
        number: LinkNumber,
        /// The peer's end.
        theirs: QpAddress,
    },
    /// Move all connections to other links, then call [`LinkGroup::link_vacated`].
    VacateLink(LinkNumber),
    /// The link is down, or will never come up: move its connections to another one, and destroy
    /// its queue pair. [`Action::Terminate`] follows if it was the last. If a handshake waits for
    /// the link, tell the handshake, with what [`LinkGroup::may_decline`] says.
    LinkFailed(LinkNumber, Cause),
    /// The peer knows this RMB of ours: connections may use it.
    RmbConfirmed(RmbIndex),
    /// The peer has no room for this RMB of ours, or does not want it.
    RmbRefused(RmbIndex),
    /// The peer will not write to this RMB any more: it may be deregistered.
    RmbDeleted(RmbIndex),
    /// The peer has deleted RMBs, which it named by their rkeys on that link. Write to no RMB that
    /// [`LinkGroup::peer_rmb_at`] does not know.
    RkeysDeleted(LinkNumber),
    /// The group is over: once what it had to send is delivered, reset all connections and destroy
    /// all queue pairs.
    Terminate(Cause),
}

/// The number of a client's first link until the server has given it one.
pub const UNNUMBERED: LinkNumber = LinkNumber(0);

/// When the server repeats a CONFIRM LINK that was not answered. A Linux client that has just sent
/// its Confirm drops one that comes too early, and waits in vain.
const CONFIRM_LINK_REPEAT: Duration = Duration::from_secs(1);
const _: () = assert!(CONFIRM_LINK_REPEAT.as_millis() < CONFIRM_LINK_REPLY_WAIT.as_millis());

/// More actions than one input causes. Most actions come from a client whose links all fail at the
/// same moment. It reports each of them, asks the server to delete each over every link that it
/// does not know to have failed yet, and announces an RMB again over each of those.
const ACTIONS_MAX: usize = 96;
const _: () = {
    let links = LINKS_PER_GROUP_MAX as usize;
    let asked = links * (links - 1) / 2;
    let (failed, announced, port, end) = (links, links, 2, 1);
    assert!(asked + failed + announced + port + end < ACTIONS_MAX);
};

/// Where the group is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Server: the queue pair is not connected yet.
    Opening,
    /// The first link is being confirmed. A server says CONFIRM LINK once more at this time.
    Confirming { repeat_at: Option<Instant> },
    /// The first link is confirmed, and a second one is tried. A client waits for the offer.
    Founding { deadline: Option<Instant> },
    /// Carries connections.
    Established,
    /// Terminal.
    Terminated,
}

/// All that we share with one peer, but for memory.
///
/// - `handle_llc`, `traffic` and `link_broke` feed what happened on a link, `handle_timeout` feeds
///   time. The answers to actions and `connections_changed` feed what the caller knows.
///   `want_link`, `forget_ports`, `probe`, `delete_link`, `announce_rmb`, `withdraw_rmb` and
///   `shutdown` feed what the caller wants.
/// - `poll_action` drains what the caller must do. Call it until `None` after every input.
/// - `poll_timeout` says when to call `handle_timeout`, at the latest.
///
/// Inputs other than `traffic` must carry non-decreasing `now`. A terminated group swallows
/// everything. A group has about 40 KiB, most of it rkeys: keep it in a box.
#[derive(Clone, Debug)]
pub struct LinkGroup {
    // RFC 7609 2.2 #5: same server for all links
    role: Role,
    setup: Setup,
    phase: Phase,
    group_links: [Option<GroupLink>; LINKS_PER_GROUP_MAX as usize],
    /// Links that have left these places, until the caller has taken all actions.
    gone: [Option<LinkNumber>; LINKS_PER_GROUP_MAX as usize],
    /// The peer's ends of the links that were deleted last, the latest first.
    past: [Option<(Gid, MacAddress, Qpn)>; LINKS_PER_GROUP_MAX as usize],
    exchange: Option<Exchange>,
    announcement: Option<Announcement>,
    our_rmbs: OurRmbs,
    peer_rmbs: PeerRmbs,
    continuing: Option<Continuing>,
    /// Client: the place of the link that is being offered, if its rkeys came with the offer.
    reserved: Option<usize>,
    peer_eye_catcher: bool,
    /// The first contact has passed the point of no return (C.3).
    committed: bool,
    /// Server: when the client may begin to believe that it has passed.
    client_goes_on: Option<Instant>,
    /// Symmetric links at most, as agreed.
    max_links: u8,
    /// The number that was given last.
    last_number: u8,
    wanted: Wanted,
    openings: Openings,
    /// Server: when the link can be offered for which there was no token.
    open_at: Option<Instant>,
    known_ports: KnownPorts,
    /// When a further link is tried again.
    retry_at: Option<Instant>,
    /// Server: how many links in a row have failed soon after they came.
    short_lived: u8,
    /// A second link was confirmed before the group was established.
    confirmed_early: Option<LinkNumber>,
    /// How often in a row the peer refused an RMB of ours, and when we announce it again.
    retries: u32,
    again_at: Option<Instant>,
    connections: u32,
    idle_deadline: Option<Instant>,
    dropped: u64,
    actions: Outbox<Action, ACTIONS_MAX>,
}

impl LinkGroup {
    /// A group whose server we are. Its first link is `number`; say when its queue pair is
    /// connected with [`Self::link_connected`].
    ///
    /// # Panics
    ///
    /// If `number` is [`UNNUMBERED`].
    pub fn new_server(now: Instant, setup: Setup, number: LinkNumber) -> Self {
        assert_ne!(number, UNNUMBERED, "links of a server have numbers");
        // The deadline counts from `link_connected`.
        let wait = setup.confirm_wait.unwrap_or(CONFIRM_LINK_REPLY_WAIT);
        Self::new(Role::Server, setup, Phase::Opening, number, now + wait)
    }

    /// A group whose client we are: the queue pair is connected, and the Confirm goes out now. Its
    /// first link is [`UNNUMBERED`] until [`Action::LinkNumbered`].
    pub fn new_client(now: Instant, setup: Setup) -> Self {
        let phase = Phase::Confirming { repeat_at: None };
        let wait = setup.confirm_wait.unwrap_or(CONFIRM_LINK_WAIT);
        // RFC 7609 3.5.1.3 #4: client timer for first CONFIRM LINK
        // RFC 7609 C.7 #1: timer for each LLC request
        Self::new(Role::Client, setup, phase, UNNUMBERED, now + wait)
    }

    fn new(role: Role, setup: Setup, phase: Phase, number: LinkNumber, deadline: Instant) -> Self {
        let mut group_links = [None; LINKS_PER_GROUP_MAX as usize];
        group_links[0] = Some(GroupLink {
            number,
            link: Link::new(setup.keepalive, deadline),
            unanswered: 0,
            ours: setup.ours,
            theirs: setup.theirs,
            user_id: setup.user_id,
            asymmetric: false,
            confirmed_at: None,
            delete: None,
            asked: None,
        });
        let mut known_ports = KnownPorts::default();
        known_ports.note_used(port_of(setup.ours));
        Self {
            role,
            setup,
            phase,
            group_links,
            gone: [None; LINKS_PER_GROUP_MAX as usize],
            past: [None; LINKS_PER_GROUP_MAX as usize],
            exchange: None,
            announcement: None,
            our_rmbs: OurRmbs::new(),
            peer_rmbs: PeerRmbs::new(),
            continuing: None,
            reserved: None,
            peer_eye_catcher: false,
            committed: false,
            client_goes_on: None,
            max_links: setup.max_links.clamp(setup.version.links_min(), LINKS_PER_GROUP_MAX),
            last_number: number.0,
            wanted: Wanted::No,
            openings: Openings::new(),
            open_at: None,
            known_ports,
            retry_at: None,
            short_lived: 0,
            confirmed_early: None,
            retries: 0,
            again_at: None,
            connections: 0,
            idle_deadline: None,
            dropped: 0,
            actions: Outbox::new(),
        }
    }

    /// The queue pair of a server's first link is connected, so CONFIRM LINK goes out.
    fn first_link_connected(&mut self, now: Instant) {
        self.phase = Phase::Confirming { repeat_at: Some(now + CONFIRM_LINK_REPEAT) };
        self.client_goes_on = Some(now + CLIENT_GOES_ON);
        let wait = self.setup.confirm_wait.unwrap_or(CONFIRM_LINK_REPLY_WAIT);
        let [Some(group_link), ..] = &mut self.group_links else {
            unreachable!("a group begins with a link");
        };
        let number = group_link.number;
        // RFC 7609 3.5.1.5 #3: server timer for CONFIRM LINK reply
        // RFC 7609 C.7 #1: timer for each LLC request
        group_link.link = Link::new(self.setup.keepalive, now + wait);
        // RFC 7609 3.3 #10: server begins CONFIRM LINK
        // RFC 7609 3.5.1.5 #1: send CONFIRM LINK after Confirm
        self.send_confirm_link(number, false);
    }

    /// Says how many connections use the group now. A group without connections ends after a while.
    pub fn connections_changed(&mut self, now: Instant, count: u32) {
        self.connections = count;
        let idle = self.phase == Phase::Established && count == 0;
        // RFC 7609 2 #5: end idle link groups
        // RFC 7609 3.5.4 #3: server ends an empty group
        // RFC 7609 3.5.4 #4: keep an empty group by timer
        self.idle_deadline = idle.then(|| now + self.setup.idle_wait);
    }

    /// Something arrived on the link that is not an LLC message. Pollers report it late, so `now`
    /// may be earlier than at other inputs.
    pub fn traffic(&mut self, now: Instant, number: LinkNumber) {
        self.link_event(now, number, Event::Traffic);
    }

    /// The peer is suspected to be dead: asks for a sign of life within `wait`.
    pub fn probe(&mut self, now: Instant, number: LinkNumber, wait: Duration) {
        self.link_event(now, number, Event::Probe(wait));
    }

    /// The NIC reports that the link's queue pair is broken, or that its port is down.
    pub fn link_broke(&mut self, now: Instant, number: LinkNumber) {
        if self.find(number).is_some_and(|group_link| !is_down(group_link)) {
            // RFC 7609 2.3 #4: move at once, send DELETE LINK
            // RFC 7609 3.5.5.1.3 #2: delete link upon errors
            // RFC 7609 3.5.5.1.3 #3: delete links of downed RNIC
            // RFC 7609 C.7.1 #1: failed LLC send is a timeout
            self.link_lost(now, number, Cause::QueuePairBroke);
        }
    }

    /// What the caller must do next, oldest first.
    #[must_use]
    pub fn poll_action(&mut self) -> Option<Action> {
        let action = self.actions.pop();
        if action.is_none() {
            self.forget_gone();
        }
        action
    }

    /// One event for one link, and what follows for the group.
    fn link_event(&mut self, now: Instant, number: LinkNumber, event: Event) {
        if self.is_terminated() {
            return;
        }
        // The link may be gone: pollers report late, and a deadline for rkeys may outlive the link.
        let Some(group_link) = self.find_mut(number) else { return };
        match group_link.link.handle(now, event) {
            Some(link::Action::SendTestLink) => {
                group_link.unanswered += 1;
                let test = TestLink { reply: false, user_data: group_link.ours.gid.0 };
                self.actions.push(Action::Send(number, Llc::TestLink(test)));
            }
            Some(link::Action::Fail(cause)) => {
                self.actions.push(Action::LinkFailed(number, cause));
                let alive = |group_link: &GroupLink| match self.phase {
                    Phase::Opening | Phase::Confirming { .. } => !is_down(group_link),
                    // A link that is not confirmed yet cannot keep a group alive.
                    Phase::Founding { .. } | Phase::Established | Phase::Terminated => {
                        group_link.link.is_up()
                    }
                };
                // RFC 7609 2.2 #1: survive the loss of a link
                // RFC 7609 4.5.3 #4: move connections if probe fails
                if !self.group_links().any(alive) {
                    self.terminate(cause);
                }
            }
            None => {}
        }
    }

    fn terminate(&mut self, cause: Cause) {
        self.phase = Phase::Terminated;
        self.exchange = None;
        // RFC 7609 4.5.3 #5: reset connections without another link
        // RFC 7609 C.7.1 #17: no link for client's DELETE LINK: reset
        // RFC 7609 C.7.1 #21: no link for server's DELETE LINK: reset
        self.actions.push(Action::Terminate(cause));
    }

    /// Begins an exchange that was waiting, if none is under way.
    fn advance(&mut self, now: Instant) {
        let begun = match self.phase {
            Phase::Founding { deadline: None } | Phase::Established => true,
            Phase::Opening | Phase::Confirming { .. } | Phase::Founding { .. } => false,
            Phase::Terminated => false,
        };
        let is_idle = self.exchange.is_none();
        let leaving = self.role == Role::Server && self.exchange.is_some_and(Exchange::vacates);
        if !begun || !(is_idle || leaving) {
            return;
        }
        // RFC 7609 3.5.5.3 #5: one changing exchange at a time
        // RFC 7609 3.5.5.3 #6: one exchange: ADD LINK through CONFIRM LINK
        // RFC 7609 3.5.5.3 #7: one exchange: DELETE LINK and reply
        // RFC 7609 3.5.5.3 #8: no RKey exchange beside link changes
        let may_begin = is_idle && self.role == Role::Server && !self.rkeys_are_under_way();
        let doomed = self.group_links().find_map(|doomed| Some((doomed.number, doomed.delete?)));
        if let Some((number, order)) = doomed
            && may_begin
        {
            self.begin_delete(now, number, order);
        }
        // RFC 7609 3.5.1.6.2 #4: no data before DELETE LINK is answered
        // RFC 7609 C.7.1 #3: delete unconfirmed second link before data
        // RFC 7609 C.7.1 #10: client deletes unconfirmed second link
        let told = self.group_links().all(|group_link| group_link.asked.is_none());
        if let Phase::Founding { .. } = self.phase
            && self.exchange.is_none()
            && told
        {
            self.establish(now);
        }
        if self.wanted != Wanted::No && may_begin && self.exchange.is_none() {
            self.begin_add(now);
        }
        if self.known_ports.is_untold() && self.phase == Phase::Established {
            self.tell_of_port(now);
        }
        // RFC 7609 3.5.5.3 #9: RKey exchanges of both may overlap
        if (self.exchange.is_none() || leaving) && self.again_at.is_none() {
            self.begin_rkeys(now);
        }
    }

    /// The first contact is over: connections may use the group.
    fn establish(&mut self, now: Instant) {
        self.phase = Phase::Established;
        // RFC 7609 2.2 #3: take part with a single RNIC
        // RFC 7609 2.2.1 #1: run a group with one link
        // RFC 7609 C.3 #2: client: no fallback after ADD LINK reply
        self.committed = true;
        self.connections_changed(now, self.connections);
        let second = self.confirmed_early.take();
        let first = self.group_links().find(|one| one.is_of_use() && Some(one.number) != second);
        let first = first.map(|group_link| group_link.number);
        for number in first.into_iter().chain(second) {
            self.actions.push(Action::LinkConfirmed(number));
        }
    }
}

#[cfg(test)]
mod tests;
