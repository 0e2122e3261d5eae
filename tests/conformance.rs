//! The contract of [`Fabric`](smcr_rnic::Fabric), asked of every backend.
//!
//! A backend is done when it passes. To add one: implement [`rig::Harness`] for it and add a line
//! at the end of this file.
#![allow(clippy::unwrap_used, reason = "a test stops where it cannot go on")]

#[path = "conformance/cross.rs"]
mod cross;
#[path = "conformance/faulty.rs"]
mod faulty;
#[path = "conformance/flow.rs"]
mod flow;
#[path = "conformance/promises.rs"]
mod promises;
#[path = "conformance/rig.rs"]
mod rig;
#[path = "conformance/unplug.rs"]
mod unplug;
#[path = "conformance/verbs.rs"]
mod verbs_troubles;
#[path = "conformance/wired.rs"]
mod wired;

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use smcr_memory::Backing;
use smcr_proto::{Gid, Instant, MacAddress, Mtu};
use smcr_rnic::Port;
use smcr_rnic::any;
use smcr_rnic::dice::{Chance, Dice};
use smcr_rnic::roce::dpdk::{self, Dpdk};
use smcr_rnic::roce::lossy::{self, Lossy};
use smcr_rnic::roce::udp::{self, Config, Place, Udp};
use smcr_rnic::roce::{self, Parameters, Share, UDP_PORT};
use smcr_rnic::shm;
use smcr_rnic::sim::{self, Network, Odds};
use smcr_rnic::verbs;
use tempfile::TempDir;

use cross::Cross;
use faulty::FaultyUdp;
use rig::Harness;
use wired::{DPDK, PACKET, PACKET_V1, PACKET_V6, UDP, UDP_V6, Wired};

