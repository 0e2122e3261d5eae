//! Connections of local programs whose bytes go by shared memory.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::net::sockopt::socket_cookie;
use smcgate_door::Reply;
use smcgate_rings::Gateway as Rings;
use smcr_rnic::Rnic;

use super::Local;
use crate::gateway::Gateway;
use crate::slab::Key;

/// The memory of each, by session.
#[derive(Debug, Default)]
pub(super) struct Shared {
    by_session: HashMap<Key, One>,
}

#[derive(Debug)]
struct One {
    rings: Arc<Rings>,
    /// Which socket the program has.
    app: u64,
}

impl Shared {
    /// Makes the memory of a session whose program has the socket `app`. Returns false if there is
    /// none, for want of descriptors or memory: then the bytes go by the socket.
    pub(super) fn make(&mut self, key: Key, app: &OwnedFd) -> bool {
        let Ok(cookie) = socket_cookie(app) else { return false };
        let made = Rings::create().and_then(|rings| {
            Rings::prepare(app.as_fd())?;
            Ok(Arc::new(rings))
        });
        let Ok(rings) = made else { return false };
        self.by_session.insert(key, One { rings, app: cookie });
        true
    }

    /// That of a session, if it has some.
    pub(super) fn of(&self, key: Key) -> Option<Arc<Rings>> {
        self.by_session.get(&key).map(|one| Arc::clone(&one.rings))
    }

    /// What the program of a session maps.
    pub(super) fn memory_of(&self, key: Key) -> Option<BorrowedFd<'_>> {
        self.by_session.get(&key).map(|one| one.rings.memory())
    }

    /// The same for a program that brings the socket of the session, and so may map it.
    pub(super) fn memory_for(&self, key: Key, socket: &OwnedFd) -> Option<BorrowedFd<'_>> {
        let one = self.by_session.get(&key)?;
        (socket_cookie(socket) == Ok(one.app)).then(|| one.rings.memory())
    }

    /// The session is over.
    pub(super) fn forget(&mut self, key: Key) {
        if let Some(one) = self.by_session.remove(&key) {
            one.rings.mark_closed();
        }
    }

    /// How many sessions have some.
    pub(super) fn len(&self) -> usize {
        self.by_session.len()
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
        self.shared.len()
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
        match local.shared.memory_for(super::key_of(connection), &socket) {
            Some(memory) => {
                local.door.answer_with(caller, Reply::Switch { rings: true }, &[memory]);
            }
            None => drop(local.door.answer(caller, Reply::Leave { seconds: 0 }, None)),
        }
        local.door.close(socket);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local;

    /// A program that knows the number of somebody's connection must not read its bytes.
    #[test]
    fn memory_is_for_whoever_has_the_socket() {
        let (key, other) = (Key { index: 1, generation: 1 }, Key { index: 1, generation: 2 });
        let (_near, app) = local::stream().unwrap();
        let (_, stranger) = local::stream().unwrap();
        let mut shared = Shared::default();
        assert!(shared.make(key, &app) && shared.len() == 1);
        let copy = app.try_clone().unwrap();
        assert!(shared.memory_for(key, &copy).is_some());
        assert!(shared.memory_for(key, &stranger).is_none());
        assert!(shared.memory_for(other, &app).is_none());
        let rings = shared.of(key).unwrap();
        shared.forget(key);
        assert!(rings.is_closed() && shared.of(key).is_none() && shared.len() == 0);
        assert!(shared.memory_of(key).is_none());
    }
}
