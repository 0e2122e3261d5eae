//! Many who come at once.

use std::net::TcpStream;

use super::rig::{connect, halted};
use crate::gateway::accept::BEGIN_MAX;

/// Whoever finds the backlog of a listener full comes back a second later. Each newcomer was begun
/// before the next one was accepted, and of 9,000 at once a third came twice.
#[test]
fn a_crowd_leaves_the_backlog_before_it_begins() {
    let (mut gateway, listens) = halted(206, "");
    let crowd: Vec<TcpStream> = (0..200).map(|_| connect(listens)).collect();
    let now = gateway.clock.now();
    assert!(!gateway.accept(now, 0), "nobody is left");
    assert_eq!((gateway.listeners[0].arrived.len(), gateway.sessions.len()), (200, 0));
    assert!(gateway.prepare_sleep().is_some_and(|limit| limit.is_zero()));
    // Others have their turn in between.
    let mut begun = Vec::new();
    while gateway.has_arrived() {
        gateway.begin_arrived(now);
        begun.push(gateway.sessions.len());
    }
    assert_eq!(begun, [BEGIN_MAX, 2 * BEGIN_MAX, 3 * BEGIN_MAX, crowd.len()]);
}

/// Descriptors of those that wait must not be those that others need to go on.
#[test]
fn no_more_leave_the_backlog_than_there_is_room_for() {
    let (mut gateway, listens) = halted(207, "[limits]\nconnections_max = 100\n");
    let _crowd: Vec<TcpStream> = (0..250).map(|_| connect(listens)).collect();
    let now = gateway.clock.now();
    assert!(gateway.accept(now, 0));
    assert_eq!(gateway.listeners[0].arrived.len(), 100);
    // However little there is, some are looked at: they may be refused.
    assert!(gateway.accept(now, 0));
    assert_eq!(gateway.listeners[0].arrived.len(), 100 + BEGIN_MAX);
    while gateway.has_arrived() {
        gateway.begin_arrived(now);
    }
    assert_eq!((gateway.sessions.len(), gateway.listeners[0].refused), (100, 64));
}

/// Who listens no more still serves those whom the kernel has let in.
#[test]
fn a_listener_that_closes_begins_all_that_wait() {
    let (mut gateway, listens) = halted(208, "");
    let crowd: Vec<TcpStream> = (0..150).map(|_| connect(listens)).collect();
    let now = gateway.clock.now();
    gateway.close(now, 0);
    assert_eq!((gateway.sessions.len(), gateway.has_arrived()), (crowd.len(), false));
}
