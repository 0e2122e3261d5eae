//! Where SMC-R cannot be: the application works over TCP, and both sides say why.

use crate::clock::wait_until;
use crate::gateway::{Gateway, SETTLE_LIMIT, Setup};
use crate::hosts::Hosts;
use crate::place::{Outcome, Socket, unanimous};
use crate::rig::{EID, Rig};

/// The port at which the gateway's clients arrive, and that of the server behind it.
const PORT: u16 = 7010;
const BEHIND: u16 = 7011;

/// What is wrong, how it comes about, and what each side says of it.
struct Row {
    what: &'static str,
    prepare: fn(&Rig<'_>),
    /// What the guest's kernel says: its own reason and the peer's diagnosis.
    guest: &'static str,
    /// What the gateway counts it under.
    gateway: &'static str,
}

/// A guest's client that cannot have SMC-R with the gateway before its server.
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
        gateway: "NO_DEVICE",
    },
    Row {
        what: "no RNIC in the guest",
        prepare: |rig| drop(rig.one.tool(&["ueid-add", EID])),
        guest: "TCP 0x03030000/0x00000000",
        gateway: "NO_DEVICE",
    },
    Row {
        what: "the SMC option is stripped from the SYN",
        prepare: |rig| {
            rig.one.speak_smc(EID);
            rig.one.strip_option("output");
        },
        guest: "TCP 0x03010000/0x00000000",
        gateway: "NO_SMC_OPTION",
    },
];

/// A guest's server that cannot have SMC-R with the gateway before its client.
const SERVERS: [Row; 3] = [
    Row {
        what: "the gateway speaks v1 alone, and a kernel over rxe v2 alone",
        prepare: |rig| rig.two.speak_smc(EID),
        guest: "TCP 0x03030000/0x00000000",
        gateway: "NO_DEVICE",
    },
    Row {
        what: "no RNIC in the guest",
        prepare: |rig| drop(rig.two.tool(&["ueid-add", EID])),
        guest: "TCP 0x03030000/0x00000000",
        gateway: "NO_DEVICE",
    },
    Row {
        what: "the SMC option is stripped from the SYN",
        prepare: |rig| {
            rig.two.speak_smc(EID);
            rig.two.strip_option("input");
        },
        guest: "TCP 0x03010000/0x00000000",
        gateway: "NO_SMC_OPTION",
    },
];

/// Users whose Linux has no UEID, or no RNIC, must not notice that the server has a gateway.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn linux_clients_fall_back() {
    for row in CLIENTS {
        let hosts = Hosts::new("linux_clients_fall_back");
        let rig = Rig::new(&hosts);
        (row.prepare)(&rig);
        let host = &hosts.a;
        let gateway = Setup::new("gateway", host)
            .listener((host.at(PORT), "smc"), (host.at(BEHIND), "tcp"))
            .start(&hosts, host);
        let server = rig.host.accept(Socket::Tcp, BEHIND, 1, "echo");
        let client = rig.one.connect(Socket::Smc, host.at(PORT), 1, "mode send=300000 shut drain");
        row.judge(&rig, &gateway, &client, &client, &server.outcomes());
    }
}

/// Users of a gateway must not notice that the server is an AF_SMC one without UEID or RNIC.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn linux_servers_fall_back() {
    for row in SERVERS {
        let hosts = Hosts::new("linux_servers_fall_back");
        let rig = Rig::new(&hosts);
        (row.prepare)(&rig);
        let host = &hosts.a;
        let gateway = Setup::new("gateway", host)
            .listener((host.at(PORT), "tcp"), (rig.two.at(PORT), "smc"))
            .start(&hosts, host);
        let server = rig.two.accept(Socket::Smc, PORT, 1, "mode echo");
        let client = rig.host.connect(Socket::Tcp, host.at(PORT), 1, "send=300000 shut drain");
        let server = server.outcomes();
        row.judge(&rig, &gateway, &server, &client, &server);
    }
}

impl Row {
    /// Asserts that the bytes came back and that both sides gave the reason they should.
    fn judge(
        &self,
        rig: &Rig<'_>,
        gateway: &Gateway<'_>,
        guest: &[Outcome],
        client: &[Outcome],
        server: &[Outcome],
    ) {
        let (client, server) = (unanimous(client, 1), unanimous(server, 1));
        assert_eq!(client.event("sent "), server.event("echoed "), "{}", self.what);
        let echoed = format!("{}, then end", client.event("sent "));
        assert_eq!(client.event("received "), echoed, "{}", self.what);

        assert_eq!(unanimous(guest, 1).event("mode "), self.guest, "{}", self.what);
        wait_until("the gateway has counted it", SETTLE_LIMIT, || {
            gateway.stats().totals.connections_tcp == 1
        });
        let stats = gateway.stats();
        let reasons: Vec<_> =
            stats.fallbacks.iter().map(|found| (&*found.name, found.count)).collect();
        assert_eq!(reasons, [(self.gateway, 1)], "{}", self.what);
        assert_eq!(stats.totals.connections_smc, 0, "{}", self.what);
        rig.assert_quiet_kernels();
        println!("{}: guest {}, gateway {}", self.what, self.guest, self.gateway);
    }
}
