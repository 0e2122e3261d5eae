//! Interception by nftables: one table, and two routing rules (for IPv4 and IPv6), all of which can
//! be told from others' and removed without knowing how they came to be.
//!
//! ```text
//!   applications of this host: output ─► NAT ─────────────► listener     (redirect)
//!   other hosts: prerouting ─► NAT, or TPROXY and a mark ─► listener     (redirect, tproxy)
//! ```

use std::fmt::Write as _;
use std::fs;
use std::io::{ErrorKind, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::process::{Command, Stdio};

use crate::config::{Intercept, InterceptWay, Listener, Protocol, SourceAddress};
use crate::listener::OWN_MARK;

/// The rules that one configuration needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Rules that catch connections of applications of this host.
    output: String,
    /// Rules that catch connections of other hosts, by NAT.
    nat: String,
    /// The same, by TPROXY.
    tproxy: String,
    /// Whether connections of applications of this host pass by NAT: those that were led to us
    /// would end without it.
    at_output: bool,
    /// Whether connections of other hosts do.
    at_prerouting: bool,
    /// Whether packets for addresses that are not ours come to our sockets.
    routes: bool,
}

impl Rules {
    /// What these listeners need; none if they need no rules.
    pub fn of<'a>(listeners: impl IntoIterator<Item = &'a Listener>) -> Option<Self> {
        let mut rules = Self {
            output: String::new(),
            nat: String::new(),
            tproxy: String::new(),
            at_output: false,
            at_prerouting: false,
            routes: false,
        };
        for listener in listeners {
            rules.routes |= listener.source == SourceAddress::Client;
            let Some(intercept) = &listener.intercept else { continue };
            match intercept.way {
                InterceptWay::Ebpf => {}
                InterceptWay::Redirect => rules.redirect(listener, intercept),
                InterceptWay::Tproxy => rules.tproxy(listener, intercept),
            }
        }
        rules.at_output = !rules.output.is_empty();
        rules.at_prerouting = !rules.nat.is_empty();
        let is_empty = !rules.at_output && !rules.at_prerouting && rules.tproxy.is_empty();
        (!is_empty || rules.routes).then_some(rules)
    }

    /// The same rules, for a host where `before` were in force: connections that came by those go
    /// on.
    #[must_use]
    pub fn after(self, before: &Self) -> Self {
        Self {
            at_output: self.at_output || before.at_output,
            at_prerouting: self.at_prerouting || before.at_prerouting,
            routes: self.routes || before.routes,
            ..self
        }
    }

    /// What is left of them when nothing is caught any more.
    pub fn idle(&self) -> Self {
        let [output, nat, tproxy] = [const { String::new() }; 3];
        Self { output, nat, tproxy, ..*self }
    }

    fn redirect(&mut self, listener: &Listener, intercept: &Intercept) {
        let to = listener.bind;
        // The address of a device, or 127.0.0.1, where the listener is at all addresses.
        let nat = match to {
            _ if to.ip().is_unspecified() => format!("redirect to :{}", to.port()),
            SocketAddr::V4(to) => format!("dnat ip to {to}"),
            SocketAddr::V6(to) => format!("dnat ip6 to {to}"),
        };
        for (_, which) in matches(intercept, to) {
            if listener.accept == Protocol::Tcp {
                let others = "fib daddr type != local";
                let _ = writeln!(self.output, "meta mark != {OWN_MARK:#x} {others} {which} {nat}");
            }
            // Packets that come from a wire are not led to the loopback device.
            if !to.ip().is_loopback() {
                let _ = writeln!(self.nat, "{} {which} {nat}", from_outside(listener));
            }
        }
    }

    fn tproxy(&mut self, listener: &Listener, intercept: &Intercept) {
        self.routes = true;
        let to = listener.bind;
        let at = match to.ip().is_unspecified() {
            true => format!(":{}", to.port()),
            false => to.to_string(),
        };
        let (from, marked) = (from_outside(listener), format!("meta mark set {ROUTE_MARK:#x}"));
        for (family, which) in matches(intercept, to) {
            let give = format!("tproxy {family} to {at}");
            let _ = writeln!(self.tproxy, "{from} {which} {give} {marked} accept");
        }
    }

    /// The script for `nft -f`. It replaces what is there at once.
    pub fn script(&self) -> String {
        let mut text = format!("{ANEW}table inet {TABLE} {{\n");
        let mut chain = |name: &str, head: &str, rules: &str| {
            let _ = writeln!(text, "  chain {name} {{");
            for line in head.lines().chain(rules.lines()) {
                let _ = writeln!(text, "    {line}");
            }
            text.push_str("  }\n");
        };
        for (name, rules) in
            [(CATCHING[0], &self.output), (CATCHING[1], &self.nat), (CATCHING[2], &self.tproxy)]
        {
            chain(name, "", rules);
        }
        if self.at_output {
            let head = "type nat hook output priority -100; policy accept;";
            chain("output_nat", head, "jump catch_output");
        }
        if self.at_prerouting {
            let head = "type nat hook prerouting priority dstnat; policy accept;";
            chain("prerouting_nat", head, "jump catch_nat");
        }
        if self.routes {
            let head = "type filter hook prerouting priority mangle; policy accept;";
            let divert = format!(
                "iif != lo meta l4proto tcp socket transparent 1 fib daddr type != local meta mark \
                 set {ROUTE_MARK:#x} accept\njump catch_tproxy"
            );
            chain("prerouting_route", head, &divert);
            // What a server on this host answers to whom we speak for must come to us.
            let head = "type route hook output priority mangle; policy accept;";
            let back = format!(
                "meta mark {OWN_MARK:#x} fib saddr type != local fib daddr type local ct mark set \
                 {ROUTE_MARK:#x}\nct direction reply ct mark {ROUTE_MARK:#x} meta mark set \
                 {ROUTE_MARK:#x}"
            );
            chain("output_route", head, &back);
        }
        text.push_str("}\n");
        text
    }

    /// The commands that bring the rules into force, as a shell would take them.
    pub fn commands(&self) -> String {
        let mut text = format!("nft -f - <<'END'\n{}END\n", self.script());
        if self.routes {
            for line in routes(has_ipv6()) {
                let _ = writeln!(text, "ip {line}");
            }
        }
        text
    }

    /// Brings the rules into force, in place of those that were there.
    ///
    /// # Errors
    ///
    /// Which command failed, and what it said; then nothing is left.
    pub fn install(&self) -> Result<(), String> {
        remove_routes();
        let run_all = || {
            nft(&self.script())?;
            routes(has_ipv6()).filter(|_| self.routes).try_for_each(ip)
        };
        run_all().inspect_err(|_| drop(remove())).map_err(|why| {
            format!(
                "connections cannot be intercepted: {why}; run as root or with CAP_NET_ADMIN, or \
                 write intercept = \"ebpf\""
            )
        })
    }

    /// Brings the rules into force in place of `before`, which are in force now.
    ///
    /// # Errors
    ///
    /// Which command failed, and what it said; then those before are still in force.
    pub fn replace(&self, before: &Self) -> Result<(), String> {
        match self.routes && !before.routes {
            true => self.install().inspect_err(|_| drop(before.install())),
            // All at once, or not at all.
            false => nft(&self.script()),
        }
    }

    /// Catches no more connections. Those that were caught go on.
    ///
    /// # Errors
    ///
    /// What `nft` said.
    pub fn cease(&self) -> Result<(), String> {
        let flush = CATCHING.map(|chain| format!("flush chain inet {TABLE} {chain}\n"));
        nft(&flush.concat())
    }
}

