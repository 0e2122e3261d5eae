//! What Prometheus makes of `/metrics`, and whether dashboard and alerts ask for what is there.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::clock::wait_until;
use crate::failure::assert_echo;
use crate::gateway::{Gateway, Pair, local};
use crate::hosts::{Hosts, accept};
use crate::process::run;

const PORT: u16 = 7010;
/// Nobody listens there.
const NOBODY: u16 = 7011;
const LIMIT: Duration = Duration::from_secs(20);

/// Asks `promtool check metrics` about a scrape. It has nothing to say about good ones.
fn assert_accepted(gateway: &Gateway<'_>) -> String {
    let metrics = gateway.get("/metrics");
    let mut command = Command::new("promtool");
    command.args(["check", "metrics"]).stdin(Stdio::piped());
    let mut checker = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("scripts/setup installs promtool");
    let mut input = checker.stdin.take().expect("it is a pipe");
    input.write_all(metrics.as_bytes()).expect("it reads");
    drop(input);
    let said = checker.wait_with_output().expect("it ends");
    let [out, err] = [&said.stdout, &said.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(said.status.success() && out.is_empty() && err.is_empty(), "{out}{err}\n{metrics}");
    metrics
}

/// The names of all metrics of a scrape, also of those that have no samples yet.
fn names(metrics: &str) -> BTreeSet<String> {
    let types = metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    let of = |(name, kind): (&str, &str)| match kind {
        "histogram" => ["_bucket", "_sum", "_count"].map(|end| format!("{name}{end}")).to_vec(),
        _ => vec![name.to_owned()],
    };
    types.flat_map(of).collect()
}

/// The names of our metrics in a text.
fn named(text: &str) -> BTreeSet<String> {
    let word = |letter: char| !(letter.is_ascii_lowercase() || letter == '_');
    let words = text.split(word).filter(|word| word.starts_with("smcgate_"));
    words.map(str::to_owned).collect()
}

fn packaging(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../packaging").join(path)
}

/// Prometheus takes what gateways say that have carried connections, and finds nothing to complain
/// about: no name, unit or help text. Dashboard and alerts name nothing that does not exist.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn promtool_accepts_metrics_and_everything_that_is_asked_for_is_there() {
    let hosts = Hosts::new("promtool_accepts_metrics_and_everything_that_is_asked_for_is_there");
    let near = Pair::client_side(&hosts, &[PORT]).towards(hosts.b.address, NOBODY);
    let pair = Pair::start_these(&hosts, near, Pair::server_side(&hosts, &[PORT]));
    let fresh = names(&assert_accepted(&pair.a));
    let listener = hosts.b.listen(local(PORT));
    let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
    let server = accept(&listener, LIMIT);
    assert_echo(&client, &server);
    drop((client, server));
    // It may be reset before it is known to be open.
    drop(hosts.a.connect(local(NOBODY)));
    wait_until("all are over", LIMIT, || {
        let active = pair.a.stats().active;
        active.smc + active.tcp + active.connecting == 0
    });
    let [metrics, far] = [&pair.a, &pair.b].map(assert_accepted);
    assert_eq!(names(&metrics), fresh, "names are there from the beginning");
    assert_eq!(names(&far), fresh);
    for sample in [
        "smcgate_connections_total{transport=\"smc-r\"} 1\n",
        "smcgate_connection_first_byte_seconds_count{listener=\"port-7010\",\
         transport=\"smc-r\"} 1\n",
        "smcgate_upstream_up{listener=\"port-7010\",upstream=\"10.8.0.2:7010\"} 1\n",
        "smcgate_rnic_up{rnic=\"soft0\"} 1\n",
        "smcgate_poller_connections_smc_total{poller=\"0\"} 1\n",
    ] {
        assert!(metrics.contains(sample), "{sample} in\n{metrics}");
    }
    for (file, least) in [("grafana/smcgate.json", 30), ("prometheus/alerts.yml", 12)] {
        let asked = named(&fs::read_to_string(packaging(file)).expect(file));
        let missing: Vec<_> = asked.difference(&fresh).collect();
        assert!(missing.is_empty() && asked.len() >= least, "{file}: {missing:?} of {asked:?}");
    }
    for (what, file) in [("check", "prometheus/alerts.yml"), ("test", "prometheus/alerts_test.yml")]
    {
        let mut command = Command::new("promtool");
        command.args([what, "rules"]).arg(packaging(file));
        run(&hosts, &hosts.a, what, LIMIT, &mut command).expect_success(file);
    }
}
