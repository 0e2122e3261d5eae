//! What a capture shows: the option in the TCP handshake, the rendezvous, RDMA instead of TCP.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::capture::Capture;
use crate::gateway::{Pair, local, smcgate};
use crate::hosts::{Hosts, accept, set_limit};
use crate::pattern::{receive, send};
use crate::process::run;

const PORT: u16 = 7010;
const LIMIT: Duration = Duration::from_secs(20);

/// Kind 254, six bytes, and the magic that stands for SMC-R in EBCDIC (RFC 7609, 3.1).
const SMC_OPTION: [u8; 6] = [254, 6, 0xE2, 0xD4, 0xC3, 0xD9];

/// The usual tools must recognise SMC-R on the wire: an operator needs them, and other stacks read
/// the same bytes.
// RFC 7609 3 #1: set up links in band
// RFC 7609 3.5.1.1 #5: no option on ACK after SYN
// RFC 7609 5.3 #1: TCP filters govern SMC-R too
// RFC 7609 B.1 #4: handle option unseen by applications
// RFC 7609 3 #2: CLC before any application data
// RFC 7609 3.1 #1: announce capability by TCP option 254
// RFC 7609 3.1 #2: exchange CLC if both set option
// RFC 7609 3.5.1.1 #1: set option on SYN
// RFC 7609 3.5.1.1 #2: set option on SYN-ACK
// RFC 7609 A.1 #1: encode TCP option in six bytes
// RFC 7609 3 #4: send data by RDMA, not TCP
// RFC 7609 3.2 #1: CLC inside its own TCP connection
// RFC 7609 3.5.1.2 #1: always send Proposal to capable peers
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_capture_shows_smc_r() {
    let words = captured("smoke_capture_shows_smc_r", "versions = [1]", 1, false);
    assert!(!words.contains("eid"), "{words}");
}

/// Two gateways without further configuration must speak SMC-Rv2, in the community `SMCGATE`.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_capture_shows_smc_r_v2() {
    let words = captured("smoke_capture_shows_smc_r_v2", "", 2, true);
    for message in ["eids SMCGATE", "eid SMCGATE", "release 1", "max-links 8"] {
        assert!(words.contains(message), "no {message} in:\n{words}");
    }
}

/// If an operator asks for both versions, both must be offered and the newer one taken. And packets
/// are those of InfiniBand if that is asked for.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_capture_shows_both_versions() {
    let smc = "versions = [1, 2]\ndense_packets = false";
    let words = captured("smoke_capture_shows_both_versions", smc, 2, false);
    assert!(words.contains("eids SMCGATE") && words.contains("10.8.0.0/24"), "{words}");
}

