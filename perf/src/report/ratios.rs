//! Ratios of two paths or builds, round by round, and what they should be.

use std::fmt::Write as _;

use crate::record::BEFORE;
use crate::summary::{Cell, Figure};

/// What a ratio should be.
#[derive(Clone, Copy, Debug)]
enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

/// A performance goal of the design. It is shown in reports but never asserted.
struct Target {
    scenarios: &'static [&'static str],
    figure: Figure,
    bound: Bound,
}

/// The goals of a pair of gateways beside the HAProxy pair of the same rounds.
const TO_HAPROXY: [Target; 10] = [
    Target { scenarios: &["RR-1"], figure: Figure::P50, bound: Bound::AtMost(0.5) },
    Target { scenarios: &["RR-1"], figure: Figure::P99, bound: Bound::AtMost(0.6) },
    Target {
        scenarios: &["RR-1 beside 1@5", "RR-1 beside 2@5", "RR-1 beside 2@0"],
        figure: Figure::P50,
        bound: Bound::AtMost(1.0),
    },
    Target {
        scenarios: &["RR-32", "RR-32-http"],
        figure: Figure::Throughput,
        bound: Bound::AtLeast(1.5),
    },
    Target { scenarios: &["RR-32", "RR-32-http"], figure: Figure::P99, bound: Bound::AtMost(0.7) },
    Target {
        scenarios: &["STR", "STR-cubic", "STR-reverse"],
        figure: Figure::Throughput,
        bound: Bound::AtLeast(1.5),
    },
    Target {
        scenarios: &["STR beside 1@5", "STR beside 2@5", "STR beside 2@0"],
        figure: Figure::Throughput,
        bound: Bound::AtLeast(1.0),
    },
    Target {
        scenarios: &["STR", "STR-cubic", "STR-reverse", "RR-1", "RR-32", "CRR"],
        figure: Figure::MachineCpu,
        bound: Bound::AtMost(0.7),
    },
    Target {
        scenarios: &["CRR", "CRR-http", "CRR-sustained"],
        figure: Figure::Throughput,
        bound: Bound::AtLeast(1.0),
    },
    Target {
        scenarios: &["CRR-sustained-client"],
        figure: Figure::Throughput,
        bound: Bound::AtLeast(5.0),
    },
];

/// The goals of gateways that share memory, beside the same gateways over RoCE in software.
const SHM_TO_UDP: [Target; 2] = [
    Target { scenarios: &["RR-1"], figure: Figure::P50, bound: Bound::AtMost(0.33) },
    Target {
        scenarios: &["STR", "STR-cubic"],
        figure: Figure::Throughput,
        bound: Bound::AtLeast(2.0),
    },
];

/// Pairs of gateways against the HAProxy pair, figure by figure; empty without both.
pub(super) fn to_haproxy(cells: &[Cell<'_>]) -> String {
    let ours = |path: &str| path.starts_with("smcgate") && !path.ends_with(BEFORE);
    let rows = cells.iter().filter(|cell| ours(cell.path)).map(|cell| {
        let rnics = if cell.path == "smcgate" { "" } else { cell.path };
        let theirs = of(cells, &cell.scenario, "haproxy");
        rows(rnics, theirs, cell, |figure, ratio| verdict(&TO_HAPROXY, cell, figure, ratio))
    });
    table(["HAProxy pair", "smcgate pair", "target"], rows.collect())
}

/// The pair that shares memory against the one over RoCE in software; empty without both.
pub(super) fn of_kinds(cells: &[Cell<'_>]) -> String {
    let rows = cells.iter().filter(|cell| cell.path == "smcgate-shm").map(|cell| {
        let over_udp = of(cells, &cell.scenario, "smcgate");
        rows("", over_udp, cell, |figure, ratio| verdict(&SHM_TO_UDP, cell, figure, ratio))
    });
    table(["roce-udp", "shm", "target"], rows.collect())
}

/// Each path with gateways against the same with those of before; empty without both.
pub(super) fn of_builds(cells: &[Cell<'_>]) -> String {
    let rows = cells.iter().map(|cell| {
        let before = of(cells, &cell.scenario, &format!("{}{BEFORE}", cell.path));
        rows(cell.path, before, cell, |_, _| String::new())
    });
    table(["before", "after", ""], rows.collect())
}

fn of<'a>(cells: &'a [Cell<'a>], scenario: &str, path: &str) -> Option<&'a Cell<'a>> {
    cells.iter().find(|cell| cell.scenario == scenario && cell.path == path)
}

/// The lines of `ours` over `theirs`. `note` is for what a scenario's name does not say.
fn rows(
    note: &str,
    theirs: Option<&Cell<'_>>,
    ours: &Cell<'_>,
    verdict: impl Fn(Figure, f64) -> String,
) -> String {
    let mut text = String::new();
    let Some(theirs) = theirs else { return text };
    let separator = if note.is_empty() { "" } else { ", " };
    for figure in Figure::ALL {
        let ratios = ours.ratios(theirs, figure);
        let Some(ratio) = ratios.median() else { continue };
        let confidence = ratios
            .confidence()
            .map_or_else(|| "–".into(), |(low, high)| format!("{low:.2}–{high:.2}"));
        writeln!(
            text,
            "| {}{separator}{note} | {} | {}{} | {}{} | {ratio:.2} | {confidence} | {} |",
            ours.scenario,
            figure.name(),
            theirs.show(figure),
            theirs.show_errors(),
            ours.show(figure),
            ours.show_errors(),
            verdict(figure, ratio),
        )
        .expect("a string takes all");
    }
    text
}

/// `rows` under a head, if there are any.
fn table([theirs, ours, last]: [&str; 3], rows: String) -> String {
    if rows.is_empty() {
        return rows;
    }
    format!(
        "\n| scenario | figure | {theirs} | {ours} | ratio | with 95 % | {last} |\n\
         |---|---|---|---|---|---|---|\n{rows}"
    )
}

/// The target of a ratio and whether it is met; empty where the design sets none.
fn verdict(targets: &[Target], cell: &Cell<'_>, figure: Figure, ratio: f64) -> String {
    let scenario = &&cell.scenario[..];
    let target = targets
        .iter()
        .find(|target| target.figure == figure && target.scenarios.contains(scenario));
    let Some(target) = target else { return String::new() };
    let (text, met) = match target.bound {
        Bound::AtLeast(bound) => (format!("≥ {bound}"), ratio >= bound),
        Bound::AtMost(bound) => (format!("≤ {bound}"), ratio <= bound),
    };
    format!("{text} {}", if met { "met" } else { "**missed**" })
}
