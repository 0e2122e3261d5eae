//! Keeps the history of the gateway, which `/history` serves.
//!
//! Here, on the admin thread, it costs the data plane nothing: the control thread adds up what
//! pollers publish anyway, once in [`SAMPLE_EVERY`].

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::stats::{Columns, History, Provider, SAMPLE_EVERY};

/// The history, shared by the task that adds to it and the requests that read it.
#[derive(Clone, Debug, Default)]
pub(super) struct Keeper {
    history: Arc<Mutex<History>>,
}

impl Keeper {
    /// Takes a sample now and then, for ever. A gateway that does not answer in time leaves a gap.
    pub(super) async fn keep(&self, provider: &dyn Provider) -> Infallible {
        let mut ticks = interval(SAMPLE_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            if let Ok(Ok(sample)) = timeout(SAMPLE_EVERY, provider.sample()).await {
                // A panic between two statements of `record` leaves nothing half done.
                self.history.lock().unwrap_or_else(PoisonError::into_inner).record(sample);
            }
        }
    }

    /// What has been kept so far.
    pub(super) fn columns(&self) -> Columns {
        self.history.lock().unwrap_or_else(PoisonError::into_inner).columns()
    }
}
