//! Answers as tables for people, in the manner of `ss` and `smcss`.

use std::fmt::Write;

use crate::stats::{
    Confinement, Connection, ConnectionPage, GroupV2, Link, LinkGroup, Process, Rnic, SharedMemory,
    Stats, Transport,
};

/// All of the statistics, one paragraph per subject; subjects without rows are left out.
pub fn stats_text(stats: &Stats) -> String {
    let mut out = summary(stats);
    paragraph(
        &mut out,
        &["FALLBACK", "CODE", "COUNT"],
        stats
            .fallbacks
            .iter()
            .map(|it| vec![it.name.clone(), format!("{:#010x}", it.code), it.count.to_string()]),
    );
    paragraph(
        &mut out,
        &["LISTENER", "BIND", "ACCEPT", "CONNECT", "UPSTREAM", "ACTIVE", "ACCEPTED", "REFUSED"],
        stats.listeners.iter().map(|it| {
            let [bind, accept] = [&it.bind, &it.accept].map(String::clone);
            let [connect, upstream] = [&it.connect, &it.upstream].map(String::clone);
            let [active, accepted, refused] =
                [it.active, it.accepted, it.refused].map(|count| count.to_string());
            vec![it.name.clone(), bind, accept, connect, upstream, active, accepted, refused]
        }),
    );
    groups(&mut out, stats);
    links(&mut out, stats);
    rnics(&mut out, stats);
    paragraph(
        &mut out,
        &["POLLER", "CORE", "PINNED", "CONNS", "TURNS", "IDLE", "PLACEMENT"],
        stats.pollers.iter().map(|it| {
            let core = it.core.map_or("-".to_owned(), |core| core.to_string());
            let idle = (it.turns_idle * 100).checked_div(it.turns).unwrap_or(0);
            let (connections, turns) = (it.connections.to_string(), it.turns.to_string());
            let pinned = if it.pinned { "yes" } else { "no" }.to_owned();
            let (index, idle) = (it.index.to_string(), format!("{idle} %"));
            vec![index, core, pinned, connections, turns, idle, or_dash(&it.placement)]
        }),
    );
    paragraph(
        &mut out,
        &["STAGE", "POLLER", "SAMPLES", "P50", "P99", "P99.9", "MAX"],
        stats.pollers.iter().flat_map(|poller| {
            let measured = poller.stages.iter().filter(|(_, stage)| stage.count > 0);
            measured.map(move |(name, stage)| {
                let times = [stage.p50_ns, stage.p99_ns, stage.p999_ns, stage.max_ns].map(micros);
                let [p50, p99, p999, most] = times;
                let (index, count) = (poller.index.to_string(), stage.count.to_string());
                vec![name.replace('_', " "), index, count, p50, p99, p999, most]
            })
        }),
    );
    out
}

/// A time in microseconds, with as many digits as are worth reading.
fn micros(nanos: u64) -> String {
    format!("{}.{} µs", nanos / 1_000, nanos % 1_000 / 100)
}

/// What everybody wants to know first.
fn summary(stats: &Stats) -> String {
    let Stats { totals, active, memory, .. } = stats;
    format!(
        "smcgate {}, up {}\n\
         active   {} smc-r, {} tcp, {} connecting, {} waiting, {} farewells, {} parked, {} kept\n\
         total    {} smc-r, {} tcp, {} handshakes failed, {} refused\n\
         bytes    {} in, {} out\n\
         memory   {} RMBs ({} of {} elements used), {} send pool ({} used)\n\
         confined {}\n",
        stats.version,
        duration(stats.uptime_s),
        active.smc,
        active.tcp,
        active.connecting,
        active.waiting,
        active.farewells,
        active.parked,
        active.kept,
        totals.connections_smc,
        totals.connections_tcp,
        totals.handshakes_failed,
        totals.refused_smc + totals.refused_tcp,
        bytes(totals.bytes_in),
        bytes(totals.bytes_out),
        bytes(memory.rmb_bytes),
        memory.rmbes_used,
        memory.rmbes,
        bytes(memory.send_bytes),
        bytes(memory.send_bytes_used),
        confinement(&stats.confinement),
    )
}

