//! SMC-R connections that carry one stream after another: those that are kept between two, and who
//! gets them.
//!
//! At a client, a connection that an application has made goes on over one that is kept to the same
//! target, if there is one. At a server, the peer decides, and there is only the upstream to be
//! connected. What the peers say to each other is in [`smcr_proto::connection::Streams`].

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use smcr_engine::ConnectionId;
use smcr_engine::handoff::{Ending, Tally};
use smcr_engine::near::Near;
use smcr_proto::Instant;
use smcr_rnic::Rnic;

use super::Gateway;
use crate::config::{OverLimit, Protocol, SourceAddress};
use crate::listener::{connect_outcome, reset};
use crate::rendezvous::Arrival;
use crate::sessions::{Beside, Carried, Follows, Kept, Negotiating, Next, Open, Session};
use crate::slab::Key;
use crate::termination::Termination;

/// The connections that are kept, and streams that have to begin anew.
#[derive(Debug, Default)]
pub(super) struct Streams {
    /// At a client, by listener and target; the one that was kept last is the last.
    ready: HashMap<(u16, SocketAddr), Vec<Key>>,
    /// Since when each is kept, and at a client, where it is in `ready`.
    places: HashMap<Key, (Instant, Option<(u16, SocketAddr)>)>,
    /// The same, oldest first: those where we are the client, and those where we are the server.
    order: [BTreeSet<(Instant, Key)>; 2],
    /// Streams that were given to a connection that was over by then: their sockets come back. Or
    /// the news that they have ended comes later than that of the end of the connection.
    turned_back: HashMap<ConnectionId, Open>,
    /// Since when nothing but connections that are kept holds up the end of the gateway.
    idle_since: Option<Instant>,
}

impl Streams {
    /// How many are kept.
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// Keeps a connection; at a client, for this listener and target.
    fn enter(&mut self, now: Instant, key: Key, place: Option<(u16, SocketAddr)>) {
        if let Some(place) = place {
            self.ready.entry(place).or_default().push(key);
        }
        self.order[usize::from(place.is_none())].insert((now, key));
        let before = self.places.insert(key, (now, place));
        assert!(before.is_none(), "it is kept once");
    }

    /// A connection is kept no more. Nothing happens if it was not.
    pub(super) fn leave(&mut self, key: Key) {
        let Some((since, place)) = self.places.remove(&key) else { return };
        self.order[usize::from(place.is_none())].remove(&(since, key));
        if let Some(place) = place {
            let ready = self.ready.get_mut(&place).expect("it has its place");
            ready.retain(|other| *other != key);
            if ready.is_empty() {
                self.ready.remove(&place);
            }
        }
    }

    /// The one that has been kept for longest.
    fn oldest(&self) -> Option<Key> {
        self.order.iter().filter_map(|order| order.first()).min().map(|(_, key)| *key)
    }

    /// One that has been kept for too long, if a client keeps one for `patience`.
    fn overdue(&self, now: Instant, patience: Duration) -> Option<Key> {
        let is_due = |(since, _): &&(Instant, Key), limit| now.since(*since) >= limit;
        let [client, server] = self.order.each_ref().map(BTreeSet::first);
        let client = client.filter(|one| is_due(one, patience));
        let server = server.filter(|one| is_due(one, patience + SERVER_PATIENCE));
        client.or(server).map(|(_, key)| *key)
    }

    /// This stream was given to a connection that was over, or has ended before that.
    pub(super) fn turn_back(&mut self, connection: ConnectionId, open: Open) {
        let before = self.turned_back.insert(connection, open);
        assert!(before.is_none(), "a connection has one stream at a time");
    }

    /// When one may have been kept for too long, if a client keeps one for `patience`.
    pub(super) fn poll_timeout(&self, patience: Duration) -> Option<Instant> {
        let [client, server] = self.order.each_ref().map(BTreeSet::first);
        let client = client.map(|(since, _)| *since + patience);
        let server = server.map(|(since, _)| *since + patience + SERVER_PATIENCE);
        [client, server].into_iter().flatten().min()
    }
}

