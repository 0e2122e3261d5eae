//! Carries out the effects of the rendezvous endpoint on sockets and pollers, and follows up on
//! connections that pollers relay.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use smcr_engine::gauges::Reading;
use smcr_engine::handoff::{Allowance, Ending, Tally};
use smcr_engine::near::Near;
use smcr_engine::{Command, ConnectionId, Established};
use smcr_proto::Instant;
use smcr_proto::wire::clc::{FRAME_MAX, Frame};
use smcr_rnic::Rnic;

use super::{Gateway, GatewayGroups};
use crate::config::Protocol;
use crate::groups::Pollers;
use crate::listener::{connect_outcome, reset};
use crate::reactor::Event;
use crate::rendezvous::{Closed, Effect, Told, Why};
use crate::sessions::{Beside, Carried, Follows, Kept, Negotiating, Open, Over, Session};
use crate::slab::Key;
use crate::termination::Termination;

impl<N: Rnic> Gateway<N> {
    /// Carries out all effects that the rendezvous endpoint has queued. Call it after each input to
    /// the endpoint, or to the link groups in it.
    pub(super) fn settle(&mut self, now: Instant) {
        while let Some(effect) = self.endpoint.poll_effect(now) {
            self.perform(now, effect);
        }
    }

    fn perform(&mut self, now: Instant, effect: Effect) {
        match effect {
            Effect::Connect { key, offer, hear } => self.connect(now, key, offer, hear),
            Effect::Unanswered { key } => self.not_answered(now, key),
            Effect::Survey { key } => self.survey(key),
            Effect::Send { key, frame } => self.send(key, &frame),
            Effect::HandOver { key, connection, group, rmbe, ended } => {
                let many_streams = self.may_have_many_streams(key);
                let near = self.nearness_of(key);
                let (allowance, groups) = (self.allowance_of(key), self.endpoint.groups_mut());
                if let (Some(local), Some(ends)) = (&mut self.local, groups.ends(connection)) {
                    local.opened(key, ends);
                }
                self.sessions.hand_over(now, key, connection, |app, tcp| {
                    groups.hand_over(connection, near(app), rmbe, allowance, many_streams);
                    (Carried::Smc { group }, Some(Beside { tcp, local: None, ended, since: now }))
                });
                if let Some(local) = &mut self.local {
                    local.switch(key);
                }
                if ended {
                    self.sessions.suspect(now, key);
                }
                self.watch_speed(now, key);
            }
            Effect::NextStream { key, connection } => self.follow_on(now, key, connection),
            Effect::StayTcp { key, connection, port, reason, leftover, declined } => {
                if self.give_back(key, leftover.is_empty() && !declined) {
                    return self.endpoint.groups_mut().closed(now, connection, None, true);
                }
                let (nearness, allowance) = (self.nearness_of(key), self.allowance_of(key));
                let (reactor, pollers) = (&self.reactor, self.endpoint.groups_mut().pollers_mut());
                self.sessions.hand_over(now, key, connection, |near, far| {
                    reactor.forget(&far);
                    reactor.forget(&near);
                    let (from_near, from_far) = (Vec::new(), leftover);
                    let (near, far) = (nearness(near), far.into());
                    let established = Established::Tcp { near, far, from_near, from_far, declined };
                    let established = Box::new(established);
                    let relay = Command::Relay { connection, established, allowance };
                    pollers.command(port, relay);
                    (Carried::Tcp { port, reason }, None)
                });
                self.watch_speed(now, key);
            }
            Effect::Reset { key, why } => self.reset(now, key, why),
            Effect::Exhausted { listener, limit } => {
                self.make_room();
                self.log_limit(now, listener, &limit.to_string());
            }
        }
    }

    /// What makes of the socket towards the application what it is to a poller.
    fn nearness_of(&mut self, key: Key) -> impl FnOnce(OwnedFd) -> Near + use<N> {
        let one = self.sessions.negotiating_mut(key).expect("its rendezvous has just ended");
        let local = self.local.as_ref().filter(|_| one.process.is_some());
        let how = local.map(|local| (local.at_end(key), local.rings_of(key)));
        move |socket| match how {
            Some((at_end, rings)) => Near::of_program(socket, at_end, rings),
            None => socket.into(),
        }
    }

    /// How fast the connection of a rendezvous may carry bytes.
    pub(super) fn allowance_of(&mut self, key: Key) -> Option<Arc<Allowance>> {
        let one = self.sessions.negotiating_mut(key).expect("its rendezvous has just ended");
        Some(Arc::clone(&self.listeners[usize::from(one.listener)].allowance))
    }

