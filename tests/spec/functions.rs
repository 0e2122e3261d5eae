//! The tests of a source file: where each begins and ends, and its name in the test runner.
//!
//! The source is formatted, so a function ends at the closing brace that has the same indentation
//! as its attributes.

use std::ops::RangeInclusive;

/// The name of a test in the test runner.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct TestName {
    /// The program that it is in.
    pub(crate) program: String,
    /// Its modules and its function.
    pub(crate) path: String,
}

/// A test in a source file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Test {
    pub(crate) name: TestName,
    /// Runs only on request, mostly because it needs root.
    pub(crate) is_ignored: bool,
    /// From the first line of its comment to its last brace, counted from zero.
    pub(crate) lines: RangeInclusive<usize>,
}

/// The tests of a file. `file` is its path from the top of the repository, `library` the name of
/// its crate as the compiler writes it.
pub(crate) fn tests(file: &str, library: &str, lines: &[&str]) -> Vec<Test> {
    let (program, modules) = place(file, library);
    let mut tests = Vec::new();
    for (index, line) in lines.iter().enumerate().filter(|(_, line)| line.trim() == "#[test]") {
        let indent = &line[..line.len() - line.trim_start().len()];
        let is_head = |line: &&&str| {
            let line = line.trim_start();
            line.starts_with("//") || line.starts_with("#[")
        };
        let head = lines[..index].iter().rev().take_while(is_head).count();
        let attributes = lines[index..].iter().take_while(is_head).count();
        let function = lines.get(index + attributes).copied().unwrap_or_default();
        let Some(name) = function_name(function) else { continue };
        let end = format!("{indent}}}");
        let length = lines[index..].iter().position(|line| *line == end).unwrap_or(attributes);
        let inside = modules_around(&lines[..index], indent.len());
        let path: Vec<&str> =
            modules.iter().map(String::as_str).chain(inside).chain([name]).collect();
        let ignores = |line: &&str| line.trim_start().starts_with("#[ignore");
        tests.push(Test {
            name: TestName { program: program.clone(), path: path.join("::") },
            is_ignored: lines[index - head..index + attributes].iter().any(ignores),
            lines: index - head..=index + length,
        });
    }
    tests
}

/// The program and the modules of a file.
fn place(file: &str, library: &str) -> (String, Vec<String>) {
    let stem = file.strip_suffix(".rs").unwrap_or(file);
    let (program, rest) = match (stem.strip_prefix("tests/"), stem.split_once("/src/")) {
        (Some(rest), _) => match rest.split_once('/') {
            Some((program, rest)) => (program, rest),
            None if rest == "lib" => (library, rest),
            None => (rest, "main"),
        },
        (None, Some((_, rest))) => (library, rest),
        (None, None) => match stem.split_once("/tests/") {
            Some((_, program)) => (program, "main"),
            None => (library, stem),
        },
    };
    let modules = rest.split('/').filter(|name| !["lib", "main", "mod"].contains(name));
    (program.to_owned(), modules.map(str::to_owned).collect())
}

fn function_name(line: &str) -> Option<&str> {
    let (_, rest) = line.trim_start().split_once("fn ").filter(|(before, _)| before.is_empty())?;
    let end = rest.find(|letter: char| !letter.is_alphanumeric() && letter != '_')?;
    (end > 0).then(|| &rest[..end])
}

/// The modules that are open after these lines and have less indentation than `indent`.
fn modules_around<'a>(lines: &[&'a str], indent: usize) -> Vec<&'a str> {
    let mut open: Vec<(usize, &str)> = Vec::new();
    for line in lines {
        let text = line.trim_start();
        let at = line.len() - text.len();
        if text == "}" {
            open.retain(|(other, _)| *other < at);
        } else if let Some(name) =
            text.strip_prefix("mod ").and_then(|rest| rest.strip_suffix(" {"))
        {
            open.push((at, name));
        }
    }
    open.into_iter().filter(|(at, _)| *at < indent).map(|(_, name)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(file: &str, text: &str) -> Vec<(String, String, bool, RangeInclusive<usize>)> {
        let lines: Vec<&str> = text.lines().collect();
        let in_short =
            |test: Test| (test.name.program, test.name.path, test.is_ignored, test.lines);
        tests(file, "smcr_it", &lines).into_iter().map(in_short).collect()
    }

    #[test]
    fn a_test_begins_with_its_comment_and_ends_with_its_brace() {
        let text =
            "fn a() {\n}\n\n/// Why.\n#[test]\n#[ignore = \"root\"]\nfn b() {\n    c();\n}\n";
        let expected = ("smcr_it".into(), "x::b".into(), true, 3..=8);
        assert_eq!(found("dataplane/it/src/x.rs", text), [expected]);
    }

    #[test]
    fn a_test_is_called_as_the_runner_calls_it() {
        let text = "#[cfg(test)]\nmod tests {\n    #[test]\n    fn b() {\n    }\n}\n";
        let name = |file: &str, text: &str| {
            let (program, path, ..) = found(file, text).remove(0);
            format!("{program} {path}")
        };
        assert_eq!(name("dataplane/it/src/lib.rs", text), "smcr_it tests::b");
        assert_eq!(
            name("dataplane/it/src/x/tests.rs", "#[test]\nfn b() {\n}"),
            "smcr_it x::tests::b"
        );
        let plain = "#[test]\nfn b() {\n}";
        assert_eq!(name("tests/sim/main.rs", plain), "sim b");
        assert_eq!(name("tests/sim/gateways/mod.rs", plain), "sim gateways::b");
        assert_eq!(name("tests/tidy.rs", plain), "tidy b");
        assert_eq!(name("tests/lib.rs", text), "smcr_it tests::b");
        assert_eq!(name("control/tests/program.rs", plain), "program b");
    }

    /// Also inside a macro, and after a module that has ended.
    #[test]
    fn modules_and_macros_around_are_told_apart() {
        let text = "mod over {\n}\nproptest! {\n    #[test]\n    fn b(n in 0..9) {\n    }\n}\n";
        let expected = ("smcr_it".into(), "b".into(), false, 3..=5);
        assert_eq!(found("dataplane/it/src/lib.rs", text), [expected]);
    }
}
