//! The pollers as the control thread sees them, and which slot a connection gets.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use smcr_engine::counters::Counters;
use smcr_engine::gauges::Gauges;
use smcr_engine::limits::CONNECTIONS_MAX;
use smcr_engine::mailbox::{Receiver, Sender};
use smcr_engine::{Command, ConnectionId, Report};

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
    slots: Slots,
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
            slots: Slots::new(),
            thread: Some(thread),
        }
    }

    /// Says something; it arrives in order, and wakes the poller.
    pub fn command(&mut self, command: Command<Qp, OwnedFd>) {
        if !self.delayed.is_empty() {
            self.delayed.push_back(command);
        } else if let Err(command) = self.commands.push(command) {
            self.delayed.push_back(command);
        }
        self.commands.wake();
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

    /// A slot for a new connection.
    pub fn take_slot(&mut self) -> Option<ConnectionId> {
        self.slots.take()
    }

    /// The connection in this slot is over.
    pub fn free_slot(&mut self, connection: ConnectionId) {
        self.slots.free(connection);
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

/// The slots of one poller, and how often each was used.
#[derive(Debug)]
struct Slots {
    /// Oldest first, so that a token comes back as late as possible.
    free: VecDeque<ConnectionId>,
}

impl Slots {
    fn new() -> Self {
        let slot = |slot| u16::try_from(slot).expect("CONNECTIONS_MAX fits");
        let free =
            (0..CONNECTIONS_MAX).map(|index| ConnectionId { slot: slot(index), generation: 1 });
        Self { free: free.collect() }
    }

    fn take(&mut self) -> Option<ConnectionId> {
        self.free.pop_front()
    }

    fn free(&mut self, connection: ConnectionId) {
        // Zero is left out, so that no token is zero.
        let generation = connection.generation.checked_add(1).unwrap_or(1);
        self.free.push_back(ConnectionId { generation, ..connection });
        assert!(self.free.len() <= CONNECTIONS_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_never_used_twice_in_a_row_and_never_zero() {
        let mut slots = Slots::new();
        let first = slots.take().unwrap();
        assert_ne!(first.token().0, 0);
        slots.free(first);
        for _ in 1..CONNECTIONS_MAX {
            let other = slots.take().unwrap();
            assert_ne!(other.slot, first.slot);
        }
        let again = slots.take().unwrap();
        assert_eq!((again.slot, again.generation), (first.slot, 2));
        assert!(slots.take().is_none());
        slots.free(ConnectionId { slot: 0, generation: u16::MAX });
        assert_eq!(slots.take().unwrap().generation, 1);
    }

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
        let connection = poller.take_slot().unwrap();
        poller.command(Command::Expect { connection });
        poller.command(Command::Forget { connection });
        assert!(is_woken());
        waker.about_to_sleep();
        assert!(!poller.catch_up() && !is_woken(), "the queue is full still");
        assert!(matches!(obeyed.receive(), Some(Command::Expect { .. })));
        assert!(poller.catch_up() && is_woken());
        assert!(matches!(obeyed.receive(), Some(Command::Forget { .. })));
    }
}
