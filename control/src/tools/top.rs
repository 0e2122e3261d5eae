//! `smcgate top`: a running gateway in a terminal, live.
//!
//! One thread asks the admin endpoint, as `smcgate stats` does; this one draws what came last and
//! obeys keys. `screen` is what the operator has chosen and what is known, `tables` turns the
//! latter into rows, `view` draws both.

mod asker;
mod screen;
mod tables;
mod view;

use std::fmt;
use std::io::{self, IsTerminal};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEventKind};

use super::client::Client;
use crate::signals;
use asker::Asker;
use screen::{Screen, Wish};

/// Why there is nothing to see.
#[derive(Debug)]
pub enum TopError {
    /// Input or output is no terminal.
    NoTerminal,
    /// The terminal or the process does not do as it should.
    Io(io::Error),
}

impl fmt::Display for TopError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoTerminal => {
                f.write_str("top needs a terminal; smcgate stats prints the same figures once")
            }
            Self::Io(error) => write!(f, "the terminal: {error}"),
        }
    }
}

impl std::error::Error for TopError {}

impl From<io::Error> for TopError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Shows the gateway whose admin endpoint is at `admin` until the operator or a signal ends it.
///
/// # Errors
///
/// If there is no terminal, or it fails. It is as it was before in any case, after a panic too.
pub fn run(admin: SocketAddr, interval: Duration) -> Result<(), TopError> {
    if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        return Err(TopError::NoTerminal);
    }
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    signals::on_stop(move || stopped.store(true, Ordering::Relaxed))?;
    let screen = Screen::new(admin);
    let asker = Asker::start(Client::new(admin), interval, screen.query())?;
    // This also has a panic restore the terminal before it prints anything.
    let mut terminal = ratatui::try_init()?;
    let outcome = watch(&mut terminal, screen, &asker, &stop);
    let restored = ratatui::try_restore();
    outcome.and(restored).map_err(TopError::Io)
}

/// Draws and obeys until the operator has enough.
fn watch(
    terminal: &mut DefaultTerminal,
    mut screen: Screen,
    asker: &Asker,
    stop: &AtomicBool,
) -> io::Result<()> {
    while !stop.load(Ordering::Relaxed) {
        while let Some(answer) = asker.answer() {
            screen.take(answer);
        }
        terminal.draw(|frame| view::draw(frame, &mut screen))?;
        if !event::poll(REDRAW_EVERY)? {
            continue;
        }
        let Event::Key(key) = event::read()? else { continue };
        // Some terminals tell when a key is released, too.
        if key.kind == KeyEventKind::Release {
            continue;
        }
        match screen.handle_key(key) {
            None => {}
            Some(Wish::Ask) => asker.ask(screen.query()),
            Some(Wish::Quit) => break,
        }
    }
    Ok(())
}

/// How long an answer or a signal may wait until it is seen.
const REDRAW_EVERY: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests;
