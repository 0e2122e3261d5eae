//! DPDK's ports of hardware: a NIC behind PCI Express and an IOMMU, which a driver of DPDK has and
//! the kernel has not.

use std::time::Duration;

use crate::clock::wait_until;
use crate::emulator::monitor;
use crate::gateway::{Setup, local};
use crate::hosts::Hosts;
use crate::in_guest::{BACK, CLIENT, PORT, SERVER, carried, listener, rnic, start};
use crate::place::{Place, Socket};
use crate::process::Process;
use crate::rig::{EID, Rig};

/// A gateway with such a port, in huge pages and with the largest packets, and the SMC-R of Linux.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn a_gateway_with_a_port_of_hardware_carries_files_to_linux_and_from_it() {
    let hosts = Hosts::new("ports-linux");
    let rig = Rig::new(&hosts);
    rig.two.speak_smc(EID);
    take_nic(&rig.one);
    rig.one.run(&["sh", "-ec", "echo 64 >/proc/sys/vm/nr_hugepages"]);
    let outward = listener("tcp", local(PORT), rig.two.at(PORT));
    let inward = listener("smc", rig.one.at(BACK), local(BACK));
    let mut gateway =
        start(&rig.one, &port("mtu = 1024\neal = [\"-m\", \"64\"]\n"), &[outward, inward]);

    let server = rig.two.accept(Socket::Smc, rig.two.at(PORT), 1, SERVER);
    carried(rig.one.start_connect(Socket::Tcp, local(PORT), 1, CLIENT), server);
    assert_eq!(rig.two.counted("server-v2"), [1, 0]);
    let server = rig.one.accept(Socket::Tcp, local(BACK), 1, SERVER);
    carried(rig.two.start_connect(Socket::Smc, rig.one.at(BACK), 1, CLIENT), server);
    let counted = rig.two.tool(&["counts"]);
    assert!(counted.iter().any(|line| line == "client-v2 1"), "{counted:?}");
    assert!(gateway.log().contains("kind=\"dpdk\""), "{}", gateway.log());
    end(&rig.one, &mut gateway);
    rig.one.run(&["sh", "-ec", "echo 0 >/proc/sys/vm/nr_hugepages"]);
    rig.assert_quiet_kernels();
}

/// The same in a VLAN, where all that Linux has it knows from a device for the VLAN.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn a_port_of_hardware_meets_linux_in_a_vlan() {
    let hosts = Hosts::new("ports-vlan");
    let rig = Rig::new(&hosts);
    for (guest, address) in [(&rig.one, "10.9.1.11/24"), (&rig.two, "10.9.1.12/24")] {
        guest.run(&["sh", "-ec", JOIN_VLAN, address]);
    }
    rig.two.create_rdma("rxe0", "eth0");
    rig.two.tool(&["pnet-add", "RIG", "eth0.100", "rxe0"]);
    rig.two.tool(&["ueid-add", EID]);
    take_nic(&rig.one);
    let there = "10.9.1.12:7010".parse().expect("an address");
    let keys = "vlan = 100\neal = [\"-m\", \"64\"]\n";
    let port = format!("{}address = \"10.9.1.31/24\"\n{keys}", rnic("dpdk", NIC));
    let mut gateway = start(&rig.one, &port, &[listener("tcp", local(PORT), there)]);

    let server = rig.two.accept(Socket::Smc, there, 1, SERVER);
    carried(rig.one.start_connect(Socket::Tcp, local(PORT), 1, CLIENT), server);
    assert_eq!(rig.two.counted("server-v2"), [1, 0]);
    end(&rig.one, &mut gateway);
    for guest in [&rig.one, &rig.two] {
        guest.run(&["ip", "link", "delete", "eth0.100"]);
    }
    rig.assert_quiet_kernels();
}

