//! The admin thread's questions to the control thread.
//!
//! Questions go through a bounded queue; the control thread answers between two other things.
//! Pollers are not asked at all: their counters are read as they stand.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, SyncSender};
use std::time::Duration;

use smcr_engine::mailbox::Sender;
use tokio::sync::oneshot;

use crate::config::Config;
use crate::operate::{OperateError, Operation};
use crate::reload::Prepared;
use crate::stats::{
    Answering, ConnectionPage, ConnectionQuery, Provider, Readiness, Sample, Stats,
};

/// What the admin thread wants to know.
pub enum Question {
    /// Everything about the gateway.
    Stats(oneshot::Sender<Stats>),
    /// What the history keeps of now.
    Sample(oneshot::Sender<Sample>),
    /// The same without rows of link groups.
    Figures(oneshot::Sender<Stats>),
    /// The connections that are asked for.
    Connections(ConnectionQuery, oneshot::Sender<ConnectionPage>),
    /// Whether new connections would be served, at this listener if one is named.
    Ready(Option<String>, oneshot::Sender<Readiness>),
    /// The configuration in force.
    Config(oneshot::Sender<Config>),
    /// That something be done.
    Operate(Operation, SyncSender<Outcome>),
    /// That another configuration be put in force.
    Reload(Box<Prepared>, SyncSender<Outcome>),
}

/// What was done, in words, or why it was not.
pub type Outcome = Result<Vec<String>, OperateError>;

/// What an RNIC counts, published by its poller now and then.
#[derive(Debug, Default)]
pub struct Traffic {
    /// RoCE packets received.
    pub packets_in: AtomicU64,
    /// RoCE packets sent, repetitions included.
    pub packets_out: AtomicU64,
    /// RoCE packets sent again.
    pub retransmits: AtomicU64,
    /// Times that a path turned out to carry larger packets.
    pub path_raised: AtomicU64,
    /// Times that a path turned out not to carry packets that were sent.
    pub path_lowered: AtomicU64,
    /// Notices of peers that routers have marked our packets.
    pub cnps_in: AtomicU64,
    /// Notices to peers that routers have marked their packets.
    pub cnps_out: AtomicU64,
    /// Packets whose ICRC was wrong.
    pub icrc_errors: AtomicU64,
    /// Packets whose PSN the peer cannot have used.
    pub psn_errors: AtomicU64,
    /// Packets for no queue pair of their sender.
    pub unknown_qp: AtomicU64,
    /// Requests whose key or range was wrong.
    pub rkey_errors: AtomicU64,
}

/// The admin thread's end.
#[derive(Clone)]
pub struct Asker {
    /// Where questions go.
    pub questions: Sender<Question>,
    /// The file that the configuration came from; none if it came from none.
    pub file: Option<PathBuf>,
    /// How often it was read again, or begun to be. Several may do that at once.
    reloads: Arc<AtomicU64>,
}

impl Asker {
    /// Asks by `questions` a gateway whose configuration is in `file`.
    pub fn new(questions: Sender<Question>, file: Option<PathBuf>) -> Self {
        Self { questions, file, reloads: Arc::default() }
    }

    /// Asks, and waits for the answer, but no longer than [`PATIENCE`].
    fn order<T>(&self, question: impl FnOnce(SyncSender<T>) -> Question) -> Option<T> {
        let (answer, answered) = mpsc::sync_channel(1);
        self.questions.send(question(answer)).ok()?;
        answered.recv_timeout(PATIENCE).ok()
    }

    /// Reads the configuration again, and has it put in force.
    ///
    /// # Errors
    ///
    /// What is wrong with it; then the one before stays in force.
    pub fn reload(&self) -> Outcome {
        let why = "the gateway was started without a file";
        let file = self.file.as_ref().ok_or_else(|| OperateError::Refused(why.to_owned()))?;
        // What is read later is newer, however long it takes to resolve the names in it.
        let order = self.reloads.fetch_add(1, Ordering::Relaxed) + 1;
        let prepared = Prepared::read(file).map_err(OperateError::Wrong)?;
        let prepared = Box::new(Prepared { order, ..prepared });
        let question = |answer| Question::Reload(prepared, answer);
        self.order(question).unwrap_or(Err(OperateError::Silent))
    }

    /// Asks. If the queue is full, the question is dropped, and so is the promise of an answer.
    fn ask<T>(&self, question: impl FnOnce(oneshot::Sender<T>) -> Question) -> Answering<T> {
        let (answer, answered) = oneshot::channel();
        drop(self.questions.send(question(answer)));
        answered
    }
}

impl Provider for Asker {
    fn stats(&self) -> Answering<Stats> {
        self.ask(Question::Stats)
    }

    fn sample(&self) -> Answering<Sample> {
        self.ask(Question::Sample)
    }

    fn figures(&self) -> Answering<Stats> {
        self.ask(Question::Figures)
    }

    fn connections(&self, query: ConnectionQuery) -> Answering<ConnectionPage> {
        self.ask(|answer| Question::Connections(query, answer))
    }

    fn ready(&self, listener: Option<String>) -> Answering<Readiness> {
        self.ask(|answer| Question::Ready(listener, answer))
    }

    fn config(&self) -> Answering<Config> {
        self.ask(Question::Config)
    }

    fn operate(&self, operation: Operation) -> Outcome {
        if operation == Operation::Reload {
            return self.reload();
        }
        let question = |answer| Question::Operate(operation, answer);
        self.order(question).unwrap_or(Err(OperateError::Silent))
    }
}

/// How long an order waits until the control thread has begun to obey it.
const PATIENCE: Duration = Duration::from_secs(2);
