//! Starts everything that a run needs, once: namespaces, servers, and the proxies of every path.

mod answers;

use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use super::calls::Calls;
use super::folder::Folder;
use super::janitor::Janitor;
use super::namespaces::{ADDRESS_B, Host, Namespaces};
use super::paths::{
    Build, PRELOADED_PORT, Path, Pin, RINGED_PORT, Rnic, SERVER_PORT, UNCONFINED,
    haproxy_configuration, intercepting, nginx_configuration, nginx_stream_configuration,
    smcgate_configuration,
};
use super::process::Process;
use super::time_wait::TimeWaits;
use crate::beside::Beside;
use crate::clock::{now_ns, ns};
use crate::failure::{Doing as _, Failure, Result};
use crate::scenarios::programs::Program;
use crate::scenarios::round_trip::MESSAGE_BYTES;
use crate::scenarios::{LoadResult, Scenario, Service};

/// How long servers and proxies may take to start serving.
const START_LIMIT: Duration = Duration::from_secs(15);
/// How long busy loops run before anything is measured beside them.
const SPREAD_TIME: Duration = Duration::from_millis(300);
/// How much longer than its duration a load may take.
const LOAD_GRACE: Duration = Duration::from_secs(90);

/// The programs to start, and how.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) paths: Vec<Path>,
    /// The servers that are needed. Those of this program always run.
    pub(crate) services: Vec<Service>,
    /// The gateway's binary.
    pub(crate) smcgate: PathBuf,
    /// The one that it is compared with.
    pub(crate) before: Option<PathBuf>,
    /// Its `[poll] policy`.
    pub(crate) idle_policy: String,
    /// Where its poller runs.
    pub(crate) pin: Pin,
    /// Their `[local] congestion_control`.
    pub(crate) local: String,
    /// How long programs watch their rings before they sleep, in microseconds; none: they decide.
    pub(crate) spin_us: Option<u32>,
    /// Whether each program has a session of its own.
    pub(crate) own_sessions: bool,
    /// Whether the gateways may do whatever the harness may.
    pub(crate) unconfined: bool,
    /// MTU of the veth pair.
    pub(crate) mtu: u32,
}

/// The running servers and proxies. Dropping it ends and removes everything.
///
/// The order of the fields is the order in which they must be dropped: programs first, the janitor
/// last.
#[derive(Debug)]
pub(crate) struct Bench {
    /// The running busy loops.
    burners: Vec<Process>,
    beside: Beside,
    servers: Vec<Process>,
    /// Those that have the preload library.
    preloaded: Vec<Process>,
    haproxies: Vec<Process>,
    nginxes: Vec<Process>,
    gateways: Vec<Process>,
    /// The running gateways, if any run: the kind of their RNICs, and which build they are.
    running: Option<(Rnic, Build)>,
    namespaces: Namespaces,
    folder: Folder,
    myself: String,
    options: Options,
    _janitor: Janitor,
}

impl Bench {
    /// Starts everything and waits until every path carries bytes end to end.
    ///
    /// # Errors
    ///
    /// When a program does not start. The message names it and has the end of its log. Nothing is
    /// left behind then.
    pub(crate) fn start(options: Options) -> Result<Self> {
        let myself = std::env::current_exe().doing(|| "finding this binary".into())?;
        let myself = myself.to_string_lossy().into_owned();
        // If the folder is there already, it is not ours, and the janitor must not remove it.
        let folder = Folder::create()?;
        let janitor = Janitor::start(&myself, folder.path(), &Namespaces::names())?;
        let mut bench = Self {
            burners: Vec::new(),
            beside: Beside::default(),
            servers: Vec::new(),
            preloaded: Vec::new(),
            haproxies: Vec::new(),
            nginxes: Vec::new(),
            gateways: Vec::new(),
            running: None,
            namespaces: Namespaces::create(options.mtu, options.own_sessions)?,
            folder,
            myself,
            options,
            _janitor: janitor,
        };
        bench.servers = bench.start_servers(SERVER_PORT)?;
        let paths = bench.options.paths.clone();
        if paths.contains(&Path::Haproxy) {
            bench.start_haproxies()?;
        }
        if paths.contains(&Path::Nginx) {
            bench.start_nginxes()?;
        }
        // The gateways come last, so that those which are measured first run already.
        for &path in paths.iter().rev() {
            bench.set_out(path, Build::After)?;
            bench.wait_until_carrying(path)?;
        }
        bench.wait_for_servers()?;
        Ok(bench)
    }

