//! LLC messages to one link group, between everything that its owner does.

use std::time::Duration;

use smcr_proto::limits::{IDLE_GROUP_CLIENT, IDLE_GROUP_SERVER};
use smcr_proto::link::Keepalive;
use smcr_proto::link_group::{
    Action, LinkGroup, Refusal, RmbIndex, Role, Setup, UNNUMBERED, Version,
};
use smcr_proto::wire::llc::v2::{
    AddLinkExtension, AddLinkV2, ConfirmLinkV2, DeleteRkeyV2, LEN_MAX, LlcV2, Records,
    RequestAddLink,
};
use smcr_proto::wire::llc::{AddLink, DeleteReason, DeleteRkey, LEN, Llc, RkeyPair};
use smcr_proto::{
    Gid, Instant, LinkNumber, LinkUserId, MacAddress, Mtu, PeerId, Psn, QpAddress, Qpn, Rkey,
};

use super::Input;

const FIRST: LinkNumber = LinkNumber(1);
const SECOND: Duration = Duration::from_secs(1);

/// Each instruction is a byte, and what it needs behind it.
///
/// # Panics
///
/// If a message changes when it is encoded again, a group wants what it must not, or waits for ever
/// for a peer that has fallen silent.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let Some(shape) = input.byte() else { return };
    let mut us = Owner::new(shape);
    us.act();
    while let Some(instruction) = input.byte() {
        us.obey(instruction, &mut input);
        us.act();
    }
    us.end();
}

struct Owner {
    now: Instant,
    group: Box<LinkGroup>,
    queue_pairs: Vec<LinkNumber>,
    waiting: Vec<Action>,
    qpns: u32,
    /// What we said last, for the peer to answer.
    said: Vec<(LinkNumber, Llc)>,
}

impl Owner {
    fn new(shape: u8) -> Self {
        let version = match shape & 2 {
            0 => Version::V1,
            _ => Version::V2 { max_connections: 255, direct: true },
        };
        let setup = Setup {
            peer_id: PeerId([64; 8]),
            version,
            ours: end(8, 8),
            theirs: end(64, 64),
            user_id: LinkUserId(8),
            eye_catcher: shape & 4 != 0,
            keepalive: Keepalive { idle: None, ..Keepalive::default() },
            idle_wait: if shape & 1 == 0 { IDLE_GROUP_SERVER } else { IDLE_GROUP_CLIENT },
            max_links: shape >> 4,
            retry_link: SECOND * 20,
            confirm_wait: (shape & 8 != 0).then_some(SECOND),
        };
        let now = Instant(0);
        let (mut group, number) = match shape & 1 {
            0 => (LinkGroup::new_server(now, setup, FIRST), FIRST),
            _ => (LinkGroup::new_client(now, setup), UNNUMBERED),
        };
        if group.role() == Role::Server {
            group.link_connected(now, FIRST);
        }
        group.connections_changed(now, 1);
        group.own_rmb(RmbIndex(0), &[(number, Rkey(1), 1)]);
        let (waiting, said) = (Vec::new(), Vec::new());
        Self { now, group: Box::new(group), queue_pairs: vec![number], waiting, qpns: 200, said }
    }

    fn obey(&mut self, instruction: u8, input: &mut Input<'_>) {
        let now = self.now;
        match instruction % 10 {
            0 | 1 => self.hear_anything(input),
            2..=4 => self.hear_answer(input),
            5 | 6 => self.answer(input.byte().unwrap_or(0)),
            7 => self.meddle(input),
            8 => self.wait(),
            _ => self.group.traffic(now, LinkNumber(input.byte().unwrap_or(1) & 7)),
        }
    }

    /// A message as it came from the wire.
    fn hear_anything(&mut self, input: &mut Input<'_>) {
        let Some(on) = input.byte() else { return };
        let bytes = match self.group.version() {
            Version::V1 => input.bytes(LEN),
            Version::V2 { .. } => {
                let len = usize::from(input.short()) % (LEN_MAX + 1);
                input.bytes(len)
            }
        };
        if let Some(bytes) = bytes.first_chunk::<LEN>()
            && let Ok(message) = Llc::decode(bytes)
        {
            assert_eq!(Llc::decode(&message.encode()), Ok(message));
        }
        if let Ok(message) = LlcV2::decode(bytes) {
            let mut again = [0; LEN_MAX];
            let again = message.encode(&mut again);
            assert_eq!(LlcV2::decode(again), Ok(message));
        }
        // A queue pair brings no message that is shorter.
        if bytes.len() >= LEN {
            let _ = self.group.handle_bytes(self.now, LinkNumber(on & 7), bytes);
        }
    }

    /// The peer answers what we said, and agrees unless a byte of it is changed.
    fn hear_answer(&mut self, input: &mut Input<'_>) {
        let [how, at, with] = [(); 3].map(|()| input.byte().unwrap_or(0));
        if self.said.is_empty() {
            return;
        }
        let (on, said) = self.said.remove(usize::from(how >> 4) % self.said.len());
        let mut bytes = match self.group.version() {
            Version::V1 => answer_to(said).encode().to_vec(),
            Version::V2 { .. } => in_version_2(&answer_to(said), how & 3),
        };
        if with != 0 {
            let at = usize::from(at) % bytes.len();
            bytes[at] ^= with;
        }
        let _ = self.group.handle_bytes(self.now, on, &bytes);
    }

