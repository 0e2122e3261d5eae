//! What goes in comes out, whoever else is there.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::thread;
use std::time::{Duration, Instant};

use super::*;

#[test]
fn what_goes_in_comes_out_and_discarded_bytes_are_zero() {
    let region = Region::new(16_384).unwrap();
    region.copy_in(0, &[7; 16_384]);
    region.discard(100, 9_000);
    let mut out = vec![1; 16_384];
    region.copy_out(0, &mut out);
    assert!(out[..100].iter().all(|byte| *byte == 7));
    assert!(out[100..9_100].iter().all(|byte| *byte == 0));
    assert!(out[9_100..].iter().all(|byte| *byte == 7));
}

/// Which pages of a region the kernel has given it.
fn present(region: &Region) -> Vec<bool> {
    let first = region.address() / 4_096;
    let mut entries = vec![0; region.len() / 4_096 * 8];
    let map = File::open("/proc/self/pagemap").unwrap();
    map.read_exact_at(&mut entries, first * 8).unwrap();
    let entry = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().unwrap());
    entries.chunks_exact(8).map(|bytes| entry(bytes) >> 63 == 1).collect()
}

/// A NIC that has pinned memory writes to the pages it knows. If the region got others for them,
/// it would read zeros for ever, and the peer's bytes would be lost without a trace.
#[test]
fn pinned_pages_stay_and_are_zeroed() {
    let region = Region::new(16_384).unwrap();
    let other = region.clone();
    let (first, second) = (other.pin(), other.pin());
    for pin in [first, second] {
        region.copy_in(0, &[7; 16_384]);
        region.discard(100, 16_000);
        assert_eq!(present(&region), [true; 4]);
        let mut out = vec![1; 16_384];
        pin.region().copy_out(0, &mut out);
        assert!(out[..100].iter().chain(&out[16_100..]).all(|byte| *byte == 7));
        assert!(out[100..16_100].iter().all(|byte| *byte == 0));
    }
    region.discard(0, 16_384);
    assert_eq!(present(&region), [false; 4], "nobody pins it any more");
}

/// Memory goes back to the host only if whoever gives it back is alone with it, and
/// knows of each byte that was placed.
#[test]
fn only_who_is_alone_gives_pages_back() {
    let region = Region::new(32_768).unwrap();
    let placer = region.placer();
    placer.place(0, &[7; 5_000]);
    placer.place(5_000, &[7; 3_000]);
    // It begins in the first half, and counts there.
    placer.place(16_380, &[7; 8]);
    assert_eq!([region.placed(0, 16_384), region.placed(16_384, 16_384)], [8_008, 0]);
    let before = present(&region);
    assert_eq!(before, [true, true, false, true, true, false, false, false]);
    for wrong in [0, 8_007, 8_009] {
        assert!(!placer.relinquish(0..8_192, 0..16_384, wrong));
    }
    let other = region.placer();
    assert!(!placer.relinquish(0..8_192, 0..16_384, 8_008), "there is another placer");
    drop(other);
    assert_eq!(present(&region), before);
    assert!(placer.relinquish(0..8_192, 0..16_384, 8_008));
    assert_eq!(present(&region), [false, false, false, true, true, false, false, false]);
    placer.place(1, &[9]);
    assert_eq!(region.placed(0, 16_384), 8_009, "it counts on");
}

/// What came while a NIC had the pages pinned was announced, and not counted. It must not make up
/// for what is placed now, and is not announced yet.
#[test]
fn nobody_gives_pages_back_that_were_ever_pinned() {
    let region = Region::new(16_384).unwrap();
    let placer = region.placer();
    let pin = region.pin();
    region.copy_in(0, &[7; 100]);
    assert!(!placer.relinquish(0..4_096, 0..16_384, 0), "a NIC has pinned it");
    drop(pin);
    placer.place(100, &[8; 100]);
    assert!(!placer.relinquish(0..4_096, 0..16_384, 100), "a hundred of two hundred bytes");
}

