//! The links and rkeys shared with one peer: add, test, delete, end (RFC 2.2, 3.5).
//!
//! ```text
//!   server                                   client
//!     │ ── CONFIRM LINK ──────────────────────► │
//!     │ ◄───────────────── CONFIRM LINK reply ─ │
//!     │ ── ADD LINK ──────────────────────────► │   the link group is established
//!     │ ◄─────────── ADD LINK reply, rejected ─ │   on both sides from here on
//! ```
//!
//! This version keeps one link per group. It still speaks the whole of the first contact: a client
//! that hears no ADD LINK waits for one, and a server that gets no answer does too, each for
//! seconds in which deployed peers serve nobody else. So our server offers a second link that no
//! client can accept, and our client rejects whatever second link it is offered.
//!
//! - `llc` sends and answers the messages;
//! - [`rkeys`] remembers what RMBs of the peer are called.
//!
//! Not here: when a link asks for a sign of life ([`link`]), and what it means for
//! connections when a group ends (`engine`).

use core::time::Duration;

use crate::error::PeerMisbehaved;
use crate::limits::{CONFIRM_LINK_REPLY_WAIT, CONFIRM_LINK_WAIT, LINKS_MAX};
use crate::link::{self, Cause, Event, Keepalive, Link};
use crate::outbox::Outbox;
use crate::time::Instant;
use crate::vocabulary::{Gid, LinkNumber, LinkUserId, MacAddress, PeerId, Qpn, Rkey};
use crate::wire::Malformed;
use crate::wire::llc::{DeleteLink, DeleteReason, LEN, Llc, TestLink};

mod llc;
pub mod rkeys;

use rkeys::{Full, PeerRkeys};

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
    /// Our port.
    pub mac: MacAddress,
    /// Our port.
    pub gid: Gid,
    /// Our queue pair.
    pub qpn: Qpn,
    /// The peer's queue pair, as its Accept or Confirm named it.
    pub peer_qpn: Qpn,
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
}

/// What the caller must do next on behalf of a link group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send this message over that link.
    Send(LinkNumber, Llc),
    /// The server has named our first link, which was [`UNNUMBERED`] so far.
    LinkNumbered(LinkNumber),
    /// The link carries connections: tell the handshake that waits for it.
    LinkConfirmed(LinkNumber),
    /// The link is down. [`Action::Terminate`] follows if it was the last. If a handshake waits for
    /// it, tell that one, with [`LinkGroup::is_committed`].
    LinkFailed(LinkNumber, Cause),
    /// The peer has another RMB, at this address.
    RkeyAdded(Rkey, u64),
    /// The peer no longer has this RMB: nothing may be written to it.
    RkeyDeleted(Rkey),
    /// The group is over: once what it had to send is delivered, reset all connections and destroy
    /// all queue pairs.
    Terminate(Cause),
}

/// The number of a client's first link until the server has given it one.
pub const UNNUMBERED: LinkNumber = LinkNumber(0);

/// When the server repeats a CONFIRM LINK that was not answered. A Linux client that has just sent
/// its Confirm drops one that comes too early, and waits in vain.
const CONFIRM_LINK_REPEAT: Duration = Duration::from_secs(1);
const _: () = assert!(CONFIRM_LINK_REPEAT.as_secs() < CONFIRM_LINK_REPLY_WAIT.as_secs());

/// The most actions one input causes: a DELETE RKEY of eight keys, and its answer.
const ACTIONS_MAX: usize = 16;

/// Where the group is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Server: the queue pair is not connected yet.
    Opening,
    /// The first link is being confirmed. A server says CONFIRM LINK once more at this time.
    Confirming { repeat_at: Option<Instant> },
    /// The first link is confirmed. Client: the server must offer a second one. Server: the client
    /// must answer the offer.
    AddingLink { deadline: Instant },
    /// Carries connections.
    Established,
    /// DELETE LINK is out for this link, for that cause.
    DeletingLink { link: LinkNumber, cause: Cause, deadline: Instant },
    /// Terminal.
    Terminated,
}

/// One link and what the group knows of it.
#[derive(Clone, Copy, Debug)]
struct Member {
    number: LinkNumber,
    link: Link,
    /// TEST LINKs that were sent and not answered.
    unanswered: u32,
}

