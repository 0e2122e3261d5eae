//! Who declines what, and when: two sides of a rendezvous over a TCP connection that delays and
//! cuts, beside a network that carries RoCE both ways, one way, not at all, or as long as it likes.
//!
//! ```text
//!   application ─ poller ─ Conversation ══ TCP ══ Conversation ─ poller ─ application
//!                          LinkGroup ─ ─ ─ LLC ─ ─ ─ LinkGroup
//! ```
//! Conversations, machines and pollers are production's. The judge knows what either application
//! sent: what arrives is that, whatever was declined by whom and when. Where nothing changes while
//! the two find out, nobody is reset either.
//!
//! The moments in which both may speak, and what is in flight then:
//!
//! | client | server | the client declines | the server declines |
//! |---|---|---|---|
//! | connected | awaits Proposal | in place of it; nothing comes | never |
//! | awaits Accept | provides | never: it waits, or closes | in place of it; nothing comes |
//! | provides | awaits Confirm | in place of it; nothing comes | never: it waits, or closes |
//! | awaits the link | awaits the link | at once; one may cross | at once; one may cross |
//! | has answered | awaits the link | until that is taken | until the client may go on |
//! | has what it waited for | any | never: reset | never: reset |

use std::collections::VecDeque;
use std::time::Duration;

use smcgate::rendezvous::conversation::{Conversation, Demand, Machine};
use smcgate_tests::{run_all, seeds};
use smcr_engine::Established;
use smcr_proto::handshake::{
    Agreement, Client, ClientAction, HandshakeError, Policy, PolicyV2, Server, ServerAction,
};
use smcr_proto::link::Keepalive;
use smcr_proto::link_group::{Action, LinkGroup, NoQueuePair, Setup, UNNUMBERED, Version};
use smcr_proto::wire::clc::v2::{Eid, Gids, HostName};
use smcr_proto::wire::clc::{Decline, Diagnosis, Frame, Ipv4Subnet, Offer, Proposal};
use smcr_proto::wire::llc::{DeleteReason, Llc};
use smcr_proto::{
    AlertToken, Gid, Instant, LinkNumber, LinkUserId, MacAddress, Mtu, PeerId, Psn, QpAddress, Qpn,
    Rkey, RmbeSize,
};
use smcr_rnic::dice::{Chance, Dice};
use smcr_rnic::sim::{Network, Odds};

use crate::host::{Host, Sizes};
use crate::tcp::{self, Read, Stream};

const CLIENT: usize = 0;
const SERVER: usize = 1;
const T0: Instant = Instant(1_000_000_000);
/// Longer than anything takes that ends.
const END: Duration = Duration::from_secs(20);
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// An RNIC gives up after this, and tries again as often as that until then.
const RETRIES: Duration = Duration::from_millis(1_500);
const RETRY: Duration = Duration::from_millis(100);

/// What an application does, and what it has heard.
struct Application {
    tcp: tcp::Application,
    /// What it says unasked, and what when it has heard something.
    parts: [Vec<u8>; 2],
    unasked: bool,
    said: usize,
    sent: Vec<u8>,
    finished: bool,
    heard: Vec<u8>,
    heard_end: bool,
    reset: bool,
}

/// Where a side has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Talking,
    Tcp,
    Smc,
    Closed,
}

/// What TCP carries.
#[derive(Debug)]
enum Segment {
    Bytes(Vec<u8>),
    End,
    Reset,
}

/// A message of the link that its RNIC has not heard of yet.
struct Post {
    from: usize,
    on: LinkNumber,
    message: Llc,
    due: Instant,
    give_up: Instant,
    delivered: bool,
}

