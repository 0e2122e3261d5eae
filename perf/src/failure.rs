//! The reason why a measurement failed, as one sentence for people.

use std::fmt;

/// A sentence that says what the harness was doing and what went wrong.
#[derive(Debug)]
pub(crate) struct Failure(String);

/// The result of operations whose failure ends a run.
pub(crate) type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// A failure that no other error caused.
    pub(crate) fn new(sentence: impl Into<String>) -> Self {
        Self(sentence.into())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Adds to an error what the harness was doing.
pub(crate) trait Doing<T> {
    /// Turns the error into a [`Failure`] that begins with `what`.
    fn doing(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: fmt::Display> Doing<T> for std::result::Result<T, E> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|error| Failure(format!("{}: {error}", what())))
    }
}
