//! A line about a connection.

use std::borrow::Cow;
use std::io::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use smcr_engine::clock::Clock;
use time::OffsetDateTime;

use super::record::Record;
use crate::config::{Field, LineFormat, Piece};
use crate::stats::Transport;
use crate::termination::Party;

/// What is known of one field.
enum Value<'a> {
    Unknown,
    Text(Cow<'a, str>),
    Number(u64),
    /// Shown in milliseconds.
    Time(Duration),
}

/// Appends the line about `record`, without its end.
pub(super) fn write_line(format: &LineFormat, clock: &Clock, record: &Record, out: &mut Vec<u8>) {
    match format {
        LineFormat::Json => write_json(clock, record, out),
        LineFormat::Pieces(pieces) => {
            for piece in pieces {
                match piece {
                    Piece::Text(text) => out.extend_from_slice(text.as_bytes()),
                    Piece::Field(field) => write_plain(&value(clock, record, *field), out),
                }
            }
        }
    }
}

/// Appends the fields that are known, as journald takes them.
///
/// ```text
///   SMCGATE_LISTENER=to-b
/// ```
pub(super) fn write_fields(clock: &Clock, record: &Record, out: &mut Vec<u8>) {
    for field in Field::ALL {
        let value = value(clock, record, field);
        if !matches!(value, Value::Unknown) {
            let mut text = Vec::new();
            write_plain(&value, &mut text);
            write_field(&format!("SMCGATE_{}", field.name().to_uppercase()), &text, out);
        }
    }
}

/// Appends one field as journald takes it. What has several lines is preceded by its length.
pub(super) fn write_field(name: &str, value: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(name.as_bytes());
    if value.contains(&b'\n') {
        out.push(b'\n');
        out.extend_from_slice(&(value.len() as u64).to_le_bytes());
    } else {
        out.push(b'=');
    }
    out.extend_from_slice(value);
    out.push(b'\n');
}

/// Appends the beginning of a message for a syslog daemon on this host, as `syslog(3)` writes it.
/// There is no time zone in it; ours is UTC. Daemons take the time of arrival in its place.
pub(super) fn write_syslog_head(clock: &Clock, record: &Record, out: &mut Vec<u8>) {
    let at = calendar(clock.calendar_time(record.ended));
    let month = MONTHS[usize::from(u8::from(at.month()) - 1)];
    let (day, hour, minute, second) = (at.day(), at.hour(), at.minute(), at.second());
    let process = std::process::id();
    let head = write!(
        out,
        "<{PRIORITY}>{month} {day:2} {hour:02}:{minute:02}:{second:02} smcgate[{process}]: "
    );
    head.expect(NEVER);
}

fn write_json(clock: &Clock, record: &Record, out: &mut Vec<u8>) {
    let mut before = '{';
    for field in Field::ALL {
        write!(out, "{before}\"{}\":", field.name()).expect(NEVER);
        before = ',';
        match value(clock, record, field) {
            Value::Unknown => out.extend_from_slice(b"null"),
            Value::Text(text) => serde_json::to_writer(&mut *out, &text).expect(NEVER),
            number @ (Value::Number(_) | Value::Time(_)) => write_plain(&number, out),
        }
    }
    out.push(b'}');
}

fn write_plain(value: &Value<'_>, out: &mut Vec<u8>) {
    match value {
        Value::Unknown => out.push(b'-'),
        Value::Text(text) => out.extend_from_slice(text.as_bytes()),
        Value::Number(number) => write!(out, "{number}").expect(NEVER),
        Value::Time(time) => {
            let micros = time.as_micros();
            write!(out, "{}.{:03}", micros / 1_000, micros % 1_000).expect(NEVER);
        }
    }
}

fn value<'a>(clock: &Clock, record: &'a Record, field: Field) -> Value<'a> {
    let text = |text: &'static str| Value::Text(Cow::Borrowed(text));
    let address = |at: Option<SocketAddr>| of(at.map(|at| Value::Text(at.to_string().into())));
    let time = |time: Option<Duration>| of(time.map(Value::Time));
    match field {
        Field::Time => Value::Text(rfc3339(clock.calendar_time(record.ended)).into()),
        Field::Start => Value::Text(rfc3339(clock.calendar_time(record.accepted)).into()),
        Field::Listener => Value::Text(Cow::Borrowed(&record.listener)),
        Field::Source => address(record.source),
        Field::Original => address(record.original),
        Field::Target => address(record.target),
        Field::Transport => of(record.transport.map(Transport::name).map(text)),
        Field::Code => of(record.reason.map(|it| Value::Text(format!("{:#010x}", it.0).into()))),
        Field::Reason => of(record.reason.map(|it| Value::Text(format!("{it:?}").into()))),
        Field::LinkGroup => of(record.group.map(|group| Value::Number(group.0.into()))),
        Field::Setup => time(record.setup),
        Field::FirstByte => time(record.first_byte),
        Field::Duration => Value::Time(record.ended.since(record.accepted)),
        Field::BytesIn => Value::Number(record.bytes_in),
        Field::BytesOut => Value::Number(record.bytes_out),
        Field::End => text(record.end.name()),
        Field::By => of(record.by.map(Party::name).map(text)),
    }
}

