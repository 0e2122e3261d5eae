//! All CLC messages: bytes of other stacks, reserved bits, and whatever a peer may invent.

use std::format;
use std::vec::Vec;

use proptest::prelude::*;

use super::*;
use crate::vocabulary::{AlertToken, Gid, MacAddress, Mtu, PeerId, Psn, Qpn, Rkey, RmbeSize};
use crate::wire::tests::{
    any_gid, any_mac, any_mtu, any_peer_id, any_psn, any_qpn, assert_reserved, bits, hex,
};

// Sent by old Linux kernels and published by hwipl/smc-go; see tests/vectors/README.md.

pub(super) const LINUX_PROPOSAL: &str = "e2d4c3d9 01 0034 10 b1a098039babcdef \
    fe800000000000009a039bfffeabcdef 98039babcdef 0000 7f000000 08 0000 00 e2d4c3d9";
const LINUX_PROPOSAL_IPV6: &str = "e2d4c3d9 01 0045 10 394498039babcdef \
    fe800000000000009a039bfffeabcdef 98039babcdef 0000 00000000 00 0000 01 \
    00000000000000000000000000000001 80 e2d4c3d9";
const LINUX_ACCEPT: &str = "e2d4c3d9 02 0044 18 b1a098039babcdef \
    fe800000000000009a039bfffeabcdef 98039babcdef 0000e4 0000157d 01 00000005 23 00 \
    00000000f0a60000 00 72f5fe e2d4c3d9";
/// Of a kernel that left the first-contact flag clear.
const LINUX_CONFIRM: &str = "e2d4c3d9 03 0044 10 b1a098039babcdef \
    fe800000000000009a039bfffeabcdef 98039babcdef 0000e5 0000187f 01 00000006 23 00 \
    00000000f0a40000 00 0d89a4 e2d4c3d9";
pub(super) const LINUX_DECLINE: &str =
    "e2d4c3d9 04 001c 10 2525252525252500 03030000 00000000 e2d4c3d9";

/// Constructed from the kernel's sources: what it sends since 5.10 with an RNIC for SMC-Rv1.
const NEW_LINUX_PROPOSAL: &str = "e2d4c3d9 01 005c 28 b1a098039babcdef \
    fe800000000000009a039bfffeabcdef 98039babcdef 0028 \
    0000000000000000000000000000000000000000 0000000000000000000000000000000000000000 \
    0a010200 18 0000 00 e2d4c3d9";

const PEER_ID: PeerId = PeerId([0xb1, 0xa0, 0x98, 0x03, 0x9b, 0xab, 0xcd, 0xef]);
const MAC: MacAddress = MacAddress([0x98, 0x03, 0x9b, 0xab, 0xcd, 0xef]);
const GID: Gid =
    Gid([0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0x9a, 0x03, 0x9b, 0xff, 0xfe, 0xab, 0xcd, 0xef]);

/// What a framer makes of a message that arrives in one piece.
fn decode(bytes: &[u8]) -> Result<Option<Frame>, Malformed> {
    let mut framer = Framer::new();
    assert_eq!(framer.feed(bytes), bytes.len());
    framer.next_frame()
}

fn assert_decodes<const N: usize>(dump: &str, expected: Frame) {
    let bytes = hex::<N>(dump);
    assert_eq!(decode(&bytes), Ok(Some(expected)));
    assert_eq!(expected.encode().as_bytes(), bytes);
}

fn ipv4_proposal() -> Proposal {
    Proposal {
        peer_id: PEER_ID,
        gid: GID,
        mac: MAC,
        subnet: Ipv4Subnet { network: [127, 0, 0, 0], prefix_bits: 8 },
        prefixes: [Ipv6Prefix::default(); 8],
        prefix_count: 0,
        offers_smc_r_v1: true,
    }
}

