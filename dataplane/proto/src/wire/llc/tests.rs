//! All LLC messages: bytes of other stacks, reserved bits, and whatever a peer may invent.

use proptest::prelude::*;

use super::*;
use crate::vocabulary::{Gid, LinkNumber, LinkUserId, MacAddress, Mtu, Psn, Qpn, Rkey};
use crate::wire::tests::{any_gid, any_mac, any_mtu, any_psn, any_qpn, assert_reserved, bits, hex};

// Sent by old Linux kernels and published by hwipl/smc-go; see tests/vectors/README.md.

const LINUX_CONFIRM_LINK: &str = "01 2c 00 03 98039babcdef fe800000000000009a039bfffeabcdef \
    000107 00 00010000 02";
/// Only meant to be rejected.
const LINUX_ADD_LINK: &str = "02 2c 00 00 98039babcdef 0000 fe800000000000009a039bfffeabcdef";
const LINUX_CONFIRM_RKEY: &str = "06 2c 00 00 00 0000155d 0000000eef4d0000";
const LINUX_DELETE_LINK: &str = "04 2c 00 60";

const MAC: MacAddress = MacAddress([0x98, 0x03, 0x9b, 0xab, 0xcd, 0xef]);
const GID: Gid =
    Gid([0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0x9a, 0x03, 0x9b, 0xff, 0xfe, 0xab, 0xcd, 0xef]);

fn assert_decodes(dump: &str, expected: Llc) {
    let bytes = hex(dump);
    assert_eq!(Llc::decode(&bytes), Ok(expected));
    assert_eq!(expected.encode(), bytes);
}

/// Without the two flag bits a Linux peer declines: "peer has RMBE eye catchers".
// RFC 7609 A.3 #1: LLC messages filled with zeros
// RFC 7609 A.3.1 #1: CONFIRM LINK: type 1, reply flag
// RFC 7609 A.3.1 #2: CONFIRM LINK: MAC, GID, QP number
// RFC 7609 A.3.1 #3: link number at byte 29
// RFC 7609 A.3.1 #4: link user id at byte 30
// RFC 7609 A.3.1 #5: link limit at byte 34
// RFC 7609 A.3.1 #6: agree on no eye catchers
// RFC 7609 3.3 #1: LLC messages are SENDs of 44 bytes
#[test]
fn decodes_the_confirm_link_that_linux_sends() {
    let expected = ConfirmLink {
        reply: false,
        no_eyecatcher: true,
        mac: MAC,
        gid: GID,
        qpn: Qpn(0x107),
        link: LinkNumber(0),
        user_id: LinkUserId(0x0001_0000),
        max_links: 2,
    };
    assert_decodes(LINUX_CONFIRM_LINK, Llc::ConfirmLink(expected));
}

/// Either of the two bits will do for a peer that sets one, and none means eye catchers.
#[test]
fn one_bit_says_no_eye_catcher() {
    for (flags, expected) in [(0x00, false), (0x01, true), (0x02, true), (0x83, true)] {
        let mut bytes = hex(LINUX_CONFIRM_LINK);
        bytes[field::FLAGS] = flags;
        let message = ConfirmLink::decode(&bytes);
        assert_eq!((message.no_eyecatcher, message.reply), (expected, flags & 0x80 != 0));
    }
}

/// Without the padding behind the MAC the GID would be wrong by two bytes, and the second link
/// would never come up.
// RFC 7609 A.3.2 #1: gap between MAC and GID
// RFC 7609 A.3.2 #2: ADD LINK: type 2, reply flag
// RFC 7609 A.3.2 #7: ADD LINK with MAC, GID, QP
#[test]
fn decodes_the_add_link_that_linux_sends() {
    let expected = AddLink {
        reply: false,
        rejected: false,
        reason: 0,
        mac: MAC,
        gid: GID,
        qpn: Qpn(0),
        link: LinkNumber(0),
        mtu: Mtu(0),
        psn: Psn(0),
    };
    assert_decodes(LINUX_ADD_LINK, Llc::AddLink(expected));
}

