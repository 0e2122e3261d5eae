//! What the connections of a listener may take: places, time and bandwidth.

use std::fmt;
use std::num::NonZeroU64;
use std::time::Duration;

use serde_json::{Value, json};

use super::error::ConfigError;
use super::limits::{CONNECTIONS_MAX, Limits};
use super::section::{Section, Source};

/// What the connections of a listener may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Connections it serves at once.
    pub connections_max: u32,
    /// How many of them one client address may have; in IPv6, one network of 64 bits.
    pub max_per_source: u32,
    /// How many new ones come in, in all.
    pub rate_max: Option<Rate>,
    /// The same of each source.
    pub rate_per_source: Option<Rate>,
    /// What becomes of a connection that exceeds one of these.
    pub over_limit: OverLimit,
    /// How long it waits, if that is to wait, before it is refused.
    pub wait_timeout: Duration,
    /// How long nothing may move on a connection before it is reset; zero: for ever.
    pub idle_timeout: Duration,
    /// The same once one direction has ended.
    pub half_closed_timeout: Duration,
    /// How old a connection may become before it is reset; zero: as old as it likes.
    pub age_max: Duration,
    /// What all connections together may carry in each direction.
    pub bandwidth_max: Option<Bandwidth>,
    /// What each may carry in each direction.
    pub bandwidth_per_connection: Option<Bandwidth>,
}

/// How many new connections come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// In a second, on average.
    pub per_second: u32,
    /// At once, after a pause.
    pub burst: u32,
}

/// What becomes of a connection that exceeds a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverLimit {
    /// It is reset.
    Refuse,
    /// It waits for its turn, and is reset if that does not come soon enough.
    Wait,
    /// It comes in, but without SMC-R.
    Tcp,
}

/// Bytes in a second. People write bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bandwidth(NonZeroU64);

impl Bounds {
    /// Reads the keys of a listener.
    pub(super) fn read(
        source: Source<'_>,
        table: &mut Section<'_>,
        limits: &Limits,
    ) -> Result<Self, ConfigError> {
        let range = 1..CONNECTIONS_MAX + 1;
        let connections_max =
            table.count("connections_max", range.clone(), limits.connections_max)?;
        let bounds = Self {
            connections_max,
            max_per_source: table.count("max_per_source", range, connections_max)?,
            rate_max: rate(table, "rate_max", "rate_burst")?,
            rate_per_source: rate(table, "rate_per_source", "rate_per_source_burst")?,
            over_limit: table.word("over_limit", &OVER_LIMIT, OverLimit::Refuse)?,
            wait_timeout: table.duration("wait_timeout", Duration::from_secs(5))?,
            idle_timeout: table.duration("idle_timeout", Duration::ZERO)?,
            half_closed_timeout: table.duration("half_closed_timeout", Duration::ZERO)?,
            age_max: table.duration("age_max", Duration::ZERO)?,
            bandwidth_max: bandwidth(source, table, "bandwidth_max")?,
            bandwidth_per_connection: bandwidth(source, table, "bandwidth_per_connection")?,
        };
        if bounds.over_limit == OverLimit::Wait && bounds.wait_timeout.is_zero() {
            let why = "0s is no time to wait; write over_limit = \"refuse\" instead";
            return Err(table.error("wait_timeout", why));
        }
        Ok(bounds)
    }

    /// The limits that somebody has set, in words.
    pub fn in_words(&self, limits: &Limits) -> Vec<String> {
        let over = match self.over_limit {
            OverLimit::Refuse => "more are refused".to_owned(),
            OverLimit::Wait => {
                format!("more wait for up to {}", super::shown::duration(self.wait_timeout))
            }
            OverLimit::Tcp => "more come in without SMC-R".to_owned(),
        };
        let rates = [("new connections", self.rate_max), ("of each source", self.rate_per_source)];
        let rates = rates.into_iter().filter_map(|(what, rate)| Some((what, rate?)));
        let rates: Vec<_> = rates.map(|(what, rate)| format!("{what}: {rate}")).collect();
        let widths = [
            ("bandwidth of all connections", self.bandwidth_max),
            ("of each", self.bandwidth_per_connection),
        ];
        let widths = widths.into_iter().filter_map(|(what, width)| Some((what, width?)));
        let widths = widths.map(|(what, width)| format!("{what}: {width} in each direction"));
        let times = [
            ("idle", self.idle_timeout),
            ("half closed and idle", self.half_closed_timeout),
            ("open", self.age_max),
        ];
        let times = times.into_iter().filter(|(_, time)| !time.is_zero());
        let times = times
            .map(|(what, time)| format!("reset when {what} for {}", super::shown::duration(time)));
        let (all, each) = (self.connections_max, self.max_per_source);
        let places = format!("connections: {all}, {each} of each source; {over}");
        let is_usual = all == limits.connections_max && each == all && rates.is_empty();
        let places = (!is_usual || self.over_limit != OverLimit::Refuse).then_some(places);
        places.into_iter().chain(rates).chain(widths).chain(times).collect()
    }

