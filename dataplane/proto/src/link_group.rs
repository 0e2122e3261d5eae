//! The links and rkeys shared with one peer: add, test, delete, end (RFC 2.2, 3.5).
//!
//! ```text
//!   server                                   client
//!     │ ── CONFIRM LINK ──────────────────────► │   first contact
//!     │ ◄───────────────── CONFIRM LINK reply ─ │
//!     │ ── ADD LINK ──────────────────────────► │   rejected: the group is established with one link
//!     │ ◄─────────────────────ADD LINK reply ─  │
//!     │ ── ADD LINK CONTINUATION ─────────────► │   keys of all RMBs, two at a time, both ways
//!     │ ◄─────── ADD LINK CONTINUATION reply ─  │
//!     │ ── CONFIRM LINK, on the new link ─────► │
//!     │ ◄───────────────── CONFIRM LINK reply ─ │   established with two
//! ```
//!
//! The server owns every change of the group's links; what a client sends are requests. A server
//! without a port for a second link still offers one, which no client can accept: deployed clients
//! wait seconds for an offer, in which they serve nobody else.
//!
//! - `members`: which links there are, which ports they use, what follows when one fails;
//! - `confirm`, `add`, `delete`: the exchanges that change links;
//! - `announce`: the exchanges that change RMBs; [`rkeys`] remembers what RMBs are called;
//! - `exchange`: what runs, what waits, and what every deadline means.
//!
//! Not here: when a link asks for a sign of life ([`link`]), and what it means for connections
//! when a link or the group ends (`engine`).

use core::time::Duration;

use crate::error::PeerMisbehaved;
use crate::limits::{CONFIRM_LINK_REPLY_WAIT, CONFIRM_LINK_WAIT, LINKS_MAX};
use crate::link::{self, Cause, Event, Keepalive};
use crate::outbox::Outbox;
use crate::time::Instant;
use crate::vocabulary::{Gid, LinkNumber, LinkUserId, MacAddress, PeerId, QpAddress, Rkey};
use crate::wire::Malformed;
use crate::wire::llc::{DeleteReason, LEN, Llc, TestLink};

mod add;
mod announce;
mod confirm;
mod delete;
mod exchange;
mod members;
pub mod rkeys;

use announce::{Incoming, RkeyExchange};
use exchange::Exchange;
pub use members::Symmetry;
use members::{Member, PLACES};
pub use rkeys::RmbIndex;
use rkeys::{OwnRmbs, PeerRmbs};

/// Which side of the first contact we were. It decides for the life of the group who adds and
/// deletes links (RFC 3.5.5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// We accepted the TCP connection, and own the procedures.
    Server,
    /// We opened it.
    Client,
}

/// What both sides know of the first link when the group begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setup {
    /// The peer.
    pub peer_id: PeerId,
    /// Our end of the first link.
    pub ours: QpAddress,
    /// The peer's end of it, as its Accept or Confirm named it.
    pub theirs: QpAddress,
    /// Our own name for the first link.
    pub user_id: LinkUserId,
    /// Whether our RMB elements begin with an eye catcher. Linux peers decline that.
    pub eye_catcher: bool,
    /// When links are probed.
    pub keepalive: Keepalive,
    /// How long the group stays without connections. Deployed peers wait for
    /// [`IDLE_GROUP_SERVER`](crate::limits::IDLE_GROUP_SERVER) or
    /// [`IDLE_GROUP_CLIENT`](crate::limits::IDLE_GROUP_CLIENT).
    pub idle_wait: Duration,
    /// How many symmetric links we are willing to have, 1 to 8. With 1 we tell the peer 2, as
    /// everybody must, and never have a second one.
    pub max_links: u8,
    /// How long after a failure a further link is tried again (RFC C.8).
    pub retry_link: Duration,
}

