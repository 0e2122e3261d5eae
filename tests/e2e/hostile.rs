//! A third host that speaks SMC-R, and whom nobody asked.
//!
//! ```text
//!   host a ── 10.8.0.0/24 ── host b ── 10.66.0.0/24 ── stranger
//!   gateway A ═════ SMC-R ═════ gateway B ◄── TCP, CLC ──┘
//! ```

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use smcr_engine::clock::Clock;
use smcr_proto::wire::cdc::{Cdc, Cursor};
use smcr_proto::wire::clc::{Decline, Diagnosis, Frame, Framer};
use smcr_proto::{AlertToken, Gid, PeerId, Psn, QpAddress, Qpn};
use smcr_rnic::roce::udp::{self, Udp};
use smcr_rnic::roce::{Fabric, Rnic};
use smcr_rnic::{Domain, Fabric as _, Opening as _, Rnic as _, Tag, Work};
use socket2::SockRef;

use crate::capture::Capture;
use crate::clock::wait_until;
use crate::failure::assert_echo;
use crate::gateway::{Pair, SETTLE_LIMIT, local, smcgate};
use crate::hosts::{Host, Hosts, accept, set_limit};
use crate::stranger::{LIMIT, Stranger, propose};

const PORT: u16 = 7010;
/// The test itself listens here, on host b, and reads what gateway A says to servers.
const OVERHEARD_PORT: u16 = 7011;
const STRANGER: Ipv4Addr = Ipv4Addr::new(10, 66, 0, 66);
const CONNECTIONS: u8 = 50;
const ATTEMPTS: usize = 60;
/// Tokens that are guessed: all of them below this.
const GUESSES: u32 = 1 << 20;
/// In how many parts, between which the others talk.
const ROUNDS: u32 = 8;
/// Kinds of messages with the token of somebody else.
const ATTACKS: usize = 5;

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

/// The Proposal that gateway A makes to whoever it takes for a server.
fn overheard(hosts: &Hosts) -> Vec<u8> {
    let ear = hosts.b.listen(hosts.b.at(OVERHEARD_PORT));
    let _client = hosts.a.connect(local(OVERHEARD_PORT)).expect("the gateway listens");
    let mut server = accept(&ear, LIMIT);
    let mut header = [0; 8];
    server.read_exact(&mut header).expect("a Proposal");
    let mut proposal = vec![0; u16::from_be_bytes([header[5], header[6]]).into()];
    proposal[..8].copy_from_slice(&header);
    server.read_exact(&mut proposal[8..]).expect("all of it");
    proposal
}

