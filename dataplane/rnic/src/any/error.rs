//! Why a NIC of some kind cannot be opened.

use std::fmt;
use std::io::{self, ErrorKind};

use crate::{shm, verbs};

/// Why a NIC cannot be opened: one line for the operator, who knows which NIC it is about.
#[derive(Debug)]
pub enum OpenError {
    /// The host refuses: there is no such device, its address is taken, or a privilege is missing.
    Host(io::Error),
    /// DPDK refuses.
    Dpdk(::dpdk::Error),
    /// Its kind says what is wrong.
    Shm(shm::OpenError),
    /// The same, of an RNIC or of libibverbs.
    Verbs(verbs::OpenError),
}

impl OpenError {
    /// Whether what is in the way may go by itself: a device or an address that is not there yet
    /// may come, and whoever has the port may end. Everything else takes somebody who mends it.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Host(error) => is_passing(error),
            Self::Dpdk(error) => matches!(error, ::dpdk::Error::Busy),
            Self::Shm(error) => is_passing(error.why()),
            Self::Verbs(error) => error.may_pass(),
        }
    }
}

fn is_passing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::NotFound
            | ErrorKind::AddrNotAvailable
            | ErrorKind::AddrInUse
            | ErrorKind::NetworkDown
    )
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(error) => write!(f, "{error}"),
            Self::Dpdk(error) => write!(f, "{error}"),
            Self::Shm(error) => write!(f, "{error}"),
            Self::Verbs(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for OpenError {}

impl From<shm::OpenError> for OpenError {
    fn from(error: shm::OpenError) -> Self {
        Self::Shm(error)
    }
}

impl From<verbs::OpenError> for OpenError {
    fn from(error: verbs::OpenError) -> Self {
        Self::Verbs(error)
    }
}

impl From<io::Error> for OpenError {
    fn from(error: io::Error) -> Self {
        Self::Host(error)
    }
}

impl From<::dpdk::Error> for OpenError {
    fn from(error: ::dpdk::Error) -> Self {
        Self::Dpdk(error)
    }
}
