//! A transcript of the messages that two peers exchanged. It leaves out what differs from run to
//! run, so that two transcripts can be compared.
//!
//! ```text
//! client: TCP SYN [SMC option]
//! server: TCP SYN-ACK [SMC option]
//! client: CLC PROPOSAL version 2 length 156
//! ```

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::gateway::smcgate;
use crate::hosts::Hosts;

/// The rendezvous and link management of one connection on one link group.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Dialogue {
    /// Messages before the first data, and those that set up or refuse the first two links. Each
    /// side waits for the other, so the order is always the same.
    opening: Vec<String>,
    /// Messages after the opening. Both sides send at will, so these are sorted.
    closing: Vec<String>,
    /// Longest pause between two messages before the first data.
    longest_silence: Duration,
}

impl Dialogue {
    /// Reads a capture.
    pub(crate) fn of(hosts: &Hosts, capture: &Path) -> Self {
        let capture = capture.to_str().expect("our own paths are text");
        let words = smcgate(hosts, "decode", &["decode", capture]).expect_success("decode");
        Self::read(&words)
    }

    /// Reads what `smcgate decode` printed.
    fn read(words: &str) -> Self {
        let mut known = HashSet::new();
        let lines = words.lines().filter_map(Line::read);
        // A slow guest may send a message twice; it counts once.
        let lines: Vec<Line<'_>> = lines.filter(|line| known.insert(line.identity())).collect();
        let client = lines.first().map_or(0, |line| line.machine());
        let speaker = |line: &Line<'_>| if line.machine() == client { "client" } else { "server" };
        let is_data = |line: &Line<'_>| ["CDC", "WRITE"].contains(&line.protocol());
        let opening = lines.iter().position(is_data).unwrap_or(lines.len());
        let (begun, over): (Vec<_>, Vec<_>) = { lines.iter().enumerate() }
            .filter(|(_, line)| line.is_certain())
            .partition(|(place, line)| *place < opening || line.founds_group());
        let told = |lines: Vec<(usize, &Line<'_>)>| -> Vec<String> {
            let told = |line: &Line<'_>| format!("{}: {}", speaker(line), line.comparable());
            lines.into_iter().map(|(_, line)| told(line)).collect()
        };
        let mut closing = told(over);
        closing.sort();
        let times = lines[..lines.len().min(opening + 1)].iter().map(|line| line.time);
        let silences = times.clone().skip(1).zip(times).map(|(now, before)| now - before);
        let longest_silence = silences.max().unwrap_or_default();
        Self { opening: told(begun), closing, longest_silence }
    }

    /// Longest pause between two messages before the first data.
    pub(crate) fn longest_silence(&self) -> Duration {
        self.longest_silence
    }

    /// Asserts that the transcript equals the golden file.
    ///
    /// # Panics
    ///
    /// If they differ. The message shows both side by side.
    pub(crate) fn assert_is(&self, golden: &Path) {
        assert_golden(golden, &self.to_string());
    }

    /// Asserts that every message after the opening is in the golden file.
    ///
    /// # Panics
    ///
    /// If one is not.
    pub(crate) fn assert_nothing_else_later(&self, golden: &Path) {
        let golden = fs::read_to_string(golden).expect("a golden transcript");
        for said in &self.closing {
            assert!(golden.lines().any(|line| line == said), "'{said}' is new:\n{self}");
        }
    }

    /// The messages of the opening.
    pub(crate) fn opening(&self) -> String {
        self.opening.iter().map(|line| format!("{line}\n")).collect()
    }

    /// Asserts that the opening equals the one in the golden file.
    ///
    /// # Panics
    ///
    /// If they differ. The message shows both side by side.
    pub(crate) fn assert_opening_is(&self, golden: &Path) {
        let golden = fs::read_to_string(golden).expect("a golden transcript");
        let golden = golden.lines().take_while(|&line| line != DATA);
        let expected: String = golden.map(|line| format!("{line}\n")).collect();
        let found = self.opening();
        assert!(found == expected, "\n{}", side_by_side(&expected, &found));
    }

