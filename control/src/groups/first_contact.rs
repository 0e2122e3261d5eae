//! A group begins: a queue pair for the Accept or the Confirm, and its machine once the peer's end
//! is known.

use std::sync::Arc;
use std::time::Duration;

use smcr_engine::Command;
use smcr_proto::handshake::Agreement;
use smcr_proto::limits::RETRY_LINK;
use smcr_proto::link_group::{LinkGroup, Role, Setup, UNNUMBERED, Version};
use smcr_proto::wire::clc::Offer;
use smcr_proto::{Gid, Instant, LinkNumber, LinkUserId};
use smcr_rnic::{ConnectError, Exhausted, Opening, QpAddress, Rnic};

use super::Groups;
use super::group::{Group, GroupId, Link, Peer, Phase};
use super::group_mut::GroupMut;
use super::ports::{Pollers, Port, PortId, QpOf};
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
        let rnic = self.shared.ports[port.0].for_link()?;
        // RFC 7609 2.1 #6: one remote peer per RMB
        let domain = rnic.open_domain()?;
        let mut opening = match rnic.open_for(domain, peer.messages()) {
            Ok(opening) => opening,
            Err(exhausted) => {
                rnic.close_domain(domain);
                return Err(exhausted);
            }
        };
        let backing = rnic.backing();
        opening.fit_path_to(peer.gid);
        self.groups_made += 1;
        let id = GroupId(self.groups_made);
        let name = self.shared.name_link(id, port);
        let link = Link::new(now, name, UNNUMBERED, port, opening.address(), opening);
        // RFC 7609 3.5.3 #5: no RMB in two groups
        // All RNICs of a LAN are alike in this.
        let stock = Stock::new(self.shared.settings.rmb_elements).backed_by(backing);
        self.founded_by.entry(peer.source).or_default().push(id);
        self.groups.insert(id, Group::new(id, role, peer, link, domain, stock));
        Ok(id)
    }

    /// Brings the first queue pair of a group to its peer's, hands it to the poller, and starts the
    /// machine. `agreement` is what the rendezvous came to. `within` says how long the link may
    /// take to be confirmed, where there is reason to doubt that it will be.
    ///
    /// # Errors
    ///
    /// [`ConnectError`] when the peer cannot be reached; the caller gives the group up.
    ///
    /// # Panics
    ///
    /// If it was connected before.
    pub fn connect(
        &mut self,
        now: Instant,
        id: GroupId,
        offer: &Offer,
        agreement: Agreement,
        within: Option<Duration>,
    ) -> Result<(), ConnectError> {
        let connected = self.input(now, id, |group| group.connect(now, offer, agreement, within));
        // The group ended together with the RNIC that its first link was to use.
        connected.unwrap_or(Err(ConnectError::Unreachable))
    }

    /// Whether packets of a group to this port of its peer need no router.
    pub fn is_direct(&self, id: GroupId, peer: Gid) -> bool {
        let link = self.at(id).and_then(|group| group.links.first());
        link.is_some_and(|link| self.ports()[link.port.0].reaches(peer))
    }

    /// The addresses of all ports over which a group may have links: the one of its first link
    /// first.
    pub fn addresses(&self, id: GroupId) -> Vec<Gid> {
        // A group that is being given up may have lost its only link.
        let Some(first) = self.at(id).and_then(|group| group.links.first()) else {
            return Vec::new();
        };
        let fits = |(index, port): &(usize, &Port<N>)| {
            port.is_up() && self.shared.share_lan(PortId(*index), first.port)
        };
        let others = self.ports().iter().enumerate().filter(fits).map(|(_, port)| port);
        let first = &self.ports()[first.port.0];
        let mut gids = Vec::new();
        for (gid, _) in std::iter::once(first).chain(others).filter_map(Port::address) {
            if !gids.contains(&gid) {
                gids.push(gid);
            }
        }
        gids
    }
}

impl<N: Rnic, P: Pollers<QpOf<N>>> GroupMut<'_, N, P> {
    fn connect(
        &mut self,
        now: Instant,
        offer: &Offer,
        agreement: Agreement,
        within: Option<Duration>,
    ) -> Result<(), ConnectError> {
        match self.group.phase {
            Phase::Opening => {}
            Phase::Running(_) => panic!("the first link of a group connects once"),
            // The RNIC that it was to stand on went out of use.
            Phase::Ending => return Err(ConnectError::Unreachable),
        }
        let group = &mut *self.group;
        group.agreement = agreement;
        // A Proposal of version 2 need not say whose it is.
        group.peer.id = offer.peer_id;
        let theirs = QpAddress {
            gid: offer.gid,
            mac: offer.mac,
            qpn: offer.qpn,
            // RFC 7609 3.5.1.4 #1: connect server QP upon Confirm
            // RFC 7609 A.2.4 #5: expect packets from Confirm's PSN
            psn: offer.psn,
            mtu: offer.mtu,
        };
        let link = group.links.first_mut().expect("a group that opens has its first link");
        let (name, port) = (link.id, link.port);
        let qp = match link.connect(theirs, &group.agreement) {
            Ok(qp) => qp,
            Err(error) => {
                // No poller ever had it.
                group.links.clear();
                self.shared.forget_link(name, port);
                return Err(error);
            }
        };
        let activity = Arc::clone(&link.activity);
        if group.role == Role::Server {
            link.number = LinkNumber(1);
        }
        let number = link.number;
        let setup = self.setup(theirs, within);
        let machine = match self.group.role {
            Role::Server => LinkGroup::new_server(now, setup, number),
            Role::Client => LinkGroup::new_client(now, setup),
        };
        self.group.phase = Phase::Running(Box::new(machine));
        self.command(port, Command::AddLink { link: name, group: self.group.id, qp, activity });
        self.tell_own_rmb();
        self.tell_members(now);
        if self.group.role == Role::Server {
            self.feed(|machine| machine.link_connected(now, number));
        }
        Ok(())
    }

    /// What the machine is told when it starts.
    fn setup(&self, theirs: QpAddress, confirm_wait: Option<Duration>) -> Setup {
        let (group, settings) = (&*self.group, &self.shared.settings);
        let link = group.links.first().expect("it was just connected");
        let (version, max_links) = match group.agreement {
            Agreement::V1 => (Version::V1, settings.max_links),
            Agreement::V2(terms) => {
                let direct = match group.role {
                    Role::Server => self.shared.ports[link.port.0].reaches(theirs.gid),
                    Role::Client => terms.peer.is_none_or(|peer| peer.direct),
                };
                let max_connections = if terms.release > 0 { terms.max_connections } else { 0 };
                (Version::V2 { max_connections, direct }, terms.max_links)
            }
        };
        Setup {
            peer_id: group.peer.id,
            version,
            ours: link.ours,
            theirs,
            user_id: LinkUserId(link.id.0),
            eye_catcher: false,
            keepalive: settings.keepalive,
            idle_wait: match group.role {
                Role::Server => settings.idle_group_server,
                Role::Client => settings.idle_group_client,
            },
            max_links,
            retry_link: RETRY_LINK,
            confirm_wait,
        }
    }
}
