//! `[confine]`: what the process gives up once it has started.

use super::error::ConfigError;
use super::section::Section;

/// What the process gives up once it has started, where the kernel knows of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Confine {
    /// System calls that it does not need.
    pub seccomp: bool,
    /// Files that it does not need.
    pub landlock: bool,
    /// Capabilities that it does not need.
    pub drop_capabilities: bool,
}

impl Confine {
    /// Whether anything is given up at all.
    pub fn is_on(self) -> bool {
        self.seccomp || self.landlock || self.drop_capabilities
    }
}

/// The table `[confine]`.
pub(super) fn read(mut table: Section<'_>) -> Result<Confine, ConfigError> {
    let confine = Confine {
        seccomp: table.boolean("seccomp", true)?,
        landlock: table.boolean("landlock", true)?,
        drop_capabilities: table.boolean("drop_capabilities", true)?,
    };
    table.finish()?;
    Ok(confine)
}
