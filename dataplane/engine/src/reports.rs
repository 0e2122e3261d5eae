//! Reports to the control thread.

use std::collections::VecDeque;

use crate::handoff::Report;
use crate::mailbox::Sender;

/// The way to the control thread, which may be behind.
#[derive(Debug)]
pub(crate) struct Reports<Stream> {
    queue: Sender<Report<Stream>>,
    /// Reports that found the queue full. Bounded by what the poller has to report about.
    delayed: VecDeque<Report<Stream>>,
    /// Something was put into the queue, and the control thread may sleep.
    wakes: bool,
}

impl<Stream> Reports<Stream> {
    pub(crate) fn new(queue: Sender<Report<Stream>>) -> Self {
        Self { queue, delayed: VecDeque::new(), wakes: false }
    }

    /// Tells the control thread, behind everything that was told before. Returns whether there was
    /// room so far, and is not any more.
    pub(crate) fn tell(&mut self, report: Report<Stream>) -> bool {
        self.wakes = true;
        if !self.delayed.is_empty() {
            self.delayed.push_back(report);
            return false;
        }
        match self.queue.push(report) {
            Ok(()) => false,
            Err(report) => {
                self.delayed.push_back(report);
                true
            }
        }
    }

    /// Whether some wait for room.
    pub(crate) fn are_delayed(&self) -> bool {
        !self.delayed.is_empty()
    }

    /// Tells what had to wait. Returns whether anything could be told.
    pub(crate) fn retry(&mut self) -> bool {
        let mut moved = false;
        while let Some(report) = self.delayed.pop_front() {
            if let Err(report) = self.queue.push(report) {
                self.delayed.push_front(report);
                break;
            }
            self.wakes = true;
            moved = true;
        }
        moved
    }

    /// Wakes the control thread if it was told something.
    pub(crate) fn wake(&mut self) {
        if std::mem::take(&mut self.wakes) {
            self.queue.wake();
        }
    }
}
