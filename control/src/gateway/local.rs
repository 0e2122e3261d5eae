//! Connections of local programs that have the preload library.
//!
//! A program hands its TCP socket over, and gets a Unix socket for it. To the rest of the gateway
//! the connection is one of a listener without an address: the gateway's end of the Unix socket is
//! the application's side of it, the TCP socket the peer's.

mod counts;
mod marks;
mod places;
mod rings;

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use smcgate_door::{Name, Reply, Request};
use smcr_proto::Instant;
use smcr_proto::wire::clc::Diagnosis;
use smcr_rnic::Rnic;

use self::counts::Counts;
use self::places::Places;
use self::rings::{Shared, Wants};
use super::Gateway;
use crate::config::{Config, Protocol};
use crate::listener::{Common, reset};
use crate::local::{self, Asked, Before, Caller, Door, Gone};
use crate::reactor::Token;
use crate::rendezvous::Arrival;
use crate::sessions::Negotiating;
use crate::slab::Key;
use crate::stats::Process;
use crate::termination::Termination;

/// The door, and what goes on there.
pub(super) struct Local {
    door: Door,
    /// The listener whose connections local programs make.
    connects: u16,
    /// The one whose connections they accept.
    accepts: u16,
    /// Programs that wait until it is known what becomes of their connection.
    waiting: HashMap<Key, Waiting>,
    counts: Counts,
    places: Places,
    shared: Shared,
}

/// A program that waits for the outcome of a rendezvous.
struct Waiting {
    caller: Key,
    /// Its end of the Unix socket.
    app: OwnedFd,
    /// What its TCP socket was like.
    before: Before,
    /// It waits no longer.
    until: Instant,
}

impl Local {
    /// What comes by `door` belongs to these listeners.
    pub(super) fn new(door: Door, connects: u16, accepts: u16) -> Self {
        let (waiting, counts, places) = Default::default();
        let shared = Shared::default();
        Self { door, connects, accepts, waiting, counts, places, shared }
    }

    /// When [`Gateway::expire_local`] may have something to do, at the latest.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        let first = self.waiting.values().map(|one| one.until).min();
        [first, self.door.poll_timeout()].into_iter().flatten().min()
    }

    /// A connection of this program is over.
    pub(super) fn leave(&mut self, process: &Process) {
        self.counts.leave(process);
    }

    /// What became of the rendezvous `key`, whose program may wait for that: it goes on by the Unix
    /// socket.
    pub(super) fn switch(&mut self, key: Key) {
        if let Some(Waiting { caller, app, .. }) = self.waiting.remove(&key) {
            self.hand_out(key, caller, &app);
        }
    }

    /// The rendezvous `key` has failed, and with it the connection.
    pub(super) fn fail(&mut self, key: Key) {
        self.shared.forget(key);
        if let Some(Waiting { caller, .. }) = self.waiting.remove(&key) {
            self.door.dismiss(caller);
        }
    }
}

impl<N: Rnic> Gateway<N> {
    /// From now on local programs come in by `door`. The last two listeners are theirs.
    pub(super) fn serve_programs(&mut self, door: Door) -> io::Result<()> {
        self.reactor.watch(door.descriptor(), Token::Door)?;
        let last = self.listeners.len();
        let local = |place: usize| u16::try_from(place).expect("nobody has as many listeners");
        self.local = Some(Local::new(door, local(last - 2), local(last - 1)));
        Ok(())
    }

    /// What the configuration says of the listeners of local programs may have changed.
    pub(super) fn change_local(&mut self, config: &Config, common: &Common) {
        let wanted = config.local_listeners().into_iter();
        for (listener, wanted) in self.listeners.iter_mut().filter(|it| it.local).zip(wanted) {
            listener.change(wanted, common.clone());
        }
    }

    /// Programs come to the door.
    pub(super) fn open_door_to_programs(&mut self, now: Instant) {
        for _ in 0..ACCEPT_MAX {
            let local = self.local.as_mut().expect(ASKED_AT_THE_DOOR);
            let key = match local.door.accept(now) {
                Ok(Some(key)) => key,
                Ok(None) | Err(Errno::CONNABORTED) => continue,
                Err(Errno::MFILE | Errno::NFILE) => {
                    // Whoever waits would be reported again and again.
                    let door = &mut local.door;
                    door.close_gone();
                    let came = self.overload.with_spare(|| {
                        door.accept(now).map(|key| key.into_iter().for_each(|it| door.dismiss(it)))
                    });
                    if came.is_err() {
                        return;
                    }
                    let index = local.connects;
                    self.log_limit(now, index, "file descriptors: programs are refused");
                    continue;
                }
                Err(_) => return,
            };
            // Most have asked by the time we hear of them.
            if self.hear_program(now, key) {
                continue;
            }
            let local = self.local.as_mut().expect(ASKED_AT_THE_DOOR);
            let watched = local
                .door
                .caller(key)
                .map(|caller| self.reactor.watch(caller.descriptor(), Token::Program(key)));
            if !matches!(watched, Some(Ok(()))) {
                local.door.dismiss(key);
            }
        }
    }

