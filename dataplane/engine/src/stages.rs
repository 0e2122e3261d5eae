//! How long bytes stay in a gateway, stage by stage.
//!
//! ```text
//!   in: read from a socket ──► posted to the RNIC ──► acknowledged by that of the peer
//!   delivered: announced by a CDC message ──► out: written to a socket
//! ```
//!
//! Each poller follows one run of bytes in either direction at a time, and begins with every
//! 16th. That is three readings of the clock per run, and none for all others.

use std::time::Duration;

use smcr_proto::Instant;

use crate::counter::Counter;
use crate::names::ConnectionId;

/// Times of one stage, by one writer for any reader.
#[derive(Debug)]
pub struct Histogram {
    buckets: [Counter; BUCKETS],
    sum: Counter,
    most: Counter,
}

/// The stages of one poller.
#[derive(Debug, Default)]
pub struct Stages {
    /// From the read of a socket until the bytes and their announcement were posted.
    pub posted: Histogram,
    /// From then until the peer's RNIC had acknowledged the announcement.
    pub acknowledged: Histogram,
    /// From the announcement of a peer until a socket had taken the last of the bytes.
    pub written: Histogram,
}

impl Stages {
    /// Every stage with its name, which says from when until when.
    pub fn by_name(&self) -> [(&'static str, &Histogram); 3] {
        [
            ("read_to_posted", &self.posted),
            ("posted_to_acknowledged", &self.acknowledged),
            ("announced_to_written", &self.written),
        ]
    }
}

impl Default for Histogram {
    fn default() -> Self {
        let buckets = std::array::from_fn(|_| Counter::default());
        Self { buckets, sum: Counter::default(), most: Counter::default() }
    }
}

impl Histogram {
    /// Adds one time.
    pub fn record(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.buckets[bucket(nanos)].add(1);
        self.sum.add(nanos);
        self.most.set(self.most.get().max(nanos));
    }

    /// The times so far. One that is recorded meanwhile may be in a part of the result.
    pub fn read(&self) -> Times {
        let counts = self.buckets.iter().map(Counter::get);
        Times {
            counts: counts.enumerate().map(|(index, count)| (end(index), count)).collect(),
            sum: Duration::from_nanos(self.sum.get()),
            most: Duration::from_nanos(self.most.get()),
        }
    }
}

/// What a [`Histogram`] held.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// Ends of intervals, and how many times were below each but not below the one before it.
    /// Every fourth one is a power of two of nanoseconds. What is longer counts for the last one.
    pub counts: Vec<(Duration, u64)>,
    /// The sum of all times.
    pub sum: Duration,
    /// The longest time.
    pub most: Duration,
}

impl Times {
    /// How many times there are.
    pub fn count(&self) -> u64 {
        self.counts.iter().map(|(_, count)| count).sum()
    }

    /// The time that `share` of 1,000 do not exceed, up to a quarter more than it is; zero if there
    /// is none.
    pub fn at(&self, share: u64) -> Duration {
        let wanted = (self.count() * share).div_ceil(1_000).max(1);
        let mut seen = 0;
        let found = self.counts.iter().find(|(_, count)| {
            seen += count;
            seen >= wanted
        });
        found.map(|(end, _)| *end).unwrap_or_default().min(self.most)
    }
}

/// Follows one run of bytes in either direction.
#[derive(Debug, Default)]
pub(crate) struct Sampler {
    sent: Option<Sent>,
    came: Option<Came>,
    passed: [u32; 2],
}

/// Bytes on their way to the peer.
#[derive(Clone, Copy, Debug)]
struct Sent {
    connection: ConnectionId,
    since: Instant,
    /// The message that announces them, if it is made; and whether it was posted.
    message: Option<u16>,
    posted: bool,
}

/// Bytes on their way to a socket.
#[derive(Clone, Copy, Debug)]
struct Came {
    connection: ConnectionId,
    since: Instant,
    /// How many bytes the connection's socket will have taken when it has taken them all.
    end: u64,
}

