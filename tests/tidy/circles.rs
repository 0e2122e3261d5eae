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
        let others = part.uses(&modules).into_iter().filter(|other| *other != part.module);
        uses.entry(part.module).or_default().extend(others);
    }
    let circular = uses.keys().filter(|module| reachable(module, &uses).contains(*module));
    circular.map(|module| format!("{folder}/{module}: it is in a circle of imports")).collect()
}

/// A file of a module in the folder.
struct Part<'a> {
    /// The module directly in the folder that the file belongs to.
    module: &'a str,
    /// The modules from the root of the crate down to the folder, and from there to the file.
    folder: Vec<&'a str>,
    names: Vec<&'a str>,
    /// Its production code, without comments.
    code: String,
}

impl<'a> Part<'a> {
    /// None if the file is elsewhere, the root of the folder, or only for tests.
    fn of(folder: &'a str, name: &'a str, text: &'a str) -> Option<Self> {
        let path = name.strip_prefix(folder)?.strip_prefix('/')?.strip_suffix(".rs")?;
        let path = path.strip_suffix("/mod").unwrap_or(path);
        let names: Vec<&str> = path.split('/').collect();
        if names.contains(&"tests") || ["lib", "main", "mod"].contains(&path) {
            return None;
        }
        let inside = folder.split_once("src").map_or("", |(_, inside)| inside);
        let folder = inside.split('/').filter(|name| !name.is_empty()).collect();
        let production = text.split("#[cfg(test)]\nmod ").next().unwrap_or(text);
        let is_code = |line: &&str| !line.trim_start().starts_with("//");
        let code: Vec<&str> = production.lines().filter(is_code).collect();
        Some(Self { module: names[0], folder, names, code: code.join("\n") })
    }

    /// The modules in the folder that it names.
    fn uses(&self, modules: &BTreeSet<&'a str>) -> BTreeSet<&'a str> {
        let here: Vec<&str> = self.folder.iter().chain(&self.names).copied().collect();
        let mut paths = Vec::new();
        let mut rest = self.code.as_str();
        while let Some(start) = rest.find(is_of_a_name) {
            let (name, after) = first_name(&rest[start..]);
            let begins_path = ["super", "crate"].contains(&name);
            rest = if begins_path { follow(&here, &rest[start..], &mut paths) } else { after };
        }
        let inside = paths.iter().filter_map(|path| path.strip_prefix(self.folder.as_slice()));
        inside.filter_map(|path| modules.get::<str>(path.first()?).copied()).collect()
    }
}

/// Adds all that the path at the beginning of `text` names, or each path of a group of them, as
/// paths from the root of the crate; `from` is the module in which it stands, or the part of the
/// path before it. Returns what follows it.
fn follow<'b>(from: &[&'b str], text: &'b str, paths: &mut Vec<Vec<&'b str>>) -> &'b str {
    let text = text.trim_start();
    if let Some(group) = text.strip_prefix('{') {
        let mut rest = group.trim_start();
        while !rest.is_empty() && !rest.starts_with('}') {
            rest = follow(from, rest, paths);
            // Past a `*`, or the other name that it gets.
            rest = &rest[rest.find([',', '}']).unwrap_or(rest.len())..];
            rest = rest.strip_prefix(',').unwrap_or(rest).trim_start();
        }
        return rest.strip_prefix('}').unwrap_or(rest);
    }
    let (name, after) = first_name(text);
    let mut path = from.to_vec();
    match name {
        "crate" => path.clear(),
        "super" => drop(path.pop()),
        "self" | "" => {}
        name => path.push(name),
    }
    match after.trim_start().strip_prefix("::") {
        Some(next) => follow(&path, next, paths),
        None => {
            paths.push(path);
            after
        }
    }
}

/// The name at the beginning of `text`, or nothing, and what follows.
fn first_name(text: &str) -> (&str, &str) {
    text.split_at(text.find(|letter| !is_of_a_name(letter)).unwrap_or(text.len()))
}

fn is_of_a_name(letter: char) -> bool {
    letter.is_alphanumeric() || letter == '_'
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

    /// The other half of the circle is always there, so there is one if `text` is understood.
    #[test]
    fn each_way_to_name_a_sibling_is_understood() {
        let back = ("a/src/x/c.rs", "use super::b::B;\nuse super::h::H;\n");
        for (file, text) in [
            ("a/src/x/b.rs", "use super::c;\n"),
            ("a/src/x/b.rs", "use super::{c::C, Parent};\n"),
            ("a/src/x/b.rs", "use super::{\n    Parent, d as e,\n    c::{self, C},\n};\n"),
            ("a/src/x/b.rs", "use {super::d::*, super::c::*};\n"),
            ("a/src/x/b.rs", "use crate::{x::{d::{D, E}, c}, y};\n"),
            ("a/src/x/b.rs", "use super::super::x::c::C;\n"),
            ("a/src/x/b.rs", "fn f(c: &crate::x::c::C<super::d::D>) {}\n"),
            ("a/src/x/b.rs", "fn f(d: super::d::D<super::c::C>) {}\n"),
            ("a/src/x/h/i.rs", "use super::super::{d, c};\n"),
            ("a/src/x/h/i/j.rs", "use super::super::super::c::C;\n"),
        ] {
            assert_eq!(circles(&[(file, text), back]).len(), 2, "{text}");
        }
        for (file, text) in [
            ("a/src/x/b.rs", "use super::super::c::C;\n"),
            ("a/src/x/b.rs", "use super::super::{c, y::c};\n"),
            ("a/src/x/b.rs", "use super::{c_and_d, d::c};\n"),
            ("a/src/x/b.rs", "use crate::c::C;\nuse other::x::c::C;\n"),
            ("a/src/x/b.rs", "pub(super) fn c() { self::c::d(); superior::c(); }\n"),
            ("a/src/x/h/i.rs", "use super::c::C;\n"),
            ("a/src/x/h/i.rs", "pub(in super::super) mod c;\n"),
        ] {
            assert_eq!(circles(&[(file, text), back]), Vec::<String>::new(), "{text}");
        }
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
