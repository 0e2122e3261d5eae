//! Many who come at once.

use std::io::{ErrorKind, Read};
use std::net::{Ipv4Addr, TcpListener, TcpStream};

use smcr_rnic::any::Nic;

use super::rig::{connect, halted};
use crate::gateway::Gateway;
use crate::gateway::accept::BEGIN_MAX;

/// More than begin in one round.
const CROWD: usize = 2 * BEGIN_MAX + 8;

/// How many wait in the queue, and how many have begun.
fn places(gateway: &Gateway<Nic>) -> (usize, usize) {
    (gateway.arrived(), gateway.sessions.len())
}

/// Whoever finds the backlog of a listener full comes back a second later. Each newcomer was begun
/// before the next one was accepted, and of 9,000 at once a third came twice.
#[test]
fn a_crowd_leaves_the_backlog_before_it_begins() {
    let (mut gateway, listens) = halted(206, "");
    let crowd: Vec<TcpStream> = (0..CROWD).map(|_| connect(listens)).collect();
    let now = gateway.clock.now();
    let sleeps =
        |gateway: &mut Gateway<Nic>| gateway.prepare_sleep().is_none_or(|it| !it.is_zero());
    assert!(sleeps(&mut gateway));
    assert!(!gateway.accept(now, 0), "nobody is left");
    assert_eq!(places(&gateway), (crowd.len(), 0));
    assert!(!sleeps(&mut gateway));
    // Others have their turn in between.
    for begun in [BEGIN_MAX, 2 * BEGIN_MAX, CROWD] {
        gateway.begin_arrived();
        assert_eq!(places(&gateway), (CROWD - begun, begun));
    }
    assert!(sleeps(&mut gateway));
}

/// Descriptors of those that wait must not be those that others need to go on.
#[test]
fn no_more_leave_the_backlog_than_there_is_room_for() {
    let (mut gateway, listens) = halted(207, "[limits]\nconnections_max = 70\n");
    let _crowd: Vec<TcpStream> = (0..CROWD + 70).map(|_| connect(listens)).collect();
    let now = gateway.clock.now();
    assert!(gateway.accept(now, 0));
    assert_eq!(places(&gateway), (70, 0));
    // However little there is, some are looked at: they may be refused.
    assert!(gateway.accept(now, 0));
    assert_eq!(places(&gateway), (70 + BEGIN_MAX, 0));
    while gateway.arrived() > 0 {
        gateway.begin_arrived();
    }
    assert_eq!((gateway.sessions.len(), gateway.listeners[0].refused), (70, 64));
    // The same where descriptors are what there is little of.
    let (mut gateway, listens) = halted(209, "");
    gateway.descriptors = 140;
    let _crowd: Vec<TcpStream> = (0..CROWD).map(|_| connect(listens)).collect();
    assert!(gateway.accept(now, 0));
    assert_eq!(places(&gateway), (70, 0));
}

/// A crowd at one listener must not keep those at another one waiting, and both together must not
/// be more than there is room for.
#[test]
fn listeners_begin_in_turn_and_share_the_room() {
    let held = TcpListener::bind((Ipv4Addr::new(127, 77, 211, 2), 0)).unwrap();
    let second = held.local_addr().unwrap();
    drop(held);
    let more = format!(
        "[[listener]]\nname = \"other\"\nbind = \"{second}\"\nupstream = \"127.0.0.1:9\"\n\
         [limits]\nconnections_max = {}\n",
        CROWD + 30
    );
    let (mut gateway, first) = halted(211, &more);
    let _crowd: Vec<TcpStream> = (0..CROWD).map(|_| connect(first)).collect();
    let _few: Vec<TcpStream> = (0..50).map(|_| connect(second)).collect();
    let now = gateway.clock.now();
    let queues = |gateway: &Gateway<Nic>| -> Vec<usize> {
        gateway.listeners.iter().map(|one| one.arrived.len()).collect()
    };
    assert!(!gateway.accept(now, 0) && !gateway.accept(now, 1));
    assert_eq!(queues(&gateway), [CROWD, 50]);
    gateway.begin_arrived();
    assert_eq!(queues(&gateway), [CROWD - BEGIN_MAX, 0]);
    while gateway.arrived() > 0 {
        gateway.begin_arrived();
    }
    let refused: Vec<u64> = gateway.listeners.iter().map(|one| one.refused).collect();
    assert_eq!((gateway.sessions.len(), refused), (CROWD + 30, vec![20, 0]));
}

/// Who listens no more still serves those whom the kernel has let in.
#[test]
fn a_listener_that_closes_begins_all_that_wait() {
    let (mut gateway, listens) = halted(208, "");
    let crowd: Vec<TcpStream> = (0..CROWD).map(|_| connect(listens)).collect();
    let now = gateway.clock.now();
    gateway.close(now, 0);
    assert_eq!(places(&gateway), (0, crowd.len()));
}

/// A gateway that stops begins nothing more. Its queue was forgotten: those in it began after that,
/// or were closed without a word.
#[test]
fn a_gateway_that_stops_resets_all_that_wait() {
    let (mut gateway, listens) = halted(210, "");
    let mut crowd: Vec<TcpStream> = (0..CROWD).map(|_| connect(listens)).collect();
    let now = gateway.clock.now();
    gateway.accept(now, 0);
    gateway.drain(now);
    gateway.begin_arrived();
    assert_eq!(places(&gateway), (0, 0));
    assert!(gateway.is_drained());
    let listener = &gateway.listeners[0];
    assert_eq!((listener.accepted, listener.refused), (CROWD as u64, CROWD as u64));
    for one in &mut crowd {
        assert_eq!(one.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    }
}
