//! Which Unix socket each connection of a local program has, and the memory by which its bytes go
//! where that is shared.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::net::sockopt::socket_cookie;
use smcgate_door::Reply;
use smcgate_rings::Gateway as Rings;
use smcr_engine::Command;
use smcr_rnic::Rnic;

use super::Local;
use crate::gateway::Gateway;
use crate::groups::Pollers as _;
use crate::sessions::{Carried, Open, Session};
use crate::slab::Key;

/// What programs have of each connection, by session.
#[derive(Debug, Default)]
pub(super) struct Shared {
    by_session: HashMap<Key, One>,
    /// How many have memory.
    with_rings: usize,
}

#[derive(Debug)]
struct One {
    rings: Option<Arc<Rings>>,
    /// Which socket the program has.
    app: u64,
    /// The session is to be reset when nobody has that socket any more.
    resets: bool,
}

impl Shared {
    /// The program of a new session has the socket `app`; `wants_rings`: its bytes go by memory,
    /// which is made. Returns false if there is none, or cannot be for want of descriptors: then
    /// the bytes go by the socket.
    pub(super) fn enter(&mut self, key: Key, app: &OwnedFd, wants_rings: bool) -> bool {
        let Ok(cookie) = socket_cookie(app) else { return false };
        let make = || {
            let rings = Rings::create()?;
            Rings::prepare(app.as_fd())?;
            Ok::<_, io::Error>(Arc::new(rings))
        };
        let rings = if wants_rings { make().ok() } else { None };
        let has_rings = rings.is_some();
        self.with_rings += usize::from(has_rings);
        self.by_session.insert(key, One { rings, app: cookie, resets: false });
        has_rings
    }

    /// The memory of a session, if it has some.
    pub(super) fn of(&self, key: Key) -> Option<Arc<Rings>> {
        self.by_session.get(&key)?.rings.clone()
    }

    /// What the program of a session maps.
    pub(super) fn memory_of(&self, key: Key) -> Option<BorrowedFd<'_>> {
        Some(self.by_session.get(&key)?.rings.as_ref()?.memory())
    }

    /// Whether a program that brings `socket` has the connection of this session.
    pub(super) fn is_socket_of(&self, key: Key, socket: &OwnedFd) -> bool {
        let one = self.by_session.get(&key);
        one.is_some_and(|one| socket_cookie(socket) == Ok(one.app))
    }

    /// A program that brings `socket` wants the session reset when nobody has that any more.
    /// Returns whether it is the session's.
    pub(super) fn reset_at_end(&mut self, key: Key, socket: &OwnedFd) -> bool {
        let is_its = self.is_socket_of(key, socket);
        if is_its && let Some(one) = self.by_session.get_mut(&key) {
            one.resets = true;
        }
        is_its
    }

    /// Whether a program wants that.
    pub(super) fn resets(&self, key: Key) -> bool {
        self.by_session.get(&key).is_some_and(|one| one.resets)
    }

    /// The session is over.
    pub(super) fn forget(&mut self, key: Key) {
        if let Some(rings) = self.by_session.remove(&key).and_then(|one| one.rings) {
            rings.mark_closed();
            self.with_rings -= 1;
        }
    }

    /// How many sessions have memory.
    pub(super) fn with_rings(&self) -> usize {
        self.with_rings
    }
}

impl Local {
    /// Gives a program its end of the Unix socket, and the memory by which the bytes go.
    pub(super) fn hand_out(&mut self, key: Key, caller: Key, app: &OwnedFd) {
        let memory = self.shared.memory_of(key);
        let reply = Reply::Switch { rings: memory.is_some() };
        let all: Vec<_> = [Some(app.as_fd()), memory].into_iter().flatten().collect();
        self.door.answer_with(caller, reply, &all);
    }

    /// The memory of the session `key`, if its bytes go by such.
    pub(in crate::gateway) fn rings_of(&self, key: Key) -> Option<Arc<Rings>> {
        self.shared.of(key)
    }

