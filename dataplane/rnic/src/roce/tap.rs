//! A tap on a NIC: copies what goes over it to whoever captures it.
//!
//! ```text
//!   poller: Tap ── full records ──► Tracer: any thread that writes them to a file
//!            ▲────── empty records ─────┘
//! ```
//!
//! The poller never waits for whoever writes. When there is no empty record, it counts what it does
//! not copy. While nobody captures, a tap costs a look at an empty queue in each turn, and no
//! memory.
//!
//! A record is an Ethernet frame as it would be on a wire. What is around the RoCE packet is made
//! up: the frame's addresses, and IP headers where the NIC has not shown them.
//!
//! - `roce` shows its packets as they are, in both directions, retransmissions and acknowledgements
//!   included, and what arrived damaged. But no tool knows [dense](super::dense) packets: their
//!   parts are shown as the packets that they would otherwise be, each with a request for an
//!   acknowledgement. (Where the kernel hides identifications and ours is guessed wrong, the packet
//!   is shown as it is.)
//! - A real RNIC does not show its packets, and memory that is shared has none. There
//!   [`Traced`](crate::tracer::Traced) shows work requests when they are posted and messages when
//!   they are received, each as the packets of which RoCEv2 would make it. What the peer writes is
//!   missing: nothing tells this host of it. A capture at the other end has it.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use smcr_proto::{Instant, MacAddress};

use super::Speller;
use super::frame::{FRAME_MAX, HEAD_MAX, Station, Way, write_head};
use super::icrc::Flow;
use super::wire::{Body, Packet};
use crate::queue::Queue;

/// What to capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selection {
    /// Only what goes to this address or comes from it.
    pub peer: Option<IpAddr>,
    /// How many bytes of each frame to keep, from its beginning.
    pub snap_len: usize,
}

/// One frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// When it was sent or received.
    pub at: Instant,
    /// Whether this host sent it.
    pub is_sent: bool,
    /// The frame, from its beginning, as much of it as was asked for.
    pub bytes: Vec<u8>,
    /// How long the whole frame is.
    pub frame_len: usize,
}

/// The end of a tap where records come out.
#[derive(Debug)]
pub struct Tracer {
    orders: Arc<Orders>,
    rings: Option<Arc<Rings>>,
}

/// The end of a tap that the poller has. As long as nothing was captured it is small.
#[derive(Debug, Default)]
pub(crate) struct Tap {
    /// `None` if nobody has ever asked for the other end.
    orders: Option<Arc<Orders>>,
    session: Option<Session>,
    /// When it was last told to obey.
    now: Instant,
    mac: MacAddress,
}

/// What the poller shall do from now on. A newer order replaces one that it has not seen yet.
#[derive(Debug, Default)]
struct Orders {
    is_new: AtomicBool,
    /// The poller never waits for it, but tries again in the next turn.
    newest: Mutex<Option<Session>>,
}

/// One capture.
#[derive(Clone, Debug)]
struct Session {
    selection: Selection,
    rings: Arc<Rings>,
}

#[derive(Debug)]
struct Rings {
    empty: Queue<Box<Record>>,
    full: Queue<Box<Record>>,
    /// Frames that were not copied because no record was empty.
    dropped: AtomicU64,
}

/// Makes a tap whose records come out of the [`Tracer`]. `mac` is the port's Ethernet address.
pub(crate) fn tap(mac: MacAddress) -> (Tap, Tracer) {
    let orders = Arc::new(Orders::default());
    let tap = Tap { orders: Some(Arc::clone(&orders)), mac, ..Tap::default() };
    (tap, Tracer { orders, rings: None })
}

impl Tracer {
    /// Begins a capture. The poller knows it before it receives anything again.
    pub fn start(&mut self, selection: Selection) {
        let snap_len = selection.snap_len.min(FRAME_MAX);
        let count = RECORDS_LEN / (snap_len + size_of::<Record>());
        let count = count.min(RECORDS_MAX);
        let rings =
            Rings { empty: Queue::new(count), full: Queue::new(count), dropped: AtomicU64::new(0) };
        for _ in 0..count {
            let bytes = Vec::with_capacity(snap_len);
            let record = Record { at: Instant(0), is_sent: false, bytes, frame_len: 0 };
            rings.empty.push(Box::new(record)).expect("there is room for all");
        }
        let rings = Arc::new(rings);
        self.rings = Some(Arc::clone(&rings));
        let selection = Selection { snap_len, ..selection };
        self.orders.give(Some(Session { selection, rings }));
    }

