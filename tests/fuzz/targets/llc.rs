//! LLC messages to one link group, between everything that its owner does.

use std::time::Duration;

use smcr_proto::limits::{IDLE_GROUP_CLIENT, IDLE_GROUP_SERVER};
use smcr_proto::link::Keepalive;
use smcr_proto::link_group::{RmbIndex, Role, Setup, Version};
use smcr_proto::wire::llc::v2::{LEN_MAX, LlcV2};
use smcr_proto::wire::llc::{AddLink, DeleteRkey, LEN, Llc, RkeyPair};
use smcr_proto::{LinkNumber, LinkUserId, Mtu, PeerId, QpAddress, Rkey};

use super::Input;
use owner::{Answer, Owner, end, in_version_2};

#[path = "../../../dataplane/proto/src/link_group/tests/owner.rs"]
mod owner;

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
    let mut us = begin(shape);
    us.act();
    while let Some(instruction) = input.byte() {
        obey(&mut us, instruction, &mut input);
        us.act();
    }
    us.end(|| answer(1));
}

fn begin(shape: u8) -> Owner {
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
    let role = if shape & 1 == 0 { Role::Server } else { Role::Client };
    Owner::new(role, setup)
}

fn obey(us: &mut Owner, instruction: u8, input: &mut Input<'_>) {
    match instruction % 10 {
        0 | 1 => hear_anything(us, input),
        2..=4 => hear_answer(us, input),
        5 | 6 => us.answer(answer(input.byte().unwrap_or(0))),
        7 => meddle(us, input),
        8 => us.wait(),
        _ => us.group.traffic(us.now, LinkNumber(input.byte().unwrap_or(1) & 7)),
    }
}

/// A message as it came from the wire.
fn hear_anything(us: &mut Owner, input: &mut Input<'_>) {
    let Some(on) = input.byte() else { return };
    let bytes = match us.group.version() {
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
        let _ = us.group.handle_bytes(us.now, LinkNumber(on & 7), bytes);
    }
}

/// The peer answers what we said, and agrees unless a byte of it is changed.
fn hear_answer(us: &mut Owner, input: &mut Input<'_>) {
    let [how, at, with] = [(); 3].map(|()| input.byte().unwrap_or(0));
    if us.said.is_empty() {
        return;
    }
    let (on, said) = us.said.remove(usize::from(how >> 4) % us.said.len());
    let mut bytes = match us.group.version() {
        Version::V1 => answer_to(said).encode().to_vec(),
        Version::V2 { .. } => {
            let pair = RkeyPair { existing: Rkey(7), new: Rkey(8), address: 8 };
            in_version_2(&answer_to(said), &vec![pair; usize::from(how & 3)], &[])
        }
    };
    if with != 0 {
        let at = usize::from(at) % bytes.len();
        bytes[at] ^= with;
    }
    let _ = us.group.handle_bytes(us.now, on, &bytes);
}

/// Something that we want, or that happens to us.
fn meddle(us: &mut Owner, input: &mut Input<'_>) {
    let [what, link] = [(); 2].map(|()| input.byte().unwrap_or(0));
    let (rmb, link) = (RmbIndex(1 + (link & 3)), LinkNumber(link & 7));
    us.meddle(what % 8, what & 8 == 0, link, rmb);
}

/// How we answer a demand of the group, in a byte.
fn answer(how: u8) -> Answer {
    Answer { which: usize::from(how >> 2), well: how & 3 > 0, port: 8 + (how & 0x0c) }
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
