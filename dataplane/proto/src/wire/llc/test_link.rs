//! TEST LINK: is anybody there (RFC A.3.8).

/// Request or reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TestLink {
    /// Whether this answers one.
    pub reply: bool,
    /// Echoed by the peer.
    pub user_data: [u8; 16],
}
