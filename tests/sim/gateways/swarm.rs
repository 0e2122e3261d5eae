//! Whatever applications, networks and operators do, under a seed; judged from outside.
//!
//! The judges know what went in and what came out. Every byte that comes is the byte that was sent
//! at that place (checked as it is read). A connection ends well and complete, or somebody had a
//! reason to reset it that the judges know of. When all is over and every port has been up for a
//! while, nothing is left of it: no lease, slot, group, queue pair, registration or domain.

use std::time::Duration;

use smcgate_tests::{run_all, seeds};
use smcr_engine::ConnectionId;
use smcr_engine::handoff::Ending;
use smcr_proto::handshake::{Agreement, AgreementV2};
use smcr_proto::wire::clc::v2::{Eid, Gids, RELEASE};
use smcr_proto::{Instant, RmbeSize};
use smcr_rnic::dice::{Chance, Dice};
use smcr_rnic::sim::Odds;

use super::gateway::{Gateway, IDLE_GROUP, Sizes};
use super::reach::Met;
use super::{Connected, World};
use crate::KIB;
use crate::application::{Application, judge_streams};
use crate::habits::{Down, Whim, redundant_links};

/// One run.
pub(super) struct Swarm {
    pub(super) dice: Dice,
    pub(super) world: World,
    /// Connections that an operator aborted, as a gateway calls them.
    aborted: Vec<(usize, ConnectionId)>,
    down: Down,
    /// How likely a step brings trouble beyond what applications do.
    pub(super) trouble: Chance,
    /// Nothing happens that two links do not survive, so no connection may be lost with its link.
    pub(super) cautious: bool,
    /// See [`Self::lose_often`].
    loses_only: bool,
    /// With `loses_only`: break paths just before the last message of a connection is acknowledged.
    pub(super) ends_late: bool,
    /// What the network does.
    odds: Odds,
    /// Then: when both sides have noticed the last trouble.
    noticed: Instant,
    pub(super) seen: Seen,
}

// RFC 7609 2.1 #15: announce data after writing it
// RFC 7609 4.8.2 #13: no reuse while peer may write
#[test]
fn gateways_survive_anything() {
    let seeds = seeds(60);
    let many = seeds.end - seeds.start >= 1_000;
    // The rarest collisions are met once in some thousand runs: of the first thousand seeds it is
    // known that they are among them, of others it is not.
    let first = seeds.start == 0;
    let all = run_all("sim", "gateways_survive_anything", seeds, |seed| Swarm::new(seed).run());
    let mut seen = Seen::default();
    all.iter().for_each(|one| seen.add(one));
    println!("{seen:#?}");
    // A swarm that never meets trouble proves nothing.
    assert!(!many || seen.is_everything(), "{seen:#?}");
    let missing = seen.met.missing();
    assert!(!many || !first || missing.is_empty(), "{seen:#?}\nmissing: {missing:?}");
}

/// What runs have met.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    graceful: u64,
    reset: u64,
    lost: u64,
    bytes: u64,
    contacts: [u64; 3],
    messages_lost: u64,
    refused: u64,
    flaps: u64,
    breaks: u64,
    /// Connections that went on over another link, and bytes that were written again for it.
    moved: u64,
    replayed: u64,
    /// Connections that were reset because a message that had been acknowledged was not there.
    data_lost: u64,
    links_failed_over: u64,
    /// Streams that followed others, and those that came too late.
    streams: [u64; 2],
    /// Memory that dormant connections gave back.
    given_back: u64,
    /// What was said about links and rkeys, and the like.
    pub(super) met: Met,
}

/// What two gateways agree on in SMC-Rv2.
fn version_2(max_links: u8, many_streams: bool) -> Agreement {
    Agreement::V2(AgreementV2 {
        eid: Eid::SMCGATE,
        release: RELEASE,
        max_connections: 255,
        max_links,
        many_streams,
        dense_packets: false,
        peer: None,
        gids: Gids::new(),
    })
}

