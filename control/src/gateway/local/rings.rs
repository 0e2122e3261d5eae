//! Which Unix socket each connection of a local program has, and the memory by which its bytes go
//! where that is shared.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::net::sockopt::socket_cookie;
use smcgate_door::Reply;
use smcgate_rings::Gateway as Rings;
use smcr_engine::near::AtEnd;
use smcr_rnic::Rnic;

use super::Local;
use crate::config;
use crate::gateway::Gateway;
use crate::groups::Ends;
use crate::slab::Key;
use crate::stats::SharedMemory;

/// What programs have of each connection, by session.
#[derive(Debug, Default)]
pub(super) struct Shared {
    by_session: HashMap<Key, One>,
    /// How many have memory, and how many have ever had some.
    with_rings: usize,
    made: u64,
    /// Those that have memory and are open over SMC-R, by the ends of the connection.
    by_ends: HashMap<Ends, Key>,
    /// How many have a shortcut, and how many have ever had one.
    shortcuts: (usize, u64),
}

/// How the bytes of a program may go.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wants {
    /// By memory.
    pub(super) rings: bool,
    /// And past us.
    pub(super) shortcut: bool,
}

#[derive(Debug)]
struct One {
    rings: Option<Arc<Rings>>,
    /// Which socket the program has.
    app: u64,
    /// What happens when nobody has that socket any more.
    at_end: AtEnd,
    /// The user of the program, if its bytes may go past us.
    shortens: Option<u32>,
    /// The ends of its connection, once that is open over SMC-R.
    ends: Option<Ends>,
    /// Its program has asked for a shortcut to the other one, and has got it.
    has_shortcut: bool,
}

