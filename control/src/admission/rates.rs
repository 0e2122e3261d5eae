//! How many new connections come in within a second.

use std::collections::HashMap;
use std::net::IpAddr;

use smcr_proto::Instant;

use crate::config::Rate;
use crate::sources::source_of;

/// A bucket of tokens, one for each connection, which fills as time passes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Bucket {
    /// Thousand-millionths of tokens that it lacked when the last one was taken.
    lacked: u64,
    /// When that was.
    taken_at: Instant,
}

impl Bucket {
    /// Whether it has a token.
    pub(super) fn has_room(self, now: Instant, rate: Rate) -> bool {
        self.lacks(now, rate) + TOKEN <= u64::from(rate.burst) * TOKEN
    }

    /// Takes a token. There may be none: then the next one comes later.
    pub(super) fn take(&mut self, now: Instant, rate: Rate) {
        (self.lacked, self.taken_at) = (self.lacks(now, rate) + TOKEN, now);
    }

    /// How much it lacks now. A rate that a reload has changed counts from the last time on, and no
    /// bucket lacks more than its burst.
    fn lacks(self, now: Instant, rate: Rate) -> u64 {
        let nanos = u64::try_from(now.since(self.taken_at).as_nanos()).unwrap_or(u64::MAX);
        let most = u64::from(rate.burst) * TOKEN;
        self.lacked.min(most).saturating_sub(nanos.saturating_mul(rate.per_second.into()))
    }
}

/// The buckets of sources. One that is full is as good as none, and takes no memory.
#[derive(Debug, Default)]
pub(super) struct SourceRates(HashMap<IpAddr, Bucket>);

impl SourceRates {
    /// Whether the bucket of `source` has a token.
    pub(super) fn has_room(&self, now: Instant, source: IpAddr, rate: Rate) -> bool {
        self.0.get(&source_of(source)).copied().unwrap_or_default().has_room(now, rate)
    }

    /// Takes a token of `source`.
    pub(super) fn take(&mut self, now: Instant, source: IpAddr, rate: Rate) {
        let source = source_of(source);
        if self.0.len() >= SOURCES_MAX && !self.0.contains_key(&source) {
            self.forget(now, rate);
        }
        self.0.entry(source).or_default().take(now, rate);
    }

    /// Makes room for a quarter of them, or every new source would have all of them looked at:
    /// forgets full buckets, and if those are too few, the fullest. Whoever is forgotten gains what
    /// its bucket lacks, which is least for these.
    fn forget(&mut self, now: Instant, rate: Rate) {
        self.0.retain(|_, bucket| bucket.lacks(now, rate) > 0);
        let Some(last) = self.0.len().checked_sub(SOURCES_MAX * 3 / 4 + 1) else { return };
        let mut lacks: Vec<u64> = self.0.values().map(|bucket| bucket.lacks(now, rate)).collect();
        let (fuller, most, _) = lacks.select_nth_unstable(last);
        let most = *most;
        let mut equal = 1 + fuller.iter().filter(|lacks| **lacks == most).count();
        self.0.retain(|_, bucket| {
            let lacks = bucket.lacks(now, rate);
            let goes = lacks < most || (lacks == most && equal > 0);
            equal -= usize::from(goes && lacks == most);
            !goes
        });
    }
}

