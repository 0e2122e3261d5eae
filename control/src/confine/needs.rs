//! What a configuration needs of the system once the gateway has started. A reload can bring in
//! nothing that needs more than that.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::config::{
    Config, CongestionControl, InterceptWay, LogTarget, OptionMode, Protocol, RnicConfig, RnicKind,
    SourceAddress,
};

/// What a gateway with one configuration needs once it has started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// `nft` and `ip`, which take the rules of an interception away at the end.
    pub programs: bool,
    /// To load eBPF programs that lead connections, when a listener comes or changes.
    pub loads_ebpf: bool,
    /// To ask and change what is in maps of eBPF programs.
    pub ebpf: bool,
    /// To mark sockets, give them foreign addresses and large buffers, and to list IPsec policies.
    pub network: bool,
    /// To open packet sockets.
    pub packets: bool,
    /// To raise the priority of threads.
    pub priority: bool,
    /// To make them real-time.
    pub realtime: bool,
    /// RNICs by libibverbs.
    pub verbs: bool,
    /// Ports of DPDK. What its drivers need is their secret.
    pub dpdk: bool,
    /// Directories in which peers of this host meet.
    pub meeting: BTreeSet<PathBuf>,
    /// Other directories in which files are written.
    pub written: BTreeSet<PathBuf>,
}

impl Needs {
    /// What `config` needs.
    pub fn of(config: &Config) -> Self {
        let mut needs = Self {
            ebpf: config.local.congestion_control == CongestionControl::Auto,
            priority: config.poll.boost > 0 || config.poll.realtime,
            realtime: config.poll.realtime,
            written: written(config),
            ..Self::default()
        };
        for listener in &config.listeners {
            let way = listener.intercept.as_ref().map(|intercept| intercept.way);
            let by_rules = matches!(way, Some(InterceptWay::Redirect | InterceptWay::Tproxy));
            needs.programs |= by_rules || listener.source == SourceAddress::Client;
            needs.loads_ebpf |= way == Some(InterceptWay::Ebpf);
            let is_smc = [listener.accept, listener.connect].contains(&Protocol::Smc);
            needs.ebpf |= is_smc && config.smc.option != OptionMode::Assume;
            needs.network |= is_smc || listener.needs_mark();
        }
        if let Some(door) = &config.local.door {
            needs.ebpf |= config.smc.option != OptionMode::Assume;
            needs.network = true;
            // The socket is removed at the end.
            needs.written.extend(door.socket.parent().map(Path::to_owned));
        }
        for rnic in &config.rnics {
            needs.add(rnic);
        }
        needs
    }

    fn add(&mut self, rnic: &RnicConfig) {
        match rnic.kind {
            // Large buffers for packets.
            RnicKind::RoceUdp { .. } => self.network = true,
            RnicKind::RocePacket { .. } => self.packets = true,
            RnicKind::Dpdk(_) => self.dpdk = true,
            RnicKind::Shm => drop(self.meeting.insert(PathBuf::from(&rnic.device))),
            RnicKind::Verbs(_) => self.verbs = true,
        }
    }

    /// What `wanted` needs that was given up by `means` because this did not need it, in words.
    pub fn missing_for(&self, wanted: &Self, means: Means) -> Vec<String> {
        let Means { capabilities, landlock, seccomp } = means;
        let any = capabilities || landlock || seccomp;
        let by_rules = "intercept by nftables, or source = \"client\"";
        let network = "SMC-R or interception, where there was neither";
        let mut missing: Vec<String> = [
            (self.programs, wanted.programs, any, by_rules),
            (self.loads_ebpf, wanted.loads_ebpf, capabilities || seccomp, "intercept = \"ebpf\""),
            (self.network, wanted.network, capabilities, network),
            (self.ebpf, wanted.ebpf, capabilities, "the TCP option by eBPF"),
            (
                self.packets,
                wanted.packets,
                capabilities || seccomp,
                "an RNIC of kind \"roce-packet\"",
            ),
            (self.verbs, wanted.verbs, capabilities || landlock, "an RNIC of kind \"verbs\""),
            (self.dpdk, wanted.dpdk, any, "an RNIC of kind \"dpdk\""),
        ]
        .into_iter()
        .filter(|(has, wants, is_gone, _)| *wants && !has && *is_gone)
        .map(|(.., what)| what.to_owned())
        .collect();
        if landlock {
            let beyond = |wanted: &BTreeSet<PathBuf>, kept: &BTreeSet<PathBuf>| {
                wanted.difference(kept).map(|it| it.display().to_string()).collect::<Vec<_>>()
            };
            for directory in beyond(&wanted.meeting, &self.meeting) {
                missing.push(format!("an RNIC in the directory {directory}"));
            }
            for directory in beyond(&wanted.written, &self.written) {
                missing.push(format!("files in the directory {directory}"));
            }
        }
        missing
    }
}

/// By what a process has given something up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Means {
    /// Capabilities were dropped.
    pub capabilities: bool,
    /// Files were, by Landlock.
    pub landlock: bool,
    /// System calls were, by seccomp.
    pub seccomp: bool,
}

