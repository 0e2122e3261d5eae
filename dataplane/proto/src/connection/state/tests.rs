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
#[test]
fn closed_is_final() {
    for event in EVENTS {
        assert_eq!(State::Closed.after(event), (State::Closed, None));
    }
}

/// Figure 22 promises that a connection cannot be stranded: from every state in which only the
/// peer is missing, time alone leads out; from every other, our side can.
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