    /// Writes a CLC message to the peer.
    fn send(&mut self, key: Key, frame: &Frame) {
        let one = self.sessions.negotiating_mut(key).expect("its rendezvous goes on");
        let peer = one.peer().expect("nothing is said before there is a connection");
        let encoded = frame.encode();
        let bytes = encoded.as_bytes();
        // A few dozen bytes always fit an empty send buffer; if they do not, the connection is
        // unusable. A local program may share the socket, and let it wait.
        // RFC 7609 3.2 #1: CLC inside its own TCP connection
        if send(peer, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) != Ok(bytes.len()) {
            self.endpoint.broke(key);
        }
    }

    /// Resets both sockets of a rendezvous that has failed.
    fn reset(&mut self, now: Instant, key: Key, why: Why) {
        let one = self.sessions.remove(key);
        tracing::debug!(session = key.index, source = %one.source, %why, "rendezvous ended");
        self.note_failed(now, &one, why);
        match why {
            Why::NoSlot => self.listeners[usize::from(one.listener)].refused += 1,
            Why::Refused
            | Why::Unanswered
            | Why::Broke
            | Why::Ended
            | Why::Failed
            | Why::BadConfirm
            | Why::Displaced
            | Why::Stopping
            | Why::Aborted => {}
        }
        let listener = &mut self.listeners[usize::from(one.listener)];
        listener.admission.leave(one.source.ip(), one.standing);
        listener.pool.leave(one.target);
        if let Some(local) = &mut self.local {
            local.fail(key);
            one.process.iter().for_each(|process| local.leave(process));
        }
        if let Some(upstream) = one.upstream {
            reset(upstream);
        }
        match one.follows {
            Some(Follows { over: false, connection, group, ended, since, round }) => {
                let Negotiating { listener, accepts, source, target, accepted, local, .. } = one;
                let beside = Beside { tcp: accepted, local, ended, since };
                let kept = Kept {
                    listener,
                    accepts,
                    connection,
                    group,
                    source,
                    target,
                    beside,
                    closing: true,
                    round,
                };
                self.sessions.insert_kept(kept);
                self.listeners[usize::from(listener)].kept += 1;
                self.endpoint.groups_mut().abort(connection);
            }
            Some(Follows { over: true, .. }) | None => reset(one.accepted),
        }
    }

    /// The reactor reports that the connect to an upstream has succeeded or failed.
    pub(super) fn connect_event(&mut self, now: Instant, key: Key, event: Event) {
        // The event may have been on its way when the session ended.
        let Some(one) = self.sessions.negotiating_mut(key) else { return };
        let upstream = one.upstream.as_ref().expect("it was watched");
        // A failure is an end; so is a farewell that the upstream has already sent.
        let outcome = if event.ending { connect_outcome(upstream) } else { Ok(()) };
        match outcome {
            Ok(()) => self.connected(now, key),
            Err(error) => self.not_accepted(now, key, &error),
        }
        self.settle(now);
    }

    /// Something happened to the socket towards the peer.
    pub(super) fn peer_event(&mut self, now: Instant, key: Key, event: Event) {
        if let Some(one) = self.sessions.negotiating_mut(key) {
            if one.accepts == Protocol::Tcp && !one.connected {
                self.connect_event(now, key, event);
            } else if event.readable && one.hears {
                self.hear(now, key, event.ending);
            }
        }
        // One event can report both the last CLC message and the end of the connection, and the end
        // is reported only once.
        if event.ending {
            self.tcp_ended(now, key);
        }
    }

    /// Reads what the peer sends until there is no more. `ending` tells that its end may be read,
    /// too.
    fn hear(&mut self, now: Instant, key: Key, ending: bool) {
        let mut bytes = [0; FRAME_MAX];
        // Bytes beyond this room stay in the socket for whoever gets the connection.
        while let room @ 1.. = self.endpoint.room(key) {
            let one = self.sessions.negotiating_mut(key).expect("its rendezvous goes on");
            let peer = one.peer().expect("what is heard is connected");
            match recv(peer, &mut bytes[..room], RecvFlags::DONTWAIT) {
                Ok((0, _)) => {
                    self.endpoint.ended(key);
                    self.settle(now);
                    return;
                }
                Ok((len, _)) => {
                    self.endpoint.received(key, &bytes[..len]);
                    // The socket is empty, and the next byte that comes is reported anew. Only
                    // before an urgent byte a read ends early: a peer that sends one within a CLC
                    // message may not be heard again before its handshake has timed out.
                    if len < room && !ending {
                        self.settle(now);
                        return;
                    }
                }
                Err(Errno::AGAIN | Errno::INTR) => return,
                Err(_) => self.endpoint.broke(key),
            }
            self.settle(now);
        }
    }

