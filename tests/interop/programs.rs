//! Programs that know nothing of SMC: their stream sockets are made ones of AF_SMC by a preload.

use crate::hosts::Hosts;
use crate::place::Place;
use crate::process::Process;
use crate::rig::{EID, Rig};

/// What users run must work over the kernels' SMC-R here before it can be asked of our gateway.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn programs_over_smc_r() {
    let hosts = Hosts::new("programs_over_smc_r");
    let rig = Rig::new(&hosts);
    rig.one.speak_smc(EID);
    rig.two.speak_smc(EID);

    let _iperf3 = rig.two.serve(5201, &["iperf3", "--server", "--one-off"]);
    let said = rig.one.run_over_smc(&["iperf3", "--client", "10.9.0.12", "--bytes", "8M"]);
    assert!(said.contains("receiver"), "{said}");

    let _redis = rig.two.serve(6379, &["redis-server", "--save", "", "--protected-mode", "no"]);
    let words = "redis-benchmark -h 10.9.0.12 -t set,get -n 500 -c 10 -q";
    let said = rig.one.run_over_smc(&words.split(' ').collect::<Vec<_>>());
    assert!(said.contains("SET: ") && said.contains("GET: "), "{said}");

    rig.two.run(&["sh", "-ec", NGINX_FILES]);
    let _nginx = rig.two.serve(8080, &["nginx", "-p", "/tmp/web", "-c", "/tmp/web/nginx.conf"]);
    let words = ["curl", "--silent", "--show-error", "--fail", "-H", "Connection: close"];
    let pages = "http://10.9.0.12:8080/[1-200]";
    let said = rig.one.run_over_smc(&[&words, &[pages][..]].concat());
    assert_eq!(said, PAGE.repeat(200));

    // The clients' kernel has set up these at least, and nothing but connections over SMC-R.
    let [ours, others] = rig.one.counted("client-v2");
    assert!(ours >= 2 + 2 * 10 + 200 && others == 0, "{ours} over SMC-R, {others} not");
    let [ours_too, others] = rig.two.counted("server-v2");
    assert_eq!((ours_too, others), (ours, 0));
    rig.assert_quiet_kernels();
}

const PAGE: &str = "What the web server has to say.\n";

/// A web server in the foreground, with everything it writes below a folder of its own.
const NGINX_FILES: &str = "\
    mkdir -p /tmp/web\n\
    cat >/tmp/web/nginx.conf <<END\n\
    daemon off; user root; pid /tmp/web/pid; error_log stderr; worker_processes 1;\n\
    events { worker_connections 512; }\n\
    http {\n\
        access_log off; client_body_temp_path /tmp/web/b; proxy_temp_path /tmp/web/p;\n\
        fastcgi_temp_path /tmp/web/f; uwsgi_temp_path /tmp/web/u; scgi_temp_path /tmp/web/s;\n\
        server { listen 8080; return 200 'What the web server has to say.\\n'; }\n\
    }\n\
    END\n";

impl Place<'_> {
    /// Starts a server whose stream sockets are ones of AF_SMC, and waits until it listens.
    fn serve(&self, port: u16, words: &[&str]) -> Process {
        let server = self.start_over_smc(words);
        let listens = format!("until ss -Hltn 'sport = :{port}' | grep -q .; do sleep 0.1; done");
        self.run(&["sh", "-c", &listens]);
        server
    }

    /// How many connections this guest's kernel has set up in this way, and how many in others or
    /// not at all.
    fn counted(&self, way: &str) -> [u64; 2] {
        let mut counted = [0, 0];
        for line in self.tool(&["counts"]) {
            let (name, count) = line.rsplit_once(' ').expect("the form of a count");
            counted[usize::from(name != way)] += count.parse::<u64>().expect("a number");
        }
        counted
    }
}
