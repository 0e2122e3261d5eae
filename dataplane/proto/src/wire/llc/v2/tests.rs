//! LLC messages of version 2: what Linux sent, and whatever a peer may invent.

use std::vec::Vec;

use proptest::prelude::*;

use super::super::add_link::RkeyPair;
use super::super::{AddLink, ConfirmLink, DeleteReason, RkeyOnLink};
use super::*;
use crate::vocabulary::{Gid, LinkNumber, LinkUserId, MacAddress, Mtu, Psn, Qpn, Rkey};
use crate::wire::tests::{any_gid, any_mac, any_mtu, any_psn, any_qpn, hex};

// Sent by Linux 6.12.95; see tests/vectors/llc_v2.txt.

/// The server offers link 3 with the keys of two RMBs.
const LINUX_ADD_LINK: &str = "22680000 \
    52540000000a 0000 00000000000000000000ffff0a090001 000012 03 03 317735 0000000000000000 \
    8000 00000000000000000000ffff0a090001 0000000000000000 0200 \
    000004a9 00000672 ff1a8f6504720000 000003b9 000007eb ff1a8f6503f20000";
const LINUX_REJECTION: &str = "222c00c0 \
    52540000000a 0000 00000000000000000000ffff0a090001 000012 02 03 b6aa37 0000000000000000";
const LINUX_DELETE_RKEY: &str = "292c0000 01 00 0000 0000035f";
const LINUX_DELETE_RKEY_REPLY: &str = "292c0080 01";

fn assert_decodes<const N: usize>(dump: &str, expected: LlcV2<'_>) {
    let bytes = hex::<N>(dump);
    assert_eq!(LlcV2::decode(&bytes), Ok(expected));
    assert_eq!(expected.encode(&mut [0xff; LEN_MAX]), bytes);
}

fn add_link() -> AddLink {
    AddLink {
        reply: false,
        rejected: false,
        reason: 0,
        mac: MacAddress([0x52, 0x54, 0, 0, 0, 0x0a]),
        gid: Gid::from_ipv4([10, 9, 0, 1]),
        qpn: Qpn(0x12),
        link: LinkNumber(3),
        mtu: Mtu::B1024,
        psn: Psn(0x31_7735),
    }
}

const PAIRS: [RkeyPair; 2] = [
    RkeyPair { existing: Rkey(0x4a9), new: Rkey(0x672), address: 0xff1a_8f65_0472_0000 },
    RkeyPair { existing: Rkey(0x3b9), new: Rkey(0x7eb), address: 0xff1a_8f65_03f2_0000 },
];

/// The second RNIC of a Linux peer is used; a key in the wrong place would end the link group with
/// the first failover.
#[test]
fn decodes_the_add_link_that_linux_sends() {
    let extension = AddLinkExtension {
        direct: true,
        target: Gid::from_ipv4([10, 9, 0, 1]),
        rkeys: Records::ours(&PAIRS),
    };
    let link = add_link();
    let message = LlcV2::AddLink(AddLinkV2 { link, extension: Some(extension) });
    assert_decodes::<104>(LINUX_ADD_LINK, message);
    let link = AddLink {
        reply: true,
        rejected: true,
        link: LinkNumber(2),
        psn: Psn(0xb6_aa37),
        ..add_link()
    };
    assert_decodes::<44>(LINUX_REJECTION, LlcV2::AddLink(AddLinkV2 { link, extension: None }));
}

/// Every connection that ends costs one of these; an answer that Linux does not understand makes
/// the next connection wait two seconds.
#[test]
fn decodes_the_delete_rkey_that_linux_sends() {
    let request = DeleteRkeyV2::Request(Records::ours(&[Rkey(0x35f)]));
    assert_decodes::<44>(LINUX_DELETE_RKEY, LlcV2::DeleteRkey(request));
    let reply = DeleteRkeyV2::Reply { negative: false, count: 1, invalid: 0 };
    assert_decodes::<44>(LINUX_DELETE_RKEY_REPLY, LlcV2::DeleteRkey(reply));
}

