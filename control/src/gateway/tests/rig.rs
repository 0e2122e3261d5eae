//! One gateway on a thread of its own, and what a script needs to play its neighbours.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use smcr_engine::affinity::Affinity;
use smcr_engine::clock::Clock;
use smcr_engine::mailbox::{Receiver, Sender, Waker, mailbox};
use smcr_memory::Region;
use smcr_proto::wire::clc::proposal::Ipv4Subnet;
use smcr_proto::wire::clc::{Frame, Framer, Offer, Proposal};
use smcr_proto::{AlertToken, Gid, MacAddress, Mtu, PeerId, Psn, Qpn, Rkey, RmbeSize};
use smcr_rnic::any;

use super::US;
use crate::access_log::AccessLog;
use crate::config::{self, Config, RnicConfig, RnicKind};
use crate::confine::Confinement;
use crate::cores::{Assignment, Reason};
use crate::device::Devices;
use crate::gateway::{Arrivals, Gateway, Lookups, Names, OpenRnics, Parts, PortParts};
use crate::intercept::Interception;
use crate::listener::{Common, Listener};
use crate::loopback::Loopback;
use crate::network::{Network, Place};
use crate::placement::Seats;
use crate::pnet::PnetTable;
use crate::service::Service;
use crate::smc_option::OptionSource;
use crate::start::ports::start_poller;
use crate::stats::{Provider, Stats};
use crate::status::{Asker, Question, Traffic};

/// A gateway with one listener, and the socket that its upstream listens on.
pub(super) struct Rig {
    /// Where it listens.
    pub(super) gateway: SocketAddr,
    upstream: TcpListener,
    asker: Asker,
    stop: Sender<()>,
    thread: Option<JoinHandle<()>>,
}

impl Rig {
    /// Accepts SMC-R. Each test has a `number` of its own.
    pub(super) fn server(number: u8, more: &str) -> Self {
        Self::new(number, "accept = \"smc\"", more)
    }

    /// Connects by SMC-R.
    pub(super) fn client(number: u8, more: &str) -> Self {
        Self::new(number, "connect = \"smc\"", more)
    }

    /// Relays TCP.
    pub(super) fn relay(number: u8, more: &str) -> Self {
        Self::new(number, "", more)
    }

    /// Accepts SMC-R, but its RNIC is down.
    pub(super) fn server_whose_rnic_is_down(number: u8) -> Self {
        Self::start(number, "accept = \"smc\"", "", false)
    }

    fn new(number: u8, sides: &str, more: &str) -> Self {
        Self::start(number, sides, more, true)
    }

    fn start(number: u8, sides: &str, more: &str, is_up: bool) -> Self {
        let address = Ipv4Addr::new(127, 77, number, 1);
        // Both at once, or they might get the same port.
        let [held, upstream] = [(); 2].map(|()| TcpListener::bind((address, 0)).unwrap());
        let gateway = held.local_addr().unwrap();
        drop(held);
        let target = upstream.local_addr().unwrap();
        let text = text_of(gateway, target, sides, more);
        let config = Config::parse(&text, "rig.toml").unwrap();
        let waker = Waker::new().unwrap();
        let (ask, questions) = mailbox(16, waker.clone());
        let (stop, stopped) = mailbox(1, waker.clone());
        let thread = std::thread::spawn(move || {
            let mail = (waker, questions, stopped);
            built(config, (number, address, is_up), mail).run().unwrap();
        });
        let rig =
            Self { gateway, upstream, asker: Asker::new(ask, None), stop, thread: Some(thread) };
        // The first answer says that it listens.
        wait_until("the gateway runs", || rig.stats().schema == crate::stats::SCHEMA);
        rig
    }

    /// What an operator sees.
    pub(super) fn stats(&self) -> Stats {
        let answering = self.asker.stats();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let answer = async { tokio::time::timeout(Duration::from_secs(2), answering).await };
        runtime.block_on(answer).ok().and_then(Result::ok).unwrap_or_default()
    }

    /// The next connection that the gateway makes.
    pub(super) fn accept(&self) -> TcpStream {
        let (socket, _) = self.upstream.accept().unwrap();
        prepare(socket)
    }

    /// Lets the upstream answer no further SYN: its queue has room for the connection that is
    /// returned, and nobody accepts that.
    pub(super) fn crowd_upstream(&self) -> TcpStream {
        rustix::net::listen(&self.upstream, 0).unwrap();
        TcpStream::connect(self.upstream.local_addr().unwrap()).unwrap()
    }

    /// Lets the upstream refuse what comes from now on, and what was not answered yet.
    pub(super) fn close_upstream(&self) {
        rustix::net::shutdown(&self.upstream, rustix::net::Shutdown::Read).unwrap();
    }

    /// Carries the CLC messages between this gateway's next connection and `far`, until both sides
    /// count one more SMC-R connection; the caller holds both TCP connections then.
    pub(super) fn relay_rendezvous(&self, far: SocketAddr) -> (TcpStream, TcpStream) {
        let (here, there, _) = self.overhear_rendezvous(far);
        (here, there)
    }

