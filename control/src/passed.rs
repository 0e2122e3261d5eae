//! Sockets that whoever started us has bound.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

/// Sockets that were bound for us, as systemd does for a `.socket` unit.
///
/// Whoever has bound them holds them as well, so that to close ours ends nothing: connections would
/// be established there, and nobody would serve them. So they are kept for as long as the process
/// lives, and at one that no listener has, connections are reset.
#[derive(Debug, Default)]
pub struct Passed(Vec<(SocketAddr, OwnedFd)>);

impl Passed {
    /// These, and the addresses to which they are bound.
    pub fn new(sockets: Vec<(SocketAddr, OwnedFd)>) -> Self {
        Self(sockets)
    }

    /// The socket that was bound to `address`.
    pub fn at(&self, address: SocketAddr) -> Option<&OwnedFd> {
        self.iter().find(|(bound, _)| *bound == address).map(|(_, socket)| socket)
    }

    /// All of them, in an order that does not change.
    pub fn iter(&self) -> impl Iterator<Item = (SocketAddr, &OwnedFd)> {
        self.0.iter().map(|(address, socket)| (*address, socket))
    }
}
