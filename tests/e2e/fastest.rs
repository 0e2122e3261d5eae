//! Acceleration that is slower than TCP: gateways notice, and use what is faster.

use std::io::Read;
use std::net::TcpStream;
use std::process::Command;
use std::thread;
use std::time::Duration;

use serde_json::Value;

use crate::clock::{now, wait_until};
use crate::gateway::{Gateway, Pair, Setup, local, smcgate};
use crate::hosts::{Host, Hosts, set_limit};
use crate::pattern;

const PORT: u16 = 7010;
/// Bytes of one connection.
const LEN: u64 = 300 << 10;
/// How many clients download at once.
const CLIENTS: usize = 4;
const LIMIT: Duration = Duration::from_secs(20);
/// How soon new connections are TCP after SMC-R has become slow, and SMC-R after that has ended.
const NOTICE_LIMIT: Duration = Duration::from_secs(45);

/// A switch that polices RoCE, as one does whose queue for it is too short: connections go over TCP
/// within seconds, for a reason of its own, and back when it has ended. All bytes are right.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn what_is_faster_is_used() {
    let hosts = Hosts::new("what_is_faster_is_used");
    let pair = start(&hosts, "prefer = \"fastest\"\ncompare_every = 10");
    assert!(smc_of_the_next(&hosts, &pair.a, 3) >= 6, "{}", fallbacks(&pair.a));

    let slow = now();
    police(&hosts.a, "udp dport 4791");
    wait_until("TCP is used", NOTICE_LIMIT, || smc_of_the_next(&hosts, &pair.a, 3) <= 1);
    let noticed = now() - slow;
    assert_ne!(peer(&pair.a)["slower"], "", "{}", peer(&pair.a));
    assert!(fallbacks(&pair.a).contains("TCP_IS_FASTER"), "{}", fallbacks(&pair.a));

    // On a busy host with two cores either may be faster, so TCP is slow from now on.
    let fast = now();
    unpolice(&hosts.a, "udp dport 4791");
    police(&hosts.a, "tcp sport 7010");
    wait_until("SMC-R is used", NOTICE_LIMIT, || smc_of_the_next(&hosts, &pair.a, 3) >= 10);
    assert_eq!(peer(&pair.a)["slower"], "");
    println!("noticed within {noticed:?}, and back within {:?}", now() - fast);
}

fn start<'h>(hosts: &'h Hosts, keys: &str) -> Pair<'h> {
    let listener = hosts.b.listen(local(PORT));
    thread::spawn(move || {
        while let Ok((mut client, _)) = listener.accept() {
            // The client judges what arrives.
            thread::spawn(move || drop(pattern::send(&mut client, 7, LEN)));
        }
    });
    let near = Setup::new("gateway-a", &hosts.a).table(&format!(
        "[[listener]]\nname = \"it\"\nbind = \"{}\"\nconnect = \"smc\"\n\
         upstream = \"{}\"\n{keys}\n",
        local(PORT),
        hosts.b.at(PORT)
    ));
    Pair::start_these(hosts, near, Pair::server_side(hosts, &[PORT]))
}

/// Has each client download `count` times, one after the other.
fn download(hosts: &Hosts, count: usize) {
    let one = || {
        let mut server: TcpStream = hosts.a.connect(local(PORT)).expect("the gateway listens");
        set_limit(&server, LIMIT);
        let digest = pattern::receive(&mut server).expect("no reset");
        let mut sent = Vec::new();
        assert_eq!(pattern::send(&mut sent, 7, LEN).expect("memory"), digest);
        assert_eq!(server.read(&mut [0]).expect("an end"), 0);
    };
    thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| (0..count).for_each(|_| one()));
        }
    });
}

/// How many of the next downloads are carried by SMC-R.
fn smc_of_the_next(hosts: &Hosts, gateway: &Gateway<'_>, count: usize) -> u64 {
    let before = gateway.stats().totals.connections_smc;
    download(hosts, count);
    gateway.stats().totals.connections_smc - before
}

/// What the gateway knows of the other one.
fn peer(gateway: &Gateway<'_>) -> Value {
    let stats: Value = serde_json::from_str(&gateway.get("/stats")).expect("JSON");
    stats["peers"][0].clone()
}

fn fallbacks(gateway: &Gateway<'_>) -> String {
    format!("{:?}", gateway.stats().fallbacks)
}

/// Has `host` drop what comes too fast of these packets.
fn police(host: &Host, what: &str) {
    let table = table(what);
    nft(
        host,
        &format!(
            "add table inet {table}\n\
             add chain inet {table} in {{ type filter hook input priority 0; }}\n\
             add rule inet {table} in {what} limit rate over 1 mbytes/second drop\n"
        ),
    );
}

fn unpolice(host: &Host, what: &str) {
    nft(host, &format!("delete table inet {}\n", table(what)));
}

fn table(what: &str) -> String {
    what.replace(' ', "_")
}

fn nft(host: &Host, rules: &str) {
    let run = || Command::new("nft").arg(rules).output();
    let output = host.enter(run).expect("scripts/setup installs nft");
    assert!(output.status.success(), "{rules}: {}", String::from_utf8_lossy(&output.stderr));
}

/// An operator asks whether acceleration pays: both transports side by side, with the gateway at
/// the far end, and in words what is wrong where nobody measures or SMC-R is not used.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_doctor_measures_with_a_peer() {
    let hosts = Hosts::new("smoke_doctor_measures_with_a_peer");
    let far = Setup::new("gateway-b", &hosts.b).table(&format!(
        "[[listener]]\nname = \"measure\"\nbind = \"{}\"\naccept = \"smc\"\n\
         upstream = \"measure\"\n[[listener]]\nname = \"other\"\nbind = \"{}\"\n\
         accept = \"smc\"\nupstream = \"127.0.0.1:9\"\n",
        hosts.b.at(PORT),
        hosts.b.at(PORT + 1)
    ));
    let pair = Pair::start_these(&hosts, Pair::client_side(&hosts, &[PORT]), far);
    let peer = hosts.b.at(PORT).to_string();
    let ask = |name: &str, more: &[&str]| {
        smcgate(&hosts, name, &[&["doctor", "--peer", &peer], more].concat())
    };
    let asked = ask("doctor-json", &["--json"]);
    let report: Value = serde_json::from_str(&asked.stdout).expect("JSON");
    assert_eq!(report["fallback"], Value::Null, "{report}");
    for transport in ["smc", "tcp"] {
        for figure in ["round_trip_ns_p50", "up_bytes_per_s", "down_bytes_per_s"] {
            assert!(report[transport][figure].as_u64() > Some(1_000), "{report}");
        }
    }
    let is_slower = report["slower"] != Value::Array(Vec::new());
    assert_eq!(asked.status.code(), Some(i32::from(is_slower)), "{report}");
    let totals = pair.b.stats().totals;
    assert!(totals.connections_smc > 9 && totals.connections_tcp >= 9, "{totals:?}");

    let other = hosts.b.at(PORT + 1).to_string();
    let asked = smcgate(&hosts, "doctor-other", &["doctor", "--peer", &other]);
    assert_eq!(asked.status.code(), Some(1), "{}", asked.stdout);
    assert!(asked.stderr.contains("nobody measures"), "{}", asked.stderr);
}