    /// The same; and what was said: Proposal, Accept, Confirm.
    pub(super) fn overhear_rendezvous(
        &self,
        far: SocketAddr,
    ) -> (TcpStream, TcpStream, [Frame; 3]) {
        let before = self.stats().totals.connections_smc;
        let here = self.accept();
        let there = connect(far);
        let (mut client, mut server) =
            (Peer::new(here.try_clone().unwrap()), Peer::new(there.try_clone().unwrap()));
        let carry = |from: &mut Peer, to: &mut Peer, what: &str| {
            let frame = from.hear().expect(what);
            to.say(&frame);
            frame
        };
        let said = [
            carry(&mut client, &mut server, "a Proposal"),
            carry(&mut server, &mut client, "an Accept"),
            carry(&mut client, &mut server, "a Confirm"),
        ];
        wait_until("the rendezvous is over", || self.stats().totals.connections_smc == before + 1);
        (here, there, said)
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let _ = self.stop.send(());
        let outcome = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            outcome.expect("it was started").expect("the gateway did not panic");
        }
    }
}

/// The configuration of a gateway with one listener.
fn text_of(gateway: SocketAddr, target: SocketAddr, sides: &str, more: &str) -> String {
    let smc = "option = \"assume\"\nassume_peers = [\"127.0.0.0/8\"]\nrmb_elements = 4\n";
    // Most tests play a peer of RFC 7609.
    let versions = if more.contains("versions") { "" } else { "versions = [1]\n" };
    let smc = format!("[smc]\n{smc}{versions}");
    let smc = match more.contains("[smc]\n") {
        true => more.replace("[smc]\n", &smc),
        false => format!("{more}\n{smc}"),
    };
    format!(
        "drain_timeout = \"100ms\"\n[admin]\nlisten = \"none\"\n[poll]\npolicy = \"block\"\n\
             pin = false\n[[listener]]\nname = \"it\"\nbind = \"{gateway}\"\n{sides}\n\
             upstream = \"{target}\"\n{smc}"
    )
}

pub(super) fn open_port(
    config: &Config,
    address: Ipv4Addr,
    clock: Clock,
    waker: &Waker,
) -> PortParts<any::Nic> {
    let spec = any::Spec {
        kind: any::Kind::RoceUdp { address: Some(address.into()) },
        device: "lo",
        pollers: 1,
        mtu_max: None,
    };
    let (rnic, fabric) = any::open(&spec).unwrap().remove(0);
    let traffic = Arc::new(Traffic::default());
    let seat = Seats::new().take().unwrap();
    let affinity = Affinity::of_this_thread().unwrap();
    let run_on = (Assignment::unpinned(Reason::Off), &affinity);
    let memory = Region::new(usize::try_from(config.smc.send_pool).unwrap()).unwrap();
    let part = (Some(fabric), memory);
    let poller = start_poller(config, run_on, part, clock, waker, &traffic, seat).unwrap();
    PortParts {
        name: NAME.to_owned(),
        kind: RnicKind::RoceUdp { address: None },
        device: "lo".to_owned(),
        lan: crate::groups::Lan::default(),
        subnet: SUBNET,
        rnic: Some(rnic),
        poller,
        traffic,
    }
}

/// A gateway that relays TCP, and that the test turns by itself. Nobody listens for it upstream.
pub(super) fn halted(number: u8, more: &str) -> (Gateway<any::Nic>, SocketAddr) {
    let address = Ipv4Addr::new(127, 77, number, 1);
    let [held, upstream] = [(); 2].map(|()| TcpListener::bind((address, 0)).unwrap());
    let [listens, target] = [held, upstream].map(|it| it.local_addr().unwrap());
    let config = Config::parse(&text_of(listens, target, "", more), "rig.toml").unwrap();
    let waker = Waker::new().unwrap();
    let (_, questions) = mailbox(1, waker.clone());
    let (_, stop) = mailbox(1, waker.clone());
    (built(config, (number, address, true), (waker, questions, stop)), listens)
}

/// A gateway that listens and does not run yet.
fn built(
    config: Config,
    (number, address, is_up): (u8, Ipv4Addr, bool),
    (waker, questions, stop): (Waker, Receiver<Question>, Receiver<()>),
) -> Gateway<any::Nic> {
    let answers = mailbox(1, waker.clone());
    let clock = Clock::new();
    let access_log = AccessLog::new(clock, &config.access_log).unwrap();
    let option = OptionSource::choose(&config.smc, false);
    let common = Common::of(&config, &Arc::new(Loopback::Host), &Arc::default());
    let listen = |wanted: &config::Listener| {
        let socket = common.listen(wanted, &option).unwrap();
        Listener::new(wanted.clone(), common.clone(), Some(socket))
    };
    let listeners = config.listeners.iter().map(listen).collect();
    let port = open_port(&config, address, clock, &waker);
    let place = Place {
        rnic: NAME.to_owned(),
        device: Some(port.device.clone()),
        // A port without an address cannot be used.
        address: is_up.then_some(address.into()),
        wanted: true,
    };
    let (devices, pnet) = (Devices::read().unwrap(), PnetTable::new(&config));
    let network = Network::new(devices, pnet, vec![place]);
    let parts = Parts {
        door: None,
        config,
        clock,
        option,
        peer_id: PeerId([number; 8]),
        ports: vec![port],
        network,
        nics: Vec::new(),
        opener: Box::new(NoMore),
        listeners,
        common,
        service: Service::default(),
        confinement: Confinement::default(),
        lookups: Lookups::new(Vec::new(), answers),
        access_log,
        interception: Interception::default(),
        waker,
        questions,
        stop,
    };
    Gateway::new(parts).unwrap()
}

