//! The one place where the control thread sleeps.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};

use crate::slab::{GENERATION_MASK, Key};

/// What a descriptor is to the control thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// A listening socket.
    Listener(u16),
    /// The application's side of a rendezvous: wanted until it is connected.
    Application(Key),
    /// The SMC-R peer's side of a rendezvous, and later the idle TCP connection beside SMC-R.
    Peer(Key),
    /// A connection of a proxy, of which a PROXY header is awaited.
    Introduction(Key),
    /// A connection that asks whether an upstream answers.
    Check(Key),
    /// The door of local programs.
    Door,
    /// A program that has come to the door.
    Program(Key),
    /// Pollers, the admin thread or a signal want attention.
    Waker,
    /// Something about the network devices changed.
    Network,
    /// Policies of IPsec changed.
    Policies,
    /// The socket of this number among those that were passed to us, which no listener has.
    Passed(u16),
    /// An RNIC has something to say.
    Rnic,
}

/// What happened to a descriptor.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// Which.
    pub token: Token,
    /// Something can be read: bytes, a connection, the end.
    pub readable: bool,
    /// The peer sends no more, or the socket failed.
    pub ending: bool,
}

/// An epoll.
pub struct Reactor {
    epoll: OwnedFd,
    found: Vec<epoll::Event>,
}

impl Reactor {
    /// An empty one.
    ///
    /// # Errors
    ///
    /// When the process is out of descriptors.
    pub fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(Self { epoll, found: Vec::with_capacity(EVENTS_MAX) })
    }

    /// Reports, while it lasts, that `descriptor` can be read.
    ///
    /// # Errors
    ///
    /// When the kernel has no room.
    pub fn watch(&self, descriptor: impl AsFd, token: Token) -> io::Result<()> {
        self.add(descriptor, token, epoll::EventFlags::IN)
    }

    /// Reports once that `socket` is connected, or failed to be.
    ///
    /// # Errors
    ///
    /// When the kernel has no room.
    pub fn watch_connect(&self, socket: impl AsFd, token: Token) -> io::Result<()> {
        self.add(socket, token, epoll::EventFlags::OUT | epoll::EventFlags::ONESHOT)
    }

    /// Reports each time something new happens to `socket`, beginning with what has already.
    ///
    /// # Errors
    ///
    /// When the kernel has no room.
    pub fn watch_edges(&self, socket: impl AsFd, token: Token) -> io::Result<()> {
        use epoll::EventFlags as F;
        self.add(socket, token, F::IN | F::OUT | F::RDHUP | F::ET)
    }

    /// Reports nothing more of `socket`: it goes to another thread.
    pub fn forget(&self, socket: impl AsFd) {
        // Fails only for what was never watched.
        let _ = epoll::delete(&self.epoll, socket);
    }

    /// Sleeps until something happens or `limit` has passed, and appends what happened.
    pub fn wait(&mut self, limit: Option<Duration>, events: &mut Vec<Event>) {
        let limit = limit.map(|limit| Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        });
        self.found.clear();
        // Interruption by a signal is a sleep that ended early.
        let _ = epoll::wait(&self.epoll, spare_capacity(&mut self.found), limit.as_ref());
        events.extend(self.found.iter().map(|event| {
            use epoll::EventFlags as F;
            let flags = event.flags;
            Event {
                token: unpack(event.data.u64()),
                readable: flags.intersects(F::IN | F::RDHUP | F::HUP | F::ERR),
                ending: flags.intersects(F::RDHUP | F::HUP | F::ERR),
            }
        }));
    }

    fn add(&self, descriptor: impl AsFd, token: Token, flags: epoll::EventFlags) -> io::Result<()> {
        let data = epoll::EventData::new_u64(pack(token));
        Ok(epoll::add(&self.epoll, descriptor, data, flags)?)
    }
}

/// Events taken at once.
const EVENTS_MAX: usize = 256;

const KIND_SHIFT: u32 = 56;
const GENERATION_SHIFT: u32 = 32;

fn pack(token: Token) -> u64 {
    let (kind, key) = match token {
        Token::Listener(index) => (0, Key { index: index.into(), generation: 0 }),
        Token::Application(key) => (1, key),
        Token::Peer(key) => (2, key),
        Token::Waker => (3, Key { index: 0, generation: 0 }),
        Token::Network => (4, Key { index: 0, generation: 0 }),
        Token::Rnic => (5, Key { index: 0, generation: 0 }),
        Token::Introduction(key) => (6, key),
        Token::Check(key) => (7, key),
        Token::Door => (8, Key { index: 0, generation: 0 }),
        Token::Program(key) => (9, key),
        Token::Policies => (10, Key { index: 0, generation: 0 }),
        Token::Passed(index) => (11, Key { index: index.into(), generation: 0 }),
    };
    kind << KIND_SHIFT
        | u64::from(key.generation & GENERATION_MASK) << GENERATION_SHIFT
        | u64::from(key.index)
}

fn unpack(data: u64) -> Token {
    let part = |shift: u32, mask: u32| {
        u32::try_from(data >> shift & u64::from(mask)).expect("no more bits than the mask has")
    };
    let key = Key { index: part(0, u32::MAX), generation: part(GENERATION_SHIFT, GENERATION_MASK) };
    match data >> KIND_SHIFT {
        0 => Token::Listener(index_of(key)),
        1 => Token::Application(key),
        2 => Token::Peer(key),
        4 => Token::Network,
        5 => Token::Rnic,
        6 => Token::Introduction(key),
        7 => Token::Check(key),
        8 => Token::Door,
        9 => Token::Program(key),
        10 => Token::Policies,
        11 => Token::Passed(index_of(key)),
        _ => Token::Waker,
    }
}

fn index_of(key: Key) -> u16 {
    u16::try_from(key.index).expect("packed from sixteen bits")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_survive_the_kernel() {
        let key = Key { index: 0xdead_beef, generation: GENERATION_MASK };
        let listener = Token::Listener(u16::MAX);
        let (application, peer) = (Token::Application(key), Token::Peer(key));
        let introduction = Token::Introduction(key);
        let others = [Token::Check(key), Token::Waker, Token::Network, Token::Rnic];
        let others = others.into_iter().chain([Token::Door, Token::Program(key), Token::Policies]);
        let others = others.chain([Token::Passed(u16::MAX)]);
        for token in [listener, application, peer, introduction].into_iter().chain(others) {
            assert_eq!(unpack(pack(token)), token);
        }
    }
}
