//! What a gateway has given up.

use serde::{Deserialize, Serialize};

/// What the process has given up since its start. The words are `on`, `off` with who said so, or
/// why the kernel cannot do it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Confinement {
    /// Capabilities that some thread still has, by name.
    pub capabilities: Vec<String>,
    /// Whether all others were dropped.
    pub dropped: String,
    /// Whether no thread can gain privileges by running a program.
    pub no_new_privs: bool,
    /// Whether files that it does not need are denied to it.
    pub landlock: String,
    /// Whether system calls that it does not need are denied to it.
    pub seccomp: String,
}
