//! Markdown tables: medians, what proxies did for each request, and ratios with their targets.

mod ratios;
mod work;

use std::fmt::Write as _;

use crate::machine::Machine;
use crate::record::{BEFORE, Measurement, Results};
use crate::summary::{Cell, Figure};

/// One line about one measurement, printed during the run.
pub(crate) fn progress(measurement: &Measurement) -> String {
    let cells = Cell::group(std::slice::from_ref(measurement));
    let Measurement { path, round, errors, .. } = measurement;
    let mut line = format!("{:<12} {path:<8} round {round}:", cells[0].scenario);
    for figure in Figure::ALL {
        write!(line, "  {} {}", figure.name(), cells[0].show(figure)).expect("a string takes all");
    }
    if let Some(one_way_ns) = measurement.one_way_p50_ns {
        write!(line, "  one way p50 {:.1} µs", one_way_ns as f64 / 1e3).expect("as above");
    }
    if *errors > 0 {
        write!(line, "  {errors} ERRORS").expect("as above");
    }
    line
}

/// The whole report in Markdown: machine, medians, ratios.
pub(crate) fn markdown(results: &Results) -> String {
    let cells = Cell::group(&results.measurements);
    let mut text = preamble(&results.machine, &results.measurements);
    text += "\n| scenario | path | throughput | RTT p50 | RTT p99 | CPU, proxies | CPU, machine \
             | proxies' peak RSS | packets |\n|---|---|---|---|---|---|---|---|---|\n";
    for cell in &cells {
        let figures: Vec<String> = Figure::ALL.iter().map(|&figure| cell.show(figure)).collect();
        let rss = match cell.peak_rss_bytes() {
            0 => "–".to_owned(),
            bytes => format!("{:.1} MB", bytes as f64 / 1e6),
        };
        let errors = cell.show_errors();
        let (scenario, path) = (&cell.scenario, cell.path);
        let packets = cell.packets_per_s();
        let packets = packets.map_or_else(|| "–".into(), |rate| format!("{:.1} k/s", rate / 1e3));
        let figures = figures.join(" | ");
        writeln!(text, "| {scenario} | {path}{errors} | {figures} | {rss} | {packets} |")
            .expect("a string takes all");
    }
    text + &work::table(&cells)
        + &sustained(&results.measurements)
        + &ratios::to_haproxy(&cells)
        + &ratios::of_kinds(&cells)
        + &ratios::of_builds(&cells)
}

fn preamble(machine: &Machine, measurements: &[Measurement]) -> String {
    let rounds = measurements.iter().map(|measurement| measurement.round).max().unwrap_or(0);
    let mut text = format!(
        "Medians of {rounds} interleaved rounds, {}, commit {}; {} ({} cores), Linux {}, veth with \
         MTU {}, congestion control {} by default.",
        machine.date,
        if machine.commit.is_empty() { "unknown" } else { &machine.commit },
        machine.cpu_model,
        machine.cores,
        machine.kernel,
        machine.mtu_bytes,
        machine.congestion_control,
    );
    if !machine.version.is_empty() {
        write!(text, " {}.", machine.version).expect("a string takes all");
    }
    if measurements.iter().any(|measurement| measurement.path.ends_with(BEFORE)) {
        let commit = match machine.commit_before.is_empty() {
            true => "of another commit",
            false => &machine.commit_before,
        };
        write!(text, " {BEFORE}: the gateways {commit}.").expect("a string takes all");
    }
    if measurements.iter().any(|measurement| measurement.local == "auto") {
        text +=
            " On loopback, gateways spare their connections with applications what paces (bbr).";
    }
    for program in &machine.programs {
        write!(text, " {program}.").expect("a string takes all");
    }
    if !machine.settings.is_empty() {
        write!(text, " {}.", machine.settings.join(", ")).expect("a string takes all");
    }
    let mut pins: Vec<&str> = measurements.iter().map(|m| m.pin.as_str()).collect();
    pins.dedup();
    write!(text, " Cores of pollers: {}.", pins.join(", ")).expect("a string takes all");
    let mut policies: Vec<&str> = measurements.iter().map(|m| m.poll.as_str()).collect();
    policies.dedup();
    write!(text, " Idle policy: {}.", policies.join(", ")).expect("a string takes all");
    if measurements.iter().any(|measurement| measurement.unconfined) {
        text += " The gateways kept what they may do (unconfined).";
    }
    if measurements.iter().any(|measurement| measurement.calls_per_s_proxies.is_some()) {
        text += " System calls of proxies were counted, which slows whoever makes many.";
    }
    let mut spins: Vec<u32> = measurements.iter().filter_map(|m| m.spin_us).collect();
    spins.dedup();
    for spin_us in spins {
        write!(text, " Programs watch their rings for {spin_us} µs.").expect("a string takes all");
    }
    text += " CPU is seconds per GB (10⁹ bytes) of a stream, per million requests otherwise; \
             one way is RTT / 2. A ratio is the median of those of the rounds.\n";
    text
}