/// Removes all rules of any gateway in this network namespace.
///
/// # Errors
///
/// What `nft` said.
pub fn remove() -> Result<(), String> {
    remove_routes();
    // A unit does this after each stop, also where interception was never wanted. And without nft
    // no gateway can have made a table.
    let asked = Command::new("nft").arg("--version").stdin(Stdio::null()).output();
    if asked.is_err_and(|error| error.kind() == ErrorKind::NotFound) {
        return Ok(());
    }
    nft(ANEW)
}

/// The commands of [`remove`], as a shell would take them.
pub fn removal() -> String {
    let mut text = String::new();
    for line in ROUTES {
        let _ = writeln!(text, "ip {}", line.replace(" add ", " del "));
    }
    let _ = write!(text, "nft -f - <<'END'\n{ANEW}END\n");
    text
}

/// What is in force now: the table, and the routing rules.
///
/// # Errors
///
/// What `nft` or `ip` said.
pub fn show() -> Result<String, String> {
    let mut text = String::new();
    let tables = output_of("nft", &["list", "tables", "inet"])?;
    if tables.lines().any(|line| line.trim() == format!("table inet {TABLE}")) {
        text.push_str(&output_of("nft", &["list", "table", "inet", TABLE])?);
    }
    for family in ["-4", "-6"] {
        let rules = output_of("ip", &[family, "rule", "show"])?;
        let mark = format!("fwmark {ROUTE_MARK:#x}");
        for rule in rules.lines().filter(|line| line.contains(&mark)) {
            let _ = writeln!(text, "ip {family} rule: {rule}");
        }
    }
    Ok(text)
}