/// All promises, for one backend, under as many seeds as it can afford.
macro_rules! conformance {
    (each $attributes:tt $harness:ty, $seeds:expr, $($promise:ident)*) => {
        $(conformance!(one $attributes $harness, $seeds, $promise);)*
    };
    (one [$($attributes:tt)*] $harness:ty, $seeds:expr, $promise:ident) => {
        #[test]
        $($attributes)*
        fn $promise() {
            for seed in smcgate_tests::seeds($seeds) {
                println!("SMC_SEED={seed}");
                promises::$promise::<$harness>(seed);
            }
        }
    };
    ($(#[$attribute:meta])* $backend:ident, $harness:ty, $seeds:expr) => {
        mod $backend {
            use super::*;

            conformance!(each [$(#[$attribute])*] $harness, $seeds,
                bytes_are_there_when_their_message_is
                many_queue_pairs_in_both_directions
                bulk_is_not_altered
                a_thousand_messages_arrive_once_and_in_order
                long_messages_arrive_whole_and_in_order
                a_message_that_is_too_long_is_contained
                forbidden_writes_are_contained
                writes_up_to_the_edges_are_placed
                breaking_under_load_brings_everything_home
                a_silent_peer_is_given_up
                a_failed_queue_pair_breaks_at_once
                release_flushes_and_disturbs_nobody
                room_is_what_can_be_posted
                the_first_message_waits_for_the_peer
                queue_pairs_come_and_go
            );
        }
    };
}

/// The two ports of a pair under test.
fn ports() -> [Port; 2] {
    [1, 2].map(|n| Port {
        gid: Gid::from_ipv4([127, 0, 0, n]),
        mac: MacAddress([2, 0, 0, 0, 0, n]),
        mtu: Mtu::B1024,
    })
}

/// The simulated network, on its virtual clock.
struct Sim<const MALICIOUS: bool> {
    network: Network,
    now: Instant,
}

impl<const MALICIOUS: bool> Harness for Sim<MALICIOUS> {
    type Rnic = sim::Rnic;
    type Fabric = sim::Fabric;
    const CUTS_WRITES: bool = false;
    const LOSES_ON_BREAK: bool = MALICIOUS;

    fn new(seed: u64) -> (Self, [(sim::Rnic, sim::Fabric); 2]) {
        let network = Network::new(seed, if MALICIOUS { Odds::MALICIOUS } else { Odds::CALM });
        let nics = ports().map(|port| network.rnic(port));
        (Self { network, now: Instant::default() }, nics)
    }

    fn now(&self) -> Instant {
        self.now
    }

    fn wait(&mut self, until: Option<Instant>) {
        let next = [until, self.network.next_event()].into_iter().flatten().min();
        // Time passes on a quiet network, too, for tests that wait and see that nothing happens.
        self.now = next.unwrap_or(self.now + Duration::from_millis(1)).max(self.now);
    }
}

/// The soft RNIC over a wire in memory that loses this number of packets in a thousand; its packets
/// may be dense.
struct RoceOverWire<const LOST_OF_1000: u32, const DENSE: bool> {
    now: Instant,
}

impl<const LOST_OF_1000: u32, const DENSE: bool> Harness for RoceOverWire<LOST_OF_1000, DENSE> {
    type Rnic = roce::Rnic;
    type Fabric = roce::Fabric<Lossy>;
    const CUTS_WRITES: bool = true;
    const DENSE: bool = DENSE;

    fn new(seed: u64) -> (Self, [(roce::Rnic, roce::Fabric<Lossy>); 2]) {
        let loss = Chance(LOST_OF_1000 * 1_000);
        // A wire that loses packets has other faults, too.
        let odds = lossy::Odds {
            loss,
            repeat: loss,
            overtake: loss,
            mark: loss,
            damage: loss,
            block: loss,
        };
        let network = lossy::Network::new(seed, odds);
        let nics = ports().map(|port| {
            let address = Ipv4Addr::from(port.gid.to_ipv4().unwrap());
            let wire = network.plug(SocketAddr::from((address, UDP_PORT)));
            let mut dice = Dice::new(seed ^ u64::from(address.to_bits()));
            // The first PSNs are shortly before the wrap, so that every test crosses it.
            let entropy =
                Box::new(move || u32::try_from(dice.next_u64() >> 32).unwrap() | NEAR_THE_LAST_PSN);
            let path = Arc::new(|_, _| Ok(1_500));
            let setup = Parameters {
                backing: Backing::Private,
                port,
                udp_port: UDP_PORT,
                share: Share::ALL,
                payload_max: 4096,
                window_max: 1 << 20,
                entropy,
                path,
            };
            roce::join(setup, wire)
        });
        (Self { now: Instant::default() }, nics)
    }

    fn now(&self) -> Instant {
        self.now
    }

    fn wait(&mut self, until: Option<Instant>) {
        // Packets on the wire have no time of arrival, so time moves in small steps.
        let step = self.now + Duration::from_micros(20);
        self.now = until.map_or(step, |until| until.clamp(self.now + NANOSECOND, step));
    }
}

/// Bits that are set in all first PSNs over a wire in memory.
const NEAR_THE_LAST_PSN: u32 = 0x00ff_ff00;
/// The smallest step of time.
const NANOSECOND: Duration = Duration::from_nanos(1);

/// The soft RNIC over UDP sockets of the kernel, on the real clock, as a gateway opens it.
struct RoceOverUdp;

impl Harness for RoceOverUdp {
    type Rnic = any::Nic;
    type Fabric = any::Fabric;
    const CUTS_WRITES: bool = true;

    fn new(_: u64) -> (Self, [(any::Nic, any::Fabric); 2]) {
        // Tests run at the same time, and each needs addresses of its own.
        static NETWORKS: AtomicU8 = AtomicU8::new(0);
        let network = NETWORKS.fetch_add(1, Ordering::Relaxed);
        let nics = [1, 2].map(|host| {
            let spec = any::Spec {
                kind: any::Kind::RoceUdp {
                    address: Some(Ipv4Addr::new(127, 20, network, host).into()),
                },
                device: "lo",
                pollers: 1,
                mtu_max: None,
            };
            any::open(&spec).unwrap().remove(0)
        });
        (Self, nics)
    }

    fn now(&self) -> Instant {
        let now = clock_gettime(ClockId::Monotonic);
        let nanoseconds = now.tv_sec * 1_000_000_000 + now.tv_nsec;
        Instant(u64::try_from(nanoseconds).unwrap())
    }

    fn wait(&mut self, _: Option<Instant>) {
        thread::sleep(Duration::from_micros(20));
    }
}

/// One soft RNIC with two fabrics, over UDP and IPv6. The ends of each queue pair are on different
/// fabrics, which hand each other the packets that the kernel gave to the wrong one.
struct RoceSharedOverIpv6<const DENSE: bool>;

impl<const DENSE: bool> Harness for RoceSharedOverIpv6<DENSE> {
    type Rnic = roce::Rnic;
    type Fabric = roce::Fabric<Udp>;
    const CUTS_WRITES: bool = true;
    const DENSE: bool = DENSE;

    fn new(_: u64) -> (Self, [(roce::Rnic, roce::Fabric<Udp>); 2]) {
        // IPv6 has only one loopback address, but many ports.
        static PORTS: AtomicU16 = AtomicU16::new(47_100);
        let port = PORTS.fetch_add(1, Ordering::Relaxed);
        let place = Place::Address(Ipv6Addr::LOCALHOST.into());
        let fabrics = udp::open_shared(&Config { port, ..Config::on(place) }, 2).unwrap();
        (Self, fabrics.try_into().unwrap())
    }

    fn now(&self) -> Instant {
        RoceOverUdp.now()
    }

    fn wait(&mut self, until: Option<Instant>) {
        RoceOverUdp.wait(until);
    }
}

/// The backend of real RNICs, over a libibverbs whose devices are in this process.
struct VerbsOverFake {
    devices: [String; 2],
}

impl Harness for VerbsOverFake {
    type Rnic = verbs::Rnic;
    type Fabric = verbs::Fabric;
    const CUTS_WRITES: bool = false;
    const RELEASES_LATER: bool = true;

    fn new(_: u64) -> (Self, [(verbs::Rnic, verbs::Fabric); 2]) {
        let devices = [1, 2].map(|host| rdma_core_fake::device([127, 30, 0, host]));
        let nics = devices.each_ref().map(|device| {
            verbs::open_with(rdma_core_fake::library(), &verbs::Config::on(device)).unwrap()
        });
        (Self { devices }, nics)
    }

    fn now(&self) -> Instant {
        RoceOverUdp.now()
    }

    fn wait(&mut self, until: Option<Instant>) {
        RoceOverUdp.wait(until);
    }
}

/// The same, on devices whose requests cannot carry bytes themselves.
struct VerbsWithoutInline(VerbsOverFake);

impl Harness for VerbsWithoutInline {
    type Rnic = verbs::Rnic;
    type Fabric = verbs::Fabric;
    const CUTS_WRITES: bool = false;
    const RELEASES_LATER: bool = true;

    fn new(seed: u64) -> (Self, [(verbs::Rnic, verbs::Fabric); 2]) {
        let (harness, nics) = VerbsOverFake::new(seed);
        // One of them carries a message. Queue pairs are made later.
        rdma_core_fake::limit_inline(&harness.devices[0], 100);
        rdma_core_fake::limit_inline(&harness.devices[1], 0);
        (Self(harness), nics)
    }

    fn now(&self) -> Instant {
        self.0.now()
    }

    fn wait(&mut self, until: Option<Instant>) {
        self.0.wait(until);
    }
}

/// The backend of real RNICs on the soft RNIC of Linux, which `tests/interop` has in a guest.
struct VerbsOnRxe;

impl Harness for VerbsOnRxe {
    type Rnic = verbs::Rnic;
    type Fabric = verbs::Fabric;
    const CUTS_WRITES: bool = true;
    const RELEASES_LATER: bool = true;

    fn new(_: u64) -> (Self, [(verbs::Rnic, verbs::Fabric); 2]) {
        let nics = [(); 2].map(|()| verbs::open(&verbs::Config::on("rxe0")).unwrap());
        (Self, nics)
    }

    fn now(&self) -> Instant {
        RoceOverUdp.now()
    }

    fn wait(&mut self, until: Option<Instant>) {
        RoceOverUdp.wait(until);
    }
}

/// The soft RNIC over two ports of DPDK that shared memory joins. No kernel is in the path.
struct RoceOverDpdk {
    /// One test at a time: the ports of all would not fit into the memory that DPDK has here.
    _turn: MutexGuard<'static, ()>,
}

impl Harness for RoceOverDpdk {
    type Rnic = roce::Rnic;
    type Fabric = roce::Fabric<Dpdk>;
    const CUTS_WRITES: bool = true;

    fn new(_: u64) -> (Self, [(roce::Rnic, roce::Fabric<Dpdk>); 2]) {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let socket = std::env::temp_dir().join(format!("smcgate-memif-{}", std::process::id()));
        let nics = [("server", 1), ("client", 2)].map(|(role, host)| {
            let socket = socket.display();
            let device = format!("net_memif{host},role={role},socket={socket},socket-abstract=no");
            let device = format!("{device},bsize=4608");
            let config = dpdk::Config {
                device: &device,
                address: Ipv4Addr::new(10, 8, 0, host).into(),
                prefix: 24,
                vlan: None,
                gateway: None,
                eal: &["--no-huge".to_owned()],
                mtu_max: None,
            };
            dpdk::open(&config).unwrap()
        });
        (Self { _turn: turn }, nics)
    }

    fn now(&self) -> Instant {
        RoceOverUdp.now()
    }

    fn wait(&mut self, until: Option<Instant>) {
        RoceOverUdp.wait(until);
    }
}

/// Two NICs in one directory. Their workers are threads of this process.
struct Shm {
    _directory: TempDir,
}

impl Harness for Shm {
    type Rnic = shm::Rnic;
    type Fabric = shm::Fabric;
    const CUTS_WRITES: bool = false;
    const LOSES_ON_BREAK: bool = true;

    fn new(_: u64) -> (Self, [(shm::Rnic, shm::Fabric); 2]) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_str().unwrap();
        let nics = [(); 2].map(|()| shm::open(path, 1).unwrap().remove(0));
        (Self { _directory: directory }, nics)
    }

    fn now(&self) -> Instant {
        RoceOverUdp.now()
    }

    fn wait(&mut self, until: Option<Instant>) {
        RoceOverUdp.wait(until);
    }
}

/// One NIC with two fabrics, whose queue pairs are connected to each other.
struct ShmShared {
    _directory: TempDir,
}

impl Harness for ShmShared {
    type Rnic = shm::Rnic;
    type Fabric = shm::Fabric;
    const CUTS_WRITES: bool = false;
    const LOSES_ON_BREAK: bool = true;

    fn new(_: u64) -> (Self, [(shm::Rnic, shm::Fabric); 2]) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().to_str().unwrap();
        let nics = shm::open(path, 2).unwrap().try_into().unwrap();
        (Self { _directory: directory }, nics)
    }

    fn now(&self) -> Instant {
        RoceOverUdp.now()
    }

    fn wait(&mut self, until: Option<Instant>) {
        RoceOverUdp.wait(until);
    }
}

conformance!(
    #[ignore = "needs rxe0: tests/interop runs it in its guest"]
    verbs_on_rxe,
    VerbsOnRxe,
    1
);
conformance!(
    #[ignore = "needs rxe0: tests/interop runs it in its guest"]
    cross_from_rxe_to_roce,
    Cross<true>,
    1
);
conformance!(
    #[ignore = "needs rxe0: tests/interop runs it in its guest"]
    cross_from_roce_to_rxe,
    Cross<false>,
    1
);
conformance!(
    #[ignore = "needs root: scripts/test e2e runs it"]
    wired_packets,
    Wired<PACKET, PACKET>,
    1
);
conformance!(
    #[ignore = "needs root: scripts/test e2e runs it"]
    wired_from_packets_to_udp_over_ipv6,
    Wired<PACKET_V6, UDP_V6>,
    1
);
conformance!(
    #[ignore = "needs root: scripts/test e2e runs it"]
    wired_packets_of_version_1,
    Wired<PACKET_V1, PACKET_V1>,
    1
);
conformance!(
    #[ignore = "needs root: scripts/test e2e runs it"]
    wired_from_packets_to_udp,
    Wired<PACKET, UDP>,
    1
);
conformance!(
    #[ignore = "needs root: scripts/test e2e runs it"]
    wired_from_udp_to_packets,
    Wired<UDP, PACKET>,
    1
);
conformance!(
    #[ignore = "needs root: scripts/test e2e runs it"]
    wired_from_dpdk_to_udp,
    Wired<DPDK, UDP>,
    1
);
conformance!(
    #[ignore = "needs root: scripts/test e2e runs it"]
    wired_from_udp_to_dpdk,
    Wired<UDP, DPDK>,
    1
);
conformance!(
    #[ignore = "needs root: scripts/test e2e runs it"]
    wired_from_packets_to_dpdk,
    Wired<PACKET, DPDK>,
    1
);
conformance!(
    #[ignore = "needs root: scripts/test e2e runs it"]
    wired_from_dpdk_to_packets,
    Wired<DPDK, PACKET>,
    1
);
conformance!(verbs_over_a_fake, VerbsOverFake, 2);
conformance!(verbs_without_inline, VerbsWithoutInline, 1);
conformance!(shm_of_two_nics, Shm, 3);
conformance!(shm_of_one_nic, ShmShared, 1);
conformance!(roce_over_dpdk, RoceOverDpdk, 1);
conformance!(roce_over_a_good_wire, RoceOverWire<0, false>, 2);
conformance!(roce_over_a_bad_wire, RoceOverWire<10, false>, 3);
conformance!(dense_roce_over_a_good_wire, RoceOverWire<0, true>, 2);
conformance!(dense_roce_over_a_bad_wire, RoceOverWire<10, true>, 3);
conformance!(roce_over_udp, RoceOverUdp, 1);
conformance!(roce_over_faulty_udp, FaultyUdp<10_000, 10_000>, 1);
conformance!(roce_shared_over_ipv6, RoceSharedOverIpv6<false>, 1);
conformance!(dense_roce_shared_over_ipv6, RoceSharedOverIpv6<true>, 1);
conformance!(calm_sim, Sim<false>, 3);
conformance!(malicious_sim, Sim<true>, 10);
