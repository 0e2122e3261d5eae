//! A group begins: a queue pair for the Accept or the Confirm, and its machine once the peer's end
//! is known.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use smcr_engine::{Command, LinkId};
use smcr_proto::handshake::Agreement;
use smcr_proto::limits::RETRY_LINK;
use smcr_proto::link_group::{LinkGroup, Role, Setup, UNNUMBERED, Version};
use smcr_proto::wire::clc::Offer;
use smcr_proto::{Gid, Instant, LinkNumber, LinkUserId, PeerId};
use smcr_rnic::{ConnectError, Exhausted, Opening, QpAddress, Rnic};

use super::Groups;
use super::group::{Group, GroupId, Link, LinkState, Peer, Phase};
use super::ports::{Pollers, PortId, QpOf};
use super::stock::Stock;

impl<N: Rnic, P: Pollers<QpOf<N>>> Groups<N, P> {
    /// Creates a group with a queue pair that knows its own address only.
    ///
    /// # Errors
    ///
    /// [`Exhausted`], with nothing changed.
    pub fn open(
        &mut self,
        now: Instant,
        port: PortId,
        role: Role,
        peer: Peer,
    ) -> Result<GroupId, Exhausted> {
        self.note_claim(now, role, peer);
        if role == Role::Server {
            self.limit_spare(now, peer.source)?;
        }
        let rnic = self.ports[port.0].for_link()?;
        // RFC 7609 2.1-6
        let domain = rnic.open_domain()?;
        let mut opening = match rnic.open_for(domain, peer.messages()) {
            Ok(opening) => opening,
            Err(exhausted) => {
                rnic.close_domain(domain);
                return Err(exhausted);
            }
        };
        opening.fit_path_to(peer.gid);
        self.links_made += 1;
        self.groups_made += 1;
        let id = GroupId(self.groups_made);
        let link = Link {
            id: LinkId(self.links_made),
            number: UNNUMBERED,
            port,
            ours: opening.address(),
            theirs: None,
            state: LinkState::Opening(opening),
            confirmed: false,
            activity: Arc::default(),
            heard: now,
        };
        // RFC 7609 3.5.3-5
        let stock = Stock::new(self.settings.rmb_elements);
        let group = Group {
            role,
            peer,
            agreement: Agreement::V1,
            phase: Phase::Opening,
            admitted: Vec::new(),
            disowned: false,
            established: false,
            confirm_wait: None,
            links: vec![link],
            stock,
            members: BTreeMap::new(),
            quarantine: VecDeque::new(),
            domains: BTreeMap::from([(port, domain)]),
        };
        self.note_link(LinkId(self.links_made), id, port);
        self.founded_by.entry(peer.source).or_default().push(id);
        self.groups.insert(id, group);
        Ok(id)
    }

    /// Brings the first queue pair of a group to its peer's, hands it to the poller, and starts the
    /// machine. `agreement` is what the rendezvous came to.
    ///
    /// # Errors
    ///
    /// [`ConnectError`]; the caller gives the group up.
    pub fn connect(
        &mut self,
        now: Instant,
        id: GroupId,
        offer: &Offer,
        agreement: Agreement,
    ) -> Result<(), ConnectError> {
        let group = self.groups.get_mut(&id).ok_or(ConnectError::Unreachable)?;
        group.agreement = agreement;
        // A Proposal of version 2 need not say whose it is.
        group.peer.id = offer.peer_id;
        let theirs = QpAddress {
            gid: offer.gid,
            mac: offer.mac,
            qpn: offer.qpn,
            // RFC 7609 3.5.1.4-1, A.2.4-5
            psn: offer.psn,
            mtu: offer.mtu,
        };
        let link = group.links.first_mut().ok_or(ConnectError::Unreachable)?;
        let LinkState::Opening(opening) = std::mem::replace(&mut link.state, LinkState::Retiring)
        else {
            panic!("the first link of a group connects once");
        };
        let qp = match opening.connect(theirs) {
            Ok(qp) => qp,
            Err(error) => {
                // No poller ever had it.
                let (link, port) = (link.id, link.port);
                group.links.clear();
                self.forget_link(link, port);
                return Err(error);
            }
        };
        link.state = LinkState::Polled;
        link.theirs = Some(theirs);
        let (role, name, port, ours) = (group.role, link.id, link.port, link.ours);
        let confirm_wait = group.confirm_wait;
        let setup = self.setup(role, offer.peer_id, agreement, (name, port), (ours, theirs));
        let setup = Setup { confirm_wait, ..setup };
        let Some(group) = self.groups.get_mut(&id) else { return Ok(()) };
        let Some(link) = group.links.first_mut() else { return Ok(()) };
        let machine = match group.role {
            Role::Server => {
                link.number = LinkNumber(1);
                LinkGroup::new_server(now, setup, link.number)
            }
            Role::Client => LinkGroup::new_client(now, setup),
        };
        group.phase = Phase::Running(Box::new(machine));
        let activity = Arc::clone(&link.activity);
        let command = Command::AddLink { link: link.id, group: id, qp, activity };
        self.pollers.command(link.port, command);
        let (role, number) = (group.role, link.number);
        self.tell_own_rmb(now, id);
        if role == Role::Server {
            self.with_machine(now, id, |machine| machine.link_connected(now, number));
        }
        Ok(())
    }

    /// What the machine of a group is told.
    fn setup(
        &self,
        role: Role,
        peer_id: PeerId,
        agreement: Agreement,
        (link, port): (LinkId, PortId),
        (ours, theirs): (QpAddress, QpAddress),
    ) -> Setup {
        let settings = &self.settings;
        let (version, max_links) = match agreement {
            Agreement::V1 => (Version::V1, settings.max_links),
            Agreement::V2(terms) => {
                let direct = match role {
                    Role::Server => self.ports[port.0].reaches(theirs.gid),
                    Role::Client => terms.peer.is_none_or(|peer| peer.direct),
                };
                let max_connections = if terms.release > 0 { terms.max_connections } else { 0 };
                (Version::V2 { max_connections, direct }, terms.max_links)
            }
        };
        Setup {
            peer_id,
            version,
            ours,
            theirs,
            user_id: LinkUserId(link.0),
            eye_catcher: false,
            keepalive: settings.keepalive,
            idle_wait: match role {
                Role::Server => settings.idle_group_server,
                Role::Client => settings.idle_group_client,
            },
            max_links,
            retry_link: RETRY_LINK,
            confirm_wait: None,
        }
    }

    /// Whether packets of a group to this port of its peer need no router.
    pub fn is_direct(&self, id: GroupId, peer: Gid) -> bool {
        let link = self.groups.get(&id).and_then(|group| group.links.first());
        link.is_some_and(|link| self.ports[link.port.0].reaches(peer))
    }

    /// The addresses of all ports over which a group may have links: the one of its first link
    /// first.
    pub fn addresses(&self, id: GroupId) -> Vec<Gid> {
        let Some(first) = self.groups.get(&id).and_then(|group| group.links.first()) else {
            return Vec::new();
        };
        let first = &self.ports[first.port.0];
        let fits = |port: &&super::Port<N>| port.is_up() && port.lan == first.lan;
        let others = self.ports.iter().filter(fits);
        let mut gids = Vec::new();
        for (gid, _) in std::iter::once(first).chain(others).filter_map(super::Port::address) {
            if !gids.contains(&gid) {
                gids.push(gid);
            }
        }
        gids
    }
}
