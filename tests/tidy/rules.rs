//! The rules, each a function of a name and a text.

/// A file of the repository.
pub(crate) struct File<'a> {
    /// Its path from the top of the repository.
    pub(crate) name: &'a str,
    pub(crate) text: &'a str,
}

/// Everything wrong with one Rust file, one line each.
pub(crate) fn check_file(file: &File<'_>) -> Vec<String> {
    let mut found = Vec::new();
    let lines: Vec<&str> = file.text.lines().collect();
    let production = if file.is_test() { 0 } else { production_lines(&lines) };
    let length = lines[..production].iter().filter(|line| !is_tag(line)).count();
    if length > 500 {
        found.push((0, format!("{length} lines of production code, 500 are allowed")));
    }
    if !file.text.starts_with("//!") && !file.name.ends_with("/tests.rs") {
        found.push((0, "a module begins with //! and says why it exists".into()));
    }
    if ["util.rs", "utils.rs", "common.rs"].iter().any(|name| file.name.ends_with(name)) {
        found.push((0, "a module of this name has no subject yet".into()));
    }
    for (number, line) in lines.iter().enumerate() {
        let in_production = number < production;
        found.extend(check_line(file, line, in_production).map(|what| (number, what.into())));
    }
    for (number, length) in long_functions(&lines) {
        found.push((number, format!("a function of {length} lines, 70 are allowed")));
    }
    let early =
        "a test that returns early counts as passed: let it fail, or ignore it, with a reason";
    found.extend(early_returns(&lines).into_iter().map(|number| (number, early.into())));
    found.iter().map(|(line, what)| format!("{}:{}: {what}", file.name, line + 1)).collect()
}

/// Everything wrong with one shell script.
pub(crate) fn check_script(file: &File<'_>) -> Option<String> {
    let interpreter = file.text.lines().next().unwrap_or_default();
    let for_shell = interpreter.starts_with("#!") && interpreter.ends_with("sh");
    if !for_shell && !file.name.ends_with(".sh") {
        return None;
    }
    let mut code = file.text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let strict = code.next() == Some("set -euo pipefail");
    (!strict).then(|| format!("{}:1: a script begins with set -euo pipefail", file.name))
}

/// Names that are missing at the top of the repository, and names that do not belong there.
pub(crate) fn check_top_level(names: &[String], allowed: &[&str]) -> Vec<String> {
    let strangers = names.iter().filter(|name| !allowed.contains(&name.as_str()));
    let strangers = strangers.map(|name| format!("{name}: does not belong at the top level"));
    let missing = allowed.iter().filter(|allowed| !names.iter().any(|name| name == *allowed));
    strangers.chain(missing.map(|name| format!("{name}: missing at the top level"))).collect()
}

impl File<'_> {
    /// Whether it is only for tests.
    fn is_test(&self) -> bool {
        self.is_below(&["tests/"])
            || self.name.contains("/tests/")
            || self.name.ends_with("/tests.rs")
    }

    fn is_below(&self, folders: &[&str]) -> bool {
        folders.iter().any(|folder| self.name.starts_with(folder))
    }
}

/// What is wrong with one line.
fn check_line(
    file: &File<'_>,
    line: &str,
    in_production: bool,
) -> impl Iterator<Item = &'static str> {
    let code = code_of(line);
    let markers = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];
    let stubs = [concat!("todo", "!("), concat!("unimplemented", "!(")];
    let net = concat!("std::", "net");
    let clocks = [concat!("Instant", "::now"), concat!("SystemTime", "::now")];
    let reads_clock = clocks.iter().any(|clock| code.contains(clock));
    let may_read_clock = file.name == "dataplane/engine/src/clock.rs" || file.is_below(&["perf/"]);
    let islands = ["ffi/", "dataplane/memory/"];
    let ignored = code.trim_start().starts_with(concat!("#[ign", "ore"));
    [
        (line.chars().count() > 100 && !line.contains("://"), "longer than 100 columns"),
        (markers.iter().any(|marker| has_word(line, marker)), "a left-over marker"),
        (stubs.iter().any(|stub| code.contains(stub)), "a stub"),
        (ignored && !code.contains('='), "an ignored test without a reason"),
        (has_word(&code, "unsafe") && !file.is_below(&islands), "unsafe outside its islands"),
        (code.contains(net) && file.is_below(&["dataplane/proto/"]), "sockets in the protocol"),
        (in_production && reads_clock && !may_read_clock, "time is an argument"),
        (has_poor_name(&code), "a name that says nothing (STYLE, habits)"),
    ]
    .into_iter()
    .filter_map(|(wrong, what)| wrong.then_some(what))
}

/// The lines before the tests at the end of the file.
fn production_lines(lines: &[&str]) -> usize {
    let tests = lines.windows(2).position(|pair| {
        pair[0] == "#[cfg(test)]" && pair[1].starts_with("mod ") && pair[1].ends_with('{')
    });
    tests.unwrap_or(lines.len())
}