/// The rates of short connections over a minute, and which host has them in TIME_WAIT at the end.
fn sustained(measurements: &[Measurement]) -> String {
    let mut text = String::new();
    for measurement in measurements {
        let Some(left) = measurement.time_waits else { continue };
        let rates = measurement.per_s_each_5s.iter().map(|rate| format!("{rate:.0}"));
        let rates: Vec<String> = rates.collect();
        let endurance =
            measurement.endurance().map_or_else(|| "–".into(), |ratio| format!("{ratio:.2}"));
        writeln!(
            text,
            "| {} | {} | {} | {endurance} | {} | {} ({}) | {} | {} |",
            measurement.scenario,
            measurement.path,
            rates.join(" "),
            left.client,
            left.proxy_a,
            left.proxy_a_towards_b,
            left.proxy_b,
            left.server,
        )
        .expect("a string takes all");
    }
    if text.is_empty() {
        return text;
    }
    let head = "\n| scenario | path | per second, every 5 s | last 20 s / first 20 s \
                (≥ 0.9) | TIME_WAIT: client | proxy A (towards B) | proxy B | server |\n\
                |---|---|---|---|---|---|---|---|\n";
    head.to_owned() + &text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::latency::Recorder;
    use crate::record::tests::{machine, measurement};
    use crate::rig::time_wait::TimeWaits;

    fn rr(path: &str, round: u32, requests_per_s: f64, rtt_us: u64) -> Measurement {
        let mut recorder = Recorder::new();
        recorder.record(rtt_us * 1_000);
        Measurement {
            requests_per_s: Some(requests_per_s),
            rtt: recorder.summary(),
            requests_total: 1_000_000,
            cpu_s_proxies: 2.0,
            cpu_s_machine: 5.0,
            ..measurement("RR-32", path, round)
        }
    }

    fn stream(path: &str, gbit_per_s: f64, cpu_s_proxies: f64) -> Measurement {
        Measurement {
            gbit_per_s: Some(gbit_per_s),
            bytes_total: 4_000_000_000,
            cpu_s_proxies,
            cpu_s_machine: 2.0 * cpu_s_proxies,
            ..measurement("STR", path, 1)
        }
    }

    fn report(measurements: Vec<Measurement>) -> String {
        markdown(&Results { machine: machine(), measurements })
    }

    #[track_caller]
    fn assert_line(text: &str, start: &str, end: &str) {
        let found = text.lines().any(|line| line.starts_with(start) && line.ends_with(end));
        assert!(found, "no line {start:?} … {end:?} in\n{text}");
    }

    /// These lines are published. An inverted ratio would turn a loss into a win.
    #[test]
    fn ratios_are_ours_over_theirs_beside_the_target() {
        let text = report(vec![
            rr("haproxy", 1, 60_000.0, 500),
            rr("smcgate", 1, 120_000.0, 400),
            stream("haproxy", 10.0, 4.0),
            stream("smcgate", 14.0, 2.0),
        ]);
        let line = "| RR-32 | throughput | 60.0 k/s | 120.0 k/s |";
        assert_line(&text, line, "| 2.00 | – | ≥ 1.5 met |");
        assert_line(&text, "| RR-32 | p99 |", "| 0.80 | – | ≤ 0.7 **missed** |");
        assert_line(&text, "| RR-32 | CPU of the proxies | 2.0 s/M | 2.0 s/M |", "| 1.00 | – |  |");
        assert_line(&text, "| STR | throughput |", "| 1.40 | – | ≥ 1.5 **missed** |");
        assert_line(&text, "| STR | CPU of the machine | 2.00 s/GB |", "| 0.50 | – | ≤ 0.7 met |");
    }

    /// Gateways with RNICs of other kinds have lines of their own.
    #[test]
    fn each_kind_of_rnic_is_compared() {
        let packets = |mut measurement: Measurement| {
            measurement.packets = Some(2_000_000);
            measurement.elapsed_s = 2.0;
            measurement
        };
        let text = report(vec![
            stream("haproxy", 10.0, 4.0),
            packets(stream("smcgate-memif", 15.0, 2.0)),
            stream("smcgate-shm", 20.0, 2.0),
        ]);
        assert_line(&text, "| STR | smcgate-memif | 15.0 Gbit/s |", "| 1000.0 k/s |");
        assert_line(&text, "| STR | smcgate-shm | 20.0 Gbit/s |", "| – |");
        assert_line(&text, "| STR, smcgate-memif | throughput |", "| 1.50 | – | ≥ 1.5 met |");
        assert_line(&text, "| STR, smcgate-shm | throughput |", "| 2.00 | – | ≥ 1.5 met |");
    }

    /// The goal of gateways that share memory is one beside those over UDP.
    #[test]
    fn shared_memory_is_compared_with_packets() {
        let text = report(vec![
            stream("smcgate", 10.0, 4.0),
            stream("smcgate-shm", 19.0, 2.0),
            stream("smcgate-packet", 30.0, 2.0),
        ]);
        assert_line(
            &text,
            "| STR | throughput | 10.0",
            "| 19.0 Gbit/s | 1.90 | – | ≥ 2 **missed** |",
        );
        assert!(text.contains("| figure | roce-udp | shm |") && !text.contains("HAProxy pair"));
    }

    /// Whether a change is kept is decided by this table: the ratios are of the same rounds, and
    /// after over before.
    #[test]
    fn two_builds_are_compared_round_by_round() {
        let (before, after) = ("smcgate@before", "smcgate");
        let text = report(vec![
            rr(before, 1, 60_000.0, 500),
            rr(after, 1, 90_000.0, 400),
            rr(after, 2, 15_000.0, 400),
            rr(before, 2, 10_000.0, 500),
        ]);
        assert_line(
            &text,
            "| RR-32, smcgate | throughput | 35.0 k/s | 52.5 k/s |",
            "| 1.50 | – |  |",
        );
        assert!(text.contains("@before: the gateways of another commit."), "{text}");
    }

    /// The table shows medians, with one line for all rounds of a path.
    #[test]
    fn rounds_become_one_line() {
        let rounds = [70_000.0, 10_000.0, 60_000.0];
        let text = report((1..).zip(rounds).map(|(n, rate)| rr("direct", n, rate, 90)).collect());
        assert_line(&text, "| RR-32 | direct | 60.0 k/s | 90", "| – | 5.0 s/M | – | – |");
        assert!(text.starts_with("Medians of 3 interleaved rounds"), "{text}");
        assert!(!text.contains("| ratio |"), "no ratio without a HAProxy pair");
    }

    /// The table must show a collapse of the rate, and which host has run out of ports.
    #[test]
    fn a_collapse_is_shown() {
        let rates = [7_000.0, 7_000.0, 7_000.0, 7_000.0, 600.0, 400.0, 400.0, 300.0, 300.0];
        let left = TimeWaits { proxy_a: 14_100, proxy_a_towards_b: 14_000, ..TimeWaits::default() };
        let text = report(vec![Measurement {
            per_s_each_5s: rates.to_vec(),
            time_waits: Some(left),
            ..measurement("CRR-sustained", "smcgate", 1)
        }]);
        let end = "300 300 | 0.05 | 0 | 14100 (14000) | 0 | 0 |";
        assert_line(&text, "| CRR-sustained | smcgate | 7000 7000", end);
    }

    /// A row with failed connections must say so.
    #[test]
    fn errors_are_shown() {
        let failing = Measurement { errors: 3, ..rr("smcgate", 1, 1.0, 1) };
        assert!(progress(&failing).ends_with("3 ERRORS"));
        assert!(report(vec![failing.clone()]).contains("smcgate (3 errors)"));
        // Nor may a ratio look good because the slowest had no answer.
        let text = report(vec![failing, rr("haproxy", 1, 2.0, 1)]);
        let ratios = text.lines().filter(|line| line.contains(" (3 errors) | 0."));
        assert!(ratios.count() > 0, "{text}");
    }
}
