//! Asks the gateway on a thread of its own, so that keys work while it does not answer.

use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use crate::stats::{Columns, ConnectionPage, ConnectionQuery, Stats};
use crate::tools::client::{Client, ClientError};

/// Everything that is shown, as the gateway said it at one time.
#[derive(Clone, Debug, Default)]
pub(super) struct Reading {
    pub(super) stats: Stats,
    pub(super) history: Columns,
    pub(super) connections: ConnectionPage,
}

/// What came of asking: a reading, or why there is none.
pub(super) type Answer = Result<Box<Reading>, String>;

/// The thread that asks. It ends when this is dropped.
pub(super) struct Asker {
    queries: Sender<ConnectionQuery>,
    answers: Receiver<Answer>,
}

impl Asker {
    /// Asks now, and then each time after `interval`.
    pub(super) fn start(
        client: Client,
        interval: Duration,
        mut query: ConnectionQuery,
    ) -> io::Result<Self> {
        let (queries, asked) = mpsc::channel();
        let (answer, answers) = mpsc::channel();
        std::thread::Builder::new().name("asker".to_owned()).spawn(move || {
            loop {
                let reading = read(&client, &query).map(Box::new);
                if answer.send(reading.map_err(|error| error.to_string())).is_err() {
                    return;
                }
                match asked.recv_timeout(interval) {
                    Ok(other) => query = asked.try_iter().last().unwrap_or(other),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        })?;
        Ok(Self { queries, answers })
    }

    /// Asks for these connections from now on, and at once.
    pub(super) fn ask(&self, query: ConnectionQuery) {
        // The thread ends only when `self` does.
        drop(self.queries.send(query));
    }

    /// The next answer, if one has come.
    pub(super) fn answer(&self) -> Option<Answer> {
        self.answers.try_recv().ok()
    }
}

fn read(client: &Client, query: &ConnectionQuery) -> Result<Reading, ClientError> {
    Ok(Reading {
        stats: client.stats()?.value,
        history: client.history()?.value,
        connections: client.connections(query)?.value,
    })
}
