//! The data flows of RFC 7609, 4.5 and 4.7, through production pollers; urgent bytes above all.
//!
//! Figures with their cursors are transcripts in `smcr-proto`; here they meet sockets.

use smcr_engine::handoff::Ending;
use smcr_proto::wire::cdc::{Cdc, Cursor};

use crate::KIB;
use crate::application::Heard;
use crate::cluster::{Cluster, Side, Transport};
use crate::foreign::Stage;
use crate::host::Sizes;
use Side::{Client, Server};

/// What one side heard of the other's urgent bytes.
fn urgent_received(cluster: &mut Cluster, side: Side, connection: usize) -> Vec<u64> {
    cluster.application(side, connection).urgent_received()
}

/// `telnet` throws away all that was typed before its interrupt, and nothing behind it: the byte
/// must come as urgent, and exactly where it was.
// RFC 7609 4.7.5 #1: P and U announce urgent data
// RFC 7609 4.7.5 #2: tell application of urgent data
// RFC 7609 4.7.5 #3: U locates the urgent byte
#[test]
fn urgent_bytes_keep_their_place() {
    for transport in Transport::BOTH {
        for side in Side::BOTH {
            let mut cluster = Cluster::calm();
            let connection = cluster.connect(transport);
            for (before, behind) in [(0, 0), (499, 1_000), (0, 7), (20 * KIB, 0), (3, 30 * KIB)] {
                let writer = cluster.application(side, connection);
                writer.write(before);
                writer.write_urgent();
                writer.write(behind);
                cluster.run_until_quiet();
            }
            let sent = cluster.application(side, connection).urgent_sent().to_vec();
            assert_eq!(sent.len(), 5);
            assert_eq!(urgent_received(&mut cluster, side.other(), connection), sent);
            let came = cluster.application(side.other(), connection).received();
            assert_eq!(came, cluster.application(side, connection).sent(), "{transport:?}");
            let urgent: u64 = cluster.hosts.iter().map(|one| one.counters.urgent_in.get()).sum();
            assert_eq!(urgent, 5);
            let urgent: u64 = cluster.hosts.iter().map(|one| one.counters.urgent_out.get()).sum();
            assert_eq!(urgent, 5);
        }
    }
}

/// Two interrupts in a row: TCP has one urgent byte at a time, so the first becomes an ordinary
/// one, in its place. Nothing may be lost, and the last one must arrive as urgent.
#[test]
fn a_later_urgent_byte_takes_the_mark() {
    for transport in Transport::BOTH {
        let mut cluster = Cluster::calm();
        let connection = cluster.connect(transport);
        cluster.run_until_quiet();
        let client = cluster.application(Client, connection);
        client.write(10);
        client.write_urgent();
        client.write_urgent();
        client.write(5);
        client.write_urgent();
        client.write(1);
        // All of it before the gateway looks.
        while cluster.application(Client, connection).act() {}
        cluster.run_until_quiet();
        assert_eq!(urgent_received(&mut cluster, Server, connection), [17]);
        assert_eq!(cluster.application(Server, connection).received(), 19);
    }
}

/// An interrupt is often the last thing that is said: the end of the stream must not swallow it.
#[test]
fn an_urgent_byte_comes_before_the_end_of_the_stream() {
    for transport in Transport::BOTH {
        let mut cluster = Cluster::calm();
        let connection = cluster.connect(transport);
        let client = cluster.application(Client, connection);
        client.write(10);
        client.write_urgent();
        client.finish();
        cluster.application(Server, connection).finish();
        cluster.run_until_quiet();
        assert_eq!(urgent_received(&mut cluster, Server, connection), [10]);
        assert_eq!(cluster.application(Server, connection).heard(), Heard::End);
        assert!(cluster.closed(connection).iter().all(|end| end.ending == Ending::Graceful));
        cluster.assert_nothing_is_left();
    }
}

/// Who waits for an urgent byte to be consumed still sees its writer go away.
#[test]
fn a_reset_does_not_wait_for_an_urgent_byte() {
    for transport in Transport::BOTH {
        let mut cluster = Cluster::calm();
        let connection = cluster.connect(transport);
        cluster.application(Server, connection).sleep();
        let client = cluster.application(Client, connection);
        client.write(50 * KIB);
        client.write_urgent();
        client.write(KIB);
        cluster.run_until_quiet();
        cluster.application(Client, connection).reset();
        cluster.run_until_quiet();
        assert!(cluster.is_closed(connection), "{transport:?}");
        cluster.application(Server, connection).wake();
        cluster.run_until_quiet();
        assert_eq!(cluster.application(Server, connection).heard(), Heard::Reset);
        cluster.assert_nothing_is_left();
    }
}

