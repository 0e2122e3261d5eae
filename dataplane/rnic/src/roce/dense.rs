//! Dense packets: several requests in one.
//!
//! A packet of InfiniBand holds one request, so that a write and the message that announces it take
//! two. Between two NICs of this kind, whose users have agreed on it
//! ([`Opening::pack_densely`](crate::Opening::pack_densely)), requests that follow each other leave
//! in one packet as far as they fit. Its opcode is one of those that the specification leaves to
//! manufacturers.
//!
//! ```text
//!   BTH, opcode c0, PSN n │ part n │ part n+1 │ part n+2 │ ICRC
//!
//!   part: │ opcode │ more │ length │ RETH of a write │ payload │ padding │
//!            1        1      2           16                      0 to 3
//! ```
//!
//! `more` is 1 if another part follows, and 0 in the last one. So a packet tells its length, and
//! whoever captures a train of them finds the next.
//!
//! Each part is a whole SEND ONLY or WRITE ONLY and has a PSN of its own; that of the packet is the
//! PSN of the first part. So everything else is as if each part were a packet: acknowledgements,
//! NAKs and repetitions are about parts, the receiver executes one after the other, and the sender
//! keeps no record of what shared a packet. When it repeats a part, others may share the packet.
//!
//! A receiver executes a packet from its first part on or not at all, so that whoever guesses PSNs
//! tries one with each packet, as without dense packets ([`guard`](super::guard)). If it knows the
//! first parts and not the last, since an acknowledgement got lost, it says which it expects.

use super::batch::PACKET_MAX;
use super::wire::{BTH_LEN, Body, ICRC_LEN, Malformed, RETH_LEN, Reth, SEND_ONLY, WRITE_ONLY};
use crate::MESSAGE_LEN;

/// The parts of a packet, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parts<'a> {
    /// From the next part to the last; well formed.
    rest: &'a [u8],
}

impl<'a> Parts<'a> {
    /// Reads the bytes between BTH and ICRC.
    pub(super) fn parse(bytes: &'a [u8]) -> Result<Self, Malformed> {
        if bytes.len() > PACKET_MAX - BTH_LEN - ICRC_LEN {
            return Err(Malformed::Length);
        }
        let mut rest = bytes;
        let mut more = true;
        while more {
            (_, more, rest) = split(rest)?;
        }
        if rest.is_empty() { Ok(Self { rest: bytes }) } else { Err(Malformed::Length) }
    }

    /// Whether all have been taken.
    pub(super) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }
}

impl<'a> Iterator for Parts<'a> {
    type Item = Body<'a>;

    fn next(&mut self) -> Option<Body<'a>> {
        if self.is_empty() {
            return None;
        }
        let (part, _, rest) = split(self.rest).expect("`parse` has read them all");
        self.rest = rest;
        Some(part)
    }
}

/// Reads the first part, and returns it, whether another one follows, and what follows.
fn split(bytes: &[u8]) -> Result<(Body<'_>, bool, &[u8]), Malformed> {
    let (head, rest) = bytes.split_first_chunk().ok_or(Malformed::Length)?;
    let [opcode, more, l1, l0] = *head;
    let len = usize::from(u16::from_be_bytes([l1, l0]));
    // Nobody sends others; and with shorter ones a packet would be many.
    if len == 0 || opcode == SEND_ONLY && len != MESSAGE_LEN {
        return Err(Malformed::Length);
    }
    let (reth, rest) = match (opcode, more) {
        (SEND_ONLY, 0 | 1) => (None, rest),
        (WRITE_ONLY, 0 | 1) => {
            let (reth, rest) = rest.split_first_chunk().ok_or(Malformed::Length)?;
            (Some(Reth::parse(reth)), rest)
        }
        _ => return Err(Malformed::Opcode),
    };
    let (payload, rest) =
        rest.split_at_checked(len.next_multiple_of(4)).ok_or(Malformed::Length)?;
    let payload = &payload[..len];
    let body = match reth {
        Some(reth) => Body::Write { reth, more: false, payload },
        None => Body::Send { first: true, more: false, payload },
    };
    Ok((body, more == 1, rest))
}

