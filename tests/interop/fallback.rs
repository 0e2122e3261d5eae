//! Where SMC-R cannot be: the application works over TCP, and both sides say why.

use std::fmt::Write as _;
use std::path::Path;

use crate::clock::wait_until;
use crate::dialogue::assert_golden;
use crate::gateway::{Gateway, SETTLE_LIMIT, Setup, local};
use crate::hosts::Hosts;
use crate::place::{Outcome, Place, Socket, unanimous};
use crate::rig::{EID, Rig};

const PORT: u16 = 7010;
const CLIENT: &str = "mode send=300000 shut drain";
const SERVER: &str = "mode echo";

/// What can be wrong with one kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    None,
    NoUeid,
    OtherUeid,
    /// The RNIC that belongs to the TCP connection's network device has no carrier.
    RnicDown,
    NoRnic,
    /// TCP option 254 is lost on the way out.
    Stripped,
    /// And on the way in. A client that this befalls has no connection at all: its server waits for
    /// a Proposal, and ends it at the first byte of data.
    StrippedInwards,
}

impl Trouble {
    fn befall(self, guest: &Place<'_>) {
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

/// What two kernels say is the yardstick for what is said to and by our gateway.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn fallbacks_from_linux_to_linux() {
    use Trouble as T;
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
        client.befall(&rig.one);
        server.befall(&rig.two);
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

/// Asserts that all the client sent came back: what each side says of the mode, if it is a kernel.
fn echoed(client: &[Outcome], server: &[Outcome]) -> [String; 2] {
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

/// What is wrong, what the guest's kernel says (its own reason and the peer's diagnosis), and what
/// the gateway counts it under.
type Row = (Trouble, &'static str, &'static str);

/// A guest's client that cannot have SMC-R with the gateway before its server.
const CLIENTS: [Row; 5] = [
    // The gateway speaks v1 alone, and a kernel over rxe v2 alone.
    (Trouble::None, "TCP 0x05000000/0x03040000", "MODE_MISMATCH"),
    (Trouble::NoUeid, "TCP 0x03030000/0x00000000", "NO_DEVICE"),
    (Trouble::NoRnic, "TCP 0x03030000/0x00000000", "NO_DEVICE"),
    (Trouble::RnicDown, "TCP 0x03030000/0x00000000", "NO_DEVICE"),
    (Trouble::Stripped, "TCP 0x03010000/0x00000000", "NO_SMC_OPTION"),
];

/// A guest's server that cannot have SMC-R with the gateway before its client.
const SERVERS: [Row; 3] = [
    // The gateway speaks v1 alone, and a kernel over rxe v2 alone.
    (Trouble::None, "TCP 0x03030000/0x00000000", "NO_DEVICE"),
    (Trouble::NoRnic, "TCP 0x03030000/0x00000000", "NO_DEVICE"),
    (Trouble::StrippedInwards, "TCP 0x03010000/0x00000000", "NO_SMC_OPTION"),
];

/// Users whose Linux has no UEID, or no RNIC, must not notice that the server has a gateway.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn linux_clients_fall_back() {
    let hosts = Hosts::new("linux_clients_fall_back");
    for (trouble, kernel, ours) in CLIENTS {
        let rig = Rig::new(&hosts);
        trouble.befall(&rig.one);
        let host = &hosts.a;
        let gateway = Setup::new("gateway", host).before(host, PORT).start(&hosts, host);
        let server = rig.host.accept(Socket::Tcp, local(PORT), 1, "echo");
        let client = rig.one.connect(Socket::Smc, host.at(PORT), 1, CLIENT);
        let [mode, _] = echoed(&client, &server.outcomes());
        assert_eq!(mode, kernel, "{trouble:?}");
        assert_reason(&gateway, ours);
        rig.assert_quiet_kernels();
        println!("client {trouble:?}: kernel {mode}, gateway {ours}");
    }
}

/// Users of a gateway must not notice that the server is an AF_SMC one without UEID or RNIC.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn linux_servers_fall_back() {
    let hosts = Hosts::new("linux_servers_fall_back");
    for (trouble, kernel, ours) in SERVERS {
        let rig = Rig::new(&hosts);
        trouble.befall(&rig.two);
        let (host, far) = (&hosts.a, rig.two.at(PORT));
        let gateway = Setup::new("gateway", host).towards(*far.ip(), PORT).start(&hosts, host);
        let server = rig.two.accept(Socket::Smc, far, 1, SERVER);
        let client = rig.host.connect(Socket::Tcp, local(PORT), 1, "send=300000 shut drain");
        let [_, mode] = echoed(&client, &server.outcomes());
        assert_eq!(mode, kernel, "{trouble:?}");
        assert_reason(&gateway, ours);
        rig.assert_quiet_kernels();
        println!("server {trouble:?}: kernel {mode}, gateway {ours}");
    }
}

/// Asserts that the gateway has had one connection, and that it was one of TCP for this reason.
fn assert_reason(gateway: &Gateway<'_>, reason: &str) {
    wait_until("the gateway has counted it", SETTLE_LIMIT, || {
        gateway.stats().totals.connections_tcp == 1
    });
    let stats = gateway.stats();
    let reasons: Vec<_> = stats.fallbacks.iter().map(|found| (&*found.name, found.count)).collect();
    assert_eq!(reasons, [(reason, 1)]);
    assert_eq!(stats.totals.connections_smc, 0);
}
