//! Every connection the control thread knows, from accept to close.

mod kept;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use smcr_engine::ConnectionId;
use smcr_engine::limits::CONNECTIONS_MAX;
use smcr_proto::Instant;
use smcr_proto::wire::clc::Diagnosis;

use crate::admission::Standing;
use crate::config::Protocol;
use crate::groups::{GroupId, PortId};
use crate::intercept::steering::LeftAlone;
use crate::slab::{Key, Slab};
use crate::stats::{Process, Transport};
use crate::termination::Termination;
pub use kept::{Beside, Follows, Kept, Next, Over};

/// A connection on its way through this process.
pub enum Session {
    /// Its rendezvous goes on, or waits to begin.
    Negotiating(Negotiating),
    /// A poller relays it.
    Open(Open),
    /// It is over, and its SMC-R connection is kept for the next one.
    Kept(Kept),
}

impl Session {
    /// Whether the poller of this port relays it by TCP.
    pub fn is_on(&self, port: PortId) -> bool {
        match self {
            Self::Open(Open { transport: Carried::Tcp { port: other, .. }, .. }) => *other == port,
            Self::Open(_) | Self::Negotiating(_) | Self::Kept(_) => false,
        }
    }
}

/// The sockets of a rendezvous.
#[derive(Debug)]
pub struct Negotiating {
    /// The listener that accepted it.
    pub listener: u16,
    /// Whether it takes a place of those that are limited there.
    pub standing: Standing,
    /// What that listener accepts.
    pub accepts: Protocol,
    /// Who connected to us.
    pub source: SocketAddr,
    /// When it came.
    pub came: Instant,
    /// The socket that was accepted.
    pub accepted: OwnedFd,
    /// Where it goes.
    pub target: SocketAddr,
    /// Where it was to go before, in vain.
    pub tried: Vec<SocketAddr>,
    /// Where the client wanted to go: it was led here, or a proxy in front of us says so.
    pub wanted: Option<SocketAddr>,
    /// Our own address of the connection with the SMC-R peer, or with what turned out to be none;
    /// none if that was not asked for, or the socket is broken.
    pub local: Option<SocketAddr>,
    /// Whether the upstream has offered SMC-R, once that was asked.
    pub offered: Option<bool>,
    /// The socket towards the upstream, once we connect to it.
    pub upstream: Option<OwnedFd>,
    /// What keeps that from being intercepted, if it connects in the name of the client.
    pub left_alone: Vec<LeftAlone>,
    /// The upstream has accepted.
    pub connected: bool,
    /// What the peer says is for the rendezvous.
    pub hears: bool,
    /// The local program that has it by the preload library.
    pub process: Option<Box<Process>>,
    /// It is another stream of this connection; `accepted` stands idle beside that.
    pub follows: Option<Follows>,
}

impl Negotiating {
    /// A connection from `source` to `target` that came to a listener, which accepts `accepts`, and
    /// for which nothing was done yet.
    pub fn new(
        now: Instant,
        (listener, accepts): (u16, Protocol),
        (source, target): (SocketAddr, SocketAddr),
        accepted: OwnedFd,
    ) -> Self {
        Self {
            listener,
            standing: Standing::Within,
            accepts,
            source,
            came: now,
            accepted,
            target,
            tried: Vec::new(),
            wanted: None,
            local: None,
            offered: None,
            upstream: None,
            left_alone: Vec::new(),
            connected: false,
            hears: false,
            process: None,
            follows: None,
        }
    }

    /// The socket towards the SMC-R peer, or towards what turned out to be none; at a client, once
    /// there is one.
    pub fn peer(&self) -> Option<&OwnedFd> {
        match self.accepts {
            Protocol::Smc => Some(&self.accepted),
            Protocol::Tcp => self.upstream.as_ref(),
        }
    }

    /// The sockets towards the application and towards the peer.
    ///
    /// # Panics
    ///
    /// If there is no upstream yet.
    pub fn into_ends(self) -> (OwnedFd, OwnedFd) {
        let upstream = self.upstream.expect("a rendezvous that succeeds has connected");
        match self.accepts {
            Protocol::Smc => (upstream, self.accepted),
            Protocol::Tcp => (self.accepted, upstream),
        }
    }
}

