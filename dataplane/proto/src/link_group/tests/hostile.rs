//! A peer that says anything at any time, and a group that has to live with it.

use std::vec::Vec;

use super::swarm::Dice;
use super::*;
use crate::wire::llc::v2::{
    AddLinkExtension, AddLinkV2, ConfirmLinkV2, DeleteRkeyV2, LEN_MAX, Records, RequestAddLink,
};
use crate::wire::llc::{AddLinkContinuation, ConfirmRkeyContinuation, LlcV2, RkeyOnLink, RkeyPair};

/// A group, and the queue pairs that its caller has made for it.
struct Victim {
    now: Instant,
    group: LinkGroup,
    queue_pairs: Vec<LinkNumber>,
    waiting: Vec<Action>,
    qpns: u32,
    /// Requests of ours that a peer may answer.
    asked: Vec<(LinkNumber, Llc)>,
}

impl Victim {
    fn new(role: Role, version: Version, dice: &mut Dice) -> Self {
        let quiet = Keepalive { idle: None, ..Keepalive::default() };
        let max_links = u8::try_from(dice.below(9)).unwrap();
        let retry_link = SECOND * 20;
        let setup = Setup { version, keepalive: quiet, max_links, retry_link, ..setup(8, 64) };
        let (group, number) = match role {
            Role::Server => {
                let mut group = LinkGroup::new_server(T0, setup, LINK);
                group.link_connected(T0, LINK);
                (group, LINK)
            }
            Role::Client => (LinkGroup::new_client(T0, setup), UNNUMBERED),
        };
        let (waiting, asked) = (Vec::new(), Vec::new());
        let mut victim =
            Self { now: T0, group, queue_pairs: vec![number], waiting, qpns: 200, asked };
        victim.group.connections_changed(T0, 1);
        victim.group.own_rmb(RmbIndex(0), &[(number, Rkey(1), 1)]);
        victim
    }