/// An older Linux client reaches us; without this it would stay on TCP, or be reset.
// RFC 7609 A.2 #3: eye catchers around CLC messages
// RFC 7609 A.2.1 #1: peer id in every CLC message
// RFC 7609 A.2.2 #1: Proposal has type 1
// RFC 7609 A.2.2 #2: accept Proposal of 52 bytes
// RFC 7609 A.2.2 #4: peer id, GID, MAC in Proposal
// RFC 7609 A.2.2 #8: IPv4 subnet and its length
// RFC 7609 A.2.2 #9: send IPv4 network, not mask
// RFC 7609 A.2.2 #10: zero IPv4 subnet for IPv6
// RFC 7609 A.2.2 #12: no IPv6 prefixes for IPv4
// RFC 7609 A.2.2 #13: IPv6 prefix takes 17 bytes
#[test]
fn decodes_the_proposals_that_linux_sends() {
    let without_gap = |bytes: &[u8], expected: Proposal| {
        assert_eq!(decode(bytes), Ok(Some(Frame::Proposal(expected))));
        // Ours is the same but for the length, the offset and the gap.
        let encoded = Frame::Proposal(expected).encode();
        let (ours, gap) = (encoded.as_bytes(), 40);
        assert_eq!(ours.len(), bytes.len() + gap);
        let length = u16::try_from(ours.len()).unwrap().to_be_bytes();
        assert_eq!((&ours[5..7], &ours[38..40]), (&length[..], &[0, 40][..]));
        assert_eq!((&ours[..5], &ours[7..38]), (&bytes[..5], &bytes[7..38]));
        assert!(ours[40..80].iter().all(|byte| *byte == 0));
        assert_eq!(ours[80..], bytes[40..]);
    };
    without_gap(&hex::<52>(LINUX_PROPOSAL), ipv4_proposal());

    let mut prefixes = [Ipv6Prefix::default(); 8];
    prefixes[0].prefix[15] = 1;
    prefixes[0].prefix_bits = 128;
    let ipv6 = Proposal {
        peer_id: PeerId([0x39, 0x44, 0x98, 0x03, 0x9b, 0xab, 0xcd, 0xef]),
        subnet: Ipv4Subnet::default(),
        prefixes,
        prefix_count: 1,
        ..ipv4_proposal()
    };
    without_gap(&hex::<69>(LINUX_PROPOSAL_IPV6), ipv6);
    assert_eq!(ipv6.ipv6_prefixes(), &prefixes[..1]);
}

/// A field in the wrong place here is a write to the wrong address there, and the whole link group
/// goes down.
// RFC 7609 A.2.1 #1: peer id in every CLC message
// RFC 7609 A.2.3 #1: Accept: type 2, 68 bytes
// RFC 7609 A.2.3 #2: F means first contact
// RFC 7609 A.2.3 #4: QP number at byte 38
// RFC 7609 A.2.3 #5: RKey at byte 41
// RFC 7609 A.2.3 #6: element index at byte 45
// RFC 7609 A.2.3 #7: alert token at byte 46
// RFC 7609 A.2.3 #8: element size in byte 50
// RFC 7609 A.2.3 #10: MTU in byte 50
// RFC 7609 A.2.3 #14: RMB address at byte 52
// RFC 7609 A.2.3 #15: initial PSN at byte 61
// RFC 7609 2.1 #10: compute element address from index
// RFC 7609 A.2 #1: send reserved CLC fields as zero
#[test]
fn decodes_the_accept_that_linux_sends() {
    let expected = Offer {
        first_contact: true,
        peer_id: PEER_ID,
        gid: GID,
        mac: MAC,
        qpn: Qpn(0xe4),
        rkey: Rkey(0x157d),
        rmbe_index: 1,
        alert_token: AlertToken(5),
        rmbe_size: RmbeSize::KIB_64,
        mtu: Mtu::B1024,
        rmb_address: 0xf0a6_0000,
        psn: Psn(0x72_f5fe),
    };
    assert_decodes::<68>(LINUX_ACCEPT, Frame::Accept(expected));
    assert_eq!(expected.rmbe_address(), 0xf0a6_0000);
    assert_eq!(Offer { rmbe_index: 3, ..expected }.rmbe_address(), 0xf0a8_0000);
}

// RFC 7609 A.2.4 #1: Confirm: type 3, as Accept
// RFC 7609 A.2.4 #3: Confirm with client's RMB values
#[test]
fn decodes_the_confirm_that_linux_sends() {
    let expected = Offer {
        first_contact: false,
        peer_id: PEER_ID,
        gid: GID,
        mac: MAC,
        qpn: Qpn(0xe5),
        rkey: Rkey(0x187f),
        rmbe_index: 1,
        alert_token: AlertToken(6),
        rmbe_size: RmbeSize::KIB_64,
        mtu: Mtu::B1024,
        rmb_address: 0xf0a4_0000,
        psn: Psn(0x0d_89a4),
    };
    assert_decodes::<68>(LINUX_CONFIRM, Frame::Confirm(expected));
}

// RFC 7609 A.2.1 #1: peer id in every CLC message
// RFC 7609 A.2.5 #1: Decline: type 4, 28 bytes
// RFC 7609 A.2.5 #2: S means out of sync
// RFC 7609 A.2.5 #4: Decline's peer id at byte 8
// RFC 7609 A.2.5 #5: Decline's diagnosis at byte 16
#[test]
fn decodes_the_decline_that_linux_sends() {
    let expected = Decline {
        out_of_sync: false,
        peer_id: PeerId([0x25, 0x25, 0x25, 0x25, 0x25, 0x25, 0x25, 0]),
        diagnosis: Diagnosis::NO_DEVICE,
    };
    assert_decodes::<28>(LINUX_DECLINE, Frame::Decline(expected));
}

