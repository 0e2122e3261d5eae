//! One connection over SMC-R carries one stream after another, and nobody notices.

use std::time::Duration;

use smcr_engine::LinkId;
use smcr_engine::handoff::Ending;
use smcr_proto::connection;
use smcr_proto::wire::cdc::{Cdc, Cursor};
use smcr_rnic::dice::{Chance, Dice};
use smcr_rnic::sim::Odds;

use crate::KIB;
use crate::application::Heard;
use crate::cluster::{Cluster, Side, Transport};
use crate::foreign::Stage;
use crate::host::Sizes;
use Side::{Client, Server};

/// A cluster whose connections carry any number of streams.
fn cluster() -> Cluster {
    let mut cluster = Cluster::calm();
    cluster.many_streams = true;
    cluster
}

/// The client says so much more and ends, then the server; each hears all of it.
fn converse(cluster: &mut Cluster, number: usize, lens: [usize; 2]) {
    for (side, len) in Side::BOTH.into_iter().zip(lens) {
        cluster.application(side, number).write(len);
        cluster.application(side, number).finish();
        cluster.run_until_quiet();
    }
    assert_heard(cluster, number);
}

/// Both sides of a stream have heard all of each other, and its end.
fn assert_heard(cluster: &mut Cluster, number: usize) {
    let sent = Side::BOTH.map(|side| cluster.application(side, number).sent());
    for (side, sent) in Side::BOTH.into_iter().zip(sent) {
        let other = cluster.application(side.other(), number);
        assert_eq!((other.received(), other.heard()), (sent, Heard::End), "pair {number}");
    }
    let ends = cluster.closed(number);
    assert_eq!(ends.iter().map(|end| end.ending).collect::<Vec<_>>(), [Ending::Graceful; 2]);
    assert_eq!(ends.iter().map(|end| end.bytes_in).sum::<u64>(), sent[0] + sent[1]);
}

/// Each stream has its own bytes, its own end and its own figures, whoever ends it first; the
/// connection is one.
#[test]
fn streams_follow_one_another() {
    let mut cluster = cluster();
    let first = cluster.connect(Transport::Smc);
    converse(&mut cluster, first, [30 * KIB, 5]);
    for (turn, lens) in
        [[0, 0], [1, 0], [0, 1], [90 * KIB, 70 * KIB], [7, 7]].into_iter().enumerate()
    {
        let next = cluster.connect_next().expect("the connection was kept");
        assert_eq!(cluster.pairs[next].ids, cluster.pairs[first].ids);
        let first_to_end = Side::BOTH[turn % 2];
        let len = lens[turn % 2];
        cluster.application(first_to_end, next).write(len);
        cluster.application(first_to_end, next).finish();
        cluster.run_until_quiet();
        let other = cluster.application(first_to_end.other(), next);
        assert_eq!((other.received(), other.heard()), (len as u64, Heard::End));
        other.write(lens[1 - turn % 2]);
        other.finish();
        cluster.run_until_quiet();
        assert_heard(&mut cluster, next);
    }
    assert!(cluster.hosts.iter().all(|host| host.closed.is_empty()));
    cluster.close_kept(Client);
    cluster.run_until_quiet();
    cluster.assert_nothing_is_left();
}

/// A server that speaks first must hear of a client that says nothing.
#[test]
fn a_silent_client_begins_a_stream() {
    let mut cluster = cluster();
    let first = cluster.connect(Transport::Smc);
    converse(&mut cluster, first, [1, 1]);
    let next = cluster.connect_next().unwrap();
    cluster.run_until_quiet();
    cluster.application(Server, next).write(100);
    cluster.run_until_quiet();
    assert_eq!(cluster.application(Client, next).received(), 100);
    converse(&mut cluster, next, [0, 0]);
}

