//! Programs that know nothing of SMC-R, over SMC-R.

use std::fs;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::gateway::{Pair, local};
use crate::hosts::Hosts;
use crate::process::{Process, run, wait_for_listener};

/// Time limit for one run of one program.
const LIMIT: Duration = Duration::from_secs(60);

/// Bulk transfer in both directions and in eight streams, as the usual first test of any network.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_iperf3() {
    const PORT: u16 = 5201;
    let hosts = Hosts::new("smoke_iperf3");
    let pair = Pair::start(&hosts, &[PORT]);
    for (name, arguments) in [
        ("iperf3-upload", &["-t", "2"][..]),
        ("iperf3-download", &["-t", "2", "-R"]),
        ("iperf3-eight", &["-t", "2", "-P", "8"]),
        ("iperf3-eight-download", &["-t", "2", "-P", "8", "-R"]),
        ("iperf3-both-ways", &["-t", "2", "--bidir"]),
    ] {
        // Each run has its own server: between two tests iperf3 does not listen for a moment.
        let mut server = Command::new("iperf3");
        server.args(["-s", "--one-off", "-B", "127.0.0.1", "--forceflush"]);
        let mut server = start_server(&hosts, PORT, &mut server);
        let mut client = Command::new("iperf3");
        client.args(["-c", "127.0.0.1", "-J"]).args(arguments);
        let report = run(&hosts, &hosts.a, name, LIMIT, &mut client).expect_success(name);
        let report: Value = serde_json::from_str(&report).expect("iperf3 -J prints JSON");
        assert_eq!(report.get("error"), None, "{name}");
        let received = report["end"]["sum_received"]["bytes"].as_u64();
        assert!(received.is_some_and(|bytes| bytes > 1 << 20), "{name}: {received:?} bytes");
        assert!(server.wait(LIMIT).success(), "{}", server.log());
    }
    // One control connection each, and the streams.
    pair.assert_all_smc(5 + 1 + 1 + 8 + 8 + 2);
}

/// Small requests, many at a time, and pipelined, as clients of caches send them.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_redis() {
    const PORT: u16 = 6379;
    let hosts = Hosts::new("smoke_redis");
    let pair = Pair::start(&hosts, &[PORT]);
    let directory = hosts.logs.to_str().expect("our own paths are text");
    let _server = start_server(
        &hosts,
        PORT,
        Command::new("redis-server")
            .args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
            .args(["--dir", directory]),
    );
    for (name, arguments) in [
        ("redis-one", &["-c", "1", "-n", "5000", "-t", "ping_mbulk,set,get"][..]),
        ("redis-fifty", &["-c", "50", "-n", "20000", "-t", "set,get,lrange_100"]),
        ("redis-pipelined", &["-c", "16", "-n", "50000", "-P", "16", "-t", "set,get"]),
        ("redis-big-values", &["-c", "8", "-n", "500", "-d", "300000", "-t", "set,get"]),
    ] {
        let mut client = Command::new("redis-benchmark");
        client.args(["-h", "127.0.0.1", "--csv"]).args(arguments);
        let report = run(&hosts, &hosts.a, name, LIMIT, &mut client).expect_success(name);
        let tests = arguments.last().map_or(0, |list| list.split(',').count());
        assert!(report.lines().count() > tests, "a header and {tests} lines:\n{report}");
        assert!(!report.to_lowercase().contains("error"), "{report}");
    }
    pair.assert_all_smc(1 + 50 + 16 + 8);
}

/// A web server behind the gateway, with connections that stay and with one per request.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_nginx() {
    const PORT: u16 = 8080;
    let hosts = Hosts::new("smoke_nginx");
    let pair = Pair::start(&hosts, &[PORT]);
    let _server = start_nginx(&hosts, PORT, "");
    let page = format!("http://{}/", local(PORT));
    for (name, header) in [("wrk-keep-alive", "Accept: */*"), ("wrk-close", "Connection: close")] {
        let mut client = Command::new("wrk");
        client.args(["-t", "2", "-c", "32", "-d", "3s", "--timeout", "20s", "--latency"]);
        client.args(["-H", header, &page]);
        let report = run(&hosts, &hosts.a, name, LIMIT, &mut client).expect_success(name);
        assert!(!report.contains("Socket errors"), "{name}:\n{report}");
        assert!(!report.contains("Non-2xx"), "{name}:\n{report}");
        assert!(report.contains(" requests in "), "{name}:\n{report}");
    }
    // The second run opens a connection per request; any machine manages a hundred.
    pair.assert_all_smc(32 + 100);

    let mut curl = Command::new("curl");
    curl.args(["--silent", "--show-error", "--fail", "--max-time", "20", &page]);
    let body = run(&hosts, &hosts.a, "curl", LIMIT, &mut curl).expect_success("curl");
    assert_eq!(body, PAGE);
}

