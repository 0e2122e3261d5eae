//! One connection: two applications, the gateways between them, and TCP between those.

use smcgate::groups::{GroupId, PortId};
use smcgate::rendezvous::Why;
use smcr_engine::ConnectionId;
use smcr_proto::{Instant, Qpn};

use super::pipe::{Inbox, Lane, Segment};
use super::{CLIENT, INTRUDER, SERVER};
use crate::application::Application;
use crate::tcp::{self, Read, Stream};

/// One connection. In each pair, the first value belongs to the side that connects.
pub(crate) struct Call {
    /// Where its sides are.
    pub(crate) hosts: [usize; 2],
    /// The RNIC that goes with TCP, at either gateway.
    pub(crate) ports: [PortId; 2],
    pub(crate) programs: [Program; 2],
    pub(crate) sides: [Side; 2],
    /// From each side.
    pub(crate) lanes: [Lane; 2],
    pub(crate) dial: Dial,
    /// The client's end of the link that its Confirm named, if that link was there before.
    pub(crate) confirmed: Option<Qpn>,
    /// That link was made to fail while the Confirm was on its way, and the Confirm has not arrived
    /// yet.
    pub(crate) outlives: bool,
    /// When its application connected.
    pub(crate) born: Instant,
    /// When the first sign came that it does not end well: somebody was told of a reset.
    pub(crate) broke: Option<Instant>,
    /// One of its applications had reset it by then.
    left_before: bool,
    /// When it was last heard of at either gateway.
    pub(crate) last: Instant,
}

/// What is at the far end of a gateway.
pub(crate) enum Program {
    /// An application that sends what can be told from all else, and checks what comes.
    Honest(Application),
    /// One that takes whatever comes: the intruder is at the other end.
    Sink(tcp::Application),
    /// The intruder itself.
    None,
}

/// One side.
pub(crate) struct Side {
    /// The application's socket, until a poller has it.
    pub(crate) app: Option<Stream>,
    pub(crate) inbox: Inbox,
    pub(crate) way: Way,
    /// The endpoint wants to hear what comes.
    pub(crate) hears: bool,
    /// It was told that the peer has ended its direction.
    pub(crate) told_end: bool,
    /// How a poller got it.
    pub(crate) carried: Option<Carried>,
    /// Why its rendezvous was given up.
    pub(crate) why: Option<Why>,
    /// What its poller calls it.
    pub(crate) connection: Option<ConnectionId>,
    /// The link group that it was put into.
    pub(crate) group: Option<GroupId>,
    /// When a poller got it.
    pub(crate) opened: Option<Instant>,
    /// When its host gets a policy by which IPsec protects it.
    pub(crate) protected_from: Option<Instant>,
    /// When to look into the end of the TCP connection beside SMC-R; none if it has not ended, or
    /// was looked into.
    pub(crate) suspected: Option<Instant>,
}

/// How a connection travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Carried {
    Smc,
    Tcp,
}

/// How far a side has come.
#[derive(Debug)]
pub(crate) enum Way {
    /// It does not know of the call yet.
    Unborn,
    /// Its rendezvous goes on.
    Talking,
    /// A poller relays it over SMC-R.
    Smc,
    /// A poller relays it over TCP; this is the network's end of its socket.
    Tcp { wire: tcp::Application, wire_ended: bool, told_end: bool },
    /// Nothing is left of it.
    Over,
}

/// How TCP between the hosts comes up.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Dial {
    /// When the SYN arrives.
    pub(crate) arrives: Option<Instant>,
    /// When its answer does.
    pub(crate) answered: Option<Instant>,
    /// When the server's gateway has an answer of its upstream.
    pub(crate) upstream: Option<Instant>,
    /// Both SYNs carry the SMC option.
    pub(crate) offers: bool,
}

impl Program {
    pub(crate) fn act(&mut self) -> bool {
        match self {
            Self::Honest(application) => application.act(),
            Self::Sink(application) => matches!(application.read(100_000), Read::Bytes(_)),
            Self::None => false,
        }
    }

    /// It reads what is left, and has nothing more to say.
    pub(crate) fn say_goodbye(&mut self) {
        match self {
            Self::Honest(application) => {
                application.wake();
                application.finish();
            }
            Self::Sink(application) => application.close(),
            Self::None => {}
        }
    }

    /// The application, unless the intruder is at the other end.
    pub(crate) fn honest(&self) -> Option<&Application> {
        match self {
            Self::Honest(application) => Some(application),
            Self::Sink(_) | Self::None => None,
        }
    }
}

impl Side {
    /// Whether its host has a policy by now by which IPsec protects it.
    pub(crate) fn is_protected(&self, now: Instant) -> bool {
        self.protected_from.is_some_and(|from| from <= now)
    }
}