    /// Adds the keys to those of a listener.
    pub(super) fn show(&self, listener: &mut Value) {
        let time = super::shown::duration;
        let rate = |rate: Option<Rate>| rate.map_or(0, |rate| rate.per_second);
        let burst = |rate: Option<Rate>| rate.map(|rate| rate.burst);
        listener["connections_max"] = json!(self.connections_max);
        listener["max_per_source"] = json!(self.max_per_source);
        listener["rate_max"] = json!(rate(self.rate_max));
        listener["rate_burst"] = json!(burst(self.rate_max));
        listener["rate_per_source"] = json!(rate(self.rate_per_source));
        listener["rate_per_source_burst"] = json!(burst(self.rate_per_source));
        listener["over_limit"] = json!(super::shown::word(&OVER_LIMIT, self.over_limit));
        listener["wait_timeout"] = json!(time(self.wait_timeout));
        listener["idle_timeout"] = json!(time(self.idle_timeout));
        listener["half_closed_timeout"] = json!(time(self.half_closed_timeout));
        listener["age_max"] = json!(time(self.age_max));
        let text = |bandwidth: Option<Bandwidth>| bandwidth.map(|it| it.to_string());
        listener["bandwidth_max"] = json!(text(self.bandwidth_max));
        listener["bandwidth_per_connection"] = json!(text(self.bandwidth_per_connection));
    }
}

/// A rate, and what may come at once: as much as in a second, if nothing else is said.
fn rate(
    table: &mut Section<'_>,
    key: &'static str,
    burst_key: &'static str,
) -> Result<Option<Rate>, ConfigError> {
    let per_second = table.count(key, 0..RATE_MAX + 1, 0)?;
    let has_burst = table.has(burst_key);
    let burst = table.count(burst_key, 1..RATE_MAX + 1, per_second.max(1))?;
    if per_second == 0 && has_burst {
        return Err(table.error(burst_key, format!("has no meaning without {key}")));
    }
    Ok((per_second > 0).then_some(Rate { per_second, burst }))
}

fn bandwidth(
    source: Source<'_>,
    table: &mut Section<'_>,
    key: &'static str,
) -> Result<Option<Bandwidth>, ConfigError> {
    let text = table.text(key)?;
    text.map(|text| Bandwidth::parse(&text.value).map_err(|why| text.error(source, why)))
        .transpose()
}

impl Bandwidth {
    /// Bytes in a second.
    pub fn bytes_per_second(self) -> NonZeroU64 {
        self.0
    }

    /// Reads `"800kbit"`, `"100Mbit"` or `"10Gbit"`: thousands of bits in a second, and so on.
    fn parse(text: &str) -> Result<Self, String> {
        let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (digits, unit) = text.split_at(split);
        let unit = UNITS.iter().find(|(name, _)| *name == unit.trim_start());
        let wrong = || {
            format!(
                "\"{text}\" is no bandwidth; write bits per second with kbit, Mbit or Gbit, as \
                 \"100Mbit\""
            )
        };
        let number: u64 = digits.parse().map_err(|_| wrong())?;
        let (_, bits) = unit.ok_or_else(wrong)?;
        let bytes = number.checked_mul(bits / 8).filter(|bytes| BYTES.contains(bytes));
        let bytes = bytes.and_then(NonZeroU64::new);
        let out_of_range =
            || format!("\"{text}\" is out of range; write \"64kbit\" to \"800Gbit\"");
        bytes.map(Self).ok_or_else(out_of_range)
    }
}

impl fmt::Display for Bandwidth {
    /// In the largest unit that is exact.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0.get();
        let exact = UNITS.iter().find(|(_, bits)| bytes.is_multiple_of(bits / 8));
        let (name, bits) = exact.expect("it was written in one of these");
        write!(f, "{}{name}", bytes / (bits / 8))
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/s, {} at once", self.per_second, self.burst)
    }
}

