//! Gateways as their operators run them: a configuration, a process, a `/stats`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;

use crate::clock::{Deadline, wait_for, wait_until};
use crate::hosts::{Host, Hosts, target};
use crate::http;
use crate::process::{Process, run};

/// How long a gateway may take to be ready.
const READY_LIMIT: Duration = Duration::from_secs(20);

/// How long counters may lag behind what applications saw.
pub(crate) const SETTLE_LIMIT: Duration = Duration::from_secs(20);

/// How long a gateway may hold elements of connections that are over. An element rests for half a
/// minute if its peer has changed the link, or did not say that it writes no more.
const REST_LIMIT: Duration = Duration::from_secs(50);

/// Where gateways answer operators, on their own host's loopback.
const ADMIN: SocketAddrV4 = local(9180);

/// A host's loopback address with this port.
pub(crate) const fn local(port: u16) -> SocketAddrV4 {
    SocketAddrV4::new(Ipv4Addr::LOCALHOST, port)
}

/// A gateway that is not running yet.
pub(crate) struct Setup {
    name: String,
    /// Keys of the top level, which come before all tables.
    top: String,
    config: String,
    /// Keys of `[smc]`.
    smc: String,
    /// Program and arguments that run the gateway; none if it runs by itself.
    wrapper: Vec<String>,
}

impl Setup {
    /// A gateway without listeners on `host`.
    pub(crate) fn new(name: &str, host: &Host) -> Self {
        Self::with_rnic(name, host, "")
    }

    /// The same, with more keys of its RNIC.
    pub(crate) fn with_rnic(name: &str, host: &Host, keys: &str) -> Self {
        Self::on_device(name, host.device, keys)
    }

    /// The same, with its RNIC on another device.
    pub(crate) fn on_device(name: &str, device: &str, keys: &str) -> Self {
        Self::of_kind(name, ("soft0", "roce-udp"), device, keys)
    }

    /// The same, with an RNIC of another name and kind.
    pub(crate) fn of_kind(
        name: &str,
        (rnic, kind): (&str, &str),
        device: &str,
        keys: &str,
    ) -> Self {
        let config = format!(
            "[admin]\nlisten = \"{ADMIN}\"\n\n\
             [[rnic]]\nname = \"{rnic}\"\nkind = \"{kind}\"\ndevice = \"{device}\"\n{keys}\n"
        );
        Self {
            name: name.to_owned(),
            top: String::new(),
            config,
            smc: String::new(),
            wrapper: Vec::new(),
        }
    }

    /// The same, with a whole configuration as an operator writes it.
    pub(crate) fn of_text(name: &str, config: &str) -> Self {
        Self {
            name: name.to_owned(),
            top: String::new(),
            config: config.to_owned(),
            smc: String::new(),
            wrapper: Vec::new(),
        }
    }

    /// Another RNIC.
    pub(crate) fn rnic(self, name: &str, device: &str) -> Self {
        self.rnic_of_kind((name, "roce-udp"), device)
    }

    /// The same, of this kind.
    pub(crate) fn rnic_of_kind(mut self, (name, kind): (&str, &str), device: &str) -> Self {
        write!(
            self.config,
            "\n[[rnic]]\nname = \"{name}\"\nkind = \"{kind}\"\ndevice = \"{device}\"\n"
        )
        .expect("writing to a string");
        self
    }

    pub(crate) fn listener(
        mut self,
        (bind, accept): (impl Into<SocketAddr>, &str),
        (upstream, connect): (impl Into<SocketAddr>, &str),
    ) -> Self {
        let (bind, upstream) = (bind.into(), upstream.into());
        write!(
            self.config,
            "\n[[listener]]\nname = \"port-{}\"\nbind = \"{bind}\"\naccept = \"{accept}\"\n\
             connect = \"{connect}\"\nupstream = \"{upstream}\"\n",
            bind.port()
        )
        .expect("writing to a string");
        self
    }

    /// The side of the clients: TCP in, SMC-R out, to the same port of `far`.
    pub(crate) fn towards(self, far: Ipv4Addr, port: u16) -> Self {
        self.listener((local(port), "tcp"), (SocketAddrV4::new(far, port), "smc"))
    }

    /// The side of the servers: SMC-R in, TCP out, to the same port of this host's loopback.
    pub(crate) fn before(self, host: &Host, port: u16) -> Self {
        self.listener((host.at(port), "smc"), (local(port), "tcp"))
    }

