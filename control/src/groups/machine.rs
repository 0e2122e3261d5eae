//! The machine of a group: what pollers tell it of links, and what it demands.
//!
//! ```text
//!   input ─► machine ─► action ─► perform ─┬─► pollers, RNICs, events
//!               ▲                          │
//!               └───── ActionOutcome ◄─────┘
//! ```
//! [`run`](GroupMut::run) is the one loop around this, and turns once per input.

use smcr_engine::{Command, LinkId, LlcBytes};
use smcr_proto::link::Cause;
use smcr_proto::link_group::{Action, LinkGroup, NoQueuePair, RmbIndex};
use smcr_proto::wire::llc::v2::LEN_MAX as LLC_MAX;
use smcr_proto::wire::llc::{DeleteReason, Llc};
use smcr_proto::{Instant, LinkNumber, LinkUserId, QpAddress, Rkey};
use smcr_rnic::Rnic;

use super::Groups;
use super::group::GroupId;
use super::group_mut::GroupMut;
use super::ports::{Pollers, QpOf};
use super::shared::Event;

/// What the machine is told of an action that it asked for.
#[derive(Debug)]
pub(super) enum ActionOutcome {
    /// There is a queue pair for a further link.
    Opened {
        number: LinkNumber,
        ours: QpAddress,
        user_id: LinkUserId,
        /// Our RMBs, as the peer reaches them by this link.
        keys: Vec<(RmbIndex, Rkey, u64)>,
    },
    /// There is none.
    Refused(LinkNumber, NoQueuePair),
    /// The queue pair of a further link is in RTS, and its poller has it.
    Connected(LinkNumber),
    /// The queue pair of a further link is gone.
    Unreachable(LinkNumber),
    /// No connection uses the link.
    Vacated(LinkNumber),
}

impl ActionOutcome {
    fn tell(self, now: Instant, machine: &mut LinkGroup) {
        match self {
            Self::Opened { number, ours, user_id, keys } => {
                machine.link_opened(now, number, ours, user_id, &keys);
            }
            Self::Refused(number, refusal) => machine.link_refused(now, number, refusal),
            Self::Connected(number) => machine.link_connected(now, number),
            Self::Unreachable(number) => machine.link_unreachable(now, number),
            Self::Vacated(number) => machine.link_vacated(now, number),
        }
    }
}

impl<N: Rnic, P: Pollers<QpOf<N>>> Groups<N, P> {
    /// Takes in an LLC message.
    pub fn llc_received(&mut self, now: Instant, link: LinkId, message: &[u8]) {
        // A late report: the link has been given up since.
        let Some((id, number)) = self.locate(link) else { return };
        tracing::trace!(group = id.0, number = number.0, llc = ?message, "received");
        self.input(now, id, |group| {
            let mut heard = Ok(());
            group.feed(|machine| heard = machine.handle_bytes(now, number, message));
            group.renew_moves();
            if let Err(offence) = heard
                && let Some(left_out) = group.shared.offences.llc.pass(now)
            {
                tracing::warn!(group = id.0, ?offence, left_out, "the peer broke the LLC protocol");
            }
        });
    }

    /// The queue pair of a link broke.
    pub fn link_broke(&mut self, now: Instant, link: LinkId, cause: smcr_rnic::QpError) {
        // A late report, as above.
        let Some((id, number)) = self.locate(link) else { return };
        tracing::warn!(group = id.0, link = link.0, ?cause, "the queue pair of a link broke");
        self.input(now, id, |group| group.feed(|machine| machine.link_broke(now, number)));
    }

    /// The poller has given up the queue pair of a link.
    pub fn link_retired(&mut self, now: Instant, link: LinkId) {
        let (id, _) = self.locate(link).expect("a link is known until its queue pair is gone");
        self.input(now, id, |group| group.drop_link(link));
    }

    /// Nothing is on this link any more.
    pub fn link_vacated(&mut self, now: Instant, link: LinkId) {
        // A late report, as above.
        let Some((id, number)) = self.locate(link) else { return };
        self.input(now, id, |group| {
            if group.note_vacated(link) {
                group.feed(|machine| machine.link_vacated(now, number));
            }
        });
    }

    /// The group of a link whose queue pair is not gone, and the link's number in it. The machine
    /// ignores what is said of a link that has lost its number.
    pub(super) fn locate(&self, link: LinkId) -> Option<(GroupId, LinkNumber)> {
        let id = self.shared.group_of_link(link)?;
        let group = self.at(id).expect("a group outlives its links");
        Some((id, group.link(link).expect("a link is forgotten when it leaves its group").number))
    }
}