    /// The peer has ended the TCP connection of session `key`, in one direction or by a reset.
    fn tcp_ended(&mut self, now: Instant, key: Key) {
        match self.sessions.at_mut(key) {
            Some(Session::Open(Open { beside: Some(beside), .. })) => {
                beside.ended = true;
                self.sessions.suspect(now, key);
            }
            Some(Session::Kept(_)) => self.kept_tcp_ended(key),
            Some(Session::Negotiating(Negotiating { follows: Some(follows), .. })) => {
                follows.ended = true;
            }
            // A rendezvous, or a connection relayed over TCP, notices the end of its socket itself.
            Some(Session::Open(_) | Session::Negotiating(_)) => {}
            None => self.farewells.ended(key),
        }
    }

    /// Handles the reports of all pollers, as far as they have come by now: a peer that keeps us
    /// busy must not keep us from everything else.
    pub(super) fn take_reports(&mut self, now: Instant) {
        for index in 0..self.ports.len() {
            let poller = &self.endpoint.groups().pollers()[index];
            for report in poller.reports.waiting().collect::<Vec<_>>() {
                match self.endpoint.reported(now, report) {
                    None => {}
                    Some(Told::Closed(closed)) => self.closed(now, closed),
                    Some(Told::StreamEnded { connection, tally, near }) => {
                        self.stream_ended(now, connection, near, &tally);
                    }
                    Some(Told::StreamBegun { connection }) => self.stream_begun(now, connection),
                    Some(Told::StreamRefused { connection, near, moved }) => {
                        self.stream_refused(now, connection, near, moved);
                    }
                }
                self.settle(now);
            }
        }
    }

    fn closed(&mut self, now: Instant, closed: Closed<Near>) {
        let Closed { connection, ending, tally, streams, kept } = closed;
        // Each of these sockets has ended in both directions, is reset by closing it, or is of no
        // more use.
        drop(streams);
        let (key, listener, beside) = match self.sessions.closed(connection) {
            // Its socket is on its way to the poller, and comes back.
            (key, Over::Open(mut open)) if kept => {
                let (listener, beside) = (open.listener, open.beside.take());
                self.streams.turn_back(connection, open);
                (key, listener, beside)
            }
            (key, Over::Open(mut open)) => {
                self.stream_over(now, key, &open, ending, &tally);
                (key, open.listener, open.beside.take())
            }
            (key, Over::Kept(kept)) => {
                self.streams.leave(key);
                self.listeners[usize::from(kept.listener)].kept -= 1;
                (key, kept.listener, Some(kept.beside))
            }
            // The peer does not want it any more, or has gone.
            (key, Over::Following) => return self.endpoint.broke(key),
        };
        // A connection relayed over TCP has no second TCP connection to end.
        let Some(Beside { tcp, ended, .. }) = beside else { return };
        // RFC 7609 3.5.4 #1: end SMC-R before TCP
        // RFC 7609 4.8 #1: end by SMC-R messages and TCP
        let connected = self.listeners[usize::from(listener)].config.connect == Protocol::Smc;
        if connected && ending == Ending::Graceful && !ended {
            self.farewells.wait(now, key, tcp);
        } else {
            end_tcp(tcp, ending);
        }
    }

    /// A connection is over, or its stream is: notes what it has carried, and frees its place.
    pub(super) fn stream_over(
        &mut self,
        now: Instant,
        key: Key,
        open: &Open,
        ending: Ending,
        tally: &Tally,
    ) {
        if let (Some(local), Some(process)) = (&mut self.local, &open.process) {
            local.leave(process);
            local.forget(key);
        }
        self.note_closed(now, open, ending, tally);
        let listener = &mut self.listeners[usize::from(open.listener)];
        listener.admission.leave(open.source.ip(), open.standing);
        listener.pool.leave(open.target);
        self.speeds.ended(now, key, listener, open, tally);
        tracing::debug!(
            session = key.index,
            source = %open.source,
            ?ending,
            ms = now.since(open.since).as_millis(),
            bytes_in = tally.bytes_in,
            bytes_out = tally.bytes_out,
            "connection closed"
        );
    }

