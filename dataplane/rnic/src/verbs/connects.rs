//! Queue pairs that wait to be connected, and the threads that connect them.
//!
//! The kernel may look for a peer's Ethernet address for seconds. A few threads share the work, so
//! that a peer that is not there delays others little, and nothing else at all.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use rdma_core::{Peer, QueuePair};

use super::worker::{Progress, Shared};
use crate::ConnectError;

/// A queue pair to connect.
#[derive(Debug)]
pub(super) struct Connect {
    pub(super) pair: Arc<QueuePair>,
    pub(super) peer: Peer,
    pub(super) progress: Arc<Progress>,
}

/// Those that wait, oldest first.
#[derive(Debug, Default)]
pub(super) struct Connects(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Connect>,
    threads: u32,
}

impl Connects {
    /// Leaves a queue pair to be connected. `shared` owns this.
    ///
    /// # Errors
    ///
    /// [`ConnectError::Exhausted`]: too many wait, or the host has no thread for them.
    pub(super) fn ask(&self, connect: Connect, shared: &Arc<Shared>) -> Result<(), ConnectError> {
        let mut state = self.lock();
        if state.waiting.len() == WAITING_MAX {
            return Err(ConnectError::Exhausted);
        }
        state.waiting.push_back(connect);
        if state.threads < THREADS_MAX {
            let own = Arc::clone(shared);
            let work = move || while own.connect_next() {};
            match thread::Builder::new().name("verbs-connect".into()).spawn(work) {
                Ok(_) => state.threads += 1,
                Err(_) if state.threads == 0 => {
                    state.waiting.pop_back();
                    return Err(ConnectError::Exhausted);
                }
                // Another thread takes it.
                Err(_) => {}
            }
        }
        Ok(())
    }

    /// Takes the oldest. If there is none, the calling thread is done.
    pub(super) fn take(&self) -> Option<Connect> {
        let mut state = self.lock();
        let next = state.waiting.pop_front();
        state.threads -= u32::from(next.is_none());
        next
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is locked.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The most that wait. The control thread has fewer rendezvous at a time.
const WAITING_MAX: usize = 1_024;
/// Threads that connect at the same time, while there is something to connect.
const THREADS_MAX: u32 = 8;
