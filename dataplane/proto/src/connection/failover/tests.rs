//! Every state meets every event; the outcome is the table in `transitions.txt`.

use std::format;
use std::string::String;
use std::vec::Vec;

use super::*;

type State = Failover<&'static str>;

/// The stream ends here.
const END: Position = Position(30);
/// Of what must be written again, the beginning and the middle.
const FROM: Position = Position(10);
const NEXT: Position = Position(20);

fn states() -> Vec<State> {
    std::vec![
        Failover::Flowing,
        Failover::Leaving { route: "old" },
        Failover::Validating { from: FROM },
        Failover::Validating { from: END },
        Failover::Replaying { from: FROM, next: NEXT },
        Failover::Repeating,
        Failover::Lost { route: None },
        Failover::Lost { route: Some("old") },
    ]
}

fn events() -> Vec<Event<&'static str>> {
    std::vec![
        Event::Leave("new"),
        Event::Depart(FROM),
        Event::Said,
        Event::Written(Position(25)),
        Event::Written(END),
        Event::Forget,
        Event::Lose,
    ]
}

fn state_name(state: &State) -> String {
    match state {
        Failover::Flowing => "Flowing".into(),
        Failover::Leaving { route } => format!("Leaving({route})"),
        Failover::Validating { from } => format!("Validating({}..)", from.0),
        Failover::Replaying { from, next } => format!("Replaying({}..{}..)", from.0, next.0),
        Failover::Repeating => "Repeating".into(),
        Failover::Lost { route: None } => "Lost".into(),
        Failover::Lost { route: Some(route) } => format!("Lost({route})"),
    }
}

fn event_name(event: &Event<&'static str>) -> String {
    match event {
        Event::Leave(_) => "Leave".into(),
        Event::Depart(from) => format!("Depart({}..)", from.0),
        Event::Written(until) => format!("Written(..{})", until.0),
        Event::Said | Event::Forget | Event::Lose => format!("{event:?}"),
    }
}

// RFC 7609 2.3 #7: send failover validation first
// RFC 7609 2.3 #9: repeat failed writes in order
// RFC 7609 2.3 #10: repeat uncompleted writes before new data
// RFC 7609 4.6.1 #1: always validate at failover
// RFC 7609 4.6.1 #4: F message first on new link
// RFC 7609 4.6.1 #7: send on, F needs no answer
// RFC 7609 4.6.2 #1: repeat pending messages before new data
#[test]
fn transitions() {
    let mut lines = Vec::new();
    for state in states() {
        for event in events() {
            let pair = format!("{} {}", state_name(&state), event_name(&event));
            let outcome = match state.clone().after(event, END) {
                None => "our mistake".into(),
                Some((next, None)) if next == state => "stays".into(),
                Some((next, None)) => state_name(&next),
                Some((next, Some(route))) => format!("{} + {route}", state_name(&next)),
            };
            lines.push(format!("{pair} -> {outcome}"));
        }
    }
    let table: Vec<&str> = include_str!("transitions.txt").lines().collect();
    assert_eq!(lines, table, "\n{}", lines.join("\n"));
}

/// The counts of those who leave a link wait for every route that was given out.
#[test]
fn no_route_is_forgotten() {
    for state in states() {
        let had = matches!(&state, Failover::Leaving { .. } | Failover::Lost { route: Some(_) });
        for event in events() {
            let gives = matches!(event, Event::Leave(_));
            let Some((next, returned)) = state.clone().after(event, END) else { continue };
            let has = matches!(&next, Failover::Leaving { .. } | Failover::Lost { route: Some(_) });
            let before = u8::from(had) + u8::from(gives);
            assert_eq!(before, u8::from(has) + u8::from(returned.is_some()), "{state:?}");
        }
    }
}