struct Side {
    conversation: Conversation,
    fate: Fate,
    group: Option<LinkGroup>,
    number: LinkNumber,
    host: Host,
    streams: Option<[Stream; 2]>,
    /// The network's end of the TCP connection to the peer.
    wire: tcp::Application,
    wire_ended: bool,
    application: Application,
    inbox: VecDeque<u8>,
    inbox_ended: bool,
    declined: bool,
    /// It has a queue pair for a first contact, or had.
    founds: bool,
    /// Its CONFIRM LINK was acknowledged.
    confirmed: bool,
    /// It has sent ADD LINK or the answer to it: the point of no return.
    committed: bool,
    /// It declined its first contact before its CONFIRM LINK was acknowledged.
    declined_early: bool,
    /// It went back to TCP after that.
    fell_back_late: bool,
    /// The control thread stands still.
    stalls: [Instant; 2],
    /// Its queue pair breaks then.
    breaks_at: Option<Instant>,
}

struct World {
    dice: Dice,
    now: Instant,
    sides: [Side; 2],
    /// From each side.
    tcp: [VecDeque<(Instant, Segment)>; 2],
    posts: VecDeque<Post>,
    /// When RoCE from each side is blocked.
    blocked: [[Instant; 2]; 2],
    slow: Duration,
    first_contact: bool,
    refusals: [bool; 3],
    /// Nothing changes while they find out.
    steady: bool,
}

#[derive(Debug, Default)]
struct Seen {
    smc: usize,
    tcp: usize,
    crossed: usize,
    reset: usize,
    /// Connections that stayed TCP because a first contact was declined before the CONFIRM LINK of
    /// that side was sent, and those that a side took back after its own was.
    declined_early: usize,
    fell_back_late: usize,
}

/// What arrives is what was sent, whatever was declined by whom and when. First contacts are
/// declined until the own CONFIRM LINK was sent, and both sides go on by TCP; whoever has sent ADD
/// LINK or its answer declines no more.
// RFC 7609 C.1 #3: never answer a Decline
// RFC 7609 C.2 #1: may decline until CONFIRM LINK is sent
// RFC 7609 C.3 #3: reset beyond point of no return
// RFC 7609 C.6 #2: never parse application data as CLC
#[test]
fn what_arrives_is_what_was_sent() {
    let seeds = seeds(500);
    let many = seeds.end - seeds.start >= 500;
    let mut seen = Seen::default();
    let name = "declines::what_arrives_is_what_was_sent";
    for one in run_all("sim", name, seeds, |seed| World::new(seed).run()) {
        seen.smc += one.smc;
        seen.tcp += one.tcp;
        seen.crossed += one.crossed;
        seen.reset += one.reset;
        seen.declined_early += one.declined_early;
        seen.fell_back_late += one.fell_back_late;
    }
    println!("{seen:?}");
    let all = [seen.smc, seen.tcp, seen.crossed, seen.reset, seen.declined_early];
    assert!(!many || all.iter().all(|count| *count > 0), "{seen:?}");
}

/// The server's RNIC reports that it cannot deliver CONFIRM LINK. The server declines at once: if
/// it waited for its own timer, the client's application would wait, too.
// RFC 7609 C.7 #5: decline if CONFIRM LINK send fails
#[test]
fn a_confirm_link_that_is_not_delivered_is_a_decline() {
    let plain =
        |world: &World| world.steady && world.first_contact && !world.refusals.contains(&true);
    let mut world = (0..).map(World::new).find(plain).expect("every few seeds");
    world.slow = Duration::from_millis(1);
    // Nothing that the server says on the link arrives.
    let broken_at = T0 + Duration::from_millis(100);
    world.blocked = [[T0 + END * 2; 2], [Instant(0), T0 + END * 2]];
    world.sides[SERVER].breaks_at = Some(broken_at);
    while !world.sides[SERVER].declined {
        assert!(world.now < T0 + END && (world.step() || world.pass_time(T0 + END)), "no Decline");
    }
    assert_eq!(world.now, broken_at, "not when a timer expires");
    assert_eq!(world.run().tcp, 1);
}

