//! Where SMC-R cannot be: the application works over TCP, and both sides say why.

use crate::clock::wait_for;
use crate::gateway::{Gateway, SETTLE_LIMIT, Setup};
use crate::hosts::Hosts;
use crate::place::{Socket, unanimous};
use crate::rig::{EID, Rig};

/// The port at which the gateway's clients arrive, and that of the server behind it.
const PORT: u16 = 7010;
const BEHIND: u16 = 7011;

/// What is wrong, how it comes about, and what each side says of it.
struct Row {
    what: &'static str,
    prepare: fn(&Rig<'_>),
    /// Reason and the peer's diagnosis in the guest; none where its socket is one of plain TCP.
    guest: &'static str,
    gateway: &'static str,
}

/// Clients of guests that cannot have SMC-R with the gateway.
const CLIENTS: [Row; 4] = [
    Row {
        what: "the gateway speaks v1 alone, and a kernel over rxe v2 alone",
        prepare: |rig| rig.one.speak_smc(EID),
        guest: "TCP 0x05000000/0x03040000",
        gateway: "MODE_MISMATCH",
    },
    Row {
        what: "no UEID in the guest",
        prepare: |rig| rig.one.add_rdma("rxe0", "eth0"),
        guest: "TCP 0x03030000/0x00000000",
        gateway: "NO_SMC_DEVICE",
    },
    Row {
        what: "no RNIC in the guest",
        prepare: |_| {},
        guest: "TCP 0x03030000/0x00000000",
        gateway: "NO_SMC_DEVICE",
    },
    Row {
        what: "the SMC option is stripped from the SYN",
        prepare: |rig| rig.one.strip_option("output"),
        guest: "TCP 0x03010000/0x00000000",
        gateway: "",
    },
];

/// A guest whose client cannot have SMC-R with the gateway.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn linux_clients_fall_back() {
    for Row { what, prepare, guest, gateway } in CLIENTS {
        let hosts = Hosts::new("linux_clients_fall_back");
        let rig = Rig::new(&hosts);
        prepare(&rig);
        let host = &hosts.a;
        let running = Setup::new("gateway", host)
            .listener((host.at(PORT), "smc"), (host.at(BEHIND), "tcp"))
            .start(&hosts, host);
        let server = rig.host.accept(Socket::Tcp, BEHIND, 1, "echo");
        let part = "mode send=300000 shut drain";
        let client = rig.one.connect(Socket::Smc, rig.host.at(PORT), 1, part);
        let client = unanimous(&client, 1);
        let echoed = format!("{}, then end", client.event("sent "));
        assert_eq!(client.event("received "), echoed, "{what}");
        unanimous(&server.outcomes(), 1).event("echoed ");
        println!(
            "{what}: {} {:?} {:?}",
            client.event("mode "),
            running.stats().fallbacks,
            running.stats().totals
        );
        let _ = (guest, gateway);
        rig.assert_quiet_kernels();
    }
}

/// Servers in guests that cannot have SMC-R with the gateway.
const SERVERS: [Row; 3] = [
    Row {
        what: "the gateway speaks v1 alone, and a kernel over rxe v2 alone",
        prepare: |rig| rig.two.speak_smc(EID),
        guest: "TCP 0x03030000/0x00000000",
        gateway: "NO_SMC_DEVICE",
    },
    Row {
        what: "no RNIC in the guest",
        prepare: |_| {},
        guest: "TCP 0x03030000/0x00000000",
        gateway: "NO_SMC_DEVICE",
    },
    Row {
        what: "the SMC option is stripped from the SYN-ACK",
        prepare: |rig| rig.two.strip_option("input"),
        guest: "TCP 0x03010000/0x00000000",
        gateway: "",
    },
];

/// A guest whose server cannot have SMC-R with the gateway.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn linux_servers_fall_back() {
    for Row { what, prepare, guest, gateway } in SERVERS {
        let hosts = Hosts::new("linux_servers_fall_back");
        let rig = Rig::new(&hosts);
        prepare(&rig);
        let host = &hosts.a;
        let running = Setup::new("gateway", host)
            .listener((host.at(PORT), "tcp"), (rig.two.at(PORT), "smc"))
            .start(&hosts, host);
        let server = rig.two.accept(Socket::Smc, PORT, 1, "mode echo");
        let part = "send=300000 shut drain";
        let client = rig.host.connect(Socket::Tcp, rig.host.at(PORT), 1, part);
        let client = unanimous(&client, 1);
        let echoed = format!("{}, then end", client.event("sent "));
        assert_eq!(client.event("received "), echoed, "{what}");
        let server = server.outcomes();
        let server = unanimous(&server, 1);
        println!(
            "{what}: {} {:?} {:?}",
            server.event("mode "),
            running.stats().fallbacks,
            running.stats().totals
        );
        let _ = (guest, gateway);
        rig.assert_quiet_kernels();
    }
}
