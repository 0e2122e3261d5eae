//! The rows of each tab.

use super::asker::Reading;
use super::screen::{Flow, Order, Screen, Tab};
use crate::stats::{Connection, Link, LinkGroup, Listener, Peer, Poller, Rnic, Transport};
use crate::tools::units::{bits, bytes, count, duration, nanoseconds, share};

/// A table of text. Rows may be shorter than the head.
#[derive(Debug, Default)]
pub(super) struct Rows {
    pub(super) head: Vec<&'static str>,
    pub(super) rows: Vec<Vec<String>>,
    /// Said below the table, or in place of it if it is empty.
    pub(super) note: String,
}

impl Rows {
    fn new(head: &[&'static str], rows: Vec<Vec<String>>, empty: &str) -> Self {
        let note = if rows.is_empty() { empty.to_owned() } else { String::new() };
        Self { head: head.to_vec(), rows, note }
    }
}

/// The table of the tab that is chosen.
pub(super) fn rows(screen: &Screen, reading: &Reading) -> Rows {
    let stats = &reading.stats;
    match screen.tab {
        Tab::Connections => connections(screen, reading),
        Tab::Links => {
            let head = [
                "GROUP",
                "PEER",
                "ROLE",
                "VERSION",
                "LINK",
                "STATE",
                "RNIC",
                "QP",
                "PEER'S RNIC",
                "CONNS",
                "PAYLOAD",
            ];
            let rows = stats.link_groups.iter().flat_map(group_rows).collect();
            let mut table = Rows::new(&head, rows, "There is no link group.");
            let totals = &stats.totals;
            table.note += &format!(
                "{} links failed over, {} lost; {} connections moved; {} groups lost",
                count(totals.links_failed_over),
                count(totals.links_lost),
                count(totals.connections_moved),
                count(totals.groups_lost),
            );
            table
        }
        Tab::Listeners => {
            let head = [
                "LISTENER", "STATE", "BIND", "ACCEPT", "CONNECT", "OPEN", "ACCEPTED", "REFUSED",
                "UPSTREAM", "STATE", "OPEN", "FAILED",
            ];
            let rows = stats.listeners.iter().flat_map(listener_rows).collect();
            Rows::new(&head, rows, "There is no listener.")
        }
        Tab::Pollers => {
            let head = ["POLLER", "CORE", "PINNED", "BUSY", "CONNS", "P99 ADDED", "PLACEMENT"];
            let rows = stats.pollers.iter().map(|it| poller_row(screen, it)).collect();
            Rows::new(&head, rows, "No poller runs.")
        }
        Tab::Rnics => {
            let head = [
                "RNIC", "STATE", "KIND", "DEVICE", "GID", "LINKS", "MTU", "IN", "OUT", "AGAIN",
                "CNPS", "ICRC", "PSN", "NO-QP", "RKEY",
            ];
            let rows = stats.rnics.iter().map(rnic_row).collect();
            Rows::new(&head, rows, "No RNIC is in use: every connection stays TCP.")
        }
        Tab::Fallbacks => {
            let rows = stats.fallbacks.iter().flat_map(|it| {
                let code = format!("{:#010x}", it.code);
                let first = vec![it.name.clone(), code, count(it.count), it.meaning.clone()];
                let blank = String::new;
                [first, vec![blank(), blank(), blank(), format!("→ {}", it.remedy)]]
            });
            let head = ["REASON", "CODE", "COUNT", "WHAT IT MEANS → WHAT TO DO"];
            let none = "No connection that could have used SMC-R has stayed TCP since the start.";
            Rows::new(&head, rows.collect(), none)
        }
        Tab::Peers => peers(reading),
    }
}

/// How fast servers are over SMC-R and over TCP.
fn peers(reading: &Reading) -> Rows {
    let row = |it: &Peer| {
        let both = [it.smc, it.tcp];
        let dash = |value: u64, text: String| if value > 0 { text } else { "-".to_owned() };
        let first = both.map(|it| dash(it.first_byte_ns, nanoseconds(it.first_byte_ns as f64)));
        let rates = both.map(|it| dash(it.bytes_per_s, bits(it.bytes_per_s as f64)));
        let slower = if it.slower.is_empty() { "-" } else { &it.slower };
        let mut row = vec![it.address.clone(), slower.to_owned()];
        row.extend(first.into_iter().chain(rates));
        row.extend(both.map(|it| count(it.samples)));
        row
    };
    let head = [
        "SERVER",
        "SLOWER",
        "FIRST SMC-R",
        "FIRST TCP",
        "RATE SMC-R",
        "RATE TCP",
        "N SMC-R",
        "N TCP",
    ];
    let rows = reading.stats.peers.iter().map(row).collect();
    Rows::new(&head, rows, "No server has been compared: no connection has used SMC-R yet.")
}

fn connections(screen: &Screen, reading: &Reading) -> Rows {
    let page = &reading.connections;
    let mut all: Vec<(&Connection, Flow)> =
        page.connections.iter().map(|row| (row, screen.flow(row))).collect();
    match screen.order {
        Order::Throughput => all.sort_by(|(_, one), (_, other)| {
            (other.inward + other.outward).total_cmp(&(one.inward + one.outward))
        }),
        // The gateway has sorted them.
        Order::Bytes | Order::Age => {}
    }
    let head = [
        "OVER",
        "STATE",
        "LISTENER",
        "APPLICATION",
        "PEER",
        "IN",
        "OUT",
        "IN/S",
        "OUT/S",
        "AGE",
        "LINK",
        "WHY TCP",
    ];
    let rows = all.into_iter().map(connection_row).collect();
    let mut table = Rows::new(&head, rows, "There is no such connection now.");
    if page.total > page.connections.len() as u64 {
        let shown = count(page.connections.len() as u64);
        table.note = format!("the first {shown} of {} connections", count(page.total));
    }
    table
}

fn connection_row((it, flow): (&Connection, Flow)) -> Vec<String> {
    let link = match (it.transport, it.link_group, it.link) {
        (Transport::SmcR, Some(group), Some(link)) => format!("{group}/{link}"),
        (Transport::SmcR, Some(group), None) => group.to_string(),
        (Transport::SmcR, None, _) | (Transport::Tcp, _, _) => "-".to_owned(),
    };
    vec![
        it.transport.name().to_owned(),
        it.state.clone(),
        it.listener.clone(),
        it.app.clone(),
        it.peer.clone(),
        bytes(it.bytes_in as f64),
        bytes(it.bytes_out as f64),
        bits(flow.inward),
        bits(flow.outward),
        duration(it.age_s),
        link,
        it.fallback.as_ref().map_or("-".to_owned(), |reason| reason.name.clone()),
    ]
}

fn group_rows(group: &LinkGroup) -> Vec<Vec<String>> {
    let host = group.v2.as_ref().map_or("", |v2| &v2.peer_host);
    let peer = if host.is_empty() { &group.peer_id } else { host };
    let version = match &group.v2 {
        Some(v2) => format!("{}.{}", group.version, v2.release),
        None => group.version.to_string(),
    };
    let own = vec![group.id.to_string(), peer.to_owned(), group.role.clone(), version];
    let link = |it: &Link| {
        let mut row = own.clone();
        row.extend([it.number.to_string(), it.state.clone(), it.rnic.clone()]);
        row.extend([format!("{}-{}", it.qpn, it.peer_qpn), it.peer_gid.clone()]);
        row.extend([count(it.connections.into()), count(it.payload.into())]);
        row
    };
    if group.links.is_empty() { vec![own] } else { group.links.iter().map(link).collect() }
}

/// One row for each upstream; what belongs to the listener is in the first.
fn listener_rows(it: &Listener) -> Vec<Vec<String>> {
    let own = vec![
        it.name.clone(),
        it.state.clone(),
        it.bind.clone(),
        it.accept.clone(),
        it.connect.clone(),
        count(it.active),
        count(it.accepted),
        count(it.refused),
    ];
    if it.upstreams.is_empty() {
        return vec![[own, vec![it.upstream.clone()]].concat()];
    }
    let row = |(index, target): (usize, &crate::stats::Upstream)| {
        let mut row = if index == 0 { own.clone() } else { vec![String::new(); own.len()] };
        row.extend([target.address.clone(), target.state.clone()]);
        row.extend([count(target.active.into()), count(target.failed)]);
        row
    };
    it.upstreams.iter().enumerate().map(row).collect()
}

fn poller_row(screen: &Screen, it: &Poller) -> Vec<String> {
    // What this gateway adds: the first and the last stage of the way of bytes.
    let added = ["read_to_posted", "announced_to_written"];
    let added = added.iter().filter_map(|name| it.stages.get(*name));
    let added: Vec<_> = added.filter(|stage| stage.count > 0).map(|stage| stage.p99_ns).collect();
    let added = if added.is_empty() {
        "-".to_owned()
    } else {
        nanoseconds(added.iter().sum::<u64>() as f64)
    };
    vec![
        it.index.to_string(),
        it.core.map_or("-".to_owned(), |core| core.to_string()),
        if it.pinned { "yes" } else { "no" }.to_owned(),
        share(screen.load(it)),
        count(it.connections.into()),
        added,
        it.placement.clone(),
    ]
}

fn rnic_row(it: &Rnic) -> Vec<String> {
    let words = [&it.name, &it.state, &it.kind, &it.device, &it.gid].map(String::clone);
    let counts = [
        it.links.into(),
        it.mtu.into(),
        it.packets_in,
        it.packets_out,
        it.retransmits,
        it.cnps_in,
        it.icrc_errors,
        it.psn_errors,
        it.unknown_qp,
        it.rkey_errors,
    ];
    words.into_iter().chain(counts.map(count)).collect()
}
