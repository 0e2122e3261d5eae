//! Tests of paths that carry less than both ends have agreed on, from the start or later.

use super::super::path::PACKET_LIFE;
use super::*;

impl Couple {
    /// Two NICs that agree on 4096 bytes, and a router between them that drops IP packets of more
    /// than `bytes` bytes.
    fn behind_a_router(seed: u64, odds: Odds, bytes: usize) -> Self {
        let couple = Self::with_mtu(seed, odds, Mtu::B4096);
        couple.network.drop_beyond(bytes);
        couple
    }

    /// Posts a write of `len` bytes and its message, and runs until it is quiet.
    pub(super) fn write_and_tell(&mut self, from: usize, len: usize, salt: u8) {
        let bytes = pattern(len, salt);
        self.write(from, 7, &bytes, 1);
        self.nodes[from].send([salt; 44], 2);
        self.run_until_quiet();
        let to = &self.nodes[1 - from];
        assert_eq!(to.received.last(), Some(&[salt; 44]));
        assert!(to.read(7, len) == bytes, "the bytes of {salt}");
        assert_eq!((to.broke.len(), self.nodes[from].broke.len()), (0, 0));
    }

    fn payload(&self, node: usize) -> u32 {
        self.nodes[node].fabric.payload(self.nodes[node].qp)
    }
}

/// The path is probed before large packets are sent, so that no connection waits for a timeout.
#[test]
fn the_path_is_proven_before_it_is_used() {
    for (bytes, payload) in [(9000, 4096), (3000, 2048), (1500, 1420), (1280, 1200), (1110, 1024)] {
        let mut couple = Couple::behind_a_router(1, Odds::default(), bytes);
        for from in [0, 1] {
            couple.write_and_tell(from, 44, 1);
            assert_eq!(couple.payload(from), payload, "{bytes}");
            couple.write_and_tell(from, 60_000, 2);
            // Node 0 runs first in each turn, so that its probe is answered at the same instant.
            let counters = couple.counters(0);
            assert_eq!((counters.timeouts, counters.retransmits), (0, 0), "{bytes}");
        }
    }
}

/// A queue pair that agreed on a size that every path carries sends no probes, and others stop when
/// they have found their size.
#[test]
fn no_needless_probes_are_sent() {
    let mut couple = Couple::new(1, Odds::default());
    couple.write_and_tell(0, 60_000, 1);
    assert_eq!(couple.counters(0).path_questions, 0);
    let mut couple = Couple::with_mtu(1, Odds::default(), Mtu::B4096);
    for _ in 0..5 {
        couple.write_and_tell(0, 60_000, 1);
        couple.now = couple.now + Duration::from_secs(100);
    }
    assert_eq!((couple.counters(0).path_questions, couple.payload(0)), (2, 4096));
}

/// With a tunnel in a tunnel even the first packets are too large. The stream pauses briefly and
/// then continues.
#[test]
fn requests_in_flight_are_split_again_when_their_packets_do_not_pass() {
    for (bytes, payload) in [(1000, 512), (400, 256)] {
        let mut couple = Couple::behind_a_router(1, Odds::default(), bytes);
        couple.write_and_tell(0, 60_000, 1);
        assert_eq!((couple.payload(0), couple.counters(0).path_lowered), (payload, 1));
        assert!(couple.now < Instant(400_000_000), "{:?}", couple.now);
    }
}

/// A route changes under a stream, to a narrower path and back.
#[test]
fn a_stream_follows_its_path_down_and_up() {
    let mut couple = Couple::with_mtu(1, Odds::default(), Mtu::B4096);
    couple.write_and_tell(0, 60_000, 1);
    for (round, (bytes, payload)) in
        [(1500, 1420), (9000, 4096), (600, 512), (2500, 2048)].into_iter().enumerate()
    {
        couple.network.drop_beyond(bytes);
        let begun = couple.now;
        for salt in 0..40 {
            couple.write_and_tell(0, 60_000, salt);
            couple.now = couple.now + Duration::from_secs(2);
        }
        assert_eq!(couple.payload(0), payload, "round {round}");
        assert!(couple.now.since(begun) < Duration::from_millis(40 * 2000 + 500));
    }
    let counters = couple.counters(0);
    assert_eq!(counters.path_lowered, 2);
    assert!(counters.path_questions < 200, "{counters:?}");
}

/// A path that carries acknowledgements but no useful packets breaks the queue pair, like a dead
/// one.
#[test]
fn a_path_for_tiny_packets_only_breaks_the_queue_pair() {
    let mut couple = Couple::behind_a_router(1, Odds::default(), 200);
    couple.write(0, 0, &pattern(60_000, 1), 1);
    couple.run_until_quiet();
    assert_eq!(couple.nodes[0].broke, [QpError::RetriesExceeded]);
    assert!(couple.now < Instant(3_000_000_000), "{:?}", couple.now);
}

