//! Messages that other stacks sent are decoded, compared, and encoded again.
//!
//! `vectors/README.md` says where each file came from. Codecs that only agree with themselves would
//! pass every other test of ours and still not work with other stacks.

use smcr_proto::wire::cdc::{self, Cdc};
use smcr_proto::wire::clc::v2::{Eid, FirstContact, OsType};
use smcr_proto::wire::clc::{Frame, Framer, OfferV2};
use smcr_proto::wire::llc::v2::{self, AddLinkV2, DeleteRkeyV2, LlcV2};
use smcr_proto::wire::llc::{AddLink, DeleteReason, Llc, RkeyPair};
use smcr_proto::{Gid, LinkNumber, LinkUserId, MacAddress, Malformed, Mtu, Psn, Qpn, Rkey};

/// One frame of a capture.
struct Vector {
    /// Its number there.
    frame: u32,
    /// A remark of the file about it.
    note: &'static str,
    bytes: Vec<u8>,
}

/// Lines of `frame | note | bytes in hex`; a line that begins with `#` is a comment.
fn vectors(text: &'static str) -> Vec<Vector> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let vectors: Vec<Vector> = lines.map(vector).collect();
    assert!(!vectors.is_empty());
    vectors
}

fn vector(line: &'static str) -> Vector {
    let fields: Vec<&str> = line.split(" | ").collect();
    let [frame, note, hex] = fields[..] else { panic!("not three fields: {line}") };
    let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex");
    Vector {
        frame: frame.parse().expect("a frame number"),
        note,
        bytes: (0..hex.len()).step_by(2).map(byte).collect(),
    }
}

fn message(vector: &Vector) -> [u8; 44] {
    vector.bytes[..].try_into().expect("44 bytes")
}

/// A CDC message in the notation of `cdc.txt`.
fn in_words(message: &Cdc) -> String {
    let flags: String = [
        (message.writer_blocked, 'B'),
        (message.urgent_pending, 'P'),
        (message.urgent_present, 'U'),
        (message.update_requested, 'R'),
        (message.failover_validation, 'F'),
        (message.sending_done, 'D'),
        (message.connection_closed, 'C'),
        (message.abnormal_close, 'A'),
        (message.odd_stream, 'S'),
        (message.keeps, 'K'),
    ]
    .into_iter()
    .filter_map(|(set, letter)| set.then_some(letter))
    .collect();
    let Cdc { sequence, token, producer, consumer, .. } = message;
    format!(
        "{sequence} {:x} {}:{} {}:{} {}",
        token.0,
        producer.wrap,
        producer.count,
        consumer.wrap,
        consumer.count,
        if flags.is_empty() { "-" } else { &flags }
    )
}

// RFC 7609 A.4 #3: sequence number at byte 2, from 1
// RFC 7609 A.4 #8: CDC's alert token at byte 4
// RFC 7609 A.4 #9: producer cursor at bytes 10, 12
// RFC 7609 A.4 #10: consumer cursor at bytes 18, 20
// RFC 7609 A.4 #13: wrap cursor at element size
#[test]
fn cdc_messages_mean_what_another_decoder_says() {
    let mut flags_seen = String::new();
    for vector in vectors(include_str!("vectors/cdc.txt")) {
        let bytes = message(&vector);
        assert!(cdc::is_cdc(&bytes));
        let decoded = Cdc::decode(&bytes).unwrap();
        assert_eq!(in_words(&decoded), vector.note, "frame {}", vector.frame);
        assert_eq!(decoded.encode(), bytes, "frame {}", vector.frame);
        flags_seen.push_str(vector.note.rsplit(' ').next().unwrap());
    }
    // Linux never sets R.
    for flag in "BPUFDCA".chars() {
        assert!(flags_seen.contains(flag), "no message with {flag}");
    }
}

/// An LLC message of a capture as a stack of version 1 would have sent it: without the version in
/// the type byte, and with the byte of CONFIRM LINK cleared that only version 2 has.
fn llc_as_version_1(vector: &Vector) -> [u8; 44] {
    let mut bytes = message(vector);
    assert_eq!(bytes[0] >> 4, 2, "a capture of version 2");
    bytes[0] &= 0x0f;
    if bytes[0] == 1 {
        assert_eq!(bytes[35], 0xff, "the most connections");
        bytes[35] = 0;
    }
    bytes
}

/// A message of version 2 on a link of version 1 must be an error, and never be decoded in part.
#[test]
fn llc_messages_of_version_2_are_not_mistaken() {
    for vector in vectors(include_str!("vectors/llc_v2.txt")) {
        let bytes = message(&vector);
        assert!(!cdc::is_cdc(&bytes));
        assert_eq!(Llc::decode(&bytes), Err(Malformed::UnknownType(bytes[0])));
    }
}

