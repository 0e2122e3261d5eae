//! A configuration as JSON, with all defaults, in the words of the file: read again, it is the same
//! configuration.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::time::Duration;

use serde_json::{Value, json};
use smcr_proto::wire::clc::v2::Eid;
use smcr_rnic::roce::packet::Version;

use super::preference::PREFERENCES;
use super::{
    AccessLog, Config, Confine, Intercept, InterceptWay, Limits, Listener, Local, Peers, Poll,
    Protocol, RnicConfig, RnicKind, Smc, TcpKeepalive, Versions,
};

impl Config {
    /// The configuration as JSON.
    pub fn to_json(&self) -> Value {
        let pnet = |entry: &super::PnetEntry| json!({"device": entry.device, "rnic": entry.rnic});
        let admin = self.admin.listen.map_or_else(|| "none".to_owned(), |at| at.to_string());
        without_nulls(json!({
            "admin": { "listen": admin },
            "rnic": self.rnics.iter().map(rnic).collect::<Vec<_>>(),
            "pnet": self.pnet.iter().map(pnet).collect::<Vec<_>>(),
            "listener": self.listeners.iter().map(listener).collect::<Vec<_>>(),
            "poll": poll(&self.poll),
            "smc": smc(&self.smc),
            "local": local(&self.local),
            "dns": { "servers": texts(&self.dns.servers) },
            "access_log": access_log(&self.access_log),
            "confine": confine(self.confine),
            "limits": limits(&self.limits),
            "drain_timeout": duration(self.drain_timeout),
            "log": word(&super::LOG_LEVELS, self.log),
        }))
    }
}

fn rnic(rnic: &RnicConfig) -> Value {
    let RnicConfig { name, kind, device, pollers, core, mtu, pnet } = rnic;
    let mut value = json!({
        "name": name, "kind": kind.name(), "device": device, "pollers": pollers, "core": core,
        "mtu": mtu, "pnet": pnet,
    });
    match kind {
        RnicKind::RoceUdp { address } => value["address"] = json!(address),
        RnicKind::RocePacket { address, version } => {
            value["address"] = json!(address);
            value["version"] = json!(if *version == Version::V1 { 1 } else { 2 });
        }
        RnicKind::Dpdk(port) => {
            value["address"] = json!(format!("{}/{}", port.address, port.prefix_bits));
            value["vlan"] = json!(port.vlan);
            value["gateway"] = json!(port.gateway);
            value["eal"] = json!(port.eal);
        }
        RnicKind::Shm => {}
        RnicKind::Verbs(port) => {
            value["port"] = json!(port.number);
            value["gid_index"] = json!(port.gid_index);
        }
    }
    value
}

fn listener(listener: &Listener) -> Value {
    let connects_smc = listener.connect == Protocol::Smc;
    let mut value = json!({
        "name": listener.name,
        "bind": listener.bind,
        "accept": word(&super::TRANSPORTS, listener.accept),
        "connect": word(&super::TRANSPORTS, listener.connect),
        "upstream": texts(&listener.upstream.all),
        "balance": word(&super::upstreams::BALANCES, listener.upstream.balance),
        "eject_after": listener.upstream.eject_after,
        "eject_for": duration(listener.upstream.eject_for),
        "check": listener.upstream.check.map(|check| json!({
            "interval": duration(check.interval), "timeout": duration(check.timeout),
            "fall": check.fall, "rise": check.rise,
        })),
        // Whoever connects decides.
        "prefer": connects_smc.then(|| word(&PREFERENCES, listener.preference.fastest)),
        "compare_every": connects_smc.then_some(listener.preference.compare_every),
        "source": word(&super::intercept::SOURCES, listener.source),
        "proxy_from": texts(&listener.proxy_from),
        "connect_timeout": duration(listener.connect_timeout),
        "tcp_nodelay": listener.tcp_nodelay,
        "tcp_keepalive": keepalive(&listener.tcp_keepalive),
        "backlog": listener.backlog,
        "rmbe_size": listener.rmbe_size,
    });
    listener.bounds.show(&mut value);
    show_peers(&listener.peers, &mut value);
    let Some(Intercept { way, ports, networks, cgroups }) = &listener.intercept else {
        return value;
    };
    let port = |range: &RangeInclusive<u16>| match range.start() == range.end() {
        true => json!(range.start()),
        false => json!(format!("{}-{}", range.start(), range.end())),
    };
    value["intercept"] = json!(match way {
        InterceptWay::Ebpf => "ebpf",
        InterceptWay::Redirect => "redirect",
        InterceptWay::Tproxy => "tproxy",
    });
    value["intercept_ports"] = ports.iter().map(port).collect();
    value["intercept_networks"] = texts(networks);
    value["intercept_cgroups"] = json!(Some(cgroups).filter(|some| !some.is_empty()));
    value
}