/// A connection that a poller relays.
#[derive(Debug)]
pub struct Open {
    /// The listener that accepted it.
    pub listener: u16,
    /// Whether it takes a place of those that are limited there.
    pub standing: Standing,
    /// What that listener accepts.
    pub accepts: Protocol,
    /// Its slot.
    pub connection: ConnectionId,
    /// Who connected to us.
    pub source: SocketAddr,
    /// Where it goes.
    pub target: SocketAddr,
    /// Where the client wanted to go, if somebody has said so.
    pub original: Option<SocketAddr>,
    /// When it came.
    pub came: Instant,
    /// Since when a poller has it.
    pub since: Instant,
    /// How we have ended it, if we have.
    pub cut: Option<Termination>,
    /// Bytes that had moved at the last look, and since when no more have.
    pub moved: (u64, Instant),
    /// When one direction was first seen to have ended.
    pub half_closed: Option<Instant>,
    /// It has lasted for too long, and is being reset.
    pub expired: bool,
    /// The peer has begun the next stream of its connection, and we have yet to hear of its end.
    pub called: bool,
    /// Which round its connection is of; see [`Sessions::round`].
    pub round: u32,
    /// How it travels.
    pub transport: Carried,
    /// The TCP connection that stands idle beside SMC-R.
    pub beside: Option<Beside>,
    /// What keeps our connection to its target from being intercepted.
    pub left_alone: Vec<LeftAlone>,
    /// The local program that has it by the preload library.
    pub process: Option<Box<Process>>,
}

/// How an open connection travels.
#[derive(Debug)]
pub enum Carried {
    /// Over SMC-R.
    Smc {
        /// In this group.
        group: GroupId,
    },
    /// Over TCP.
    Tcp {
        /// Whose poller relays.
        port: PortId,
        /// Why; none where nobody asked for SMC-R.
        reason: Option<Diagnosis>,
    },
}

impl Carried {
    /// What operators call it.
    pub fn name(&self) -> Transport {
        match self {
            Self::Smc { .. } => Transport::SmcR,
            Self::Tcp { .. } => Transport::Tcp,
        }
    }
}

/// All sessions.
pub struct Sessions {
    table: Slab<Session>,
    /// How many of them are open, over SMC-R and over TCP.
    open: [usize; 2],
    /// How often the configuration, or what there is of RNICs, has changed: a connection that is
    /// older carries no other stream.
    pub round: u32,
    /// Which session has which slot.
    by_slot: Box<[Option<Key>]>,
    /// SMC-R connections whose TCP connection has ended, and when, oldest first; their peer may be
    /// dead.
    suspects: VecDeque<(Instant, Key)>,
}

impl Default for Sessions {
    fn default() -> Self {
        let by_slot = vec![None; CONNECTIONS_MAX].into();
        Self { table: Slab::default(), open: [0; 2], round: 0, by_slot, suspects: VecDeque::new() }
    }
}

impl Sessions {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// How many of them pollers relay so.
    pub fn open(&self, transport: Transport) -> usize {
        self.open[place(transport)]
    }

    /// Every session.
    pub fn iter(&self) -> impl Iterator<Item = (Key, &Session)> {
        self.table.iter()
    }

    /// Takes in a connection that was accepted.
    pub fn insert(&mut self, negotiating: Negotiating) -> Key {
        self.table.insert(Session::Negotiating(negotiating))
    }

    /// The session, unless it is over.
    pub fn at_mut(&mut self, key: Key) -> Option<&mut Session> {
        self.table.at_mut(key)
    }

    /// The sockets of a rendezvous, unless it is over.
    pub fn negotiating_mut(&mut self, key: Key) -> Option<&mut Negotiating> {
        match self.table.at_mut(key)? {
            Session::Negotiating(negotiating) => Some(negotiating),
            Session::Open(_) | Session::Kept(_) => None,
        }
    }

    /// The local program that has a session.
    pub fn process(&self, key: Key) -> Option<&Process> {
        match self.table.at(key)? {
            Session::Negotiating(one) => one.process.as_deref(),
            Session::Open(open) => open.process.as_deref(),
            Session::Kept(_) => None,
        }
    }

