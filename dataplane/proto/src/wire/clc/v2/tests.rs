//! CLC messages of version 2: what Linux sent, and whatever a peer may invent.

use std::format;
use std::vec::Vec;

use proptest::prelude::*;

use super::super::{
    Decline, Diagnosis, EYECATCHER, Frame, Framer, Ipv4Subnet, Ipv6Prefix, Offer, Proposal,
};
use super::*;
use crate::vocabulary::{AlertToken, Gid, MacAddress, Mtu, PeerId, Psn, Qpn, Rkey, RmbeSize};
use crate::wire::Malformed;
use crate::wire::tests::{any_gid, any_mac, any_mtu, any_peer_id, any_psn, any_qpn, hex};

// Sent by Linux 6.12.95; see tests/vectors/clc_v2.txt.

/// Of a client that has no RNIC for SMC-Rv1.
const LINUX_PROPOSAL: &str = "e2d4c3d9 01 009c 22 0000000000000000 \
    00000000000000000000000000000000 000000000000 0000 0000000000000000 0000 001c \
    00000000000000000000000000000000000000000000000000000000 01 00 00 10 0000 0000 \
    00000000000000000000ffff0a090002 ff 02 0001 000000000000000000000000 \
    5445535445494431202020202020202020202020202020202020202020202020 e2d4c3d9";
/// Not captured, but constructed.
const BOTH_VERSIONS: &str = "e2d4c3d9 01 00d5 20 0102030405060708 \
    fefefefefefefefefefefefefefefefe 020202020202 0028 0000000000000000 0000 0035 \
    00000000000000000000000000000000000000000000000000000000 \
    0a010200 18 0000 01 20202020202020202020202020202020 40 02 00 00 10 0000 0000 \
    00000000000000000000ffff0a090002 ff 02 0001 000000000000000000000000 \
    5445535445494431202020202020202020202020202020202020202020202020 \
    534d434741544520202020202020202020202020202020202020202020202020 e2d4c3d9";
/// Of a first contact.
const LINUX_ACCEPT: &str = "e2d4c3d9 02 00a0 28 a50152540000000a \
    00000000000000000000ffff0a090001 52540000000a 000011 0000035a 01 00000001 23 00 \
    ff48160183bb0000 00 1fa93c \
    5445535445494431202020202020202020202020202020202020202020202020 0000000000000000 \
    80 21 0000 766d412020202020202020202020202020202020202020202020202020202020 \
    ff 02 0001 00000000 0000000000000000 e2d4c3d9";
/// The answer, of a client with one port.
const LINUX_CONFIRM: &str = "e2d4c3d9 03 00b4 28 0c2152540000000b \
    00000000000000000000ffff0a090002 52540000000b 000011 000003a7 01 00000001 23 00 \
    ff2d6affc4050000 00 7c65d2 \
    5445535445494431202020202020202020202020202020202020202020202020 0000000000000000 \
    80 21 0000 766d422020202020202020202020202020202020202020202020202020202020 \
    ff 02 0001 00000000 0000000000000000 01 000000 00000000000000000000ffff0a090002 e2d4c3d9";

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

fn eid() -> Eid {
    Eid::new("testeid1").unwrap()
}

fn client_gid() -> Gid {
    Gid::from_ipv4([10, 9, 0, 2])
}

/// All that is zero in a Proposal that does not offer version 1.
fn no_v1() -> Proposal {
    Proposal {
        peer_id: PeerId::default(),
        gid: Gid::default(),
        mac: MacAddress::default(),
        subnet: Ipv4Subnet::default(),
        prefixes: [Ipv6Prefix::default(); 8],
        prefix_count: 0,
        offers_smc_r_v1: false,
    }
}

fn extension() -> ProposalExtension {
    ProposalExtension {
        release: 1,
        gid: client_gid(),
        max_connections: 255,
        max_links: 2,
        features: 1,
        eids: Eids::from_items([eid()]).unwrap(),
    }
}

fn first_contact(host: &str) -> FirstContact {
    let capabilities = Capabilities {
        max_connections: 255,
        max_links: 2,
        features: 1,
        vendor_options: VendorOptions::default(),
    };
    FirstContact {
        direct: true,
        os: OsType::LINUX,
        release: 1,
        host_name: HostName::new(host),
        capabilities: Some(capabilities),
    }
}