/// What the process may do no more, and what it still may.
fn confinement(it: &Confinement) -> String {
    let kept = match &it.capabilities[..] {
        [] => "none".to_owned(),
        some if some.len() > SOME => format!("{} of them", some.len()),
        some => some.join(" "),
    };
    let no_new_privs = if it.no_new_privs { "on" } else { "off" };
    let [dropped, landlock, seccomp] =
        [&it.dropped, &it.landlock, &it.seccomp].map(|it| or_dash(it));
    format!(
        "capabilities dropped: {dropped} (left: {kept}), no_new_privs: {no_new_privs}, landlock: \
         {landlock}, seccomp: {seccomp}"
    )
}

/// The link groups alone.
pub fn groups_text(stats: &Stats) -> String {
    alone(stats, groups)
}

/// The links alone, of all groups.
pub fn links_text(stats: &Stats) -> String {
    alone(stats, links)
}

/// The RNICs alone.
pub fn rnics_text(stats: &Stats) -> String {
    alone(stats, rnics)
}

fn alone(stats: &Stats, table: fn(&mut String, &Stats)) -> String {
    let mut out = String::new();
    table(&mut out, stats);
    out.trim_start().to_owned()
}

fn groups(out: &mut String, stats: &Stats) {
    let row = |it: &LinkGroup| {
        vec![
            it.id.to_string(),
            it.role.clone(),
            version_text(it.version, it.v2.as_ref()),
            it.peer_id.clone(),
            it.kind.clone(),
            it.links.len().to_string(),
            it.connections.to_string(),
            it.rmbs.to_string(),
            it.v2.as_ref().map_or("-".to_owned(), |v2| or_dash(&v2.eid)),
            host_text(it.v2.as_ref()),
        ]
    };
    let head =
        ["GROUP", "ROLE", "VERSION", "PEER", "TYPE", "LINKS", "CONNS", "RMBS", "EID", "HOST"];
    paragraph(out, &head, stats.link_groups.iter().map(row));
}

fn links(out: &mut String, stats: &Stats) {
    let links =
        stats.link_groups.iter().flat_map(|group| group.links.iter().map(move |it| (group.id, it)));
    let row = |(group, it): (u32, &Link)| {
        vec![
            it.id.to_string(),
            group.to_string(),
            it.number.to_string(),
            it.state.clone(),
            it.rnic.clone(),
            format!("{}-{}", it.qpn, it.peer_qpn),
            it.peer_gid.clone(),
            it.connections.to_string(),
            it.payload.to_string(),
        ]
    };
    let head = ["LINK", "GROUP", "NUMBER", "STATE", "RNIC", "QP", "PEER", "CONNS", "PAYLOAD"];
    paragraph(out, &head, links.map(row));
}

fn rnics(out: &mut String, stats: &Stats) {
    let row = |it: &Rnic| {
        let mut row =
            [&it.name, &it.kind, &it.device, &it.state, &it.gid].map(String::clone).to_vec();
        row.extend([it.links, it.mtu].iter().map(u32::to_string));
        row.extend([it.packets_in, it.packets_out, it.retransmits].iter().map(u64::to_string));
        let dropped = [it.icrc_errors, it.psn_errors, it.unknown_qp, it.rkey_errors];
        row.extend(dropped.iter().map(u64::to_string));
        row
    };
    let head = [
        "RNIC", "KIND", "DEVICE", "STATE", "GID", "LINKS", "MTU", "IN", "OUT", "AGAIN", "ICRC",
        "PSN", "NO-QP", "RKEY",
    ];
    paragraph(out, &head, stats.rnics.iter().map(row));
}

/// The connections of a page, and how many there are in all.
pub fn connections_text(page: &ConnectionPage) -> String {
    let mut out = String::new();
    let head = [
        "ID",
        "TRANSPORT",
        "STATE",
        "LISTENER",
        "APP",
        "PEER",
        "IN",
        "OUT",
        "AGE",
        "LINK",
        "VERSION",
        "EID",
        "HOST",
        "REASON",
        "PROCESS",
    ];
    table(&mut out, &head, page.connections.iter().map(connection_row));
    let shown = page.connections.len() as u64;
    if shown == page.total {
        // Writing to a String cannot fail.
        writeln!(out, "{shown} connections").ok();
    } else {
        writeln!(out, "{shown} of {} connections, page {}", page.total, page.page).ok();
    }
    out
}