impl Call {
    pub(crate) fn new(
        now: Instant,
        hosts: [usize; 2],
        ports: [PortId; 2],
        programs: [Program; 2],
        streams: [Option<Stream>; 2],
    ) -> Self {
        let sides = streams.map(|app| Side {
            app,
            inbox: Inbox::default(),
            way: Way::Unborn,
            hears: false,
            told_end: false,
            carried: None,
            why: None,
            connection: None,
            group: None,
            opened: None,
            protected_from: None,
            suspected: None,
        });
        Self {
            hosts,
            ports,
            programs,
            sides,
            lanes: [Lane::default(), Lane::default()],
            dial: Dial::default(),
            confirmed: None,
            outlives: false,
            born: now,
            broke: None,
            left_before: false,
            last: now,
        }
    }

    /// Whether the intruder has no part in it.
    pub(crate) fn is_honest(&self) -> bool {
        !self.hosts.contains(&INTRUDER)
    }

    /// Both applications of an honest call.
    pub(crate) fn applications(&self) -> Option<[&Application; 2]> {
        let [client, server] = &self.programs;
        Some([client.honest()?, server.honest()?])
    }

    /// The application at one side of an honest call.
    pub(crate) fn application(&mut self, side: usize) -> Option<&mut Application> {
        match &mut self.programs[side] {
            Program::Honest(application) => Some(application),
            Program::Sink(_) | Program::None => None,
        }
    }

    /// Segments arrive. Returns whether any did.
    pub(crate) fn deliver(&mut self, now: Instant) -> bool {
        let [from_client, from_server] = &mut self.lanes;
        let [client, server] = &mut self.sides;
        from_client.deliver(now, &mut server.inbox) | from_server.deliver(now, &mut client.inbox)
    }

    /// Where a poller relays TCP: gives it what came, and returns what it sent.
    pub(crate) fn pump(&mut self, side: usize) -> Option<Segment> {
        let Side { inbox, way, .. } = &mut self.sides[side];
        let Way::Tcp { wire, wire_ended, told_end } = way else { return None };
        while let readable @ [first, ..] = inbox.readable() {
            let written = match inbox.is_urgent() {
                true => wire.write_urgent(*first),
                false => wire.write(readable),
            };
            let Some(len @ 1..) = written else { break };
            inbox.take(len);
        }
        if inbox.reset && !*told_end {
            *told_end = true;
            wire.reset();
        } else if inbox.is_empty() && inbox.ended && !*told_end {
            *told_end = true;
            wire.finish();
        }
        match wire.read_marked(2_000) {
            (Read::Bytes(bytes), true) => Some(Segment::Urgent(bytes[0])),
            (Read::Bytes(bytes), false) => Some(Segment::Bytes(bytes)),
            (Read::Finished, _) if !*wire_ended => {
                *wire_ended = true;
                Some(Segment::End)
            }
            (Read::Reset, _) if !*wire_ended => {
                *wire_ended = true;
                // Who has been reset needs not be told so.
                (!inbox.reset).then_some(Segment::Reset)
            }
            (Read::Finished | Read::Reset | Read::Nothing, _) => None,
        }
    }

    /// Notes that something of it broke.
    pub(crate) fn note_break(&mut self, now: Instant) {
        if self.broke.is_none() {
            self.left_before = self.is_left();
            self.broke = Some(now);
        }
    }

    /// Whether an application reset it before anything else of it broke.
    pub(crate) fn was_left(&self) -> bool {
        if self.broke.is_some() { self.left_before } else { self.is_left() }
    }

    fn is_left(&self) -> bool {
        self.programs.iter().filter_map(Program::honest).any(Application::has_reset)
    }

    /// Nothing can happen to it any more.
    pub(crate) fn is_over(&self) -> bool {
        let Dial { arrives, answered, upstream, .. } = self.dial;
        let dials = [arrives, answered, upstream].iter().any(Option::is_some);
        let mut sides = self.hosts.iter().zip(&self.sides);
        let over = sides.all(|(host, side)| *host == INTRUDER || matches!(side.way, Way::Over));
        over && !dials && self.lanes.iter().all(Lane::is_empty)
    }

    /// When something happens to it next. `asleep` are the gateways that do nothing.
    pub(crate) fn next(&self, asleep: [bool; 2]) -> Option<Instant> {
        let Dial { arrives, answered, upstream, .. } = self.dial;
        let awake = |side: usize| self.hosts[side] == INTRUDER || !asleep[self.hosts[side]];
        let at = |side: usize, when: Option<Instant>| when.filter(|_| awake(side));
        let lanes = self.lanes.iter().filter_map(Lane::next);
        let dial = [at(SERVER, arrives), at(CLIENT, answered), at(SERVER, upstream)];
        let suspected = [CLIENT, SERVER].map(|side| {
            let Side { way, suspected, .. } = &self.sides[side];
            at(side, suspected.filter(|_| matches!(way, Way::Smc)))
        });
        lanes.chain(dial.into_iter().chain(suspected).flatten()).min()
    }
}
