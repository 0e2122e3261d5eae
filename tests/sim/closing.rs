//! Every way a connection can end looks to both applications as it does over TCP.

use std::time::Duration;

use smcr_engine::Command;
use smcr_engine::handoff::Ending;
use smcr_engine::limits::FILL_PER_TURN_MAX;
use smcr_rnic::sim::Odds;

use crate::application::Heard;
use crate::cluster::{Cluster, Side, Transport};
use crate::host::Sizes;
use crate::{KIB, MIB};
use Side::{Client, Server};

fn endings(cluster: &Cluster, connection: usize) -> Vec<Ending> {
    cluster.closed(connection).iter().map(|closed| closed.ending).collect()
}

/// `shutdown(SHUT_WR)`: the end of one direction leaves the other one open.
// RFC 7609 4.8.1 #6: end of writing sends D
// RFC 7609 4.8.1 #9: peer's D wakes a reader
#[test]
fn either_side_may_finish_first_and_still_receive() {
    for transport in Transport::BOTH {
        for first in Side::BOTH {
            let mut cluster = Cluster::calm();
            let connection = cluster.connect(transport);
            cluster.application(first, connection).write(100 * KIB);
            cluster.application(first, connection).finish();
            cluster.run_until_quiet();
            let second = cluster.application(first.other(), connection);
            assert_eq!((second.received(), second.heard()), (100 * KIB as u64, Heard::End));
            assert!(!cluster.is_closed(connection));

            let second = cluster.application(first.other(), connection);
            second.write(MIB);
            second.finish();
            cluster.run_until_quiet();
            let first = cluster.application(first, connection);
            assert_eq!((first.received(), first.heard()), (MIB as u64, Heard::End));
            assert!(endings(&cluster, connection).iter().all(|end| *end == Ending::Graceful));
            cluster.assert_nothing_is_left();
        }
    }
}

// RFC 7609 4.8.1 #24: both sides may close at once
#[test]
fn both_may_finish_at_once() {
    for transport in Transport::BOTH {
        let mut cluster = Cluster::calm();
        let connection = cluster.connect(transport);
        for side in Side::BOTH {
            cluster.application(side, connection).write(30 * KIB);
            cluster.application(side, connection).finish();
        }
        cluster.run_until_quiet();
        for side in Side::BOTH {
            let application = cluster.application(side, connection);
            assert_eq!(application.received(), 30 * KIB as u64);
            assert_eq!(application.heard(), Heard::End);
        }
        assert!(endings(&cluster, connection).iter().all(|end| *end == Ending::Graceful));
        cluster.assert_nothing_is_left();
    }
}

/// The end of the stream must wait behind bytes that a slow reader has not taken yet.
// RFC 7609 4.8.1 #4: send pending data before the end
// RFC 7609 4.8.1 #14: end reads behind all data
#[test]
fn the_end_comes_behind_the_last_byte_of_a_sleeping_reader() {
    for transport in Transport::BOTH {
        let mut cluster = Cluster::calm();
        let connection = cluster.connect(transport);
        cluster.application(Server, connection).sleep();
        cluster.application(Client, connection).write(MIB);
        cluster.application(Client, connection).finish();
        cluster.run_until_quiet();
        cluster.application(Server, connection).wake();
        cluster.application(Server, connection).finish();
        cluster.run_until_quiet();
        let server = cluster.application(Server, connection);
        assert_eq!((server.received(), server.heard()), (MIB as u64, Heard::End));
        cluster.assert_nothing_is_left();
    }
}

/// A program that is killed must not leave its partner waiting.
// RFC 7609 4.8.2 #1: TCP reset aborts the connection
// RFC 7609 4.8.2 #5: fail calls on aborted socket
// RFC 7609 4.8.2 #8: tell application of the abort
#[test]
fn a_reset_reaches_the_other_application() {
    for transport in Transport::BOTH {
        for side in Side::BOTH {
            let mut cluster = Cluster::calm();
            let connection = cluster.connect(transport);
            cluster.application(side, connection).write(KIB);
            cluster.run_until_quiet();
            cluster.application(side, connection).reset();
            cluster.run_until_quiet();
            assert_eq!(cluster.application(side.other(), connection).heard(), Heard::Reset);
            cluster.assert_nothing_is_left();
        }
    }
}

