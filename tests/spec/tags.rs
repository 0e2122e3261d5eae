//! Tags: the comments by which code and tests claim entries of the register.

use super::functions::{self, Test};
use super::register::Id;

/// What a tag begins with. Its ids follow, separated by commas: see [`find`].
pub(crate) const TAG: &str = concat!("RFC ", "7609 ");

/// Who claims an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    /// Production code, which obeys the entry.
    Obeyed,
    /// This test, which fails if the entry is not obeyed.
    Proven(Test),
    /// Code that tests use but that is not a test: nothing shows whether it ever runs.
    Nobody,
}

/// One id of one tag.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Tag {
    /// Number of the line, beginning with 1.
    pub(crate) line: usize,
    /// The id, or the text in its place that is not an id.
    pub(crate) id: Result<Id, String>,
    pub(crate) claim: Claim,
}

/// The tags of one file. `name` is its path from the top of the repository, `library` the name of
/// its crate as the compiler writes it.
///
/// A tag is in a comment and ends with its line. If a comma follows the number of the RFC, it is
/// prose. A tag above or in a test says that the test proves the entry. A tag on other code that
/// only tests use is a mistake: see [`Claim::Nobody`].
pub(crate) fn find(name: &str, library: &str, text: &str) -> Vec<Tag> {
    let lines: Vec<&str> = text.lines().collect();
    let tests = functions::tests(name, library, &lines);
    let production = if is_test(name) { 0 } else { production_lines(&lines) };
    let mut tags = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let Some((_, comment)) = line.split_once("//") else { continue };
        let test = tests.iter().find(|test| test.lines.contains(&index));
        let claim = match (index < production, test) {
            (true, _) => Claim::Obeyed,
            (false, Some(test)) => Claim::Proven(test.clone()),
            (false, None) => Claim::Nobody,
        };
        for words in comment.split(TAG).skip(1) {
            tags.extend(ids(words).map(|id| Tag { line: index + 1, id, claim: claim.clone() }));
        }
    }
    tags
}

/// The ids at the beginning of a text. Prose has none; a word that looks like a section is meant
/// to be an id.
fn ids(text: &str) -> impl Iterator<Item = Result<Id, String>> {
    let words = text.split(", ").scan(true, |go_on, part| {
        let word = part.split([' ', ':', ';', ')']).next().unwrap_or_default();
        let proceed = *go_on && looks_like_section(word);
        *go_on = proceed && word == part;
        proceed.then(|| word.trim_end_matches('.'))
    });
    words.map(|word| Id::parse(word).ok_or_else(|| word.to_owned()))
}

/// `4.5.1` and `A.2` do, `A` and `has` do not.
fn looks_like_section(word: &str) -> bool {
    let mut letters = word.bytes();
    match letters.next() {
        Some(b'0'..=b'9') => true,
        Some(b'A'..=b'Z') => matches!(letters.next(), Some(b'.' | b'-')),
        Some(_) | None => false,
    }
}

/// Whether a file is only for tests.
fn is_test(name: &str) -> bool {
    name.starts_with("tests/") || name.contains("/tests/") || name.ends_with("/tests.rs")
}

/// The lines before the tests at the end of the file.
fn production_lines(lines: &[&str]) -> usize {
    let tests = lines.windows(2).position(|pair| {
        pair[0] == "#[cfg(test)]" && pair[1].starts_with("mod ") && pair[1].ends_with('{')
    });
    tests.unwrap_or(lines.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODE: &str = "control/src/x.rs";

    /// Line, text and claim of each tag, in brief. `@` stands for the number of the RFC.
    fn found(name: &str, text: &str) -> Vec<String> {
        let tags = find(name, "smcgate", &text.replace('@', TAG.trim_end()));
        let in_short = |tag: Tag| match tag.id {
            Ok(id) => {
                let claim = match tag.claim {
                    Claim::Obeyed => "Obeyed".to_owned(),
                    Claim::Proven(test) => format!("by {}", test.name.path),
                    Claim::Nobody => "by nobody".to_owned(),
                };
                format!("{} {id} {claim}", tag.line)
            }
            Err(word) => format!("{} no id: {word}", tag.line),
        };
        tags.into_iter().map(in_short).collect()
    }

    #[test]
    fn tags_are_found_where_they_stand() {
        assert_eq!(found(CODE, "a();\n// @ 2.1-3\nb();"), ["2 2.1-3 Obeyed"]);
        assert_eq!(found(CODE, "a(); // @ A.4-12"), ["1 A.4-12 Obeyed"]);
        assert_eq!(found(CODE, "/// Why: @ 2-1."), ["1 2-1 Obeyed"]);
        let several = ["1 2-1 Obeyed", "1 2-2 Obeyed", "1 B.1-3 Obeyed"];
        assert_eq!(found(CODE, "// @ 2-1, 2-2, B.1-3: because"), several);
    }

    /// A sentence about the RFC claims nothing.
    #[test]
    fn prose_is_no_tag() {
        for prose in ["// @, 4.8.1", "// as @ has it", "let a = \"@ 2-1\";", "// A @ B of it"] {
            assert_eq!(found(CODE, prose), Vec::<String>::new(), "{prose}");
        }
        assert_eq!(found(CODE, "// @ 2-1, not 2-2"), ["1 2-1 Obeyed"]);
        assert_eq!(found(CODE, "// @ 2-1 and so on, 2-2"), ["1 2-1 Obeyed"]);
    }

    /// A missing or mistyped number must be reported.
    #[test]
    fn a_tag_without_a_number_is_kept_for_the_complaint() {
        assert_eq!(found(CODE, "// @ 4.5.1"), ["1 no id: 4.5.1"]);
        assert_eq!(found(CODE, "// @ 2-1, A.2"), ["1 2-1 Obeyed", "1 no id: A.2"]);
    }

    /// If a test counted as code, a rule that no code obeys could pass.
    #[test]
    fn tests_prove_and_code_obeys() {
        let tests = "mod tests {\n    // @ 2-1\n    #[test]\n    fn a() {\n    }\n}";
        let both = &format!("// @ 2-1\n#[cfg(test)]\n{tests}");
        assert_eq!(found(CODE, both), ["1 2-1 Obeyed", "4 2-1 by x::tests::a"]);
        let elsewhere = "#[cfg(test)]\nmod tests;\n// @ 2-1";
        assert_eq!(found(CODE, elsewhere), ["3 2-1 Obeyed"]);
        for name in ["tests/sim/x.rs", "control/src/x/tests.rs", "control/src/x/tests/y.rs"] {
            assert_eq!(found(name, "// @ 2-1"), ["1 2-1 by nobody"], "{name}");
        }
        let inside = "#[test]\nfn a() {\n    b(); // @ 2-1\n}\n// @ 2-2\nfn c() {\n}";
        assert_eq!(found("tests/sim/main.rs", inside), ["3 2-1 by a", "5 2-2 by nobody"]);
    }
}
