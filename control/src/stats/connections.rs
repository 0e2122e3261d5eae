//! The connections of a gateway, page by page.

use serde::{Deserialize, Serialize};

use super::{GroupV2, SCHEMA};

/// How a connection travels between the gateways.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Transport {
    /// RDMA.
    #[serde(rename = "smc-r")]
    SmcR,
    /// Relayed socket to socket.
    #[serde(rename = "tcp")]
    Tcp,
}

impl Transport {
    /// The word of the JSON: `smc-r` or `tcp`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::SmcR => "smc-r",
            Self::Tcp => "tcp",
        }
    }

    /// The transport with this name; `smc` is understood too.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "smc-r" | "smc" => Some(Self::SmcR),
            "tcp" => Some(Self::Tcp),
            _ => None,
        }
    }
}

/// One connection through the gateway.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Connection {
    /// Unique within the process.
    pub id: u64,
    /// Name of its listener.
    pub listener: String,
    /// How it travels.
    pub transport: Transport,
    /// The application's end: address and port.
    pub app: String,
    /// The far end towards the other gateway or server: address and port.
    pub peer: String,
    /// Bytes read from the application; its socket is the one that does not lead to the peer.
    pub bytes_in: u64,
    /// Bytes written to the application.
    pub bytes_out: u64,
    /// Where it is in its life: `waiting`, `connecting`, `active`, `half-closed`, `closing`.
    pub state: String,
    /// Why it is not SMC-R; none if it is, or if nobody asked for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<FallbackReason>,
    /// Its link group, if it is SMC-R.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_group: Option<u32>,
    /// The number of the link it sends on, if it is SMC-R.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<u8>,
    /// The version of SMC-R, if it is SMC-R: 1 or 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u8>,
    /// What its link group agreed on, if that is of version 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub v2: Option<GroupV2>,
    /// The local program that has it by the preload library.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<Process>,
    /// How that program passes its bytes; none if it is by a socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<SharedMemory>,
    /// Seconds since it was accepted.
    pub age_s: f64,
}

/// How a local program passes its bytes without a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SharedMemory {
    /// By memory that it shares with the gateway.
    Rings,
    /// By memory that it may share with the program at the other end.
    Shortcut,
}

impl SharedMemory {
    /// What operators call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rings => "rings",
            Self::Shortcut => "shortcut",
        }
    }
}

/// A local program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its process id when the connection began; others may have the descriptor by now.
    pub pid: u32,
    /// The user it runs as.
    pub uid: u32,
    /// Its name.
    pub command: String,
}

impl Connection {
    /// Whether each of these words, in lower case, is part of its ends, its listener, its
    /// transport, its state, its reason to stay TCP, its peer's name or its program's.
    fn contains(&self, words: &[String]) -> bool {
        let texts = [&self.app, &self.peer, &self.listener, &self.state].map(String::as_str);
        let host = self.v2.as_ref().map_or("", |v2| &v2.peer_host);
        let reason = self.fallback.as_ref().map_or("", |reason| &reason.name);
        let command = self.process.as_ref().map_or("", |process| &process.command);
        let texts = texts.into_iter().chain([self.transport.name(), host, reason, command]);
        let texts = texts.map(str::to_lowercase).collect::<Vec<_>>();
        words.iter().all(|word| texts.iter().any(|text| text.contains(word)))
    }
}

/// Why one connection stayed TCP.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FallbackReason {
    /// The diagnosis code, as in CLC Decline.
    pub code: u32,
    /// The code in words.
    pub name: String,
}

/// Which connections are asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionQuery {
    /// Only those of this listener.
    pub listener: Option<String>,
    /// Only those that travel so.
    pub transport: Option<Transport>,
    /// Which page; the first is 1.
    pub page: u32,
    /// Rows of a page, from 1 to [`PER_PAGE_MAX`](super::PER_PAGE_MAX).
    pub per_page: u32,
    /// Only those that have each of these words, in any case, in their ends, listener, transport,
    /// state, reason to stay TCP or the name of their peer.
    pub search: String,
    /// Which come first.
    pub sort: Sort,
}

/// In which order connections are listed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sort {
    /// As the gateway has them, which stays the same while they live.
    #[default]
    Place,
    /// Those that carried most bytes first.
    Bytes,
    /// The oldest first.
    Oldest,
    /// The youngest first.
    Youngest,
}

impl Sort {
    /// The word of the query string.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Place => "place",
            Self::Bytes => "bytes",
            Self::Oldest => "oldest",
            Self::Youngest => "youngest",
        }
    }

    /// The order with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Place, Self::Bytes, Self::Oldest, Self::Youngest]
            .into_iter()
            .find(|sort| sort.name() == name)
    }

    fn apply<T>(self, all: &mut [Candidate<T>]) {
        match self {
            Self::Place => {}
            Self::Bytes => all.sort_by_key(|one| std::cmp::Reverse(one.carried)),
            Self::Oldest => all.sort_by(|one, other| other.age_s.total_cmp(&one.age_s)),
            Self::Youngest => all.sort_by(|one, other| one.age_s.total_cmp(&other.age_s)),
        }
    }
}

