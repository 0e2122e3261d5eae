//! Cases without SMC-R: the application must work over TCP, and both sides must say why.

use std::fmt::Write as _;
use std::path::Path;

use crate::clock::wait_until;
use crate::dialogue::assert_golden;
use crate::gateway::{SETTLE_LIMIT, Setup, local};
use crate::hosts::{Host, Hosts};
use crate::place::{Outcome, Place, Socket, unanimous};
use crate::rig::{EID, Rig};
use crate::testbed::Pairing;

const PORT: u16 = 7010;
const CLIENT: &str = "mode send=300000 shut drain";
const SERVER: &str = "mode echo";

/// What can be wrong with one kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KernelFault {
    None,
    NoUeid,
    OtherUeid,
    /// The RNIC that belongs to the TCP connection's network device has no carrier.
    RnicDown,
    NoRnic,
    /// TCP option 254 is lost on the way out.
    Stripped,
    /// TCP option 254 is lost on the way in. Such a client gets no connection at all: its server
    /// waits for a Proposal, and closes the connection at the first byte of data.
    StrippedInwards,
}

impl KernelFault {
    fn apply(self, guest: &Place<'_>) {
        match self {
            Self::None => guest.speak_smc(EID),
            Self::NoUeid => guest.add_rdma("rxe0", "eth0"),
            Self::OtherUeid => guest.speak_smc("SOMEBODY-ELSE"),
            Self::RnicDown => {
                guest.tool(&["ueid-add", EID]);
                guest.create_rdma("rxe1", "eth1");
                guest.tool(&["pnet-add", "RIG", "eth0", "rxe1"]);
            }
            Self::NoRnic => drop(guest.tool(&["ueid-add", EID])),
            Self::Stripped => {
                guest.speak_smc(EID);
                guest.strip_option("output");
            }
            Self::StrippedInwards => {
                guest.speak_smc(EID);
                guest.strip_option("input");
            }
        }
    }
}

/// The reasons that two kernels give are the yardstick for those between a kernel and our gateway.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn fallbacks_from_linux_to_linux() {
    use KernelFault as T;
    let hosts = Hosts::new("fallbacks-LinuxToLinux");
    let mut found = String::new();
    for (client, server) in [
        (T::NoUeid, T::None),
        (T::OtherUeid, T::None),
        (T::RnicDown, T::None),
        (T::Stripped, T::None),
        (T::None, T::NoUeid),
        (T::None, T::RnicDown),
        (T::None, T::StrippedInwards),
    ] {
        let rig = Rig::new(&hosts);
        client.apply(&rig.one);
        server.apply(&rig.two);
        let accepting = rig.two.accept(Socket::Smc, rig.two.at(PORT), 1, SERVER);
        let connecting = rig.one.connect(Socket::Smc, rig.two.at(PORT), 1, CLIENT);
        let [client_mode, server_mode] = echoed(&connecting, &accepting.outcomes());
        writeln!(found, "client {client:?}, server {server:?}").expect("writing to a string");
        writeln!(found, "    client: {client_mode}\n    server: {server_mode}").expect("as above");
        rig.assert_quiet_kernels();
    }
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/interop/golden/fallbacks.txt");
    assert_golden(Path::new(golden), &found);
}

/// Asserts that everything came back to the client. Returns the mode that each kernel reports.
pub(crate) fn echoed(client: &[Outcome], server: &[Outcome]) -> [String; 2] {
    let (client, server) = (unanimous(client, 1), unanimous(server, 1));
    assert_eq!(client.event("sent "), server.event("echoed "));
    let echoed = format!("{}, then end", client.event("sent "));
    assert_eq!(client.event("received "), echoed);
    let mode = |outcome: &Outcome| {
        let mut events = outcome.events.iter();
        events.find_map(|event| event.strip_prefix("mode ")).unwrap_or("TCP").to_owned()
    };
    [mode(client), mode(server)]
}

/// What is wrong with the guest, what is wrong with our gateway, what the guest's kernel reports
/// (its own reason and the peer's diagnosis), and the reason that the gateway counts.
type Row = (KernelFault, GatewayFault, &'static str, &'static str);

/// What is wrong with our gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GatewayFault {
    Well,
    /// It speaks only SMC-Rv1; a kernel over rxe speaks only SMC-Rv2.
    Version1,
    /// Its RNIC has no carrier.
    RnicDown,
}

impl GatewayFault {
    fn setup(self, host: &Host) -> Setup {
        let community = format!("eids = [\"{EID}\"]");
        match self {
            Self::Well => Setup::new("gateway", host).smc(&community),
            Self::Version1 => Setup::new("gateway", host).smc("versions = [1]"),
            Self::RnicDown => Setup::on_device("gateway", "wh", "").smc(&community),
        }
    }
}

