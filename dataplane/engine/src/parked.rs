//! CDC messages that wait: for their connection, or for messages that must be taken in before them.

use smcr_proto::connection::{Connection, is_before};
use smcr_proto::wire::cdc::Cdc;

use crate::limits::{PARKED_MAX, VALIDATIONS_WAITING_MAX};
use crate::names::Ending;

/// CDC messages about one connection, oldest first, and never more than a few.
///
/// Each message says everything that the ones before it said, so that of many the newest is enough.
/// The exception is failover validation: it asks about the messages before it, and nothing replaces
/// it. A peer that sends too many of them loses the connection.
#[derive(Debug, Default)]
pub(crate) struct Parked {
    messages: Vec<Waiting>,
    validations: usize,
    /// Why the connection must be reset as soon as somebody has it.
    doom: Option<Ending>,
}

/// A message that waits, or has waited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The message.
    pub(crate) message: Cdc,
    /// It stands in the place of the messages from this number on, which are missing now. The peer
    /// has nothing to do with that.
    pub(crate) replaces: Option<u16>,
}

impl Waiting {
    /// This message, in the place of `before`, too, or the other way round if that is the newer
    /// one: it came on another link. Where others are missing in between, or came another way, the
    /// newer one does not speak for those before them: they may be lost.
    ///
    /// P and U are about the bytes that `before` brought. Unless others follow them, this one says
    /// it in its place: Linux says it once.
    pub(crate) fn in_place_of(self, before: Self) -> Self {
        // Of two numbers that are half of all apart, each is before the other.
        let (mut newer, older) = match is_before(self.message.sequence, before.message.sequence) {
            true => (before, self),
            false => (self, before),
        };
        if newer.message.producer == older.message.producer {
            newer.message.urgent_pending |= older.message.urgent_pending;
            newer.message.urgent_present |= older.message.urgent_present;
        }
        let is_next = older.message.sequence.wrapping_add(1) == newer.first();
        Self { replaces: is_next.then(|| older.first()).or(newer.replaces), ..newer }
    }

    /// The number of the first message that it stands for.
    fn first(&self) -> u16 {
        self.replaces.unwrap_or(self.message.sequence)
    }

    /// Whether what is missing before it is missing because we have dropped it.
    pub(crate) fn fills_gap_of<R>(&self, connection: &Connection<R>) -> bool {
        self.replaces.is_some_and(|first| connection.follows(first))
    }
}

impl From<Cdc> for Waiting {
    fn from(message: Cdc) -> Self {
        Self { message, replaces: None }
    }
}

impl Parked {
    /// Parks a message behind all others. Returns whether all of them are still there.
    pub(crate) fn push(&mut self, waiting: Waiting) -> bool {
        let validates = waiting.message.failover_validation;
        if validates && self.validations >= VALIDATIONS_WAITING_MAX {
            self.doom(Ending::PeerMisbehaved);
            return false;
        }
        let is_full = self.messages.len() >= PARKED_MAX;
        if let Some(last) = self.messages.last_mut()
            && is_full
            && !validates
            && !last.message.failover_validation
        {
            *last = waiting.in_place_of(*last);
            return false;
        }
        self.validations += usize::from(validates);
        self.messages.push(waiting);
        // Full, then one validation before all others, and one message behind each of the others.
        assert!(self.messages.len() <= PARKED_MAX + 1 + 2 * VALIDATIONS_WAITING_MAX);
        true
    }

    /// Parks a failover validation before all others: it explains what they wait for.
    pub(crate) fn push_first(&mut self, validation: Cdc) {
        assert!(validation.failover_validation);
        assert!(self.first().is_some_and(|first| !first.failover_validation));
        self.validations += 1;
        self.messages.insert(0, validation.into());
    }

    /// The message that has waited longest, or explains what it waits for.
    pub(crate) fn first(&self) -> Option<&Cdc> {
        self.messages.first().map(|waiting| &waiting.message)
    }

    /// Decides that the connection must be reset as soon as somebody has it.
    pub(crate) fn doom(&mut self, ending: Ending) {
        self.doom.get_or_insert(ending);
    }

    /// Why the connection must be reset, if it must.
    pub(crate) fn doomed(&self) -> Option<Ending> {
        self.doom
    }