fn connection_row(it: &Connection) -> Vec<String> {
    let place = match (it.transport, it.link_group, it.link) {
        (Transport::SmcR, Some(group), Some(link)) => format!("{group}/{link}"),
        (Transport::SmcR, Some(group), None) => group.to_string(),
        (Transport::SmcR, None, _) | (Transport::Tcp, _, _) => "-".to_owned(),
    };
    let reason = match &it.fallback {
        Some(reason) => format!("{:#010x} {}", reason.code, reason.name),
        None => "-".to_owned(),
    };
    vec![
        it.id.to_string(),
        it.transport.name().to_owned(),
        it.state.clone(),
        it.listener.clone(),
        it.app.clone(),
        it.peer.clone(),
        bytes(it.bytes_in),
        bytes(it.bytes_out),
        format!("{:.1}s", it.age_s),
        place,
        it.version.map_or("-".to_owned(), |version| version_text(version, it.v2.as_ref())),
        it.v2.as_ref().map_or("-".to_owned(), |v2| or_dash(&v2.eid)),
        host_text(it.v2.as_ref()),
        reason,
        it.process.as_ref().map_or("-".to_owned(), |process| process_text(process, it.memory)),
    ]
}

/// A local program, as `ps` would name it, and how it passes its bytes if not by a socket.
fn process_text(Process { pid, command, .. }: &Process, memory: Option<SharedMemory>) -> String {
    let memory = memory.map_or(String::new(), |memory| format!(" ({})", memory.name()));
    format!("{pid}/{}{memory}", or_dash(command))
}

/// Version and, where there is one, release: `1`, `2.0`, `2.1`.
fn version_text(version: u8, v2: Option<&GroupV2>) -> String {
    match v2 {
        Some(v2) => format!("{version}.{}", v2.release),
        None => version.to_string(),
    }
}

/// The peer's host and what it runs, as far as it has said so.
fn host_text(v2: Option<&GroupV2>) -> String {
    match v2 {
        Some(v2) if v2.peer_os.is_empty() => or_dash(&v2.peer_host),
        Some(v2) => format!("{} ({})", or_dash(&v2.peer_host), v2.peer_os),
        None => "-".to_owned(),
    }
}

fn or_dash(text: &str) -> String {
    if text.is_empty() { "-" } else { text }.to_owned()
}

/// A table behind an empty line, if it has rows.
fn paragraph(out: &mut String, head: &[&str], rows: impl Iterator<Item = Vec<String>>) {
    let mut rows = rows.peekable();
    if rows.peek().is_some() {
        out.push('\n');
        table(out, head, rows);
    }
}

/// Columns as wide as their widest cell; no blanks at the ends of lines.
fn table(out: &mut String, head: &[&str], rows: impl Iterator<Item = Vec<String>>) {
    let head = head.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
    let rows = std::iter::once(head).chain(rows).collect::<Vec<_>>();
    let columns = rows[0].len();
    let width_of = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths = (0..columns).map(width_of).collect::<Vec<_>>();
    for row in &rows {
        let mut line = String::new();
        for (cell, &width) in row.iter().zip(&widths) {
            write!(line, "{cell:width$}  ").ok();
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
}

/// Bytes with three digits and a binary unit.
fn bytes(count: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    // Ten bits per unit; a u64 has at most six of them.
    let unit = (count.ilog2() / 10).min(6);
    let tenths = (u128::from(count) * 10) >> (10 * unit);
    format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit as usize - 1])
}

/// Seconds as the two largest units.
fn duration(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3_600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m {}s", seconds % 60),
        (0, _, _) => format!("{hours}h {}m", minutes % 60),
        (_, _, _) => format!("{days}d {}h", hours % 24),
    }
}