#[test]
fn llc_messages_survive_decoding() {
    let mut kinds = [0; 16];
    for vector in vectors(include_str!("vectors/llc_v2.txt")) {
        let bytes = llc_as_version_1(&vector);
        let decoded = Llc::decode(&bytes).unwrap();
        assert_eq!(decoded.encode(), bytes, "frame {}", vector.frame);
        assert_eq!(decoded.is_reply(), bytes[3] & 0x80 != 0, "frame {}", vector.frame);
        kinds[usize::from(bytes[0])] += 1;
    }
    // The capture has CONFIRM LINK, ADD LINK, DELETE LINK, CONFIRM RKEY and DELETE RKEY.
    assert_eq!(kinds, [0, 6, 2, 0, 4, 0, 14, 0, 0, 8, 0, 0, 0, 0, 0, 0]);
}

/// The LLC message with this frame number and type, decoded as version 1.
fn llc(frame: u32, type_byte: u8) -> Llc {
    let all = vectors(include_str!("vectors/llc_v2.txt"));
    let vector = all
        .iter()
        .find(|vector| vector.frame == frame && vector.bytes[0] == type_byte)
        .expect("a frame that is in the file");
    Llc::decode(&llc_as_version_1(vector)).expect("every line decodes")
}

const FIRST_MAC: MacAddress = MacAddress([0x52, 0x54, 0, 0, 0, 0x0a]);

/// Checks each field of the messages that set up and delete a link. To encode them again would not
/// show that two fields of equal length were swapped.
// RFC 7609 A.3.1 #3: link number at byte 29
// RFC 7609 A.3.2 #7: ADD LINK with MAC, GID, QP
// RFC 7609 A.3.2 #10: ADD LINK with initial PSN
// RFC 7609 A.3.4 #2: flag that deletes all links
// RFC 7609 A.3.4 #3: flag that says orderly
// RFC 7609 A.3.4 #5: deletion reason at byte 5
// RFC 7609 A.3.4 #6: five reasons for DELETE LINK
#[test]
fn link_messages_mean_what_happened() {
    let Llc::ConfirmLink(confirm) = llc(10, 0x21) else { panic!() };
    assert_eq!((confirm.mac, confirm.gid), (FIRST_MAC, Gid::from_ipv4([10, 9, 0, 1])));
    assert_eq!((confirm.qpn, confirm.link), (Qpn(0x11), LinkNumber(1)));
    assert_eq!((confirm.user_id, confirm.max_links), (LinkUserId(0x0000_0101), 2));
    assert!(confirm.no_eyecatcher && !confirm.reply);

    // The server offered a second link over the same port, and the client had no other port. In the
    // place of version 1's reason, version 2 has the upper half of the length.
    let Llc::AddLink(reject) = llc(16, 0x22) else { panic!() };
    let expected = AddLink {
        reply: true,
        rejected: true,
        reason: 0,
        mac: FIRST_MAC,
        gid: Gid::from_ipv4([10, 9, 0, 1]),
        qpn: Qpn(0x12),
        link: LinkNumber(2),
        mtu: Mtu::B1024,
        psn: Psn(0xb6_aa37),
    };
    assert_eq!(reject, expected);

    // The RNIC of link 1 was removed; at the end the operator stopped everything.
    let Llc::DeleteLink(lost) = llc(419, 0x24) else { panic!() };
    assert_eq!((lost.link, lost.reason), (LinkNumber(1), DeleteReason::LOST_PATH));
    assert!(lost.orderly && !lost.all && !lost.reply);
    let Llc::DeleteLink(end) = llc(514, 0x24) else { panic!() };
    assert_eq!((end.link, end.reason), (LinkNumber(0), DeleteReason::OPERATOR));
    assert!(end.all && !end.orderly && !end.reply);
}

/// An RMB with its keys for the link that carries the message and for the other one; then its
/// deletion.
// RFC 7609 A.3.5 #4: byte 4 counts other links
// RFC 7609 A.3.5 #5: RKey at byte 5, address at 9
// RFC 7609 A.3.5 #6: two more RTokens from byte 17
#[test]
fn rkey_messages_mean_what_happened() {
    let Llc::ConfirmRkey(confirm) = llc(47, 0x26) else { panic!() };
    assert_eq!(confirm.rkey, Rkey(0x4a9));
    assert_eq!(confirm.address, 0xff1a_8f65_0472_0000);
    assert_eq!(confirm.other_links, 1);
    assert_eq!(confirm.others[0].link, LinkNumber(1));
    assert_eq!(confirm.others[0].rkey, Rkey(0x42d));
    assert_eq!(confirm.others[0].address, 0xff1a_8f65_0472_0000);
    assert!(!confirm.reply && !confirm.negative && !confirm.retry);

    let Llc::DeleteRkey(delete) = llc(862, 0x29) else { panic!() };
    assert_eq!((delete.count, delete.rkeys[0]), (1, Rkey(0x430)));
    assert_eq!((delete.error_mask, delete.rkeys[1]), (0, Rkey(0)));
    assert!(!delete.reply && !delete.negative);
}

/// All LLC messages of version 2.
fn all_llc_v2() -> Vec<Vector> {
    let mut all = vectors(include_str!("vectors/llc_v2.txt"));
    all.extend(vectors(include_str!("vectors/llc_v2_long.txt")));
    all
}

