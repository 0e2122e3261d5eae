//! Whatever applications, network and operators do, under a seed; judged from outside.
//!
//! The judges know what went in and what came out: a byte that comes is the byte that was sent at
//! that place (checked as it is read), nothing stalls while its link lives, a connection that ends
//! well is complete, and when all is over, nothing is missing: no lease, no element, no slot.

use std::collections::BTreeSet;
use std::time::Duration;

use smcgate_tests::{run_all, seeds};
use smcr_engine::Command;
use smcr_engine::handoff::Ending;
use smcr_proto::RmbeSize;
use smcr_rnic::dice::{Chance, Dice};
use smcr_rnic::sim::Odds;

use crate::KIB;
use crate::application::Heard;
use crate::cluster::{Cluster, Side, Transport};
use crate::host::Sizes;
use Side::{Client, Server};

/// One run.
struct Swarm {
    dice: Dice,
    cluster: Cluster,
    /// Connections that the operator aborted.
    aborted: BTreeSet<usize>,
    /// How likely a step brings trouble beyond what applications do.
    trouble: Chance,
}

// RFC 7609 2.1 #15: announce data after writing it
// RFC 7609 4.8.2 #13: no reuse while peer may write
#[test]
fn swarm() {
    let seeds = seeds(200);
    let many = seeds.end - seeds.start >= 200;
    let mut seen = Seen::default();
    for one in run_all("sim", "swarm::swarm", seeds, |seed| Swarm::new(seed).run()) {
        seen.add(&one);
    }
    // A swarm that never meets trouble proves nothing.
    assert!(!many || seen.is_everything(), "{seen:?}");
}

/// What all runs together have met.
#[derive(Debug, Default)]
struct Seen {
    graceful: usize,
    reset: usize,
    lost: usize,
    bytes: u64,
    urgent: u64,
    /// Streams that followed others on a connection, and those that came too late for one.
    followed: usize,
    refused: usize,
    /// Memory that dormant connections gave back.
    given_back: u64,
    /// Waits for the peer, the pool, the send queue and the socket, early messages, late reports.
    waits: [u64; 6],
}

impl Seen {
    fn add(&mut self, one: &Self) {
        self.graceful += one.graceful;
        self.reset += one.reset;
        self.lost += one.lost;
        self.bytes += one.bytes;
        self.urgent += one.urgent;
        self.followed += one.followed;
        self.refused += one.refused;
        self.given_back += one.given_back;
        for (sum, wait) in self.waits.iter_mut().zip(one.waits) {
            *sum += wait;
        }
    }

    fn count(&mut self, cluster: &Cluster) {
        self.followed += cluster.pairs.iter().filter(|pair| pair.turn > 0).count();
        self.refused += cluster.pairs.iter().filter(|pair| pair.refused).count();
        for host in &cluster.hosts {
            let ends = |ending| host.closed.values().filter(|end| end.ending == ending).count();
            self.graceful += ends(Ending::Graceful);
            self.reset += ends(Ending::ResetByPeer);
            self.lost += ends(Ending::LinkLost);
            let counters = &host.counters;
            self.bytes += counters.rdma_in.get();
            self.urgent += counters.urgent_out.get();
            self.given_back += counters.memory_given_back.get();
            let waits = [
                &counters.blocked_on_peer,
                &counters.blocked_on_pool,
                &counters.blocked_on_queue,
                &counters.blocked_on_socket,
                &counters.cdc_parked,
                &counters.reports_delayed,
            ];
            for (sum, wait) in self.waits.iter_mut().zip(waits) {
                *sum += wait.get();
            }
        }
    }

    fn is_everything(&self) -> bool {
        let common = self.graceful.min(self.reset).min(self.lost) > 20;
        common
            && self.bytes > 10 << 20
            && self.urgent > 100
            && self.followed > 100
            && self.refused > 0
            && self.given_back > 1 << 20
            && self.waits.iter().all(|wait| *wait > 0)
    }
}