impl Seen {
    pub(super) fn has_met(&self, what: &str) -> bool {
        self.met.has(what)
    }

    pub(super) fn add(&mut self, one: &Self) {
        self.graceful += one.graceful;
        self.reset += one.reset;
        self.lost += one.lost;
        self.bytes += one.bytes;
        for (sum, count) in self.contacts.iter_mut().zip(one.contacts) {
            *sum += count;
        }
        self.messages_lost += one.messages_lost;
        self.refused += one.refused;
        self.flaps += one.flaps;
        self.breaks += one.breaks;
        self.moved += one.moved;
        self.replayed += one.replayed;
        self.data_lost += one.data_lost;
        self.links_failed_over += one.links_failed_over;
        self.given_back += one.given_back;
        self.streams.iter_mut().zip(one.streams).for_each(|(sum, count)| *sum += count);
        self.met.add(&one.met);
    }

    /// Whether the common trouble was met. Data that is lost behind an acknowledgement is rare, and
    /// in [`mutants`](super::mutants).
    fn is_everything(&self) -> bool {
        let endings = self.graceful.min(self.reset).min(self.lost) > 20;
        let trouble = self.messages_lost.min(self.flaps).min(self.breaks).min(self.refused) > 5;
        let rescues = self.moved.min(self.replayed).min(self.links_failed_over) > 20;
        endings
            && trouble
            && rescues
            && self.bytes.min(self.given_back) > 1 << 20
            && self.contacts.iter().all(|sum| *sum > 5)
            && self.streams[0] > 100
            && self.streams[1] > 0
    }
}

impl Swarm {
    pub(super) fn new(seed: u64) -> Self {
        Self::sized(seed, |_| ())
    }

    /// The same at gateways of other sizes.
    pub(super) fn sized(seed: u64, adjust: impl Fn(&mut Sizes)) -> Self {
        let mut dice = Dice::new(seed);
        let breaks = [Chance::NEVER, Chance::NEVER, Chance(500), Chance::percent(2)];
        let exhausted = [Chance::NEVER, Chance::NEVER, Chance::percent(1), Chance::percent(10)];
        let odds = Odds {
            break_on_transmit: breaks[dice.index(4)],
            exhausted: exhausted[dice.index(4)],
            ..Odds::MALICIOUS
        };
        let odds = if dice.roll(Chance::percent(20)) { Odds::CALM } else { odds };
        let cautious = dice.roll(Chance::percent(30));
        let odds = if cautious {
            let never = Chance::NEVER;
            Odds { break_on_transmit: never, exhausted: never, straggle: never, ..odds }
        } else {
            odds
        };
        let socket_bytes = [1_000, 30_000, 100_000][dice.index(3)];
        let mut sizes = [(); 2].map(|()| Sizes {
            rnics: if cautious { [2, 3][dice.index(2)] } else { [1, 2, 2, 3][dice.index(4)] },
            max_links: [2, 3, 8][dice.index(3)],
            rmbe: RmbeSize::from_notation([0, 0, 1, 2][dice.index(4)]),
            elements: [1, 3, 20][dice.index(3)],
            rmb_bytes: [1 << 20, 1 << 25, 1 << 25][dice.index(3)],
            send_chunks: [1, 2, 8][dice.index(3)],
            socket_bytes,
            reports: [2, 100][dice.index(2)],
        });
        sizes.iter_mut().for_each(adjust);
        let trouble = [Chance::NEVER, Chance::percent(1), Chance::percent(5)][dice.index(3)];
        let trouble = match cautious {
            true if dice.roll(Chance::percent(30)) => Chance::NEVER,
            true => Chance::percent(15),
            false => trouble,
        };
        let max_links = sizes[0].max_links.min(sizes[1].max_links);
        let odds_now = odds.clone();
        let mut world = World::new(seed, odds, sizes);
        if seed % 2 == 1 {
            world.agreement = version_2(max_links, seed % 4 == 3);
        }
        let (aborted, down, seen) = (Vec::new(), Down::default(), Seen::default());
        let noticed = Instant(0);
        Self {
            world,
            dice,
            aborted,
            down,
            trouble,
            cautious,
            loses_only: false,
            ends_late: false,
            odds: odds_now,
            noticed,
            seen,
        }
    }