    /// Asserts that these lines are among the messages after the opening.
    ///
    /// # Panics
    ///
    /// If one is missing. The message shows all that were sent.
    pub(crate) fn assert_later_said(&self, lines: &[&str]) {
        for line in lines {
            assert!(self.closing.iter().any(|said| said == line), "no '{line}':\n{self}");
        }
    }
}

/// Asserts that a text equals the golden file. If `SMCGATE_BLESS` is set, writes the file instead.
///
/// # Panics
///
/// If they differ. The message shows both side by side.
pub(crate) fn assert_golden(golden: &Path, found: &str) {
    if std::env::var_os("SMCGATE_BLESS").is_some() {
        fs::write(golden, found).expect("the source is ours to write");
    }
    let expected = fs::read_to_string(golden).expect("a golden transcript");
    assert!(found == expected, "\n{}", side_by_side(&expected, found));
}

impl std::fmt::Display for Dialogue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.opening.iter().try_for_each(|line| writeln!(f, "{line}"))?;
        writeln!(f, "{DATA}")?;
        self.closing.iter().try_for_each(|line| writeln!(f, "{line}"))
    }
}

/// The line between opening and closing.
const DATA: &str = "(data, and in any order)";

/// Two transcripts, line by line, with a mark where they differ.
pub(crate) fn side_by_side(left: &str, right: &str) -> String {
    let (mut left, mut right) = (left.lines(), right.lines());
    let mut table = String::new();
    loop {
        let (left, right) = (left.next(), right.next());
        if left.is_none() && right.is_none() {
            return table;
        }
        let mark = if left == right { ' ' } else { '≠' };
        let (left, right) = (left.unwrap_or_default(), right.unwrap_or_default());
        table += &format!("{left:76} {mark} {right}\n");
    }
}

/// A line of `smcgate decode`.
struct Line<'a> {
    time: Duration,
    source: &'a str,
    words: Vec<&'a str>,
}

impl<'a> Line<'a> {
    /// Reads `TIME SOURCE > TARGET WORDS`.
    fn read(line: &'a str) -> Option<Self> {
        let mut words = line.split(' ');
        let time = Duration::try_from_secs_f64(words.next()?.parse().ok()?).ok()?;
        let source = words.next()?;
        Some(Self { time, source, words: words.skip(2).collect() })
    }

    /// Which machine spoke: the last digit of its addresses.
    fn machine(&self) -> u8 {
        let address = self.source.split(':').next().unwrap_or_default();
        address.bytes().last().unwrap_or_default()
    }

    /// Identifies a message, also when it is sent again: by sender, queue pair and PSN, or by its
    /// words if it has no PSN.
    fn identity(&self) -> (&'a str, Vec<&'a str>) {
        let sequence = self.words.iter().position(|&word| word == "qp");
        let is_sequenced = ["LLC", "CDC", "WRITE"].contains(&self.protocol());
        let from = sequence.filter(|_| is_sequenced).unwrap_or(0);
        (self.source, self.words[from..].to_vec())
    }

    fn protocol(&self) -> &str {
        self.words.first().copied().unwrap_or_default()
    }

    /// Whether its kind occurs in every run. TEST LINK depends on how long a run takes.
    fn is_certain(&self) -> bool {
        ["TCP", "CLC", "LLC"].contains(&self.protocol())
            && !self.words.starts_with(&["LLC", "TEST", "LINK"])
    }

    /// Whether it is about one of the first two links, which are set up together with the group.
    /// Linux sends data only after that; the RFC (3.5.1.6) allows data as soon as one link exists.
    fn founds_group(&self) -> bool {
        let exchange =
            ["ADD", "CONFIRM"].iter().any(|verb| self.words.starts_with(&["LLC", verb, "LINK"]));
        let number = self.words.iter().position(|&word| word == "link");
        let number = number.and_then(|place| self.words.get(place + 1));
        exchange && number.is_some_and(|number| ["1", "2"].contains(number))
    }

