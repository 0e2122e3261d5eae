//! Answers the admin thread's questions, and carries out operators' commands.

mod connections;
mod listeners;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use smcr_engine::LinkId;
use smcr_engine::counters::Counters;
use smcr_proto::Instant;
use smcr_proto::handshake::Agreement;
use smcr_proto::link::State as LinkState;
use smcr_proto::link_group::{LinkGroup as LinkMachine, Role, Symmetry, Version};
use smcr_proto::wire::clc::Diagnosis;
use smcr_proto::wire::clc::v2::OsType;
use smcr_rnic::Rnic;
use tokio::sync::oneshot;

use super::Gateway;
use super::poller_rows::poller_row;
use crate::groups::{self, Group, GroupId, Phase, PortId};
use crate::operate::Operation;
use crate::reasons;
use crate::stats::{
    Active, Fallback, GroupV2, Link, LinkGroup, Memory, Readiness, Rnic as RnicRow, SCHEMA, Sample,
    Stats, Totals, Transport,
};
use crate::status::{Outcome, Question, Traffic};
pub(super) use listeners::counts_of;

impl<N: Rnic> Gateway<N> {
    /// Answers what the admin thread asked.
    pub(super) fn answer_questions(&mut self, now: Instant) {
        while let Some(question) = self.mail.questions.receive() {
            match question {
                Question::Sample(to) => answer(to, || self.sample(now)),
                Question::Stats(to) => answer(to, || {
                    let link_groups = self.link_groups();
                    Stats { link_groups, ..self.figures(now) }
                }),
                Question::Figures(to) => answer(to, || self.figures(now)),
                Question::Connections(query, to) => answer(to, || self.connections(now, &query)),
                Question::Ready(listener, to) => answer(to, || {
                    let reasons = self.reasons_to_stay_away(listener.as_deref());
                    Readiness { reasons }
                }),
                Question::Config(to) => answer(to, || self.config.clone()),
                // Whoever asked may have stopped waiting; then the answer is dropped.
                Question::Operate(operation, answer) => {
                    drop(answer.try_send(self.operate(now, operation)));
                    self.settle(now);
                }
                Question::Reload(prepared, answer) => {
                    self.service.reloading();
                    let outcome = self.reload(now, *prepared);
                    self.service.ready();
                    match &outcome {
                        Ok(notes) => tracing::info!(?notes, "another configuration is in force"),
                        Err(why) => tracing::warn!(%why, "the configuration stays as it was"),
                    }
                    drop(answer.try_send(outcome));
                }
            }
        }
    }

    fn operate(&mut self, now: Instant, operation: Operation) -> Outcome {
        tracing::info!(?operation, "operator command");
        self.renew_kept();
        let groups = self.endpoint.groups_mut();
        match operation {
            Operation::LinkDelete { link, orderly } => {
                groups.delete_link(now, LinkId(link), orderly)
            }
            Operation::LinkAdd { group } => groups.add_link(now, GroupId(group)),
            Operation::RnicDown { rnic, orderly } => groups.rnic_down(now, &rnic, orderly),
            Operation::RnicUp { rnic } => groups.rnic_up(now, &rnic),
            Operation::Drain { listener, close_idle_over_s } => {
                let over = close_idle_over_s.map(|seconds| Duration::from_secs(seconds.into()));
                return self.drain_listeners(now, listener.as_deref(), over);
            }
            Operation::Undrain { listener } => return self.undrain_listeners(listener.as_deref()),
            Operation::Measure { peer } => return self.open_doors(now, peer),
            Operation::Reload => panic!("whoever asks for it has read the file first"),
        }
        .map(|()| Vec::new())
    }