    /// Assumes that `peer` has SMC-R, instead of looking for TCP option 254.
    pub(crate) fn assume(self, peer: Ipv4Addr) -> Self {
        self.smc("option = \"assume\"").smc(&format!("assume_peers = [\"{peer}\"]"))
    }

    /// One more line of `[smc]`.
    pub(crate) fn smc(mut self, line: &str) -> Self {
        self.smc += line;
        self.smc.push('\n');
        self
    }

    /// One more table.
    pub(crate) fn table(mut self, table: &str) -> Self {
        self.config.push_str(table);
        self
    }

    /// Limits how many connections the listener that was added last serves at once.
    pub(crate) fn connections_max(mut self, count: u32) -> Self {
        writeln!(self.config, "connections_max = {count}").expect("writing to a string");
        self
    }

    /// Limits the memory of its RMBs.
    pub(crate) fn rmb_bytes(mut self, bytes: u32) -> Self {
        self.top = format!("[limits]\nrmb_bytes = {bytes}\n\n");
        self
    }

    /// Sets how long it waits for connections to end after SIGTERM.
    pub(crate) fn drain_timeout(mut self, timeout: &str) -> Self {
        self.top = format!("drain_timeout = \"{timeout}\"\n\n");
        self
    }

    /// Runs it by another program that replaces itself by it, such as `prlimit --nofile=64:64`.
    pub(crate) fn under(mut self, wrapper: &[&str]) -> Self {
        self.wrapper = wrapper.iter().map(|&word| word.to_owned()).collect();
        self
    }

    /// Starts it and waits until it is ready.
    pub(crate) fn start<'h>(self, hosts: &'h Hosts, host: &'h Host) -> Gateway<'h> {
        let process = self.spawn(hosts, host);
        let mut gateway = Gateway { host, process };
        gateway.wait_until_ready();
        gateway
    }

    /// Starts what will not become ready. Returns its exit code and what it said.
    pub(crate) fn start_in_vain(self, hosts: &Hosts, host: &Host) -> (Option<i32>, String) {
        let mut process = self.spawn(hosts, host);
        let status = process.wait(READY_LIMIT);
        (status.code(), process.log())
    }

    /// Its configuration.
    pub(crate) fn text(&self) -> String {
        let Self { top, config, smc, .. } = self;
        format!("{top}{config}\n[smc]\n{smc}")
    }

    fn spawn(self, hosts: &Hosts, host: &Host) -> Process {
        let path = hosts.logs.join(format!("{}.toml", self.name));
        fs::write(&path, self.text()).expect("the directory is ours");
        let mut words = self.wrapper.iter();
        let mut command = match words.next() {
            None => Command::new(program()),
            Some(wrapper) => {
                let mut command = Command::new(wrapper);
                command.args(words).arg(program());
                command
            }
        };
        command.args(["--log", "debug", "run", "-c"]).arg(&path);
        Process::start(host, &hosts.logs, &self.name, &mut command)
    }
}

/// A running gateway, killed when dropped.
pub(crate) struct Gateway<'h> {
    host: &'h Host,
    pub(crate) process: Process,
}