/// A link of version 2 must understand every message of the kernel, and our own encoding of it must
/// be the same to the last byte.
#[test]
fn llc_messages_of_version_2_survive_decoding() {
    let mut lengths = std::collections::BTreeMap::<usize, usize>::new();
    for vector in all_llc_v2() {
        let bytes = &vector.bytes[..];
        assert!(v2::is_v2(bytes));
        let decoded = LlcV2::decode(bytes).unwrap();
        assert_eq!(decoded.encode(&mut [0; v2::LEN_MAX]), bytes, "frame {}", vector.frame);
        assert_eq!(decoded.is_reply(), bytes[3] & 0x80 != 0, "frame {}", vector.frame);
        *lengths.entry(bytes.len()).or_default() += 1;
    }
    assert_eq!(lengths, [(44, 34), (88, 4), (104, 2)].into());
}

/// A failover of the kernel: link 3 replaces link 1, and each side sends the keys of its two RMBs
/// on link 3. These fields decide where bytes are written after a failover.
#[test]
fn added_links_name_their_keys() {
    let all = all_llc_v2();
    let message = |frame: u32| {
        let vector = all.iter().find(|vector| vector.frame == frame && vector.bytes[0] == 0x22);
        let message = LlcV2::decode(&vector.expect("it is in the file").bytes).unwrap();
        let LlcV2::AddLink(AddLinkV2 { link, extension: Some(extension) }) = message else {
            panic!("{message:?}")
        };
        (link, extension)
    };
    let (offer, extension) = message(431);
    assert_eq!((offer.link, offer.reply, offer.qpn), (LinkNumber(3), false, Qpn(0x12)));
    assert!(extension.direct);
    assert_eq!(extension.target, Gid::from_ipv4([10, 9, 0, 1]));
    let (existing, new) = (Rkey(0x4a9), Rkey(0x672));
    let first = RkeyPair { existing, new, address: 0xff1a_8f65_0472_0000 };
    assert_eq!(extension.rkeys.iter().next(), Some(first));
    let (answer, extension) = message(432);
    assert_eq!((answer.link, answer.reply, answer.qpn), (LinkNumber(3), true, Qpn(0x12)));
    let news: Vec<Rkey> = extension.rkeys.iter().map(|pair| pair.new).collect();
    assert_eq!(news, [Rkey(0x630), Rkey(0x7eb)]);

    let delete = all.iter().find(|vector| vector.frame == 862).expect("it is in the file");
    let LlcV2::DeleteRkey(DeleteRkeyV2::Request(rkeys)) = LlcV2::decode(&delete.bytes).unwrap()
    else {
        panic!()
    };
    assert!(rkeys.iter().eq([Rkey(0x430)]));
}

/// We must understand every CLC message of the kernel, and our own encoding of it must be the same
/// to the last byte. The messages themselves show which clients know only version 1.
#[test]
fn clc_messages_of_version_2_survive_decoding() {
    let mut first_contacts = 0;
    for vector in vectors(include_str!("vectors/clc_v2.txt")) {
        let mut framer = Framer::new();
        assert_eq!(framer.feed(&vector.bytes), vector.bytes.len());
        let frame = framer.next_frame().unwrap().unwrap();
        assert!(framer.leftover().is_empty());
        assert_eq!(frame.encode().as_bytes(), vector.bytes, "frame {}", vector.frame);
        let (offer, kind) = match frame {
            Frame::ProposalV2(proposal) => {
                assert!(!proposal.v1.offers_smc_r_v1);
                let v2 = proposal.v2.expect("version 2 was offered");
                assert_eq!(v2.gid, Gid::from_ipv4([10, 9, 0, 2]));
                assert_eq!(v2.eids.as_slice(), [Eid::new("TESTEID1").unwrap()]);
                continue;
            }
            Frame::AcceptV2(offer) => (offer, 2),
            Frame::ConfirmV2(offer) => (offer, 3),
            Frame::Proposal(_)
            | Frame::Accept(_)
            | Frame::Confirm(_)
            | Frame::Decline(_)
            | Frame::DeclineV2(_) => panic!("{frame:?}"),
        };
        assert_eq!(vector.bytes[4], kind);
        first_contacts += usize::from(is_first_contact_of_linux(&offer, kind));
    }
    assert_eq!(first_contacts, 4);
}

/// Checks what an Accept or Confirm says about its sender. Returns whether it is a first contact.
fn is_first_contact_of_linux(message: &OfferV2, kind: u8) -> bool {
    assert_eq!(message.eid.to_string(), "TESTEID1");
    let Some(FirstContact { direct, os, release, host_name, capabilities }) = message.first_contact
    else {
        assert!(!message.offer.first_contact && message.gids.as_slice().is_empty());
        return false;
    };
    assert!(direct && message.offer.first_contact);
    assert_eq!((os, release), (OsType::LINUX, 1));
    assert_eq!(host_name.to_string(), if kind == 2 { "vmA" } else { "vmB" });
    let capabilities = capabilities.expect("they came with release 1");
    assert_eq!((capabilities.max_connections, capabilities.max_links), (255, 2));
    // The client names its ports, the one in use first.
    assert_eq!(kind == 3, message.gids.as_slice().first() == Some(&message.offer.gid));
    true
}
