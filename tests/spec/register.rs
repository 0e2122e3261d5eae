//! The register: the rules of RFC 7609, read from `requirements/*.toml`.

use std::fmt;

use serde::Deserialize;

/// The sections with rules, in the order of the RFC. A section without entries was forgotten.
pub(crate) const SECTIONS: &str = "
    1.2 2 2.1 2.2 2.2.1 2.2.2 2.2.3 2.2.4 2.3
    3 3.1 3.2 3.3 3.4
    3.5.1 3.5.1.1 3.5.1.2 3.5.1.3 3.5.1.4 3.5.1.5 3.5.1.6 3.5.1.6.1 3.5.1.6.2 3.5.1.6.3 3.5.1.6.4
    3.5.2 3.5.2.1 3.5.2.2 3.5.2.3 3.5.2.4 3.5.3 3.5.4
    3.5.5.1 3.5.5.1.1 3.5.5.1.2 3.5.5.1.3 3.5.5.1.4 3.5.5.2 3.5.5.2.1 3.5.5.2.2 3.5.5.2.3
    3.5.5.3 3.5.5.3.1 3.5.5.3.2 3.5.5.3.3
    4.1 4.2 4.3 4.4.1 4.4.2 4.5.1 4.5.2 4.5.3 4.6 4.6.1 4.6.2
    4.7.1 4.7.2 4.7.3 4.7.4 4.7.5 4.7.6 4.8 4.8.1 4.8.2 4.8.3
    5.1 5.2 5.3 5.5 5.6
    A.1 A.2 A.2.1 A.2.2 A.2.3 A.2.4 A.2.5
    A.3 A.3.1 A.3.2 A.3.3 A.3.4 A.3.5 A.3.6 A.3.7 A.3.8 A.4
    B B.1 C.1 C.2 C.3 C.4 C.5 C.6 C.7 C.7.1 C.8";

/// Section and running number: `4.5.1 #2`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Id {
    pub(crate) section: String,
    pub(crate) number: u32,
}

impl Id {
    /// `None` if the text is not an id.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (section, number) = text.split_once(" #")?;
        let plain = number.bytes().all(|byte| byte.is_ascii_digit()) && !number.starts_with('0');
        let number = number.parse().ok().filter(|_| plain)?;
        Some(Self { section: section.to_owned(), number })
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{}", self.section, self.number)
    }
}

/// What the register says about one rule of the RFC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) id: Id,
    /// What our code has to do, in a few words; of an exception, what our code does instead.
    pub(crate) title: String,
    /// Of an exception: why we do otherwise than the RFC says.
    pub(crate) reason: Option<String>,
}

impl Entry {
    /// Whether we do otherwise than the RFC says.
    pub(crate) fn is_exception(&self) -> bool {
        self.reason.is_some()
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.id, self.title)
    }
}

/// One file of the register.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Chapter {
    #[serde(default)]
    requirement: Vec<Requirement>,
    #[serde(default)]
    exception: Vec<Exception>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Requirement {
    id: String,
    title: String,
    strength: String,
    text: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Exception {
    id: String,
    title: String,
    text: String,
    reason: String,
}

/// The entries of some files, in the order of `sections`, and everything that is wrong with them.
pub(crate) fn read<'a>(
    files: impl IntoIterator<Item = &'a str>,
    sections: &str,
) -> (Vec<Entry>, Vec<String>) {
    let mut complaints = Vec::new();
    let mut entries = Vec::new();
    for file in files {
        match toml::from_str(file) {
            Ok(chapter) => read_chapter(chapter, &mut entries, &mut complaints),
            Err(error) => complaints.push(error.to_string()),
        }
    }
    let sections: Vec<&str> = sections.split_whitespace().collect();
    let place = |entry: &Entry| sections.iter().position(|section| *section == entry.id.section);
    for entry in entries.iter().filter(|entry| place(entry).is_none()) {
        complaints.push(format!("{}: the RFC has no such section, or it binds nothing", entry.id));
    }
    complaints.extend(wrong_titles(&entries));
    entries.sort_by_key(|entry| (place(entry), entry.id.number));
    for section in &sections {
        let ids = entries.iter().map(|entry| &entry.id).filter(|id| id.section == *section);
        let numbers: Vec<u32> = ids.map(|id| id.number).collect();
        let count = u32::try_from(numbers.len()).expect("a section has few entries");
        if count == 0 {
            complaints.push(format!("{section}: no entry"));
        } else if numbers != (1..=count).collect::<Vec<_>>() {
            complaints.push(format!("{section}: numbered {numbers:?}, not 1 to {count}"));
        }
    }
    (entries, complaints)
}

/// Titles by which a reader of a tag does not know what it claims.
fn wrong_titles(entries: &[Entry]) -> Vec<String> {
    let mut complaints = Vec::new();
    for (index, entry) in entries.iter().enumerate() {
        let Entry { id, title, .. } = entry;
        let words = title.split_whitespace().count();
        // With more letters a tag in deeply nested code would not fit into its line.
        if !(2..=8).contains(&words) || title.chars().count() > 48 {
            complaints.push(format!("{id}: a title has 2 to 8 words and 48 letters at most"));
        }
        if title.trim() != title || title.ends_with('.') {
            complaints.push(format!("{id}: a title is no sentence: it ends without a full stop"));
        }
        let same = |other: &&Entry| other.title == *title && other.id != *id;
        if let Some(other) = entries[..index].iter().find(same) {
            complaints.push(format!("{id}: {} has the same title", other.id));
        }
    }
    complaints
}

