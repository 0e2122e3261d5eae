//! What is wrong with a configuration file, in one line.

use std::fmt::{self, Write};

/// One fault of a configuration file.
///
/// Displays as `FILE:LINE: KEY: why; what to do`, on one line whatever the file contains: control
/// characters in its name, its keys and its values are escaped. The program prints the line and
/// exits with code 2; nothing has been started.
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
        write_on_one_line(f, &self.file)?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        if !self.key.is_empty() {
            f.write_str(": ")?;
            write_on_one_line(f, &self.key)?;
        }
        f.write_str(": ")?;
        write_on_one_line(f, &self.why)
    }
}

/// Writes `text` with its control characters escaped, so that it can neither begin a line of its
/// own nor command a terminal. The two line separators of Unicode count as well.
fn write_on_one_line(f: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    for letter in text.chars() {
        match letter {
            '\u{2028}' | '\u{2029}' => write!(f, "{}", letter.escape_unicode())?,
            _ if letter.is_control() => write!(f, "{}", letter.escape_default())?,
            _ => f.write_char(letter)?,
        }
    }
    Ok(())
}

impl std::error::Error for ConfigError {}
