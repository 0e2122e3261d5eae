use super::*;

const PATIENCE: Duration = Duration::from_millis(2);

/// A path, and a network that carries packets with up to `carries` bytes of payload.
struct Bench {
    path: Path,
    carries: u32,
    now: Instant,
    asked: Vec<u32>,
}

impl Bench {
    fn new(carries: u32) -> Self {
        Self::up_to(4096, carries)
    }

    fn up_to(ceiling: u32, carries: u32) -> Self {
        let path = Path::new(ceiling, ceiling);
        Self { path, carries, now: Instant(0), asked: Vec::new() }
    }

    /// Runs until no probe is outstanding, and returns the last outcome.
    fn run(&mut self, has_work: bool) -> Outcome {
        let mut last = Outcome::Nothing;
        loop {
            let outcome = match self.path.probe() {
                Some(payload) => {
                    self.asked.push(payload);
                    self.path.probe_sent(self.now, PATIENCE);
                    let passes = payload <= self.carries;
                    if passes { self.path.answered(self.now) } else { Outcome::Nothing }
                }
                None => {
                    let Some(until) = self.path.wake_at() else { return last };
                    self.now = self.now.max(until);
                    self.path.expire(self.now, has_work)
                }
            };
            if outcome != Outcome::Nothing {
                last = outcome;
            }
        }
    }

    fn pass(&mut self, seconds: u64) {
        self.now = self.now + Duration::from_secs(seconds);
        assert_eq!(self.path.expire(self.now, true), Outcome::Nothing);
    }

    fn asked(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.asked)
    }
}

/// The largest size need be none of those that are usual between.
#[test]
fn a_ceiling_between_usual_sizes_is_tried_again() {
    for ceiling in [1088, 1280, 1408, 1984] {
        let mut bench = Bench::up_to(ceiling, ceiling - 1);
        bench.run(true);
        let below = bench.path.payload();
        assert!(PAYLOADS.contains(&below) && below < ceiling, "{below}");
        bench.carries = ceiling;
        bench.asked();
        bench.pass(3);
        bench.run(true);
        assert_eq!((bench.path.payload(), bench.asked().last()), (ceiling, Some(&ceiling)));
    }
}

/// Usually the agreed size passes. It takes two answers to prove it, since one may be a late
/// acknowledgement of another packet.
#[test]
fn the_agreed_size_is_tried_first() {
    let mut bench = Bench::new(4096);
    assert_eq!(bench.path.payload(), PAYLOAD_FIRST);
    assert_eq!(bench.run(true), Outcome::Grown(4096));
    assert_eq!(bench.asked(), [4096, 4096]);
    bench.pass(1_000_000);
    assert!(!bench.path.is_probing(), "there is nothing to gain");
}

#[test]
fn a_path_that_carries_less_is_probed_in_steps() {
    let mut bench = Bench::new(1439);
    assert_eq!(bench.run(true), Outcome::Grown(1420));
    assert_eq!(
        bench.asked(),
        [4096, 4096, 4096, 1200, 1200, 1340, 1340, 1420, 1420, 2048, 2048, 2048]
    );
    assert_eq!(bench.path.payload(), 1420);
}

/// Each attempt makes requests wait, so attempts become rare, and an idle queue pair makes none.
#[test]
fn larger_sizes_are_tried_again_less_and_less_often() {
    let mut bench = Bench::new(1439);
    bench.run(true);
    bench.asked();
    let mut tries = Vec::new();
    for second in 1..200 {
        bench.pass(1);
        if bench.path.is_probing() {
            bench.run(true);
            assert_eq!(bench.asked(), [2048; 3]);
            tries.push(second);
        }
    }
    assert_eq!(tries, [2, 6, 14, 30, 62, 126, 190]);
    bench.now = bench.now + RAISE_AFTER_MAX;
    bench.path.expire(bench.now, false);
    assert!(!bench.path.is_probing(), "there is nothing to send");
    bench.carries = 9000;
    bench.pass(1);
    assert_eq!(bench.run(true), Outcome::Grown(4096));
    assert_eq!(bench.asked(), [2048, 2048, 4096, 4096]);
}

