//! Every state meets every event; the outcome is the table in `transitions.txt`, in which the
//! arrows of Figures 22 and 23 have their numbers.

use std::format;
use std::string::String;
use std::vec::Vec;

use super::*;

const STATES: [State; 13] = [
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
    State::Closed,
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

/// Figures 22 and 23 with their texts: the number of each arrow, and the boxes it joins.
const ARROWS: [(&str, &str, &str); 15] = [
    ("3A", "Active", "PeerCloseWait1"),
    ("3B", "PeerCloseWait1", "PeerCloseWait2"),
    ("3C", "PeerCloseWait1", "AppFinCloseWait"),
    ("3C", "PeerCloseWait2", "AppFinCloseWait"),
    // If the application has closed by then: both arrows at once.
    ("3C, 3D", "PeerCloseWait1", "Closed"),
    ("3C, 3D", "PeerCloseWait2", "Closed"),
    ("3D", "AppFinCloseWait", "Closed"),
    ("4A", "Active", "AppCloseWait1"),
    ("4B", "AppCloseWait1", "AppCloseWait2"),
    ("4C", "AppCloseWait1", "PeerFinCloseWait"),
    ("4C", "AppCloseWait2", "PeerFinCloseWait"),
    // If the peer has said C by then: both arrows at once.
    ("4C, 4D", "AppCloseWait1", "Closed"),
    ("4D", "PeerFinCloseWait", "Closed"),
    ("1B", "PeerAbortWait", "Closed"),
    ("2B", "ProcessAbort", "Closed"),
];

/// One line of `transitions.txt`: what a state makes of an event, and the arrow that says so, or
/// why there is none.
struct Line {
    pair: &'static str,
    outcome: &'static str,
    note: &'static str,
}

fn table() -> Vec<Line> {
    let lines = include_str!("transitions.txt").lines().map(|line| {
        let (transition, note) = line.split_once('|').unwrap();
        let (pair, outcome) = transition.split_once(" -> ").unwrap();
        Line { pair, outcome: outcome.trim(), note: note.trim() }
    });
    lines.collect()
}

/// The box of the figures that a state belongs to.
fn figure_box(state: &str) -> &str {
    state.split(['(', ' ']).next().unwrap()
}

// RFC 7609 4.8.1 #5: closing both directions sends C
// RFC 7609 4.8.1 #6: end of writing sends D
// RFC 7609 4.8.1 #7: close or shutdown: to PeerCloseWait1
// RFC 7609 4.8.1 #8: peer's D: to PeerCloseWait2
// RFC 7609 4.8.1 #10: peer's C: PeerCloseWait to Closed
// RFC 7609 4.8.1 #11: half-closed waits for application's close
// RFC 7609 4.8.1 #13: peer's D or C: to AppCloseWait1
// RFC 7609 4.8.1 #16: shutdown sends D: to AppCloseWait2
// RFC 7609 4.8.1 #17: close after peer's C: to Closed
// RFC 7609 4.8.1 #18: close before peer's C: to PeerFinCloseWait
// RFC 7609 4.8.1 #19: peer's C: PeerFinCloseWait to Closed
// RFC 7609 4.8.1 #23: free element after closing timeout
// RFC 7609 4.8.1 #24: both sides may close at once
// RFC 7609 4.8.2 #3: abort sends A: to PeerAbortWait
// RFC 7609 4.8.2 #4: PeerAbortWait hears A and C
// RFC 7609 4.8.2 #6: peer's A: PeerAbortWait to Closed
// RFC 7609 4.8.2 #7: limit PeerAbortWait by a timer
// RFC 7609 4.8.2 #10: answer A with A
// RFC 7609 4.8.2 #12: both sides may abort at once
#[test]
fn transitions() {
    let mut found = Vec::new();
    for state in STATES {
        for event in EVENTS {
            let (next, action) = state.after(event);
            let event = match event {
                Event::Orderly(step) => format!("{step:?}"),
                Event::Abort | Event::PeerAborted | Event::AbortSent | Event::Timeout => {
                    format!("{event:?}")
                }
            };
            let action = action.map_or(String::new(), |action| format!(" + {action:?}"));
            let outcome =
                if next == state { String::from("stays") } else { format!("{next:?}{action}") };
            assert!(next != state || action.is_empty(), "{state:?} {event}");
            found.push(format!("{state:?} {event} -> {outcome}"));
        }
    }
    let table: Vec<_> =
        table().iter().map(|line| format!("{} -> {}", line.pair, line.outcome)).collect();
    assert_eq!(found, table, "\n{}", found.join("\n"));
}

/// Every arrow of the figures is taken, by an event of the table that carries its number; and no
/// number stands where the figures have another arrow. What has no number says why.
// RFC 7609 4.8.1 #1: begin and end as Closed
// RFC 7609 4.8.1 #2: Active after the rendezvous
#[test]
fn the_figures_are_in_the_table() {
    let mut taken = Vec::new();
    for line in table() {
        let (from, to) = (figure_box(line.pair), figure_box(line.outcome));
        let is_number = line.note.starts_with(|first: char| first.is_ascii_digit());
        match line.note {
            // From any state before our C: Figure 23 draws one box for all of them.
            "1A" => assert_eq!((line.outcome, is_before_our_c(from)), (ABORTS, true), "{from}"),
            "2A" => {
                assert!(line.pair.ends_with(" PeerAborted") && is_before_our_c(from), "{from}");
                assert_eq!(to, "ProcessAbort");
            }
            number if is_number => {
                assert!(ARROWS.contains(&(number, from, to)), "{}: {number}", line.pair);
                taken.push((number, from, to));
            }
            reason => assert!(reason.len() > 5, "{} without a reason", line.pair),
        }
    }
    for arrow in ARROWS {
        assert!(taken.contains(&arrow), "{arrow:?} is missing");
    }
}

fn is_before_our_c(figure_box: &str) -> bool {
    !["PeerFinCloseWait", "PeerAbortWait", "ProcessAbort", "Closed"].contains(&figure_box)
}

const ABORTS: &str = "PeerAbortWait + SayAbort";

/// An RMBE is reused after that, so nothing may bring its connection back.
// RFC 7609 4.8.1 #20: reuse element once Closed
#[test]
fn closed_is_final() {
    for event in EVENTS {
        assert_eq!(State::Closed.after(event), (State::Closed, None));
    }
}

/// Figure 22 promises that a connection cannot be stranded: from every state in which only the
/// peer is missing, time alone leads out; from every other, our side can.
// RFC 7609 4.8.1 #21: limit closing by a timer
// RFC 7609 4.8.2 #7: limit PeerAbortWait by a timer
#[test]
fn no_state_is_a_trap() {
    for state in STATES.into_iter().filter(|state| *state != State::Closed) {
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
