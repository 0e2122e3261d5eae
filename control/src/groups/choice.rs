//! Which port, group and link a new connection gets (RFC 3.5.2, 3.5.3).

use std::net::IpAddr;

use smcr_engine::LinkId;
use smcr_proto::link_group::Role;
use smcr_proto::wire::clc::Offer;
use smcr_proto::{Gid, Instant, MacAddress, PeerId};
use smcr_rnic::Rnic;

use super::Groups;
use super::group::{Group, GroupId, Link, Peer};
use super::ports::{Pollers, Port, PortId, QpOf};

/// Why a server's Accept names no link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unnamed {
    /// We have no link group that it could be of: the server must clean its own up (RFC C.4).
    OutOfSync,
    /// The link was of a group whose other links are well. It has gone since, and the server will
    /// hear of that. If we said that the group is out of sync, the server would end the group with
    /// all connections on it.
    LinkGone,
    /// The link is of a group with somebody else, as far as we can tell: see `claims`.
    NotTheirs,
}

impl<N: Rnic, P: Pollers<QpOf<N>>> Groups<N, P> {
    /// Where a new connection that came by `port` can use RDMA: there, on the least busy of the
    /// pollers of its RNIC; else on another RNIC of the same physical network. `peer` is the port
    /// that it must reach, once that is known.
    pub fn usable_port(&self, port: PortId, peer: Option<Gid>) -> Option<PortId> {
        let near = self.shared.ports.get(port.0)?;
        let rank = |(index, other): (usize, &Port<N>)| {
            let reaches = peer.is_none_or(|peer| other.reaches(peer));
            let id = PortId(index);
            let fits = other.is_up() && self.shared.share_lan(id, port) && reaches;
            let elsewhere = other.address() != near.address();
            fits.then(|| (elsewhere, self.shared.load(id), id))
        };
        self.shared.ports.iter().enumerate().filter_map(rank).min().map(|(_, _, id)| id)
    }

    /// The port that shares memory with a client of this id, on the least busy poller of its RNIC.
    pub fn port_near(&self, client: PeerId) -> Option<PortId> {
        self.least_busy(|port| port.is_near(client))
    }

    /// The port that shares memory with the server's port, on the least busy poller of its RNIC.
    /// Our Proposal may have named another: the server has seen by our peer id that we are near.
    pub fn port_sharing_with(&self, server: Gid) -> Option<PortId> {
        self.least_busy(|port| port.shares_with(server))
    }

    fn least_busy(&self, fits: impl Fn(&Port<N>) -> bool) -> Option<PortId> {
        let ports = self.shared.ports.iter().enumerate().filter(|(_, port)| fits(port));
        ports.map(|(index, _)| PortId(index)).min_by_key(|id| (self.shared.load(*id), *id))
    }

    /// The port that was told to a server as this one, on the least busy poller of its RNIC; none
    /// if it has gone since, or cannot reach `peer`.
    pub fn port_at(&self, address: (Gid, MacAddress), peer: Option<Gid>) -> Option<PortId> {
        let fits = |port: &Port<N>| {
            let reaches = peer.is_none_or(|peer| port.reaches(peer));
            port.is_up() && port.address() == Some(address) && reaches
        };
        self.least_busy(fits)
    }

    /// The port that was told to a server as this one, also while it is down.
    pub fn port_named(&self, address: (Gid, MacAddress)) -> Option<PortId> {
        self.shared.ports.iter().position(|port| port.address() == Some(address)).map(PortId)
    }

    /// The group that a new connection from `peer` by `port` joins, where we are the server.
    ///
    /// None begins a new one: with a new peer, beside groups that are full, and while an RNIC has
    /// pollers that serve no group of this peer.
    pub fn joinable(&self, port: PortId, peer: Peer) -> Option<GroupId> {
        let near = self.shared.ports.get(port.0)?;
        let with_peer: Vec<_> =
            self.founded_by(peer.source).filter(|(_, it)| self.serves(it, port, peer)).collect();
        let pollers =
            self.shared.ports.iter().filter(|one| one.is_up() && one.address() == near.address());
        // RFC 7609 3.5.3 #1: allow parallel link groups
        // RFC 7609 3.5.3 #2: only server opens parallel groups
        // RFC 7609 3.5.3 #3: server treats parallel as first contact
        if with_peer.len() < pollers.count() && self.idle_poller(port, &with_peer) {
            return None;
        }
        let open = with_peer.into_iter().filter(|(_, group)| {
            // RFC 7609 2 #4: use existing links for later connections
            // RFC 7609 2.2.4 #7: recognize peers by peer id
            // RFC 7609 3.5.1.6.4 #5: try first contact again next time
            let links = || group.links.iter().filter(|link| link.is_alive());
            // One whose RNICs the operator takes away is left alone.
            let stays = links().any(|link| !self.shared.ports[link.port.0].retired);
            stays && group.is_established() && group.members.len() < group.members_max()
        });
        open.min_by_key(|(id, group)| (group.members.len(), *id)).map(|(id, _)| id)
    }

