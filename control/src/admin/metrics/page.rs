//! Metrics, one at a time, and the labels of their samples.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;

use crate::stats::{Residence, Spread};

/// What a histogram of times says.
pub(super) struct Times {
    count: u64,
    sum_ns: u64,
    /// How many are in each bucket, and not in the one before it.
    buckets: Vec<(f64, u64)>,
}

impl From<&Residence> for Times {
    fn from(stage: &Residence) -> Self {
        let buckets = octaves(&stage.buckets);
        Self { count: stage.count, sum_ns: stage.sum_ns, buckets }
    }
}

impl From<&Spread> for Times {
    fn from(spread: &Spread) -> Self {
        let counted: u64 = spread.buckets.iter().map(|(_, count)| count).sum();
        let buckets = spread.buckets.iter().map(|(end, count)| (seconds(*end), *count));
        let longer = (f64::INFINITY, spread.count - counted);
        let buckets = buckets.chain([longer]).collect();
        Self { count: spread.count, sum_ns: spread.sum_ns, buckets }
    }
}

/// How many times are below each power of two of nanoseconds, from 1 us to 17 s, but not below the
/// one before it; then how many are longer.
fn octaves(buckets: &[(u64, u64)]) -> Vec<(f64, u64)> {
    let between = |above: u64, most: u64| {
        let within = buckets.iter().filter(|(end, _)| (above + 1..=most).contains(end));
        within.map(|(_, count)| count).sum()
    };
    let octaves = (10..35).map(|exponent| {
        let least = if exponent == 10 { 0 } else { 1 << (exponent - 1) };
        (seconds(1 << exponent), between(least, 1 << exponent))
    });
    octaves.chain([(f64::INFINITY, between(1 << 34, u64::MAX))]).collect()
}

/// A time in seconds.
#[allow(clippy::cast_precision_loss, reason = "nobody reads more than 15 digits")]
fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

pub(super) type Labels = Vec<(&'static str, String)>;

/// A number without labels, as the only sample of its metric.
pub(super) fn plain(number: u64) -> [(Labels, u64); 1] {
    [(Labels::new(), number)]
}

pub(super) fn transport(name: &str) -> Labels {
    vec![("transport", name.to_owned())]
}

pub(super) fn kind(name: &str) -> Labels {
    vec![("kind", name.to_owned())]
}

/// Where the metrics go, one at a time.
pub(super) struct Page<'a>(pub(super) DescriptorEncoder<'a>);

impl Page<'_> {
    pub(super) fn counter(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<Unit>,
        samples: impl IntoIterator<Item = (Labels, u64)>,
    ) -> fmt::Result {
        self.numbers((name, help, unit), MetricType::Counter, samples, |sample, number| {
            sample.encode_counter::<NoLabelSet, _, u64>(&number, None)
        })
    }

    pub(super) fn gauge(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<Unit>,
        samples: impl IntoIterator<Item = (Labels, u64)>,
    ) -> fmt::Result {
        self.numbers((name, help, unit), MetricType::Gauge, samples, |sample, number| {
            sample.encode_gauge(&number)
        })
    }

    /// Numbers, each written by `encode`.
    fn numbers(
        &mut self,
        (name, help, unit): (&str, &str, Option<Unit>),
        kind: MetricType,
        samples: impl IntoIterator<Item = (Labels, u64)>,
        encode: impl Fn(&mut MetricEncoder<'_>, u64) -> fmt::Result,
    ) -> fmt::Result {
        let help = help.trim_end_matches('.');
        let mut metric = self.0.encode_descriptor(name, help, unit.as_ref(), kind)?;
        for (labels, number) in samples {
            match labels.is_empty() {
                true => encode(&mut metric, number)?,
                false => encode(&mut metric.encode_family(&labels)?, number)?,
            }
        }
        Ok(())
    }

    /// Histograms of times, in seconds.
    pub(super) fn times(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Labels, Times)>,
    ) -> fmt::Result {
        let (help, unit) = (help.trim_end_matches('.'), Some(&Unit::Seconds));
        let mut metric = self.0.encode_descriptor(name, help, unit, MetricType::Histogram)?;
        for (labels, times) in samples {
            metric.encode_family(&labels)?.encode_histogram::<NoLabelSet>(
                seconds(times.sum_ns),
                times.count,
                &times.buckets,
                None,
            )?;
        }
        Ok(())
    }
}
