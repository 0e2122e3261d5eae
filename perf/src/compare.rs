//! Compares two result files, to show the effect of a change on one machine.

use std::fmt::Write as _;

use crate::record::Results;
use crate::summary::{Cell, Figure};

/// Medians of every scenario and path that both files have, in Markdown.
///
/// The ratio is after / before. `spread` is the largest round of `before` over the smallest: a
/// change within it is noise.
pub(crate) fn markdown(before: &Results, after: &Results) -> String {
    let label =
        |results: &Results| format!("{} ({})", results.machine.date, results.machine.commit);
    let mut text = format!("Before: {}; after: {}.\n\n", label(before), label(after));
    if before.machine.cpu_model != after.machine.cpu_model
        || before.machine.kernel != after.machine.kernel
    {
        text += "**Different machines or kernels: the ratios compare these, too.**\n\n";
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
        assert!(!text.contains("Different machines"));
    }

    /// A difference between two machines must not be taken for one between two commits.
    #[test]
    fn another_machine_is_pointed_out() {
        let mut other = results(&[1.0]);
        other.machine.kernel = "5.15".into();
        assert!(markdown(&results(&[1.0]), &other).contains("Different machines"));
    }
}
