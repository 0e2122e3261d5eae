//! `[access_log]`: one line about each connection that is over.

use std::fmt;
use std::path::{Path, PathBuf};

use super::error::ConfigError;
use super::section::{Placed, Section, Source};

/// Where lines go, what they say, and about how many connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccessLog {
    /// Where they go.
    pub to: LogTarget,
    /// What they say.
    pub format: LineFormat,
    /// The share of connections that have one. Those that ended badly always have one.
    pub sample: Share,
}

/// Where lines go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogTarget {
    /// Nowhere.
    None,
    /// To the end of this file.
    File(PathBuf),
    /// To journald, at this socket.
    Journald(PathBuf),
    /// To a syslog daemon, at this socket.
    Syslog(PathBuf),
}

/// A share of all, in millionths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share(u32);

/// What a line says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LineFormat {
    /// Every field, as a JSON object.
    Json,
    /// Pieces, one behind the other.
    Pieces(Vec<Piece>),
}

/// A part of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// What the operator wrote.
    Text(String),
    /// What is known of a connection; `-` if it is not known.
    Field(Field),
}

/// What can be said of a connection that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// When it ended.
    Time,
    /// When it was accepted.
    Start,
    /// The listener.
    Listener,
    /// Who connected to us.
    Source,
    /// Where that client wanted to go, if it was led here or came by a proxy that says so.
    Original,
    /// Where we connected to, or tried to last.
    Target,
    /// `smc-r` or `tcp`; nothing for a connection that never opened.
    Transport,
    /// The code of the reason why it stayed TCP.
    Code,
    /// The name of that reason.
    Reason,
    /// Its link group.
    LinkGroup,
    /// From the accept until both sides were connected and the transport was chosen.
    Setup,
    /// From the accept until the first byte of the server.
    FirstByte,
    /// From the accept until the end.
    Duration,
    /// Read from the application.
    BytesIn,
    /// Written to the application.
    BytesOut,
    /// How it ended.
    End,
    /// Who ended it.
    By,
}

impl AccessLog {
    /// The table `[access_log]`.
    pub(super) fn read(source: Source<'_>, mut table: Section<'_>) -> Result<Self, ConfigError> {
        let to = table.optional_word("to", &TARGETS)?;
        let path = table.text("path")?;
        // Who writes "none" wants the path for later.
        if let (None, Some(path)) = (to, &path) {
            let why = "has no effect without \"to\"; write to = \"file\"";
            return Err(path.error(source, why));
        }
        let format = match table.text("format")? {
            None => LineFormat::Json,
            Some(text) => LineFormat::read(&text).map_err(|why| text.error(source, why))?,
        };
        let sample = Share(table.millionths("sample", MILLION)?);
        if let Some(path) = path.as_ref().filter(|path| !Path::new(&path.value).is_absolute()) {
            let why = format!("\"{}\" is not absolute; write it from / on", path.value);
            return Err(path.error(source, why));
        }
        let or = |usual: &str| PathBuf::from(path.as_ref().map_or(usual, |path| &path.value));
        let to = match to.unwrap_or(Target::None) {
            Target::None => LogTarget::None,
            Target::File if path.is_none() => {
                return Err(table.error("path", "is missing; a file has to have one"));
            }
            Target::File => LogTarget::File(or("")),
            Target::Journald => LogTarget::Journald(or(JOURNALD)),
            Target::Syslog => LogTarget::Syslog(or(SYSLOG)),
        };
        table.finish()?;
        Ok(Self { to, format, sample })
    }
}

impl LogTarget {
    /// The word for it, and the path.
    pub fn parts(&self) -> (&'static str, Option<&Path>) {
        match self {
            Self::None => ("none", None),
            Self::File(path) => ("file", Some(path)),
            Self::Journald(path) => ("journald", Some(path)),
            Self::Syslog(path) => ("syslog", Some(path)),
        }
    }
}

impl Share {
    /// Whether one that has drawn this number belongs to the share. Numbers are drawn evenly.
    pub fn has(self, drawn: u32) -> bool {
        u64::from(drawn) * u64::from(MILLION) < u64::from(self.0) << 32
    }

    /// As a part of 1.
    pub fn as_f64(self) -> f64 {
        f64::from(self.0) / f64::from(MILLION)
    }
}

impl LineFormat {
    fn read(text: &Placed<String>) -> Result<Self, String> {
        if text.value == "json" {
            return Ok(Self::Json);
        }
        if text.value.is_empty() || text.value.contains(char::is_control) {
            return Err("is not one line of text; write \"json\" or \"%{time} %{end}\"".to_owned());
        }
        let mut pieces = Vec::new();
        let mut rest = text.value.as_str();
        while !rest.is_empty() {
            let (piece, after) = match rest.strip_prefix('%') {
                None => {
                    let (text, after) = rest.split_at(rest.find('%').unwrap_or(rest.len()));
                    (Piece::Text(text.to_owned()), after)
                }
                Some(escaped) if escaped.starts_with('%') => {
                    (Piece::Text("%".to_owned()), &escaped[1..])
                }
                Some(field) => {
                    let named = field.strip_prefix('{').and_then(|name| name.split_once('}'));
                    let (name, after) = named.ok_or(
                        "has a % without a name; write %{time}, or %% for the sign itself",
                    )?;
                    (Piece::Field(Field::of_name(name).ok_or_else(|| unknown(name))?), after)
                }
            };
            pieces.push(piece);
            rest = after;
        }
        Ok(Self::Pieces(pieces))
    }
}

