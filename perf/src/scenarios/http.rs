//! RR-32-http and CRR-http: nginx loaded by wrk, as in most published HTTP benchmarks.
//!
//! Estimate, keep-alive: nginx 4 µs and wrk 4 µs per request, kernel work of two sends and two
//! receives as in RR(32): about 200 k/s direct, a third of it through a HAProxy pair.
//! Estimate, `Connection: close`: as CRR, since TCP's set-up dwarfs HTTP: about 33 k/s direct.

use std::net::SocketAddr;
use std::time::Duration;

use super::LoadResult;
use crate::latency::Latency;

/// The connections that wrk keeps open.
pub(crate) const CONNECTIONS: u32 = 32;

/// Whether a connection carries one request or many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeepAlive {
    Yes,
    No,
}

/// wrk's command line. Its unit of time is the second, so `duration` is rounded up.
pub(crate) fn wrk(target: SocketAddr, duration: Duration, keep_alive: KeepAlive) -> Vec<String> {
    let seconds = duration.as_secs_f64().ceil();
    let mut command: Vec<String> = ["wrk", "--latency", "-t1"].map(str::to_owned).to_vec();
    command.push(format!("-c{CONNECTIONS}"));
    command.push(format!("-d{seconds}s"));
    if keep_alive == KeepAlive::No {
        command.extend(["-H".to_owned(), "Connection: close".to_owned()]);
    }
    command.push(format!("http://{target}/"));
    command
}

/// Reads wrk's report. It gives percentiles but no histogram, and rounds them to three digits.
///
/// # Errors
///
/// With a sentence that says which line is missing or unreadable.
pub(crate) fn parse(output: &str, keep_alive: KeepAlive) -> Result<LoadResult, String> {
    let after = |label: &str| {
        output
            .lines()
            .find_map(|line| line.trim().strip_prefix(label))
            .map(str::trim)
            .ok_or_else(|| format!("wrk printed no line {label:?}"))
    };
    let percentile = |label: &str| after(label).and_then(duration_ns);
    let summary = output
        .lines()
        .find(|line| line.contains(" requests in "))
        .ok_or("wrk printed no summary line")?;
    let (requests, rest) = summary.split_once(" requests in ").expect("found by this text");
    let requests: u64 = requests.trim().parse().map_err(|_| format!("wrk: {summary:?}"))?;
    let (elapsed, read) = rest.split_once(", ").ok_or_else(|| format!("wrk: {summary:?}"))?;
    let elapsed_s = duration_ns(elapsed)? as f64 / 1e9;
    // "Thread Stats  Avg  Stdev  Max": the third number of the line "Latency" is the maximum.
    let thread_line = after("Latency ")?;
    let mean_ns =
        thread_line.split_whitespace().next().ok_or("wrk: no mean").map(duration_ns)??;
    let max_ns =
        thread_line.split_whitespace().nth(2).ok_or("wrk: no maximum").map(duration_ns)??;
    let latency = Latency {
        count: requests,
        min_ns: None,
        mean_ns: mean_ns as f64,
        p50_ns: percentile("50%")?,
        p90_ns: Some(percentile("90%")?),
        p99_ns: percentile("99%")?,
        p999_ns: None,
        max_ns,
        histogram_ns: Vec::new(),
    };
    Ok(LoadResult {
        elapsed_s,
        connections_opened: match keep_alive {
            KeepAlive::Yes => u64::from(CONNECTIONS),
            KeepAlive::No => requests,
        },
        bytes_total: bytes(read.trim_end_matches(" read"))?,
        requests_total: requests,
        requests_per_s: Some(
            after("Requests/sec:")?.parse().map_err(|_| "wrk: Requests/sec unreadable")?,
        ),
        latency: Some(latency),
        errors: errors(output)?,
        ..LoadResult::default()
    })
}

/// `Socket errors: connect 0, read 12, write 0, timeout 0` and `Non-2xx or 3xx responses: 5`, both
/// printed only if something failed.
fn errors(output: &str) -> Result<u64, String> {
    let mut sum = 0;
    for line in output.lines().map(str::trim) {
        let counts =
            line.strip_prefix("Socket errors:").or(line.strip_prefix("Non-2xx or 3xx responses:"));
        for count in counts.unwrap_or_default().split(',').filter(|text| !text.is_empty()) {
            let digits = count.split_whitespace().last().unwrap_or_default();
            sum += digits.parse::<u64>().map_err(|_| format!("wrk: {line:?}"))?;
        }
    }
    Ok(sum)
}

/// `410.00us`, `1.25ms`, `3.01s`, `1.00m`.
fn duration_ns(text: &str) -> Result<u64, String> {
    scaled(text, &[("us", 1e3), ("ms", 1e6), ("s", 1e9), ("m", 60e9)])
}

/// `512.00B`, `1.25KB`, `3.01MB`, `1.00GB`; wrk counts in powers of 1024.
fn bytes(text: &str) -> Result<u64, String> {
    const KIB: f64 = 1024.0;
    scaled(text, &[("KB", KIB), ("MB", KIB * KIB), ("GB", KIB * KIB * KIB), ("B", 1.0)])
}

/// The number before the first of `units` that ends `text`, times its factor.
fn scaled(text: &str, units: &[(&str, f64)]) -> Result<u64, String> {
    for (unit, factor) in units {
        if let Some(digits) = text.trim().strip_suffix(unit) {
            let number: f64 = digits.trim().parse().map_err(|_| format!("wrk: {text:?}"))?;
            #[expect(clippy::cast_possible_truncation, reason = "rounded, and far below 2^53")]
            #[expect(clippy::cast_sign_loss, reason = "durations and sizes are not negative")]
            return Ok((number * factor).round() as u64);
        }
    }
    Err(format!("wrk: {text:?} has no unit"))
}

#[cfg(test)]
mod tests;
