//! The files of `smcr-engine` in which threads meet, on the threads of a model checker.
//!
//! They are the production files, compiled once more with [`sync`] in place of the atomics, queues
//! and descriptors of the real ones. The checker, loom, runs each test in `models.rs` under every
//! order of events that the memory model allows, within a bound.

pub mod sync;

#[allow(missing_docs, reason = "a model of a private module")]
pub mod limits {
    /// Two connections are enough to tell one from another.
    pub const CONNECTIONS_MAX: usize = 2;
}

#[allow(missing_docs, reason = "models of larger types")]
pub mod names {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct ConnectionId {
        pub slot: u16,
        pub generation: u16,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct GroupId(pub u32);
}

#[path = "../../dataplane/engine/src/counters.rs"]
pub mod counters;
#[path = "../../dataplane/engine/src/gauges.rs"]
pub mod gauges;
#[path = "../../dataplane/engine/src/mailbox.rs"]
pub mod mailbox;
#[path = "../../dataplane/engine/src/owners.rs"]
pub mod owners;
