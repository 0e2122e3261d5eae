//! The operators' page, as a browser shows it.
//!
//! The page marks each value with the place in `/stats` that it comes from (`data-path`), so the
//! two can be compared value by value.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::failure::assert_echo;
use crate::gateway::{Gateway, Pair, local};
use crate::hosts::{Host, Hosts, accept};
use crate::process::run;

const PORT: u16 = 7010;
/// A port whose server has no SMC-R.
const PLAIN_PORT: u16 = 7011;
const LIMIT: Duration = Duration::from_secs(15);
/// A browser starts slowly on a busy machine.
const BROWSER_LIMIT: Duration = Duration::from_secs(60);

/// People must be able to read on the page whatever `/stats` says. Groups of SMC-Rv2 and the
/// counters of pollers used to appear as `[object Object]`.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_the_page_shows_all_of_stats() {
    let hosts = Hosts::new("smoke_the_page_shows_all_of_stats");
    let near = Pair::client_side(&hosts, &[PORT]).towards(hosts.b.address, PLAIN_PORT);
    let pair = Pair::start_these(&hosts, near, Pair::server_side(&hosts, &[PORT]));
    let (server, plain) = (hosts.b.listen(local(PORT)), hosts.b.listen(hosts.b.at(PLAIN_PORT)));
    // They stay open while the browser shows the page.
    let connections = [(&server, PORT), (&plain, PLAIN_PORT)].map(|(listener, port)| {
        let client = hosts.a.connect(local(port)).expect("the gateway listens");
        let server = accept(listener, LIMIT);
        assert_echo(&client, &server);
        (client, server)
    });
    for (gateway, host) in [(&pair.a, &hosts.a), (&pair.b, &hosts.b)] {
        compare_page_with_stats(&hosts, gateway, host);
    }
    drop(connections);
}

fn compare_page_with_stats(hosts: &Hosts, gateway: &Gateway<'_>, host: &Host) {
    let stats = || serde_json::from_str::<Value>(&gateway.get("/stats")).expect("JSON");
    let before = stats();
    let page = browse(hosts, host);
    let after = leaves(&stats());
    let shown = main_part(&page);
    for nonsense in ["[object", "undefined", "NaN"] {
        assert!(!shown.contains(nonsense), "{nonsense} on the page:\n{shown}");
    }

    // The comparison proves something only if it includes what the page once got wrong.
    let before = leaves(&before);
    for path in ["link_groups.0.v2.eid", "link_groups.0.links.0.state", "pollers.0.counters.turns"]
    {
        assert!(before.contains_key(path), "/stats has no {path}: {before:?}");
    }
    assert_ne!(before["pollers.0.counters.cdc_in"], Value::from(0), "there was no traffic");

    let cells = cells(shown);
    for (path, first) in &before {
        let Some(cell) = cells.get(path.as_str()) else {
            panic!("{path} is not on the page:\n{shown}");
        };
        let last = after.get(path).unwrap_or(first);
        assert!(is_shown(path, cell, first, last), "{path} is {first} to {last}, shown as {cell}");
    }
    let invented: Vec<_> = cells.keys().filter(|path| !before.contains_key(**path)).collect();
    assert!(invented.is_empty(), "on the page, but not in /stats: {invented:?}");
}

/// The page as Chromium renders it on `host`, as markup.
fn browse(hosts: &Hosts, host: &Host) -> String {
    let profile = hosts.logs.join(format!("chromium-{}", host.name));
    let mut command = Command::new("chromium");
    command
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
        .arg(format!("--user-data-dir={}", profile.display()))
        // By then the page has asked at least once; virtual time stands still while it waits.
        .args(["--virtual-time-budget=3000", "--dump-dom", "http://127.0.0.1:9180/"]);
    let name = format!("chromium-{}", host.device);
    let page = run(hosts, host, &name, BROWSER_LIMIT, &mut command).expect_success("chromium");
    remove(&profile);
    page
}

/// Removes the browser profile: megabytes that nobody needs.
fn remove(profile: &Path) {
    // A helper process of the browser may still write to it; then it stays.
    drop(std::fs::remove_dir_all(profile));
}

/// The tables that the script has made, without the script.
fn main_part(page: &str) -> &str {
    let start = page.find("<main").unwrap_or_else(|| panic!("no <main> in\n{page}"));
    let end = page.find("</main>").unwrap_or_else(|| panic!("no </main> in\n{page}"));
    &page[start..end]
}

/// The text of each marked cell, by its path.
fn cells(page: &str) -> BTreeMap<&str, String> {
    page.split("data-path=\"")
        .skip(1)
        .map(|rest| {
            let (path, rest) = rest.split_once("\">").expect("the attribute comes last");
            let (text, _) = rest.split_once("</td>").expect("the cell ends");
            let text = text.replace("&lt;", "<").replace("&gt;", ">").replace("&nbsp;", "\u{a0}");
            (path, text.replace("&amp;", "&"))
        })
        .collect()
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

/// Whether `cell` shows a value that `/stats` had before or after, or one between these.
fn is_shown(path: &str, cell: &str, first: &Value, last: &Value) -> bool {
    if path.starts_with("fallbacks.") && path.ends_with(".code") {
        return first.as_u64().is_some_and(|code| cell == format!("0x{code:08x}"));
    }
    if let (Some(first), Some(last), Ok(shown)) = (first.as_f64(), last.as_f64(), cell.parse()) {
        return (first.min(last)..=first.max(last)).contains(&shown);
    }
    [first, last].into_iter().any(|value| cell == words(value))
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
