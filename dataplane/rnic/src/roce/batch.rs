//! The interface between the core and the wire: the core sends runs and receives trains.
//!
//! The cost of sending is per system call, not per packet: a run of up to 64 packets of one size,
//! the last of which may be shorter, costs little more than one packet. So the packets of all queue
//! pairs are gathered as runs in a staging buffer, in the order in which they are built.

use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use smcr_os::Placed;
use smcr_os::carrier::Link;
use smcr_proto::{Instant, Qpn};

use super::wire::{BTH_LEN, ICRC_LEN, RETH_LEN};

/// Carries datagrams: a socket, a port of a NIC, or memory.
pub trait Wire {
    /// Receives at most one burst, which replaces the previous one, and returns the number of its
    /// trains. Does not block.
    fn receive(&mut self, now: Instant) -> usize;

    /// Returns one train of the burst.
    ///
    /// # Panics
    ///
    /// If `index` is not below what `receive` returned.
    fn train(&self, index: usize) -> Train<'_>;

    /// Sends `runs`, whose packets lie in `bytes`, in order. Returns how many it sent.
    fn send(&mut self, now: Instant, bytes: &[u8], runs: &[Run]) -> Sent;

    /// How many packets one run may have. Falls to one if the network device cannot split runs.
    fn segments_max(&self) -> usize;

    /// A descriptor that is readable while `receive` would return something, if the wire has one.
    fn event_descriptor(&self) -> Option<BorrowedFd<'_>>;

    /// How long at most to sleep while packets may come, if the wire has no descriptor but fills
    /// without being asked.
    fn nap(&self) -> Option<Duration> {
        None
    }

    /// Whether the wire can carry packets now, or ever again.
    fn link(&self) -> Link {
        Link::Up
    }
}

/// Datagrams that came from one address, in order: all of one size but the last, which may be
/// shorter.
#[derive(Clone, Copy, Debug)]
pub struct Train<'a> {
    /// Their source address.
    pub source: SocketAddr,
    /// Their payloads, one behind the other.
    pub bytes: &'a [u8],
    /// The size of all but the last.
    pub segment_len: usize,
    /// What their IP headers say of congestion: all the same.
    pub ecn: Ecn,
    /// The identification in the IP header of the first, if the wire shows it. The others have
    /// consecutive identifications.
    pub identification: Option<u16>,
}

/// What an IP header says of congestion (RFC 3168).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ecn {
    /// Its sender does not react to marks (Not-ECT).
    #[default]
    NotCapable,
    /// Its sender reacts to marks: ECT(0) or ECT(1).
    Capable,
    /// A router was congested, and marked the packet instead of dropping it (CE).
    Congested,
}

impl Ecn {
    /// What the byte says that IPv4 calls type of service, and IPv6 traffic class.
    pub(super) fn of(traffic_class: u8) -> Self {
        match traffic_class & 3 {
            0 => Self::NotCapable,
            3 => Self::Congested,
            _ => Self::Capable,
        }
    }
}

/// The byte that IPv4 calls type of service, and IPv6 traffic class, of what leaves: ECT(0) if its
/// sender reacts to marks.
pub(super) fn traffic_class(reacts: bool) -> u8 {
    if reacts { 2 } else { 0 }
}

/// Packets to one queue pair that leave in one system call: all of one size but the last, which may
/// be shorter. Packet i has the identification i in its IP header.
///
/// A run never mixes queue pairs, because the receiver may steer all its packets to the poller of
/// the first one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Their destination address.
    pub target: SocketAddr,
    /// Their destination queue pair.
    pub number: Qpn,
    /// Whether their IP headers say that their sender reacts to marks of congestion.
    pub reacts: bool,
    /// Where they are in the staging buffer.
    pub range: Range<usize>,
    /// The size of all but the last.
    pub segment_len: usize,
    /// How many there are.
    pub segments: usize,
}

/// The result of sending runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// How many runs were sent or refused. The wire was full for the others: offer them again
    /// later.
    pub runs: usize,
    /// How many of these were refused. Their packets are lost.
    pub refused: usize,
}

/// Where packets go, and what their IP headers say of congestion: the same in one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Destination {
    pub(super) target: SocketAddr,
    pub(super) number: Qpn,
    pub(super) reacts: bool,
}