#[test]
fn the_first_size_is_the_one_that_the_host_knows() {
    assert_eq!(Path::new(4096, 512).payload(), 512);
    assert_eq!(Path::new(256, 4096).payload(), 256);
    assert_eq!(Path::new(1024, 1024).probe(), None, "every path carries it");
}

/// Requests are split again when the last old packet is gone, and after two more answers.
#[test]
fn a_path_that_shrank_is_probed_for_its_size_and_for_the_responders_position() {
    let mut bench = Bench::new(4096);
    bench.run(true);
    bench.asked();
    bench.carries = 1300;
    let gone_at = bench.now + PACKET_LIFE;
    bench.path.doubt(4096, gone_at);
    assert_eq!(bench.run(true), Outcome::Resegment(1200));
    let mut expected = Vec::new();
    expected.extend([4096; 3]);
    expected.push(0);
    for refused in [2048, 1420, 1340] {
        expected.extend([refused; 3]);
    }
    // One probe of the size, and two of the position.
    expected.extend([1200; 3]);
    assert_eq!(bench.asked(), expected);
    assert_eq!(bench.now, gone_at);
    assert_eq!(bench.path.payload(), 1200);
}

#[test]
fn a_size_that_passes_is_kept() {
    let mut bench = Bench::new(4096);
    bench.path.doubt(1024, bench.now);
    assert_eq!((bench.run(true), bench.asked()), (Outcome::GoOn, vec![1024]));
}

/// A peer that is silent reveals nothing about sizes.
#[test]
fn silence_does_not_lower_the_size() {
    let mut bench = Bench::new(0);
    bench.run(true);
    bench.asked();
    bench.carries = 0;
    let mut path = Path::new(1024, 1024);
    std::mem::swap(&mut path, &mut bench.path);
    bench.path.doubt(1024, bench.now);
    // Not even an empty packet passes.
    while let Some(payload) = bench.path.probe() {
        bench.asked.push(payload);
        bench.path.probe_sent(bench.now, PATIENCE);
        bench.now = bench.now + PATIENCE;
        if bench.path.expire(bench.now, true) == Outcome::GoOn {
            break;
        }
    }
    assert_eq!(bench.asked(), [1024, 1024, 1024, 0, 0, 0]);
    assert!(!bench.path.is_doubted());
}

/// In every step of black hole detection, progress of the peer ends it, and the packets stay as
/// they are.
#[test]
fn progress_ends_a_doubt_at_every_step() {
    for answers in 0..12 {
        let mut bench = Bench::new(600);
        bench.path.doubt(4096, Instant(0) + PACKET_LIFE);
        for _ in 0..answers {
            match bench.path.probe() {
                Some(payload) => {
                    bench.path.probe_sent(bench.now, PATIENCE);
                    if payload <= bench.carries {
                        bench.path.answered(bench.now);
                    }
                }
                None => {
                    bench.now = bench.path.wake_at().expect("a timer runs in every step");
                    bench.path.expire(bench.now, true);
                }
            }
        }
        assert!(bench.path.is_doubted(), "{answers}");
        bench.path.progress(bench.now);
        assert!(!bench.path.is_doubted() && !bench.path.is_probing());
        assert_eq!((bench.path.wake_at(), bench.path.probe()), (None, None));
        assert_eq!(bench.path.answered(bench.now), Outcome::Nothing, "an answer that is late");
    }
}

/// A path whose MTU changes every few seconds must not cause a pause each time.
#[test]
fn a_path_that_shrinks_again_and_again_is_raised_ever_later() {
    let mut bench = Bench::new(4096);
    let mut waits = Vec::new();
    for _ in 0..7 {
        bench.carries = 9000;
        while bench.path.payload() < 4096 {
            bench.pass(1);
            bench.run(true);
        }
        bench.carries = 1439;
        let before = bench.now;
        bench.path.doubt(4096, bench.now);
        bench.run(true);
        while !bench.path.is_probing() {
            bench.pass(1);
        }
        waits.push(bench.now.since(before).as_secs());
    }
    assert!(waits.is_sorted() && waits[0] == 2 && waits[6] >= 64, "{waits:?}");
}