impl fmt::Display for LineFormat {
    /// As an operator writes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Pieces(pieces) = self else { return f.write_str("json") };
        pieces.iter().try_for_each(|piece| match piece {
            Piece::Text(text) => f.write_str(&text.replace('%', "%%")),
            Piece::Field(field) => write!(f, "%{{{}}}", field.name()),
        })
    }
}

impl Field {
    /// All of them, in the order in which JSON has them.
    pub const ALL: [Self; 17] = [
        Self::Time,
        Self::Start,
        Self::Listener,
        Self::Source,
        Self::Original,
        Self::Target,
        Self::Transport,
        Self::Code,
        Self::Reason,
        Self::LinkGroup,
        Self::Setup,
        Self::FirstByte,
        Self::Duration,
        Self::BytesIn,
        Self::BytesOut,
        Self::End,
        Self::By,
    ];

    /// What it is called in formats and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Time => "time",
            Self::Start => "start",
            Self::Listener => "listener",
            Self::Source => "source",
            Self::Original => "original",
            Self::Target => "target",
            Self::Transport => "transport",
            Self::Code => "code",
            Self::Reason => "reason",
            Self::LinkGroup => "link_group",
            Self::Setup => "setup_ms",
            Self::FirstByte => "first_byte_ms",
            Self::Duration => "duration_ms",
            Self::BytesIn => "bytes_in",
            Self::BytesOut => "bytes_out",
            Self::End => "end",
            Self::By => "by",
        }
    }

    fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|field| field.name() == name)
    }
}

fn unknown(name: &str) -> String {
    let known = Field::ALL.map(Field::name).join(", ");
    format!("%{{{name}}} is not known; known here: {known}")
}

/// The words of `to`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Target {
    None,
    File,
    Journald,
    Syslog,
}

const TARGETS: [(&str, Target); 4] = [
    ("none", Target::None),
    ("file", Target::File),
    ("journald", Target::Journald),
    ("syslog", Target::Syslog),
];
const JOURNALD: &str = "/run/systemd/journal/socket";
const SYSLOG: &str = "/dev/log";
const MILLION: u32 = 1_000_000;

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;

    fn config(lines: &str) -> Result<AccessLog, String> {
        let listener = "[[listener]]\nname='a'\nbind='127.0.0.1:1'\nupstream='127.0.0.1:2'\n";
        let text = format!("{listener}[access_log]\n{lines}\n");
        let config = Config::parse(&text, "a.toml").map_err(|error| error.to_string())?;
        Ok(config.access_log)
    }

    fn complaint(lines: &str) -> String {
        config(lines).expect_err("it is wrong")
    }

    #[test]
    fn lines_go_where_the_operator_says() {
        let to = |lines| config(lines).unwrap().to;
        assert_eq!(to(""), LogTarget::None);
        assert_eq!(to("to='file'\npath='/x/y'"), LogTarget::File("/x/y".into()));
        assert_eq!(to("to='journald'"), LogTarget::Journald(JOURNALD.into()));
        assert_eq!(to("to='syslog'"), LogTarget::Syslog("/dev/log".into()));
        let why = complaint("path='/x/y'");
        assert_eq!(
            why,
            "a.toml:6: access_log.path: has no effect without \"to\"; write to = \"file\""
        );
        assert_eq!(to("to='none'\npath='/x/y'"), LogTarget::None);
        let why = complaint("to='file'");
        assert!(why.contains("access_log.path: is missing"), "{why}");
        let why = complaint("to='file'\npath='log'");
        assert!(why.contains(":7: access_log.path: \"log\" is not absolute"), "{why}");
    }

    /// A slip in a format must not become a column that is empty for weeks.
    #[test]
    fn formats_have_names_that_are_known() {
        let format = config("format='%{source}->%{target} 100%% %{end}'").unwrap().format;
        let expected = [
            Piece::Field(Field::Source),
            Piece::Text("->".to_owned()),
            Piece::Field(Field::Target),
            Piece::Text(" 100".to_owned()),
            Piece::Text("%".to_owned()),
            Piece::Text(" ".to_owned()),
            Piece::Field(Field::End),
        ];
        assert_eq!(format, LineFormat::Pieces(expected.into()));
        assert_eq!(format.to_string(), "%{source}->%{target} 100%% %{end}");
        let why = complaint("format='%{colour}'");
        assert!(why.starts_with("a.toml:6: access_log.format: %{colour} is not known"), "{why}");
        assert!(why.contains("time, start, listener") && why.ends_with("end, by"), "{why}");
        for wrong in ["'50%'", "'%time'", "'%{time'", "''", "\"a\\nb\""] {
            let why = complaint(&format!("format={wrong}"));
            assert!(why.contains("access_log.format: "), "{why}");
        }
    }

    #[test]
    fn a_share_of_connections_can_be_chosen() {
        let sample = |text: &str| config(&format!("sample={text}")).unwrap().sample;
        let of = |share: Share| [0, 1 << 29, 1 << 31, u32::MAX].map(|drawn| share.has(drawn));
        assert_eq!(of(sample("1.0")), [true; 4]);
        assert_eq!(of(sample("1")), [true; 4]);
        assert_eq!(of(sample("0.25")), [true, true, false, false]);
        assert_eq!(of(sample("0")), [false; 4]);
        assert_eq!(sample("0.1").as_f64().to_string(), "0.1");
        for wrong in ["1.5", "-0.1", "nan", "'all'", "0.0000001"] {
            let why = complaint(&format!("sample={wrong}"));
            assert!(why.contains("access_log.sample: "), "{why}");
        }
    }
}
