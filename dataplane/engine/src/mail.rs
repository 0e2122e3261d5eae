//! Letters from poller to poller: CDC messages about connections of the other, and connections that
//! change hands.
//!
//! A message follows the one sent before it to the same neighbour, also where that one still waits
//! for room: an outbox is a queue in front of a full queue.

use std::collections::{HashMap, VecDeque};
use std::sync::OnceLock;

use smcr_proto::AlertToken;

use crate::limits::{LETTERS_MAX, VALIDATIONS_WAITING_MAX};
use crate::mailbox::{Receiver, Sender};
use crate::names::{ConnectionId, GroupId};
use crate::owners::{Owner, Owners};
use crate::parked::Waiting;
use crate::sync::Arc;

/// What one poller says to another. `T` is a connection.
#[derive(Debug)]
pub enum Letter<T> {
    /// This connection is yours now.
    Adopt(T),
    /// A CDC message about a connection of yours came by a link of mine.
    Deliver {
        /// The link group of that link.
        group: GroupId,
        /// The message. Its token names the connection.
        message: Waiting,
    },
    /// Reset this connection of yours on both sides.
    Abort {
        /// Which connection.
        connection: ConnectionId,
    },
    /// Close this connection of yours, unless a stream has begun on it.
    CloseKept {
        /// Which connection.
        connection: ConnectionId,
    },
}

/// How pollers reach each other, by index. Whoever joins later is introduced before anybody can
/// have a letter for it.
#[derive(Debug)]
pub struct Neighbours<T>(Box<[OnceLock<Sender<T>>]>);

impl<T> Neighbours<T> {
    /// Nobody, with room for `most`.
    pub fn new(most: usize) -> Self {
        Self(std::iter::repeat_with(OnceLock::new).take(most).collect())
    }

    /// From now on the poller at `index` is reached by `sender`.
    ///
    /// # Panics
    ///
    /// If there is one already, or no room.
    pub fn introduce(&self, index: usize, sender: Sender<T>) {
        assert!(self.0[index].set(sender).is_ok(), "an index belongs to one poller for ever");
    }

    fn at(&self, index: usize) -> &Sender<T> {
        self.0[index].get().expect("who has a connection was introduced before")
    }
}

impl<T> FromIterator<Sender<T>> for Neighbours<T> {
    fn from_iter<I: IntoIterator<Item = Sender<T>>>(all: I) -> Self {
        Self(all.into_iter().map(OnceLock::from).collect())
    }
}

/// The letters of one poller: those that come, and those that it writes to pollers that may be
/// behind.
#[derive(Debug)]
pub(crate) struct Mail<T> {
    letters: Receiver<Letter<T>>,
    /// By index; the one of this poller is never used.
    neighbours: Arc<Neighbours<Letter<T>>>,
    /// What they must be told, by the same index; it ends with the last that was told anything.
    outboxes: Vec<ToNeighbour<T>>,
    /// Which poller has which connection; shared by all.
    owners: Arc<Owners>,
    index: u8,
}

/// What a neighbour must be told.
#[derive(Debug)]
struct ToNeighbour<T> {
    waiting: VecDeque<Letter<T>>,
    /// How many have left `waiting`: the place of its first, counted from the beginning of time.
    left: u64,
    /// The connections of which messages wait.
    spoken_of: HashMap<AlertToken, Spoken>,
    /// The neighbour has new mail, and may sleep.
    posted: bool,
}

/// What waits of one connection.
#[derive(Debug)]
struct Spoken {
    messages: usize,
    validations: usize,
    /// The place of the last message.
    last: u64,
    /// Its poller will be told to abort it.
    aborted: bool,
}

/// Whom a CDC message is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// A connection of this poller.
    Here,
    /// A connection that this poller will get: it must keep the message.
    Coming,
    /// A connection that this neighbour has or will get.
    At(usize),
    /// A connection of another link group than that of the link: the sender has no say in it.
    Foreign,
    /// No connection: it is over, or never was.
    Unknown,
}

