//! What operators have counted stays counted.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::Ordering;
use std::time::Duration;

use smcr_rnic::any::Nic;

use super::rig::{halted, open_port};
use crate::admission::{Limit, Standing};
use crate::config::{self, Protocol};
use crate::gateway::Gateway;
use crate::groups::PortId;
use crate::reload::Prepared;
use crate::stats::Transport;

const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Puts the same configuration in force but for what is `changed` about the listener.
fn reload(gateway: &mut Gateway<Nic>, changed: impl Fn(&mut config::Listener)) {
    let mut config = gateway.config.clone();
    config.listeners.iter_mut().for_each(changed);
    let now = gateway.clock.now();
    gateway.reload(now, Prepared::of(config)).unwrap();
}

/// The counters of the listeners named `it`, added up as `/metrics` does, and that of all.
fn counted(gateway: &Gateway<Nic>) -> BTreeMap<&'static str, u64> {
    let stats = gateway.figures(gateway.clock.now());
    let rows: Vec<_> = stats.listeners.iter().filter(|row| row.name == "it").collect();
    let failed = rows.iter().flat_map(|row| row.upstreams.iter().map(|it| it.failed)).sum();
    BTreeMap::from([
        ("refused by all", stats.totals.refused_tcp),
        ("accepted", rows.iter().map(|row| row.accepted).sum()),
        ("refused", rows.iter().map(|row| row.refused).sum()),
        ("refused for a limit", rows.iter().map(|row| row.refused_connections).sum()),
        ("durations", rows.iter().map(|row| row.durations.tcp.whole.count).sum()),
        ("failed", failed),
    ])
}

/// A listener whose role a reload changes is another one, and its place is given away when its
/// connections are over. Prometheus took what was then missing for a restart, and showed a burst of
/// connections that never were.
#[test]
fn counters_outlive_the_listeners_that_have_counted() {
    let (mut gateway, _) = halted(212, "");
    let now = gateway.clock.now();
    let listener = &mut gateway.listeners[0];
    (listener.accepted, listener.refused) = (5, 3);
    listener.admission.counts.refuse(Limit::Connections);
    listener.durations.record(Transport::Tcp, Duration::from_secs(1), None);
    let target = listener.pool.choose(now, CLIENT, &[]).unwrap();
    listener.pool.failed(now, target);
    listener.admission.enter(CLIENT, Standing::Within);
    let before = counted(&gateway);
    assert_eq!(before.values().copied().collect::<Vec<_>>(), [5, 1, 1, 3, 3, 1]);

    reload(&mut gateway, |it| it.connect = Protocol::Smc);
    assert_eq!(counted(&gateway), before, "one that goes, and one that has come");
    gateway.listeners[0].admission.leave(CLIENT, Standing::Within);
    assert_eq!(counted(&gateway), before, "the last connection is over");
    gateway.listeners[1].accepted += 2;
    reload(&mut gateway, |it| it.name = "other".to_owned());
    assert_eq!(gateway.listeners[0].config.name, "other", "its place is given away");
    assert_eq!(counted(&gateway)["refused by all"], 3);
    reload(&mut gateway, |it| it.name = "it".to_owned());
    assert_eq!(counted(&gateway), BTreeMap::from_iter(before.into_iter().map(more)));

    gateway.open_doors(now, target).unwrap();
    gateway.listeners.iter_mut().for_each(|it| it.refused += 1);
    let refused = counted(&gateway)["refused by all"];
    gateway.close_doors(now);
    gateway.open_doors(now, target).unwrap();
    assert_eq!(counted(&gateway)["refused by all"], refused);
}

/// What the listener had accepted between two reloads.
fn more((name, count): (&'static str, u64)) -> (&'static str, u64) {
    (name, if name == "accepted" { count + 2 } else { count })
}

/// So many came in, as the poller said in the end.
fn count_packets(gateway: &mut Gateway<Nic>, port: PortId, count: u64) {
    gateway.endpoint.groups_mut().pollers_mut()[port.0].stop();
    gateway.ports[port.0].traffic.packets_in.store(count, Ordering::Relaxed);
}

/// An RNIC that a reload takes away, and a later one brings back, is opened anew.
#[test]
fn counters_of_an_rnic_go_on_when_it_comes_back() {
    let (mut gateway, _) = halted(213, "");
    let (now, first) = (gateway.clock.now(), PortId(0));
    count_packets(&mut gateway, first, 7);
    gateway.endpoint.groups_mut().close_port(first);
    let address = Ipv4Addr::new(127, 77, 213, 2);
    let again = open_port(&gateway.config, address, gateway.clock, &gateway.mail.waker);
    let second = gateway.add_port(now, again);
    count_packets(&mut gateway, second, 1);
    let rows = gateway.figures(now).rnics;
    assert_eq!(rows.iter().map(|row| row.packets_in).collect::<Vec<_>>(), [8]);
}

/// An operator corrects a file whose names nobody resolves, and reloads again. When the first
/// reload has waited for its names in vain, it must not bring the old file back.
#[test]
fn a_configuration_that_was_read_earlier_does_not_come_back() {
    let (mut gateway, _) = halted(218, "");
    let now = gateway.clock.now();
    let mut reload = |name: &str, order| {
        let mut config = gateway.config.clone();
        name.clone_into(&mut config.listeners[0].name);
        let outcome = gateway.reload(now, Prepared { order, ..Prepared::of(config) });
        (outcome.is_ok(), gateway.config.listeners[0].name.clone())
    };
    assert_eq!(reload("corrected", 2), (true, "corrected".to_owned()));
    assert_eq!(reload("wrong", 1), (false, "corrected".to_owned()));
    assert_eq!(reload("newest", 3), (true, "newest".to_owned()));
}