/// The largest first.
const UNITS: [(&str, u64); 3] = [("Gbit", 1_000_000_000), ("Mbit", 1_000_000), ("kbit", 1_000)];
/// With less, a segment takes seconds; more is a slip of the pen.
const BYTES: std::ops::RangeInclusive<u64> = 8_000..=100_000_000_000;
/// More than any host accepts.
const RATE_MAX: u32 = 1_000_000;
const OVER_LIMIT: [(&str, OverLimit); 3] =
    [("refuse", OverLimit::Refuse), ("wait", OverLimit::Wait), ("tcp", OverLimit::Tcp)];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn read(lines: &str) -> Result<Bounds, String> {
        let listener = "[[listener]]\nname = 'a'\nbind = '127.0.0.1:1'\nupstream = '127.0.0.1:2'\n";
        let config = Config::parse(&format!("{listener}{lines}"), "a.toml");
        Ok(config.map_err(|error| error.to_string())?.listeners[0].bounds.clone())
    }

    #[test]
    fn nothing_is_limited_unless_somebody_says_so() {
        let bounds = read("").unwrap();
        let expected = Bounds {
            connections_max: 9000,
            max_per_source: 9000,
            rate_max: None,
            rate_per_source: None,
            over_limit: OverLimit::Refuse,
            wait_timeout: Duration::from_secs(5),
            idle_timeout: Duration::ZERO,
            half_closed_timeout: Duration::ZERO,
            age_max: Duration::ZERO,
            bandwidth_max: None,
            bandwidth_per_connection: None,
        };
        assert_eq!(bounds, expected);
    }

    #[test]
    fn every_key_arrives_where_it_belongs() {
        let bounds = read(
            "connections_max = 70\nrate_max = 100\nrate_per_source = 5\n\
             rate_per_source_burst = 20\nover_limit = 'wait'\nwait_timeout = '2s'\n\
             half_closed_timeout = '3s'\nage_max = '1h'\nidle_timeout = '4s'\n\
             bandwidth_max = '100Mbit'\nbandwidth_per_connection = '800 kbit'",
        );
        let bounds = bounds.unwrap();
        assert_eq!((bounds.connections_max, bounds.max_per_source), (70, 70));
        assert_eq!(bounds.rate_max, Some(Rate { per_second: 100, burst: 100 }));
        assert_eq!(bounds.rate_per_source, Some(Rate { per_second: 5, burst: 20 }));
        assert_eq!((bounds.over_limit, bounds.wait_timeout.as_secs()), (OverLimit::Wait, 2));
        let times = [bounds.half_closed_timeout, bounds.idle_timeout, bounds.age_max];
        assert_eq!(times.map(|time| time.as_secs()), [3, 4, 3600]);
        let bytes = |it: Option<Bandwidth>| it.unwrap().bytes_per_second().get();
        assert_eq!(bytes(bounds.bandwidth_max), 12_500_000);
        assert_eq!(bytes(bounds.bandwidth_per_connection), 100_000);
    }

    /// Bits and bytes differ by eight, and so do the opinions on what a bare number means.
    #[test]
    fn what_makes_no_sense_is_an_error() {
        for (lines, why) in [
            ("bandwidth_max = '100MB'", ":5: listener.a.bandwidth_max: \"100MB\" is no bandwidth"),
            ("bandwidth_max = '100'", "as \"100Mbit\""),
            ("bandwidth_max = 100", "text in quotes"),
            ("bandwidth_max = '0Mbit'", "out of range"),
            ("bandwidth_per_connection = '63kbit'", "out of range"),
            ("bandwidth_max = '99999999999999999Gbit'", "out of range"),
            ("rate_burst = 5", "listener.a.rate_burst: has no meaning without rate_max"),
            ("rate_max = 1\nrate_burst = 0", "out of range"),
            ("over_limit = 'drop'", "\"refuse\" or \"wait\" or \"tcp\""),
            ("over_limit = 'wait'\nwait_timeout = '0s'", "no time to wait"),
        ] {
            let error = read(lines).expect_err(lines);
            assert!(error.contains(why), "{lines}\n{error}");
        }
    }

    /// `smcgate check` shows what an operator has limited, and what follows.
    #[test]
    fn limits_have_words() {
        let bounds = read(
            "connections_max = 7\nmax_per_source = 3\nrate_per_source = 5\nover_limit = 'wait'\n\
             bandwidth_max = '1Gbit'\nage_max = '90m'",
        );
        let expected = [
            "connections: 7, 3 of each source; more wait for up to 5s",
            "of each source: 5/s, 5 at once",
            "bandwidth of all connections: 1Gbit in each direction",
            "reset when open for 90m",
        ];
        let limits = |max| Limits {
            connections_max: max,
            handshakes_max: 1,
            silent_max: 1,
            rmb_bytes: None,
        };
        assert_eq!(bounds.unwrap().in_words(&limits(9000)), expected);
        assert!(read("").unwrap().in_words(&limits(9000)).is_empty());
    }

    #[test]
    fn bandwidths_are_shown_in_the_largest_exact_unit() {
        for (written, shown) in
            [("1000Mbit", "1Gbit"), ("1500kbit", "1500kbit"), ("64 kbit", "64kbit")]
        {
            assert_eq!(Bandwidth::parse(written).unwrap().to_string(), shown);
        }
    }
}
