//! The operators' page, as a browser shows it.
//!
//! The page marks each value with the place in `/stats` that it comes from, its exact value and the
//! unit of its text, so all of them can be compared.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::TcpStream;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use smcgate::tools::units;

use crate::browser::Browser;
use crate::clock::wait_until;
use crate::failure::assert_echo;
use crate::gateway::{Gateway, Pair, local};
use crate::hosts::{Host, Hosts, accept};

const PORT: u16 = 7010;
/// A port whose server has no SMC-R.
const PLAIN_PORT: u16 = 7011;
const LIMIT: Duration = Duration::from_secs(15);
const PAGE: &str = "http://127.0.0.1:9180/";

/// A name that would be markup if the page took it for that.
const NASTY: &str = "<i>no</i>&amp;\\\"";

/// People must be able to read on the page whatever `/stats` says, before there was any connection,
/// while there are some, and when the gateway has gone. Objects used to appear as
/// `[object Object]`.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_the_page_shows_all_of_stats() {
    let hosts = Hosts::new("smoke_the_page_shows_all_of_stats");
    let near =
        Pair::client_side(&hosts, &[PORT]).towards(hosts.b.address, PLAIN_PORT).table(&format!(
            "[[listener]]\nname = \"{NASTY}\"\nbind = \"127.0.0.1:7999\"\naccept = \"tcp\"\n\
             connect = \"tcp\"\nupstream = \"127.0.0.1:1\"\n"
        ));
    let pair = Pair::start_these(&hosts, near, Pair::server_side(&hosts, &[PORT]));
    let near = Watched::new(&hosts, &pair.a, &hosts.a);
    near.compare();
    near.browser.wait_until("document.body.textContent.includes('has stayed TCP since')");

    let (server, plain) = (hosts.b.listen(local(PORT)), hosts.b.listen(hosts.b.at(PLAIN_PORT)));
    // They stay open while the browser shows the page.
    let connections = [(&server, PORT), (&plain, PLAIN_PORT)].map(|(listener, port)| {
        let client = hosts.a.connect(local(port)).expect("the gateway listens");
        let server = accept(listener, LIMIT);
        assert_echo(&client, &server);
        (client, server)
    });
    let stats = near.compare();
    // The comparison proves something only if it includes what the page once got wrong.
    for path in ["link_groups.0.v2.eid", "link_groups.0.links.0.state", "fallbacks.0.meaning"] {
        assert!(stats.contains_key(path), "/stats has no {path}: {stats:?}");
    }
    assert_ne!(stats["pollers.0.counters.cdc_in"], Value::from(0), "there was no traffic");
    assert_eq!(near.browser.run("return document.querySelectorAll('i').length;"), 0);
    near.compare_rates_while(|| assert_echo(&connections[0].0, &connections[0].1));
    near.is_legible_light_and_dark();
    Watched::new(&hosts, &pair.b, &hosts.b).compare();

    pair.a.process.signal(Signal::STOP);
    near.browser.wait_until("document.getElementById('state').textContent === 'stale'");
    near.browser.wait_until("document.getElementById('stale').textContent.includes(' old.')");
    near.has_no_nonsense();
    pair.a.process.signal(Signal::CONT);
    near.browser.wait_until("document.getElementById('state').textContent === 'live'");
    near.browser.wait_until("document.getElementById('stale').hidden");
    drop(connections);
}

