//! Connections between the gateways that carry one stream after another.
//!
//! What a control thread has to say to link groups about them is done here as production does it:
//! which are kept, who closes them and when, and what to do with news that come late. Choosing
//! upstreams and limits are not: those have tests elsewhere.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use smcgate::groups::PortId;
use smcr_engine::ConnectionId;
use smcr_engine::handoff::Ending;
use smcr_engine::streams::Streams as _;
use smcr_proto::Instant;

use super::gateway::Gateway;
use super::rendezvous::{CLIENT, Rendezvous, SERVER};
use super::{Connected, World};
use crate::application::Application;
use crate::tcp::{self, Sockets, Stream};

/// The SMC-R connections of one gateway.
#[derive(Debug, Default)]
pub(crate) struct Sessions {
    open: BTreeMap<ConnectionId, Session>,
    /// Their end was reported while a socket was on its way to them, or before the end of their
    /// last stream was.
    turned_back: BTreeSet<ConnectionId>,
    /// What nobody has looked at yet.
    news: Vec<(ConnectionId, News)>,
}

/// One of them.
#[derive(Debug)]
struct Session {
    /// We begin its streams.
    is_client: bool,
    life: Life,
}

#[derive(Debug)]
enum Life {
    /// It carries a stream. If it was called, the peer has begun the next one.
    Open { called: bool },
    /// It carries none.
    Kept { since: Instant, closing: bool },
    /// The peer has begun a stream, which has no socket yet.
    Following,
}

#[derive(Debug)]
enum News {
    /// A stream is over.
    Ended(Ending),
    /// The peer has begun a stream.
    Begun,
    /// A stream came too late.
    Returned(Stream),
}

/// Streams whose servers have no socket yet.
#[derive(Default)]
pub(crate) struct Waiting {
    far: BTreeMap<usize, (Stream, [PortId; 2])>,
    /// Which stream each connection carries, or has carried last: by the gateway and its name
    /// there.
    pub(super) current: BTreeMap<(usize, ConnectionId), usize>,
    /// Connections that servers have reset because they did not want the stream.
    refused: BTreeSet<(usize, ConnectionId)>,
    /// Streams that have followed others, and those that came too late.
    pub(super) counts: [u64; 2],
}

impl Sessions {
    pub(super) fn opened(&mut self, id: ConnectionId, is_client: bool) {
        let before =
            self.open.insert(id, Session { is_client, life: Life::Open { called: false } });
        assert!(before.is_none(), "a name is used once");
    }

    /// Those that may be kept for too long are closed at this time.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.open.values().filter_map(Session::closes_at).min()
    }

    fn says(&mut self, id: ConnectionId, news: News) {
        self.news.push((id, news));
    }
}

impl Session {
    fn closes_at(&self) -> Option<Instant> {
        match self.life {
            Life::Kept { since, closing: false } => {
                Some(since + if self.is_client { KEPT_FOR } else { KEPT_FOR + SERVER_PATIENCE })
            }
            Life::Kept { .. } | Life::Open { .. } | Life::Following => None,
        }
    }
}

impl Gateway {
    /// A poller has said that a stream is over.
    pub(super) fn stream_ended(&mut self, now: Instant, id: ConnectionId) {
        let sessions = &mut self.sessions;
        sessions.says(id, News::Ended(Ending::Graceful));
        if sessions.turned_back.remove(&id) {
            return;
        }
        let life = &mut sessions.open.get_mut(&id).expect("it had a stream").life;
        let Life::Open { called } = *life else { panic!("{id:?} had none: {life:?}") };
        *life = Life::Kept { since: now, closing: false };
        if called {
            return self.stream_begun(id);
        }
        self.groups.note_kept(id);
    }

    /// A poller has said that the peer has begun a stream.
    pub(super) fn stream_begun(&mut self, id: ConnectionId) {
        let Some(session) = self.sessions.open.get_mut(&id) else { return };
        match &mut session.life {
            Life::Open { called } => *called = true,
            life @ Life::Kept { .. } => {
                *life = Life::Following;
                self.sessions.says(id, News::Begun);
            }
            Life::Following => panic!("a stream begins once"),
        }
    }

    /// A poller has given a socket back.
    pub(super) fn stream_refused(
        &mut self,
        now: Instant,
        id: ConnectionId,
        near: Stream,
        moved: bool,
    ) {
        if self.sessions.turned_back.remove(&id) {
            return self.sessions.says(id, News::Returned(near));
        }
        if moved {
            return self.groups.next_stream(id, near, None);
        }
        let life = &mut self.sessions.open.get_mut(&id).expect("it was given a stream").life;
        *life = Life::Kept { since: now, closing: true };
        self.groups.close_kept(id);
        self.sessions.says(id, News::Returned(near));
    }