/// What `smcgate decode` prints of two connections between gateways with this line in `[smc]`,
/// whose packets are dense or not.
fn captured(test: &str, smc: &str, version: u8, dense: bool) -> String {
    let hosts = Hosts::new(test);
    for host in [&hosts.a, &hosts.b] {
        // Captures then show packets as a cable would carry them, not trains of packets.
        host.ip(&["link", "set", "dev", host.device, "gso_max_segs", "1"]);
    }
    // Each connection has its own rendezvous.
    let smc = format!("{smc}\nkept_max = 0");
    let near = Pair::client_side(&hosts, &[PORT]).smc(&smc);
    let far = Pair::server_side(&hosts, &[PORT]).smc(&smc);
    let pair = Pair::start_these(&hosts, near, far);
    let capture = Capture::start(&hosts.a, hosts.a.device, &hosts.logs);
    let listener = hosts.b.listen(local(PORT));
    // Two connections: a first contact, and one on a link that exists.
    for seed in 0..2 {
        let mut client = hosts.a.connect(local(PORT)).expect("the gateway listens");
        set_limit(&client, LIMIT);
        let mut server = accept(&listener, LIMIT);
        let sent = send(&mut client, seed, 200_000).expect("the connection is up");
        drop(client);
        assert_eq!(receive(&mut server).expect("the connection is up"), sent);
    }
    pair.assert_all_smc(2);
    for gateway in [&pair.a, &pair.b] {
        let groups = gateway.stats().link_groups;
        assert!(groups.iter().all(|group| group.version == version), "{groups:?}");
        let agreed =
            groups.iter().any(|group| group.v2.as_ref().is_some_and(|v2| v2.dense_packets));
        assert_eq!(agreed, dense, "{groups:?}");
    }
    let file = capture.stop(&hosts.a, hosts.b.address);

    let handshakes = handshakes(&file);
    let offered = |syn_ack| handshakes.iter().filter(|&&(ack, smc)| ack == syn_ack && smc).count();
    assert!(offered(false) >= 2, "SYN with the option: {handshakes:?}");
    assert!(offered(true) >= 2, "SYN-ACK with the option: {handshakes:?}");
    assert!(handshakes.iter().all(|&(_, smc)| smc), "all that the gateways speak is SMC-R");
    let others = later_options(&file);
    assert_eq!(others, 0, "the option belongs to SYN and SYN-ACK alone");

    let seen = tshark(&hosts, "tshark-smc", &file, "smc");
    for message in ["Proposal", "Accept", "Confirm", "CDC Message"] {
        assert!(seen.contains(message), "no {message} in:\n{seen}");
    }
    let shared = tshark(&hosts, "tshark-dense", &file, "infiniband.bth.opcode == 0xc0");
    assert_eq!(!shared.trim().is_empty(), dense, "{shared}");
    let malformed = tshark(&hosts, "tshark-malformed", &file, "smc && _ws.malformed");
    assert!(malformed.trim().is_empty(), "{malformed}");

    let file = file.to_str().expect("our own paths are text");
    let words = smcgate(&hosts, "decode", &["decode", file]).expect_success("smcgate decode");
    for message in [
        "TCP SYN [SMC option]",
        "TCP SYN-ACK [SMC option]",
        "CLC PROPOSAL",
        "CLC ACCEPT",
        "CLC CONFIRM",
        "LLC CONFIRM LINK",
        "WRITE ONLY",
        "CDC seq",
    ] {
        assert!(words.contains(message), "no {message} in:\n{words}");
    }
    words
}

/// One line for each frame of the capture that `filter` selects.
pub(crate) fn tshark(hosts: &Hosts, name: &str, file: &Path, filter: &str) -> String {
    let mut command = Command::new("tshark");
    command.arg("-r").arg(file).args(["-Y", filter]);
    run(hosts, &hosts.b, name, Duration::from_secs(60), &mut command).expect_success(name)
}

/// For each SYN to the gateway's port and each answer: whether it is a SYN-ACK, and whether it
/// carries the SMC option. Reads the bytes themselves, without a dissector.
pub(crate) fn handshakes(file: &Path) -> Vec<(bool, bool)> {
    let bytes = fs::read(file).expect("tcpdump wrote it");
    frames(&bytes).filter_map(handshake).collect()
}

/// The frames of a classic little-endian pcap file.
fn frames(file: &[u8]) -> impl Iterator<Item = &[u8]> {
    const FILE_HEADER_BYTES: usize = 24;
    const RECORD_HEADER_BYTES: usize = 16;
    assert_eq!(file[..4], [0xD4, 0xC3, 0xB2, 0xA1], "the magic number of such a file");
    let mut rest = &file[FILE_HEADER_BYTES..];
    std::iter::from_fn(move || {
        let (header, after) = rest.split_at_checked(RECORD_HEADER_BYTES)?;
        let stored = u32::from_le_bytes(*header[8..].first_chunk()?);
        let (frame, after) = after.split_at_checked(usize::try_from(stored).ok()?)?;
        rest = after;
        Some(frame)
    })
}

/// How many segments that are neither SYN nor SYN-ACK carry the SMC option.
fn later_options(file: &Path) -> usize {
    let bytes = fs::read(file).expect("tcpdump wrote it");
    let with_option = |frame| matches!(options(frame), Some((flags, true)) if flags & SYN == 0);
    frames(&bytes).filter(|frame| with_option(frame)).count()
}

/// Whether this Ethernet frame is a SYN-ACK and has the option, if it is part of a TCP handshake.
fn handshake(frame: &[u8]) -> Option<(bool, bool)> {
    let (flags, smc) = options(frame)?;
    (flags & SYN != 0).then_some((flags & ACK != 0, smc))
}

const SYN: u8 = 0x02;
const ACK: u8 = 0x10;