/// What the caller must do next on behalf of a link group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send this message over that link.
    Send(LinkNumber, Llc),
    /// The server has named our first link, which was [`UNNUMBERED`] so far.
    LinkNumbered(LinkNumber),
    /// The link carries connections from now on. With the first link the first contact is over:
    /// tell the handshake that waits for it.
    LinkConfirmed(LinkNumber),
    /// Choose a port, open a queue pair on it, register every RMB of ours there; answer with
    /// [`LinkGroup::link_opened`] or [`LinkGroup::link_refused`].
    OpenLink {
        /// The link that is to be added.
        number: LinkNumber,
        /// The server's port of its offer, if we are the client. A client takes a port that the
        /// group does not use yet, or any. A server, which has `None` here, does the same.
        peer: Option<(Gid, MacAddress)>,
    },
    /// Bring the queue pair to the peer's and hand it to its poller; answer with
    /// [`LinkGroup::link_connected`] or [`LinkGroup::link_unreachable`].
    ConnectLink {
        /// The link that is being added.
        number: LinkNumber,
        /// The peer's end of it.
        theirs: QpAddress,
    },
    /// The link is going to be deleted: move its connections to another one, then call
    /// [`LinkGroup::link_vacated`]. [`Action::LinkFailed`] follows.
    VacateLink(LinkNumber),
    /// The link is down: move its connections to another one that is up, then destroy its queue
    /// pair. [`Action::Terminate`] follows if it was the last. If a handshake waits for this link,
    /// tell that one, with [`LinkGroup::is_committed`].
    LinkFailed(LinkNumber, Cause),
    /// The peer knows this RMB of ours on all links: connections may use it.
    RmbConfirmed(RmbIndex),
    /// The peer does not take this RMB of ours, which the group forgets.
    RmbRefused(RmbIndex),
    /// The peer will not write to this RMB of ours any more.
    RmbDeleted(RmbIndex),
    /// The peer no longer has the RMB with this key on this link: nothing may be written to it,
    /// by no link.
    RkeyDeleted(LinkNumber, Rkey),
    /// The group is over: once what it had to send is delivered, reset all connections and destroy
    /// all queue pairs. No RMB is deleted any more.
    Terminate(Cause),
}

/// Why there is no queue pair for a further link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// No port could carry it. Another try follows [`LinkGroup::want_link`].
    NoPort,
    /// Out of memory or queue pairs. Another try follows by itself.
    Exhausted,
}

/// The number of a client's first link until the server has given it one.
pub const UNNUMBERED: LinkNumber = LinkNumber(0);

/// The most actions one input causes: the end of all links, with DELETE LINK over each, and what
/// was answered before.
const ACTIONS_MAX: usize = 48;

/// Where the group is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Server: the queue pair is not connected yet.
    Opening,
    /// The first link is being confirmed. A server says CONFIRM LINK once more at this time.
    Confirming { repeat_at: Option<Instant> },
    /// The first link is confirmed, and a second one is tried. With a deadline, the peer must speak:
    /// a server offers, a client answers an offer. Without one, an exchange has its own.
    AddingLink { deadline: Option<Instant> },
    /// Carries connections.
    Established,
    /// Terminal.
    Terminated,
}

/// All that we share with one peer, but for memory.
///
/// - `handle_llc`, `traffic` and `link_broke` feed what happened on a link, `handle_timeout` feeds
///   time; `connections_changed`, `probe`, `want_link`, `delete_link`, `shutdown`, `own_rmb`,
///   `announce_rmb` and `withdraw_rmb` feed what the caller knows or wants; `link_opened`,
///   `link_refused`, `link_connected`, `link_unreachable` and `link_vacated` answer actions.
/// - `poll_action` drains what the caller must do. Call it until `None` after every input.
/// - `poll_timeout` says when to call `handle_timeout`, at the latest.
///
/// Inputs must carry non-decreasing `now`, and may come at any time: what cannot be now waits
/// inside. A terminated group swallows everything.
///
/// A group is about 40 KiB, most of it what 255 RMBs of the peer are called on 9 links. Box it.
#[derive(Clone, Debug)]
pub struct LinkGroup {
    role: Role,
    setup: Setup,
    phase: Phase,
    members: [Option<Member>; PLACES],
    exchange: Exchange,
    rkey_exchange: Option<RkeyExchange>,
    incoming: Option<Incoming>,
    peer_rmbs: PeerRmbs,
    own_rmbs: OwnRmbs,
    peer_eye_catcher: bool,
    /// How many symmetric links there may be; agreed once the first link is confirmed.
    links_limit: u8,
    /// A link should be added, or asked for, as soon as that can be.
    wants_link: bool,
    /// When a link is tried again that could not be added (C.8).
    retry_at: Option<Instant>,
    /// A port of ours that the group does not use, as far as we know.
    spare_port: Option<(Gid, MacAddress)>,
    last_number: u8,
    serial: u32,
    /// The point of no return of the first contact is behind (C.3).
    committed: bool,
    connections: u32,
    idle_deadline: Option<Instant>,
    dropped: u64,
    keys_unknown: u64,
    actions: Outbox<Action, ACTIONS_MAX>,
}