    /// A poller has closed a connection.
    pub(super) fn session_closed(&mut self, id: ConnectionId, ending: Ending, kept: bool) {
        let session = self.sessions.open.remove(&id).expect("it is closed once");
        match session.life {
            Life::Open { .. } if kept => drop(self.sessions.turned_back.insert(id)),
            Life::Open { .. } => self.sessions.says(id, News::Ended(ending)),
            // Who waits for the stream of the last kind looks whether it is still there.
            Life::Kept { .. } | Life::Following => {}
        }
    }

    /// Closes what has been kept for too long.
    pub(super) fn expire_kept(&mut self, now: Instant) -> bool {
        let is_due = |session: &Session| session.closes_at().is_some_and(|at| at <= now);
        let due = self.sessions.open.iter().filter(|(_, session)| is_due(session));
        let due: Vec<_> = due.map(|(id, _)| *id).collect();
        due.iter().for_each(|id| self.close_kept(*id));
        !due.is_empty()
    }

    /// Connections without a stream that nobody has closed.
    pub(super) fn kept(&self) -> Vec<ConnectionId> {
        let is_kept = |life: &Life| matches!(life, Life::Kept { closing: false, .. });
        let all = self.sessions.open.iter();
        all.filter(|(_, session)| is_kept(&session.life)).map(|(id, _)| *id).collect()
    }

    /// No other stream shall follow on this connection.
    pub(super) fn close_kept(&mut self, id: ConnectionId) {
        let life = &mut self.sessions.open.get_mut(&id).expect("it is kept").life;
        let Life::Kept { closing, .. } = life else { panic!("it has a stream: {life:?}") };
        *closing = true;
        self.groups.close_kept(id);
    }

    /// A connection carries another stream.
    fn go_on(&mut self, id: ConnectionId, near: Stream) {
        let session = self.sessions.open.get_mut(&id).expect("it is kept");
        session.life = Life::Open { called: false };
        self.groups.next_stream(id, near, None);
    }

    /// Whether the peer waits for a socket.
    fn is_following(&self, id: ConnectionId) -> bool {
        let session = self.sessions.open.get(&id);
        session.is_some_and(|session| matches!(session.life, Life::Following))
    }

    /// A connection that may carry another stream of ours.
    fn ready(&self, now: Instant) -> Option<ConnectionId> {
        let kept = self.kept().into_iter();
        let mut ours = kept.filter(|id| self.sessions.open[id].is_client);
        ours.find(|id| self.groups.may_go_on(now, PROVEN_WITHIN, *id))
    }

    /// Panics unless all news were heard.
    pub(super) fn assert_no_session_is_left(&self) {
        let Sessions { open, turned_back, news } = &self.sessions;
        assert!(open.is_empty() && turned_back.is_empty(), "{open:?} {turned_back:?}");
        assert!(news.is_empty(), "{news:?}");
    }
}

impl World {
    /// An application of `client` connects to one of the other host over a connection that is kept.
    /// Returns `None` if there is none.
    pub(crate) fn connect_next(&mut self, client: usize, ports: [PortId; 2]) -> Option<usize> {
        self.heed_streams();
        if self.hosts[client].asleep {
            return None;
        }
        let id = self.hosts[client].ready(self.now)?;
        let (number, applications, [near, far]) = self.applications_for_next();
        let names = [(client, Some(id)), (1 - client, None)];
        self.connections.push(Connected { applications, names, ended: [None; 2] });
        self.waiting.current.insert((client, id), number);
        self.waiting.far.insert(number, (far, ports));
        self.hosts[client].go_on(id, near);
        Some(number)
    }

    /// The next connection: its number, its applications, and the sockets of the gateways.
    pub(super) fn applications_for_next(&self) -> (usize, [Application; 2], [Stream; 2]) {
        let number = self.connections.len();
        let seed = 2 * number as u64;
        let [(here, near), (there, far)] =
            [(), ()].map(|()| tcp::connection(self.sizes.socket_bytes));
        let applications =
            [Application::new(here, seed, seed + 1), Application::new(there, seed + 1, seed)];
        (number, applications, [near, far])
    }