/// A reader that has slept through everything finds the urgent byte where it was, once all
/// buffers on the way have moved on.
// RFC 7609 4.7.6 #3: send urgent data when window opens
// RFC 7609 4.7.6 #5: hold data behind urgent byte
#[test]
fn an_urgent_byte_finds_its_way_through_full_buffers() {
    for transport in Transport::BOTH {
        let sizes = Sizes { socket_bytes: 10_000, ..Sizes::USUAL };
        let mut cluster = Cluster::new(1, smcr_rnic::sim::Odds::CALM, sizes);
        let connection = cluster.connect(transport);
        cluster.application(Server, connection).sleep();
        let client = cluster.application(Client, connection);
        for _ in 0..3 {
            client.write(30 * KIB);
            client.write_urgent();
            client.write(KIB);
        }
        cluster.run_until_quiet();
        assert!(cluster.application(Client, connection).is_blocked());
        cluster.application(Server, connection).wake();
        cluster.run_until_quiet();
        let sent = cluster.application(Client, connection).urgent_sent().to_vec();
        assert_eq!(sent.len(), 3);
        assert_eq!(urgent_received(&mut cluster, Server, connection), sent, "{transport:?}");
        assert_eq!(cluster.application(Server, connection).received(), 31 * KIB as u64 * 3 + 3);
    }
}

/// RDMA writes alone wake nobody and show nothing: bytes exist once a message says so. A gateway
/// that read earlier would read what is not there yet.
// RFC 7609 4.7.1 #1: writes carry no immediate data
// RFC 7609 4.7.1 #2: CDC message wakes the receiver
// RFC 7609 4.7.1 #4: producer cursor says what is readable
#[test]
fn bytes_without_their_message_wake_nobody() {
    let mut stage = Stage::new();
    stage.run();
    let turns = stage.host.counters.turns.get();
    let span = stage.honest.produce(1_000);
    stage.write_in_silence(1_000, span);
    stage.run();
    assert_eq!(stage.host.counters.turns.get(), turns);
    assert_eq!(stage.application.received(), 0);
    stage.say_what_is_due();
    stage.run();
    assert_eq!(stage.application.received(), 1_000);
    assert!(stage.heard.is_empty(), "with the window open nobody has to be told");
}

/// Somebody who types waits for nothing; a burst costs fewer messages than it has writes.
// RFC 7609 4.5.2 #1: send at once, whatever the size
// RFC 7609 4.5.2 #2: combine small sends
#[test]
fn small_writes_go_out_at_once_or_together() {
    let mut cluster = Cluster::calm();
    let connection = cluster.connect(Transport::Smc);
    cluster.run_until_quiet();
    let messages = |cluster: &mut Cluster| cluster.host(Client).counters.cdc_out.get();
    for typed in 1..=10 {
        cluster.application(Client, connection).write(1);
        cluster.run_until_quiet();
        assert_eq!(cluster.application(Server, connection).received(), typed);
    }
    assert_eq!(messages(&mut cluster), 10);
    let client = cluster.application(Client, connection);
    client.write_at_most(10);
    client.write(1_000);
    while cluster.application(Client, connection).act() {}
    cluster.run_until_quiet();
    assert_eq!(cluster.application(Server, connection).received(), 1_010);
    assert_eq!(messages(&mut cluster), 11);
}

/// Whoever answers and hangs up, as an HTTP server does, has one message for both, and the peer can
/// pass both on at once.
// RFC 7609 4.8.1 #4: send pending data before the end
// RFC 7609 4.8.1 #6: end of writing sends D
#[test]
fn the_last_bytes_and_the_end_share_a_message() {
    let mut cluster = Cluster::calm();
    let connection = cluster.connect(Transport::Smc);
    cluster.run_until_quiet();
    let messages = |cluster: &mut Cluster| cluster.host(Server).counters.cdc_out.get();
    let before = messages(&mut cluster);
    let server = cluster.application(Server, connection);
    server.write(1_000);
    server.finish();
    while cluster.application(Server, connection).act() {}
    cluster.run_until_quiet();
    assert_eq!(cluster.application(Client, connection).received(), 1_000);
    assert_eq!(cluster.application(Client, connection).heard(), Heard::End);
    assert_eq!(messages(&mut cluster), before + 1);
}

/// A peer that asks by R whether our application reads at all is answered as soon as there is
/// something to say, however open its window is.
// RFC 7609 4.5.1 #8: report next consumption after R
// RFC 7609 4.5.1 #9: answer R if cursor is old
#[test]
fn a_requested_update_is_sent_at_once() {
    let mut stage = Stage::new();
    stage.write(10);
    stage.run();
    assert!(stage.heard.is_empty());
    let span = stage.honest.produce(1);
    stage.write_in_silence(1, span);
    let asking = Cdc { update_requested: true, ..stage.honest.poll_cdc().unwrap() };
    stage.say(asking);
    stage.run();
    assert_eq!(stage.last_heard().consumer.count, 11);
    let answers = stage.heard.len();
    stage.write(1);
    stage.run();
    assert_eq!(stage.heard.len(), answers, "asked once");
}

/// The messages that a gateway sent, as far as their cursors and flags are concerned.
fn said(messages: &[Cdc]) -> Vec<(u32, &'static str)> {
    messages.iter().map(|cdc| (cdc.producer.count, flags(cdc))).collect()
}