    /// What costs the same however many connections there are.
    pub(super) fn figures(&self, now: Instant) -> Stats {
        Stats {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_s: self.uptime_s(now),
            totals: self.totals(),
            active: self.active(),
            fallbacks: self.fallback_rows(),
            link_groups: Vec::new(),
            pollers: self
                .endpoint
                .groups()
                .pollers()
                .iter()
                .enumerate()
                .filter(|(_, poller)| !poller.is_stopped())
                .map(poller_row)
                .collect(),
            rnics: self.rnic_rows(),
            listeners: self.listener_rows(now),
            peers: self.speeds.rows(now),
            memory: self.memory(),
            confinement: self.confinement.row(),
        }
    }

    /// What the history keeps of one moment.
    fn sample(&self, now: Instant) -> Sample {
        let (totals, active) = (self.totals(), self.active());
        Sample {
            uptime_ms: u64::try_from(now.since(self.started).as_millis()).unwrap_or(u64::MAX),
            bytes_in: totals.bytes_in,
            bytes_out: totals.bytes_out,
            connections_smc: totals.connections_smc,
            connections_tcp: totals.connections_tcp,
            fallbacks: self.endpoint.fallbacks().values().sum(),
            active_smc: active.smc,
            active_tcp: active.tcp,
        }
    }

    fn totals(&self) -> Totals {
        let sum = |counter: fn(&Counters) -> u64| -> u64 {
            self.endpoint.groups().pollers().iter().map(|poller| counter(&poller.counters)).sum()
        };
        let counts = self.endpoint.groups().counts();
        let rendezvous = self.endpoint.counts();
        let lines = self.access_log.counts();
        Totals {
            connections_smc: rendezvous.connections_smc,
            connections_tcp: rendezvous.connections_tcp,
            bytes_in: sum(|counters| counters.bytes_in.get()),
            bytes_out: sum(|counters| counters.bytes_out.get()),
            handshakes_failed: rendezvous.handshakes_failed,
            streams_followed: rendezvous.streams_followed,
            refused_smc: self.fallen_back(Diagnosis::OUT_OF_MEMORY)
                + self.fallen_back(Diagnosis::TOO_BUSY),
            links_failed_over: counts.links_failed_over,
            links_lost: counts.links_lost,
            groups_lost: counts.groups_lost,
            connections_moved: counts.connections_moved,
            rmbe_conflicts: counts.conflicts,
            tcp_cut_short: self.farewells.were_cut_short(),
            foreign_claims: counts.foreign_claims,
            groups_out_of_sync: counts.out_of_sync,
            crowded_sources: counts.crowded_sources,
            links_not_listed: counts.links_not_listed,
            silent_cut_short: rendezvous.silent_cut_short,
            idle_closed: self.idle.closed().idle,
            half_closed_closed: self.idle.closed().half_closed,
            aged_closed: self.idle.closed().aged,
            offers_held: counts.offers_held,
            rmbes_rested: counts.elements_rested,
            panics_survived: crate::supervise::survived(),
            refused_tcp: self.former.refused()
                + self.listeners.iter().map(|listener| listener.refused).sum::<u64>(),
            rings: self.local.as_ref().map_or(0, |local| local.rings().1),
            shortcuts: self.local.as_ref().map_or(0, |local| local.shortcuts().1),
            access_log_written: lines.written,
            access_log_dropped: lines.dropped,
        }
    }

    fn fallen_back(&self, reason: Diagnosis) -> u64 {
        self.endpoint.fallbacks().get(&reason).copied().unwrap_or(0)
    }

    fn active(&self) -> Active {
        let without_place = self.endpoint.waiting() as u64;
        let groups = self.endpoint.groups();
        Active {
            smc: self.sessions.open(Transport::SmcR) as u64,
            tcp: self.sessions.open(Transport::Tcp) as u64,
            connecting: self.endpoint.len() as u64 - without_place,
            waiting: without_place + self.arrived() as u64,
            farewells: self.farewells.len() as u64,
            kept: self.streams.len() as u64,
            rings: self.local.as_ref().map_or(0, |local| local.rings().0 as u64),
            shortcuts: self.local.as_ref().map_or(0, |local| local.shortcuts().0 as u64),
            link_groups: groups.iter().count() as u64,
            links: groups.iter().map(|(_, group)| group.links.len() as u64).sum(),
            ..Active::default()
        }
    }

