//! Latencies: recorded in an HDR histogram, reported with the histogram attached.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// The longest latency that the histogram distinguishes: one minute, in nanoseconds.
const HIGHEST_NS: u64 = 60_000_000_000;

/// Collects latencies at a relative error of 0.1 %.
#[derive(Debug)]
pub(crate) struct Recorder {
    histogram: Histogram<u64>,
}

/// A summary of the collected latencies. All values are nanoseconds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Latency {
    /// How many latencies were recorded.
    pub(crate) count: u64,
    /// `None` where the tool that measured does not say.
    pub(crate) min_ns: Option<u64>,
    pub(crate) mean_ns: f64,
    pub(crate) p50_ns: u64,
    /// `None` where the tool that measured does not say. (In files from before 26 November 2026,
    /// redis has its 95th percentile here.)
    pub(crate) p90_ns: Option<u64>,
    pub(crate) p99_ns: u64,
    /// `None` where the tool that measured does not say.
    pub(crate) p999_ns: Option<u64>,
    pub(crate) max_ns: u64,
    /// The full histogram as `(latency_ns, count)`, latencies rounded up to 1 %, empty buckets
    /// left out.
    #[serde(default)]
    pub(crate) histogram_ns: Vec<(u64, u64)>,
}

impl Recorder {
    /// Creates an empty histogram.
    pub(crate) fn new() -> Self {
        let histogram = Histogram::new_with_bounds(1, HIGHEST_NS, 3).expect("constant bounds fit");
        Self { histogram }
    }

    /// Counts one latency. Latencies over a minute count as a minute.
    pub(crate) fn record(&mut self, latency_ns: u64) {
        self.histogram.saturating_record(latency_ns);
    }

    /// The summary and the full histogram, or `None` if nothing was recorded.
    pub(crate) fn summary(&self) -> Option<Latency> {
        let histogram = &self.histogram;
        if histogram.is_empty() {
            return None;
        }
        let mut coarse =
            Histogram::<u64>::new_with_bounds(1, HIGHEST_NS, 2).expect("constant bounds fit");
        for bucket in histogram.iter_recorded() {
            coarse.saturating_record_n(bucket.value_iterated_to(), bucket.count_at_value());
        }
        let pairs = coarse.iter_recorded().map(|b| (b.value_iterated_to(), b.count_at_value()));
        Some(Latency {
            count: histogram.len(),
            min_ns: Some(histogram.min()),
            mean_ns: histogram.mean(),
            p50_ns: histogram.value_at_quantile(0.50),
            p90_ns: Some(histogram.value_at_quantile(0.90)),
            p99_ns: histogram.value_at_quantile(0.99),
            p999_ns: Some(histogram.value_at_quantile(0.999)),
            max_ns: histogram.max(),
            histogram_ns: pairs.collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A published p99 must be the 99th percentile, not the maximum or a bucket beside it.
    #[test]
    fn percentiles_are_within_a_thousandth() {
        let mut recorder = Recorder::new();
        for latency_us in 1..=10_000 {
            recorder.record(latency_us * 1_000);
        }
        let latency = recorder.summary().unwrap();
        let near = |value: u64, expected: u64| value.abs_diff(expected) * 1_000 <= expected;
        assert!(near(latency.p50_ns, 5_000_000), "{latency:?}");
        assert!(near(latency.p90_ns.unwrap(), 9_000_000), "{latency:?}");
        assert!(near(latency.p99_ns, 9_900_000), "{latency:?}");
        assert!(near(latency.p999_ns.unwrap(), 9_990_000), "{latency:?}");
        assert_eq!(latency.count, 10_000);
    }

    /// The file must hold every sample, so that readers can recompute percentiles.
    #[test]
    fn the_attached_histogram_holds_every_sample() {
        let mut recorder = Recorder::new();
        for latency_ns in [70_000, 70_100, 90_000, 5_000_000, 90_000_000_000] {
            recorder.record(latency_ns);
        }
        let latency = recorder.summary().unwrap();
        assert_eq!(latency.histogram_ns.iter().map(|(_, count)| count).sum::<u64>(), 5);
        assert!(latency.histogram_ns.is_sorted());
        assert!(latency.histogram_ns.len() < 6);
    }

    /// A run that measured nothing must not report a latency of zero.
    #[test]
    fn nothing_recorded_is_no_latency() {
        assert!(Recorder::new().summary().is_none());
    }
}