fn poll(poll: &Poll) -> Value {
    json!({
        "policy": word(&super::IDLE_POLICIES, poll.policy),
        "spin_us": u64::try_from(poll.spin.as_micros()).unwrap_or(u64::MAX),
        "cores": poll.cores,
        "pin": poll.pin,
        "boost": poll.boost,
        "realtime": poll.realtime,
    })
}

fn smc(smc: &Smc) -> Value {
    let ours = smc.eids.as_slice();
    let listed: Vec<_> = ours.iter().filter(|eid| **eid != Eid::SMCGATE).collect();
    let mut value = json!({
        "option": word(&super::smc::OPTION_MODES, smc.option),
        "assume_peers": texts(&smc.assume_peers),
        "eids": texts(&listed),
        "default_eid": listed.len() < ours.len(),
        "rmbe_size": smc.rmbe_size,
        "rmbe_size_min": smc.rmbe_size_min,
        "rmb_elements": smc.rmb_elements,
        "send_pool": smc.send_pool,
        "handshake_timeout": duration(smc.handshake_timeout),
        "test_link_idle": duration(smc.test_link_idle),
        "test_link_timeout": duration(smc.test_link_timeout),
        "idle_group_server": duration(smc.idle_group_server),
        "idle_group_client": duration(smc.idle_group_client),
        "kept_max": smc.kept_max,
        "kept_for": duration(smc.kept_for),
        "dense_packets": smc.dense_packets,
        "tcp_keepalive": keepalive(&smc.tcp_keepalive),
    });
    if let Versions::Listed { v1, v2 } = smc.versions {
        let spoken = [(1, v1), (2, v2)].into_iter().filter(|(_, spoken)| *spoken);
        value["versions"] = spoken.map(|(version, _)| json!(version)).collect();
    }
    show_peers(&smc.peers, &mut value);
    value
}

fn local(Local { congestion_control, door }: &Local) -> Value {
    let door = door.as_ref();
    json!({
        "congestion_control": word(&super::CONGESTION_CONTROLS, *congestion_control),
        "socket": door.map(|door| &door.socket),
        "uids": door.map(|door| &door.uids),
        "gids": door.map(|door| &door.gids),
        "connections_per_process": door.map(|door| door.connections_per_process),
        "rings": door.map(|door| door.rings),
        "shortcuts": door.map(|door| word(&super::local::SHORTCUTS, door.shortcuts)),
        "shortcut_after": door.map(|door| door.shortcut_after),
    })
}

fn confine(confine: Confine) -> Value {
    let Confine { seccomp, landlock, drop_capabilities } = confine;
    json!({
        "seccomp": seccomp, "landlock": landlock, "drop_capabilities": drop_capabilities,
    })
}

fn limits(limits: &Limits) -> Value {
    let Limits { connections_max, handshakes_max, silent_max, rmb_bytes } = limits;
    json!({
        "connections_max": connections_max, "handshakes_max": handshakes_max,
        "silent_max": silent_max, "rmb_bytes": rmb_bytes,
    })
}

fn access_log(AccessLog { to, format, sample }: &AccessLog) -> Value {
    let (to, path) = to.parts();
    json!({"to": to, "path": path, "format": format.to_string(), "sample": sample.as_f64()})
}

fn keepalive(keepalive: &TcpKeepalive) -> Value {
    let TcpKeepalive { idle, interval, count } = keepalive;
    json!({"idle": duration(*idle), "interval": duration(*interval), "count": count})
}

fn show_peers(peers: &Peers, value: &mut Value) {
    let (sources, gids) = peers.lists();
    value["peers"] = sources.map_or(Value::Null, texts);
    value["gids"] = gids.map_or(Value::Null, texts);
}

fn texts<T: Display>(values: &[T]) -> Value {
    values.iter().map(|value| json!(value.to_string())).collect()
}

