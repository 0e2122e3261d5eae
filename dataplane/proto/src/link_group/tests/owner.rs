//! The owner of a link group, played by a test: does what the group wants, in whatever order and
//! with whatever success, and watches over its time. What the peer says is up to the caller.
//!
//! The fuzz target for LLC includes this file, too (`tests/fuzz/targets/llc.rs`).

use std::time::Duration;
use std::vec;
use std::vec::Vec;

use smcr_proto::link_group::{Action, LinkGroup, NoQueuePair, RmbIndex, Role, Setup, UNNUMBERED};
use smcr_proto::wire::llc::v2::{
    AddLinkExtension, AddLinkV2, ConfirmLinkV2, DeleteRkeyV2, LEN_MAX, LlcV2, Records,
    RequestAddLink,
};
use smcr_proto::wire::llc::{DeleteReason, LEN, Llc, RkeyPair};
use smcr_proto::{
    Gid, Instant, LinkNumber, LinkUserId, MacAddress, Mtu, Psn, QpAddress, Qpn, Rkey,
};

const FIRST: LinkNumber = LinkNumber(1);
const SECOND: Duration = Duration::from_secs(1);

/// A group, and what its owner has done for it.
pub(crate) struct Owner {
    pub(crate) now: Instant,
    pub(crate) group: LinkGroup,
    /// Links that have a queue pair.
    pub(crate) queue_pairs: Vec<LinkNumber>,
    /// What the group said last, oldest first, for the peer to answer.
    pub(crate) said: Vec<(LinkNumber, Llc)>,
    /// What the group wants and did not get yet.
    waiting: Vec<Action>,
    qpns: u32,
}

/// How the owner answers one demand of the group.
#[derive(Clone, Copy)]
pub(crate) struct Answer {
    /// Which demand: any number.
    pub(crate) which: usize,
    /// Whether it can be done.
    pub(crate) well: bool,
    /// The port for a new queue pair.
    pub(crate) port: u8,
}

impl Owner {
    /// A group whose first link is about to be confirmed.
    pub(crate) fn new(role: Role, setup: Setup) -> Self {
        let now = Instant(0);
        let (mut group, number) = match role {
            Role::Server => (LinkGroup::new_server(now, setup, FIRST), FIRST),
            Role::Client => (LinkGroup::new_client(now, setup), UNNUMBERED),
        };
        if role == Role::Server {
            group.link_connected(now, FIRST);
        }
        group.connections_changed(now, 1);
        group.own_rmb(RmbIndex(0), &[(number, Rkey(1), 1)]);
        let (waiting, said) = (Vec::new(), Vec::new());
        Self { now, group, queue_pairs: vec![number], said, waiting, qpns: 200 }
    }

    /// Takes in what the group wants; what needs an answer waits for it.
    pub(crate) fn act(&mut self) {
        while let Some(action) = self.group.poll_action() {
            match action {
                Action::Send(on, message) => {
                    let mut bytes = [0; LEN_MAX];
                    assert!(self.group.encode(on, &message, &mut bytes).len() >= LEN);
                    self.said.push((on, message));
                }
                Action::LinkNumbered(number) => self.queue_pairs[0] = number,
                Action::LinkFailed(number, _) => {
                    self.queue_pairs.retain(|one| *one != number);
                    self.waiting.retain(|one| !is_about(*one, number));
                }
                Action::Terminate(_) => assert!(self.group.is_terminated()),
                Action::OpenLink { number, .. } => {
                    // A peer may use a number again; then only the newest is wanted.
                    self.waiting.retain(|one| !opens(*one, number));
                    self.waiting.push(action);
                }
                Action::ConnectLink { .. } | Action::VacateLink(_) => self.waiting.push(action),
                Action::LinkConfirmed(_) | Action::RmbConfirmed(_) | Action::RmbRefused(_) => {}
                Action::RmbDeleted(_) | Action::RkeysDeleted(_) | Action::LinkProven(_) => {}
            }
        }
        self.said = self.said.split_off(self.said.len().saturating_sub(8));
    }

    /// Gets one thing done that the group wants, well or not.
    pub(crate) fn answer(&mut self, Answer { which, well, port }: Answer) {
        if self.waiting.is_empty() {
            return;
        }
        let now = self.now;
        let action = self.waiting.remove(which % self.waiting.len());
        if let Action::OpenLink { number, .. } = action {
            if !well {
                self.group.link_refused(now, number, NoQueuePair::Exhausted);
                return;
            }
            self.qpns += 1;
            self.queue_pairs.push(number);
            let ours = end(self.qpns, port);
            let keys = [(RmbIndex(0), Rkey(self.qpns), 1)];
            self.group.link_opened(now, number, ours, LinkUserId(1), &keys);
        }
        if let Action::ConnectLink { number, .. } = action {
            if well {
                self.group.link_connected(now, number);
            } else {
                self.queue_pairs.retain(|one| *one != number);
                self.group.link_unreachable(now, number);
            }
        }
        if let Action::VacateLink(number) = action {
            self.group.link_vacated(now, number);
        }
    }