/// The peer has sent more messages about one connection than may wait for its poller, which is
/// behind. The connection is aborted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Flooded;

impl<T> Default for ToNeighbour<T> {
    fn default() -> Self {
        Self { waiting: VecDeque::new(), left: 0, spoken_of: HashMap::new(), posted: false }
    }
}

impl<T> ToNeighbour<T> {
    /// Puts a message behind all others. Of a long queue, it replaces the one before it of the same
    /// connection: each says everything the ones before it said. Failover validations are never
    /// replaced, so there may be a few of one connection and no more. So no queue grows beyond what
    /// connections there are, whatever peers say.
    fn put_message(&mut self, group: GroupId, waiting: Waiting) -> Result<(), Flooded> {
        let message = waiting.message;
        let place = self.left + self.waiting.len() as u64;
        let nothing = Spoken { messages: 0, validations: 0, last: 0, aborted: false };
        let spoken = self.spoken_of.entry(message.token).or_insert(nothing);
        let validates = usize::from(message.failover_validation);
        if self.waiting.len() >= LETTERS_MAX && spoken.messages > 0 {
            let last = usize::try_from(spoken.last - self.left).expect("an index of the queue");
            let Letter::Deliver { message: last, .. } = &mut self.waiting[last] else {
                panic!("what is spoken of a connection is a message");
            };
            if !last.message.failover_validation && !message.failover_validation {
                *last = waiting.in_place_of(*last);
                return Ok(());
            }
            if spoken.validations + validates > VALIDATIONS_WAITING_MAX {
                if !std::mem::replace(&mut spoken.aborted, true) {
                    let connection = ConnectionId::from_token(message.token);
                    self.waiting.push_back(Letter::Abort { connection });
                }
                return Err(Flooded);
            }
        }
        spoken.messages += 1;
        spoken.validations += validates;
        spoken.last = place;
        self.waiting.push_back(Letter::Deliver { group, message: waiting });
        Ok(())
    }

    /// What has waited longest.
    fn pop(&mut self) -> Option<Letter<T>> {
        let letter = self.waiting.pop_front()?;
        self.left += 1;
        if let Letter::Deliver { message: Waiting { message, .. }, .. } = &letter {
            let spoken = self.spoken_of.get_mut(&message.token).expect("it was counted");
            spoken.messages -= 1;
            spoken.validations -= usize::from(message.failover_validation);
            if spoken.messages == 0 {
                self.spoken_of.remove(&message.token);
            }
        }
        Some(letter)
    }

    /// Puts back what was popped last: there was no room for it.
    fn put_back(&mut self, letter: Letter<T>) {
        self.left -= 1;
        if let Letter::Deliver { message: Waiting { message, .. }, .. } = &letter {
            let nothing = Spoken { messages: 0, validations: 0, last: self.left, aborted: false };
            let spoken = self.spoken_of.entry(message.token).or_insert(nothing);
            spoken.messages += 1;
            spoken.validations += usize::from(message.failover_validation);
        }
        self.waiting.push_front(letter);
    }
}

impl<T> Mail<T> {
    pub(crate) fn new(
        letters: Receiver<Letter<T>>,
        neighbours: Arc<Neighbours<Letter<T>>>,
        owners: Arc<Owners>,
        index: u8,
    ) -> Self {
        Self { letters, neighbours, outboxes: Vec::new(), owners, index }
    }

    /// Has an outbox for this neighbour.
    fn write_to(&mut self, neighbour: usize) {
        if neighbour >= self.outboxes.len() {
            self.outboxes.resize_with(neighbour + 1, ToNeighbour::default);
        }
    }

    /// The oldest letter to this poller.
    pub(crate) fn receive(&mut self) -> Option<Letter<T>> {
        self.letters.receive()
    }

