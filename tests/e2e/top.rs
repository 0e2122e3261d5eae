//! `smcgate top` in a terminal, as an operator sees it.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use smcgate::tools::units;

use crate::clock::wait_until;
use crate::failure::assert_echo;
use crate::gateway::{Pair, local, program};
use crate::hosts::{Host, Hosts, accept};
use crate::process::{Finished, run};

const PORT: u16 = 7010;
/// A port whose server has no SMC-R.
const PLAIN_PORT: u16 = 7011;
const LIMIT: Duration = Duration::from_secs(15);

/// The figures are those of `/stats`; the gateway may go away and come back; and however it ends,
/// the terminal works as before.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn top_shows_the_gateway_in_a_terminal() {
    let hosts = Hosts::new("top_shows_the_gateway_in_a_terminal");
    let near = || Pair::client_side(&hosts, &[PORT]).towards(hosts.b.address, PLAIN_PORT);
    let pair = Pair::start_these(&hosts, near(), Pair::server_side(&hosts, &[PORT]));
    let (server, plain) = (hosts.b.listen(local(PORT)), hosts.b.listen(hosts.b.at(PLAIN_PORT)));
    let open = |listener, port| {
        let client = hosts.a.connect(local(port)).expect("the gateway listens");
        let server = accept(listener, LIMIT);
        assert_echo(&client, &server);
        (client, server)
    };
    let connections = [open(&server, PORT), open(&server, PORT), open(&plain, PLAIN_PORT)];
    let terminal = Terminal::start(&hosts, &hosts.a);
    terminal.shows("live");
    compare(&terminal, &pair);

    // Each letter asks anew.
    terminal.press("1");
    terminal.press("/");
    terminal.press("NO_SMC");
    let wanted = |text: &str| text.contains("port-7011") && !text.contains("port-7010");
    wait_until("the filter leaves one", LIMIT, || wanted(&terminal.text()));
    terminal.press("Escape");
    terminal.shows("port-7010");

    drop(connections);
    let Pair { a, b } = pair;
    drop(a);
    terminal.shows("NO ANSWER");
    let again = near().start(&hosts, &hosts.a);
    wait_until("it is back", LIMIT, || {
        let text = terminal.text();
        text.contains("live") && !text.contains("NO ANSWER")
    });
    drop((again, b));

    terminal.press("q");
    terminal.is_as_before(0);
    terminal.press("again");
    terminal.press("Enter");
    terminal.shows("q quit");
    terminal.terminate();
    terminal.is_as_before(0);
}

/// Every pane against the documents of the gateway. Nothing moves meanwhile.
fn compare(terminal: &Terminal<'_>, pair: &Pair<'_>) {
    let document = |path| serde_json::from_str::<Value>(&pair.a.get(path)).expect("JSON");
    let (stats, page) = (document("/stats"), document("/connections"));
    let count = |value: &Value| units::count(value.as_u64().expect("a count"));
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    let bytes = |value: &Value| units::bytes(value.as_f64().expect("a count"));
    let totals = &stats["totals"];
    terminal.press("1");
    terminal.shows(&format!(
        "open {} smc-r, {} tcp",
        count(&stats["active"]["smc"]),
        count(&stats["active"]["tcp"])
    ));
    terminal.shows(&format!(
        "since the start {} smc-r, {} tcp, of which {} fell back",
        count(&totals["connections_smc"]),
        count(&totals["connections_tcp"]),
        count(&stats["fallbacks"][0]["count"])
    ));
    terminal.shows(&format!("{} in all", bytes(&totals["bytes_in"])));
    let rows = page["connections"].as_array().expect("a list");
    assert_eq!(rows.len(), 3);
    for row in rows {
        let [over, state, listener] = ["transport", "state", "listener"].map(|key| text(&row[key]));
        let words = [over, state, listener, text(&row["app"]), text(&row["peer"])];
        let sizes = ["bytes_in", "bytes_out"].map(|key| bytes(&row[key]));
        terminal.shows_row(&[&words[..], &sizes].concat());
    }
    let (group, link) = (&stats["link_groups"][0], &stats["link_groups"][0]["links"][0]);
    terminal.press("2");
    terminal.shows_row(&[
        count(&group["id"]),
        text(&group["v2"]["peer_host"]),
        text(&group["role"]),
        format!("{}.{}", group["version"], group["v2"]["release"]),
        count(&link["number"]),
        text(&link["state"]),
        text(&link["rnic"]),
        format!("{}-{}", link["qpn"], link["peer_qpn"]),
        text(&link["peer_gid"]),
        count(&link["connections"]),
    ]);
    terminal.press("3");
    for row in stats["listeners"].as_array().expect("a list") {
        let words = ["name", "state", "bind", "accept", "connect"].map(|key| text(&row[key]));
        let counts = ["active", "accepted", "refused"].map(|key| count(&row[key]));
        let target = &row["upstreams"][0];
        let target = [text(&target["address"]), text(&target["state"]), count(&target["active"])];
        terminal.shows_row(&[&words[..], &counts, &target].concat());
    }
    terminal.press("4");
    terminal.shows(&text(&stats["pollers"][0]["placement"]));
    terminal.press("5");
    let rnic = &stats["rnics"][0];
    let words = ["name", "state", "kind", "device", "gid"].map(|key| text(&rnic[key]));
    terminal.shows_row(&[&words[..], &[count(&rnic["links"]), count(&rnic["mtu"])]].concat());
    terminal.press("6");
    let reason = &stats["fallbacks"][0];
    let code = format!("{:#010x}", reason["code"].as_u64().expect("a code"));
    let words = [text(&reason["name"]), code, count(&reason["count"]), text(&reason["meaning"])];
    terminal.shows_row(&words);
    terminal.shows(&format!("→ {}", text(&reason["remedy"])));
}

