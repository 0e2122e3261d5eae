//! Durations as people write them: a whole number and a unit.

use std::time::Duration;

/// Reads `"50us"`, `"250ms"`, `"2s"`, `"10m"` or `"1h"`.
///
/// # Errors
///
/// A sentence that says what to write instead.
pub(super) fn parse(text: &str) -> Result<Duration, String> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let wrong = || {
        format!("\"{text}\" is no duration; write a whole number and us, ms, s, m or h, as \"5s\"")
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    if unit.is_empty() {
        return Err(format!("\"{text}\" {}", without_unit(digits)));
    }
    let micros_per_unit: u64 = match unit.trim_start() {
        "us" => 1,
        "ms" => 1_000,
        "s" => 1_000_000,
        "m" => 60_000_000,
        "h" => 3_600_000_000,
        _ => return Err(wrong()),
    };
    number
        .checked_mul(micros_per_unit)
        .filter(|micros| *micros <= MICROS_MAX)
        .map(Duration::from_micros)
        .ok_or_else(|| format!("\"{text}\" is more than a year; write a shorter time"))
}

/// What is wrong with `number` alone.
pub(super) fn without_unit(number: &str) -> String {
    format!("has no unit; write \"{number}s\" (or us, ms, m, h)")
}

/// A year. Anything longer is a slip of the pen, and sums of such times cannot overflow.
const MICROS_MAX: u64 = 366 * 24 * 3_600_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_means_what_it_says() {
        assert_eq!(parse("50us"), Ok(Duration::from_micros(50)));
        assert_eq!(parse("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(parse("2s"), Ok(Duration::from_secs(2)));
        assert_eq!(parse("10m"), Ok(Duration::from_secs(600)));
        assert_eq!(parse("1 h"), Ok(Duration::from_secs(3600)));
        assert_eq!(parse("0s"), Ok(Duration::ZERO));
    }

    /// A bare number once meant seconds here and milliseconds there; it means nothing.
    #[test]
    fn what_is_not_a_duration_is_refused() {
        for text in ["", "5", "s", "1.5s", "-1s", "5 sec", "18446744073709551616s", "9000h"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
