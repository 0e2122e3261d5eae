//! Where applications of a scenario run: a guest, or the host of our gateway.

use std::fs;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use crate::clock::wait_until;
use crate::emulator::pull_plug;
use crate::gateway::program;
use crate::hosts::{Host, Hosts};
use crate::process::{Process, run};

/// How long a program may take: guests are slow, and the machine may be busy with other things.
const LIMIT: Duration = Duration::from_secs(120);

/// A machine on which applications run.
pub(crate) struct Place<'h> {
    hosts: &'h Hosts,
    /// None for the gateway's host.
    guest: Option<u8>,
    name: String,
    /// What runs programs here, with its arguments; nothing if they run by themselves.
    wrapper: Vec<String>,
}

/// What kind of socket an application opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Socket {
    Smc,
    Tcp,
}

/// A client or a server at work, which ends when it has had all its connections.
pub(crate) struct Application {
    process: Process,
    output: PathBuf,
}

/// What one connection saw, and how many saw the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) count: u32,
    pub(crate) events: Vec<String>,
}

impl<'h> Place<'h> {
    pub(crate) fn guest(hosts: &'h Hosts, guest: u8) -> Self {
        Self { hosts, guest: Some(guest), name: format!("guest{guest}"), wrapper: vec![] }
    }

    pub(crate) fn gateway_host(hosts: &'h Hosts) -> Self {
        Self { hosts, guest: None, name: "host".to_owned(), wrapper: vec![] }
    }

    /// The gateway's host, with the preload library in all programs.
    pub(crate) fn preloaded(hosts: &'h Hosts, door: &str) -> Self {
        let gateway = program();
        let gateway = gateway.to_str().expect("a path of ours is UTF-8");
        let wrapper = [gateway, "exec", "--socket", door, "--"].map(str::to_owned).into();
        Self { hosts, guest: None, name: "preloaded".to_owned(), wrapper }
    }

    /// Its first address on the wire, with this port.
    pub(crate) fn at(&self, port: u16) -> SocketAddrV4 {
        match self.guest {
            Some(guest) => SocketAddrV4::new(Ipv4Addr::new(10, 9, 0, 10 + guest), port),
            None => self.hosts.a.at(port),
        }
    }

    /// Runs a program to its end. Returns its standard output.
    ///
    /// # Panics
    ///
    /// If it fails.
    pub(crate) fn run(&self, words: &[&str]) -> String {
        let (name, mut command) = self.command(words);
        run(self.hosts, self.host(), &name, LIMIT, &mut command).expect_success(&name)
    }

    /// Waits until this guest answers. One that does not, because an earlier scenario was too much
    /// for its kernel, is booted again.
    ///
    /// # Panics
    ///
    /// If it does not answer then either.
    pub(crate) fn await_agent(&self) {
        let guest = self.guest.expect("a guest");
        if !self.answers(guest, 30) {
            pull_plug(guest);
            assert!(self.answers(guest, 150), "guest {guest} is dead");
        }
    }

    /// Whether a guest answers within so many seconds.
    fn answers(&self, guest: u8, seconds: u32) -> bool {
        let (seconds, guest, tool) = (seconds.to_string(), guest.to_string(), tool());
        let mut command = Command::new("timeout");
        command.args([&seconds, &tool, "on", "--patience", &seconds, &guest, "true"]);
        let name = format!("{}-answers-{seconds}", self.name);
        let mut process = Process::start(self.host(), &self.hosts.logs, &name, &mut command);
        process.wait(LIMIT * 2).success()
    }

    /// What kind of socket applications open here.
    pub(crate) fn socket(&self) -> Socket {
        if self.guest.is_some() { Socket::Smc } else { Socket::Tcp }
    }

    /// Starts a program, as it is.
    pub(crate) fn start(&self, words: &[&str]) -> Process {
        let (name, mut command) = self.command(words);
        Process::start(self.host(), &self.hosts.logs, &name, &mut command)
    }

    /// Starts a program that knows only TCP; in a guest its stream sockets become AF_SMC sockets.
    pub(crate) fn start_program(&self, words: &[&str]) -> Process {
        let (name, mut command) = self.program(words);
        Process::start(self.host(), &self.hosts.logs, &name, &mut command)
    }

    /// Runs such a program to its end. Returns its standard output.
    pub(crate) fn run_program(&self, words: &[&str]) -> String {
        let (name, mut command) = self.program(words);
        run(self.hosts, self.host(), &name, LIMIT, &mut command).expect_success(&name)
    }

    fn program(&self, words: &[&str]) -> (String, Command) {
        match self.socket() {
            Socket::Smc => self.command(&[&["env", &preload()], words].concat()),
            Socket::Tcp => self.command(words),
        }
    }

    /// Runs `smcgate-guest` to its end. Returns the lines that it prints.
    pub(crate) fn tool(&self, words: &[&str]) -> Vec<String> {
        let tool = tool();
        let words: Vec<&str> = [tool.as_str()].iter().chain(words).copied().collect();
        self.run(&words).lines().map(str::to_owned).collect()
    }

