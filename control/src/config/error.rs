//! What is wrong with a configuration file, in one line.

use std::fmt;

/// One fault of a configuration file.
///
/// Displays as `FILE:LINE: KEY: why; what to do`, on one line. The program prints it and exits
/// with code 2; nothing has been started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    file: String,
    line: Option<usize>,
    key: String,
    why: String,
}

impl ConfigError {
    /// A fault of `file`; `line` counts from one, `key` is a path such as `listener.to-b.bind`, or
    /// empty.
    pub(super) fn new(file: &str, line: Option<usize>, key: &str, why: impl Into<String>) -> Self {
        Self { file: file.to_owned(), line, key: key.to_owned(), why: why.into() }
    }

    /// The line, counted from one; `None` if the file could not be read.
    pub fn line(&self) -> Option<usize> {
        self.line
    }

    /// The key, as a path such as `listener.to-b.bind`; empty if no key is to blame.
    pub fn key(&self) -> &str {
        &self.key
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        if !self.key.is_empty() {
            write!(f, ": {}", self.key)?;
        }
        write!(f, ": {}", self.why)
    }
}

impl std::error::Error for ConfigError {}