    /// A rendezvous has given these names to the connection of its stream.
    pub(super) fn note_names(&mut self, number: usize, names: [(usize, Option<ConnectionId>); 2]) {
        self.connections[number].names = names;
        for (host, id) in names {
            if let Some(id) = id {
                self.waiting.current.entry((host, id)).or_insert(number);
            }
        }
    }

    /// Acts on what gateways know of streams. Returns whether anything moved.
    pub(super) fn heed_streams(&mut self) -> bool {
        let mut moved = false;
        for host in 0..2 {
            for (id, news) in std::mem::take(&mut self.hosts[host].sessions.news) {
                moved = true;
                match news {
                    News::Ended(ending) => self.stream_is_over(host, id, ending),
                    News::Begun => self.serve(host, id),
                    News::Returned(near) => self.begin_anew(host, id, near),
                }
            }
        }
        moved
    }

    fn stream_is_over(&mut self, host: usize, id: ConnectionId, ending: Ending) {
        let number = self.waiting.current[&(host, id)];
        let one = &mut self.connections[number];
        let side = usize::from(one.names[SERVER].0 == host);
        assert_eq!(one.ended[side].replace(ending), None, "stream {number} ended twice");
        if side == CLIENT {
            self.forget_far(number);
        }
    }

    /// The server of a stream will not hear of it any more.
    fn forget_far(&mut self, number: usize) {
        if let Some((far, _)) = self.waiting.far.remove(&number) {
            Sockets::default().reset_on_close(&far);
        }
    }

    /// The gateway of a server connects to it, for a stream that the peer has begun.
    fn serve(&mut self, host: usize, id: ConnectionId) {
        if !self.hosts[host].is_following(id) {
            return;
        }
        let mut all = self.connections.iter();
        let first = all.find(|one| one.names[SERVER] == (host, Some(id)));
        let (client, Some(theirs)) = first.expect("it had a first stream").names[CLIENT] else {
            panic!("both gateways had it");
        };
        let number = self.waiting.current[&(client, theirs)];
        self.waiting.counts[0] += 1;
        let refuses = self.waiting.counts[0].is_multiple_of(16);
        if refuses {
            self.forget_far(number);
        }
        match self.waiting.far.remove(&number) {
            Some((far, _)) => {
                self.connections[number].names[SERVER].1 = Some(id);
                self.waiting.current.insert((host, id), number);
                self.hosts[host].go_on(id, far);
            }
            None => {
                self.waiting.refused.insert((host, id));
                self.hosts[host].groups.abort(id);
            }
        }
    }

    /// A stream came too late for its connection: it has a rendezvous, or its client has lost it.
    fn begin_anew(&mut self, host: usize, id: ConnectionId, near: Stream) {
        let number = self.waiting.current[&(host, id)];
        let one = &mut self.connections[number];
        if one.names[SERVER].0 == host {
            one.ended[SERVER] = Some(Ending::ResetByPeer);
            Sockets::default().reset_on_close(&near);
            return;
        }
        self.waiting.counts[1] += 1;
        let (far, ports) = self.waiting.far.remove(&number).expect("nobody has heard of it");
        let (now, agreement) = (self.now, self.agreement);
        let anew = Rendezvous::new(now, number, host, ports, agreement, [near, far]);
        one.names = anew.names();
        self.rendezvous.push(anew);
    }

    /// Whether a server did not want a stream of this connection.
    pub(super) fn was_refused(&self, number: usize) -> bool {
        let pairs = self.connections.iter().filter(|one| {
            let names = &self.connections[number].names;
            names.iter().zip(&one.names).any(|(a, b)| a.1.is_some() && a == b)
        });
        let mut names = pairs.flat_map(|one| one.names);
        names.any(|(host, id)| id.is_some_and(|id| self.waiting.refused.contains(&(host, id))))
    }

    /// Panics if a stream was forgotten.
    pub(super) fn assert_no_stream_waits(&self) {
        assert!(self.waiting.far.is_empty(), "streams wait: {:?}", self.waiting.far.keys());
        self.hosts.iter().for_each(Gateway::assert_no_session_is_left);
    }
}

/// Longer than production has it, as time passes in larger steps here.
const KEPT_FOR: Duration = Duration::from_secs(20);
/// How much longer than its client a server keeps a connection.
const SERVER_PATIENCE: Duration = Duration::from_secs(60);
/// Production wants a proof of the last 0.1 s. A link that broke since then is one more thing to
/// survive.
const PROVEN_WITHIN: Duration = KEPT_FOR;
