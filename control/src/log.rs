//! Log lines: one per event, on standard error, for people and for grep.
//!
//! ```text
//! 2026-11-21T01:40:00.123456Z  INFO listening listener=to-b bind=127.0.0.1:7001
//! ```
//! The message is a fixed phrase, what varies is in fields, and the names of fields are stable:
//! `listener`, `bind`, `peer`, `connection`, `link_group`, `link`, `rnic`, `code`, `reason`,
//! `error`. Values a peer chose go through `Debug` or a type of ours, so that they cannot forge
//! lines. The data path never logs.

use tracing_subscriber::EnvFilter;

/// What is logged unless somebody asks for more or less.
pub const DEFAULT: &str = "info";

const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// Starts logging on standard error with this filter, see [`parse_filter`].
///
/// # Panics
///
/// If called a second time, or with a filter that [`parse_filter`] refuses: our bug.
pub fn start(filter: &str) {
    let filter = EnvFilter::try_new(filter).expect("the filter was checked");
    tracing_subscriber::fmt()
        .compact()
        .with_ansi(false)
        .with_target(false)
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
}

/// Checks a level or a filter as `tracing` understands it.
///
/// # Errors
///
/// What is wrong with it. A bare word that is no level is refused, though `tracing` would take it
/// for a module and silently log nothing.
pub fn parse_filter(filter: &str) -> Result<String, String> {
    let is_level = |word: &str| LEVELS.iter().any(|level| level.eq_ignore_ascii_case(word));
    let word = filter.split(',').find(|part| !part.contains('=') && !is_level(part));
    match (word, EnvFilter::try_new(filter)) {
        (Some(word), _) => Err(format!("{word:?} is none of {}", LEVELS.join(", "))),
        (None, Err(error)) => Err(error.to_string()),
        (None, Ok(_)) => Ok(filter.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A level with a typo must not mean silence.
    #[test]
    fn typos_are_refused() {
        for good in [DEFAULT, "TRACE", "off", "warn,smcgate::admin=debug"] {
            assert_eq!(parse_filter(good).as_deref(), Ok(good));
        }
        for bad in ["inof", "", "info,debgu", "smcgate=loud"] {
            assert!(parse_filter(bad).is_err(), "{bad:?}");
        }
    }
}
