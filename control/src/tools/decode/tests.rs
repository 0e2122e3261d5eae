//! Tests with captures of other stacks, with streams segmented at every byte, and with damage.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;

use smcr_proto::wire::cdc::{Cdc, Cursor};
use smcr_proto::wire::clc::{Decline, Diagnosis, Frame, Offer};
use smcr_proto::{AlertToken, Gid, LinkNumber, MacAddress, Mtu, PeerId, Psn, Qpn, Rkey, RmbeSize};

use super::frame::{Datagram, Segment};
use super::sends::Sends;
use super::*;

fn vector(name: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/vectors/pcap");
    std::fs::read(folder.join(name)).unwrap()
}

fn lines(bytes: &[u8]) -> (Vec<String>, Summary) {
    let mut lines = Vec::new();
    let summary = decode(bytes, &mut |line| {
        lines.push(line.to_string());
        Ok(())
    });
    (lines, summary.unwrap())
}

/// The rendezvous of two Linux hosts, from the SYN to the first bytes and their CDC message, as
/// tshark and `captures/show.py` read it.
#[test]
fn reads_a_first_contact_of_linux() {
    let (lines, summary) = lines(&vector("linux-6.12-v2-first-contact.pcap"));
    assert_eq!((summary.frames, summary.damaged), (60, false));
    for (index, begin) in [
        (0, "0.000000 10.9.0.2:42320 > 10.9.0.1:5201 TCP SYN [SMC option]"),
        (1, "0.006379 10.9.0.1:5201 > 10.9.0.2:42320 TCP SYN-ACK [SMC option]"),
        (2, "0.020775 10.9.0.2:42320 > 10.9.0.1:5201 CLC PROPOSAL version 2 "),
        (3, "0.065758 10.9.0.1:5201 > 10.9.0.2:42320 CLC ACCEPT version 2 [first-contact] "),
        (4, "0.093776 10.9.0.2:42320 > 10.9.0.1:5201 CLC CONFIRM version 2 [first-contact] "),
        (5, "0.106716 10.9.0.1 > 10.9.0.2 LLC CONFIRM LINK v2 [no-eyecatcher] link 1 "),
        (6, "0.111465 10.9.0.2 > 10.9.0.1 ACK qp 0x000011 psn 2074940 msn 1"),
        (7, "0.116266 10.9.0.2 > 10.9.0.1 LLC CONFIRM LINK v2 [reply no-eyecatcher] link 1 "),
        (9, "0.121061 10.9.0.1 > 10.9.0.2 LLC ADD LINK v2 reason 0 link 2 their-qp 0x000012 "),
        (11, "0.124768 10.9.0.2 > 10.9.0.1 LLC ADD LINK v2 [reply rejected] "),
        (
            12,
            "0.125103 10.9.0.2 > 10.9.0.1 WRITE ONLY qp 0x000011 psn 8152532 \
             address 0xff48160183bb0000 rkey 0x0000035a length 37",
        ),
        (
            13,
            "0.125229 10.9.0.2 > 10.9.0.1 CDC seq 1 token 0x00000001 producer 0:37 \
             consumer 0:0 qp 0x000011 psn 8152533",
        ),
    ] {
        assert!(lines[index].starts_with(begin), "{}\nis not\n{begin}", lines[index]);
    }
    // The first write went to the memory that Accept offered.
    assert!(
        lines[3].contains(" rkey 0x0000035a ") && lines[3].contains(" rmb 0xff48160183bb0000 ")
    );
    assert!(lines[3].contains(" gid ::ffff:10.9.0.1 ") && lines[3].contains(" mtu 1024 "));
    // Fields that only version 2 has.
    for (index, end) in [
        (2, " v2-gid ::ffff:10.9.0.2 release 1 max-conns 255 max-links 2 eids TESTEID1"),
        (
            3,
            " eid TESTEID1 path direct os Linux release 1 host vmA max-conns 255 max-links 2 \
             length 160",
        ),
        (
            4,
            " eid TESTEID1 path direct os Linux release 1 host vmB max-conns 255 max-links 2 \
             gids ::ffff:10.9.0.2 length 180",
        ),
    ] {
        assert!(lines[index].ends_with(end), "{}\ndoes not end\n{end}", lines[index]);
    }
    assert!(lines[5].contains(" max-links 2 max-conns 255 "), "{}", lines[5]);
    let keys = " path direct client-target-gid ::ffff:10.9.0.1 \
                rkeys 0x0000035a=0x00000574@0xff48160183bb0000 ";
    assert!(lines[9].contains(keys), "{}", lines[9]);
}