impl<N: Rnic> Gateway<N> {
    /// Whether the connection of a rendezvous may carry other streams after this one.
    pub(super) fn may_have_many_streams(&mut self, key: Key) -> bool {
        let one = self.sessions.negotiating_mut(key).expect("its rendezvous has just ended");
        let config = &self.listeners[usize::from(one.listener)].config;
        // A program has a connection of its own.
        let is_gateways = one.process.is_none() && self.config.smc.kept_max > 0;
        is_gateways
            && match one.accepts {
                // The TCP connection speaks for one client.
                Protocol::Tcp => config.source != SourceAddress::Client,
                // Those that come in by it must be refused at once, or not at all.
                Protocol::Smc => config.bounds.over_limit == OverLimit::Refuse,
            }
    }

    /// A connection that is kept, for a new one to `target` at listener `index`.
    pub(super) fn kept_to(&mut self, now: Instant, index: u16, target: SocketAddr) -> Option<Key> {
        let ready = self.streams.ready.get(&(index, target))?;
        let groups = self.endpoint.groups();
        let sessions = &mut self.sessions;
        let may_go_on = |key: &&Key| {
            let kept = sessions.kept_mut(**key).expect("what is ready is kept");
            groups.may_go_on(now, PROVEN_WITHIN, kept.connection)
        };
        let key = *ready.iter().rev().find(may_go_on)?;
        if self.is_protected(key) {
            return None;
        }
        self.streams.leave(key);
        Some(key)
    }

    /// Whether IPsec is to protect what goes between the two ends of a connection that is kept.
    // RFC 7609 5.5 #1: no SMC-R under IPsec
    fn is_protected(&mut self, key: Key) -> bool {
        let kept = self.sessions.kept_mut(key).expect("whoever calls has looked");
        let peer = match kept.accepts {
            Protocol::Tcp => kept.target,
            Protocol::Smc => kept.source,
        };
        kept.beside.local.is_none_or(|local| self.network.policies.protect(local, peer))
    }

    /// Policies of IPsec have changed: what is kept and must be protected now is closed, before a
    /// peer that does not know of it begins a stream there.
    pub(super) fn policies_changed(&mut self) {
        for key in self.streams.places.keys().copied().collect::<Vec<_>>() {
            if self.is_protected(key) {
                self.close_kept(key);
            }
        }
    }

    /// An application has connected: a connection that was kept carries it.
    pub(super) fn go_on(&mut self, now: Instant, key: Key, accepted: OwnedFd, next: Next) {
        let connection = self.sessions.go_on(now, key, next);
        self.unkeep(connection);
        self.give_stream(connection, accepted.into());
        self.endpoint.note_stream();
        self.watch_speed(now, key);
    }

    /// A connection that was kept has a stream again.
    fn unkeep(&mut self, connection: ConnectionId) {
        let key = self.sessions.key_of(connection).expect("it has a stream");
        let listener = match self.sessions.at_mut(key) {
            Some(Session::Open(open)) => open.listener,
            Some(Session::Negotiating(one)) => one.listener,
            Some(Session::Kept(_)) | None => panic!("it has a stream"),
        };
        self.listeners[usize::from(listener)].kept -= 1;
    }

    /// Gives a connection the socket of its next stream.
    fn give_stream(&mut self, connection: ConnectionId, near: Near) {
        let key = self.sessions.key_of(connection).expect("it has a stream");
        let Some(Session::Open(open)) = self.sessions.at_mut(key) else {
            panic!("it has a stream");
        };
        let allowance = self.listeners[usize::from(open.listener)].allowance.clone();
        self.endpoint.groups_mut().next_stream(connection, near, Some(allowance));
    }