/// One link, as operators see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkView {
    /// Its number.
    pub number: LinkNumber,
    /// Where it is in its life.
    pub state: link::State,
    /// Our end.
    pub ours: QpAddress,
    /// The peer's end, once it is known.
    pub theirs: Option<QpAddress>,
    /// Whether it shares a port with an older link.
    pub asymmetric: bool,
}

impl LinkGroup {
    /// A group whose server we are. Its first link is `number`; say when its queue pair is
    /// connected with [`Self::link_connected`].
    ///
    /// # Panics
    ///
    /// If `number` is [`UNNUMBERED`], or the setup wants no or too many links.
    pub fn new_server(now: Instant, setup: Setup, number: LinkNumber) -> Self {
        assert_ne!(number, UNNUMBERED, "links of a server have numbers");
        // The deadline counts from `link_connected`.
        Self::new(Role::Server, setup, Phase::Opening, number, now + CONFIRM_LINK_REPLY_WAIT)
    }

    /// A group whose client we are: the queue pair is connected, and the Confirm goes out now. Its
    /// first link is [`UNNUMBERED`] until [`Action::LinkNumbered`].
    ///
    /// # Panics
    ///
    /// If the setup wants no or too many links.
    pub fn new_client(now: Instant, setup: Setup) -> Self {
        let phase = Phase::Confirming { repeat_at: None };
        // RFC 7609 3.5.1.3-4, C.7-1
        Self::new(Role::Client, setup, phase, UNNUMBERED, now + CONFIRM_LINK_WAIT)
    }

    fn new(role: Role, setup: Setup, phase: Phase, number: LinkNumber, deadline: Instant) -> Self {
        assert!((1..=LINKS_MAX).contains(&setup.max_links), "RFC 2.2.2: 1 to 8 links");
        let mut group = Self {
            role,
            setup,
            phase,
            members: [None; PLACES],
            exchange: Exchange::Idle,
            rkey_exchange: None,
            incoming: None,
            peer_rmbs: PeerRmbs::new(),
            own_rmbs: OwnRmbs::new(),
            peer_eye_catcher: false,
            links_limit: setup.max_links,
            wants_link: false,
            retry_at: None,
            spare_port: None,
            last_number: number.0,
            serial: 0,
            committed: false,
            connections: 0,
            idle_deadline: None,
            dropped: 0,
            keys_unknown: 0,
            actions: Outbox::new(),
        };
        let Setup { ours, theirs, user_id, .. } = setup;
        let first = group.new_member(deadline, number, ours, Some(theirs), user_id);
        group.members[0] = Some(first);
        group
    }

    /// Which side we are.
    pub fn role(&self) -> Role {
        self.role
    }

    /// The peer.
    pub fn peer_id(&self) -> PeerId {
        self.setup.peer_id
    }

    /// Whether connections may join.
    pub fn is_established(&self) -> bool {
        self.phase == Phase::Established
    }

    /// Whether the group is over.
    pub fn is_terminated(&self) -> bool {
        self.phase == Phase::Terminated
    }

    /// Whether the point of no return of the first contact is behind: a failure of the link now
    /// resets its first connection instead of declining it.
    ///
    /// # Specification
    ///
    /// RFC 7609, C.3. We count from sending ADD LINK, not from its completion: nobody tells us.
    pub fn is_committed(&self) -> bool {
        self.committed
    }

    /// Whether the peer's RMB elements begin with an eye catcher. Known once a link is confirmed.
    pub fn peer_eye_catcher(&self) -> bool {
        self.peer_eye_catcher
    }

    /// Messages that fitted no procedure under way, and were ignored.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Keys of ours that the peer did not know when we deleted them.
    pub fn keys_unknown(&self) -> u64 {
        self.keys_unknown
    }