/// The peer writes to memory that it shares without telling anybody.
#[test]
fn memory_that_others_share_is_kept() {
    let region = Region::shared(16_384).unwrap();
    let placer = region.placer();
    placer.place(0, &[7; 10]);
    assert!(!placer.relinquish(0..4_096, 0..16_384, 10));
    assert!(present(&region)[0]);
}

#[test]
#[should_panic(expected = "1+16384 of 16384")]
fn a_range_that_leaves_the_region_is_our_bug() {
    Region::new(16_384).unwrap().copy_in(1, &[0; 16_384]);
}

/// Copies go word by word, and many words at once; a byte must not depend on which it was.
#[test]
fn every_start_and_length_is_that_and_no_more() {
    const LEN: usize = 300;
    let region = Region::new(LEN).unwrap();
    let bytes: Vec<u8> = (1..=250).collect();
    for at in 0..=24 {
        for len in 0..=bytes.len() {
            region.zero(0, LEN);
            let mut expected = [0; LEN];
            expected[at..at + len].copy_from_slice(&bytes[..len]);
            region.copy_in(at, &bytes[..len]);
            let mut out = [1; LEN];
            region.copy_out(0, &mut out);
            assert_eq!(out, expected, "{len} bytes in at {at}");

            let mut out = [1; LEN];
            region.copy_out(at, &mut out[..len]);
            assert_eq!(out[..len], bytes[..len], "{len} bytes out from {at}");
            assert_eq!(out[len..], [1; LEN][len..], "{len} bytes out from {at}");

            region.copy_in(0, &[9; LEN]);
            expected = [9; LEN];
            expected[at..at + len].fill(0);
            region.zero(at, len);
            region.copy_out(0, &mut out);
            assert_eq!(out, expected, "{len} bytes zeroed at {at}");
        }
    }
}

/// From one region to another, with every difference between the places of words.
#[test]
fn a_copy_between_regions_is_that_and_no_more() {
    const LEN: usize = 300;
    let (region, source) = (Region::new(LEN).unwrap(), Region::new(LEN).unwrap());
    let bytes: Vec<u8> = (0..LEN).map(|at| u8::try_from(at % 251).unwrap() + 1).collect();
    source.copy_in(0, &bytes);
    for (at, from) in (0..=9).flat_map(|at| (0..=9).map(move |from| (at, from))) {
        for len in 0..=250 {
            region.zero(0, LEN);
            let mut expected = [0; LEN];
            expected[at..at + len].copy_from_slice(&bytes[from..from + len]);
            region.copy_from(at, &source, from, len);
            let mut out = [1; LEN];
            region.copy_out(0, &mut out);
            assert_eq!(out, expected, "{len} bytes from {from} to {at}");
        }
    }
}

#[test]
#[should_panic(expected = "overlap")]
fn a_copy_onto_itself_is_our_bug() {
    let region = Region::new(4096).unwrap();
    region.copy_from(0, &region, 99, 100);
}

/// Two processes on this host see one memory, and each keeps to its end of it.
#[test]
fn a_shared_region_is_the_same_for_both() {
    let own = Region::shared(8_192).unwrap();
    let peers = Region::of_peer(own.descriptor().unwrap(), 8_192).unwrap();
    assert_ne!(own.address(), peers.address());
    peers.copy_in(4_000, &[7; 200]);
    own.word(8).store(99, Ordering::Release);
    let mut out = [0; 200];
    own.copy_out(4_000, &mut out);
    assert_eq!((out, peers.word(8).load(Ordering::Acquire)), ([7; 200], 99));
    own.discard(0, 8_192);
    peers.copy_out(4_000, &mut out);
    assert_eq!((out, peers.word(8).load(Ordering::Acquire)), ([0; 200], 0));
    assert!(Region::of_peer(own.descriptor().unwrap(), 8_191).is_err());
}

#[test]
#[should_panic(expected = "8192+8 of 8192")]
fn a_word_outside_of_the_region_is_our_bug() {
    Region::new(8_192).unwrap().word(8_192);
}

