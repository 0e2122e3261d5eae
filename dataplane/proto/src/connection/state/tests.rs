//! Every state meets every event; the outcome is the table in `transitions.txt`.

use std::format;
use std::string::String;
use std::vec::Vec;

use super::*;

const STATES: [State; 12] = [
    State::Active,
    State::PeerCloseWait1(Half::Done),
    State::PeerCloseWait1(Half::Closed),
    State::PeerCloseWait2(Half::Done),
    State::PeerCloseWait2(Half::Closed),
    State::AppFinCloseWait,
    State::AppCloseWait1(Half::Done),
    State::AppCloseWait1(Half::Closed),
    State::AppCloseWait2,
    State::PeerFinCloseWait,
    State::PeerAbortWait,
    State::ProcessAbort,
];

const EVENTS: [Event; 8] = [
    Event::Orderly(Orderly::ShutdownWrite),
    Event::Orderly(Orderly::Close),
    Event::Orderly(Orderly::PeerDone),
    Event::Orderly(Orderly::PeerClosed),
    Event::Abort,
    Event::PeerAborted,
    Event::AbortSent,
    Event::Timeout,
];

// RFC 7609 4.8.1-5, 4.8.1-6, 4.8.1-7, 4.8.1-8, 4.8.1-10, 4.8.1-11, 4.8.1-13, 4.8.1-16, 4.8.1-17
// RFC 7609 4.8.1-18, 4.8.1-19, 4.8.1-23, 4.8.1-24, 4.8.2-3, 4.8.2-4, 4.8.2-6, 4.8.2-7, 4.8.2-10
// RFC 7609 4.8.2-12
#[test]
fn transitions() {
    let mut lines = Vec::new();
    for state in STATES {
        for event in EVENTS {
            let (next, action) = state.after(event);
            let event = match event {
                Event::Orderly(step) => format!("{step:?}"),
                Event::Abort | Event::PeerAborted | Event::AbortSent | Event::Timeout => {
                    format!("{event:?}")
                }
            };
            if next == state {
                assert_eq!(action, None, "{state:?} {event}");
                continue;
            }
            let action = action.map_or(String::new(), |action| format!(" + {action:?}"));
            lines.push(format!("{state:?} {event} -> {next:?}{action}"));
        }
    }
    let table: Vec<&str> = include_str!("transitions.txt").lines().collect();
    assert_eq!(lines, table, "\n{}", lines.join("\n"));
}

/// An RMBE is reused after that, so nothing may bring its connection back.
// RFC 7609 4.8.1-20
#[test]
fn closed_is_final() {
    for event in EVENTS {
        assert_eq!(State::Closed.after(event), (State::Closed, None));
    }
}

/// Figure 22 promises that a connection cannot be stranded: from every state in which only the
/// peer is missing, time alone leads out; from every other, our side can.
// RFC 7609 4.8.1-21, 4.8.2-7
#[test]
fn no_state_is_a_trap() {
    for state in STATES {
        let event = if state.waits_for_peer() {
            Event::Timeout
        } else if state == State::ProcessAbort {
            Event::AbortSent
        } else {
            Event::Abort
        };
        let (next, _) = state.after(event);
        assert_ne!(next, state);
        let (last, _) = next.after(Event::Timeout);
        let (last, _) = last.after(Event::AbortSent);
        assert_eq!(last, State::Closed, "{state:?} by way of {next:?}");
    }
}
