//! The NIC contract: reliable-connected (RC) queue pairs, independent of the hardware or software
//! that implements them.
//!
//! Two threads use a NIC, so it has two traits. The control thread uses [`Rnic`], whose calls may
//! sleep and fail. One poller uses [`Fabric`], whose calls may do neither. A queue pair moves by
//! value from one to the other, so it has one user at a time. This crate knows nothing of SMC: it
//! carries out RDMA writes into registered memory and sends messages of 44 bytes, or longer ones
//! if both ends have agreed on them.
//!
//! The backends are `sim`, which simulates a network of NICs in one thread on a virtual clock,
//! `roce`, which implements RoCEv2 in software, over UDP sockets or over ports of DPDK, `verbs`,
//! which drives real RNICs, and `shm`, which joins the processes of one host by shared memory.
//! `any` is one type for all backends that a gateway may have. `fault_injector` wraps any of them.
//! `queue` is for threads that must not wait for each other.

mod absent;
pub mod any;
pub mod dice;
pub mod fault_injector;
pub mod queue;
pub mod roce;
pub mod shm;
pub mod sim;
mod sync;
pub mod tracer;
pub mod verbs;

use std::os::fd::BorrowedFd;

use smcr_memory::{Backing, Lease, Region, Rmbe};
pub use smcr_proto::QpAddress;
use smcr_proto::{Gid, Instant, MacAddress, Mtu, Qpn, Rkey};

/// Length in bytes of the messages that queue pairs carry.
pub const MESSAGE_LEN: usize = 44;

/// The payload of one send. Posting copies it into the NIC's own memory.
pub type Message = [u8; MESSAGE_LEN];

/// Length in bytes of the longest message that a queue pair with [`Messages::Long`] accepts.
pub const LONG_MESSAGE_MAX: usize = 8192;

/// Which messages a queue pair accepts from its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Messages {
    /// Messages of [`MESSAGE_LEN`] bytes only. A longer one breaks the queue pair.
    Short,
    /// Messages of [`MESSAGE_LEN`] bytes and longer ones, up to [`LONG_MESSAGE_MAX`]. A longer one
    /// takes one packet or more and costs the receiver an allocation.
    Long,
}

/// The port of an RNIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its GID, which is its IP address in the form that RoCEv2 uses.
    pub gid: Gid,
    /// Its Ethernet address.
    pub mac: MacAddress,
    /// The largest path MTU it can use.
    pub mtu: Mtu,
}

/// A protection domain. An rkey registered in one gives no access to queue pairs of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Domain(pub u32);

/// A registered memory region: peers connected to queue pairs of `domain` may write it until it is
/// deregistered.
#[must_use = "registered memory stays open to writes until `deregister`"]
#[derive(Debug)]
pub struct Registration {
    /// Only peers of queue pairs in this domain may use the rkey.
    pub domain: Domain,
    /// The remote key that a write must carry.
    pub rkey: Rkey,
    /// The address that a write to the first byte must carry.
    pub address: u64,
}

/// Packets come to a queue pair that its peer cannot have sent, because their PSNs are far from all
/// that it may use now: somebody sends from its address and guesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Suspicion {
    /// The queue pair, which is ours.
    pub qpn: Qpn,
    /// The port of its peer: the address that the packets came from.
    pub peer: Gid,
    /// How many came since the last report about this queue pair.
    pub packets: u64,
}

/// What a NIC says without being asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Somebody attacks a queue pair.
    Suspicion(Suspicion),
    /// The port works again.
    Up,
    /// The port does not work: its queue pairs break, or have broken.
    Down,
    /// [`Rnic::port`] is another one now. Queue pairs with the old address reach nobody.
    Readdressed,
    /// The device is gone and does not come back. Its queue pairs break, or have broken.
    Gone,
}

/// The NIC or the host has no resources for another object. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exhausted;

/// Why a queue pair was not connected to its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectError {
    /// The NIC or the host has no resources for it. Another attempt may succeed.
    Exhausted,
    /// Nothing can be sent to the peer's address: the port is down, there is no route, or no queue
    /// pair can have such an address.
    Unreachable,
}

/// The control thread's interface to a NIC. Calls are rare, may take long and may fail.
pub trait Rnic {
    /// A queue pair that has not reached RTS yet.
    type Opening: Opening;

    /// The NIC's port.
    fn port(&self) -> Port;

