//! A peer that says anything at any time, and a group that has to live with it.

use std::vec::Vec;

use super::owner::{Answer, Owner, in_version_2};
use super::swarm::Dice;
use super::*;
use crate::wire::llc::{AddLinkContinuation, ConfirmRkeyContinuation, RkeyOnLink, RkeyPair};

/// A group, its owner, and what the peer knows of them.
struct Victim(Owner);

impl Victim {
    fn new(role: Role, version: Version, dice: &mut Dice) -> Self {
        let quiet = Keepalive { idle: None, ..Keepalive::default() };
        let max_links = u8::try_from(dice.below(9)).unwrap();
        let retry_link = SECOND * 20;
        let setup = Setup { version, keepalive: quiet, max_links, retry_link, ..setup(8, 64) };
        Self(Owner::new(role, setup))
    }

    /// The peer says something: the next answer, a new request, or anything.
    fn hear(&mut self, dice: &mut Dice, malice: usize) {
        let (on, message) = if dice.below(100) < malice {
            (LinkNumber(u8::try_from(dice.below(5)).unwrap()), anything(dice))
        } else if !self.0.said.is_empty() {
            let (on, said) = self.0.said.remove(0);
            match self.go_on(on, said) {
                Some(next) => next,
                None if said.is_reply() => (on, self.request(dice)),
                None => (on, answer_to(said, dice)),
            }
        } else if let Some(on) = self.0.queue_pairs.first() {
            (*on, self.request(dice))
        } else {
            return;
        };
        let _ = match self.0.group.version() {
            Version::V1 => self.0.group.handle_bytes(self.0.now, on, &message.encode()),
            Version::V2 { .. } => {
                let bytes = version_2(&message, dice);
                self.0.group.handle_bytes(self.0.now, on, &bytes)
            }
        };
    }

    /// What a server says after an answer of its client.
    fn go_on(&self, on: LinkNumber, said: Llc) -> Option<(LinkNumber, Llc)> {
        if !said.is_reply() || self.0.group.role() == Role::Server {
            return None;
        }
        if let (Llc::AddLink(AddLink { rejected: false, link, .. }), Version::V2 { .. }) =
            (said, self.0.group.version())
        {
            let qpn = self.0.group.links().find(|view| view.number == link)?.theirs.qpn;
            return Some((link, Llc::ConfirmLink(ConfirmLink { qpn, link, ..confirm_link() })));
        }
        if let Llc::AddLink(AddLink { rejected: false, link, .. }) = said {
            let pairs = [RkeyPair { existing: Rkey(7), new: Rkey(8), address: 8 }; 2];
            let more = AddLinkContinuation { reply: false, link, remaining: 1, pairs };
            return Some((on, Llc::AddLinkContinuation(more)));
        }
        let Llc::AddLinkContinuation(AddLinkContinuation { link, .. }) = said else { return None };
        let qpn = self.0.group.links().find(|view| view.number == link)?.theirs.qpn;
        Some((link, Llc::ConfirmLink(ConfirmLink { qpn, link, ..confirm_link() })))
    }

    /// What a peer may say unasked.
    fn request(&self, dice: &mut Dice) -> Llc {
        let is_client = self.0.group.role() == Role::Client;
        if self.0.queue_pairs.first() == Some(&UNNUMBERED) {
            return Llc::ConfirmLink(ConfirmLink { qpn: Qpn(64), ..confirm_link() });
        }
        let used = self.0.group.links().map(|view| view.number.0).max().unwrap_or(1);
        let theirs = u32::try_from(64 + dice.below(4)).unwrap();
        let QpAddress { mac, gid, qpn, psn, mtu } = end(theirs);
        match dice.below(4) {
            0 | 1 if self.0.group.exchange.is_none() => {
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
    let rkeys: Vec<_> = (0..dice.below(256)).map(|n| Rkey(u32::try_from(n).unwrap())).collect();
    let mut bytes = in_version_2(message, &pairs, &rkeys);
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

/// How the owner answers a demand.
fn answer(dice: &mut Dice) -> Answer {
    let port = u8::try_from(8 + dice.below(4)).unwrap();
    Answer { which: dice.below(64), well: dice.below(4) > 0, port }
}

/// Something goes wrong here, or somebody wants something.
fn meddle(owner: &mut Owner, dice: &mut Dice) {
    let mut small = |below: usize| u8::try_from(dice.below(below)).unwrap();
    let (link, rmb) = (LinkNumber(small(5)), RmbIndex(1 + small(4)));
    owner.meddle(small(8), small(2) == 0, link, rmb);
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
// RFC 7609 C.7.1 #35: any other LLC error fails link
// RFC 7609 C.7 #1: timer for each LLC request
// RFC 7609 C.7 #4: expired timer starts recovery
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
    victim.0.act();
    // Some peers are worse than others.
    let malice = dice.below(20);
    for _ in 0..dice.below(100) {
        match dice.below(100) {
            0..50 => victim.hear(&mut dice, malice),
            50..90 => victim.0.answer(answer(&mut dice)),
            90..97 => meddle(&mut victim.0, &mut dice),
            _ => victim.0.wait(),
        }
        victim.0.act();
    }
    let Victim(mut owner) = victim;
    let is_deep = owner.group.is_established() && owner.group.links().count() > 1;
    owner.end(|| answer(&mut dice));
    let group = &owner.group;
    let busy = group.exchange.is_some() || group.rkeys_are_under_way();
    assert!(group.is_terminated() || !busy || group.poll_timeout().is_some(), "waits for nothing");
    is_deep
}
