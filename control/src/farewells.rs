//! TCP connections beside SMC-R connections that are over, until the peer ends them.
//!
//! The side that ends TCP first keeps the pair of ports in TIME_WAIT for a minute. The side that
//! listens can afford that. The side that connected has some 28,000 ports towards the peer: with a
//! few thousand short connections per second it ran out of them, and each `connect` searched them
//! all. So the connecting side waits until the peer has ended TCP, and resets a connection that the
//! peer does not end in time, because a reset leaves no TIME_WAIT. By then both sides have sent the
//! C flag of CDC, so that the reset loses no data.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::time::Duration;

use smcr_proto::Instant;

use crate::listener::reset;
use crate::slab::Key;

/// The TCP connections that wait for their peers.
#[derive(Debug, Default)]
pub struct Farewells {
    sockets: HashMap<Key, OwnedFd>,
    /// Oldest first. Connections that the peer has ended stay here until their time is over.
    order: VecDeque<(Instant, Key)>,
    cut_short: u64,
}

impl Farewells {
    /// Waits until the peer ends `tcp`, which events call `key`. If too many wait, the oldest is
    /// reset.
    pub fn wait(&mut self, now: Instant, key: Key, tcp: OwnedFd) {
        while self.sockets.len() >= WAITING_MAX {
            let (_, oldest) = self.order.pop_front().expect("every socket has its turn");
            self.cut_short(oldest);
        }
        let before = self.sockets.insert(key, tcp);
        assert!(before.is_none(), "a session is closed once");
        self.order.push_back((now, key));
    }

    /// The peer has ended what `key` calls, if that is one of these: now it can be closed.
    pub fn ended(&mut self, key: Key) {
        drop(self.sockets.remove(&key));
    }

    /// Resets what has waited for too long.
    pub fn expire(&mut self, now: Instant) {
        let is_due = |(since, _): &mut (Instant, Key)| now.since(*since) >= PATIENCE;
        while let Some((_, key)) = self.order.pop_front_if(is_due) {
            self.cut_short(key);
        }
    }

    /// When [`expire`](Self::expire) must be called, at the latest.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.order.front().map(|(since, _)| *since + PATIENCE)
    }

    /// Resets all that are left.
    pub fn cut_all_short(&mut self) {
        self.order.clear();
        self.sockets.drain().for_each(|(_, tcp)| reset(tcp));
    }

    /// How many wait now.
    pub fn len(&self) -> usize {
        self.sockets.len()
    }

    /// Whether none does.
    pub fn is_empty(&self) -> bool {
        self.sockets.is_empty()
    }

    /// How many were reset because their peers did not end them in time.
    pub fn were_cut_short(&self) -> u64 {
        self.cut_short
    }

    fn cut_short(&mut self, key: Key) {
        // Usually the peer has ended it long ago.
        if let Some(tcp) = self.sockets.remove(&key) {
            self.cut_short += 1;
            reset(tcp);
        }
    }
}

/// Descriptors that may wait. Each waits as long as a message takes to reach the peer and its FIN
/// takes to come back.
const WAITING_MAX: usize = 1_024;
/// How long a peer may take to end TCP when both sides have said C.
const PATIENCE: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read};
    use std::net::{Shutdown, TcpListener, TcpStream};

    use super::*;

    const START: Instant = Instant(1);

    fn key(index: usize) -> Key {
        Key { index: u32::try_from(index).unwrap(), generation: 0 }
    }

    /// Both ends of a TCP connection.
    fn pair() -> (OwnedFd, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near.into(), listener.accept().unwrap().0)
    }

    /// A connection that the peer ends in time ends in good order. One that it does not end,
    /// because its program hangs or its packets are lost, must not keep a descriptor for ever.
    #[test]
    fn the_peer_has_its_time_and_no_more() {
        let mut farewells = Farewells::default();
        let [(first, mut polite), (second, mut silent)] = [pair(), pair()];
        farewells.wait(START, key(1), first);
        farewells.wait(START, key(2), second);
        polite.shutdown(Shutdown::Write).unwrap();
        farewells.ended(key(1));
        assert_eq!(polite.read(&mut [0]).unwrap(), 0);
        farewells.expire(START + PATIENCE / 2);
        assert_eq!(farewells.len(), 1);
        farewells.expire(START + PATIENCE);
        assert_eq!(silent.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
        assert!(farewells.is_empty());
        assert_eq!(farewells.were_cut_short(), 1);
    }

    /// Peers that do not end TCP must not take the descriptors that new connections need.
    #[test]
    fn no_more_wait_than_descriptors_can_be_spared() {
        let mut farewells = Farewells::default();
        let (oldest, mut peer) = pair();
        let (spare, _kept) = pair();
        farewells.wait(START, key(0), oldest);
        for index in 1..=WAITING_MAX {
            farewells.wait(START, key(index), spare.try_clone().unwrap());
        }
        assert_eq!((farewells.len(), farewells.were_cut_short()), (WAITING_MAX, 1));
        assert_eq!(peer.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    }
}