/// The server's CONFIRM LINK arrives and is acknowledged, and then the network carries nothing that
/// the client says on the link. No byte has gone by RDMA, so both go on by TCP.
// RFC 7609 C.2 #2: fall back until ADD LINK
#[test]
fn a_first_contact_that_fails_behind_confirm_link_stays_tcp() {
    let plain =
        |world: &World| world.steady && world.first_contact && !world.refusals.contains(&true);
    let mut world = (0..).map(World::new).find(plain).expect("every few seeds");
    world.slow = Duration::from_millis(1);
    world.blocked = [[T0 + END * 2; 2]; 2];
    while !world.sides[SERVER].confirmed {
        assert!(world.now < T0 + END && (world.step() || world.pass_time(T0 + END)), "no answer");
    }
    assert!(!world.sides[SERVER].committed, "the client's CONFIRM LINK is on its way");
    world.blocked[CLIENT] = [world.now, T0 + END * 2];
    let seen = world.run();
    assert_eq!((seen.tcp, seen.fell_back_late, seen.reset), (1, 1, 0));
}

fn policy() -> PolicyV2 {
    PolicyV2 {
        eids: Eid::with_ours(&[]).unwrap(),
        release: 1,
        max_connections: 255,
        max_links: 2,
        host_name: HostName::new("sim"),
        many_streams: true,
        dense_packets: true,
    }
}

fn end(side: usize) -> QpAddress {
    let last = u8::try_from(side + 1).unwrap();
    QpAddress {
        mac: MacAddress([2, 0, 0, 0, 0, last]),
        gid: Gid::from_ipv4([10, 0, 0, last]),
        qpn: Qpn(u32::from(last)),
        psn: Psn(7),
        mtu: Mtu::B1024,
    }
}

fn peer_id(side: usize) -> PeerId {
    PeerId([u8::try_from(side + 1).unwrap(); 8])
}

fn offer(side: usize, first_contact: bool) -> Offer {
    let QpAddress { mac, gid, qpn, psn, mtu } = end(side);
    Offer {
        first_contact,
        peer_id: peer_id(side),
        gid,
        mac,
        qpn,
        rkey: Rkey(5),
        rmbe_index: 1,
        alert_token: AlertToken(9),
        rmbe_size: RmbeSize::KIB_64,
        mtu,
        rmb_address: 0,
        psn,
    }
}

fn setup(side: usize) -> Setup {
    Setup {
        peer_id: peer_id(1 - side),
        version: Version::V1,
        ours: end(side),
        theirs: end(1 - side),
        user_id: LinkUserId(1),
        eye_catcher: false,
        keepalive: Keepalive::default(),
        idle_wait: Duration::from_secs(600),
        max_links: 2,
        retry_link: Duration::from_secs(600),
        confirm_wait: None,
    }
}

impl Application {
    fn new(dice: &mut Dice, tcp: tcp::Application, unasked: bool) -> Self {
        let mut part = || {
            let mut bytes = vec![0; 1 + dice.index(3_000)];
            dice.fill(&mut bytes);
            bytes
        };
        let mut parts = [part(), part()];
        if dice.roll(Chance::percent(25)) {
            // As a Decline begins, and perhaps nothing more for now.
            let frame = decline().encode();
            let mut bytes = frame.as_bytes()[..1 + dice.index(11)].to_vec();
            if dice.roll(Chance::percent(50)) {
                bytes.append(&mut parts[0]);
            }
            parts[0] = bytes;
        }
        Self {
            tcp,
            parts,
            unasked,
            said: 0,
            sent: Vec::new(),
            finished: false,
            heard: Vec::new(),
            heard_end: false,
            reset: false,
        }
    }

    fn act(&mut self) -> bool {
        let mut moved = false;
        match self.tcp.read(100_000) {
            Read::Bytes(bytes) => {
                self.heard.extend(bytes);
                moved = true;
            }
            Read::Finished => moved |= !std::mem::replace(&mut self.heard_end, true),
            Read::Reset => moved |= !std::mem::replace(&mut self.reset, true),
            Read::Nothing => {}
        }
        let answers = !self.heard.is_empty();
        while !self.reset && self.said < 2 && (answers || (self.said == 0 && self.unasked)) {
            let part = &self.parts[self.said];
            if self.tcp.write(part) != Some(part.len()) {
                break;
            }
            self.sent.extend(part);
            self.said += 1;
            moved = true;
        }
        if self.said == 2 && !self.finished && !self.reset {
            self.tcp.finish();
            self.finished = true;
            moved = true;
        }
        moved
    }
}