    /// A stream is over in good order: keeps its connection, if that is wished for.
    pub(super) fn stream_ended(
        &mut self,
        now: Instant,
        connection: ConnectionId,
        near: Near,
        tally: &Tally,
    ) {
        // It has ended in both directions.
        drop(near);
        if let Some(open) = self.streams.turned_back.remove(&connection) {
            // The connection is over by now, and its last poller was faster to say so.
            return self.stream_over(now, NO_KEY, &open, Ending::Graceful, tally);
        }
        let (key, open) = self.sessions.keep(connection);
        self.stream_over(now, key, &open, Ending::Graceful, tally);
        let listener = &mut self.listeners[usize::from(open.listener)];
        listener.kept += 1;
        let serves = !listener.drained && !listener.retired && self.draining.is_none();
        let is_of_before = open.round != self.sessions.round;
        let kept = self.sessions.kept_mut(key).expect("it was just kept");
        let most = self.config.smc.kept_max;
        if open.called {
            // The news of the next one has come first.
            return self.stream_begun(now, connection);
        }
        let is_client = kept.accepts == Protocol::Tcp;
        let is_old = is_client && now.since(kept.beside.since) >= AGE_MAX;
        if most == 0 || !serves || kept.beside.ended || is_of_before || is_old {
            return self.close_kept(key);
        }
        let place = is_client.then_some((kept.listener, kept.target));
        self.streams.enter(now, key, place);
        self.endpoint.groups_mut().note_kept(connection);
        if self.streams.len() > most {
            let oldest = self.streams.oldest().expect("it was just put there");
            self.close_kept(oldest);
        }
    }

    /// No other stream shall follow on a connection that was kept.
    fn close_kept(&mut self, key: Key) {
        self.streams.leave(key);
        let kept = self.sessions.kept_mut(key).expect("whoever calls has looked");
        if !std::mem::replace(&mut kept.closing, true) {
            self.endpoint.groups_mut().close_kept(kept.connection);
        }
    }

    /// Closes what is kept; of this listener only, if one is named.
    pub(super) fn close_all_kept(&mut self, listener: Option<u16>) {
        let is_meant = |kept: &Kept| listener.is_none_or(|index| index == kept.listener);
        let kept = self.sessions.iter().filter_map(|(key, session)| match session {
            Session::Kept(kept) => is_meant(kept).then_some(key),
            Session::Open(_) | Session::Negotiating(_) => None,
        });
        for key in kept.collect::<Vec<_>>() {
            self.close_kept(key);
        }
    }

    /// What rendezvous rest on has changed: connections that are there carry no other stream.
    pub(super) fn renew_kept(&mut self) {
        self.sessions.round += 1;
        self.close_all_kept(None);
    }

    /// Closes what was kept for too long. That is for the client to do; its server would close
    /// connections that are about to be used, and waits for longer.
    pub(super) fn expire_kept(&mut self, now: Instant) {
        while let Some(key) = self.streams.overdue(now, self.config.smc.kept_for) {
            self.close_kept(key);
        }
    }

    /// Something has run out that what is kept has a part of.
    pub(super) fn make_room(&mut self) {
        for _ in 0..MAKE_ROOM {
            let Some(oldest) = self.streams.oldest() else { return };
            self.close_kept(oldest);
        }
    }

    /// Whether no connection is left but what is kept, and that has had its time to be closed.
    pub(super) fn is_idle(&mut self, now: Instant) -> bool {
        let kept: usize = self.listeners.iter().map(|listener| listener.kept as usize).sum();
        if self.sessions.len() > kept {
            self.streams.idle_since = None;
            return false;
        }
        let since = *self.streams.idle_since.get_or_insert(now);
        kept == 0 || now.since(since) >= CLOSE_KEPT_WITHIN
    }

    /// The peer has ended the TCP connection beside one that is kept.
    pub(super) fn kept_tcp_ended(&mut self, key: Key) {
        let kept = self.sessions.kept_mut(key).expect("whoever calls has looked");
        kept.beside.ended = true;
        let connection = kept.connection;
        // RFC 7609 4.8.2 #11: peer's TCP reset without A aborts
        let is_reset = connect_outcome(&kept.beside.tcp).is_err();
        self.close_kept(key);
        if is_reset {
            self.endpoint.groups_mut().abort(connection);
        }
    }

