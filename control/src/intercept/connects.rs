//! Interception at `connect`, by eBPF.

use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::PathBuf;

use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, Object};
use rustix::fs::fstat;
use rustix::net::{AddressFamily, SocketType, socket};
use smcr_os::tcp::network_cookie;

use crate::config::{Cidr, Intercept};
use crate::ebpf;
use crate::ebpf::cgroup::{Root, is_absent};

/// The loaded programs. Dropping it detaches them: connections that were intercepted go on, and new
/// ones go where applications want them to.
pub struct Connects {
    intercepted: MapHandle,
    /// Where connections wanted to go, by our sockets.
    arrived: MapHandle,
    /// What is intercepted for a listener.
    led: Vec<(Cidr, u16)>,
    /// The programs.
    object: Object,
    /// Hold those in the root that see all connections.
    _everywhere: Vec<Link>,
    /// The cgroups whose connections are intercepted; none if it is all.
    within: Vec<Within>,
}

/// A cgroup with programs.
struct Within {
    path: PathBuf,
    /// Its inode, and what holds the programs in it; none while there is no such cgroup.
    attached: Option<(u64, Vec<Link>)>,
    /// Why no programs are attached, or it is not known whether they still should be, as was said
    /// last.
    trouble: Option<String>,
}

impl Connects {
    /// Loads the programs for applications in `cgroups` and all below, beside whatever else is
    /// attached there, and below `root`. Nothing is intercepted yet, and never a socket whose
    /// SO_MARK is `own_mark`. A cgroup that is not there is awaited: see
    /// [`look_again`](Self::look_again).
    ///
    /// # Errors
    ///
    /// Why not, in words that continue a sentence; nothing is left behind.
    pub(crate) fn load(root: &Root, cgroups: &[PathBuf], own_mark: u32) -> Result<Self, String> {
        let any = socket(AddressFamily::INET, SocketType::STREAM, None);
        let network = any.map_err(io::Error::from).and_then(|any| network_cookie(any.as_fd()));
        let network = network.map_err(|error| error.to_string())?;
        let refused = |error: libbpf_rs::Error| error.to_string();
        let mut object = ebpf::open(PROGRAM).map_err(refused)?;
        {
            let mut constants = object
                .maps_mut()
                .find(|map| map.name().to_string_lossy().ends_with(".rodata"))
                .expect("the programs have constants");
            let constants = constants.initial_value_mut().expect("they have values");
            constants[..8].copy_from_slice(&network.to_ne_bytes());
            constants[8..12].copy_from_slice(&own_mark.to_ne_bytes());
        }
        let mut object = object.load().map_err(refused)?;
        let map = |name| ebpf::map(&object, name).map_err(refused);
        let (intercepted, arrived) = (map("intercepted")?, map("arrived")?);
        let is_everywhere = |name: &OsStr| name == FOLLOW || cgroups.is_empty();
        let everywhere = attach(&mut object, root.as_fd(), is_everywhere).map_err(refused)?;
        let within =
            cgroups.iter().map(|path| Within { path: path.clone(), attached: None, trouble: None });
        let mut within: Vec<Within> = within.collect();
        within.iter_mut().try_for_each(|one| one.look(&mut object, root))?;
        let (led, _everywhere) = (Vec::new(), everywhere);
        Ok(Self { intercepted, arrived, led, object, _everywhere, within })
    }

    /// Looks for the cgroups afresh. A service that starts again has another cgroup of the same
    /// name, and the programs are gone with the one before. Call it once in a while.
    pub(crate) fn look_again(&mut self, root: &Root) {
        for one in &mut self.within {
            if let Err(why) = one.look(&mut self.object, root) {
                one.say(why);
            }
        }
    }

    /// The same for all applications of this host that we can see.
    ///
    /// # Errors
    ///
    /// Why not, in words that continue a sentence; nothing is left behind.
    pub fn load_for_all(own_mark: u32) -> Result<Self, String> {
        Self::load(&Root::open()?, &[], own_mark)
    }

    /// From now on connections to `port` in `network` come to `listener`. Where networks overlap,
    /// the smaller one counts.
    ///
    /// # Errors
    ///
    /// When there are too many.
    pub fn intercept(&self, network: Cidr, port: u16, listener: SocketAddr) -> io::Result<()> {
        let key = destination(network, port);
        self.intercepted.update(&key, &place(listener), MapFlags::ANY).map_err(io::Error::other)
    }

