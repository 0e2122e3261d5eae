//! What the operator has chosen, and what is known of the gateway.

use std::collections::HashMap;
use std::net::SocketAddr;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::asker::{Answer, Reading};
use crate::stats::{Connection, ConnectionQuery, PER_PAGE_MAX, Poller, Sort};

/// What is below the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tab {
    Connections,
    Links,
    Listeners,
    Pollers,
    Rnics,
    Fallbacks,
    Peers,
}

impl Tab {
    pub(super) const ALL: [Self; 7] = [
        Self::Connections,
        Self::Links,
        Self::Listeners,
        Self::Pollers,
        Self::Rnics,
        Self::Fallbacks,
        Self::Peers,
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Connections => "Connections",
            Self::Links => "Links",
            Self::Listeners => "Listeners",
            Self::Pollers => "Pollers",
            Self::Rnics => "RNICs",
            Self::Fallbacks => "Stayed TCP",
            Self::Peers => "SMC-R beside TCP",
        }
    }

    fn index(self) -> usize {
        Self::ALL.iter().position(|&tab| tab == self).expect("all are there")
    }

    fn step(self, step: usize) -> Self {
        Self::ALL[(self.index() + step) % Self::ALL.len()]
    }
}

/// Which connections come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Those that carry most now.
    Throughput,
    /// Those that have carried most.
    Bytes,
    /// The oldest.
    Age,
}

impl Order {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Throughput => "throughput",
            Self::Bytes => "bytes",
            Self::Age => "age",
        }
    }

    const fn next(self) -> Self {
        match self {
            Self::Throughput => Self::Bytes,
            Self::Bytes => Self::Age,
            Self::Age => Self::Throughput,
        }
    }
}

/// What a key asks for beyond another look of the screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    /// The gateway shall be asked again, for other connections.
    Ask,
    /// The operator has enough.
    Quit,
}

/// Everything that the view shows.
#[derive(Debug)]
pub(super) struct Screen {
    pub(super) admin: SocketAddr,
    pub(super) tab: Tab,
    pub(super) order: Order,
    /// Words that connections must have.
    pub(super) filter: String,
    /// Whether keys are letters of the filter.
    pub(super) is_typing: bool,
    /// Rows that are above the first one shown. The view limits it to those there are.
    pub(super) scrolled: usize,
    /// The last that the gateway said; none before it has said anything.
    pub(super) reading: Option<Box<Reading>>,
    /// Why the last question was not answered.
    pub(super) failure: Option<String>,
    before: Before,
}

/// What rates are measured against.
#[derive(Debug, Default)]
struct Before {
    connections: HashMap<u64, (u64, u64, f64)>,
    pollers: Vec<Poller>,
}

/// Bytes per second of one connection.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Flow {
    pub(super) inward: f64,
    pub(super) outward: f64,
}

impl Screen {
    pub(super) fn new(admin: SocketAddr) -> Self {
        Self {
            admin,
            tab: Tab::Connections,
            order: Order::Throughput,
            filter: String::new(),
            is_typing: false,
            scrolled: 0,
            reading: None,
            failure: None,
            before: Before::default(),
        }
    }

    /// Which connections to ask for: at most a page, those that matter most.
    pub(super) fn query(&self) -> ConnectionQuery {
        let sort = match self.order {
            Order::Throughput | Order::Bytes => Sort::Bytes,
            Order::Age => Sort::Oldest,
        };
        ConnectionQuery {
            search: self.filter.clone(),
            sort,
            per_page: PER_PAGE_MAX,
            ..ConnectionQuery::default()
        }
    }

    /// Takes in an answer. What was known stays on the screen while the gateway is away.
    pub(super) fn take(&mut self, answer: Answer) {
        match answer {
            Err(why) => self.failure = Some(why),
            Ok(reading) => {
                self.failure = None;
                if let Some(last) = self.reading.replace(reading) {
                    let row = |it: &Connection| (it.id, (it.bytes_in, it.bytes_out, it.age_s));
                    self.before = Before {
                        connections: last.connections.connections.iter().map(row).collect(),
                        pollers: last.stats.pollers,
                    };
                }
            }
        }
    }