    /// The peer has begun another stream on a connection that we have kept.
    pub(super) fn stream_begun(&mut self, now: Instant, connection: ConnectionId) {
        // It may have ended while the news was on its way.
        let Some(key) = self.sessions.key_of(connection) else { return };
        self.streams.leave(key);
        if let Some(Session::Open(open)) = self.sessions.at_mut(key) {
            // It has another poller now, and the one before has yet to say that the last one ended.
            open.called = true;
            return;
        }
        let Some(kept) = self.sessions.kept_mut(key) else { return };
        let (index, source, last_target) = (kept.listener, kept.source, kept.target);
        let listener = &mut self.listeners[usize::from(index)];
        listener.accepted += 1;
        if listener.retired || self.is_protected(key) {
            self.turned_away(now, index, Some(source), Termination::Aborted);
            return self.refuse_stream(key);
        }
        if self.is_full() {
            self.turned_away(now, index, Some(source), Termination::Limit);
            return self.refuse_stream(key);
        }
        let listener = &mut self.listeners[usize::from(index)];
        let exceeded = listener.admission.exceeded(now, &listener.config.bounds, source.ip());
        if let Some(limit) = exceeded {
            listener.admission.counts.refuse(limit);
            self.turned_away(now, index, Some(source), limit.into());
            self.log_limit(now, index, limit.consequence());
            return self.refuse_stream(key);
        }
        // Where the client wants to go, it has said by its TCP connection.
        let target = match listener.pool.is_original_dst() {
            true => Ok(last_target),
            false => self.chosen(now, index, source),
        };
        let target = match target {
            Ok(target) => target,
            Err((_, end)) => {
                self.turned_away(now, index, Some(source), end);
                return self.refuse_stream(key);
            }
        };
        let listener = &mut self.listeners[usize::from(index)];
        listener.pool.enter(target);
        listener.admission.spend(now, &listener.config.bounds, source.ip());
        listener.admission.enter(source.ip(), crate::admission::Standing::Within);
        let wanted = listener.pool.is_original_dst().then_some(target);
        self.sessions.follow(now, key, target, wanted);
        self.unkeep(connection);
        let follows = Some(connection);
        let arrival = Arrival { follows, ..Arrival::new(index, source, target.ip()) };
        self.endpoint.arrived(now, key, arrival);
    }

    /// A stream that the peer has begun goes nowhere: its connection is reset.
    fn refuse_stream(&mut self, key: Key) {
        let kept = self.sessions.kept_mut(key).expect("whoever calls has looked");
        kept.closing = true;
        let connection = kept.connection;
        self.endpoint.groups_mut().abort(connection);
    }

    /// The upstream of a stream that the peer has begun is there.
    pub(super) fn follow_on(&mut self, now: Instant, key: Key, connection: ConnectionId) {
        let allowance = self.allowance_of(key);
        let one = self.sessions.negotiating_mut(key).expect("its rendezvous has just ended");
        let follows = one.follows.expect("it is a stream that the peer has begun");
        let groups = self.endpoint.groups_mut();
        self.sessions.hand_over(now, key, connection, |app, tcp| {
            groups.next_stream(connection, app.into(), allowance);
            let Follows { ended, since, .. } = follows;
            let beside = Beside { tcp, local: None, ended, since };
            (Carried::Smc { group: follows.group }, Some(beside))
        });
        if follows.ended {
            self.sessions.suspect(now, key);
        }
        self.watch_speed(now, key);
    }

    /// A stream came too late for a connection, and nothing was read of its socket.
    pub(super) fn stream_refused(
        &mut self,
        now: Instant,
        connection: ConnectionId,
        near: Near,
        moved: bool,
    ) {
        if let Some(open) = self.streams.turned_back.remove(&connection) {
            return self.begin_anew(now, open, near);
        }
        if moved {
            return self.give_stream(connection, near);
        }
        // It is about to end, or on its way to another link.
        let (key, open) = self.sessions.keep(connection);
        self.listeners[usize::from(open.listener)].kept += 1;
        self.close_kept(key);
        self.begin_anew(now, open, near);
    }