fn server_offer() -> Offer {
    Offer {
        first_contact: true,
        peer_id: PeerId([0xa5, 1, 0x52, 0x54, 0, 0, 0, 0x0a]),
        gid: Gid::from_ipv4([10, 9, 0, 1]),
        mac: MacAddress([0x52, 0x54, 0, 0, 0, 0x0a]),
        qpn: Qpn(0x11),
        rkey: Rkey(0x35a),
        rmbe_index: 1,
        alert_token: AlertToken(1),
        rmbe_size: RmbeSize::KIB_64,
        mtu: Mtu::B1024,
        rmb_address: 0xff48_1601_83bb_0000,
        psn: Psn(0x1f_a93c),
    }
}

/// A Linux client over soft-RoCE reaches us.
#[test]
fn decodes_the_proposal_that_linux_sends() {
    let expected = ProposalV2 { v1: no_v1(), v2: Some(extension()) };
    assert_decodes::<156>(LINUX_PROPOSAL, Frame::ProposalV2(expected));
}

/// A client that can do both: the extension stands behind the prefix area, whose length varies.
/// Constructed; tshark 4.0 reads it as it is meant.
#[test]
fn proposes_both_versions() {
    let mut prefixes = [Ipv6Prefix::default(); 8];
    prefixes[0] = Ipv6Prefix { prefix: [0x20; 16], prefix_bits: 64 };
    let v1 = Proposal {
        peer_id: PeerId([1, 2, 3, 4, 5, 6, 7, 8]),
        gid: Gid([0xfe; 16]),
        mac: MacAddress([2; 6]),
        subnet: Ipv4Subnet { network: [10, 1, 2, 0], prefix_bits: 24 },
        prefixes,
        prefix_count: 1,
        offers_smc_r_v1: true,
    };
    let eids = Eids::from_items([eid(), Eid::SMCGATE]).unwrap();
    let v2 = Some(ProposalExtension { eids, ..extension() });
    assert_decodes::<213>(BOTH_VERSIONS, Frame::ProposalV2(ProposalV2 { v1, v2 }));
}

/// A Linux server accepts us; the operator sees who it is.
#[test]
fn decodes_the_accept_that_linux_sends() {
    let expected = OfferV2 {
        offer: server_offer(),
        eid: eid(),
        first_contact: Some(first_contact("vmA")),
        gids: Gids::new(),
    };
    assert_decodes::<160>(LINUX_ACCEPT, Frame::AcceptV2(expected));
    let peer = first_contact("vmA");
    assert_eq!(format!("{} {:?} {}", peer.os, peer.os, peer.host_name), "Linux Linux vmA");
    assert_eq!(format!("{:?} {}", HostName([0; 32]), OsType(9)), "HostName() OS 9");
}

/// Its list of ports is what a second link is built from.
#[test]
fn decodes_the_confirm_that_linux_sends() {
    let offer = Offer {
        peer_id: PeerId([0x0c, 0x21, 0x52, 0x54, 0, 0, 0, 0x0b]),
        gid: client_gid(),
        mac: MacAddress([0x52, 0x54, 0, 0, 0, 0x0b]),
        rkey: Rkey(0x3a7),
        rmb_address: 0xff2d_6aff_c405_0000,
        psn: Psn(0x7c_65d2),
        ..server_offer()
    };
    let expected = OfferV2 {
        offer,
        eid: eid(),
        first_contact: Some(first_contact("vmB")),
        gids: Gids::from_items([client_gid()]).unwrap(),
    };
    assert_decodes::<180>(LINUX_CONFIRM, Frame::ConfirmV2(expected));
}

/// Kernels before 6.6 are of release 0: their extension is shorter.
#[test]
fn decodes_release_0() {
    let mut bytes = hex::<160>(LINUX_ACCEPT).to_vec();
    bytes[105] = 0x20;
    bytes.drain(140..156);
    bytes[6] = 144;
    let Ok(Some(Frame::AcceptV2(accept))) = decode(&bytes) else { panic!() };
    let expected = FirstContact { release: 0, capabilities: None, ..first_contact("vmA") };
    assert_eq!(accept.first_contact, Some(expected));
    assert_eq!(Frame::AcceptV2(accept).encode().as_bytes(), bytes);
}