    /// A program asks. Returns whether it has.
    pub(super) fn hear_program(&mut self, now: Instant, key: Key) -> bool {
        let local = self.local.as_mut().expect(ASKED_AT_THE_DOOR);
        match local.door.hear(key) {
            Ok(None) => return false,
            Ok(Some(asked)) => self.asked(now, key, asked),
            Err(Gone) => local.door.dismiss(key),
        }
        true
    }

    fn asked(&mut self, now: Instant, caller: Key, asked: Asked) {
        let Asked { request, socket } = asked;
        match (request, socket) {
            (Request::Mark { peer }, Some(socket)) => {
                let reply = self.mark(now, caller, peer, &socket);
                self.leave_alone(caller, reply, socket);
            }
            (Request::Listen, Some(socket)) => {
                let reply = self.mark_listener(now, caller, &socket);
                self.leave_alone(caller, reply, socket);
            }
            (Request::Connected { waits, rings, shortcut }, Some(socket)) => {
                self.take_connected(now, caller, (waits, Wants { rings, shortcut }), socket);
            }
            (Request::Accepted { rings, shortcut }, Some(socket)) => {
                self.take_accepted(now, caller, Wants { rings, shortcut }, socket);
            }
            (Request::Attach { connection, shortcut }, Some(socket)) => {
                self.attach(caller, (connection, shortcut), socket);
            }
            (Request::Shortcut { connection }, Some(socket)) => {
                self.give_shortcut(caller, connection, socket);
            }
            (Request::Reset { connection }, Some(socket)) => {
                self.reset_for(caller, key_of(connection), socket);
            }
            (
                Request::Mark { .. }
                | Request::Listen
                | Request::Connected { .. }
                | Request::Accepted { .. }
                | Request::Attach { .. }
                | Request::Shortcut { .. }
                | Request::Reset { .. },
                None,
            ) => self.dismiss(caller),
        }
    }

    /// Answers about a socket that the program goes on to use. It is closed here before the answer
    /// leaves: then the program has the only descriptor.
    fn leave_alone(&mut self, caller: Key, reply: Reply, socket: OwnedFd) {
        let door = &mut self.local.as_mut().expect(ASKED_AT_THE_DOOR).door;
        door.close(socket);
        door.answer(caller, reply, None);
    }

    fn dismiss(&mut self, caller: Key) {
        self.local.as_mut().expect(ASKED_AT_THE_DOOR).door.dismiss(caller);
    }

    /// A program has connected a socket that was marked.
    fn take_connected(&mut self, now: Instant, caller: Key, how: (bool, Wants), socket: OwnedFd) {
        let (waits, wants) = how;
        let index = self.local.as_ref().expect(ASKED_AT_THE_DOOR).connects;
        let Some((own, peer)) = local::ends(&socket) else {
            // It is over already, which the program finds out by itself.
            return self.leave_alone(caller, Reply::Leave { seconds: 0 }, socket);
        };
        if !self.is_marking() || !self.option.peer_offered(&socket, peer) {
            return self.leave_alone(caller, Reply::Leave { seconds: LATER_S }, socket);
        }
        // From here on the peer waits for a rendezvous, and nothing else will do.
        let taken = self.take_over(now, caller, index, (own.ip(), &socket));
        let Some(Taken { near, app, before, process }) = taken else {
            return self.turn_program_away(now, caller, index, (own, socket));
        };
        let uid = process.uid;
        let sockets = Sockets { accepted: near, upstream: socket, process };
        let one = negotiating(now, (index, Protocol::Tcp), (own, peer), sockets);
        let key = self.sessions.insert(one);
        let local = self.local.as_mut().expect(ASKED_AT_THE_DOOR);
        let wants = Wants { rings: wants.rings && local.door.offers_rings(), ..wants };
        let rings = local.shared.enter(key, &app, wants, uid);
        let name = Name { connection: number(key), local: own, peer, rings };
        match local::name(&app, &name) {
            Ok(()) if waits => {
                local.door.keep(caller);
                let until = now + WAIT_MAX;
                local.waiting.insert(key, Waiting { caller, app, before, until });
            }
            Ok(()) => local.hand_out(key, caller, &app),
            // Nobody would know what that socket is. The program sees a reset.
            Err(_) => local.door.dismiss(caller),
        }
        let arrival = Arrival {
            listener: index,
            source: own,
            upstream: peer.ip(),
            offered: true,
            port: None,
            dialled: true,
            stays: self.draining.is_some().then_some(Diagnosis::TOO_BUSY),
            follows: None,
        };
        self.begin_local(now, key, arrival);
    }