fn of(value: Option<Value<'_>>) -> Value<'_> {
    value.unwrap_or(Value::Unknown)
}

/// A time since the beginning of 1970, in UTC and microseconds.
fn rfc3339(since_1970: Duration) -> String {
    let at = calendar(since_1970);
    let (year, month, day) = (at.year(), u8::from(at.month()), at.day());
    let (hour, minute, second) = (at.hour(), at.minute(), at.second());
    let micros = at.microsecond();
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
}

fn calendar(since_1970: Duration) -> OffsetDateTime {
    OffsetDateTime::UNIX_EPOCH + time::Duration::nanoseconds(nanos(since_1970))
}

/// Clocks of this century fit.
fn nanos(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).unwrap_or(i64::MAX)
}

/// Facility `local0`, severity `info`.
const PRIORITY: u8 = 16 * 8 + 6;
const MONTHS: [&str; 12] =
    ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
const NEVER: &str = "writing to memory does not fail";

#[cfg(test)]
mod tests {
    use serde_json::{Value as Json, json};
    use smcr_proto::Instant;
    use smcr_proto::wire::clc::Diagnosis;

    use super::*;
    use crate::access_log::tests::record;
    use crate::config::Config;
    use crate::termination::Termination;

    fn line(format: &str, record: &Record) -> String {
        let text = "[[listener]]\nname='a'\nbind='127.0.0.1:1'\nupstream='127.0.0.1:2'\n";
        let text = format!("{text}[access_log]\nformat='{format}'\n");
        let format = Config::parse(&text, "a.toml").unwrap().access_log.format;
        let mut out = Vec::new();
        write_line(&format, &Clock::new(), record, &mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn json_has_every_field_and_null_where_nothing_is_known() {
        let whole: Json = serde_json::from_str(&line("json", &record(7))).unwrap();
        let keys: Vec<_> = Field::ALL.map(|field| whole.get(field.name()).cloned()).into();
        assert!(keys.iter().all(Option::is_some), "{whole}");
        assert_eq!(whole["listener"], "to \"b\"");
        assert_eq!((&whole["setup_ms"], &whole["duration_ms"]), (&json!(1.5), &json!(2_000.0)));
        assert_eq!((&whole["code"], &whole["link_group"]), (&json!("0x03010000"), &Json::Null));
        assert_eq!((&whole["end"], &whole["by"]), (&json!("reset"), &json!("client")));
        let source = Some("[fd00::1]:9".parse().unwrap());
        let refused = Record::turned_away(Instant(5), "in", source, Termination::Limit);
        let refused: Json = serde_json::from_str(&line("json", &refused)).unwrap();
        assert_eq!((&refused["transport"], &refused["target"]), (&Json::Null, &Json::Null));
        assert_eq!((&refused["source"], &refused["end"]), (&json!("[fd00::1]:9"), &json!("limit")));
    }

    #[test]
    fn a_format_says_what_and_in_which_order() {
        let format = "%{bytes_in}/%{bytes_out} %{first_byte_ms} %{link_group} 1%% %{reason}";
        assert_eq!(line(format, &record(7)), "7/20 0.250 - 1% NO_SMC_OPTION");
    }

    #[test]
    fn times_are_those_of_the_calendar() {
        let at = |seconds, nanos| rfc3339(Duration::new(seconds, nanos));
        assert_eq!(at(0, 0), "1970-01-01T00:00:00.000000Z");
        assert_eq!(at(1_709_251_199, 123_456_789), "2024-02-29T23:59:59.123456Z");
        let mut head = Vec::new();
        write_syslog_head(&Clock::new(), &record(7), &mut head);
        let head = String::from_utf8(head).unwrap();
        assert!(head.starts_with("<134>") && head.ends_with("]: "), "{head}");
        assert_eq!(head.find(" smcgate["), Some("<134>Nov 24 23:31:26".len()), "{head}");
    }

    /// A name with several lines must not add a field of its own to an entry of the journal.
    #[test]
    fn a_field_of_several_lines_has_its_length() {
        let mut out = Vec::new();
        write_field("A", b"b", &mut out);
        write_field("C", b"d\nE=f", &mut out);
        assert_eq!(out, b"A=b\nC\n\x05\0\0\0\0\0\0\0d\nE=f\n");
        let mut out = Vec::new();
        write_fields(&Clock::new(), &record(7), &mut out);
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("SMCGATE_BYTES_IN=7\n") && !text.contains("LINK_GROUP"), "{text}");
        assert_eq!(Diagnosis(0x0301_0000).name(), Some("NO_SMC_OPTION"));
    }
}
