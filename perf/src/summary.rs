//! Medians over rounds, which the tables show.

use crate::record::{Measurement, median};

/// A figure that tables show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Figure {
    /// Gbit/s of a stream, requests per second of everything else. More is better.
    Throughput,
    /// Median round trip, in nanoseconds. Less is better, as with all below.
    P50,
    /// 99th percentile of round trips, in nanoseconds.
    P99,
    /// CPU seconds of both proxies per gigabyte of a stream, per million requests otherwise.
    ProxyCpu,
    /// The same of the whole machine.
    MachineCpu,
}

impl Figure {
    /// All of them, in the order of a table's columns.
    pub(crate) const ALL: [Self; 5] =
        [Self::Throughput, Self::P50, Self::P99, Self::ProxyCpu, Self::MachineCpu];

    /// Its name in tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Throughput => "throughput",
            Self::P50 => "p50",
            Self::P99 => "p99",
            Self::ProxyCpu => "CPU of the proxies",
            Self::MachineCpu => "CPU of the machine",
        }
    }

    fn of(self, measurement: &Measurement) -> Option<f64> {
        let cpu = |cpu_s: f64| {
            if !measurement.can_divide_work() {
                return None;
            }
            measurement.per_gb(cpu_s).or_else(|| measurement.per_million_requests(cpu_s))
        };
        match self {
            Self::Throughput => measurement.gbit_per_s.or(measurement.requests_per_s),
            Self::P50 => measurement.rtt.as_ref().map(|rtt| rtt.p50_ns as f64),
            Self::P99 => measurement.rtt.as_ref().map(|rtt| rtt.p99_ns as f64),
            Self::ProxyCpu if measurement.path.ends_with("direct") => None,
            Self::ProxyCpu => cpu(measurement.cpu_s_proxies),
            Self::MachineCpu => cpu(measurement.cpu_s_machine),
        }
    }
}

/// All rounds of one scenario over one path.
#[derive(Debug)]
pub(crate) struct Cell<'a> {
    /// [`Measurement::label`].
    pub(crate) scenario: String,
    pub(crate) path: &'a str,
    pub(crate) rounds: Vec<&'a Measurement>,
}

impl<'a> Cell<'a> {
    /// Groups measurements, in the order in which scenarios and paths first appear.
    pub(crate) fn group(measurements: &'a [Measurement]) -> Vec<Self> {
        let mut cells: Vec<Self> = Vec::new();
        for measurement in measurements {
            let (scenario, path) = (measurement.label(), &measurement.path);
            match cells.iter_mut().find(|cell| cell.scenario == scenario && cell.path == path) {
                Some(cell) => cell.rounds.push(measurement),
                None => cells.push(Self { scenario, path, rounds: vec![measurement] }),
            }
        }
        cells
    }

    /// The median of `figure`, `None` where the scenario does not have it.
    pub(crate) fn median(&self, figure: Figure) -> Option<f64> {
        median(self.rounds.iter().filter_map(|measurement| figure.of(measurement)))
    }

    /// What `figure` was in each round, over what it was for `other` in the same round.
    pub(crate) fn ratios(&self, other: &Cell<'_>, figure: Figure) -> Ratios {
        let of_other = |round| other.rounds.iter().find(|measurement| measurement.round == round);
        let pairs = self.rounds.iter().filter_map(|ours| {
            let theirs = figure.of(of_other(ours.round)?)?;
            // A CPU time below the clock's tick reads as zero.
            (theirs > 0.0).then_some(figure.of(ours)? / theirs)
        });
        let mut sorted: Vec<f64> = pairs.collect();
        sorted.sort_by(f64::total_cmp);
        Ratios { sorted }
    }

    /// The largest over the smallest of all rounds.
    pub(crate) fn spread(&self, figure: Figure) -> Option<f64> {
        let values = || self.rounds.iter().filter_map(|measurement| figure.of(measurement));
        let smallest = values().reduce(f64::min).filter(|&smallest| smallest > 0.0)?;
        Some(values().reduce(f64::max)? / smallest)
    }