    /// The message, its flags, and the fields that are the same in every run.
    fn comparable(&self) -> String {
        let mut comparable: Vec<&str> = Vec::new();
        let mut in_flags = false;
        let mut words = self.words.iter();
        while let Some(word) = words.next() {
            let name = word.chars().all(|letter| letter.is_uppercase() || letter == '-');
            let version = word.strip_prefix('v').is_some_and(|rest| rest.parse::<u8>().is_ok());
            in_flags |= word.starts_with('[');
            if name || version || in_flags {
                comparable.push(word);
                in_flags &= !word.ends_with(']');
                continue;
            }
            let value = words.next();
            // A client proposes how many links it could have; a server decides.
            let proposed = self.words.contains(&"PROPOSAL") && *word == "max-links";
            if COMPARED_FIELDS.contains(word) && !proposed {
                comparable.extend([*word].iter().chain(value));
            }
        }
        comparable.join(" ")
    }
}

/// Fields that a peer decides. Others say who it is and where its memory lies.
const COMPARED_FIELDS: [&str; 6] =
    ["version", "link", "max-links", "rmbe", "error-mask", "other-links"];

/// The comparison of our gateway with Linux depends on this: an excerpt of what `smcgate decode`
/// prints for two Linux guests must become the transcript that a person would write.
#[test]
fn retells_what_was_decoded() {
    let words = "\
        0.0 10.9.0.11:48590 > 10.9.0.12:7010 TCP SYN [SMC option]\n\
        0.2 10.9.0.12:7010 > 10.9.0.11:48590 CLC ACCEPT version 2 [first-contact] peer 03 rmbe 1\n\
        0.3 10.9.0.12 > 10.9.0.11 LLC CONFIRM LINK v2 [no-eyecatcher] link 1 gid ::1 max-links 2 \
        qp 0x000011 psn 7\n\
        0.3 10.9.0.12 > 10.9.0.11 LLC CONFIRM LINK v2 [no-eyecatcher] link 1 gid ::1 max-links 2 \
        qp 0x000011 psn 7\n\
        0.3 10.9.0.11 > 10.9.0.12 ACK qp 0x000011 psn 2074940 msn 1\n\
        0.4 10.9.0.11 > 10.9.0.12 LLC CONFIRM LINK v2 [reply no-eyecatcher] link 1 mac 52:54\n\
        0.5 10.9.0.11 > 10.9.0.12 WRITE ONLY qp 0x000011 length 37\n\
        0.6 10.9.0.12 > 10.9.0.11 LLC DELETE RKEY v2 error-mask 0x00 rkeys 0x000003de\n\
        0.7 10.9.0.11 > 10.9.0.12 CDC seq 1 token 0x00000001\n\
        0.8 10.9.0.21 > 10.9.0.12 LLC DELETE RKEY v2 [reply] error-mask 0x00 rkeys 0x0\n";
    let expected = "\
        client: TCP SYN [SMC option]\n\
        server: CLC ACCEPT version 2 [first-contact] rmbe 1\n\
        server: LLC CONFIRM LINK v2 [no-eyecatcher] link 1 max-links 2\n\
        client: LLC CONFIRM LINK v2 [reply no-eyecatcher] link 1\n\
        (data, and in any order)\n\
        client: LLC DELETE RKEY v2 [reply] error-mask 0x00\n\
        server: LLC DELETE RKEY v2 error-mask 0x00\n";
    let dialogue = Dialogue::read(words);
    assert_eq!(dialogue.to_string(), expected);
    // The pause between the first two lines is the longest; all other messages follow at once.
    assert_eq!(dialogue.longest_silence(), Duration::from_millis(200));
}

/// A reader must see at a glance where two transcripts differ.
#[test]
fn differences_are_marked() {
    let table = side_by_side("same\none\n", "same\nother\nmore\n");
    let marks: Vec<bool> = table.lines().map(|line| line.contains('≠')).collect();
    assert_eq!(marks, [false, true, true]);
}
