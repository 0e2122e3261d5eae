//! Figures in units for people.
//!
//! The page that the gateway serves has the same functions in `admin/page/units.js`, and a test
//! compares the two. Numbers are cut off rather than rounded, so that nothing is shown as
//! "1000 kB".

/// Bytes, in decimal units.
pub fn bytes(count: f64) -> String {
    scaled(count, &[" B", " kB", " MB", " GB", " TB", " PB", " EB"])
}

/// Bytes per second, as bits per second.
pub fn bits(bytes_per_second: f64) -> String {
    let units = [" bit/s", " kbit/s", " Mbit/s", " Gbit/s", " Tbit/s"];
    scaled((bytes_per_second * 8.0).floor(), &units)
}

/// How often per second.
pub fn rate(per_second: f64) -> String {
    scaled(per_second, &["/s", " k/s", " M/s"])
}

/// A time of that many nanoseconds.
pub fn nanoseconds(count: f64) -> String {
    scaled(count, &[" ns", " µs", " ms", " s"])
}

/// A count, its digits in groups of three.
pub fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Seconds, as the two largest units; a few seconds with tenths, unless they are whole.
pub fn duration(seconds: f64) -> String {
    if seconds < 10.0 && seconds.fract() > 0.0 {
        return format!("{:.1}s", (seconds * 10.0).floor() / 10.0);
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "whole seconds")]
    let whole = seconds as u64;
    let (minutes, hours, days) = (whole / 60, whole / 3_600, whole / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{whole}s"),
        (0, 0, _) => format!("{minutes}m {}s", whole % 60),
        (0, _, _) => format!("{hours}h {}m", minutes % 60),
        (_, _, _) => format!("{days}d {}h", hours % 24),
    }
}

/// A share between 0 and 1, in percent.
pub fn share(share: f64) -> String {
    format!("{:.1} %", (share * 1_000.0 + 1e-9).floor() / 10.0)
}

/// Three digits and a unit.
fn scaled(mut value: f64, units: &[&str]) -> String {
    let mut unit = 0;
    while value >= 1_000.0 && unit + 1 < units.len() {
        value /= 1_000.0;
        unit += 1;
    }
    let digits = match value {
        _ if unit == 0 && value.fract() == 0.0 => 0,
        100.0.. => 0,
        10.0.. => 1,
        _ => 2,
    };
    let power = [1.0, 10.0, 100.0][digits];
    format!("{:.digits$}{}", (value * power + 1e-9).floor() / power, units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_change_where_they_should() {
        let cases = [0.0, 999.0, 1_000.0, 1_009.9, 12_345.0, 999_999.0, 1e6, 3.5e9, 1.8e19];
        let words = ["0 B", "999 B", "1.00 kB", "1.00 kB", "12.3 kB", "999 kB", "1.00 MB"];
        assert_eq!(cases.map(bytes)[..7], words);
        assert_eq!(cases.map(bytes)[7..], ["3.50 GB", "18.0 EB"]);
        assert_eq!(
            [0.0, 12.5, 125_000.0, 1.25e9].map(bits),
            ["0 bit/s", "100 bit/s", "1.00 Mbit/s", "10.0 Gbit/s"]
        );
        assert_eq!(
            [0.0, 0.5, 3.0, 12.25, 2_500.0].map(rate),
            ["0/s", "0.50/s", "3/s", "12.2/s", "2.50 k/s"]
        );
        assert_eq!([800.0, 12_345.0, 2e9].map(nanoseconds), ["800 ns", "12.3 µs", "2.00 s"]);
    }

    #[test]
    fn times_and_counts_are_readable() {
        let cases = [0.0, 1.56, 9.0, 59.9, 60.0, 3_600.0, 90_000.0];
        let words = ["0s", "1.5s", "9s", "59s", "1m 0s", "1h 0m", "1d 1h"];
        assert_eq!(cases.map(duration), words);
        assert_eq!([0, 999, 1_000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([0.0, 0.123_45, 1.0].map(share), ["0.0 %", "12.3 %", "100.0 %"]);
    }
}