/// A Linux server answers a client of version 2 with the long form: fallback, not a reset.
#[test]
fn decodes_a_decline_of_version_2() {
    let bytes = hex::<44>(
        "e2d4c3d9 04 002c 28 b1a098039babcdef 03030002 20000000 \
         00000000000000000000000000000000 e2d4c3d9",
    );
    let decline =
        Decline { out_of_sync: true, peer_id: PEER_ID, diagnosis: Diagnosis::NO_SMC_R_DEVICE };
    let expected = DeclineV2 { decline, os: v2::OsType::LINUX, information: [0; 4] };
    assert_decodes::<44>(
        "e2d4c3d9 04 002c 28 b1a098039babcdef 03030002 20000000 \
         00000000000000000000000000000000 e2d4c3d9",
        Frame::DeclineV2(expected),
    );
    assert_eq!(decode(&bytes), Ok(Some(Frame::DeclineV2(expected))));
}

/// Every Linux since 5.10 proposes in this form, also where only SMC-Rv1 is possible.
// RFC 7609 A.2 #5: use the lower version
// RFC 7609 A.2.2 #5: gap of 40 bytes in Proposal
// RFC 7609 A.2.2 #6: skip offset to find the subnet
#[test]
fn decodes_the_proposal_of_newer_kernels() {
    let expected = Proposal {
        subnet: Ipv4Subnet { network: [10, 1, 2, 0], prefix_bits: 24 },
        ..ipv4_proposal()
    };
    let mut bytes = hex::<92>(NEW_LINUX_PROPOSAL);
    let new = |v1| Frame::ProposalV2(ProposalV2 { v1, v2: None });
    assert_decodes::<92>(NEW_LINUX_PROPOSAL, new(expected));
    // SMC-R and SMC-D, and then what is none of our business: SMC-D alone, or nothing.
    for (flags, offers) in [(0x2b, true), (0x29, false), (0x2a, false)] {
        bytes[7] = flags;
        let Ok(Some(Frame::ProposalV2(proposal))) = decode(&bytes) else { panic!("{flags:#x}") };
        let ProposalV2 { v1: proposal, v2: None } = proposal else { panic!("{flags:#x}") };
        assert_eq!(proposal.offers_smc_r_v1, offers, "{flags:#x}");
        let subnet = if offers { expected.subnet } else { Ipv4Subnet::default() };
        assert_eq!(proposal.subnet, subnet, "{flags:#x}");
    }
}

/// A client that has SMC-D only gets a Decline, and its connection goes on over TCP.
#[test]
fn reads_a_proposal_of_smc_d() {
    let mut bytes = hex::<92>(NEW_LINUX_PROPOSAL);
    bytes[3] = 0xc4;
    bytes[91] = 0xc4;
    let Ok(Some(Frame::ProposalV2(proposal))) = decode(&bytes) else { panic!() };
    assert!(!proposal.v1.offers_smc_r_v1 && proposal.v2.is_none());
    // Nobody else may begin like that.
    let mut accept = hex::<68>(LINUX_ACCEPT);
    accept[3] = 0xc4;
    assert_eq!(decode(&accept), Err(Malformed::Eyecatcher));
}

/// A peer that miscounts cannot make us read past its message.
// RFC 7609 A.2.2 #7: refuse offset outside the message
// RFC 7609 A.2.2 #11: at most eight IPv6 prefixes
// RFC 7609 A.2.2 #12: no IPv6 prefixes for IPv4
// RFC 7609 A.2.2 #14: Proposal length agrees with contents
#[test]
fn refuses_prefix_areas_that_do_not_fit() {
    let refused = |change: &dyn Fn(&mut [u8; 69])| {
        let mut bytes = hex::<69>(LINUX_PROPOSAL_IPV6);
        change(&mut bytes);
        assert_eq!(decode(&bytes), Err(Malformed::PrefixArea));
    };
    refused(&|bytes| bytes[47] = 0); // Bytes behind the prefixes.
    refused(&|bytes| bytes[47] = 2); // More prefixes than bytes.
    refused(&|bytes| bytes[47] = 255);
    refused(&|bytes| bytes[39] = 1); // One byte too far.
    refused(&|bytes| bytes[39] = 26); // Behind the body.
    refused(&|bytes| bytes[38] = 0xff); // Behind the message.

    // Nine prefixes would fit here, but eight is the most.
    let mut long = [0; LEN_OF_NINE];
    long[..52].copy_from_slice(&hex::<52>(LINUX_PROPOSAL));
    put(&mut long, field::LENGTH, &[0, 205]);
    long[48..52].fill(0);
    long[201..].copy_from_slice(&EYECATCHER);
    long[47] = 9;
    assert_eq!(decode(&long), Err(Malformed::PrefixArea));
}