    fn fallback_rows(&self) -> Vec<Fallback> {
        let row = |(diagnosis, count): (&Diagnosis, &u64)| {
            let words = reasons::words(*diagnosis);
            Fallback {
                code: diagnosis.0,
                name: format!("{diagnosis:?}"),
                count: *count,
                meaning: words.meaning.to_owned(),
                remedy: words.remedy.to_owned(),
            }
        };
        let mut rows: Vec<_> = self.endpoint.fallbacks().iter().map(row).collect();
        rows.sort_by_key(|row| std::cmp::Reverse(row.count));
        rows
    }

    fn link_groups(&self) -> Vec<LinkGroup> {
        self.endpoint.groups().iter().map(|(id, group)| self.group_row(id, group)).collect()
    }

    fn group_row(&self, id: GroupId, group: &Group<N::Opening>) -> LinkGroup {
        let row = |link: &groups::Link<N::Opening>| {
            let port = &self.endpoint.groups().ports()[link.port.0];
            let payload = port.rnic.as_ref().and_then(|rnic| rnic.payload(link.ours.qpn));
            Link { payload: payload.unwrap_or(0), ..link_row(group, link, &port.name) }
        };
        LinkGroup {
            id: id.0,
            role: role_name(group.role).to_owned(),
            version: version_of(group),
            v2: v2_row(group),
            peer_id: group.peer.id.to_string(),
            kind: kind_name(group).to_owned(),
            connections: u32::try_from(group.members.len()).unwrap_or(u32::MAX),
            links: group.links.iter().map(row).collect(),
            rmbs: group.stock.rmbs(),
        }
    }

    fn memory(&self) -> Memory {
        let pollers = self.endpoint.groups().pollers().iter().filter(|it| !it.is_stopped());
        let mut memory = Memory {
            send_bytes: self.config.smc.send_pool * pollers.count() as u64,
            ..Memory::default()
        };
        for (_, group) in self.endpoint.groups().iter() {
            let (elements, used) = group.stock.elements();
            memory.rmb_bytes += group.stock.bytes();
            memory.rmbes += elements;
            memory.rmbes_used += used;
        }
        for poller in self.endpoint.groups().pollers() {
            memory.send_bytes_used += poller.counters.send_bytes_lent.get();
        }
        memory
    }

    /// One row for each RNIC, however many pollers it has.
    fn rnic_rows(&self) -> Vec<RnicRow> {
        let mut rows: Vec<RnicRow> = Vec::new();
        for row in (0..self.ports.len()).filter_map(|port| self.rnic_row(PortId(port))) {
            match rows.iter_mut().find(|other| other.name == row.name) {
                None => rows.push(row),
                Some(same) => same.links += row.links,
            }
        }
        // Those that are closed count, too, if their RNIC was opened again.
        for (port, info) in self.endpoint.groups().ports().iter().zip(&self.ports) {
            if let Some(row) = rows.iter_mut().find(|row| row.name == port.name) {
                add_traffic(row, &info.traffic);
            }
        }
        rows
    }

    /// The row of the RNIC that has this port, without what it counts.
    fn rnic_row(&self, id: PortId) -> Option<RnicRow> {
        let (port, info) = (&self.endpoint.groups().ports()[id.0], &self.ports[id.0]);
        let address = port.rnic.as_ref()?.port();
        let links = self.endpoint.groups().iter().flat_map(|(_, group)| &group.links);
        Some(RnicRow {
            name: port.name.clone(),
            kind: info.kind.name().to_owned(),
            device: info.device.clone(),
            gid: address.gid.to_string(),
            state: if port.is_up() { "up" } else { "down" }.to_owned(),
            links: u32::try_from(links.filter(|link| link.port == id).count()).unwrap_or(u32::MAX),
            mtu: address.mtu.bytes().unwrap_or(0),
            ..RnicRow::default()
        })
    }
}

