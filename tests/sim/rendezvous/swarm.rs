//! Whatever applications, networks, operators and a hostile host do, under a seed; judged from
//! outside.
//!
//! The judge knows what went in and what came out. Every byte that comes is the byte that was sent
//! at that place (checked as it is read). A connection is SMC-R at both gateways, or TCP at both,
//! or reset; it ends well and complete, or somebody had a reason to reset it that the judge knows
//! of. A hostile host is no reason, and nobody waits for it
//! longer than some round trips. When all is over, nothing is left.

use std::net::IpAddr;
use std::ops::Range;
use std::time::Duration;

use smcgate::groups::PortId;
use smcgate_tests::{run_all, seeds};
use smcr_engine::handoff::Ending;
use smcr_proto::{Gid, RmbeSize};
use smcr_rnic::dice::{Chance, Dice};
use smcr_rnic::sim::Odds;

use super::call::Way;
use super::intruder::{Intruder, Tried};
use super::node::Speaks;
use super::pipe::Segment;
use super::{CLIENT, INTRUDER, Parts, SERVER, World, address_of};
use crate::KIB;
use crate::application::{Application, Heard};
use crate::gateways::gateway::{IDLE_GROUP, Sizes};
use crate::gateways::reach::Met;
use crate::rogue::Attempts;

/// One run.
pub(super) struct Swarm {
    dice: Dice,
    pub(super) world: World,
    /// How likely a step brings trouble beyond what applications do.
    trouble: Chance,
    /// Ports that are down.
    down: Vec<Gid>,
    /// Something has happened that may cost any connection its link.
    disturbed: bool,
    pub(super) met: Met,
}

/// Two gateways, with the rendezvous of production between them.
// RFC 7609 C.1 #3: never answer a Decline
// RFC 7609 C.2 #1: may decline until CONFIRM LINK is sent
// RFC 7609 C.2 #2: fall back until ADD LINK
// RFC 7609 C.6 #2: never parse application data as CLC
#[test]
fn rendezvous_survive_anything() {
    let trouble = [
        "a connection is SMC-R",
        "a connection is TCP",
        "a connection is refused",
        "a rendezvous is broken off",
        "TCP is reset during a rendezvous",
        "a control thread stands still",
    ];
    run("rendezvous_survive_anything", Swarm::rough, &trouble);
}

/// The same with a third host that is hostile.
// RFC 7609 4.7.1 #3: find connection by alert token
// RFC 7609 3.5.1.2 #5: find group by id and address
// RFC 7609 3.5.2.1 #2: find existing group by address too
#[test]
fn nobody_touches_another() {
    let tried = [
        "a connection is SMC-R",
        "a Proposal in the name of another",
        "an Accept with the link of another",
        "a Confirm with the element of another",
        "a Decline that calls out of sync",
        "a flood of connections",
        "silence",
        "a first contact of the intruder",
        "a CDC message of the intruder",
        "an LLC message of the intruder",
        "a write of the intruder is refused",
        "a forged CDC message is counted",
        "a claim is counted",
    ];
    run("nobody_touches_another", Swarm::visited, &tried);
}

/// Runs such swarms, which must meet all of that.
fn run(name: &str, swarm: impl Fn(u64) -> Swarm + Sync, expected: &[&str]) {
    let Range { start, end } = seeds(SEEDS);
    let asked = end - start;
    let end = end.min(start + SEEDS_MAX);
    if end - start < asked {
        println!(
            "{name}: {SEEDS_MAX} of the {asked} seeds that were asked for; SMC_FROM continues"
        );
    }
    let runs = run_all("sim", name, start..end, |seed| swarm(seed).run());
    let mut met = Met::default();
    runs.iter().for_each(|one| met.add(one));
    println!("{met:#?}");
    let missing: Vec<_> = expected.iter().filter(|what| !met.has(what)).collect();
    assert!(end - start < SEEDS || missing.is_empty(), "{met:#?}\nmissing: {missing:?}");
}

impl Swarm {
    fn new(seed: u64, odds: Odds, trouble: Chance, intruder: [IpAddr; 2]) -> Self {
        let mut dice = Dice::new(seed);
        let socket_bytes = [1_000, 30_000, 100_000][dice.index(3)];
        let sizes = [(); 2].map(|()| Sizes {
            rnics: [1, 1, 2, 3][dice.index(4)],
            max_links: [2, 3, 8][dice.index(3)],
            rmbe: RmbeSize::from_notation([0, 0, 1][dice.index(3)]),
            elements: [1, 3, 20][dice.index(3)],
            rmb_bytes: PLENTY,
            send_chunks: [1, 2, 8][dice.index(3)],
            socket_bytes,
            reports: [2, 100][dice.index(2)],
        });
        let speaks = [(true, false), (false, true), (true, true)];
        let speaks = speaks.map(|(v1, v2)| Speaks { v1, v2 });
        let same = speaks[dice.index(3)];
        let odd = speaks[dice.index(3)];
        let speaks = [same, if dice.roll(Chance::percent(30)) { odd } else { same }];
        let slow = [Duration::from_micros(100), Duration::from_millis(2), SLOW][dice.index(3)];
        let world = World::new(seed, &Parts { odds, sizes, speaks, slow, intruder });
        let (down, met) = (Vec::new(), Met::default());
        Self { dice, world, trouble, down, disturbed: false, met }
    }

