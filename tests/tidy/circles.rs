//! No module uses another one that uses it. Modules in a circle can only be understood together.

use std::collections::{BTreeMap, BTreeSet};

use super::rules::File;

/// Every module in `folder` that uses itself by way of its siblings, one line each. `folder` is the
/// root of a crate (`.../src`), or that of a module in it. A module counts as one with its
/// children. What it uses of its parent is no edge: the parent declares the siblings.
pub(crate) fn check_circles(folder: &str, files: &[File<'_>]) -> Vec<String> {
    let parts: Vec<Part<'_>> =
        files.iter().filter_map(|file| Part::of(folder, file.name, file.text)).collect();
    let mut uses: BTreeMap<&str, BTreeSet<&str>> =
        parts.iter().map(|part| (part.module, BTreeSet::new())).collect();
    let modules: BTreeSet<&str> = uses.keys().copied().collect();
    for part in &parts {
        let others = part.uses(&modules).filter(|other| *other != part.module);
        uses.entry(part.module).or_default().extend(others);
    }
    let circular = uses.keys().filter(|module| reachable(module, &uses).contains(*module));
    circular.map(|module| format!("{folder}/{module}: it is in a circle of imports")).collect()
}

/// A file of a module in the folder.
struct Part<'a> {
    /// The module directly in the folder that the file belongs to.
    module: &'a str,
    /// How the file names the folder: from the root of the crate, and from itself.
    from_root: String,
    from_here: String,
    /// Its lines of production code.
    code: Vec<&'a str>,
}

impl<'a> Part<'a> {
    /// None if the file is elsewhere, the root of the folder, or only for tests.
    fn of(folder: &str, name: &'a str, text: &'a str) -> Option<Self> {
        let path = name.strip_prefix(folder)?.strip_prefix('/')?.strip_suffix(".rs")?;
        let path = path.strip_suffix("/mod").unwrap_or(path);
        let names: Vec<&str> = path.split('/').collect();
        if names.contains(&"tests") || ["lib", "main", "mod"].contains(&path) {
            return None;
        }
        let inside = folder.split_once("src").map_or("", |(_, inside)| inside);
        let from_root = format!("crate{}::", inside.replace('/', "::"));
        let production = text.split("#[cfg(test)]\nmod ").next().unwrap_or(text);
        let is_code = |line: &&str| !line.trim_start().starts_with("//");
        let code = production.lines().filter(is_code).collect();
        Some(Self { module: names[0], from_root, from_here: "super::".repeat(names.len()), code })
    }

    /// The modules in the folder that it names.
    fn uses<'b>(&'b self, modules: &'b BTreeSet<&'a str>) -> impl Iterator<Item = &'a str> + 'b {
        let ways = [&self.from_root, &self.from_here];
        let named = ways.into_iter().flat_map(|way| {
            let after = |line: &&'a str| {
                let line: &'a str = line;
                line.split(way.as_str()).skip(1).collect::<Vec<_>>()
            };
            self.code.iter().flat_map(after)
        });
        named.filter_map(|rest: &str| {
            let end = rest.find(|letter: char| !letter.is_alphanumeric() && letter != '_');
            modules.get(&rest[..end.unwrap_or(rest.len())]).copied()
        })
    }
}

/// Everything that a module uses, itself or by way of others.
fn reachable<'a>(module: &str, uses: &BTreeMap<&'a str, BTreeSet<&'a str>>) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    let mut left: Vec<&str> = uses[module].iter().copied().collect();
    while let Some(next) = left.pop() {
        if found.insert(next) {
            left.extend(&uses[next]);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn circles(files: &[(&str, &str)]) -> Vec<String> {
        let files: Vec<_> = files.iter().map(|(name, text)| File { name, text }).collect();
        check_circles("a/src/x", &files)
    }

    #[test]
    fn a_circle_is_found_however_long_it_is() {
        let two =
            [("a/src/x/b.rs", "use super::c::C;\n"), ("a/src/x/c.rs", "fn c(b: super::b::B) {}\n")];
        assert_eq!(circles(&two).len(), 2);
        let three = [
            ("a/src/x/b.rs", "use super::c::C;\n"),
            ("a/src/x/c.rs", "use super::d::{D, E};\n"),
            ("a/src/x/d.rs", "use super::b::B;\n"),
            ("a/src/x/e.rs", "use super::b::B;\n"),
        ];
        let found = circles(&three);
        assert_eq!(found.len(), 3, "who uses a circle is not in it: {found:?}");
        assert!(found[0].starts_with("a/src/x/b: "), "{found:?}");
    }

    #[test]
    fn a_module_is_one_with_its_children() {
        let lines = [
            ("a/src/x/b.rs", "mod d;\n"),
            ("a/src/x/b/d.rs", "use super::super::c::C;\n"),
            ("a/src/x/c/mod.rs", "use crate::x::b::B;\n"),
        ];
        assert_eq!(circles(&lines).len(), 2);
    }

    #[test]
    fn the_root_of_a_crate_has_no_circles_either() {
        let lines = [
            ("a/src/lib.rs", "mod b;\nmod c;\n"),
            ("a/src/b/e.rs", "use crate::c::C;\n"),
            ("a/src/c.rs", "use crate::b::B;\n"),
        ];
        let files = lines.map(|(name, text)| File { name, text });
        assert_eq!(check_circles("a/src", &files).len(), 2);
    }

    #[test]
    fn what_is_no_circle_is_left_alone() {
        let lines = [
            (
                "a/src/x/b.rs",
                "// As super::c has it.\n#[cfg(test)]\nmod tests {\n    use super::c::C;\n}\n",
            ),
            ("a/src/x/c.rs", "use super::Parent;\nuse super::b::B;\n"),
            ("a/src/x/tests.rs", "use super::b::B;\nuse super::c::C;\n"),
            ("a/src/y/b.rs", "use super::c::C;\n"),
            ("a/src/y/c.rs", "use super::b::B;\n"),
        ];
        assert_eq!(circles(&lines), Vec::<String>::new());
    }
}