/// Functions of more than 70 lines: where they begin, and how long they are.
///
/// It relies on the formatter: the brace that ends a function is alone on its line, with the same
/// indentation as the line that began the function.
fn long_functions(lines: &[&str]) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let indent = line.len() - code.len();
        // `fn(` is a type; a definition has a name.
        let defines = has_word(&code_of(line), "fn") && !code.contains("fn(");
        if !defines || code.ends_with('}') || code.ends_with(';') {
            continue;
        }
        let end = lines[start..].iter().position(|line| {
            let code = line.trim_start();
            line.len() - code.len() == indent && (code == "}" || code.ends_with(");"))
        });
        let end = end.map_or(start, |end| start + end + 1);
        let length = lines[start..end].iter().filter(|line| !is_tag(line)).count();
        if length > 70 && !code.starts_with("macro_rules!") {
            found.push((start, length));
        }
    }
    found
}

/// Whether a line is nothing but a tag, which names a rule of the RFC (see `tests/spec`). Tags do
/// not count as lines of code: to leave one out must not make a function short enough.
fn is_tag(line: &str) -> bool {
    line.trim_start().starts_with(concat!("// RFC ", "7609 "))
}

/// The lines on which a test returns early.
fn early_returns(lines: &[&str]) -> Vec<usize> {
    let mut found = Vec::new();
    for (start, line) in lines.iter().enumerate().filter(|(_, line)| line.trim() == "#[test]") {
        let end = format!("{}}}", &line[..line.len() - line.trim_start().len()]);
        let body = lines[start..].iter().take_while(|line| **line != end);
        let returns = |(_, line): &(usize, &&str)| {
            let code = code_of(line);
            code.contains("return;") || code.contains("{ return }")
        };
        found.extend(body.enumerate().filter(returns).map(|(index, _)| start + index));
    }
    found
}

/// Whether this line defines something with a name that says nothing.
fn has_poor_name(code: &str) -> bool {
    let words: Vec<&str> = words(code).collect();
    words.windows(2).any(|pair| match pair[0] {
        "fn" => pair[1].starts_with("get_"),
        "struct" | "enum" | "trait" | "type" => pair[1].ends_with("Manager"),
        "mod" => ["util", "utils", "common"].contains(&pair[1]),
        _ => false,
    })
}

fn has_word(text: &str, word: &str) -> bool {
    words(text).any(|found| found == word)
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|letter: char| !letter.is_alphanumeric() && letter != '_')
        .filter(|word| !word.is_empty())
}

