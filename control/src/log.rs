//! Log lines: one per event, on standard error, for people and for grep.
//!
//! ```text
//! 2026-11-21T01:40:00.123456Z  INFO listening listener=to-b bind=127.0.0.1:7001
//! ```
//! The message is a fixed phrase, what varies is in fields, and the names of fields are stable:
//! `listener`, `bind`, `peer`, `connection`, `link_group`, `link`, `rnic`, `code`, `reason`,
//! `error`. Values a peer chose go through `Debug` or a type of ours, so that they cannot forge
//! lines. The data path never logs.
//!
//! Peers can cause lines, and must not fill a disk with them. Lines are of one kind if one place in
//! the source writes them. Of each kind up to a thousand are written at once, and then one a
//! second; the next line says how many were left out (`suppressed`). Lines of `debug` and `trace`
//! are never left out.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use smcr_engine::clock::Clock;
use smcr_proto::Instant;
use tracing::callsite::Identifier;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::{Format, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Registry, reload};

use crate::config::LogLevel;

/// What is logged unless somebody asks for more or less.
pub const DEFAULT: &str = "info";

const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// Starts logging on standard error with this filter, see [`parse_filter`].
///
/// # Panics
///
/// If called a second time, or with a filter that [`parse_filter`] refuses: our bug.
///
/// `None`: at this level until [`change`] says otherwise.
pub fn start(filter: Option<&str>, level: LogLevel) {
    let text = filter.unwrap_or(name_of(level));
    let filter_now = EnvFilter::try_new(text).expect("the filter was checked");
    let (filter_now, handle) = reload::Layer::new(filter_now);
    if filter.is_none() {
        // Who has given a filter at the command line wants that one.
        LEVEL.set(handle).expect("logging starts once");
    }
    let lines = Format::default().compact().with_ansi(false).with_target(false);
    let limited = Limited { lines, clock: Clock::new(), kinds: Mutex::default() };
    let layer = tracing_subscriber::fmt::layer().with_ansi(false).event_format(limited);
    let layer = layer.with_writer(std::io::stderr);
    tracing_subscriber::registry().with(filter_now).with(layer).init();
}

/// From now on logs what is worth `level`, unless a filter was given at the start.
pub fn change(level: LogLevel) {
    let filter = EnvFilter::try_new(name_of(level)).expect("a level is a filter");
    if let Some(handle) = LEVEL.get() {
        // Fails only if nobody logs any more.
        let _ = handle.reload(filter);
    }
}

/// What changes the level later.
static LEVEL: OnceLock<reload::Handle<EnvFilter, Registry>> = OnceLock::new();

fn name_of(level: LogLevel) -> &'static str {
    match level {
        LogLevel::Error => "error",
        LogLevel::Warn => "warn",
        LogLevel::Info => "info",
        LogLevel::Debug => "debug",
        LogLevel::Trace => "trace",
    }
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

/// Writes lines in the format of `F`, and leaves out those that are too many.
struct Limited<F> {
    lines: F,
    clock: Clock,
    kinds: Mutex<Kinds>,
}

impl<S, N, F> FormatEvent<S, N> for Limited<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let (kind, level) = (event.metadata().callsite(), *event.metadata().level());
        let passed = {
            let mut kinds = self.kinds.lock().expect("nobody panics while it counts");
            kinds.pass(self.clock.now(), kind, level)
        };
        match passed {
            None => Ok(()),
            Some(0) => self.lines.format_event(context, writer, event),
            Some(left_out) => {
                let mut line = String::new();
                self.lines.format_event(context, Writer::new(&mut line), event)?;
                writeln!(writer, "{} suppressed={left_out}", line.trim_end())
            }
        }
    }
}

/// How many lines of each kind may be written.
#[derive(Debug, Default)]
struct Kinds(HashMap<Identifier, Allowance>);

#[derive(Clone, Copy, Debug)]
struct Allowance {
    lines: u32,
    /// When the time began after which one more line may be written.
    since: Instant,
    left_out: u64,
}