    /// What a connection carries, by its own clock; since it began, if it was not there before.
    pub(super) fn flow(&self, row: &Connection) -> Flow {
        let known = self.before.connections.get(&row.id).filter(|known| known.2 < row.age_s);
        let (bytes_in, bytes_out, age_s) = known.copied().unwrap_or_default();
        let time = (row.age_s - age_s).max(0.001);
        Flow {
            inward: row.bytes_in.saturating_sub(bytes_in) as f64 / time,
            outward: row.bytes_out.saturating_sub(bytes_out) as f64 / time,
        }
    }

    /// The share of a poller's turns that moved something, since the reading before.
    pub(super) fn load(&self, poller: &Poller) -> f64 {
        // One that stopped in between has left a gap, so places do not say which poller it is. Of a
        // gateway that was restarted, all begin anew.
        let known = self.before.pollers.iter().find(|it| it.index == poller.index);
        let known = known.filter(|it| it.turns <= poller.turns);
        let (turns, idle) = known.map_or((0, 0), |it| (it.turns, it.turns_idle));
        let turns = poller.turns - turns;
        if turns == 0 {
            return 0.0;
        }
        1.0 - poller.turns_idle.saturating_sub(idle) as f64 / turns as f64
    }

    /// Does what a key means.
    pub(super) fn handle_key(&mut self, key: KeyEvent) -> Option<Wish> {
        let with_control = key.modifiers.contains(KeyModifiers::CONTROL);
        if with_control && key.code == KeyCode::Char('c') {
            return Some(Wish::Quit);
        }
        if self.is_typing { self.handle_letter(key.code) } else { self.handle_command(key.code) }
    }

    fn handle_letter(&mut self, code: KeyCode) -> Option<Wish> {
        if code == KeyCode::Enter {
            self.is_typing = false;
            return None;
        }
        if code == KeyCode::Esc {
            self.is_typing = false;
            self.filter.clear();
        } else if code == KeyCode::Backspace {
            self.filter.pop();
        } else if let KeyCode::Char(letter) = code {
            self.filter.push(letter);
        } else {
            return None;
        }
        self.scrolled = 0;
        Some(Wish::Ask)
    }

    fn handle_command(&mut self, code: KeyCode) -> Option<Wish> {
        if code == KeyCode::Char('q') {
            return Some(Wish::Quit);
        }
        if let KeyCode::Char(digit @ '1'..='7') = code {
            self.turn_to(Tab::ALL[digit as usize - '1' as usize]);
        } else if [KeyCode::Tab, KeyCode::Right, KeyCode::Char('l')].contains(&code) {
            self.turn_to(self.tab.step(1));
        } else if [KeyCode::BackTab, KeyCode::Left, KeyCode::Char('h')].contains(&code) {
            self.turn_to(self.tab.step(Tab::ALL.len() - 1));
        } else if [KeyCode::Down, KeyCode::Char('j')].contains(&code) {
            self.scrolled += 1;
        } else if [KeyCode::Up, KeyCode::Char('k')].contains(&code) {
            self.scrolled = self.scrolled.saturating_sub(1);
        } else if code == KeyCode::PageDown {
            self.scrolled += SCREENFUL;
        } else if code == KeyCode::PageUp {
            self.scrolled = self.scrolled.saturating_sub(SCREENFUL);
        } else if code == KeyCode::Home {
            self.scrolled = 0;
        } else if code == KeyCode::Char('s') {
            self.order = self.order.next();
            self.turn_to(Tab::Connections);
            return Some(Wish::Ask);
        } else if code == KeyCode::Char('/') {
            self.turn_to(Tab::Connections);
            self.is_typing = true;
        } else if code == KeyCode::Esc && !self.filter.is_empty() {
            self.filter.clear();
            return Some(Wish::Ask);
        }
        None
    }

    fn turn_to(&mut self, tab: Tab) {
        self.tab = tab;
        self.scrolled = 0;
    }
}

/// Rows that a page key moves by.
const SCREENFUL: usize = 20;
