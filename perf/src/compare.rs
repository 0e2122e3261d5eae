//! Compares two result files, to show the effect of a change on one machine.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use crate::machine::Machine;
use crate::record::{Measurement, Results};
use crate::summary::{Cell, Figure};

/// Medians of every scenario and path that both files have, in Markdown.
///
/// The ratio is after / before. `spread` is the largest round of `before` over the smallest: a
/// change within it is noise.
pub(crate) fn markdown(before: &Results, after: &Results) -> String {
    let label = |results: &Results| {
        let Machine { date, commit, version, .. } = &results.machine;
        format!("{date} ({})", if commit.is_empty() { version } else { commit })
    };
    let mut text = format!("Before: {}; after: {}.\n\n", label(before), label(after));
    let others = differences(&conditions(before, after), &conditions(after, before));
    if !others.is_empty() {
        text += "**Other conditions, which the ratios compare, too:**\n\n";
        text += &others;
        text += "\n";
    }
    text += "| scenario | path | figure | before | after | ratio | spread |\n";
    text += "|---|---|---|---|---|---|---|\n";
    let cells_after = Cell::group(&after.measurements);
    for old in Cell::group(&before.measurements) {
        let same = |new: &&Cell<'_>| new.scenario == old.scenario && new.path == old.path;
        let Some(new) = cells_after.iter().find(same) else { continue };
        for figure in Figure::ALL {
            let (Some(was), Some(is)) = (old.median(figure), new.median(figure)) else { continue };
            if was <= 0.0 {
                continue;
            }
            writeln!(
                text,
                "| {} | {} | {} | {} | {} | {:.2} | {:.2} |",
                old.scenario,
                old.path,
                figure.name(),
                old.show(figure),
                new.show(figure),
                is / was,
                old.spread(figure).unwrap_or(1.0),
            )
            .expect("a string takes all");
        }
    }
    text
}

