//! Tags: the comments by which code and tests claim entries of the register.

use super::functions::{self, Test};
use super::register::Id;

/// What a tag begins with. The id and the title of one entry follow: see [`find`].
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

/// A tag.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Tag {
    /// Number of the line, beginning with 1.
    pub(crate) line: usize,
    /// The id and the title, or a comment that is meant as a tag but is none.
    pub(crate) words: Result<(Id, String), String>,
    pub(crate) claim: Claim,
}

/// The tags of one file. `name` is its path from the top of the repository, `library` the name of
/// its crate as the compiler writes it.
///
/// A tag is a comment of its own, on one line: the number of the RFC, the id of one entry, a colon
/// and the title of the entry. If a comma follows the number of the RFC, it is prose. A tag above
/// or in a test says that the test proves the entry. A tag on other code that only tests use is a
/// mistake: see [`Claim::Nobody`].
pub(crate) fn find(name: &str, library: &str, text: &str) -> Vec<Tag> {
    let lines: Vec<&str> = text.lines().collect();
    let tests = functions::tests(name, library, &lines);
    let production = if is_test(name) { 0 } else { production_lines(&lines) };
    let mut tags = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let Some((_, comment)) = line.rsplit_once("//") else { continue };
        let Some(words) = words_in(comment.trim_start_matches(['/', '!']).trim()) else { continue };
        let test = tests.iter().find(|test| test.lines.contains(&index));
        let claim = match (index < production, test) {
            (true, _) => Claim::Obeyed,
            (false, Some(test)) => Claim::Proven(test.clone()),
            (false, None) => Claim::Nobody,
        };
        tags.push(Tag { line: index + 1, words, claim });
    }
    tags
}

/// Id and title in a comment, or the comment if it has the beginning of a tag but is none. Prose
/// has neither, nor has an example in quotes.
fn words_in(comment: &str) -> Option<Result<(Id, String), String>> {
    comment.match_indices(TAG).find(|(at, _)| {
        let is_quoted = comment[..*at].ends_with('`');
        !is_quoted && looks_like_section(&comment[at + TAG.len()..])
    })?;
    let tag = comment.strip_prefix(TAG).and_then(|rest| {
        let (id, title) = rest.split_once(": ")?;
        Some((Id::parse(id)?, title.to_owned()))
    });
    Some(tag.ok_or_else(|| comment.to_owned()))
}

/// Whether a text begins with a section: `4.5.1` and `A.2` do, `A` and `has` do not.
fn looks_like_section(text: &str) -> bool {
    let word = text.split([' ', ':']).next().unwrap_or_default();
    let has_number = text.strip_prefix(word).is_some_and(|rest| rest.starts_with(" #"));
    let mut letters = word.bytes();
    match letters.next() {
        Some(b'0'..=b'9') => true,
        Some(b'A'..=b'Z') => has_number || matches!(letters.next(), Some(b'.' | b'-')),
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
        let in_short = |tag: Tag| match tag.words {
            Ok((id, title)) => {
                let claim = match tag.claim {
                    Claim::Obeyed => "Obeyed".to_owned(),
                    Claim::Proven(test) => format!("by {}", test.name.path),
                    Claim::Nobody => "by nobody".to_owned(),
                };
                format!("{} {id}: {title} {claim}", tag.line)
            }
            Err(comment) => {
                format!("{} no tag: {}", tag.line, comment.replace(TAG.trim_end(), "@"))
            }
        };
        tags.into_iter().map(in_short).collect()
    }

    #[test]
    fn tags_are_found_where_they_stand() {
        assert_eq!(found(CODE, "a();\n// @ 2.1 #3: do it\nb();"), ["2 2.1 #3: do it Obeyed"]);
        assert_eq!(found(CODE, "a(); // @ A.4 #12: wrap: 0"), ["1 A.4 #12: wrap: 0 Obeyed"]);
        assert_eq!(found(CODE, "/// Why.\n/// @ 2 #1: do it"), ["2 2 #1: do it Obeyed"]);
        let two = ["1 B #1: do it Obeyed", "2 B.1 #3: do that Obeyed"];
        assert_eq!(found(CODE, "// @ B #1: do it\n// @ B.1 #3: do that"), two);
    }

    /// A sentence about the RFC claims nothing.
    #[test]
    fn prose_is_no_tag() {
        let prose = [
            "// @, 4.8.1",
            "// @, 2 #1: do it",
            "// as @ has it",
            "// as `@ 2 #1: do it`",
            "let a = \"@ 2 #1: do\";",
            "// A @ B of it",
        ];
        for prose in prose {
            assert_eq!(found(CODE, prose), Vec::<String>::new(), "{prose}");
        }
    }

    /// Who makes a mistake in a tag must hear of it.
    #[test]
    fn what_is_meant_as_a_tag_is_kept_for_the_complaint() {
        let wrong = [
            "@ 4.5.1",
            "@ 2-1",
            "@ 2-1, 2-2",
            "@ A-1",
            "@ 2 #1",
            "@ 2 #1 do it",
            "@ 2 #1, 2 #2: do it",
            "@ B #x: do it",
            "why: @ 2 #1: do it",
        ];
        for wrong in wrong {
            assert_eq!(found(CODE, &format!("// {wrong}")), [format!("1 no tag: {wrong}")]);
        }
    }

    /// If a test counted as code, a rule that no code obeys could pass.
    #[test]
    fn tests_prove_and_code_obeys() {
        let tests = "mod tests {\n    // @ 2 #1: do it\n    #[test]\n    fn a() {\n    }\n}";
        let both = &format!("// @ 2 #1: do it\n#[cfg(test)]\n{tests}");
        assert_eq!(found(CODE, both), ["1 2 #1: do it Obeyed", "4 2 #1: do it by x::tests::a"]);
        let elsewhere = "#[cfg(test)]\nmod tests;\n// @ 2 #1: do it";
        assert_eq!(found(CODE, elsewhere), ["3 2 #1: do it Obeyed"]);
        for name in ["tests/sim/x.rs", "control/src/x/tests.rs", "control/src/x/tests/y.rs"] {
            assert_eq!(found(name, "// @ 2 #1: do it"), ["1 2 #1: do it by nobody"], "{name}");
        }
        let inside =
            "#[test]\nfn a() {\n    b(); // @ 2 #1: do it\n}\n// @ 2 #2: do that\nfn c() {\n}";
        assert_eq!(
            found("tests/sim/main.rs", inside),
            ["3 2 #1: do it by a", "5 2 #2: do that by nobody"]
        );
    }
}