fn read_chapter(chapter: Chapter, entries: &mut Vec<Entry>, complaints: &mut Vec<String>) {
    let mut add =
        |id: &str, title: &str, texts: [&str; 2], reason: Option<&str>| match Id::parse(id) {
            Some(_) if texts.iter().any(|text| text.trim().is_empty()) => {
                complaints.push(format!("{id}: says nothing"));
            }
            Some(id) => {
                entries.push(Entry { id, title: title.into(), reason: reason.map(str::to_owned) });
            }
            None => complaints.push(format!("{id}: an id is a section, a space, # and a number")),
        };
    for Exception { id, title, text, reason } in &chapter.exception {
        add(id, title, [text, reason], Some(reason));
    }
    for Requirement { id, title, strength, text } in &chapter.requirement {
        add(id, title, [text, strength], None);
    }
    for Requirement { id, strength, .. } in &chapter.requirement {
        if !["must", "should", "may"].contains(&strength.as_str()) {
            complaints.push(format!("{id}: {strength:?} is not must, should or may"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn titled(id: &str, title: &str, strength: &str) -> String {
        let what = format!("title = \"{title}\"\nstrength = '{strength}'\ntext = 'Do.'");
        format!("[[requirement]]\nid = '{id}'\n{what}\n")
    }

    fn requirement(id: &str, strength: &str) -> String {
        titled(id, &format!("do what {id} says"), strength)
    }

    fn complaints(files: &[&str]) -> String {
        read(files.iter().copied(), "2 2.1").1.join("\n")
    }

    #[test]
    fn a_good_register_is_read_in_order() {
        let exception = "[[exception]]\nid = '2.1 #1'\ntitle = 'do otherwise'\ntext = 'Do.'\n\
                         reason = 'Why.'\n";
        let two = requirement("2 #1", "must") + &requirement("2 #2", "may");
        let (entries, complaints) = read([exception, &two], "2 2.1");
        assert_eq!(complaints, Vec::<String>::new());
        let names: Vec<String> = entries.iter().map(Entry::to_string).collect();
        assert_eq!(
            names,
            ["2 #1: do what 2 #1 says", "2 #2: do what 2 #2 says", "2.1 #1: do otherwise"]
        );
        let reasons: Vec<Option<&str>> =
            entries.iter().map(|entry| entry.reason.as_deref()).collect();
        assert_eq!(reasons, [None, None, Some("Why.")]);
    }

    /// If two entries had one id, the code of one would claim the other one, too.
    #[test]
    fn a_bad_register_is_refused() {
        let good = requirement("2 #1", "must") + &requirement("2.1 #1", "should");
        assert_eq!(complaints(&[&good]), "");
        let also = |more: &str| complaints(&[&good, more]);
        assert_eq!(also(&requirement("2 #1", "must")), "2: numbered [1, 1], not 1 to 2");
        assert_eq!(also(&requirement("2 #3", "must")), "2: numbered [1, 3], not 1 to 2");
        assert_eq!(
            also(&requirement("2 #2", "shall")),
            "2 #2: \"shall\" is not must, should or may"
        );
        assert!(also(&requirement("7.1 #1", "must")).starts_with("7.1 #1: the RFC has no such"));
        assert!(also(&requirement("2.1", "must")).starts_with("2.1: an id is"));
        let mute = "[[exception]]\nid = '2 #2'\ntitle = 'do it'\ntext = 'Do.'\nreason = ' '\n";
        assert_eq!(also(mute), "2 #2: says nothing");
        assert!(also("[[requirement]]\nid = '2 #2'\n").contains("missing field"));
        assert_eq!(complaints(&[&requirement("2 #1", "must")]), "2.1: no entry");
    }

    /// Two rules of one title could not be told apart where they are claimed.
    #[test]
    fn a_title_tells_its_rule_from_all_others() {
        let good = titled("2 #1", "reset on A", "must") + &requirement("2.1 #1", "must");
        assert_eq!(complaints(&[&good]), "");
        let also = |title: &str| complaints(&[&good, &titled("2 #2", title, "must")]);
        assert_eq!(also("reset on C"), "");
        assert_eq!(also("reset on A"), "2 #2: 2 #1 has the same title");
        assert_eq!(also("Reset it."), "2 #2: a title is no sentence: it ends without a full stop");
        for wrong in ["", "reset", "do this and that and that and what follows", &"ab ".repeat(20)]
        {
            assert!(also(wrong).starts_with("2 #2: a title has 2 to 8 words"), "{wrong}");
        }
    }

    #[test]
    fn only_ids_are_ids() {
        assert_eq!(Id::parse("A.2.1 #12").unwrap().to_string(), "A.2.1 #12");
        for wrong in
            ["A.2.1", "A.2.1 #", "A.2.1 #0", "A.2.1 #01", "A.2.1 #+1", "A.2.1 #x", "A.2.1-1"]
        {
            assert_eq!(Id::parse(wrong), None, "{wrong}");
        }
    }
}