/// Opens no RNIC.
struct NoMore;

impl OpenRnics<any::Nic> for NoMore {
    fn wanted(&self, _: &Config, _: &Names, _: Arrivals<'_>) -> Vec<RnicConfig> {
        Vec::new()
    }

    fn open(&mut self, _: &Config, _: &RnicConfig) -> Result<Vec<PortParts<any::Nic>>, String> {
        Err("a rig has one RNIC".to_owned())
    }
}

/// The peer of a gateway in a rendezvous, played by the test.
pub(super) struct Peer {
    pub(super) socket: TcpStream,
    framer: Framer,
}

impl Peer {
    pub(super) fn new(socket: TcpStream) -> Self {
        Self { socket, framer: Framer::new() }
    }

    pub(super) fn say(&mut self, frame: &Frame) {
        self.socket.write_all(frame.encode().as_bytes()).unwrap();
    }

    /// The next message; `None` if the connection ends instead.
    pub(super) fn hear(&mut self) -> Option<Frame> {
        loop {
            if let Some(frame) = self.framer.next_frame().unwrap() {
                return Some(frame);
            }
            let mut bytes = vec![0; self.framer.wanted()];
            match self.socket.read(&mut bytes) {
                Ok(0) => return None,
                Ok(len) => assert_eq!(self.framer.feed(&bytes[..len]), len),
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return None,
                Err(error) => panic!("no answer: {error}"),
            }
        }
    }

    /// What Linux has in the place of version 1 if it offers only the other.
    pub(super) fn nobody() -> Proposal {
        Proposal {
            peer_id: PeerId::default(),
            gid: Gid::default(),
            mac: MacAddress::default(),
            subnet: Ipv4Subnet::default(),
            prefixes: Default::default(),
            prefix_count: 0,
            offers_smc_r_v1: false,
        }
    }

    pub(super) fn proposal(&self) -> Frame {
        Frame::Proposal(Proposal {
            peer_id: US,
            gid: Gid::from_ipv4([127, 77, 0, 1]),
            mac: MacAddress([2; 6]),
            subnet: SUBNET,
            prefixes: Default::default(),
            prefix_count: 0,
            offers_smc_r_v1: true,
        })
    }

    /// An element behind a queue pair at `gid`.
    pub(super) fn offer(&self, gid: Gid) -> Offer {
        Offer {
            first_contact: true,
            peer_id: US,
            gid,
            mac: MacAddress([2; 6]),
            qpn: Qpn(77),
            rkey: Rkey(1),
            rmbe_index: 1,
            alert_token: AlertToken(1),
            rmbe_size: RmbeSize::KIB_64,
            mtu: Mtu::B1024,
            rmb_address: 0,
            psn: Psn(0),
        }
    }
}

pub(super) fn connect(address: SocketAddr) -> TcpStream {
    prepare(TcpStream::connect(address).unwrap())
}

fn prepare(socket: TcpStream) -> TcpStream {
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

/// Closes with a reset.
pub(super) fn reset(socket: TcpStream) {
    crate::listener::reset(socket.into());
}

/// One question and one answer.
pub(super) fn assert_echo(client: &mut TcpStream, server: &mut TcpStream) {
    let mut seen = [0; 5];
    client.write_all(b"hello").unwrap();
    server.read_exact(&mut seen).unwrap();
    assert_eq!(&seen, b"hello");
    server.write_all(b"there").unwrap();
    client.read_exact(&mut seen).unwrap();
    assert_eq!(&seen, b"there");
}

/// Waits for what must happen soon.
pub(super) fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..PATIENCE.as_millis() / STEP.as_millis() {
        if holds() {
            return;
        }
        std::thread::sleep(STEP);
    }
    panic!("never: {what}");
}

/// Far above what anything takes here, and for the silent client far below what it would take
/// if the operator's limit were ignored.
const PATIENCE: Duration = Duration::from_secs(4);
const STEP: Duration = Duration::from_millis(5);
/// The soft RNIC of the loopback device, as the PNET table names it.
const NAME: &str = "soft-lo";
/// The network that everybody here is in.
pub(super) const SUBNET: Ipv4Subnet = Ipv4Subnet { network: [127, 0, 0, 0], prefix_bits: 8 };
