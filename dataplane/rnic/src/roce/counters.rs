//! What a fabric counts. A plain struct: it has one writer, who copies it where others can see it.

/// What happened on one fabric since it was made. Everything counts packets unless it says else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Received, whatever became of them.
    pub packets_in: u64,
    /// Handed to the wire.
    pub packets_out: u64,
    /// Handed to the wire once more.
    pub retransmits: u64,
    /// Packets that only asked whether their size passes.
    pub path_questions: u64,
    /// Times that packets became larger, the path having been asked.
    pub path_raised: u64,
    /// Times that what was not acknowledged was cut anew, for smaller packets.
    pub path_lowered: u64,
    /// Acknowledgement timers that ran out.
    pub timeouts: u64,
    /// Timeouts that turned out to be hasty: the answer was only late.
    pub timeouts_undone: u64,
    /// Dropped: the ICRC was wrong.
    pub icrc_errors: u64,
    /// Refused: a key or a range that opens nothing.
    pub rkey_errors: u64,
    /// Refused: a request that breaks the rules of the transport.
    pub invalid_requests: u64,
    /// Negative acknowledgements received.
    pub naks_in: u64,
    /// Negative acknowledgements sent.
    pub naks_out: u64,
    /// Acknowledgements received.
    pub acks_in: u64,
    /// Acknowledgements sent.
    pub acks_out: u64,
    /// Requests that had been carried out before; acknowledged again.
    pub duplicates: u64,
    /// Requests that came too early, something before them being lost; dropped.
    pub out_of_order: u64,
    /// Dropped: for no queue pair of ours, or from another address than its peer's.
    pub unknown_qp: u64,
    /// For a queue pair of another poller of the same NIC; handed over to it, or dropped if it had
    /// no room.
    pub strays: u64,
    /// Dropped: no packet of a reliable connection.
    pub malformed: u64,
    /// Messages for which there was no room; the peer was told to wait.
    pub rnr: u64,
    /// Runs of packets that the wire refused; they are lost, and retransmitted.
    pub runs_refused: u64,
}
