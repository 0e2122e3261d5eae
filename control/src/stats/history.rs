//! The last quarter of an hour of a gateway: the JSON of `GET /history`, and the ring behind it.
//!
//! A sample keeps the sums of its moment, not rates: whoever reads it takes the difference of two,
//! over any span, and every number can be compared with `/stats`.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::SCHEMA;

/// How often a sample is taken.
pub const SAMPLE_EVERY: Duration = Duration::from_secs(2);

/// Samples that are kept: rates over 15 minutes need one more than there are intervals. 64 bytes
/// each make 28 kB.
const SAMPLES_MAX: usize = 451;

/// What is kept of one moment. Everything but the last two counts from the start of the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// When: milliseconds since the start of the process.
    pub uptime_ms: u64,
    /// Bytes read from applications.
    pub bytes_in: u64,
    /// Bytes written to applications.
    pub bytes_out: u64,
    /// Connections that were carried by SMC-R.
    pub connections_smc: u64,
    /// Connections that were relayed as TCP.
    pub connections_tcp: u64,
    /// Connections that could have been SMC-R, and stayed TCP.
    pub fallbacks: u64,
    /// Connections over SMC-R now.
    pub active_smc: u64,
    /// Connections over TCP now.
    pub active_tcp: u64,
}

/// The samples of the last 15 minutes.
#[derive(Debug)]
pub struct History {
    samples: VecDeque<Sample>,
}

impl Default for History {
    fn default() -> Self {
        Self { samples: VecDeque::with_capacity(SAMPLES_MAX) }
    }
}

impl History {
    /// Keeps a sample. One that is no newer than the last is dropped: rates need time between two.
    pub fn record(&mut self, sample: Sample) {
        if self.samples.back().is_some_and(|last| sample.uptime_ms <= last.uptime_ms) {
            return;
        }
        if self.samples.len() == SAMPLES_MAX {
            self.samples.pop_front();
        }
        self.samples.push_back(sample);
        assert!(self.samples.len() <= SAMPLES_MAX);
    }

    /// Everything that is kept, as the document that is served.
    pub fn columns(&self) -> Columns {
        let column = |of: fn(&Sample) -> u64| self.samples.iter().map(of).collect();
        Columns {
            schema: SCHEMA,
            period_ms: u64::try_from(SAMPLE_EVERY.as_millis()).expect("seconds"),
            uptime_ms: column(|one| one.uptime_ms),
            bytes_in: column(|one| one.bytes_in),
            bytes_out: column(|one| one.bytes_out),
            connections_smc: column(|one| one.connections_smc),
            connections_tcp: column(|one| one.connections_tcp),
            fallbacks: column(|one| one.fallbacks),
            active_smc: column(|one| one.active_smc),
            active_tcp: column(|one| one.active_tcp),
        }
    }
}

/// The history, one list for each number; the oldest sample first. All lists are equally long.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Columns {
    /// [`SCHEMA`].
    pub schema: u32,
    /// How often a sample is taken. One is missing where the gateway did not answer in time.
    pub period_ms: u64,
    /// When: milliseconds since the start of the process.
    pub uptime_ms: Vec<u64>,
    /// As `totals.bytes_in` of `/stats`.
    pub bytes_in: Vec<u64>,
    /// As `totals.bytes_out` of `/stats`.
    pub bytes_out: Vec<u64>,
    /// As `totals.connections_smc` of `/stats`.
    pub connections_smc: Vec<u64>,
    /// As `totals.connections_tcp` of `/stats`.
    pub connections_tcp: Vec<u64>,
    /// The sum of all `fallbacks` of `/stats`.
    pub fallbacks: Vec<u64>,
    /// As `active.smc` of `/stats`.
    pub active_smc: Vec<u64>,
    /// As `active.tcp` of `/stats`.
    pub active_tcp: Vec<u64>,
}

impl Columns {
    /// How much a sum has grown per second between each two samples, and at the end of which time
    /// in milliseconds. Empty if the lists are not equally long, as no gateway sends them.
    pub fn rates(&self, sums: &[u64]) -> Vec<(u64, f64)> {
        if sums.len() != self.uptime_ms.len() {
            return Vec::new();
        }
        let samples: Vec<_> = self.uptime_ms.iter().zip(sums).collect();
        let rate = |pair: &[(&u64, &u64)]| {
            let ((began, before), (ended, after)) = (pair[0], pair[1]);
            let milliseconds = ended.saturating_sub(*began).max(1);
            (*ended, after.saturating_sub(*before) as f64 * 1_000.0 / milliseconds as f64)
        };
        samples.windows(2).map(rate).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(uptime_ms: u64) -> Sample {
        Sample { uptime_ms, bytes_in: uptime_ms * 10, ..Sample::default() }
    }

    /// A gateway that runs for weeks keeps a quarter of an hour, and no more memory for it.
    #[test]
    fn keeps_fifteen_minutes() {
        let mut history = History::default();
        let room = history.samples.capacity();
        for sample in 0..10_000 {
            history.record(at(sample * 2_000));
        }
        let kept = history.columns();
        assert_eq!((kept.uptime_ms.len(), kept.bytes_in.len()), (451, 451));
        assert_eq!(kept.uptime_ms.last().unwrap() - kept.uptime_ms[0], 15 * 60 * 1_000);
        assert_eq!(history.samples.capacity(), room);
        assert!(size_of::<Sample>() * SAMPLES_MAX < 30_000);
    }

    /// Rates are over the time that has passed, also where a sample is missing.
    #[test]
    fn rates_are_per_second() {
        let mut history = History::default();
        for uptime_ms in [500, 2_500, 2_500, 8_500] {
            history.record(at(uptime_ms));
        }
        let columns = history.columns();
        assert_eq!(columns.rates(&columns.bytes_in), [(2_500, 10_000.0), (8_500, 10_000.0)]);
        assert_eq!(columns.rates(&[1]), []);
        assert_eq!(Columns::default().rates(&[]), []);
    }

    /// Readers know the names, and which of two lists an index belongs to.
    #[test]
    fn the_document_has_the_promised_keys() {
        let json = serde_json::to_value(History::default().columns()).unwrap();
        let keys = "schema period_ms uptime_ms bytes_in bytes_out connections_smc \
                    connections_tcp fallbacks active_smc active_tcp";
        assert_eq!(
            json.as_object().unwrap().len(),
            keys.split(' ').filter(|it| !it.is_empty()).count()
        );
        assert!(keys.split_whitespace().all(|key| json.get(key).is_some()));
        assert_eq!((&json["schema"], &json["period_ms"]), (&1.into(), &2_000.into()));
    }
}