/// A request and its answer cost few messages: the beginning of a stream travels with its first
/// bytes, and its end with the last ones.
#[test]
fn a_short_stream_costs_few_messages() {
    let mut cluster = cluster();
    let first = cluster.connect(Transport::Smc);
    converse(&mut cluster, first, [1, 1]);
    let sent = |cluster: &Cluster| {
        cluster.hosts.each_ref().map(|host| host.sum(|counters| counters.cdc_out.get()))
    };
    let before = sent(&cluster);
    let next = cluster.connect_next().unwrap();
    cluster.application(Client, next).write(100);
    // Before its gateway looks.
    while cluster.application(Client, next).act() {}
    cluster.run_until_quiet();
    cluster.application(Server, next).write(100);
    cluster.application(Server, next).finish();
    cluster.run_until_quiet();
    cluster.application(Client, next).finish();
    cluster.run_until_quiet();
    let after = sent(&cluster);
    assert_eq!([0, 1].map(|host| after[host] - before[host]), [2, 1]);
}

/// An urgent byte, and bytes that wait for room, are of one stream and of none after it.
#[test]
fn nothing_of_a_stream_is_left_for_the_next() {
    let mut cluster = cluster();
    let first = cluster.connect(Transport::Smc);
    for side in Side::BOTH {
        cluster.application(side.other(), first).sleep();
        cluster.application(side, first).write(60 * KIB);
        cluster.application(side, first).write_urgent();
    }
    cluster.run_until_quiet();
    Side::BOTH.into_iter().for_each(|side| cluster.application(side, first).wake());
    cluster.run_until_quiet();
    converse(&mut cluster, first, [0, 0]);
    let next = cluster.connect_next().expect("the connection was kept");
    converse(&mut cluster, next, [50 * KIB, 50 * KIB]);
    for side in Side::BOTH {
        assert!(cluster.application(side, next).urgent_received().is_empty());
    }
}

/// A program that resets its connection takes the SMC-R connection along. Who comes next gets
/// another one.
// RFC 7609 4.8.2 #1: TCP reset aborts the connection
#[test]
fn a_reset_ends_the_connection() {
    for side in Side::BOTH {
        let mut cluster = cluster();
        let first = cluster.connect(Transport::Smc);
        converse(&mut cluster, first, [1, 1]);
        let next = cluster.connect_next().unwrap();
        cluster.application(side, next).write(100);
        cluster.run_until_quiet();
        cluster.application(side, next).reset();
        cluster.run_until_quiet();
        assert_eq!(cluster.application(side.other(), next).heard(), Heard::Reset);
        assert_eq!(cluster.connect_next(), None);
        cluster.assert_nothing_is_left();
    }
}

/// Either side may have enough. A stream that comes to a connection that the peer has closed is
/// given back, and nothing of it was read.
#[test]
fn a_stream_that_comes_too_late_is_given_back() {
    let mut cluster = cluster();
    let first = cluster.connect(Transport::Smc);
    converse(&mut cluster, first, [1, 1]);
    cluster.close_kept(Server);
    // The client's poller hears of it before the command comes.
    for _ in 0..20 {
        cluster.turn(Server);
        cluster.wait(Duration::from_micros(5));
        cluster.turn(Server);
    }
    cluster.host(Client).control_asleep = true;
    for _ in 0..5 {
        cluster.turn(Client);
        cluster.wait(Duration::from_micros(5));
    }
    let next = cluster.connect_next().unwrap();
    cluster.application(Client, next).write(100);
    cluster.host(Client).control_asleep = false;
    cluster.run_until_quiet();
    assert!(cluster.pairs[next].refused);
    cluster.assert_nothing_is_left();
}

/// A stream that begins as the server's side closes is carried all the same.
#[test]
fn a_stream_that_crosses_a_close_is_carried() {
    let mut cluster = cluster();
    let first = cluster.connect(Transport::Smc);
    converse(&mut cluster, first, [1, 1]);
    let next = cluster.connect_next().unwrap();
    cluster.close_kept(Server);
    // Both leave before either arrives.
    cluster.turn(Server);
    cluster.turn(Client);
    converse(&mut cluster, next, [100, 100]);
    assert!(!cluster.pairs[next].refused);
    assert!(cluster.hosts.iter().all(|host| host.closed.is_empty()), "it is kept again");
}