    /// The whole run.
    ///
    /// # Panics
    ///
    /// If a judge finds something wrong.
    pub(super) fn run(mut self) -> Seen {
        if !self.cautious && self.dice.roll(Chance::percent(20)) {
            self.world.wire.make_noise(Chance::percent(2));
        }
        for _ in 0..self.dice.below(300) {
            self.act();
        }
        self.calm_down();
        self.world.run_for(Duration::from_secs(5));
        self.judge_links();
        if self.dice.roll(Chance::percent(5)) {
            self.thin_out();
        }
        self.end();
        self.judge();
        self.seen
    }

    /// Somebody does something, then everybody looks around a few times.
    fn act(&mut self) {
        if self.world.connections.is_empty() || self.dice.roll(Chance::percent(12)) {
            self.connect();
        } else {
            let number = self.dice.index(self.world.connections.len());
            let side = self.dice.index(2);
            self.act_on(number, side);
        }
        if self.has_streams() && self.dice.roll(Chance::percent(25)) {
            self.end_streams();
        } else if self.has_streams() && self.dice.roll(Chance::percent(12)) {
            self.connect();
        }
        if self.dice.roll(self.trouble) {
            self.make_trouble();
        }
        if self.world.talks() > 0 && self.dice.roll(Chance::percent(2)) {
            let (index, side) = (self.dice.index(self.world.talks()), self.dice.index(2));
            self.world.break_off(index, side);
        }
        if self.dice.roll(Chance(4_000)) {
            // Longer than it takes to be dormant.
            self.world.pause(Duration::from_secs(6));
        }
        for _ in 0..self.dice.below(12) {
            self.look_around();
        }
    }

    /// Somebody looks around, or time passes.
    fn look_around(&mut self) {
        let World { hosts, now, .. } = &mut self.world;
        let host = self.dice.index(2);
        match self.dice.below(12) {
            0 => drop(hosts[host].control(*now)),
            1 | 2 => {
                let poller = self.dice.index(hosts[host].gids.len());
                hosts[host].turn_poller(poller, *now);
            }
            3 => drop(self.world.applications()),
            4 if self.world.talks() > 0 => {
                let one = self.dice.index(self.world.talks());
                self.world.talk(|index| index == one);
            }
            5..=8 => drop(self.world.step()),
            _ => {
                let limit = [1, 1, 10, 1_000, 5_000][self.dice.index(5)];
                // A host that stands still for seconds is one that peers give up.
                while self.cautious && self.world.step() {}
                self.world.pass_time(self.world.now + Duration::from_millis(limit));
            }
        }
    }

    fn connect(&mut self) {
        let client = self.dice.index(2);
        let ports = [client, 1 - client]
            .map(|host| self.down.any_up(&mut self.dice, &self.world.hosts[host].gids));
        let follows = self.has_streams() && self.dice.roll(Chance::percent(80));
        if follows && self.world.connect_next(client, ports).is_some() {
            return;
        }
        self.world.connect(client, ports);
    }

    /// Whether connections carry one stream after another.
    fn has_streams(&self) -> bool {
        matches!(&self.world.agreement, Agreement::V2(terms) if terms.many_streams)
    }

    /// Somebody ends a conversation, or has enough of a connection without one.
    fn end_streams(&mut self) {
        if self.dice.roll(Chance::percent(80)) {
            let count = self.world.connections.len();
            let young = count.saturating_sub(8);
            self.world.connections[young + self.dice.index(count - young)].say_goodbye();
            return;
        }
        let host = &mut self.world.hosts[self.dice.index(2)];
        let kept = host.kept();
        if !host.asleep && !kept.is_empty() {
            host.close_kept(kept[self.dice.index(kept.len())]);
        }
    }

