//! Proxies in front of a gateway, which say for whom they are.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::process::Command;
use std::thread;
use std::time::Duration;

use crate::gateway::{Setup, local};
use crate::hosts::{Hosts, accept, set_limit};
use crate::process::{Process, run, wait_for_listener};
use crate::programs::start_nginx;

const PORT: u16 = 8081;
const FRONT: u16 = 8090;
const LIMIT: Duration = Duration::from_secs(20);

/// The listener of host b, which trusts `from`.
fn behind(hosts: &Hosts, from: &str, more: &str) -> Setup {
    Setup::new("gateway-b", &hosts.b).table(&format!(
        "[[listener]]\nname = \"web\"\nbind = \"{}\"\nupstream = \"{}\"\nproxy_from = [{from}]\n\
         {more}\n",
        hosts.b.at(PORT),
        local(PORT)
    ))
}

/// HAProxy before a gateway before nginx: the web server learns who HAProxy's client is, and where
/// it wanted to go.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_a_client_of_haproxy_is_known_to_nginx() {
    for (send, source) in [("send-proxy", "proxy-v2"), ("send-proxy-v2", "proxy-v1")] {
        let hosts = Hosts::new(&format!("smoke_behind_haproxy_{send}"));
        let from = format!("\"{}/32\"", hosts.a.address);
        let gateway = behind(&hosts, &from, &format!("source = \"{source}\"\nmax_per_source = 1"));
        let gateway = gateway.start(&hosts, &hosts.b);
        let _nginx = start_nginx(&hosts, PORT, "proxy_protocol");
        let config = format!(
            "defaults\n mode tcp\n timeout connect 5s\n timeout client 20s\n timeout server 20s\n\
             listen web\n bind {}\n server it {} {send}\n",
            local(FRONT),
            hosts.b.at(PORT)
        );
        let file = hosts.logs.join("haproxy.cfg");
        fs::write(&file, config).expect("the directory is ours");
        let mut haproxy = Command::new("haproxy");
        haproxy.arg("-db").arg("-f").arg(&file);
        let _haproxy = Process::start(&hosts.a, &hosts.logs, "haproxy", &mut haproxy);
        wait_for_listener(&hosts.a, local(FRONT));
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--show-error", "--fail", "--max-time", "20"]);
        curl.arg(format!("http://{}/who", local(FRONT)));
        // Where curl itself has come from stands behind what the server says.
        curl.args(["--write-out", " %{local_ip}:%{local_port}"]);
        let said = run(&hosts, &hosts.a, "curl", LIMIT, &mut curl).expect_success("curl");
        let words: Vec<&str> = said.split(' ').collect();
        assert_eq!((words[0], words[1]), (words[2], local(FRONT).to_string().as_str()), "{said}");
        drop(gateway);
    }
}

/// A header may come in pieces, with the first bytes of the client behind it; who is not trusted
/// says nothing of the kind; and who is trusted, but talks nonsense or nothing, is reset.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn headers_of_proxies_are_read_as_they_come() {
    let hosts = Hosts::new("headers_of_proxies_are_read_as_they_come");
    let trusted = behind(&hosts, "\"10.8.0.0/24\"", "")
        .listener((local(PORT + 1), "tcp"), (local(PORT), "tcp"));
    let gateway = trusted.start(&hosts, &hosts.b);
    let server = hosts.b.listen(local(PORT));
    let connect = || {
        let client = hosts.a.connect(hosts.b.at(PORT)).expect("the gateway listens");
        client.set_nodelay(true).expect("a socket");
        set_limit(&client, LIMIT);
        client
    };
    let mut client = connect();
    for piece in [b"PRO".as_slice(), b"XY TCP4 192.0.2.7 192.0.2.8 77 ", b"88\r\nfirst"] {
        client.write_all(piece).expect("it is up");
        thread::sleep(Duration::from_millis(20));
    }
    let mut served = accept(&server, LIMIT);
    let mut first = [0; 5];
    served.read_exact(&mut first).expect("it is up");
    assert_eq!(&first, b"first");
    let row = gateway.get("/connections");
    assert!(row.contains("192.0.2.7:77"), "{row}");

    // A listener without trusted proxies takes the same bytes for those of the application.
    let mut plain = hosts.b.connect(local(PORT + 1)).expect("the gateway listens");
    set_limit(&plain, LIMIT);
    plain.write_all(b"PROXY").expect("it is up");
    let mut served_plain = accept(&server, LIMIT);
    served_plain.read_exact(&mut first).expect("it is up");
    assert_eq!(&first, b"PROXY");

    let mut nonsense = connect();
    nonsense.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("it is up");
    let silent = connect();
    for mut client in [nonsense, silent] {
        let error = client.read(&mut [0]).expect_err("a reset");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
    // A health check that only connects.
    drop(connect());
    drop((plain, served_plain, client, served));
    gateway.holdings_at_rest();
}
