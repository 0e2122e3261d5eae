//! Programs that know nothing of SMC. In a guest, a preloaded library turns their stream sockets
//! into AF_SMC sockets.

use std::fs;
use std::time::Duration;

use crate::hosts::Hosts;
use crate::rig::Rig;
use crate::testbed::{Pairing, Testbed};

const IPERF3: u16 = 5201;
const REDIS: u16 = 6379;
const WEB: u16 = 8080;

/// How long a server may take to end after its last client.
const LIMIT: Duration = Duration::from_secs(30);

/// If these programs did not work over SMC-R between two kernels, we could not ask it of our
/// gateway.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn programs_from_linux_to_linux() {
    programs(Pairing::LinuxToLinux);
}

/// iperf3 each way, redis-benchmark, and a web server with 200 short connections.
pub(crate) fn programs(pairing: Pairing) {
    let hosts = Hosts::new(&format!("programs-{pairing:?}"));
    let rig = Rig::new(&hosts);
    let testbed = Testbed::open(&rig, &hosts, pairing, &[IPERF3, REDIS, WEB]);
    let near = testbed.target(0).ip().to_string();
    let far = testbed.server_address(0).ip().to_string();

    for direction in [&[][..], &["--reverse"]] {
        // Each run has its own server: between two tests iperf3 does not listen for a moment.
        let mut iperf3 =
            testbed.serve(IPERF3, &["iperf3", "--server", "--one-off", "--bind", &far]);
        let words = ["iperf3", "--client", &near, "--bytes", "8M", "--json"];
        let said = testbed.run(&[&words, direction].concat());
        let report: serde_json::Value = serde_json::from_str(&said).expect("iperf3 prints JSON");
        let received = report["end"]["sum_received"]["bytes"].as_u64();
        // iperf3 does not count bytes that are on their way when the sender ends.
        assert!(received.is_some_and(|bytes| bytes > 1 << 20), "{said}");
        assert!(iperf3.wait(LIMIT).success(), "{}", iperf3.log());
    }

    let words = ["redis-server", "--bind", &far, "--save", "", "--protected-mode", "no"];
    let _redis = testbed.serve(REDIS, &words);
    let words = format!("redis-benchmark -h {near} -t set,get -n 500 -c 10 -q");
    let said = testbed.run(&words.split(' ').collect::<Vec<_>>());
    assert!(said.contains("SET: ") && said.contains("GET: "), "{said}");

    // Guests can read this machine's files; what they write stays in the guest.
    let folder = hosts.logs.to_str().expect("our own paths are text");
    let configuration = hosts.logs.join("nginx.conf");
    fs::write(&configuration, nginx(&far)).expect("the directory is ours");
    let configuration = configuration.to_str().expect("our own paths are text");
    let _nginx = testbed.serve(WEB, &["nginx", "-e", "stderr", "-p", folder, "-c", configuration]);
    let words = ["curl", "--silent", "--show-error", "--fail", "-H", "Connection: close"];
    let pages = format!("http://{near}:{WEB}/[1-200]");
    let said = testbed.run(&[&words, &[&*pages][..]].concat());
    assert_eq!(said, PAGE.repeat(200));

    // A control connection and a stream, twice; two times ten, and one that asks for settings.
    testbed.assert_all_smc(2 * 2 + 2 * 10 + 1 + 200);
    rig.assert_quiet_kernels();
}

const PAGE: &str = "What the web server has to say.\n";

/// A web server in the foreground, with everything it writes below its own folder.
fn nginx(address: &str) -> String {
    format!(
        "daemon off; master_process off; pid pid; error_log stderr;\n\
         events {{ worker_connections 512; }}\n\
         http {{\n\
             access_log off;\n\
             client_body_temp_path temporary; proxy_temp_path temporary;\n\
             fastcgi_temp_path temporary; uwsgi_temp_path temporary; scgi_temp_path temporary;\n\
             server {{\n\
                 listen {address}:{WEB};\n\
                 return 200 'What the web server has to say.\\n';\n\
             }}\n\
         }}\n"
    )
}