    fn act_on(&mut self, number: usize, side: usize) {
        let whim = Whim::any(&mut self.dice, &[10, 2 * KIB, 100 * KIB, 400 * KIB]);
        whim.follow(&mut self.world.connections[number].applications[side]);
    }

    /// From now on the only trouble is that what was acknowledged is lost, and there is much of it.
    pub(super) fn lose_often(&mut self) {
        (self.cautious, self.loses_only) = (false, true);
        self.trouble = Chance::percent(15);
    }

    /// As much trouble as redundancy is made for: one port or queue pair while there is another
    /// link, and the next only when all is well again.
    fn test_redundancy(&mut self) {
        if self.world.now < self.noticed {
            return;
        }
        self.noticed = self.world.now + NOTICE;
        if self.is_redundant() && self.down.is_empty() {
            if self.dice.roll(Chance::percent(50)) {
                self.break_something();
            } else {
                self.flap();
            }
        } else if !self.down.is_empty() && self.dice.roll(Chance::percent(50)) {
            self.mend_port();
        }
    }

    /// Whether every group has links that do not fail together, and both sides know them.
    fn is_redundant(&self) -> bool {
        let links = |host: &Gateway| -> Option<Vec<usize>> {
            host.groups.iter().map(|(_, group)| redundant_links(group)).collect()
        };
        let [one, other] = self.world.hosts.each_ref().map(links);
        one.is_some_and(|one| !one.is_empty() && other.is_some_and(|other| other == one))
    }

    fn break_something(&mut self) {
        let pairs = self.world.network.queue_pairs();
        if !pairs.is_empty() {
            self.seen.breaks += 1;
            self.world.network.break_qp(pairs[self.dice.index(pairs.len())].1);
        }
    }

    fn make_trouble(&mut self) {
        if self.cautious {
            self.test_redundancy();
            return;
        }
        if self.loses_only {
            if self.ends_late {
                self.end_late();
            } else {
                self.lose();
            }
            return;
        }
        match self.dice.below(6) {
            0 => self.lose(),
            1 | 2 => self.break_something(),
            3 => {
                let host = &mut self.world.hosts[self.dice.index(2)];
                host.asleep = !host.asleep;
            }
            4 => {
                let number = self.dice.index(self.world.connections.len());
                let (host, id) = self.world.connections[number].names[self.dice.index(2)];
                if let Some(id) = id {
                    self.world.hosts[host].groups.abort(id);
                    self.aborted.push((host, id));
                }
            }
            _ => self.flap(),
        }
    }

    /// One side sends and is acknowledged, the other's pollers are late, and then the path breaks.
    fn lose(&mut self) {
        let late = self.dice.index(2);
        for _ in 0..4 {
            let number = self.dice.index(self.world.connections.len());
            let len = 1 + self.dice.index(2 * KIB);
            for application in &mut self.world.connections[number].applications {
                if !application.is_gone() && !application.will_finish() {
                    application.write(len);
                }
            }
        }
        for _ in 0..20 {
            self.world.applications();
            let World { hosts, now, .. } = &mut self.world;
            hosts[1 - late].turn(*now);
            self.world.pass_time(self.world.now + Duration::from_millis(1));
        }
        let World { hosts, network, .. } = &self.world;
        let pairs = network.queue_pairs();
        let pairs = pairs.into_iter().filter(|(gid, _)| hosts[late].gids.contains(gid));
        if let Some((_, qpn)) = pairs.max_by_key(|(_, qpn)| network.untold(*qpn)) {
            self.seen.breaks += 1;
            network.break_qp(qpn);
        }
    }

