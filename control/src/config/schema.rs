//! A JSON schema of the configuration, for editors and for programs that write it.
//!
//! It is made by reading a file that has one table of each kind: the reader asks for all keys that
//! it knows, whether the file has them or not, and says what it expects of each. So the schema
//! knows what the reader knows. `smcgate check` also knows what depends on several keys.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;

use serde_json::{Map, Value, json};

use super::Config;
use super::section::Source;

/// What the value of a key is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    Text,
    RequiredText,
    /// A text, or a list of texts.
    RequiredTexts,
    Texts,
    Number(Range<u64>),
    Numbers(Range<u64>),
    Ports,
    Boolean,
    /// A number from 0 to 1.
    Share,
    Duration,
    Word(Vec<String>),
    Table,
    Tables,
}

/// What the reader has asked for so far.
#[derive(Debug, Default)]
pub(super) struct Learned {
    /// What each key is, by its table and its name.
    keys: RefCell<BTreeMap<(Vec<&'static str>, &'static str), Shape>>,
}

impl Learned {
    /// The reader has asked for `key` in the table at `place`.
    pub(super) fn note(&self, place: &[&'static str], key: &'static str, shape: Shape) {
        let mut keys = self.keys.borrow_mut();
        let known = keys.entry((place.to_vec(), key)).or_insert_with(|| shape.clone());
        // What only some kinds require may be missing. Else the last word is the most exact one.
        if (&*known, &shape) != (&Shape::Text, &Shape::RequiredText) {
            *known = shape;
        }
    }

    /// The schema of the table at `place`.
    fn table(&self, place: &[&'static str]) -> Value {
        let (mut properties, mut required) = (Map::new(), Vec::new());
        let keys = self.keys.borrow();
        for ((_, key), shape) in keys.iter().filter(|((at, _), _)| at == place) {
            let below = || self.table(&[place, &[*key]].concat());
            if matches!(shape, Shape::RequiredText | Shape::RequiredTexts) {
                required.push(*key);
            }
            properties.insert((*key).to_owned(), schema_of(shape, below));
        }
        json!({
            "type": "object", "properties": properties, "required": required,
            "additionalProperties": false,
        })
    }
}

fn schema_of(shape: &Shape, below: impl Fn() -> Value) -> Value {
    let number = |range: &Range<u64>| {
        let last = range.end - 1;
        json!({"type": "integer", "minimum": range.start, "maximum": last})
    };
    let text = || json!({"type": "string"});
    let list = |items: Value| json!({"type": "array", "items": items});
    match shape {
        Shape::Text => text(),
        Shape::RequiredText => json!({"type": "string", "minLength": 1}),
        Shape::RequiredTexts => json!({"anyOf": [text(), {
            "type": "array", "items": text(), "minItems": 1,
        }]}),
        Shape::Texts => list(text()),
        Shape::Number(range) => number(range),
        Shape::Numbers(range) => list(number(range)),
        Shape::Ports => list(json!({"anyOf": [
            number(&(1..65_536)), {"type": "string", "pattern": "^ *[0-9]+ *- *[0-9]+ *$"},
        ]})),
        Shape::Boolean => json!({"type": "boolean"}),
        Shape::Share => json!({"type": "number", "minimum": 0, "maximum": 1}),
        Shape::Duration => json!({"type": "string", "pattern": "^[0-9]+(us|ms|s|m|h)$"}),
        Shape::Word(words) => json!({"enum": words}),
        Shape::Table => below(),
        Shape::Tables => list(below()),
    }
}

impl Config {
    /// A JSON schema of the file.
    ///
    /// # Panics
    ///
    /// Never: the file that teaches it is right.
    pub fn schema() -> Value {
        let learned = Learned::default();
        let source = Source { name: "schema", text: TEACHER, here: &[], learned: Some(&learned) };
        Self::read(source).expect("a test reads it");
        let mut schema = learned.table(&[]);
        schema["$schema"] = json!("https://json-schema.org/draft/2020-12/schema");
        schema["title"] = json!("The configuration of smcgate");
        let has_socket = json!({"required": ["socket"]});
        schema["anyOf"] = json!([
            {"required": ["listener"]},
            {"required": ["local"], "properties": {"local": has_socket}},
        ]);
        schema
    }
}

/// One of each kind of table: what is not there the reader asks for all the same.
const TEACHER: &str = r#"
[[rnic]]
name = "udp"
kind = "roce-udp"
device = "a"
[[rnic]]
name = "packet"
kind = "roce-packet"
device = "b"
[[rnic]]
name = "port"
kind = "dpdk"
device = "c"
address = "10.8.0.1/24"
[[rnic]]
name = "memory"
kind = "shm"
device = "/d"
[[rnic]]
name = "hardware"
kind = "verbs"
device = "e"
[[pnet]]
device = "f"
rnic = "udp"
[[listener]]
name = "all"
bind = "127.0.0.1:1"
upstream = "127.0.0.1:2"
"#;

#[cfg(test)]
mod tests {
    use super::*;

    fn keys_of(schema: &Value, pointer: &str) -> Vec<String> {
        let table = schema.pointer(pointer).unwrap_or_else(|| panic!("{pointer}: {schema:#}"));
        table["properties"].as_object().unwrap().keys().cloned().collect()
    }

    /// What the reader says that it knows, when it finds a key that it does not know, is in the
    /// schema: an editor must not mark as wrong what the gateway takes.
    #[test]
    fn all_that_the_reader_knows_is_in_the_schema() {
        let schema = Config::schema();
        let listener = "[[listener]]\nname='a'\nbind='127.0.0.1:1'\nupstream='127.0.0.1:2'\n";
        let rnic = |rest: &str| format!("{listener}[[rnic]]\nname='r'\ndevice='d'\n{rest}\nx=1");
        for (text, pointer) in [
            (format!("{listener}[x]"), ""),
            (format!("{listener}x=1"), "/properties/listener/items"),
            (format!("{listener}check={{x=1}}"), "/properties/listener/items/properties/check"),
            (
                format!("{listener}tcp_keepalive={{x=1}}"),
                "/properties/listener/items/properties/tcp_keepalive",
            ),
            (format!("{listener}[smc]\nx=1"), "/properties/smc"),
            (format!("{listener}[poll]\nx=1"), "/properties/poll"),
            (format!("{listener}[limits]\nx=1"), "/properties/limits"),
            (format!("{listener}[admin]\nx=1"), "/properties/admin"),
            (format!("{listener}[local]\nx=1"), "/properties/local"),
            (format!("{listener}[dns]\nx=1"), "/properties/dns"),
            (format!("{listener}[confine]\nx=1"), "/properties/confine"),
            (format!("{listener}[access_log]\nx=1"), "/properties/access_log"),
            (rnic("kind='roce-udp'"), "/properties/rnic/items"),
            (rnic("kind='roce-packet'"), "/properties/rnic/items"),
            (rnic("kind='dpdk'\naddress='10.8.0.1/24'"), "/properties/rnic/items"),
            (rnic("kind='shm'"), "/properties/rnic/items"),
            (rnic("kind='verbs'"), "/properties/rnic/items"),
        ] {
            let complaint = Config::parse(&text, "a.toml").unwrap_err().to_string();
            let (_, known) = complaint.split_once("known here: ").expect(&complaint);
            let there = keys_of(&schema, pointer);
            for key in known.split(", ") {
                assert!(
                    there.iter().any(|other| other == key),
                    "{pointer}: {key} not in {there:?}"
                );
            }
        }
        // Tables that somebody adds must be added above.
        let tables = schema["properties"].as_object().unwrap().values();
        let tables = tables.filter(|one| one["type"] != "string" && one.get("enum").is_none());
        assert_eq!(tables.count(), 11);
    }

    #[test]
    fn what_is_required_and_what_can_be_chosen_is_said() {
        let schema = Config::schema();
        let listener = &schema["properties"]["listener"]["items"];
        assert_eq!(listener["required"], json!(["bind", "name", "upstream"]));
        assert_eq!(listener["properties"]["accept"], json!({"enum": ["tcp", "smc"]}));
        assert_eq!(listener["additionalProperties"], json!(false));
        let rnic = &schema["properties"]["rnic"]["items"];
        assert_eq!(rnic["required"], json!(["device", "name"]));
    }
}
