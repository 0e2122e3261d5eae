//! The door to a network: reliable-connected queue pairs, whatever carries them.
//!
//! Two traits, because two threads. [`Rnic`] is for the control thread: it may sleep and fail.
//! [`Fabric`] is for one poller: it may do neither. Between them a queue pair moves by value, so it
//! has one user at a time. This crate speaks no SMC: it moves bytes into registered memory and
//! messages of 44 bytes; where both ends have agreed on it, now and then a longer one.
//!
//! Backends: `sim`, a network of NICs in one thread on a virtual clock, and `roce`, RoCEv2 in
//! software over UDP sockets. Around any of them: `fault_injector`.

mod absent;
pub mod dice;
pub mod fault_injector;
pub mod roce;
pub mod sim;

use std::os::fd::BorrowedFd;

use smcr_memory::{Lease, Region};
pub use smcr_proto::QpAddress;
use smcr_proto::{Gid, Instant, MacAddress, Mtu, Qpn, Rkey};

/// Length in bytes of the messages that queue pairs carry.
pub const MESSAGE_LEN: usize = 44;

/// A message, by value: it is copied into the NIC's own memory when it is posted.
pub type Message = [u8; MESSAGE_LEN];

/// Length in bytes of the longest message of a queue pair that takes [`Messages::Long`].
pub const LONG_MESSAGE_MAX: usize = 8192;

/// Which messages a queue pair takes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Messages {
    /// Those of [`MESSAGE_LEN`] bytes; a longer one breaks it.
    Short,
    /// Those, and longer ones up to [`LONG_MESSAGE_MAX`]: each of them is a packet or more, and
    /// costs an allocation.
    Long,
}

/// The port of an RNIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its address.
    pub gid: Gid,
    /// Its Ethernet address.
    pub mac: MacAddress,
    /// The largest path MTU it can use.
    pub mtu: Mtu,
}

/// A protection domain: keys registered in one open nothing to queue pairs of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Domain(pub u32);

/// A region that the peers of one domain may write, until it is deregistered.
#[must_use = "registered memory stays open to writes until `deregister`"]
#[derive(Debug)]
pub struct Registration {
    /// The domain whose queue pairs the key opens the region to.
    pub domain: Domain,
    /// The key.
    pub rkey: Rkey,
    /// The address of the first byte, as peers must name it.
    pub address: u64,
}

/// The NIC or the host has no room for another object. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exhausted;

/// A NIC as the control thread sees it: slow, fallible, rarely used.
pub trait Rnic {
    /// A queue pair on its way to RTS.
    type Opening: Opening;

    /// The port.
    fn port(&self) -> Port;

    /// Whether packets to the peer's port have a way to go now. Sends nothing, so nobody has
    /// promised that they arrive.
    fn has_route(&self, peer: Gid) -> bool;

    /// Bytes of payload that packets of one of its queue pairs have now, as the path allows; `None`
    /// if that is not known.
    fn payload(&self, _: Qpn) -> Option<u32> {
        None
    }

    /// Opens a protection domain.
    ///
    /// # Errors
    ///
    /// [`Exhausted`], with nothing changed.
    fn open_domain(&mut self) -> Result<Domain, Exhausted>;

    /// Closes a domain.
    ///
    /// # Panics
    ///
    /// If something is still registered in it: our bug.
    fn close_domain(&mut self, domain: Domain);

    /// Opens `region` to writes by the peers of `domain`. May take milliseconds.
    ///
    /// When this returns, writes that name the key are placed: whoever is told the key afterwards
    /// can use it.
    ///
    /// # Errors
    ///
    /// [`Exhausted`], with nothing changed.
    fn register(&mut self, domain: Domain, region: &Region) -> Result<Registration, Exhausted>;

    /// Closes a region. Writes that name its key are refused from some time soon; the memory stays
    /// mapped until then.
    fn deregister(&mut self, registration: Registration);

    /// Creates a queue pair that takes in short messages, so that its address can be told to the
    /// peer.
    ///
    /// # Errors
    ///
    /// [`Exhausted`], with nothing changed.
    fn open(&mut self, domain: Domain) -> Result<Self::Opening, Exhausted> {
        self.open_for(domain, Messages::Short)
    }

    /// As [`Self::open`], with a choice of the messages.
    ///
    /// # Errors
    ///
    /// [`Exhausted`], with nothing changed.
    fn open_for(&mut self, domain: Domain, messages: Messages) -> Result<Self::Opening, Exhausted>;
}

/// A queue pair that knows its own address but not yet its peer's. It cannot be posted to.
pub trait Opening {
    /// The queue pair, ready.
    type Qp: Send;

    /// What the peer must be told.
    fn address(&self) -> QpAddress;

    /// Asks the peer for packets no larger than what the host knows to be carried between the two.
    /// This changes what the peer must be told.
    fn fit_path_to(&mut self, _peer: Gid) {}

    /// Brings the queue pair to RTS. The result is moved to its poller, and comes back only to be
    /// destroyed.
    ///
    /// # Errors
    ///
    /// [`Exhausted`] when the peer's address cannot be reached; the queue pair is gone.
    fn connect(self, peer: QpAddress) -> Result<Self::Qp, Exhausted>;
}

/// Names a queue pair among those that one fabric has adopted. Never reused by that fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QpId(pub u32);

/// The caller's own mark on a request; it comes back with the completion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tag(pub u64);