/// Resets travel even where no byte can: the reader sleeps and every buffer is full.
// RFC 7609 4.8.2 #9: discard data on abort
// RFC 7609 A.4 #24: A flushes unread data
#[test]
fn a_reset_overtakes_what_is_blocked() {
    for transport in Transport::BOTH {
        for side in Side::BOTH {
            for writers in [vec![side], vec![side.other()], vec![side, side.other()]] {
                let mut cluster = Cluster::calm();
                let connection = cluster.connect(transport);
                for writer in &writers {
                    cluster.application(writer.other(), connection).sleep();
                    cluster.application(*writer, connection).write(MIB);
                }
                cluster.run_until_quiet();
                cluster.application(side, connection).reset();
                cluster.run_until_quiet();
                assert!(cluster.is_closed(connection), "{transport:?} {side:?} {writers:?}");
                cluster.application(side.other(), connection).wake();
                cluster.run_until_quiet();
                assert_eq!(cluster.application(side.other(), connection).heard(), Heard::Reset);
                cluster.assert_nothing_is_left();
            }
        }
    }
}

/// The last bytes of a program that is killed fill all room that there is, and more of them wait.
/// Nobody reads, so no room will ever come: neither gateway may wait for it.
#[test]
fn a_reset_does_not_wait_for_room_that_its_own_bytes_took() {
    for transport in Transport::BOTH {
        for killed in [vec![Client], vec![Server], vec![Client, Server]] {
            let mut cluster = Cluster::calm();
            let connection = cluster.connect(transport);
            fill_all_buffers(&mut cluster, connection);
            killed.iter().for_each(|side| kill_at_work(&mut cluster, *side, connection));
            cluster.run_for(SOON);
            assert!(cluster.is_closed(connection), "{transport:?} {killed:?}");
            cluster.assert_nothing_is_left();
        }
    }
}

/// The same where the first bytes of the server may be a Decline, and it has sent none. Its socket
/// takes some of the last bytes, so that the gateway has begun with them.
#[test]
fn a_reset_reaches_a_silent_server_that_reads_nothing() {
    let sizes = Sizes { socket_bytes: 4 * FILL_PER_TURN_MAX as usize, ..Sizes::USUAL };
    let part = sizes.socket_bytes * 5 / 8;
    let mut cluster = Cluster::new(1, Odds::CALM, sizes);
    let connection = cluster.connect_declined();
    cluster.application(Server, connection).sleep();
    cluster.application(Client, connection).write(part);
    cluster.run_until_quiet();
    kill_at_work(&mut cluster, Client, connection);
    cluster.run_for(SOON);
    assert!(cluster.is_closed(connection));
    cluster.application(Server, connection).wake();
    cluster.run_until_quiet();
    assert_eq!(cluster.application(Server, connection).heard(), Heard::Reset);
    cluster.assert_nothing_is_left();
}

/// Nor does that of a program with the preload library wait for room, though no error of its socket
/// tells of it.
#[test]
fn a_program_that_resets_does_not_wait_for_room() {
    for transport in Transport::BOTH {
        let mut cluster = Cluster::calm();
        let connection = cluster.connect(transport);
        cluster.application(Server, connection).sleep();
        cluster.application(Client, connection).write(MIB);
        cluster.run_until_quiet();
        assert!(cluster.application(Client, connection).is_blocked());
        cluster.application(Client, connection).reset_at_end();
        cluster.application(Client, connection).close();
        cluster.run_for(SOON);
        assert!(cluster.is_closed(connection), "{transport:?}");
        assert_eq!(endings(&cluster, connection)[0], Ending::ResetByApplication);
        cluster.application(Server, connection).wake();
        cluster.run_until_quiet();
        assert_eq!(cluster.application(Server, connection).heard(), Heard::Reset);
        cluster.assert_nothing_is_left();
    }
}

/// A gateway that writes to a program that was killed gets the error by that, and a read then says
/// that the stream has ended. To whoever reads it, it must not look whole.
#[test]
fn a_reset_is_no_end_where_bytes_wait_for_who_was_killed() {
    for transport in Transport::BOTH {
        for side in Side::BOTH {
            let mut cluster = Cluster::calm();
            let connection = cluster.connect(transport);
            cluster.application(side, connection).sleep();
            cluster.application(side.other(), connection).write(MIB);
            cluster.run_until_quiet();
            cluster.application(side, connection).reset();
            // The other program looks after every turn: an end that a reset follows counts, too.
            for turns in 0.. {
                assert!(turns < 1000, "{transport:?} {side:?}");
                cluster.turn(side);
                cluster.wait(Duration::from_micros(5));
                cluster.turn(side.other());
                while cluster.application(side.other(), connection).act() {}
                if cluster.application(side.other(), connection).heard() != Heard::Bytes {
                    break;
                }
            }
            let heard = cluster.application(side.other(), connection).heard();
            assert_eq!(heard, Heard::Reset, "{transport:?} {side:?}");
            cluster.run_until_quiet();
            assert!(cluster.is_closed(connection), "{transport:?} {side:?}");
            cluster.assert_nothing_is_left();
        }
    }
}

