//! Where the connections of a group go when a link is left, and when there is another one.

use smcr_engine::handoff::KeyChange;
use smcr_engine::{Command, ConnectionId, LinkId};
use smcr_proto::Rkey;
use smcr_rnic::Rnic;

use super::Groups;
use super::group::{Group, Leaving, Link, LinkState};
use super::group_mut::GroupMut;
use super::left::Left;
use super::ports::{Pollers, PortId, QpOf};

impl<N: Rnic, P: Pollers<QpOf<N>>> Groups<N, P> {
    /// A connection is on another link now, where the peer's element is at `address` of the RMB
    /// called `rkey`.
    pub fn connection_moved(
        &mut self,
        connection: ConnectionId,
        to: LinkId,
        rkey: Rkey,
        address: u64,
    ) {
        // A late report: the connection has ended since.
        let Some(mut group) = self.group_of(connection) else { return };
        group.note_moved(connection, to, rkey, address);
    }
}

impl<N: Rnic, P: Pollers<QpOf<N>>> GroupMut<'_, N, P> {
    fn note_moved(&mut self, connection: ConnectionId, to: LinkId, rkey: Rkey, address: u64) {
        let link = self.group.link(to);
        // A link that is gone meanwhile was one on the way: the connection follows the others.
        let Some(port) = link.map(|link| link.port) else { return };
        let member = self.group.members.get_mut(&connection).expect("it is one of this group");
        self.shared.connection_went(member.port);
        self.shared.connection_came(port);
        (member.link, member.named_on, member.port) = (to, to, port);
        if let Some(peer) = &mut member.peer {
            let before = peer.rmbe_address();
            peer.rkey = rkey;
            peer.rmb_address = peer.rmb_address.wrapping_add(address.wrapping_sub(before));
        }
        self.shared.counts.connections_moved += 1;
        if member.aborted {
            // The abort may have reached the previous poller after the connection had left it, so
            // repeat it here.
            self.command(port, Command::Abort { connection });
        } else if member.closing {
            self.command(port, Command::CloseKept { connection });
        }
    }

    /// Nothing is on this link any more. Returns whether the machine waits for that.
    pub(super) fn note_vacated(&mut self, link: LinkId) -> bool {
        let found = self.group.link_mut(link).expect("it was just located");
        match &found.state {
            LinkState::Leaving(Leaving::Disorderly) => {
                self.retire(link);
                false
            }
            LinkState::Leaving(Leaving::Orderly) => {
                found.state = LinkState::Vacated;
                true
            }
            // A late report: the link was ordered away twice, or its group has ended.
            LinkState::Vacated | LinkState::Retiring => false,
            LinkState::Opening(_) | LinkState::Polled => {
                unreachable!("only a link that was ordered away is reported to be empty")
            }
        }
    }

    /// Spreads the connections of the group over its links again.
    pub(super) fn rebalance(&mut self) {
        let group = &*self.group;
        let usable = group.links.iter().filter(|link| group.is_usable(link));
        let loads = usable.map(|link| (link.id, group.relayed_on(link.id))).collect();
        for Shift { from, to, mut moving } in even_out(loads) {
            moving.retain(|connection| is_named_on(self.group, *connection, (from, to)));
            if moving.is_empty() {
                continue;
            }
            let (group, count) = (self.group.id.0, moving.len());
            tracing::info!(group, from = from.0, to = to.0, count, "connections rebalanced");
            // RFC 7609 2.2 #2: spread connections over active links
            // RFC 7609 2.3 #12: use a link that comes back
            // RFC 7609 2.3 #13: move connections without a failure
            self.order_move(from, to, Some(moving));
        }
    }

    /// Sends everything on a link elsewhere. Returns whether there is an elsewhere.
    pub(super) fn move_all(&mut self, from: LinkId, leaving: Leaving) -> bool {
        // It may be the only link, or the others are down or leaving too.
        let Some(to) = self.alternative_to(from) else { return false };
        self.order_move(from, to, None);
        let link = self.group.link_mut(from).expect("it was just looked at");
        link.state = LinkState::Leaving(leaving);
        true
    }

    /// The link to which connections go that leave another one.
    fn alternative_to(&self, from: LinkId) -> Option<LinkId> {
        let group = &*self.group;
        let port = group.link(from).expect("a link that is left is still there").port;
        let others = group.links.iter().filter(|link| link.id != from && group.is_usable(link));
        // The same poller needs no hand-over.
        let best = others.min_by_key(|link| (link.port != port, group.members_on(link.id)));
        best.map(|link| link.id)
    }

    /// A connection is about to come to a link that others are leaving, and shall follow them. The
    /// peer may have announced its RMB after the poller was told what RMBs are called elsewhere.
    ///
    /// If the link has been deleted, its rkeys are forgotten. The earlier order stays in force, but
    /// for those whose RMBs never had a name on the link.
    pub(super) fn renew_move(&mut self, port: PortId, from: LinkId) {
        let machine = self.group.machine();
        let left = |link: &Link<_>| {
            is_being_left(link)
                && link.id == from
                && machine.is_some_and(|machine| machine.knows_rmbs_on(link.number))
        };
        if self.group.links.iter().any(left)
            && let Some(to) = self.alternative_to(from)
        {
            self.order_move(from, to, None);
        } else if let Some(left) = self.group.left.of(from)
            && let Some(to_port) = self.group.link(left.to).map(|to| to.port)
        {
            let mut keys = self.group.kept_names(from, left.to);
            if !keys.is_empty() {
                keys.extend_from_slice(&left.keys);
                self.tell_to_move(port, (from, left.to), to_port, keys, None);
            }
        }
    }

    /// The peer may have announced RMBs for links that connections are leaving. When such a link is
    /// gone, nobody knows any more what they were called there: who comes to it late must find them
    /// in the order to move.
    pub(super) fn renew_moves(&mut self) {
        let group = &*self.group;
        let has_news = |link: &&Link<_>| {
            let left = group.left.of(link.id).filter(|_| is_being_left(link));
            let way = left.and_then(|left| Some((left, group.link(left.to)?)));
            way.is_some_and(|(left, to)| {
                group.machine().is_some()
                    && key_changes(group, link, to).iter().any(|key| !left.keys.contains(key))
            })
        };
        let stale = group.links.iter().filter(has_news).map(|link| (link.port, link.id));
        for (port, link) in stale.collect::<Vec<_>>() {
            self.renew_move(port, link);
        }
    }

    fn order_move(&mut self, from: LinkId, to: LinkId, only: Option<Vec<ConnectionId>>) {
        let [old, new] = [from, to].map(|link| {
            self.group.link(link).expect("connections move between links that are there")
        });
        let (port, to_port) = (old.port, new.port);
        let mut keys = key_changes(self.group, old, new);
        if only.is_none() {
            let theirs = old.theirs.expect("a link with connections leads to a peer");
            let noted = keys.clone();
            self.group.left.note(Left { link: from, theirs, to, keys: noted });
            // Kept names come first: `named_for` refuses RMBs that have one of them on `from`.
            keys.splice(0..0, self.group.kept_names(from, to));
        }
        self.tell_to_move(port, (from, to), to_port, keys, only);
    }

    fn tell_to_move(
        &mut self,
        port: PortId,
        (from, to): (LinkId, LinkId),
        to_port: PortId,
        keys: Vec<KeyChange>,
        only: Option<Vec<ConnectionId>>,
    ) {
        let to_poller = u8::try_from(to_port.0).expect("pollers have an index of eight bits");
        // RFC 7609 2.3 #3: move connections of a failed link
        // RFC 7609 2.3 #4: move at once, send DELETE LINK
        // RFC 7609 4.6 #1: each side switches links itself
        self.command(port, Command::MoveConnections { from, to, to_poller, keys, only });
    }
}

