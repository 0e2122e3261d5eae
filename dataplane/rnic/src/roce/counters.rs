//! The counters of a fabric. They are plain integers: the fabric alone writes them, and its poller
//! copies them to where others read them.

/// The counters of one fabric since it was created. They count packets unless they say otherwise;
/// of dense packets, what is refused or a duplicate is a part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Received, including those that were dropped.
    pub packets_in: u64,
    /// Handed to the wire.
    pub packets_out: u64,
    /// Retransmitted.
    pub retransmits: u64,
    /// Requests that left in one packet with the request before them.
    pub packed: u64,
    /// Path MTU probes sent.
    pub path_questions: u64,
    /// How often a path MTU probe allowed a queue pair to send larger packets.
    pub path_raised: u64,
    /// How often a queue pair had to split its unacknowledged requests into smaller packets.
    pub path_lowered: u64,
    /// How often a retransmission timer expired.
    pub timeouts: u64,
    /// Timeouts that turned out to be spurious: the acknowledgement was only late.
    pub timeouts_undone: u64,
    /// Dropped because the ICRC was wrong.
    pub icrc_errors: u64,
    /// Refused because the rkey was unknown or the range was outside its region.
    pub rkey_errors: u64,
    /// Refused because the request breaks the rules of the transport.
    pub invalid_requests: u64,
    /// Negative acknowledgements received.
    pub naks_in: u64,
    /// Negative acknowledgements sent.
    pub naks_out: u64,
    /// Acknowledgements received.
    pub acks_in: u64,
    /// Acknowledgements sent.
    pub acks_out: u64,
    /// Packets received that a congested router had marked.
    pub marked_in: u64,
    /// Congestion notification packets received: routers have marked packets of ours.
    pub cnps_in: u64,
    /// Congestion notification packets sent.
    pub cnps_out: u64,
    /// Duplicates of requests that were executed before. They are acknowledged again.
    pub duplicates: u64,
    /// Dropped because an earlier packet was missing.
    pub out_of_order: u64,
    /// Requests and answers whose PSN is so far from the expected one that the peer cannot have
    /// sent them. A few are answered, the others dropped.
    pub psn_errors: u64,
    /// Dropped because no queue pair has the number, or because they did not come from the address
    /// of its peer.
    pub unknown_qp: u64,
    /// Received by this poller for a queue pair of another poller of the same NIC. They are
    /// forwarded to it, or dropped if its mailbox is full.
    pub strays: u64,
    /// Dropped because they are not well-formed packets of the reliable connected service.
    pub malformed: u64,
    /// Messages for which there was no room. The peer got an RNR NAK.
    pub rnr: u64,
    /// Runs of packets that the wire refused. The requester retransmits them.
    pub runs_refused: u64,
}
