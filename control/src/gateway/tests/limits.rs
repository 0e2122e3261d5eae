//! What one source can take from others: connections, and time.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketType, bind, connect as connect_socket, socket};
use smcr_proto::wire::clc::{Diagnosis, Frame};

use super::rig::{Peer, Rig, assert_echo, connect, wait_until};

/// A connection from another address of this host.
fn connect_from(source: &str, target: SocketAddr) -> TcpStream {
    try_from(source, target).unwrap()
}

/// The same, where the gateway may refuse it: it can be reset before `connect` returns.
fn try_from(source: &str, target: SocketAddr) -> io::Result<TcpStream> {
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    let source: IpAddr = source.parse().unwrap();
    bind(&socket, &SocketAddr::new(source, 0)).unwrap();
    connect_socket(&socket, &target)?;
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(Duration::from_secs(4))).unwrap();
    Ok(stream)
}

/// Whether the gateway refuses a connection from this source.
fn is_refused(source: &str, target: SocketAddr) -> bool {
    match try_from(source, target) {
        Ok(mut stream) => is_over(&mut stream),
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    }
}

/// Whether the other end has closed it, in whatever way.
fn is_over(stream: &mut TcpStream) -> bool {
    !matches!(stream.read(&mut [0]), Ok(1..))
}

/// One client with a leak took all connections of a gateway, and nobody else could connect.
#[test]
fn one_source_has_so_many_connections_at_most() {
    let rig = Rig::server(90, "max_per_source = 2\n");
    let mut open: Vec<_> = (0..2).map(|_| (connect(rig.gateway), rig.accept())).collect();
    assert!(is_refused("127.0.0.1", rig.gateway), "the third is refused");
    let mut other = Peer::new(connect_from("127.0.0.9", rig.gateway));
    let mut server = rig.accept();
    other.say(&super::decline(Diagnosis::NO_SMC_R_DEVICE));
    assert_echo(&mut other.socket, &mut server);
    assert_eq!(rig.stats().totals.refused_tcp, 1);
    // What has ended counts no more.
    drop(open.pop());
    wait_until("it is over", || rig.stats().listeners[0].active == 2);
    let _again = connect(rig.gateway);
    rig.accept();
}

/// Connections that never say anything hold descriptors until they time out: a few thousand of them
/// left none for others.
#[test]
fn peers_that_send_no_proposal_are_cut_short() {
    let rig = Rig::server(91, "[limits]\nsilent_max = 2\n");
    let mut silent: Vec<_> = (0..2).map(|_| connect(rig.gateway)).collect();
    wait_until("both are there", || rig.stats().active.connecting == 2);
    let mut other = Peer::new(connect_from("127.0.0.9", rig.gateway));
    assert!(is_over(&mut silent[0]), "the oldest of the source that has most");
    other.say(&other.proposal());
    assert!(other.hear().is_some());
    // Who has proposed is none of them any more.
    let _third = connect(rig.gateway);
    wait_until("it is there", || rig.stats().active.connecting == 3);
    assert_eq!(rig.stats().totals.silent_cut_short, 1);
}

/// An application that has forgotten a connection keeps it for ever. Where the operator says so, it
/// is reset at both ends when nothing has moved for long enough, over TCP as over SMC-R; and a
/// connection that is used is not.
#[test]
fn a_connection_that_is_idle_for_too_long_is_reset() {
    let far = Rig::server(92, "");
    let near = Rig::client(93, "idle_timeout = \"2s\"\n");
    let mut smc = connect(near.gateway);
    let beside = near.relay_rendezvous(far.gateway);
    let mut smc_server = far.accept();
    let mut tcp = connect(near.gateway);
    let mut peer = Peer::new(near.accept());
    assert!(peer.hear().is_some(), "a Proposal");
    peer.say(&super::decline(Diagnosis::NO_SMC_R_DEVICE));
    for _ in 0..10 {
        assert_echo(&mut smc, &mut smc_server);
        assert_echo(&mut tcp, &mut peer.socket);
        std::thread::sleep(Duration::from_millis(250));
    }
    assert_eq!(near.stats().totals.idle_closed, 0);
    for stream in [&mut smc, &mut smc_server, &mut tcp, &mut peer.socket] {
        assert!(is_over(stream));
    }
    drop(beside);
    assert_eq!((near.stats().totals.idle_closed, far.stats().totals.idle_closed), (2, 0));
}