    /// The rendezvous has failed: takes its sockets.
    ///
    /// # Panics
    ///
    /// If `key` names no rendezvous.
    pub fn remove(&mut self, key: Key) -> Negotiating {
        let Some(Session::Negotiating(negotiating)) = self.table.remove(key) else {
            panic!("a rendezvous ends once");
        };
        negotiating
    }

    /// The rendezvous is over: a poller relays the connection from now on. `how` takes the sockets
    /// towards the application and the peer, and says how the connection travels, and what stands
    /// beside it.
    ///
    /// # Panics
    ///
    /// If `key` names no rendezvous.
    pub fn hand_over(
        &mut self,
        now: Instant,
        key: Key,
        connection: ConnectionId,
        how: impl FnOnce(OwnedFd, OwnedFd) -> (Carried, Option<Beside>),
    ) {
        let round = self.round;
        self.table.replace(key, |session| {
            let Session::Negotiating(mut negotiating) = session else {
                panic!("a rendezvous ends once");
            };
            let process = negotiating.process.take();
            let left_alone = std::mem::take(&mut negotiating.left_alone);
            let round = negotiating.follows.map_or(round, |follows| follows.round);
            let Negotiating { listener, standing, accepts, source, target, .. } = negotiating;
            let (original, came, local) = (negotiating.wanted, negotiating.came, negotiating.local);
            let (app, peer) = negotiating.into_ends();
            let (transport, mut beside) = how(app, peer);
            beside.iter_mut().for_each(|beside| beside.local = local);
            Session::Open(Open {
                listener,
                standing,
                accepts,
                connection,
                source,
                target,
                original,
                came,
                since: now,
                cut: None,
                moved: (0, now),
                half_closed: None,
                expired: false,
                called: false,
                round,
                transport,
                beside,
                left_alone,
                process,
            })
        });
        self.by_slot[usize::from(connection.slot)] = Some(key);
        if let Some(Session::Open(open)) = self.table.at(key) {
            self.open[place(open.transport.name())] += 1;
        }
    }

    /// A poller has closed a connection.
    ///
    /// # Panics
    ///
    /// If no session has that slot.
    pub fn closed(&mut self, connection: ConnectionId) -> (Key, Over) {
        let key = self.by_slot[usize::from(connection.slot)].take();
        let key = key.expect("a poller closes what it was given");
        if let Some(follows) = self.negotiating_mut(key).and_then(|one| one.follows.as_mut()) {
            follows.over = true;
            return (key, Over::Following);
        }
        match self.table.remove(key) {
            Some(Session::Open(open)) => {
                self.open[place(open.transport.name())] -= 1;
                (key, Over::Open(open))
            }
            Some(Session::Kept(kept)) => (key, Over::Kept(kept)),
            Some(Session::Negotiating(_)) | None => panic!("a slot leads to an open session"),
        }
    }

    /// The session that has this slot.
    pub fn key_of(&self, connection: ConnectionId) -> Option<Key> {
        self.by_slot[usize::from(connection.slot)]
    }

    /// The TCP connection beside an SMC-R connection has ended.
    pub fn suspect(&mut self, now: Instant, key: Key) {
        self.suspects.push_back((now, key));
    }

    /// The next SMC-R connection that is still open a while after its TCP connection has ended.
    pub fn next_suspect(&mut self, now: Instant) -> Option<&mut Open> {
        let is_due = |(since, _): &mut (Instant, Key)| now.since(*since) >= SUSPECT_AFTER;
        let is_open = |key| matches!(self.table.at(key), Some(Session::Open(_)));
        let key = loop {
            let (_, key) = self.suspects.pop_front_if(is_due)?;
            if is_open(key) {
                break key;
            }
        };
        match self.table.at_mut(key) {
            Some(Session::Open(open)) => Some(open),
            Some(Session::Negotiating(_) | Session::Kept(_)) | None => {
                panic!("it was open just now")
            }
        }
    }

    /// When [`next_suspect`](Self::next_suspect) may have one, at the latest.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.suspects.front().map(|(since, _)| *since + SUSPECT_AFTER)
    }
}

/// Where connections of a transport are counted.
fn place(transport: Transport) -> usize {
    match transport {
        Transport::SmcR => 0,
        Transport::Tcp => 1,
    }
}

/// How long a connection may outlive its TCP connection before its peer is asked to prove itself.
const SUSPECT_AFTER: Duration = Duration::from_millis(300);