impl<N: Rnic, P: Pollers<QpOf<N>>> GroupMut<'_, N, P> {
    /// Does what the machine demands, until it demands nothing more.
    ///
    /// Nothing else takes actions from a machine. What an action comes to is an [`ActionOutcome`],
    /// which the machine is told before the next action is taken.
    pub(super) fn run(&mut self, now: Instant) {
        while let Some(action) = self.group.machine_mut().and_then(LinkGroup::poll_action) {
            if let Some(outcome) = self.perform(now, action) {
                let machine = self.group.machine_mut();
                let machine = machine.expect("no action that has an outcome ends the group");
                outcome.tell(now, machine);
            }
        }
    }

    fn perform(&mut self, now: Instant, action: Action) -> Option<ActionOutcome> {
        match action {
            Action::OpenLink { number, peer } => return Some(self.open_link(now, number, peer)),
            Action::ConnectLink { number, theirs } => {
                return Some(self.connect_link(number, theirs));
            }
            Action::VacateLink(number) => return self.vacate_link(number),
            Action::Send(number, llc) => self.send(number, &llc),
            Action::LinkNumbered(number) => {
                let first = self.group.links.first_mut();
                first.expect("the link is there on which its number came").number = number;
            }
            Action::LinkConfirmed(number) => self.link_confirmed(now, number),
            Action::LinkProven(number) => self.link_proven(now, number),
            Action::LinkFailed(number, cause) => self.link_failed(now, number, cause),
            Action::RmbConfirmed(index) => self.rmb_confirmed(index),
            Action::RmbRefused(index) | Action::RmbDeleted(index) => self.rmb_gone(index),
            Action::RkeysDeleted(_) => self.abort_where_rkeys_are_gone(),
            Action::Terminate(cause) => self.end(cause),
        }
        None
    }

    fn send(&mut self, number: LinkNumber, llc: &Llc) {
        tracing::trace!(group = self.group.id.0, number = number.0, ?llc, "sent");
        // The machine may have wanted to say something on a link that has failed since.
        let Some(link) = self.group.numbered(number) else { return };
        let (link, port) = (link.id, link.port);
        let mut bytes = [0; LLC_MAX];
        let machine = self.group.machine().expect("it has just asked for this");
        let message = LlcBytes::new(machine.encode(number, llc, &mut bytes));
        self.command(port, Command::SendLlc { link, message });
    }

    /// A link carries connections from now on.
    fn link_confirmed(&mut self, now: Instant, number: LinkNumber) {
        // It may have failed since the machine said so.
        if let Some(link) = self.group.numbered_mut(number) {
            link.confirmed = true;
        }
        let group = &mut *self.group;
        if std::mem::replace(&mut group.established, true) {
            tracing::info!(group = group.id.0, number = number.0, "another link is up");
            if !self.delete_unwanted(now, number) {
                self.rebalance();
            }
            return;
        }
        tracing::info!(
            group = group.id.0,
            role = ?group.role,
            peer = %group.peer.id,
            gid = %group.peer.gid,
            "link group established"
        );
        self.shared.events.push_back(Event::Established(group.id));
        self.delete_unwanted(now, number);
    }

    /// Deletes a link in order if the operator has taken its port out of use while it was being
    /// confirmed: until then, the machine deletes no link in order. Returns whether that is so.
    ///
    /// A port that the configuration has no more is left alone. Its links go when others are up.
    fn delete_unwanted(&mut self, now: Instant, number: LinkNumber) -> bool {
        let port = self.group.numbered(number).map(|link| &self.shared.ports[link.port.0]);
        let unwanted = port.is_some_and(|port| !port.wanted && !port.retired);
        if unwanted {
            self.feed(|machine| machine.delete_link(now, number, DeleteReason::OPERATOR, true));
        }
        unwanted
    }

    /// The peer has answered on a link. The acknowledgement of the question may come later than the
    /// answer, which shares a packet with others perhaps.
    fn link_proven(&self, now: Instant, number: LinkNumber) {
        // It may have failed since, as above.
        if let Some(link) = self.group.numbered(number) {
            link.activity.prove(now);
        }
    }

    /// A link is down, or will never be up.
    fn link_failed(&mut self, now: Instant, number: LinkNumber, cause: Cause) {
        let group = &*self.group;
        let is_first = group.links.first().is_some_and(|link| link.number == number);
        if !group.established && is_first {
            tracing::info!(group = group.id.0, ?cause, "the link of a first contact is down");
            let machine = group.machine().expect("it has just said so");
            let committed = !machine.may_decline(now);
            let failed = Event::FirstContactFailed { group: group.id, committed };
            self.shared.events.push_back(failed);
        }
        self.leave_link(number, cause);
    }

    /// Resets the connections that write to an RMB whose rkeys the peer has deleted: a peer that
    /// withdraws what is in use has given them up.
    fn abort_where_rkeys_are_gone(&mut self) {
        let group = &*self.group;
        let gone = group.members.iter().filter(|(_, member)| !group.has_rmb_of(member));
        let gone: Vec<_> = gone.map(|(connection, _)| *connection).collect();
        for connection in gone {
            let (group, slot) = (self.group.id.0, connection.slot);
            tracing::warn!(group, slot, "reset: the peer has withdrawn the RMB that it writes to");
            self.abort(connection);
        }
    }
}