impl Kinds {
    /// Whether to write a line; if so, how many of its kind were left out since the last one.
    fn pass(&mut self, now: Instant, kind: Identifier, level: Level) -> Option<u64> {
        if level > Level::INFO {
            return Some(0);
        }
        let fresh = Allowance { lines: LINES_AT_ONCE, since: now, left_out: 0 };
        let allowance = self.0.entry(kind).or_insert(fresh);
        let gained = now.since(allowance.since).as_secs() / LINE_EVERY.as_secs();
        if gained > 0 {
            let gained = u32::try_from(gained).unwrap_or(u32::MAX);
            allowance.lines = allowance.lines.saturating_add(gained).min(LINES_AT_ONCE);
            allowance.since = now;
        }
        if allowance.lines == 0 {
            allowance.left_out += 1;
            return None;
        }
        allowance.lines -= 1;
        Some(std::mem::take(&mut allowance.left_out))
    }
}

/// How many lines of one kind may be written at once: more than a start with hundreds of listeners
/// writes.
const LINES_AT_ONCE: u32 = 1_000;
/// How long it takes until one more may be written.
const LINE_EVERY: Duration = Duration::from_secs(1);

#[cfg(test)]
pub(crate) mod tests {
    use std::io;
    use std::sync::Arc;

    use super::*;

    /// What was written.
    #[derive(Clone, Default)]
    pub(crate) struct Text(pub(crate) Arc<Mutex<Vec<u8>>>);

    impl io::Write for Text {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// A peer that can cause a line as often as it likes could fill the disk, and lines of other
    /// kinds would be lost among them.
    #[test]
    fn a_flood_of_one_kind_is_cut_and_leaves_room_for_others() {
        let text = Text::default();
        let out = text.clone();
        let lines = Format::default().compact().without_time().with_ansi(false).with_target(false);
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .event_format(Limited { lines, clock: Clock::new(), kinds: Mutex::default() })
            .with_max_level(Level::DEBUG)
            .with_writer(move || out.clone())
            .finish();
        let flood = 5 * LINES_AT_ONCE;
        tracing::subscriber::with_default(subscriber, || {
            for number in 0..flood {
                tracing::warn!(number, "a flood");
                tracing::debug!(number, "asked for");
            }
            tracing::warn!("another kind");
        });
        let text = String::from_utf8(text.0.lock().unwrap().clone()).unwrap();
        let count = |what: &str| text.lines().filter(|line| line.contains(what)).count();
        let written = count("a flood");
        // A slow machine may take seconds for them.
        assert!((1_000..1_100).contains(&written), "{written}");
        assert_eq!((count("asked for"), count("another kind")), (flood as usize, 1));
    }

    /// It is said how much is missing, and after a quiet time everything is as before.
    #[test]
    fn what_was_left_out_is_counted() {
        let mut kinds = Kinds::default();
        let kind = Identifier(&KIND);
        let at = |ms: u64| Instant(ms * 1_000_000);
        let passed = |kinds: &mut Kinds, ms| kinds.pass(at(ms), kind.clone(), Level::WARN);
        for _ in 0..LINES_AT_ONCE {
            assert_eq!(passed(&mut kinds, 0), Some(0));
        }
        assert_eq!([passed(&mut kinds, 1), passed(&mut kinds, 999)], [None, None]);
        assert_eq!([passed(&mut kinds, 1_000), passed(&mut kinds, 1_001)], [Some(2), None]);
        assert_eq!(passed(&mut kinds, 10_000_000), Some(1));
        assert_eq!(kinds.0[&kind].lines, LINES_AT_ONCE - 1);
    }

    /// Stands for a place in the source.
    struct Kind;

    static KIND: Kind = Kind;

    impl tracing::callsite::Callsite for Kind {
        fn set_interest(&self, _: tracing::subscriber::Interest) {}

        fn metadata(&self) -> &tracing::Metadata<'_> {
            unreachable!("nobody asks")
        }
    }

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