    /// Whether the host has a route to the peer's port now. This sends nothing, so it does not
    /// prove that the peer can be reached.
    fn has_route(&self, peer: Gid) -> bool;

    /// The payload in bytes that full packets of this queue pair have now, as its path allows;
    /// `None` if the backend does not know.
    fn payload(&self, _: Qpn) -> Option<u32> {
        None
    }

    /// Whether registering memory pins it, so that all of it takes memory and not only what is
    /// used. The same for the life of the NIC.
    fn pins(&self) -> bool {
        false
    }

    /// Whether its queue pairs take [dense packets](Opening::pack_densely), or their network has no
    /// packets. The same for the life of the NIC.
    fn packs_densely(&self) -> bool {
        false
    }

    /// What regions for this NIC should be made of. If it is [`Backing::Shared`], it registers no
    /// others: peers map them. The same for the life of the NIC.
    fn backing(&self) -> Backing {
        Backing::Private
    }

    /// What this host tells others, so that a peer with whose NIC this one shares memory can
    /// notice: two bytes that are the NIC's own, and six in the form of a MAC address. `None` if
    /// the NIC shares no memory. The same for the life of the NIC.
    fn mark(&self) -> Option<[u8; 8]> {
        None
    }

    /// Whether this NIC shares memory with one that has this mark now.
    fn is_near(&self, _mark: [u8; 8]) -> bool {
        false
    }

    /// Takes the next event. Call it until there is none, at least once a second.
    fn event(&mut self) -> Option<Event> {
        None
    }

    /// A descriptor that is readable while [`event`](Self::event) has something to say, if the NIC
    /// has one: then its events need not wait for a second. The same for the life of the NIC.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Names the memory whose leases the NIC's fabric will be given with its writes. A NIC that
    /// needs a key for what it reads registers the memory in every domain that it opens. Call it
    /// once, before the first `open_domain`; a NIC whose fabric writes nothing needs no memory.
    ///
    /// # Errors
    ///
    /// [`Exhausted`], with nothing changed.
    fn send_from(&mut self, memory: &Region) -> Result<(), Exhausted>;

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
    /// If a region is still registered in it, which would be our bug.
    fn close_domain(&mut self, domain: Domain);

    /// Registers `region`, so that the peers of `domain` may write it. May take milliseconds. A
    /// NIC that writes to pages rather than to addresses [pins](Region::pin) the region until it
    /// has forgotten it.
    ///
    /// The NIC accepts writes with the rkey from the moment this returns, so the caller may then
    /// announce the rkey to a peer.
    ///
    /// # Errors
    ///
    /// [`Exhausted`], with nothing changed.
    fn register(&mut self, domain: Domain, region: &Region) -> Result<Registration, Exhausted>;

    /// Deregisters a region. The NIC may still accept writes with its rkey for a short time; the
    /// memory stays mapped until it refuses them.
    fn deregister(&mut self, registration: Registration);

    /// Creates a queue pair that accepts short messages only. The caller then announces its address
    /// to the peer.
    ///
    /// # Errors
    ///
    /// [`Exhausted`], with nothing changed.
    fn open(&mut self, domain: Domain) -> Result<Self::Opening, Exhausted> {
        self.open_for(domain, Messages::Short)
    }

    /// Creates a queue pair as [`Self::open`] does, but the caller chooses which messages it
    /// accepts.
    ///
    /// # Errors
    ///
    /// [`Exhausted`], with nothing changed.
    fn open_for(&mut self, domain: Domain, messages: Messages) -> Result<Self::Opening, Exhausted>;
}

/// A queue pair that knows its own address but not yet its peer's. Work requests cannot be posted
/// to it.
pub trait Opening {
    /// The connected queue pair.
    type Qp: Send;

    /// The address of this queue pair, which the peer needs to connect to it.
    fn address(&self) -> QpAddress;

    /// Lowers the path MTU in [`address`](Self::address) to what the path between the two hosts
    /// carries, as far as this host knows, so that the peer sends no larger packets. Call it before
    /// the address is announced.
    fn fit_path_to(&mut self, _peer: Gid) {}

    /// Both users have agreed on packets that only NICs of ours have: several requests in one, and
    /// writes of other sizes than those of path MTUs. Call it before [`connect`](Self::connect), at
    /// both ends or at none. It does nothing where there are no such packets.
    fn pack_densely(&mut self) {}

