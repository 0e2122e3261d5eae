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
        let cpu =
            |cpu_s| measurement.per_gb(cpu_s).or_else(|| measurement.per_million_requests(cpu_s));
        match self {
            Self::Throughput => measurement.gbit_per_s.or(measurement.requests_per_s),
            Self::P50 => measurement.rtt.as_ref().map(|rtt| rtt.p50_ns as f64),
            Self::P99 => measurement.rtt.as_ref().map(|rtt| rtt.p99_ns as f64),
            Self::ProxyCpu if measurement.path == "direct" => None,
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
        median(self.rounds.iter().filter_map(|m| Some(m.packets? as f64 / m.elapsed_s)))
    }

    /// Failed connections and requests of all rounds.
    pub(crate) fn errors(&self) -> u64 {
        self.rounds.iter().map(|measurement| measurement.errors).sum()
    }

    /// The median of `figure` with its unit, `–` if there is none.
    pub(crate) fn show(&self, figure: Figure) -> String {
        self.median(figure)
            .map_or_else(|| "–".into(), |value| show(figure, value, self.is_stream()))
    }

    /// Whether throughput is Gbit/s and CPU is per gigabyte.
    pub(crate) fn is_stream(&self) -> bool {
        self.rounds.iter().any(|measurement| measurement.gbit_per_s.is_some())
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
