//! Endpoints without sockets and without a clock: what they demand, and when.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use smcr_engine::{Command, ConnectionId, GroupId};
use smcr_proto::limits::CLC_WAIT;
use smcr_proto::link::Keepalive;
use smcr_proto::wire::clc::proposal::Ipv4Subnet;
use smcr_proto::wire::clc::{Decline, Diagnosis, Frame, Proposal};
use smcr_proto::{Gid, Instant, MacAddress, Mtu, PeerId, RmbeSize};
use smcr_rnic::sim::{self, Network, Odds};

use super::shared::ANSWER_WITHIN;
use super::*;
use crate::config::Peers;
use crate::device::{Networks, Subnets};
use crate::groups::{self, Groups, Lan, Pollers, Port, PortId, QpOf};
use crate::slab::Key;

mod gone;
mod proof;
mod protected;

const START: Instant = Instant(1_000_000_000);
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(3);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const SUBNET: Ipv4Subnet = Ipv4Subnet { network: [10, 0, 0, 0], prefix_bits: 8 };
const SERVER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));

/// Stands in for the pollers: records the commands to them.
#[derive(Default)]
struct Told(VecDeque<Command<QpOf<sim::Rnic>, ()>>);

impl Pollers<QpOf<sim::Rnic>> for Told {
    type Stream = ();

    fn command(&mut self, _: PortId, command: Command<QpOf<sim::Rnic>, ()>) {
        self.0.push_back(command);
    }

    fn expect(&mut self, _: PortId, _: ConnectionId, _: GroupId) {}

    fn forget(&mut self, port: PortId, connection: ConnectionId) {
        self.command(port, Command::Forget { connection });
    }
}

type Tested = Endpoint<sim::Rnic, Told>;

/// An endpoint with one listener, whose RNIC is in a network of its own.
fn endpoint(side: Side, limits: impl FnOnce(&mut Settings)) -> Tested {
    endpoint_in(&Network::new(1, Odds::CALM), (1, 1), side, limits)
}

/// An endpoint with one listener, on a host with so many RNICs in this network.
fn endpoint_in(
    network: &Network,
    (host, nics): (u8, u8),
    side: Side,
    limits: impl FnOnce(&mut Settings),
) -> Tested {
    let ports = (0..nics).map(|index| {
        let gid = Gid::from_ipv4([10, 0, index, host]);
        let mac = MacAddress([2, 0, 0, 0, index, host]);
        let nic = smcr_rnic::Port { gid, mac, mtu: Mtu::B1024 };
        let nic = Some(network.rnic(nic).0);
        Port::new(format!("r{index}"), Lan::default(), SUBNET, nic)
    });
    let peer_id = PeerId([host; 8]);
    let of_groups = groups::Settings {
        peer_id,
        rmb_elements: 4,
        rmbe_size_min: RmbeSize::default(),
        rmb_bytes: 1 << 26,
        keepalive: Keepalive::default(),
        idle_group_server: Duration::from_secs(600),
        idle_group_client: Duration::from_secs(610),
        max_links: 2,
    };
    let terms = Terms {
        side,
        peers: Peers::default(),
        rmbe_size: RmbeSize::KIB_64,
        connect_timeout: CONNECT_TIMEOUT,
    };
    let mut settings = Settings {
        peer_id,
        v1: vec![true; nics.into()],
        v2: None,
        is_assumed: false,
        handshake_timeout: HANDSHAKE_TIMEOUT,
        handshakes_max: 8,
        silent_max: 8,
        listeners: vec![terms],
    };
    limits(&mut settings);
    let mut names = 0;
    let entropy = move || {
        names += 1;
        names
    };
    let groups = Groups::new(of_groups, ports.collect(), Told::default(), Box::new(entropy));
    Endpoint::new(settings, groups)
}

fn surroundings() -> Surroundings {
    Surroundings {
        offered: true,
        port: Some(PortId(0)),
        subnets: Subnets { ipv4: SUBNET, ..Subnets::default() },
        networks: Networks { subnets: vec![SUBNET], prefixes: Vec::new() },
        protected: false,
    }
}

fn key(index: u32) -> Key {
    Key { index, generation: 0 }
}