    /// Brings the queue pair to RTS. The caller moves the result to its poller, which owns it until
    /// it is destroyed.
    ///
    /// # Errors
    ///
    /// [`ConnectError`]. The queue pair is destroyed.
    fn connect(self, peer: QpAddress) -> Result<Self::Qp, ConnectError>;
}

/// Identifies a queue pair among those that one fabric has adopted. A fabric never reuses one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QpId(pub u32);

/// The caller's identifier of a work request (the `wr_id` of verbs). The completion returns it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tag(pub u64);

/// A work request: one entry of a send queue.
#[derive(Debug)]
pub enum Work {
    /// RDMA write of the leased bytes to `address` in the peer's memory. It carries no immediate
    /// data and causes no completion at the peer, so the peer's host is not told of it.
    // RFC 7609 4.7.1 #1: writes carry no immediate data
    Write {
        /// The bytes to write. The completion returns the lease.
        lease: Lease,
        /// The remote key of the peer's region.
        rkey: Rkey,
        /// Where to write: an address in the peer's registration.
        address: u64,
        /// Identifies this work request in its completion.
        tag: Tag,
    },
    /// Send of a message, with a solicited event at the peer.
    Send {
        /// The bytes.
        message: Message,
        /// Identifies this work request in its completion.
        tag: Tag,
    },
    /// Send of a longer message. The peer must have opened its queue pair with
    /// [`Messages::Long`]; otherwise it refuses the message and the queue pair breaks.
    SendLong {
        /// The bytes: more than [`MESSAGE_LEN`], at most [`LONG_MESSAGE_MAX`].
        message: Box<[u8]>,
        /// Identifies this work request in its completion.
        tag: Tag,
    },
}

/// How a work request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The peer's NIC acknowledged it. The peer's host may still lose it: see promise 3.
    Done,
    /// The queue pair broke or was released before an acknowledgement came. The peer may or may not
    /// have received it.
    Flushed,
}

/// Why a queue pair broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpError {
    /// The peer's NIC sent no acknowledgement for too long.
    RetriesExceeded,
    /// The peer's NIC refused a request of ours: the rkey, the range or the format was wrong.
    RemoteError,
    /// The peer sent a request that it must not send. Our NIC refused it.
    PeerMisbehaved,
    /// The port went down, or the user of the queue pair called [`Fabric::fail`].
    PortDown,
}

/// One entry of the completion queue.
#[derive(Debug)]
pub enum Completion {
    /// A write ended. The fabric returns its lease.
    Wrote {
        /// The queue pair.
        qp: QpId,
        /// The lease of the work request.
        lease: Lease,
        /// The tag of the work request.
        tag: Tag,
        /// How it ended.
        status: Status,
    },
    /// A send ended.
    Sent {
        /// The queue pair.
        qp: QpId,
        /// The tag of the work request.
        tag: Tag,
        /// How it ended.
        status: Status,
    },
    /// A message arrived.
    Received {
        /// The queue pair.
        qp: QpId,
        /// The bytes.
        message: Message,
    },
    /// A longer message arrived.
    ReceivedLong {
        /// The queue pair.
        qp: QpId,
        /// The bytes.
        message: Box<[u8]>,
    },
    /// The queue pair broke: it sends and receives nothing any more. The fabric reports this once,
    /// before the flushed completions.
    Broke {
        /// The queue pair.
        qp: QpId,
        /// Why.
        cause: QpError,
    },
}

/// What a caller has found out about [`Fabric::event_descriptor`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signs {
    /// It is readable, or nobody has looked.
    Maybe,
    /// When the kernel was asked in this turn or in one of the last, it was not readable.
    NotYet,
    /// A sleep has ended a moment ago, and has not found it readable.
    None,
}