/// All that we share with one peer, but for memory.
///
/// - `handle_llc`, `traffic` and `link_broke` feed what happened on a link, `handle_timeout` feeds
///   time; `link_connected`, `connections_changed`, `probe`, `delete_link` and `shutdown` feed what
///   the caller knows or wants.
/// - `poll_action` drains what the caller must do. Call it until `None` after every input.
/// - `poll_timeout` says when to call `handle_timeout`, at the latest.
///
/// Inputs must carry non-decreasing `now`. A terminated group swallows everything.
#[derive(Clone, Debug)]
pub struct LinkGroup {
    role: Role,
    setup: Setup,
    phase: Phase,
    members: [Option<Member>; LINKS_MAX as usize],
    peer_rkeys: PeerRkeys,
    peer_eye_catcher: bool,
    /// The point of no return of the first contact is behind (C.3).
    committed: bool,
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
        Self::new(Role::Server, setup, Phase::Opening, number, now + CONFIRM_LINK_REPLY_WAIT)
    }

    /// A group whose client we are: the queue pair is connected, and the Confirm goes out now. Its
    /// first link is [`UNNUMBERED`] until [`Action::LinkNumbered`].
    pub fn new_client(now: Instant, setup: Setup) -> Self {
        let phase = Phase::Confirming { repeat_at: None };
        // RFC 7609 3.5.1.3-4, C.7-1
        Self::new(Role::Client, setup, phase, UNNUMBERED, now + CONFIRM_LINK_WAIT)
    }

    fn new(role: Role, setup: Setup, phase: Phase, number: LinkNumber, deadline: Instant) -> Self {
        let link = Link::new(setup.keepalive, deadline);
        let mut members = [None; LINKS_MAX as usize];
        members[0] = Some(Member { number, link, unanswered: 0 });
        Self {
            role,
            setup,
            phase,
            members,
            peer_rkeys: PeerRkeys::new(),
            peer_eye_catcher: false,
            committed: false,
            connections: 0,
            idle_deadline: None,
            dropped: 0,
            actions: Outbox::new(),
        }
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

    /// The links of the group and their states, those that are down included.
    pub fn links(&self) -> impl Iterator<Item = (LinkNumber, link::State)> {
        self.members.iter().flatten().map(|member| (member.number, member.link.state()))
    }

    /// Where the peer's RMB with this key begins, if it is known.
    pub fn peer_rmb_address(&self, rkey: Rkey) -> Option<u64> {
        self.peer_rkeys.address(rkey)
    }

    /// Remembers an RMB that the peer told by Accept or Confirm rather than by CONFIRM RKEY.
    ///
    /// # Errors
    ///
    /// [`Full`] if no more can be remembered: decline the connection.
    pub fn learn_rkey(&mut self, rkey: Rkey, address: u64) -> Result<(), Full> {
        self.peer_rkeys.learn(rkey, address)
    }

    /// Server: the queue pair of the first link is connected, so CONFIRM LINK goes out.
    ///
    /// # Panics
    ///
    /// If that is known already.
    pub fn link_connected(&mut self, now: Instant) {
        assert_eq!(self.phase, Phase::Opening, "a link connects once");
        self.phase = Phase::Confirming { repeat_at: Some(now + CONFIRM_LINK_REPEAT) };
        let [Some(member), ..] = &mut self.members else {
            unreachable!("a group begins with a link");
        };
        let number = member.number;
        // RFC 7609 3.5.1.5-3, C.7-1
        member.link = Link::new(self.setup.keepalive, now + CONFIRM_LINK_REPLY_WAIT);
        // RFC 7609 3.3-10, 3.5.1.5-1
        self.send_confirm_link(number, false);
    }

    /// How many connections use the group now. A group that stays without is ended.
    pub fn connections_changed(&mut self, now: Instant, count: u32) {
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
    }

    /// Takes one link out of the group; with the last one the group ends. The server asks its
    /// client, a client asks its server to ask it (RFC 3.5.5.1.3, 3.5.5.1.4).
    pub fn delete_link(&mut self, now: Instant, number: LinkNumber, reason: DeleteReason) {
        if self.phase == Phase::Established && self.find(number).is_some() {
            self.ask_to_delete(now, number, Cause::DeletedByUs, reason, true);
        }
    }

    /// Ends the group: DELETE LINK for all links goes out, nobody waits for an answer.
    ///
    /// # Specification
    ///
    /// RFC 7609, 3.5.5.1.3 and 4.8.3.
    pub fn shutdown(&mut self, now: Instant, reason: DeleteReason) {
        self.end(now, Cause::DeletedByUs, reason);
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
        let result = self.dispatch(now, number, message);
        // RFC 7609 C.7.1-35
        if result.is_err() {
            self.link_event(now, number, Event::Fail(Cause::PeerMisbehaved));
        }
        result
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
            Phase::AddingLink { deadline } | Phase::DeletingLink { deadline, .. } => Some(deadline),
            Phase::Confirming { repeat_at } => repeat_at,
            Phase::Established => None,
        };
        let links = self.members.iter().flatten().filter_map(|member| member.link.poll_timeout());
        links.chain(phase).chain(self.idle_deadline).min()
    }

    /// Does what is due at this time.
    pub fn handle_timeout(&mut self, now: Instant) {
        match self.phase {
            Phase::Opening | Phase::Terminated => return,
            // RFC 7609 C.8-1
            // C.8: the group goes on without a second link.
            Phase::AddingLink { deadline } if deadline <= now => self.establish(now),
            Phase::DeletingLink { link, cause, deadline } if deadline <= now => {
                self.link_event(now, link, Event::Fail(cause));
            }
            Phase::Confirming { repeat_at: Some(repeat_at) } if repeat_at <= now => {
                self.phase = Phase::Confirming { repeat_at: None };
                for member in self.members.into_iter().flatten() {
                    self.send_confirm_link(member.number, false);
                }
            }
            Phase::AddingLink { .. }
            | Phase::DeletingLink { .. }
            | Phase::Confirming { .. }
            | Phase::Established => {}
        }
        for member in self.members.into_iter().flatten() {
            self.link_event(now, member.number, Event::Timeout);
        }
        if self.idle_deadline.is_some_and(|deadline| deadline <= now) {
            self.end(now, Cause::Idle, DeleteReason::PROGRAM);
        }
    }

    /// One event for one link, and what follows for the group.
    fn link_event(&mut self, now: Instant, number: LinkNumber, event: Event) {
        let test = TestLink { reply: false, user_data: self.setup.gid.0 };
        let Some(member) = self.find_mut(number) else { return };
        match member.link.handle(now, event) {
            Some(link::Action::SendTestLink) => {
                member.unanswered += 1;
                self.actions.push(Action::Send(number, Llc::TestLink(test)));
            }
            Some(link::Action::Fail(cause)) => {
                self.actions.push(Action::LinkFailed(number, cause));
                let alive = |member: &Member| !matches!(member.link.state(), link::State::Down(_));
                if !self.members.iter().flatten().any(alive) {
                    self.phase = Phase::Terminated;
                    // RFC 7609 4.5.3-5, C.7.1-17, C.7.1-21
                    self.actions.push(Action::Terminate(cause));
                }
            }
            None => {}
        }
    }

    /// Tells the peer that all is over, and ends it.
    fn end(&mut self, now: Instant, cause: Cause, reason: DeleteReason) {
        if let Some(link) = self.any_link_up() {
            // RFC 7609 3.5.4-6, 3.5.4-10
            // RFC 7609 A.3.4-4
            let none = UNNUMBERED;
            let all = DeleteLink { reply: false, all: true, orderly: true, link: none, reason };
            self.actions.push(Action::Send(link, Llc::DeleteLink(all)));
        }
        for member in self.members.into_iter().flatten() {
            // RFC 7609 C.7.1-19
            self.link_event(now, member.number, Event::Fail(cause));
        }
        assert!(self.is_terminated(), "a group without links is over");
    }

    /// The first contact is over: connections may use the group.
    fn establish(&mut self, now: Instant) {
        self.phase = Phase::Established;
        // RFC 7609 2.2-3, 2.2.1-1, C.3-2
        self.committed = true;
        self.connections_changed(now, self.connections);
        if let Some(number) = self.any_link_up() {
            self.actions.push(Action::LinkConfirmed(number));
        }
    }

    fn any_link_up(&self) -> Option<LinkNumber> {
        let up = self.members.iter().flatten().find(|member| member.link.is_up());
        up.map(|member| member.number)
    }

    fn find(&self, number: LinkNumber) -> Option<&Member> {
        self.members.iter().flatten().find(|member| member.number == number)
    }

    fn find_mut(&mut self, number: LinkNumber) -> Option<&mut Member> {
        self.members.iter_mut().flatten().find(|member| member.number == number)
    }
}

#[cfg(test)]
mod tests;
