//! Every state meets every event; the outcome is the table in `transitions.txt`.

use std::format;
use std::string::String;
use std::vec::Vec;

use super::*;

const T0: Instant = Instant(0);
const IDLE: Duration = Duration::from_secs(30);
const WAIT: Duration = Duration::from_secs(2);
const KEEPALIVE: Keepalive = Keepalive { idle: Some(IDLE), reply_wait: WAIT };

fn confirming() -> Link {
    Link::new(KEEPALIVE, T0 + WAIT)
}

fn active() -> Link {
    let mut link = confirming();
    assert_eq!(link.handle(T0, Event::Confirmed), None);
    link
}

fn probing() -> Link {
    let mut link = active();
    assert_eq!(link.handle(T0 + IDLE, Event::Timeout), Some(Action::SendTestLink));
    link
}

fn down() -> Link {
    let mut link = active();
    assert_eq!(link.handle(T0, Event::Fail(Cause::Idle)), Some(Action::Fail(Cause::Idle)));
    link
}

fn state_name(state: State) -> String {
    match state {
        State::Confirming { .. } => "Confirming".into(),
        State::Active { .. } => "Active".into(),
        State::Probing { .. } => "Probing".into(),
        State::Down(cause) => format!("Down({cause:?})"),
    }
}

// RFC 7609 4.5.3 #1: probe idle link by TEST LINK
// RFC 7609 4.5.3 #3: TEST LINK answer shows viable link
// RFC 7609 C.7 #4: expired timer starts recovery
// RFC 7609 C.7.1 #23: unanswered TEST LINK fails link
#[test]
fn transitions() {
    let events = [
        ("Confirmed", Event::Confirmed),
        ("Traffic", Event::Traffic),
        ("Probe", Event::Probe(WAIT)),
        ("Fail", Event::Fail(Cause::QueuePairBroke)),
        ("Timeout", Event::Timeout),
    ];
    let mut lines = Vec::new();
    for before in [confirming(), active(), probing(), down()] {
        for (name, event) in events {
            let mut link = before;
            let action = link.handle(T0 + IDLE + WAIT, event);
            let action = action.map_or(String::new(), |action| format!(" + {action:?}"));
            let (from, to) = (state_name(before.state), state_name(link.state));
            lines.push(format!("{from} {name} -> {to}{action}"));
        }
    }
    let table: Vec<&str> = include_str!("transitions.txt").lines().collect();
    assert_eq!(lines, table, "\n{}", lines.join("\n"));
}

/// A timer wheel may fire early by its granularity; links must not die of it.
#[test]
fn early_timeouts_change_nothing() {
    for (link, early) in [
        (confirming(), T0 + Duration::from_nanos(1)),
        (active(), T0 + IDLE / 2),
        (probing(), T0 + IDLE + WAIT / 2),
    ] {
        let mut woken = link;
        assert_eq!(woken.handle(early, Event::Timeout), None);
        assert_eq!(woken.state(), link.state());
    }
}

/// A busy link is never probed: TEST LINK is for silence.
// RFC 7609 4.5.3 #2: no probe on a busy link
#[test]
fn traffic_puts_the_probe_off() {
    let mut link = active();
    link.handle(T0 + IDLE / 2, Event::Traffic);
    assert_eq!(link.poll_timeout(), Some(T0 + IDLE / 2 + IDLE));
    assert_eq!(link.handle(T0 + IDLE, Event::Timeout), None);
}

/// An operator who suspects a peer gets an answer as fast as asked for, even if a patient probe
/// is out already.
#[test]
fn a_second_probe_shortens_the_wait() {
    let mut link = probing();
    let now = T0 + IDLE;
    assert_eq!(link.handle(now, Event::Probe(WAIT / 4)), None);
    assert_eq!(link.poll_timeout(), Some(now + WAIT / 4));
    assert_eq!(link.handle(now, Event::Probe(WAIT)), None);
    assert_eq!(link.poll_timeout(), Some(now + WAIT / 4));
}

/// A poller reports late what came before the probe. It was taken for the answer, and a dead peer
/// was found out half a minute later.
#[test]
fn traffic_from_before_a_probe_is_no_answer() {
    let mut link = probing();
    let asked = T0 + IDLE;
    assert_eq!(link.handle(Instant(asked.0 - 1), Event::Traffic), None);
    assert_eq!(link.poll_timeout(), Some(asked + WAIT));
    link.handle(asked, Event::Traffic);
    assert_eq!(link.state(), State::Active { probe_at: Some(asked + IDLE) });
}

/// `idle = 0` in the configuration means: do not ask.
#[test]
fn keepalive_can_be_off() {
    let keepalive = Keepalive { idle: None, ..KEEPALIVE };
    let mut link = Link::new(keepalive, T0 + WAIT);
    link.handle(T0, Event::Confirmed);
    assert_eq!(link.poll_timeout(), None);
    assert_eq!(link.handle(T0 + IDLE * 100, Event::Timeout), None);
    assert!(link.is_up());
    assert_eq!(link.handle(T0, Event::Probe(WAIT)), Some(Action::SendTestLink));
}
