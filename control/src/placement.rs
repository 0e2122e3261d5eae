//! The pollers as the control thread sees them.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use smcr_engine::counters::Counters;
use smcr_engine::gauges::Gauges;
use smcr_engine::handoff::{LetterOf, Neighbours, Owners};
use smcr_engine::limits::{COMMANDS_MAX, LETTERS_MAX};
use smcr_engine::mailbox::{Receiver, Sender, Waker, mailbox};
use smcr_engine::near::Near;
use smcr_engine::{Command, ConnectionId, GroupId, Report};

use crate::cores::Assignment;
use crate::groups::{Pollers, PortId};

/// What a polling thread needs to know of the others before any of them starts.
pub struct Seat<Qp> {
    /// Its index among all pollers.
    pub index: u8,
    /// Wakes it.
    pub waker: Waker,
    /// What the control thread tells it.
    pub obey: Receiver<Command<Qp, Near>>,
    /// What other pollers tell it.
    pub letters: Receiver<LetterOf<Near>>,
    /// How to tell each of the pollers something, by index.
    pub neighbours: Arc<Neighbours<LetterOf<Near>>>,
    /// Who has which slot.
    pub owners: Arc<Owners>,
    /// How the control thread tells it something.
    commands: Sender<Command<Qp, Near>>,
}

impl<Qp> Seat<Qp> {
    /// The control thread's end of it.
    pub fn line(&self) -> ToPoller<Qp> {
        let commands = self.commands.clone();
        ToPoller { commands, index: self.index, owners: Arc::clone(&self.owners) }
    }
}

/// How the control thread speaks to one poller.
pub struct ToPoller<Qp> {
    commands: Sender<Command<Qp, Near>>,
    index: u8,
    owners: Arc<Owners>,
}

/// The pollers of a process, which may become more.
#[derive(Clone)]
pub struct Seats {
    neighbours: Arc<Neighbours<LetterOf<Near>>>,
    owners: Arc<Owners>,
    taken: usize,
}

impl Seats {
    /// No poller yet.
    #[allow(clippy::new_without_default, reason = "a large allocation deserves a call")]
    pub fn new() -> Self {
        let neighbours = Arc::new(Neighbours::new(POLLERS_MAX));
        Self { neighbours, owners: Arc::new(Owners::new()), taken: 0 }
    }

    /// A seat for one more poller, known to all that there are.
    ///
    /// # Errors
    ///
    /// When the process is out of descriptors, or has had 256 pollers.
    pub fn take<Qp>(&mut self) -> io::Result<Seat<Qp>> {
        let full = "there have been 256 pollers since the start; restart the gateway";
        let index = u8::try_from(self.taken).map_err(|_| io::Error::other(full))?;
        let waker = Waker::new()?;
        let (commands, obey) = mailbox(COMMANDS_MAX, waker.clone());
        let (letter, letters) = mailbox(LETTERS_MAX, waker.clone());
        self.neighbours.introduce(self.taken, letter);
        self.taken += 1;
        let (neighbours, owners) = (Arc::clone(&self.neighbours), Arc::clone(&self.owners));
        Ok(Seat { index, waker, obey, letters, neighbours, owners, commands })
    }
}

/// As many as an index has values.
const POLLERS_MAX: usize = 256;

/// One polling thread, from outside.
pub struct PollerHandle<Qp> {
    /// Where it runs.
    pub assignment: Assignment,
    /// What it counts.
    pub counters: Arc<Counters>,
    /// How far its connections have come.
    pub gauges: Arc<Gauges>,
    /// What it says.
    pub reports: Receiver<Report<Near>>,
    line: ToPoller<Qp>,
    /// Commands that found the queue full. They keep their order.
    delayed: VecDeque<Command<Qp, Near>>,
    thread: Option<JoinHandle<()>>,
}

impl<Qp> PollerHandle<Qp> {
    /// A poller that runs on `thread`.
    pub fn new(
        assignment: Assignment,
        shared: (Arc<Counters>, Arc<Gauges>),
        reports: Receiver<Report<Near>>,
        line: ToPoller<Qp>,
        thread: JoinHandle<()>,
    ) -> Self {
        let (counters, gauges) = shared;
        Self {
            assignment,
            counters,
            gauges,
            reports,
            line,
            delayed: VecDeque::new(),
            thread: Some(thread),
        }
    }