/// The beginning of a stream may come to a poller before the connection does, which a neighbour
/// with many of them is still about to hand over.
#[test]
fn a_stream_that_begins_while_its_connection_moves_is_heard_of() {
    let sizes = Sizes { rnics: 2, letters: 16, ..Sizes::USUAL };
    let mut cluster = Cluster::new(1, Odds::CALM, sizes);
    cluster.many_streams = true;
    let from = cluster.add_link_between([0, 0]);
    let first: Vec<_> = (0..40).map(|_| cluster.connect(Transport::Smc)).collect();
    first.iter().for_each(|number| converse(&mut cluster, *number, [1, 1]));
    let to = cluster.add_link_between([0, 1]);
    let [ours, theirs] =
        [0, 1].map(|host| cluster.pairs.iter().filter_map(|pair| pair.ids[host]).collect());
    cluster.host(Client).move_connections(from, to, Some(ours));
    cluster.run_until_quiet();
    cluster.host(Server).move_connections(from, to, Some(theirs));
    cluster.turn_at(Server, 0);
    let next: Vec<_> = first.iter().map(|_| cluster.connect_next().unwrap()).collect();
    cluster.turn(Client);
    cluster.wait(Duration::from_micros(5));
    cluster.turn_at(Server, 1);
    assert!(cluster.host(Server).sum(|counters| counters.cdc_parked.get()) > 0);
    cluster.run_until_quiet();
    next.iter().for_each(|number| converse(&mut cluster, *number, [10, 10]));
}

/// A peer that writes to a connection without a stream loses it. A gateway that took the bytes in
/// had nowhere to put them, and ended with all others when it closed that connection.
#[test]
fn bytes_of_no_stream_reset_the_connection() {
    for and_closes in [false, true] {
        let mut stage =
            Stage::with_streams([connection::Streams::Follows, connection::Streams::Begins]);
        stage.write(10);
        stage.honest.shutdown_write();
        stage.say_what_is_due();
        stage.run();
        stage.application.finish();
        stage.run();
        let kept: Vec<_> = stage.host.kept.iter().copied().collect();
        assert_eq!((kept.len(), stage.application.heard()), (1, Heard::End));
        let producer = Cursor { wrap: 0, count: 11 };
        let token = kept[0].token();
        let behind = Cdc { sequence: 3, token, producer, sending_done: true, ..Cdc::default() };
        stage.say(Cdc { connection_closed: and_closes, ..behind });
        stage.run();
        assert!(stage.heard.last().unwrap().abnormal_close, "closes: {and_closes}");
        stage.host.close_kept(&kept);
        stage.run();
    }
}

/// Links come and go while streams end and begin: each byte is of its stream, none is missing, and
/// nobody waits for ever.
// RFC 7609 2.3 #3: move connections of a failed link
// RFC 7609 4.6.1 #8: validate before resuming
// RFC 7609 4.6.2 #1: repeat pending messages before new data
#[test]
fn streams_survive_failovers() {
    let mut followed = 0;
    let seeds = smcgate_tests::seeds(300);
    let many = seeds.end - seeds.start >= 300;
    for seed in seeds {
        println!("SMC_SEED={seed}");
        followed += Streams::new(seed).run();
    }
    assert!(!many || followed > 1_000, "{followed}");
}

/// One run.
struct Streams {
    dice: Dice,
    cluster: Cluster,
    links: Vec<LinkId>,
}