    /// Whether there are letters to this poller.
    pub(crate) fn has_come(&self) -> bool {
        !self.letters.is_empty()
    }

    /// Whether the poller with this index is the one that reads and writes these letters.
    pub(crate) fn is_own(&self, index: u8) -> bool {
        index == self.index
    }

    /// Where `id` is, for a link of `group`, if it is not in the table of this poller.
    pub(crate) fn place_of(&self, id: ConnectionId, group: GroupId) -> Place {
        match self.owner_of(id) {
            None => Place::Unknown,
            Some(owner) if owner.group != group => Place::Foreign,
            Some(owner) if self.is_own(owner.poller) => Place::Coming,
            Some(owner) => Place::At(owner.poller.into()),
        }
    }

    /// Who has `id`, or is the next to get it; `None` if it is over.
    pub(crate) fn owner_of(&self, id: ConnectionId) -> Option<Owner> {
        self.owners.of(id)
    }

    /// A connection of this poller is over.
    pub(crate) fn disown(&self, id: ConnectionId) {
        self.owners.clear(id);
    }

    /// Gives a connection of this poller to a neighbour.
    pub(crate) fn hand_over(&mut self, id: ConnectionId, group: GroupId, to: u8, connection: T) {
        // First: the neighbour may have passed the connection on before this thread runs again.
        self.owners.set(id, group, to);
        self.send(to.into(), Letter::Adopt(connection));
    }

    /// Passes a message on to the poller that has its connection.
    pub(crate) fn pass_on(
        &mut self,
        neighbour: usize,
        group: GroupId,
        message: Waiting,
    ) -> Result<(), Flooded> {
        self.write_to(neighbour);
        let outbox = &mut self.outboxes[neighbour];
        if outbox.waiting.is_empty() {
            let letter = Letter::Deliver { group, message };
            if self.neighbours.at(neighbour).push(letter).is_ok() {
                outbox.posted = true;
                return Ok(());
            }
        }
        let passed = outbox.put_message(group, message);
        self.post_to(neighbour);
        passed
    }

    /// Tells a neighbour, as soon as it has room.
    pub(crate) fn send(&mut self, neighbour: usize, letter: Letter<T>) {
        self.write_to(neighbour);
        self.outboxes[neighbour].waiting.push_back(letter);
        self.post_to(neighbour);
    }

    /// Whether something waits for a neighbour to have room.
    pub(crate) fn waits(&self) -> bool {
        self.outboxes.iter().any(|outbox| !outbox.waiting.is_empty())
    }

    /// Posts what waits, and wakes whoever has new mail. Returns whether anything moved.
    pub(crate) fn post(&mut self) -> bool {
        let mut moved = false;
        for neighbour in 0..self.outboxes.len() {
            moved |= self.post_to(neighbour);
            if std::mem::take(&mut self.outboxes[neighbour].posted) {
                self.neighbours.at(neighbour).wake();
            }
        }
        moved
    }

    fn post_to(&mut self, neighbour: usize) -> bool {
        let outbox = &mut self.outboxes[neighbour];
        let mut moved = false;
        while let Some(letter) = outbox.pop() {
            if let Err(letter) = self.neighbours.at(neighbour).push(letter) {
                outbox.put_back(letter);
                break;
            }
            moved = true;
        }
        outbox.posted |= moved;
        moved
    }
}

#[cfg(test)]
mod tests {
    use smcr_proto::wire::cdc::Cdc;

    use super::*;

    const GROUP: GroupId = GroupId(1);

    fn message(token: u32, sequence: u16, failover_validation: bool) -> Waiting {
        let token = AlertToken(token);
        Cdc { token, sequence, failover_validation, ..Cdc::default() }.into()
    }