impl Sampler {
    /// A socket was read at about `now`, and its bytes are to be followed if it is their turn.
    /// `time` is asked for the time then.
    pub(crate) fn read(
        &mut self,
        now: Instant,
        connection: ConnectionId,
        time: impl FnOnce() -> Instant,
    ) {
        let is_free = self.sent.is_none_or(|sent| now.since(sent.since) > GIVEN_UP);
        if is_free && is_turn(&mut self.passed[0]) {
            self.sent = Some(Sent { connection, since: time(), message: None, posted: false });
        }
    }

    /// A message that announces all bytes of a connection was queued.
    pub(crate) fn announced(&mut self, connection: ConnectionId, sequence: u16) {
        if let Some(sent) = &mut self.sent
            && sent.connection == connection
        {
            sent.message.get_or_insert(sequence);
        }
    }

    /// What was queued was posted.
    pub(crate) fn posted(&mut self, stages: &Stages, time: impl FnOnce() -> Instant) {
        if let Some(sent) = &mut self.sent
            && sent.message.is_some()
            && !sent.posted
        {
            let now = time();
            stages.posted.record(now.since(sent.since));
            (sent.posted, sent.since) = (true, now);
        }
    }

    /// The peer's RNIC has acknowledged a message.
    pub(crate) fn acknowledged(
        &mut self,
        (connection, sequence): (ConnectionId, u16),
        stages: &Stages,
        time: impl FnOnce() -> Instant,
    ) {
        if let Some(sent) = self.sent
            && sent.posted
            && (sent.connection, sent.message) == (connection, Some(sequence))
        {
            stages.acknowledged.record(time().since(sent.since));
            self.sent = None;
        }
    }

    /// A peer announced bytes at about `now`; `end` is how many the socket will have taken with
    /// them. They are to be followed if it is their turn.
    pub(crate) fn came(
        &mut self,
        now: Instant,
        (connection, end): (ConnectionId, u64),
        time: impl FnOnce() -> Instant,
    ) {
        let is_free = self.came.is_none_or(|came| now.since(came.since) > GIVEN_UP);
        if is_free && is_turn(&mut self.passed[1]) {
            self.came = Some(Came { connection, since: time(), end });
        }
    }

    /// A socket has taken `end` bytes by now.
    pub(crate) fn written(
        &mut self,
        (connection, end): (ConnectionId, u64),
        stages: &Stages,
        time: impl FnOnce() -> Instant,
    ) {
        if let Some(came) = self.came
            && came.connection == connection
            && came.end <= end
        {
            stages.written.record(time().since(came.since));
            self.came = None;
        }
    }
}

fn is_turn(passed: &mut u32) -> bool {
    *passed = (*passed + 1) % ONE_IN;
    *passed == 1
}

/// The bucket of a time.
fn bucket(nanos: u64) -> usize {
    let exponent = nanos.max(1).ilog2();
    let Some(octave) = exponent.checked_sub(LEAST) else { return 0 };
    let quarter = usize::try_from(nanos >> (exponent - 2) & 3).expect("two bits");
    (1 + 4 * octave as usize + quarter).min(BUCKETS - 1)
}

/// The end of a bucket: the first time behind it.
fn end(index: usize) -> Duration {
    let Some(index) = index.checked_sub(1) else { return Duration::from_nanos(1 << LEAST) };
    let (octave, quarter) = (index / 4, index as u64 % 4);
    Duration::from_nanos((5 + quarter) << (octave + LEAST as usize - 2))
}

