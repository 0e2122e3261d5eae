//! The two ends of the connections of a scenario: two kernels, or a kernel and our gateway.

use std::net::SocketAddrV4;

use crate::clock::wait_until;
use crate::gateway::{Gateway, SETTLE_LIMIT, Setup, local};
use crate::hosts::Hosts;
use crate::place::{Application, Outcome, Place, Socket, unanimous};
use crate::process::Process;
use crate::rig::{EID, Rig};

/// Which ends speak SMC-R themselves, and which one has our gateway in front of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pairing {
    /// Guest 1 connects to guest 2: the yardstick.
    LinuxToLinux,
    /// Guest 1 connects to our gateway, which connects to a TCP server on its own host.
    LinuxToGateway,
    /// A TCP client on the gateway's host connects to the gateway, which connects to guest 2.
    GatewayToLinux,
}

/// A pairing that is ready for connections.
pub(crate) struct Testbed<'r> {
    rig: &'r Rig<'r>,
    pairing: Pairing,
    /// Our gateway; none if both ends are kernels.
    pub(crate) gateway: Option<Gateway<'r>>,
}

impl<'r> Testbed<'r> {
    /// Makes all ends speak SMC-R over one RNIC each. Servers will listen on `ports`.
    pub(crate) fn open(
        rig: &'r Rig<'r>,
        hosts: &'r Hosts,
        pairing: Pairing,
        ports: &[u16],
    ) -> Self {
        Self::open_as(rig, hosts, pairing, ports, |setup| setup)
    }

    /// The same, with more settings of the gateway.
    pub(crate) fn open_as(
        rig: &'r Rig<'r>,
        hosts: &'r Hosts,
        pairing: Pairing,
        ports: &[u16],
        more: impl FnOnce(Setup) -> Setup,
    ) -> Self {
        let host = &hosts.a;
        let setup = Setup::new("gateway", host).smc(&format!("eids = [\"{EID}\"]"));
        let gateway = match pairing {
            Pairing::LinuxToLinux => None,
            Pairing::LinuxToGateway => {
                Some(ports.iter().fold(setup, |setup, &port| setup.before(host, port)))
            }
            Pairing::GatewayToLinux => {
                let far = *rig.two.at(0).ip();
                Some(ports.iter().fold(setup, |setup, &port| setup.towards(far, port)))
            }
        };
        let testbed = Self { rig, pairing, gateway: gateway.map(|g| more(g).start(hosts, host)) };
        for guest in testbed.kernels() {
            guest.speak_smc(EID);
        }
        testbed
    }

    /// Where clients run.
    pub(crate) fn client(&self) -> &'r Place<'r> {
        match self.pairing {
            Pairing::LinuxToLinux | Pairing::LinuxToGateway => &self.rig.one,
            Pairing::GatewayToLinux => &self.rig.host,
        }
    }

    /// Where servers run.
    pub(crate) fn server(&self) -> &'r Place<'r> {
        match self.pairing {
            Pairing::LinuxToLinux | Pairing::GatewayToLinux => &self.rig.two,
            Pairing::LinuxToGateway => &self.rig.host,
        }
    }

    /// The ends whose kernel speaks SMC-R, the client's first.
    pub(crate) fn kernels(&self) -> Vec<&'r Place<'r>> {
        let ends = [self.client(), self.server()];
        ends.into_iter().filter(|end| end.socket() == Socket::Smc).collect()
    }

    /// The address by which clients reach the server on `port`.
    pub(crate) fn target(&self, port: u16) -> SocketAddrV4 {
        match self.pairing {
            Pairing::LinuxToLinux => self.rig.two.at(port),
            Pairing::LinuxToGateway => self.rig.host.at(port),
            Pairing::GatewayToLinux => local(port),
        }
    }

    /// Where the server on `port` listens.
    pub(crate) fn server_address(&self, port: u16) -> SocketAddrV4 {
        match self.pairing {
            Pairing::LinuxToLinux | Pairing::GatewayToLinux => self.rig.two.at(port),
            Pairing::LinuxToGateway => local(port),
        }
    }

