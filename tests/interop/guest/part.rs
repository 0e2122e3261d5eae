//! A list of steps that an application takes with a connection, and what it sees.
//!
//! `send=1000 shut drain mode` sends, half-closes, reads to the end, and says whether the
//! connection used SMC-R. Its outcome is one line. Connections with the same outcome are counted
//! together:
//!
//! ```text
//! 1 x sent 1000 bytes, SHA-256 …; shut; received 0 bytes, SHA-256 …, then end; mode SMCR
//! ```

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddrV4;
use std::str::FromStr;
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use crate::diag;
use crate::stream::{Stream, Transport};

/// One step of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// `send=N`: that many bytes of the pattern.
    Send(u64),
    /// `trickle=N`: that many bytes, a thousand at a time, with pauses between them.
    Trickle(u64),
    /// `receive=N`: that many bytes, no more.
    Receive(u64),
    /// `drain`: everything up to the end.
    Drain,
    /// `echo`: sends back everything up to the end.
    Echo,
    /// `shut`: half-closes.
    Shut,
    /// `urgent`: one byte out of band.
    Urgent,
    /// `take-urgent`: the byte that came out of band.
    TakeUrgent,
    /// `pause=MS`: waits for that many milliseconds.
    Pause(u64),
    /// `linger-zero`: the close that follows is abortive.
    LingerZero,
    /// `mode`: whether the kernel carries this connection over SMC-R, and why if not.
    Mode,
}

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unknown = || format!("there is no step '{text}'");
        if let Some((step, number)) = text.split_once('=') {
            let number = number.parse().map_err(|_| unknown())?;
            return match step {
                "send" => Ok(Self::Send(number)),
                "trickle" => Ok(Self::Trickle(number)),
                "receive" => Ok(Self::Receive(number)),
                "pause" => Ok(Self::Pause(number)),
                _ => Err(unknown()),
            };
        }
        Ok(match text {
            "drain" => Self::Drain,
            "echo" => Self::Echo,
            "shut" => Self::Shut,
            "urgent" => Self::Urgent,
            "take-urgent" => Self::TakeUrgent,
            "linger-zero" => Self::LingerZero,
            "mode" => Self::Mode,
            _ => return Err(unknown()),
        })
    }
}

impl Part {
    /// Takes this step. Returns what it saw, as an error if no other step can follow.
    fn take(self, stream: &mut Stream) -> Result<String, String> {
        let failed = |error: io::Error| format!("{self:?} failed: {:?}", error.kind());
        match self {
            Self::Send(count) => stream.send(count, None).map(|seen| format!("sent {seen}")),
            Self::Trickle(count) => {
                let breath = Duration::from_millis(20);
                stream.send(count, Some(breath)).map(|seen| format!("sent {seen}"))
            }
            Self::Receive(count) => {
                let (seen, outcome) = stream.receive(count);
                return match outcome {
                    Ok(()) => Ok(format!("received {seen}")),
                    Err(error) => Err(format!("received {seen}, then {}", ending(&error))),
                };
            }
            Self::Drain => {
                let (seen, outcome) = stream.receive(u64::MAX);
                let ending = outcome.map_or_else(|error| ending(&error), |()| "more".to_owned());
                return Ok(format!("received {seen}, then {ending}"));
            }
            Self::Echo => stream.echo().map(|seen| format!("echoed {seen}")),
            Self::Shut => stream.shut().map(|()| "shut".to_owned()),
            Self::Urgent => stream.send_urgent().map(|()| "sent an urgent byte".to_owned()),
            Self::TakeUrgent => {
                stream.receive_urgent().map(|byte| format!("urgent byte {:?}", char::from(byte)))
            }
            Self::Pause(milliseconds) => {
                thread::sleep(Duration::from_millis(milliseconds));
                Ok("paused".to_owned())
            }
            Self::LingerZero => stream.linger_zero().map(|()| "lingers not".to_owned()),
            Self::Mode => diag::mode_of(stream).map(|mode| format!("mode {mode}")),
        }
        .map_err(failed)
    }
}

fn ending(error: &io::Error) -> String {
    let kind = error.kind();
    if kind == io::ErrorKind::UnexpectedEof { "end".to_owned() } else { format!("{kind:?}") }
}

/// Outcomes, and how many connections had each.
#[derive(Default)]
struct Outcomes(Mutex<BTreeMap<String, u32>>);

impl Outcomes {
    fn add(&self, outcome: String) {
        *self.0.lock().expect("nobody panics with it").entry(outcome).or_default() += 1;
    }

    fn print(self) {
        let outcomes = self.0.into_inner().expect("nobody panics with it");
        outcomes.iter().for_each(|(outcome, count)| println!("{count} x {outcome}"));
    }
}

/// Plays the steps in order, up to one after which no other can follow, and closes.
fn play(mut stream: Stream, part: &[Part]) -> String {
    let mut seen = Vec::new();
    for step in part {
        match step.take(&mut stream) {
            Ok(event) => seen.push(event),
            Err(event) => {
                seen.push(event);
                break;
            }
        }
    }
    seen.join("; ")
}

/// Makes `times` connections at once, plays the part with each in a thread of its own, and prints
/// the outcomes.
pub(crate) fn connect(transport: Transport, to: SocketAddrV4, part: &[Part], times: u32) {
    let outcomes = Outcomes::default();
    thread::scope(|scope| {
        for _ in 0..times {
            scope.spawn(|| {
                outcomes.add(match transport.connect(to) {
                    Ok(stream) => play(stream, part),
                    Err(error) => format!("connect failed: {:?}", error.kind()),
                });
            });
        }
    });
    outcomes.print();
}

/// Accepts `times` connections, plays the part with each in its own thread, and prints the
/// outcomes.
pub(crate) fn accept(
    transport: Transport,
    at: SocketAddrV4,
    part: &[Part],
    times: u32,
) -> io::Result<()> {
    let listener = transport.listen(at)?;
    eprintln!("listening on {at}");
    let outcomes = Outcomes::default();
    thread::scope(|scope| {
        let outcomes = &outcomes;
        for _ in 0..times {
            match listener.accept() {
                Ok(stream) => drop(scope.spawn(move || outcomes.add(play(stream, part)))),
                Err(error) => outcomes.add(format!("accept failed: {:?}", error.kind())),
            }
        }
    });
    outcomes.print();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If one step were read as another, a scenario could pass for the wrong reason.
    #[test]
    fn steps_are_what_they_are_called() {
        assert_eq!("send=1000".parse(), Ok(Part::Send(1_000)));
        assert_eq!("pause=5".parse(), Ok(Part::Pause(5)));
        assert_eq!("drain".parse(), Ok(Part::Drain));
        for wrong in ["send", "send=", "send=-1", "drain=1", "Drain", ""] {
            assert!(wrong.parse::<Part>().is_err(), "{wrong}");
        }
    }
}