/// Our way out of a second link: the request, echoed with reply and rejection flags and a reason.
// RFC 7609 A.3 #2: one flag marks LLC replies
// RFC 7609 A.3.2 #3: Z marks a rejection
// RFC 7609 A.3.2 #4: rejection reason in byte 2
// RFC 7609 A.3.2 #5: reason 1: no alternate path
#[test]
fn rejects_a_link_as_linux_expects() {
    let Ok(Llc::AddLink(request)) = Llc::decode(&hex(LINUX_ADD_LINK)) else { panic!() };
    let rejection = AddLink {
        reply: true,
        rejected: true,
        reason: add_link::REASON_NO_ALTERNATE_PATH,
        ..request
    };
    let bytes = rejection.encode();
    assert_eq!(bytes[..4], [0x02, 44, 0x01, 0xc0]);
    assert_eq!(bytes[4..], hex::<LEN>(LINUX_ADD_LINK)[4..]);
}

// RFC 7609 A.3.5 #1: CONFIRM RKEY: type 6, reply flag
// RFC 7609 A.3.5 #5: RKey at byte 5, address at 9
#[test]
fn decodes_the_confirm_rkey_that_linux_sends() {
    let expected = ConfirmRkey {
        reply: false,
        negative: false,
        retry: false,
        other_links: 0,
        rkey: Rkey(0x155d),
        address: 0x0000_000e_ef4d_0000,
        others: [RkeyOnLink::default(); 2],
    };
    assert_decodes(LINUX_CONFIRM_RKEY, Llc::ConfirmRkey(expected));
}

// RFC 7609 A.3.4 #1: DELETE LINK: type 4, reply flag
// RFC 7609 A.3.4 #2: flag that deletes all links
// RFC 7609 A.3.4 #3: flag that says orderly
// RFC 7609 2.3 #14: say whether deletion is orderly
#[test]
fn decodes_the_delete_link_that_linux_sends() {
    let expected = DeleteLink {
        reply: false,
        all: true,
        orderly: true,
        link: LinkNumber(0),
        reason: DeleteReason(0),
    };
    assert_decodes(LINUX_DELETE_LINK, Llc::DeleteLink(expected));
}

/// Messages that no capture has, written down from the RFC's figures: A.3.3, A.3.6, A.3.7, A.3.8.
// RFC 7609 A.3.3 #1: ADD LINK CONTINUATION: type 3, reply flag
// RFC 7609 A.3.3 #6: new link's number at byte 4
// RFC 7609 A.3.3 #9: at most two pairs per message
// RFC 7609 A.3.6 #1: CONFIRM RKEY CONTINUATION: type 8, reply flag
// RFC 7609 A.3.6 #3: at most three RTokens per message
// RFC 7609 A.3.7 #1: DELETE RKEY: type 9, reply flag
// RFC 7609 A.3.7 #5: deleted RKeys from byte 8
// RFC 7609 A.3.8 #1: TEST LINK: type 7, reply flag
// RFC 7609 A.3.5 #2: negative flag of CONFIRM RKEY
// RFC 7609 A.3.6 #5: negative flag of CONFIRM RKEY CONTINUATION
// RFC 7609 A.3.7 #2: negative flag of DELETE RKEY
#[test]
fn decodes_what_the_rfc_draws() {
    let pair = |n: u8| RkeyPair {
        existing: Rkey(u32::from(n)),
        new: Rkey(0x0a00_0000 + u32::from(n)),
        address: 0x0b00_0000_0000_0000 + u64::from(n),
    };
    assert_decodes(
        "03 2c 00 80 02 05 0000 00000001 0a000001 0b00000000000001 \
         00000002 0a000002 0b00000000000002",
        Llc::AddLinkContinuation(AddLinkContinuation {
            reply: true,
            link: LinkNumber(2),
            remaining: 5,
            pairs: [pair(1), pair(2)],
        }),
    );
    let on_link = |n: u8| RkeyOnLink {
        link: LinkNumber(n),
        rkey: Rkey(0x0c00_0000 + u32::from(n)),
        address: 0x0d00_0000_0000_0000 + u64::from(n),
    };
    assert_decodes(
        "08 2c 00 a0 03 05 0c000005 0d00000000000005 06 0c000006 0d00000000000006 \
         07 0c000007 0d00000000000007",
        Llc::ConfirmRkeyContinuation(ConfirmRkeyContinuation {
            reply: true,
            negative: true,
            remaining: 3,
            others: [5, 6, 7].map(on_link),
        }),
    );
    assert_decodes(
        "09 2c 00 a0 08 50 0000 00000001 00000002 00000003 00000004 00000005 00000006 00000007 \
         00000008",
        Llc::DeleteRkey(DeleteRkey {
            reply: true,
            negative: true,
            count: 8,
            error_mask: 0x50,
            rkeys: [1, 2, 3, 4, 5, 6, 7, 8].map(Rkey),
        }),
    );
    assert_decodes(
        "07 2c 00 80 000102030405060708090a0b0c0d0e0f",
        Llc::TestLink(TestLink {
            reply: true,
            user_data: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        }),
    );
}