/// A client in a loop makes a thousand connections a second, each of which costs a rendezvous.
#[test]
fn new_connections_come_in_at_so_many_in_a_second() {
    let rig = Rig::server(
        94,
        "rate_max = 100\nrate_burst = 3\nrate_per_source = 1\n\
                               rate_per_source_burst = 2\n",
    );
    let _open: Vec<_> = (0..2).map(|_| (connect(rig.gateway), rig.accept())).collect();
    assert!(is_refused("127.0.0.1", rig.gateway), "the third within the second");
    let _other = (connect_from("127.0.0.9", rig.gateway), rig.accept());
    let listener = rig.stats().listeners.remove(0);
    assert_eq!((listener.refused, listener.refused_source_rate, listener.active), (1, 1, 3));
    let crowd: Vec<_> =
        (10..30).map(|last| try_from(&format!("127.0.0.{last}"), rig.gateway)).collect();
    wait_until("all were accepted", || rig.stats().listeners[0].accepted == 24);
    let refused = crowd.into_iter().filter_map(|stream| {
        let read = stream.and_then(|mut stream| {
            stream.set_read_timeout(Some(Duration::from_millis(200)))?;
            stream.read(&mut [0])
        });
        read.err().filter(|error| error.kind() == ErrorKind::ConnectionReset)
    });
    let refused = refused.count() as u64;
    assert!(refused > 0, "twenty at once where some may come");
    assert_eq!(rig.stats().listeners[0].refused_rate, refused);
}

/// A burst above a limit is over in a moment: who waits for that is not refused. Who has waited
/// for too long is, and a source that floods the queue blocks nobody else.
#[test]
fn what_exceeds_a_limit_waits_for_its_turn() {
    let keys = "connections_max = 1\nover_limit = \"wait\"\nwait_timeout = \"3s\"\n";
    let rig = Rig::server(95, keys);
    let first = (connect(rig.gateway), rig.accept());
    let mut second = Peer::new(connect(rig.gateway));
    let mut third = connect(rig.gateway);
    wait_until("they wait", || rig.stats().listeners[0].waiting == 2);
    drop(first);
    let mut server = rig.accept();
    second.say(&super::decline(Diagnosis::NO_SMC_R_DEVICE));
    assert_echo(&mut second.socket, &mut server);
    assert!(is_over(&mut third), "nobody has left in time");
    let listener = rig.stats().listeners.remove(0);
    assert_eq!((listener.waited, listener.refused_connections, listener.waiting), (1, 1, 0));
    assert_eq!(listener.active, 1);
}

/// One client with more connections than it may have delayed everybody's new connections, and where
/// many waited, got them refused.
#[test]
fn who_waits_for_its_own_limit_holds_up_nobody_else() {
    let rig = Rig::relay(180, "max_per_source = 1\nover_limit = \"wait\"\n");
    let first = (connect(rig.gateway), rig.accept());
    let _second = connect(rig.gateway);
    wait_until("it waits", || rig.stats().listeners[0].waiting == 1);
    for last in 10..20 {
        let mut other = connect_from(&format!("127.0.0.{last}"), rig.gateway);
        assert_echo(&mut other, &mut rig.accept());
    }
    let listener = rig.stats().listeners.remove(0);
    assert_eq!((listener.waited, listener.waiting), (0, 1), "nobody else has waited");
    drop(first);
    rig.accept();
    assert_eq!(rig.stats().listeners[0].waited, 1);
}

/// One client's connections that wait took all that the process may have, and everybody else was
/// refused.
#[test]
fn a_crowd_that_waits_makes_room_for_others() {
    let keys = "connections_max = 1\nover_limit = \"wait\"\n[limits]\nconnections_max = 3\n";
    let rig = Rig::relay(181, keys);
    let first = (connect(rig.gateway), rig.accept());
    let mut crowd: Vec<_> = (0..2).map(|_| connect(rig.gateway)).collect();
    wait_until("they wait", || rig.stats().listeners[0].waiting == 2);
    assert!(is_refused("127.0.0.1", rig.gateway), "its own crowd");
    let mut other = connect_from("127.0.0.9", rig.gateway);
    assert!(is_over(&mut crowd[1]), "the newest of the source that has most");
    assert!(is_refused("127.0.0.10", rig.gateway), "nobody has more than its share");
    drop(first);
    // Of the crowd, the first has its turn, then the other one.
    let server = rig.accept();
    drop((crowd, server));
    assert_echo(&mut other, &mut rig.accept());
    assert_eq!(rig.stats().listeners[0].refused, 3);
}