/// Programs read each line of JSON into a map: of two values with the same key they keep one, or
/// refuse the line.
#[test]
fn no_key_occurs_twice_in_a_line_of_json() {
    for name in ["linux-6.12-v2-first-contact.pcap", "linux-6.12-v2-scenarios.pcap"] {
        let one_of_each = &mut |line: &MessageLine| {
            let json = serde_json::to_string(line).unwrap();
            let keys: serde_json::Map<String, serde_json::Value> =
                serde_json::from_str(&json).unwrap();
            assert_eq!(keys["target"], line.target, "{json}");
            assert_eq!(serde_json::to_string(&keys).unwrap().len(), json.len(), "{json}");
            Ok(())
        };
        decode(&vector(name)[..], one_of_each).unwrap();
    }
}

/// Wireshark writes pcapng by default, whose time stamps have another format.
#[test]
fn both_file_formats_say_the_same() {
    let old = lines(&vector("linux-6.12-v2-first-contact.pcap"));
    assert_eq!(lines(&vector("linux-6.12-v2-first-contact.pcapng")), old);
}

/// Half-close, urgent data, a blocked writer, abort and shutdown each leave their flag.
#[test]
fn reads_flags_and_reasons_of_linux() {
    let (lines, _) = lines(&vector("linux-6.12-v2-scenarios.pcap"));
    for words in [
        "CDC seq 2 token 0x00000001 producer 0:1000 consumer 0:0 [D] ",
        "CDC seq 3 token 0x00000001 producer 0:1000 consumer 0:500 [D C] ",
        "CDC seq 1 token 0x00000002 producer 0:500 consumer 0:0 [P U] ",
        "CDC seq 2 token 0x00000003 producer 2:0 consumer 0:0 [B] ",
        "CDC seq 1 token 0x00000004 producer 0:0 consumer 0:0 [A] ",
        "LLC CONFIRM RKEY v2 [reply] rkey 0x00000685 address 0xff3aaaf7c4b10000 ",
        "LLC DELETE RKEY v2 rkeys 0x000003cb ",
        "LLC DELETE RKEY v2 [reply] count 1 unknown 0 ",
        "LLC DELETE LINK v2 [all] link 0 reason OPERATOR ",
    ] {
        assert!(lines.iter().any(|line| line.contains(words)), "{words}");
    }
}

/// The frames of a capture whose writer was killed are shown, and the end is reported as damaged.
#[test]
fn a_cut_file_is_a_shorter_transcript() {
    for name in ["linux-6.12-v2-first-contact.pcap", "linux-6.12-v2-first-contact.pcapng"] {
        let whole = vector(name);
        let (all, _) = lines(&whole);
        for cut in (0..whole.len()).step_by(61) {
            let mut seen = Vec::new();
            let result = decode(&whole[..cut], &mut |line| {
                seen.push(line.to_string());
                Ok(())
            });
            assert_eq!(seen, all[..seen.len()], "{name} cut at {cut}");
            match result {
                Ok(summary) => assert!(summary.damaged || summary.frames < 60, "{name} at {cut}"),
                Err(DecodeError::NotACapture) => assert!(cut < 256, "{name} cut at {cut}"),
                Err(error) => panic!("{name} cut at {cut}: {error}"),
            }
        }
    }
}