/// A newer peer may try an optional message; the link must survive that, and nothing else.
// RFC 7609 A.3 #3: unknown opcode 00: protocol error
// RFC 7609 A.3 #4: unknown opcode 10: drop silently
#[test]
fn tells_optional_types_from_mandatory_ones() {
    let known = [1, 2, 3, 4, 6, 7, 8, 9];
    for kind in 0..=u8::MAX {
        let mut bytes = [0; LEN];
        bytes[field::TYPE] = kind;
        bytes[field::LENGTH] = LENGTH;
        let outcome = Llc::decode(&bytes);
        match kind {
            _ if known.contains(&kind) => assert!(outcome.is_ok(), "{kind:#x}"),
            0x80..=0xbf => assert_eq!(outcome, Err(Malformed::Ignorable(kind))),
            _ => assert_eq!(outcome, Err(Malformed::UnknownType(kind))),
        }
    }
}

/// What is no message breaks the link, rather than being half understood.
// RFC 7609 A.3 #1: LLC messages filled with zeros
// RFC 7609 A.3.7 #3: byte 4 counts deleted RKeys
#[test]
fn refuses_wrong_lengths_and_counts() {
    for kind in [1, 2, 3, 4, 6, 7, 8, 9] {
        let mut bytes = [0; LEN];
        bytes[field::TYPE] = kind;
        for length in [0, 43, 45] {
            bytes[field::LENGTH] = length;
            assert_eq!(Llc::decode(&bytes), Err(Malformed::Length), "{kind}");
        }
    }
    assert_eq!(Llc::decode(&hex("09 2c 00 00 09")), Err(Malformed::RkeyCount));
}

/// What a later version puts into reserved bits must not break us, and no bit that has a meaning
/// may be overlooked.
// RFC 7609 A.3.5 #3: retry flag of CONFIRM RKEY
#[test]
fn ignores_reserved_bytes() {
    let check = |dump: &str, reserved: [u8; LEN]| {
        assert_reserved(&hex(dump), &reserved, Llc::decode);
    };
    check("01 2c", bits(&[(2..3, 0xff), (3..4, 0x7c), (35..44, 0xff)]));
    check(
        LINUX_ADD_LINK,
        bits(&[(2..3, 0xf0), (3..4, 0x3f), (10..12, 0xff), (32..33, 0xf0), (36..44, 0xff)]),
    );
    check("03 2c", bits(&[(2..3, 0xff), (3..4, 0x7f), (6..8, 0xff), (40..44, 0xff)]));
    check(LINUX_DELETE_LINK, bits(&[(2..3, 0xff), (3..4, 0x1f), (9..44, 0xff)]));
    check(LINUX_CONFIRM_RKEY, bits(&[(2..3, 0xff), (3..4, 0x4f), (43..44, 0xff)]));
    check("07 2c", bits(&[(2..3, 0xff), (3..4, 0x7f), (20..44, 0xff)]));
    check("08 2c", bits(&[(2..3, 0xff), (3..4, 0x5f)]));
    check("09 2c", bits(&[(2..3, 0xff), (3..4, 0x5f), (6..8, 0xff), (40..44, 0xff)]));
}

#[test]
#[should_panic(expected = "QPNs and PSNs have 24 bits")]
fn sends_no_number_that_does_not_fit() {
    let Ok(Llc::ConfirmLink(message)) = Llc::decode(&hex(LINUX_CONFIRM_LINK)) else { panic!() };
    let _ = ConfirmLink { qpn: Qpn(1 << 24), ..message }.encode();
}

