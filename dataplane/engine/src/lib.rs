//! One polling thread.
//!
//! A [`Poller`] owns the completion queue of one RNIC, the links that end on it, their connections
//! and the TCP sockets of those connections. One [turn](Poller::turn) of its loop takes whatever
//! has come and carries it as far as it goes: commands, completions, bytes from peers to sockets,
//! bytes from sockets to peers, control messages, timers. Everything a step frees, the next one
//! uses in the same turn.
//!
//! What never happens on this thread: a lock, a log line, a wait for another thread, an allocation
//! per byte moved, a registration, a connect. Those belong to the control thread, and the two talk
//! through two bounded queues of two enums, [`Command`] and [`Report`]. Pollers write each other
//! [letters](handoff::LetterOf), by queues of their own.
//!
//! - [`handoff`], [`mailbox`]: the conversation with the control thread, and its queues.
//! - [`streams`]: the TCP sockets; [`kernel`] is the real thing, on epoll, and [`near`] what its
//!   sockets are. `hot`: shared memory of local programs that is looked at.
//! - [`poller`]: the tables, the queues and the turn.
//! - `relay`: a connection, a value that borrows a `turn` of its poller.
//! - `mail`, `moves`: connections that change their poller, or their link.
//! - `parked`: CDC messages that came before their connection, or before others.
//! - [`idle`]: what to do when nothing moved: spin, yield or sleep.
//! - [`affinity`]: on which cores it runs.
//! - [`spacing`]: at which offsets in their pages bytes wait for readers.
//! - [`allowance`], `paced`: how fast connections may carry bytes, and who waits because of it.
//! - [`counters`], [`gauges`]: what others may read while we run.
#![forbid(unsafe_code)]

pub mod affinity;
pub mod allowance;
pub mod clock;
mod connections;
mod counter;
pub mod counters;
mod crowd;
pub mod gauges;
pub mod handoff;
mod hot;
pub mod idle;
pub mod kernel;
pub mod limits;
mod links;
mod load;
mod mail;
pub mod mailbox;
mod moves;
mod names;
pub mod near;
mod nearness;
mod owners;
mod paced;
mod parked;
pub mod poller;
pub mod priority;
mod relay;
mod reports;
mod requests;
pub mod spacing;
pub mod stages;
pub mod streams;
mod sync;
mod turn;
mod waiting;
mod waits;

pub use handoff::{Command, ConnectionId, Established, GroupId, LinkId, LlcBytes, Report};
pub use poller::Poller;
