//! Two gateways, the applications behind them, and a virtual clock.
//!
//! ```text
//!   application ─ TCP ─ host 0 ═══ simulated RNICs ═══ host 1 ─ TCP ─ application     (SMC-R)
//!   application ─ TCP ─ host 0 ─ TCP ─ application                                    (fallback)
//! ```
//!
//! A poller that moved nothing sleeps as it would in production: only a socket, its NIC, a command
//! or its own deadline wakes it. What a missed wake-up leaves undone stays undone here too.

use std::collections::BTreeMap;
use std::time::Duration;

use smcr_engine::streams::Streams;
use smcr_engine::{ConnectionId, Established, GroupId, LinkId};
use smcr_proto::{Instant, Qpn, connection};
use smcr_rnic::Opening;
use smcr_rnic::sim::{Network, Odds};

use crate::PAUSE_STEPS;
use crate::application::{self, Application, Heard};
use crate::host::{Closed, Host, Sizes};
use crate::tcp::{self, Stream};

/// Which application of a connection, and the host nearest to it. The first one connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Client,
    Server,
}

impl Side {
    pub(crate) const BOTH: [Self; 2] = [Self::Client, Self::Server];

    pub(crate) fn other(self) -> Self {
        match self {
            Self::Client => Self::Server,
            Self::Server => Self::Client,
        }
    }

    fn index(self) -> usize {
        match self {
            Self::Client => 0,
            Self::Server => 1,
        }
    }
}

/// What lies between the two applications of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    Smc,
    Tcp,
}

impl Transport {
    pub(crate) const BOTH: [Self; 2] = [Self::Smc, Self::Tcp];
}

/// One connection of two applications.
#[derive(Debug)]
pub(crate) struct Pair {
    pub(crate) applications: [Application; 2],
    /// Its name at each host. The fallback needs one host only.
    pub(crate) ids: [Option<ConnectionId>; 2],
    /// Which link it uses, if it uses one.
    pub(crate) link: Option<LinkId>,
    /// How many streams its connection has carried before.
    pub(crate) turn: u32,
    /// Its connection was over when it came.
    pub(crate) refused: bool,
}

/// A link, from outside.
#[derive(Clone, Copy, Debug)]
struct Wire {
    qpn: Qpn,
    /// Which RNIC of each host it ends at.
    places: [usize; 2],
}

/// Everything.
pub(crate) struct Cluster {
    pub(crate) network: Network,
    pub(crate) hosts: [Host; 2],
    pub(crate) pairs: Vec<Pair>,
    links: Vec<Wire>,
    /// Rendezvous that have not ended at this host, of this pair.
    held: BTreeMap<(usize, usize), Established<Stream>>,
    /// Whether connections may carry one stream after another.
    pub(crate) many_streams: bool,
    /// Sockets of streams that the client's host has begun, by the connection at the other host.
    coming: BTreeMap<ConnectionId, (usize, Stream)>,
    now: Instant,
    sizes: Sizes,
    /// Since time last passed.
    steps: u64,
}

impl Cluster {
    pub(crate) fn new(seed: u64, odds: Odds, sizes: Sizes) -> Self {
        let network = Network::new(seed, odds);
        let hosts = [1, 2].map(|number| Host::new(&network, number, sizes.clone()));
        let mut cluster = Self {
            network,
            hosts,
            pairs: Vec::new(),
            links: Vec::new(),
            held: BTreeMap::new(),
            many_streams: false,
            coming: BTreeMap::new(),
            now: Instant(1),
            sizes,
            steps: 0,
        };
        cluster.add_link();
        cluster
    }

    /// Nothing breaks, and one link is there.
    pub(crate) fn calm() -> Self {
        Self::new(1, Odds::CALM, Sizes::USUAL)
    }

    /// Connects the first RNICs of the hosts by one more link, the one new connections use.
    pub(crate) fn add_link(&mut self) {
        self.connect_rnics([0, 0], false);
    }

    /// Connects these RNICs by one more link, the one new connections use. Connections of links
    /// that are added so go on over the others when one breaks.
    pub(crate) fn add_link_between(&mut self, places: [usize; 2]) -> LinkId {
        self.connect_rnics(places, true);
        self.newest_link()
    }