prop_compose! {
    fn any_confirm_link()(
        (reply, no_eyecatcher, link, user_id, max_links) in any::<(bool, bool, u8, u32, u8)>(),
        mac in any_mac(),
        gid in any_gid(),
        qpn in any_qpn(),
    ) -> Llc {
        let (link, user_id) = (LinkNumber(link), LinkUserId(user_id));
        Llc::ConfirmLink(ConfirmLink {
            reply, no_eyecatcher, mac, gid, qpn, link, user_id, max_links,
        })
    }
}

prop_compose! {
    fn any_add_link()(
        (reply, rejected, link) in any::<(bool, bool, u8)>(),
        reason in 0..16_u8,
        mac in any_mac(),
        gid in any_gid(),
        qpn in any_qpn(),
        mtu in any_mtu(),
        psn in any_psn(),
    ) -> Llc {
        let link = LinkNumber(link);
        Llc::AddLink(AddLink { reply, rejected, reason, mac, gid, qpn, link, mtu, psn })
    }
}

prop_compose! {
    fn any_delete_rkey()(
        (reply, negative, error_mask, rkeys) in any::<(bool, bool, u8, [u32; 8])>(),
        count in 0..=8_u8,
    ) -> Llc {
        let rkeys = rkeys.map(Rkey);
        Llc::DeleteRkey(DeleteRkey { reply, negative, count, error_mask, rkeys })
    }
}

fn any_rkeys_on_links<const N: usize>() -> impl Strategy<Value = [RkeyOnLink; N]> {
    any::<[(u8, u32, u64); N]>().prop_map(|all| {
        all.map(|(link, rkey, address)| RkeyOnLink {
            link: LinkNumber(link),
            rkey: Rkey(rkey),
            address,
        })
    })
}

fn any_llc() -> impl Strategy<Value = Llc> {
    let add_link_continuation = any::<(bool, u8, u8, [(u32, u32, u64); 2])>().prop_map(
        |(reply, link, remaining, pairs)| {
            Llc::AddLinkContinuation(AddLinkContinuation {
                reply,
                link: LinkNumber(link),
                remaining,
                pairs: pairs.map(|(existing, new, address)| RkeyPair {
                    existing: Rkey(existing),
                    new: Rkey(new),
                    address,
                }),
            })
        },
    );
    let delete_link =
        any::<(bool, bool, bool, u8, u32)>().prop_map(|(reply, all, orderly, link, reason)| {
            let (link, reason) = (LinkNumber(link), DeleteReason(reason));
            Llc::DeleteLink(DeleteLink { reply, all, orderly, link, reason })
        });
    let confirm_rkey = (any::<([bool; 3], u8, u32, u64)>(), any_rkeys_on_links()).prop_map(
        |(([reply, negative, retry], other_links, rkey, address), others)| {
            let rkey = Rkey(rkey);
            Llc::ConfirmRkey(ConfirmRkey {
                reply,
                negative,
                retry,
                other_links,
                rkey,
                address,
                others,
            })
        },
    );
    let confirm_rkey_continuation = (any::<(bool, bool, u8)>(), any_rkeys_on_links()).prop_map(
        |((reply, negative, remaining), others)| {
            Llc::ConfirmRkeyContinuation(ConfirmRkeyContinuation {
                reply,
                negative,
                remaining,
                others,
            })
        },
    );
    let test_link = any::<(bool, [u8; 16])>()
        .prop_map(|(reply, user_data)| Llc::TestLink(TestLink { reply, user_data }));
    prop_oneof![
        any_confirm_link(),
        any_add_link(),
        add_link_continuation,
        delete_link,
        confirm_rkey,
        confirm_rkey_continuation,
        any_delete_rkey(),
        test_link,
    ]
}

proptest! {
    #[test]
    fn survives_the_wire(message in any_llc()) {
        let bytes = message.encode();
        prop_assert_eq!(Llc::decode(&bytes), Ok(message));
        prop_assert_eq!(message.is_reply(), bytes[field::FLAGS] & REPLY != 0);
    }

    /// Whatever a peer sends, it cannot end the process; and what we understand of it, we can say.
    #[test]
    fn decodes_any_bytes(kind in 0..16_u8, rest in any::<[u8; LEN - 2]>()) {
        let mut bytes = [kind; LEN];
        bytes[1] = LENGTH;
        bytes[2..].copy_from_slice(&rest);
        if let Ok(message) = Llc::decode(&bytes) {
            prop_assert_eq!(Llc::decode(&message.encode()), Ok(message));
        }
    }
}
