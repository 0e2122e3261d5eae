//! The files of `smcr-engine`, `smcr-memory` and `smcr-rnic` in which threads meet, on the threads
//! of a model checker.
//!
//! They are the production files, compiled once more with [`sync`] in place of the atomics and
//! descriptors of the real ones. The checker, loom, runs each test in `models.rs` under every
//! order of events that the memory model allows, within a bound.

pub mod sync;

#[allow(missing_docs, reason = "a model of a private module")]
pub mod limits {
    /// Two connections are enough to tell one from another.
    pub const CONNECTIONS_MAX: usize = 2;
    pub const LETTERS_MAX: usize = 4;
    pub const VALIDATIONS_WAITING_MAX: usize = 1;
}

#[allow(missing_docs, reason = "models of larger types")]
pub mod names {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct ConnectionId {
        pub slot: u16,
        pub generation: u16,
    }

    impl ConnectionId {
        pub fn from_token(token: smcr_proto::AlertToken) -> Self {
            let [high, low] = [token.0 >> 16, token.0 & 0xffff]
                .map(|half| u16::try_from(half).expect("half of a word"));
            Self { slot: low, generation: high }
        }
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct GroupId(pub u32);
}

#[allow(missing_docs, reason = "a model of a larger type")]
pub mod parked {
    use smcr_proto::wire::cdc::Cdc;

    #[derive(Clone, Copy, Debug)]
    pub struct Waiting {
        pub message: Cdc,
        pub replaces: Option<u16>,
    }

    impl Waiting {
        pub fn in_place_of(self, before: Self) -> Self {
            Self { replaces: Some(before.message.sequence), ..self }
        }
    }

    impl From<Cdc> for Waiting {
        fn from(message: Cdc) -> Self {
            Self { message, replaces: None }
        }
    }
}

#[allow(missing_docs, reason = "a model of a larger type")]
pub mod stages {
    /// Counters as all others, which one thread writes.
    #[derive(Debug, Default)]
    pub struct Stages;
}

pub mod shm;

pub mod desk;
pub mod page;

#[path = "../../dataplane/engine/src/counter.rs"]
mod counter;
#[path = "../../dataplane/engine/src/counters.rs"]
pub mod counters;
#[path = "../../dataplane/engine/src/gauges.rs"]
pub mod gauges;
#[allow(dead_code, reason = "a poller does more with its mail than a desk")]
#[path = "../../dataplane/engine/src/mail.rs"]
pub mod mail;
#[path = "../../dataplane/engine/src/mailbox.rs"]
pub mod mailbox;
#[allow(dead_code, reason = "a region does more with its occupants than a page")]
#[path = "../../dataplane/memory/src/occupants.rs"]
mod occupants;
#[path = "../../dataplane/engine/src/owners.rs"]
pub mod owners;
#[path = "../../dataplane/rnic/src/queue.rs"]
mod queue;
