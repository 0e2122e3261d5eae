//! Link groups: the machine of `smcr-proto`, and what it stands on: queue pairs and memory.
//!
//! A group lives as long as its machine says. When that terminates, the connections on it are
//! failed, the queue pair is retired, and once everything is home its memory is withdrawn.

use std::sync::Arc;
use std::time::Duration;

use smcr_engine::handoff::Activity;
use smcr_engine::{Command, LinkId};
use smcr_memory::Rmbe;
use smcr_proto::limits::RETRY_LINK;
use smcr_proto::link::{Cause, Keepalive};
use smcr_proto::link_group::{self, LinkGroup, Refusal, Role, Setup, UNNUMBERED};
use smcr_proto::wire::clc::Offer;
use smcr_proto::wire::llc::{DeleteReason, Llc};
use smcr_proto::{Gid, Instant, LinkNumber, LinkUserId, MacAddress, PeerId, RmbeSize};
use smcr_rnic::{Domain, Exhausted, Message, Opening, QpAddress, Rnic};

use crate::buffers::{Element, Stock};
use crate::config;
use crate::gateway::Gateway;
use crate::reactor::Key;
use crate::sessions::{GroupId, PortId};

/// One link group.
pub struct Group<O> {
    /// The RNIC and poller it lives on.
    pub port: PortId,
    /// Our role in its first contact.
    pub role: Role,
    /// The peer.
    pub peer: Peer,
    /// Where it is in its life.
    pub phase: Phase<O>,
    /// Its one link.
    pub link: LinkId,
    /// The link's number, once it has one.
    pub number: LinkNumber,
    /// Our end of the link.
    pub address: QpAddress,
    /// When the link last brought something.
    pub activity: Arc<Activity>,
    /// Its RMBs.
    pub stock: Stock,
    /// Connections and rendezvous that hold an element.
    pub users: u32,
    /// The rendezvous of the first contact.
    pub founder: Option<Key>,
    /// Rendezvous that wait for the outcome of the first contact.
    pub waiting: Vec<Key>,
    domain: Domain,
    /// What the machine was last told of `activity`.
    heard: Instant,
    /// The poller has given the queue pair up.
    retired: bool,
}

/// Who is at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The peer.
    pub id: PeerId,
    /// Its port.
    pub gid: Gid,
    /// Its port.
    pub mac: MacAddress,
}

impl Peer {
    /// Who made this offer.
    pub fn of(offer: &Offer) -> Self {
        Self { id: offer.peer_id, gid: offer.gid, mac: offer.mac }
    }
}

/// Where a group is in its life.
pub enum Phase<O> {
    /// The server's queue pair waits for the address of the client's.
    Opening(Option<O>),
    /// The machine runs. The peer's queue pair is this one.
    Running(Box<LinkGroup>, QpAddress),
    /// Over; elements or the queue pair are still out.
    Ending,
}

impl<O> Group<O> {
    /// Whether connections may join.
    pub fn is_established(&self) -> bool {
        match &self.phase {
            Phase::Running(machine, _) => machine.is_established(),
            Phase::Opening(_) | Phase::Ending => false,
        }
    }

    /// Whether its first contact is going on.
    pub fn is_founding(&self) -> bool {
        match &self.phase {
            Phase::Opening(_) => true,
            Phase::Running(machine, _) => !machine.is_established() && !machine.is_terminated(),
            Phase::Ending => false,
        }
    }
}