/// The same Proposal, but that the client's RNIC is the stranger's.
fn from_another_port(proposal: &[u8]) -> Vec<u8> {
    let mut framer = Framer::new();
    let mut left = proposal;
    let frame = loop {
        if let Some(frame) = framer.next_frame().expect("our gateway makes no nonsense") {
            break frame;
        }
        left = &left[framer.feed(left)..];
    };
    let Frame::ProposalV2(mut frame) = frame else { panic!("of version 2: {frame:?}") };
    let gid = Gid::from_ipv4(STRANGER.octets());
    frame.v1.gid = gid;
    frame.v2.as_mut().expect("version 2 is offered").gid = gid;
    Frame::ProposalV2(frame).encode().as_bytes().to_vec()
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

/// Verified connections between hosts a and b, which are nobody else's business.
struct Others {
    connections: Vec<(TcpStream, TcpStream)>,
    round: u8,
}

impl Others {
    fn connect(hosts: &Hosts, listener: &TcpListener) -> Self {
        let connect = |_| {
            let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
            set_limit(&client, LIMIT);
            (client, accept(listener, LIMIT))
        };
        Self { connections: (0..CONNECTIONS).map(connect).collect(), round: 0 }
    }

    /// Each of them carries bytes both ways, as they were sent.
    fn talk(&mut self) {
        self.round += 1;
        for (number, (client, server)) in (0..).zip(&self.connections) {
            let said = [number, self.round].repeat(500);
            for (mut from, mut to) in [(client, server), (server, client)] {
                let mut heard = vec![0; said.len()];
                from.write_all(&said).expect("the connection is up");
                to.read_exact(&mut heard).expect("the connection is up");
                assert_eq!(heard, said, "connection {number}, round {}", self.round);
            }
        }
    }
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
    let mut others = Others::connect(&hosts, &listener);
    let proposal = overheard(&hosts);
    let mut anonymous = proposal.clone();
    anonymous[PEER_ID].fill(0);
    let variants = [proposal.clone(), anonymous, from_another_port(&proposal)];

    others.talk();
    let mut strangers = Vec::new();
    for attempt in 0..ATTEMPTS {
        let proposal = &variants[attempt % variants.len()];
        strangers.push(attack(&stranger, hosts.b.at(PORT), proposal));
        if attempt % 10 == 9 {
            others.talk();
        }
    }
    wait_until("each attempt is counted", SETTLE_LIMIT, || {
        let totals = pair.b.stats().totals;
        // Who has a port of his own claims to be nobody else: many hosts may have one name.
        let claims = 2 * ATTEMPTS as u64 / 3;
        (totals.foreign_claims, totals.groups_out_of_sync) == (claims, ATTEMPTS as u64)
    });
    others.talk();
    let lines = pair.b.process.log().matches("claims to be the peer of this group").count();
    assert!((1..5).contains(&lines), "{lines} lines: neither silence nor a flood");
    assert_eq!(pair.b.stats().active.smc, u64::from(CONNECTIONS));
    // The listener takes those connections with it that nobody has accepted.
    drop((others, strangers, listener));
    for gateway in [&pair.a, &pair.b] {
        gateway.holdings_at_rest();
    }
}

/// One host has a link group and a queue pair of its own with the gateway. It sends CDC messages
/// with the tokens of all connections of another host, and with a million guesses: messages that
/// abort, close, and move cursors. It does so in the other's name, after it has proposed with that
/// name and gone away again and again.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn a_stranger_with_a_queue_pair_touches_no_connection() {
    let hosts = Hosts::new("a_stranger_with_a_queue_pair_touches_no_connection");
    let stranger = stranger(&hosts);
    let peers = format!("assume_peers = [\"{}\", \"{STRANGER}\"]", hosts.a.address);
    let far = Pair::server_side(&hosts, &[PORT]).smc("option = \"assume\"").smc(&peers);
    let near = Pair::client_side(&hosts, &[PORT, OVERHEARD_PORT]).assume(hosts.b.address);
    let pair = Pair::start_these(&hosts, near, far);
    let listener = hosts.b.listen(local(PORT));
    let mut others = Others::connect(&hosts, &listener);
    let capture = Capture::start(&hosts.a, hosts.a.device, &hosts.logs);
    others.talk();
    let tokens = tokens_heard(&hosts, capture);
    assert_eq!(tokens.len(), usize::from(CONNECTIONS), "each connection has told us its token");

    let proposal = overheard(&hosts);
    for _ in 0..ATTEMPTS {
        let (socket, _) = propose(&stranger, hosts.b.at(PORT), &proposal);
        let no_time = Some(Duration::ZERO);
        SockRef::from(&socket).set_linger(no_time).expect("an open socket");
    }
    others.talk();
    let peer_id = PeerId(proposal[PEER_ID].try_into().expect("eight bytes"));
    let mut peer = Stranger::found(&stranger, hosts.b.at(PORT), peer_id);
    for round in 0..ROUNDS {
        thread::scope(|scope| {
            // Their bytes are on the way while the messages come.
            scope.spawn(|| others.talk());
            peer.say(tokens.iter().copied().flat_map(attacks));
            let guesses = round * GUESSES / ROUNDS..(round + 1) * GUESSES / ROUNDS;
            let attack_of = |guess: u32| attacks(AlertToken(guess))[guess as usize % ATTACKS];
            peer.say(guesses.map(attack_of));
        });
    }
    let live = u64::from(ROUNDS) * (tokens.len() * ATTACKS) as u64;
    let mut seen = (0, 0);
    wait_until("each message is counted", LIMIT, || {
        peer.idle();
        let stats = pair.b.stats();
        seen = (stats.counter("cdc_foreign"), stats.counter("cdc_unknown_token"));
        seen.0 + seen.1 == live + u64::from(GUESSES)
    });
    // A guess may be right.
    assert!(seen.0 >= live && seen.0 < live + 100, "{live} of them have live tokens: {seen:?}");
    others.talk();
    assert_eq!(pair.b.stats().totals.foreign_claims, ATTEMPTS as u64);
    assert_eq!(pair.b.stats().active.smc, u64::from(CONNECTIONS) + 1, "his own is one, too");
    drop((others, peer, listener));
    for gateway in [&pair.a, &pair.b] {
        gateway.holdings_at_rest();
    }
}

/// What a CDC message with somebody else's token could do: abort, close, announce bytes that nobody
/// wrote, free an element that is full, and claim a failover that has lost messages. Each is newer
/// than all that the connection has heard, or it would be no news to it.
fn attacks(token: AlertToken) -> [Cdc; ATTACKS] {
    let base = Cdc { sequence: 0x4000, token, ..Cdc::default() };
    let far = Cursor { wrap: 0, count: 1000 };
    [
        Cdc { abnormal_close: true, ..base },
        Cdc { sending_done: true, connection_closed: true, ..base },
        Cdc { producer: far, ..base },
        Cdc { consumer: far, ..base },
        Cdc { failover_validation: true, ..base },
    ]
}

/// The tokens of gateway B that stand in the CDC messages of a capture.
fn tokens_heard(hosts: &Hosts, capture: Capture) -> BTreeSet<AlertToken> {
    let file = capture.stop(&hosts.a, hosts.b.address);
    let file = file.to_str().expect("our own paths are text");
    let words = smcgate(hosts, "decode", &["decode", file]).expect_success("smcgate decode");
    let to_b = format!("> {} CDC", hosts.b.address);
    let tokens = words.lines().filter(|line| line.contains(&to_b)).map(|line| {
        let (_, token) = line.split_once("token 0x").expect("each CDC message has a token");
        AlertToken(u32::from_str_radix(&token[..8], 16).expect("eight digits"))
    });
    tokens.collect()
}