    /// Makes the gateways of `path` those that run. Gateways of other kinds and builds would use
    /// the cores beside them.
    ///
    /// # Errors
    ///
    /// When they do not start, or carry nothing.
    pub(crate) fn set_out(&mut self, path: Path, build: Build) -> Result<()> {
        let wanted = gateways_for(path, build, &self.options.idle_policy, self.running);
        if self.running == wanted {
            return Ok(());
        }
        self.gateways.clear();
        self.preloaded.clear();
        self.running = wanted;
        let Some((rnic, _)) = wanted else { return Ok(()) };
        self.start_gateways(rnic)?;
        if self.is_preloading() {
            // A listening socket must be marked before it listens.
            self.wait_for_doors()?;
            for first in [PRELOADED_PORT, RINGED_PORT] {
                let servers = self.start_servers(first)?;
                self.preloaded.extend(servers);
            }
        }
        self.wait_until_carrying(path)
    }

    /// The binary of the gateways that run.
    fn smcgate(&self) -> String {
        let Options { smcgate, before, .. } = &self.options;
        let binary = match (self.running, before) {
            (Some((_, Build::Before)), Some(before)) => before,
            _ => smcgate,
        };
        binary.to_string_lossy().into_owned()
    }

    /// Whether some path needs the preload library.
    fn is_preloading(&self) -> bool {
        self.options.paths.iter().any(|path| path.is_preloaded())
    }

    /// The door of the gateway in `host`.
    fn door(&self, host: Host) -> PathBuf {
        self.folder.path().join(format!("door-{host:?}"))
    }