/// An operator with hundreds of connections must find the one that he looks for.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn the_page_finds_one_of_many_connections() {
    let hosts = Hosts::new("the_page_finds_one_of_many_connections");
    let pair = Pair::start(&hosts, &[PORT]);
    let server = hosts.b.listen(local(PORT));
    let clients: Vec<(TcpStream, TcpStream)> = (0..COUNT)
        .map(|_| {
            let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
            (client, accept(&server, LIMIT))
        })
        .collect();
    (&clients[7].0).write_all(&[7; 5_000]).expect("the connection is open");
    let total = |query: &str| {
        let page: Value = serde_json::from_str(&pair.a.get(query)).expect("JSON");
        page["total"].as_u64().expect("a count")
    };
    wait_until("all connections are listed", LIMIT, || total("/connections") == COUNT);

    let browser = Browser::start(&hosts, &hosts.a);
    browser.open(PAGE);
    let shows = |range: &str| {
        browser.wait_until(&format!("document.getElementById('pages').textContent === '{range}'"));
        let rows = "return document.querySelectorAll('#rows-of-connections tbody tr').length;";
        browser.run(rows).as_u64().expect("a count")
    };
    assert_eq!(shows("1–25 of 300"), 25);
    // The one with the most bytes comes first.
    let busiest = format!("127.0.0.1:{}", clients[7].0.local_addr().expect("it is open").port());
    let first = "document.querySelector('#rows-of-connections tbody tr').textContent";
    browser.wait_until(&format!("{first}.includes('{busiest}') && {first}.includes('5.00 kB')"));

    browser.run("document.getElementById('next').click();");
    assert_eq!(shows("26–50 of 300"), 25);
    browser.run(
        "const rows = document.getElementById('rows'); rows.value = '500'; \
         rows.dispatchEvent(new Event('change'));",
    );
    assert_eq!(shows("1–300 of 300"), 300);
    let distinct = browser.run(
        "return new Set([...document.querySelectorAll('[data-path$=\".app\"]')]\
         .map(it => it.textContent)).size;",
    );
    assert_eq!(distinct, COUNT);

    browser.write("#search", &format!("{busiest} SMC-R"));
    assert_eq!(shows("1–1 of 1"), 1);
    browser.write("#search", " no such word");
    assert_eq!(shows("0 of 0"), 0);
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

const COUNT: u64 = 300;

/// The page of a gateway, in a browser.
struct Watched<'a> {
    gateway: &'a Gateway<'a>,
    browser: Browser<'a>,
}

/// One value on the page.
struct Shown {
    path: String,
    exact: String,
    unit: String,
    text: String,
}

impl<'a> Watched<'a> {
    fn new(hosts: &Hosts, gateway: &'a Gateway<'a>, host: &'a Host) -> Self {
        let browser = Browser::start(hosts, host);
        browser.open(PAGE);
        browser.run("document.getElementById('all').open = true;");
        Self { gateway, browser }
    }

    fn document(&self, path: &str) -> Value {
        serde_json::from_str(&self.gateway.get(path)).expect("JSON")
    }

    /// What may be on the page: `/stats`, and the connections that it asks for.
    fn values(&self) -> BTreeMap<String, Value> {
        let mut values = leaves(&self.document("/stats"));
        let connections = self.document("/connections?sort=bytes&per_page=25");
        let rows = leaves(&connections).into_iter();
        values.extend(rows.map(|(path, value)| (format!("/connections {path}"), value)));
        values
    }

    /// Compares every value on the page with `/stats` before and after. Returns that before.
    fn compare(&self) -> BTreeMap<String, Value> {
        let before = self.values();
        let history = self.document("/history");
        // One reading may be on its way already, so the next but one is wholly newer.
        let readings = "document.body.dataset.readings";
        let seen = self.browser.run(&format!("return Number({readings} ?? 0);"));
        self.browser.wait_until(&format!("Number({readings}) > {seen} + 1"));
        // Of a gateway that has just started there are no rates yet.
        let derived = "document.querySelectorAll('[data-share], [data-history]')";
        self.browser.wait_until(&format!("{derived}.length >= 9"));
        self.has_no_nonsense();
        let shown = self.shown();
        let (derived, drawn) = (self.derived(), self.points());
        let after = self.values();

        for Shown { path, exact, unit, text } in &shown {
            // What came a moment ago may be acknowledged only now, and an empty list shows nothing.
            let Some(first) = before.get(path).or_else(|| after.get(path)) else {
                panic!("{path} is {exact} on the page, but not in /stats");
            };
            let last = after.get(path).unwrap_or(first);
            assert!(
                is_between(exact, first, last),
                "{path} is {first} to {last}, shown as {exact}"
            );
            assert_eq!(*text, humanised(unit, exact), "{path} in {unit}");
        }
        for path in before.keys().filter(|path| !path.starts_with("/connections ")) {
            assert!(shown.iter().any(|one| one.path == *path), "{path} is not on the page");
        }
        self.compare_derived(&derived, &before, &after);
        let samples = history["uptime_ms"].as_array().expect("a list").len() as u64;
        assert!(drawn.iter().all(|&points| points + 1 >= samples), "{drawn:?} of {samples}");
        before
    }