impl Shared {
    /// The program of a new session, of this user, has the socket `app`. If it wants rings, its
    /// bytes go by memory, which is made. Returns false if there is none, or cannot be for want of
    /// descriptors: then the bytes go by the socket.
    pub(super) fn enter(&mut self, key: Key, app: &OwnedFd, wants: Wants, uid: u32) -> bool {
        let Ok(cookie) = socket_cookie(app) else { return false };
        let make = || {
            let rings = Rings::create()?;
            Rings::prepare(app.as_fd())?;
            Ok::<_, io::Error>(Arc::new(rings))
        };
        let rings = if wants.rings { make().ok() } else { None };
        let has_rings = rings.is_some();
        self.with_rings += usize::from(has_rings);
        self.made += u64::from(has_rings);
        let shortens = wants.shortcut.then_some(uid);
        let (at_end, ends, has_shortcut) = (AtEnd::default(), None, false);
        let one = One { rings, app: cookie, at_end, shortens, ends, has_shortcut };
        self.by_session.insert(key, one);
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
    pub(super) fn reset_at_end(&self, key: Key, socket: &OwnedFd) {
        if let Some(one) = self.by_session.get(&key)
            && self.is_socket_of(key, socket)
        {
            one.at_end.reset();
        }
    }

    /// How a session ends when nobody has its program's socket any more.
    pub(super) fn at_end(&self, key: Key) -> AtEnd {
        self.by_session.get(&key).map(|one| one.at_end.clone()).unwrap_or_default()
    }

    /// The session is open over SMC-R, and these are the ends of its connection. If the other one
    /// is a session with memory, too, their programs may pass the bytes by themselves, as the door
    /// says.
    pub(super) fn opened(&mut self, key: Key, ends: Ends, door: &config::Door) {
        let Some(one) = self.by_session.get_mut(&key) else { return };
        let (Some(ours), Some(user)) = (one.rings.clone(), one.shortens) else { return };
        one.ends = Some(ends);
        self.by_ends.insert(ends, key);
        let other = self.by_ends.get(&ends.turned()).and_then(|key| self.by_session.get(key));
        if let Some(One { rings: Some(theirs), shortens: Some(other), .. }) = other
            && door.shortcuts.are_for(user, *other)
        {
            Rings::offer_shortcut(&ours, theirs, door.shortcut_after);
        }
    }

    /// The session is over.
    pub(super) fn forget(&mut self, key: Key) {
        let Some(One { rings, ends, has_shortcut, .. }) = self.by_session.remove(&key) else {
            return;
        };
        self.shortcuts.0 -= usize::from(has_shortcut);
        if let Some(ends) = ends {
            self.by_ends.remove(&ends);
        }
        if let Some(rings) = rings {
            rings.mark_closed();
            self.with_rings -= 1;
        }
    }

    /// The user of the program of a session, if its bytes may go past us.
    pub(super) fn shortens(&self, key: Key) -> Option<u32> {
        self.by_session.get(&key)?.shortens
    }

    /// What the program of a session maps that was offered a shortcut, and brings `socket`.
    pub(super) fn shortcut_of(&mut self, key: Key, socket: &OwnedFd) -> Option<Arc<Rings>> {
        let is_its = self.is_socket_of(key, socket);
        let one = self.by_session.get_mut(&key).filter(|_| is_its)?;
        let rings = one.rings.clone().filter(|rings| rings.shortcut_memory().is_ok())?;
        if !std::mem::replace(&mut one.has_shortcut, true) {
            self.shortcuts = (self.shortcuts.0 + 1, self.shortcuts.1 + 1);
        }
        Some(rings)
    }

    /// Whether the program of a session has got a shortcut.
    pub(super) fn has_shortcut(&self, key: Key) -> bool {
        self.by_session.get(&key).is_some_and(|one| one.has_shortcut)
    }

    /// How many sessions have a shortcut, and how many have ever had one.
    pub(super) fn shortcuts(&self) -> (usize, u64) {
        self.shortcuts
    }

    /// How many sessions have memory, and how many have ever had some.
    pub(super) fn with_rings(&self) -> (usize, u64) {
        (self.with_rings, self.made)
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

    /// Closes what a program has brought as the socket of this session. If it is that, it is our
    /// own, in which nothing lies that takes long to close: it is closed here, and before the
    /// answer, so that the program's end is not late.
    fn close(&self, key: Key, socket: OwnedFd) {
        match self.shared.is_socket_of(key, &socket) {
            true => drop(socket),
            false => self.door.close(socket),
        }
    }

    /// The memory of the session `key`, if its bytes go by such.
    pub(in crate::gateway) fn rings_of(&self, key: Key) -> Option<Arc<Rings>> {
        self.shared.of(key)
    }

    /// How the program of the session `key` passes its bytes; none if it is by a socket.
    pub(in crate::gateway) fn memory_of(&self, key: Key) -> Option<SharedMemory> {
        let has_rings = self.shared.of(key).is_some();
        let memory = match self.shared.has_shortcut(key) {
            true => SharedMemory::Shortcut,
            false => SharedMemory::Rings,
        };
        has_rings.then_some(memory)
    }

    /// How many sessions have such memory, and how many have ever had some.
    pub(in crate::gateway) fn rings(&self) -> (usize, u64) {
        self.shared.with_rings()
    }

    /// How many sessions have a shortcut to another one, and how many have ever had one.
    pub(in crate::gateway) fn shortcuts(&self) -> (usize, u64) {
        self.shared.shortcuts()
    }

    /// The session `key` is open over SMC-R, between these ends.
    pub(in crate::gateway) fn opened(&mut self, key: Key, ends: Ends) {
        self.shared.opened(key, ends, self.door.config());
    }

    /// How the session `key` ends when nobody has its program's socket any more.
    pub(in crate::gateway) fn at_end(&self, key: Key) -> AtEnd {
        self.shared.at_end(key)
    }

    /// The session `key` is over.
    pub(in crate::gateway) fn forget(&mut self, key: Key) {
        self.shared.forget(key);
    }
}

impl<N: Rnic> Gateway<N> {
    /// A program has the socket of a connection whose bytes go by shared memory, and wants that.
    /// If it knows of no shortcuts, it must not if it was offered one.
    pub(super) fn attach(
        &mut self,
        caller: Key,
        (connection, shortcut): (u64, bool),
        socket: OwnedFd,
    ) {
        let local = self.local.as_mut().expect(super::ASKED_AT_THE_DOOR);
        let key = super::key_of(connection);
        let is_its = local.shared.is_socket_of(key, &socket);
        let is_offered = local.shared.of(key).is_some_and(|rings| rings.is_offered_shortcut());
        let is_its = is_its && (shortcut || !is_offered);
        local.close(key, socket);
        match is_its.then(|| local.shared.memory_of(key)).flatten() {
            Some(memory) => {
                local.door.answer_with(caller, Reply::Switch { rings: true }, &[memory]);
            }
            None => drop(local.door.answer(caller, Reply::Leave { seconds: 0 }, None)),
        }
    }

    /// A program has the socket of a connection, and wants the shortcut that it was offered.
    pub(super) fn give_shortcut(&mut self, caller: Key, connection: u64, socket: OwnedFd) {
        let local = self.local.as_mut().expect(super::ASKED_AT_THE_DOOR);
        let key = super::key_of(connection);
        let user = local.door.caller(caller).map(|caller| caller.process.uid);
        let may = |owner: u32| {
            user.is_some_and(|user| local.door.config().shortcuts.are_for(user, owner))
        };
        let may = local.shared.shortens(key).is_some_and(may);
        let rings = if may { local.shared.shortcut_of(key, &socket) } else { None };
        local.close(key, socket);
        match rings.as_ref().and_then(|rings| rings.shortcut_memory().ok()) {
            Some(memory) => {
                local.door.answer_with(caller, Reply::Switch { rings: true }, &[memory]);
            }
            None => drop(local.door.answer(caller, Reply::Leave { seconds: 0 }, None)),
        }
    }

    /// A program that has `socket` closes it, and wants the connection `key` reset when nobody has
    /// that any more. Nothing happens if that is another one.
    pub(super) fn reset_for(&mut self, caller: Key, key: Key, socket: OwnedFd) {
        let local = self.local.as_mut().expect(super::ASKED_AT_THE_DOOR);
        // Before our copy is closed: the connection ends when there is none left.
        local.shared.reset_at_end(key, &socket);
        local.close(key, socket);
        local.door.answer(caller, Reply::Done, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Shortcuts;
    use crate::groups::PortId;
    use crate::local;

    /// A program that knows the number of somebody's connection must not read its bytes, nor reset
    /// it.
    #[test]
    fn a_connection_is_of_whoever_has_its_socket() {
        let (key, other) = (Key { index: 1, generation: 1 }, Key { index: 1, generation: 2 });
        let (_near, app) = local::stream().unwrap();
        let (_, stranger) = local::stream().unwrap();
        let mut shared = Shared::default();
        let [with, without] = [true, false].map(|rings| Wants { rings, shortcut: rings });
        assert!(shared.enter(key, &app, with, 0) && shared.with_rings() == (1, 1));
        let copy = app.try_clone().unwrap();
        assert!(shared.is_socket_of(key, &copy) && shared.memory_of(key).is_some());
        assert!(!shared.is_socket_of(key, &stranger));
        assert!(!shared.is_socket_of(other, &app) && shared.memory_of(other).is_none());
        let rings = shared.of(key).unwrap();
        shared.forget(key);
        assert!(rings.is_closed() && shared.of(key).is_none() && shared.with_rings() == (0, 1));
        assert!(shared.memory_of(key).is_none());
        assert!(!shared.enter(other, &app, without, 0) && shared.is_socket_of(other, &app));
        shared.reset_at_end(other, &stranger);
        assert!(!shared.at_end(other).is_reset());
        shared.reset_at_end(other, &copy);
        assert!(shared.at_end(other).is_reset());
        shared.forget(other);
        assert!(!shared.is_socket_of(other, &app));
    }

    /// A program must get the bytes of nobody but the one that it is connected to.
    #[test]
    fn both_ends_of_a_connection_and_no_others_get_a_shortcut() {
        let wants = Wants { rings: true, shortcut: true };
        let rings_of = |shared: &Shared, at: u32| shared.of(key(at)).unwrap();
        let offered = |shared: &Shared, one, other| {
            let other = rings_of(shared, other);
            rings_of(shared, one).other_end().is_some_and(|it| Arc::ptr_eq(&it, &other))
        };
        for (shortcuts, other_user, is_offered) in [
            (Shortcuts::SameUser, 0, true),
            (Shortcuts::SameUser, 7, false),
            (Shortcuts::Always, 7, true),
            (Shortcuts::Never, 0, false),
        ] {
            let (mut shared, mut sockets) = (Shared::default(), Vec::new());
            for (at, user) in [(1, 0), (2, other_user), (3, 0), (4, 0)] {
                let (near, app) = local::stream().unwrap();
                assert!(shared.enter(key(at), &app, wants, user));
                sockets.push((near, app));
            }
            let door = door(shortcuts);
            shared.opened(key(3), ends(0, (5, 9), (6, 8)), &door);
            // The same numbers, the other way round, and another poller.
            shared.opened(key(4), ends(1, (6, 8), (5, 9)), &door);
            shared.opened(key(1), ends(0, (5, 1), (6, 2)), &door);
            assert!(!offered(&shared, 1, 3) && !offered(&shared, 3, 4));
            shared.opened(key(2), ends(0, (6, 2), (5, 1)), &door);
            assert_eq!((offered(&shared, 1, 2), offered(&shared, 2, 1)), (is_offered, is_offered));
            assert!(rings_of(&shared, 3).other_end().is_none());
            let given = [&sockets[0].1, &sockets[2].1].map(|app| shared.shortcut_of(key(1), app));
            assert_eq!(given.map(|it| it.is_some()), [is_offered, false], "not with another's");
            assert_eq!(shared.shortcuts(), (usize::from(is_offered), u64::from(is_offered)));
            (1..=4).for_each(|at| shared.forget(key(at)));
            assert!(shared.by_ends.is_empty() && shared.shortcuts.0 == 0);
        }
    }

    fn key(index: u32) -> Key {
        Key { index, generation: 1 }
    }

    /// A connection between two queue pairs, with two tokens.
    fn ends(port: usize, ours: (u32, u32), theirs: (u32, u32)) -> Ends {
        Ends::between(PortId(port), ours, theirs)
    }

    fn door(shortcuts: Shortcuts) -> config::Door {
        config::Door {
            socket: "door".into(),
            uids: Vec::new(),
            gids: Vec::new(),
            connections_per_process: 10,
            rings: true,
            shortcuts,
            shortcut_after: 0,
        }
    }
}
