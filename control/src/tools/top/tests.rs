//! The screen as a terminal would show it.

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::asker::Reading;
use super::screen::{Order, Screen, Tab, Wish};
use super::view;
use crate::stats::{
    Active, Columns, ConnectionPage, Fallback, FallbackReason, Link, LinkGroup, Listener, Measured,
    Peer, Poller, Rnic, SCHEMA, Sort, Stats, Totals, Transport, Upstream, tests::row,
};
use crate::tools::units;

fn stats() -> Stats {
    let link =
        Link { number: 1, state: "active".to_owned(), rnic: "soft0".to_owned(), ..Link::default() };
    let target = |address: &str, state: &str| Upstream {
        address: address.to_owned(),
        state: state.to_owned(),
        ..Upstream::default()
    };
    Stats {
        schema: SCHEMA,
        version: "1.2.3".to_owned(),
        uptime_s: 3_700,
        totals: Totals {
            connections_smc: 12_345,
            bytes_in: 5_000_000,
            links_failed_over: 4,
            ..Totals::default()
        },
        active: Active { smc: 2, tcp: 1, waiting: 7, ..Active::default() },
        fallbacks: vec![Fallback {
            code: 0x0301_0000,
            name: "NO_SMC_OPTION".to_owned(),
            count: 6,
            meaning: "The other end is silent.".to_owned(),
            remedy: "Ask it.".to_owned(),
        }],
        link_groups: vec![LinkGroup { id: 9, links: vec![link], ..LinkGroup::default() }],
        pollers: vec![Poller { turns: 1_000, turns_idle: 750, ..Poller::default() }],
        rnics: vec![Rnic { name: "soft0".to_owned(), psn_errors: 77, ..Rnic::default() }],
        listeners: vec![Listener {
            name: "to-b".to_owned(),
            upstreams: vec![target("10.8.0.2:1", "up"), target("10.8.0.2:2", "down")],
            ..Listener::default()
        }],
        peers: vec![Peer {
            address: "10.8.0.2:7".to_owned(),
            slower: "throughput".to_owned(),
            smc: Measured { first_byte_ns: 12_345, bytes_per_s: 1_000, samples: 3 },
            ..Peer::default()
        }],
        ..Stats::default()
    }
}

fn reading(bytes: [u64; 3], age_s: f64) -> Box<Reading> {
    let connections = bytes.iter().zip(1..).map(|(&bytes_in, id)| {
        let mut it = row(id, "to-b", Transport::SmcR);
        (it.bytes_in, it.bytes_out, it.age_s) = (bytes_in, 0, age_s);
        it
    });
    let connections: Vec<_> = connections.collect();
    Box::new(Reading {
        stats: stats(),
        history: Columns {
            uptime_ms: vec![1_000, 3_000],
            bytes_in: vec![0, 250_000],
            bytes_out: vec![0, 0],
            connections_smc: vec![10, 13],
            connections_tcp: vec![0, 0],
            ..Columns::default()
        },
        connections: ConnectionPage { total: 3, connections, ..ConnectionPage::default() },
    })
}

fn screen() -> Screen {
    Screen::new("127.0.0.1:9180".parse().unwrap())
}

/// What a terminal of this size shows.
fn drawn(screen: &mut Screen, (width, height): (u16, u16)) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| view::draw(frame, screen)).unwrap();
    terminal.backend().to_string()
}

fn press(screen: &mut Screen, keys: &str) -> Option<Wish> {
    let code = |key| if key == '\n' { KeyCode::Enter } else { KeyCode::Char(key) };
    let event = |key| KeyEvent::new(code(key), KeyModifiers::NONE);
    keys.chars().map(|key| screen.handle_key(event(key))).last().flatten()
}

/// Pollers keep their numbers when one between them stops, as metrics and logs name them by these;
/// and the load of each is measured against what it did itself.
#[test]
fn pollers_have_the_numbers_that_the_gateway_gives_them() {
    let poller =
        |index, turns, turns_idle| Poller { index, turns, turns_idle, ..Poller::default() };
    let readings = [
        vec![poller(0, 1_000, 0), poller(1, 1_000, 0), poller(2, 1_000, 1_000)],
        vec![poller(0, 2_000, 1_000), poller(2, 2_000, 1_250)],
    ];
    let mut screen = screen();
    press(&mut screen, "4");
    for pollers in readings {
        let mut reading = reading([0; 3], 1.0);
        reading.stats.pollers = pollers;
        screen.take(Ok(reading));
    }
    let text = drawn(&mut screen, (150, 20));
    let row = text.lines().find(|line| line.contains("75.0 %"));
    let row = row.unwrap_or_else(|| panic!("no load of three quarters in\n{text}"));
    // The terminal of the test puts lines in quotation marks.
    assert!(row.starts_with("\"2 "), "{row}");
}