    /// Two gateways, and trouble.
    fn rough(seed: u64) -> Self {
        let mut dice = Dice::new(!seed);
        let breaks = [Chance::NEVER, Chance::NEVER, Chance(500), Chance::percent(2)];
        let exhausted = [Chance::NEVER, Chance::NEVER, Chance::percent(2), Chance::percent(10)];
        let trouble = [Chance::NEVER, Chance::percent(2), Chance::percent(8)][dice.index(3)];
        let odds = Odds {
            break_on_transmit: breaks[dice.index(4)],
            exhausted: exhausted[dice.index(4)],
            ..Odds::MALICIOUS
        };
        let odds = match trouble {
            Chance::NEVER => CAREFUL,
            _ => odds,
        };
        let mut swarm = Self::new(seed, odds, trouble, [address_of(INTRUDER); 2]);
        swarm.disturbed = trouble != Chance::NEVER;
        swarm.world.refuses = swarm.disturbed;
        swarm
    }

    /// Two gateways without trouble, and a hostile host.
    pub(super) fn visited(seed: u64) -> Self {
        Self::visited_from(seed, false)
    }

    /// The same, where the hostile host may have the TCP address of either gateway.
    pub(super) fn visited_from(seed: u64, blends_in: bool) -> Self {
        let seems =
            [0, 1].map(|host: usize| address_of(if blends_in { 1 - host } else { INTRUDER }));
        let mut swarm = Self::new(seed, CAREFUL, Chance::NEVER, seems);
        let mut intruder = Intruder::new(seed, &swarm.world.network);
        intruder.blends_in = blends_in;
        swarm.world.intruder = Some(intruder);
        swarm
    }

    /// The whole run.
    ///
    /// # Panics
    ///
    /// If the judge finds something wrong.
    pub(super) fn run(mut self) -> Met {
        self.settle();
        for _ in 0..self.dice.below(ACTS_MAX) {
            self.act();
        }
        self.calm_down();
        self.world.visit(Intruder::depart);
        self.world.run_for(Duration::from_secs(5));
        self.count_attempts();
        // Whoever connects now finds everything in order.
        let last = [0, 1].map(|client| {
            let number = self.world.connect(client, 1 - client, [PortId(0); 2]);
            for side in [CLIENT, SERVER] {
                self.world.calls[number].application(side).expect("it is honest").write(20 * KIB);
            }
            number
        });
        self.world.run_for(Duration::from_secs(15));
        for call in &mut self.world.calls {
            call.programs.iter_mut().for_each(super::Program::say_goodbye);
        }
        // Longer than a peer that does not answer a close is waited for, and than elements rest.
        self.world.run_for(Duration::from_secs(75));
        self.world.run_for(2 * IDLE_GROUP);
        for number in 0..self.world.calls.len() {
            if self.world.calls[number].is_honest() {
                self.judge(number, last.contains(&number));
            }
        }
        let World { nodes, network, .. } = &mut self.world;
        nodes.iter_mut().for_each(|node| node.assert_nothing_is_left(network));
        self.met
    }

    /// A hostile host that is about has something to attack, and links to do it with.
    fn settle(&mut self) {
        if self.world.intruder.is_none() {
            return;
        }
        for client in [0, 1, 0, 1] {
            self.world.connect(client, 1 - client, [PortId(0); 2]);
        }
        self.world.run_for(self.world.patience() / 10);
        self.world.visit(Intruder::settle);
        self.world.run_for(self.world.patience() / 10);
    }

    /// Somebody does something, then everybody looks around a few times.
    fn act(&mut self) {
        if self.world.calls.is_empty() || self.dice.roll(Chance::percent(15)) {
            self.connect();
        } else {
            let number = self.dice.index(self.world.calls.len());
            let side = self.dice.index(2);
            self.act_on(number, side);
        }
        if self.dice.roll(self.trouble) {
            self.make_trouble();
        }
        self.world.visit(Intruder::act);
        for _ in 0..self.dice.below(12) {
            self.look_around();
        }
    }

