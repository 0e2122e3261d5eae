//! What the gateway has said lately, so that it need not be asked again: peers that stay TCP, and
//! that there is no gateway at all.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// So many peers are remembered at most.
const PEERS_MAX: usize = 256;

/// What is remembered. All times are in seconds.
pub(crate) struct Recent {
    /// Of each peer a part of its hash, and until when it is left alone.
    peers: [AtomicU64; PEERS_MAX],
    /// Until when nobody looks for a gateway.
    absent_until: AtomicU32,
}

/// Of this process.
pub(crate) static RECENT: Recent = Recent::new();

impl Recent {
    const fn new() -> Self {
        Self { peers: [const { AtomicU64::new(0) }; PEERS_MAX], absent_until: AtomicU32::new(0) }
    }

    /// Whether this peer stays TCP without a question.
    pub(crate) fn is_left(&self, peer: SocketAddr, now: u32) -> bool {
        let (index, tag) = place(peer);
        let slot = self.peers[index].load(Relaxed);
        slot >> 32 == tag && now < until(slot)
    }

    /// Leaves this peer alone.
    pub(crate) fn leave(&self, peer: SocketAddr, until: u32) {
        let (index, tag) = place(peer);
        self.peers[index].store(tag << 32 | u64::from(until), Relaxed);
    }

    /// Whether a gateway was missed a moment ago.
    pub(crate) fn is_absent(&self, now: u32) -> bool {
        now < self.absent_until.load(Relaxed)
    }

    /// There is no gateway.
    pub(crate) fn missed(&self, now: u32, seconds: u32) {
        self.absent_until.store(now.saturating_add(seconds), Relaxed);
    }
}

/// The lower half of a slot.
#[expect(clippy::cast_possible_truncation, reason = "the lower half is meant")]
fn until(slot: u64) -> u32 {
    slot as u32
}

/// Where a peer is remembered, and what tells it from others there. Two peers may be taken for one:
/// then one stays TCP for a while without need.
fn place(peer: SocketAddr) -> (usize, u64) {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let ip = match peer.ip() {
        std::net::IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        std::net::IpAddr::V6(v6) => v6,
    };
    let bytes = ip.octets().into_iter().chain(peer.port().to_be_bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325, step);
    let index = usize::try_from(hash % PEERS_MAX as u64).unwrap_or(0);
    (index, hash >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_left_alone_for_a_while() {
        let recent = Recent::new();
        let peer = "10.8.0.2:80".parse().unwrap();
        assert!(!recent.is_left(peer, 0));
        recent.leave(peer, 100);
        assert!(recent.is_left(peer, 99) && !recent.is_left(peer, 100));
        assert!(recent.is_left("[::ffff:10.8.0.2]:80".parse().unwrap(), 99), "the same peer");
        for other in ["10.8.0.2:81", "10.8.0.3:80", "[fd00::1]:80"] {
            assert!(!recent.is_left(other.parse().unwrap(), 99), "{other}");
        }
    }

    #[test]
    fn an_absent_gateway_is_looked_for_again() {
        let recent = Recent::new();
        assert!(!recent.is_absent(5));
        recent.missed(5, 1);
        assert!(recent.is_absent(5) && !recent.is_absent(6));
    }
}