/// SMC-D parts of a Proposal, a system EID and ISM devices, are skipped: a mainframe is a peer like
/// any other.
#[test]
fn skips_what_is_of_smc_d() {
    let proposal = ProposalV2 { v1: no_v1(), v2: Some(extension()) };
    let mut bytes = hex::<156>(LINUX_PROPOSAL).to_vec();
    let smc_d = [[0x5e; 32].as_slice(), &[0; 16], &[7; 20]].concat();
    bytes.splice(152..152, smc_d.iter().copied());
    bytes[6] += u8::try_from(smc_d.len()).unwrap();
    bytes[7] = 0x2e; // Version 2 of both.
    bytes[81] = 2; // ISM devices.
    bytes[83] |= 1; // The system EID is there.
    bytes[86..88].copy_from_slice(&[0, 32]);
    assert_eq!(decode(&bytes), Ok(Some(Frame::ProposalV2(proposal))));
    // SMC-D alone is nothing to us.
    bytes[7] = 0x26;
    let nothing = ProposalV2 { v1: no_v1(), v2: None };
    assert_eq!(decode(&bytes), Ok(Some(Frame::ProposalV2(nothing))));
}

/// A peer that miscounts cannot make us read past its message.
#[test]
fn refuses_extensions_that_do_not_fit() {
    let proposal = |at: usize, value: u8| {
        let mut bytes = hex::<156>(LINUX_PROPOSAL);
        bytes[at] = value;
        decode(&bytes)
    };
    assert_eq!(proposal(80, 2), Err(Malformed::Extension), "two EIDs");
    assert_eq!(proposal(51, 72), Err(Malformed::Extension), "cut by the end");
    assert_eq!(proposal(50, 0xff), Err(Malformed::Extension), "behind the message");
    assert!(matches!(proposal(51, 0), Ok(Some(Frame::ProposalV2(ProposalV2 { v2: None, .. })))));
    let mut bytes = hex::<180>(LINUX_CONFIRM);
    bytes[156] = 2;
    assert_eq!(decode(&bytes), Err(Malformed::Extension), "two GIDs");
    let mut bytes = hex::<160>(LINUX_ACCEPT).to_vec();
    bytes.truncate(108);
    bytes[6] = 108;
    bytes[104..].copy_from_slice(&EYECATCHER);
    assert_eq!(decode(&bytes), Err(Malformed::Extension), "first contact without extension");
    bytes[7] = 0x20;
    assert!(matches!(decode(&bytes), Ok(Some(Frame::AcceptV2(_)))));
    bytes[107] = 0;
    assert_eq!(decode(&bytes), Err(Malformed::Trailer));
    bytes[6] = 107;
    assert_eq!(decode(&bytes), Err(Malformed::Length));
}

/// Bits that nobody has given a meaning may get one; messages that carry them are understood.
#[test]
fn ignores_reserved_bytes() {
    let changed = |bytes: &[u8], reserved: &[core::ops::Range<usize>]| {
        let mut changed = bytes.to_vec();
        reserved.iter().for_each(|field| changed[field.clone()].fill(0xff));
        assert!(changed != bytes);
        assert_eq!(decode(&changed), decode(bytes));
    };
    changed(&hex::<156>(LINUX_PROPOSAL), &[40..50, 52..80, 82..83, 84..86, 108..120]);
    changed(&hex::<160>(LINUX_ACCEPT), &[51..52, 60..61, 96..104, 106..108, 148..156]);
    changed(&hex::<180>(LINUX_CONFIRM), &[96..104, 157..160]);
    let decline = hex::<44>("e2d4c3d9 04 002c 20 b1a098039babcdef 03030008 20000000");
    let mut decline = decline.to_vec();
    decline[40..].copy_from_slice(&EYECATCHER);
    changed(&decline, core::slice::from_ref(&(21..24)));
}

prop_compose! {
    fn any_extension()(
        (release, gid) in (0..16_u8, any_gid()),
        (max_connections, max_links, features) in any::<(u8, u8, u16)>(),
        eids in prop::collection::vec(any::<[u8; 32]>(), 0..=8),
    ) -> ProposalExtension {
        let eids = Eids::from_items(eids.into_iter().map(Eid)).unwrap();
        ProposalExtension { release, gid, max_connections, max_links, features, eids }
    }
}