    /// A program has accepted a connection whose client has offered SMC-R.
    fn take_accepted(&mut self, now: Instant, caller: Key, wants: Wants, socket: OwnedFd) {
        let index = self.local.as_ref().expect(ASKED_AT_THE_DOOR).accepts;
        let Some((own, peer)) = local::ends(&socket) else {
            return self.leave_alone(caller, Reply::Leave { seconds: 0 }, socket);
        };
        if !self.is_marking() || !self.option.peer_offered(&socket, peer) {
            return self.leave_alone(caller, Reply::Leave { seconds: 0 }, socket);
        }
        let taken = self.take_over(now, caller, index, (peer.ip(), &socket));
        let Some(Taken { near, app, process, .. }) = taken else {
            return self.turn_program_away(now, caller, index, (peer, socket));
        };
        let uid = process.uid;
        let sockets = Sockets { accepted: socket, upstream: near, process };
        let one = negotiating(now, (index, Protocol::Smc), (peer, own), sockets);
        let key = self.sessions.insert(one);
        let local = self.local.as_mut().expect(ASKED_AT_THE_DOOR);
        let wants = Wants { rings: wants.rings && local.door.offers_rings(), ..wants };
        let rings = local.shared.enter(key, &app, wants, uid);
        let name = Name { connection: number(key), local: own, peer, rings };
        // Whatever comes of it, it comes by this socket; a stream that nobody named is a reset one.
        let named = local::name(&app, &name);
        match named {
            Ok(()) => local.hand_out(key, caller, &app),
            Err(_) => local.door.dismiss(caller),
        }
        let arrival = Arrival {
            listener: index,
            source: peer,
            upstream: own.ip(),
            offered: true,
            port: self.network.port_for(own.ip()),
            dialled: true,
            stays: self.draining.is_some().then_some(Diagnosis::TOO_BUSY),
            follows: None,
        };
        self.begin_local(now, key, arrival);
    }

    /// What it takes to serve a connection of a program, which comes from `source`; none if the
    /// gateway cannot.
    fn take_over(
        &mut self,
        now: Instant,
        caller: Key,
        index: u16,
        (source, socket): (IpAddr, &OwnedFd),
    ) -> Option<Taken> {
        let may = self.has_room_for(caller) && self.has_room(now, source);
        if !may || !self.option.take(socket) {
            return None;
        }
        let before = Before::take(socket).ok()?;
        let (near, app) = local::stream().ok()?;
        let local = self.local.as_mut()?;
        let mut process = local.door.caller(caller)?.process.clone();
        process.command = local.counts.enter(&process);
        self.listeners[usize::from(index)].accepted += 1;
        Some(Taken { near, app, before, process })
    }

    /// Whether a program may have one more connection, beside those that it and its user have.
    fn has_room_for(&self, caller: Key) -> bool {
        let Some(Local { door, counts, .. }) = &self.local else { return false };
        let Some(Caller { process, .. }) = door.caller(caller) else { return false };
        counts.have_room(door.connections_per_process(), process, self.free())
    }

    /// The gateway cannot serve a connection whose peer waits for a rendezvous.
    fn turn_program_away(
        &mut self,
        now: Instant,
        caller: Key,
        index: u16,
        (source, socket): (SocketAddr, OwnedFd),
    ) {
        reset(socket);
        self.turned_away(now, index, Some(source), Termination::Limit);
        self.log_limit(
            now,
            index,
            "connections of the process, a program or a user: those of programs are reset",
        );
        self.dismiss(caller);
    }

    fn begin_local(&mut self, now: Instant, key: Key, arrival: Arrival) {
        let one = self.sessions.negotiating_mut(key).expect("it has just come in");
        let listener = &mut self.listeners[usize::from(one.listener)];
        listener.pool.enter(one.target);
        listener.admission.enter(one.source.ip(), one.standing);
        self.endpoint.arrived(now, key, arrival);
        self.settle(now);
    }