    /// The group whose first contact with the client `peer` is going on.
    pub fn founding(&self, port: PortId, peer: Peer) -> Option<GroupId> {
        let fits =
            |group: &Group<N::Opening>| group.is_founding() && self.serves(group, port, peer);
        self.founded_by(peer.source).find(|(_, group)| fits(group)).map(|(id, _)| id)
    }

    /// Whether connections of `peer` by `port` belong to this group, in the role of its server.
    fn serves(&self, group: &Group<N::Opening>, port: PortId, peer: Peer) -> bool {
        // RFC 7609 3.5.1.2 #13: match group by id and subnet
        let here = group.links.first().is_some_and(|link| self.shared.share_lan(link.port, port));
        let usable = !group.is_over() && !group.out_of_sync;
        // RFC 7609 2.2.3 #2: separate group for reverse connections
        group.role == Role::Server && group.is_with(peer) && here && usable
    }

    /// Whether the poller that a new group would live on has none of these.
    fn idle_poller(&self, port: PortId, groups: &[(GroupId, &Group<N::Opening>)]) -> bool {
        let links = || groups.iter().flat_map(|(_, group)| &group.links);
        let near = self.shared.ports[port.0].address();
        let mut here =
            self.shared.ports.iter().enumerate().filter(|(_, one)| one.address() == near);
        !groups.is_empty()
            && here.any(|(index, one)| one.is_up() && links().all(|link| link.port.0 != index))
    }

    /// The link that a server's Accept names in a later contact, and its group. `v2` says which
    /// version the Accept is of, `source` which address we connected to, `proposed` which
    /// RNIC our Proposal named.
    ///
    /// # Errors
    ///
    /// [`Unnamed`]: decline.
    pub fn named_by(
        &mut self,
        now: Instant,
        accept: &Offer,
        v2: bool,
        source: IpAddr,
        proposed: PortId,
    ) -> Result<(GroupId, LinkId), Unnamed> {
        let is_near = |link: &Link<N::Opening>| self.shared.share_lan(link.port, proposed);
        // Nearly always it is one that this address founded.
        let others = self.iter().filter(|(_, group)| group.peer.source != source);
        let ours = self.founded_by(source).chain(others).filter(|(_, group)| {
            let runs = group.machine().is_some_and(|machine| !machine.is_terminated());
            // RFC 7609 3.5.2.2 #1: recognize later contact by Accept
            let with = group.peer.id == accept.peer_id && group.peer.v2 == v2;
            runs && group.role == Role::Client && with
        });
        let mut unnamed = Unnamed::OutOfSync;
        let mut foreign = None;
        for (id, group) in ours {
            // A link that both sides have deleted is not named in a Confirm, although connections
            // may be leaving it still: its keys mean nothing to the server any more.
            let machine = group.machine().expect("it was just asked");
            let is_there = |link: &Link<N::Opening>| machine.knows_rmbs_on(link.number);
            if let Some(link) = group
                .links
                .iter()
                .find(|link| link.leads_to(accept) && is_near(link) && is_there(link))
            {
                if group.shows_same_host(source, link, accept) {
                    return Ok((id, link.id));
                }
                unnamed = Unnamed::NotTheirs;
                foreign = Some((id, group.peer.source));
                break;
            }
            let end = (accept.gid, accept.mac, accept.qpn);
            if machine.has_led_to(end) {
                unnamed = Unnamed::LinkGone;
            }
        }
        if let Some((id, founder)) = foreign {
            self.shared.foreign_claim(now, id, founder, source);
        }
        Err(unnamed)
    }
}
