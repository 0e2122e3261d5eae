//! A move from one link to another.

use crate::names::{KeyChange, LinkId, PeerElement};

/// From which link to which, and the rkeys and addresses of the peer's RMBs on both.
#[derive(Debug)]
pub(crate) struct Route {
    pub(crate) from: LinkId,
    pub(crate) to: LinkId,
    /// The poller that has the link `to`.
    pub(crate) to_poller: u8,
    keys: Vec<KeyChange>,
}

impl Route {
    pub(crate) fn new(from: LinkId, to: LinkId, to_poller: u8, keys: Vec<KeyChange>) -> Self {
        Self { from, to, to_poller, keys }
    }

    /// The peer's element by its rkey and address on the new link, if its RMB is known there.
    pub(crate) fn translate(&self, peer: PeerElement) -> Option<PeerElement> {
        let token = (peer.rkey, peer.rmb_address);
        let key = self.keys.iter().find(|key| (key.old, key.old_base) == token)?;
        let address = peer.address.wrapping_sub(key.old_base).wrapping_add(key.new_base);
        Some(PeerElement { rkey: key.new, address, rmb_address: key.new_base, ..peer })
    }
}

#[cfg(test)]
mod tests {
    use smcr_proto::ring::Ring;
    use smcr_proto::{AlertToken, Rkey};

    use super::*;

    fn change(old: u32, old_base: u64, new: u32, new_base: u64) -> KeyChange {
        KeyChange { old: Rkey(old), old_base, new: Rkey(new), new_base }
    }

    /// An element keeps its place in its RMB, whatever key and address the RMB has on the new
    /// link. A mistake here writes one connection's bytes into another's element.
    // RFC 7609 2.3 #3: move connections of a failed link
    #[test]
    fn an_element_is_found_in_the_same_rmb() {
        let keys = vec![change(1, 1_000, 11, 50_000), change(2, 1_000, 12, 90_000)];
        let route = Route::new(LinkId(1), LinkId(2), 0, keys);
        let (ring, token) = (Ring::new(16_384), AlertToken(5));
        let (rkey, address, rmb_address) = (Rkey(2), 1_300, 1_000);
        let peer = PeerElement { rkey, address, rmb_address, ring, token };
        let moved = route.translate(peer).unwrap();
        assert_eq!((moved.rkey, moved.address, moved.token), (Rkey(12), 90_300, token));
        assert_eq!(moved.rmb_address, 90_000);
        assert!(route.translate(PeerElement { rkey: Rkey(3), ..peer }).is_none());
        assert!(route.translate(PeerElement { rmb_address: 999, ..peer }).is_none());
    }

    /// A peer has used an rkey again without deleting it, so the route has the RMB that it opened
    /// before, too. That one begins closer before the element, which is none of its own: the
    /// connection wrote into it, wherever it is on the new link.
    // RFC 7609 2.1 #1: tell RKey and address together
    #[test]
    fn an_rmb_is_told_from_an_earlier_one_with_its_key() {
        let keys = vec![change(1, 9_000, 11, 70_000), change(1, 1_000, 12, 90_000)];
        let route = Route::new(LinkId(1), LinkId(2), 0, keys);
        let (ring, token) = (Ring::new(16_384), AlertToken(5));
        let (rkey, address, rmb_address) = (Rkey(1), 9_192, 1_000);
        let moved = route.translate(PeerElement { rkey, address, rmb_address, ring, token });
        let moved = moved.expect("its RMB is known");
        assert_eq!((moved.rkey, moved.address, moved.rmb_address), (Rkey(12), 98_192, 90_000));
    }
}