    /// Says something; it arrives in order, and wakes the poller.
    pub fn command(&mut self, command: Command<Qp, Near>) {
        self.push(command);
        self.line.commands.wake();
    }

    fn push(&mut self, command: Command<Qp, Near>) {
        if !self.delayed.is_empty() {
            self.delayed.push_back(command);
        } else if let Err(command) = self.line.commands.push(command) {
            self.delayed.push_back(command);
        }
    }

    /// Says what could not be said before. Returns whether all of it was.
    pub fn catch_up(&mut self) -> bool {
        let before = self.delayed.len();
        while let Some(command) = self.delayed.pop_front() {
            if let Err(command) = self.line.commands.push(command) {
                self.delayed.push_front(command);
                break;
            }
        }
        if self.delayed.len() < before {
            self.line.commands.wake();
        }
        self.delayed.is_empty()
    }

    /// Ends the thread, and waits for it.
    pub fn stop(&mut self) {
        self.command(Command::Stop);
        while !self.catch_up() {
            std::thread::yield_now();
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("a poller panicked");
        }
    }

    /// Whether the thread was told to end, and did.
    pub fn is_stopped(&self) -> bool {
        self.thread.is_none()
    }

    /// Whether the thread ended although nobody told it to.
    pub fn is_dead(&self) -> bool {
        self.thread.as_ref().is_some_and(JoinHandle::is_finished)
    }
}

impl<Qp> Pollers<Qp> for Vec<PollerHandle<Qp>> {
    type Stream = Near;

    fn command(&mut self, port: PortId, command: Command<Qp, Near>) {
        self[port.0].command(command);
    }

    fn expect(&mut self, port: PortId, connection: ConnectionId, group: GroupId) {
        let line = &self[port.0].line;
        line.owners.set(connection, group, line.index);
    }

    fn forget(&mut self, port: PortId, connection: ConnectionId) {
        self[port.0].line.owners.clear(connection);
        self.command(port, Command::Forget { connection });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cores::Reason;

    /// A poller that sleeps is left alone unless there is something new for it: the control thread
    /// passes here each time it goes to sleep itself.
    #[test]
    fn only_a_command_wakes_a_poller() {
        let waker = Waker::new().unwrap();
        let (commands, obeyed) = mailbox::<Command<(), Near>>(1, waker.clone());
        let (_, obey) = mailbox(1, waker.clone());
        let (_, letters) = mailbox(1, waker.clone());
        let seat = Seat {
            index: 0,
            waker: waker.clone(),
            obey,
            letters,
            neighbours: Arc::new(Neighbours::new(1)),
            owners: Arc::new(Owners::new()),
            commands,
        };
        let (_, reports) = mailbox(1, waker.clone());
        let shared = (Arc::new(Counters::default()), Arc::new(Gauges::new()));
        let thread = std::thread::spawn(|| {});
        let unpinned = Assignment::unpinned(Reason::Off);
        let mut pollers = vec![PollerHandle::new(unpinned, shared, reports, seat.line(), thread)];
        let is_woken = || rustix::io::read(waker.descriptor(), &mut [0; 8]).is_ok();

        waker.about_to_sleep();
        assert!(pollers[0].catch_up() && !is_woken());
        let connection = ConnectionId { slot: 0, generation: 1 };
        pollers.expect(PortId(0), connection, GroupId(1));
        assert!(!is_woken(), "the message that matters will wake it");
        let known = seat.owners.of(connection).map(|owner| (owner.poller, owner.group));
        assert_eq!(known, Some((0, GroupId(1))));
        pollers.forget(PortId(0), connection);
        assert_eq!((seat.owners.of(connection), is_woken()), (None, true));
        waker.about_to_sleep();
        pollers.command(PortId(0), Command::Stop);
        assert!(is_woken());
        waker.about_to_sleep();
        assert!(!pollers[0].catch_up() && !is_woken(), "the queue is full still");
        assert!(matches!(obeyed.receive(), Some(Command::Forget { .. })));
        assert!(pollers[0].catch_up() && is_woken());
        assert!(matches!(obeyed.receive(), Some(Command::Stop)));
    }
}