const LEN_OF_NINE: usize = 52 + 9 * 17;

/// What is no message closes the connection, and the counter of reasons says why.
// RFC 7609 A.2 #4: check both CLC eye catchers
// RFC 7609 C.6 #3: malformed CLC is a protocol error
// RFC 7609 2.1 #9: element index from 1 to 255
// RFC 7609 A.2 #5: use the lower version
#[test]
fn refuses_broken_headers_and_trailers() {
    let outcome = |dump: &str, at: usize, value: u8| {
        let mut bytes = hex::<68>(dump).to_vec();
        bytes.truncate(usize::from(bytes[6]));
        bytes[at] = value;
        decode(&bytes)
    };
    for dump in [LINUX_PROPOSAL, LINUX_ACCEPT, LINUX_CONFIRM, LINUX_DECLINE] {
        let last = usize::from(hex::<68>(dump)[6]) - 1;
        assert_eq!(outcome(dump, 0, 0), Err(Malformed::Eyecatcher));
        assert_eq!(outcome(dump, 4, 0), Err(Malformed::UnknownType(0)));
        assert_eq!(outcome(dump, 4, 5), Err(Malformed::UnknownType(5)));
        assert_eq!(outcome(dump, 7, 0x08), Err(Malformed::Version(0)));
        assert_eq!(outcome(dump, 5, 0xff), Err(Malformed::Length));
        assert_eq!(outcome(dump, 6, 27), Err(Malformed::Length));
        assert_eq!(outcome(dump, last, 0), Err(Malformed::Trailer));
    }
    assert_eq!(outcome(LINUX_ACCEPT, 7, 0x38), Err(Malformed::Version(3)));
    assert_eq!(outcome(LINUX_ACCEPT, 7, 0x28), Err(Malformed::Length), "too short for 2");
    assert_eq!(outcome(LINUX_CONFIRM, 7, 0x20), Err(Malformed::Length), "too short for 2");
    assert_eq!(outcome(LINUX_ACCEPT, 45, 0), Err(Malformed::RmbeIndex));
}

/// Linux once took a reserved bit of a Decline for a protocol error, and closed connections that
/// should have gone on over TCP. Nor may a bit that has a meaning be overlooked.
// RFC 7609 A.2 #2: ignore reserved CLC fields
// RFC 7609 A.2 #1: send reserved CLC fields as zero
#[test]
fn ignores_reserved_bytes() {
    // Newer versions of a Proposal are told apart; those of a Decline, by its length.
    assert_reserved(&hex::<52>(LINUX_PROPOSAL), &bits(&[(7..8, 0x0c), (45..47, 0xff)]), |bytes| {
        decode(bytes)
    });
    assert_reserved(
        &hex::<68>(LINUX_ACCEPT),
        &bits(&[(7..8, 0x07), (51..52, 0xff), (60..61, 0xff)]),
        |bytes| decode(bytes),
    );
    assert_reserved(
        &hex::<68>(LINUX_CONFIRM),
        &bits(&[(7..8, 0x07), (51..52, 0xff), (60..61, 0xff)]),
        |bytes| decode(bytes),
    );
    assert_reserved(&hex::<28>(LINUX_DECLINE), &bits(&[(7..8, 0xe7), (20..24, 0xff)]), |bytes| {
        decode(bytes)
    });
}

/// The log names the codes we know, and keeps the number of those we do not.
#[test]
fn unknown_diagnoses_survive() {
    assert_eq!(format!("{:?}", Diagnosis::TIMED_OUT), "TIMED_OUT");
    assert_eq!(Diagnosis(0x0999_0003).name(), Some("RKEY_REGISTRATION"));
    assert_eq!(format!("{:?}", Diagnosis(0x0305_0002)), "Diagnosis(0x03050002)");
}

#[test]
#[should_panic(expected = "offers SMC-Rv1")]
fn proposes_nothing_that_it_cannot_do() {
    let _ = Frame::Proposal(Proposal { offers_smc_r_v1: false, ..ipv4_proposal() }).encode();
}