    /// One side of a connection says its last. That arrives and is answered, but before it is
    /// acknowledged the path breaks.
    fn end_late(&mut self) {
        let number = self.dice.index(self.world.connections.len());
        let (late, len) = (self.dice.index(2), 1 + self.dice.index(2 * KIB));
        let one = &mut self.world.connections[number];
        let [(host, Some(id)), _] = [one.names[late], one.names[1 - late]] else { return };
        if one.applications.iter().any(|one| one.is_gone() || one.will_finish()) {
            return;
        }
        one.applications.iter_mut().for_each(Application::wake);
        one.applications[1 - late].finish();
        self.world.run_for(Duration::from_millis(100));
        let last = &mut self.world.connections[number].applications[late];
        last.write(len);
        last.finish();
        // Bytes, then their end.
        for _ in 0..4 {
            self.world.applications();
            self.world.hosts[host].turn(self.world.now);
        }
        let long = Duration::from_millis(50);
        self.world.network.change_odds(Odds { latency: long..=long, ..self.odds.clone() });
        self.world.now = self.world.now + Duration::from_millis(1);
        self.world.hosts[1 - host].turn(self.world.now);
        self.world.network.change_odds(self.odds.clone());
        for _ in 0..40 {
            self.world.applications();
            self.world.hosts[1 - host].turn(self.world.now);
            self.world.pass_time(self.world.now + Duration::from_millis(1));
        }
        self.connect();
        for _ in 0..6 {
            self.world.talk(|_| true);
        }
        let groups = &self.world.hosts[host].groups;
        let Some(link) = groups.member(id).map(|member| member.link) else { return };
        let mut links = groups.iter().flat_map(|(_, group)| &group.links);
        if let Some(link) = links.find(|one| one.id == link) {
            self.seen.breaks += 1;
            self.world.network.break_qp(link.ours.qpn);
        }
    }

    /// A port goes down, or comes back.
    fn flap(&mut self) {
        let gids = self.world.gids();
        let gid = gids[self.dice.index(gids.len())];
        self.seen.flaps += 1;
        if let Some(carrier) = self.down.flap(&mut self.dice, &self.world.network, gid) {
            self.seen.met.note_times("a port is gone", u64::from(!carrier));
            self.world.carrier_changed(gid, carrier);
        }
    }

    /// A port that was down comes back. Returns whether there was one.
    fn mend_port(&mut self) -> bool {
        let mended = self.down.mend_one(&self.world.network);
        if let Some(gid) = mended {
            self.world.carrier_changed(gid, true);
        }
        mended.is_some()
    }

    /// From now on nothing breaks.
    fn calm_down(&mut self) {
        self.world.network.change_odds(Odds { straggle: Chance::NEVER, ..Odds::MALICIOUS });
        self.world.wire.make_noise(Chance::NEVER);
        // A message that was meddled with is as good as a path that breaks.
        self.seen.breaks += u64::from(self.world.wire.meddled() > 0);
        while self.mend_port() {}
        for host in &mut self.world.hosts {
            host.asleep = false;
        }
    }

    /// Most end, and the others stay until the memory of those has long been idle.
    fn thin_out(&mut self) {
        for four in self.world.connections.chunks_mut(4) {
            // Whoever has been told of the end and reads nothing for minutes is given up.
            four[0].applications.iter_mut().for_each(Application::wake);
            four.iter_mut().skip(1).for_each(Connected::say_goodbye);
        }
        self.world.run_for(Duration::from_secs(180));
    }

    /// Everybody wakes, says goodbye, and waits for the others to do so.
    fn end(&mut self) {
        self.world.connections.iter_mut().for_each(Connected::say_goodbye);
        // Longer than a peer that does not answer a close is waited for, and than elements rest.
        self.world.run_for(Duration::from_secs(75));
        // Longer than an idle group lives.
        self.world.run_for(2 * IDLE_GROUP);
    }

    /// A link has a reason to go down.
    fn judge_links(&self) {
        if self.cautious && self.seen.flaps == 0 && self.seen.breaks == 0 {
            let counts = self.world.hosts.each_ref().map(|host| host.groups.counts());
            let down = counts.map(|counts| counts.links_failed_over);
            assert_eq!(down, [0; 2], "links went down that nobody broke");
        }
    }

