//! A configuration that an operator, or a program of theirs, wrote.

use smcgate::config::Config;

/// Reads `data` as the text of a configuration file.
///
/// # Panics
///
/// If a complaint names no key and no line, or a line that the file has not.
pub fn run(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let Err(error) = Config::parse(&text, "smcgate.toml") else { return };
    let lines = text.lines().count() + 1;
    assert!(error.line().is_none_or(|line| (1..=lines).contains(&line)), "{error} of {lines}");
    let complaint = error.to_string();
    assert!(!complaint.is_empty() && !complaint.contains('\n'), "{complaint:?}");
}