/// Connections that change their link for balance.
#[derive(Debug, PartialEq, Eq)]
struct Shift {
    from: LinkId,
    to: LinkId,
    moving: Vec<ConnectionId>,
}

/// The fewest moves after which no link has two connections more than another.
fn even_out(mut loads: Vec<(LinkId, Vec<ConnectionId>)>) -> Vec<Shift> {
    let mut shifts: Vec<Shift> = Vec::new();
    loop {
        let Some(most) = (0..loads.len()).max_by_key(|index| loads[*index].1.len()) else {
            // No link of the group can be used now.
            return shifts;
        };
        let least = (0..loads.len()).min_by_key(|index| loads[*index].1.len());
        let least = least.expect("where one has most, one has least");
        let surplus = (loads[most].1.len() - loads[least].1.len()) / 2;
        if surplus == 0 {
            return shifts;
        }
        let keep = loads[most].1.len() - surplus;
        let moving = loads[most].1.split_off(keep);
        loads[least].1.extend(&moving);
        shifts.push(Shift { from: loads[most].0, to: loads[least].0, moving });
    }
}

/// Whether the poller was told to move all connections of a link elsewhere.
fn is_being_left<O>(link: &Link<O>) -> bool {
    matches!(link.state, LinkState::Leaving(_) | LinkState::Vacated)
}

