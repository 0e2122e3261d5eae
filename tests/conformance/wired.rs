//! RoCE in software between two hosts on this machine, by any of its wires at either end.

use std::fs::File;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{self, Command};
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use smcr_proto::Instant;
use smcr_rnic::any;
use smcr_rnic::roce::packet::Version;

use crate::RoceOverUdp;
use crate::rig::Harness;

/// A UDP socket of the kernel.
pub(crate) const UDP: u8 = 0;
/// A packet socket of the kernel.
pub(crate) const PACKET: u8 = 1;
/// The same, with RoCE v1.
pub(crate) const PACKET_V1: u8 = 3;
/// A UDP socket, over IPv6.
pub(crate) const UDP_V6: u8 = 4;
/// A packet socket, over IPv6.
pub(crate) const PACKET_V6: u8 = 5;
/// A port of DPDK on the device.
pub(crate) const DPDK: u8 = 2;

/// Two hosts with a cable between them. The first end has the wire `NEAR`, the second one `FAR`.
pub(crate) struct Wired<const NEAR: u8, const FAR: u8> {
    namespaces: [String; 2],
}

impl<const NEAR: u8, const FAR: u8> Harness for Wired<NEAR, FAR> {
    type Rnic = any::Nic;
    type Fabric = any::Fabric;
    const CUTS_WRITES: bool = true;

    fn new(_: u64) -> (Self, [(any::Nic, any::Fabric); 2]) {
        // Tests run at the same time, and each needs hosts of its own.
        static NETWORKS: AtomicU8 = AtomicU8::new(0);
        let network = NETWORKS.fetch_add(1, Ordering::Relaxed);
        let namespaces = ["a", "b"].map(|end| format!("wired-{}-{network}-{end}", process::id()));
        let [a, b] = &namespaces;
        ip(&["netns", "add", a]);
        ip(&["netns", "add", b]);
        let harness = Self { namespaces: namespaces.clone() };
        ip(&["-n", a, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", b]);
        for (namespace, host) in [(a, 1), (b, 2)] {
            let address = format!("10.77.{network}.{host}/24");
            ip(&["-n", namespace, "address", "add", &address, "dev", "wire"]);
            let address = format!("{}/64", ipv6(network, host));
            ip(&["-n", namespace, "address", "add", &address, "dev", "wire", "nodad"]);
            ip(&["-n", namespace, "link", "set", "wire", "up"]);
        }
        // Queue pairs ask for the path from here. The loopback device answers for a whole network.
        ip(&["link", "set", "lo", "up"]);
        ip(&["address", "add", &format!("10.77.{network}.1/24"), "dev", "lo"]);
        for host in [1, 2] {
            let address = format!("{}/128", ipv6(network, host));
            ip(&["address", "add", &address, "dev", "lo", "nodad"]);
        }
        let near = inside(a, || open(NEAR, network, 1));
        (harness, [near, inside(b, || open(FAR, network, 2))])
    }

    fn now(&self) -> Instant {
        RoceOverUdp.now()
    }

    fn wait(&mut self, until: Option<Instant>) {
        RoceOverUdp.wait(until);
    }
}

impl<const NEAR: u8, const FAR: u8> Drop for Wired<NEAR, FAR> {
    fn drop(&mut self) {
        for name in &self.namespaces {
            drop(Command::new("ip").args(["netns", "delete", name]).output());
        }
    }
}

/// The address of a host in a network.
fn ipv6(network: u8, host: u8) -> Ipv6Addr {
    Ipv6Addr::from([0xfd77, network.into(), 0, 0, 0, 0, 0, host.into()])
}

/// Opens a NIC on the cable, on the host where the thread is.
fn open(wire: u8, network: u8, host: u8) -> (any::Nic, any::Fabric) {
    // The kernel must not know the address of a port.
    let own: IpAddr = [10, 77, network, 10 + host].into();
    let port = format!("net_af_packet{},iface=wire", 2 * u16::from(network) + u16::from(host));
    let eal = ["--no-huge".to_owned()];
    let (kind, device) = match wire {
        UDP => (any::Kind::RoceUdp { address: None }, "wire"),
        PACKET => (any::Kind::RocePacket { address: None, version: Version::V2 }, "wire"),
        PACKET_V1 => (any::Kind::RocePacket { address: None, version: Version::V1 }, "wire"),
        DPDK => {
            let (prefix, vlan, gateway, eal) = (24, None, None, &eal);
            (any::Kind::Dpdk { address: own, prefix, vlan, gateway, eal }, &port[..])
        }
        UDP_V6 => (any::Kind::RoceUdp { address: Some(ipv6(network, host).into()) }, "wire"),
        PACKET_V6 => {
            let address = Some(ipv6(network, host).into());
            (any::Kind::RocePacket { address, version: Version::V2 }, "wire")
        }
        _ => unreachable!("there are six wires"),
    };
    let spec = any::Spec { kind, device, pollers: 1, mtu_max: None };
    any::open(&spec).unwrap().remove(0)
}

/// Does `work` in a network namespace. Sockets opened there stay there.
fn inside<T: Send>(namespace: &str, work: impl FnOnce() -> T + Send) -> T {
    let file = File::open(Path::new("/run/netns").join(namespace)).unwrap();
    let enter_and_work = || {
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
        work()
    };
    thread::scope(|scope| scope.spawn(enter_and_work).join()).unwrap()
}

fn ip(arguments: &[&str]) {
    let status = Command::new("ip").args(arguments).status().expect("iproute2 is installed");
    assert!(status.success(), "ip {arguments:?}");
}
