//! What pollers say of links, and what the machine of a group demands.

use smcr_engine::{Command, LinkId, LlcBytes};
use smcr_proto::link_group::{Action, LinkGroup};
use smcr_proto::wire::llc::v2::LEN_MAX as LLC_MAX;
use smcr_proto::{Instant, LinkNumber};
use smcr_rnic::Rnic;

use super::group::GroupId;
use super::ports::{Pollers, QpOf};
use super::{Event, Groups};

impl<N: Rnic, P: Pollers<QpOf<N>>> Groups<N, P> {
    /// Takes in an LLC message.
    pub fn llc_received(&mut self, now: Instant, link: LinkId, message: &[u8]) {
        let Some((id, number)) = self.locate(link) else { return };
        tracing::trace!(group = id.0, number = number.0, llc = ?message, "received");
        let mut heard = Ok(());
        self.with_machine(now, id, |machine| {
            heard = machine.handle_bytes(now, number, message);
        });
        if let Err(offence) = heard
            && let Some(left_out) = self.offences.llc.pass(now)
        {
            tracing::warn!(group = id.0, ?offence, left_out, "the peer broke the LLC protocol");
        }
    }

    /// The queue pair of a link broke.
    pub fn link_broke(&mut self, now: Instant, link: LinkId, cause: smcr_rnic::Cause) {
        let Some((id, number)) = self.locate(link) else { return };
        tracing::warn!(group = id.0, link = link.0, ?cause, "the queue pair of a link broke");
        self.with_machine(now, id, |machine| machine.link_broke(now, number));
    }

    /// The poller has given up the queue pair of a link.
    pub fn link_retired(&mut self, now: Instant, link: LinkId) {
        let Some((id, _)) = self.locate(link) else { return };
        self.drop_link(id, link);
        self.bury(now, id);
    }

    /// Lets `input` act on the machine of a group, and does what the machine then demands.
    pub(super) fn with_machine(
        &mut self,
        now: Instant,
        id: GroupId,
        input: impl FnOnce(&mut LinkGroup),
    ) {
        if let Some(machine) = self.machine_of(id) {
            input(machine);
            while let Some(action) = self.machine_of(id).and_then(LinkGroup::poll_action) {
                self.act(now, id, action);
            }
        }
        self.reschedule(id);
    }

    fn machine_of(&mut self, id: GroupId) -> Option<&mut LinkGroup> {
        self.groups.get_mut(&id)?.machine_mut()
    }

    fn act(&mut self, now: Instant, id: GroupId, action: Action) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        match action {
            Action::Send(number, llc) => {
                tracing::trace!(group = id.0, number = number.0, ?llc, "sent");
                if let Some(link) = group.numbered(number) {
                    let (link, port) = (link.id, link.port);
                    let mut bytes = [0; LLC_MAX];
                    let Some(machine) = group.machine() else { return };
                    let message = LlcBytes::new(machine.encode(number, &llc, &mut bytes));
                    self.pollers.command(port, Command::SendLlc { link, message });
                }
            }
            Action::LinkNumbered(number) => {
                if let Some(link) = group.links.first_mut() {
                    link.number = number;
                }
            }
            Action::LinkConfirmed(number) => self.link_confirmed(id, number),
            Action::OpenLink { number, peer } => self.open_link(now, id, number, peer),
            Action::ConnectLink { number, theirs } => self.connect_link(now, id, number, theirs),
            Action::VacateLink(number) => self.vacate_link(now, id, number),
            Action::LinkFailed(number, cause) => {
                let is_first = group.links.first().is_some_and(|link| link.number == number);
                if !group.established && is_first {
                    tracing::info!(group = id.0, ?cause, "the link of a first contact is down");
                    let committed =
                        group.machine().is_some_and(|machine| !machine.may_decline(now));
                    self.events.push_back(Event::FirstContactFailed { group: id, committed });
                }
                self.link_failed(id, number, cause);
            }
            Action::RmbConfirmed(index) => self.rmb_confirmed(id, index),
            Action::RmbRefused(index) | Action::RmbDeleted(index) => self.rmb_gone(id, index),
            Action::RkeysDeleted(_) => self.abort_homeless(id),
            Action::Terminate(cause) => self.end(now, id, cause),
        }
    }

    /// Resets the connections that write to an RMB that the peer no longer has: a peer that
    /// withdraws what is in use has given them up.
    fn abort_homeless(&mut self, id: GroupId) {
        let Some(group) = self.groups.get(&id) else { return };
        let Some(machine) = group.machine() else { return };
        let homeless = |member: &super::Member| {
            let number = group.link(member.link).map(|link| link.number);
            let rkey = member.peer.map(|peer| peer.rkey);
            number.zip(rkey).is_some_and(|(on, rkey)| machine.peer_rmb(on, rkey, on).is_none())
        };
        let homeless: Vec<_> = group
            .members
            .iter()
            .filter(|(_, member)| homeless(member))
            .map(|(id, _)| *id)
            .collect();
        for connection in homeless {
            tracing::warn!(group = id.0, slot = connection.slot, "reset: its RMB was withdrawn");
            self.abort(connection);
        }
    }

    /// A link carries connections from now on.
    fn link_confirmed(&mut self, id: GroupId, number: LinkNumber) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        if let Some(name) = group.numbered(number).map(|link| link.id)
            && let Some(link) = group.link_mut(name)
        {
            link.confirmed = true;
        }
        if std::mem::replace(&mut group.established, true) {
            tracing::info!(group = id.0, number = number.0, "another link is up");
            self.rebalance(id);
            return;
        }
        tracing::info!(
            group = id.0,
            role = ?group.role,
            peer = %group.peer.id,
            gid = %group.peer.gid,
            "link group established"
        );
        self.events.push_back(Event::Established(id));
    }

    /// The group of a link that was not given up, and the link's number in it.
    pub(super) fn locate(&self, link: LinkId) -> Option<(GroupId, LinkNumber)> {
        let id = *self.group_of_link.get(&link)?;
        Some((id, self.groups.get(&id)?.link(link)?.number))
    }
}