fn add_traffic(row: &mut RnicRow, traffic: &Traffic) {
    let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    row.packets_in += read(&traffic.packets_in);
    row.packets_out += read(&traffic.packets_out);
    row.retransmits += read(&traffic.retransmits);
    row.path_raised += read(&traffic.path_raised);
    row.path_lowered += read(&traffic.path_lowered);
    row.cnps_in += read(&traffic.cnps_in);
    row.cnps_out += read(&traffic.cnps_out);
    row.icrc_errors += read(&traffic.icrc_errors);
    row.psn_errors += read(&traffic.psn_errors);
    row.unknown_qp += read(&traffic.unknown_qp);
    row.rkey_errors += read(&traffic.rkey_errors);
}

/// Answers, unless whoever asked has stopped waiting: questions that are too old cost nothing.
fn answer<T>(to: oneshot::Sender<T>, made: impl FnOnce() -> T) {
    if !to.is_closed() {
        drop(to.send(made()));
    }
}

fn role_name(role: Role) -> &'static str {
    match role {
        Role::Client => "client",
        Role::Server => "server",
    }
}

fn version_of<O>(group: &Group<O>) -> u8 {
    if group.peer.v2 { 2 } else { 1 }
}

/// What operators see of an SMC-Rv2 group. None for a group that has not agreed on version 2.
fn v2_row<O>(group: &Group<O>) -> Option<GroupV2> {
    let Agreement::V2(terms) = group.agreement else { return None };
    let direct = match group.machine().map(LinkMachine::version) {
        Some(Version::V2 { direct, .. }) => direct,
        Some(Version::V1) | None => true,
    };
    Some(GroupV2 {
        release: terms.release,
        eid: terms.eid.to_string(),
        peer_host: terms.peer.map(|peer| peer.host_name.to_string()).unwrap_or_default(),
        peer_os: terms.peer.map(|peer| os_name(peer.os)).unwrap_or_default(),
        direct,
        max_connections: terms.max_connections,
        max_links: terms.max_links,
        dense_packets: terms.dense_packets,
    })
}

fn os_name(os: OsType) -> String {
    os.name().map_or_else(|| os.0.to_string(), str::to_owned)
}

fn kind_name<O>(group: &Group<O>) -> &'static str {
    // Its first link is not connected yet, or the group has ended.
    let Some(machine) = group.machine() else { return "none" };
    match machine.symmetry() {
        Symmetry::Single => "single",
        Symmetry::AsymmetricLocal => "asymmetric-local",
        Symmetry::AsymmetricPeer => "asymmetric-peer",
        Symmetry::Symmetric => "symmetric",
    }
}

fn link_row<O>(group: &Group<O>, link: &groups::Link<O>, rnic: &str) -> Link {
    let state = group.machine().and_then(|machine| {
        machine.links().find(|view| view.number == link.number).map(|view| view.state)
    });
    let state = match state {
        None if matches!(group.phase, Phase::Opening) => "opening",
        Some(LinkState::Confirming { .. }) => "confirming",
        Some(LinkState::Active { .. }) => "active",
        Some(LinkState::Probing { .. }) => "probing",
        Some(LinkState::Down(_)) | None => "down",
    };
    Link {
        id: link.id.0,
        number: link.number.0,
        state: state.to_owned(),
        rnic: rnic.to_owned(),
        qpn: link.ours.qpn.0,
        peer_qpn: link.theirs.map_or(0, |theirs| theirs.qpn.0),
        peer_gid: link.theirs.map_or(group.peer.gid, |theirs| theirs.gid).to_string(),
        connections: u32::try_from(group.members_on(link.id)).unwrap_or(u32::MAX),
        payload: 0,
    }
}