/// The last bytes of a region stand in a word of which it has only a part.
#[test]
fn a_region_may_end_within_a_word() {
    let region = Region::new(4096 + 3).unwrap();
    region.copy_in(4095, &[1, 2, 3, 4]);
    let mut out = [0; 4];
    region.copy_out(4095, &mut out);
    assert_eq!(out, [1, 2, 3, 4]);
    region.zero(4095, 4);
    region.copy_out(4095, &mut out);
    assert_eq!(out, [0; 4]);
}

/// Two pollers write neighbouring ranges that meet within a word: neither may undo the other.
#[test]
fn neighbours_within_a_word_keep_their_bytes() {
    let region = Region::new(4096).unwrap();
    let writer = |from: usize, len: usize| {
        let region = region.clone();
        move || {
            for round in 0..20_000_u32 {
                let value = u8::try_from(round % 251).unwrap();
                region.copy_in(from, &vec![value; len]);
                let mut out = vec![!value; len];
                region.copy_out(from, &mut out);
                assert_eq!(out, vec![value; len], "round {round}");
            }
        }
    };
    thread::scope(|scope| {
        scope.spawn(writer(0, 3));
        scope.spawn(writer(3, 8));
    });
}

/// A peer that breaks the protocol makes one poller write what another reads and a third clears.
/// Readers then see something that somebody wrote, and a race detector sees no race.
#[test]
fn those_who_meet_in_memory_see_what_somebody_wrote() {
    const LEN: usize = 203;
    let region = Region::new(4096).unwrap();
    let rounds = 2_000;
    thread::scope(|scope| {
        for value in [1, 2] {
            let region = region.clone();
            scope.spawn(move || {
                for round in 0..rounds {
                    region.copy_in(round % 16, &[value; LEN]);
                }
            });
        }
        scope.spawn(|| (0..rounds).for_each(|round| region.zero(round % 16, LEN)));
        for round in 0..rounds {
            let mut out = [9; LEN];
            region.copy_out(round % 16, &mut out);
            assert!(out.iter().all(|byte| *byte <= 2), "{out:?}");
        }
    });
}

/// Prints how fast copies are, beside plain ones.
#[test]
#[ignore = "a measurement: cargo test --release -p smcr-memory -- --ignored --nocapture speed"]
fn speed_of_copies() {
    for len in [44, 1024, 4096, 65_536] {
        let region = Region::new(65_536).unwrap();
        let (bytes, mut out) = (vec![7; len], vec![0; len]);
        region.copy_in(0, &bytes);
        let into = rate(len, || region.copy_in(0, std::hint::black_box(&bytes)));
        let from = rate(len, || region.copy_out(0, std::hint::black_box(&mut out)));
        let zero = rate(len, || region.zero(0, std::hint::black_box(len)));
        let peers = Region::shared(65_536).unwrap();
        let to = rate(len, || peers.copy_from(0, &region, 0, std::hint::black_box(len)));
        let plain = rate(len, || std::hint::black_box(&mut out[..]).copy_from_slice(&bytes));
        println!(
            "{len:6} bytes: in {into:.1}, out {from:.1}, zero {zero:.1}, to another \
             {to:.1}, plain {plain:.1} GB/s"
        );
    }
}

/// The best of several runs, in bytes per nanosecond.
#[allow(clippy::disallowed_methods, reason = "a measurement reads the clock")]
fn rate(len: usize, mut copy: impl FnMut()) -> f64 {
    let rounds = u32::try_from((1 << 26) / len).unwrap();
    let run = |_| {
        let start = Instant::now();
        (0..rounds).for_each(|_| copy());
        start.elapsed()
    };
    let best = (0..20).map(run).min().unwrap_or(Duration::MAX);
    f64::from(rounds) * len as f64 / best.as_nanos() as f64
}

