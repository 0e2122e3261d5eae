//! Every requirement of RFC 7609: which code obeys it, and which test proves it.
//!
//! The register (`spec/requirements/*.toml`) has an entry per rule, in our own words: a requirement
//! with its strength, or an exception with the reason why we do otherwise. Code and tests claim an
//! entry by a comment with the number of the RFC, the id of the entry and its title. The title says
//! in a few words what our code has to do; the title of an exception says what our code does
//! instead. An entry is *open* as long as no code claims to obey it, or no test claims to
//! prove it.
//!
//! No entry may be open. If we do not obey an entry, it becomes an exception, with a reason that a
//! stranger accepts. To see the table: `cargo test -p smcgate-tests --test spec -- --nocapture`.
//!
//! A claim is not a proof. `scripts/test proof`, the last phase, reads which tests passed in the
//! phases before it, and counts an entry as proven only if one of the tests that claim it has
//! passed.
#![allow(clippy::unwrap_used, reason = "a test stops where it cannot go on")]

#[path = "spec/functions.rs"]
mod functions;
#[path = "spec/proofs.rs"]
mod proofs;
#[path = "spec/register.rs"]
mod register;
#[path = "spec/tags.rs"]
mod tags;

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use functions::Test;
use proofs::Proofs;
use register::{Entry, Id, SECTIONS};
use tags::Claim;

/// The claims on one entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Claims {
    obeyed: bool,
    tests: Vec<Test>,
}

/// The counts of one section.
#[derive(Debug, Default, PartialEq, Eq)]
struct Row {
    entries: usize,
    obeyed: usize,
    tested: usize,
    /// Those of them that no test proves without root.
    root: usize,
    exceptions: usize,
    open: Vec<u32>,
}

/// A rule that no code obeys, or that no test proves, must not remain unnoticed.
#[test]
fn every_requirement_is_obeyed_and_proven_or_an_exception() {
    let (entries, claims) = register_and_claims();
    let rows: Vec<(&str, Row)> =
        SECTIONS.split_whitespace().map(|name| (name, row(name, &entries, &claims))).collect();
    print(&rows);
    let open: usize = rows.iter().map(|(_, row)| row.open.len()).sum();
    assert_eq!(open, 0, "the table shows entries that no code obeys or that no test proves");
}

/// If a phase did not run, the entries that it would have proven are reported as unproven. If a
/// phase ran and left an entry unproven, that is an error: a test was renamed, or never runs.
#[test]
#[ignore = "reads what the other phases have printed; run by scripts/test proof"]
fn every_claim_was_proven_in_this_run() {
    let (entries, claims) = register_and_claims();
    let folder = root().join("target/proofs");
    let mut proofs = Proofs::default();
    for path in files(&folder).iter().filter(|path| path.extension() == Some("log".as_ref())) {
        let phase = path.file_stem().unwrap().to_str().expect("names are UTF-8");
        proofs.add(phase, &read(path));
    }
    let (mut proven, mut with_root) = (0, 0);
    let mut unproven: BTreeMap<&str, Vec<&Entry>> = BTreeMap::new();
    let mut missing = Vec::new();
    for entry in entries.iter().filter(|entry| !entry.is_exception()) {
        let tests = &claims.get(&entry.id).expect("none is open").tests;
        let mut passed = tests.iter().filter(|test| proofs.has(&test.name)).peekable();
        if passed.peek().is_none() {
            let has_run = |phase: &str| proofs.phases.iter().any(|ran| ran == phase);
            let absent = tests.iter().map(phase_of).find(|phase| !has_run(phase));
            match absent {
                Some(phase) => unproven.entry(phase).or_default().push(entry),
                None => {
                    let names: Vec<&str> = tests.iter().map(|test| &test.name.path[..]).collect();
                    missing.push(format!("{entry}: claimed by {}", names.join(", ")));
                }
            }
        } else if passed.all(|test| test.is_ignored) {
            with_root += 1;
        } else {
            proven += 1;
        }
    }
    let exceptions = print_exceptions(&entries);
    let claimed: usize = unproven.values().map(Vec::len).sum();
    for (phase, entries) in unproven {
        for entry in entries {
            println!("register: UNPROVEN, as {phase} was not run: {entry}");
        }
    }
    println!(
        "register: {proven} proven, {with_root} proven only with root, {claimed} claimed only, \
         {exceptions} exceptions; {} tests passed",
        proofs.passed()
    );
    assert!(missing.is_empty(), "none of the tests that claim it passed:\n{}", missing.join("\n"));
}

/// Prints what we do otherwise than the RFC says, with the reasons, and returns how many they are.
fn print_exceptions(entries: &[Entry]) -> usize {
    let mut exceptions = 0;
    for entry in entries {
        let Some(reason) = &entry.reason else { continue };
        let reason: Vec<&str> = reason.split_whitespace().collect();
        println!("register: exception {entry}. {}", reason.join(" "));
        exceptions += 1;
    }
    exceptions
}