impl Gateway<'_> {
    fn wait_until_ready(&mut self) {
        wait_until("/readyz says 200", READY_LIMIT, || {
            if let Some(status) = self.process.ended() {
                panic!("the gateway ended with {status}:\n{}", self.process.log());
            }
            http::get(self.host, ADMIN, "/readyz").is_ok_and(|(status, _)| status == 200)
        });
    }

    /// Body of `GET path`.
    ///
    /// # Panics
    ///
    /// If it is not there.
    pub(crate) fn get(&self, path: &str) -> String {
        let (status, body) = http::get(self.host, ADMIN, path).expect("the gateway answers");
        assert_eq!(status, 200, "{path}: {body}");
        body
    }

    /// What `GET /stats` says now.
    pub(crate) fn stats(&self) -> Stats {
        let stats: Stats = serde_json::from_str(&self.get("/stats")).expect("the schema of /stats");
        assert_eq!(stats.schema, 1);
        stats
    }

    /// Waits until no connection is left. Returns what the gateway still holds.
    pub(crate) fn holdings_at_rest(&self) -> Holdings {
        let at_rest = Active::default();
        wait_until("all connections have left the gateway", REST_LIMIT, || {
            let stats = self.stats();
            stats.active == at_rest && stats.memory.rmbes_used == 0
        });
        // The connection of the scrape itself ends last.
        wait_for("descriptors settle", SETTLE_LIMIT, || {
            let before = self.process.descriptors_by_kind();
            std::thread::sleep(Duration::from_millis(100));
            let descriptors = self.process.descriptors_by_kind();
            (before == descriptors).then_some(Holdings {
                descriptors,
                resident_kib: self.process.resident_kib(),
                send_bytes_used: self.stats().memory.send_bytes_used,
            })
        })
    }

    /// Waits until no connection is left, and no more is held than `before`. Returns what is.
    ///
    /// # Panics
    ///
    /// If more is held for so long that it is not under way to be closed, but leaked.
    pub(crate) fn holdings_back_to(&self, before: &Holdings) -> Holdings {
        let deadline = Deadline::after(SETTLE_LIMIT);
        loop {
            let held = self.holdings_at_rest();
            if held.is_back_to(before) {
                return held;
            }
            assert!(!deadline.passed(), "{held:?} after {before:?}");
        }
    }
}

/// What a gateway still holds when it has no connections.
#[derive(Debug)]
pub(crate) struct Holdings {
    /// How many of each kind.
    pub(crate) descriptors: BTreeMap<String, usize>,
    pub(crate) resident_kib: u64,
    pub(crate) send_bytes_used: u64,
}

impl Holdings {
    /// Whether nothing was leaked between `before` and `self`.
    ///
    /// A few descriptors may differ (a scrape, a queue pair that is being made), and so may memory
    /// that the allocator keeps. One leaked object per connection exceeds both bounds.
    fn is_back_to(&self, before: &Self) -> bool {
        let descriptors = |held: &Self| held.descriptors.values().sum::<usize>();
        descriptors(self) <= descriptors(before) + 8
            && self.resident_kib <= before.resident_kib + before.resident_kib / 4 + 16 * 1024
            && self.send_bytes_used == before.send_bytes_used
    }
}

/// Two gateways, one on each host, with the same ports open on both.
pub(crate) struct Pair<'h> {
    pub(crate) a: Gateway<'h>,
    pub(crate) b: Gateway<'h>,
}

impl<'h> Pair<'h> {
    /// Applications on host a reach servers on `127.0.0.1` of host b by connecting to the same
    /// port of their own `127.0.0.1`.
    pub(crate) fn start(hosts: &'h Hosts, ports: &[u16]) -> Self {
        let near = Self::client_side(hosts, ports);
        Self::start_these(hosts, near, Self::server_side(hosts, ports))
    }

    /// A pair of gateways set up by the caller.
    pub(crate) fn start_these(hosts: &'h Hosts, near: Setup, far: Setup) -> Self {
        let b = far.start(hosts, &hosts.b);
        let a = near.start(hosts, &hosts.a);
        Self { a, b }
    }

    /// Gateway A, not running yet.
    pub(crate) fn client_side(hosts: &Hosts, ports: &[u16]) -> Setup {
        let near = Setup::new("gateway-a", &hosts.a);
        ports.iter().fold(near, |near, &port| near.towards(hosts.b.address, port))
    }

    /// Gateway B, not running yet.
    pub(crate) fn server_side(hosts: &Hosts, ports: &[u16]) -> Setup {
        let far = Setup::new("gateway-b", &hosts.b);
        ports.iter().fold(far, |far, &port| far.before(&hosts.b, port))
    }

    /// Asserts that at least `least` connections were served since the start, each over SMC-R, and
    /// that none was given an element that another connection still had.
    pub(crate) fn assert_all_smc(&self, least: u64) {
        for gateway in [&self.a, &self.b] {
            let stats = gateway.stats();
            let Totals { connections_smc: smc, connections_tcp: tcp, .. } = stats.totals;
            assert!(smc >= least && tcp == 0, "{smc} SMC-R, {tcp} TCP: {:?}", stats.fallbacks);
            assert_eq!(stats.totals.rmbe_conflicts, 0);
        }
    }
}

