//! Lengths of RoCE headers, and opcodes.

/// Base transport header.
pub(super) const BTH: usize = 12;
/// RDMA extended transport header: address, RKey, length.
pub(super) const RETH: usize = 16;
/// ACK extended transport header.
pub(super) const AETH: usize = 4;
/// Invariant CRC at the end of every packet.
pub(super) const ICRC: usize = 4;

/// The reliable connected operations whose headers we look into.
pub(super) mod opcode {
    pub(in super::super) const SEND_FIRST: u8 = 0;
    pub(in super::super) const SEND_MIDDLE: u8 = 1;
    pub(in super::super) const SEND_LAST: u8 = 2;
    pub(in super::super) const SEND_ONLY: u8 = 4;
    pub(in super::super) const WRITE_FIRST: u8 = 6;
    pub(in super::super) const WRITE_ONLY: u8 = 10;
    pub(in super::super) const WRITE_ONLY_IMMEDIATE: u8 = 11;
    pub(in super::super) const READ_REQUEST: u8 = 12;
    pub(in super::super) const READ_RESPONSE_FIRST: u8 = 13;
    pub(in super::super) const READ_RESPONSE_LAST: u8 = 15;
    pub(in super::super) const READ_RESPONSE_ONLY: u8 = 16;
    pub(in super::super) const ACKNOWLEDGE: u8 = 17;
    pub(in super::super) const ATOMIC_ACKNOWLEDGE: u8 = 18;
    /// Several requests in one packet: ours (`dense` in `smcr-rnic`).
    pub(in super::super) const DENSE: u8 = 0xc0;
}
