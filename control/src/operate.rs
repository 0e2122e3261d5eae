//! What an operator can tell a running gateway to do: `POST /operate`, as types.

use std::fmt;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// One command. In JSON: `{"do": "rnic_down", "rnic": "r0", "orderly": true}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub enum Operation {
    /// Take a link out of its group; with the last one the group ends.
    LinkDelete {
        /// Its id, as `smcgate links` shows it.
        link: u32,
        /// Let its connections move first.
        orderly: bool,
    },
    /// Ask for another link in a group, on an RNIC that it does not use yet.
    LinkAdd {
        /// The group, as `smcgate groups` shows it.
        group: u32,
    },
    /// Take an RNIC out of use until `RnicUp`.
    RnicDown {
        /// Its name.
        rnic: String,
        /// Let connections move first.
        orderly: bool,
    },
    /// Use an RNIC again.
    RnicUp {
        /// Its name.
        rnic: String,
    },
    /// Read the configuration again, and put it in force.
    Reload,
    /// Open listeners for a minute whose connections go to a server for measurements.
    Measure {
        /// Its address.
        peer: SocketAddr,
    },
    /// Take no new connections.
    Drain {
        /// At this listener; none: at all of them.
        #[serde(default)]
        listener: Option<String>,
        /// Close connections on which nothing moves, spread over so many seconds.
        #[serde(default)]
        close_idle_over_s: Option<u32>,
    },
    /// Take connections again.
    Undrain {
        /// At this listener; none: at all of them.
        #[serde(default)]
        listener: Option<String>,
    },
}

/// Why a command was not obeyed. Displays on one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OperateError {
    /// The link, group or RNIC does not exist.
    Unknown(String),
    /// It cannot be done now.
    Refused(String),
    /// What the operator wrote is wrong.
    Wrong(String),
    /// The gateway did not answer.
    Silent,
}

impl fmt::Display for OperateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(what) => write!(f, "there is no {what}"),
            Self::Refused(why) | Self::Wrong(why) => f.write_str(why),
            Self::Silent => f.write_str("the control thread does not answer"),
        }
    }
}

impl std::error::Error for OperateError {}