/// A client in a guest that cannot use SMC-R with the gateway in front of its server.
const CLIENTS: [Row; 7] = [
    (KernelFault::NoUeid, GatewayFault::Well, "TCP 0x03030000/0x00000000", "NO_DEVICE"),
    (KernelFault::OtherUeid, GatewayFault::Well, "TCP 0x05000000/0x03030008", "NO_COMMON_EID"),
    (KernelFault::NoRnic, GatewayFault::Well, "TCP 0x03030000/0x00000000", "NO_DEVICE"),
    (KernelFault::RnicDown, GatewayFault::Well, "TCP 0x03030000/0x00000000", "NO_DEVICE"),
    (KernelFault::Stripped, GatewayFault::Well, "TCP 0x03010000/0x00000000", "NO_SMC_OPTION"),
    (KernelFault::None, GatewayFault::Version1, "TCP 0x05000000/0x030c0000", "VERSION_MISMATCH"),
    (KernelFault::None, GatewayFault::RnicDown, "TCP 0x05000000/0x03030002", "NO_SMC_R_DEVICE"),
];

/// A server in a guest that cannot use SMC-R with the gateway in front of its client.
const SERVERS: [Row; 7] = [
    (KernelFault::NoUeid, GatewayFault::Well, "TCP 0x03030000/0x00000000", "NO_DEVICE"),
    (KernelFault::OtherUeid, GatewayFault::Well, "TCP 0x03030000/0x00000000", "NO_DEVICE"),
    (KernelFault::NoRnic, GatewayFault::Well, "TCP 0x03030002/0x00000000", "NO_SMC_R_DEVICE"),
    (KernelFault::RnicDown, GatewayFault::Well, "TCP 0x03030002/0x00000000", "NO_SMC_R_DEVICE"),
    (
        KernelFault::StrippedInwards,
        GatewayFault::Well,
        "TCP 0x03010000/0x00000000",
        "NO_SMC_OPTION",
    ),
    (KernelFault::None, GatewayFault::Version1, "TCP 0x03030000/0x00000000", "NO_DEVICE"),
    (KernelFault::None, GatewayFault::RnicDown, "TCP 0x05000000/0x03030002", "NO_SMC_R_DEVICE"),
];

/// Plays all rows of one pairing. Asserts that the bytes came through and that both sides gave the
/// expected reason.
pub(crate) fn fall_back(pairing: Pairing) {
    let hosts = Hosts::new(&format!("fallbacks-{pairing:?}"));
    let rows = if pairing == Pairing::LinuxToGateway { &CLIENTS } else { &SERVERS };
    let mut wrong = String::new();
    for &(kernel_fault, gateway_fault, kernel, gateway) in rows {
        let rig = Rig::new(&hosts);
        let found = play(&rig, &hosts, pairing, kernel_fault, gateway_fault);
        let line = format!("kernel {kernel_fault:?}, gateway {gateway_fault:?}: {found:?}\n");
        print!("{line}");
        let [mode, reason, others] = &found;
        if (&**mode, &**reason, &**others) != (kernel, gateway, "") {
            wrong += &line;
        }
        rig.assert_quiet_kernels();
    }
    assert!(wrong.is_empty(), "{pairing:?}:\n{wrong}");
}

/// Plays one row. Returns what the kernel reports, the reason that the gateway counts, and what
/// else the gateway counts.
fn play(
    rig: &Rig<'_>,
    hosts: &Hosts,
    pairing: Pairing,
    kernel_fault: KernelFault,
    gateway_fault: GatewayFault,
) -> [String; 3] {
    let host = &hosts.a;
    let mode;
    let gateway;
    if pairing == Pairing::LinuxToGateway {
        kernel_fault.apply(&rig.one);
        gateway = gateway_fault.setup(host).before(host, PORT).start(hosts, host);
        let server = rig.host.accept(Socket::Tcp, local(PORT), 1, "echo");
        let client = rig.one.connect(Socket::Smc, host.at(PORT), 1, CLIENT);
        [mode, _] = echoed(&client, &server.outcomes());
    } else {
        kernel_fault.apply(&rig.two);
        let far = rig.two.at(PORT);
        gateway = gateway_fault.setup(host).towards(*far.ip(), PORT).start(hosts, host);
        let server = rig.two.accept(Socket::Smc, far, 1, SERVER);
        let client = rig.host.connect(Socket::Tcp, local(PORT), 1, "send=300000 shut drain");
        [_, mode] = echoed(&client, &server.outcomes());
    }
    wait_until("the gateway has counted it", SETTLE_LIMIT, || {
        let totals = gateway.stats().totals;
        totals.connections_tcp + totals.connections_smc == 1
    });
    let mut reasons: Vec<_> =
        gateway.stats().fallbacks.into_iter().map(|found| found.name).collect();
    let reason = if reasons.is_empty() { String::new() } else { reasons.remove(0) };
    [mode, reason, reasons.join(", ")]
}