    /// We get one thing done that the group wants, well or not.
    fn answer(&mut self, how: u8) {
        if self.waiting.is_empty() {
            return;
        }
        let (now, well) = (self.now, how & 3 > 0);
        let action = self.waiting.remove(usize::from(how >> 2) % self.waiting.len());
        if let Action::OpenLink { number, .. } = action {
            if !well {
                self.group.link_refused(now, number, Refusal::Exhausted);
                return;
            }
            self.qpns += 1;
            self.queue_pairs.push(number);
            let ours = end(self.qpns, 8 + (how & 0x0c));
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

    /// Something that we want, or that happens to us.
    fn meddle(&mut self, input: &mut Input<'_>) {
        let [what, link] = [(); 2].map(|()| input.byte().unwrap_or(0));
        let (now, rmb) = (self.now, RmbIndex(1 + (link & 3)));
        let link = LinkNumber(link & 7);
        let QpAddress { gid, mac, .. } = end(7, 7);
        match what % 8 {
            0 => self.group.link_broke(now, link),
            1 => self.group.delete_link(now, link, DeleteReason::OPERATOR, what & 8 == 0),
            2 | 3 => self.group.want_link(now, (gid, mac)),
            4 | 5 => {
                let keys: Vec<_> = self.queue_pairs.iter().map(|one| (*one, Rkey(9), 9)).collect();
                self.group.announce_rmb(now, rmb, &keys);
            }
            6 => self.group.withdraw_rmb(now, rmb),
            _ => self.group.probe(now, link, SECOND),
        }
    }

    fn wait(&mut self) {
        let Some(due) = self.group.poll_timeout() else { return };
        self.now = self.now.max(due);
        self.group.handle_timeout(self.now);
        self.act();
        let next = self.group.poll_timeout();
        assert!(next.is_none_or(|next| next > self.now), "due again at once: a busy loop");
    }

    /// Takes in what the group wants; what needs an answer waits for it.
    fn act(&mut self) {
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
                Action::RmbDeleted(_) | Action::RkeysDeleted(_) => {}
            }
        }
        self.said = self.said.split_off(self.said.len().saturating_sub(8));
    }

    /// The peer has fallen silent: nothing may wait for it for ever.
    fn end(&mut self) {
        let silence = self.now + SECOND * 300;
        while !self.group.is_terminated() && self.now < silence {
            let before = self.now;
            while !self.waiting.is_empty() {
                self.answer(1);
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

/// Whether we are asked to open that link.
fn opens(action: Action, link: LinkNumber) -> bool {
    matches!(action, Action::OpenLink { number, .. } if number == link)
}

fn is_about(action: Action, link: LinkNumber) -> bool {
    action == Action::VacateLink(link)
        || matches!(action, Action::ConnectLink { number, .. } if number == link)
}

/// What a peer that agrees says.
fn answer_to(said: Llc) -> Llc {
    let reply = true;
    match said {
        Llc::ConfirmLink(mut one) => {
            one.reply = reply;
            Llc::ConfirmLink(one)
        }
        Llc::AddLink(one) => {
            let QpAddress { mac, gid, .. } = end(64, 65);
            let rejected = one.mtu == Mtu(0);
            Llc::AddLink(AddLink { reply, rejected, mac, gid, ..one })
        }
        Llc::AddLinkContinuation(mut one) => {
            one.reply = reply;
            Llc::AddLinkContinuation(one)
        }
        Llc::DeleteLink(mut one) => {
            one.reply = reply;
            Llc::DeleteLink(one)
        }
        Llc::ConfirmRkey(mut one) => {
            one.reply = reply;
            Llc::ConfirmRkey(one)
        }
        Llc::ConfirmRkeyContinuation(mut one) => {
            one.reply = reply;
            Llc::ConfirmRkeyContinuation(one)
        }
        Llc::DeleteRkey(one) => Llc::DeleteRkey(DeleteRkey { reply, ..one }),
        Llc::TestLink(mut one) => {
            one.reply = reply;
            Llc::TestLink(one)
        }
    }
}

/// The message as a peer of version 2 puts it.
fn in_version_2(message: &Llc, keys: u8) -> Vec<u8> {
    let pair = RkeyPair { existing: Rkey(7), new: Rkey(8), address: 8 };
    let pairs = vec![pair; usize::from(keys)];
    let gids = [end(64, 64).gid; 3];
    let message = match message {
        Llc::ConfirmLink(link) => {
            LlcV2::ConfirmLink(ConfirmLinkV2 { link: *link, max_connections: 255 })
        }
        Llc::AddLink(link) => {
            let rkeys = Records::ours(&pairs);
            let extension = AddLinkExtension { direct: true, target: link.gid, rkeys };
            let link = AddLink { reason: 0, ..*link };
            LlcV2::AddLink(AddLinkV2 { link, extension: Some(extension) })
        }
        Llc::AddLinkContinuation(more) => {
            let gids = Records::ours(&gids);
            LlcV2::RequestAddLink(RequestAddLink { reply: more.reply, gids })
        }
        Llc::DeleteLink(message) => LlcV2::DeleteLink(*message),
        Llc::ConfirmRkey(message) => LlcV2::ConfirmRkey(*message),
        Llc::ConfirmRkeyContinuation(message) => LlcV2::ConfirmRkeyContinuation(*message),
        Llc::DeleteRkey(DeleteRkey { negative, count, .. }) => {
            let (negative, count, invalid) = (*negative, *count, 0);
            LlcV2::DeleteRkey(DeleteRkeyV2::Reply { negative, count, invalid })
        }
        Llc::TestLink(message) => LlcV2::TestLink(*message),
    };
    let mut bytes = [0; LEN_MAX];
    message.encode(&mut bytes).to_vec()
}

fn end(qpn: u32, port: u8) -> QpAddress {
    QpAddress {
        mac: MacAddress([2, 0, 0, 0, 0, port]),
        gid: Gid::from_ipv4([10, 0, 0, port]),
        qpn: Qpn(qpn),
        psn: Psn(qpn * 1000),
        mtu: Mtu::B1024,
    }
}
