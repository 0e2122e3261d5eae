//! A third host that speaks SMC-R, knows what others have said, and means harm.
//!
//! ```text
//!   host a ── 10.8.0.0/24 ── host b ── 10.66.0.0/24 ── stranger
//!   gateway A ═════ SMC-R ═════ gateway B ◄── TCP, CLC ──┘
//! ```

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::Duration;

use smcr_proto::PeerId;
use smcr_proto::wire::clc::{Decline, Diagnosis, Frame, Framer};

use crate::clock::wait_until;
use crate::failure::assert_echo;
use crate::gateway::{Pair, SETTLE_LIMIT, local};
use crate::hosts::{Host, Hosts, accept, set_limit};

const PORT: u16 = 7010;
/// The test itself listens here, on host b, and reads what gateway A says to servers.
const OVERHEARD_PORT: u16 = 7011;
const LIMIT: Duration = Duration::from_secs(20);
const STRANGER: Ipv4Addr = Ipv4Addr::new(10, 66, 0, 66);
const CONNECTIONS: u8 = 50;
const ATTEMPTS: u64 = 50;

/// Where a Proposal has the peer id.
const PEER_ID: std::ops::Range<usize> = 8..16;

/// A host on another cable of host b, which reaches the address that gateway B listens on.
fn stranger(hosts: &Hosts) -> Host {
    let stranger = Host::new(&format!("{}-c", hosts.a.name), "vc", STRANGER);
    hosts.b.ip(&["link", "add", "ub", "type", "veth", "peer", "name", "vc"]);
    hosts.b.ip(&["link", "set", "vc", "netns", &stranger.name]);
    hosts.b.ip(&["address", "add", "10.66.0.2/24", "dev", "ub"]);
    stranger.ip(&["address", "add", "10.66.0.66/24", "dev", "vc"]);
    hosts.b.ip(&["link", "set", "ub", "up"]);
    stranger.ip(&["link", "set", "vc", "up"]);
    stranger.ip(&["route", "add", "10.8.0.0/24", "via", "10.66.0.2"]);
    stranger
}

/// The Proposal that gateway A sends to any server, the same one that it sends to gateway B.
fn overheard(hosts: &Hosts) -> Vec<u8> {
    let listener = hosts.b.listen(hosts.b.at(OVERHEARD_PORT));
    let _client = hosts.a.connect(local(OVERHEARD_PORT)).expect("the gateway listens");
    let mut server = accept(&listener, LIMIT);
    let mut header = [0; 8];
    server.read_exact(&mut header).expect("a Proposal");
    let mut proposal = vec![0; u16::from_be_bytes([header[5], header[6]]).into()];
    proposal[..8].copy_from_slice(&header);
    server.read_exact(&mut proposal[8..]).expect("all of it");
    proposal
}

/// Sends `proposal`. Returns the connection and the answer.
fn propose(stranger: &Host, at: std::net::SocketAddrV4, proposal: &[u8]) -> (TcpStream, Frame) {
    let mut socket = stranger.connect(at).expect("the gateway listens");
    set_limit(&socket, LIMIT);
    socket.write_all(proposal).expect("the connection is up");
    let mut framer = Framer::new();
    loop {
        if let Some(frame) = framer.next_frame().expect("our gateway makes no nonsense") {
            return (socket, frame);
        }
        let mut bytes = vec![0; framer.wanted()];
        let len = socket.read(&mut bytes).expect("an answer");
        assert!(len > 0, "an answer");
        assert_eq!(framer.feed(&bytes[..len]), len);
    }
}

/// Sends `proposal`, and calls the group that the answer names out of sync.
fn attack(stranger: &Host, at: std::net::SocketAddrV4, proposal: &[u8]) -> TcpStream {
    let (mut socket, answer) = propose(stranger, at, proposal);
    let first_contact = if let Frame::Accept(accept) = &answer {
        accept.first_contact
    } else if let Frame::AcceptV2(accept) = &answer {
        accept.offer.first_contact
    } else {
        panic!("an Accept: {answer:?}")
    };
    assert!(first_contact, "a stranger is told the keys of another's link group: {answer:?}");
    let peer_id = PeerId(proposal[PEER_ID].try_into().expect("eight bytes"));
    let decline = Decline { out_of_sync: true, peer_id, diagnosis: Diagnosis::OUT_OF_SYNC };
    socket.write_all(Frame::Decline(decline).encode().as_bytes()).expect("the connection is up");
    socket
}