impl<N: Rnic> Gateway<N> {
    /// Creates a group with a queue pair that knows its own address only.
    ///
    /// # Errors
    ///
    /// [`Exhausted`], with nothing changed.
    pub(crate) fn open_group(
        &mut self,
        now: Instant,
        port: PortId,
        role: Role,
        peer: Peer,
        founder: Key,
    ) -> Result<GroupId, Exhausted> {
        let smc = &self.config.smc;
        let size = RmbeSize::from_bytes(smc.rmbe_size).expect("the configuration was checked");
        let elements = u8::try_from(smc.rmb_elements).expect("the configuration was checked");
        let rnic = self.ports[port.0].rnic.as_mut().ok_or(Exhausted)?;
        // RFC 7609 2.1-6
        let domain = rnic.open_domain()?;
        let opening = match rnic.open(domain) {
            Ok(opening) => opening,
            Err(exhausted) => {
                rnic.close_domain(domain);
                return Err(exhausted);
            }
        };
        self.links_made += 1;
        self.groups_made += 1;
        let id = GroupId(self.groups_made);
        self.groups.insert(
            id,
            Group {
                port,
                role,
                peer,
                link: LinkId(self.links_made),
                number: UNNUMBERED,
                address: opening.address(),
                phase: Phase::Opening(Some(opening)),
                activity: Arc::default(),
                stock: Stock::new(domain, size, elements),
                users: 0,
                founder: Some(founder),
                waiting: Vec::new(),
                domain,
                heard: now,
                retired: false,
            },
        );
        Ok(id)
    }

    /// Brings the group's queue pair to its peer's, hands it to the poller, and starts the machine.
    ///
    /// # Errors
    ///
    /// [`Exhausted`] when the peer cannot be reached; the caller gives the group up.
    pub(crate) fn connect_group(
        &mut self,
        now: Instant,
        id: GroupId,
        offer: &Offer,
    ) -> Result<(), Exhausted> {
        let keepalive = keepalive(&self.config.smc);
        let idle_waits = (self.config.smc.idle_group_server, self.config.smc.idle_group_client);
        let group = self.groups.get_mut(&id).ok_or(Exhausted)?;
        let Phase::Opening(opening) = &mut group.phase else { return Err(Exhausted) };
        let address = QpAddress {
            gid: offer.gid,
            mac: offer.mac,
            qpn: offer.qpn,
            // RFC 7609 3.5.1.4-1, A.2.4-5
            psn: offer.psn,
            mtu: offer.mtu,
        };
        let qp = opening.take().ok_or(Exhausted)?.connect(address)?;
        let idle_wait = match group.role {
            Role::Server => idle_waits.0,
            Role::Client => idle_waits.1,
        };
        let setup = Setup {
            peer_id: group.peer.id,
            ours: group.address,
            theirs: address,
            user_id: LinkUserId(group.link.0),
            eye_catcher: false,
            keepalive,
            idle_wait,
            max_links: 1,
            retry_link: RETRY_LINK,
        };
        let machine = match group.role {
            Role::Server => {
                group.number = LinkNumber(1);
                LinkGroup::new_server(now, setup, group.number)
            }
            Role::Client => LinkGroup::new_client(now, setup),
        };
        group.phase = Phase::Running(Box::new(machine), address);
        let (link, activity) = (group.link, Arc::clone(&group.activity));
        self.ports[group.port.0].poller.command(Command::AddLink { link, qp, activity });
        if self.groups[&id].role == Role::Server {
            self.with_machine(now, id, |machine, number| machine.link_connected(now, number));
        }
        Ok(())
    }

    /// Notes the key of the peer's RMB, so that the peer can delete it by name later.
    pub(crate) fn learn_rkey(&mut self, id: GroupId, offer: &Offer) {
        if let Some(group) = self.groups.get_mut(&id)
            && let Phase::Running(machine, _) = &mut group.phase
            && machine.learn_rkey(group.number, offer.rkey, offer.rmb_address).is_err()
        {
            // The connection itself knows its key; only a DELETE RKEY for it will be denied.
            tracing::debug!(group = id.0, "the peer has more RMBs than can be remembered");
        }
    }

    /// Takes an element of a group.
    ///
    /// # Errors
    ///
    /// [`Exhausted`], with nothing changed.
    pub(crate) fn take_element(&mut self, now: Instant, id: GroupId) -> Result<Element, Exhausted> {
        let group = self.groups.get_mut(&id).ok_or(Exhausted)?;
        let rnic = self.ports[group.port.0].rnic.as_mut().ok_or(Exhausted)?;
        let element = group.stock.take(rnic, &mut self.rmb_budget)?;
        group.users += 1;
        self.count_users(now, id);
        Ok(element)
    }