/// Whatever is placed behind what: as soon as it is finished, all of it is there, nothing else, and
/// it is counted where it began.
#[test]
fn what_is_placed_in_one_go_is_all_there_in_the_end() {
    let mut seed: u64 = 1;
    let mut random = |below: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(seed >> 33).unwrap() % below
    };
    let region = Region::new(4 * PIECE).unwrap();
    let placer = region.placer();
    let (mut expected, mut counts) = (vec![0; 4 * PIECE], [0; 4]);
    for round in 0..300 {
        let mut unfinished = Unfinished::default();
        let mut at = random(4 * PIECE);
        for _ in 0..random(40) {
            let most = [3, 9, 30, 1_408][random(4)];
            // Mostly behind what came before, sometimes elsewhere, near or far.
            at = match random(8) {
                0 => random(4 * PIECE),
                1 => at.saturating_sub(random(12)),
                2 => at + random(12),
                _ => at,
            };
            at = if at >= 4 * PIECE { 0 } else { at };
            let len = (random(most) + 1).min(4 * PIECE - at);
            let bytes: Vec<u8> = (0..len).map(|_| random(256).to_le_bytes()[0]).collect();
            placer.place_on(&mut unfinished, at, &bytes);
            expected[at..at + len].copy_from_slice(&bytes);
            counts[at / PIECE] += u32::try_from(len).unwrap();
            at += len;
        }
        placer.finish(&mut unfinished);
        assert!(unfinished.is_finished());
        let mut found = vec![0; 4 * PIECE];
        region.copy_out(0, &mut found);
        assert!(expected == found, "round {round}");
        let found = [0, 1, 2, 3].map(|piece| region.placed(piece * PIECE, PIECE));
        assert_eq!(counts, found, "round {round}");
    }
}

/// The bytes of a word before the end of what was placed last are not there before it is finished,
/// and those of a neighbour in that word stay.
#[test]
fn an_unfinished_word_is_stored_in_the_end() {
    let region = Region::new(PIECE).unwrap();
    let placer = region.placer();
    placer.place(0, &[1; 32]);
    let mut unfinished = Unfinished::default();
    placer.place_on(&mut unfinished, 3, &[11, 12, 13, 14, 15, 16, 17, 18, 19, 20]);
    let bytes = || {
        let mut bytes = [0; 24];
        region.copy_out(0, &mut bytes);
        bytes
    };
    let mut expected = [1; 24];
    expected[3..8].copy_from_slice(&[11, 12, 13, 14, 15]);
    assert_eq!(bytes(), expected);
    placer.place_on(&mut unfinished, 13, &[21, 22, 23, 24]);
    expected[8..16].copy_from_slice(&[16, 17, 18, 19, 20, 21, 22, 23]);
    assert_eq!(bytes(), expected);
    placer.finish(&mut unfinished);
    expected[16] = 24;
    assert_eq!(bytes(), expected);
}

#[test]
#[should_panic(expected = "of 16384")]
fn nothing_is_placed_beyond_the_region() {
    let region = Region::new(PIECE).unwrap();
    region.placer().place_on(&mut Unfinished::default(), PIECE - 3, &[1; 4]);
}

/// What one connection leaves behind the next one must not find, and memory that no connection has
/// used must not come into being.
#[test]
fn shared_memory_is_zero_when_it_is_discarded_and_no_more_than_before() {
    let own = Region::shared(40 * 4_096).unwrap();
    own.copy_in(9 * 4_096 - 1, &[7; 4_098]);
    own.copy_in(39 * 4_096, &[7]);
    let blocks = || {
        let file = own.descriptor().unwrap().try_clone_to_owned().unwrap();
        File::from(file).metadata().unwrap().blocks()
    };
    assert_eq!(blocks(), 4 * 8);
    own.discard(9 * 4_096, 30 * 4_096 + 1);
    assert_eq!(blocks(), 4 * 8);
    let mut out = vec![1; 40 * 4_096];
    own.copy_out(0, &mut out);
    assert_eq!((out[9 * 4_096 - 1], out.iter().filter(|byte| **byte != 0).count()), (7, 1));
}