fn arrival(host: u8) -> Arrival {
    let source = SocketAddr::from(([10, 0, 0, host], 7));
    let (upstream, port) = (SERVER, Some(PortId(0)));
    let (dialled, stays, follows) = (false, None, None);
    Arrival { listener: 0, source, upstream, offered: true, port, dialled, stays, follows }
}

/// All effects that the endpoint has queued, but for the surveys: the network is always the same.
fn drain(endpoint: &mut Tested, now: Instant) -> Vec<Effect> {
    drain_amid(endpoint, now, &surroundings())
}

/// All effects that the endpoint has queued, but for the surveys, which find `surroundings`.
fn drain_amid(endpoint: &mut Tested, now: Instant, surroundings: &Surroundings) -> Vec<Effect> {
    let mut effects = Vec::new();
    while let Some(effect) = endpoint.poll_effect(now) {
        if let Effect::Survey { key } = effect {
            endpoint.surveyed(key, surroundings.clone());
        } else {
            effects.push(effect);
        }
    }
    effects
}

/// Accepts and connects a connection to a server.
fn connect(endpoint: &mut Tested, now: Instant, index: u32) {
    endpoint.arrived(now, key(index), arrival(9));
    assert!(matches!(drain(endpoint, now)[..], [Effect::Connect { offer: false, hear: true, .. }]));
    endpoint.connected(now, key(index));
    assert!(drain(endpoint, now).is_empty(), "nothing was proposed yet");
}

/// A Proposal of the host that all connections to a server are from.
fn propose(endpoint: &mut Tested, index: u32) {
    let frame = Frame::Proposal(Proposal {
        peer_id: PeerId([9; 8]),
        gid: Gid::from_ipv4([10, 0, 0, 9]),
        mac: MacAddress([2, 0, 0, 0, 0, 9]),
        subnet: SUBNET,
        prefixes: Default::default(),
        prefix_count: 0,
        offers_smc_r_v1: true,
    });
    endpoint.received(key(index), frame.encode().as_bytes());
}

/// Why the endpoint declines, if that is what it does; the connection stays TCP then.
fn declined(effects: &[Effect]) -> Option<Diagnosis> {
    match effects {
        [
            Effect::Send { frame: Frame::Decline(decline), .. },
            Effect::StayTcp { declined: true, reason, .. },
        ] => {
            assert_eq!(*reason, Some(decline.diagnosis));
            Some(decline.diagnosis)
        }
        _ => None,
    }
}

/// A control thread that polled now and then would wake for nothing, and answer late. So each wait
/// has a deadline, and `poll_timeout` returns it.
#[test]
fn every_wait_has_a_deadline_that_is_asked_for() {
    let mut server = endpoint(Side::Server, |_| {});
    assert_eq!(server.poll_timeout(), None, "nothing is waited for");
    server.arrived(START, key(1), arrival(9));
    drain(&mut server, START);
    assert_eq!(server.poll_timeout(), Some(START + CONNECT_TIMEOUT));
    let connected_at = START + Duration::from_secs(1);
    server.connected(connected_at, key(1));
    drain(&mut server, connected_at);
    let due = connected_at + HANDSHAKE_TIMEOUT;
    assert_eq!(server.poll_timeout(), Some(due), "of the rendezvous as a whole");
    let early = Instant(due.0 - 1);
    server.handle_timeout(early);
    assert!(drain(&mut server, early).is_empty());
    server.handle_timeout(due);
    assert!(matches!(drain(&mut server, due)[..], [Effect::Reset { why: Why::Failed, .. }]));
    assert_eq!((server.poll_timeout(), server.len()), (None, 0));
}

/// A Proposal waits for the first contact of another connection, and meanwhile an operator protects
/// the connection by IPsec: what counts is how things are when it is answered.
// RFC 7609 5.5 #1: no SMC-R under IPsec
#[test]
fn whoever_waited_is_answered_as_things_are_now() {
    let mut server = endpoint(Side::Server, |_| {});
    connect(&mut server, START, 1);
    connect(&mut server, START, 2);
    propose(&mut server, 1);
    assert_eq!(drain(&mut server, START).len(), 1);
    propose(&mut server, 2);
    assert!(drain(&mut server, START).is_empty(), "one first contact at a time");
    server.abort(key(1));
    let protected = Surroundings { protected: true, ..surroundings() };
    let effects = drain_amid(&mut server, START, &protected);
    let [Effect::Reset { .. }, second @ ..] = &effects[..] else { panic!("{effects:?}") };
    assert_eq!(declined(second), Some(Diagnosis::IPSEC));
}

