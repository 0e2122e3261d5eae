//! One end of a queue pair, as the worker knows it.

use std::sync::Arc;

use smcr_memory::Region;
use smcr_proto::Rkey;

use super::bell::Bell;
use super::line::Line;
use super::shared::Inbox;
use super::wire::Name;
use crate::Domain;

/// One end of a queue pair, which is ours.
pub(super) struct End {
    pub(super) own: Name,
    pub(super) domain: Domain,
    pub(super) peer: Name,
    pub(super) part: usize,
    pub(super) inbox: Arc<Inbox>,
    pub(super) stage: Stage,
    /// The key for which we have asked the peer.
    pub(super) asked: Option<Rkey>,
    /// The keys of which the peer has the region.
    pub(super) granted: Vec<Rkey>,
}

/// How far its connection is.
pub(super) enum Stage {
    /// There is none.
    Apart,
    /// We have said hello, with this memory and the other ends of this bell.
    Calling { line: Line, memory: Region, bell: Bell },
    /// The two workers talk.
    Talking(Line),
    /// The peer has broken the rules, and we do not listen to it any more. It hears so from our
    /// fabric; if the connection ended before, it would take us for dead.
    Deaf { _kept: Line },
}
