//! Links break, tables run full, threads fall behind: connections are reset or wait, nothing leaks.

use smcr_engine::Command;
use smcr_engine::handoff::Ending;
use smcr_engine::streams::{Event, Key};
use smcr_rnic::sim::Odds;

use crate::application::Heard;
use crate::cluster::{Cluster, Side, Transport};
use crate::host::Sizes;
use crate::{KIB, MIB};
use Side::{Client, Server};

/// A peer that dies under load: every program hears of it, and the gateway forgets it entirely.
// RFC 7609 4.8.3 #3: reset connections without any link
// RFC 7609 3.5.4 #9: end connections of deleted group
// RFC 7609 3.5.4 #12: reset connections when client ends group
#[test]
fn a_link_that_breaks_under_load_resets_its_connections_and_leaks_nothing() {
    for seed in 0..20 {
        let mut cluster = Cluster::new(seed, Odds::MALICIOUS, Sizes::USUAL);
        let lost: Vec<_> = (0..10).map(|_| cluster.connect(Transport::Smc)).collect();
        let fallback = cluster.connect(Transport::Tcp);
        for connection in &lost {
            cluster.application(Client, *connection).write(MIB);
            cluster.application(Server, *connection).write(MIB);
        }
        for _ in 0..200 {
            cluster.step();
            cluster.pass_time();
        }
        cluster.break_link();
        cluster.run_until_quiet();
        for connection in lost {
            for side in Side::BOTH {
                assert_eq!(cluster.application(side, connection).heard(), Heard::Reset);
            }
            assert!(cluster.closed(connection).iter().all(|end| end.ending == Ending::LinkLost));
        }
        assert!(cluster.hosts.iter().all(|host| host.retired.len() == 1));

        cluster.add_link();
        let survivor = cluster.connect(Transport::Smc);
        for connection in [fallback, survivor] {
            cluster.application(Client, connection).write(MIB);
            cluster.application(Client, connection).finish();
            cluster.application(Server, connection).finish();
        }
        cluster.run_until_quiet();
        cluster.assert_nothing_stalls();
        cluster.assert_nothing_is_left();
    }
}

/// The control thread falls behind: its reports wait, and the data path does not.
// RFC 7609 A.4 #2: process CDC on the data path
#[test]
fn a_full_report_queue_delays_reports_only() {
    let mut cluster = Cluster::new(1, Odds::CALM, Sizes { reports: 2, ..Sizes::USUAL });
    let ending: Vec<_> = (0..20).map(|_| cluster.connect(Transport::Smc)).collect();
    let going_on = cluster.connect(Transport::Smc);
    cluster.run_until_quiet();
    cluster.host(Client).control_asleep = true;
    for connection in &ending {
        cluster.application(Client, *connection).finish();
        cluster.application(Server, *connection).finish();
    }
    cluster.application(Client, going_on).write(MIB);
    cluster.run_until_quiet();
    assert_eq!(cluster.application(Server, going_on).received(), MIB as u64);
    assert_eq!(cluster.closed(ending[0]).len(), 1);
    assert!(cluster.host(Client).counters.reports_delayed.get() > 0);

    cluster.host(Client).control_asleep = false;
    cluster.application(Client, going_on).finish();
    cluster.application(Server, going_on).finish();
    cluster.run_until_quiet();
    cluster.assert_nothing_is_left();
}

/// Late events of epoll must not reach the next connection in the same slot: it would be closed,
/// or read before it has anything to say.
#[test]
fn a_late_event_does_not_reach_the_next_user_of_a_slot() {
    let mut cluster = Cluster::calm();
    let first = cluster.connect(Transport::Smc);
    let id = cluster.pairs[first].ids[0].unwrap();
    cluster.application(Client, first).reset();
    cluster.run_until_quiet();

    let second = cluster.connect(Transport::Smc);
    assert_eq!(cluster.pairs[second].ids[0].unwrap().slot, id.slot);
    cluster.run_until_quiet();
    let before = cluster.host(Client).sockets.system_calls();
    let key = Key { slot: id.slot, generation: id.generation, far: false, turn: 0 };
    let socket = Event {
        key,
        readable: true,
        writable: true,
        ending: true,
        urgent: true,
        failed: true,
        by_rings: false,
    };
    cluster.host(Client).sockets.tell_late(socket);
    cluster.run_until_quiet();
    assert_eq!(cluster.host(Client).sockets.system_calls(), before);
    cluster.application(Client, second).write(KIB);
    cluster.run_until_quiet();
    assert_eq!(cluster.application(Server, second).received(), KIB as u64);
}

/// The kernel has no memory to watch one more socket: its program is told, instead of waiting for
/// ever.
#[test]
fn a_socket_that_cannot_be_watched_is_reset() {
    for transport in Transport::BOTH {
        let mut cluster = Cluster::calm();
        cluster.host(Client).sockets.set_full(true);
        let connection = cluster.connect(transport);
        cluster.run_until_quiet();
        for side in Side::BOTH {
            assert_eq!(cluster.application(side, connection).heard(), Heard::Reset);
        }
        assert!(cluster.host(Client).counters.watch_failures.get() > 0);
        cluster.assert_nothing_is_left();
    }
}

/// LLC messages keep a link alive: they must get through where every request slot is taken, or a
/// busy link is declared dead.
#[test]
fn llc_messages_pass_a_saturated_send_queue() {
    let mut cluster = Cluster::calm();
    let connections: Vec<_> = (0..250).map(|_| cluster.connect(Transport::Smc)).collect();
    cluster.run_until_quiet();
    for connection in connections {
        cluster.application(Client, connection).write_at_most(50);
        cluster.application(Client, connection).write(5 * KIB);
    }
    let link = cluster.newest_link();
    let messages: Vec<_> = (0..40).map(|number| [number; 44]).collect();
    for message in &messages {
        cluster.step();
        cluster.host(Client).command(Command::SendLlc { link, message: (*message).into() });
    }
    cluster.run_until_quiet();
    let received: Vec<_> =
        cluster.host(Server).llc.iter().map(|(_, message)| message.as_bytes()).collect();
    assert_eq!(received, messages);
}

/// The last words of a link, DELETE LINK, leave before its queue pair goes; with the queue pair
/// broken there is nothing to wait for.
// RFC 7609 3.5.4 #7: clean up once DELETE LINK is sent
#[test]
fn a_link_is_retired_behind_its_last_words() {
    for breaks in [false, true] {
        let mut cluster = Cluster::calm();
        let connection = cluster.connect(Transport::Smc);
        cluster.run_until_quiet();
        let link = cluster.newest_link();
        cluster.host(Client).command(Command::SendLlc { link, message: [4; 44].into() });
        cluster.host(Client).command(Command::FailConnections { link });
        cluster.host(Client).command(Command::RetireLink { link });
        cluster.step();
        assert!(!cluster.host(Client).retired.contains(&link));
        if breaks {
            cluster.break_link();
        }
        cluster.run_until_quiet();
        assert!(cluster.host(Client).retired.contains(&link));
        assert_eq!(cluster.host(Server).llc.len(), usize::from(!breaks));
        assert_eq!(cluster.application(Client, connection).heard(), Heard::Reset);
    }
}
