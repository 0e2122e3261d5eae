//! Packets that are built several at once.

use std::time::Duration;

use super::*;
use crate::dice::Dice;
use crate::roce::batch::SEGMENTS_MAX;

impl Bench {
    /// Sends what may be sent, so many packets at most, up to `train` of them at once. Returns
    /// them, and how many were built at once.
    fn send_trains(&mut self, mut most: usize, train: usize) -> (Vec<Vec<u8>>, Vec<usize>) {
        let (mut packets, mut trains) = (Vec::new(), Vec::new());
        let mut next = self.requester.next(self.now);
        while most > 0
            && let Some(packet) = next
        {
            let alike = self.requester.alike(packet, most.min(train));
            most -= alike;
            let mut out = vec![0xaa; alike * packet.len()];
            let mut sealed = Vec::new();
            let seal = |index: u16, bytes: &mut [u8]| {
                sealed.push(index);
                bytes[packet.len() - 1] = 0x55;
            };
            next = self.requester.build(
                self.now,
                packet,
                most == 0,
                &mut out,
                &mut self.counters,
                seal,
            );
            assert_eq!(next, self.requester.next(self.now), "it is what a new question finds");
            assert!(sealed.iter().copied().map(usize::from).eq(0..alike), "each, in order");
            assert!(out.chunks(packet.len()).all(|packet| packet.ends_with(&[0x55])));
            packets.extend(out.chunks(packet.len()).map(<[u8]>::to_vec));
            trains.push(alike);
        }
        (packets, trains)
    }
}

/// Only packets before the last one of a write are known to be alike.
#[test]
fn the_full_packets_of_a_write_are_built_at_once() {
    let mut bench = Bench::new();
    bench.write(10 * MTU + 1);
    bench.message();
    bench.write(2 * MTU);
    let (packets, trains) = bench.send_trains(99, SEGMENTS_MAX);
    assert_eq!(trains, [10, 1, 1, 1, 1]);
    assert_eq!(packets.len(), 14);
}

/// Every 32nd packet asks for an acknowledgement, so a train ends there.
#[test]
fn a_train_ends_with_the_packet_that_asks() {
    let mut bench = Bench::new();
    bench.message();
    bench.write(100 * MTU);
    let (packets, trains) = bench.send_trains(99, SEGMENTS_MAX);
    let asks = |packet: &Vec<u8>| packet[8] & 0x80 != 0;
    assert_eq!(packets.iter().position(asks), Some(31));
    assert_eq!(trains[..2], [1, 31]);
}

/// Whatever happens, the packets are those that would leave one by one, at the same time.
#[test]
fn trains_have_the_packets_that_would_leave_one_by_one() {
    let (mut longest, mut probes) = (0, 0);
    for seed in 0..400 {
        let mut dice = Dice::new(seed);
        // Half of them are told by nobody what the path carries, and probe.
        let known = if seed % 4 < 2 { MTU } else { 256 };
        let sizes = Sizes { dense: seed % 2 == 0, known, ..PLAIN };
        let window = [16_384, 65_536, 1 << 20][usize::try_from(seed % 3).unwrap()];
        let [mut one, mut other] = [(); 2].map(|()| Bench {
            requester: Requester::new((Qpn(9), FIRST), sizes, window),
            ..Bench::new()
        });
        let mut sent = 0;
        for step in 0..60 {
            let (kind, number) = (dice.next_u64() % 10, dice.next_u64());
            for bench in [&mut one, &mut other] {
                match kind {
                    0 | 1 if bench.requester.room() > 0 => {
                        bench.write(u32::try_from(number % 60_000).unwrap() + 1);
                    }
                    2 if bench.requester.room() > 0 => bench.message(),
                    // What was acknowledged before, and what was never sent, changes nothing.
                    3 | 4 if sent > 0 => {
                        bench.answer(Syndrome::ACK, number % sent).unwrap();
                        bench.completed();
                    }
                    5 if sent > 0 && number % 4 == 0 => {
                        bench.answer(Syndrome::SEQUENCE_ERROR, number % sent).unwrap();
                    }
                    6 if sent > 0 => {
                        bench.answer(Syndrome::NOT_READY, number % sent).unwrap();
                    }
                    7 => bench.requester.slow_down(bench.now),
                    8 => {
                        bench.now = bench.now + Duration::from_micros(number % 3_000);
                        // It breaks if nobody answers for long.
                        let _ = bench.expire();
                    }
                    _ => {}
                }
            }
            let most = usize::try_from(number % 200).unwrap() + 1;
            let (singles, _) = one.send_trains(most, 1);
            let train = usize::try_from(number % 40).unwrap() + 1;
            let (packets, trains) = other.send_trains(most, train);
            assert_eq!(packets, singles, "seed {seed}, step {step}");
            let counts = |bench: &Bench| (bench.counters.retransmits, bench.counters.packed);
            assert_eq!(counts(&one), counts(&other), "seed {seed}, step {step}");
            sent += u64::try_from(packets.len()).unwrap();
            probes += packets.iter().filter(|packet| packet[12..20] == [0; 8]).count();
            longest = trains.into_iter().chain([longest]).max().unwrap_or(0);
        }
    }
    assert_eq!(longest, 32, "there were no trains");
    assert!(probes > 0, "nobody probed");
}
