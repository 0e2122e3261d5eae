//! What proxies did for each request, beside which the budgets of the scenarios can be read.

use std::fmt::Write as _;

use crate::record::Measurement;
use crate::summary::Cell;

/// From how many connections on memory is stated for each of them.
const CROWD: u32 = 1_000;

/// Wake-ups, system calls, packets and memory of the proxies of each path; empty where no file says
/// anything about them.
pub(super) fn table(cells: &[Cell<'_>]) -> String {
    let mut text = String::new();
    for cell in cells {
        if cell.rounds.iter().all(|round| round.sleeps_proxies.is_none()) {
            continue;
        }
        let sleeps = cell.each(|round| Some(round.sleeps_proxies? as f64));
        let preemptions = cell.each(|round| Some(round.preemptions_proxies? as f64));
        let packets = cell.each(|round| Some(round.packets? as f64));
        let calls = cell.each(|round| Some(round.calls_per_s_proxies? * counted_s(round)?));
        let show = |each: Option<f64>| each.map_or_else(|| "–".into(), |each| format!("{each:.2}"));
        let rss = cell.rounds.iter().map(|round| round.rss_bytes_proxies_before).min();
        writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} | {:.1} MB | {} | {} |",
            cell.scenario,
            cell.path,
            show(sleeps),
            show(preemptions),
            show(calls),
            show(packets),
            rss.unwrap_or(0) as f64 / 2e6,
            for_each_connection(cell, |round| Some(round.peak_rss_bytes_proxies)),
            for_each_connection(cell, |round| round.rss_bytes_proxies_at_rest),
        )
        .expect("a string takes all");
    }
    if text.is_empty() {
        return text;
    }
    let head = "\nOf both proxies, for each request, or each megabyte of a stream; memory of one \
                of them.\n\n| scenario | path | sleeps | cores lost or offered | system calls | \
                packets of A | resident before | for each connection | at rest |\n\
                |---|---|---|---|---|---|---|---|---|\n";
    head.to_owned() + &text
}

/// Calls are counted for a part of the time, and requests for all of it, warm-up included: the time
/// that all requests would have taken at the rate that was measured.
fn counted_s(round: &Measurement) -> Option<f64> {
    match (round.gbit_per_s, round.requests_per_s) {
        (Some(gbit_per_s), _) => Some(round.bytes_total as f64 * 8e-9 / gbit_per_s),
        (None, Some(requests_per_s)) => Some(round.requests_total as f64 / requests_per_s),
        (None, None) => None,
    }
}

/// How far the memory of one proxy had grown for each connection of a crowd, when it was `rss`.
fn for_each_connection(cell: &Cell<'_>, rss: impl Fn(&Measurement) -> Option<u64>) -> String {
    // Within one host, the other gateway has no connections.
    let proxies = if cell.path.starts_with("host-") { 1.0 } else { 2.0 };
    let grown = |round: &&Measurement| {
        let grown = rss(round)?.saturating_sub(round.rss_bytes_proxies_before);
        (round.connections >= CROWD).then(|| grown as f64 / proxies / f64::from(round.connections))
    };
    let largest = cell.rounds.iter().filter_map(grown).reduce(f64::max);
    largest.map_or_else(|| "–".into(), |bytes| format!("{:.1} kB", bytes / 1e3))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::measurement;

    /// Budgets are compared with these figures: the unit must be one request.
    #[test]
    fn work_is_stated_for_each_request() {
        let round = Measurement {
            requests_per_s: Some(1_000.0),
            requests_total: 2_500,
            sleeps_proxies: Some(10_000),
            preemptions_proxies: Some(0),
            calls_per_s_proxies: Some(16_000.0),
            packets: Some(5_000),
            ..measurement("RR-1", "smcgate", 1)
        };
        let text = table(&Cell::group(&[round]));
        let line = "| RR-1 | smcgate | 4.00 | 0.00 | 16.00 | 2.00 | 0.0 MB | – | – |";
        assert!(text.lines().any(|l| l == line), "{text}");
    }

    /// And one megabyte, though a stream has no requests.
    #[test]
    fn work_of_a_stream_is_stated_for_each_megabyte() {
        let round = Measurement {
            gbit_per_s: Some(8.0),
            bytes_total: 2_000_000_000,
            sleeps_proxies: Some(500),
            preemptions_proxies: Some(0),
            calls_per_s_proxies: Some(30_000.0),
            ..measurement("STR", "haproxy", 1)
        };
        let text = table(&Cell::group(&[round]));
        let line = "| STR | haproxy | 0.25 | 0.00 | 30.00 | – | 0.0 MB | – | – |";
        assert!(text.lines().any(|l| l == line), "{text}");
    }

    /// Memory is that of one proxy, for each connection that it has.
    #[test]
    fn memory_of_a_crowd_is_stated_for_each_connection() {
        let mut round = measurement("IDLE-8999", "smcgate", 1);
        (round.connections, round.requests_total, round.sleeps_proxies) = (9_000, 1, Some(0));
        round.rss_bytes_proxies_before = 30_000_000;
        round.peak_rss_bytes_proxies = 102_000_000;
        round.rss_bytes_proxies_at_rest = Some(48_000_000);
        let text = table(&Cell::group(&[round]));
        assert!(text.lines().any(|line| line.ends_with("| 15.0 MB | 4.0 kB | 1.0 kB |")), "{text}");
    }
}