/// Where the operator has listed the peers, a stranger is told nothing of what SMC-R hands out; but
/// it is served like anybody else, and so are those that are listed.
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

/// A host that sends from the address of another, and has learned the number of a queue pair, can
/// try PSNs. No connection notices, and the operator does.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_guessed_psns_stop_nothing_and_are_logged() {
    let hosts = Hosts::new("smoke_guessed_psns_stop_nothing_and_are_logged");
    let stranger = stranger(&hosts);
    // A network that lets everybody send from any address.
    hosts.b.enter(|| {
        for device in ["all", "ub"] {
            let filter = format!("/proc/sys/net/ipv4/conf/{device}/rp_filter");
            fs::write(filter, "0").expect("we are root");
        }
    });
    stranger.ip(&["address", "add", &format!("{}/32", hosts.a.address), "dev", "vc"]);
    let pair = Pair::start(&hosts, &[PORT]);
    let listener = hosts.b.listen(local(PORT));
    let mut others = Others::connect(&hosts, &listener);
    others.talk();
    let errors = || pair.b.stats().rnics.iter().map(|rnic| rnic.psn_errors).sum::<u64>();
    assert_eq!(errors(), 0, "no packet of a good peer is counted");

    let qpn = Qpn(pair.b.stats().link_groups[0].links[0].qpn);
    let mut guesser = stranger.enter(|| Guesser::new(hosts.a.address, hosts.b.address, qpn));
    for _ in 0..GUESSERS {
        thread::scope(|scope| {
            scope.spawn(|| others.talk());
            stranger.enter(|| guesser.guess());
        });
    }
    // A few guesses are near ones, and a socket may be full.
    let least = u64::from(GUESSERS * GUESSES_EACH) / 2;
    wait_until("the guesses are counted", SETTLE_LIMIT, || errors() > least);
    others.talk();
    guesser.victim.qpn = Qpn(qpn.0 ^ 1);
    let strangers = || pair.b.stats().rnics.iter().map(|rnic| rnic.unknown_qp).sum::<u64>();
    let (before, least) = (strangers(), u64::from(GUESSES_EACH) / 2);
    stranger.enter(|| guesser.guess());
    wait_until("they knock at a wrong door", SETTLE_LIMIT, || strangers() >= before + least);
    let logged = || pair.b.process.log().matches("somebody guesses PSNs").count();
    wait_until("they are logged", SETTLE_LIMIT, || logged() > 0);
    let (lines, at) = (logged(), format!("peer={} qpn={}", hosts.a.address, qpn.0));
    assert!(lines < 4 && pair.b.process.log().contains(&at), "{lines} lines of {at}");
    assert_eq!(pair.b.stats().active.smc, u64::from(CONNECTIONS));
    drop((others, listener));
    for gateway in [&pair.a, &pair.b] {
        gateway.holdings_at_rest();
    }
}

/// Queue pairs that guess, one after the other, each from another first PSN.
const GUESSERS: u32 = 40;
/// So few in all that it is unlikely for one of them to be right: once in 4,000 runs.
const GUESSES_EACH: u32 = 100;

/// An RNIC with the address of another host.
struct Guesser {
    rnic: Rnic,
    fabric: Fabric<Udp>,
    domain: Domain,
    victim: QpAddress,
    clock: Clock,
}

impl Guesser {
    fn new(claimed: Ipv4Addr, victim: Ipv4Addr, qpn: Qpn) -> Self {
        let opened = udp::open(&udp::Config::on(udp::Place::Address(claimed.into())));
        let (mut rnic, fabric) = opened.expect("nobody else has the port of RoCEv2 here");
        let domain = rnic.open_domain().expect("the RNIC is new");
        let smcr_rnic::Port { mac, mtu, .. } = rnic.port();
        let gid = Gid::from_ipv4(victim.octets());
        let victim = QpAddress { gid, mac, qpn, psn: Psn(0), mtu };
        Self { rnic, fabric, domain, victim, clock: Clock::new() }
    }

    /// Sends messages with consecutive PSNs, from a random one on.
    fn guess(&mut self) {
        let opening = self.rnic.open(self.domain).expect("few queue pairs at once");
        let qp = opening.connect(self.victim).expect("there is a route");
        let now = self.clock.now();
        let qp = self.fabric.adopt(now, qp);
        let message = |tag: u32| Work::Send { message: [0; 44], tag: Tag(tag.into()) };
        self.fabric.post(qp, &mut (0..GUESSES_EACH).map(message).collect());
        self.fabric.transmit(now);
        self.fabric.release(now, qp);
        self.fabric.poll(now, &mut Vec::with_capacity(GUESSES_EACH as usize));
    }
}