    /// From now on what `intercept` says comes to the listener at `bind`.
    ///
    /// # Errors
    ///
    /// As [`intercept`](Self::intercept).
    pub fn lead(&mut self, intercept: &Intercept, bind: SocketAddr) -> io::Result<()> {
        for network in networks_of(intercept) {
            // A listener at all addresses is called by that of the loopback device.
            let ip = match (bind.ip().is_unspecified(), network.base()) {
                (false, _) => bind.ip(),
                (true, IpAddr::V4(_)) => Ipv4Addr::LOCALHOST.into(),
                (true, IpAddr::V6(_)) => Ipv6Addr::LOCALHOST.into(),
            };
            // One family cannot be led to the other.
            if ip.is_ipv4() != network.base().is_ipv4() || (ip.is_ipv6() && bind.is_ipv4()) {
                continue;
            }
            for port in intercept.ports.iter().cloned().flatten() {
                self.intercept(network, port, SocketAddr::new(ip, bind.port()))?;
                self.led.push((network, port));
            }
        }
        // Who says everybody does not mean what programs of this host say to each other, nor
        // addresses that mean nothing without a device.
        if intercept.networks.is_empty() {
            for (own, nobody) in NEVER_BY_DEFAULT {
                let own: Cidr = own.parse().expect("it is one");
                for port in intercept.ports.iter().cloned().flatten() {
                    self.intercept(own, port, nobody.parse().expect("it is one"))?;
                    self.led.push((own, port));
                }
            }
        }
        Ok(())
    }

    /// Intercepts nothing more. Connections that were intercepted go on.
    pub fn release_all(&mut self) {
        for (network, port) in std::mem::take(&mut self.led) {
            self.release(network, port);
        }
    }

    /// Ends that.
    pub fn release(&self, network: Cidr, port: u16) {
        // Fails only if it was never intercepted.
        drop(self.intercepted.delete(&destination(network, port)));
    }

    /// Where the connection wanted to go that was accepted; none if it was not intercepted.
    pub fn original_of(&self, accepted: BorrowedFd<'_>) -> Option<SocketAddr> {
        let key = accepted.as_raw_fd().to_ne_bytes();
        let mut value = [0; PLACE_LEN];
        let found = self.arrived.lookup_into(&key, &mut value, MapFlags::ANY);
        found.is_ok_and(|found| found).then(|| address(&value))
    }
}

impl Within {
    /// Attaches the programs if there is another cgroup than before.
    ///
    /// # Errors
    ///
    /// Why they cannot be attached to one that is there, in words that continue a sentence. If it
    /// is not known whether there is one, they stay where they are.
    fn look(&mut self, object: &mut Object, root: &Root) -> Result<(), String> {
        let opened = root.below(&self.path);
        let (inode, found) = match opened.and_then(|it| Ok((fstat(&it)?.st_ino, it))) {
            Ok(found) => found,
            Err(error) if is_absent(error) => {
                self.attached = None;
                self.say("there is none; its connections are intercepted when there is".to_owned());
                return Ok(());
            }
            Err(error) => {
                return Err(format!(
                    "the cgroup {} cannot be opened: {error}",
                    self.path.display()
                ));
            }
        };
        if self.attached.as_ref().is_some_and(|(attached, _)| *attached == inode) {
            self.trouble = None;
            return Ok(());
        }
        self.attached = None;
        let cgroup = self.path.display();
        let links = attach(object, found.as_fd(), |name| name != FOLLOW)
            .map_err(|error| format!("the cgroup {cgroup} takes no program: {error}"))?;
        tracing::info!(%cgroup, "its connections are intercepted");
        (self.attached, self.trouble) = (Some((inode, links)), None);
        Ok(())
    }

    /// Says why nothing is intercepted, or would not be if there were another cgroup than before;
    /// unless that is known.
    fn say(&mut self, why: String) {
        if self.trouble.as_ref() != Some(&why) {
            let cgroup = self.path.display();
            match self.attached {
                None => tracing::warn!(%cgroup, why, "nothing is intercepted"),
                Some(_) => tracing::warn!(%cgroup, why, "a new one would not be intercepted"),
            }
            self.trouble = Some(why);
        }
    }
}

/// Attaches those programs to `cgroup` whose names are `wanted`.
fn attach(
    object: &mut Object,
    cgroup: BorrowedFd<'_>,
    wanted: impl Fn(&OsStr) -> bool,
) -> libbpf_rs::Result<Vec<Link>> {
    let programs = object.progs_mut().filter(|program| wanted(program.name()));
    programs.map(|program| program.attach_cgroup(cgroup.as_raw_fd())).collect()
}

impl fmt::Debug for Connects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connects").finish_non_exhaustive()
    }
}

/// `struct place` of the programs: address and port in network byte order.
pub(super) fn place(at: SocketAddr) -> [u8; PLACE_LEN] {
    let mut out = [0; PLACE_LEN];
    out[..16].copy_from_slice(&mapped(at.ip()).octets());
    // The port is the first half of a word.
    out[16..18].copy_from_slice(&at.port().to_be_bytes());
    out
}

