//! One decoded message, as text for people and as JSON for programs.

use std::fmt;

use serde::ser::{Serialize, SerializeMap, Serializer};

/// A message: its name in the RFC, and its fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Words {
    kind: String,
    fields: Vec<(&'static str, Value)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Value {
    Number(u64),
    Text(String),
    Flags(Vec<&'static str>),
}

impl Words {
    /// Creates a message without fields.
    pub(super) fn new(kind: impl Into<String>) -> Self {
        Self { kind: kind.into(), fields: Vec::new() }
    }

    /// Its name: `CDC`, `LLC CONFIRM LINK`, `WRITE ONLY`.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// Whether it is an SMC-R message, and not an RDMA packet or a part of a message.
    pub fn is_message(&self) -> bool {
        ["TCP", "CLC", "LLC", "CDC"].iter().any(|layer| self.kind.starts_with(layer))
    }

    /// Adds a number, shown in decimal.
    pub(super) fn number(mut self, name: &'static str, value: impl Into<u64>) -> Self {
        self.fields.push((name, Value::Number(value.into())));
        self
    }

    /// Adds a value in its text form.
    pub(super) fn text(mut self, name: &'static str, value: impl fmt::Display) -> Self {
        self.fields.push((name, Value::Text(value.to_string())));
        self
    }

    /// Adds a number in hexadecimal, with `digits` digits.
    pub(super) fn hex(self, name: &'static str, value: impl Into<u64>, digits: usize) -> Self {
        let value = value.into();
        self.text(name, format_args!("0x{value:0digits$x}"))
    }

    /// Adds bytes in hexadecimal.
    pub(super) fn bytes(self, name: &'static str, bytes: &[u8]) -> Self {
        self.text(name, bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
    }

    /// Adds the flags that are set. JSON has this field even if none is set.
    pub(super) fn flags(mut self, flags: &[(bool, &'static str)]) -> Self {
        let set = flags.iter().filter(|(set, _)| *set).map(|(_, name)| *name).collect();
        self.fields.push(("flags", Value::Flags(set)));
        self
    }

    /// Appends all fields of `more`.
    pub(super) fn with(mut self, more: Self) -> Self {
        self.fields.extend(more.fields);
        self
    }
}

impl fmt::Display for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.kind)?;
        for (name, value) in &self.fields {
            match value {
                Value::Number(number) => write!(f, " {name} {number}")?,
                Value::Text(text) => write!(f, " {name} {text}")?,
                Value::Flags(set) if set.is_empty() => {}
                Value::Flags(set) => write!(f, " [{}]", set.join(" "))?,
            }
        }
        Ok(())
    }
}

/// A message with its time, sender and receiver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageLine {
    /// Nanoseconds since the first frame of the capture; zero for a frame with an earlier stamp.
    pub time_ns: u64,
    /// The sender: an address, and the port if it is TCP.
    pub source: String,
    /// The receiver.
    pub target: String,
    /// The message.
    pub words: Words,
}

impl fmt::Display for MessageLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, micros) = (self.time_ns / 1_000_000_000, self.time_ns / 1_000 % 1_000_000);
        write!(f, "{seconds}.{micros:06} {} > {} {}", self.source, self.target, self.words)
    }
}

/// The fields are keys beside `time_ns`, `source`, `target` and `message`.
impl Serialize for MessageLine {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("time_ns", &self.time_ns)?;
        map.serialize_entry("source", &self.source)?;
        map.serialize_entry("target", &self.target)?;
        map.serialize_entry("message", &self.words.kind)?;
        for (name, value) in &self.words.fields {
            match value {
                Value::Number(number) => map.serialize_entry(name, number)?,
                Value::Text(text) => map.serialize_entry(name, text)?,
                Value::Flags(set) => map.serialize_entry(name, set)?,
            }
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scripts grep the text or parse the JSON, so both must say the same.
    #[test]
    fn text_and_json_say_the_same() {
        let words = Words::new("CDC")
            .number("seq", 3_u16)
            .hex("token", 5_u32, 8)
            .text("producer", "0:1024")
            .flags(&[(true, "B"), (false, "P"), (true, "D")]);
        let line = MessageLine {
            time_ns: 1_234_567,
            source: "10.8.0.1".to_owned(),
            target: "10.8.0.2".to_owned(),
            words,
        };
        assert_eq!(
            line.to_string(),
            "0.001234 10.8.0.1 > 10.8.0.2 CDC seq 3 token 0x00000005 producer 0:1024 [B D]"
        );
        assert_eq!(
            serde_json::to_string(&line).unwrap(),
            concat!(
                r#"{"time_ns":1234567,"source":"10.8.0.1","target":"10.8.0.2","message":"CDC","#,
                r#""seq":3,"token":"0x00000005","producer":"0:1024","flags":["B","D"]}"#,
            )
        );
    }
}