/// Which phase of `scripts/test` runs a test.
fn phase_of(test: &Test) -> &'static str {
    match (&test.name.program[..], test.is_ignored) {
        ("interop", true) => "interop",
        (_, true) => "e2e",
        (_, false) => "test",
    }
}

/// All entries, and the claims on them.
fn register_and_claims() -> (Vec<Entry>, HashMap<Id, Claims>) {
    let root = root();
    let chapters = files(&root.join("tests/spec/requirements"));
    let chapters: Vec<String> = chapters.iter().map(|path| read(path)).collect();
    let (entries, mut complaints) = register::read(chapters.iter().map(String::as_str), SECTIONS);
    let mut claims = HashMap::new();
    for path in files(root).iter().filter(|path| is_source(root, path)) {
        let name = path.strip_prefix(root).unwrap().to_str().expect("names are UTF-8");
        let library = library_of(path);
        complaints.extend(collect((name, &library), &read(path), &entries, &mut claims));
    }
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
    (entries, claims)
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// The name of the crate of a file, as the compiler writes it.
fn library_of(path: &Path) -> String {
    let manifest = path.ancestors().skip(1).map(|folder| folder.join("Cargo.toml"));
    let manifest = manifest.filter(|path| path.is_file()).map(|path| read(&path)).next();
    let manifest: toml::Table = manifest.expect("every crate has one").parse().unwrap();
    let package = manifest.get("package").and_then(|package| package.get("name"));
    package.and_then(toml::Value::as_str).unwrap_or_default().replace('-', "_")
}

/// Adds what one file claims, and returns what is wrong with its tags.
fn collect(
    (name, library): (&str, &str),
    text: &str,
    entries: &[Entry],
    claims: &mut HashMap<Id, Claims>,
) -> Vec<String> {
    let mut complaints = Vec::new();
    for tag in tags::find(name, library, text) {
        let mut complain = |what: String| complaints.push(format!("{name}:{}: {what}", tag.line));
        let (id, title) = match tag.words {
            Ok(words) => words,
            Err(comment) => {
                complain(format!("\"{comment}\" is no tag. {}", advice(&comment, entries)));
                continue;
            }
        };
        let claim: &mut Claims = claims.entry(id.clone()).or_default();
        match (entries.iter().find(|entry| entry.id == id), tag.claim) {
            (None, _) => complain(format!("{id} is not in the register")),
            (Some(entry), _) if entry.title != title => {
                complain(format!("{id} has another title. Write: // {}{entry}", tags::TAG));
            }
            (Some(entry), Claim::Obeyed) if entry.is_exception() => {
                complain(format!("{id} is an exception: nothing obeys it"));
            }
            (Some(_), Claim::Obeyed) => claim.obeyed = true,
            (Some(_), Claim::Proven(test)) => claim.tests.push(test),
            (Some(_), Claim::Nobody) => {
                complain(format!("{id} is claimed by code that is no test"));
            }
        }
    }
    complaints
}

/// What to write in place of a comment that is no tag.
fn advice(comment: &str, entries: &[Entry]) -> String {
    let mentions = |entry: &&Entry| {
        let Id { section, number } = &entry.id;
        let forms = [format!("{section}-{number}"), format!("{section} #{number}")];
        // Look at the characters around the id, too: 2-1 also occurs in 2.2-1 and in 2-10.
        let around = [" ", ",", ";", ":", ".", ")", "("];
        let comment = format!(" {comment} ");
        let has = |form: &String| {
            comment.match_indices(form.as_str()).any(|(at, _)| {
                let (before, rest) = (&comment[..at], &comment[at + form.len()..]);
                before.ends_with([' ', '(']) && around.iter().any(|end| rest.starts_with(end))
            })
        };
        forms.iter().any(has)
    };
    let tags: Vec<String> = entries
        .iter()
        .filter(mentions)
        .map(|entry| format!("\n    // {}{entry}", tags::TAG))
        .collect();
    if tags.is_empty() {
        "A tag has an id of the register, a colon and the title of that entry".to_owned()
    } else {
        format!("Write on lines of their own:{}", tags.concat())
    }
}

/// Counts one section.
fn row(section: &str, entries: &[Entry], claims: &HashMap<Id, Claims>) -> Row {
    let mut row = Row::default();
    for entry in entries.iter().filter(|entry| entry.id.section == section) {
        let claim = claims.get(&entry.id).cloned().unwrap_or_default();
        let tested = !claim.tests.is_empty();
        let with_root = tested && claim.tests.iter().all(|test| test.is_ignored);
        row.entries += 1;
        row.obeyed += usize::from(claim.obeyed);
        row.tested += usize::from(tested);
        row.root += usize::from(with_root);
        row.exceptions += usize::from(entry.is_exception());
        let closed = claim.obeyed && tested;
        if !(entry.is_exception() || closed) {
            row.open.push(entry.id.number);
        }
    }
    row
}

/// Prints the table by section, with the numbers of open entries at its right.
fn print(rows: &[(&str, Row)]) {
    println!("section    entries  code  tests  with root  exceptions  open");
    let line = |name: &str, [entries, obeyed, tested, root, exceptions, open]: [usize; 6]| {
        format!(
            "{name:<10} {entries:>7} {obeyed:>5} {tested:>6} {root:>10} {exceptions:>11} {open:>5}"
        )
    };
    let mut total = [0; 6];
    for (name, row) in rows {
        let Row { entries, obeyed, tested, root, exceptions, open } = row;
        let numbers = [*entries, *obeyed, *tested, *root, *exceptions, open.len()];
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
        let reason = is_exception.then(|| "Why.".to_owned());
        Entry { id: Id::parse(id).unwrap(), title: format!("do what {id} says"), reason }
    }

    fn entries() -> [Entry; 4] {
        [entry("2 #1", false), entry("2 #2", false), entry("2 #3", true), entry("2.1 #1", false)]
    }

    /// What one comment in one file leads to.
    fn complaint(name: &str, comment: &str) -> String {
        let text = format!("// {}{comment}\n#[test]\nfn a() {{\n}}\n", tags::TAG);
        collect((name, "it"), &text, &entries(), &mut HashMap::new()).join("\n")
    }

    /// A tag that points nowhere tells a reader of a rule that does not exist.
    #[test]
    fn wrong_tags_are_refused() {
        let code = "control/src/x.rs";
        assert_eq!(complaint(code, "2 #1: do what 2 #1 says"), "");
        let missing = "control/src/x.rs:1: 2 #4 is not in the register";
        assert_eq!(complaint(code, "2 #4: do what 2 #4 says"), missing);
        let exception = "control/src/x.rs:1: 2 #3 is an exception: nothing obeys it";
        assert_eq!(complaint(code, "2 #3: do what 2 #3 says"), exception);
        let shown = complaint("tests/x.rs", "2 #3: do what 2 #3 says");
        assert_eq!(shown, "", "a test may show what we do instead");
        let idle = format!("// {}2 #1: do what 2 #1 says\nfn helper() {{\n}}\n", tags::TAG);
        let complaints = collect(("tests/x.rs", "it"), &idle, &entries(), &mut HashMap::new());
        assert_eq!(complaints, ["tests/x.rs:1: 2 #1 is claimed by code that is no test"]);
    }

    /// A title that is not that of the register misleads, and a bare number says nothing.
    #[test]
    fn whoever_writes_a_wrong_tag_is_told_the_right_one() {
        let tag = tags::TAG;
        let wrong = complaint("tests/x.rs", "2 #1: do something else");
        let right = format!("// {tag}2 #1: do what 2 #1 says");
        assert_eq!(wrong, format!("tests/x.rs:1: 2 #1 has another title. Write: {right}"));
        let old = complaint("tests/x.rs", "2-1, 2.1-1");
        let of_both = format!("    {right}\n    // {tag}2.1 #1: do what 2.1 #1 says");
        let refused = format!("tests/x.rs:1: \"{tag}2-1, 2.1-1\" is no tag.");
        assert_eq!(old, format!("{refused} Write on lines of their own:\n{of_both}"));
        assert!(complaint("tests/x.rs", "2.1").ends_with(
            "is no tag. A tag has an id of the \
             register, a colon and the title of that entry"
        ));
    }

    /// Only code and a test together close an entry.
    #[test]
    fn what_one_side_alone_claims_is_open() {
        let mut claims = HashMap::new();
        let tag = tags::TAG;
        let one = format!("// {tag}2 #1: do what 2 #1 says\n");
        let code = format!("{one}// {tag}2.1 #1: do what 2.1 #1 says\n");
        assert!(collect(("perf/src/x.rs", "it"), &code, &entries(), &mut claims).is_empty());
        let open = |claims: &HashMap<Id, Claims>| row("2", &entries(), claims).open;
        assert_eq!(open(&claims), [1, 2]);
        let two = format!("// {tag}2 #2: do what 2 #2 says\n");
        let test = format!("{one}{two}#[test]\nfn a() {{\n}}\n");
        assert!(collect(("tests/x.rs", "it"), &test, &entries(), &mut claims).is_empty());
        let expected =
            Row { entries: 3, obeyed: 1, tested: 2, root: 0, exceptions: 1, open: vec![2] };
        assert_eq!(row("2", &entries(), &claims), expected);
    }
}
