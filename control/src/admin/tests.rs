//! The endpoint over real sockets.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use smcr_engine::mailbox::{Waker, mailbox};

use super::*;
use crate::config::Config;
use crate::operate::{OperateError, Operation};
use crate::stats::{
    Active, Answering, ByTransport, ConnectionPage, ConnectionQuery, Fallback, Listener, Poller,
    Readiness, Rnic, SCHEMA, Sample, Stats, Totals, Transport, Upstream,
    tests::{answered, page_of, row},
};
use crate::status::Asker;

/// A gateway that stands still.
#[derive(Default)]
struct Still {
    reasons: Vec<String>,
    /// How many of its samples are yet to panic.
    faults: AtomicU32,
}

impl Provider for Still {
    fn stats(&self) -> Answering<Stats> {
        answered(Stats {
            schema: SCHEMA,
            version: "1.2.3".to_owned(),
            uptime_s: 7,
            totals: Totals {
                connections_smc: 11,
                connections_tcp: 3,
                bytes_in: 99,
                ..Totals::default()
            },
            active: Active { smc: 2, tcp: 1, ..Active::default() },
            fallbacks: vec![Fallback {
                code: 0x0301_0000,
                name: "peer has no \"option\"".to_owned(),
                count: 3,
                ..Fallback::default()
            }],
            rnics: vec![Rnic {
                name: "soft0".to_owned(),
                icrc_errors: 5,
                psn_errors: 6,
                unknown_qp: 7,
                ..Rnic::default()
            }],
            pollers: vec![Poller {
                index: 3,
                counters: [("send_bytes_lent", 4096), ("near", 1)]
                    .map(|(name, number)| (name.to_owned(), number))
                    .into(),
                ..Poller::default()
            }],
            listeners: vec![
                twice("removed", 5),
                twice("open", 7),
                leads("nowhere", "open", "web.example:80"),
                leads("onwards", "open", "original-dst"),
                leads("gone", "removed", "web.example:80"),
            ],
            ..Stats::default()
        })
    }

    fn sample(&self) -> Answering<Sample> {
        let faults = self.faults.load(SeqCst);
        self.faults.store(faults.saturating_sub(1), SeqCst);
        assert_eq!(faults, 0, "as I was asked to");
        answered(Sample { uptime_ms: 7_000, bytes_in: 99, ..Sample::default() })
    }

    fn figures(&self) -> Answering<Stats> {
        self.stats()
    }

    fn connections(&self, query: ConnectionQuery) -> Answering<ConnectionPage> {
        let all = (1..=5)
            .map(|id| row(id, "to-b", if id == 3 { Transport::Tcp } else { Transport::SmcR }));
        answered(page_of(all, &query))
    }

    fn config(&self) -> Answering<Config> {
        let text = "[[listener]]\nname = 'a'\nbind = '127.0.0.1:1'\nupstream = '127.0.0.1:2'\n";
        answered(Config::parse(text, "a.toml").unwrap())
    }

    fn ready(&self, listener: Option<String>) -> Answering<Readiness> {
        let about = listener.into_iter().map(|name| format!("there is no listener {name}"));
        answered(Readiness { reasons: self.reasons.iter().cloned().chain(about).collect() })
    }

    fn operate(&self, operation: Operation) -> Result<Vec<String>, OperateError> {
        match operation {
            Operation::LinkDelete { link: 7, orderly: true } => Ok(vec!["done".to_owned()]),
            Operation::LinkDelete { link, .. } => {
                Err(OperateError::Unknown(format!("link {link}")))
            }
            Operation::Reload => Err(OperateError::Wrong("a.toml:3: wrong".to_owned())),
            Operation::LinkAdd { .. }
            | Operation::RnicDown { .. }
            | Operation::RnicUp { .. }
            | Operation::Drain { .. }
            | Operation::Undrain { .. }
            | Operation::Measure { .. } => Err(OperateError::Refused("not now".to_owned())),
        }
    }
}

/// A listener that knows no address of where it leads.
fn leads(name: &str, state: &str, upstream: &str) -> Listener {
    let [name, state, upstream] = [name, state, upstream].map(str::to_owned);
    Listener { name, state, upstream, ..Listener::default() }
}