    fn judge(&mut self) {
        let lost = self.world.network.messages_lost();
        for number in 0..self.world.connections.len() {
            self.judge_connection(number);
        }
        self.world.assert_no_stream_waits();
        self.seen.streams = self.world.waiting.counts;
        let World { hosts, network, contacts, wire, .. } = &mut self.world;
        self.seen.contacts = *contacts;
        self.seen.messages_lost = lost;
        self.seen.met.add(wire.met());
        for host in hosts.iter() {
            let counts = host.groups.counts();
            self.seen.moved += counts.connections_moved;
            self.seen.links_failed_over += counts.links_failed_over;
            self.seen.replayed += host.count(|all| all.bytes_replayed.get());
            self.seen.given_back += host.count(|all| all.memory_given_back.get());
            self.seen.data_lost += host.count(|all| all.resets_data_lost.get());
            self.seen.met.note_times("no memory for a connection", host.no_memory);
        }
        self.seen.bytes = hosts.iter().map(|host| host.count(|all| all.rdma_in.get())).sum();
        hosts.iter_mut().for_each(|host| host.assert_nothing_is_left(network));
    }

    /// Whether something happened that may have cost the link of this connection.
    fn may_be_lost(&self, number: usize) -> bool {
        let mut names = self.world.connections[number].names.into_iter();
        let is_touched = |(host, id): (usize, Option<_>)| {
            id.is_some_and(|id| self.world.wire.is_touched(host, id))
        };
        !self.cautious || names.any(is_touched)
    }

    /// Whether an operator aborted the connection of this stream, during it or another one.
    fn was_aborted(&self, number: usize) -> bool {
        let mut names = self.world.connections[number].names.into_iter();
        names.any(|(host, id)| id.is_some_and(|id| self.aborted.contains(&(host, id))))
    }

    /// Whether an RNIC lost what it had acknowledged in the link group of this connection.
    fn has_lost(&self, number: usize) -> bool {
        let mut names = self.world.connections[number].names.into_iter();
        names.any(|(host, id)| id.is_some_and(|id| self.world.wire.has_lost(host, id)))
    }

    fn judge_connection(&mut self, number: usize) {
        let endings = [0, 1].map(|side| self.world.ending(number, side));
        let handed_over = [0, 1].map(|side| self.world.was_handed_over(number, side));
        let ended = [0, 1].map(|side| endings[side].is_some() == handed_over[side]);
        assert_eq!(ended, [true; 2], "connection {number} did not end: {endings:?}");
        let [client, server] = &self.world.connections[number].applications;
        let told = |one: &Application| (one.sent(), one.received(), one.heard());
        let story = format!("connection {number}: {endings:?} {:?}", [client, server].map(told));
        let gone = client.is_gone() || server.is_gone();
        let closings = self.world.connections[number]
            .names
            .map(|(host, id)| self.world.hosts[host].closed.get(&id?).copied());
        let lost = [endings, closings].as_flattened().contains(&Some(Ending::LinkLost));
        // What was acknowledged and then lost is no fault of anybody's, but only there.
        let vanished = endings.iter().flatten().any(|ending| *ending == Ending::DataLost)
            && self.has_lost(number);
        let refused = handed_over != [true; 2];
        let excused = gone
            || lost && self.may_be_lost(number)
            || vanished
            || refused
            || self.was_aborted(number)
            || self.world.was_refused(number);
        let well = judge_streams([client, server], &story);
        assert!(well || excused, "{story}: why?");
        self.seen.refused += u64::from(refused);
        self.seen.lost += u64::from(lost);
        self.seen.graceful += u64::from(well && !refused);
        self.seen.reset += u64::from(!well && !lost);
    }
}

/// Within this time a broken link is known to be down on both sides.
const NOTICE: Duration = Duration::from_secs(3);
