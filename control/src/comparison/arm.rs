//! What connections over one transport have shown lately.

use std::collections::VecDeque;
use std::time::Duration;

use smcr_engine::handoff::Tally;
use smcr_proto::Instant;

/// What one connection has shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// How long its first answer took.
    pub first_byte: Option<Duration>,
    /// How many bytes it has carried in how much time, if that is enough to tell.
    pub carried: Option<(u64, Duration)>,
}

/// What is compared. It is kept as a cost, so that less is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Measure {
    /// Nanoseconds until the first answer.
    FirstByte,
    /// Nanoseconds per MiB.
    Throughput,
}

/// What connections over one transport have shown.
#[derive(Debug, Default)]
pub(super) struct Arm {
    first_byte: Costs,
    throughput: Costs,
    /// How many have shown anything, since the start.
    pub(super) samples: u64,
}

/// The newest costs, oldest first.
#[derive(Debug, Default)]
pub(super) struct Costs(VecDeque<(Instant, u64)>);

impl Sample {
    /// What a connection has shown that came at `came`, was handed to its poller at `opened`, and
    /// ended at `now`.
    ///
    /// What an application does before it asks anything is not counted: its user may think.
    pub fn of(now: Instant, came: Instant, opened: Instant, tally: &Tally) -> Self {
        let first_byte = tally.first_out.map(|out| match tally.first_in {
            Some(asked) if asked <= out => opened.since(came) + out.since(asked.max(opened)),
            // The server speaks first.
            Some(_) | None => out.since(came),
        });
        let (bytes, since) = if tally.bytes_in > tally.bytes_out {
            (tally.bytes_in, tally.first_in)
        } else {
            (tally.bytes_out, tally.first_out)
        };
        let carried = since.filter(|_| bytes >= BYTES_MIN).map(|since| (bytes, now.since(since)));
        Self { first_byte, carried }
    }

    /// What an open connection shows that has carried `bytes` within `time`; none if those are too
    /// few.
    pub fn of_open(bytes: u64, time: Duration) -> Option<Self> {
        let carried = (bytes >= OPEN_BYTES_MIN).then_some((bytes, time));
        carried.map(|carried| Self { first_byte: None, carried: Some(carried) })
    }
}

impl Measure {
    pub(super) const ALL: [Self; 2] = [Self::FirstByte, Self::Throughput];

    /// Whether `sample` says something about it.
    pub(super) fn is_in(self, sample: &Sample) -> bool {
        match self {
            Self::FirstByte => sample.first_byte.is_some(),
            Self::Throughput => sample.carried.is_some(),
        }
    }

    /// What it is for people.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::FirstByte => "first byte",
            Self::Throughput => "throughput",
        }
    }

    /// The most that SMC-R may cost where TCP costs `tcp`. The rendezvous takes a round trip or two
    /// more than TCP, once for each connection: that is not what an operator must know of.
    pub(super) fn tolerance(self, tcp: u64) -> u64 {
        let slack = match self {
            Self::FirstByte => 1_000_000,
            Self::Throughput => 0,
        };
        tcp.saturating_add(tcp / 4).saturating_add(slack)
    }

    /// A cost in words.
    pub(super) fn words(self, cost: u64) -> String {
        match self {
            Self::FirstByte => format!("{:?}", Duration::from_nanos(cost)),
            Self::Throughput => {
                format!("{:.1} Mbit/s", Self::bytes_per_s(cost) as f64 * 8.0 / 1e6)
            }
        }
    }

    /// Bytes per second for a cost in throughput.
    pub(super) fn bytes_per_s(cost: u64) -> u64 {
        let bytes = (1_u128 << 20) * 1_000_000_000 / u128::from(cost.max(1));
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }
}

impl Arm {
    /// Adds what a connection has shown.
    pub(super) fn add(&mut self, now: Instant, sample: Sample) {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        if let Some(time) = sample.first_byte {
            self.first_byte.add(now, nanos(time));
        }
        if let Some((bytes, time)) = sample.carried {
            let cost = u128::from(nanos(time)) * (1 << 20) / u128::from(bytes.max(1));
            self.throughput.add(now, u64::try_from(cost).unwrap_or(u64::MAX));
        }
        self.samples += u64::from(sample != Sample::default());
    }

    /// Forgets what was shown so far.
    pub(super) fn forget(&mut self) {
        self.first_byte.0.clear();
        self.throughput.0.clear();
    }

    pub(super) fn of(&self, measure: Measure) -> &Costs {
        match measure {
            Measure::FirstByte => &self.first_byte,
            Measure::Throughput => &self.throughput,
        }
    }
}

impl Costs {
    fn add(&mut self, now: Instant, cost: u64) {
        if self.0.len() == KEPT {
            self.0.pop_front();
        }
        self.0.push_back((now, cost));
    }

    /// Whether there are enough of late to tell anything.
    pub(super) fn is_telling(&self, now: Instant) -> bool {
        self.fresh(now).count() >= TELLING
    }

    /// The middle one of late, if there are enough.
    pub(super) fn middle(&self, now: Instant) -> Option<u64> {
        self.at(now, |count| count / 2)
    }

    /// What the quickest quarter of late does not exceed, if there are enough.
    pub(super) fn quick(&self, now: Instant) -> Option<u64> {
        self.at(now, |count| count / 4)
    }

    /// The newest `count`, the newest first, however old.
    pub(super) fn newest(&self, count: usize) -> impl Iterator<Item = u64> {
        self.0.iter().rev().take(count).map(|(_, cost)| *cost)
    }

    /// What three quarters of late do not exceed, if there are enough.
    pub(super) fn slow(&self, now: Instant) -> Option<u64> {
        self.at(now, |count| count * 3 / 4)
    }

    fn at(&self, now: Instant, place: impl Fn(usize) -> usize) -> Option<u64> {
        let mut costs = [0; KEPT];
        let mut count = 0;
        for (slot, cost) in costs.iter_mut().zip(self.fresh(now)) {
            *slot = cost;
            count += 1;
        }
        let costs = &mut costs[..count];
        costs.sort_unstable();
        (count >= TELLING).then(|| costs[place(count)])
    }

    fn fresh(&self, now: Instant) -> impl Iterator<Item = u64> {
        let of_late = move |(at, _): &&(Instant, u64)| now.since(*at) < FRESH;
        self.0.iter().filter(of_late).map(|(_, cost)| *cost)
    }
}

/// So many costs are kept.
const KEPT: usize = 8;
/// Fewer tell nothing.
const TELLING: usize = 4;
/// How long a cost counts.
const FRESH: Duration = Duration::from_secs(120);
/// A connection that has carried less says nothing about throughput.
const BYTES_MIN: u64 = 256 << 10;
/// The same of an open one, for the second in which it is looked at.
const OPEN_BYTES_MIN: u64 = 64 << 10;
