//! What the configuration says, as link groups and rendezvous take it.

use rustix::system::uname;
use smcr_proto::handshake::PolicyV2;
use smcr_proto::link::Keepalive;
use smcr_proto::wire::clc::v2::{HostName, RELEASE};
use smcr_proto::{PeerId, RmbeSize};

use crate::config::{Config, Protocol, RnicKind};
use crate::groups;
use crate::host_memory;
use crate::listener::Listener;
use crate::rendezvous::{self, Side, Terms};
use crate::smc_option::OptionSource;

/// What the operator decided about link groups.
pub(super) fn group_settings(config: &Config, peer_id: PeerId) -> groups::Settings {
    let smc = &config.smc;
    groups::Settings {
        peer_id,
        rmb_elements: u8::try_from(smc.rmb_elements).expect("the configuration was checked"),
        rmbe_size_min: rmbe_size(smc.rmbe_size_min),
        rmb_bytes: config.limits.rmb_bytes(host_memory::limit()),
        keepalive: Keepalive { idle: Some(smc.test_link_idle), reply_wait: smc.test_link_timeout },
        idle_group_server: smc.idle_group_server,
        idle_group_client: smc.idle_group_client,
        max_links: smcr_proto::limits::LINKS_PER_GROUP_MAX,
    }
}

/// What the operator decided about rendezvous. `kinds` are those of all ports, also of those whose
/// RNICs are no longer in the configuration.
pub(super) fn settings(
    config: &Config,
    peer_id: PeerId,
    kinds: &[&RnicKind],
    (option, listeners): (&OptionSource, &[Listener]),
) -> rendezvous::Settings {
    let smc = &config.smc;
    let v2 = PolicyV2 {
        eids: smc.eids,
        release: RELEASE,
        max_connections: CONNECTIONS_PER_GROUP,
        max_links: smcr_proto::limits::LINKS_PER_GROUP_MAX,
        host_name: HostName::new(&uname().nodename().to_string_lossy()),
        many_streams: smc.kept_max > 0,
        // A group may have a link over any of them, also over one that is absent so far.
        dense_packets: smc.dense_packets && config.rnics.iter().all(|it| it.kind.packs_densely()),
    };
    let is_over_v2 = kinds.iter().any(|kind| !kind.carries_roce_v1());
    rendezvous::Settings {
        peer_id,
        v1: kinds.iter().map(|kind| smc.versions.speaks_v1(kind)).collect(),
        v2: (smc.versions.speaks_v2() && is_over_v2).then_some(v2),
        is_assumed: matches!(option, OptionSource::Assume(_)),
        handshake_timeout: smc.handshake_timeout,
        handshakes_max: config.limits.handshakes_max as usize,
        silent_max: config.limits.silent_max as usize,
        listeners: listeners.iter().map(|listener| terms(config, listener)).collect(),
    }
}

/// What a listener says about rendezvous.
fn terms(config: &Config, listener: &Listener) -> Terms {
    let Listener { config: listener, retired, .. } = listener;
    let side = match (listener.accept, listener.connect) {
        // Nobody comes there any more.
        _ if *retired && listener.connect == Protocol::Tcp => Side::Neither,
        (Protocol::Smc, _) => Side::Server,
        (Protocol::Tcp, Protocol::Smc) => Side::Client,
        (Protocol::Tcp, Protocol::Tcp) => Side::Neither,
    };
    Terms {
        side,
        peers: listener.peers.clone(),
        rmbe_size: rmbe_size(listener.rmbe_size.unwrap_or(config.smc.rmbe_size)),
        connect_timeout: listener.connect_timeout,
    }
}

fn rmbe_size(bytes: u32) -> RmbeSize {
    RmbeSize::from_bytes(bytes).expect("the configuration was checked")
}

/// The most connections of a group: an RMB has no more elements.
const CONNECTIONS_PER_GROUP: u8 = 255;

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(rnics: &str) -> Config {
        Config::parse(&format!("[local]\nsocket = '/run/x'\n{rnics}"), "test").unwrap()
    }

    /// An RNIC of libibverbs keeps dense packets off as long as the configuration names it, whether
    /// its device is there or not, and no longer.
    #[test]
    fn dense_packets_are_for_rnics_that_all_take_them() {
        let soft = "[[rnic]]\nname = 'soft'\nkind = 'roce-udp'\ndevice = 'lo'\n";
        let hard = "[[rnic]]\nname = 'hard'\nkind = 'verbs'\ndevice = 'mlx5_0'\n";
        let (one, both) = (parse(soft), parse(&format!("{soft}{hard}")));
        let kinds: Vec<_> = both.rnics.iter().map(|rnic| &rnic.kind).collect();
        let offers = |config: &Config, kinds: &[&RnicKind]| {
            let settings =
                settings(config, PeerId([1; 8]), kinds, (&OptionSource::None(String::new()), &[]));
            settings.v2.expect("an RNIC has an address of RoCE v2").dense_packets
        };
        assert!(!offers(&both, &kinds));
        assert!(!offers(&both, &kinds[..1]), "the other one is not there yet");
        assert!(offers(&one, &kinds), "the other one was removed by a reload");
        let off = parse(&format!("[smc]\ndense_packets = false\n{soft}"));
        assert!(!offers(&off, &kinds[..1]));
    }
}