/// The line without its comment and without what is inside its string literals.
fn code_of(line: &str) -> String {
    let mut code = String::new();
    let (mut quoted, mut escaped) = (false, false);
    let mut letters = line.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            _ if escaped => escaped = false,
            '\\' if quoted => escaped = true,
            '\'' if !quoted && letters.peek() == Some(&'"') => drop(letters.next()),
            '"' => quoted = !quoted,
            '/' if !quoted && letters.peek() == Some(&'/') => break,
            _ if !quoted => code.push(letter),
            _ => {}
        }
    }
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complaints(name: &str, body: &str) -> Vec<String> {
        check_file(&File { name, text: &format!("//! Why.\n{body}\n") })
    }

    fn is_refused(name: &str, body: &str, what: &str) {
        let found = complaints(name, body);
        assert_eq!(found.len(), 1, "{body}: {found:?}");
        assert!(found[0].starts_with(name) && found[0].contains(what), "{found:?}");
    }

    #[test]
    fn good_code_is_left_alone() {
        let body = "/// Unsafe, todo and unwrap are words.\nfn widget() -> &'static str {\n    \
                    \"unsafe // not a comment\"\n}\n#![forbid(unsafe_code)]";
        assert_eq!(complaints("dataplane/proto/src/x.rs", body), Vec::<String>::new());
    }

    #[test]
    fn length_of_files_counts_production_only() {
        let name = "control/src/x.rs";
        let body = "const A: u8 = 0;\n".repeat(499);
        assert!(complaints(name, body.trim_end()).is_empty());
        is_refused(name, &body, "501 lines");
        let tests = "#[cfg(test)]\nmod tests {\n}\n";
        let body = "const A: u8 = 0;\n".repeat(499) + tests + &"const B: u8 = 0;\n".repeat(300);
        assert!(complaints(name, &body).is_empty());
        assert!(complaints("tests/x.rs", &"const A: u8 = 0;\n".repeat(600)).is_empty());
    }

    #[test]
    fn a_declared_test_module_does_not_hide_what_follows() {
        let body = "#[cfg(test)]\nmod tests;\n".to_owned() + &"const A: u8 = 0;\n".repeat(500);
        is_refused("control/src/x.rs", &body, "lines of production");
    }

    #[test]
    fn length_of_functions_includes_both_ends() {
        let of = |lines: usize| format!("    fn a() {{\n{}    }}", "        b();\n".repeat(lines));
        assert!(complaints("control/src/x.rs", &of(68)).is_empty());
        is_refused("control/src/x.rs", &of(69), "function of 71 lines");
        let field = of(69).replace("fn a() {", "a: fn(),");
        assert!(complaints("control/src/x.rs", &field).is_empty());
    }

    #[test]
    fn tags_do_not_count_as_lines_of_code() {
        let tag = concat!("    // RFC ", "7609 2 #1: identify a link\n");
        let function = format!("    fn a() {{\n{}{tag}{tag}    }}", "        b();\n".repeat(68));
        assert!(complaints("control/src/x.rs", &function).is_empty());
        is_refused("control/src/x.rs", &function.replace("7609 2", "7609, 2"), "of 72 lines");
        let file = "const A: u8 = 0;\n".repeat(498) + tag + tag + tag;
        assert!(complaints("control/src/x.rs", file.trim_end()).is_empty());
        is_refused("control/src/x.rs", &file.trim_end().replace("7609 2", "7609, 2"), "502 lines");
    }

    #[test]
    fn long_lines_are_refused_unless_they_hold_an_address() {
        is_refused("perf/src/x.rs", &format!("// {}", "ü".repeat(98)), "100 columns");
        assert!(complaints("perf/src/x.rs", &format!("// {}", "ü".repeat(97))).is_empty());
        assert!(complaints("perf/src/x.rs", &format!("// x://{}", "y".repeat(98))).is_empty());
    }

    #[test]
    fn words_that_may_not_stand_in_the_source() {
        let x = "control/src/x.rs";
        is_refused(x, concat!("// FIX", "ME later"), "marker");
        is_refused(x, concat!("// TO", "DO"), "marker");
        is_refused(x, concat!("    todo", "!();"), "stub");
        is_refused(x, concat!("    unimplemented", "!(\"x\");"), "stub");
        is_refused(x, concat!("#[ign", "ore]"), "without a reason");
        is_refused(x, "struct LinkManager;", "name");
        is_refused(x, "pub fn get_link(&self);", "name");
        is_refused(x, "mod common;", "name");
        assert!(complaints(x, concat!("#[ign", "ore = \"needs a guest\"]")).is_empty());
    }

    #[test]
    fn a_test_does_not_end_before_its_end() {
        let test = |body: &str| format!("#[test]\nfn a() {{\n    {body}\n}}\nfn b() {{ return; }}");
        is_refused("control/src/x.rs", &test("let Some(x) = y else { return };"), "early");
        is_refused("tests/x.rs", &test(concat!("return", ";")), "early");
        assert!(
            complaints("tests/x.rs", &test("let Some(x) = y else { return None };")).is_empty()
        );
    }

    #[test]
    fn unsafe_stays_on_its_islands() {
        let body = "    let x = unsafe { y() };";
        is_refused("dataplane/engine/src/x.rs", body, "islands");
        is_refused("tests/x.rs", "unsafe impl Send for X {}", "islands");
        assert!(complaints("ffi/os/src/x.rs", body).is_empty());
        assert!(complaints("dataplane/memory/src/x.rs", body).is_empty());
    }

    #[test]
    fn clocks_and_sockets_stay_out_of_the_machines() {
        let clock = concat!("let now = Instant", "::now();");
        is_refused("dataplane/engine/src/x.rs", clock, "time");
        is_refused("control/src/x.rs", concat!("SystemTime", "::now();"), "time");
        assert!(complaints("dataplane/engine/src/clock.rs", clock).is_empty());
        assert!(complaints("perf/src/x.rs", clock).is_empty());
        assert!(complaints("tests/x.rs", clock).is_empty());
        let net = concat!("use std::", "net::TcpStream;");
        is_refused("dataplane/proto/src/x.rs", net, "sockets");
        assert!(complaints("control/src/x.rs", net).is_empty());
    }

    #[test]
    fn a_module_says_why_it_exists_and_has_a_subject() {
        let silent = File { name: "control/src/x.rs", text: "use std::io;\n" };
        assert!(check_file(&silent)[0].contains("//!"));
        assert!(check_file(&File { name: "control/src/x/tests.rs", ..silent }).is_empty());
        is_refused("control/src/util.rs", "", "subject");
    }

    #[test]
    fn scripts_stop_at_the_first_error() {
        let of = |name: &str, text: &str| check_script(&File { name, text });
        let bash = "#!/usr/bin/env bash\n# Why.\n\n";
        assert!(of("scripts/x", &format!("{bash}set -euo pipefail\nls\n")).is_none());
        assert!(of("scripts/x", &format!("{bash}ls\nset -euo pipefail\n")).is_some());
        assert!(of("scripts/lib/x.sh", "set -e\n").is_some());
        assert!(of("scripts/x.py", "#!/usr/bin/env python3\n").is_none());
    }

    #[test]
    fn the_top_level_is_what_it_should_be() {
        let names = |names: &[&str]| names.iter().map(|&name| name.into()).collect::<Vec<String>>();
        assert!(check_top_level(&names(&["a", "b"]), &["a", "b"]).is_empty());
        assert_eq!(check_top_level(&names(&["a", "c"]), &["a", "b"]).len(), 2);
    }
}
