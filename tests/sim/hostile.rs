//! Two peers of one gateway, one of them hostile: it says what it likes about the connections of
//! the other, by all links that it has.
//!
//! The worst is assumed: it knows every token and every cursor. In production it would have to
//! guess them.

use std::time::Duration;

use smcgate_tests::{run_all, seeds};
use smcr_engine::{ConnectionId, LinkId};
use smcr_proto::wire::cdc::{Cdc, Cursor};
use smcr_proto::{Gid, Instant, MacAddress, Mtu};
use smcr_rnic::dice::{Chance, Dice};
use smcr_rnic::sim::{self, Network, Odds};
use smcr_rnic::{Completion, Fabric as _, Opening, Port, QpId, Rnic, Tag, Work};

use crate::KIB;
use crate::application::Heard;
use crate::cluster::{Cluster, Side, Transport};
use crate::host::{Host, Sizes};

/// The hostile peer: an RNIC of its own, and a link to each poller of its victim.
struct Stranger {
    fabric: sim::Fabric,
    links: Vec<QpId>,
    dice: Dice,
    said: u64,
}

impl Stranger {
    fn new(seed: u64, network: &Network, victim: &mut Host, pollers: u8) -> Self {
        let gid = Gid::from_ipv4([10, 9, 0, 66]);
        let port = Port { gid, mac: MacAddress([2, 6, 6, 6, 6, 6]), mtu: Mtu::B1024 };
        let (mut rnic, mut fabric) = network.rnic(port);
        let domain = rnic.open_domain().unwrap();
        let links = (0..pollers).map(|place| {
            let (ours, theirs) = (rnic.open(domain).unwrap(), victim.open_at(place.into()));
            let (here, there) = (ours.address(), theirs.address());
            let link = LinkId(1_000 + u32::from(place));
            victim.add_foreign_link_at(place.into(), link, theirs, here);
            fabric.adopt(Instant(1), ours.connect(there).unwrap())
        });
        let links = links.collect();
        Self { fabric, links, dice: Dice::new(seed), said: 0 }
    }

    /// Says something about a connection of somebody else.
    fn forge(&mut self, victim: ConnectionId) {
        let dice = &mut self.dice;
        let mut sequence = || u16::try_from(dice.below(1 << 16)).unwrap();
        let sequence = [1, 2, sequence()][dice.index(3)];
        let mut cursor = || Cursor {
            wrap: u16::try_from(dice.below(3)).unwrap(),
            count: u32::try_from(dice.below(16 * 1024)).unwrap(),
        };
        let (producer, consumer) = (cursor(), cursor());
        let mut often = || dice.roll(Chance::percent(20));
        let cdc = Cdc {
            token: victim.token(),
            sequence,
            producer,
            consumer,
            abnormal_close: often(),
            sending_done: often(),
            connection_closed: often(),
            failover_validation: often(),
            urgent_pending: often(),
            urgent_present: often(),
            writer_blocked: often(),
            odd_stream: often(),
            keeps: often(),
            ..Cdc::default()
        };
        let link = self.links[self.dice.index(self.links.len())];
        if self.fabric.room(link) > 0 {
            let send = Work::Send { message: cdc.encode(), tag: Tag(0) };
            self.fabric.post(link, &mut vec![send]);
            self.said += 1;
        }
    }

    fn turn(&mut self, now: Instant) {
        let mut completions = Vec::with_capacity(64);
        self.fabric.poll(now, &mut completions);
        for completion in completions {
            if let Completion::Broke { cause, .. } = completion {
                panic!("its links are well, whatever it says: {cause:?}");
            }
        }
        self.fabric.transmit(now);
    }
}

/// One run: `pollers` at each gateway, four connections, and a stranger who talks all the time.
fn run(seed: u64, pollers: u8) {
    let odds = Odds { straggle: Chance::NEVER, ..Odds::MALICIOUS };
    let sizes = Sizes { rnics: pollers, ..Sizes::USUAL };
    let mut cluster = Cluster::new(seed, odds, sizes);
    let last = usize::from(pollers) - 1;
    // Of the last link, so that the messages of the first poller are for a neighbour.
    cluster.add_link_between([last, last]);
    let [_, victim] = &mut cluster.hosts;
    let mut stranger = Stranger::new(seed, &cluster.network, victim, pollers);
    let pairs: Vec<usize> = (0..4).map(|_| cluster.connect(Transport::Smc)).collect();
    for round in 0..30 {
        for number in pairs.iter().filter(|_| round <= 20) {
            for side in Side::BOTH {
                let len = stranger.dice.index(20 * KIB);
                cluster.application(side, *number).write(len);
            }
        }
        for _ in 0..40 {
            let number = pairs[stranger.dice.index(pairs.len())];
            let [_, victim] = cluster.pairs[number].ids;
            stranger.forge(victim.unwrap());
            stranger.turn(cluster.now());
            cluster.step();
            cluster.pass_time();
        }
        if round == 20 {
            for number in &pairs {
                for side in Side::BOTH {
                    cluster.application(side, *number).finish();
                }
            }
        }
    }
    while cluster.step() || cluster.pass_time() {
        stranger.turn(cluster.now());
    }
    cluster.run_for(Duration::from_secs(1));
    for number in pairs {
        for side in Side::BOTH {
            let sent = cluster.application(side.other(), number).sent();
            let application = cluster.application(side, number);
            assert_eq!((application.heard(), application.received()), (Heard::End, sent));
        }
    }
    cluster.assert_nothing_is_left();
    let [_, victim] = &cluster.hosts;
    // The tokens of connections that are over name nothing any more.
    let dropped = victim.sum(|counters| counters.cdc_foreign.get());
    let unknown = victim.sum(|counters| counters.cdc_unknown_token.get());
    assert_eq!(dropped + unknown, stranger.said, "each attempt is counted");
    assert!(dropped > 500, "{dropped} of {}", stranger.said);
    let passed_on = victim.sum(|counters| counters.cdc_forwarded.get());
    assert_eq!(passed_on, 0, "what is forged is not even passed on");
}

/// Customers of an honest peer lost their connections, or read bytes that were never sent, because
/// somebody else had a link to the same gateway.
// RFC 7609 4.7.1 #3: find connection by alert token
#[test]
fn a_stranger_cannot_touch_the_connections_of_others() {
    let name = "a_stranger_cannot_touch_the_connections_of_others";
    run_all("sim", name, seeds(20), |seed| run(seed, 1 + u8::try_from(seed % 2).unwrap()));
}
