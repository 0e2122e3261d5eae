//! Answers to the admin thread's questions.
//!
//! The admin thread asks through a bounded queue and waits; the control thread answers between two
//! other things. Pollers are not asked at all: their counters are read as they stand.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, SyncSender};
use std::time::Duration;

use smcr_engine::mailbox::Sender;
use smcr_proto::Instant;
use smcr_proto::link_group::Role;
use smcr_proto::wire::clc::Diagnosis;
use smcr_rnic::Rnic;

use crate::config::Transport as Side;
use crate::gateway::{Gateway, Port};
use crate::groups::{Group, Phase};
use crate::sessions::{Carried, Session};
use crate::stats::{
    Active, Connection, ConnectionPage, ConnectionQuery, Fallback, Link, LinkGroup, Listener,
    Memory, Poller, Provider, Readiness, Stats, Totals, Transport,
};

/// What the admin thread wants to know.
pub enum Question {
    /// Everything about the gateway.
    Stats(SyncSender<Stats>),
    /// Every connection.
    Connections(SyncSender<Vec<Connection>>),
    /// Whether new connections would be served.
    Ready(SyncSender<Readiness>),
}

/// What an RNIC counts, published by its poller now and then.
#[derive(Debug, Default)]
pub struct Traffic {
    /// RoCE packets received.
    pub packets_in: AtomicU64,
    /// RoCE packets sent, repetitions included.
    pub packets_out: AtomicU64,
    /// RoCE packets sent again.
    pub retransmits: AtomicU64,
    /// Packets whose ICRC was wrong.
    pub icrc_errors: AtomicU64,
    /// Requests whose key or range was wrong.
    pub rkey_errors: AtomicU64,
}

/// The admin thread's end.
pub struct Asker(pub Sender<Question>);

impl Asker {
    /// Asks, and waits for the answer. The control thread is never busy for longer than this, and
    /// if it is, an empty answer tells more than a scrape that hangs.
    fn ask<T: Default>(&self, question: impl FnOnce(SyncSender<T>) -> Question) -> T {
        let (answer, answered) = mpsc::sync_channel(1);
        if self.0.send(question(answer)).is_err() {
            return T::default();
        }
        answered.recv_timeout(PATIENCE).unwrap_or_default()
    }
}

impl Provider for Asker {
    fn stats(&self) -> Stats {
        self.ask(Question::Stats)
    }

    fn connections(&self, query: &ConnectionQuery) -> ConnectionPage {
        ConnectionPage::select(self.ask(Question::Connections), query)
    }

    fn ready(&self) -> Readiness {
        self.ask(Question::Ready)
    }
}

impl<N: Rnic> Gateway<N> {
    /// Answers what the admin thread asked.
    pub(crate) fn answer_questions(&mut self, now: Instant) {
        while let Some(question) = self.questions.receive() {
            // Whoever asked may have lost patience; that is no concern of ours.
            match question {
                Question::Stats(answer) => drop(answer.try_send(self.stats(now))),
                Question::Connections(answer) => drop(answer.try_send(self.connections(now))),
                Question::Ready(answer) => drop(answer.try_send(self.readiness())),
            }
        }
    }
}

const PATIENCE: Duration = Duration::from_secs(2);