/// The polling thread's interface to the same NIC: a completion queue, and the queue pairs that
/// report to it.
///
/// No method blocks. Once the tables are warm, no method allocates, except for long messages. Every
/// backend keeps these promises, and the conformance suite tests each of them:
///
/// 1. **Order.** The work requests of one queue pair complete in posting order.
/// 2. **Visibility.** When `poll` returns a received message, this thread can read the bytes of
///    every write that the peer posted before it on that queue pair. Until then it must not rely
///    on any of them.
/// 3. **Exactly once.** Each posted work request completes once, done or flushed. Done means that
///    the peer's NIC has acknowledged it: a message that completed as done is received once, unless
///    the peer's end breaks or is released first; then the last of them, and the bytes they
///    announce, may never reach the peer's host (RFC 7609, 4.6.1). A flushed message is received at
///    most once.
/// 4. **Containment.** A write outside a registered region, with a wrong rkey, or with an rkey of
///    another domain changes no byte; it breaks its queue pair at both ends and affects no other.
///    If a backend splits a long write, the parts before the refused one may be placed. A message
///    longer than the receiving queue pair accepts is refused in the same way.
/// 5. **Fail stop.** After `Broke`, work requests posted earlier and later complete as flushed, in
///    order, and nothing more is received on that queue pair.
/// 6. **No stall.** As long as the network delivers some packets, every posted work request
///    completes, provided that the caller calls `poll` and `transmit` whenever `event_descriptor`
///    is readable or the deadline of `prepare_sleep` has passed.
pub trait Fabric {
    /// A connected queue pair, as the control thread hands it to the poller.
    type Qp: Send;

    /// Takes over a queue pair, which receives from now on.
    fn adopt(&mut self, now: Instant, qp: Self::Qp) -> QpId;

    /// How many more work requests the send queue of `qp` accepts.
    fn room(&self, qp: QpId) -> usize;

    /// Moves the work requests in `work` to the send queue of `qp`. No packet leaves before
    /// `transmit`.
    ///
    /// Posting cannot fail. The caller keeps within `room`, and a broken queue pair completes every
    /// work request as flushed, through `poll`. One path for errors, not two.
    ///
    /// # Panics
    ///
    /// If `work` exceeds `room`, or `qp` is not adopted. A backend may also panic at a lease of
    /// memory that [`Rnic::send_from`] has not named.
    fn post(&mut self, qp: QpId, work: &mut Vec<Work>);

    /// Receives packets, and appends completions to `out` until its capacity is used up. One call
    /// does a bounded amount of work; call it once a turn, and again if `has_completions`.
    fn poll(&mut self, now: Instant, out: &mut Vec<Completion>);

    /// What the caller has found out about `event_descriptor`, so that `poll` need not ask the
    /// kernel once more. A caller that says so at all does it before the first `poll` of every
    /// turn.
    fn note_signs(&mut self, _signs: Signs) {}

    /// Sends posted work requests, retransmissions that are due, and those acknowledgements that
    /// can leave together with data or must not be delayed longer. Call it once at the end of a
    /// turn.
    fn transmit(&mut self, now: Instant);

    /// Whether something is there already for the next `poll`, so that another one in this turn is
    /// worth it. A NIC in memory carries out work requests as they are transmitted, and those to
    /// the caller itself have arrived then.
    fn has_completions(&self) -> bool {
        false
    }

    /// Says how long the caller may sleep on `event_descriptor`: until the returned instant, or
    /// without limit if there is none. Acknowledgements may be delayed for as long. If the instant
    /// is not later than `now`, there is work to do at once.
    fn prepare_sleep(&mut self, now: Instant) -> Option<Instant>;

    /// A descriptor that is readable while `poll` would receive something. Backends on a virtual
    /// clock have none.
    fn event_descriptor(&self) -> Option<BorrowedFd<'_>>;

    /// Breaks a queue pair, as if its port had gone down. The caller uses this when it learned from
    /// elsewhere that the queue pair is dead and cannot wait for the retries to be exceeded. Unless
    /// it is broken already, [`Completion::Broke`] follows, with [`QpError::PortDown`]. Messages
    /// that had arrived before are still reported.
    fn fail(&mut self, now: Instant, qp: QpId);

    /// Releases a queue pair: it sends and receives nothing any more, and the next `poll`s report
    /// its outstanding work requests as flushed. No other queue pair gets its number until then.
    fn release(&mut self, now: Instant, qp: QpId);

    /// Gives the memory of an element back to the host, as [`Rmbe::relinquish`] does, and
    /// returns how many bytes. `announced` is how many bytes, modulo 2^32, the peer has announced
    /// since the element was taken, and all of them have been read.
    ///
    /// A backend can do so if the thread that calls this is the only one that places the bytes of
    /// peers in the element. Otherwise what a peer writes meanwhile would be lost, so the memory
    /// stays: of hardware, and what hardware ever knew; what a peer shares; and where another RNIC
    /// knows the RMB, as those of the other links of a group do.
    fn relinquish(&mut self, _element: &mut Rmbe, _announced: u32) -> usize {
        0
    }
}
