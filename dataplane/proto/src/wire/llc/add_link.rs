//! ADD LINK and its continuation (RFC A.3.2, A.3.3).

use crate::vocabulary::{Gid, LinkNumber, MacAddress, Mtu, Psn, Qpn, Rkey};

/// Request or reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddLink {
    /// Whether this answers one.
    pub reply: bool,
    /// In a reply: no link will be added, for `reason`.
    pub rejected: bool,
    /// Why it was rejected; see [`REASON_NO_ALTERNATE_PATH`]. Four bits.
    pub reason: u8,
    /// The sender's port for the new link.
    pub mac: MacAddress,
    /// The sender's port for the new link.
    pub gid: Gid,
    /// Its queue pair.
    pub qpn: Qpn,
    /// Chosen by the server.
    pub link: LinkNumber,
    /// The largest path MTU of the sender's port.
    pub mtu: Mtu,
    /// The first PSN the sender will use.
    pub psn: Psn,
}

/// The only reason for a rejection that the RFC names.
pub const REASON_NO_ALTERNATE_PATH: u8 = 1;

/// One RMB, as it is known on an existing link and on the new one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RkeyPair {
    /// Its key on the link that carries this message.
    pub existing: Rkey,
    /// Its key on the new link.
    pub new: Rkey,
    /// Its address on the new link.
    pub address: u64,
}

/// The keys that RMBs have on the new link, two at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddLinkContinuation {
    /// Whether this answers one.
    pub reply: bool,
    /// The new link.
    pub link: LinkNumber,
    /// Keys still to be sent, those of this message included.
    pub remaining: u8,
    /// The first `min(remaining, 2)` count.
    pub pairs: [RkeyPair; 2],
}