    /// A client's stream for which no connection was left after all has a rendezvous. At a server,
    /// the peer has lost it.
    fn begin_anew(&mut self, now: Instant, open: Open, near: Near) {
        self.endpoint.take_back_stream();
        let accepted = near.into_socket();
        if open.accepts == Protocol::Smc {
            self.stream_over(now, NO_KEY, &open, Ending::ResetByPeer, &Tally::default());
            return reset(accepted);
        }
        let Open { listener, standing, accepts, source, target, original, came, .. } = open;
        let ends = (source, target);
        let one = Negotiating::new(came, (listener, accepts), ends, accepted);
        let key = self.sessions.insert(Negotiating { standing, wanted: original, ..one });
        let arrival = Arrival::new(listener, source, target.ip());
        self.endpoint.arrived(now, key, arrival);
    }
}

/// How fresh the proof must be that a link works before a new stream depends on it, as for a
/// rendezvous: the stream could not go back to TCP. Where connections are few, they find none, and
/// have their rendezvous, which waits for a proof.
const PROVEN_WITHIN: Duration = Duration::from_millis(100);
/// How old a connection may be that carries another stream. A rendezvous finds out what is best
/// now: another RNIC, TCP, or another gateway behind the same address.
const AGE_MAX: Duration = Duration::from_secs(5);
/// How much longer than itself a server lets a client keep a connection.
const SERVER_PATIENCE: Duration = Duration::from_secs(60);
/// How many are closed when something has run out.
const MAKE_ROOM: usize = 16;
/// How long the peer may take to close what is kept when the gateway stops.
const CLOSE_KEPT_WITHIN: Duration = Duration::from_secs(1);
/// What names no session.
const NO_KEY: Key = Key { index: u32::MAX, generation: 0 };

#[cfg(test)]
mod tests {
    use super::*;

    fn key(index: u32) -> Key {
        Key { index, generation: 0 }
    }

    fn at(seconds: u64) -> Instant {
        Instant(1) + Duration::from_secs(seconds)
    }

    /// The one that was used last is used first, so that the others can be closed; and a key that
    /// is kept again counts from then on.
    #[test]
    fn the_oldest_is_the_one_that_nobody_needed_for_longest() {
        let place = |port| Some((0, SocketAddr::from(([10, 8, 0, 2], port))));
        let mut streams = Streams::default();
        for (index, port) in [(1, 7), (2, 7), (3, 8)] {
            streams.enter(at(index.into()), key(index), place(port));
        }
        assert_eq!(streams.ready[&place(7).unwrap()], [key(1), key(2)]);
        assert_eq!((streams.len(), streams.oldest()), (3, Some(key(1))));
        streams.leave(key(1));
        streams.enter(at(4), key(1), place(7));
        assert_eq!(streams.ready[&place(7).unwrap()], [key(2), key(1)]);
        assert_eq!(streams.oldest(), Some(key(2)));
        for index in [2, 3, 1, 1, 9] {
            streams.leave(key(index));
        }
        assert!(streams.ready.is_empty() && streams.order.iter().all(BTreeSet::is_empty));
        assert_eq!(
            (streams.len(), streams.oldest(), streams.poll_timeout(PATIENCE)),
            (0, None, None)
        );
    }

    /// A client closes what nobody needs. Its server would close what is about to be used, so it
    /// does so only where the client seems to have forgotten; and it can make room at any time.
    #[test]
    fn a_server_waits_for_longer_than_its_client() {
        let mut streams = Streams::default();
        streams.enter(at(1), key(1), None);
        streams.enter(at(2), key(2), Some((0, SocketAddr::from(([10, 8, 0, 2], 7)))));
        assert_eq!(streams.overdue(at(2) + PATIENCE / 2, PATIENCE), None);
        assert_eq!(streams.poll_timeout(PATIENCE), Some(at(2) + PATIENCE));
        assert_eq!(streams.overdue(at(2) + PATIENCE, PATIENCE), Some(key(2)));
        streams.leave(key(2));
        assert_eq!(streams.overdue(at(2) + PATIENCE, PATIENCE), None);
        assert_eq!(streams.oldest(), Some(key(1)));
        let forgotten = at(1) + PATIENCE + SERVER_PATIENCE;
        assert_eq!(streams.poll_timeout(PATIENCE), Some(forgotten));
        assert_eq!(streams.overdue(forgotten, PATIENCE), Some(key(1)));
    }

    const PATIENCE: Duration = Duration::from_secs(2);
}