/// No file may cause a panic, which would cost a support engineer an evening.
#[test]
fn garbage_is_never_a_panic() {
    let mut dice = 0x9e37_79b9_7f4a_7c15_u64;
    let mut roll = |sides: usize| {
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(dice >> 33).unwrap() % sides
    };
    for name in ["linux-6.12-v2-first-contact.pcap", "linux-6.12-v2-first-contact.pcapng"] {
        let whole = vector(name);
        for round in 0..150 {
            let mut bytes = whole.clone();
            // Half of the rounds leave the file's headers intact, so that frames are reached.
            let spared = if round % 2 == 0 { 0 } else { 300 };
            for _ in 0..1 + roll(60) {
                let at = spared + roll(bytes.len() - spared);
                bytes[at] = u8::try_from(roll(256)).unwrap();
            }
            decode(&bytes[..], &mut |line| {
                assert!(!line.to_string().is_empty());
                Ok(())
            })
            .ok();
        }
    }
}

#[test]
fn says_what_it_cannot_read() {
    let fail = |bytes: &[u8]| decode(bytes, &mut |_| Ok(())).unwrap_err().to_string();
    assert!(fail(b"PK\x03\x04 and so on, for longer than a header").contains("neither"));
    assert!(fail(b"").contains("neither"));
    let mut wireless = vector("linux-6.12-v2-first-contact.pcap");
    wireless[20] = 105;
    assert!(fail(&wireless).contains("link type 105"));
}

/// A full disk must not look like a short capture.
#[test]
fn failing_output_is_an_error() {
    let capture = vector("linux-6.12-v2-first-contact.pcap");
    let result = decode(&capture[..], &mut |_| Err(io::ErrorKind::StorageFull.into()));
    assert!(matches!(result, Err(DecodeError::Output(_))));
}

const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 8, 0, 1));
const SERVER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 8, 0, 2));

fn segment(sequence: u32, flags: u8, payload: &[u8]) -> Segment<'_> {
    Segment { source_port: 40_000, target_port: 7_002, sequence, flags, options: &[], payload }
}

