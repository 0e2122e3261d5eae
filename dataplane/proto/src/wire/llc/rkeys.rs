//! CONFIRM RKEY, its continuation, and DELETE RKEY (RFC A.3.5 to A.3.7).

use crate::vocabulary::{LinkNumber, Rkey};

/// What an RMB is called on one of the other links.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RkeyOnLink {
    /// The link.
    pub link: LinkNumber,
    /// The key there.
    pub rkey: Rkey,
    /// The address there.
    pub address: u64,
}

/// A new RMB: its key on this link and on the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfirmRkey {
    /// Whether this answers one.
    pub reply: bool,
    /// In a reply: the keys were not taken.
    pub negative: bool,
    /// In a negative reply: try again later.
    pub retry: bool,
    /// How many keys for other links there are, continuations included.
    pub other_links: u8,
    /// The key on the link that carries this message.
    pub rkey: Rkey,
    /// The address on that link.
    pub address: u64,
    /// Keys on other links; the first `min(other_links, 2)` count.
    pub others: [RkeyOnLink; 2],
}

/// More keys for other links, up to three.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfirmRkeyContinuation {
    /// Whether this answers one.
    pub reply: bool,
    /// In a reply: the keys were not taken.
    pub negative: bool,
    /// Keys still to be sent, those of this message included.
    pub remaining: u8,
    /// The first `min(remaining, 3)` count.
    pub others: [RkeyOnLink; 3],
}

/// RMBs that go away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeleteRkey {
    /// Whether this answers one.
    pub reply: bool,
    /// In a reply: some key was unknown; `error_mask` says which.
    pub negative: bool,
    /// How many of `rkeys` are meant, at most eight.
    pub count: u8,
    /// In a reply: the high bit is the first key.
    pub error_mask: u8,
    /// The keys.
    pub rkeys: [Rkey; 8],
}