/// A host could reset all connections of another: it sent the other's Proposal from an address of
/// its own, and then said that the link group in the answer is out of sync.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_a_stranger_ends_no_connection() {
    let hosts = Hosts::new("smoke_a_stranger_ends_no_connection");
    let stranger = stranger(&hosts);
    let peers = format!("assume_peers = [\"{}\", \"{STRANGER}\"]", hosts.a.address);
    let far = Pair::server_side(&hosts, &[PORT]).smc("option = \"assume\"").smc(&peers);
    let near = Pair::client_side(&hosts, &[PORT, OVERHEARD_PORT]).assume(hosts.b.address);
    let pair = Pair::start_these(&hosts, near, far);
    let listener = hosts.b.listen(local(PORT));
    let connections: Vec<_> = (0..CONNECTIONS)
        .map(|_| {
            let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
            set_limit(&client, LIMIT);
            (client, accept(&listener, LIMIT))
        })
        .collect();
    let proposal = overheard(&hosts);
    let mut anonymous = proposal.clone();
    anonymous[PEER_ID].fill(0);

    let mut round = 0;
    let mut talk = || {
        round += 1;
        for (number, (client, server)) in (0..).zip(&connections) {
            let said = [number, round].repeat(500);
            for (mut from, mut to) in [(client, server), (server, client)] {
                let mut heard = vec![0; said.len()];
                from.write_all(&said).expect("the connection is up");
                to.read_exact(&mut heard).expect("the connection is up");
                assert_eq!(heard, said, "connection {number}, round {round}");
            }
        }
    };
    talk();
    let mut strangers = Vec::new();
    for attempt in 0..ATTEMPTS {
        let proposal = if attempt % 2 == 0 { &proposal } else { &anonymous };
        strangers.push(attack(&stranger, hosts.b.at(PORT), proposal));
        if attempt % 10 == 9 {
            talk();
        }
    }
    wait_until("each attempt is counted", SETTLE_LIMIT, || {
        let totals = pair.b.stats().totals;
        (totals.foreign_claims, totals.groups_out_of_sync) == (ATTEMPTS, ATTEMPTS)
    });
    talk();
    let lines = pair.b.process.log().matches("claims to be the peer of this group").count();
    assert!((1..5).contains(&lines), "{lines} lines: neither silence nor a flood");
    assert_eq!(pair.b.stats().active.smc, u64::from(CONNECTIONS));
    // The listener takes those connections with it that nobody has accepted.
    drop((connections, strangers, listener));
    for gateway in [&pair.a, &pair.b] {
        gateway.holdings_at_rest();
    }
}

/// If the operator has listed the peers, a stranger must learn no key to our memory. It is still
/// served over TCP, and the peers in the list are still served over SMC-R.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_a_stranger_that_is_not_listed_stays_tcp() {
    let hosts = Hosts::new("smoke_a_stranger_that_is_not_listed_stays_tcp");
    let stranger = stranger(&hosts);
    let assumed = format!("assume_peers = [\"{}\", \"{STRANGER}\"]", hosts.a.address);
    let far = Pair::server_side(&hosts, &[PORT]).smc("option = \"assume\"").smc(&assumed);
    let far = far.smc("peers = [\"10.8.0.0/24\"]").smc("gids = [\"10.8.0.0/24\"]");
    let near = Pair::client_side(&hosts, &[PORT, OVERHEARD_PORT]).assume(hosts.b.address);
    let pair = Pair::start_these(&hosts, near, far);
    let listener = hosts.b.listen(local(PORT));
    let listed = hosts.a.connect(local(PORT)).expect("the gateway listens");
    assert_echo(&listed, &accept(&listener, LIMIT));
    assert_eq!(pair.b.stats().active.smc, 1);

    let (socket, answer) = propose(&stranger, hosts.b.at(PORT), &overheard(&hosts));
    let diagnosis = if let Frame::Decline(decline) = answer {
        decline.diagnosis
    } else if let Frame::DeclineV2(decline) = answer {
        decline.decline.diagnosis
    } else {
        panic!("a Decline: {answer:?}")
    };
    assert_eq!(diagnosis, Diagnosis::PEER_NOT_LISTED);
    assert_echo(&socket, &accept(&listener, LIMIT));
    let stats = pair.b.stats();
    let reason = stats.fallbacks.iter().find(|reason| reason.name == "PEER_NOT_LISTED");
    assert_eq!(reason.map(|reason| reason.count), Some(1));
    assert_eq!((stats.active.smc, stats.totals.foreign_claims), (1, 0));
}