/// Every figure of the header and of each pane is that of the gateway, in units for people.
#[test]
fn each_pane_shows_its_figures() {
    let mut screen = screen();
    screen.take(Ok(reading([1_000, 2_000, 3_000], 1.0)));
    for (key, words) in [
        ("1", &["smcgate 1.2.3", "up 1h 1m", "live", "1.00 Mbit/s", "5.00 MB in all"][..]),
        ("1", &["open 2 smc-r, 1 tcp", "7 waiting", "1.50/s smc-r", "12,345 smc-r", "6 fell back"]),
        ("2", &["GROUP", "active", "soft0", "4 links failed over"]),
        ("3", &["to-b", "10.8.0.2:1", "down"]),
        ("4", &["BUSY", "25.0 %"]),
        ("5", &["soft0", "77"]),
        ("7", &["10.8.0.2:7", "throughput", "12.3 µs", "8.00 kbit/s"]),
        ("6", &["NO_SMC_OPTION", "0x03010000", "The other end is silent.", "→ Ask it."]),
    ] {
        assert_eq!(press(&mut screen, key), None);
        let text = drawn(&mut screen, (150, 20));
        for word in words {
            assert!(text.contains(word), "{word} is missing in\n{text}");
        }
        assert!(text.contains("q quit"), "{text}");
    }
}

/// The connection that is busy now comes first, and not the one that was busy yesterday.
#[test]
fn connections_are_sorted_by_what_they_carry_now() {
    let mut screen = screen();
    screen.take(Ok(reading([900_000, 0, 0], 1.0)));
    screen.take(Ok(reading([900_000, 125_000, 250_000], 2.0)));
    let first = |screen: &mut Screen| {
        let text = drawn(screen, (150, 20));
        text.lines().find(|line| line.contains("127.0.0.1:4000")).unwrap().to_owned()
    };
    let busiest = first(&mut screen);
    assert!(busiest.contains("127.0.0.1:40003") && busiest.contains("2.00 Mbit/s"), "{busiest}");
    assert_eq!(press(&mut screen, "s"), Some(Wish::Ask));
    assert_eq!((screen.order, screen.query().sort), (Order::Bytes, Sort::Bytes));
    assert!(first(&mut screen).contains("127.0.0.1:40001"));
    press(&mut screen, "s");
    assert_eq!((screen.order, screen.query().sort), (Order::Age, Sort::Oldest));
}

/// Letters of a filter are letters, also those that are commands elsewhere.
#[test]
fn typing_filters() {
    let mut screen = screen();
    assert_eq!(press(&mut screen, "4/"), None);
    assert_eq!((screen.tab, screen.is_typing), (Tab::Connections, true));
    assert_eq!(press(&mut screen, "q1"), Some(Wish::Ask));
    assert_eq!(screen.query().search, "q1");
    assert!(drawn(&mut screen, (150, 20)).contains("filter: q1"));
    assert_eq!(press(&mut screen, "\n"), None);
    assert!(drawn(&mut screen, (150, 20)).contains("/ filter: q1"));
    assert_eq!(press(&mut screen, "q"), Some(Wish::Quit));
}

/// An operator must not take old figures for new ones, and must see when the gateway is back.
#[test]
fn a_gateway_that_is_away_is_shown_as_such() {
    let mut screen = screen();
    assert!(drawn(&mut screen, (150, 20)).contains("asking"));
    screen.take(Err("nobody listens there".to_owned()));
    let text = drawn(&mut screen, (150, 20));
    assert!(text.contains("NO ANSWER: nobody listens there") && text.contains("nothing is known"));
    screen.take(Ok(reading([1; 3], 1.0)));
    screen.take(Err("timeout".to_owned()));
    let text = drawn(&mut screen, (150, 20));
    assert!(text.contains("NO ANSWER: timeout") && text.contains("127.0.0.1:40001"), "{text}");
    screen.take(Ok(reading([1; 3], 2.0)));
    assert!(!drawn(&mut screen, (150, 20)).contains("NO ANSWER"));
}

/// Whoever makes the window tiny, or scrolls beyond the end, must not crash it.
#[test]
fn any_size_and_any_key_will_do() {
    let mut screen = screen();
    let mut tcp = reading([1; 3], 1.0);
    tcp.connections.connections[0].transport = Transport::Tcp;
    tcp.connections.connections[0].fallback =
        Some(FallbackReason { code: 1, name: "WHY".to_owned() });
    screen.take(Ok(tcp));
    for size in [(1, 1), (20, 5), (80, 24), (300, 100)] {
        for key in [KeyCode::Tab, KeyCode::PageDown, KeyCode::End, KeyCode::BackTab, KeyCode::Up] {
            screen.handle_key(KeyEvent::new(key, KeyModifiers::NONE));
            drawn(&mut screen, size);
        }
    }
    screen.handle_key(KeyEvent::new(KeyCode::PageDown, KeyModifiers::NONE));
    assert!(drawn(&mut screen, (200, 30)).contains("WHY"), "all rows fit, so all are shown");
    let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert_eq!(screen.handle_key(control_c), Some(Wish::Quit));
}

/// A gateway that has just started has no history and nothing else.
#[test]
fn a_gateway_without_anything_is_shown() {
    let mut screen = screen();
    screen.take(Ok(Box::default()));
    for key in ["1", "2", "3", "4", "5", "6", "7"] {
        press(&mut screen, key);
        let text = drawn(&mut screen, (150, 20));
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        assert!(text.contains("There is no") || text.contains("No "), "{text}");
    }
    assert_eq!(units::share(0.0), "0.0 %");
}