    /// Gives an element back; the last one of a group that is over ends it.
    pub(crate) fn give_back_element(&mut self, now: Instant, id: GroupId, rmbe: Rmbe) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        group.stock.give_back(rmbe);
        group.users -= 1;
        self.count_users(now, id);
        self.bury_group(id);
    }

    fn count_users(&mut self, now: Instant, id: GroupId) {
        let users = self.groups[&id].users;
        self.with_machine(now, id, |machine, _| machine.connections_changed(now, users));
    }

    /// Takes in an LLC message.
    pub(crate) fn llc_received(&mut self, now: Instant, link: LinkId, message: &Message) {
        let Some(id) = self.group_of(link) else { return };
        tracing::trace!(group = id.0, llc = ?Llc::decode(message), "received");
        self.with_machine(now, id, |machine, number| {
            if let Err(offence) = machine.handle_bytes(now, number, message) {
                tracing::warn!(group = id.0, ?offence, "the peer broke the LLC protocol");
            }
        });
    }

    /// The queue pair of a link broke.
    pub(crate) fn link_broke(&mut self, now: Instant, link: LinkId, cause: smcr_rnic::Cause) {
        let Some(id) = self.group_of(link) else { return };
        tracing::warn!(group = id.0, link = link.0, ?cause, "the queue pair of a link broke");
        self.with_machine(now, id, |machine, number| machine.link_broke(now, number));
    }

    /// The poller has given up the queue pair of a link.
    pub(crate) fn link_retired(&mut self, link: LinkId) {
        let Some(id) = self.group_of(link) else { return };
        if let Some(group) = self.groups.get_mut(&id) {
            group.retired = true;
        }
        self.bury_group(id);
    }

    /// Somebody has reason to believe that the peer of this group is dead: ask it.
    pub(crate) fn probe_group(&mut self, now: Instant, id: GroupId) {
        self.with_machine(now, id, |machine, number| machine.probe(now, number, PROBE_WAIT));
    }

    /// Ends a group by an operator's or our own decision.
    pub(crate) fn shut_group_down(&mut self, now: Instant, id: GroupId, reason: DeleteReason) {
        self.with_machine(now, id, |machine, _| machine.shutdown(now, reason));
    }

    /// Does what is due in all groups.
    pub(crate) fn expire_groups(&mut self, now: Instant) {
        let due: Vec<GroupId> = self.groups.keys().copied().collect();
        for id in due {
            let Some(group) = self.groups.get_mut(&id) else { continue };
            // The poller only notes when something came; the machine hears of it here, where it
            // matters.
            let heard = group.activity.last();
            let news = heard > std::mem::replace(&mut group.heard, heard);
            self.with_machine(now, id, |machine, number| {
                if news {
                    machine.traffic(heard, number);
                }
                if machine.poll_timeout().is_some_and(|deadline| deadline <= now) {
                    machine.handle_timeout(now);
                }
            });
        }
    }

    /// When a group must be looked after, at the latest.
    pub(crate) fn next_group_deadline(&self) -> Option<Instant> {
        self.groups.values().filter_map(Group::next_deadline).min()
    }

    /// Lets `input` act on the machine of a group, and does what the machine then demands.
    fn with_machine(
        &mut self,
        now: Instant,
        id: GroupId,
        input: impl FnOnce(&mut LinkGroup, LinkNumber),
    ) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        let Phase::Running(machine, _) = &mut group.phase else { return };
        input(machine, group.number);
        loop {
            let Some(group) = self.groups.get_mut(&id) else { return };
            let Phase::Running(machine, _) = &mut group.phase else { return };
            let Some(action) = machine.poll_action() else { return };
            self.act_on_group(now, id, action);
        }
    }

    fn act_on_group(&mut self, now: Instant, id: GroupId, action: link_group::Action) {
        use link_group::Action as A;
        let Some(group) = self.groups.get_mut(&id) else { return };
        match action {
            A::Send(_, llc) => {
                tracing::trace!(group = id.0, ?llc, "sent");
                let command = Command::SendLlc { link: group.link, message: llc.encode() };
                self.ports[group.port.0].poller.command(command);
            }
            A::LinkNumbered(number) => group.number = number,
            A::LinkConfirmed(_) => self.first_contact_succeeded(now, id),
            A::LinkFailed(_, cause) => {
                tracing::info!(group = id.0, ?cause, "a link is down");
                self.first_contact_failed(now, id);
            }
            A::OpenLink { number, .. } => {
                self.with_machine(now, id, |machine, _| {
                    machine.link_refused(now, number, Refusal::NoPort);
                });
            }
            // Elements are reached by the keys of Accept and Confirm; on one link nothing else
            // depends on these, and no other link is ever opened.
            A::ConnectLink { .. }
            | A::VacateLink(_)
            | A::RmbConfirmed(_)
            | A::RmbRefused(_)
            | A::RmbDeleted(_)
            | A::RkeyDeleted(..) => {}
            A::Terminate(cause) => self.end_group(now, id, cause),
        }
    }

    fn first_contact_succeeded(&mut self, now: Instant, id: GroupId) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        tracing::info!(
            group = id.0,
            role = ?group.role,
            peer = %group.peer.id,
            gid = %group.peer.gid,
            "link group established"
        );
        let founder = group.founder.take();
        let waiting = std::mem::take(&mut group.waiting);
        if let Some(founder) = founder {
            self.link_confirmed(now, founder);
        }
        for key in waiting {
            self.resume(now, key);
        }
    }

    fn first_contact_failed(&mut self, now: Instant, id: GroupId) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        let committed = match &group.phase {
            Phase::Running(machine, _) => machine.is_committed(),
            Phase::Opening(_) | Phase::Ending => false,
        };
        if let Some(founder) = group.founder.take() {
            self.link_failed(now, founder, committed);
        }
    }

    /// The group is over: fails its connections and gives up its queue pair.
    pub(crate) fn end_group(&mut self, now: Instant, id: GroupId, cause: Cause) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        if matches!(group.phase, Phase::Ending) {
            return;
        }
        let was_running = matches!(group.phase, Phase::Running(..));
        tracing::info!(group = id.0, ?cause, connections = group.users, "link group ends");
        group.phase = Phase::Ending;
        let founder = group.founder.take();
        let waiting = std::mem::take(&mut group.waiting);
        let link = group.link;
        if was_running {
            let poller = &mut self.ports[group.port.0].poller;
            // RFC 7609 3.5.4-9, 3.5.4-12, 4.8.3-3
            poller.command(Command::FailConnections { link });
            poller.command(Command::RetireLink { link });
        } else {
            group.retired = true;
        }
        if let Some(founder) = founder {
            self.link_failed(now, founder, true);
        }
        for key in waiting {
            self.resume(now, key);
        }
        self.bury_group(id);
    }

    /// A group that was being founded is not wanted any more.
    pub(crate) fn give_up_group(&mut self, now: Instant, founder: Key, id: GroupId) {
        if let Some(group) = self.groups.get_mut(&id)
            && group.founder == Some(founder)
        {
            group.founder = None;
            self.end_group(now, id, Cause::DeletedByUs);
        }
    }

    /// Withdraws the memory of a group that is over, once nothing of it is in use.
    fn bury_group(&mut self, id: GroupId) {
        let Some(group) = self.groups.get(&id) else { return };
        if !matches!(group.phase, Phase::Ending) || !group.retired || group.users > 0 {
            return;
        }
        let Some(group) = self.groups.remove(&id) else { return };
        if let Some(rnic) = self.ports[group.port.0].rnic.as_mut() {
            group.stock.close(rnic, &mut self.rmb_budget);
            rnic.close_domain(group.domain);
        }
    }

    fn group_of(&self, link: LinkId) -> Option<GroupId> {
        self.groups.iter().find(|(_, group)| group.link == link).map(|(id, _)| *id)
    }
}

impl<O> Group<O> {
    fn next_deadline(&self) -> Option<Instant> {
        match &self.phase {
            Phase::Running(machine, _) => machine.poll_timeout(),
            Phase::Opening(_) | Phase::Ending => None,
        }
    }
}

fn keepalive(smc: &config::Smc) -> Keepalive {
    Keepalive { idle: Some(smc.test_link_idle), reply_wait: smc.test_link_timeout }
}

/// How long a peer that looks dead may take to show that it is not.
const PROBE_WAIT: Duration = Duration::from_millis(700);