    /// How many sessions have such memory.
    pub(in crate::gateway) fn rings(&self) -> usize {
        self.shared.with_rings()
    }

    /// Whether a program wants the session `key` reset when nobody has its socket any more.
    pub(in crate::gateway) fn resets(&self, key: Key) -> bool {
        self.shared.resets(key)
    }

    /// The session `key` is over.
    pub(in crate::gateway) fn forget(&mut self, key: Key) {
        self.shared.forget(key);
    }
}

impl<N: Rnic> Gateway<N> {
    /// A program has the socket of a connection whose bytes go by shared memory, and wants that.
    pub(super) fn attach(&mut self, caller: Key, connection: u64, socket: OwnedFd) {
        let local = self.local.as_mut().expect(super::ASKED_AT_THE_DOOR);
        let key = super::key_of(connection);
        let is_its = local.shared.is_socket_of(key, &socket);
        match is_its.then(|| local.shared.memory_of(key)).flatten() {
            Some(memory) => {
                local.door.answer_with(caller, Reply::Switch { rings: true }, &[memory]);
            }
            None => drop(local.door.answer(caller, Reply::Leave { seconds: 0 }, None)),
        }
        local.door.close(socket);
    }

    /// A program that has `socket` closes it, and wants the connection `key` reset when nobody has
    /// that any more. Nothing happens if that is another one.
    pub(super) fn reset_for(&mut self, key: Key, socket: &OwnedFd) {
        let local = self.local.as_mut().expect(super::ASKED_AT_THE_DOOR);
        if local.shared.reset_at_end(key, socket) {
            self.reset_at_end(key);
        }
    }

    /// Has the connection `key` reset when nobody has its program's socket any more, if a program
    /// wants that.
    pub(in crate::gateway) fn reset_at_end(&mut self, key: Key) {
        if !self.local.as_ref().is_some_and(|local| local.resets(key)) {
            return;
        }
        match self.sessions.at_mut(key) {
            Some(Session::Open(Open { connection, transport, .. })) => {
                let connection = *connection;
                let groups = self.endpoint.groups_mut();
                match transport {
                    Carried::Smc { .. } => groups.reset_at_end(connection),
                    Carried::Tcp { port, .. } => {
                        groups.pollers_mut().command(*port, Command::ResetAtEnd { connection });
                    }
                }
            }
            // As soon as it carries bytes, which the program may have written already.
            Some(Session::Negotiating(_)) => {}
            None => panic!("a program has a socket of what is here only"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local;

    /// A program that knows the number of somebody's connection must not read its bytes, nor reset
    /// it.
    #[test]
    fn a_connection_is_of_whoever_has_its_socket() {
        let (key, other) = (Key { index: 1, generation: 1 }, Key { index: 1, generation: 2 });
        let (_near, app) = local::stream().unwrap();
        let (_, stranger) = local::stream().unwrap();
        let mut shared = Shared::default();
        assert!(shared.enter(key, &app, true) && shared.with_rings() == 1);
        let copy = app.try_clone().unwrap();
        assert!(shared.is_socket_of(key, &copy) && shared.memory_of(key).is_some());
        assert!(!shared.is_socket_of(key, &stranger));
        assert!(!shared.is_socket_of(other, &app) && shared.memory_of(other).is_none());
        let rings = shared.of(key).unwrap();
        shared.forget(key);
        assert!(rings.is_closed() && shared.of(key).is_none() && shared.with_rings() == 0);
        assert!(shared.memory_of(key).is_none());
        assert!(!shared.enter(other, &app, false) && shared.is_socket_of(other, &app));
        assert!(!shared.reset_at_end(other, &stranger) && !shared.resets(other));
        assert!(shared.reset_at_end(other, &copy) && shared.resets(other));
        shared.forget(other);
        assert!(!shared.is_socket_of(other, &app));
    }
}
