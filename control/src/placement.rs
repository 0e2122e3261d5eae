//! The pollers as the control thread sees them.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use smcr_engine::counters::Counters;
use smcr_engine::gauges::Gauges;
use smcr_engine::mailbox::{Receiver, Sender};
use smcr_engine::{Command, Report};

use crate::groups::{Pollers, PortId};

/// One polling thread, from outside.
pub struct Poller<Qp> {
    /// The core it is pinned to.
    pub core: Option<usize>,
    /// What it counts.
    pub counters: Arc<Counters>,
    /// How far its connections have come.
    pub gauges: Arc<Gauges>,
    /// What it says.
    pub reports: Receiver<Report<OwnedFd>>,
    commands: Sender<Command<Qp, OwnedFd>>,
    /// Commands that found the queue full. They keep their order.
    delayed: VecDeque<Command<Qp, OwnedFd>>,
    thread: Option<JoinHandle<()>>,
}

impl<Qp> Poller<Qp> {
    /// A poller that runs on `thread`.
    pub fn new(
        core: Option<usize>,
        shared: (Arc<Counters>, Arc<Gauges>),
        reports: Receiver<Report<OwnedFd>>,
        commands: Sender<Command<Qp, OwnedFd>>,
        thread: JoinHandle<()>,
    ) -> Self {
        let (counters, gauges) = shared;
        Self {
            core,
            counters,
            gauges,
            reports,
            commands,
            delayed: VecDeque::new(),
            thread: Some(thread),
        }
    }

    /// Says something; it arrives in order, and wakes the poller.
    ///
    /// [`Command::Expect`] wakes nobody: the first message that it is about will, and the poller
    /// obeys before it looks at a message it cannot place.
    pub fn command(&mut self, command: Command<Qp, OwnedFd>) {
        let wakes = !matches!(command, Command::Expect { .. });
        self.push(command);
        if wakes {
            self.commands.wake();
        }
    }

    fn push(&mut self, command: Command<Qp, OwnedFd>) {
        if !self.delayed.is_empty() {
            self.delayed.push_back(command);
        } else if let Err(command) = self.commands.push(command) {
            self.delayed.push_back(command);
        }
    }

    /// Says what could not be said before. Returns whether all of it was.
    pub fn catch_up(&mut self) -> bool {
        let before = self.delayed.len();
        while let Some(command) = self.delayed.pop_front() {
            if let Err(command) = self.commands.push(command) {
                self.delayed.push_front(command);
                break;
            }
        }
        if self.delayed.len() < before {
            self.commands.wake();
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
    use smcr_engine::ConnectionId;

    use super::*;

    /// A poller that sleeps is left alone unless there is something new for it: the control thread
    /// passes here each time it goes to sleep itself.
    #[test]
    fn only_a_command_wakes_a_poller() {
        use smcr_engine::mailbox::{Waker, mailbox};
        let waker = Waker::new().unwrap();
        let (commands, obeyed) = mailbox::<Command<(), OwnedFd>>(1, waker.clone());
        let (_, reports) = mailbox(1, waker.clone());
        let shared = (Arc::new(Counters::default()), Arc::new(Gauges::new()));
        let thread = std::thread::spawn(|| {});
        let mut poller = Poller::new(None, shared, reports, commands, thread);
        let is_woken = || rustix::io::read(waker.descriptor(), &mut [0; 8]).is_ok();

        waker.about_to_sleep();
        assert!(poller.catch_up() && !is_woken());
        let connection = ConnectionId { slot: 0, generation: 1 };
        poller.command(Command::Expect { connection });
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