/// The conditions under which a connection is one of those to intercept: one for each family, which
/// comes first, by its name in rules.
fn matches(intercept: &Intercept, to: SocketAddr) -> Vec<(&'static str, String)> {
    let ranges = intercept.ports.iter().map(|range| match (range.start(), range.end()) {
        (first, last) if first == last => first.to_string(),
        (first, last) => format!("{first}-{last}"),
    });
    let ports = ranges.collect::<Vec<_>>().join(", ");
    let both = to.ip().is_unspecified() && to.is_ipv6();
    let mut all = Vec::new();
    for (is_meant, name, family, prefix) in [
        (to.is_ipv4() || both, "ipv4", "ip", IpAddr::is_ipv4 as fn(&IpAddr) -> bool),
        (to.is_ipv6(), "ipv6", "ip6", IpAddr::is_ipv6),
    ] {
        let networks = intercept.networks.iter().filter(|network| prefix(&network.base()));
        let networks: Vec<_> = networks.map(ToString::to_string).collect();
        if !is_meant || (networks.is_empty() && !intercept.networks.is_empty()) {
            continue;
        }
        let networks = match networks.is_empty() {
            // What means nothing without a device, we could not connect to in turn.
            true if family == "ip6" => " ip6 daddr != fe80::/10".to_owned(),
            true => String::new(),
            false => format!(" {family} daddr {{ {} }}", networks.join(", ")),
        };
        all.push((family, format!("meta nfproto {name}{networks} tcp dport {{ {ports} }}")));
    }
    all
}

/// From where connections come that `listener` intercepts on their way in: from outside to a server
/// of this host, or through this host to others.
fn from_outside(listener: &Listener) -> &'static str {
    match listener.accept {
        Protocol::Smc => "iif != lo fib daddr type local",
        Protocol::Tcp => "iif != lo fib daddr type != local",
    }
}

/// What is to be added to the routes of a host.
fn routes(has_ipv6: bool) -> impl Iterator<Item = &'static str> {
    ROUTES.into_iter().filter(move |line| has_ipv6 || line.starts_with("-4"))
}

/// Whether the loopback device has IPv6. Hosts may have it switched off: then `ip` would fail, and
/// nobody needs the routes.
fn has_ipv6() -> bool {
    match fs::read_to_string("/proc/sys/net/ipv6/conf/lo/disable_ipv6") {
        Ok(disabled) => disabled.trim() == "0",
        Err(error) => error.kind() != ErrorKind::NotFound,
    }
}

fn remove_routes() {
    // What is not there cannot be removed, and that is well.
    for line in ROUTES {
        drop(ip(&line.replace(" add ", " del ")));
    }
}

fn nft(script: &str) -> Result<(), String> {
    let mut child = Command::new("nft")
        .args(["-f", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("nft cannot be started: {error}; install nftables"))?;
    let mut input = child.stdin.take().expect("it has a pipe");
    // One that has ended already says why.
    let _ = input.write_all(script.as_bytes());
    drop(input);
    let output = child.wait_with_output().map_err(|error| format!("nft: {error}"))?;
    said("nft", &output).map(drop)
}

fn ip(line: &str) -> Result<(), String> {
    let words: Vec<&str> = line.split(' ').collect();
    output_of("ip", &words).map(drop)
}

fn output_of(program: &str, words: &[&str]) -> Result<String, String> {
    let output = Command::new(program).args(words).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("{program} cannot be started: {error}"))?;
    said(&format!("{program} {}", words.join(" ")), &output)
}

fn said(what: &str, output: &std::process::Output) -> Result<String, String> {
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let complaint = String::from_utf8_lossy(&output.stderr);
    Err(format!("{what}: {}", complaint.lines().next().unwrap_or("failed").trim()))
}