impl ConnectionQuery {
    /// Whether a row with these properties is asked for; to be used before a row is built.
    pub fn wants(&self, listener: &str, transport: Transport) -> bool {
        self.listener.as_deref().is_none_or(|wanted| wanted == listener)
            && self.transport.is_none_or(|wanted| wanted == transport)
    }
}

impl Default for ConnectionQuery {
    fn default() -> Self {
        Self {
            listener: None,
            transport: None,
            page: 1,
            per_page: 100,
            search: String::new(),
            sort: Sort::default(),
        }
    }
}

/// One page of connections.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ConnectionPage {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Connections that match the filters, on all pages.
    pub total: u64,
    /// This page; the first is 1.
    pub page: u32,
    /// Most rows of a page.
    pub per_page: u32,
    /// The rows.
    pub connections: Vec<Connection>,
}

/// A connection whose row is not built yet, and what decides about its place.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<T> {
    /// Which one it is.
    pub of: T,
    /// Bytes that it has carried, in both directions.
    pub carried: u64,
    /// Seconds since it was accepted.
    pub age_s: f64,
}

impl ConnectionPage {
    /// The page that `query` asks for, out of all connections that it
    /// [wants](ConnectionQuery::wants), in a stable order. `row` builds their rows: only those of
    /// the page, unless there are words to search for.
    ///
    /// A page behind the last one is empty; `total` is right all the same.
    pub fn select<T: Copy>(
        all: impl IntoIterator<Item = Candidate<T>>,
        query: &ConnectionQuery,
        row: impl Fn(T) -> Connection,
    ) -> Self {
        let words: Vec<_> = query.search.split_whitespace().map(str::to_lowercase).collect();
        let is_meant = |one: &Candidate<T>| words.is_empty() || row(one.of).contains(&words);
        let mut all: Vec<_> = all.into_iter().filter(is_meant).collect();
        query.sort.apply(&mut all);
        let skip = u64::from(query.page.saturating_sub(1)) * u64::from(query.per_page);
        let skip = usize::try_from(skip).unwrap_or(usize::MAX);
        Self {
            schema: SCHEMA,
            total: all.len() as u64,
            page: query.page,
            per_page: query.per_page,
            connections: all
                .into_iter()
                .skip(skip)
                .take(query.per_page as usize)
                .map(|one| row(one.of))
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    use crate::stats::tests::{page_of, row};

    fn ids(query: &ConnectionQuery) -> Vec<u64> {
        let mut rows = [
            row(1, "to-b", Transport::SmcR),
            row(2, "to-b", Transport::Tcp),
            row(3, "from-a", Transport::SmcR),
        ];
        (rows[0].bytes_in, rows[0].age_s) = (10, 30.0);
        (rows[1].bytes_in, rows[1].age_s) = (30, 20.0);
        (rows[2].bytes_in, rows[2].age_s) = (20, 40.0);
        rows.iter_mut().for_each(|row| row.bytes_out = 0);
        rows[1].fallback =
            Some(FallbackReason { code: 0x0301_0000, name: "NO_SMC_OPTION".to_owned() });
        page_of(rows, query).connections.iter().map(|row| row.id).collect()
    }

    /// Whoever looks for a client, a listener or a reason finds it by whatever he knows of it.
    #[test]
    fn words_are_found_wherever_they_are() {
        let search = |search: &str| {
            ids(&ConnectionQuery { search: search.to_owned(), ..ConnectionQuery::default() })
        };
        assert_eq!(search(""), [1, 2, 3]);
        assert_eq!(search("127.0.0.1:40002"), [2]);
        assert_eq!(search("TO-B smc-r"), [1]);
        assert_eq!(search("no_smc"), [2]);
        assert_eq!(search(" 10.8.0.2  active "), [1, 2, 3]);
        assert_eq!(search("half-closed"), [0; 0]);
    }

    /// Rows of thousands of connections take the control thread milliseconds, for each page that is
    /// asked for. Only those of the page are built.
    #[test]
    fn only_rows_of_the_page_are_built() {
        let built = Cell::new(0);
        let of = |id: u64| {
            built.set(built.get() + 1);
            row(id, "to-b", Transport::SmcR)
        };
        let all = || (0..1_000).map(|id| Candidate { of: id, carried: id, age_s: 1.0 });
        let query = ConnectionQuery { sort: Sort::Bytes, per_page: 10, ..Default::default() };
        let page = ConnectionPage::select(all(), &query, of);
        assert_eq!((page.total, page.connections[0].id, built.take()), (1_000, 999, 10));
        // Words may be anywhere in a row.
        let query = ConnectionQuery { search: "40999".to_owned(), ..query };
        let page = ConnectionPage::select(all(), &query, of);
        assert_eq!((page.total, page.connections[0].id, built.get()), (1, 999, 1_001));
    }

    /// The busiest connection of thousands must be on the first page.
    #[test]
    fn the_order_is_the_one_asked_for() {
        for (name, expected) in [
            ("place", [1, 2, 3]),
            ("bytes", [2, 3, 1]),
            ("oldest", [3, 1, 2]),
            ("youngest", [2, 1, 3]),
        ] {
            let sort = Sort::from_name(name).unwrap();
            assert_eq!(ids(&ConnectionQuery { sort, ..ConnectionQuery::default() }), expected);
        }
        assert_eq!(Sort::from_name("size"), None);
    }
}