/// One of two listeners with the same name.
fn twice(state: &str, accepted: u64) -> Listener {
    let mut durations = ByTransport::default();
    durations.record(Transport::Tcp, Duration::from_secs(accepted), None);
    let upstream = Upstream {
        address: "10.8.0.2:1".to_owned(),
        state: "out".to_owned(),
        failed: 1,
        ..Upstream::default()
    };
    Listener {
        name: "twice".to_owned(),
        state: state.to_owned(),
        upstreams: vec![upstream],
        accepted,
        durations,
        ..Listener::default()
    }
}

fn start(reasons: &[&str]) -> AdminThread {
    let reasons = reasons.iter().map(|&reason| reason.to_owned()).collect();
    let still = Still { reasons, ..Still::default() };
    spawn("127.0.0.1:0".parse().unwrap(), Arc::new(still)).unwrap()
}

/// One request; the status and the body.
fn request(admin: &AdminThread, method: &str, path: &str) -> (u16, String) {
    let (head, body) = answer(admin, method, path);
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body)
}

/// One request; the head and the body.
fn answer(admin: &AdminThread, method: &str, path: &str) -> (String, String) {
    let mut stream = TcpStream::connect(admin.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    write!(stream, "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.to_owned(), body.to_owned())
}

fn json(admin: &AdminThread, path: &str) -> (u16, serde_json::Value) {
    let (status, body) = request(admin, "GET", path);
    (status, serde_json::from_str(&body).unwrap())
}

/// What a monitoring script reads is what the gateway said.
#[test]
fn stats_are_what_the_provider_says() {
    let admin = start(&[]);
    let (status, stats) = json(&admin, "/stats");
    assert_eq!(status, 200);
    assert_eq!(stats["schema"], 1);
    assert_eq!(stats["totals"]["connections_smc"], 11);
    assert_eq!(stats["fallbacks"][0]["code"], 0x0301_0000);
}

/// Filters and pages of the query string arrive at the provider.
#[test]
fn connections_are_filtered_and_paged() {
    let admin = start(&[]);
    let (status, page) =
        json(&admin, "/connections?transport=smc-r&page=2&per_page=3&listener=to-b");
    assert_eq!(status, 200);
    assert_eq!(page["total"], 4);
    assert_eq!(page["connections"].as_array().unwrap().len(), 1);
    assert_eq!(page["connections"][0]["id"], 5);
    assert_eq!(json(&admin, "/connections?listener=other").1["total"], 0);
    let (_, page) = json(&admin, "/connections?search=127.0.0.1+TCP&sort=bytes");
    assert_eq!((&page["total"], &page["connections"][0]["id"]), (&1.into(), &3.into()));
}

/// A typo in a filter must not look like "no connections".
#[test]
fn bad_queries_are_refused_with_the_reason() {
    let admin = start(&[]);
    for (query, word) in [
        ("transport=udp", "transport"),
        ("page=0", "first page"),
        ("per_page=1001", "per_page"),
        ("sort=size", "sort"),
        ("page=minus", "page"),
        ("lisener=to-b", "lisener"),
    ] {
        let (status, body) = json(&admin, &format!("/connections?{query}"));
        assert_eq!(status, 400, "{query}");
        assert!(body["error"].as_str().unwrap().contains(word), "{query}: {body}");
    }
}

/// Prometheus must be able to read the text, quotes in labels included.
#[test]
fn metrics_have_names_types_units_and_labels() {
    let admin = start(&[]);
    let (status, text) = request(&admin, "GET", "/metrics");
    assert_eq!(status, 200);
    for line in [
        "# HELP smcgate_connections_total Connections carried, by transport",
        "# TYPE smcgate_connections_total counter",
        "# TYPE smcgate_connections_active gauge",
        "smcgate_connections_total{transport=\"smc-r\"} 11",
        "smcgate_connections_active{transport=\"tcp\"} 1",
        "smcgate_in_bytes_total 99",
        "smcgate_uptime_seconds 7",
        "smcgate_build_info{version=\"1.2.3\"} 1",
        "smcgate_fallbacks_total{code=\"0x03010000\",name=\"peer has no \\\"option\\\"\"} 3",
        "smcgate_rnic_icrc_errors_total{rnic=\"soft0\"} 5",
        "smcgate_rnic_psn_errors_total{rnic=\"soft0\"} 6",
        "smcgate_rnic_unknown_qp_total{rnic=\"soft0\"} 7",
        "smcgate_poller_send_lent_bytes{poller=\"3\"} 4096",
        "smcgate_poller_near{poller=\"3\"} 1",
    ] {
        assert!(text.lines().any(|it| it == line), "{line} is missing in\n{text}");
    }
    assert!(!text.contains("# UNIT") && !text.contains("# EOF"), "{text}");
}

/// `increase()` of a series that begins with 500 is 0: what alerts ask for must be there before it
/// happens.
#[test]
fn what_alerts_ask_for_has_series_from_the_beginning() {
    let (_, text) = request(&start(&[]), "GET", "/metrics");
    let count = |line: &str| text.lines().filter(|it| it.starts_with(line)).count();
    for line in [
        "smcgate_fallbacks_total{code=\"0x01010000\",name=\"OUT_OF_MEMORY\"} 0",
        "smcgate_fallbacks_total{code=\"0x02030000\",name=\"NO_ROCE_PATH\"} 0",
        "smcgate_listener_upstreams{listener=\"nowhere\"} 0",
        "smcgate_listener_upstreams{listener=\"twice\"} 1",
    ] {
        assert_eq!(count(line), 1, "{line} in\n{text}");
    }
    assert_eq!(count("smcgate_fallbacks_total{code=\"0x03010000\""), 1, "one that has occurred");
    assert_eq!(count("smcgate_listener_upstreams{listener=\"onwards\""), 0, "it has none ever");
    assert_eq!(count("smcgate_listener_upstreams{listener=\"gone\""), 0, "nobody looks it up");
}

/// Scrapers that understand OpenMetrics get it.
#[test]
fn open_metrics_are_there_for_the_asking() {
    let admin = start(&[]);
    let mut stream = TcpStream::connect(admin.address()).unwrap();
    let accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5";
    let head = "Host: 127.0.0.1\r\nConnection: close";
    write!(stream, "GET /metrics HTTP/1.1\r\n{head}\r\nAccept: {accept}\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("content-type: application/openmetrics-text"), "{answer}");
    assert!(answer.contains("# TYPE smcgate_connections counter\n"), "{answer}");
    assert!(answer.contains("# UNIT smcgate_in_bytes bytes\n") && answer.ends_with("# EOF\n"));
}

/// A listener that an operator has replaced by another of its name may still have connections. Two
/// samples with the same labels would make Prometheus refuse the whole scrape.
#[test]
fn listeners_of_one_name_are_one_series() {
    let (_, text) = request(&start(&[]), "GET", "/metrics");
    let labels = "listener=\"twice\",transport=\"tcp\"";
    let longest = format!("smcgate_connection_duration_seconds_bucket{{le=\"+Inf\",{labels}}} 2");
    for line in [
        longest.as_str(),
        "smcgate_listener_accepted_total{listener=\"twice\"} 12",
        "smcgate_listener_open{listener=\"twice\"} 1",
        "smcgate_upstream_up{listener=\"twice\",upstream=\"10.8.0.2:1\"} 0",
        "smcgate_upstream_failed_total{listener=\"twice\",upstream=\"10.8.0.2:1\"} 2",
        "smcgate_connection_duration_seconds_count{listener=\"twice\",transport=\"tcp\"} 2",
    ] {
        assert_eq!(text.lines().filter(|it| *it == line).count(), 1, "{line} in\n{text}");
    }
    let smc = "{listener=\"twice\",transport=\"smc-r\"}";
    assert!(!text.contains(smc), "a transport that was not used");
}

/// Prometheus took the zeros of a control thread that did not answer for a restart. It gets an
/// error now; and whoever asks whether this thread lives is answered at once all the same.
#[test]
fn a_control_thread_that_does_not_answer_is_no_zero_and_holds_nobody_up() {
    let (questions, _nobody) = mailbox(16, Waker::new().unwrap());
    let asker = Arc::new(Asker::new(questions, None));
    let admin = spawn("127.0.0.1:0".parse().unwrap(), asker).unwrap();
    let ask = |path: &str, patience| {
        let mut stream = TcpStream::connect(admin.address()).unwrap();
        stream.set_read_timeout(Some(patience)).unwrap();
        let head = "Host: 127.0.0.1\r\nConnection: close";
        write!(stream, "GET {path} HTTP/1.1\r\n{head}\r\n\r\n").unwrap();
        stream
    };
    // One after another they would take longer than a connection may last.
    let paths = ["/metrics", "/stats", "/connections", "/config", "/readyz"];
    let silent = paths.map(|path| (path, ask(path, Duration::from_secs(20))));
    std::thread::sleep(Duration::from_millis(200));
    let mut alive = [0; 12];
    ask("/healthz", Duration::from_secs(1)).read_exact(&mut alive).expect("an answer at once");
    assert_eq!(&alive, b"HTTP/1.1 200");
    for (path, mut stream) in silent {
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 503 "), "{path}: {answer}");
        assert!(answer.contains("the control thread does not answer"), "{path}: {answer}");
    }
}

/// A load balancer must see the difference between alive and ready, an operator the reason.
#[test]
fn readiness_is_not_health() {
    let admin = start(&["no RNIC has a route to a peer"]);
    assert_eq!(json(&admin, "/healthz").0, 200);
    let (status, body) = json(&admin, "/readyz");
    assert_eq!(status, 503);
    assert_eq!(body["reasons"][0], "no RNIC has a route to a peer");
    assert_eq!(json(&start(&[]), "/readyz").0, 200);
}

#[test]
fn unknown_paths_and_methods_are_json_errors() {
    let admin = start(&[]);
    assert_eq!(json(&admin, "/nothing").0, 404);
    let (status, body) = request(&admin, "POST", "/stats");
    assert_eq!(status, 405);
    assert!(serde_json::from_str::<serde_json::Value>(&body).unwrap()["error"].is_string());
}

/// The page must work on a host without a way out, so it may not load anything from elsewhere.
#[test]
fn the_page_is_self_contained() {
    let admin = start(&[]);
    let (status, page) = request(&admin, "GET", "/");
    assert_eq!(status, 200);
    let files = page::FILES.map(|(name, kind, _)| {
        let (head, body) = answer(&admin, "GET", &format!("/page/{name}"));
        assert!(head.starts_with("HTTP/1.1 200 "), "{name}: {head}");
        assert!(head.contains(&format!("content-type: {kind}\r\n")), "{name}: {head}");
        body
    });
    for text in files.iter().chain([&page]) {
        assert!(!text.is_empty());
        let text = text.replace("http://www.w3.org/2000/svg", "");
        for elsewhere in ["http:", "https:", "src=\"//", "href=\"//", "@import", "innerHTML"] {
            assert!(!text.contains(elsewhere), "{elsewhere} in\n{text}");
        }
    }
    for name in ["main.js", "style.css", "icon.svg"] {
        assert!(page.contains(&format!("=\"/page/{name}\"")), "{name} is not used");
    }
    let modules = files.concat();
    for name in page::FILES.iter().map(|(name, _, _)| name).filter(|it| it.ends_with(".js")) {
        let used = modules.contains(&format!("from \"./{name}\"")) || *name == "main.js";
        assert!(used, "nobody imports {name}");
    }
    assert_eq!(request(&admin, "GET", "/page/other.js").0, 404);
}

/// Should the page ever take a peer's name for markup, the browser must refuse to run it.
#[test]
fn the_page_may_run_no_script_but_ours() {
    let (head, _) = answer(&start(&[]), "GET", "/");
    let policy = head.lines().find_map(|line| line.strip_prefix("content-security-policy: "));
    let policy = policy.unwrap_or_else(|| panic!("no policy in {head}"));
    assert!(policy.contains("default-src 'none'") && policy.contains("script-src 'self'"));
    assert!(!policy.contains("unsafe") && !policy.contains('*'), "{policy}");
}

/// The history, as soon as it has something.
fn history(admin: &AdminThread) -> serde_json::Value {
    let history = (0..100).map(|_| {
        std::thread::sleep(Duration::from_millis(20));
        let (status, history) = json(admin, "/history");
        assert_eq!((status, &history["schema"]), (200, &1.into()));
        history
    });
    let sampled = history.into_iter().find(|history| history["uptime_ms"][0] == 7_000);
    sampled.expect("a sample was taken")
}

/// Plots show what has been, so the gateway must keep it, and say when each number was true.
#[test]
fn history_is_kept_from_the_start() {
    assert_eq!(history(&start(&[]))["bytes_in"], serde_json::json!([99]));
}

/// A panic in what keeps the history left the page without plots until the next restart.
#[test]
fn history_goes_on_after_a_panic() {
    let still = Still { faults: AtomicU32::new(2), ..Still::default() };
    let admin = spawn("127.0.0.1:0".parse().unwrap(), Arc::new(still)).unwrap();
    assert_eq!(history(&admin)["bytes_in"], serde_json::json!([99]));
    assert_eq!(json(&admin, "/healthz").0, 200);
}

/// Clients that connect and say nothing, more than there are places, delay the others at most until
/// their deadline; and then they are thrown out.
#[test]
fn silent_clients_cannot_hold_the_endpoint() {
    let admin = start(&[]);
    let silent = (0..guard::CONNECTIONS_MAX + 5)
        .map(|_| {
            let mut stream = TcpStream::connect(admin.address()).unwrap();
            stream.write_all(b"GET /stats HT").unwrap();
            stream
        })
        .collect::<Vec<_>>();
    assert_eq!(json(&admin, "/healthz").0, 200);
    let mut first = &silent[0];
    first.set_read_timeout(Some(guard::LIFETIME * 4)).unwrap();
    let mut rest = Vec::new();
    // The server hangs up, with or without a word; a read that times out would be an error here.
    match first.read_to_end(&mut rest) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionReset),
    }
}

/// A second gateway on the same port must fail at once, and stopping the first makes room for it.
#[test]
fn the_address_is_refused_when_taken_and_free_after_stop() {
    let admin = start(&[]);
    let address = admin.address();
    let still = || Arc::new(Still::default());
    let error = spawn(address, still()).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    admin.stop();
    spawn(address, still()).unwrap();
}

/// A web page must not read the statistics of the host that shows it, by a name that its owner
/// makes lead there. Where others may ask, monitoring knows hosts by name.
#[test]
fn reads_name_an_address_where_only_this_host_can_ask() {
    for (listen, host, expected) in [
        ("127.0.0.1:0", "127.0.0.1:9180", 200),
        ("127.0.0.1:0", "localhost", 200),
        ("127.0.0.1:0", "[::1]:9180", 200),
        ("127.0.0.1:0", "localhost:9180", 200),
        ("127.0.0.1:0", "evil.example:9180", 403),
        ("0.0.0.0:0", "gateway.example:9180", 200),
    ] {
        let still = Arc::new(Still::default());
        let admin = spawn(listen.parse().unwrap(), still).unwrap();
        let here = SocketAddr::from(([127, 0, 0, 1], admin.address().port()));
        let mut stream = TcpStream::connect(here).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        write!(stream, "GET /stats HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let status: u16 = answer.split(' ').nth(1).unwrap().parse().unwrap();
        assert_eq!(status, expected, "{host} at {listen}: {answer}");
    }
}

/// An operator's command arrives; a web page's does not, whatever it calls this host.
#[test]
fn commands_come_as_json_to_an_address() {
    let admin = start(&[]);
    let here = admin.address().to_string();
    let body = |link| format!(r#"{{"do":"link_delete","link":{link},"orderly":true}}"#);
    let up = r#"{"do":"rnic_up","rnic":"r0"}"#.to_owned();
    for (host, kind, body, expected) in [
        (here.as_str(), "application/json", body(7), 200),
        (&here, "application/json", body(8), 404),
        (&here, "application/json", up, 409),
        (&here, "application/json", r#"{"do":"reboot"}"#.to_owned(), 422),
        (&here, "text/plain", body(7), 415),
        ("evil.example:80", "application/json", body(7), 403),
    ] {
        let mut stream = TcpStream::connect(admin.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let len = body.len();
        write!(
            stream,
            "POST /operate HTTP/1.1\r\nHost: {host}\r\nContent-Type: {kind}\r\n\
             Content-Length: {len}\r\nConnection: close\r\n\r\n{body}"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let status: u16 = answer.split(' ').nth(1).unwrap().parse().unwrap();
        assert_eq!(status, expected, "{host} {kind} {body}: {answer}");
    }
}