/// Marks packets for addresses that are not ours and come to our sockets all the same.
const ROUTE_MARK: u32 = 0x534d_4302;
const TABLE: &str = "smcgate";
/// Leaves no table of ours, whether there was one or not.
const ANEW: &str = "table inet smcgate\ndelete table inet smcgate\n";
/// The chains whose rules catch new connections.
const CATCHING: [&str; 3] = ["catch_output", "catch_nat", "catch_tproxy"];
/// What makes the kernel take packets with [`ROUTE_MARK`] for its own. 21315 is 0x5343.
const ROUTES: [&str; 4] = [
    "-4 rule add fwmark 0x534d4302 lookup 21315",
    "-6 rule add fwmark 0x534d4302 lookup 21315",
    "-4 route add local default dev lo table 21315",
    "-6 route add local default dev lo table 21315",
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn rules(listener: &str) -> Option<Rules> {
        let text = format!("[[listener]]\nname = 'a'\nupstream = 'original-dst'\n{listener}\n");
        Rules::of(&Config::parse(&text, "a.toml").unwrap().listeners)
    }

    fn caught(listener: &str) -> String {
        let rules = rules(listener).expect("it needs rules");
        let lines: Vec<_> = [&rules.output, &rules.nat, &rules.tproxy]
            .into_iter()
            .flat_map(|chain| chain.lines())
            .map(str::to_owned)
            .collect();
        lines.join("\n")
    }

    /// A rule that catches too much takes connections that are none of our business; one that
    /// catches our own never ends.
    #[test]
    fn what_is_asked_for_is_caught_and_nothing_else() {
        let local = caught(
            "bind = '127.0.0.1:15001'\nintercept = 'redirect'\nintercept_ports = [1, '5-6']\n\
             intercept_networks = ['10.8.0.0/24', 'fd00::/64']",
        );
        let expected = "meta mark != 0x534d4301 fib daddr type != local meta nfproto ipv4 ip daddr \
                        { 10.8.0.0/24 } tcp dport { 1, 5-6 } dnat ip to 127.0.0.1:15001";
        assert_eq!(local, expected, "IPv6 cannot come to a listener of IPv4");
        let both = caught("bind = '[::]:9'\nintercept = 'redirect'\nintercept_ports = [1]");
        assert_eq!(both.lines().count(), 4, "{both}");
        assert!(both.lines().all(|line| line.ends_with("redirect to :9")), "{both}");
        let through = caught("bind = '127.0.0.1:9'\nintercept = 'tproxy'\nintercept_ports = [1]");
        let expected = "iif != lo fib daddr type != local meta nfproto ipv4 tcp dport { 1 } tproxy \
                        ip to 127.0.0.1:9 meta mark set 0x534d4302 accept";
        assert_eq!(through, expected);
        let both = caught("bind = '[::]:9'\nintercept = 'tproxy'\nintercept_ports = [1]");
        let [ip, ip6] = [" tproxy ip to :9 ", " tproxy ip6 to :9 "].map(|it| both.contains(it));
        assert!(ip && ip6, "{both}");
        let inwards = caught(
            "bind = '[fd00::2]:9'\naccept = 'smc'\nintercept = 'tproxy'\nintercept_ports = [1]",
        );
        let expected = "iif != lo fib daddr type local meta nfproto ipv6 ip6 daddr != fe80::/10 ";
        assert!(inwards.starts_with(expected), "{inwards}");
    }

    /// NAT to the address of a device drops packets where the device has none, as the veths of pods
    /// have none on many nodes. Applications of the node itself come by no other way.
    #[test]
    fn the_manifest_leads_pods_by_tproxy_and_the_node_by_nat() {
        let manifest = include_str!("../../../packaging/kubernetes/smcgate.yaml");
        let (_, text) = manifest.split_once("smcgate.toml: |\n").unwrap();
        let (text, _) = text.split_once("\n---\n").unwrap();
        let config = Config::parse(text, "smcgate.toml").unwrap();
        let rules = Rules::of(&config.listeners).unwrap();
        assert_eq!(rules.nat, "");
        assert!(rules.tproxy.contains(" tproxy ip to :15001 "), "{}", rules.tproxy);
        assert!(rules.output.contains(" dnat ip to 127.0.0.1:15002"), "{}", rules.output);
    }

    #[test]
    fn the_rules_of_one_gateway_replace_those_before() {
        let listener = "bind = '127.0.0.1:9'\nintercept = 'tproxy'\nintercept_ports = [1]";
        let script = rules(listener).unwrap().script();
        assert!(script.starts_with("table inet smcgate\ndelete table inet smcgate\n"));
        let none = "bind = '127.0.0.1:9'\nintercept = 'ebpf'\nintercept_ports = [1]";
        assert_eq!(rules(none), None);
    }

    /// On a host without IPv6 a gateway for IPv4 starts all the same.
    #[test]
    fn without_ipv6_there_are_no_routes_of_it() {
        assert_eq!(routes(true).count(), 4);
        let ipv4: Vec<_> = routes(false).collect();
        assert!(ipv4.len() == 2 && ipv4.iter().all(|line| line.starts_with("-4 ")), "{ipv4:?}");
    }

    /// NAT that is taken away takes connections with it.
    #[test]
    fn what_was_caught_passes_by_the_same_hooks_later() {
        let nat = "bind = '127.0.0.1:9'\nintercept = 'redirect'\nintercept_ports = [1]";
        let before = rules(nat).unwrap();
        let tproxy = "bind = '10.0.0.1:9'\nintercept = 'tproxy'\nintercept_ports = [1]";
        for after in [rules(tproxy).unwrap().after(&before), before.idle()] {
            let script = after.script();
            assert!(script.contains("type nat hook output"), "{script}");
            assert!(!script.contains("dnat"), "{script}");
        }
    }
}