/// A client may decline before our connect to the application has succeeded, and its bytes may
/// follow at once. The connect keeps its time limit, and nobody gets a socket that is not
/// connected.
#[test]
fn a_decline_in_place_of_a_proposal_waits_for_the_application() {
    let decline =
        Decline { out_of_sync: false, peer_id: PeerId([9; 8]), diagnosis: Diagnosis::TIMED_OUT };
    let begin = || {
        let mut server = endpoint(Side::Server, |_| {});
        server.arrived(START, key(1), arrival(9));
        assert!(matches!(drain(&mut server, START)[..], [Effect::Connect { hear: true, .. }]));
        server.received(key(1), Frame::Decline(decline).encode().as_bytes());
        assert!(drain(&mut server, START).is_empty(), "the application is not connected");
        assert_eq!(server.room(key(1)), 0, "the other bytes are the application's");
        server
    };

    let mut server = begin();
    server.connected(START, key(1));
    let effects = drain(&mut server, START);
    assert!(matches!(effects[..], [Effect::StayTcp { declined: false, .. }]), "{effects:?}");

    let mut server = begin();
    let due = START + CONNECT_TIMEOUT;
    assert_eq!(server.poll_timeout(), Some(due));
    server.handle_timeout(due);
    let effects = drain(&mut server, due);
    assert!(matches!(effects[..], [Effect::Unanswered { .. }]), "{effects:?}");
    assert_eq!(server.poll_timeout(), None, "it is for the owner to say");
    // Another upstream has as much time as the first.
    server.redirected(due, key(1), [10, 0, 0, 7].into());
    let effects = drain(&mut server, due);
    assert!(matches!(effects[..], [Effect::Connect { offer: false, .. }]), "{effects:?}");
    assert_eq!(server.poll_timeout(), Some(due + CONNECT_TIMEOUT));
    server.handle_timeout(due + CONNECT_TIMEOUT);
    let effects = drain(&mut server, due + CONNECT_TIMEOUT);
    assert!(matches!(effects[..], [Effect::Unanswered { .. }]), "{effects:?}");
    server.unanswered(key(1));
    let effects = drain(&mut server, due + CONNECT_TIMEOUT);
    assert!(matches!(effects[..], [Effect::Reset { why: Why::Unanswered, .. }]), "{effects:?}");

    let mut server = begin();
    server.refused(key(1));
    let effects = drain(&mut server, START);
    assert!(matches!(effects[..], [Effect::Reset { why: Why::Refused, .. }]), "{effects:?}");
    assert_eq!((server.poll_timeout(), server.len()), (None, 0));
}

/// A client that connects and sends nothing is given up after the longest time that CLC allows.
#[test]
fn a_peer_has_as_long_as_clc_allows() {
    let patient = |settings: &mut Settings| settings.handshake_timeout = Duration::from_secs(60);
    let mut server = endpoint(Side::Server, patient);
    connect(&mut server, START, 1);
    let due = START + CLC_WAIT;
    assert_eq!(server.poll_timeout(), Some(due));
    server.handle_timeout(due);
    assert!(matches!(drain(&mut server, due)[..], [Effect::Reset { why: Why::Failed, .. }]));
}