    fn connect_rnics(&mut self, places: [usize; 2], fails_over: bool) {
        let link = link_id(self.links.len());
        let [client, server] = &mut self.hosts;
        let openings = [client.open_at(places[0]), server.open_at(places[1])];
        let [first, second] = openings.each_ref().map(Opening::address);
        self.links.push(Wire { qpn: first.qpn, places });
        let keys = [server.key_at(places[1]), client.key_at(places[0])];
        let ends = openings.into_iter().zip([second, first]).zip(keys).zip(places);
        for (host, (((opening, peer), key), place)) in self.hosts.iter_mut().zip(ends) {
            host.add_link_at(place, link, opening, peer, fails_over.then_some(key));
        }
    }

    /// Breaks this link, as if the path had gone.
    pub(crate) fn break_this(&mut self, link: LinkId) {
        self.network.break_qp(self.links[link.0 as usize].qpn);
    }

    /// The link that new connections use.
    pub(crate) fn newest_link(&self) -> LinkId {
        link_id(self.links.len() - 1)
    }

    /// Breaks the newest link, as if the path had gone.
    pub(crate) fn break_link(&mut self) {
        self.break_this(self.newest_link());
    }

    /// Whether a host knows the newest link to be lost.
    pub(crate) fn is_link_lost(&self) -> bool {
        self.hosts.iter().any(|host| host.broken.contains(&self.newest_link()))
    }

    /// Whether the link of this connection was lost.
    pub(crate) fn lost_link(&self, number: usize) -> bool {
        let link = self.pairs[number].link;
        link.is_some_and(|link| self.hosts.iter().any(|host| host.broken.contains(&link)))
    }

    /// A connection, by number. The applications have said nothing yet.
    pub(crate) fn connect(&mut self, transport: Transport) -> usize {
        match transport {
            Transport::Smc => {
                let number = self.connect_at(Side::Client).expect("a free slot");
                self.establish(Side::Server, number);
                number
            }
            Transport::Tcp => self.connect_tcp([Vec::new(), Vec::new()]),
        }
    }

    /// A connection over SMC-R, if both hosts have a slot, of which one host alone has ended the
    /// rendezvous. The other one expects it, until [`Self::establish`].
    pub(crate) fn connect_at(&mut self, early: Side) -> Option<usize> {
        let number = self.pairs.len();
        let link = self.newest_link();
        let places = self.links[link.0 as usize].places;
        if self.hosts.iter().any(|host| !host.has_slot()) {
            return None;
        }
        let mut take = |host: usize| {
            let host_place = places[host];
            let host = &mut self.hosts[host];
            let element = host.take_element_at(host_place).expect("there was a slot");
            host.expect(element.id, link);
            element
        };
        let [client, server] = [take(0), take(1)];
        let ids = [Some(client.id), Some(server.id)];
        let peers = [server.described, client.described];
        let streams = self.add_pair(ids, Some(link));
        for (host, (element, (near, peer))) in
            [client, server].into_iter().zip(streams.into_iter().zip(peers)).enumerate()
        {
            let streams = match (self.many_streams, host) {
                (false, _) => connection::Streams::One,
                (true, 0) => connection::Streams::Begins,
                (true, _) => connection::Streams::Follows,
            };
            let (group, rmbe) = (GroupId(1), element.rmbe);
            let smc = Established::Smc { near, link, group, rmbe, peer, streams };
            self.held.insert((host, number), smc);
        }
        self.establish(early, number);
        Some(number)
    }

    /// Ends the rendezvous at this host: its poller takes over. Returns whether it was still open.
    pub(crate) fn establish(&mut self, side: Side, number: usize) -> bool {
        let Some(established) = self.held.remove(&(side.index(), number)) else { return false };
        let pair = &self.pairs[number];
        let id = pair.ids[side.index()].expect("it was expected");
        let host = &mut self.hosts[side.index()];
        let lost = pair.link.is_some_and(|link| host.failed.contains(&link));
        match established {
            Established::Smc { near, rmbe, .. } if lost => {
                host.sockets.reset_on_close(&near);
                host.abandon(id, rmbe);
                self.pairs[number].ids[side.index()] = None;
            }
            Established::Smc { .. } | Established::Tcp { .. } => host.relay(id, established),
        }
        true
    }

