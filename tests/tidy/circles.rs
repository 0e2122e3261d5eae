//! No module uses another one that uses it. Modules in a circle can only be understood together.

use std::collections::{BTreeMap, BTreeSet};

use super::rules::File;

/// Every module among the files directly in `folder` that uses itself by way of its siblings, one
/// line each. What a module uses of its parent is no edge: the parent declares the siblings.
pub(crate) fn check_circles(folder: &str, files: &[File<'_>]) -> Vec<String> {
    let siblings: BTreeMap<&str, &str> =
        files.iter().filter_map(|file| Some((module_in(folder, file.name)?, file.text))).collect();
    let uses: BTreeMap<&str, BTreeSet<&str>> =
        siblings.iter().map(|(module, text)| (*module, used(text, &siblings).collect())).collect();
    let circular = uses.keys().filter(|module| reachable(module, &uses).contains(*module));
    circular.map(|module| format!("{folder}/{module}.rs:1: it is in a circle of imports")).collect()
}

/// The module that a file is, if it is directly in the folder and not only for tests.
fn module_in<'a>(folder: &str, name: &'a str) -> Option<&'a str> {
    let module = name.strip_prefix(folder)?.strip_prefix('/')?.strip_suffix(".rs")?;
    (!module.contains('/') && module != "tests").then_some(module)
}

/// The siblings that a module names in production code.
fn used<'a>(text: &'a str, siblings: &BTreeMap<&'a str, &'a str>) -> impl Iterator<Item = &'a str> {
    let production = text.split("#[cfg(test)]\nmod ").next().unwrap_or(text);
    let code = production.lines().filter(|line| !line.trim_start().starts_with("//"));
    let named = code.flat_map(|line| line.split("super::").skip(1));
    let named = named.map(|rest| {
        let end = rest.find(|letter: char| !letter.is_alphanumeric() && letter != '_');
        &rest[..end.unwrap_or(rest.len())]
    });
    named.filter(|name| siblings.contains_key(name)).collect::<Vec<_>>().into_iter()
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
        assert!(found[0].starts_with("a/src/x/b.rs:1: "), "{found:?}");
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
