//! Two hosts on one machine: network namespaces joined by a veth pair, gone when dropped.

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::panic;
use std::path::{Path, PathBuf};
use std::process::{self, Command};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use socket2::SockRef;

/// How long a connection may take to come up before the test has failed.
pub(crate) const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// Two hosts that reach each other and nothing else.
pub(crate) struct Hosts {
    pub(crate) a: Host,
    pub(crate) b: Host,
    /// Folder for the logs of the processes of this test.
    pub(crate) logs: PathBuf,
}

/// A host: a network namespace with a device and an address.
pub(crate) struct Host {
    /// Name of the namespace, as `ip netns` shows it.
    pub(crate) name: String,
    namespace: File,
    pub(crate) device: &'static str,
    pub(crate) address: Ipv4Addr,
}

impl Hosts {
    /// Makes both hosts, with names no other run uses.
    ///
    /// # Panics
    ///
    /// If we lack the privilege to make network namespaces.
    pub(crate) fn new(test: &str) -> Self {
        raise_descriptor_limit();
        let logs = target().join("e2e").join(test);
        if logs.exists() {
            fs::remove_dir_all(&logs).expect("the logs of the last run are ours to delete");
        }
        fs::create_dir_all(&logs).expect("target/ is writable");

        static COUNT: AtomicU32 = AtomicU32::new(0);
        let unique = format!("smcgate-{}-{}", process::id(), COUNT.fetch_add(1, Relaxed));
        let a = Host::new(&format!("{unique}-a"), "va", Ipv4Addr::new(10, 8, 0, 1));
        let b = Host::new(&format!("{unique}-b"), "vb", Ipv4Addr::new(10, 8, 0, 2));
        ip(&["link", "add", "va", "netns", &a.name, "type", "veth", "peer", "name", "vb"]
            .into_iter()
            .chain(["netns", &b.name])
            .collect::<Vec<_>>());
        for host in [&a, &b] {
            let address = format!("{}/24", host.address);
            ip(&["-n", &host.name, "address", "add", &address, "dev", host.device]);
            ip(&["-n", &host.name, "link", "set", "lo", "up"]);
            ip(&["-n", &host.name, "link", "set", host.device, "up"]);
        }
        Self { a, b, logs }
    }

    /// Like [`Self::new`], with a second cable between devices in a subnet of their own.
    pub(crate) fn with_two_paths(test: &str) -> Self {
        let hosts = Self::new(test);
        let Self { a, b, .. } = &hosts;
        a.ip(&["link", "add", a.second(), "type", "veth", "peer", "name", b.second()]);
        a.ip(&["link", "set", b.second(), "netns", &b.name]);
        for (host, address) in [(a, "10.9.0.1/24"), (b, "10.9.0.2/24")] {
            host.ip(&["address", "add", address, "dev", host.second()]);
            host.ip(&["link", "set", host.second(), "up"]);
        }
        hosts
    }
}

impl Host {
    pub(crate) fn new(name: &str, device: &'static str, address: Ipv4Addr) -> Self {
        ip(&["netns", "add", name]);
        let namespace = File::open(Path::new("/run/netns").join(name)).expect("just made");
        Self { name: name.to_owned(), namespace, device, address }
    }

    /// Does `work` on this host. Sockets opened and processes started there stay there.
    pub(crate) fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let inside = || {
            move_into_link_name_space(self.namespace.as_fd(), Some(LinkNameSpaceType::Network))
                .expect("entering a network namespace needs root");
            work()
        };
        thread::scope(|scope| scope.spawn(inside).join())
            .unwrap_or_else(|cause| panic::resume_unwind(cause))
    }

    /// This host's address on the wire, with this port.
    pub(crate) fn at(&self, port: u16) -> SocketAddrV4 {
        SocketAddrV4::new(self.address, port)
    }

    /// Its end of the second cable.
    pub(crate) fn second(&self) -> &'static str {
        if self.device == "va" { "wa" } else { "wb" }
    }

    /// Plugs one of its two cables in, or pulls it.
    pub(crate) fn set_path(&self, path: usize, up: bool) {
        let device = [self.device, self.second()][path];
        self.ip(&["link", "set", device, if up { "up" } else { "down" }]);
    }

    /// Listens on `at`, which must be an address of this host.
    pub(crate) fn listen(&self, at: impl Into<SocketAddr>) -> TcpListener {
        let at = at.into();
        self.enter(|| TcpListener::bind(at)).unwrap_or_else(|e| panic!("listen on {at}: {e}"))
    }

    /// Runs `ip` on this host.
    pub(crate) fn ip(&self, arguments: &[&str]) {
        ip(&[&["-n", &self.name], arguments].concat());
    }

    /// Connects to `to` from this host.
    pub(crate) fn connect(&self, to: impl Into<SocketAddr>) -> std::io::Result<TcpStream> {
        let to = to.into();
        self.enter(|| TcpStream::connect_timeout(&to, CONNECT_LIMIT))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // A namespace that is left behind is no reason to panic while panicking.
        drop(Command::new("ip").args(["netns", "delete", &self.name]).status());
    }
}

/// Accepts the next connection of `listener`; its reads and writes fail after `limit`.
///
/// # Panics
///
/// If none arrives in time.
pub(crate) fn accept(listener: &TcpListener, limit: Duration) -> TcpStream {
    // Linux applies the read timeout of a listening socket to accept.
    SockRef::from(listener).set_read_timeout(Some(limit)).expect("an open socket");
    let (stream, _) = listener.accept().expect("a connection at the server in time");
    set_limit(&stream, limit);
    stream
}

/// Lets reads and writes of `stream` fail after `limit` without progress.
pub(crate) fn set_limit(stream: &TcpStream, limit: Duration) {
    stream.set_read_timeout(Some(limit)).expect("an open socket");
    stream.set_write_timeout(Some(limit)).expect("an open socket");
}

/// Cargo's target directory; this binary is `target/PROFILE/deps/e2e-…`.
pub(crate) fn target() -> PathBuf {
    let program = std::env::current_exe().expect("/proc is mounted");
    program.ancestors().nth(3).expect("cargo nests it three deep").to_owned()
}

fn ip(arguments: &[&str]) {
    let output = Command::new("ip").args(arguments).output().expect("scripts/setup installs ip");
    assert!(
        output.status.success(),
        "ip {}: {}(this suite needs root)",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Raises the descriptor limit: a test may hold both ends of thousands of connections. Programs
/// that it starts inherit the limit.
fn raise_descriptor_limit() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
        .expect("up to the hard limit everybody may");
}