    /// A stream on a connection that has carried others, if there is one.
    pub(crate) fn connect_next(&mut self) -> Option<usize> {
        let client = self.hosts[0].kept.pop_first()?;
        let of_it = self.pairs.iter().rposition(|pair| pair.ids[0] == Some(client));
        let Pair { ids, link, turn, .. } = self.pairs[of_it.expect("it was connected")];
        let server = ids[1].expect("it had a stream at both hosts");
        let [near, far] = self.add_pair(ids, link);
        let number = self.pairs.len() - 1;
        self.pairs[number].turn = turn + 1;
        let before = self.coming.insert(server, (number, far));
        assert!(before.is_none(), "one at a time");
        self.hosts[0].give_stream(client, near);
        Some(number)
    }

    /// No other stream shall follow on a connection that has carried one; as the host of this side
    /// says.
    pub(crate) fn close_kept(&mut self, side: Side) {
        let host = &mut self.hosts[side.index()];
        let kept: Vec<_> = host.kept.iter().copied().collect();
        host.close_kept(&kept);
    }

    /// Does for streams what control threads do.
    fn give_streams(&mut self) {
        let [client, server] = &mut self.hosts;
        for connection in std::mem::take(&mut server.begun) {
            let (_, far) = self.coming.remove(&connection).expect("somebody has begun it");
            server.give_stream(connection, far);
        }
        // What never came to the server's host never will, if its connection is over.
        let over = |host: &Host, id: ConnectionId| host.closed.contains_key(&id);
        self.coming.retain(|connection, (number, far)| {
            let ends = over(server, *connection);
            if ends {
                server.sockets.reset_on_close(far);
                self.pairs[*number].ids[1] = None;
            }
            !ends
        });
        for (side, host) in [client, server].into_iter().enumerate() {
            for (connection, near, moved) in std::mem::take(&mut host.refused) {
                if moved {
                    host.give_stream(connection, near);
                    continue;
                }
                host.sockets.reset_on_close(&near);
                let is_it = |pair: &Pair| pair.ids[side] == Some(connection);
                let number = self.pairs.iter().rposition(is_it).expect("it is a stream of ours");
                (self.pairs[number].ids[side], self.pairs[number].refused) = (None, true);
            }
        }
    }

    /// A connection that fell back, with what the rendezvous had read from either application.
    pub(crate) fn connect_tcp(&mut self, first: [Vec<u8>; 2]) -> usize {
        self.fall_back(first, false)
    }

    /// The same after the host has declined: the first bytes of the far side may be a Decline.
    pub(crate) fn connect_declined(&mut self) -> usize {
        self.fall_back([Vec::new(), Vec::new()], true)
    }

    fn fall_back(&mut self, [from_near, from_far]: [Vec<u8>; 2], declined: bool) -> usize {
        let id = self.hosts[0].take_slot().expect("a free slot");
        let [near, far] = self.add_pair([Some(id), None], None);
        self.hosts[0].relay(id, Established::Tcp { near, far, from_near, from_far, declined });
        self.pairs.len() - 1
    }

    /// What the applications of the first pair of a cluster send first: the client, the server.
    pub(crate) fn first_bytes_of_first_pair(client: usize, server: usize) -> [Vec<u8>; 2] {
        [application::bytes(0, 0, client), application::bytes(1, 0, server)]
    }

    fn add_pair(&mut self, ids: [Option<ConnectionId>; 2], link: Option<LinkId>) -> [Stream; 2] {
        let seed = 2 * self.pairs.len() as u64;
        let [(client, near), (server, far)] =
            [(), ()].map(|()| tcp::connection(self.sizes.socket_bytes));
        let applications =
            [Application::new(client, seed, seed + 1), Application::new(server, seed + 1, seed)];
        self.pairs.push(Pair { applications, ids, link, turn: 0, refused: false });
        [near, far]
    }

    /// An application of a connection.
    pub(crate) fn application(&mut self, side: Side, number: usize) -> &mut Application {
        &mut self.pairs[number].applications[side.index()]
    }

    /// The gateway of this side.
    pub(crate) fn host(&mut self, side: Side) -> &mut Host {
        &mut self.hosts[side.index()]
    }

    /// What the pollers reported about the end of a connection.
    pub(crate) fn closed(&self, number: usize) -> Vec<Closed> {
        let turn = self.pairs[number].turn;
        let ids = self.pairs[number].ids.iter().zip(&self.hosts);
        ids.filter_map(|(id, host)| host.ends.get(&((*id)?, turn)).copied()).collect()
    }

