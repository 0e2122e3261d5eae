//! The network namespaces of the rig, in the form that modules of the end-to-end suite need.

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::os::fd::AsFd;
use std::panic;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Where programs run that are not in a guest.
pub(crate) struct Hosts {
    /// The host of our gateway.
    pub(crate) a: Host,
    /// The rig itself: the network of its bridges, where captures are taken.
    pub(crate) b: Host,
    /// Folder for the logs of the processes of this test.
    pub(crate) logs: PathBuf,
}

/// One of them.
pub(crate) struct Host {
    /// None: where the test itself runs.
    namespace: Option<File>,
    pub(crate) device: &'static str,
    pub(crate) address: Ipv4Addr,
}

impl Hosts {
    /// # Panics
    ///
    /// Outside of `scripts/linux-rig`.
    pub(crate) fn new(test: &str) -> Self {
        let logs = target().join("interop").join(test);
        if logs.exists() {
            fs::remove_dir_all(&logs).expect("the logs of the last run are ours to delete");
        }
        fs::create_dir_all(&logs).expect("target/ is writable");
        let namespace = std::env::var_os("SMCGATE_HOST_H").expect("scripts/linux-rig says where");
        let namespace = File::open(Path::new(&namespace)).expect("scripts/linux-rig made it");
        let address = Ipv4Addr::new(10, 9, 0, 13);
        let a = Host { namespace: Some(namespace), device: "vh", address };
        let b = Host { namespace: None, device: "lan", address: Ipv4Addr::new(10, 99, 0, 254) };
        Self { a, b, logs }
    }
}

impl Host {
    /// Does `work` on this host. Sockets opened and processes started there stay there.
    pub(crate) fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let inside = || {
            if let Some(namespace) = &self.namespace {
                let network = Some(LinkNameSpaceType::Network);
                move_into_link_name_space(namespace.as_fd(), network)
                    .expect("entering a network namespace needs root");
            }
            work()
        };
        thread::scope(|scope| scope.spawn(inside).join())
            .unwrap_or_else(|cause| panic::resume_unwind(cause))
    }

    /// This host's address on the wire, with this port.
    pub(crate) fn at(&self, port: u16) -> SocketAddrV4 {
        SocketAddrV4::new(self.address, port)
    }

    /// Connects to `to` from this host.
    pub(crate) fn connect(&self, to: SocketAddrV4) -> std::io::Result<TcpStream> {
        self.enter(|| TcpStream::connect_timeout(&to.into(), Duration::from_secs(10)))
    }
}

/// Cargo's target directory: this binary is `target/PROFILE/deps/interop-…`.
pub(crate) fn target() -> PathBuf {
    let program = std::env::current_exe().expect("/proc is mounted");
    program.ancestors().nth(3).expect("cargo nests it three deep").to_owned()
}