    /// The links of the group, those that are down and not yet deleted included.
    pub fn links(&self) -> impl Iterator<Item = LinkView> {
        let asymmetric = self.asymmetric();
        self.present().map(move |member| LinkView {
            number: member.number,
            state: member.link.state(),
            ours: member.ours,
            theirs: member.theirs,
            asymmetric: Some(member.number) == asymmetric,
        })
    }

    /// Whether connections may use this link.
    pub fn is_link_up(&self, number: LinkNumber) -> bool {
        self.find(number).is_some_and(Member::is_up)
    }

    /// How many connections use the group now. A group that stays without is ended.
    pub fn connections_changed(&mut self, now: Instant, count: u32) {
        self.connections_counted(now, count);
    }

    fn connections_counted(&mut self, now: Instant, count: u32) {
        self.connections = count;
        let idle = self.phase == Phase::Established && count == 0;
        // RFC 7609 2-5, 3.5.4-3, 3.5.4-4
        self.idle_deadline = idle.then(|| now + self.setup.idle_wait);
    }

    /// Something arrived on the link that is not an LLC message.
    pub fn traffic(&mut self, now: Instant, number: LinkNumber) {
        self.link_event(now, number, Event::Traffic);
    }

    /// The peer is suspected to be dead: asks for a sign of life within `wait`.
    pub fn probe(&mut self, now: Instant, number: LinkNumber, wait: Duration) {
        self.link_event(now, number, Event::Probe(wait));
    }

    /// The NIC reports that the link's queue pair is broken.
    pub fn link_broke(&mut self, now: Instant, number: LinkNumber) {
        // RFC 7609 3.5.5.1.3-2, C.7.1-1
        self.link_event(now, number, Event::Fail(Cause::QueuePairBroke));
        self.proceed(now);
    }

    /// Takes in 44 bytes that arrived on a link and are no CDC message.
    ///
    /// # Errors
    ///
    /// As [`Self::handle_llc`]; bytes that are no message, and may not be discarded, are an offence
    /// too (C.7.1, last entry).
    pub fn handle_bytes(
        &mut self,
        now: Instant,
        number: LinkNumber,
        bytes: &[u8; LEN],
    ) -> Result<(), PeerMisbehaved> {
        match Llc::decode(bytes) {
            Ok(message) => self.handle_llc(now, number, &message),
            // RFC 7609 3.3-9, C.7.1-34
            Err(Malformed::Ignorable(_)) => {
                self.dropped += 1;
                self.traffic(now, number);
                Ok(())
            }
            Err(malformed) => {
                self.link_event(now, number, Event::Fail(Cause::PeerMisbehaved));
                self.proceed(now);
                Err(malformed.into())
            }
        }
    }

    /// Takes in a message that arrived on a link.
    ///
    /// # Errors
    ///
    /// [`PeerMisbehaved`] is for the log: the link is down, as the actions say (C.7.1).
    pub fn handle_llc(
        &mut self,
        now: Instant,
        number: LinkNumber,
        message: &Llc,
    ) -> Result<(), PeerMisbehaved> {
        if self.phase == Phase::Terminated || self.find(number).is_none() {
            return Ok(());
        }
        self.link_event(now, number, Event::Traffic);
        if self.is_deaf(number, message) {
            self.dropped += 1;
            return Ok(());
        }
        let result = self.dispatch(now, number, message);
        // RFC 7609 C.7.1-35
        if result.is_err() {
            self.link_event(now, number, Event::Fail(Cause::PeerMisbehaved));
        }
        self.proceed(now);
        result
    }

    /// Whether a message comes too late: the link is down, or the client has asked to delete it.
    // RFC 7609 C.7.1-27
    fn is_deaf(&self, number: LinkNumber, message: &Llc) -> bool {
        let Some(member) = self.find(number) else { return true };
        let asked = member.doom.is_some_and(|doom| doom.asked.is_some());
        let delete = match message {
            Llc::DeleteLink(delete) => Some(delete),
            Llc::ConfirmLink(_)
            | Llc::AddLink(_)
            | Llc::AddLinkContinuation(_)
            | Llc::ConfirmRkey(_)
            | Llc::ConfirmRkeyContinuation(_)
            | Llc::DeleteRkey(_)
            | Llc::TestLink(_) => None,
        };
        match member.link.state() {
            link::State::Down(_) => !delete.is_some_and(|delete| delete.all),
            link::State::Confirming { .. }
            | link::State::Active { .. }
            | link::State::Probing { .. } => {
                asked && delete.is_none() && !matches!(message, Llc::TestLink(_))
            }
        }
    }