/// Whether the peer has said what the RMB of a connection is called on the second link. A link that
/// comes up lacks the RMBs that the peer has made since it listed its RMBs for that link; it names
/// them right afterwards. A connection that moved there before would be lost.
fn is_named_on<O>(
    group: &Group<O>,
    connection: ConnectionId,
    (from, to): (LinkId, LinkId),
) -> bool {
    let peer = group.members.get(&connection).and_then(|member| member.peer);
    let links = group.link(from).zip(group.link(to));
    peer.zip(links).is_some_and(|(peer, (old, new))| {
        let known = key_changes(group, old, new);
        known.iter().any(|key| (key.old, key.old_base) == (peer.rkey, peer.rmb_address))
    })
}

/// What the peer's RMBs are called on one link and on another: all of them, because connections may
/// be on their way to the one that is left.
fn key_changes<O>(group: &Group<O>, old: &Link<O>, new: &Link<O>) -> Vec<KeyChange> {
    let machine = group.machine().expect("a link to move to is up while the machine runs");
    let change = |((old, old_base), (new, new_base))| KeyChange { old, old_base, new, new_base };
    machine.peer_rmbs(old.number, new.number).map(change).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connections(slots: std::ops::Range<u16>) -> Vec<ConnectionId> {
        slots.map(|slot| ConnectionId { slot, generation: 1 }).collect()
    }

    /// A link that comes back carries its share again, and nobody is moved to and fro for it.
    // RFC 7609 2.2 #2: spread connections over active links
    // RFC 7609 2.3 #12: use a link that comes back
    #[test]
    fn connections_are_spread_with_the_fewest_moves() {
        let loads = vec![(LinkId(1), connections(0..9)), (LinkId(2), connections(9..9))];
        let expected = Shift { from: LinkId(1), to: LinkId(2), moving: connections(5..9) };
        assert_eq!(even_out(loads), [expected]);
        let even = vec![(LinkId(1), connections(0..3)), (LinkId(2), connections(3..5))];
        assert_eq!(even_out(even), []);
        assert_eq!(even_out(Vec::new()), []);
        let three = vec![
            (LinkId(1), connections(0..6)),
            (LinkId(2), connections(6..12)),
            (LinkId(3), Vec::new()),
        ];
        let mut left = [6, 6, 0];
        for shift in even_out(three) {
            left[shift.from.0 as usize - 1] -= shift.moving.len();
            left[shift.to.0 as usize - 1] += shift.moving.len();
        }
        assert!(left.iter().max().unwrap() - left.iter().min().unwrap() <= 1, "{left:?}");
    }
}