    /// Takes in what the group wants; what needs an answer waits for it.
    fn act(&mut self) {
        while let Some(action) = self.group.poll_action() {
            match action {
                Action::Send(on, llc) => {
                    let mut bytes = [0; LEN_MAX];
                    assert!(self.group.encode(on, &llc, &mut bytes).len() >= LEN);
                    self.asked.push((on, llc));
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
        self.asked = self.asked.split_off(self.asked.len().saturating_sub(8));
    }

    /// The peer says something: the next answer, a new request, or anything.
    fn hear(&mut self, dice: &mut Dice, malice: usize) {
        let (on, message) = if dice.below(100) < malice {
            (LinkNumber(u8::try_from(dice.below(5)).unwrap()), anything(dice))
        } else if !self.asked.is_empty() {
            let (on, said) = self.asked.remove(0);
            match self.go_on(on, said) {
                Some(next) => next,
                None if said.is_reply() => (on, self.request(dice)),
                None => (on, answer_to(said, dice)),
            }
        } else if let Some(on) = self.queue_pairs.first() {
            (*on, self.request(dice))
        } else {
            return;
        };
        let _ = match self.group.version() {
            Version::V1 => self.group.handle_bytes(self.now, on, &message.encode()),
            Version::V2 { .. } => {
                let bytes = version_2(&message, dice);
                self.group.handle_bytes(self.now, on, &bytes)
            }
        };
    }

    /// What a server says after an answer of its client.
    fn go_on(&self, on: LinkNumber, said: Llc) -> Option<(LinkNumber, Llc)> {
        if !said.is_reply() || self.group.role() == Role::Server {
            return None;
        }
        if let (Llc::AddLink(AddLink { rejected: false, link, .. }), Version::V2 { .. }) =
            (said, self.group.version())
        {
            let qpn = self.group.links().find(|view| view.number == link)?.theirs.qpn;
            return Some((link, Llc::ConfirmLink(ConfirmLink { qpn, link, ..confirm_link() })));
        }
        if let Llc::AddLink(AddLink { rejected: false, link, .. }) = said {
            let pairs = [RkeyPair { existing: Rkey(7), new: Rkey(8), address: 8 }; 2];
            let more = AddLinkContinuation { reply: false, link, remaining: 1, pairs };
            return Some((on, Llc::AddLinkContinuation(more)));
        }
        let Llc::AddLinkContinuation(AddLinkContinuation { link, .. }) = said else { return None };
        let qpn = self.group.links().find(|view| view.number == link)?.theirs.qpn;
        Some((link, Llc::ConfirmLink(ConfirmLink { qpn, link, ..confirm_link() })))
    }

    /// What a peer may say unasked.
    fn request(&self, dice: &mut Dice) -> Llc {
        let is_client = self.group.role() == Role::Client;
        if self.queue_pairs.first() == Some(&UNNUMBERED) {
            return Llc::ConfirmLink(ConfirmLink { qpn: Qpn(64), ..confirm_link() });
        }
        let used = self.group.links().map(|view| view.number.0).max().unwrap_or(1);
        let theirs = u32::try_from(64 + dice.below(4)).unwrap();
        let QpAddress { mac, gid, qpn, psn, mtu } = end(theirs);
        match dice.below(4) {
            0 | 1 if self.group.exchange.is_none() => {
                let link = if is_client { LinkNumber(used + 1) } else { UNNUMBERED };
                let (reply, rejected, reason) = (false, false, 0);
                Llc::AddLink(AddLink { reply, rejected, reason, mac, gid, qpn, link, mtu, psn })
            }
            2 if used > 1 => {
                let link = LinkNumber(u8::try_from(1 + dice.below(used.into())).unwrap());
                let (reply, all, orderly) = (false, false, dice.below(2) == 0);
                let reason = DeleteReason::OPERATOR;
                Llc::DeleteLink(DeleteLink { reply, all, orderly, link, reason })
            }
            _ => Llc::TestLink(TestLink { reply: false, user_data: [1; 16] }),
        }
    }

    /// The caller gets one thing done, well or not.
    fn answer(&mut self, dice: &mut Dice) {
        if self.waiting.is_empty() {
            return;
        }
        let (now, well) = (self.now, dice.below(4) > 0);
        let action = self.waiting.remove(dice.below(self.waiting.len()));
        if let Action::OpenLink { number, .. } = action {
            if !well {
                self.group.link_refused(now, number, Refusal::Exhausted);
                return;
            }
            self.qpns += 1;
            self.queue_pairs.push(number);
            let port = u32::try_from(8 + dice.below(4)).unwrap();
            let ours = QpAddress { qpn: Qpn(self.qpns), ..end(port) };
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

    /// Something goes wrong here, or somebody wants something.
    fn meddle(&mut self, dice: &mut Dice) {
        let link = LinkNumber(u8::try_from(dice.below(5)).unwrap());
        let rmb = RmbIndex(u8::try_from(1 + dice.below(4)).unwrap());
        let now = self.now;
        match dice.below(8) {
            0 => self.group.link_broke(now, link),
            1 => self.group.delete_link(now, link, DeleteReason::OPERATOR, dice.below(2) == 0),
            2 | 3 => self.group.want_link(now, hosts::port(7)),
            4 | 5 => {
                let keys: Vec<_> = self.queue_pairs.iter().map(|one| (*one, Rkey(9), 9)).collect();
                self.group.announce_rmb(now, rmb, &keys);
            }
            6 => self.group.withdraw_rmb(now, rmb),
            _ => self.group.probe(now, link, SECOND),
        }
    }

    /// Time passes until something is due, and must pass when it was done.
    fn wait(&mut self) {
        let Some(due) = self.group.poll_timeout() else { return };
        self.now = self.now.max(due);
        self.group.handle_timeout(self.now);
        self.act();
        let next = self.group.poll_timeout();
        assert!(next.is_none_or(|next| next > self.now), "due again at once: a busy loop");
    }
}

/// Whether the caller is asked to do this for that link.
fn is_about(action: Action, link: LinkNumber) -> bool {
    action == Action::VacateLink(link)
        || matches!(action, Action::ConnectLink { number, .. } if number == link)
}

/// Whether the caller is asked to open that link.
fn opens(action: Action, link: LinkNumber) -> bool {
    matches!(action, Action::OpenLink { number, .. } if number == link)
}

/// A message that a peer might send, with whatever it likes in it.
fn anything(dice: &mut Dice) -> Llc {
    let mut flag = || dice.below(2) == 0;
    let (reply, negative, retry, all, orderly) = (flag(), flag(), flag(), flag(), flag());
    let all = all && negative && retry && orderly;
    let mut small = |below: usize| u8::try_from(dice.below(below)).unwrap();
    let (link, count) = (LinkNumber(small(5)), small(8));
    let end = end(u32::from(60 + small(8)));
    let QpAddress { mac, gid, qpn, psn, .. } = end;
    let mtu = Mtu(small(6));
    let rkey = Rkey(u32::from(small(4)));
    let key = RkeyOnLink { link, rkey, address: 7 };
    match small(8) {
        0 => Llc::ConfirmLink(ConfirmLink {
            reply,
            no_eyecatcher: true,
            mac,
            gid,
            qpn,
            link,
            user_id: LinkUserId(0),
            max_links: count,
        }),
        1 => {
            let (rejected, reason) = (negative && reply, 1);
            Llc::AddLink(AddLink { reply, rejected, reason, mac, gid, qpn, link, mtu, psn })
        }
        2 => {
            let pair = RkeyPair { existing: rkey, new: Rkey(8), address: 8 };
            let pairs = [pair, RkeyPair::default()];
            Llc::AddLinkContinuation(AddLinkContinuation { reply, link, remaining: count, pairs })
        }
        3 => {
            let reason = if retry { DeleteReason::LOST_PATH } else { DeleteReason::UNKNOWN_LINK };
            Llc::DeleteLink(DeleteLink { reply, all, orderly, link, reason })
        }
        4 => {
            let (other_links, address, others) = (count, 7, [key; 2]);
            let negative = negative && reply;
            Llc::ConfirmRkey(ConfirmRkey {
                reply,
                negative,
                retry,
                other_links,
                rkey,
                address,
                others,
            })
        }
        5 => {
            let (remaining, others) = (count, [key; 3]);
            let more = ConfirmRkeyContinuation { reply, negative, remaining, others };
            Llc::ConfirmRkeyContinuation(more)
        }
        6 => {
            let rkeys = [rkey, Rkey(8), Rkey(1), rkey, rkey, rkey, rkey, rkey];
            Llc::DeleteRkey(DeleteRkey { reply, negative, count, error_mask: 0, rkeys })
        }
        _ => Llc::TestLink(TestLink { reply, user_data: [count; 16] }),
    }
}

/// The message as a peer of version 2 puts it: with keys as many as it likes, and now and then with
/// a byte that does not belong there, or without its end.
fn version_2(message: &Llc, dice: &mut Dice) -> Vec<u8> {
    let pair = RkeyPair { existing: Rkey(7), new: Rkey(8), address: 8 };
    let pairs: Vec<_> = (0..dice.below(256)).map(|_| pair).collect();
    let gids = [end(64).gid; 3];
    let rkeys: Vec<_> = (0..dice.below(256)).map(|n| Rkey(u32::try_from(n).unwrap())).collect();
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
        Llc::DeleteRkey(DeleteRkey { reply: true, negative, count, .. }) => {
            let (negative, count, invalid) = (*negative, *count, 1);
            LlcV2::DeleteRkey(DeleteRkeyV2::Reply { negative, count, invalid })
        }
        Llc::DeleteRkey(_) => LlcV2::DeleteRkey(DeleteRkeyV2::Request(Records::ours(&rkeys))),
        Llc::TestLink(message) => LlcV2::TestLink(*message),
    };
    let mut bytes = [0; LEN_MAX];
    let mut bytes = message.encode(&mut bytes).to_vec();
    match dice.below(200) {
        0 => {
            let at = dice.below(bytes.len());
            bytes[at] = u8::try_from(dice.below(256)).unwrap();
        }
        1 => bytes.truncate(dice.below(bytes.len() + 1)),
        _ => {}
    }
    bytes
}

/// What a peer may answer; it agrees to most.
fn answer_to(request: Llc, dice: &mut Dice) -> Llc {
    let (reply, no) = (true, dice.below(8) == 0);
    let nothing = Llc::TestLink(TestLink { reply: false, user_data: [2; 16] });
    match request {
        Llc::ConfirmLink(one) => Llc::ConfirmLink(ConfirmLink { reply, ..one }),
        // A client's notice.
        Llc::AddLink(one) if one.link == UNNUMBERED => nothing,
        Llc::AddLink(one) => {
            let port = u32::try_from(64 + dice.below(4)).unwrap();
            let QpAddress { mac, gid, .. } = end(port);
            let no = no || one.mtu == Mtu(0);
            Llc::AddLink(AddLink { reply, rejected: no, mac, gid, ..one })
        }
        Llc::AddLinkContinuation(one) => {
            Llc::AddLinkContinuation(AddLinkContinuation { reply, ..one })
        }
        Llc::DeleteLink(one) => Llc::DeleteLink(DeleteLink { reply: !no, ..one }),
        Llc::ConfirmRkey(one) => {
            Llc::ConfirmRkey(ConfirmRkey { reply, negative: no, retry: true, ..one })
        }
        Llc::ConfirmRkeyContinuation(one) => {
            Llc::ConfirmRkeyContinuation(ConfirmRkeyContinuation { reply, ..one })
        }
        Llc::DeleteRkey(one) => Llc::DeleteRkey(DeleteRkey { reply, negative: no, ..one }),
        Llc::TestLink(one) => Llc::TestLink(TestLink { reply, ..one }),
    }
}

/// Whatever a peer says, whatever goes wrong here besides: the gateway does not stop, time goes on,
/// and when the peer has fallen silent nothing waits for it for ever. One bad peer would take all
/// others with it.
// RFC 7609 C.7.1-35, C.7-1, C.7-4
#[test]
fn no_peer_can_stop_a_group() {
    let mut deep = [0; 4];
    for seed in 0..20_000 {
        let role = [Role::Server, Role::Client][usize::from(seed % 2 == 0)];
        let version = match seed / 2 % 2 {
            0 => Version::V1,
            _ => Version::V2 { max_connections: 255, direct: true },
        };
        let outcome = std::panic::catch_unwind(|| one_victim(seed, role, version));
        match outcome {
            Ok(is_deep) => {
                let kind = usize::from(seed % 2 == 0) + 2 * usize::from(version != Version::V1);
                deep[kind] += u32::from(is_deep);
            }
            Err(_) => panic!("seed {seed} {role:?} {version:?}"),
        }
    }
    assert!(deep.iter().all(|count| *count > 500), "seen too little: {deep:?}");
}

/// Whether the group came as far as to have more than one link.
fn one_victim(seed: u64, role: Role, version: Version) -> bool {
    let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut victim = Victim::new(role, version, &mut dice);
    victim.act();
    // Some peers are worse than others.
    let malice = dice.below(20);
    for _ in 0..dice.below(100) {
        match dice.below(100) {
            0..50 => victim.hear(&mut dice, malice),
            50..90 => victim.answer(&mut dice),
            90..97 => victim.meddle(&mut dice),
            _ => victim.wait(),
        }
        victim.act();
    }
    let is_deep = victim.group.is_established() && victim.group.links().count() > 1;
    judge(victim, dice);
    is_deep
}

/// The peer says nothing any more. Whatever was under way ends.
fn judge(mut victim: Victim, mut dice: Dice) {
    let silence = victim.now + SECOND * 300;
    while !victim.group.is_terminated() && victim.now < silence {
        let before = victim.now;
        while !victim.waiting.is_empty() {
            victim.answer(&mut dice);
            victim.act();
        }
        victim.wait();
        if victim.now == before && victim.group.poll_timeout().is_none() {
            break;
        }
    }
    let group = &victim.group;
    if group.is_terminated() {
        assert_eq!(group.poll_timeout(), None);
        return;
    }
    assert!(group.is_established(), "still in its first contact");
    let busy = group.exchange.is_some() || group.rkeys_are_under_way();
    assert!(!busy || group.poll_timeout().is_some(), "it waits for nothing");
}