    /// Ends the capture. What the poller has copied by then can still be [taken](Self::take).
    pub fn stop(&mut self) {
        self.orders.give(None);
    }

    /// Shows the next record, if there is one.
    pub fn take<T>(&self, show: impl FnOnce(&Record) -> T) -> Option<T> {
        let rings = self.rings.as_ref()?;
        let record = rings.full.pop()?;
        let shown = show(&record);
        // All records there are have room.
        let _ = rings.empty.push(record);
        Some(shown)
    }

    /// How many frames of this capture were not copied because too many waited.
    pub fn dropped(&self) -> u64 {
        self.rings.as_ref().map_or(0, |rings| rings.dropped.load(Ordering::Relaxed))
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Orders {
    fn give(&self, order: Option<Session>) {
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        *newest = order;
        self.is_new.store(true, Ordering::Relaxed);
    }
}

impl Tap {
    /// Does what was ordered since the last call. Call it once in each turn.
    pub(crate) fn obey(&mut self, now: Instant) {
        self.now = now;
        if let Some(orders) = self.orders.as_ref().filter(|it| it.is_new.load(Ordering::Relaxed))
            && let Ok(mut newest) = orders.newest.try_lock()
        {
            orders.is_new.store(false, Ordering::Relaxed);
            self.session = newest.take();
        }
    }

    /// When the present turn began.
    pub(crate) fn now(&self) -> Instant {
        self.now
    }

    /// Whether somebody captures.
    pub(crate) fn is_on(&self) -> bool {
        self.session.is_some()
    }

    /// Copies a packet that this host, at `local`, has sent to `remote`.
    pub(crate) fn sent(
        &self,
        now: Instant,
        (local, remote): (SocketAddr, SocketAddr),
        identification: u16,
        packet: &[u8],
    ) {
        let ends = (Station { mac: self.mac, address: local }, nameless(remote));
        self.copy(now, (true, remote.ip()), ends, identification, packet);
    }

    /// Copies a packet that this host, at `local`, has received from `remote`.
    pub(crate) fn received(
        &self,
        now: Instant,
        (local, remote): (SocketAddr, SocketAddr),
        identification: u16,
        packet: &[u8],
    ) {
        let ends = (nameless(remote), Station { mac: self.mac, address: local });
        self.copy(now, (false, remote.ip()), ends, identification, packet);
    }

    fn copy(
        &self,
        now: Instant,
        (is_sent, remote): (bool, IpAddr),
        ends: (Station, Station),
        identification: u16,
        packet: &[u8],
    ) {
        let Some(Session { selection, .. }) = &self.session else { return };
        if selection.peer.is_some_and(|peer| peer != remote) {
            return;
        }
        let addresses = (ends.0.address, ends.1.address);
        match Packet::parse(packet) {
            Ok(Packet { target, psn, body: Body::Dense(parts), .. })
                if Flow::new(addresses.0, addresses.1).is_intact(identification, packet) =>
            {
                let mut speller = Speller::new(addresses, target, psn);
                parts.for_each(|part| {
                    speller.part(part, &mut |packet| self.copy_one(now, is_sent, ends, 0, packet));
                });
            }
            Ok(_) | Err(_) => self.copy_one(now, is_sent, ends, identification, packet),
        }
    }

    fn copy_one(
        &self,
        now: Instant,
        is_sent: bool,
        ends: (Station, Station),
        identification: u16,
        packet: &[u8],
    ) {
        let Some(Session { selection, rings }) = &self.session else { return };
        let Some(mut record) = rings.empty.pop() else {
            rings.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let mut head = [0; HEAD_MAX];
        let way = Way { from: ends.0, to: ends.1, reacts: false };
        let head_len = write_head(&mut head, way, identification, packet, false);
        record.at = now;
        record.is_sent = is_sent;
        record.frame_len = head_len + packet.len();
        let head = &head[..head_len.min(selection.snap_len)];
        let rest = selection.snap_len - head.len();
        record.bytes.clear();
        record.bytes.extend_from_slice(head);
        record.bytes.extend_from_slice(&packet[..packet.len().min(rest)]);
        // All records there are have room.
        let _ = rings.full.push(record);
    }
}

/// A peer whose Ethernet address is not known here.
fn nameless(address: SocketAddr) -> Station {
    Station { mac: MacAddress::default(), address }
}

/// How many bytes all records of a tap have.
const RECORDS_LEN: usize = 16 << 20;
/// The most records of a tap.
const RECORDS_MAX: usize = 65_536;