    /// Somebody looks around, or time passes.
    fn look_around(&mut self) {
        let World { nodes, now, .. } = &mut self.world;
        let host = self.dice.index(2);
        match self.dice.below(12) {
            0 => drop(self.world.control(host)),
            1 | 2 => {
                let poller = self.dice.index(nodes[host].gids.len());
                nodes[host].turn_poller(poller, *now);
            }
            3 => drop(self.world.programs()),
            4 => drop(self.world.carry()),
            5..=8 => drop(self.world.step()),
            _ => {
                let limit = [1, 1, 10, 1_000][self.dice.index(4)];
                // A host that stands still for long is trouble.
                while !self.disturbed && self.world.step() {}
                self.world.pass_time(self.world.now + Duration::from_millis(limit));
            }
        }
    }

    fn connect(&mut self) {
        let client = self.dice.index(2);
        let ports = [client, 1 - client].map(|host| {
            let gids = &self.world.nodes[host].gids;
            let up: Vec<_> = (0..gids.len()).filter(|i| !self.down.contains(&gids[*i])).collect();
            let any = self.dice.index(gids.len());
            PortId(if up.is_empty() { any } else { up[self.dice.index(up.len())] })
        });
        self.world.connect(client, 1 - client, ports);
    }

    fn act_on(&mut self, number: usize, side: usize) {
        let roll = self.dice.below(100);
        let len_max = [10, 2 * KIB, 100 * KIB][self.dice.index(3)];
        let len = 1 + self.dice.index(len_max);
        let slowly = 1 + self.dice.index(4 * KIB);
        let Some(application) = self.world.calls[number].application(side) else { return };
        if application.is_gone() {
            return;
        }
        match roll {
            0..50 if !application.will_finish() => application.write(len),
            50..54 if !application.will_finish() => application.write_urgent(),
            0..60 if slowly > 100 => application.write_at_most(slowly),
            60..70 if slowly > 100 => application.read_at_most(slowly),
            70..78 => application.sleep(),
            78..85 => application.wake(),
            85..94 => application.finish(),
            94..95 => application.reset(),
            95..96 => application.close(),
            _ => {}
        }
    }

    fn make_trouble(&mut self) {
        let number = self.dice.index(self.world.calls.len());
        let side = self.dice.index(2);
        match self.dice.below(7) {
            0 => {
                let pairs = self.world.network.queue_pairs();
                if !pairs.is_empty() {
                    self.met.note("a queue pair breaks");
                    self.world.network.break_qp(pairs[self.dice.index(pairs.len())].1);
                }
            }
            1 => {
                self.met.note("a control thread stands still");
                let node = &mut self.world.nodes[side];
                node.asleep = !node.asleep;
            }
            2 => {
                self.met.note("a rendezvous is broken off");
                let going_on = |call: &super::Call| matches!(call.sides[side].way, Way::Talking);
                let number = self.world.calls.iter().rposition(going_on).unwrap_or(number);
                self.world.break_off(number, side);
            }
            3 | 4 => {
                let going_on = |call: &super::Call| matches!(call.sides[side].way, Way::Talking);
                let number = self.world.calls.iter().rposition(going_on).unwrap_or(number);
                self.met.note("TCP is reset during a rendezvous");
                self.world.calls[number].excused = true;
                for side in [CLIENT, SERVER] {
                    self.world.send(number, side, Segment::Reset);
                }
            }
            5 => {
                let call = &mut self.world.calls[number];
                call.excused = true;
                let (host, connection) = (call.hosts[side], call.sides[side].connection);
                if let Some(connection) = connection {
                    self.world.nodes[host].endpoint.groups_mut().abort(connection);
                }
            }
            _ => self.flap(),
        }
    }

    /// A port goes down, or comes back.
    fn flap(&mut self) {
        let gids: Vec<Gid> = self.world.nodes.iter().flat_map(|node| node.gids.clone()).collect();
        let gid = gids[self.dice.index(gids.len())];
        if let Some(index) = self.down.iter().position(|down| *down == gid) {
            self.down.remove(index);
            self.world.network.port_up(gid);
            self.world.carrier_changed(gid, true);
        } else {
            self.met.note("a port is gone");
            self.down.push(gid);
            self.world.network.port_down(gid);
            // Some devices do not say that they are down.
            if self.dice.roll(Chance::percent(70)) {
                self.world.carrier_changed(gid, false);
            }
        }
    }

    /// From now on nothing breaks.
    fn calm_down(&mut self) {
        self.world.network.change_odds(CAREFUL);
        self.world.refuses = false;
        for gid in std::mem::take(&mut self.down) {
            self.world.network.port_up(gid);
            self.world.carrier_changed(gid, true);
        }
        for node in &mut self.world.nodes {
            node.asleep = false;
        }
    }