    /// Starts a server at `at` that plays `part` with each of `times` connections.
    pub(crate) fn accept(
        &self,
        socket: Socket,
        at: SocketAddrV4,
        times: u32,
        part: &str,
    ) -> Application {
        let server = self.start_application("accept", socket, at, times, part);
        wait_until("the server listens", LIMIT, || server.process.log().contains("listening"));
        server
    }

    /// Makes `times` connections to `to`, all at once, and plays `part` with each.
    pub(crate) fn connect(
        &self,
        socket: Socket,
        to: SocketAddrV4,
        times: u32,
        part: &str,
    ) -> Vec<Outcome> {
        self.start_connect(socket, to, times, part).outcomes()
    }

    /// Like [`Place::connect`], but does not wait for the connections.
    pub(crate) fn start_connect(
        &self,
        socket: Socket,
        to: SocketAddrV4,
        times: u32,
        part: &str,
    ) -> Application {
        self.start_application("connect", socket, to, times, part)
    }

    /// How many connections this guest's kernel has set up in this way, and how many in another way
    /// or not at all.
    pub(crate) fn counted(&self, way: &str) -> [u64; 2] {
        let mut counted = [0, 0];
        for line in self.tool(&["counts"]) {
            let (name, count) = line.rsplit_once(' ').expect("the form of a count");
            counted[usize::from(name != way)] += count.parse::<u64>().expect("a number");
        }
        counted
    }

    fn start_application(
        &self,
        role: &str,
        socket: Socket,
        address: SocketAddrV4,
        times: u32,
        part: &str,
    ) -> Application {
        let (address, times, tool) = (address.to_string(), times.to_string(), tool());
        let mut words = vec![tool.as_str(), role, "--times", &times];
        words.extend(socket.option());
        words.push(&address);
        words.extend(part.split(' '));
        let (name, mut command) = self.command(&words);
        let process = Process::start(self.host(), &self.hosts.logs, &name, &mut command);
        Application { process, output: self.hosts.logs.join(name).with_extension("out") }
    }

    /// Where programs for this place are started.
    fn host(&self) -> &'h Host {
        if self.guest.is_some() { &self.hosts.b } else { &self.hosts.a }
    }

    /// A command for this place, and a name that is unique in this test.
    fn command(&self, words: &[&str]) -> (String, Command) {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Relaxed);
        let what = words.iter().find(|word| !word.contains('/')).unwrap_or(&"command");
        let name = format!("{number:03}-{}-{what}", self.name);
        let words = self.wrapper.iter().map(String::as_str).chain(words.iter().copied());
        let words: Vec<&str> = words.collect();
        let (first, rest) = words.split_first().expect("a program");
        let mut command = match self.guest {
            Some(guest) => {
                let mut command = Command::new(tool());
                command.args(["on", &guest.to_string(), first]);
                command
            }
            None => Command::new(first),
        };
        command.args(rest);
        (name, command)
    }
}

impl Socket {
    fn option(self) -> Option<&'static str> {
        match self {
            Self::Smc => None,
            Self::Tcp => Some("--tcp"),
        }
    }
}

impl Application {
    /// Waits for its end. Returns what it saw.
    pub(crate) fn outcomes(mut self) -> Vec<Outcome> {
        let status = self.process.wait(LIMIT);
        assert!(status.success(), "{}", self.process.log());
        let output = fs::read_to_string(&self.output).expect("it wrote it");
        outcomes(&output.lines().map(str::to_owned).collect::<Vec<_>>())
    }
}

impl Outcome {
    /// The rest of the event that begins with `beginning`.
    ///
    /// # Panics
    ///
    /// If there is no such event.
    pub(crate) fn event(&self, beginning: &str) -> &str {
        let mut events = self.events.iter();
        let found = events.find_map(|event| event.strip_prefix(beginning));
        found.unwrap_or_else(|| panic!("no '{beginning}…' in {self:?}"))
    }
}

/// The outcome that all of `count` connections share.
///
/// # Panics
///
/// If their outcomes differ.
pub(crate) fn unanimous(outcomes: &[Outcome], count: u32) -> &Outcome {
    match outcomes {
        [only] if only.count == count => only,
        _ => panic!("not {count} connections with one outcome: {outcomes:#?}"),
    }
}

fn outcomes(lines: &[String]) -> Vec<Outcome> {
    let outcome = |line: &String| {
        let (count, events) = line.split_once(" x ").expect("the form of an outcome");
        let events = events.split("; ").map(str::to_owned).collect();
        Outcome { count: count.parse().expect("a number of connections"), events }
    };
    lines.iter().map(outcome).collect()
}

/// The variable that turns a program's stream sockets into AF_SMC sockets.
fn preload() -> String {
    let library = std::env::var("SMCGATE_PRELOAD").expect("scripts/linux-rig says where");
    format!("LD_PRELOAD={library}")
}

/// The program that serves as agent, application and operator's tool in a guest.
fn tool() -> String {
    std::env::var("SMCGATE_GUEST").expect("scripts/linux-rig says where")
}