    /// Makes `times` connections, all at once, and plays these parts on each. Returns what the
    /// clients saw and what the servers saw. Asserts that it is the same for all connections, and
    /// that kernels have carried them over SMC-R.
    pub(crate) fn play(
        &self,
        port: u16,
        times: u32,
        client: &str,
        server: &str,
    ) -> (Outcome, Outcome) {
        let server = self.accept(port, times, server);
        let client = self.start_connect(port, times, client);
        self.outcomes(client, server, times)
    }

    /// Starts a server on `port` that plays `part` with `times` connections.
    pub(crate) fn accept(&self, port: u16, times: u32, part: &str) -> Application {
        let end = self.server();
        end.accept(end.socket(), self.server_address(port), times, &with_mode_step(end, part))
    }

    /// Starts to make `times` connections to the server on `port`, all at once.
    pub(crate) fn start_connect(&self, port: u16, times: u32, part: &str) -> Application {
        let (end, part) = (self.client(), with_mode_step(self.client(), part));
        end.start_connect(end.socket(), self.target(port), times, &part)
    }

    /// Waits for both ends. Returns what [`Testbed::play`] returns.
    pub(crate) fn outcomes(
        &self,
        client: Application,
        server: Application,
        times: u32,
    ) -> (Outcome, Outcome) {
        let (client, server) = (client.outcomes(), server.outcomes());
        let seen = |end: &Place<'_>, outcomes: &[Outcome]| {
            let mut outcome = unanimous(outcomes, times).clone();
            if end.socket() == Socket::Smc {
                assert_eq!(outcome.events.remove(0), "mode SMCR", "{outcome:?}");
            }
            outcome
        };
        (seen(self.client(), &client), seen(self.server(), &server))
    }

    /// Asserts that at least this number of connections used SMC-R, that none used TCP, and that
    /// both sides have counted them so.
    pub(crate) fn assert_all_smc(&self, least: u64) {
        let mut counts = Vec::new();
        for end in self.kernels() {
            let way = if std::ptr::eq(end, self.client()) { "client-v2" } else { "server-v2" };
            let [ours, others] = end.counted(way);
            assert_eq!(others, 0, "{:?}: not over SMC-R", self.pairing);
            counts.push(ours);
        }
        if let Some(gateway) = &self.gateway {
            wait_until("the gateway has counted them", SETTLE_LIMIT, || {
                gateway.stats().totals.connections_smc >= counts[0]
            });
            let stats = gateway.stats();
            assert_eq!(stats.totals.connections_tcp, 0, "{:?}", stats.fallbacks);
            assert_eq!(stats.totals.handshakes_failed, 0);
            counts.push(stats.totals.connections_smc);
        }
        let same = counts.iter().all(|&count| count == counts[0] && count >= least);
        assert!(same, "{:?}: at least {least}, not {counts:?}", self.pairing);
    }

    /// Asserts that no kernel has printed warnings and that the gateway has nothing left open.
    pub(crate) fn assert_at_rest(&self) {
        self.rig.assert_quiet_kernels();
        if let Some(gateway) = &self.gateway {
            gateway.holdings_at_rest();
        }
    }

    /// Starts a server that knows nothing of SMC, and waits until it listens on `port`.
    pub(crate) fn serve(&self, port: u16, words: &[&str]) -> Process {
        let end = self.server();
        let server = end.start_program(words);
        let listens = format!("until ss -Hltn 'sport = :{port}' | grep -q .; do sleep 0.1; done");
        end.run(&["sh", "-c", &listens]);
        server
    }

    /// Runs a client that knows nothing of SMC to its end. Returns its standard output.
    pub(crate) fn run(&self, words: &[&str]) -> String {
        self.client().run_program(words)
    }
}

/// The part with `mode` as its first step, if a kernel carries the connection.
fn with_mode_step(end: &Place<'_>, part: &str) -> String {
    match end.socket() {
        Socket::Smc => format!("mode {part}"),
        Socket::Tcp => part.to_owned(),
    }
}