    /// Sequence numbers of what waits of one connection, validations marked.
    fn waiting(outbox: &ToNeighbour<()>, token: u32) -> Vec<(u16, bool)> {
        let of = |letter: &Letter<()>| {
            let Letter::Deliver { message: Waiting { message, .. }, .. } = letter else {
                return None;
            };
            let here = message.token.0 == token;
            here.then_some((message.sequence, message.failover_validation))
        };
        outbox.waiting.iter().filter_map(of).collect()
    }

    /// A poller that is stuck must not cost its neighbours all memory, nor lose the last word of
    /// any connection: its bytes would never be read.
    #[test]
    fn a_long_queue_keeps_the_newest_message_of_each_connection() {
        let mut outbox = ToNeighbour::<()>::default();
        let most = u32::try_from(LETTERS_MAX).unwrap();
        for token in 0..most {
            outbox.put_message(GROUP, message(token, 1, false)).unwrap();
        }
        for (token, sequence) in [(7, 2), (7, 3), (most, 1)] {
            outbox.put_message(GROUP, message(token, sequence, false)).unwrap();
        }
        assert_eq!(outbox.waiting.len(), LETTERS_MAX + 1);
        assert_eq!(waiting(&outbox, 7), [(3, false)]);
        // What leaves in between does not change which message is the last of its connection.
        let first = outbox.pop().unwrap();
        outbox.put_back(first);
        (0..3).for_each(|_| assert!(outbox.pop().is_some()));
        for token in most + 1..most + 5 {
            outbox.put_message(GROUP, message(token, 1, false)).unwrap();
        }
        outbox.put_message(GROUP, message(7, 4, false)).unwrap();
        assert_eq!(waiting(&outbox, 7), [(4, false)]);
        // Whoever takes it in must not ask the peer for those before it.
        let marked = outbox.waiting.iter().filter_map(|letter| match letter {
            Letter::Deliver { message, .. } => {
                message.replaces.map(|first| (message.message.token, first))
            }
            Letter::Adopt(()) | Letter::Abort { .. } | Letter::CloseKept { .. } => None,
        });
        assert_eq!(marked.collect::<Vec<_>>(), [(AlertToken(7), 1)]);
        while outbox.pop().is_some() {}
        assert!(outbox.spoken_of.is_empty(), "nothing is kept of what has left");
    }

    /// What is lost is asked by one message and would be overwritten by the next: both must come.
    // RFC 7609 4.6.1 #1: always validate at failover
    #[test]
    fn a_validation_is_never_replaced() {
        let mut outbox = ToNeighbour::<()>::default();
        for _ in 0..LETTERS_MAX {
            outbox.put_message(GROUP, message(1, 1, false)).unwrap();
        }
        for (sequence, validates) in [(2, true), (3, false), (4, false)] {
            outbox.put_message(GROUP, message(1, sequence, validates)).unwrap();
        }
        assert_eq!(waiting(&outbox, 1)[LETTERS_MAX..], [(2, true), (4, false)]);
    }

    /// A peer that floods us with messages which must not be replaced, while one of our pollers is
    /// behind, would take all memory. It loses its connection instead, and only that.
    #[test]
    fn what_may_not_be_replaced_is_bounded() {
        let mut outbox = ToNeighbour::<()>::default();
        for token in 0..u32::try_from(LETTERS_MAX).unwrap() {
            outbox.put_message(GROUP, message(token, 1, false)).unwrap();
        }
        let mut refused = 0;
        for round in 0..10_000 {
            for validates in [true, false] {
                let outcome = outbox.put_message(GROUP, message(7, round, validates));
                refused += u64::from(outcome.is_err());
            }
        }
        assert!(refused > 9_000, "{refused}");
        assert!(outbox.waiting.len() < LETTERS_MAX + 3 * VALIDATIONS_WAITING_MAX);
        let aborts = outbox.waiting.iter().filter(|one| matches!(one, Letter::Abort { .. }));
        assert_eq!(aborts.count(), 1);
        assert_eq!(outbox.put_message(GROUP, message(8, 2, true)), Ok(()));
    }
}