fn address(place: &[u8; PLACE_LEN]) -> SocketAddr {
    let (address, port) = place.split_first_chunk::<16>().expect("it is longer");
    let port = u16::from_be_bytes([port[0], port[1]]);
    SocketAddr::new(IpAddr::V6(Ipv6Addr::from(*address)).to_canonical(), port)
}

/// The networks that `intercept` names; if it names none, all.
pub(super) fn networks_of(intercept: &Intercept) -> Vec<Cidr> {
    match &intercept.networks[..] {
        [] => {
            vec![EVERYBODY_V4.parse().expect("it is one"), EVERYBODY_V6.parse().expect("it is one")]
        }
        some => some.to_vec(),
    }
}

/// `struct destination` of the programs.
pub(super) fn destination(network: Cidr, port: u16) -> [u8; 4 + PLACE_LEN] {
    let base = network.base();
    let bits = u32::from(network.prefix_bits()) + if base.is_ipv4() { 96 } else { 0 };
    let mut out = [0; 4 + PLACE_LEN];
    out[..4].copy_from_slice(&(32 + bits).to_ne_bytes());
    out[4..6].copy_from_slice(&port.to_be_bytes());
    out[8..].copy_from_slice(&mapped(base).octets());
    out
}

pub(super) fn mapped(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}

/// Networks that only whoever names them means, and where to they are led: nowhere.
const NEVER_BY_DEFAULT: [(&str, &str); 3] =
    [("127.0.0.0/8", "0.0.0.0:0"), ("::1", "[::]:0"), ("fe80::/10", "[::]:0")];
