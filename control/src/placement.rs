//! The pollers as the control thread sees them.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use smcr_engine::counters::Counters;
use smcr_engine::gauges::Gauges;
use smcr_engine::handoff::Owners;
use smcr_engine::limits::COMMANDS_MAX;
use smcr_engine::mailbox::{Receiver, Sender, Waker, mailbox};
use smcr_engine::{Command, Report};

use crate::cores::Assignment;
use crate::groups::{Pollers, PortId};

/// What a polling thread needs to know of the others before any of them starts.
pub struct Seat<Qp> {
    /// Its index among all pollers.
    pub index: u8,
    /// Wakes it.
    pub waker: Waker,
    /// What it is told.
    pub obey: Receiver<Command<Qp, OwnedFd>>,
    /// How to tell each of the pollers something, by index.
    pub neighbours: Vec<Sender<Command<Qp, OwnedFd>>>,
    /// Who has which slot.
    pub owners: Arc<Owners>,
}

impl<Qp> Seat<Qp> {
    /// The control thread's end of it.
    pub fn line(&self) -> ToPoller<Qp> {
        let commands = self.neighbours[usize::from(self.index)].clone();
        ToPoller { commands, index: self.index, owners: Arc::clone(&self.owners) }
    }
}

/// How the control thread speaks to one poller.
pub struct ToPoller<Qp> {
    commands: Sender<Command<Qp, OwnedFd>>,
    index: u8,
    owners: Arc<Owners>,
}

/// Seats for `count` pollers.
///
/// # Errors
///
/// When the process is out of descriptors, or `count` is above 256.
pub fn seats<Qp>(count: usize) -> io::Result<Vec<Seat<Qp>>> {
    let owners = Arc::new(Owners::new());
    let mut ends = Vec::new();
    for index in 0..count {
        let index = u8::try_from(index).map_err(|_| io::ErrorKind::InvalidInput)?;
        let waker = Waker::new()?;
        let (commands, obey) = mailbox(COMMANDS_MAX, waker.clone());
        ends.push((index, waker, commands, obey));
    }
    let neighbours: Vec<_> = ends.iter().map(|(_, _, commands, _)| commands.clone()).collect();
    let seat = |(index, waker, _, obey)| Seat {
        index,
        waker,
        obey,
        neighbours: neighbours.clone(),
        owners: Arc::clone(&owners),
    };
    Ok(ends.into_iter().map(seat).collect())
}

/// One polling thread, from outside.
pub struct Poller<Qp> {
    /// Where it runs.
    pub assignment: Assignment,
    /// What it counts.
    pub counters: Arc<Counters>,
    /// How far its connections have come.
    pub gauges: Arc<Gauges>,
    /// What it says.
    pub reports: Receiver<Report<OwnedFd>>,
    line: ToPoller<Qp>,
    /// Commands that found the queue full. They keep their order.
    delayed: VecDeque<Command<Qp, OwnedFd>>,
    thread: Option<JoinHandle<()>>,
}

impl<Qp> Poller<Qp> {
    /// A poller that runs on `thread`.
    pub fn new(
        assignment: Assignment,
        shared: (Arc<Counters>, Arc<Gauges>),
        reports: Receiver<Report<OwnedFd>>,
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
    ///
    /// [`Command::Expect`] wakes nobody: the first message that it is about will, and the poller
    /// obeys before it looks at a message it cannot place.
    pub fn command(&mut self, command: Command<Qp, OwnedFd>) {
        let expected = match &command {
            Command::Expect { connection, group } => Some((*connection, *group)),
            Command::AddLink { .. }
            | Command::SendLlc { .. }
            | Command::FailConnections { .. }
            | Command::FailLink { .. }
            | Command::RetireLink { .. }
            | Command::Forget { .. }
            | Command::Relay { .. }
            | Command::Abort { .. }
            | Command::MoveConnections { .. }
            | Command::Adopt(_)
            | Command::Deliver { .. }
            | Command::Stop => None,
        };
        self.push(command);
        match expected {
            // Behind the push: what other pollers pass on comes behind it too.
            Some((connection, group)) => {
                self.line.owners.set(connection, Some(group), self.line.index);
            }
            None => self.line.commands.wake(),
        }
    }

    fn push(&mut self, command: Command<Qp, OwnedFd>) {
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

    /// Whether the thread ended although nobody told it to.
    pub fn is_dead(&self) -> bool {
        self.thread.as_ref().is_some_and(JoinHandle::is_finished)
    }
}

impl<Qp> Pollers<Qp> for Vec<Poller<Qp>> {
    type Stream = OwnedFd;

    fn command(&mut self, port: PortId, command: Command<Qp, OwnedFd>) {
        self[port.0].command(command);
    }
}

#[cfg(test)]
mod tests {
    use smcr_engine::{ConnectionId, GroupId};

    use super::*;
    use crate::cores::Reason;

    /// A poller that sleeps is left alone unless there is something new for it: the control thread
    /// passes here each time it goes to sleep itself.
    #[test]
    fn only_a_command_wakes_a_poller() {
        let waker = Waker::new().unwrap();
        let (commands, obeyed) = mailbox::<Command<(), OwnedFd>>(1, waker.clone());
        let (_, never) = mailbox(1, waker.clone());
        let seat = Seat {
            index: 0,
            waker: waker.clone(),
            obey: never,
            neighbours: vec![commands],
            owners: Arc::new(Owners::new()),
        };
        let (_, reports) = mailbox(1, waker.clone());
        let shared = (Arc::new(Counters::default()), Arc::new(Gauges::new()));
        let thread = std::thread::spawn(|| {});
        let unpinned = Assignment::unpinned(Reason::Off);
        let mut poller = Poller::new(unpinned, shared, reports, seat.line(), thread);
        let is_woken = || rustix::io::read(waker.descriptor(), &mut [0; 8]).is_ok();

        waker.about_to_sleep();
        assert!(poller.catch_up() && !is_woken());
        let connection = ConnectionId { slot: 0, generation: 1 };
        poller.command(Command::Expect { connection, group: GroupId(1) });
        assert!(!is_woken(), "the message that matters will wake it");
        poller.command(Command::Forget { connection });
        assert!(is_woken());
        waker.about_to_sleep();
        assert!(!poller.catch_up() && !is_woken(), "the queue is full still");
        assert!(matches!(obeyed.receive(), Some(Command::Expect { .. })));
        assert!(poller.catch_up() && is_woken());
        assert!(matches!(obeyed.receive(), Some(Command::Forget { .. })));
    }
}