impl Swarm {
    fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let breaks = [Chance::NEVER, Chance::NEVER, Chance(500), Chance::percent(2)];
        let odds = Odds { break_on_transmit: breaks[dice.index(4)], ..Odds::MALICIOUS };
        let odds = if dice.roll(Chance::percent(20)) { Odds::CALM } else { odds };
        let sizes = Sizes {
            rmbe: RmbeSize::from_notation([0, 0, 1, 2][dice.index(4)]),
            send_chunks: [1, 2, 16][dice.index(3)],
            socket_bytes: [1_000, 30_000, 200_000][dice.index(3)],
            reports: [2, 100][dice.index(2)],
            elements: [3, 20, 255][dice.index(3)],
            ..Sizes::USUAL
        };
        let trouble = [Chance::NEVER, Chance::percent(1), Chance::percent(5)][dice.index(3)];
        let mut cluster = Cluster::new(seed, odds, sizes);
        cluster.many_streams = dice.roll(Chance::percent(50));
        Self { cluster, dice, aborted: BTreeSet::new(), trouble }
    }

    /// The whole run.
    fn run(mut self) -> Seen {
        for _ in 0..self.dice.below(400) {
            self.act();
        }
        for side in Side::BOTH {
            self.cluster.host(side).control_asleep = false;
        }
        self.cluster.run_until_quiet();
        self.cluster.assert_nothing_stalls();
        self.end();
        self.judge();
        let mut seen = Seen::default();
        seen.count(&self.cluster);
        seen
    }

    /// Somebody does something, then everybody looks around a few times.
    fn act(&mut self) {
        if self.cluster.pairs.is_empty() || self.dice.roll(Chance::percent(15)) {
            self.connect();
        } else {
            let number = self.dice.index(self.cluster.pairs.len());
            let side = self.side();
            self.act_on(side, number);
            if self.cluster.many_streams && self.dice.roll(Chance::percent(10)) {
                self.finish(number);
            }
        }
        if self.dice.roll(self.trouble) {
            self.make_trouble();
        }
        if self.dice.roll(Chance(4_000)) {
            // Longer than it takes to be dormant.
            self.cluster.pause(Duration::from_secs(6));
        }
        for _ in 0..self.dice.below(12) {
            match self.dice.below(10) {
                0 => drop(self.cluster.turn(Client)),
                1 => drop(self.cluster.turn(Server)),
                2..=6 => drop(self.cluster.step()),
                _ => drop(self.cluster.pass_time()),
            }
        }
    }

    fn side(&mut self) -> Side {
        Side::BOTH[self.dice.index(2)]
    }

    fn connect(&mut self) {
        if self.cluster.is_link_lost() {
            self.cluster.add_link();
        }
        if self.dice.roll(Chance::percent(30)) {
            if self.cluster.host(Client).has_slot() {
                self.cluster.connect(Transport::Tcp);
            }
            return;
        }
        if self.dice.roll(Chance::percent(70)) && self.cluster.connect_next().is_some() {
            return;
        }
        let early = self.side();
        if let Some(number) = self.cluster.connect_at(early)
            && self.dice.roll(Chance::percent(50))
        {
            self.cluster.establish(early.other(), number);
        }
    }

    fn act_on(&mut self, side: Side, number: usize) {
        let roll = self.dice.below(100);
        let len_max = [10, 2 * KIB, 100 * KIB, 400 * KIB][self.dice.index(4)];
        let len = 1 + self.dice.index(len_max);
        let slowly = 1 + self.dice.index(4 * KIB);
        self.cluster.establish(side, number);
        let application = self.cluster.application(side, number);
        if application.is_gone() {
            return;
        }
        match roll {
            0..50 if !application.will_finish() => application.write(len),
            50..54 if !application.will_finish() => application.write_urgent(),
            0..60 if slowly > 100 => application.write_at_most(slowly),
            60..70 if slowly > 100 => application.read_at_most(slowly),
            70..78 => application.sleep(),
            78..86 => application.wake(),
            86..93 => application.finish(),
            93..95 => application.reset(),
            95..97 => application.close(),
            _ => {}
        }
    }

    /// A short conversation: both say a little more, and no more than that.
    fn finish(&mut self, number: usize) {
        for side in Side::BOTH {
            self.cluster.establish(side, number);
            let len = self.dice.index(2 * KIB);
            let application = self.cluster.application(side, number);
            if !application.is_gone() && !application.will_finish() {
                application.write(len);
                application.finish();
            }
            application.wake();
        }
    }

    fn make_trouble(&mut self) {
        match self.dice.below(5) {
            4 => {
                let side = self.side();
                self.cluster.close_kept(side);
            }
            0 => self.cluster.break_link(),
            1 => {
                let side = self.side();
                let host = self.cluster.host(side);
                host.control_asleep = !host.control_asleep;
            }
            2 => {
                let number = self.dice.index(self.cluster.pairs.len());
                if let Some(connection) = self.cluster.pairs[number].ids[0] {
                    self.cluster.host(Client).command(Command::Abort { connection });
                    // Whichever stream it has by then.
                    let pairs = self.cluster.pairs.iter().enumerate();
                    let of_it = pairs.filter(|(_, pair)| pair.ids[0] == Some(connection));
                    self.aborted.extend(of_it.map(|(number, _)| number));
                }
            }
            _ => {
                let side = self.side();
                let link = self.cluster.newest_link();
                self.cluster.host(side).command(Command::SendLlc { link, message: [4; 44].into() });
            }
        }
    }

    /// Everybody wakes, says goodbye, and waits for the others to do so.
    fn end(&mut self) {
        for side in Side::BOTH {
            for number in 0..self.cluster.pairs.len() {
                self.cluster.establish(side, number);
                let application = self.cluster.application(side, number);
                application.wake();
                application.finish();
            }
        }
        self.cluster.run_until_quiet();
        let side = self.side();
        self.cluster.close_kept(side);
        // Longer than a peer that does not answer a close is waited for.
        self.cluster.run_for(Duration::from_secs(70));
    }

    fn judge(&mut self) {
        self.cluster.assert_nothing_stalls();
        for number in 0..self.cluster.pairs.len() {
            let closed = self.cluster.closed(number);
            let pair = &self.cluster.pairs[number];
            let [client, server] = &pair.applications;
            let gone = client.is_gone() || server.is_gone();
            let excused = gone
                || pair.refused
                || self.aborted.contains(&number)
                || self.cluster.lost_link(number);
            let well = closed.iter().all(|end| end.ending == Ending::Graceful);
            assert!(well || excused, "pair {number}: {closed:?}");
            for (writer, reader) in [(client, server), (server, client)] {
                assert!(reader.received() <= writer.sent());
                let (sent, heard) = (writer.urgent_sent(), reader.urgent_received());
                assert!(heard.iter().all(|at| sent.contains(at)), "pair {number}: {heard:?}");
                let ended = reader.is_gone() || reader.heard() != Heard::Bytes;
                assert!(ended, "pair {number} still waits");
                if !excused {
                    assert_eq!(reader.received(), writer.sent(), "pair {number} is cut short");
                    assert_eq!(reader.heard(), Heard::End, "pair {number} ended well");
                    // An earlier one may have lost its mark to a later one; the last one cannot.
                    assert_eq!(heard.last(), sent.last(), "pair {number}: an urgent byte is lost");
                }
            }
        }
        self.cluster.assert_nothing_is_left();
    }
}
