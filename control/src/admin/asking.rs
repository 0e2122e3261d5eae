//! Asks the gateway, and waits no longer than whoever asks us.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::stats::{Answering, Provider};

/// Where requests put their questions: one at a time, however many there are, so that the control
/// thread has its own work in between.
#[derive(Clone)]
pub(super) struct Desk {
    provider: Arc<dyn Provider>,
    turn: Arc<Semaphore>,
}

/// The control thread does not answer in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Silent;

impl Desk {
    /// Nobody asks there yet.
    pub(super) fn new(provider: Arc<dyn Provider>) -> Self {
        Self { provider, turn: Arc::new(Semaphore::new(1)) }
    }

    /// Whoever answers.
    pub(super) fn provider(&self) -> Arc<dyn Provider> {
        Arc::clone(&self.provider)
    }

    /// Asks when all others have been answered that came before. Other requests are served
    /// meanwhile.
    ///
    /// # Errors
    ///
    /// [`Silent`] if there is no answer within [`PATIENCE`]. An answer that comes later is dropped.
    pub(super) async fn ask<T>(
        &self,
        question: impl FnOnce(&dyn Provider) -> Answering<T>,
    ) -> Result<T, Silent> {
        let answered = async {
            let _turn = self.turn.acquire().await.expect("the semaphore is never closed");
            question(&*self.provider).await
        };
        timeout(PATIENCE, answered).await.map_err(|_| Silent)?.map_err(|_| Silent)
    }
}

/// How long a request waits for its turn and its answer. The control thread is never busy for
/// longer than this; and if it is, an error tells more than a scrape that hangs.
const PATIENCE: Duration = Duration::from_secs(2);
