//! `packaging/stats.md` says what each key of the JSON means, in the words of the source. This
//! makes it from there, and fails if it is not the same.
#![allow(clippy::unwrap_used, reason = "a test stops where it cannot go on")]

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use smcr_engine::counters::DESCRIPTIONS;

/// A type whose fields are keys.
struct Table {
    name: String,
    about: String,
    keys: Vec<Key>,
}

struct Key {
    name: String,
    kind: String,
    about: String,
}

/// The documents, by path, and what each is.
const DOCUMENTS: [(&str, &str); 3] =
    [("GET /stats", "Stats"), ("GET /connections", "ConnectionPage"), ("GET /history", "Columns")];

#[test]
fn the_document_of_the_keys_is_as_the_source_says() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let fresh = document(&tables(&top.join("control/src")));
    let path = top.join("packaging/stats.md");
    let made = Path::new(env!("CARGO_TARGET_TMPDIR")).join("stats.md");
    fs::write(&made, &fresh).unwrap();
    let is_fresh = fs::read_to_string(&path).is_ok_and(|text| text == fresh);
    assert!(is_fresh, "the document is stale; cp {} {}", made.display(), path.display());
}

/// The text of the document.
fn document(tables: &[Table]) -> String {
    let mut out = "# The keys of the JSON of the admin endpoint\n\n\
        Made from the source by `cargo test -p smcgate --test stats_document`; change the comments \
        there. Numbers that\nonly grow count from the start of the process. The unit is part of a \
        name, unless it is a plain count: `_s`,\n`_ms`, `_ns`, `_bytes`. A new key keeps `schema`; \
        one that is renamed or removed raises it.\n"
        .to_owned();
    let mut told: Vec<&str> = Vec::new();
    for (path, root) in DOCUMENTS {
        let mut next = vec![(path, root)];
        while !next.is_empty() {
            let (title, name) = next.remove(0);
            let table = named(tables, name).expect("each type is in the source");
            if told.contains(&name) {
                continue;
            }
            told.push(name);
            let about = &table.about;
            let head = "| key | type | meaning |\n|---|---|---|\n";
            write!(out, "\n## `{title}`\n\n{about}\n\n{head}").unwrap();
            for key in &table.keys {
                let inner = named(tables, innermost(&key.kind));
                let kind = shown(&key.kind, inner);
                writeln!(out, "| `{}` | {kind} | {} |", key.name, key.about).unwrap();
                next.extend(inner.map(|table| (&*table.name, &*table.name)));
            }
        }
    }
    out.push_str("\n## `counters` of a `Poller`\n\n| key | unit | meaning |\n|---|---|---|\n");
    for counter in DESCRIPTIONS {
        writeln!(out, "| `{}` | {} | {} |", counter.name, counter.unit, counter.help).unwrap();
    }
    out
}

fn named<'a>(tables: &'a [Table], name: &str) -> Option<&'a Table> {
    tables.iter().find(|table| table.name == name)
}

/// `Link` of `Option<Vec<Link>>`.
fn innermost(kind: &str) -> &str {
    let inner = kind.rsplit(['<', ',']).next().expect("there is one piece");
    inner.trim_end_matches('>').trim()
}

/// The type of JSON that `kind` becomes.
fn shown(kind: &str, inner: Option<&Table>) -> String {
    let base = match (inner, innermost(kind)) {
        (Some(table), _) => format!("`{}`", table.name),
        (None, "bool") => "boolean".to_owned(),
        (None, "String" | "Transport" | "SharedMemory") => "text".to_owned(),
        (None, _) => "number".to_owned(),
    };
    match kind {
        _ if kind.starts_with("Vec<(") => "list of pairs of numbers".to_owned(),
        _ if kind.starts_with("Vec<") => format!("list of {base}"),
        _ if kind.starts_with("BTreeMap<") => format!("object of {base}"),
        _ if kind.starts_with("Option<") => format!("{base}, if there is one"),
        _ => base,
    }
}

/// All structs of the files about statistics.
fn tables(source: &Path) -> Vec<Table> {
    let mut files = vec![source.join("stats.rs")];
    let inner = fs::read_dir(source.join("stats")).unwrap();
    files.extend(inner.map(|entry| entry.unwrap().path()));
    files.sort();
    files.iter().flat_map(|file| structs(&fs::read_to_string(file).unwrap())).collect()
}

/// The public structs of a file, with their comments. Formatted source has one field in a line.
fn structs(text: &str) -> Vec<Table> {
    let mut tables: Vec<Table> = Vec::new();
    let (mut about, mut other_name, mut is_inside) = (Vec::new(), None, false);
    for line in text.lines().map(str::trim) {
        if let Some(comment) = line.strip_prefix("///") {
            about.push(comment.trim());
        } else if let Some(attribute) = line.strip_prefix("#[serde(rename = \"") {
            other_name = attribute.split('"').next();
        } else if let Some(name) = line.strip_prefix("pub struct ") {
            let name = name.split([' ', '(', ';']).next().unwrap().to_owned();
            tables.push(Table { name, about: joined(&mut about), keys: Vec::new() });
            is_inside = line.ends_with('{');
        } else if let Some((name, kind)) =
            line.strip_prefix("pub ").and_then(|it| it.split_once(": ")).filter(|_| is_inside)
        {
            let name = other_name.take().unwrap_or(name).to_owned();
            let (kind, about) = (kind.trim_end_matches(',').to_owned(), joined(&mut about));
            tables.last_mut().unwrap().keys.push(Key { name, kind, about });
        } else if !line.starts_with("#[") {
            is_inside &= line != "}";
            about.clear();
        }
    }
    tables
}

/// A comment in one line, without what only programmers follow.
fn joined(lines: &mut Vec<&str>) -> String {
    let text =
        std::mem::take(lines).join(" ").replace("[`SCHEMA`]", "The version of this document");
    let text = text.replace("as `smcr_engine::counters` has it", "in the last table here");
    text.replace("[`", "`").replace("`]", "`").replace('|', "\\|")
}