    /// Notes what the hostile host has tried, and what was counted of it.
    fn count_attempts(&mut self) {
        let Some(intruder) = self.world.intruder.take() else { return };
        let Attempts { cdc, llc, refused, written } = intruder.rogue.attempts;
        assert_eq!(written, 0, "memory that was offered to others was written");
        let nodes = &self.world.nodes;
        // Not all need be counted: what came by a link that was given up meanwhile is not read.
        let foreign = nodes.iter().map(|node| node.count(|all| all.cdc_foreign.get()));
        self.met.note_times("a forged CDC message is counted", foreign.sum());
        let claims = nodes.iter().map(|node| node.endpoint.groups().counts().foreign_claims);
        self.met.note_times("a claim is counted", claims.sum());
        let Tried { replays, accepts, confirms, out_of_sync, floods, silences, contacts } =
            intruder.tried;
        for (what, times) in [
            ("a Proposal in the name of another", replays),
            ("an Accept with the link of another", accepts),
            ("a Confirm with the element of another", confirms),
            ("a Decline that calls out of sync", out_of_sync),
            ("a flood of connections", floods),
            ("silence", silences),
            ("a first contact of the intruder", contacts),
            ("a CDC message of the intruder", cdc),
            ("an LLC message of the intruder", llc),
            ("a write of the intruder is refused", refused),
        ] {
            self.met.note_times(what, times);
        }
    }

    /// Judges an honest connection; `calm` is one that was made when all trouble was over.
    fn judge(&mut self, number: usize, calm: bool) {
        let endings = [0, 1].map(|side| self.world.ending(number, side));
        let call = &self.world.calls[number];
        let sides = &call.sides;
        let ways = [0, 1].map(|side: usize| sides[side].carried);
        let [client, server] = call.applications().expect("it is honest");
        let given_up = [0, 1].map(|side: usize| sides[side].why);
        let told = |one: &Application| (one.sent(), one.received(), one.heard());
        let story = format!(
            "connection {number}: {ways:?} {given_up:?} {endings:?} {:?}",
            [client, server].map(told)
        );
        for side in [CLIENT, SERVER] {
            let over = sides[side].connection.is_none() || endings[side].is_some();
            assert!(over && !matches!(sides[side].way, Way::Talking), "{story}: it did not end");
        }
        let gone = client.is_gone() || server.is_gone();
        let excused = gone || !calm && (call.excused || self.disturbed);
        let mut well = true;
        for (writer, reader) in [(client, server), (server, client)] {
            assert!(reader.received() <= writer.sent(), "{story}");
            assert!(reader.is_gone() || reader.heard() != Heard::Bytes, "{story}: it waits");
            let all = reader.received() == writer.sent();
            // Complete, or it knows that it is not.
            let knows = reader.is_gone() || writer.is_gone() || reader.heard() != Heard::End;
            assert!(all || knows, "{story}: cut short");
            well &= all && reader.heard() == Heard::End;
        }
        assert!(well || excused, "{story}: why?");
        if let [Some(one), Some(other)] = ways {
            assert!(one == other || !well, "{story}: each side has it elsewhere");
        }
        let wait = sides.iter().filter_map(|side| Some(side.opened?.since(call.born))).max();
        let patient = wait.is_none_or(|wait| wait <= self.world.patience());
        assert!(patient || self.disturbed && !calm, "{story}: it waited for {wait:?}");
        self.met.note(match ways {
            [Some(super::call::Carried::Smc), Some(super::call::Carried::Smc)] => {
                "a connection is SMC-R"
            }
            [Some(super::call::Carried::Tcp), Some(super::call::Carried::Tcp)] => {
                "a connection is TCP"
            }
            [_, _] => "a connection is refused",
        });
        let lost = endings.iter().flatten().any(|ending| *ending == Ending::LinkLost);
        self.met.note_times("a connection is lost with its link", u64::from(lost));
    }
}

/// Nothing breaks, and everything comes as late and as reordered as the contract allows.
const CAREFUL: Odds = Odds { straggle: Chance::NEVER, ..Odds::MALICIOUS };
/// Bytes of RMBs that are enough for everybody, whatever a hostile host takes.
const PLENTY: u64 = 1 << 28;
/// What TCP takes at most.
const SLOW: Duration = Duration::from_millis(30);
/// Actions of a run.
const ACTS_MAX: u64 = 150;
/// Seeds that every test runs.
const SEEDS: u64 = 60;
/// Seeds that one call runs at most, because each takes a good part of a second of virtual hosts'
/// work. Whoever wants more calls again, with `SMC_FROM` behind these.
const SEEDS_MAX: u64 = 4_000;
