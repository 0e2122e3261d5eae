//! Bytes come as they went in, whatever their rhythm.

use smcr_engine::{Command, ConnectionId};
use smcr_rnic::sim::Odds;

use crate::cluster::{Cluster, Side, Transport};
use crate::host::Sizes;
use crate::{KIB, MIB};
use Side::{Client, Server};

/// Ends a connection as polite programs do, and checks that nobody remembers it.
fn say_goodbye(cluster: &mut Cluster) {
    for number in 0..cluster.pairs.len() {
        cluster.application(Client, number).finish();
        cluster.application(Server, number).finish();
    }
    cluster.run_until_quiet();
    cluster.assert_nothing_stalls();
    cluster.assert_nothing_is_left();
}

/// A request and its answer: the least a user can expect.
// RFC 7609 4.7.1 #2: CDC message wakes the receiver
#[test]
fn a_request_is_answered() {
    for transport in Transport::BOTH {
        let mut cluster = Cluster::calm();
        let connection = cluster.connect(transport);
        cluster.application(Client, connection).write(100);
        cluster.run_until_quiet();
        assert_eq!(cluster.application(Server, connection).received(), 100);

        cluster.application(Server, connection).write(5 * KIB);
        cluster.run_until_quiet();
        assert_eq!(cluster.application(Client, connection).received(), 5 * KIB as u64);
        say_goodbye(&mut cluster);
    }
}

/// Small elements, odd sizes, a nasty network: no byte may move.
// RFC 7609 4.2 #4: use the element as a ring
// RFC 7609 4.7.4 #1: write wrapped data in two pieces
// RFC 7609 5.6 #1: carry TLS bytes unchanged
#[test]
fn a_megabyte_each_way_wraps_a_small_element_many_times() {
    for seed in 0..5 {
        for transport in Transport::BOTH {
            let sizes = Sizes { socket_bytes: 100_001, ..Sizes::USUAL };
            let mut cluster = Cluster::new(seed, Odds::MALICIOUS, sizes);
            let connection = cluster.connect(transport);
            cluster.application(Client, connection).write(MIB);
            cluster.application(Server, connection).write(MIB + 7);
            cluster.run_until_quiet();
            assert_eq!(cluster.application(Server, connection).received(), MIB as u64);
            assert_eq!(cluster.application(Client, connection).received(), MIB as u64 + 7);
            say_goodbye(&mut cluster);
        }
    }
}

/// A writer that is faster than its reader is told so by B, and wakes when there is room.
// RFC 7609 4.7.4 #4: set B when bytes are left
// RFC 7609 4.7.4 #8: resume writing when window opens
#[test]
fn a_blocked_writer_is_counted_and_goes_on() {
    let mut cluster = Cluster::calm();
    let connection = cluster.connect(Transport::Smc);
    cluster.application(Server, connection).read_at_most(100);
    cluster.application(Client, connection).write(MIB);
    cluster.run_until_quiet();
    assert_eq!(cluster.application(Server, connection).received(), MIB as u64);
    assert!(cluster.host(Client).counters.blocked_on_peer.get() > 0);
    say_goodbye(&mut cluster);
}

/// Interactive programs: each letter arrives although nothing follows it.
// RFC 7609 4.5.2 #1: send at once, whatever the size
#[test]
fn single_bytes_arrive_at_once_and_in_any_number() {
    for transport in Transport::BOTH {
        let mut cluster = Cluster::calm();
        let connection = cluster.connect(transport);
        for letters in 1..=5 {
            cluster.application(Client, connection).write(1);
            cluster.run_until_quiet();
            assert_eq!(cluster.application(Server, connection).received(), letters);
        }
        cluster.application(Client, connection).write_at_most(1);
        cluster.application(Server, connection).read_at_most(1);
        cluster.application(Client, connection).write(5 * KIB);
        cluster.run_until_quiet();
        assert_eq!(cluster.application(Server, connection).received(), 5 + 5 * KIB as u64);
        say_goodbye(&mut cluster);
    }
}

/// A reader that sleeps must stop the writer, not the gateway's memory; what was written before
/// comes when it wakes.
#[test]
fn a_sleeping_reader_stops_the_writer_and_loses_nothing() {
    for transport in Transport::BOTH {
        let mut cluster = Cluster::calm();
        let connection = cluster.connect(transport);
        cluster.application(Server, connection).sleep();
        cluster.application(Client, connection).write(2 * MIB);
        cluster.run_until_quiet();
        let client = cluster.application(Client, connection);
        assert!(client.is_blocked());
        let buffers = 2 * Sizes::USUAL.socket_bytes + 2 * Sizes::USUAL.rmbe.bytes() as usize;
        assert!(client.sent() <= (buffers + 65_536) as u64, "{}", client.sent());
        assert_eq!(cluster.application(Server, connection).received(), 0);
        if transport == Transport::Smc {
            assert!(cluster.host(Server).counters.blocked_on_socket.get() > 0);
        }

        cluster.application(Server, connection).wake();
        cluster.run_until_quiet();
        assert_eq!(cluster.application(Server, connection).received(), 2 * MIB as u64);
        say_goodbye(&mut cluster);
    }
}

/// The sleeping reader of one connection must not slow its neighbours on the same link.
// RFC 7609 2 #3: carry many connections per link
#[test]
fn a_sleeping_reader_disturbs_nobody_else() {
    let mut cluster = Cluster::calm();
    let asleep = cluster.connect(Transport::Smc);
    let awake = cluster.connect(Transport::Smc);
    cluster.application(Server, asleep).sleep();
    cluster.application(Client, asleep).write(MIB);
    cluster.application(Client, awake).write(MIB);
    cluster.run_until_quiet();
    assert_eq!(cluster.application(Server, awake).received(), MIB as u64);
    cluster.application(Server, asleep).wake();
    say_goodbye(&mut cluster);
}