impl Streams {
    fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        // What a link loses that it had acknowledged ends a connection, rightly.
        let odds = Odds { lose_on_break: Chance::NEVER, ..Odds::MALICIOUS };
        let odds = if dice.index(4) == 0 { Odds::CALM } else { odds };
        let sizes = Sizes {
            rnics: 2,
            send_chunks: [1, 2, 16][dice.index(3)],
            letters: [16, 4_096][dice.index(2)],
            elements: [4, 255][dice.index(2)],
            ..Sizes::USUAL
        };
        let mut cluster = Cluster::new(seed, odds, sizes);
        cluster.many_streams = true;
        cluster.host(Server).prefers_newest = dice.index(2) == 0;
        let links = vec![cluster.add_link_between([0, 0])];
        Self { dice, cluster, links }
    }

    /// Returns how many streams have followed others.
    fn run(mut self) -> usize {
        for _ in 0..60 {
            self.act();
            for _ in 0..self.dice.index(40) {
                self.cluster.step();
                self.cluster.pass_time();
            }
        }
        self.cluster.run_until_quiet();
        for number in 0..self.cluster.pairs.len() {
            self.finish(number);
        }
        self.cluster.run_until_quiet();
        for side in Side::BOTH {
            self.cluster.close_kept(side);
        }
        self.cluster.run_for(Duration::from_secs(70));
        self.judge()
    }

    fn act(&mut self) {
        let dice = &mut self.dice;
        match dice.index(10) {
            0 if self.links.len() < 5 => {
                let places = [dice.index(2), dice.index(2)];
                self.links.push(self.cluster.add_link_between(places));
            }
            1 if self.links.len() > 1 => self.break_or_move(),
            2 => {
                let side = Side::BOTH[dice.index(2)];
                self.cluster.close_kept(side);
            }
            3..6 => self.connect(),
            _ if !self.cluster.pairs.is_empty() => {
                let number = self.dice.index(self.cluster.pairs.len());
                self.write(number);
                if self.dice.index(3) > 0 {
                    self.finish(number);
                }
            }
            _ => {}
        }
    }

    fn connect(&mut self) {
        if self.cluster.connect_next().is_some() {
            return;
        }
        let early = Side::BOTH[self.dice.index(2)];
        if let Some(number) = self.cluster.connect_at(early) {
            self.cluster.establish(early.other(), number);
        }
    }

    fn write(&mut self, number: usize) {
        for side in Side::BOTH {
            let most = [20, 40 * KIB][self.dice.index(2)];
            let len = self.dice.index(most);
            let application = self.cluster.application(side, number);
            if !application.will_finish() {
                application.write(len);
            }
        }
    }

    /// Both sides end, one of them now and the other one now or soon.
    fn finish(&mut self, number: usize) {
        let first = Side::BOTH[self.dice.index(2)];
        for side in [first, first.other()] {
            if !self.cluster.application(side, number).will_finish() {
                self.cluster.application(side, number).finish();
            }
            for _ in 0..self.dice.index(6) {
                self.cluster.step();
                self.cluster.pass_time();
            }
        }
    }

    /// The first link never breaks, so that there is always one to go to.
    fn break_or_move(&mut self) {
        let dice = &mut self.dice;
        let from = self.links[dice.index(self.links.len())];
        let to = *self.links.iter().rev().find(|link| **link != from).expect("two links");
        if from != self.links[0] && dice.index(2) == 0 {
            self.cluster.break_this(from);
            self.links.retain(|link| *link != from);
            return;
        }
        let index = dice.index(2);
        let ids = self.cluster.pairs.iter().filter_map(|pair| pair.ids[index]);
        let chosen = ids.filter(|_| dice.index(2) == 0).collect();
        self.cluster.host(Side::BOTH[index]).move_connections(from, to, Some(chosen));
    }

    fn judge(mut self) -> usize {
        self.cluster.assert_nothing_stalls();
        for number in 0..self.cluster.pairs.len() {
            if self.cluster.pairs[number].refused {
                continue;
            }
            assert_heard(&mut self.cluster, number);
        }
        self.cluster.assert_nothing_is_left();
        let turns = self.cluster.pairs.iter().filter(|pair| pair.turn > 0 && !pair.refused);
        turns.count()
    }
}