/// What a file says of the conditions of its measurements: a name, and every value that there is.
type Conditions = Vec<(&'static str, BTreeSet<String>)>;

/// Everything that `results` records beside the figures of what `others` have, too; except date,
/// commits and versions, which are what is compared, and what the names of scenarios say.
fn conditions(results: &Results, others: &Results) -> Conditions {
    let Machine {
        date: _,
        commit: _,
        commit_before: _,
        version: _,
        version_before: _,
        cpu_model,
        cores,
        memory_bytes,
        kernel,
        congestion_control,
        mtu_bytes,
        programs,
        settings,
    } = &results.machine;
    let names = |m: &Measurement| (m.label(), m.path.clone());
    let theirs: BTreeSet<_> = others.measurements.iter().map(names).collect();
    let both: Vec<_> = results.measurements.iter().filter(|m| theirs.contains(&names(m))).collect();
    let each = |value: fn(&Measurement) -> String| both.iter().map(|m| value(m)).collect();
    let all = |list: &[String]| list.iter().cloned().collect();
    let of_machine = [
        ("processor", one(cpu_model)),
        ("cores", one(cores)),
        ("memory in bytes", one(memory_bytes)),
        ("kernel", one(kernel)),
        ("congestion control by default", one(congestion_control)),
        ("MTU", one(mtu_bytes)),
        ("programs", all(programs)),
        ("settings", all(settings)),
    ];
    let of_each = [
        ("cores of pollers", each(|m| m.pin.clone())),
        ("idle policy", each(|m| m.poll.clone())),
        ("congestion control of loopback", each(|m| m.local.clone())),
        (
            "µs for which rings are watched",
            each(|m| match m.spin_us {
                Some(spin_us) => spin_us.to_string(),
                None => "as programs decide".to_owned(),
            }),
        ),
        ("unconfined", each(|m| m.unconfined.to_string())),
        ("system calls counted", each(|m| m.calls_per_s_proxies.is_some().to_string())),
        ("congestion control", each(|m| format!("{} in {}", m.congestion_control, m.scenario))),
        ("connections", each(|m| format!("{} in {}", m.connections, m.scenario))),
        (
            "bytes of a message",
            each(|m| {
                let bytes = m.message_bytes.map_or_else(|| "unknown".into(), |b| b.to_string());
                format!("{bytes} in {}", m.scenario)
            }),
        ),
    ];
    of_machine.into_iter().chain(of_each).collect()
}

fn one(value: &impl ToString) -> BTreeSet<String> {
    BTreeSet::from([value.to_string()])
}

/// One line for each condition that only one of the files has.
fn differences(before: &Conditions, after: &Conditions) -> String {
    let mut text = String::new();
    for ((name, was), (_, is)) in before.iter().zip(after) {
        if was != is {
            let only = |these: &BTreeSet<String>, those| {
                let only: Vec<_> = these.difference(those).map(String::as_str).collect();
                if only.is_empty() { "–".to_owned() } else { only.join(", ") }
            };
            writeln!(
                text,
                "- {name}: only before: {}; only after: {}",
                only(was, is),
                only(is, was)
            )
            .expect("a string takes all");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Measurement;
    use crate::record::tests::{machine, measurement};

    fn results(gbits_per_s: &[f64]) -> Results {
        let measurements = (1..).zip(gbits_per_s).map(|(round, &gbit_per_s)| Measurement {
            gbit_per_s: Some(gbit_per_s),
            ..measurement("STR", "smcgate", round)
        });
        Results { machine: machine(), measurements: measurements.collect() }
    }

    /// Developers decide by this table whether to keep a change, so direction and noise must be
    /// right.
    #[test]
    fn ratio_is_after_over_before_beside_the_noise() {
        let text = markdown(&results(&[10.0, 8.0, 12.0]), &results(&[15.0, 15.0, 1.0]));
        let line = "| STR | smcgate | throughput | 10.0 Gbit/s | 15.0 Gbit/s | 1.50 | 1.50 |";
        assert!(text.lines().any(|l| l == line), "{text}");
        assert!(!text.contains("conditions"));
    }

    /// A difference between two machines, or two ways to measure, must not be taken for one between
    /// two commits.
    #[test]
    fn other_conditions_are_pointed_out() {
        type Change = fn(&mut Results);
        let changes: [(&str, Change); 13] = [
            ("kernel: only before: 6.18; only after: 5.15", |r| r.machine.kernel = "5.15".into()),
            ("processor", |r| r.machine.cpu_model = "Slide rule".into()),
            ("congestion control by", |r| r.machine.congestion_control = "cubic".into()),
            ("MTU: only before: 1500; only after: 9000", |r| r.machine.mtu_bytes = 9000),
            ("programs: only before: –; only after: HAProxy 3", |r| {
                r.machine.programs = vec!["HAProxy 3".into()];
            }),
            ("settings", |r| r.machine.settings.clear()),
            ("cores of pollers", |r| r.measurements[0].pin = "off".into()),
            ("idle policy", |r| r.measurements[0].poll = "spin".into()),
            ("congestion control of loopback", |r| r.measurements[0].local = "auto".into()),
            ("µs for which rings", |r| r.measurements[0].spin_us = Some(5)),
            ("unconfined", |r| r.measurements[0].unconfined = true),
            ("system calls counted", |r| r.measurements[0].calls_per_s_proxies = Some(1.0)),
            ("congestion control: only before: bbr in STR; only after: cubic in STR", |r| {
                r.measurements[0].congestion_control = "cubic".into();
            }),
        ];
        for (line, change) in changes {
            let mut other = results(&[1.0]);
            change(&mut other);
            // What only one of the files has is not compared.
            other.measurements.push(measurement("RR-1", "smcgate", 1));
            let text = markdown(&results(&[1.0]), &other);
            assert!(text.lines().any(|l| l.starts_with(&format!("- {line}"))), "{line}:\n{text}");
            assert_eq!(text.lines().filter(|line| line.starts_with("- ")).count(), 1, "{text}");
        }
    }
}
