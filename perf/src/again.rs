//! What a server answers that is asked again and again, as what scrapes metrics does it.

use crate::failure::{Failure, Result};

/// The answers so far.
#[derive(Default)]
pub(crate) struct Answers {
    asked: u64,
    missed: u64,
}

impl Answers {
    /// What to print of the next one. A gateway that is busy may answer 503, and is asked again.
    pub(crate) fn next(&mut self, answer: Result<String>) -> String {
        self.asked += 1;
        answer.unwrap_or_else(|why| {
            self.missed += 1;
            format!("{MISSED}{} of {}: {why}\n", self.missed, self.asked)
        })
    }
}

/// How many answers have not come, and why, if `printed` is what was printed of all; none if all
/// came.
///
/// # Errors
///
/// When none came: what was measured meanwhile was not beside a scrape.
pub(crate) fn missed(printed: &str) -> Result<Option<&str>> {
    let is_missed = |line: &str| line.starts_with(MISSED);
    match printed.lines().rfind(|line| is_missed(line)) {
        Some(last) if printed.lines().all(is_missed) => Err(Failure::new(last)),
        last => Ok(last),
    }
}

/// How a line begins that says so.
const MISSED: &str = "answers that did not come: ";

#[cfg(test)]
mod tests {
    use super::*;

    /// The figures would be published as those of a gateway that is scraped.
    #[test]
    fn whoever_was_never_answered_has_not_scraped() {
        let busy = || Err(Failure::new("GET /metrics: 503"));
        let answer = || Ok("smcgate_connections 7\n".to_owned());
        let printed = |all: Vec<Result<String>>| {
            let mut answers = Answers::default();
            all.into_iter().map(|one| answers.next(one)).collect::<String>()
        };
        assert!(missed(&printed(vec![busy(), busy()])).is_err());
        assert_eq!(missed(&printed(vec![answer(), answer()])).unwrap(), None);
        let some = printed(vec![busy(), answer(), busy(), answer()]);
        let said = missed(&some).unwrap().unwrap();
        assert!(said.ends_with(": 2 of 3: GET /metrics: 503"), "{said}");
    }
}