const PAGE: &str = "What the web server has to say.\n";

/// A web server that reads PROXY headers must learn who its clients are, over SMC-R and over TCP,
/// in both versions.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_proxy_header() {
    const PORT: u16 = 8081;
    for version in ["proxy-v1", "proxy-v2"] {
        let hosts = Hosts::new(&format!("smoke_{version}"));
        let source = format!("source = \"{version}\"\n");
        let far = Pair::server_side(&hosts, &[PORT]).table(&source);
        let pair = Pair::start_these(&hosts, Pair::client_side(&hosts, &[PORT]), far);
        let _server = start_nginx(&hosts, PORT, "proxy_protocol");
        let ask = |name: &str, place: &str| {
            let mut curl = Command::new("curl");
            let page = format!("http://{place}/who");
            // Where curl itself has come from stands behind what the server says.
            curl.args(["--silent", "--show-error", "--fail", "--max-time", "20", &page]);
            curl.args(["--write-out", " %{local_ip}:%{local_port}"]);
            run(&hosts, &hosts.a, name, LIMIT, &mut curl).expect_success(name)
        };
        let said = ask("through-both", &local(PORT).to_string());
        let words: Vec<&str> = said.split(' ').collect();
        let client = format!("{}:", hosts.a.address);
        assert!(words[0].starts_with(&client), "the gateway of the clients: {said}");
        assert_eq!(words[1], hosts.b.at(PORT).to_string(), "{said}");
        pair.assert_all_smc(1);
        // Without a gateway at the clients' host it is TCP, and the client is curl itself.
        let said = ask("through-one", &hosts.b.at(PORT).to_string());
        let words: Vec<&str> = said.split(' ').collect();
        assert_eq!((words[0], words[1]), (words[2], hosts.b.at(PORT).to_string().as_str()));
    }
}

/// nginx in the foreground, with everything it writes below the test's own directory; `options` are
/// those of its listener. At `/who` it says who has connected to where, as a PROXY header told it.
pub(crate) fn start_nginx(hosts: &Hosts, port: u16, options: &str) -> Process {
    let directory = hosts.logs.join("nginx");
    fs::create_dir_all(directory.join("html")).expect("the directory is ours");
    fs::write(directory.join("html/index.html"), PAGE).expect("the directory is ours");
    let place = directory.to_str().expect("our own paths are text");
    let config = format!(
        "daemon off; user root; pid {place}/nginx.pid; worker_processes 1;\n\
         error_log {place}/error.log;\n\
         events {{ worker_connections 4096; }}\n\
         http {{ access_log off; keepalive_requests 1000000;\n\
           client_body_temp_path {place}/body; proxy_temp_path {place}/proxy;\n\
           fastcgi_temp_path {place}/fastcgi; uwsgi_temp_path {place}/uwsgi;\n\
           scgi_temp_path {place}/scgi;\n\
           server {{ listen 127.0.0.1:{port} backlog=4096 {options}; root {place}/html;\n\
             location /who {{ return 200 \"$proxy_protocol_addr:$proxy_protocol_port \
               $proxy_protocol_server_addr:$proxy_protocol_server_port\"; }} }}\n\
         }}\n"
    );
    let file = directory.join("nginx.conf");
    fs::write(&file, config).expect("the directory is ours");
    start_server(hosts, port, Command::new("nginx").arg("-p").arg(&directory).arg("-c").arg(&file))
}

/// Starts a server on host b and waits until it listens.
fn start_server(hosts: &Hosts, port: u16, command: &mut Command) -> Process {
    let name = command.get_program().to_string_lossy().into_owned();
    let server = Process::start(&hosts.b, &hosts.logs, &name, command);
    wait_for_listener(&hosts.b, local(port));
    server
}