const EVERYBODY_V4: &str = "0.0.0.0/0";
const EVERYBODY_V6: &str = "::/0";
pub(super) const PLACE_LEN: usize = 20;
/// The program that sees both ends of connections.
const FOLLOW: &str = "follow";
/// Compiled by `build.rs`.
const PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/intercept.o"));

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// A layout that the programs do not have would intercept nothing, or something else.
    #[test]
    fn places_have_the_layout_of_the_programs() {
        let at: SocketAddr = "10.8.0.2:7010".parse().unwrap();
        let bytes = place(at);
        assert_eq!(bytes[8..], [0, 0, 255, 255, 10, 8, 0, 2, 0x1b, 0x62, 0, 0]);
        assert_eq!(address(&bytes), at);
        let at: SocketAddr = "[fd00::2]:443".parse().unwrap();
        assert_eq!(address(&place(at)), at);
        let key = destination("10.8.0.0/24".parse().unwrap(), 7010);
        assert_eq!(key[..8], [152, 0, 0, 0, 0x1b, 0x62, 0, 0]);
        assert_eq!(key[16..], [0, 0, 255, 255, 10, 8, 0, 0]);
        let key = destination("::/0".parse().unwrap(), 1);
        assert_eq!(key[..4], [32, 0, 0, 0]);
    }

    /// An application that connects to a place where nobody listens comes to the listener, is told
    /// that it is where it wanted to be, and the listener learns that too. Others, and those after
    /// us, are left alone.
    #[test]
    #[ignore = "needs the privilege to load eBPF; run by scripts/test e2e"]
    fn applications_come_to_the_listener_and_do_not_notice() {
        let connects = Connects::load_for_all(0x534d).expect("eBPF is permitted");
        for (listens, network, wanted, other) in [
            ("127.0.0.1:0", "127.7.0.0/16", "127.7.0.7:7010", "127.7.0.7:7011"),
            ("[::1]:0", "::1", "[::1]:7010", "[::1]:7011"),
        ] {
            let listener = TcpListener::bind(listens).unwrap();
            let wanted: SocketAddr = wanted.parse().unwrap();
            let network: Cidr = network.parse().unwrap();
            connects.intercept(network, 7010, listener.local_addr().unwrap()).unwrap();
            let application = TcpStream::connect(wanted).expect("it is led here");
            assert_eq!(application.peer_addr().unwrap(), wanted);
            let (accepted, _) = listener.accept().unwrap();
            assert_eq!(connects.original_of(accepted.as_fd()), Some(wanted));
            let limit = std::time::Duration::from_millis(200);
            assert!(TcpStream::connect_timeout(&other.parse().unwrap(), limit).is_err());
            connects.release(network, 7010);
            assert!(TcpStream::connect_timeout(&wanted, limit).is_err());
        }
    }

    /// A look that fails for want of descriptors or memory says nothing about the cgroup, whose
    /// applications would go past the gateway if the programs were taken off it.
    #[test]
    #[ignore = "needs the privilege to load eBPF; run by scripts/test e2e"]
    fn a_look_that_fails_for_another_reason_leaves_the_programs() {
        let root = Root::open().expect("it can be mounted");
        let mut connects = Connects::load(&root, &["/".into()], 0x534d).expect("it is permitted");
        let gateway = TcpListener::bind("127.0.0.1:0").unwrap();
        let far: SocketAddr = "127.9.0.9:7010".parse().unwrap();
        let network: Cidr = "127.9.0.9".parse().unwrap();
        connects.intercept(network, 7010, gateway.local_addr().unwrap()).unwrap();
        // The kernel answers ENAMETOOLONG: for EMFILE, other tests would have no descriptors, too.
        connects.within[0].path = ["/", &"x".repeat(5000)].concat().into();
        connects.look_again(&root);
        TcpStream::connect(far).expect("it is still led to the gateway");
        assert!(connects.within[0].trouble.as_ref().unwrap().contains("cannot be opened"));
        connects.within[0].path = "/".into();
        connects.look_again(&root);
        assert_eq!(connects.within[0].trouble, None, "the next time is news");
        connects.within[0].path = "/none".into();
        connects.look_again(&root);
        assert!(TcpStream::connect(far).is_err());
    }

    /// Ports are used again. Whoever comes to the listener from where an application was that gave
    /// up must not be led to where that one wanted to go.
    #[test]
    #[ignore = "needs the privilege to load eBPF; run by scripts/test e2e"]
    fn a_connection_is_not_taken_for_one_that_was_there_before() {
        let connects = Connects::load_for_all(0x534d).expect("eBPF is permitted");
        let gateway = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = gateway.local_addr().unwrap();
        let far: SocketAddr = "198.51.100.7:7010".parse().unwrap();
        connects.intercept("198.51.100.0/24".parse().unwrap(), 7010, at).unwrap();
        // It ends before anybody has asked where it wanted to go, by a reset.
        let connect = |from: SocketAddr, to: SocketAddr| {
            let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None);
            let socket = socket.unwrap();
            socket.set_reuse_address(true).unwrap();
            socket.set_linger(Some(std::time::Duration::ZERO)).unwrap();
            socket.bind(&from.into()).unwrap();
            socket.connect(&to.into()).unwrap();
            let source = socket.local_addr().unwrap().as_socket().unwrap();
            (socket, source)
        };
        let (first, source) = connect("127.0.0.1:0".parse().unwrap(), far);
        let accepted = gateway.accept().unwrap().0;
        drop((first, accepted));
        let (_second, _) = connect(source, at);
        let accepted = gateway.accept().unwrap().0;
        assert_eq!(connects.original_of(accepted.as_fd()), None);
    }

    /// A socket may be used once more after a connect has failed. It must then be told whom it is
    /// connected to in truth.
    #[test]
    #[ignore = "needs the privilege to load eBPF; run by scripts/test e2e"]
    fn a_socket_that_goes_elsewhere_is_told_where_it_is() {
        let connects = Connects::load_for_all(0x534d).expect("eBPF is permitted");
        // Tests run at the same time, and each one's program sees what the others connect.
        let far: SocketAddr = "203.0.113.7:7010".parse().unwrap();
        let near = TcpListener::bind("127.0.0.1:0").unwrap();
        let place = near.local_addr().unwrap();
        let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        connects.intercept("203.0.113.0/24".parse().unwrap(), 7010, nobody).unwrap();
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        let refused = rustix::net::connect(&socket, &far);
        assert_eq!(refused, Err(rustix::io::Errno::CONNREFUSED));
        rustix::net::connect(&socket, &place).unwrap();
        assert_eq!(TcpStream::from(socket).peer_addr().unwrap(), place);
    }

    /// An operator who names no networks means other hosts, not what programs of this one say to
    /// each other.
    #[test]
    #[ignore = "needs the privilege to load eBPF; run by scripts/test e2e"]
    fn everybody_does_not_mean_ourselves() {
        let mut connects = Connects::load_for_all(0x534d).expect("eBPF is permitted");
        let gateway = TcpListener::bind("[::]:0").unwrap();
        let own = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = own.local_addr().unwrap();
        let intercept = Intercept {
            way: crate::config::InterceptWay::Ebpf,
            ports: vec![at.port()..=at.port()],
            networks: Vec::new(),
            cgroups: Vec::new(),
        };
        connects.lead(&intercept, gateway.local_addr().unwrap()).unwrap();
        let _application = TcpStream::connect(at).unwrap();
        own.accept().unwrap();
        for far in ["198.51.100.7", "2001:db8::7"] {
            let far = SocketAddr::new(far.parse().unwrap(), at.port());
            let application = TcpStream::connect(far).expect("it is led to the gateway");
            assert_eq!(application.peer_addr().unwrap(), far);
            let (accepted, _) = gateway.accept().unwrap();
            assert_eq!(connects.original_of(accepted.as_fd()), Some(far));
        }
        connects.release_all();
    }
}