/// Directories in which the gateway creates and writes files while it runs. A part of the gateway
/// that writes files names their directory here.
fn written(config: &Config) -> BTreeSet<PathBuf> {
    match &config.access_log.to {
        // A file that was rotated is opened again, so its directory counts.
        LogTarget::File(path) => path.parent().map(Path::to_owned).into_iter().collect(),
        // Whom a socket leads to, Landlock does not ask.
        LogTarget::None | LogTarget::Journald(_) | LogTarget::Syslog(_) => BTreeSet::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn needs(rest: &str) -> Needs {
        let text =
            format!("[[listener]]\nname='a'\nbind='127.0.0.1:1'\nupstream='127.0.0.1:2'\n{rest}\n");
        Needs::of(&Config::parse(&text, "a.toml").unwrap())
    }

    /// What a relay of TCP never needs, nobody who takes it over shall have.
    #[test]
    fn a_relay_of_tcp_needs_nothing() {
        let least = "[local]\ncongestion_control='host'\n[poll]\nboost=0\nrealtime=false";
        assert_eq!(needs(least), Needs::default());
        let (by_nice, by_policy) = (needs("[poll]\nrealtime=false"), needs("[poll]\nboost=0"));
        assert!(by_nice.priority && !by_nice.realtime);
        assert!(by_policy.priority && by_policy.realtime);
        assert!(needs("connect='smc'").network && needs("connect='smc'").ebpf);
        let assumed = "connect='smc'\n[smc]\noption='assume'\nassume_peers=['10.0.0.1']\n\
                       [local]\ncongestion_control='host'";
        assert!(!needs(assumed).ebpf);
    }

    /// The rules of nftables are taken away at the end, by programs.
    #[test]
    fn rules_need_programs_and_ebpf_does_not() {
        let way = |way: &str| {
            let text = format!(
                "[[listener]]\nname='a'\nbind='127.0.0.1:1'\nupstream='original-dst'\n\
                 intercept='{way}'\nintercept_ports=[9]\n"
            );
            let needs = Needs::of(&Config::parse(&text, "a.toml").unwrap());
            (needs.programs, needs.loads_ebpf, needs.network)
        };
        assert_eq!(way("redirect"), (true, false, true));
        assert_eq!(way("tproxy"), (true, false, true));
        assert_eq!(way("ebpf"), (false, true, true));
    }

    /// A reload that needs what was given up must say so before it changes anything.
    #[test]
    fn what_was_given_up_is_named() {
        let all = Means { capabilities: true, landlock: true, seccomp: true };
        let udp = needs("[[rnic]]\nname='r'\ndevice='va'");
        let packet = needs("[[rnic]]\nname='r'\nkind='roce-packet'\ndevice='va'");
        let log = needs("[access_log]\nto='file'\npath='/var/log/x/a.log'");
        assert_eq!(udp.missing_for(&log, all), ["files in the directory /var/log/x"]);
        let near = needs("[[rnic]]\nname='r'\nkind='shm'\ndevice='/run/x'");
        assert_eq!(udp.missing_for(&udp, all), [""; 0]);
        assert_eq!(udp.missing_for(&packet, all), ["an RNIC of kind \"roce-packet\""]);
        assert_eq!(udp.missing_for(&near, all), ["an RNIC in the directory /run/x"]);
        assert_eq!(near.missing_for(&needs("connect='smc'"), all).len(), 1);
    }

    /// A kernel before 5.19 lets nobody mark a SYN without CAP_BPF, so each connection of such a
    /// listener would be reset.
    #[test]
    fn a_first_listener_with_smc_needs_ebpf_also_where_there_is_an_rnic() {
        let rnic = "[[rnic]]\nname='r'\ndevice='va'\n[local]\ncongestion_control='host'";
        let (relay, smc) = (needs(rnic), needs(&format!("connect='smc'\n{rnic}")));
        let by = |capabilities| {
            let means = Means { capabilities, landlock: true, seccomp: true };
            relay.missing_for(&smc, means)
        };
        assert_eq!(by(true), ["the TCP option by eBPF"]);
        assert_eq!(by(false), [""; 0]);
    }

    /// Where a kernel has no Landlock, or an operator does not want it, another directory takes no
    /// restart.
    #[test]
    fn what_nobody_has_given_up_is_not_missed() {
        let least = needs("");
        let more = needs(
            "[access_log]\nto='file'\npath='/var/log/x/a.log'\n[[rnic]]\nname='r'\nkind='shm'\n\
             device='/run/x'\n[[rnic]]\nname='p'\nkind='roce-packet'\ndevice='va'",
        );
        let by = |capabilities, landlock, seccomp| {
            least.missing_for(&more, Means { capabilities, landlock, seccomp }).len()
        };
        assert_eq!(by(false, false, false), 0);
        assert_eq!(by(false, true, false), 2);
        assert_eq!(by(true, false, false), 1);
        assert_eq!(by(false, false, true), 1);
    }
}