    /// Checks SMC-R connections whose TCP connection ended a while ago.
    ///
    /// A peer that closes a connection ends both SMC-R and TCP, and usually its CDC message arrives
    /// first. A peer that died ends TCP alone, by FIN; a probe of the group's links shows whether
    /// it did. A reset of the TCP connection resets the SMC-R connection, too (RFC 4.8.2).
    pub(super) fn expire_suspects(&mut self, now: Instant) {
        let mut probed = Vec::new();
        while let Some(open) = self.sessions.next_suspect(now) {
            let (Carried::Smc { group }, Some(beside)) = (&open.transport, &open.beside) else {
                panic!("TCP is suspect only beside SMC-R");
            };
            // RFC 7609 4.8.2 #11: peer's TCP reset without A aborts
            if connect_outcome(&beside.tcp).is_err() {
                open.cut = Some(Termination::TcpLost);
                self.endpoint.groups_mut().abort(open.connection);
            } else {
                // RFC 7609 2.1 #17: state flags only in CDC messages
                probed.push(*group);
            }
        }
        probed.sort_unstable();
        probed.dedup();
        for group in probed {
            self.endpoint.groups_mut().probe(now, group);
        }
        self.settle(now);
    }

    /// Resets connections that have lasted for too long.
    pub(super) fn expire_idle(&mut self, now: Instant) {
        let groups = self.endpoint.groups();
        let reading_of = |open: &Open| reading(groups, open);
        for (key, why) in self.idle.expire(now, &mut self.sessions, reading_of) {
            tracing::debug!(session = key.index, why = why.name(), "a connection is reset");
            self.abort(key, why.into());
        }
        self.settle(now);
    }

    /// Resets a connection on both sides, whether it is still a rendezvous or already relayed.
    pub(super) fn abort(&mut self, key: Key, end: Termination) {
        match self.sessions.at_mut(key) {
            Some(Session::Open(Open { connection, transport, cut, .. })) => {
                *cut = Some(end);
                let connection: ConnectionId = *connection;
                let groups = self.endpoint.groups_mut();
                match transport {
                    Carried::Smc { .. } => groups.abort(connection),
                    Carried::Tcp { port, .. } => {
                        groups.pollers_mut().command(*port, Command::Abort { connection });
                    }
                }
            }
            Some(Session::Negotiating(_)) => self.endpoint.abort(key),
            Some(Session::Kept(kept)) => {
                let connection = kept.connection;
                self.endpoint.groups_mut().abort(connection);
            }
            None => panic!("only what is here can be given up"),
        }
    }
}

/// The gauges that its poller keeps of an open connection.
pub(super) fn reading<N: Rnic>(groups: &GatewayGroups<N>, open: &Open) -> Reading {
    let port = match open.transport {
        Carried::Smc { .. } => {
            groups.member(open.connection).map_or_else(|| groups.any_port(), |it| it.port)
        }
        Carried::Tcp { port, .. } => port,
    };
    groups.pollers()[port.0].gauges.read(open.connection.slot)
}

/// Ends the TCP connection of the rendezvous, after its SMC-R connection has ended as `ending`
/// says.
fn end_tcp(tcp: OwnedFd, ending: Ending) {
    match ending {
        Ending::Graceful => drop(tcp),
        // RFC 7609 4.8.1 #22: reset TCP when closing times out
        Ending::ResetByApplication
        | Ending::ResetByPeer
        | Ending::LinkLost
        | Ending::DataLost
        | Ending::PeerMisbehaved
        | Ending::Stalled
        | Ending::Aborted => reset(tcp),
    }
}
#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// A peer that watches the TCP connection must learn from it how the SMC-R connection ended: a
    /// FIN after a stall would look as if all bytes had been delivered.
    // RFC 7609 4.8 #1: end by SMC-R messages and TCP
    // RFC 7609 4.8.1 #22: reset TCP when closing times out
    #[test]
    fn tcp_ends_as_smc_r_did() {
        for (ending, outcome) in [
            (Ending::Graceful, Ok(0)),
            (Ending::Stalled, Err(ErrorKind::ConnectionReset)),
            (Ending::LinkLost, Err(ErrorKind::ConnectionReset)),
            (Ending::ResetByApplication, Err(ErrorKind::ConnectionReset)),
        ] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let mut far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (near, _) = listener.accept().unwrap();
            end_tcp(near.into(), ending);
            assert_eq!(far.read(&mut [0]).map_err(|error| error.kind()), outcome, "{ending:?}");
        }
    }
}