/// The flags of the TCP segment in this Ethernet frame, and whether it has the SMC option.
fn options(frame: &[u8]) -> Option<(u8, bool)> {
    const ETHERNET_BYTES: usize = 14;
    const TCP: u8 = 6;
    const FIXED_TCP_BYTES: usize = 20;
    let ip = frame.get(ETHERNET_BYTES..)?;
    let (next, ip_bytes) = match frame[12..ETHERNET_BYTES] {
        [0x08, 0x00] => (*ip.get(9)?, usize::from(ip[0] & 0x0F) * 4),
        [0x86, 0xDD] => (*ip.get(6)?, 40),
        _ => return None,
    };
    if next != TCP {
        return None;
    }
    let tcp = ip.get(ip_bytes..)?;
    let flags = *tcp.get(13)?;
    let options = tcp.get(FIXED_TCP_BYTES..usize::from(tcp[12] >> 4) * 4)?;
    let smc = options.windows(SMC_OPTION.len()).any(|bytes| bytes == SMC_OPTION);
    Some((flags, smc))
}

/// SYN and SYN-ACK of a Linux 6.12 host with SMC, and the ACK that follows, as captured.
const LINUX_SYN: &[u8; 82] = b"\
    \x52\x54\x00\x00\x00\x0a\x52\x54\x00\x00\x00\x0b\x08\x00\x45\x00\
    \x00\x44\x53\xe2\x40\x00\x40\x06\xd2\xbd\x0a\x09\x00\x02\x0a\x09\
    \x00\x01\xa5\x50\x14\x51\x9f\x45\x3e\xe1\x00\x00\x00\x00\xc0\x02\
    \xfa\xf0\x14\x4b\x00\x00\x02\x04\x05\xb4\x04\x02\x08\x0a\xb1\xe9\
    \xf8\x90\x00\x00\x00\x00\x01\x03\x03\x07\x01\x01\xfe\x06\xe2\xd4\
    \xc3\xd9";
const LINUX_SYN_ACK: &[u8; 82] = b"\
    \x52\x54\x00\x00\x00\x0b\x52\x54\x00\x00\x00\x0a\x08\x00\x45\x00\
    \x00\x44\x00\x00\x40\x00\x40\x06\x26\xa0\x0a\x09\x00\x01\x0a\x09\
    \x00\x02\x14\x51\xa5\x50\xc1\x89\x60\xf9\x9f\x45\x3e\xe2\xc0\x12\
    \xfe\x88\x14\x4b\x00\x00\x02\x04\x05\xb4\x04\x02\x08\x0a\x02\x79\
    \xe1\x9c\xb1\xe9\xf8\x90\x01\x03\x03\x07\x01\x01\xfe\x06\xe2\xd4\
    \xc3\xd9";
const LINUX_ACK: &[u8; 66] = b"\
    \x52\x54\x00\x00\x00\x0a\x52\x54\x00\x00\x00\x0b\x08\x00\x45\x00\
    \x00\x34\x53\xe3\x40\x00\x40\x06\xd2\xcc\x0a\x09\x00\x02\x0a\x09\
    \x00\x01\xa5\x50\x14\x51\x9f\x45\x3e\xe2\xc1\x89\x60\xfa\x80\x10\
    \x01\xf6\x14\x3b\x00\x00\x01\x01\x08\x0a\xb1\xe9\xf8\xa9\x02\x79\
    \xe1\x9c";

/// The functions above must be right about a capture that we did not make.
#[test]
fn finds_the_option_in_what_linux_sends() {
    assert_eq!(handshake(LINUX_SYN), Some((false, true)));
    assert_eq!(handshake(LINUX_SYN_ACK), Some((true, true)));
    assert_eq!(handshake(LINUX_ACK), None);
    assert_eq!(options(LINUX_ACK), Some((ACK, false)));
    // The same SYN as a host without SMC sends it: two no-operations and another option.
    let mut plain = *LINUX_SYN;
    plain[76] = 253;
    assert_eq!(handshake(&plain), Some((false, false)));
}

/// A capture that ends in the middle of a frame is read up to that frame.
#[test]
fn reads_frames_of_a_capture() {
    let mut file = vec![0xD4, 0xC3, 0xB2, 0xA1];
    file.resize(24, 0);
    for frame in [&b"one"[..], b"two!"] {
        let stored = u32::try_from(frame.len()).expect("short");
        file.extend([[0; 4], [0; 4], stored.to_le_bytes(), stored.to_le_bytes()].concat());
        file.extend(frame);
    }
    assert_eq!(frames(&file).collect::<Vec<_>>(), [&b"one"[..], b"two!"]);
    file.pop();
    assert_eq!(frames(&file).collect::<Vec<_>>(), [&b"one"[..]]);
}