    /// The largest peak of the proxies' resident size.
    pub(crate) fn peak_rss_bytes(&self) -> u64 {
        self.rounds.iter().map(|m| m.peak_rss_bytes_proxies).max().unwrap_or(0)
    }

    /// The median of RoCE packets per second that gateway A received and sent, if it has any.
    pub(crate) fn packets_per_s(&self) -> Option<f64> {
        let rate = |m: &&Measurement| Some(m.packets? as f64 / m.counted_s()?);
        median(self.rounds.iter().filter_map(rate))
    }

    /// What `counted` is for each request, or each megabyte of a stream; the median of the rounds
    /// that have it.
    pub(crate) fn each(&self, counted: impl Fn(&Measurement) -> Option<f64>) -> Option<f64> {
        let each = |round: &&Measurement| {
            if !round.can_divide_work() {
                return None;
            }
            let units = match round.gbit_per_s {
                Some(_) => round.bytes_total as f64 / 1e6,
                None => round.requests_total as f64,
            };
            Some(counted(round)? / units).filter(|each| each.is_finite())
        };
        median(self.rounds.iter().filter_map(each))
    }

    /// Failed connections and requests of all rounds.
    fn errors(&self) -> u64 {
        self.rounds.iter().map(|measurement| measurement.errors).sum()
    }

    /// What stands beside the figures of a path that failed some of its connections.
    pub(crate) fn show_errors(&self) -> String {
        match self.errors() {
            0 => String::new(),
            errors => format!(" ({errors} errors)"),
        }
    }

    /// The median of `figure` with its unit, `–` if there is none. The throughput of short
    /// connections is followed by that of the stream beside them.
    pub(crate) fn show(&self, figure: Figure) -> String {
        let shown = self
            .median(figure)
            .map_or_else(|| "–".into(), |value| show(figure, value, self.is_stream()));
        let beside = median(self.rounds.iter().filter_map(|round| round.beside_gbit_per_s));
        match beside {
            Some(beside) if figure == Figure::Throughput => {
                format!("{shown} beside {beside:.1} Gbit/s")
            }
            Some(_) | None => shown,
        }
    }

    /// Whether throughput is Gbit/s and CPU is per gigabyte.
    pub(crate) fn is_stream(&self) -> bool {
        self.rounds.iter().any(|measurement| measurement.gbit_per_s.is_some())
    }
}

/// Ratios of rounds that followed one another, in ascending order. What disturbs the machine for
/// longer than a round disturbs both figures of a ratio.
#[derive(Debug)]
pub(crate) struct Ratios {
    sorted: Vec<f64>,
}

impl Ratios {
    pub(crate) fn median(&self) -> Option<f64> {
        median(self.sorted.iter().copied())
    }

    /// Between which two of them the true median lies with a probability of 95 % or more, however
    /// they are distributed. It takes six rounds to say that.
    pub(crate) fn confidence(&self) -> Option<(f64, f64)> {
        let count = self.sorted.len();
        // Each is below the true median with probability 1/2. How probable is it that no more than
        // `below` of them are?
        let (mut below, mut term, mut tail) = (0, 0.5_f64.powi(i32::try_from(count).ok()?), 0.0);
        while 2.0 * (tail + term) <= 0.05 {
            tail += term;
            term *= (count - below) as f64 / (below + 1) as f64;
            below += 1;
        }
        (below > 0).then(|| (self.sorted[below - 1], self.sorted[count - below]))
    }
}