prop_compose! {
    fn any_v1()(
        offers_smc_r_v1 in any::<bool>(),
        (peer_id, gid, mac) in (any_peer_id(), any_gid(), any_mac()),
        (network, prefix_bits) in any::<([u8; 4], u8)>(),
        list in prop::collection::vec(any::<([u8; 16], u8)>(), 0..=8),
    ) -> Proposal {
        let mut v1 = Proposal { peer_id, gid, mac, offers_smc_r_v1, ..no_v1() };
        if offers_smc_r_v1 {
            v1.subnet = Ipv4Subnet { network, prefix_bits };
            v1.prefix_count = u8::try_from(list.len()).unwrap();
            for (prefix, (bytes, bits)) in v1.prefixes.iter_mut().zip(list) {
                *prefix = Ipv6Prefix { prefix: bytes, prefix_bits: bits };
            }
        }
        v1
    }
}

prop_compose! {
    fn any_proposal()(v1 in any_v1(), v2 in any_extension(), has_v2 in any::<bool>()) -> Frame {
        let v2 = (has_v2 || !v1.offers_smc_r_v1).then_some(v2);
        Frame::ProposalV2(ProposalV2 { v1, v2 })
    }
}

prop_compose! {
    fn any_offer()(
        (peer_id, gid, mac, qpn) in (any_peer_id(), any_gid(), any_mac(), any_qpn()),
        (rkey, token, rmb_address) in any::<(u32, u32, u64)>(),
        (mtu, psn, rmbe_index) in (any_mtu(), any_psn(), 1..=u8::MAX),
        (first_contact, direct, os, release) in (any::<bool>(), any::<bool>(), 0..16_u8, 0..16_u8),
        (max_connections, max_links, features, vendor_options) in any::<(u8, u8, u16, u32)>(),
        (eid, host_name) in any::<([u8; 32], [u8; 32])>(),
        gids in prop::collection::vec(any_gid(), 0..=8),
        is_accept in any::<bool>(),
    ) -> Frame {
        let vendor_options = VendorOptions(vendor_options);
        let capabilities = Capabilities { max_connections, max_links, features, vendor_options };
        let extension = FirstContact {
            direct,
            os: OsType(os),
            release,
            host_name: HostName(host_name),
            capabilities: (release > 0).then_some(capabilities),
        };
        let offer = Offer {
            first_contact, peer_id, gid, mac, qpn, rmbe_index, mtu, psn, rmb_address,
            rkey: Rkey(rkey),
            alert_token: AlertToken(token),
            ..server_offer()
        };
        let gids = if first_contact && !is_accept { gids } else { Vec::new() };
        let message = OfferV2 {
            offer,
            eid: Eid(eid),
            first_contact: first_contact.then_some(extension),
            gids: Gids::from_items(gids).unwrap(),
        };
        if is_accept { Frame::AcceptV2(message) } else { Frame::ConfirmV2(message) }
    }
}

prop_compose! {
    fn any_decline()(
        (out_of_sync, code, information) in any::<(bool, u32, [u32; 4])>(),
        (peer_id, os) in (any_peer_id(), 0..16_u8),
    ) -> Frame {
        let decline = Decline { out_of_sync, peer_id, diagnosis: Diagnosis(code) };
        Frame::DeclineV2(DeclineV2 { decline, os: OsType(os), information })
    }
}

proptest! {
    #[test]
    fn survives_the_wire(frame in prop_oneof![any_proposal(), any_offer(), any_decline()]) {
        prop_assert_eq!(decode(frame.encode().as_bytes()), Ok(Some(frame)));
    }

    /// Whatever a peer sends, it cannot end the process; and what is understood can be said again.
    #[test]
    fn decodes_any_bytes(
        frame in prop_oneof![any_proposal(), any_offer(), any_decline()],
        changes in prop::collection::vec((4..180_usize, any::<u8>()), 0..6),
    ) {
        let mut bytes = frame.encode().as_bytes().to_vec();
        for (at, value) in changes {
            if let Some(byte) = bytes.get_mut(at) {
                *byte = value;
            }
        }
        let mut framer = Framer::new();
        prop_assert_eq!(framer.feed(&bytes), bytes.len());
        let says_something = |frame: &Frame| match frame {
            Frame::ProposalV2(proposal) => proposal.v1.offers_smc_r_v1 || proposal.v2.is_some(),
            Frame::Proposal(proposal) => proposal.offers_smc_r_v1,
            Frame::Accept(_) | Frame::Confirm(_) | Frame::Decline(_) | Frame::AcceptV2(_)
            | Frame::ConfirmV2(_) | Frame::DeclineV2(_) => true,
        };
        if let Ok(Some(frame)) = framer.next_frame() && says_something(&frame) {
            prop_assert_eq!(decode(frame.encode().as_bytes()), Ok(Some(frame)));
        }
    }
}