/// Such a port and a soft RNIC of ours, while the link goes and comes, and until somebody pulls the
/// NIC out: streams go on by the other RNIC, and whoever pulls need not wait for the gateway's end.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn a_port_of_hardware_loses_its_link_and_is_pulled_out_under_load() {
    let hosts = Hosts::new("ports-pulled");
    let rig = Rig::new(&hosts);
    take_nic(&rig.one);
    let here = rig.one.at(PORT);
    let rnics = port("eal = [\"-m\", \"64\"]\n") + &rnic("roce-packet", "eth0");
    let guest = start(&rig.one, &rnics, &[listener("smc", here, local(PORT))]);
    let gateway = Setup::new("gateway", &hosts.a).smc(&format!("eids = [\"{EID}\"]"));
    let gateway = gateway.towards(*here.ip(), PORT).start(&hosts, &hosts.a);

    let server = rig.one.accept(Socket::Tcp, local(PORT), 1, "receive=800000 shut drain");
    let client = rig.host.start_connect(Socket::Tcp, local(PORT), 1, "trickle=800000 drain");
    let links = || {
        let groups = gateway.stats().link_groups;
        groups.iter().flat_map(|group| &group.links).filter(|link| link.state == "active").count()
    };
    wait_until("two links", LIMIT, || links() == 2);
    let said = guest.log().len();
    monitor(1, "set_link port off");
    let says = |words| guest.log()[said..].contains(words);
    wait_until("the link is lost", LIMIT, || says("an RNIC does not work"));
    monitor(1, "set_link port on");
    wait_until("the link is back", LIMIT, || says("an RNIC works again"));
    wait_until("two links", LIMIT, || links() == 2);
    monitor(1, "device_del nic");
    wait_until("the port is gone", LIMIT, || says("an RNIC is gone"));
    wait_until("the NIC is out", LIMIT, || !has_nic(&rig.one));
    let (client, server) = (client.outcomes(), server.outcomes());
    assert_eq!(client[0].event("sent "), server[0].event("received "));

    let totals = gateway.stats().totals;
    assert_eq!((totals.connections_smc, totals.connections_tcp), (1, 0));
    rig.assert_quiet_kernels();
}

/// Ends a gateway in a guest. One that is killed leaves a device that goes on until it is reset,
/// and the kernel complains.
fn end(guest: &Place<'_>, gateway: &mut Process) {
    guest.run(&["pkill", "-TERM", "-x", "smcgate"]);
    gateway.wait(LIMIT);
}

/// An RNIC on the guest's NIC, with an address that no kernel has.
fn port(keys: &str) -> String {
    format!("{}address = \"10.9.0.31/24\"\n{keys}", rnic("dpdk", NIC))
}

/// Gives the guest's NIC to programs; puts one in before if it was pulled out.
fn take_nic(guest: &Place<'_>) {
    if !has_nic(guest) {
        monitor(1, &format!("device_add {}", std::env::var("SMCGATE_NIC_1").expect(RIG)));
        wait_until("the guest has a NIC", LIMIT, || has_nic(guest));
    }
    guest.run(&["sh", "-ec", TAKE, NIC]);
}

fn has_nic(guest: &Place<'_>) -> bool {
    guest.run(&["ls", "/sys/bus/pci/devices"]).contains(NIC)
}

/// Where the NIC is.
const NIC: &str = "0000:01:00.0";
const RIG: &str = "scripts/linux-rig sets it";
/// A guest is slow.
const LIMIT: Duration = Duration::from_secs(60);
/// Makes a device for the VLAN, with the address `$0`, which an earlier run may have left.
const JOIN_VLAN: &str = "\
    [ -e /sys/class/net/eth0.100 ] && ip link delete eth0.100\n\
    ip link add link eth0 name eth0.100 type vlan id 100\n\
    ip address add \"$0\" dev eth0.100\n\
    ip link set eth0.100 up\n";
/// Binds the NIC at `$0` to the driver that gives it to programs.
const TAKE: &str = "\
    modprobe vfio-pci\n\
    echo vfio-pci >\"/sys/bus/pci/devices/$0/driver_override\"\n\
    [ -e \"/sys/bus/pci/devices/$0/driver\" ] || echo \"$0\" >/sys/bus/pci/drivers_probe\n\
    [ -e /sys/bus/pci/drivers/vfio-pci/$0 ]\n";