/// What the segments of one direction show.
fn shown(segments: &[Segment<'_>]) -> Vec<String> {
    let mut streams = Streams::default();
    let mut shown = Vec::new();
    for segment in segments {
        streams.segment(CLIENT, SERVER, segment, &mut |words| shown.push(words.to_string()));
    }
    shown
}

fn offer() -> Offer {
    Offer {
        first_contact: true,
        peer_id: PeerId([0xab, 0xcd, 2, 0, 0, 0, 0, 1]),
        gid: Gid::from_ipv4([10, 8, 0, 1]),
        mac: MacAddress([2, 0, 0, 0, 0, 1]),
        qpn: Qpn(0x1234),
        rkey: Rkey(0xbeef),
        rmbe_index: 3,
        alert_token: AlertToken(5),
        rmbe_size: RmbeSize::KIB_64,
        mtu: Mtu::B1024,
        rmb_address: 0x7f00_0000_0000,
        psn: Psn(42),
    }
}

const CONFIRM: &str = "CLC CONFIRM version 1 [first-contact] peer abcd020000000001 \
    gid ::ffff:10.8.0.1 mac 02:00:00:00:00:01 qp 0x001234 rkey 0x0000beef rmbe 3 \
    rmbe-bytes 65536 token 0x00000005 rmb 0x00007f0000000000 mtu 1024 psn 42";

/// TCP may segment, retransmit and reorder a stream anywhere. The application's bytes behind the
/// rendezvous must not be shown, even if they look like CLC.
#[test]
fn clc_messages_are_found_however_the_stream_is_cut() {
    let confirm = Frame::Confirm(offer()).encode();
    let decline = Frame::Decline(Decline {
        out_of_sync: false,
        peer_id: offer().peer_id,
        diagnosis: Diagnosis::OUT_OF_MEMORY,
    })
    .encode();
    let refused = "CLC DECLINE version 1 peer abcd020000000001 code 0x01010000 \
        reason OUT_OF_MEMORY";
    let stream = [confirm.as_bytes(), decline.as_bytes(), b"GET / ", confirm.as_bytes()].concat();
    // Across the wrap of sequence numbers.
    let first = u32::MAX - 20;
    let sequence = |at: usize| first.wrapping_add(1).wrapping_add(u32::try_from(at).unwrap());
    let syn = segment(first, Segment::SYN, &[]);
    for cut in 1..stream.len() {
        let (head, tail) = stream.split_at(cut);
        let head = segment(sequence(0), Segment::ACK, head);
        let tail = segment(sequence(cut), Segment::ACK, tail);
        let expected = [CONFIRM, refused];
        assert_eq!(shown(&[syn, head, tail]), expected, "cut at {cut}");
        assert_eq!(shown(&[syn, tail, head]), expected, "reordered, cut at {cut}");
        assert_eq!(shown(&[syn, head, head, tail, head, tail]), expected, "repeated at {cut}");
    }
    // A capture that began after the SYN.
    assert_eq!(shown(&[segment(7, Segment::ACK, &stream)]), [CONFIRM, refused]);
    assert_eq!(shown(&[syn, segment(sequence(0), Segment::ACK, b"SSH-2.0-x\r\n")]), [""; 0]);
}

/// Users look for the option first, but other experimental options have the same number.
#[test]
fn the_option_counts_only_with_its_value() {
    let with =
        |options: &'static [u8], flags| shown(&[Segment { options, ..segment(1, flags, &[]) }]);
    let ours = &[2, 4, 5, 0xb4, 1, 254, 6, 0xe2, 0xd4, 0xc3, 0xd9];
    assert_eq!(with(ours, Segment::SYN), ["TCP SYN [SMC option]"]);
    assert_eq!(with(ours, Segment::SYN | Segment::ACK), ["TCP SYN-ACK [SMC option]"]);
    assert_eq!(with(&[254, 6, 0xe2, 0xd4, 0xc3, 0xc4], Segment::SYN), [""; 0]);
    assert_eq!(with(&[1, 254], Segment::SYN), [""; 0]);
    assert_eq!(with(&[254, 0, 0, 0], Segment::SYN), [""; 0]);
}

/// A malformed message ends the rendezvous (RFC 7609, C.6), and the reader must see why.
#[test]
fn malformed_clc_is_shown_as_such() {
    let mut accept = Frame::Accept(offer()).encode().as_bytes().to_vec();
    *accept.last_mut().unwrap() = 0;
    let lines = shown(&[segment(7, Segment::ACK, &accept)]);
    assert!(lines[0].starts_with("CLC ACCEPT malformed Trailer hex e2d4c3d902"), "{lines:?}");
    accept[5..7].copy_from_slice(&[0xff, 0xff]);
    let lines = shown(&[segment(7, Segment::ACK, &accept)]);
    assert_eq!(lines, ["CLC malformed length length 65535"]);
}

/// One RoCE packet: base header, what follows it, and an ICRC.
fn roce(opcode: u8, psn: u8, rest: &[u8]) -> Vec<u8> {
    let header = [opcode, 0x80, 0xff, 0xff, 0, 0, 0, 0x11, 0x80, 0, 0, psn];
    [&header[..], rest, &[0xcc; 4]].concat()
}

fn write(psn: u8, payload_bytes: u8) -> Vec<u8> {
    let reth = [0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 7, 0, 0, 0, payload_bytes];
    roce(10, psn, &[&reth[..], &vec![0xaa; usize::from(payload_bytes)]].concat())
}

fn cdc(sequence: u16) -> [u8; 44] {
    let producer = Cursor { wrap: 0, count: 1024 };
    Cdc { sequence, token: AlertToken(5), producer, writer_blocked: true, ..Cdc::default() }
        .encode()
}

/// The source and the target of the test's packets.
const BETWEEN: (IpAddr, IpAddr) =
    (IpAddr::V4(Ipv4Addr::new(10, 8, 0, 1)), IpAddr::V4(Ipv4Addr::new(10, 8, 0, 2)));

fn packets(bytes: &[u8], wire_bytes: usize) -> Vec<String> {
    let mut shown = Vec::new();
    let datagram = Datagram { bytes, wire_bytes };
    roce::packets(datagram, BETWEEN, &mut Sends::default(), &mut |words| {
        shown.push(words.to_string());
    });
    shown
}

/// A capture on the sending host shows a train of packets as one datagram. The CDC message at its
/// end must be shown.
#[test]
fn trains_of_segmentation_offload_are_taken_apart() {
    let train = [write(1, 64), write(2, 64), roce(4, 3, &cdc(9))].concat();
    let expected = [
        "WRITE ONLY qp 0x000011 psn 1 address 0x0000000000001000 rkey 0x00000007 length 64",
        "WRITE ONLY qp 0x000011 psn 2 address 0x0000000000001000 rkey 0x00000007 length 64",
        "CDC seq 9 token 0x00000005 producer 0:1024 consumer 0:0 [B] qp 0x000011 psn 3",
    ];
    assert_eq!(packets(&train, train.len()), expected);
    let train = [roce(4, 1, &cdc(1)), roce(4, 2, &cdc(2)), roce(4, 3, &cdc(3))].concat();
    assert_eq!(packets(&train, train.len()).len(), 3);
    let acks = [roce(17, 1, &[0x1f, 0, 0, 1]), roce(17, 2, &[0x1f, 0, 0, 2])].concat();
    let expected = ["ACK qp 0x000011 psn 1 msn 1", "ACK qp 0x000011 psn 2 msn 2"];
    assert_eq!(packets(&acks, acks.len()), expected);
}

/// A dense packet has several requests, and a train has several of them.
#[test]
fn dense_packets_are_taken_apart() {
    let reth = [0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 7, 0, 0, 0, 5];
    let part = |opcode, more, bytes: &[u8]| [&[opcode, more, 0, 5], bytes].concat();
    let write = part(10, 1, &[&reth[..], &[0xaa; 8]].concat());
    let message = |more, sequence| [&[4, more, 0, 44][..], &cdc(sequence)].concat();
    let first = roce(0xc0, 0xff, &[&write[..], &message(1, 8), &message(0, 9)].concat());
    let second = roce(0xc0, 2, &[message(1, 10), message(0, 11)].concat());
    let train = [&first[..], &second].concat();
    let expected = [
        "WRITE ONLY qp 0x000011 psn 255 address 0x0000000000001000 rkey 0x00000007 length 5",
        "CDC seq 8 token 0x00000005 producer 0:1024 consumer 0:0 [B] qp 0x000011 psn 256",
        "CDC seq 9 token 0x00000005 producer 0:1024 consumer 0:0 [B] qp 0x000011 psn 257",
        "CDC seq 10 token 0x00000005 producer 0:1024 consumer 0:0 [B] qp 0x000011 psn 2",
        "CDC seq 11 token 0x00000005 producer 0:1024 consumer 0:0 [B] qp 0x000011 psn 3",
    ];
    assert_eq!(packets(&train, train.len()), expected);
    for cut in 0..first.len() {
        let shown = packets(&first[..cut], first.len());
        assert!((1..=3).contains(&shown.len()), "{shown:?}");
    }
    let shown = packets(&first[..50], first.len());
    assert_eq!(shown, [expected[0], "SEND ONLY qp 0x000011 psn 256 cut by the capture"]);
    assert_eq!(packets(&first[..13], first.len())[0].split(' ').next(), Some("DENSE"));
}

/// An engineer who looks for the cause of a retransmission needs to tell the NAKs apart.
#[test]
fn refusals_are_told_apart() {
    for (syndrome, words) in [
        (0x60, "NAK qp 0x000011 psn 1 for PSN sequence error msn 2"),
        (0x62, "NAK qp 0x000011 psn 1 for remote access error msn 2"),
        (0x2e, "RNR NAK qp 0x000011 psn 1 timer 14 msn 2"),
        (0x7f, "ACKNOWLEDGE qp 0x000011 psn 1 syndrome 0x7f msn 2"),
    ] {
        let packet = roce(17, 1, &[syndrome, 0, 0, 2]);
        assert_eq!(packets(&packet, packet.len()), [words]);
    }
}

/// `tcpdump -s 96` cuts packets. The rest is shown, and nothing is read beyond its end.
#[test]
fn packets_cut_by_the_capture_are_shown_as_such() {
    for packet in [roce(4, 1, &cdc(1)), write(1, 40), roce(17, 1, &[0, 0, 0, 1])] {
        for cut in 0..packet.len() {
            let shown = packets(&packet[..cut], packet.len());
            assert_eq!(shown.len(), 1, "{shown:?}");
        }
    }
    let packet = roce(4, 1, &cdc(1));
    let expected = ["SEND ONLY qp 0x000011 psn 1 cut by the capture"];
    assert_eq!(packets(&packet[..30], packet.len()), expected);
}

/// Other programs use RDMA as well, and later versions may add LLC messages.
#[test]
fn unknown_messages_are_shown_as_such() {
    let foreign = roce(4, 1, b"not a message of ours");
    assert_eq!(packets(&foreign, foreign.len()), ["SEND ONLY qp 0x000011 psn 1 length 21"]);
    let mut request = [0; 44];
    request[..3].copy_from_slice(&[0x25, 44, 0]);
    let mut request = roce(4, 1, &request);
    let shown = packets(&request, request.len());
    assert_eq!(shown[0], "LLC REQUEST ADD LINK v2 gids - qp 0x000011 psn 1");
    request[12] = 0x23;
    let shown = packets(&request, request.len());
    assert!(shown[0].starts_with("LLC ADD LINK CONTINUATION v2 hex 232c00"), "{shown:?}");
    let strange = roce(0xc1, 1, &[]);
    assert_eq!(packets(&strange, strange.len()), ["opcode 0xc1 qp 0x000011 psn 1 length 0"]);
}

/// SMC-Rv1 messages, as we and z/OS send them.
#[test]
fn llc_of_version_1_is_read() {
    let message = smcr_proto::wire::llc::DeleteLink {
        reply: false,
        all: true,
        orderly: true,
        link: LinkNumber(2),
        reason: smcr_proto::wire::llc::DeleteReason::LOST_PATH,
    };
    let bytes = smcr_proto::wire::llc::Llc::DeleteLink(message).encode();
    let packet = roce(4, 1, &bytes);
    let expected = ["LLC DELETE LINK [all orderly] link 2 reason LOST_PATH qp 0x000011 psn 1"];
    assert_eq!(packets(&packet, packet.len()), expected);
}

/// With many RMBs, LLC messages of SMC-Rv2 are longer than a packet, and a failover needs all their
/// rkeys. If the capture lacks a packet, no message may be shown.
#[test]
fn messages_in_several_packets_are_put_together() {
    use smcr_proto::wire::llc::v2::{DeleteRkeyV2, LEN_MAX, LlcV2, Records};
    let rkeys: Vec<Rkey> = (0..150).map(Rkey).collect();
    let mut buffer = [0; LEN_MAX];
    let message = LlcV2::DeleteRkey(DeleteRkeyV2::Request(Records::ours(&rkeys)));
    let message = message.encode(&mut buffer);
    let parts = [&message[..256], &message[256..512], &message[512..]];
    let shown = |psns: [u8; 3]| {
        let mut sends = Sends::default();
        let mut shown = Vec::new();
        for ((opcode, psn), part) in (0..).zip(psns).zip(parts) {
            let bytes = roce(opcode, psn, part);
            let datagram = Datagram { bytes: &bytes, wire_bytes: bytes.len() };
            roce::packets(datagram, BETWEEN, &mut sends, &mut |words| {
                shown.push(words.to_string());
            });
        }
        shown
    };
    let whole = shown([7, 8, 9]);
    assert_eq!(whole[0], "SEND FIRST qp 0x000011 psn 7 length 256");
    assert_eq!(whole[1], "SEND MIDDLE qp 0x000011 psn 8 length 256");
    assert!(whole[2].starts_with("LLC DELETE RKEY v2 rkeys 0x00000000,0x00000001,"), "{whole:?}");
    assert!(whole[2].ends_with(",0x00000095 qp 0x000011 psn 9"), "{whole:?}");
    assert_eq!(shown([7, 9, 10])[2], "SEND LAST qp 0x000011 psn 10 length 96");
}