/// How many runs of bytes there are for one that is followed, as long as none is.
const ONE_IN: u32 = 16;
/// Whoever has waited for so long may be gone: the connection has ended, or left this poller.
const GIVEN_UP: Duration = Duration::from_secs(60);
/// Shorter times than this power of two of nanoseconds are not told apart.
const LEAST: u32 = 10;
/// Four for each power of two up to 17 seconds, and one for what is below.
const BUCKETS: usize = 1 + 4 * 24;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_time_is_in_the_bucket_that_ends_behind_it() {
        for nanos in (0..64).flat_map(|bit| [(1u64 << bit) - 1, 1 << bit, (1 << bit) + 1]) {
            let index = bucket(nanos);
            let last = index == BUCKETS - 1;
            assert!(last || Duration::from_nanos(nanos) < end(index), "{nanos}");
            assert!(index == 0 || Duration::from_nanos(nanos) >= end(index - 1), "{nanos}");
        }
        assert_eq!(end(BUCKETS - 1), Duration::from_nanos(1 << 34));
    }

    #[test]
    fn shares_of_times_are_found() {
        let histogram = Histogram::default();
        assert_eq!((histogram.read().count(), histogram.read().at(500)), (0, Duration::ZERO));
        for micros in 1..=1_000 {
            histogram.record(Duration::from_micros(micros));
        }
        let times = histogram.read();
        assert_eq!((times.count(), times.most), (1_000, Duration::from_millis(1)));
        assert_eq!(times.sum, Duration::from_micros(500_500));
        for share in [1, 500, 990, 1_000] {
            let exact = Duration::from_micros(share);
            let found = times.at(share);
            assert!(found >= exact && found <= exact * 5 / 4 + Duration::from_nanos(48), "{share}");
        }
    }

    fn id(slot: u16) -> ConnectionId {
        ConnectionId { slot, generation: 1 }
    }

    fn at(micros: u64) -> Instant {
        Instant(micros * 1_000)
    }

    /// What was recorded: how many times of each stage, and their sums.
    fn read(stages: &Stages) -> [(u64, Duration); 3] {
        stages.by_name().map(|(_, stage)| (stage.read().count(), stage.read().sum))
    }

    #[test]
    fn bytes_are_followed_from_the_read_to_the_acknowledgement() {
        let (stages, mut sampler) = (Stages::default(), Sampler::default());
        let micros = Duration::from_micros;
        sampler.read(at(9), id(1), || at(10));
        // Others are not, as long as they are; nor is what is not about them.
        sampler.read(at(11), id(2), || panic!("not asked"));
        sampler.announced(id(2), 7);
        sampler.posted(&stages, || panic!("not asked"));
        sampler.announced(id(1), 70);
        sampler.announced(id(1), 71);
        sampler.posted(&stages, || at(15));
        sampler.posted(&stages, || panic!("once"));
        sampler.acknowledged((id(1), 69), &stages, || panic!("not asked"));
        sampler.acknowledged((id(2), 70), &stages, || panic!("not asked"));
        sampler.acknowledged((id(1), 70), &stages, || at(45));
        sampler.acknowledged((id(1), 70), &stages, || panic!("once"));
        assert_eq!(read(&stages), [(1, micros(5)), (1, micros(30)), (0, micros(0))]);
        // The next one is followed after some that are not.
        for _ in 1..ONE_IN {
            sampler.read(at(50), id(3), || panic!("not asked"));
        }
        sampler.read(at(50), id(3), || at(50));
        // It never leaves. Others are followed after a while.
        for _ in 0..ONE_IN {
            sampler.read(at(50), id(4), || panic!("not asked"));
        }
        let late = at(50) + GIVEN_UP + micros(1);
        let mut asked = 0;
        for _ in 0..ONE_IN {
            sampler.read(late, id(4), || {
                asked += 1;
                late
            });
        }
        assert_eq!(asked, 1);
    }

    #[test]
    fn bytes_are_followed_from_their_announcement_to_the_socket() {
        let (stages, mut sampler) = (Stages::default(), Sampler::default());
        let micros = Duration::from_micros;
        sampler.came(at(1), (id(1), 1_000), || at(2));
        sampler.written((id(2), 2_000), &stages, || panic!("not asked"));
        sampler.written((id(1), 999), &stages, || panic!("not asked"));
        sampler.written((id(1), 1_500), &stages, || at(9));
        sampler.written((id(1), 1_500), &stages, || panic!("once"));
        assert_eq!(read(&stages), [(0, micros(0)), (0, micros(0)), (1, micros(7))]);
    }
}
