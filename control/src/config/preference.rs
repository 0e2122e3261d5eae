//! `prefer` and `compare_every`: whether SMC-R is used where TCP is faster.

use super::Protocol;
use super::error::ConfigError;
use super::section::Section;

/// Whether a listener uses SMC-R where it is slower than TCP, and how it finds that out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preference {
    /// What is faster is used. Otherwise it is SMC-R wherever it can be.
    pub fastest: bool,
    /// Of so many connections one stays TCP so that both can be compared; zero: none.
    pub compare_every: u32,
}

impl Preference {
    /// Reads the keys of a listener that connects by `connect`.
    pub(super) fn read(table: &mut Section<'_>, connect: Protocol) -> Result<Self, ConfigError> {
        for key in ["prefer", "compare_every"] {
            if connect == Protocol::Tcp && table.has(key) {
                let why = "is for listeners with connect = \"smc\": whoever connects decides";
                return Err(table.error(key, why));
            }
        }
        let fastest = table.word("prefer", &PREFERENCES, false)?;
        let every = if fastest { 50 } else { 0 };
        Ok(Self { fastest, compare_every: table.count("compare_every", 0..1_000_001, every)? })
    }
}

pub(super) const PREFERENCES: [(&str, bool); 2] = [("smc", false), ("fastest", true)];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn read(lines: &str) -> Result<Preference, String> {
        let text = format!("[[listener]]\nname='a'\nbind='127.0.0.1:1'\nupstream='x:1'\n{lines}\n");
        let config = Config::parse(&text, "a.toml").map_err(|error| error.to_string())?;
        Ok(config.listeners[0].preference)
    }

    /// Whoever has asked for SMC-R gets it, unless he says otherwise.
    #[test]
    fn only_who_wants_the_fastest_compares() {
        let every = |lines: &str| read(lines).map(|it| (it.fastest, it.compare_every));
        assert_eq!(every("connect='smc'"), Ok((false, 0)));
        assert_eq!(every("connect='smc'\nprefer='fastest'"), Ok((true, 50)));
        assert_eq!(every("connect='smc'\ncompare_every=9"), Ok((false, 9)));
        for (lines, why) in [
            ("prefer='fastest'", "whoever connects decides"),
            ("connect='smc'\nprefer='slowest'", "prefer"),
        ] {
            let error = read(lines).expect_err(lines);
            assert!(error.contains(why), "{error}");
        }
    }
}