/// A token, in its thousand-millionths: a rate of one in a second yields one of them each
/// nanosecond.
const TOKEN: u64 = 1_000_000_000;
/// Sources of one listener that are remembered at once, half a megabyte. Each must have made a
/// connection to be here.
const SOURCES_MAX: usize = 16_384;

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: Rate = Rate { per_second: 10, burst: 3 };

    fn at(ms: u64) -> Instant {
        Instant(ms * 1_000_000)
    }

    #[test]
    fn a_bucket_has_its_burst_and_then_its_rate() {
        let mut bucket = Bucket::default();
        let mut taken = Vec::new();
        for ms in 1_000..2_000 {
            while bucket.has_room(at(ms), RATE) {
                bucket.take(at(ms), RATE);
                taken.push(ms);
            }
        }
        let expected =
            [1_000, 1_000, 1_000, 1_100, 1_200, 1_300, 1_400, 1_500, 1_600, 1_700, 1_800, 1_900];
        assert_eq!(taken, expected);
        assert!(bucket.has_room(at(10_000), RATE));
    }

    /// An operator who raises a rate must not shut everybody out until the old bucket is full.
    #[test]
    fn a_higher_rate_or_a_shorter_burst_counts_at_once() {
        let mut bucket = Bucket::default();
        let slow = Rate { per_second: 10, burst: 600 };
        while bucket.has_room(at(1_000), slow) {
            bucket.take(at(1_000), slow);
        }
        for rate in [Rate { per_second: 1_000, burst: 600 }, RATE] {
            let mut bucket = bucket;
            assert!(!bucket.has_room(at(1_000), rate), "the burst is used up");
            for ms in [1_101, 1_202, 1_303] {
                assert!(bucket.has_room(at(ms), rate));
                bucket.take(at(ms), rate);
            }
        }
    }

    /// A host with an IPv6 network has more addresses than anybody can remember.
    #[test]
    fn sources_have_buckets_of_their_own_and_a_network_is_one_source() {
        let mut rates = SourceRates::default();
        let source = |text: &str| text.parse::<IpAddr>().unwrap();
        for text in ["fd00::1", "fd00::2", "fd00::3"] {
            assert!(rates.has_room(at(0), source(text), RATE));
            rates.take(at(0), source(text), RATE);
        }
        assert!(!rates.has_room(at(0), source("fd00::4"), RATE));
        assert!(rates.has_room(at(0), source("fd00:0:0:1::1"), RATE));
    }

    /// Somebody with many addresses must not get a source forgotten that has used up its burst, be
    /// it his own.
    #[test]
    fn the_table_is_bounded_and_forgets_the_fullest_first() {
        let mut rates = SourceRates::default();
        let greedy = IpAddr::from([10, 0, 0, 1]);
        for _ in 0..3 {
            rates.take(at(1_000), greedy, RATE);
        }
        for number in 0..100_000_u32 {
            rates.take(at(1_000), IpAddr::from((0x0b00_0000 + number).to_be_bytes()), RATE);
            assert!(rates.0.len() <= SOURCES_MAX);
        }
        assert!(!rates.has_room(at(1_000), greedy, RATE));
        // What is full again goes first, and all of it.
        rates.take(at(1_200), IpAddr::from([12, 0, 0, 1]), RATE);
        while rates.0.len() < SOURCES_MAX {
            let number = u32::try_from(rates.0.len()).unwrap();
            rates.take(at(1_200), IpAddr::from((0x0d00_0000 + number).to_be_bytes()), RATE);
        }
        rates.take(at(1_250), IpAddr::from([14, 0, 0, 1]), RATE);
        assert!(
            rates.0.contains_key(&greedy) && rates.0.contains_key(&IpAddr::from([12, 0, 0, 1]))
        );
    }
    /// A rate that fills a bucket between two new sources had all of them looked at for each.
    #[test]
    fn room_is_made_for_many_at_once() {
        let mut rates = SourceRates::default();
        let source = |number: u32| IpAddr::from((0x0b00_0000 + number).to_be_bytes());
        for number in 0..u32::try_from(SOURCES_MAX).unwrap() {
            let ms = if number < 5 { 1_000 } else { 1_050 + u64::from(number % 7) };
            rates.take(at(ms), source(number), RATE);
        }
        assert_eq!(rates.0.len(), SOURCES_MAX);
        // Five of them are full.
        rates.take(at(1_100), source(1 << 20), RATE);
        assert_eq!(rates.0.len(), SOURCES_MAX * 3 / 4 + 1);
        assert!((0..5).all(|number| !rates.0.contains_key(&source(number))));
        // The fullest are gone, and no others.
        let lacks = |ms: u64| rates.0.values().filter(|it| it.taken_at == at(ms)).count();
        assert!(lacks(1_050) == 0 && lacks(1_056) == SOURCES_MAX / 7, "{}", lacks(1_056));
    }
}
