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

/// Section and running number: `4.5.1-2`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Id {
    pub(crate) section: String,
    pub(crate) number: u32,
}

impl Id {
    /// `None` if the text is not an id.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (section, number) = text.split_once('-')?;
        let plain = number.bytes().all(|byte| byte.is_ascii_digit()) && !number.starts_with('0');
        let number = number.parse().ok().filter(|_| plain)?;
        Some(Self { section: section.to_owned(), number })
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.section, self.number)
    }
}

/// What the register says about one rule of the RFC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) id: Id,
    /// We do otherwise; the register has the reason.
    pub(crate) is_exception: bool,
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
    strength: String,
    text: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Exception {
    id: String,
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

fn read_chapter(chapter: Chapter, entries: &mut Vec<Entry>, complaints: &mut Vec<String>) {
    let mut add = |id: &str, texts: [&str; 2], is_exception: bool| match Id::parse(id) {
        Some(_) if texts.iter().any(|text| text.trim().is_empty()) => {
            complaints.push(format!("{id}: says nothing"));
        }
        Some(id) => entries.push(Entry { id, is_exception }),
        None => complaints.push(format!("{id}: an id is a section, a hyphen and a number")),
    };
    for Exception { id, text, reason } in &chapter.exception {
        add(id, [text, reason], true);
    }
    for Requirement { id, strength, text } in &chapter.requirement {
        add(id, [text, strength], false);
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

    fn requirement(id: &str, strength: &str) -> String {
        format!("[[requirement]]\nid = '{id}'\nstrength = '{strength}'\ntext = 'Do.'\n")
    }

    fn complaints(files: &[&str]) -> String {
        read(files.iter().copied(), "2 2.1").1.join("\n")
    }

    #[test]
    fn a_good_register_is_read_in_order() {
        let exception = "[[exception]]\nid = '2.1-1'\ntext = 'Do.'\nreason = 'Why.'\n";
        let two = requirement("2-1", "must") + &requirement("2-2", "may");
        let (entries, complaints) = read([exception, &two], "2 2.1");
        assert_eq!(complaints, Vec::<String>::new());
        let ids: Vec<String> = entries.iter().map(|entry| entry.id.to_string()).collect();
        assert_eq!(ids, ["2-1", "2-2", "2.1-1"]);
        let exceptions: Vec<bool> = entries.iter().map(|entry| entry.is_exception).collect();
        assert_eq!(exceptions, [false, false, true]);
    }

    /// If two entries had one id, the code of one would claim the other one, too.
    #[test]
    fn a_bad_register_is_refused() {
        let good = requirement("2-1", "must") + &requirement("2.1-1", "should");
        assert_eq!(complaints(&[&good]), "");
        let also = |more: &str| complaints(&[&good, more]);
        assert_eq!(also(&requirement("2-1", "must")), "2: numbered [1, 1], not 1 to 2");
        assert_eq!(also(&requirement("2-3", "must")), "2: numbered [1, 3], not 1 to 2");
        assert_eq!(also(&requirement("2-2", "shall")), "2-2: \"shall\" is not must, should or may");
        assert!(also(&requirement("7.1-1", "must")).starts_with("7.1-1: the RFC has no such"));
        assert!(also(&requirement("2.1", "must")).starts_with("2.1: an id is"));
        let mute = "[[exception]]\nid = '2-2'\ntext = 'Do.'\nreason = ' '\n";
        assert_eq!(also(mute), "2-2: says nothing");
        assert!(also("[[requirement]]\nid = '2-2'\n").contains("missing field"));
        assert_eq!(complaints(&[&requirement("2-1", "must")]), "2.1: no entry");
    }

    #[test]
    fn only_ids_are_ids() {
        assert_eq!(Id::parse("A.2.1-12").unwrap().to_string(), "A.2.1-12");
        for wrong in ["A.2.1", "A.2.1-", "A.2.1-0", "A.2.1-01", "A.2.1-+1", "A.2.1-x"] {
            assert_eq!(Id::parse(wrong), None, "{wrong}");
        }
    }
}