/// Length of a part in bytes.
pub(super) const fn part_len(opcode: u8, payload: usize) -> usize {
    let reth = if opcode == WRITE_ONLY { RETH_LEN } else { 0 };
    HEAD_LEN + reth + payload.next_multiple_of(4)
}

/// Writes the head of a part to the beginning of `out`, and returns the rest. `more` says that
/// another part follows.
///
/// # Panics
///
/// If a payload is longer than packets are, or `out` shorter than the head.
pub(super) fn write_head(opcode: u8, more: bool, payload: usize, out: &mut [u8]) -> &mut [u8] {
    let [l1, l0] = u16::try_from(payload).expect("at most the MTU").to_be_bytes();
    let (head, rest) = out.split_first_chunk_mut().expect("the caller made room");
    *head = [opcode, more.into(), l1, l0];
    rest
}

const HEAD_LEN: usize = 4;

#[cfg(test)]
mod tests {
    use smcr_proto::Rkey;

    use super::*;

    /// A write of five bytes, and a message.
    fn parts() -> Vec<u8> {
        let write = [
            0x0a, 1, 0, 5, 0, 0, 0, 0, 0, 0, 0x20, 0, 0, 0, 0, 7, 0, 0, 0, 5, 1, 2, 3, 4, 5, 0, 0,
            0,
        ];
        [&write[..], &[0x04, 0, 0, 44], &[8; 44]].concat()
    }

    #[test]
    fn parts_are_read_in_order() {
        let bytes = parts();
        let reth = Reth { address: 0x2000, rkey: Rkey(7), len: 5 };
        let parts: Vec<_> = Parts::parse(&bytes).unwrap().collect();
        let write = Body::Write { reth, more: false, payload: &[1, 2, 3, 4, 5] };
        assert_eq!(parts, [write, Body::Send { first: true, more: false, payload: &[8; 44] }]);
    }

    #[test]
    fn heads_and_lengths_are_what_is_read() {
        assert_eq!(part_len(WRITE_ONLY, 5) + part_len(SEND_ONLY, 44), parts().len());
        let mut head = [0xee; 5];
        assert_eq!(write_head(WRITE_ONLY, true, 5, &mut head), [0xee]);
        assert_eq!(head[..4], parts()[..4]);
    }

    /// Nothing of a packet is executed of which a part is wrong.
    #[test]
    fn one_bad_part_spoils_the_packet() {
        let whole = parts();
        for len in 0..whole.len() {
            assert_eq!(Parts::parse(&whole[..len]), Err(Malformed::Length), "{len}");
        }
        let with = |at: usize, value: u8| {
            let mut bytes = parts();
            bytes[at] = value;
            Parts::parse(&bytes).map(drop)
        };
        for (at, value) in [(0, 0xc0), (28, 0xc0), (1, 0x40), (29, 0x40)] {
            assert_eq!(with(at, value), Err(Malformed::Opcode), "{at}");
        }
        for (at, value) in [(3, 0), (31, 0), (31, 43), (31, 45), (1, 0), (29, 1)] {
            assert_eq!(with(at, value), Err(Malformed::Length), "{at} {value}");
        }
    }

    /// A datagram that the network put together again may be longer than any packet.
    #[test]
    fn no_packet_is_longer_than_packets_are() {
        let message = |more| [&[0x04, more, 0, 44][..], &[8; 44]].concat();
        let whole = |count: usize| [message(1).repeat(count - 1), message(0)].concat();
        let most = (PACKET_MAX - BTH_LEN - ICRC_LEN) / 48;
        assert_eq!(Parts::parse(&whole(most)).unwrap().count(), most);
        assert_eq!(Parts::parse(&whole(most + 1)), Err(Malformed::Length));
    }
}