/// Random losses of large packets must not lower the packet size.
#[test]
fn random_loss_does_not_lower_the_size() {
    let odds = Odds { loss: Chance::percent(20), ..Odds::default() };
    let mut couple = Couple::with_mtu(1, odds, Mtu::B4096);
    for salt in 0..100 {
        couple.write_and_tell(0, 60_000, salt);
    }
    let lowered = couple.counters(0).path_lowered;
    assert!(lowered <= 2, "{lowered}");
}

/// RNICs send packets of the agreed size, whatever the path carries. So we agree on no more than
/// the host knows to pass, but on no less than all networks carry, since ICMP may be forged.
#[test]
fn no_more_is_agreed_than_the_host_knows_to_pass() {
    let network = Network::new(1, Odds::default());
    let peer = Gid::from_ipv4([10, 0, 0, 9]);
    let agreed = |port: Mtu, path: HostPath| {
        let (mut rnic, _fabric) = nic_on(&network, port, path);
        let domain = rnic.open_domain().unwrap();
        let mut opening = rnic.open(domain).unwrap();
        opening.fit_path_to(peer);
        opening.address().mtu
    };
    assert_eq!(agreed(Mtu::B4096, |_, _| Ok(9000)), Mtu::B4096);
    assert_eq!(agreed(Mtu::B4096, |_, _| Ok(1500)), Mtu::B1024);
    assert_eq!(agreed(Mtu::B4096, |_, _| Ok(552)), Mtu::B1024);
    assert_eq!(agreed(Mtu::B512, |_, _| Ok(552)), Mtu::B512);
    assert_eq!(agreed(Mtu::B4096, |_, _| Err(io::ErrorKind::NotFound.into())), Mtu::B4096);
}

/// Slots of the receiver's memory that a sender may write, one after the other.
const SLOTS: usize = 8;
const SLOT_LEN: usize = 64 << 10;
/// What a slot holds while nobody may write it.
const POISON: u8 = 0x5a;

/// Two NICs under load, with faults of the network and stalls of the pollers from a seed.
struct Swarm {
    couple: Couple,
    dice: Dice,
    /// The writes of each sender: length and salt.
    sent: [Vec<(usize, u8)>; 2],
    /// How many of them the receiver has checked.
    judged: [usize; 2],
    /// Each poller is not scheduled until this time.
    stalled_until: [Instant; 2],
    path_changes_at: Instant,
    /// No write fills a packet: only dense packets may be too large for the path.
    only_small: bool,
}

impl Swarm {
    const WRITES: usize = 120;

    fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed ^ 0xface);
        let mut odds = |percent: u64| Chance(u32::try_from(dice.below(percent * 10_000)).unwrap());
        let odds = Odds {
            loss: odds(4),
            repeat: odds(4),
            overtake: odds(4),
            mark: Chance::NEVER,
            damage: odds(2),
            block: odds(5),
        };
        // Every other pair sends dense packets.
        let couple = match seed % 2 {
            0 => Couple::with_mtu(seed, odds, Mtu::B4096),
            _ => Couple::dense(seed, odds, [|_, _| Ok(9000); 2]),
        };
        let lingers = Chance(u32::try_from(dice.below(20_000)).unwrap());
        couple.network.linger(lingers, PACKET_LIFE / 2);
        for node in &couple.nodes {
            node.memory.copy_in(0, &vec![POISON; SLOTS * SLOT_LEN]);
        }
        Self {
            couple,
            dice,
            sent: [Vec::new(), Vec::new()],
            judged: [0; 2],
            stalled_until: [Instant(0); 2],
            path_changes_at: Instant(0),
            only_small: seed % 4 == 3,
        }
    }

    fn slot(number: usize) -> usize {
        number % SLOTS * SLOT_LEN
    }

    fn message(number: usize, salt: u8) -> Message {
        let mut message = [salt; 44];
        message[..8].copy_from_slice(&(number as u64).to_le_bytes());
        message
    }

    /// Posts writes and their messages while the receiver has free slots, as real connections do.
    fn post(&mut self, from: usize) {
        let number = self.sent[from].len();
        let is_full = number - self.judged[from] >= SLOTS;
        if number == Self::WRITES || is_full || self.dice.below(20) > 0 {
            return;
        }
        let len = match self.dice.index(if self.only_small { 1 } else { 3 }) {
            0 => 1 + self.dice.index(200),
            1 => 1 + self.dice.index(5000),
            _ => 1 + self.dice.index(SLOT_LEN),
        };
        let salt = u8::try_from(self.dice.index(256)).unwrap();
        self.write(from, Self::slot(number), &pattern(len, salt));
        self.couple.nodes[from].send(Self::message(number, salt), 1);
        self.sent[from].push((len, salt));
    }

    /// Writes `bytes`, as several writes where the send pool has no room for one.
    fn write(&mut self, from: usize, at: usize, bytes: &[u8]) {
        let target = &self.couple.nodes[1 - from].registration;
        let (rkey, base) = (target.rkey, target.address + at as u64);
        let mut done = 0;
        while done < bytes.len() {
            let rest = &bytes[done..];
            let node = &mut self.couple.nodes[from];
            let filled = node.pool.fill(u32::try_from(rest.len()).unwrap(), |room| {
                let len = rest.len().min(room.len());
                room.copy_in(&rest[..len]);
                Ok::<_, ()>(len)
            });
            let lease = filled.expect("a chunk is free").unwrap().expect("not empty");
            let address = base + done as u64;
            done += lease.len() as usize;
            node.post(Work::Write { lease, rkey, address, tag: Tag(0) });
        }
    }

    /// Checks each received message: its bytes must be in place, and no other byte of its slot may
    /// have changed.
    fn judge(&mut self, from: usize, seed: u64) {
        let node = &self.couple.nodes[1 - from];
        while let Some(message) = node.received.get(self.judged[from]) {
            let number = self.judged[from];
            let (len, salt) = self.sent[from][number];
            assert_eq!(*message, Self::message(number, salt), "seed {seed}: message {number}");
            let mut expected = pattern(len, salt);
            expected.resize(SLOT_LEN, POISON);
            let slot = node.read(Self::slot(number), SLOT_LEN);
            assert!(slot == expected, "seed {seed}: the bytes of {number}");
            // The slot is free from here on.
            node.memory.copy_in(Self::slot(number), &vec![POISON; SLOT_LEN]);
            self.judged[from] += 1;
        }
    }

    fn change_path(&mut self) {
        let now = self.couple.now;
        if now < self.path_changes_at {
            return;
        }
        let bytes = [400, 700, 1000, 1280, 1500, 1500, 2500, 9000, 9000][self.dice.index(9)];
        self.couple.network.drop_beyond(bytes);
        let (least, most) = (Duration::from_millis(1), Duration::from_millis(900));
        self.path_changes_at = now + self.dice.duration(&(least..=most));
    }

    fn turn(&mut self, seed: u64) {
        self.couple.now = self.couple.now + TURN;
        let now = self.couple.now;
        let mut wake = self.couple.network.pass(now);
        self.change_path();
        for from in [0, 1] {
            if now < self.stalled_until[from] {
                wake = wake.into_iter().chain([self.stalled_until[from]]).min();
                continue;
            }
            if self.dice.below(3000) == 0 {
                let longest = [1, 20, 300][self.dice.index(3)];
                let stall = Duration::ZERO..=Duration::from_millis(longest);
                self.stalled_until[from] = now + self.dice.duration(&stall);
            }
            self.post(from);
            self.couple.nodes[from].take_in(now);
            self.judge(1 - from, seed);
            self.couple.nodes[from].fabric.transmit(now);
            if self.couple.nodes[from].fabric.prepare_sleep(now).is_none_or(|at| at <= now) {
                wake = Some(now);
            } else {
                let at = self.couple.nodes[from].fabric.prepare_sleep(now);
                wake = wake.into_iter().chain(at).min();
            }
        }
        let all_posted = self.sent.iter().all(|sent| sent.len() == Self::WRITES);
        if let Some(at) = wake.filter(|_| all_posted || self.dice.below(2) == 0) {
            self.couple.now = self.couple.now.max(at.min(self.path_changes_at));
        }
    }

    /// Runs until all writes have arrived exactly as sent, or a queue pair broke, which ends a
    /// stream but must not corrupt a byte. Returns whether none broke.
    fn run(mut self, seed: u64) -> (bool, [Counters; 2]) {
        let counters = |couple: &Couple| [couple.counters(0), couple.counters(1)];
        while self.judged != [Self::WRITES; 2] {
            self.turn(seed);
            if self.couple.nodes.iter().any(|node| !node.broke.is_empty()) {
                return (false, counters(&self.couple));
            }
            assert!(self.couple.now < Instant(600_000_000_000), "seed {seed} never ends");
        }
        for from in [0, 1] {
            let slots = self.couple.nodes[from].read(0, SLOTS * SLOT_LEN);
            assert!(slots.iter().all(|byte| *byte == POISON), "seed {seed}: written late");
        }
        (true, counters(&self.couple))
    }
}

/// Packets are lost, duplicated, reordered and delayed by up to their lifetime, pollers stall for a
/// third of a second, and the path MTU changes every half second. No byte may be wrong.
#[test]
fn whatever_happens_to_the_path_no_byte_is_wrong() {
    let count = std::env::var("SMC_SEEDS").ok().and_then(|it| it.parse().ok()).unwrap_or(60);
    let (mut lowered, mut raised, mut broke, mut packed) = (0, 0, 0, 0);
    for seed in 0..count {
        let (whole, counters) = Swarm::new(seed).run(seed);
        broke += u64::from(!whole);
        lowered += counters.iter().map(|it| it.path_lowered).sum::<u64>();
        packed += counters.iter().map(|it| it.packed).sum::<u64>();
        raised += counters.iter().map(|it| it.path_raised).sum::<u64>();
    }
    println!("{count} seeds: lowered {lowered}, raised {raised}, broke {broke}, packed {packed}");
    assert!(packed > 10 * count, "packed {packed}");
    assert!(2 * lowered > count && raised > count, "lowered {lowered}, raised {raised}");
    assert!(broke <= count / 20, "{broke} of {count} broke");
}
