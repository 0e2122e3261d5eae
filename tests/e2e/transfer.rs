//! A gibibyte each way at the same time, byte for byte.

use std::net::{Shutdown, SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

use crate::gateway::{Pair, local};
use crate::hosts::{Hosts, accept, set_limit};
use crate::pattern::{StreamDigest, receive, send};

const PORT: u16 = 7010;
const GIB: u64 = 1 << 30;

/// A transfer that pauses for longer has failed.
const STALL_LIMIT: Duration = Duration::from_secs(20);

/// To corrupt a backup is the worst thing that a gateway can do. Windows and wraps go wrong when
/// the pipe is full in both directions.
// RFC 7609 5.6 #1: carry TLS bytes unchanged
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn a_gibibyte_each_way_at_once() {
    let hosts = Hosts::new("a_gibibyte_each_way_at_once");
    transfer_both_ways(&hosts, &Pair::start(&hosts, &[PORT]), GIB);
}

// RFC 7609 2.1 #1: tell RKey and address together
// RFC 7609 2.1 #5: one element per connection and side
// RFC 7609 3.5.1.3 #3: connect client QP from Accept
// RFC 7609 3.5.1.4 #1: connect server QP upon Confirm
// RFC 7609 4.1 #1: each side allocates an element
// RFC 7609 A.2.3 #3: GID and MAC of chosen RNIC
// RFC 7609 A.2.4 #5: expect packets from Confirm's PSN
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_transfer_both_ways() {
    let hosts = Hosts::new("smoke_transfer_both_ways");
    transfer_both_ways(&hosts, &Pair::start(&hosts, &[PORT]), 64 << 20);
}

/// Gateways with elements of different sizes: the small one wraps thousands of times and is always
/// full, the large one is not. Neither may assume that the other element is like its own.
// RFC 7609 4.7.4 #1: write wrapped data in two pieces
// RFC 7609 2.1 #11: choose RMBs independently of the peer
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn elements_of_different_sizes() {
    let hosts = Hosts::new("elements_of_different_sizes");
    let pair = Pair::start_these(
        &hosts,
        Pair::client_side(&hosts, &[PORT]).smc("rmbe_size = 16384"),
        Pair::server_side(&hosts, &[PORT]).smc("rmbe_size = 524288"),
    );
    transfer_both_ways(&hosts, &pair, 200 << 20);
}

pub(crate) fn transfer_both_ways(hosts: &Hosts, pair: &Pair<'_>, bytes: u64) {
    transfer_by(local(PORT).into(), hosts, pair, bytes);
}

/// Transfers both ways at once. Gateway and server listen at `near` of their hosts.
pub(crate) fn transfer_by(near: SocketAddr, hosts: &Hosts, pair: &Pair<'_>, bytes: u64) {
    let listener = hosts.b.listen(near);
    let client = hosts.a.connect(near).expect("the gateway listens");
    set_limit(&client, STALL_LIMIT);
    let server = accept(&listener, STALL_LIMIT);

    let (to_server, to_client) = thread::scope(|scope| {
        let client = scope.spawn(|| exchange(&client, 1, bytes));
        let server = scope.spawn(|| exchange(&server, 2, bytes));
        let (client_sent, client_received) = client.join().expect("the client's transfer");
        let (server_sent, server_received) = server.join().expect("the server's transfer");
        ((client_sent, server_received), (server_sent, client_received))
    });
    assert_eq!(to_server.0, to_server.1, "client to server");
    assert_eq!(to_client.0, to_client.1, "server to client");
    assert_eq!((to_server.1.bytes, to_client.1.bytes), (bytes, bytes));
    pair.assert_all_smc(1);
}

/// Sends `bytes` bytes and the end, and meanwhile receives to the end. Returns both digests.
fn exchange(stream: &TcpStream, seed: u64, bytes: u64) -> (StreamDigest, StreamDigest) {
    thread::scope(|scope| {
        let sending = scope.spawn(|| {
            let sent = send(&mut &*stream, seed, bytes).expect("the peer reads");
            stream.shutdown(Shutdown::Write).expect("the connection is up");
            sent
        });
        let received = receive(&mut &*stream).expect("the peer writes");
        (sending.join().expect("sending"), received)
    })
}
