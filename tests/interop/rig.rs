//! Two guests and the host of a gateway: how a scenario sets them up and checks them.

use std::net::Ipv4Addr;
use std::path::PathBuf;

use crate::capture::Capture;
use crate::hosts::Hosts;
use crate::place::Place;

/// The EID that guests are given, and one that nobody else has.
pub(crate) const EID: &str = "SMCGATE-RIG";

/// The address of guest 1.
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 11);

/// Warnings that a guest's kernel prints although all is well.
///
/// `rxe_modify_qp`: when a second link was offered and rejected, or when a group ends, SMC asks rxe
/// for a transition of a queue pair that rxe refuses.
const HARMLESS_WARNINGS: [&str; 9] = [
    "adding ib device",
    "removing ib device",
    "removing net device",
    "has pnetid",
    "applied user defined pnetid",
    "erased user defined pnetid",
    "smc: SMC-R lg ",
    "rxe_modify_qp: returned err = -22",
    // The emulator had to wait for a core of ours.
    "hrtimer: interrupt took",
];

/// The machines of a scenario.
pub(crate) struct Rig<'h> {
    pub(crate) one: Place<'h>,
    pub(crate) two: Place<'h>,
    pub(crate) host: Place<'h>,
    hosts: &'h Hosts,
}

impl<'h> Rig<'h> {
    /// Guests without SMC-R: modules freshly loaded, no RDMA device, no UEID, an empty kernel log.
    pub(crate) fn new(hosts: &'h Hosts) -> Self {
        let (one, two) = (Place::guest(hosts, 1), Place::guest(hosts, 2));
        for guest in [&one, &two] {
            guest.await_agent();
            guest.run(&["sh", "-ec", RESET]);
        }
        let host = Place::gateway_host(hosts);
        host.run(&["ip", "link", "set", "wh", "down"]);
        Self { one, two, host, hosts }
    }

    /// Starts to capture all traffic between guests and host.
    pub(crate) fn capture(&self) -> Capture {
        Capture::start(&self.hosts.b, "lan", &self.hosts.logs)
    }

    /// Ends a capture that [`capture`](Self::capture) began. Returns its file.
    pub(crate) fn captured(&self, capture: Capture) -> PathBuf {
        capture.stop(&self.hosts.a, GUEST)
    }

    /// Asserts that no guest's kernel has printed warnings since the scenario began.
    ///
    /// # Panics
    ///
    /// If one has. The message shows the warnings.
    pub(crate) fn assert_quiet_kernels(&self) {
        for guest in [&self.one, &self.two] {
            let log = guest.run(&["dmesg", "--notime", "--level=emerg,alert,crit,err,warn"]);
            let harmless =
                |line: &&str| HARMLESS_WARNINGS.iter().any(|harmless| line.contains(harmless));
            let complaints: Vec<&str> = log.lines().filter(|line| !harmless(line)).collect();
            assert!(complaints.is_empty(), "a kernel complains:\n{}", complaints.join("\n"));
        }
    }
}

impl Place<'_> {
    /// Gives this guest what SMC-R needs: an RDMA device over its network device, in the same PNET,
    /// and an EID.
    pub(crate) fn speak_smc(&self, eid: &str) {
        self.add_rdma("rxe0", "eth0");
        self.tool(&["ueid-add", eid]);
    }

    /// Removes TCP option 254 from its packets, as some middleboxes do: `output` from those that it
    /// sends, `input` from those that it receives.
    pub(crate) fn strip_option(&self, hook: &str) {
        self.run(&["nft", "add table ip rig"]);
        self.run(&[
            "nft",
            &format!("add chain ip rig {hook} {{ type filter hook {hook} priority 0; }}"),
        ]);
        self.run(&["nft", &format!("add rule ip rig {hook} reset tcp option 254")]);
    }

    /// Adds an RDMA device over a network device, and both to the PNET.
    pub(crate) fn add_rdma(&self, rdma: &str, ethernet: &str) {
        self.create_rdma(rdma, ethernet);
        self.tool(&["pnet-add", "RIG", ethernet, rdma]);
    }

    /// Adds an RDMA device over a network device. The PNET table remembers those it had.
    pub(crate) fn create_rdma(&self, rdma: &str, ethernet: &str) {
        self.run(&["rdma", "link", "add", rdma, "type", "rxe", "netdev", ethernet]);
    }
}

/// Loads the modules anew; link groups, UEIDs and the PNET table go with them.
///
/// A socket may take a while to leave the kernel after its program has ended.
const RESET: &str = "\
    nft flush ruleset\n\
    ip link set eth1 down\n\
    for module in smc_diag smc rdma_rxe; do\n\
        patience=100\n\
        while [ -d /sys/module/$module ] && ! modprobe -r $module; do\n\
            patience=$((patience - 1))\n\
            [ $patience -gt 0 ] || exit 1\n\
            sleep 0.2\n\
        done\n\
    done\n\
    modprobe smc_diag\n\
    modprobe rdma_rxe\n\
    dmesg --clear\n";