/// A reader that is only slow gets what waits for room. What is in the element when the abort comes
/// is thrown away, as ever.
#[test]
fn whoever_makes_room_in_time_gets_the_last_bytes() {
    let mut cluster = Cluster::calm();
    let connection = cluster.connect(Transport::Smc);
    fill_all_buffers(&mut cluster, connection);
    kill_at_work(&mut cluster, Client, connection);
    cluster.run_for(Duration::from_millis(100));
    assert!(!cluster.is_closed(connection));
    cluster.application(Server, connection).wake();
    cluster.run_for(SOON);
    let sent = cluster.application(Client, connection).sent();
    let server = cluster.application(Server, connection);
    let element = u64::from(Sizes::USUAL.rmbe.bytes());
    assert_eq!(sent, 2 * Sizes::USUAL.socket_bytes as u64);
    assert!(sent - server.received() < element, "{} of {sent}", server.received());
    assert_eq!(server.heard(), Heard::Reset);
    assert!(cluster.is_closed(connection));
    cluster.assert_nothing_is_left();
}

/// Both programs stop to read, and each fills the buffers of the other one's socket.
fn fill_all_buffers(cluster: &mut Cluster, connection: usize) {
    for side in Side::BOTH {
        cluster.application(side, connection).sleep();
        cluster.application(side, connection).write(Sizes::USUAL.socket_bytes);
    }
    cluster.run_until_quiet();
}

/// A program writes as much as its socket takes, and is killed before its gateway has looked.
fn kill_at_work(cluster: &mut Cluster, side: Side, connection: usize) {
    let application = cluster.application(side, connection);
    application.write(MIB);
    application.act();
    application.reset();
}

/// A program may finish, wait for the answer, and be killed meanwhile.
#[test]
fn a_reset_behind_the_end_of_the_stream_is_heard() {
    for transport in Transport::BOTH {
        for side in Side::BOTH {
            let mut cluster = Cluster::calm();
            let connection = cluster.connect(transport);
            cluster.application(side, connection).write(KIB);
            cluster.application(side, connection).finish();
            cluster.run_until_quiet();
            assert_eq!(cluster.application(side.other(), connection).heard(), Heard::End);
            cluster.application(side, connection).reset();
            cluster.run_until_quiet();
            assert!(cluster.is_closed(connection), "{transport:?} {side:?}");
            cluster.assert_nothing_is_left();
        }
    }
}

/// `close` with bytes still coming: the sender learns that nobody reads them.
// RFC 7609 4.8.1 #3: closing with unread data aborts
#[test]
fn who_writes_to_a_closed_program_is_reset() {
    for transport in Transport::BOTH {
        for side in Side::BOTH {
            let mut cluster = Cluster::calm();
            let connection = cluster.connect(transport);
            cluster.application(side, connection).close();
            cluster.run_until_quiet();
            let other = cluster.application(side.other(), connection);
            assert_eq!(other.heard(), Heard::End);
            other.write(MIB);
            cluster.run_until_quiet();
            assert!(cluster.is_closed(connection), "{transport:?} {side:?}");
            assert!(cluster.application(side.other(), connection).is_readable());
            cluster.assert_nothing_is_left();
        }
    }
}

/// A program that closes with SO_LINGER of zero wants a reset, and a Unix socket cannot say so.
/// What it has written before leaves first, and who has a copy of the socket goes on. What counts
/// is what was said before the socket was closed, whether its end was read before that or not.
#[test]
fn a_socket_that_is_to_be_reset_at_its_end_is() {
    for transport in Transport::BOTH {
        for says_late in [false, true] {
            let mut cluster = Cluster::calm();
            let connection = cluster.connect(transport);
            if !says_late {
                cluster.application(Client, connection).reset_at_end();
            }
            cluster.application(Client, connection).write(10 * KIB);
            cluster.application(Client, connection).finish();
            cluster.run_until_quiet();
            let server = cluster.application(Server, connection);
            assert_eq!((server.received(), server.heard()), (10 * KIB as u64, Heard::End));
            server.write(KIB);
            cluster.run_until_quiet();
            assert_eq!(cluster.application(Client, connection).received(), KIB as u64);
            if says_late {
                cluster.application(Client, connection).reset_at_end();
            }
            cluster.application(Client, connection).close();
            cluster.run_until_quiet();
            assert!(cluster.is_closed(connection), "{transport:?}, late: {says_late}");
            assert_eq!(endings(&cluster, connection)[0], Ending::ResetByApplication);
            cluster.assert_nothing_is_left();
        }
    }
}