    /// The rendezvous of a program's connection begins: both of its sockets are connected.
    pub(super) fn connect_local(&mut self, now: Instant, key: Key, hear: bool) {
        let one = self.sessions.negotiating_mut(key).expect("its rendezvous has just begun");
        one.hears = hear;
        if self.watch(key, true, false).is_err() {
            self.endpoint.abort(key);
        } else {
            self.connected(now, key);
        }
    }

    /// The TCP connection of a rendezvous that has failed is the program's own again, if that
    /// waits for it and no byte stands in the way. Returns whether that is so; then nothing is left
    /// of the connection here.
    pub(super) fn give_back(&mut self, key: Key, is_clean: bool) -> bool {
        let Some(local) = &mut self.local else { return false };
        if !is_clean {
            local.switch(key);
            return false;
        }
        let Some(Waiting { caller, before, .. }) = local.waiting.remove(&key) else {
            return false;
        };
        local.shared.forget(key);
        let one = self.sessions.remove(key);
        let listener = &mut self.listeners[usize::from(one.listener)];
        listener.admission.leave(one.source.ip(), one.standing);
        listener.pool.leave(one.target);
        if let Some(process) = &one.process {
            local.leave(process);
        }
        let tcp = one.peer().expect("it came with its TCP socket");
        self.reactor.forget(tcp);
        before.restore(tcp);
        drop(one);
        local.door.answer(caller, Reply::Leave { seconds: 0 }, None);
        true
    }

    /// Looks after programs that wait.
    pub(super) fn expire_local(&mut self, now: Instant) {
        let Some(local) = &mut self.local else { return };
        let due = local.waiting.iter().filter(|(_, one)| one.until <= now);
        let due: Vec<Key> = due.map(|(key, _)| *key).collect();
        due.into_iter().for_each(|key| local.switch(key));
        local.door.expire(now);
    }

    /// Whether connections of this listener come from local programs.
    pub(super) fn is_local(&self, index: u16) -> bool {
        self.listeners[usize::from(index)].local
    }

    /// Whether a local program has the address `own`, but none of our devices: it lives in another
    /// network namespace.
    pub(super) fn is_foreign(&self, index: u16, own: IpAddr) -> bool {
        self.is_local(index) && self.network.port_for(own).is_none()
    }
}

/// What it takes to serve a connection of a program.
struct Taken {
    /// Our end of the Unix socket.
    near: OwnedFd,
    /// The program's.
    app: OwnedFd,
    before: Before,
    process: Process,
}

/// The sockets of a session, in the order in which a listener would get them.
struct Sockets {
    accepted: OwnedFd,
    upstream: OwnedFd,
    process: Process,
}

/// A session of a program, from `source` to `target`, at a listener that accepts `accepts`.
fn negotiating(
    now: Instant,
    (listener, accepts): (u16, Protocol),
    (source, target): (SocketAddr, SocketAddr),
    Sockets { accepted, upstream, process }: Sockets,
) -> Negotiating {
    Negotiating {
        // At a server it is asked where the peer has come to.
        local: (accepts == Protocol::Smc).then_some(target),
        upstream: Some(upstream),
        process: Some(Box::new(process)),
        ..Negotiating::new(now, (listener, accepts), (source, target), accepted)
    }
}

/// A session as programs and operators number it.
fn number(key: Key) -> u64 {
    u64::from(key.generation) << 32 | u64::from(key.index)
}

fn key_of(number: u64) -> Key {
    let half = |bits: u64| u32::try_from(bits & u64::from(u32::MAX)).expect("half of the bits");
    Key { index: half(number), generation: half(number >> 32) }
}

/// Why there is a door: it is never closed before the gateway ends.
const ASKED_AT_THE_DOOR: &str = "whoever asks has come in by the door";
/// How long a program waits for the outcome of a rendezvous. Then it goes on by the Unix socket.
const WAIT_MAX: Duration = Duration::from_millis(200);
/// When a program may ask again about a peer that is no SMC-R peer.
const LATER_S: u32 = 10;
/// The same where the reason may be over soon.
const SOON_S: u32 = 1;
/// Programs that are let in before the control thread does something else.
const ACCEPT_MAX: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_names_a_session() {
        let key = Key { index: 0xdead_beef, generation: 0x00ff_fff7 };
        assert_eq!(key_of(number(key)), key);
    }
}
