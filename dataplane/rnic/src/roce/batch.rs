//! Between the core and what carries its packets: runs out, trains in.
//!
//! The kernel charges by the call, not by the packet: a run of up to 64 packets of one size, the
//! last of which may be shorter, costs little more than one packet. So packets are gathered in a
//! staging buffer as runs, in the order they are built, whichever queue pair they are of.

use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::BorrowedFd;

use smcr_proto::Qpn;

/// What carries datagrams: sockets, a port of a NIC, or memory.
pub trait Wire {
    /// Takes in at most one burst, which replaces the one before, and returns the number of its
    /// trains. Does not block.
    fn receive(&mut self) -> usize;

    /// A train of the burst.
    ///
    /// # Panics
    ///
    /// If `index` is not below what `receive` returned.
    fn train(&self, index: usize) -> Train<'_>;

    /// Sends `runs`, whose packets lie in `bytes`, in order, and says how far it came.
    fn send(&mut self, bytes: &[u8], runs: &[Run]) -> Sent;

    /// How many packets one run may have. May fall when a network device turns out to be unable.
    fn segments_max(&self) -> usize;

    /// Readable while `receive` would find something, if there is such a thing.
    fn event_descriptor(&self) -> Option<BorrowedFd<'_>>;
}

/// Datagrams that came from one address, in order: all of one size but the last, which may be
/// shorter.
#[derive(Clone, Copy, Debug)]
pub struct Train<'a> {
    /// Where they came from.
    pub source: SocketAddr,
    /// Their payloads, end to end.
    pub bytes: &'a [u8],
    /// The size of all but the last.
    pub segment_len: usize,
    /// The identification in the IP header of the first, if that can be seen. The others have the
    /// following ones.
    pub identification: Option<u16>,
}

/// Packets to one queue pair that leave together: all of one size but the last, which may be
/// shorter. Those to several would all arrive where the first of them is steered.
/// Packet i has the identification i in its IP header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Where to.
    pub target: SocketAddr,
    /// The queue pair there.
    pub number: Qpn,
    /// Where they lie in the staging buffer.
    pub range: Range<usize>,
    /// The size of all but the last.
    pub segment_len: usize,
    /// How many there are.
    pub segments: usize,
}

/// How far a wire came with sending.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Runs that were taken or refused. Those behind them must wait; offer them again later.
    pub runs: usize,
    /// Runs of those that were refused: as if lost.
    pub refused: usize,
}

/// The staging buffer and its runs.
#[derive(Debug)]
pub(super) struct Batch {
    bytes: Box<[u8]>,
    used: usize,
    runs: Vec<Run>,
    /// Runs that have left.
    gone: usize,
}

/// Room for one packet.
#[derive(Debug)]
pub(super) struct Slot<'a> {
    /// Where to build it. Holds old bytes.
    pub(super) bytes: &'a mut [u8],
    /// The identification that its IP header will have.
    pub(super) identification: u16,
}

impl Batch {
    /// An empty one.
    pub(super) fn new() -> Self {
        Self {
            bytes: vec![0; STAGING_LEN].into(),
            used: 0,
            runs: Vec::with_capacity(RUNS_MAX),
            gone: 0,
        }
    }

    /// Nothing waits to leave.
    pub(super) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Room for the next packet, of `len` bytes to a queue pair; `None` when the batch must leave
    /// first.
    pub(super) fn slot(
        &mut self,
        to: (SocketAddr, Qpn),
        len: usize,
        segments_max: usize,
    ) -> Option<Slot<'_>> {
        assert!(0 < len && len <= PACKET_MAX);
        let joins = self.joins(to, len, segments_max);
        if !joins {
            // A batch that has half a buffer of packets leaves, so that they are sent while the
            // caches still hold them.
            let full = self.runs.len() == RUNS_MAX || self.used >= STAGING_LEN / 2;
            if full || self.used + len > self.bytes.len() {
                return None;
            }
            let range = self.used..self.used;
            let (target, number) = to;
            self.runs.push(Run { target, number, range, segment_len: len, segments: 0 });
        }
        let run = self.runs.last_mut().expect("one was joined or pushed");
        let identification = u16::try_from(run.segments).expect("a run is short");
        run.segments += 1;
        let start = self.used;
        self.used += len;
        run.range.end = self.used;
        Some(Slot { bytes: &mut self.bytes[start..self.used], identification })
    }

    /// Whether a packet of `len` bytes to this queue pair could be the next of the last run.
    pub(super) fn joins(&self, to: (SocketAddr, Qpn), len: usize, segments_max: usize) -> bool {
        let Some(run) = self.runs.last() else { return false };
        let is_whole = run.range.len() == run.segments * run.segment_len;
        is_whole
            && (run.target, run.number) == to
            && len <= run.segment_len
            && run.segments < segments_max.min(SEGMENTS_MAX)
            && run.range.len() + len <= RUN_LEN_MAX
            && self.used + len <= self.bytes.len()
    }

    /// Offers what waits to `wire`. Returns how many packets were taken, and how many runs were
    /// refused; the batch is empty unless the wire is blocked.
    pub(super) fn leave(&mut self, wire: &mut impl Wire) -> Departure {
        let waiting = &self.runs[self.gone..];
        let sent = wire.send(&self.bytes[..self.used], waiting);
        let packets = waiting[..sent.runs].iter().map(|run| run.segments as u64).sum();
        self.gone += sent.runs;
        if self.gone == self.runs.len() {
            self.runs.clear();
            self.gone = 0;
            self.used = 0;
        }
        Departure { packets, refused: sent.refused as u64 }
    }
}