/// Who closes so when both have ended has nothing to reset: the other one has seen the end.
#[test]
fn a_conversation_that_is_over_is_not_reset() {
    for transport in Transport::BOTH {
        let mut cluster = Cluster::calm();
        let connection = cluster.connect(transport);
        cluster.application(Client, connection).reset_at_end();
        cluster.application(Client, connection).finish();
        cluster.run_until_quiet();
        cluster.application(Server, connection).finish();
        // Until the client hears of it, and no further.
        for _ in 0..1000 {
            while cluster.application(Server, connection).act() {}
            while cluster.application(Client, connection).act() {}
            if cluster.application(Client, connection).heard() == Heard::End {
                break;
            }
            cluster.wait(Duration::from_micros(1));
            cluster.turn(Server);
            cluster.turn(Client);
        }
        assert_eq!(cluster.application(Client, connection).heard(), Heard::End);
        cluster.application(Client, connection).close();
        cluster.run_until_quiet();
        assert!(cluster.is_closed(connection), "{transport:?}");
        assert_eq!(cluster.application(Server, connection).heard(), Heard::End);
        assert_ne!(endings(&cluster, connection)[0], Ending::ResetByApplication, "{transport:?}");
        cluster.assert_nothing_is_left();
    }
}

/// The same where the end is that of both directions.
#[test]
fn a_closed_socket_is_reset_behind_its_bytes() {
    for transport in Transport::BOTH {
        let mut cluster = Cluster::calm();
        let connection = cluster.connect(transport);
        cluster.application(Client, connection).write(10 * KIB);
        cluster.application(Client, connection).reset_at_end();
        let bytes_in = |cluster: &mut Cluster| cluster.host(Client).counters.bytes_in.get();
        while cluster.application(Client, connection).act() {}
        assert_eq!(bytes_in(&mut cluster), 0, "they are on their way");
        cluster.application(Client, connection).close();
        cluster.run_until_quiet();
        assert_eq!(bytes_in(&mut cluster), 10 * KIB as u64);
        assert_eq!(cluster.application(Server, connection).heard(), Heard::Reset);
        assert_eq!(endings(&cluster, connection)[0], Ending::ResetByApplication);
        cluster.assert_nothing_is_left();
    }
}

/// A socket that says that its end is near may turn out to be broken there. What was read before
/// leaves before the reset.
// RFC 7609 4.8.1 #4: send pending data before the end
#[test]
fn a_socket_that_breaks_at_its_end_loses_nothing_before_it() {
    for transport in Transport::BOTH {
        let mut cluster = Cluster::calm();
        let connection = cluster.connect(transport);
        cluster.run_until_quiet();
        cluster.application(Client, connection).write(10 * KIB);
        while cluster.application(Client, connection).act() {}
        cluster.application(Client, connection).finish_and_break();
        cluster.turn(Client);
        // A peer throws away what it has not passed on when the reset comes.
        for _ in 0..10 {
            cluster.wait(Duration::from_micros(5));
            cluster.turn(Server);
        }
        cluster.run_until_quiet();
        let server = cluster.application(Server, connection);
        assert_eq!(server.received(), 10 * KIB as u64, "{transport:?}");
        assert_eq!(server.heard(), Heard::Reset);
        assert_eq!(endings(&cluster, connection)[0], Ending::ResetByApplication);
        cluster.assert_nothing_is_left();
    }
}

/// The operator's abort, the end of a drain, and what is due to a connection whose element the peer
/// gave to another: nothing more is written for it, what had arrived is not delivered.
// RFC 7609 4.4.2 #4: abort without writing the element
// RFC 7609 4.4.2 #5: free element that conflicts, show reset
#[test]
fn an_aborted_connection_is_reset_on_both_sides() {
    for transport in Transport::BOTH {
        let mut cluster = Cluster::calm();
        let connection = cluster.connect(transport);
        for side in Side::BOTH {
            cluster.application(side, connection).write(MIB);
        }
        for _ in 0..20 {
            cluster.step();
            cluster.pass_time();
        }
        let id = cluster.pairs[connection].ids[0].unwrap();
        let written = cluster.host(Client).counters.rdma_out.get();
        cluster.host(Client).command(Command::Abort { connection: id });
        cluster.run_until_quiet();
        assert_eq!(cluster.host(Client).counters.rdma_out.get(), written);
        assert!(cluster.application(Client, connection).received() < MIB as u64);
        for side in Side::BOTH {
            assert_eq!(cluster.application(side, connection).heard(), Heard::Reset);
        }
        assert_eq!(endings(&cluster, connection)[0], Ending::Aborted);
        cluster.assert_nothing_is_left();
    }
}

/// Longer than the last bytes of a program that is killed wait for room.
const SOON: Duration = Duration::from_secs(1);
