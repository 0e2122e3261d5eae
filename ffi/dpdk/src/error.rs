//! Why DPDK, or one of its ports, cannot be used. Each is one line for an operator.

use std::fmt;

use dpdk_sys::Unavailable;

/// Why DPDK, or one of its ports, cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// There is no DPDK here.
    Unavailable(Unavailable),
    /// DPDK did not start, for this reason. It can be started once in a process, so it never will.
    NotStarted(String),
    /// DPDK runs already, with other arguments.
    StartedOtherwise,
    /// The name of the device cannot be right, for this reason.
    Misnamed(&'static str),
    /// Another process, or another RNIC of this one, has the port.
    Busy,
    /// The file that shows who has the port cannot be made, for this reason.
    Unlockable(String),
    /// The port cannot be opened: what failed, and why.
    Refused {
        /// What failed.
        step: &'static str,
        /// Why, as DPDK says.
        why: String,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unavailable(why) => write!(f, "{why}"),
            Self::NotStarted(why) => {
                write!(f, "DPDK does not start: {why}; correct `eal`, or ask smcgate doctor")
            }
            Self::StartedOtherwise => {
                write!(f, "DPDK runs already with other arguments; `eal` must be the same for all")
            }
            Self::Misnamed(why) => write!(f, "{why}"),
            Self::Busy => write!(
                f,
                "the port is busy: another process or RNIC has opened it; stop that one, or name \
                 another port"
            ),
            Self::Unlockable(why) => write!(f, "nobody can tell whether the port is busy: {why}"),
            Self::Refused { step, why } => write!(f, "{step}: {why}"),
        }
    }
}

impl std::error::Error for Error {}