/// Runs `smcgate` with `arguments` on host a, to its end.
pub(crate) fn smcgate(hosts: &Hosts, name: &str, arguments: &[&str]) -> crate::process::Finished {
    let limit = Duration::from_secs(30);
    run(hosts, &hosts.a, name, limit, Command::new(program()).args(arguments))
}

/// The gateway under test: beside this test in cargo's target directory, or `$SMCGATE_BIN`.
pub(crate) fn program() -> PathBuf {
    if let Some(program) = std::env::var_os("SMCGATE_BIN") {
        return program.into();
    }
    let profile = if cfg!(debug_assertions) { "debug" } else { "release" };
    let program = target().join(profile).join("smcgate");
    assert!(program.exists(), "{} is missing: cargo build -p smcgate", program.display());
    program
}

/// The part of `GET /stats` that tests look at.
#[derive(Debug, Deserialize)]
pub(crate) struct Stats {
    pub(crate) schema: u32,
    pub(crate) totals: Totals,
    pub(crate) active: Active,
    pub(crate) fallbacks: Vec<Fallback>,
    pub(crate) rnics: Vec<Rnic>,
    pub(crate) memory: Memory,
    pub(crate) link_groups: Vec<LinkGroup>,
    pub(crate) pollers: Vec<Poller>,
    #[serde(default)]
    pub(crate) listeners: Vec<Listener>,
}

impl Stats {
    /// What all pollers together have counted under this name.
    pub(crate) fn counter(&self, name: &str) -> u64 {
        self.pollers.iter().map(|poller| poller.counters[name]).sum()
    }
}

#[derive(Debug, Deserialize)]
pub(crate) struct Listener {
    pub(crate) name: String,
    pub(crate) bind: String,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Poller {
    pub(crate) counters: BTreeMap<String, u64>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct LinkGroup {
    pub(crate) version: u8,
    #[serde(default)]
    pub(crate) v2: Option<GroupV2>,
    pub(crate) peer_id: String,
    pub(crate) links: Vec<Link>,
}

/// What is said of a link group of SMC-Rv2.
#[derive(Debug, Deserialize)]
pub(crate) struct GroupV2 {
    pub(crate) direct: bool,
    #[serde(default)]
    pub(crate) dense_packets: bool,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Link {
    pub(crate) state: String,
    pub(crate) qpn: u32,
    pub(crate) payload: u32,
}

#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct Totals {
    pub(crate) connections_smc: u64,
    pub(crate) connections_tcp: u64,
    #[serde(default)]
    pub(crate) streams_followed: u64,
    #[serde(default)]
    pub(crate) connections_moved: u64,
    pub(crate) handshakes_failed: u64,
    #[serde(default)]
    pub(crate) tcp_cut_short: u64,
    #[serde(default)]
    pub(crate) foreign_claims: u64,
    #[serde(default)]
    pub(crate) groups_out_of_sync: u64,
    pub(crate) rmbe_conflicts: u64,
    #[serde(default)]
    pub(crate) rings: u64,
    #[serde(default)]
    pub(crate) shortcuts: u64,
    #[serde(default)]
    pub(crate) bytes_in: u64,
    #[serde(default)]
    pub(crate) bytes_out: u64,
}

#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct Active {
    pub(crate) smc: u64,
    pub(crate) tcp: u64,
    #[serde(default)]
    pub(crate) rings: u64,
    #[serde(default)]
    pub(crate) shortcuts: u64,
    #[serde(default)]
    pub(crate) connecting: u64,
    #[serde(default)]
    pub(crate) waiting: u64,
    #[serde(default)]
    pub(crate) farewells: u64,
    #[serde(default)]
    pub(crate) parked: u64,
    #[serde(default)]
    pub(crate) kept: u64,
}

/// What is said of an RNIC.
#[derive(Debug, Deserialize)]
pub(crate) struct Rnic {
    pub(crate) name: String,
    pub(crate) packets_out: u64,
    pub(crate) state: String,
    pub(crate) path_lowered: u64,
    pub(crate) cnps_in: u64,
    pub(crate) cnps_out: u64,
    pub(crate) psn_errors: u64,
    pub(crate) unknown_qp: u64,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Fallback {
    pub(crate) code: u32,
    pub(crate) name: String,
    pub(crate) count: u64,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Memory {
    pub(crate) rmb_bytes: u64,
    pub(crate) rmbes_used: u64,
    pub(crate) send_bytes_used: u64,
}
