//! What both threads call the same: links, groups, connections, and what is told of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use smcr_proto::ring::Ring;
use smcr_proto::{AlertToken, Instant, Rkey};
use smcr_rnic::Message;

/// A link, as both threads call it. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u32);

/// A link group, as both threads call it. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub u32);

/// A connection: a slot, unique in the process, and a number that the slot never has twice in a
/// row. A connection keeps its name when it moves from poller to poller.
///
/// The alert token that peers put in CDC messages is the same thing in one number, so that a late
/// message does not reach the next user of the slot. The control thread draws generations at
/// random: from its own tokens a peer cannot tell those of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId {
    /// Index in the table of whichever poller has it.
    pub slot: u16,
    /// Drawn at random for each use of the slot; never 0, so that no token is.
    pub generation: u16,
}

impl ConnectionId {
    /// The token for peers.
    pub fn token(self) -> AlertToken {
        // RFC 7609 1.2 #1: alert token names one connection
        AlertToken(u32::from(self.generation) << 16 | u32::from(self.slot))
    }

    /// The connection that a token names.
    pub fn from_token(token: AlertToken) -> Self {
        let [high, low] = [token.0 >> 16, token.0 & 0xffff]
            .map(|half| u16::try_from(half).expect("half of a word"));
        Self { slot: low, generation: high }
    }
}

/// How an RMB of the peer is addressed through one link and through another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyChange {
    /// Its key on the link that is left.
    pub old: Rkey,
    /// Its address there.
    pub old_base: u64,
    /// Its key on the link that is taken.
    pub new: Rkey,
    /// Its address there.
    pub new_base: u64,
}

/// The element of the peer that we write.
#[derive(Clone, Copy, Debug)]
pub struct PeerElement {
    /// Opens it.
    pub rkey: Rkey,
    /// Its first byte (of the element, not of the RMB).
    pub address: u64,
    /// The first byte of its RMB. Several RMBs may have one key, so both together name the RMB.
    pub rmb_address: u64,
    /// Its shape: how long it is, and whether an eye catcher stands at its beginning.
    pub ring: Ring,
    /// What the peer wants to see in our CDC messages.
    pub token: AlertToken,
}

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Both sides finished and said so.
    Graceful,
    /// One of the two applications, or its host, reset it.
    ResetByApplication,
    /// The SMC-R peer reset it.
    ResetByPeer,
    /// Its link broke and there was no other.
    LinkLost,
    /// What its NIC had acknowledged to the peer never came: found when the peer changed the link.
    DataLost,
    /// The SMC-R peer broke the protocol.
    PeerMisbehaved,
    /// The peer did not answer our close in time.
    Stalled,
    /// The control thread asked for it.
    Aborted,
}

/// What a connection has carried, as its near socket saw it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Read from its near socket.
    pub bytes_in: u64,
    /// Written to its near socket.
    pub bytes_out: u64,
    /// When the first of those were read. The time is that of the poller's turn.
    pub first_in: Option<Instant>,
    /// When the first of those were written.
    pub first_out: Option<Instant>,
    /// Who was the first to end its direction, or has reset the connection; none if nobody has, or
    /// both were found at once.
    pub ended_by: Option<End>,
}

/// One of the two ends of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The application behind the near socket.
    Near,
    /// The SMC-R peer, or whoever is behind the far socket.
    Far,
}

impl Tally {
    /// Adds bytes that were read; there may be none.
    pub(crate) fn count_in(&mut self, now: Instant, bytes: u64) {
        self.bytes_in += bytes;
        if bytes > 0 {
            self.first_in.get_or_insert(now);
        }
    }

    /// Adds bytes that were written; there may be none.
    pub(crate) fn count_out(&mut self, now: Instant, bytes: u64) {
        self.bytes_out += bytes;
        if bytes > 0 {
            self.first_out.get_or_insert(now);
        }
    }

    /// Notes that bytes were read or written, if they were, that are not counted here.
    pub(crate) fn note_first(&mut self, now: Instant, read: bool, written: bool) {
        if read {
            self.first_in.get_or_insert(now);
        }
        if written {
            self.first_out.get_or_insert(now);
        }
    }