/// s390 hosts write lengths and counts the other way round.
#[test]
fn reads_either_byte_order() {
    let expected = hex::<104>(LINUX_ADD_LINK);
    let mut bytes = expected;
    bytes[1..3].copy_from_slice(&[0, 104]);
    bytes[70..72].copy_from_slice(&[0, 2]);
    assert_eq!(LlcV2::decode(&bytes), LlcV2::decode(&expected));
    let mut bytes = hex::<44>(LINUX_REJECTION);
    bytes[1..3].copy_from_slice(&[0, 44]);
    assert_eq!(LlcV2::decode(&bytes), LlcV2::decode(&hex::<44>(LINUX_REJECTION)));
}

/// A peer that counts more than it sends loses its link; we do not read what an earlier message
/// left in the buffer.
#[test]
fn refuses_lists_that_do_not_fit() {
    let changed = |at: usize, value: u8| {
        let mut bytes = hex::<104>(LINUX_ADD_LINK);
        bytes[at] = value;
        bytes
    };
    assert_eq!(LlcV2::decode(&changed(70, 3)), Err(Malformed::RkeyCount));
    assert_eq!(LlcV2::decode(&changed(71, 2)), Err(Malformed::RkeyCount), "both bytes");
    assert_eq!(LlcV2::decode(&changed(1, 105)), Err(Malformed::Length));
    assert_eq!(LlcV2::decode(&changed(1, 71)), Err(Malformed::Extension));
    assert_eq!(LlcV2::decode(&hex::<43>(LINUX_DELETE_RKEY)), Err(Malformed::Length));
    let mut delete = hex::<44>(LINUX_DELETE_RKEY);
    delete[4] = 10;
    assert_eq!(LlcV2::decode(&delete), Err(Malformed::RkeyCount));
    let mut request = hex::<44>("252c0000");
    request[24] = 2;
    assert_eq!(LlcV2::decode(&request), Err(Malformed::Extension));
    request[24] = 1;
    assert!(LlcV2::decode(&request).is_ok());
}

/// Messages of version 1 have no business on such a link; what may be ignored is.
#[test]
fn tells_versions_apart() {
    let with_type = |first: u8| {
        let mut bytes = hex::<44>(LINUX_REJECTION);
        bytes[0] = first;
        LlcV2::decode(&bytes).map(|_| ())
    };
    assert_eq!(with_type(0x02), Err(Malformed::UnknownType(0x02)));
    assert_eq!(with_type(0xfe), Err(Malformed::UnknownType(0xfe)), "CDC");
    assert_eq!(with_type(0x23), Err(Malformed::UnknownType(0x23)), "no continuation");
    assert_eq!(with_type(0x8a), Err(Malformed::Ignorable(0x8a)));
    assert_eq!(LlcV2::decode(&[]), Err(Malformed::Length));
    assert!(is_v2(&[0x22]) && !is_v2(&[0x02]) && !is_v2(&[]));
}

/// Bits that nobody has given a meaning may get one; messages that carry them are understood.
#[test]
fn ignores_reserved_bytes() {
    let original = hex::<104>(LINUX_ADD_LINK);
    let mut changed = original;
    for byte in [3, 44] {
        changed[byte] ^= 0x1f;
    }
    changed[10..12].fill(0xff);
    changed[36..44].fill(0xff);
    changed[45] = 0xff;
    changed[62..70].fill(0xff);
    assert_eq!(LlcV2::decode(&changed), LlcV2::decode(&original));
}

#[test]
#[should_panic(expected = "needs its keys")]
fn a_link_without_keys_is_our_bug() {
    LlcV2::AddLink(AddLinkV2 { link: add_link(), extension: None }).encode(&mut [0; LEN_MAX]);
}

/// Lists that a message may have, kept while it borrows them.
#[derive(Clone, Debug)]
struct Lists {
    pairs: Vec<RkeyPair>,
    rkeys: Vec<Rkey>,
    gids: Vec<Gid>,
}

