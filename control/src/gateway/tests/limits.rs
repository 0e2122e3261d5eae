//! What one source can take from others: connections, and time.

use std::io::Read;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketType, bind, connect as connect_socket, socket};
use smcr_proto::wire::clc::Diagnosis;

use super::rig::{Peer, Rig, assert_echo, connect, wait_until};

/// A connection from another address of this host.
fn connect_from(source: &str, target: SocketAddr) -> TcpStream {
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    let source: IpAddr = source.parse().unwrap();
    bind(&socket, &SocketAddr::new(source, 0)).unwrap();
    connect_socket(&socket, &target).unwrap();
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(Duration::from_secs(4))).unwrap();
    stream
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
    assert!(is_over(&mut connect(rig.gateway)), "the third is refused");
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
    let near = Rig::client(93, "idle_timeout = \"1s\"\n");
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