/// `value` of `figure` with its unit.
pub(crate) fn show(figure: Figure, value: f64, stream: bool) -> String {
    match figure {
        Figure::Throughput if stream => format!("{value:.1} Gbit/s"),
        Figure::Throughput if value >= 10_000.0 => format!("{:.1} k/s", value / 1e3),
        Figure::Throughput => format!("{value:.0} /s"),
        Figure::P50 | Figure::P99 if value >= 1e6 => format!("{:.2} ms", value / 1e6),
        Figure::P50 | Figure::P99 => format!("{:.1} µs", value / 1e3),
        Figure::ProxyCpu | Figure::MachineCpu if stream => format!("{value:.2} s/GB"),
        Figure::ProxyCpu | Figure::MachineCpu => format!("{value:.1} s/M"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::measurement;

    /// The tables of the binomial distribution: published claims rest on them.
    #[test]
    fn the_median_is_where_rounds_say_it_is() {
        for (rounds, between) in [
            (5, None),
            (6, Some((1, 6))),
            (8, Some((1, 8))),
            (9, Some((2, 8))),
            (10, Some((2, 9))),
            (20, Some((6, 15))),
        ] {
            let sorted: Vec<f64> = (1..=rounds).map(f64::from).collect();
            let between = between.map(|(low, high)| (f64::from(low), f64::from(high)));
            assert_eq!(Ratios { sorted }.confidence(), between, "{rounds} rounds");
        }
        assert_eq!(Ratios { sorted: Vec::new() }.confidence(), None);
    }

    /// CRR-beside-STR: the CPU time of the stream must not be charged to the requests beside it.
    #[test]
    fn nobody_knows_whose_cpu_time_it_was_beside_a_stream() {
        let alone = Measurement {
            requests_per_s: Some(100.0),
            requests_total: 100,
            sleeps_proxies: Some(200),
            cpu_s_proxies: 1.0,
            cpu_s_machine: 2.0,
            ..measurement("CRR", "smcgate", 1)
        };
        let beside = Measurement {
            scenario: "CRR-beside-STR".into(),
            beside_gbit_per_s: Some(3.0),
            ..alone.clone()
        };
        for (measurement, is_known) in [(alone, true), (beside, false)] {
            let measurements = [measurement];
            let cells = Cell::group(&measurements);
            for figure in [Figure::ProxyCpu, Figure::MachineCpu] {
                assert_eq!(cells[0].median(figure).is_some(), is_known, "{figure:?}");
            }
            let sleeps = cells[0].each(|round| Some(round.sleeps_proxies? as f64));
            assert_eq!(sleeps.is_some(), is_known);
            assert!(cells[0].median(Figure::Throughput).is_some());
        }
    }

    /// What was counted while a crowd came and settled is not of the requests beside it, nor of the
    /// seconds in which these were measured.
    #[test]
    fn the_work_of_a_crowd_is_not_that_of_its_requests() {
        let crowd = Measurement {
            requests_total: 100,
            sleeps_proxies: Some(200),
            cpu_s_proxies: 1.0,
            packets: Some(2_600),
            elapsed_s: 3.0,
            observed_s: Some(26.0),
            ..measurement("IDLE-9000", "smcgate", 1)
        };
        let older = Measurement { observed_s: None, ..crowd.clone() };
        for (measurement, packets_per_s) in [(crowd, Some(100.0)), (older, None)] {
            let measurements = [measurement];
            let cells = Cell::group(&measurements);
            assert_eq!(cells[0].packets_per_s(), packets_per_s);
            assert_eq!(cells[0].median(Figure::ProxyCpu), None);
            assert_eq!(cells[0].each(|round| Some(round.sleeps_proxies? as f64)), None);
        }
    }

    /// A round in which everything was slow must not change a ratio.
    #[test]
    fn ratios_are_of_the_same_round() {
        let rate = |path, round, requests_per_s| {
            let requests_per_s = Some(requests_per_s);
            Measurement { requests_per_s, ..measurement("RR-1", path, round) }
        };
        let all = [
            rate("haproxy", 1, 100.0),
            rate("smcgate", 1, 200.0),
            rate("haproxy", 2, 10.0),
            rate("smcgate", 2, 20.0),
            rate("smcgate", 3, 500.0),
        ];
        let cells = Cell::group(&all);
        let ratios = cells[1].ratios(&cells[0], Figure::Throughput);
        assert_eq!(ratios.sorted, [2.0, 2.0]);
        assert_eq!(ratios.median(), Some(2.0));
    }
}