fn flags(cdc: &Cdc) -> &'static str {
    match (cdc.writer_blocked, cdc.urgent_pending, cdc.urgent_present) {
        (false, false, false) => "",
        (true, false, false) => "B",
        (false, true, false) => "P",
        (true, true, false) => "B P",
        (false, true, true) => "P U",
        (true, true, true) => "B P U",
        (_, false, true) => "U without P",
    }
}

/// Figure 20: the urgent byte is the last of its write, and what follows waits until it was
/// consumed. Linux reads it the same way.
// RFC 7609 4.7.5 #1: P and U announce urgent data
// RFC 7609 4.7.5 #4: always report urgent consumption
// RFC 7609 4.7.5 #5: wait until urgent byte is consumed
// RFC 7609 4.7.5 #6: clear P and U with next data
#[test]
fn scenario_5_urgent_data_with_the_window_open() {
    let mut stage = Stage::new();
    stage.application.write(499);
    stage.application.write_urgent();
    stage.application.write(1_000);
    while stage.application.act() {}
    stage.run();
    assert_eq!(said(&stage.heard), [(500, "P U")]);
    assert_eq!(stage.honest.urgent_position(), Some(499));

    stage.honest.consume(499);
    stage.say_what_is_due();
    stage.run();
    assert_eq!(stage.heard.len(), 1, "the urgent byte is still unread");
    stage.honest.consume(1);
    stage.say_what_is_due();
    stage.run();
    assert_eq!(said(&stage.heard), [(500, "P U"), (1_500, "")]);
}

/// The bytes of an application just fill the element, and more come a moment later. Without B the
/// reader would report nothing before it has read a tenth, and those bytes would wait.
// RFC 7609 4.7.4 #4: set B when bytes are left
// RFC 7609 4.7.4 #9: set B when element is full
#[test]
fn bytes_behind_an_exact_fill_wait_for_any_read() {
    let mut stage = Stage::new();
    stage.application.write(16 * KIB);
    stage.run();
    assert_eq!(said(&stage.heard), [(0, "B")]);
    stage.application.write(1);
    stage.run();
    assert_eq!(stage.heard.len(), 1, "nothing can be written");
    stage.honest.consume(2);
    stage.say_what_is_due();
    stage.run();
    assert_eq!(said(&stage.heard), [(0, "B"), (1, "")]);
}

/// What waits behind an urgent byte waits for its consumption, of which the peer tells anyway: B
/// would make it tell of every byte before that, too.
// RFC 7609 4.7.4 #4: set B when bytes are left
// RFC 7609 4.7.6 #4: clear B when nothing waits
#[test]
fn an_urgent_byte_that_fills_the_window_does_not_say_blocked() {
    let mut stage = Stage::new();
    stage.application.write(16 * KIB - 1);
    stage.application.write_urgent();
    stage.application.write(100);
    while stage.application.act() {}
    stage.run();
    assert_eq!(said(&stage.heard), [(0, "P U")]);
    stage.honest.consume(16 * 1024);
    stage.say_what_is_due();
    stage.run();
    assert_eq!(said(&stage.heard), [(0, "P U"), (100, "")]);
}

/// Figure 20, seen by the receiver: consumption of urgent data is told whatever the window.
// RFC 7609 4.7.5 #2: tell application of urgent data
// RFC 7609 4.7.5 #3: U locates the urgent byte
// RFC 7609 4.7.5 #4: always report urgent consumption
#[test]
fn scenario_5_the_receiver_tells_at_once() {
    let mut stage = Stage::new();
    stage.write_urgent(500);
    stage.run();
    assert_eq!(stage.application.urgent_received(), [499]);
    assert_eq!(stage.last_heard().consumer, Cursor { wrap: 0, count: 500 });
    let messages = stage.heard.len();
    stage.write(1_000);
    stage.run();
    assert_eq!((stage.application.received(), stage.heard.len()), (1_500, messages));
}

/// Figure 21: a reader in front of a full window hears at once that something urgent waits, so
/// that it may hurry; B stands until the urgent byte went out, and ends with it.
// RFC 7609 4.7.6 #1: P alone while window is closed
// RFC 7609 4.7.6 #3: send urgent data when window opens
// RFC 7609 4.7.6 #4: clear B when nothing waits
// RFC 7609 4.7.6 #5: hold data behind urgent byte
#[test]
fn scenario_6_urgent_data_with_the_window_closed() {
    let mut stage = Stage::new();
    stage.application.write(16 * KIB + 500);
    stage.run();
    assert_eq!(said(&stage.heard), [(0, "B")]);
    stage.application.write_urgent();
    stage.application.write(1_000);
    stage.run();
    assert_eq!(said(&stage.heard), [(0, "B"), (0, "B P")]);

    stage.honest.consume(16 * 1024);
    stage.say_what_is_due();
    stage.run();
    assert_eq!(said(&stage.heard)[2..], [(501, "P U")]);
    stage.honest.consume(501);
    stage.say_what_is_due();
    stage.run();
    assert_eq!(said(&stage.heard)[3..], [(1_501, "")]);
}