prop_compose! {
    fn any_lists()(
        pairs in prop::collection::vec(any::<(u32, u32, u64)>(), 0..=255),
        rkeys in prop::collection::vec(any::<u32>(), 0..=255),
        gids in prop::collection::vec(any_gid(), 0..=255),
    ) -> Lists {
        let pair = |(existing, new, address)| {
            RkeyPair { existing: Rkey(existing), new: Rkey(new), address }
        };
        Lists {
            pairs: pairs.into_iter().map(pair).collect(),
            rkeys: rkeys.into_iter().map(Rkey).collect(),
            gids,
        }
    }
}

prop_compose! {
    fn any_link()(
        (mac, gid, qpn, mtu, psn) in (any_mac(), any_gid(), any_qpn(), any_mtu(), any_psn()),
        (reply, rejected, link) in any::<(bool, bool, u8)>(),
    ) -> AddLink {
        AddLink { reply, rejected, reason: 0, mac, gid, qpn, link: LinkNumber(link), mtu, psn }
    }
}

/// One message of each type.
fn all(lists: &Lists, link: AddLink, other: u64) -> [LlcV2<'_>; 9] {
    let [byte, reply, ..] = other.to_le_bytes();
    let word = u32::try_from(other >> 32).unwrap();
    let AddLink { mac, gid, qpn, .. } = link;
    let on_link = RkeyOnLink { link: link.link, rkey: Rkey(word), address: other };
    let confirm = ConfirmLink {
        reply: link.reply,
        no_eyecatcher: link.rejected,
        mac,
        gid,
        qpn,
        link: link.link,
        user_id: LinkUserId(word),
        max_links: byte,
    };
    [
        LlcV2::ConfirmLink(ConfirmLinkV2 { link: confirm, max_connections: reply }),
        LlcV2::AddLink(AddLinkV2 {
            link,
            extension: Some(AddLinkExtension {
                direct: link.rejected,
                target: gid,
                rkeys: Records::ours(&lists.pairs),
            }),
        }),
        LlcV2::AddLink(AddLinkV2 { link: AddLink { rejected: true, ..link }, extension: None }),
        LlcV2::RequestAddLink(RequestAddLink {
            reply: link.reply,
            gids: Records::ours(&lists.gids),
        }),
        LlcV2::DeleteLink(DeleteLink {
            reply: link.reply,
            all: link.rejected,
            orderly: byte & 1 != 0,
            link: link.link,
            reason: DeleteReason(word),
        }),
        LlcV2::ConfirmRkey(ConfirmRkey {
            reply: link.reply,
            negative: link.rejected,
            retry: byte & 1 != 0,
            other_links: byte,
            rkey: Rkey(word),
            address: other,
            others: [on_link; 2],
        }),
        LlcV2::DeleteRkey(DeleteRkeyV2::Request(Records::ours(&lists.rkeys))),
        LlcV2::DeleteRkey(DeleteRkeyV2::Reply {
            negative: link.rejected,
            count: byte,
            invalid: reply,
        }),
        LlcV2::TestLink(TestLink { reply: link.reply, user_data: [byte; 16] }),
    ]
}

proptest! {
    #[test]
    fn survives_the_wire(lists in any_lists(), link in any_link(), other in any::<u64>()) {
        for message in all(&lists, link, other) {
            let mut buffer = [0xff; LEN_MAX];
            let bytes = message.encode(&mut buffer).to_vec();
            prop_assert_eq!(announced_len(&bytes), Ok(bytes.len()));
            let decoded = LlcV2::decode(&bytes);
            prop_assert_eq!(decoded, Ok(message));
            prop_assert_eq!(decoded.unwrap().is_reply(), message.is_reply());
        }
    }

    /// Whatever a peer sends, it cannot end the process; and what is understood can be said again.
    #[test]
    fn decodes_any_bytes(
        kind in prop_oneof![0x20..0x2a_u8, any::<u8>()],
        length in prop_oneof![44..300_u16, any::<u16>()],
        mut bytes in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        if let [first, low, high, ..] = &mut bytes[..] {
            *first = kind;
            [*low, *high] = length.to_le_bytes();
        }
        if let Ok(message) = LlcV2::decode(&bytes) {
            let mut buffer = [0; LEN_MAX];
            prop_assert_eq!(LlcV2::decode(message.encode(&mut buffer)), Ok(message));
        }
    }
}