    /// Something that the owner wants, or that happens to it: `what` below eight.
    pub(crate) fn meddle(&mut self, what: u8, orderly: bool, link: LinkNumber, rmb: RmbIndex) {
        let now = self.now;
        let QpAddress { gid, mac, .. } = end(7, 7);
        match what {
            0 => self.group.link_broke(now, link),
            1 => self.group.delete_link(now, link, DeleteReason::OPERATOR, orderly),
            2 | 3 => self.group.want_link(now, (gid, mac)),
            4 | 5 => {
                let keys: Vec<_> = self.queue_pairs.iter().map(|one| (*one, Rkey(9), 9)).collect();
                self.group.announce_rmb(now, rmb, &keys);
            }
            6 => self.group.withdraw_rmb(now, rmb),
            _ => self.group.probe(now, link, SECOND),
        }
    }

    /// Time passes until the group says that something is due. Nothing is due before, and when it
    /// was done, time must pass again.
    pub(crate) fn wait(&mut self) {
        let Some(due) = self.group.poll_timeout() else { return };
        if due > self.now {
            let mut early = self.group.clone();
            early.handle_timeout(Instant(due.0 - 1));
            assert_eq!(early.poll_action(), None, "it acts before it said that it would");
            assert_eq!(early.poll_timeout(), Some(due));
        }
        self.now = self.now.max(due);
        self.group.handle_timeout(self.now);
        self.act();
        let next = self.group.poll_timeout();
        assert!(next.is_none_or(|next| next > self.now), "due again at once: a busy loop");
    }

    /// The peer has fallen silent: nothing may wait for it for ever.
    pub(crate) fn end(&mut self, mut how: impl FnMut() -> Answer) {
        let silence = self.now + SECOND * 300;
        while !self.group.is_terminated() && self.now < silence {
            let before = self.now;
            while !self.waiting.is_empty() {
                self.answer(how());
                self.act();
            }
            self.wait();
            if self.now == before && self.group.poll_timeout().is_none() {
                break;
            }
        }
        if self.group.is_terminated() {
            assert_eq!(self.group.poll_timeout(), None);
        } else {
            assert!(self.group.is_established(), "still in its first contact");
        }
    }
}

/// Whether the owner is asked to open that link.
fn opens(action: Action, link: LinkNumber) -> bool {
    matches!(action, Action::OpenLink { number, .. } if number == link)
}

/// Whether the owner is asked for something else that concerns that link.
fn is_about(action: Action, link: LinkNumber) -> bool {
    action == Action::VacateLink(link)
        || matches!(action, Action::ConnectLink { number, .. } if number == link)
}

/// The message as a peer of version 2 puts it, with these keys where it has room for some.
pub(crate) fn in_version_2(message: &Llc, pairs: &[RkeyPair], rkeys: &[Rkey]) -> Vec<u8> {
    let gids = [end(64, 64).gid; 3];
    let message = match message {
        Llc::ConfirmLink(link) => {
            LlcV2::ConfirmLink(ConfirmLinkV2 { link: *link, max_connections: 255 })
        }
        Llc::AddLink(link) => {
            let rkeys = Records::ours(pairs);
            let extension = AddLinkExtension { direct: true, target: link.gid, rkeys };
            let mut link = *link;
            link.reason = 0;
            LlcV2::AddLink(AddLinkV2 { link, extension: Some(extension) })
        }
        Llc::AddLinkContinuation(more) => {
            let gids = Records::ours(&gids);
            LlcV2::RequestAddLink(RequestAddLink { reply: more.reply, gids })
        }
        Llc::DeleteLink(message) => LlcV2::DeleteLink(*message),
        Llc::ConfirmRkey(message) => LlcV2::ConfirmRkey(*message),
        Llc::ConfirmRkeyContinuation(message) => LlcV2::ConfirmRkeyContinuation(*message),
        Llc::DeleteRkey(message) if message.reply => {
            let (negative, count, invalid) = (message.negative, message.count, 0);
            LlcV2::DeleteRkey(DeleteRkeyV2::Reply { negative, count, invalid })
        }
        Llc::DeleteRkey(_) => LlcV2::DeleteRkey(DeleteRkeyV2::Request(Records::ours(rkeys))),
        Llc::TestLink(message) => LlcV2::TestLink(*message),
    };
    let mut bytes = [0; LEN_MAX];
    message.encode(&mut bytes).to_vec()
}

/// A queue pair of this number behind this port.
pub(crate) fn end(qpn: u32, port: u8) -> QpAddress {
    QpAddress {
        mac: MacAddress([2, 0, 0, 0, 0, port]),
        gid: Gid::from_ipv4([10, 0, 0, port]),
        qpn: Qpn(qpn),
        psn: Psn(qpn * 1000),
        mtu: Mtu::B1024,
    }
}
