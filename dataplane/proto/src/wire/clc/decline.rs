//! CLC Decline and its diagnosis codes (RFC A.2.5).

use crate::vocabulary::PeerId;

/// Why a peer declined, as it travels in CLC Decline.
///
/// The space is open: a code we do not know is carried and logged, never rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Diagnosis(pub u32);

/// A refusal; TCP goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decline {
    /// S: the receiver believes in a link group that does not exist here.
    pub out_of_sync: bool,
    /// Who declines.
    pub peer_id: PeerId,
    /// Why.
    pub diagnosis: Diagnosis,
}