/// A terminal on a host that runs `top` each time somebody enters a line.
struct Terminal<'h> {
    hosts: &'h Hosts,
    host: &'h Host,
    socket: String,
}

impl<'h> Terminal<'h> {
    fn start(hosts: &'h Hosts, host: &'h Host) -> Self {
        let socket = hosts.logs.join("tmux").display().to_string();
        let terminal = Self { hosts, host, socket };
        // Afterwards it says how the program ended, and whether the terminal echoes again.
        let script = format!(
            "while :; do echo before; {} top --interval 0.3; \
             echo ended with $?, $(stty -a | tr ' ;' '\\n\\n' | grep -cx -e icanon -e echo) of 2; \
             read line; done",
            program().display()
        );
        let size = ["-x", "190", "-y", "30"];
        let session = ["-f", "/dev/null", "new-session", "-d"];
        terminal.tmux(&[&session[..], &size, &["sh", "-c", &script]].concat());
        terminal
    }

    fn tmux(&self, arguments: &[&str]) -> String {
        self.try_tmux(arguments).expect_success("tmux")
    }

    fn try_tmux(&self, arguments: &[&str]) -> Finished {
        let mut command = Command::new("tmux");
        command.args(["-u", "-S", &self.socket]).args(arguments).env("TERM", "xterm-256color");
        for file in ["tmux-command.out", "tmux-command.log"] {
            // What it said before is not of interest. The first time there is none.
            drop(std::fs::remove_file(self.hosts.logs.join(file)));
        }
        run(self.hosts, self.host, "tmux-command", LIMIT, &mut command)
    }

    /// What is on the screen.
    fn text(&self) -> String {
        self.tmux(&["capture-pane", "-p"])
    }

    /// Types a text, or the key of that name.
    fn press(&self, keys: &str) {
        self.tmux(&["send-keys", keys]);
    }

    fn shows(&self, words: &str) {
        wait_until(&format!("the terminal shows {words:?}"), LIMIT, || self.text().contains(words));
    }

    /// Waits until a line has these cells, in this order, and nothing between them.
    fn shows_row(&self, cells: &[String]) {
        let wanted = cells.join(" ");
        wait_until(&format!("a row is {wanted:?}"), LIMIT, || {
            self.text().lines().any(|line| {
                line.split_whitespace().collect::<Vec<_>>().join(" ").starts_with(&wanted)
            })
        });
    }

    /// Ends what runs in the terminal by SIGTERM.
    fn terminate(&self) {
        let shell = self.tmux(&["display-message", "-p", "#{pane_pid}"]);
        let mut command = Command::new("pkill");
        command.args(["-TERM", "-P", shell.trim()]);
        run(self.hosts, self.host, "pkill", LIMIT, &mut command).expect_success("pkill");
    }

    /// Waits until the program has ended so, and the terminal shows what it showed before.
    fn is_as_before(&self, code: i32) {
        self.shows(&format!("ended with {code}, 2 of 2"));
        assert!(self.text().contains("before"), "{}", self.text());
    }
}

impl Drop for Terminal<'_> {
    fn drop(&mut self) {
        drop(self.try_tmux(&["kill-server"]));
    }
}