/// The word of `words` that means `value`.
pub(super) fn word<T: Copy + PartialEq>(words: &[(&'static str, T)], value: T) -> &'static str {
    let found = words.iter().find(|(_, meaning)| *meaning == value);
    found.expect("whatever can be meant can be written").0
}

/// In the largest unit that is exact.
pub(super) fn duration(time: Duration) -> String {
    let micros = time.as_micros();
    let units = [(3_600_000_000, "h"), (60_000_000, "m"), (1_000_000, "s"), (1_000, "ms")];
    let exact = |(unit, _): &(u128, &str)| micros > 0 && micros.is_multiple_of(*unit);
    match units.into_iter().find(exact) {
        Some((unit, name)) => format!("{}{name}", micros / unit),
        None => format!("{micros}us"),
    }
}

/// What the file would not have.
fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(entries) => {
            let entries = entries.into_iter().filter(|(_, value)| !value.is_null());
            entries.map(|(key, value)| (key, without_nulls(value))).collect()
        }
        Value::Array(values) => values.into_iter().map(without_nulls).collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => value,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An operator who saves what is shown has what is in force, and every key of it is known.
    #[test]
    fn what_is_shown_can_be_read_again() {
        let least = "[[listener]]\nname='a'\nbind='127.0.0.1:1'\nupstream='127.0.0.1:2'\n";
        let most = "log = 'debug'\ndrain_timeout = '1500ms'\n[admin]\nlisten = 'none'\n\
             [[rnic]]\nname='r0'\nkind='roce-packet'\ndevice='va'\nmtu=1024\ncore=3\n\
             [[rnic]]\nname='r1'\nkind='dpdk'\ndevice='net_x'\naddress='10.8.0.1/24'\nvlan=7\n\
             eal=['--no-huge']\n[[rnic]]\nname='r2'\nkind='verbs'\ndevice='rxe'\ngid_index=2\n\
             [[rnic]]\nname='r3'\nkind='shm'\ndevice='/run/s'\npollers=2\n\
             [[pnet]]\ndevice='va'\nrnic='r1'\n\
             [[listener]]\nname='out'\nbind='[::1]:15001'\nconnect='smc'\n\
             upstream='original-dst'\nintercept='ebpf'\nintercept_ports=[7010, '8000-8099']\n\
             intercept_networks=['10.8.0.0/24']\nintercept_cgroups=['/apps']\npeers=[]\n\
             prefer='fastest'\n\
             [[listener]]\nname='in'\nbind='10.8.0.2:15002'\naccept='smc'\nsource='proxy-v2'\n\
             upstream='server.example:7'\nidle_timeout='90s'\nrmbe_size=65536\nbacklog=7\n\
             tcp_keepalive={idle='0s'}\nmax_per_source=3\nrate_max=50\nrate_burst=7\n\
             rate_per_source=9\nover_limit='tcp'\nwait_timeout='700ms'\n\
             half_closed_timeout='1m'\nage_max='2h'\nbandwidth_max='1Gbit'\n\
             bandwidth_per_connection='1500kbit'\n\
             [[listener]]\nname='behind'\nbind='10.8.0.2:15003'\nupstream='server.example:7'\n\
             proxy_from=['10.9.0.0/16']\nbalance='source'\ncheck={}\n\
             [confine]\nlandlock=false\n[dns]\nservers=['10.8.0.53', '[fd00::1]:5353']\n\
             [poll]\npolicy='block'\ncores=[1,2]\npin=false\nboost=0\nrealtime=false\nspin_us=7\n\
             [local]\ncongestion_control='host'\nsocket='/run/l'\nuids=[1000]\ngids=[33, 34]\n\
             connections_per_process=77\nrings=false\nshortcuts='always'\nshortcut_after=1\n\
             [smc]\noption='assume'\nassume_peers=['10.0.0.0/8']\ngids=['fd00::/64']\n\
             eids=['SITE-A']\ndefault_eid=false\nversions=[1,2]\ntest_link_idle='1h'\n\
             [limits]\nconnections_max=10\nrmb_bytes=1000000\n\
             [access_log]\nto='file'\npath='/var/log/a.log'\nsample=0.125\n\
             format='%{time} 100%% %{end}'\n";
        for text in [least, most] {
            let config = Config::parse(text, "a.toml").unwrap();
            let shown = config.to_json();
            let written = toml::to_string(&shown).unwrap();
            assert_eq!(Config::parse(&written, "b.toml").unwrap(), config, "{written}");
            let listed = shown["listener"].as_array().unwrap();
            assert_eq!(listed.len(), config.listeners.len());
        }
    }
}
