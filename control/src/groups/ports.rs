//! The RNICs that link groups stand on, and the pollers behind them.

use smcr_engine::Command;
use smcr_rnic::{Opening, Rnic};

/// The queue pair of an RNIC, as it travels to its poller.
pub type QpOf<N> = <<N as Rnic>::Opening as Opening>::Qp;

/// One RNIC with its poller: an index that never changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortId(pub usize);

/// An RNIC as link groups use it.
pub struct Port<N> {
    /// What the operator calls it.
    pub name: String,
    /// The NIC; none where connections can only be TCP.
    pub rnic: Option<N>,
}

/// The pollers, one per port, as link groups command them.
///
/// Commands for one poller arrive in the order in which they were given.
pub trait Pollers<Qp> {
    /// What pollers call a socket.
    type Stream;

    /// Says `command` to the poller of `port`.
    fn command(&mut self, port: PortId, command: Command<Qp, Self::Stream>);
}
