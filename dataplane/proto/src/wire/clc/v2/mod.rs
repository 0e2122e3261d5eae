//! CLC of SMC-Rv2, as Linux speaks it since 5.16: routable RoCE, EIDs in place of subnets.
//!
//! There is no RFC; z/OS and Linux define it. It differs from version 1 in four ways:
//!
//! - peers belong together if they have an enterprise ID ([`Eid`]) in common, wherever they are;
//! - the Proposal carries both versions, and the Accept says by its own version which one it is;
//! - Accept and Confirm of a first contact carry [`FirstContact`]: who the peer is, which release
//!   of version 2 it speaks, how large link groups may be, and whether a router is between;
//! - what counts in a Proposal is the RoCEv2 GID of its extension. Linux leaves peer ID, GID and
//!   MAC of version 1 zero if it does not offer that.

mod decline;
mod eid;
mod first_contact;
mod offer;
mod proposal;

pub use decline::DeclineV2;
pub use eid::{CONFIGURED_MAX, EIDS_MAX, Eid, EidError, Eids};
pub use first_contact::{Capabilities, FirstContact, HostName, OsType, VendorOptions};
pub use offer::{GIDS_MAX, Gids, OfferV2};
pub use proposal::{ProposalExtension, ProposalV2};

pub(super) use decline::LEN as DECLINE_LEN;
pub(super) use offer::LEN_MIN as OFFER_LEN_MIN;
pub(super) use proposal::LEN_MAX as PROPOSAL_LEN_MAX;

/// The version of these messages.
pub const VERSION: u8 = 2;

/// The newest release of version 2 that we know: it says how large link groups may be.
pub const RELEASE: u8 = 1;

#[cfg(test)]
mod tests;