/// Connections of one host come together, and so do their deadlines. Those that wait for the first
/// contact of another begin one of their own when that fails, and have time for it.
// RFC 7609 3.5.1.6.4 #5: try first contact again next time
#[test]
fn who_waited_for_a_first_contact_has_time_of_its_own() {
    let mut server = endpoint(Side::Server, |_| {});
    connect(&mut server, START, 1);
    connect(&mut server, START, 2);
    propose(&mut server, 1);
    assert!(matches!(
        drain(&mut server, START)[..],
        [Effect::Send { frame: Frame::Accept(_), .. }]
    ));
    propose(&mut server, 2);
    assert!(drain(&mut server, START).is_empty(), "one first contact at a time");
    let due = START + HANDSHAKE_TIMEOUT;
    server.handle_timeout(due);
    let effects = drain(&mut server, due);
    let [Effect::Reset { key: first, .. }, Effect::Send { key: second, frame: Frame::Accept(_) }] =
        effects[..]
    else {
        panic!("{effects:?}")
    };
    assert_eq!((first, second), (key(1), key(2)));
    assert_eq!(server.poll_timeout(), Some(due + HANDSHAKE_TIMEOUT));
}

/// A Linux client gives up after six seconds. Before that, a Decline tells it to go on over TCP.
// RFC 7609 C.1 #1: decline in place of expected CLC
#[test]
fn a_client_is_answered_before_it_gives_up() {
    let patient = |settings: &mut Settings| settings.handshake_timeout = Duration::from_secs(60);
    let mut server = endpoint(Side::Server, patient);
    connect(&mut server, START, 1);
    propose(&mut server, 1);
    assert_eq!(drain(&mut server, START).len(), 1);
    connect(&mut server, START, 2);
    propose(&mut server, 2);
    assert!(drain(&mut server, START).is_empty());
    let due = START + ANSWER_WITHIN;
    assert_eq!(server.poll_timeout(), Some(due));
    server.handle_timeout(due);
    assert_eq!(declined(&drain(&mut server, due)), Some(Diagnosis::TIMED_OUT));
    assert_eq!(server.fallbacks()[&Diagnosis::TIMED_OUT], 1);
}

/// A connection whose message cannot be sent is reset, whatever was to follow the message.
#[test]
fn nothing_follows_a_message_that_cannot_be_sent() {
    let mut client = endpoint(Side::Client, |_| {});
    client.arrived(START, key(1), arrival(9));
    assert!(matches!(
        drain(&mut client, START)[..],
        [Effect::Connect { offer: true, hear: true, .. }]
    ));
    client.connected(START, key(1));
    assert!(matches!(client.poll_effect(START), Some(Effect::Survey { .. })));
    client.surveyed(key(1), Surroundings { protected: true, ..surroundings() });
    let said = client.poll_effect(START);
    assert!(matches!(said, Some(Effect::Send { frame: Frame::Decline(_), .. })), "{said:?}");
    client.broke(key(1));
    let effects = drain(&mut client, START);
    assert!(matches!(effects[..], [Effect::Reset { why: Why::Broke, .. }]), "{effects:?}");
    assert_eq!(client.counts().connections_tcp, 0);
}

/// A connection that waits for a place gets the first one that is free, and stays TCP if there is
/// none in time; when the gateway stops, it is reset at once.
#[test]
fn places_are_handed_on() {
    let few = |settings: &mut Settings| settings.handshakes_max = 1;
    let mut client = endpoint(Side::Client, few);
    for index in 1..=4 {
        client.arrived(START, key(index), arrival(9));
        let effects = drain(&mut client, START);
        assert_eq!(effects.len(), usize::from(index == 1), "{effects:?}");
    }
    assert_eq!(client.stage(key(2)), Some(Stage::Waiting));
    client.refused(key(1));
    let effects = drain(&mut client, START);
    let [Effect::Reset { why: Why::Refused, .. }, Effect::Connect { key: next, offer: true, .. }] =
        effects[..]
    else {
        panic!("{effects:?}")
    };
    assert_eq!((next, client.stage(next)), (key(2), Some(Stage::Connecting)));

    let due = START + HANDSHAKE_TIMEOUT;
    client.connected(START, key(2));
    assert!(matches!(
        drain(&mut client, START)[..],
        [Effect::Send { frame: Frame::Proposal(_), .. }]
    ));
    assert_eq!(client.poll_timeout(), Some(due));
    let effects = drain(&mut client, due);
    let [
        Effect::Exhausted { limit: Limit::Places, .. },
        Effect::Connect { key: third, offer: false, hear: false },
        ..,
    ] = effects[..]
    else {
        panic!("{effects:?}")
    };
    client.connected(due, third);
    let effects = drain(&mut client, due);
    assert!(
        matches!(effects[..], [Effect::StayTcp { reason: Some(Diagnosis::TOO_BUSY), .. }]),
        "{effects:?}"
    );

    client.arrived(due, key(5), arrival(9));
    assert!(drain(&mut client, due).is_empty());
    client.drain();
    let effects = drain(&mut client, due);
    assert!(
        matches!(effects[..], [Effect::Reset { why: Why::Stopping, key: last }] if last == key(5)),
        "{effects:?}"
    );
}