    /// Notes which ends have ended their direction so far.
    pub(crate) fn note_ends(&mut self, near: bool, far: bool) {
        if self.ended_by.is_none() {
            self.ended_by = only(near, far);
        }
    }

    /// Notes which sockets were reset. Who resets ends it, whoever has ended a direction before.
    pub(crate) fn note_reset(&mut self, near: bool, far: bool) {
        self.ended_by = only(near, far);
    }
}

/// The one end of which something is true.
fn only(near: bool, far: bool) -> Option<End> {
    match (near, far) {
        (true, false) => Some(End::Near),
        (false, true) => Some(End::Far),
        (false, false) | (true, true) => None,
    }
}

/// When a link last brought anything, and when something last arrived. Written by the poller, read
/// by the control thread, so that keepalive costs the data path one store. The control thread
/// writes when an answer to TEST LINK has come; then the time of a proof may be as much too early
/// as that thread is behind.
#[derive(Debug, Default)]
pub struct Activity {
    heard: AtomicU64,
    proven: AtomicU64,
}

impl Activity {
    /// Notes that something came.
    pub fn note(&self, now: Instant) {
        self.heard.store(now.0, Ordering::Relaxed);
    }

    /// When something last came.
    pub fn last(&self) -> Instant {
        Instant(self.heard.load(Ordering::Relaxed))
    }

    /// Notes that the peer's NIC has acknowledged a message, or that the peer has answered one: the
    /// link carries in both directions.
    pub fn prove(&self, now: Instant) {
        self.proven.store(now.0, Ordering::Relaxed);
    }

    /// When it last did.
    pub fn proven(&self) -> Instant {
        Instant(self.proven.load(Ordering::Relaxed))
    }
}

/// Held by every reported LLC message until the control thread takes it. A link keeps one, too: the
/// number of its clones is the number of messages that wait.
#[derive(Clone, Debug, Default)]
pub struct Unheard(Arc<()>);

impl Unheard {
    /// How many others stand for messages of the same link.
    pub(crate) fn others(&self) -> usize {
        Arc::strong_count(&self.0) - 1
    }
}

/// An LLC message, as it travels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LlcBytes {
    /// As most are.
    Short(Message),
    /// A longer one of SMC-Rv2. Rare, so it may cost an allocation.
    Long(Box<[u8]>),
}

impl LlcBytes {
    /// The message with these bytes; none is shorter than [`MESSAGE_LEN`](smcr_rnic::MESSAGE_LEN).
    pub fn new(bytes: &[u8]) -> Self {
        bytes.try_into().map_or_else(|_| Self::Long(bytes.into()), Self::Short)
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Short(message) => message,
            Self::Long(message) => message,
        }
    }
}

impl From<Message> for LlcBytes {
    fn from(message: Message) -> Self {
        Self::Short(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_bytes_have_a_time() {
        let mut tally = Tally::default();
        tally.count_in(Instant(1), 0);
        assert_eq!(tally, Tally::default());
        for at in [2, 3] {
            tally.count_in(Instant(at), 10);
            tally.count_out(Instant(at + 5), 1);
        }
        let (first_in, first_out) = (Some(Instant(2)), Some(Instant(7)));
        let expected = Tally { bytes_in: 20, bytes_out: 2, first_in, first_out, ended_by: None };
        assert_eq!(tally, expected);
    }

    #[test]
    fn who_ends_first_is_remembered_unless_the_other_resets() {
        let mut tally = Tally::default();
        for (near, far) in [(false, false), (false, true), (true, true)] {
            tally.note_ends(near, far);
        }
        assert_eq!(tally.ended_by, Some(End::Far));
        tally.note_reset(true, false);
        assert_eq!(tally.ended_by, Some(End::Near));
    }

    #[test]
    fn a_token_names_its_connection() {
        let connection = ConnectionId { slot: 0x1234, generation: 0xfedc };
        assert_eq!(connection.token(), AlertToken(0xfedc_1234));
        assert_eq!(ConnectionId::from_token(connection.token()), connection);
    }
}
