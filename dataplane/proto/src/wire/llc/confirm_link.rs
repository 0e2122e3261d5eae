//! CONFIRM LINK: proves that a new link carries messages both ways (RFC A.3.1).

use crate::vocabulary::{Gid, LinkNumber, LinkUserId, MacAddress, Qpn};

/// Request or reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfirmLink {
    /// Whether this answers one.
    pub reply: bool,
    /// The sender's RMB elements begin with data, not with a four-byte eye catcher: the two flag
    /// bits every deployed stack sets and demands (research: the RFC calls them reserved).
    pub no_eyecatcher: bool,
    /// The sender's port.
    pub mac: MacAddress,
    /// The sender's port.
    pub gid: Gid,
    /// The sender's queue pair.
    pub qpn: Qpn,
    /// Chosen by the server, echoed by the client.
    pub link: LinkNumber,
    /// The sender's own name for the link.
    pub user_id: LinkUserId,
    /// The most links the sender wants in the group.
    pub max_links: u8,
}