prop_compose! {
    fn any_proposal()(
        (peer_id, gid, mac) in (any_peer_id(), any_gid(), any_mac()),
        (network, prefix_bits) in any::<([u8; 4], u8)>(),
        list in prop::collection::vec(any::<([u8; 16], u8)>(), 0..=8),
    ) -> Frame {
        let mut prefixes = [Ipv6Prefix::default(); 8];
        for (prefix, (bytes, bits)) in prefixes.iter_mut().zip(&list) {
            *prefix = Ipv6Prefix { prefix: *bytes, prefix_bits: *bits };
        }
        Frame::Proposal(Proposal {
            peer_id,
            gid,
            mac,
            subnet: Ipv4Subnet { network, prefix_bits },
            prefixes,
            prefix_count: u8::try_from(list.len()).unwrap(),
            offers_smc_r_v1: true,
        })
    }
}

prop_compose! {
    fn any_offer()(
        (peer_id, gid, mac, qpn) in (any_peer_id(), any_gid(), any_mac(), any_qpn()),
        (first_contact, rkey, token, rmb_address) in any::<(bool, u32, u32, u64)>(),
        rmbe_index in 1..=u8::MAX,
        (size, mtu, psn) in (0..16_u8, any_mtu(), any_psn()),
    ) -> Offer {
        Offer {
            first_contact,
            peer_id,
            gid,
            mac,
            qpn,
            rkey: Rkey(rkey),
            rmbe_index,
            alert_token: AlertToken(token),
            rmbe_size: RmbeSize::from_notation(size),
            mtu,
            rmb_address,
            psn,
        }
    }
}

fn any_frame() -> impl Strategy<Value = Frame> {
    let decline =
        (any::<(bool, u32)>(), any_peer_id()).prop_map(|((out_of_sync, code), peer_id)| {
            Frame::Decline(Decline { out_of_sync, peer_id, diagnosis: Diagnosis(code) })
        });
    prop_oneof![
        any_proposal(),
        any_offer().prop_map(Frame::Accept),
        any_offer().prop_map(Frame::Confirm),
        decline,
    ]
}

proptest! {
    // RFC 7609 A.2.2 #3: Proposal carries version 1
    #[test]
    fn survives_the_wire(frame in any_frame()) {
        prop_assert_eq!(decode(frame.encode().as_bytes()), Ok(Some(frame)));
    }

    /// Messages in a row come out as they went in, wherever TCP cut the stream.
    #[test]
    fn survives_a_stream(
        frames in prop::collection::vec(any_frame(), 1..6),
        cuts in prop::collection::vec(1..120_usize, 1..40),
    ) {
        let stream: Vec<u8> =
            frames.iter().flat_map(|frame| frame.encode().as_bytes().to_vec()).collect();
        let mut framer = Framer::new();
        let mut received = Vec::new();
        let mut rest = &stream[..];
        for cut in cuts.iter().cycle() {
            let taken = framer.feed(&rest[..rest.len().min(*cut)]);
            rest = &rest[taken..];
            while let Some(frame) = framer.next_frame().unwrap() {
                received.push(frame);
            }
            if rest.is_empty() {
                break;
            }
        }
        prop_assert_eq!(received, frames);
        prop_assert!(framer.leftover().is_empty());
    }

    /// Whatever a peer sends, it cannot end the process.
    #[test]
    fn decodes_any_bytes(
        frame in any_frame(),
        changes in prop::collection::vec((0..188_usize, any::<u8>()), 0..4),
        tail in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        let mut bytes = frame.encode().as_bytes().to_vec();
        bytes.extend(tail);
        for (at, value) in changes {
            if let Some(byte) = bytes.get_mut(at) {
                *byte = value;
            }
        }
        let _ = decode(&bytes);
    }

    /// Nor with lengths, offsets and counts that lie.
    #[test]
    fn decodes_any_proposal(
        length in 52..600_usize,
        version in prop::sample::select(&[0x10_u8, 0x20, 0x28, 0x2b][..]),
        offset in prop_oneof![0..600_u16, any::<u16>()],
        rest in prop::collection::vec(any::<u8>(), 600),
    ) {
        let mut bytes = rest;
        bytes.truncate(length);
        bytes[..8].copy_from_slice(&hex::<8>("e2d4c3d9 01"));
        put(&mut bytes, field::LENGTH, &u16::try_from(length).unwrap().to_be_bytes());
        bytes[field::VERSION_AND_FLAGS] = version;
        bytes[38..40].copy_from_slice(&offset.to_be_bytes());
        bytes[length - 4..].copy_from_slice(&EYECATCHER);
        if let Ok(Some(frame)) = decode(&bytes) {
            prop_assert_eq!(decode(frame.encode().as_bytes()), Ok(Some(frame)));
        }
    }
}