/// More names than these nobody reads.
const SOME: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::{Fallback, FallbackReason, Link, Poller, Residence, tests::row};

    #[test]
    fn units_change_where_they_should() {
        let cases = [0, 1023, 1024, 1536, 1 << 20, (1 << 30) - 1, u64::MAX];
        let words = ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1023.9 MiB", "15.9 EiB"];
        assert_eq!(cases.map(bytes), words);
        assert_eq!([59, 60, 3_600, 90_000].map(duration), ["59s", "1m 0s", "1h 0m", "1d 1h"]);
    }

    /// The first question of every operator: is it accelerated, and if not, why not.
    #[test]
    fn connections_show_transport_and_reason() {
        let mut smc = row(1, "to-b", Transport::SmcR);
        (smc.link_group, smc.link, smc.version) = (Some(3), Some(2), Some(2));
        smc.v2 = Some(GroupV2 {
            release: 1,
            eid: "FLEET".to_owned(),
            peer_host: "b".to_owned(),
            peer_os: "Linux".to_owned(),
            ..GroupV2::default()
        });
        smc.process = Some(Process { pid: 7, uid: 0, command: "nginx".to_owned() });
        smc.memory = Some(SharedMemory::Shortcut);
        let mut tcp = row(20, "from-a", Transport::Tcp);
        tcp.fallback =
            Some(FallbackReason { code: 0x0301_0000, name: "peer has no SMC option".to_owned() });
        let page =
            ConnectionPage { total: 9, page: 2, connections: vec![smc, tcp], ..Default::default() };
        let words = connections_text(&page);
        let lines = words.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
        assert_eq!(
            lines.collect::<Vec<_>>(),
            [
                "ID TRANSPORT STATE LISTENER APP PEER IN OUT AGE LINK VERSION EID HOST REASON \
                 PROCESS",
                "1 smc-r active to-b 127.0.0.1:40001 10.8.0.2:7002 1001 B 1.9 KiB 1.5s 3/2 2.1 \
                 FLEET b (Linux) - 7/nginx (shortcut)",
                "20 tcp active from-a 127.0.0.1:40020 10.8.0.2:7002 1020 B 1.9 KiB 1.5s - - - - \
                 0x03010000 peer has no SMC option -",
                "2 of 9 connections, page 2",
            ]
        );
    }

    /// An RNIC that was closed leaves a gap in the numbers of pollers; metrics and logs have them
    /// with the gap, so the tables must, too.
    #[test]
    fn pollers_have_the_numbers_that_the_gateway_gives_them() {
        let stages =
            [("read_to_posted".to_owned(), Residence { count: 5, ..Residence::default() })];
        let poller = Poller { index: 7, stages: stages.into(), ..Poller::default() };
        let text = stats_text(&Stats { pollers: vec![poller], ..Stats::default() });
        assert!(text.contains("\n7       -     no"), "{text}");
        assert!(text.contains("\nread to posted  7       5"), "{text}");
    }

    /// Columns line up whatever is in them, and lines do not end in blanks.
    #[test]
    fn columns_line_up() {
        let mut out = String::new();
        let rows = [vec!["1".to_owned(), "é".to_owned(), "x".to_owned()]];
        table(&mut out, &["LONG", "B", "C"], rows.into_iter());
        assert_eq!(out, "LONG  B  C\n1     é  x\n");
    }

    #[test]
    fn stats_name_reasons_and_links() {
        let link = Link {
            id: 9,
            connections: 3,
            number: 1,
            state: "active".to_owned(),
            rnic: "soft0".to_owned(),
            qpn: 17,
            peer_qpn: 19,
            peer_gid: "::ffff:10.8.0.2".to_owned(),
            payload: 1420,
        };
        let group =
            LinkGroup { id: 3, role: "client".to_owned(), links: vec![link], ..Default::default() };
        let reason = Fallback {
            code: 0x0200_0000,
            name: "timed out".to_owned(),
            count: 4,
            ..Fallback::default()
        };
        let stats = Stats { fallbacks: vec![reason], link_groups: vec![group], ..Stats::default() };
        let text = stats_text(&stats);
        assert!(text.contains("\ntimed out  0x02000000  4\n"), "{text}");
        assert!(
            text.contains(
                "\n9     3      1       active  soft0  17-19  ::ffff:10.8.0.2  3      1420\n"
            ),
            "{text}"
        );
        assert!(!text.contains("POLLER"), "{text}");
    }
}