/// A local program has connected by itself, and the server waits for a Proposal. If there is none,
/// silence would leave the server waiting, and the application would get its Decline as data.
#[test]
fn a_dialled_server_is_told_that_there_is_no_proposal() {
    let few = |settings: &mut Settings| settings.handshakes_max = 1;
    let mut client = endpoint(Side::Client, few);
    let dialled = |stays| Arrival { dialled: true, stays, ..arrival(9) };
    let begin = |client: &mut Tested, now, index, stays| {
        client.arrived(now, key(index), dialled(stays));
        let waits = drain(client, now).is_empty();
        client.connected(now, key(index));
        (waits, drain(client, now))
    };
    let (waits, effects) = begin(&mut client, START, 1, None);
    assert!(!waits && matches!(effects[..], [Effect::Send { frame: Frame::Proposal(_), .. }]));
    let (waits, effects) = begin(&mut client, START, 2, Some(Diagnosis::OVER_LIMIT));
    assert_eq!((waits, declined(&effects)), (false, Some(Diagnosis::OVER_LIMIT)));

    client.arrived(START, key(3), dialled(None));
    assert!(drain(&mut client, START).is_empty(), "it waits for a place");
    let due = START + HANDSHAKE_TIMEOUT;
    assert!(matches!(
        drain(&mut client, due)[..],
        [Effect::Exhausted { .. }, Effect::Connect { hear: true, .. }, ..]
    ));
    client.connected(due, key(3));
    assert_eq!(declined(&drain(&mut client, due)), Some(Diagnosis::TOO_BUSY));
}

/// Where SMC-R is assumed, a server awaits a Proposal whatever our SYN says. Connections that were
/// to stay TCP were reset: it took the first bytes of the application for a message. Other servers
/// get no message.
#[test]
fn an_assumed_server_is_told_that_there_is_no_proposal() {
    let assumed = |settings: &mut Settings| settings.is_assumed = true;
    for offered in [true, false] {
        let mut client = endpoint(Side::Client, assumed);
        let stays = Some(Diagnosis::OVER_LIMIT);
        client.arrived(START, key(1), Arrival { stays, ..arrival(9) });
        let effects = drain(&mut client, START);
        assert!(
            matches!(effects[..], [Effect::Connect { offer: false, hear: true, .. }, ..]),
            "{effects:?}"
        );
        client.connected(START, key(1));
        let effects = drain_amid(&mut client, START, &Surroundings { offered, ..surroundings() });
        if offered {
            assert_eq!(declined(&effects), stays);
        } else {
            let plain =
                matches!(&effects[..], [Effect::StayTcp { reason, .. }] if *reason == stays);
            assert!(plain, "{effects:?}");
        }
    }
}

/// Each peer that sends nothing holds two descriptors. Beyond their budget the oldest is reset, and
/// the one that came last is served.
#[test]
fn silent_peers_make_room() {
    let few = |settings: &mut Settings| settings.silent_max = 1;
    let mut server = endpoint(Side::Server, few);
    connect(&mut server, START, 1);
    server.arrived(START, key(2), arrival(9));
    let effects = drain(&mut server, START);
    let [Effect::Connect { key: second, .. }, Effect::Reset { key: first, why: Why::Displaced }] =
        effects[..]
    else {
        panic!("{effects:?}")
    };
    assert_eq!((first, second, server.counts().silent_cut_short), (key(1), key(2), 1));
    // An input for somebody who has gone has no effect.
    assert_eq!(server.room(key(1)), 0);
    server.ended(key(1));
    server.connected(START, key(1));
    assert!(drain(&mut server, START).is_empty());
}
