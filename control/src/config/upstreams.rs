//! `upstream` and its keys: where the connections of a listener go.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use super::circles::comes_back;
use super::error::ConfigError;
use super::network::Upstream;
use super::section::{Placed, Section, Source};

/// Where the connections of a listener go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upstreams {
    /// Addresses and names, at least one; or each connection to its own target, and nothing else.
    pub all: Vec<Upstream>,
    /// Which of their addresses a connection gets.
    pub balance: Balance,
    /// After so many failures in a row an address gets no connections for a while; zero: never.
    pub eject_after: u32,
    /// For how long, the first time; each time in a row it is twice as long.
    pub eject_for: Duration,
    /// Connections that only ask whether somebody answers, if they are wished for.
    pub check: Option<Check>,
}

/// Which address a connection gets, of those that work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Balance {
    /// One after the other.
    RoundRobin,
    /// The one that has the fewest.
    LeastConnections,
    /// The same for all connections of a client, as long as that address works. An address that
    /// comes or goes moves no clients but its own.
    Source,
}

/// How addresses are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Check {
    /// How often.
    pub interval: Duration,
    /// How long an address may take to answer.
    pub timeout: Duration,
    /// After so many failures in a row an address is down.
    pub fall: u32,
    /// After so many successes in a row it is up again.
    pub rise: u32,
}

impl Upstreams {
    /// Reads the keys of the listener at `bind`. Returns the first upstream and its place in the
    /// file, too.
    pub(super) fn read(
        source: Source<'_>,
        table: &mut Section<'_>,
        bind: SocketAddr,
    ) -> Result<(Self, Placed<Upstream>), ConfigError> {
        let texts = table.required_texts("upstream")?;
        let mut all: Vec<Placed<Upstream>> = Vec::new();
        for text in texts {
            let value: Upstream =
                text.value.parse().map_err(|why: String| text.error(source, why))?;
            let is_here = |address| source.here.contains(&address);
            if let Upstream::Address(to) = value
                && comes_back(bind, to, is_here)
            {
                let why = format!("{to} is this listener itself, which would connect to itself");
                return Err(text.error(source, format!("{why}; write the address of the server")));
            }
            if all.iter().any(|other| other.value == value) {
                return Err(text.error(source, format!("\"{value}\" is listed twice")));
            }
            all.push(Placed { value, path: text.path, span: text.span });
        }
        let each_its_own = |one: &&Placed<Upstream>| one.value == Upstream::OriginalDst;
        if let Some(one) = all.iter().find(each_its_own).filter(|_| all.len() > 1) {
            let why = "each connection goes to where it wanted to; write no other upstream";
            return Err(one.error(source, why));
        }
        let first = all.first().cloned().expect("the list was not empty");
        let upstreams = Self {
            all: all.into_iter().map(|one| one.value).collect(),
            balance: table.word("balance", &BALANCES, Balance::RoundRobin)?,
            eject_after: table.count("eject_after", 0..1_001, 3)?,
            eject_for: table.duration("eject_for", Duration::from_secs(10))?,
            check: Check::read(table)?,
        };
        Ok((upstreams, first))
    }

    /// Whether each connection goes to where it wanted to.
    pub fn is_original_dst(&self) -> bool {
        self.all.contains(&Upstream::OriginalDst)
    }
}

impl fmt::Display for Upstreams {
    /// As the operator has listed them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<_> = self.all.iter().map(ToString::to_string).collect();
        f.write_str(&texts.join(", "))
    }
}

impl Check {
    fn read(parent: &mut Section<'_>) -> Result<Option<Self>, ConfigError> {
        let is_wanted = parent.has("check");
        let mut table = parent.table("check")?;
        let check = Self {
            interval: table.duration_from(
                "interval",
                (Duration::from_millis(10), "be a load of its own"),
                Duration::from_secs(2),
            )?,
            timeout: table.duration_from(
                "timeout",
                (Duration::from_millis(1), "find every server down"),
                Duration::from_secs(1),
            )?,
            fall: table.count("fall", 1..101, 3)?,
            rise: table.count("rise", 1..101, 2)?,
        };
        table.finish()?;
        Ok(is_wanted.then_some(check))
    }
}

pub(super) const BALANCES: [(&str, Balance); 3] = [
    ("round-robin", Balance::RoundRobin),
    ("least-connections", Balance::LeastConnections),
    ("source", Balance::Source),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn read(lines: &str) -> Result<Upstreams, String> {
        let text = format!("[[listener]]\nname = 'a'\nbind = '127.0.0.1:1'\n{lines}\n");
        let config = Config::parse(&text, "a.toml").map_err(|error| error.to_string())?;
        Ok(config.listeners[0].upstream.clone())
    }

    #[test]
    fn one_or_several() {
        let one = read("upstream = '10.8.0.2:1'").unwrap();
        let several = read("upstream = ['10.8.0.2:1']").unwrap();
        assert_eq!(one, several);
        assert_eq!((one.balance, one.eject_after, one.check), (Balance::RoundRobin, 3, None));
        let all = read(
            "upstream = ['10.8.0.2:1', 'b.example:2']\nbalance = 'source'\neject_after = 0\n\
             check = { interval = '500ms', fall = 1 }",
        );
        let all = all.unwrap();
        let check = all.check.unwrap();
        assert_eq!((check.interval, check.fall, check.rise), (Duration::from_millis(500), 1, 2));
        assert_eq!(all.to_string(), "10.8.0.2:1, b.example:2");
        assert!(read("upstream = '10.8.0.2:1'\ncheck = {}").unwrap().check.is_some());
    }

    #[test]
    fn a_list_that_makes_no_sense_is_an_error() {
        for (lines, why) in [
            ("upstream = []", "at least one"),
            ("upstream = ['10.8.0.2:1', '10.8.0.2:1']", "listed twice"),
            ("upstream = ['10.8.0.2:1', '127.0.0.1:1']", "this listener itself"),
            ("upstream = ['10.8.0.2:1', 'original-dst']", "no other upstream"),
            ("upstream = '10.8.0.2:1'\nbalance = 'random'", "balance"),
            ("upstream = '10.8.0.2:1'\ncheck = { interval = '1ms' }", "10ms"),
            ("upstream = '10.8.0.2:1'\ncheck = { every = '1s' }", "every"),
        ] {
            let error = read(lines).expect_err(lines);
            assert!(error.contains(why), "{lines}\n{error}");
        }
    }
}