/// One request to a queue pair.
#[derive(Debug)]
pub enum Work {
    /// Write the leased bytes to `address` in the peer's memory. The peer is not told: there is no
    /// immediate data, and no completion on its side.
    // RFC 7609 4.7.1-1
    Write {
        /// What to write. Comes back with the completion.
        lease: Lease,
        /// Opens the peer's region.
        rkey: Rkey,
        /// Where, as the peer named it.
        address: u64,
        /// The caller's mark.
        tag: Tag,
    },
    /// Send a message, with a solicited event at the peer.
    Send {
        /// The bytes.
        message: Message,
        /// The caller's mark.
        tag: Tag,
    },
    /// Send a longer message, to a queue pair that was opened for such; to any other it is an
    /// offence.
    SendLong {
        /// The bytes: more than [`MESSAGE_LEN`], at most [`LONG_MESSAGE_MAX`].
        message: Box<[u8]>,
        /// The caller's mark.
        tag: Tag,
    },
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The peer's NIC acknowledged it. The peer's host may still lose it: see promise 3.
    Done,
    /// The queue pair broke or was released first; the peer may or may not have it.
    Flushed,
}

/// Why a queue pair broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The peer's NIC did not acknowledge for too long.
    RetriesExceeded,
    /// The peer's NIC refused a request of ours: key, range or form.
    RemoteError,
    /// The peer sent something it must not; its request was refused.
    PeerMisbehaved,
    /// The port is gone, or its user said so.
    PortDown,
}

/// What a fabric has to say.
#[derive(Debug)]
pub enum Completion {
    /// A write ended, and its lease is home.
    Wrote {
        /// The queue pair.
        qp: QpId,
        /// What was lent.
        lease: Lease,
        /// The caller's mark.
        tag: Tag,
        /// How it ended.
        status: Status,
    },
    /// A send ended.
    Sent {
        /// The queue pair.
        qp: QpId,
        /// The caller's mark.
        tag: Tag,
        /// How it ended.
        status: Status,
    },
    /// A message came in.
    Received {
        /// The queue pair.
        qp: QpId,
        /// The bytes.
        message: Message,
    },
    /// A longer message came in.
    ReceivedLong {
        /// The queue pair.
        qp: QpId,
        /// The bytes.
        message: Box<[u8]>,
    },
    /// The queue pair will carry nothing any more. Comes once, before the flushed completions.
    Broke {
        /// The queue pair.
        qp: QpId,
        /// Why.
        cause: Cause,
    },
}

/// The same NIC as one polling thread sees it: a completion queue, and the queue pairs on it.
///
/// No method blocks, and none allocates once its tables are warm, but for long messages. Every
/// backend keeps these promises, and the conformance suite holds every backend to them:
///
/// 1. **Order.** Work on one queue pair completes in posting order.
/// 2. **Visibility.** When `poll` returns a received message, every write the peer posted before
///    it on that queue pair can be read by this thread. Before that, none may be assumed.
/// 3. **Exactly once.** Each posted request completes once, done or flushed. Done means that the
///    peer's NIC has it: a message that completed as done is received once, unless the peer's end
///    breaks or is released first; then the last of them, and the bytes they announce, may never
///    reach the peer's host (RFC 7609, 4.6.1). A flushed message is received at most once.
/// 4. **Containment.** A write outside a registered region, with a wrong key, or with a key of
///    another domain changes no byte and breaks the queue pair on both ends, and nothing else.
///    A backend may carry a long write as several; those before the refused one are then placed.
///    A message that is longer than the receiver takes is refused in the same way.
/// 5. **Fail stop.** After `Broke`, what was posted and what is posted later completes as flushed,
///    in order, and nothing more is received on that queue pair.
/// 6. **No stall.** While the network delivers now and then, everything posted completes, provided
///    that `poll` and `transmit` are called whenever `event_descriptor` is readable or the
///    deadline of `prepare_sleep` has passed.
pub trait Fabric {
    /// A connected queue pair, as it travels between threads.
    type Qp: Send;

    /// Takes over a queue pair. From now on it receives.
    fn adopt(&mut self, now: Instant, qp: Self::Qp) -> QpId;

    /// How many more requests `qp` takes.
    fn room(&self, qp: QpId) -> usize;

    /// Empties `work` into the send queue of `qp`. Nothing leaves before `transmit`.
    ///
    /// Posting cannot fail: room is the caller's to budget, and a broken queue pair answers every
    /// request through `poll`, flushed. One path for errors, not two.
    ///
    /// # Panics
    ///
    /// If `work` exceeds `room`, or `qp` is not adopted.
    fn post(&mut self, qp: QpId, work: &mut Vec<Work>);

    /// Takes in what the network brought, and appends completions to `out`, as many as fit without
    /// growing it. Work is bounded; call it once a turn.
    fn poll(&mut self, now: Instant, out: &mut Vec<Completion>);

    /// Sends what was posted, what timed out, and the acknowledgements that can travel along or
    /// may not wait longer. Call it once at the end of a turn.
    fn transmit(&mut self, now: Instant);

    /// Says how long the caller may sleep on `event_descriptor`: until the instant returned, or
    /// without limit. Sends all acknowledgements that were held back. An instant that is not later
    /// than `now` means that there is work already.
    fn prepare_sleep(&mut self, now: Instant) -> Option<Instant>;

    /// Readable while `poll` would find something. Backends on a virtual clock have none.
    fn event_descriptor(&self) -> Option<BorrowedFd<'_>>;

    /// Breaks a queue pair, as if its port had gone down: its user knows from elsewhere that it
    /// carries nothing, and cannot wait until retries are exceeded. Unless it is broken already,
    /// [`Completion::Broke`] follows, with [`Cause::PortDown`]. What was received is still told.
    fn fail(&mut self, now: Instant, qp: QpId);

    /// Gives up a queue pair: nothing is sent or received on it any more, and what is outstanding
    /// is flushed through the following `poll`s. The number may be used by nobody until then.
    fn release(&mut self, now: Instant, qp: QpId);
}
