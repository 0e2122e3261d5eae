//! How long connections took, as histograms.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Transport;

/// How long connections took that are over, by transport.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ByTransport {
    /// Those over SMC-R.
    #[serde(rename = "smc-r")]
    pub smc_r: Durations,
    /// Those over TCP.
    pub tcp: Durations,
}

/// How long connections took that are over.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Durations {
    /// From the accept to the end.
    pub whole: Spread,
    /// From the accept to the first byte of the server, of those that got one.
    pub first_byte: Spread,
}

/// Times, counted by length.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Spread {
    /// How many.
    pub count: u64,
    /// Their sum, in nanoseconds.
    pub sum_ns: u64,
    /// How many did not exceed each time in nanoseconds, but the one before it; the rest are
    /// longer. Empty while there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub buckets: Vec<(u64, u64)>,
}

impl ByTransport {
    /// Adds a connection that took so long.
    pub fn record(&mut self, transport: Transport, whole: Duration, first_byte: Option<Duration>) {
        let durations = match transport {
            Transport::SmcR => &mut self.smc_r,
            Transport::Tcp => &mut self.tcp,
        };
        durations.whole.record(whole);
        if let Some(time) = first_byte {
            durations.first_byte.record(time);
        }
    }

    /// Each with its transport.
    pub fn each(&self) -> [(Transport, &Durations); 2] {
        [(Transport::SmcR, &self.smc_r), (Transport::Tcp, &self.tcp)]
    }

    /// Adds what others counted.
    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in [(&mut self.smc_r, &other.smc_r), (&mut self.tcp, &other.tcp)] {
            mine.whole.add(&theirs.whole);
            mine.first_byte.add(&theirs.first_byte);
        }
    }
}

impl Spread {
    fn record(&mut self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.count += 1;
        self.sum_ns = self.sum_ns.saturating_add(nanos);
        if self.buckets.is_empty() {
            self.buckets = BOUNDS_US.map(|end| (end * 1_000, 0)).into();
        }
        if let Some((_, count)) = self.buckets.iter_mut().find(|(end, _)| nanos <= *end) {
            *count += 1;
        }
    }

    fn add(&mut self, other: &Self) {
        self.count += other.count;
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
        if self.buckets.is_empty() {
            self.buckets.clone_from(&other.buckets);
        } else {
            let both = self.buckets.iter_mut().zip(&other.buckets);
            both.for_each(|((_, count), (_, more))| *count += more);
        }
    }
}

/// From an answer of a server nearby to a connection that stays for a day, in microseconds.
const BOUNDS_US: [u64; 18] = [
    100,
    250,
    500,
    1_000,
    2_500,
    5_000,
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    10_000_000,
    60_000_000,
    3_600_000_000,
    86_400_000_000,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_counted_where_they_belong_and_add_up() {
        let mut all = ByTransport::default();
        let micros = Duration::from_micros;
        all.record(Transport::SmcR, micros(100), Some(micros(101)));
        all.record(Transport::SmcR, Duration::from_secs(100_000), None);
        all.record(Transport::Tcp, micros(7), None);
        let mut sum = ByTransport::default();
        sum.add(&all);
        sum.add(&all);
        let [(_, smc), (_, tcp)] = sum.each();
        assert_eq!((smc.whole.count, smc.first_byte.count, tcp.whole.count), (4, 2, 2));
        assert_eq!(smc.whole.sum_ns, 2 * (100_000 + 100_000 * 1_000_000_000));
        let filled = |spread: &Spread| {
            let some = spread.buckets.iter().filter(|(_, count)| *count > 0);
            some.copied().collect::<Vec<_>>()
        };
        // What is longer than the last bound is in no bucket.
        assert_eq!(filled(&smc.whole), [(100_000, 2)]);
        assert_eq!(filled(&smc.first_byte), [(250_000, 2)]);
    }
}