    /// The messages, in the order in which they must be taken in.
    pub(crate) fn into_messages(self) -> impl Iterator<Item = Waiting> {
        self.messages.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use smcr_proto::wire::cdc::Cursor;

    use super::*;

    fn message(sequence: u16, failover_validation: bool) -> Waiting {
        Cdc { sequence, failover_validation, ..Cdc::default() }.into()
    }

    fn numbers(parked: Parked) -> Vec<(u16, Option<u16>)> {
        parked.into_messages().map(|one| (one.message.sequence, one.replaces)).collect()
    }

    /// The last bytes would never be announced if the newest message were dropped; and a gap that
    /// we made must not be taken for one that the peer must explain.
    // RFC 7609 3.5.2.4 #5: keep data that precedes Confirm
    #[test]
    fn the_newest_message_stays_and_says_what_it_replaces() {
        let mut parked = Parked::default();
        let most = u16::try_from(PARKED_MAX).unwrap();
        assert!((0..most).all(|sequence| parked.push(message(sequence, false))));
        assert!(!parked.push(message(most, false)) && !parked.push(message(most + 1, false)));
        // What it has replaced before, on its way here, it still replaces.
        let mut elsewhere = Parked::default();
        elsewhere.push(Waiting { replaces: Some(8), ..message(9, false) });
        assert_eq!(numbers(elsewhere), [(9, Some(8))]);
        let mut expected: Vec<_> = (0..most - 1).map(|sequence| (sequence, None)).collect();
        expected.push((most + 1, Some(most - 1)));
        assert_eq!(numbers(parked), expected);
    }

    /// Linux says P and U once, with the urgent byte: a message that takes the place of that one,
    /// and brings nothing else, must say it, or an interrupt would be a byte among others.
    // RFC 7609 4.7.5 #3: U locates the urgent byte
    #[test]
    fn an_urgent_byte_is_not_forgotten_with_its_message() {
        let said = |sequence, count, urgent| -> Waiting {
            let producer = Cursor { wrap: 0, count };
            let (urgent_pending, urgent_present) = (urgent, urgent);
            Cdc { sequence, producer, urgent_pending, urgent_present, ..Cdc::default() }.into()
        };
        let both = said(3, 10, false).in_place_of(said(2, 10, true));
        assert_eq!(both, Waiting { replaces: Some(2), ..said(3, 10, true) });
        // Bytes that follow take the mark away.
        let both = said(3, 11, false).in_place_of(said(2, 10, true));
        assert_eq!(both, Waiting { replaces: Some(2), ..said(3, 11, false) });
    }

    /// A peer may choose numbers of which each is before the other. The two changed places without
    /// end, until the stack was full.
    #[test]
    fn numbers_that_are_half_of_all_apart_have_some_order() {
        for (one, other) in [(1, 0x8001), (0x8001, 1), (0, 0x8000)] {
            let both = message(one, false).in_place_of(message(other, false));
            assert!([one, other].contains(&both.message.sequence));
        }
        let mut parked = Parked::default();
        for sequence in (1..=u16::try_from(PARKED_MAX).unwrap()).map(|number| number << 4) {
            parked.push(message(sequence, false));
            parked.push(message(sequence ^ 0x8000, false));
        }
        assert_eq!(parked.messages.len(), PARKED_MAX);
    }

    /// A message that comes late from the old link has less to say than the newest, however full it
    /// is here.
    #[test]
    fn an_older_message_takes_no_newer_ones_place() {
        let mut parked = Parked::default();
        let most = u16::try_from(PARKED_MAX).unwrap();
        for sequence in (1..most).chain([50]) {
            assert!(parked.push(message(sequence, false)));
        }
        assert!(!parked.push(message(45, false)));
        let mut expected: Vec<_> = (1..most).map(|sequence| (sequence, None)).collect();
        expected.push((50, None));
        assert_eq!(parked.messages.len(), PARKED_MAX);
        assert!(!parked.push(message(49, false)));
        expected[PARKED_MAX - 1] = (50, Some(49));
        assert_eq!(numbers(parked), expected);
    }

    /// What a validation asks is asked by no other message: bytes that are lost would be taken for
    /// bytes that have come.
    // RFC 7609 4.6.1 #1: always validate at failover
    #[test]
    fn nothing_replaces_a_validation_and_it_replaces_nothing() {
        let mut parked = Parked::default();
        let most = u16::try_from(PARKED_MAX).unwrap();
        for sequence in 0..most {
            parked.push(message(sequence, false));
        }
        for (number, validates) in [(100, true), (101, false), (102, false)] {
            assert_eq!(parked.push(message(number, validates)), number != 102);
        }
        parked.push_first(message(99, true).message);
        assert_eq!(parked.first(), Some(&message(99, true).message));
        assert_eq!(parked.doomed(), None);
        let all = numbers(parked);
        assert_eq!(all.len(), PARKED_MAX + 3);
        assert_eq!(all[PARKED_MAX..], [(most - 1, None), (100, None), (102, Some(101))]);
    }

    /// A peer that floods us with what must not be replaced would take all memory. It loses its
    /// connection instead.
    #[test]
    fn validations_are_bounded() {
        let mut parked = Parked::default();
        for sequence in 0..u16::try_from(PARKED_MAX).unwrap() {
            parked.push(message(sequence, false));
        }
        for sequence in 100..10_000 {
            parked.push(message(sequence, sequence % 2 == 0));
            if sequence == 130 {
                assert_eq!(parked.doomed(), None, "an honest peer may do that");
                parked.push_first(message(99, true).message);
            }
        }
        assert_eq!(parked.doomed(), Some(Ending::PeerMisbehaved));
        assert!(numbers(parked).len() <= PARKED_MAX + 1 + 2 * VALIDATIONS_WAITING_MAX);
    }
}