/// What left a batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Departure {
    /// Packets taken or refused.
    pub(super) packets: u64,
    /// Runs refused.
    pub(super) refused: u64,
}

/// Packets of one run: what every kernel with UDP segmentation takes.
pub(super) const SEGMENTS_MAX: usize = 64;
/// Bytes of one run: the largest payload of a UDP datagram.
pub(super) const RUN_LEN_MAX: usize = 65_507;
/// The longest packet: BTH, RETH, 4096 bytes, ICRC.
pub(super) const PACKET_MAX: usize = 12 + 16 + 4096 + 4;
/// Runs that leave together.
const RUNS_MAX: usize = 16;
const STAGING_LEN: usize = 2 * 65_536;

const _: () = assert!(STAGING_LEN / 2 >= RUN_LEN_MAX);

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes what it is told to, and remembers it.
    struct Fake {
        takes: usize,
        sent: Vec<Run>,
    }

    impl Wire for Fake {
        fn receive(&mut self) -> usize {
            0
        }
        fn train(&self, _: usize) -> Train<'_> {
            unreachable!("nothing is received")
        }
        fn send(&mut self, bytes: &[u8], runs: &[Run]) -> Sent {
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

    fn peer(last: u8) -> (SocketAddr, Qpn) {
        (SocketAddr::from(([10, 0, 0, last], 4791)), Qpn(7))
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
        assert_eq!(numbers, [0, 1, 2, 0, 1, 0], "what the kernel will put into the IP headers");
        assert_eq!(shape(&batch), [(3, 252), (2, 80), (1, 96)]);
    }

    /// A peer's poller would get packets of another's queue pairs, at the cost of a detour each.
    #[test]
    fn another_address_or_queue_pair_is_another_run() {
        let mut batch = Batch::new();
        fill(&mut batch, &[(1, 60), (2, 60), (2, 60)]);
        assert_eq!(shape(&batch), [(1, 60), (2, 120)]);
        let (target, _) = peer(2);
        assert!(!batch.joins((target, Qpn(8)), 60, SEGMENTS_MAX));
        assert!(batch.joins((target, Qpn(7)), 60, SEGMENTS_MAX));
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

    #[test]
    fn without_segmentation_each_packet_is_a_run() {
        let mut batch = Batch::new();
        for _ in 0..3 {
            assert_eq!(batch.slot(peer(1), 60, 1).unwrap().identification, 0);
        }
        assert_eq!(shape(&batch), [(1, 60); 3]);
    }

    #[test]
    fn what_a_blocked_wire_did_not_take_is_offered_again() {
        let mut batch = Batch::new();
        fill(&mut batch, &[(1, 60), (2, 60), (3, 60)]);
        let mut wire = Fake { takes: 2, sent: Vec::new() };
        assert_eq!(batch.leave(&mut wire).packets, 2);
        assert!(!batch.is_empty());
        wire.takes = 9;
        assert_eq!(batch.leave(&mut wire).packets, 1);
        assert!(batch.is_empty());
        let targets: Vec<_> = wire.sent.iter().map(|run| (run.target, run.number)).collect();
        assert_eq!(targets, [peer(1), peer(2), peer(3)]);
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
        fill_is_refused_until_it_left(batch);
    }

    fn fill_is_refused_until_it_left(mut batch: Batch) {
        assert!(batch.slot(peer(2), 20, SEGMENTS_MAX).is_none());
        let mut wire = Fake { takes: usize::MAX, sent: Vec::new() };
        batch.leave(&mut wire);
        assert!(batch.slot(peer(2), 20, SEGMENTS_MAX).is_some());
    }
}
