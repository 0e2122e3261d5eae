//! Which tests passed in this run: read from what `cargo test` printed, phase by phase.

use std::collections::HashSet;

use super::functions::TestName;

/// The tests that passed, and the phases that ran.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Proofs {
    /// By the name of the phase.
    pub(crate) phases: Vec<String>,
    passed: HashSet<TestName>,
}

impl Proofs {
    /// Adds what a phase has printed.
    pub(crate) fn add(&mut self, phase: &str, output: &str) {
        self.phases.push(phase.to_owned());
        let mut program = String::new();
        let mut unfinished: Option<&str> = None;
        for line in output.lines() {
            if let Some(name) = program_in(line) {
                program = name;
                unfinished = None;
            } else if let Some((path, end)) = test_in(line) {
                unfinished = Some(path);
                self.note(&program, &mut unfinished, end);
            } else {
                // Another program wrote between the name of a test and its outcome.
                self.note(&program, &mut unfinished, line);
            }
        }
    }

    fn note(&mut self, program: &str, unfinished: &mut Option<&str>, end: &str) {
        let is_over = |outcome: &str| end == outcome || end.ends_with(&format!("... {outcome}"));
        if is_over("ok")
            && let Some(path) = unfinished.take()
        {
            let name = TestName { program: program.to_owned(), path: path.to_owned() };
            self.passed.insert(name);
        } else if is_over("FAILED") || end.starts_with("ignored") {
            *unfinished = None;
        }
    }

    /// Whether a test ran and passed.
    pub(crate) fn has(&self, name: &TestName) -> bool {
        self.passed.contains(name)
    }

    /// How many passed.
    pub(crate) fn passed(&self) -> usize {
        self.passed.len()
    }
}

/// The program whose tests follow: `Running unittests src/lib.rs (target/debug/deps/NAME-HASH)`.
fn program_in(line: &str) -> Option<String> {
    let (_, rest) = line.split_once("Running ")?;
    let path = rest.split_once('(')?.1.strip_suffix(')')?;
    let file = path.rsplit('/').next()?;
    Some(file.rsplit_once('-')?.0.to_owned())
}

/// A test and the rest of its line: `test a::b ... ok`.
fn test_in(line: &str) -> Option<(&str, &str)> {
    let (path, end) = line
        .strip_prefix("test ")?
        .split_once(" ... ")
        .or_else(|| line.strip_prefix("test ")?.strip_suffix(" ...").map(|path| (path, "")))?;
    let path = path.strip_suffix(" - should panic").unwrap_or(path);
    (!path.contains(' ')).then_some((path, end))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passed(output: &str, program: &str, path: &str) -> bool {
        let mut proofs = Proofs::default();
        proofs.add("test", output);
        proofs.has(&TestName { program: program.into(), path: path.into() })
    }

    #[test]
    fn only_what_ran_and_passed_proves() {
        let output = "     Running unittests src/lib.rs (target/debug/deps/smcr_proto-fbcb9ba9)\n\
                      test a::b ... ok\ntest a::c ... FAILED\ntest a::d ... ignored, needs root\n\
                      test a::e - should panic ... ok\ntest result: ok. 2 passed\n\
                      \x20    Running sim/main.rs (deps/sim-11f)\ntest a::f ... ok\n";
        let has = |path| passed(output, "smcr_proto", path);
        assert_eq!(
            ["a::b", "a::c", "a::d", "a::e", "a::f"].map(has),
            [true, false, false, true, false]
        );
        assert!(passed(output, "sim", "a::f"));
    }

    /// A program that a test starts writes to the same output.
    #[test]
    fn words_between_a_test_and_its_outcome_are_passed_over() {
        let output = "Running e2e/main.rs (deps/e2e-3)\ntest a ... hello\nworld\nok\n\
                      test b ... what\ntest c ... ok\n";
        assert_eq!(["a", "b", "c"].map(|path| passed(output, "e2e", path)), [true, false, true]);
    }
}