    /// Whether every poller that had this connection reported its end.
    pub(crate) fn is_closed(&self, number: usize) -> bool {
        self.closed(number).len() == self.pairs[number].ids.iter().flatten().count()
    }

    /// One look around by everybody. Returns whether anything moved.
    pub(crate) fn step(&mut self) -> bool {
        self.steps += 1;
        assert!(self.steps < STEPS_MAX, "busy for ever");
        let mut moved = false;
        for application in self.pairs.iter_mut().flat_map(|pair| &mut pair.applications) {
            moved |= application.act();
        }
        for host in &mut self.hosts {
            moved |= host.turn(self.now);
        }
        self.give_streams();
        moved
    }

    /// What time it is.
    pub(crate) fn now(&self) -> Instant {
        self.now
    }

    /// One look around by one gateway alone.
    pub(crate) fn turn(&mut self, side: Side) -> bool {
        self.hosts[side.index()].turn(self.now)
    }

    /// One look around by one poller of one gateway alone.
    pub(crate) fn turn_at(&mut self, side: Side, place: usize) -> bool {
        self.hosts[side.index()].turn_at(place, self.now)
    }

    /// Lets so much time pass for the network alone.
    pub(crate) fn wait(&mut self, duration: Duration) {
        self.now = self.now + duration;
    }

    /// Moves the clock to the next thing the network does, if there is one.
    pub(crate) fn pass_time(&mut self) -> bool {
        let next = self.network.next_event();
        if let Some(at) = next
            && at > self.now
        {
            self.now = at;
            self.steps = 0;
        }
        next.is_some()
    }

    /// Until nobody can do anything any more, other than wait for a timer of seconds.
    pub(crate) fn run_until_quiet(&mut self) {
        while self.step() || self.pass_time() {}
    }

    /// Lets time pass, timers included.
    pub(crate) fn run_for(&mut self, duration: Duration) {
        let until = self.now + duration;
        loop {
            self.run_until_quiet();
            if !self.pass_to_deadline(until) {
                break;
            }
        }
        self.now = self.now.max(until);
    }

    /// Lets time pass until the next timer of a host, if that is not after `until`. Returns whether
    /// it is not.
    fn pass_to_deadline(&mut self, until: Instant) -> bool {
        let deadlines = self.hosts.iter_mut();
        let deadlines = deadlines.filter_map(|host| host.next_deadline(self.now));
        let Some(at) = deadlines.min().filter(|at| *at <= until) else { return false };
        self.now = self.now.max(at);
        self.steps = 0;
        true
    }

    /// Lets time pass while nobody does anything new: `duration`, or less if there is much to do.
    pub(crate) fn pause(&mut self, duration: Duration) {
        let until = self.now + duration;
        for _ in 0..PAUSE_STEPS {
            if !(self.step() | self.pass_time() || self.pass_to_deadline(until)) {
                break;
            }
        }
    }

    /// Panics if something could go on and does not: nobody may wait for a timer to be found.
    pub(crate) fn assert_nothing_stalls(&self) {
        for (number, pair) in self.pairs.iter().enumerate() {
            let broken = pair.applications.iter().any(|one| one.heard() == Heard::Reset);
            if broken || self.is_pending(number) {
                continue;
            }
            for side in Side::BOTH {
                let writer = &pair.applications[side.index()];
                let reader = &pair.applications[side.other().index()];
                if reader.is_reading() && !writer.is_gone() {
                    let came = (reader.received(), writer.is_blocked());
                    assert_eq!(came, (writer.sent(), false), "pair {number}: {side:?} stalls");
                    assert!(!writer.has_finished(), "pair {number}: the end did not come");
                }
            }
        }
    }

    fn is_pending(&self, number: usize) -> bool {
        (0..2).any(|host| self.held.contains_key(&(host, number)))
    }

    /// Panics unless every connection is reported as closed and everything lent is home.
    pub(crate) fn assert_nothing_is_left(&self) {
        for number in 0..self.pairs.len() {
            let pair = &self.pairs[number];
            assert!(self.is_closed(number), "pair {number} is not closed: {pair:?}");
        }
        assert!(self.coming.is_empty());
        self.hosts.iter().for_each(Host::assert_nothing_is_left);
    }
}

fn link_id(index: usize) -> LinkId {
    LinkId(u32::try_from(index).expect("few links"))
}

/// More looks around than any scenario needs without time passing.
const STEPS_MAX: u64 = 5_000_000;
