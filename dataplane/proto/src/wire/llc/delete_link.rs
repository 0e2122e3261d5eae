//! DELETE LINK and its reasons (RFC A.3.4).

use crate::vocabulary::LinkNumber;

/// Why a link goes away. The space is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeleteReason(pub u32);

/// Request or reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeleteLink {
    /// Whether this answers one.
    pub reply: bool,
    /// All links of the group, not just `link`.
    pub all: bool,
    /// Outstanding work may finish first.
    pub orderly: bool,
    /// Which link.
    pub link: LinkNumber,
    /// Why.
    pub reason: DeleteReason,
}