fn decline() -> Frame {
    let (out_of_sync, diagnosis) = (false, Diagnosis::TIMED_OUT);
    Frame::Decline(Decline { out_of_sync, peer_id: peer_id(0), diagnosis })
}

impl World {
    fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let network = Network::new(seed, Odds::CALM);
        let steady = dice.roll(Chance::percent(50));
        let machines = Self::machines(&mut dice);
        // Somebody must begin.
        let speaker = dice.index(3);
        let mut sides = machines.into_iter().enumerate().map(|(side, machine)| {
            let (application, near) = tcp::connection(40_000);
            let (wire, far) = tcp::connection(40_000);
            let number = u8::try_from(side + 1).unwrap();
            let within = |dice: &mut Dice| T0 + dice.duration(&(Duration::ZERO..=END / 5));
            let far_off = T0 + END * 2;
            let trouble = |dice: &mut Dice| !steady && dice.roll(Chance::percent(25));
            let stalls = match trouble(&mut dice) {
                true => {
                    let from = within(&mut dice);
                    [from, from + dice.duration(&(Duration::ZERO..=Duration::from_secs(4)))]
                }
                false => [far_off; 2],
            };
            let breaks_at = trouble(&mut dice).then(|| within(&mut dice));
            Side {
                conversation: Conversation::new(machine),
                fate: Fate::Talking,
                group: None,
                number: UNNUMBERED,
                host: Host::new(&network, number, Sizes { elements: 4, ..Sizes::USUAL }),
                streams: Some([near, far]),
                wire,
                wire_ended: false,
                application: Application::new(&mut dice, application, speaker != side),
                inbox: VecDeque::new(),
                inbox_ended: false,
                declined: false,
                founds: false,
                confirmed: false,
                committed: false,
                declined_early: false,
                fell_back_late: false,
                stalls,
                breaks_at,
            }
        });
        let sides = [sides.next().unwrap(), sides.next().unwrap()];
        let blocked = [(); 2].map(|()| {
            let (at, end) = (T0 + dice.duration(&(Duration::ZERO..=END / 5)), T0 + END * 2);
            match dice.index(if steady { 3 } else { 5 }) {
                0 => [end, end],
                1 | 2 => [Instant(0), end],
                3 => [at, end],
                _ => [Instant(0), at],
            }
        });
        let slow = [1, 20, 300].map(Duration::from_millis)[dice.index(3)];
        let first_contact = dice.roll(Chance::percent(85));
        let refusals = [(); 3].map(|()| dice.roll(Chance::percent(8)));
        Self {
            dice,
            now: T0,
            sides,
            tcp: [VecDeque::new(), VecDeque::new()],
            posts: VecDeque::new(),
            blocked,
            slow,
            first_contact,
            refusals,
            steady,
        }
    }

    /// Either version, as either side happens to speak them.
    fn machines(dice: &mut Dice) -> [Machine; 2] {
        let proposal = Proposal {
            peer_id: peer_id(CLIENT),
            gid: end(CLIENT).gid,
            mac: end(CLIENT).mac,
            subnet: Ipv4Subnet { network: [10, 0, 0, 0], prefix_bits: 24 },
            prefixes: Default::default(),
            prefix_count: 0,
            offers_smc_r_v1: true,
        };
        let client = match dice.index(2) {
            0 => Client::new(T0, proposal),
            _ => Client::with_v2(T0, proposal, policy(), proposal.gid),
        };
        let v2 = (dice.index(2) == 0).then(policy);
        let server = Server::with_policy(T0, peer_id(SERVER), Policy { v1: true, v2 });
        [Machine::Client(client), Machine::Server(server)]
    }

    fn run(mut self) -> Seen {
        let until = T0 + END;
        let mut steps = 0;
        while self.now < until {
            steps += 1;
            assert!(steps < 2_000_000, "busy for ever");
            if !self.step() && !self.pass_time(until) {
                break;
            }
        }
        self.judge()
    }

    fn judge(&self) -> Seen {
        let fates = self.sides.each_ref().map(|side| side.fate);
        for side in [CLIENT, SERVER] {
            let (here, there) = (&self.sides[side].application, &self.sides[1 - side].application);
            let said = &there.sent[..here.heard.len().min(there.sent.len())];
            assert_eq!(here.heard, said, "side {side}, {fates:?}: not what was sent");
        }
        let declined = self.sides.iter().all(|side| side.declined);
        let mut seen = Seen { crossed: usize::from(declined), ..Seen::default() };
        match fates {
            [Fate::Smc, Fate::Smc] => seen.smc = 1,
            [Fate::Tcp, Fate::Tcp] if self.sides.iter().all(|side| !side.application.reset) => {
                seen.tcp = 1;
                let any = |is: fn(&Side) -> bool| usize::from(self.sides.iter().any(is));
                seen.declined_early = any(|side| side.declined_early);
                seen.fell_back_late = any(|side| side.fell_back_late);
                for side in [CLIENT, SERVER] {
                    let (here, there) =
                        (&self.sides[side].application, &self.sides[1 - side].application);
                    assert!(here.finished && here.heard_end, "side {side} waits");
                    assert_eq!(here.heard.len(), there.sent.len(), "all of it");
                }
            }
            _ => {
                assert!(!self.steady, "{fates:?}: nobody may be reset");
                seen.reset = 1;
            }
        }
        seen
    }

    fn step(&mut self) -> bool {
        let mut moved = false;
        for side in [CLIENT, SERVER] {
            moved |= self.arrive(side);
            moved |= self.control(side);
            moved |= self.relay(side);
        }
        moved | self.deliver()
    }

    /// What TCP brings to a side.
    fn arrive(&mut self, side: usize) -> bool {
        let from = 1 - side;
        let mut moved = false;
        while self.tcp[from].front().is_some_and(|(at, _)| *at <= self.now) {
            let (_, segment) = self.tcp[from].pop_front().unwrap();
            moved = true;
            let here = &mut self.sides[side];
            match segment {
                Segment::Bytes(bytes) => here.inbox.extend(bytes),
                Segment::End => here.inbox_ended = true,
                Segment::Reset if here.fate == Fate::Tcp => here.wire.reset(),
                Segment::Reset => self.close(side, false),
            }
        }
        let here = &mut self.sides[side];
        if here.fate == Fate::Tcp {
            let (bytes, _) = here.inbox.as_slices();
            if !bytes.is_empty()
                && let Some(len @ 1..) = here.wire.write(bytes)
            {
                here.inbox.drain(..len);
                moved = true;
            }
            if here.inbox.is_empty() && std::mem::take(&mut here.inbox_ended) {
                here.wire.finish();
                moved = true;
            }
        }
        moved
    }

    fn is_stalled(&self, side: usize) -> bool {
        let [from, to] = self.sides[side].stalls;
        from <= self.now && self.now < to
    }

    /// The control thread of a side.
    fn control(&mut self, side: usize) -> bool {
        if self.is_stalled(side) {
            return false;
        }
        let now = self.now;
        let mut moved = false;
        let here = &mut self.sides[side];
        if here.breaks_at.is_some_and(|at| at <= now) {
            here.breaks_at = None;
            self.group(side, |group, number| group.link_broke(now, number));
            moved = true;
        }
        let here = &mut self.sides[side];
        if here.group.as_ref().and_then(LinkGroup::poll_timeout).is_some_and(|at| at <= now) {
            self.group(side, |group, _| group.handle_timeout(now));
            moved = true;
        }
        let here = &mut self.sides[side];
        if here.fate != Fate::Talking {
            return moved;
        }
        let room = here.conversation.room().min(here.inbox.len());
        if room > 0 {
            // A socket gives what it has, or less.
            let len = 1 + self.dice.index(room);
            let bytes: Vec<u8> = here.inbox.drain(..len).collect();
            here.conversation.feed(&bytes);
            moved = true;
        } else if here.inbox.is_empty() && here.inbox_ended && !here.conversation.has_ended() {
            here.conversation.end();
            moved = true;
        }
        if now >= T0 + HANDSHAKE_TIMEOUT {
            here.conversation.fail(HandshakeError::TimedOut);
        }
        here.conversation.handle_timeout(now);
        moved | self.converse(side)
    }

    fn converse(&mut self, side: usize) -> bool {
        let mut moved = false;
        while self.sides[side].fate == Fate::Talking
            && let Some(demand) = self.sides[side].conversation.poll_demand()
        {
            moved = true;
            match demand {
                Demand::Client(action) => self.act_as_client(action),
                Demand::Server(action) => self.act_as_server(action),
                Demand::Say(frame) => self.say(side, &frame),
                Demand::Failed(_) => {}
                Demand::FallBack(_) => self.fall_back(side),
                Demand::Close(_) => self.close(side, true),
            }
        }
        moved
    }

    fn act_as_client(&mut self, action: ClientAction) {
        let now = self.now;
        let refuses = self.refusals[0];
        let Machine::Client(client) = &mut self.sides[CLIENT].conversation.machine else {
            panic!()
        };
        match action {
            ClientAction::Send(frame) => self.say(CLIENT, &frame),
            ClientAction::OpenLink(_) | ClientAction::JoinLink(_) if refuses => {
                client.refuse(Diagnosis::OUT_OF_MEMORY, false);
            }
            ClientAction::OpenLink(theirs) | ClientAction::JoinLink(theirs) => {
                let ours = offer(CLIENT, theirs.first_contact);
                match client.agreement() {
                    Some(Agreement::V2(_)) => client.provide_v2(ours, Gids::new()),
                    Some(Agreement::V1) | None => client.provide(ours),
                }
                if theirs.first_contact {
                    self.sides[CLIENT].group = Some(LinkGroup::new_client(now, setup(CLIENT)));
                    self.sides[CLIENT].founds = true;
                }
            }
            ClientAction::Done => self.sides[CLIENT].fate = Fate::Smc,
            ClientAction::FallBack => self.fall_back(CLIENT),
        }
    }

    fn act_as_server(&mut self, action: ServerAction) {
        let now = self.now;
        let ours = offer(SERVER, self.first_contact);
        let [_, refuses, breaks] = self.refusals;
        let here = &mut self.sides[SERVER];
        let Machine::Server(server) = &mut here.conversation.machine else { panic!() };
        match action {
            ServerAction::Send(frame) => self.say(SERVER, &frame),
            ServerAction::Provide(_) if refuses => server.refuse(Diagnosis::OUT_OF_MEMORY),
            ServerAction::Provide(_) => match (server.objection(), server.agreement()) {
                (Some(objection), _) => server.refuse(objection),
                (None, Some(Agreement::V2(_))) => server.provide_v2(now, ours, true),
                (None, _) => server.provide(now, ours),
            },
            ServerAction::ConnectLink(_) if breaks => {
                here.conversation.decline(Diagnosis::QUEUE_PAIR_NOT_READY);
            }
            ServerAction::ConnectLink(_) => {
                (here.number, here.founds) = (LinkNumber(1), true);
                here.group = Some(LinkGroup::new_server(now, setup(SERVER), here.number));
                self.group(SERVER, |group, number| group.link_connected(now, number));
            }
            ServerAction::JoinLink(_) => {}
            ServerAction::Done => self.sides[SERVER].fate = Fate::Smc,
            ServerAction::FallBack => self.fall_back(SERVER),
        }
    }

    fn say(&mut self, side: usize, frame: &Frame) {
        if matches!(frame, Frame::Decline(_) | Frame::DeclineV2(_)) {
            let here = &mut self.sides[side];
            assert!(!here.committed, "side {side} declines beyond the point of no return");
            here.declined = true;
            here.declined_early = here.founds && !here.confirmed;
        }
        self.send(side, Segment::Bytes(frame.encode().as_bytes().to_vec()));
    }

    /// TCP carries what a side sends, cut anywhere, in order, and late.
    fn send(&mut self, side: usize, segment: Segment) {
        let mut pieces = VecDeque::from([segment]);
        if let Some(Segment::Bytes(bytes)) = pieces.front_mut()
            && bytes.len() > 1
            && self.dice.roll(Chance::percent(30))
        {
            let tail = bytes.split_off(1 + self.dice.index(bytes.len() - 1));
            pieces.push_back(Segment::Bytes(tail));
        }
        for piece in pieces {
            let last = self.tcp[side].back().map_or(self.now, |(at, _)| *at);
            let at = self.now + self.dice.duration(&(self.slow / 20..=self.slow));
            self.tcp[side].push_back((at.max(last), piece));
        }
    }

    fn fall_back(&mut self, side: usize) {
        // Whom ADD LINK never reached may decline; then the sender of it goes back, too. (The RFC
        // counts from its completion.) A side that declines has sent none itself, as `say` asserts.
        let follows = self.sides[1 - side].declined;
        let committed = self.sides[side].committed && !follows;
        assert!(!committed, "side {side} goes back from the point of no return");
        self.give_up(side);
        let here = &mut self.sides[side];
        here.fell_back_late = here.confirmed;
        let [near, far] = here.streams.take().expect("it ends once");
        let id = here.host.take_slot().expect("a free slot");
        let from_far = here.conversation.leftover().to_vec();
        let declined = here.conversation.has_declined();
        let from_near = Vec::new();
        here.fate = Fate::Tcp;
        here.host.relay(id, Established::Tcp { near, far, from_near, from_far, declined });
    }

    /// Resets both connections of a side.
    fn close(&mut self, side: usize, tells: bool) {
        self.give_up(side);
        let here = &mut self.sides[side];
        if here.fate == Fate::Tcp || here.fate == Fate::Closed {
            return;
        }
        here.fate = Fate::Closed;
        here.streams = None;
        here.application.tcp.reset();
        if tells {
            self.send(side, Segment::Reset);
        }
    }

    fn give_up(&mut self, side: usize) {
        let now = self.now;
        self.group(side, |group, _| group.shutdown(now, DeleteReason::PROGRAM));
        self.sides[side].group = None;
    }

    /// Lets something act on the link group of a side, and does what it then demands.
    fn group(&mut self, side: usize, input: impl FnOnce(&mut LinkGroup, LinkNumber)) {
        let now = self.now;
        let here = &mut self.sides[side];
        let Some(group) = &mut here.group else { return };
        input(group, here.number);
        while let Some(group) = &mut self.sides[side].group
            && let Some(action) = group.poll_action()
        {
            match action {
                Action::Send(on, message) => {
                    self.sides[side].committed |= matches!(message, Llc::AddLink(_));
                    let due = now + self.slow / 2;
                    let give_up = now + RETRIES;
                    let (from, delivered) = (side, false);
                    self.posts.push_back(Post { from, on, message, due, give_up, delivered });
                }
                Action::LinkNumbered(number) => self.sides[side].number = number,
                Action::OpenLink { number, .. } => {
                    group.link_refused(now, number, NoQueuePair::NoAlternatePath);
                }
                Action::LinkConfirmed(_) => {
                    self.sides[side].conversation.link_confirmed();
                }
                Action::LinkFailed(..) => {
                    let committed = !group.may_decline(now);
                    self.sides[side].conversation.link_failed(committed);
                }
                Action::Terminate(_) => {
                    self.sides[side].group = None;
                    if self.sides[side].fate == Fate::Smc {
                        self.close(side, true);
                    }
                }
                Action::ConnectLink { .. }
                | Action::VacateLink(_)
                | Action::LinkProven(_)
                | Action::RmbConfirmed(_)
                | Action::RmbRefused(_)
                | Action::RmbDeleted(_)
                | Action::RkeysDeleted(_) => {}
            }
        }
    }

    fn is_blocked(&self, from: usize) -> bool {
        let [since, until] = self.blocked[from];
        since <= self.now && self.now < until
    }

    /// When an RNIC does something about a message: not before those before it have arrived.
    fn due(&self, index: usize) -> Instant {
        let Post { from, due, .. } = self.posts[index];
        let waits = |post: &Post| post.from == from && !post.delivered;
        if self.posts.iter().take(index).any(waits) { Instant(u64::MAX) } else { due }
    }

    /// What RoCE carries: a message arrives, and is acknowledged, or the queue pair breaks.
    fn deliver(&mut self) -> bool {
        let now = self.now;
        let Some(index) = (0..self.posts.len()).find(|index| self.due(*index) <= now) else {
            return false;
        };
        let mut post = self.posts.remove(index).unwrap();
        let (from, to) = (post.from, 1 - post.from);
        if self.sides[from].group.is_none() {
            return true;
        }
        let heard = !self.is_blocked(from) && self.sides[to].group.is_some();
        // Reports wait for a control thread that stands still.
        if heard && !post.delivered && !self.is_stalled(to) {
            post.delivered = true;
            let (on, message) = (post.on, post.message);
            self.group(to, |group, number| {
                let on = if number == UNNUMBERED { UNNUMBERED } else { on };
                let _ = group.handle_llc(now, on, &message);
            });
            self.converse(to);
        }
        if heard && !self.is_blocked(to) {
            if post.delivered {
                self.sides[from].confirmed |= matches!(post.message, Llc::ConfirmLink(_));
            } else {
                post.due = now + RETRY;
                post.give_up = post.give_up.max(now + RETRY * 2);
                self.posts.insert(index, post);
            }
            return true;
        }
        if post.give_up <= now {
            self.group(from, |group, number| group.link_broke(now, number));
            if !self.is_stalled(from) {
                self.converse(from);
            }
            return true;
        }
        post.due = (now + RETRY).min(post.give_up);
        self.posts.insert(index, post);
        true
    }

    /// Application and poller of a side, and what it sends on TCP.
    fn relay(&mut self, side: usize) -> bool {
        let now = self.now;
        let here = &mut self.sides[side];
        let mut moved = here.application.act() | here.host.turn(now);
        if here.fate != Fate::Tcp {
            return moved;
        }
        let segment = match here.wire.read(2_000) {
            Read::Bytes(bytes) => Some(Segment::Bytes(bytes)),
            Read::Finished if !here.wire_ended => Some(Segment::End),
            Read::Reset if !here.wire_ended => Some(Segment::Reset),
            Read::Finished | Read::Reset | Read::Nothing => None,
        };
        if let Some(segment) = segment {
            here.wire_ended = !matches!(segment, Segment::Bytes(_));
            self.send(side, segment);
            moved = true;
        }
        moved
    }

    /// Moves the clock to the next thing that happens.
    fn pass_time(&mut self, until: Instant) -> bool {
        let now = self.now;
        let mut next = Vec::new();
        next.extend(self.tcp.iter().filter_map(|tcp| tcp.front()).map(|(at, _)| *at));
        next.extend((0..self.posts.len()).map(|index| self.due(index)));
        for side in [CLIENT, SERVER] {
            let stalled = self.is_stalled(side);
            let here = &mut self.sides[side];
            next.extend(here.host.next_deadline(now));
            if stalled {
                next.push(here.stalls[1]);
                continue;
            }
            next.extend(here.breaks_at);
            next.extend(here.group.as_ref().and_then(LinkGroup::poll_timeout));
            if here.fate == Fate::Talking {
                next.push(T0 + HANDSHAKE_TIMEOUT);
                next.extend(here.conversation.machine.poll_timeout());
            }
        }
        let Some(next) = next.into_iter().filter(|at| *at <= until).min() else { return false };
        self.now = next.max(Instant(now.0 + 1_000));
        true
    }
}
