//! Who leaves the door when too many are there.

use std::collections::HashMap;

use smcr_proto::Instant;

use crate::slab::Key;

/// Whoever makes room for a newcomer of the user `uid`: of the user that has most callers, the one
/// that has been silent for longest. None if that would help nobody, because the newcomer's user
/// would have as many, or if all wait for an answer.
///
/// `callers` are those that are there: their users, and when each is given up. That is never for
/// those that wait for an answer.
pub(super) fn displaced(uid: u32, callers: &[(Key, u32, Instant)]) -> Option<Key> {
    let mut counts = HashMap::<u32, usize>::new();
    callers.iter().for_each(|(_, user, _)| *counts.entry(*user).or_default() += 1);
    let own = counts.get(&uid).copied().unwrap_or(0);
    let (busiest, count) = counts.into_iter().max_by_key(|(_, count)| *count)?;
    let is_silent = |one: &&(Key, u32, Instant)| one.1 == busiest && one.2 < Instant(u64::MAX);
    let silent = callers.iter().filter(is_silent);
    let oldest = silent.min_by_key(|(.., until)| *until)?;
    (own + 1 < count).then_some(oldest.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(index: u32) -> Key {
        Key { index, generation: 1 }
    }

    /// One user's silent callers must not keep everybody else's programs from SMC-R.
    #[test]
    fn the_user_with_most_callers_makes_room() {
        let all = [(1, 1000, 9), (2, 1000, u64::MAX), (3, 1000, 5), (4, 1001, 1)];
        let callers = all.map(|(it, uid, until)| (key(it), uid, Instant(until)));
        assert_eq!(displaced(1002, &callers), Some(key(3)));
        assert_eq!(displaced(1001, &callers), Some(key(3)));
        assert_eq!(displaced(1000, &callers), None, "its own");
        let kept = callers.map(|(key, uid, _)| (key, uid, Instant(u64::MAX)));
        assert_eq!(displaced(1002, &kept), None, "they wait for an answer");
        assert_eq!(displaced(1002, &[]), None);
    }
}
