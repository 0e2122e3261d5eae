//! Packet sequence numbers: 24 bits on the wire, compared modulo 2^24.

use smcr_proto::Psn;

/// The bits of a PSN.
pub(super) const PSN_MASK: u32 = 0x00ff_ffff;

/// How a PSN relates to the one that is expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// It was received before: a duplicate.
    Before,
    /// It is the expected one.
    Expected,
    /// A packet before it is missing.
    After,
}

/// The PSN `count` packets after `psn`.
pub(super) fn advance(psn: Psn, count: u64) -> Psn {
    // The sum is masked to 24 bits, so the upper half of the count does not matter.
    #[allow(clippy::cast_possible_truncation, reason = "only the low 24 bits count")]
    let count = count as u32;
    Psn(psn.0.wrapping_add(count) & PSN_MASK)
}

/// How many packets `later` comes after `earlier`: 0 to 2^24 - 1.
pub(super) fn distance(earlier: Psn, later: Psn) -> u32 {
    later.0.wrapping_sub(earlier.0) & PSN_MASK
}

/// How `psn` relates to `expected`: half of the number space is before it, half after.
pub(super) fn order(expected: Psn, psn: Psn) -> Order {
    match distance(expected, psn) {
        0 => Order::Expected,
        1..0x80_0000 => Order::After,
        _ => Order::Before,
    }
}

/// Whether `psn` is so close to `expected` that the peer may have sent it.
///
/// A peer sends what its window allows from the oldest packet on that we have not acknowledged, and
/// the network may repeat or delay packets. So its PSNs are as many before and after the expected
/// one as it has packets in flight.
pub(super) fn is_near(expected: Psn, psn: Psn) -> bool {
    distance(expected, advance(psn, NEAR.into())) < 2 * NEAR
}

/// How far a PSN may be from the expected one. Our requester has half as many packets in flight at
/// most, `rdma_rxe` 129. An attacker who guesses is as near once in 256 times.
pub(super) const NEAR: u32 = 1 << 15;

#[cfg(test)]
mod tests {
    use super::*;

    /// After 16 million packets the PSNs wrap; a stream must not notice.
    #[test]
    fn numbers_wrap() {
        assert_eq!(advance(Psn(0xff_ffff), 1), Psn(0));
        assert_eq!(advance(Psn(5), 1 << 40 | 3), Psn(8));
        assert_eq!(distance(Psn(0xff_fff0), Psn(0x10)), 0x20);
        assert_eq!(order(Psn(0xff_ffff), Psn(0)), Order::After);
        assert_eq!(order(Psn(0), Psn(0xff_ffff)), Order::Before);
        assert_eq!(order(Psn(0), Psn(0x7f_ffff)), Order::After);
        assert_eq!(order(Psn(0), Psn(0x80_0000)), Order::Before);
        assert_eq!(order(Psn(7), Psn(7)), Order::Expected);
    }

    /// What a peer has in flight is near, also where the PSNs wrap.
    #[test]
    fn near_is_symmetric_and_wraps() {
        let near: u64 = NEAR.into();
        let behind = |psn, count: u64| advance(psn, (1 << 24) - count);
        for psn in [Psn(0), Psn(5), Psn(0x80_0000), Psn(PSN_MASK)] {
            for good in [psn, advance(psn, near - 1), behind(psn, near)] {
                assert!(is_near(psn, good), "{psn:?} {good:?}");
            }
            for bad in [advance(psn, near), behind(psn, near + 1), advance(psn, 1 << 23)] {
                assert!(!is_near(psn, bad), "{psn:?} {bad:?}");
            }
        }
        let near = (0..=PSN_MASK).filter(|psn| is_near(Psn(77), Psn(*psn))).count();
        assert_eq!(near, (2 * NEAR) as usize, "one of 256");
    }
}