/// Connections from a proxy that sends no header took more places than the listener has.
#[test]
fn who_says_not_for_whom_it_is_takes_a_place() {
    let keys = "connections_max = 2\nproxy_from = [\"127.0.0.1/32\"]\n";
    let rig = Rig::relay(182, keys);
    let mut silent: Vec<_> = (0..2).map(|_| connect(rig.gateway)).collect();
    assert!(is_refused("127.0.0.1", rig.gateway), "the third");
    let listener = rig.stats().listeners.remove(0);
    assert_eq!((listener.refused_connections, listener.active), (1, 2));
    silent[0].write_all(b"PROXY TCP4 10.0.0.7 10.0.0.8 5 6\r\n").unwrap();
    assert_echo(&mut silent[0], &mut rig.accept());
    assert!(is_refused("127.0.0.1", rig.gateway));
    assert_eq!(rig.stats().listeners[0].active, 2);
}

/// Streams that share a narrow limit were reset as idle while they waited for their turn.
#[test]
fn who_waits_for_bandwidth_is_not_idle() {
    let rig = Rig::relay(183, "idle_timeout = \"1s\"\nbandwidth_max = \"64kbit\"\n");
    let mut streams: Vec<_> = (0..12).map(|_| (connect(rig.gateway), rig.accept())).collect();
    for (client, _) in &mut streams {
        // What all of them may carry in fifteen seconds.
        client.write_all(&[7; 10_000]).unwrap();
    }
    let mut idle = (connect(rig.gateway), rig.accept());
    assert!(is_over(&mut idle.0) && is_over(&mut idle.1));
    std::thread::sleep(Duration::from_secs(2));
    let stats = rig.stats();
    assert_eq!((stats.totals.idle_closed, stats.listeners[0].active), (1, 12));
}

/// What exceeds a limit and comes in without SMC-R says so on both sides, and takes no place of
/// the others.
#[test]
fn what_exceeds_a_limit_comes_in_without_smc_r() {
    let keys = "connections_max = 1\nover_limit = \"tcp\"\n";
    let far = Rig::server(96, keys);
    let near = Rig::client(97, keys);
    let mut first = connect(near.gateway);
    let _beside = near.relay_rendezvous(far.gateway);
    let mut first_server = far.accept();
    assert_echo(&mut first, &mut first_server);
    // At the client's gateway no Proposal is sent, and a server that awaits one hears of that.
    let (mut second, mut server) = (connect(near.gateway), Peer::new(near.accept()));
    let Some(Frame::Decline(decline)) = server.hear() else { panic!("no Decline") };
    assert_eq!(decline.diagnosis, Diagnosis::OVER_LIMIT);
    assert_echo(&mut second, &mut server.socket);
    // At the server's gateway a Proposal is declined.
    let mut third = Peer::new(connect(far.gateway));
    let mut server = far.accept();
    third.say(&third.proposal());
    let Some(Frame::Decline(decline)) = third.hear() else { panic!("no Decline") };
    assert_eq!(decline.diagnosis, Diagnosis::OVER_LIMIT);
    assert_echo(&mut third.socket, &mut server);
    for rig in [&near, &far] {
        let stats = rig.stats();
        assert_eq!((stats.fallbacks.len(), &*stats.fallbacks[0].name), (1, "OVER_LIMIT"));
        let listener = &stats.listeners[0];
        assert_eq!((listener.over_limit_tcp, listener.active, listener.refused), (1, 2, 0));
    }
}

/// A client that says FIN and never reads again holds a connection for ever; so does one that has
/// an old configuration and never connects anew.
#[test]
fn half_closed_and_old_connections_are_reset() {
    let rig = Rig::relay(98, "half_closed_timeout = \"2s\"\n");
    let [(mut open, mut open_server), (mut half, mut half_server)] =
        [(), ()].map(|()| (connect(rig.gateway), rig.accept()));
    assert_echo(&mut open, &mut open_server);
    half.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(is_over(&mut half_server), "FIN");
    for _ in 0..10 {
        // As long as something moves in the other direction, it stays.
        assert_eq!((half_server.write(b"x").unwrap(), half.read(&mut [0]).unwrap()), (1, 1));
        std::thread::sleep(Duration::from_millis(250));
    }
    let reset = half.read(&mut [0]).map_err(|error| error.kind());
    assert_eq!(reset, Err(ErrorKind::ConnectionReset));
    assert_echo(&mut open, &mut open_server);
    let totals = rig.stats().totals;
    assert_eq!((totals.half_closed_closed, totals.aged_closed, totals.idle_closed), (1, 0, 0));

    let rig = Rig::relay(99, "age_max = \"2s\"\n");
    let (mut client, mut server) = (connect(rig.gateway), rig.accept());
    let mut rounds = 0;
    while client.write(b"x").is_ok_and(|_| server.read(&mut [0]).is_ok_and(|len| len == 1)) {
        std::thread::sleep(Duration::from_millis(20));
        rounds += 1;
    }
    assert!(rounds > 10, "it was busy all the time");
    wait_until("it is counted", || rig.stats().totals.aged_closed == 1);
}