    /// Waits until both gateways let programs with the preload library in.
    fn wait_for_doors(&mut self) -> Result<()> {
        let until = now_ns() + ns(START_LIMIT);
        while [Host::A, Host::B].into_iter().any(|host| !self.door(host).exists()) {
            for gateway in &mut self.gateways {
                gateway.check_alive()?;
            }
            if now_ns() >= until {
                return Err(Failure::new("the gateways open no door"));
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// `argv` in `host` with the preload library, as users start a program with it.
    fn with_preload(&self, host: Host, has_rings: bool, argv: Vec<String>) -> Vec<String> {
        let smcgate = self.smcgate();
        let door = self.door(host);
        let exec = [&smcgate, "exec", "--socket", &door.to_string_lossy()].map(str::to_owned);
        let spin = self.options.spin_us.map(|spin| format!("--spin={spin}"));
        let rings = ["--rings".to_owned()].into_iter().chain(spin).filter(|_| has_rings);
        exec.into_iter().chain(rings).chain(["--".to_owned()]).chain(argv).collect()
    }

    /// The two namespaces.
    pub(crate) fn namespaces(&self) -> &Namespaces {
        &self.namespaces
    }

    /// The proxies of `path`, none for direct.
    pub(crate) fn proxies(&mut self, path: Path) -> &mut [Process] {
        match path {
            Path::Direct | Path::HostDirect => &mut [],
            Path::Haproxy => &mut self.haproxies,
            Path::Nginx => &mut self.nginxes,
            Path::Smcgate(_) | Path::Intercepted => &mut self.gateways,
            Path::Preload(_) | Path::Rings(_) => &mut self.gateways,
            Path::HostPreload | Path::HostRings => &mut self.gateways,
        }
    }

    /// Replaces the running busy loops by those of `beside`.
    ///
    /// # Errors
    ///
    /// When one does not start.
    pub(crate) fn run_beside(&mut self, beside: Beside) -> Result<()> {
        if beside == self.beside {
            return Ok(());
        }
        self.burners.clear();
        let nice = beside.nice.to_string();
        for number in 0..beside.loops {
            let argv = ["nice", "-n", &nice, &self.myself, "burn"].map(str::to_owned);
            let command = self.namespaces.command(Host::A, &argv);
            self.burners.push(Process::start(
                &format!("burn-{number}"),
                command,
                self.folder.path(),
            )?);
        }
        self.beside = beside;
        // The scheduler needs a moment to spread new processes over the cores.
        thread::sleep(SPREAD_TIME);
        Ok(())
    }

    /// The busy loops that run beside the measurements now.
    pub(crate) fn beside(&self) -> Beside {
        self.beside
    }

    /// CPU seconds that the busy loops have used.
    pub(crate) fn beside_cpu_s(&self) -> f64 {
        self.burners.iter().map(Process::cpu_s).sum()
    }

    /// Runs one load to its end.
    ///
    /// # Errors
    ///
    /// When it fails, hangs, or prints something other than its result.
    pub(crate) fn load(
        &self,
        scenario: Scenario,
        path: Path,
        duration: Duration,
    ) -> Result<LoadResult> {
        let mut argv = scenario.command(&self.myself, |service| path.target(service), duration);
        if path.is_preloaded() {
            argv = self.with_preload(path.load_host(), path.has_rings(), argv);
        }
        let command = self.namespaces.command(path.load_host(), &argv);
        let load = Process::start(&format!("load-{scenario}-{path}"), command, self.folder.path())?;
        let output = load.output_within(duration + LOAD_GRACE)?;
        scenario.parse(&output).doing(|| format!("{scenario} over {path}"))
    }

    /// Begins to count the system calls of the proxies of `path`, for a load of `duration` that
    /// starts now.
    ///
    /// # Errors
    ///
    /// When `perf` is not installed.
    pub(crate) fn count_calls(&mut self, path: Path, duration: Duration) -> Result<Calls> {
        let folder = self.folder.path().to_owned();
        Calls::begin(self.proxies(path), duration, &folder)
    }

    /// The connections of `scenario` over `path` that are in TIME_WAIT.
    ///
    /// # Errors
    ///
    /// When `ss` is not installed.
    pub(crate) fn time_waits(&self, scenario: Scenario, path: Path) -> Result<TimeWaits> {
        let [a, b] = [Host::A, Host::B].map(|host| self.namespaces.time_waits(host));
        Ok(TimeWaits::count([&a?, &b?], path, scenario.service()))
    }

    /// Starts the servers that are needed; that of the first service has the port `first`.
    fn start_servers(&self, first: u16) -> Result<Vec<Process>> {
        let folder = self.folder.path().to_string_lossy().into_owned();
        let has_rings = first == RINGED_PORT;
        let is_preloaded = has_rings || first == PRELOADED_PORT;
        let mut servers = Vec::new();
        for service in Service::ALL {
            // Files of others are for one server each.
            let has_files = matches!(service, Service::Http | Service::Postgres);
            if is_preloaded && has_files {
                continue;
            }
            let port = first + service.port_offset();
            let needed = self.options.services.contains(&service);
            let argv = match Program::serving(service) {
                Some(program) if needed => program.server(port, &folder),
                None if service == Service::Http && needed => {
                    let file = self.folder.write("nginx.conf", &nginx_configuration(&folder))?;
                    ["nginx", "-c", &file, "-p", &folder].map(str::to_owned).to_vec()
                }
                None if service != Service::Http => {
                    let listen = format!("0.0.0.0:{port}");
                    [&self.myself, "serve", service.name(), "--listen", &listen]
                        .map(str::to_owned)
                        .to_vec()
                }
                Some(_) | None => continue,
            };
            let argv = match is_preloaded {
                true => self.with_preload(Host::B, has_rings, argv),
                false => argv,
            };
            let command = self.namespaces.command(Host::B, &argv);
            let name = format!("server-{}-{first}", service.name());
            servers.push(Process::start(&name, command, self.folder.path())?);
        }
        Ok(servers)
    }

    fn start_haproxies(&mut self) -> Result<()> {
        for host in [Host::B, Host::A] {
            let name = format!("haproxy-{host:?}");
            let file = self.folder.write(&format!("{name}.cfg"), &haproxy_configuration(host))?;
            let argv = ["haproxy", "-db", "-f", &file].map(str::to_owned);
            let command = self.namespaces.command(host, &argv);
            self.haproxies.push(Process::start(&name, command, self.folder.path())?);
        }
        Ok(())
    }

    fn start_nginxes(&mut self) -> Result<()> {
        let folder = self.folder.path().to_string_lossy().into_owned();
        for host in [Host::B, Host::A] {
            let name = format!("nginx-{host:?}");
            let text = nginx_stream_configuration(host, &folder);
            let file = self.folder.write(&format!("{name}.conf"), &text)?;
            let argv = ["nginx", "-c", &file, "-p", &folder].map(str::to_owned);
            let command = self.namespaces.command(host, &argv);
            self.nginxes.push(Process::start(&name, command, self.folder.path())?);
        }
        Ok(())
    }

    fn start_gateways(&mut self, rnic: Rnic) -> Result<()> {
        let folder = self.folder.path().to_string_lossy().into_owned();
        for (host, core) in [(Host::B, 1), (Host::A, 0)] {
            let name = format!("smcgate-{host:?}");
            let pin = match self.options.pin {
                Pin::Auto => String::new(),
                Pin::Fixed => format!("cores = [{core}]\n"),
                Pin::Off => "pin = false\n".to_owned(),
            };
            let Options { idle_policy, local, .. } = &self.options;
            let door = match self.is_preloading() {
                true => format!("socket = \"{}\"\n", self.door(host).display()),
                false => String::new(),
            };
            let local = format!("[local]\ncongestion_control = \"{local}\"\n{door}");
            let poll = format!("policy = \"{idle_policy}\"\n{pin}\n{local}");
            let mut text = smcgate_configuration(host, rnic, &poll, &folder);
            if host == Host::A && self.options.paths.contains(&Path::Intercepted) {
                text += &intercepting();
            }
            if self.options.unconfined {
                text += UNCONFINED;
            }
            let file = self.folder.write(&format!("{name}.toml"), &text)?;
            let smcgate = self.smcgate();
            let argv = [&smcgate, "run", "-c", &file].map(str::to_owned);
            let command = self.namespaces.command(host, &argv);
            self.gateways.push(Process::start(&name, command, self.folder.path())?);
        }
        Ok(())
    }

    /// Sends echoes until one round trip works, which also makes the gateways' first contact.
    fn wait_until_carrying(&mut self, path: Path) -> Result<()> {
        let until = now_ns() + ns(START_LIMIT);
        let echo = Scenario::RoundTrip { connections: 1, bytes: MESSAGE_BYTES };
        loop {
            let others = [&mut self.haproxies, &mut self.nginxes, &mut self.gateways];
            let servers = self.servers.iter_mut().chain(&mut self.preloaded);
            for process in servers.chain(others.into_iter().flatten()) {
                process.check_alive()?;
            }
            let host = path.load_host();
            let before = path.rnic().map(|_| self.gateway_totals(host)).transpose();
            let carried = before.and_then(|before| {
                self.load(echo, path, Duration::from_millis(50))?;
                let Some(before) = before else { return Ok(()) };
                let after = self.gateway_totals(host)?;
                // A port may take a second to find the other one.
                match after.connections_tcp > before.connections_tcp {
                    true => Err(Failure::new("its connections stay TCP")),
                    false => Ok(()),
                }
            });
            match carried {
                Ok(()) => return Ok(()),
                Err(failure) if now_ns() >= until => {
                    return Err(Failure::new(format!("{path} carries nothing: {failure}")));
                }
                Err(_) => thread::sleep(Duration::from_millis(100)),
            }
        }
    }

    /// Waits until the servers that others have written let somebody in.
    fn wait_for_servers(&mut self) -> Result<()> {
        for &service in &self.options.services {
            let port = SERVER_PORT + service.port_offset();
            let knock = format!(
                "until (exec 3<>/dev/tcp/{ADDRESS_B}/{port}) 2>/dev/null; do sleep 0.1; done"
            );
            let command =
                self.namespaces.command(Host::A, &["bash", "-c", &knock].map(str::to_owned));
            let name = format!("knock-{}", service.name());
            let knocking = Process::start(&name, command, self.folder.path())?;
            let outcome = knocking.output_within(START_LIMIT);
            for server in &mut self.servers {
                server.check_alive()?;
            }
            outcome?;
        }
        Ok(())
    }
}

/// The gateways that run while `path` is measured, where those of before are `running`.
fn gateways_for(
    path: Path,
    build: Build,
    idle_policy: &str,
    running: Option<(Rnic, Build)>,
) -> Option<(Rnic, Build)> {
    match path.rnic() {
        Some(rnic) => Some((rnic, build)),
        // Without connections they would still use two cores, beside whatever else is measured.
        None if idle_policy == "spin" => None,
        // They sleep, and use less than a hundredth of a core. After a start they would have to
        // warm up again.
        None => running,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pair of HAProxy beside two gateways that spin would have no core of its own.
    #[test]
    fn gateways_that_spin_do_not_run_beside_other_paths() {
        let ours = Path::Smcgate(Rnic::RoceUdp);
        let running = Some((Rnic::RoceUdp, Build::After));
        for other in [Path::Direct, Path::HostDirect, Path::Haproxy, Path::Nginx] {
            assert_eq!(gateways_for(other, Build::After, "spin", running), None);
            for policy in ["adaptive", "block"] {
                assert_eq!(gateways_for(other, Build::After, policy, running), running);
            }
        }
        for policy in ["spin", "adaptive", "block"] {
            let before = Some((Rnic::RoceUdp, Build::Before));
            assert_eq!(gateways_for(ours, Build::Before, policy, running), before);
        }
    }
}
