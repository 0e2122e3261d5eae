//! One link group while something happens to it.
//!
//! Everything that changes a group is a method of [`GroupMut`], which borrows the group and what
//! all groups share. It cannot reach `Groups`, so nothing that follows from an input can become an
//! input of its own.

use smcr_engine::Command;
use smcr_proto::Instant;
use smcr_proto::link_group::LinkGroup;
use smcr_rnic::Rnic;

use super::group::Group;
use super::ports::{Pollers, PortId, QpOf};
use super::shared::Shared;

/// A group, and what it shares with all others.
pub(super) struct GroupMut<'a, N: Rnic, P: Pollers<QpOf<N>>> {
    pub(super) group: &'a mut Group<N::Opening>,
    pub(super) shared: &'a mut Shared<N, P>,
}

impl<N: Rnic, P: Pollers<QpOf<N>>> GroupMut<'_, N, P> {
    /// Says `command` to the poller of `port`.
    pub(super) fn command(&mut self, port: PortId, command: Command<QpOf<N>, P::Stream>) {
        self.shared.pollers.command(port, command);
    }

    /// Feeds the machine, if it runs: a group whose queue pair is not connected yet has none, and
    /// one that is over has none any more. What the machine then demands is done by
    /// [`run`](Self::run), behind the input.
    pub(super) fn feed(&mut self, input: impl FnOnce(&mut LinkGroup)) {
        if let Some(machine) = self.group.machine_mut() {
            input(machine);
        }
    }

    /// Asks the peer on every link for a sign of life.
    pub(super) fn probe(&mut self, now: Instant) {
        let numbers: Vec<_> = self.group.links.iter().map(|link| link.number).collect();
        let wait = self.shared.settings.keepalive.reply_wait;
        // What came before the question is no answer to it.
        self.report_traffic();
        self.feed(|machine| {
            for number in numbers {
                machine.probe(now, number, wait);
            }
        });
    }

    /// Tells the machine which links brought something since the last time, and what time it is.
    pub(super) fn expire(&mut self, now: Instant) {
        self.report_traffic();
        self.feed(|machine| {
            if machine.poll_timeout().is_some_and(|deadline| deadline <= now) {
                machine.handle_timeout(now);
            }
        });
    }

    /// Tells the machine which links brought something since the last time.
    ///
    /// Pollers only note when something came; the machine hears of it where it matters.
    fn report_traffic(&mut self) {
        let mut heard_from = Vec::new();
        for link in &mut self.group.links {
            let heard = link.activity.last();
            if heard > std::mem::replace(&mut link.heard, heard) {
                heard_from.push((link.number, heard));
            }
        }
        self.feed(|machine| {
            for (number, heard) in heard_from {
                machine.traffic(heard, number);
            }
        });
    }

    /// Whether the group has ended and nothing of it is in use any more.
    pub(super) fn is_finished(&mut self, now: Instant) -> bool {
        if !self.group.is_over() || !self.group.links.is_empty() {
            return false;
        }
        self.lift_quarantine(now);
        self.group.is_unused()
    }
}