/// The staging buffer and its runs.
#[derive(Debug)]
pub(super) struct Batch {
    bytes: Placed,
    used: usize,
    runs: Vec<Run>,
    /// How many runs were sent.
    gone: usize,
}

/// Room for one packet, or for several of one length.
#[derive(Debug)]
pub(super) struct Slot<'a> {
    /// The buffer to build them in, one behind the other. It still holds old bytes.
    pub(super) bytes: &'a mut [u8],
    /// The identification that the IP header of the first will have. The others have the next ones.
    pub(super) identification: u16,
    /// How many there are.
    pub(super) count: usize,
}

impl Batch {
    /// Creates an empty batch.
    pub(super) fn new() -> Self {
        Self {
            bytes: Placed::for_sent(STAGING_LEN, BTH_LEN + RETH_LEN),
            used: 0,
            runs: Vec::with_capacity(RUNS_MAX),
            gone: 0,
        }
    }

    /// Whether no run waits to be sent.
    pub(super) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Reserves room for the next packet, of `len` bytes to a queue pair. Returns `None` if the
    /// batch must be flushed first.
    pub(super) fn slot(
        &mut self,
        to: Destination,
        len: usize,
        segments_max: usize,
    ) -> Option<Slot<'_>> {
        self.slots(to, len, 1, segments_max)
    }

    /// Reserves room for the next packets, of `len` bytes each, as many as one run takes and `most`
    /// at most, of which there is at least one. Returns `None` if the batch must be flushed first.
    pub(super) fn slots(
        &mut self,
        to: Destination,
        len: usize,
        most: usize,
        segments_max: usize,
    ) -> Option<Slot<'_>> {
        assert!(0 < len && len <= PACKET_MAX && most > 0);
        let joins = self.joins(to, len, segments_max);
        if !joins {
            // A batch is flushed when half of the buffer is used, so that the packets are sent
            // while the caches still hold them.
            let full = self.runs.len() == RUNS_MAX || self.used >= STAGING_LEN / 2;
            if full || self.used + len > self.bytes.len() {
                return None;
            }
            let range = self.used..self.used;
            let Destination { target, number, reacts } = to;
            self.runs.push(Run { target, number, reacts, range, segment_len: len, segments: 0 });
        }
        let run = self.runs.last_mut().expect("a run was joined or pushed above");
        // A shorter packet ends its run.
        let segments = if len < run.segment_len { 1 } else { segments_max.min(SEGMENTS_MAX) };
        let room = (RUN_LEN_MAX - run.range.len()).min(self.bytes.len() - self.used) / len;
        let count = most.min(room).min(segments.saturating_sub(run.segments)).max(1);
        let identification = u16::try_from(run.segments).expect("a run is short");
        run.segments += count;
        let start = self.used;
        self.used += count * len;
        run.range.end = self.used;
        Some(Slot { bytes: &mut self.bytes[start..self.used], identification, count })
    }

    /// Whether a packet of `len` bytes to this queue pair can be appended to the last run.
    pub(super) fn joins(&self, to: Destination, len: usize, segments_max: usize) -> bool {
        let Some(run) = self.runs.last() else { return false };
        let is_whole = run.range.len() == run.segments * run.segment_len;
        is_whole
            && (run.target, run.number, run.reacts) == (to.target, to.number, to.reacts)
            && len <= run.segment_len
            && run.segments < segments_max.min(SEGMENTS_MAX)
            && run.range.len() + len <= RUN_LEN_MAX
            && self.used + len <= self.bytes.len()
    }

    /// Whether the last run has several packets.
    pub(super) fn ends_in_train(&self) -> bool {
        self.runs.last().is_some_and(|run| run.segments > 1)
    }

    /// Sends the runs through `wire`, and shows each packet that it has taken or refused. Returns
    /// how many these are, and how many runs were refused. The batch is empty afterwards unless the
    /// wire is full.
    pub(super) fn flush(
        &mut self,
        now: Instant,
        wire: &mut impl Wire,
        show: Option<Show<'_>>,
    ) -> Flushed {
        let waiting = &self.runs[self.gone..];
        let sent = wire.send(now, &self.bytes[..self.used], waiting);
        let packets = waiting[..sent.runs].iter().map(|run| run.segments as u64).sum();
        if let Some(show) = show {
            for run in &waiting[..sent.runs] {
                let packets = self.bytes[run.range.clone()].chunks(run.segment_len);
                (0..).zip(packets).for_each(|(i, packet)| show(run.target, i, packet));
            }
        }
        self.gone += sent.runs;
        if self.gone == self.runs.len() {
            self.runs.clear();
            self.gone = 0;
            self.used = 0;
        }
        Flushed { packets, refused: sent.refused as u64 }
    }
}

