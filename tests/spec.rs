//! Every requirement of RFC 7609, who obeys it, and who proves it.
//!
//! The register (`spec/requirements/*.toml`) has an entry per rule, in our own words: a requirement
//! with its strength, or an exception with the reason why we do otherwise. Code and tests claim an
//! entry by a comment with the number of the RFC and the id of the entry. An entry is *open* as
//! long as no code claims to obey it, or no test to prove that.
//!
//! Nothing may be open. Who will not obey an entry files an exception, with a reason that a
//! stranger accepts. To see the table: `cargo test -p smcgate-tests --test spec -- --nocapture`.
#![allow(clippy::unwrap_used, reason = "a test stops where it cannot go on")]

#[path = "spec/register.rs"]
mod register;
#[path = "spec/tags.rs"]
mod tags;

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use register::{Entry, Id, SECTIONS};
use tags::Claim;

/// What claims one entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Claims {
    obeyed: bool,
    proven: bool,
}

/// What is known of one section.
#[derive(Debug, Default, PartialEq, Eq)]
struct Row {
    entries: usize,
    obeyed: usize,
    proven: usize,
    exceptions: usize,
    open: Vec<u32>,
}

/// A rule that nobody obeys, or that nobody would miss, must not appear unnoticed.
#[test]
fn every_requirement_is_obeyed_and_proven_or_an_exception() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let chapters = files(&root.join("tests/spec/requirements"));
    let chapters: Vec<String> = chapters.iter().map(|path| read(path)).collect();
    let (entries, mut complaints) = register::read(chapters.iter().map(String::as_str), SECTIONS);
    let mut claims = HashMap::new();
    for path in files(root).iter().filter(|path| is_source(root, path)) {
        let name = path.strip_prefix(root).unwrap().to_str().expect("names are UTF-8");
        complaints.extend(collect(name, &read(path), &entries, &mut claims));
    }
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));

    let rows: Vec<(&str, Row)> =
        SECTIONS.split_whitespace().map(|name| (name, row(name, &entries, &claims))).collect();
    print(&rows);
    let open: usize = rows.iter().map(|(_, row)| row.open.len()).sum();
    assert_eq!(open, 0, "entries that nobody obeys, or that no test proves, as the table shows");
}

/// Adds what one file claims, and returns what is wrong with its tags.
fn collect(
    name: &str,
    text: &str,
    entries: &[Entry],
    claims: &mut HashMap<Id, Claims>,
) -> Vec<String> {
    let mut complaints = Vec::new();
    for tag in tags::find(name, text) {
        let mut complain = |what: String| complaints.push(format!("{name}:{}: {what}", tag.line));
        let id = match tag.id {
            Ok(id) => id,
            Err(word) => {
                complain(format!("{word} is not an id: a section, a hyphen and a number"));
                continue;
            }
        };
        let claim: &mut Claims = claims.entry(id.clone()).or_default();
        match (entries.iter().find(|entry| entry.id == id), tag.claim) {
            (None, _) => complain(format!("{id} is not in the register")),
            (Some(entry), Claim::Obeyed) if entry.is_exception => {
                complain(format!("{id} is an exception: nothing obeys it"));
            }
            (Some(_), Claim::Obeyed) => claim.obeyed = true,
            (Some(_), Claim::Proven) => claim.proven = true,
        }
    }
    complaints
}

/// Counts one section.
fn row(section: &str, entries: &[Entry], claims: &HashMap<Id, Claims>) -> Row {
    let mut row = Row::default();
    for entry in entries.iter().filter(|entry| entry.id.section == section) {
        let claim = claims.get(&entry.id).copied().unwrap_or_default();
        row.entries += 1;
        row.obeyed += usize::from(claim.obeyed);
        row.proven += usize::from(claim.proven);
        row.exceptions += usize::from(entry.is_exception);
        let closed = claim.obeyed && claim.proven;
        if !(entry.is_exception || closed) {
            row.open.push(entry.id.number);
        }
    }
    row
}

/// The table by section, the numbers of what is open at its right.
fn print(rows: &[(&str, Row)]) {
    println!("section    entries  code  tests  exceptions  open");
    let line = |name: &str, [entries, obeyed, proven, exceptions, open]: [usize; 5]| {
        format!("{name:<10} {entries:>7} {obeyed:>5} {proven:>6} {exceptions:>11} {open:>5}")
    };
    let mut total = [0; 5];
    for (name, row) in rows {
        let Row { entries, obeyed, proven, exceptions, open } = row;
        let numbers = [*entries, *obeyed, *proven, *exceptions, open.len()];
        for (sum, number) in total.iter_mut().zip(numbers) {
            *sum += number;
        }
        let open: Vec<String> = open.iter().map(u32::to_string).collect();
        println!("{}  {}", line(name, numbers), open.join(" "));
    }
    println!("{}", line("all", total));
}

/// Whether tags may stand in a file. The scanner's own tests have texts that look like some.
fn is_source(root: &Path, path: &Path) -> bool {
    let own = root.join("tests/spec");
    let name = path.extension().unwrap_or_default();
    (name == "rs" || name == "c") && !path.starts_with(own)
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// All files below a folder, without dotfiles and what a build leaves behind.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| {
        let name = path.file_name().unwrap().to_str().expect("names are UTF-8");
        !name.starts_with('.') && name != "target" && !path.is_symlink()
    });
    paths.sort();
    let below = |path: PathBuf| if path.is_dir() { files(&path) } else { vec![path] };
    paths.into_iter().flat_map(below).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(id: &str, is_exception: bool) -> Entry {
        Entry { id: Id::parse(id).unwrap(), is_exception }
    }

    fn entries() -> [Entry; 4] {
        [entry("2-1", false), entry("2-2", false), entry("2-3", true), entry("2.1-1", false)]
    }

    /// What one tag in one file leads to.
    fn complaint(name: &str, ids: &str) -> String {
        let text = format!("// {}{ids}\n", tags::TAG);
        collect(name, &text, &entries(), &mut HashMap::new()).join("\n")
    }

    /// A tag that points nowhere tells a reader of a rule that does not exist.
    #[test]
    fn wrong_tags_are_refused() {
        assert_eq!(complaint("control/src/x.rs", "2-1, 2-2"), "");
        assert_eq!(
            complaint("control/src/x.rs", "2-4"),
            "control/src/x.rs:1: 2-4 is not in the register"
        );
        assert!(complaint("control/src/x.rs", "2.1").contains("2.1 is not an id"));
        let exception = "control/src/x.rs:1: 2-3 is an exception: nothing obeys it";
        assert_eq!(complaint("control/src/x.rs", "2-3"), exception);
        assert_eq!(complaint("tests/x.rs", "2-3"), "", "a test may show what we do instead");
    }

    /// Only code and a test together close an entry.
    #[test]
    fn what_one_side_alone_claims_is_open() {
        let mut claims = HashMap::new();
        let tag = tags::TAG;
        let code = format!("// {tag}2-1\n// {tag}2.1-1\n");
        assert!(collect("perf/src/x.rs", &code, &entries(), &mut claims).is_empty());
        let open = |claims: &HashMap<Id, Claims>| row("2", &entries(), claims).open;
        assert_eq!(open(&claims), [1, 2]);
        let test = format!("// {tag}2-1, 2-2\n");
        assert!(collect("tests/x.rs", &test, &entries(), &mut claims).is_empty());
        let expected = Row { entries: 3, obeyed: 1, proven: 2, exceptions: 1, open: vec![2] };
        assert_eq!(row("2", &entries(), &claims), expected);
    }
}
