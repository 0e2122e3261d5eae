//! Trouble between the gateways: what happens to ports, paths, TCP and control threads. All of it
//! is noted for the judge.

use smcgate::groups::{GroupId, Pollers};
use smcr_engine::Command;
use smcr_proto::{Gid, QpAddress, Qpn};

use super::blame::Scope;
use super::call::Way;
use super::mutants::Planted;
use super::pipe::Segment;
use super::{CLIENT, SERVER, World};
use crate::habits::redundant_links;

/// A link group that loses links.
struct Hit {
    host: usize,
    id: GroupId,
    /// Both ends of these links.
    ends: Vec<Qpn>,
    /// How many links it has left, if both sides knew that those do not fail together.
    left: Option<usize>,
}

impl World {
    /// Notes which link groups have a link on a path that has failed.
    pub(crate) fn note_failed_links(&mut self) {
        for qpn in self.network.failed_paths() {
            self.blame_links(|ours, theirs| {
                ours.qpn == qpn || theirs.is_some_and(|it| it.qpn == qpn)
            });
        }
        self.note_ports_down();
        self.note_losses();
    }

    /// Notes which link groups have a link on which the network lost messages.
    fn note_losses(&mut self) {
        let ends: Vec<Qpn> = self.network.lossy_pairs().into_iter().flatten().collect();
        for (host, node) in self.nodes.iter().enumerate() {
            for (id, group) in node.endpoint.groups().iter() {
                let mut links = group.links.iter();
                if links.any(|link| ends.contains(&link.ours.qpn)) {
                    self.blame.note_loss(self.now, host, id);
                }
            }
        }
    }

    fn note_ports_down(&mut self) {
        if self.down.is_empty() {
            return;
        }
        self.blame.note(self.now, Scope::Talks);
        for (host, node) in self.nodes.iter().enumerate() {
            for (id, group) in node.endpoint.groups().iter() {
                let dead = group.links.iter().any(|link| {
                    self.down.has(link.ours.gid)
                        || link.theirs.is_some_and(|theirs| self.down.has(theirs.gid))
                });
                if dead {
                    self.blame.note_group_still(self.now, host, id);
                }
            }
        }
    }

    /// Notes that these links fail, before anybody knows of it.
    fn blame_links(&mut self, fails: impl Fn(QpAddress, Option<QpAddress>) -> bool) {
        let mut hit = Vec::new();
        for (host, node) in self.nodes.iter().enumerate() {
            for (id, group) in node.endpoint.groups().iter() {
                let failing = group.links.iter().filter(|link| fails(link.ours, link.theirs));
                let ends = failing.flat_map(|link| [Some(link.ours), link.theirs]);
                let ends: Vec<Qpn> = ends.flatten().map(|end| end.qpn).collect();
                let count = group.links.iter().filter(|link| ends.contains(&link.ours.qpn)).count();
                let left = redundant_links(group).and_then(|links| links.checked_sub(count));
                if count > 0 {
                    hit.push(Hit { host, id, ends, left });
                }
            }
        }
        for one in &hit {
            // Both sides must know of the other links.
            let is_far = |far: &&Hit| {
                far.host != one.host && far.ends.iter().any(|end| one.ends.contains(end))
            };
            let far = hit.iter().find(is_far);
            let spare = one.left.min(far.and_then(|far| far.left)) > Some(0);
            if far.is_some() {
                self.blame.note_common(one.host, one.id);
            }
            self.blame.note(self.now, Scope::Group { host: one.host, id: one.id, spare });
        }
    }

    /// A Confirm whose link was made to fail is about to arrive: its server may have left the link.
    pub(super) fn note_outlived_link(&mut self, number: usize) {
        let call = &mut self.calls[number];
        let arrives = call.lanes[CLIENT].next().is_some_and(|at| at <= self.now);
        if call.outlives && arrives {
            call.outlives = false;
            let qpn = call.confirmed.expect("it has named a link");
            let server = self.nodes.get(call.hosts[SERVER]).expect("the call is honest");
            let outlived = !server.knows_link(qpn);
            self.met.note_times("a Confirm outlives its link", outlived.into());
        }
    }

    /// A port goes down, or comes back. Returns whether it is gone.
    pub(crate) fn flap(&mut self, gid: Gid) -> bool {
        let goes = !self.down.has(gid);
        if goes {
            self.blame_links(|ours, theirs| {
                ours.gid == gid || theirs.is_some_and(|theirs| theirs.gid == gid)
            });
        } else {
            self.note_failed_links();
        }
        let carrier = self.down.flap(&mut self.dice, &self.network, gid);
        if let Some(carrier) = carrier {
            self.carrier_changed(gid, carrier);
        }
        goes
    }

    /// All ports are up again.
    pub(crate) fn mend_ports(&mut self) {
        self.note_failed_links();
        while let Some(gid) = self.down.mend_one(&self.network) {
            self.carrier_changed(gid, true);
        }
    }

    /// Something between the gateways resets TCP. That is trouble unless the connection is over.
    pub(crate) fn reset_tcp(&mut self, number: usize) {
        let mut sides = self.calls[number].sides.iter();
        if sides.any(|side| !matches!(side.way, Way::Unborn | Way::Over)) {
            self.blame.note(self.now, Scope::Call(number));
        }
        for side in [CLIENT, SERVER] {
            self.send(number, side, Segment::Reset);
        }
    }

    /// A gateway aborts what it believes to be a connection over SMC-R. If it has stayed TCP, or is
    /// over, nothing comes of that, so it is no trouble.
    pub(crate) fn abort(&mut self, number: usize, side: usize) {
        let call = &self.calls[number];
        let (host, here) = (call.hosts[side], &call.sides[side]);
        let Some(connection) = here.connection else { return };
        if matches!(here.way, Way::Smc) {
            self.blame.note(self.now, Scope::Call(number));
        }
        let groups = self.nodes[host].endpoint.groups_mut();
        groups.abort(connection);
        if self.planted == Some(Planted::AbortsTcp) && matches!(here.way, Way::Tcp { .. }) {
            groups.pollers_mut().command(call.ports[side], Command::Abort { connection });
        }
    }

    /// A control thread begins to stand still, or goes on.
    pub(crate) fn fall_asleep(&mut self, host: usize, asleep: bool) {
        let since = self.nodes[host].asleep.take();
        if let Some(since) = since {
            self.blame.note_standstill(self.now, since);
        }
        self.nodes[host].asleep = asleep.then_some(since.unwrap_or(self.now));
    }

    /// The gateway of a port hears of its network.
    pub(crate) fn carrier_changed(&mut self, gid: Gid, carrier: bool) {
        for host in 0..2 {
            if let Some(port) = self.nodes[host].port_at(gid) {
                let groups = self.nodes[host].endpoint.groups_mut();
                groups.carrier_changed(self.now, port, carrier);
                self.drain(host);
            }
        }
    }
}