    /// Compares rates and shares while something is done again and again: they are not zero then.
    fn compare_rates_while(&self, work: impl Fn() + Sync) {
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Relaxed) {
                    work();
                    std::thread::sleep(Duration::from_millis(5));
                }
            });
            let rate =
                |name| format!("document.querySelector('[data-history={name}]').textContent");
            let (inward, outward) = (rate("bytes_in"), rate("bytes_out"));
            let before = self.values();
            let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| {
                self.browser.wait_until(&format!("!['–', '0 bit/s'].includes({inward})"));
                self.browser.wait_until(&format!("!['–', '0 bit/s'].includes({outward})"));
                let derived = self.derived();
                self.compare_derived(&derived, &before, &self.values());
            }));
            done.store(true, Relaxed);
            outcome.unwrap_or_else(|cause| std::panic::resume_unwind(cause));
        });
    }

    fn has_no_nonsense(&self) {
        let text = self.browser.run("return document.documentElement.outerHTML;");
        let text = text.as_str().expect("markup");
        for nonsense in ["[object", "undefined", "NaN", "Infinity"] {
            assert!(!text.contains(nonsense), "{nonsense} on the page:\n{text}");
        }
        assert_eq!(self.browser.complaints(), Vec::<String>::new());
    }

    fn shown(&self) -> Vec<Shown> {
        let found = self.browser.run(
            "return [...document.querySelectorAll('[data-path]')].map(it => \
             [it.dataset.path, it.dataset.value, it.dataset.unit, it.textContent]);",
        );
        let row = |row: &Value| {
            let [path, exact, unit, text] =
                [0, 1, 2, 3].map(|at| row[at].as_str().expect("text").to_owned());
            Shown { path, exact, unit, text }
        };
        found.as_array().expect("a list").iter().map(row).collect()
    }

    /// Shares and rates, with what the page made them of.
    fn derived(&self) -> Value {
        self.browser.run(
            "return [...document.querySelectorAll('[data-share], [data-history]')].map(it => \
             ({ ...it.dataset, text: it.textContent }));",
        )
    }

    /// How many points each line of each plot has.
    fn points(&self) -> Vec<u64> {
        let found = self.browser.run(
            "return [...document.querySelectorAll('path[data-points]')]\
             .map(it => Number(it.dataset.points));",
        );
        found.as_array().expect("a list").iter().map(|it| it.as_u64().expect("a count")).collect()
    }

    fn compare_derived(
        &self,
        derived: &Value,
        before: &BTreeMap<String, Value>,
        after: &BTreeMap<String, Value>,
    ) {
        let history = self.document("/history");
        let derived = derived.as_array().expect("a list");
        assert!(derived.len() >= 9, "seven rates and levels, and two shares of a poller");
        for one in derived {
            let text = one["text"].as_str().expect("text");
            if let Some(made) = one["share"].as_str() {
                let made = numbers(made);
                let among = |at: usize, path: &str| {
                    let bounds = [before, after].map(|of| of[path].as_f64().expect("a count"));
                    assert!((bounds[0]..=bounds[1]).contains(&made[at]), "{made:?} in {bounds:?}");
                };
                among(0, "pollers.0.turns");
                among(1, "pollers.0.turns_idle");
                let (turns, idle) = (made[0] - made[2], made[1] - made[3]);
                let busy = if turns > 0.0 { 1.0 - idle / turns } else { 0.0 };
                assert_eq!(text, units::share(busy), "{made:?}");
                continue;
            }
            let name = one["history"].as_str().expect("one or the other");
            let sample = |which: &str| {
                let made = numbers(one[which].as_str()?);
                let times = history["uptime_ms"].as_array().expect("a list");
                let at = times.iter().position(|time| time.as_f64() == Some(made[0]));
                let at = at.unwrap_or_else(|| panic!("{made:?} is not in {history}"));
                assert_eq!(history[name][at].as_f64(), Some(made[1]), "{name}");
                Some(made)
            };
            let Some(to) = sample("to") else {
                assert_eq!(text, "–", "{name} without a sample");
                continue;
            };
            let value = match sample("from") {
                None => to[1],
                Some(from) => (to[1] - from[1]) * 1_000.0 / (to[0] - from[0]),
            };
            let unit = one["unit"].as_str().expect("text");
            assert_eq!(text, humanised(unit, &value.to_string()), "{name} {value}");
        }
    }

    /// Text must stand out from what is behind it, whether the operator likes it light or dark.
    fn is_legible_light_and_dark(&self) {
        let colours = |dark| {
            self.browser.set_dark(dark);
            let colours = self.browser.run(
                "const [body, card, faint] = [document.body, ...['.card', '.facts']\
                 .map(it => document.querySelector(it))].map(it => getComputedStyle(it)); \
                 return [body.color, faint.color, body.backgroundColor, card.backgroundColor];",
            );
            let colours = colours.as_array().expect("a list").iter();
            colours.map(|it| luminance(it.as_str().expect("rgb()"))).collect::<Vec<_>>()
        };
        for (dark, colours) in [(false, colours(false)), (true, colours(true))] {
            let [ink, faint, ground, card] = colours[..] else { panic!("{colours:?}") };
            assert_eq!(ground < 0.1, dark, "{colours:?}");
            for (text, behind) in [(ink, ground), (ink, card), (faint, ground), (faint, card)] {
                let contrast = (text.max(behind) + 0.05) / (text.min(behind) + 0.05);
                assert!(contrast > 4.5, "dark {dark}: {contrast} of {colours:?}");
            }
        }
    }
}