    fn dispatch(
        &mut self,
        now: Instant,
        on: LinkNumber,
        message: &Llc,
    ) -> Result<(), PeerMisbehaved> {
        match message {
            Llc::ConfirmLink(confirm) => self.handle_confirm_link(now, on, confirm)?,
            Llc::AddLink(add) => self.handle_add_link(now, on, add)?,
            Llc::AddLinkContinuation(more) => self.handle_continuation(now, on, more)?,
            Llc::DeleteLink(delete) => self.handle_delete_link(now, on, delete),
            Llc::ConfirmRkey(confirm) => self.handle_confirm_rkey(now, on, confirm),
            Llc::ConfirmRkeyContinuation(more) => {
                self.handle_confirm_rkey_continuation(now, on, more);
            }
            Llc::DeleteRkey(delete) => self.handle_delete_rkey(on, delete),
            Llc::TestLink(test) => self.handle_test_link(on, test)?,
        }
        Ok(())
    }

    fn handle_test_link(
        &mut self,
        on: LinkNumber,
        message: &TestLink,
    ) -> Result<(), PeerMisbehaved> {
        if !message.reply {
            // RFC 7609 3.3-4, 3.5.5.3-1, 3.5.5.3.1-1, 3.5.5.3.2-1, 3.5.5.3.3-1, A.3.8-2
            self.send(on, Llc::TestLink(TestLink { reply: true, ..*message }));
            return Ok(());
        }
        let ours = self.setup.ours.gid.0;
        let Some(member) = self.find_mut(on) else { return Ok(()) };
        if member.unanswered == 0 {
            self.dropped += 1;
            return Ok(());
        }
        member.unanswered -= 1;
        // RFC 7609 C.7.1-33
        if message.user_data == ours { Ok(()) } else { Err(PeerMisbehaved::WrongEcho) }
    }

    fn send(&mut self, on: LinkNumber, message: Llc) {
        self.actions.push(Action::Send(on, message));
    }

    /// What the caller must do next, oldest first.
    #[must_use]
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop()
    }

    /// When to call [`Self::handle_timeout`], at the latest.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let phase = match self.phase {
            Phase::Opening | Phase::Terminated => return None,
            Phase::AddingLink { deadline } => deadline,
            Phase::Confirming { repeat_at } => repeat_at,
            Phase::Established => None,
        };
        let links = self.present().filter_map(|member| member.link.poll_timeout());
        // A link that joins has no deadline of its own.
        let links = links.filter(|deadline| *deadline != Instant(u64::MAX));
        let exchange = self.exchange_timeout();
        links.chain(phase).chain(exchange).chain(self.idle_deadline).min()
    }

    /// Does what is due at this time.
    pub fn handle_timeout(&mut self, now: Instant) {
        match self.phase {
            Phase::Opening | Phase::Terminated => return,
            // RFC 7609 C.8-1
            // C.8: the group goes on without a second link.
            Phase::AddingLink { deadline: Some(deadline) } if deadline <= now => {
                self.phase = Phase::AddingLink { deadline: None };
            }
            Phase::Confirming { repeat_at: Some(repeat_at) } if repeat_at <= now => {
                self.phase = Phase::Confirming { repeat_at: None };
                for member in self.members.into_iter().flatten() {
                    self.send_confirm_link(member.number, false);
                }
            }
            Phase::AddingLink { .. } | Phase::Confirming { .. } | Phase::Established => {}
        }
        for member in self.members.into_iter().flatten().filter(|member| !member.gone) {
            self.link_event(now, member.number, Event::Timeout);
        }
        self.exchange_expired(now);
        if self.idle_deadline.is_some_and(|deadline| deadline <= now) {
            self.end(now, Cause::Idle, DeleteReason::PROGRAM);
        }
        self.proceed(now);
    }
}

#[cfg(test)]
mod tests;