/// Who is shown packets: each with its target and its identification.
pub(super) type Show<'a> = &'a dyn Fn(SocketAddr, u16, &[u8]);

/// The result of flushing a batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flushed {
    /// Packets taken or refused.
    pub(super) packets: u64,
    /// Runs refused.
    pub(super) refused: u64,
}

/// The most packets of one run, which every kernel with UDP segmentation accepts.
pub(super) const SEGMENTS_MAX: usize = 64;
/// The most bytes of one run. With its headers (18 Ethernet, 40 IPv6, 8 UDP) it must stay below
/// 64 KiB: the kernel takes a little more, but cuts it into packets before the network device.
pub(super) const RUN_LEN_MAX: usize = 65_469;
/// The most payload of a packet: the largest path MTU.
pub(super) const PAYLOAD_MAX: u32 = 4096;
/// The longest packet: BTH, RETH, payload, ICRC.
pub(super) const PACKET_MAX: usize = BTH_LEN + RETH_LEN + PAYLOAD_MAX as usize + ICRC_LEN;
/// The most runs of one batch.
const RUNS_MAX: usize = 16;
const STAGING_LEN: usize = 2 * 65_536;

const _: () = assert!(STAGING_LEN / 2 >= RUN_LEN_MAX);

#[cfg(test)]
mod tests {
    use super::*;

    /// A wire that takes as many runs as the test says, and records them.
    struct Fake {
        takes: usize,
        sent: Vec<Run>,
    }