fn numbers(text: &str) -> Vec<f64> {
    text.split(' ').map(|word| word.parse().expect("a number")).collect()
}

/// The relative luminance of `rgb(R, G, B)`, as WCAG defines it.
fn luminance(colour: &str) -> f64 {
    let digits = colour.trim_start_matches("rgb(").trim_end_matches(')');
    let parts = digits.split(", ").map(|part| {
        let part = part.parse::<f64>().unwrap_or_else(|_| panic!("{colour}")) / 255.0;
        if part <= 0.04045 { part / 12.92 } else { ((part + 0.055) / 1.055).powf(2.4) }
    });
    parts.zip([0.2126, 0.7152, 0.0722]).map(|(part, weight)| part * weight).sum()
}

/// Every value that is not an object, by its path. A list of plain values counts as one value.
fn leaves(stats: &Value) -> BTreeMap<String, Value> {
    let mut found = BTreeMap::new();
    let mut open = vec![(String::new(), stats)];
    while let Some((path, value)) = open.pop() {
        let at = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
        match value {
            Value::Object(object) => {
                open.extend(object.iter().map(|(key, inner)| (at(key), inner)));
            }
            Value::Array(rows) if rows.iter().all(Value::is_object) => {
                let rows = rows.iter().enumerate();
                open.extend(rows.map(|(index, inner)| (at(&index.to_string()), inner)));
            }
            Value::Array(_)
            | Value::Null
            | Value::Bool(_)
            | Value::Number(_)
            | Value::String(_) => {
                found.insert(path, value.clone());
            }
        }
    }
    found
}

/// Whether the page has a value that the gateway had before or after, or one between these.
fn is_between(exact: &str, first: &Value, last: &Value) -> bool {
    if let (Some(first), Some(last), Ok(shown)) = (first.as_f64(), last.as_f64(), exact.parse()) {
        return (first.min(last)..=first.max(last)).contains(&shown);
    }
    [first, last].into_iter().any(|value| exact == words(value))
}

/// An exact value in the unit that the page shows it in.
fn humanised(unit: &str, exact: &str) -> String {
    let number = || exact.parse::<f64>().unwrap_or_else(|_| panic!("{exact} in {unit}"));
    match unit {
        _ if exact == "–" => exact.to_owned(),
        "text" => exact.to_owned(),
        "count" => units::count(exact.parse().unwrap_or_else(|_| panic!("{exact} is no count"))),
        "bytes" => units::bytes(number()),
        "bits" => units::bits(number()),
        "rate" => units::rate(number()),
        "duration" => units::duration(number()),
        "nanoseconds" => units::nanoseconds(number()),
        "code" => format!("{:#010x}", exact.parse::<u32>().expect("a code")),
        "yes" => if exact == "true" { "yes" } else { "no" }.to_owned(),
        other => panic!("a unit that nobody checks: {other}"),
    }
}

fn words(value: &Value) -> String {
    match value {
        Value::Null => "–".to_owned(),
        Value::String(text) if text.is_empty() => "–".to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(values) => values.iter().map(words).collect::<Vec<_>>().join(", "),
        Value::Bool(_) | Value::Number(_) | Value::Object(_) => value.to_string(),
    }
}