/// Two hundred connections at once want more requests than the send queue takes.
#[test]
fn a_full_send_queue_delays_and_loses_nothing() {
    let mut cluster = Cluster::calm();
    let connections: Vec<_> = (0..250).map(|_| cluster.connect(Transport::Smc)).collect();
    cluster.run_until_quiet();
    for connection in &connections {
        cluster.application(Client, *connection).write(50);
        cluster.application(Server, *connection).write(60 * KIB);
    }
    cluster.run_until_quiet();
    for connection in connections {
        assert_eq!(cluster.application(Server, connection).received(), 50);
        assert_eq!(cluster.application(Client, connection).received(), 60 * KIB as u64);
    }
    assert!(cluster.host(Client).counters.blocked_on_queue.get() > 0);
    say_goodbye(&mut cluster);
}

/// With one chunk of send memory for all, connections take turns.
#[test]
fn an_exhausted_send_pool_delays_and_loses_nothing() {
    let sizes = Sizes { send_chunks: 1, ..Sizes::USUAL };
    let mut cluster = Cluster::new(1, Odds::CALM, sizes);
    let connections: Vec<_> = (0..30).map(|_| cluster.connect(Transport::Smc)).collect();
    for connection in &connections {
        cluster.application(Client, *connection).write(60 * KIB);
    }
    cluster.run_until_quiet();
    for connection in connections {
        assert_eq!(cluster.application(Server, connection).received(), 60 * KIB as u64);
    }
    let counters = &cluster.host(Client).counters;
    // A link that has lent out something has more than the nothing that is free.
    assert!(counters.blocked_on_pool.get() + counters.blocked_on_share.get() > 0);
    say_goodbye(&mut cluster);
}

/// The client speaks as soon as its rendezvous has ended; the server may still be at it. However
/// much is said, and in however many messages, it must be there when the server is ready.
// RFC 7609 3.5.2.4 #4: server's element ready before Accept
// RFC 7609 3.5.2.4 #5: keep data that precedes Confirm
// RFC 7609 3.5.2.4 #6: client receives once Confirm is sent
#[test]
fn what_comes_before_the_end_of_the_rendezvous_is_kept() {
    for writes in [1, 10, 40] {
        let mut cluster = Cluster::calm();
        let connection = cluster.connect_at(Client).unwrap();
        for _ in 0..writes {
            cluster.application(Client, connection).write(7);
            cluster.run_until_quiet();
        }
        assert!(cluster.host(Server).counters.cdc_parked.get() > 0);
        assert!(cluster.establish(Server, connection));
        cluster.run_until_quiet();
        assert_eq!(cluster.application(Server, connection).received(), 7 * writes);
        say_goodbye(&mut cluster);
    }
}

/// In a burst of new connections, messages overtake the commands that bring theirs.
#[test]
fn a_message_finds_its_connection_behind_a_thousand_commands() {
    let mut cluster = Cluster::calm();
    cluster.run_until_quiet();
    let nobody = ConnectionId { slot: 9_999, generation: 1 };
    for _ in 0..1_000 {
        cluster.host(Server).command(Command::Forget { connection: nobody });
    }
    let connection = cluster.connect(Transport::Smc);
    cluster.application(Client, connection).write(1);
    for _ in 0..3 {
        // The server's poller does not get the core.
        cluster.application(Client, connection).act();
        cluster.turn(Client);
        cluster.pass_time();
    }
    cluster.run_until_quiet();
    let counters = &cluster.host(Server).counters;
    assert_eq!((counters.cdc_unknown_token.get(), counters.cdc_parked.get()), (0, 1));
    assert_eq!(cluster.application(Server, connection).received(), 1);
    say_goodbye(&mut cluster);
}

/// Bytes that the rendezvous read, looking for CLC, belong to the applications.
#[test]
fn what_the_rendezvous_read_comes_first() {
    let mut cluster = Cluster::calm();
    let [client, server] = Cluster::first_bytes_of_first_pair(50_000, 3);
    let connection = cluster.connect_tcp([client, server]);
    cluster.application(Client, connection).has_sent(50_000);
    cluster.application(Server, connection).has_sent(3);
    cluster.application(Server, connection).sleep();
    cluster.application(Client, connection).write(MIB);
    cluster.run_until_quiet();
    assert_eq!(cluster.application(Client, connection).received(), 3);

    cluster.application(Server, connection).wake();
    cluster.run_until_quiet();
    assert_eq!(cluster.application(Server, connection).received(), 50_000 + MIB as u64);
    say_goodbye(&mut cluster);
}

/// An idle connection must not cost system calls, and a small request few.
#[test]
fn a_small_request_costs_one_read_and_one_write() {
    let mut cluster = Cluster::calm();
    let connection = cluster.connect(Transport::Smc);
    cluster.run_until_quiet();
    let before = Side::BOTH.map(|side| cluster.host(side).sockets.system_calls());
    cluster.application(Client, connection).write(64);
    cluster.run_until_quiet();
    let after = Side::BOTH.map(|side| cluster.host(side).sockets.system_calls());
    assert_eq!([after[0] - before[0], after[1] - before[1]], [1, 1]);
    say_goodbye(&mut cluster);
}