    impl Wire for Fake {
        fn receive(&mut self, _: Instant) -> usize {
            0
        }
        fn train(&self, _: usize) -> Train<'_> {
            unreachable!("nothing is received")
        }
        fn send(&mut self, _: Instant, bytes: &[u8], runs: &[Run]) -> Sent {
            let runs = &runs[..runs.len().min(self.takes)];
            assert!(runs.iter().all(|run| run.range.end <= bytes.len()));
            self.sent.extend_from_slice(runs);
            Sent { runs: runs.len(), refused: 0 }
        }
        fn segments_max(&self) -> usize {
            SEGMENTS_MAX
        }
        fn event_descriptor(&self) -> Option<BorrowedFd<'_>> {
            None
        }
    }

    fn peer(last: u8) -> Destination {
        let target = SocketAddr::from(([10, 0, 0, last], 4791));
        Destination { target, number: Qpn(7), reacts: true }
    }

    fn fill(batch: &mut Batch, packets: &[(u8, usize)]) -> Vec<u16> {
        let slot = |(host, len): &(u8, usize)| {
            let slot = batch.slot(peer(*host), *len, SEGMENTS_MAX).unwrap();
            assert_eq!(slot.bytes.len(), *len);
            slot.identification
        };
        packets.iter().map(slot).collect()
    }

    fn shape(batch: &Batch) -> Vec<(usize, usize)> {
        batch.runs.iter().map(|run| (run.segments, run.range.len())).collect()
    }

    /// Each run is one system call: many messages of a turn must cost one, not many.
    #[test]
    fn equal_packets_and_a_shorter_last_one_are_a_run() {
        let mut batch = Batch::new();
        let numbers = fill(&mut batch, &[(1, 96), (1, 96), (1, 60), (1, 60), (1, 20), (1, 96)]);
        assert_eq!(numbers, [0, 1, 2, 0, 1, 0], "the identifications that the kernel will set");
        assert_eq!(shape(&batch), [(3, 252), (2, 80), (1, 96)]);
    }

    /// Otherwise a poller of the peer would get packets for queue pairs of another poller, and have
    /// to forward each of them.
    #[test]
    fn another_address_or_queue_pair_is_another_run() {
        let mut batch = Batch::new();
        fill(&mut batch, &[(1, 60), (2, 60), (2, 60)]);
        assert_eq!(shape(&batch), [(1, 60), (2, 120)]);
        assert!(!batch.joins(Destination { number: Qpn(8), ..peer(2) }, 60, SEGMENTS_MAX));
        assert!(!batch.joins(Destination { reacts: false, ..peer(2) }, 60, SEGMENTS_MAX));
        assert!(batch.joins(peer(2), 60, SEGMENTS_MAX));
    }

    /// The kernel refuses more than 64 packets or 65,507 bytes.
    #[test]
    fn a_run_ends_at_the_kernels_limits() {
        let mut batch = Batch::new();
        fill(&mut batch, &[(1, 60); 65]);
        assert_eq!(shape(&batch), [(64, 3840), (1, 60)]);
        let mut batch = Batch::new();
        fill(&mut batch, &[(1, 4128); 16]);
        assert_eq!(shape(&batch), [(15, 61_920), (1, 4128)]);
    }

    /// As many as one run takes, and as the buffer has room for.
    #[test]
    fn packets_of_one_length_get_their_room_at_once() {
        let mut batch = Batch::new();
        let mut slots = |host, len, most, segments_max| {
            let slot = batch.slots(peer(host), len, most, segments_max)?;
            assert_eq!(slot.bytes.len(), slot.count * len);
            Some((slot.identification, slot.count))
        };
        assert_eq!(slots(1, 60, 30, SEGMENTS_MAX), Some((0, 30)));
        assert_eq!(slots(1, 60, 99, SEGMENTS_MAX), Some((30, 34)), "a run has 64");
        assert_eq!(slots(1, 60, 99, SEGMENTS_MAX), Some((0, 64)));
        assert_eq!(slots(1, 60, 3, 1), Some((0, 1)), "they leave alone");
        assert_eq!(slots(2, 60, 3, 2), Some((0, 2)));
        assert_eq!(slots(2, 40, 3, 3), Some((2, 1)), "a shorter one ends its run");
        assert_eq!(slots(3, 4128, 99, SEGMENTS_MAX), Some((0, 15)), "a run has 65,507 bytes");
        assert_eq!(slots(3, 4128, 99, SEGMENTS_MAX), None, "half of the buffer is used");
        let shape = shape(&batch);
        assert_eq!(shape, [(64, 3840), (64, 3840), (1, 60), (3, 160), (15, 61_920)]);
    }

    #[test]
    fn without_segmentation_each_packet_is_a_run() {
        let mut batch = Batch::new();
        for _ in 0..3 {
            assert_eq!(batch.slot(peer(1), 60, 1).unwrap().identification, 0);
        }
        assert_eq!(shape(&batch), [(1, 60); 3]);
    }

    #[test]
    fn runs_that_a_full_wire_did_not_take_are_offered_again() {
        let mut batch = Batch::new();
        fill(&mut batch, &[(1, 60), (2, 60), (3, 60)]);
        let mut wire = Fake { takes: 2, sent: Vec::new() };
        assert_eq!(batch.flush(Instant::default(), &mut wire, None).packets, 2);
        assert!(!batch.is_empty());
        wire.takes = 9;
        assert_eq!(batch.flush(Instant::default(), &mut wire, None).packets, 1);
        assert!(batch.is_empty());
        let targets: Vec<_> = wire.sent.iter().map(|run| run.target).collect();
        assert_eq!(targets, [peer(1), peer(2), peer(3)].map(|peer| peer.target));
    }

    #[test]
    fn a_full_batch_takes_no_more() {
        let mut batch = Batch::new();
        let mut taken = 0;
        while let Some(slot) = batch.slot(peer(1), 4128, SEGMENTS_MAX) {
            slot.bytes.fill(1);
            taken += 1;
        }
        assert!(taken >= 15, "at least a whole run: {taken}");
        fill_is_refused_until_the_flush(batch);
    }

    fn fill_is_refused_until_the_flush(mut batch: Batch) {
        assert!(batch.slot(peer(2), 20, SEGMENTS_MAX).is_none());
        let mut wire = Fake { takes: usize::MAX, sent: Vec::new() };
        batch.flush(Instant::default(), &mut wire, None);
        assert!(batch.slot(peer(2), 20, SEGMENTS_MAX).is_some());
    }
}
