//! RNICs that come and go with the configuration.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use smcr_proto::Instant;
use smcr_rnic::Rnic;

use super::{Gateway, PortInfo, PortParts};
use crate::config::{Config, RnicConfig, RnicKind};
use crate::groups::{self, PortId};
use crate::network::Place;
use crate::placement::PollerHandle;
use crate::reactor::Token;

/// What names of upstreams mean.
pub type Names = BTreeMap<String, Vec<IpAddr>>;

/// By which devices connections come to listeners that are bound to all addresses, and go where the
/// configuration does not say.
#[derive(Clone, Copy, Debug)]
pub enum Arrivals<'a> {
    /// By any that has an address.
    Anywhere,
    /// By those that have one of these addresses: connections have used them. Any other may be that
    /// of a container, which come and go, and each RNIC has a thread and memory.
    At(&'a BTreeSet<IpAddr>),
}

/// Chooses and opens RNICs.
pub trait OpenRnics<N: Rnic> {
    /// The RNICs that `config` needs, if names of upstreams mean what `names` says.
    fn wanted(&self, config: &Config, names: &Names, by: Arrivals<'_>) -> Vec<RnicConfig>;

    /// Opens one, and starts its pollers.
    ///
    /// # Errors
    ///
    /// Why not, in one line; then nothing is left of it.
    fn open(&mut self, config: &Config, nic: &RnicConfig) -> Result<Vec<PortParts<N>>, String>;
}

/// An RNIC that was opened, and its ports.
pub(super) struct Nic {
    pub(super) config: RnicConfig,
    pub(super) ports: Vec<PortId>,
    retired: bool,
}

impl Nic {
    /// The one that `config` describes, which is in use.
    pub(super) fn new(config: RnicConfig, ports: Vec<PortId>) -> Self {
        Self { config, ports, retired: false }
    }
}

/// What another configuration changes about RNICs.
pub(super) struct RnicChange<N: Rnic> {
    /// Those that were opened for it.
    added: Vec<(RnicConfig, Vec<PortParts<N>>)>,
    /// Those that it has again before they were closed, by their place in the list.
    revived: Vec<usize>,
    /// Those that it has no more.
    removed: Vec<usize>,
}

impl<N: Rnic> Gateway<N> {
    /// Something about network devices changed: an RNIC is gone, without a carrier or without its
    /// address, or it works again.
    pub(super) fn network_changed(&mut self, now: Instant) {
        match self.network.refresh() {
            Ok(ports) => {
                self.interception.addresses_changed(self.network.devices());
                self.missing.heard_news();
                for port in ports {
                    self.carrier_changed(now, port);
                }
            }
            Err(error) => tracing::warn!(%error, "the network devices cannot be listed"),
        }
    }

    /// RNICs say what has happened to them.
    pub(super) fn hear_rnics(&mut self, now: Instant) {
        for port in self.endpoint.groups_mut().hear_rnics(now) {
            let address = self.endpoint.groups().ports()[port.0].address();
            let (gid, _) = address.expect("what has spoken is an RNIC");
            let subnet = self.network.readdressed(port, gid.to_ip());
            self.endpoint.groups_mut().readdressed(now, port, subnet);
            self.carrier_changed(now, port);
        }
    }

    pub(super) fn carrier_changed(&mut self, now: Instant, port: PortId) {
        self.renew_kept();
        self.endpoint.groups_mut().carrier_changed(now, port, self.network.is_up(port));
        self.settle(now);
    }

    /// Opens what `config` has and we have not. What it changes about an RNIC is put back.
    ///
    /// # Errors
    ///
    /// Why not, in one line; then everything is as before.
    pub(super) fn open_rnics(
        &mut self,
        config: &mut Config,
        names: &Names,
        notes: &mut Vec<String>,
    ) -> Result<RnicChange<N>, String> {
        let wanted = self.opener.wanted(config, names, Arrivals::Anywhere);
        self.open_these(wanted, config, notes)
    }

    /// The same, where `wanted` are the RNICs that it needs.
    pub(super) fn open_these(
        &mut self,
        wanted: Vec<RnicConfig>,
        config: &mut Config,
        notes: &mut Vec<String>,
    ) -> Result<RnicChange<N>, String> {
        let mut change = RnicChange { added: Vec::new(), revived: Vec::new(), removed: Vec::new() };
        for wanted in wanted {
            let (name, what) = (wanted.name.clone(), "takes effect after a restart");
            match self.nics.iter().position(|nic| nic.config.name == name) {
                Some(place) if self.nics[place].config != wanted => {
                    notes.push(format!("rnic {name}: what is different {what}"));
                    let listed = config.rnics.iter_mut().find(|one| one.name == name);
                    listed.into_iter().for_each(|one| one.clone_from(&self.nics[place].config));
                    // It is what the restart will change, so it has to be there until then.
                    change.revived.extend(self.nics[place].retired.then_some(place));
                }
                Some(place) if self.nics[place].retired => change.revived.push(place),
                Some(_) => {}
                None => match self.open_rnic(config, &wanted) {
                    Ok(ports) => change.added.push((wanted, ports)),
                    // Nobody has asked for it by name: without it, connections stay TCP.
                    Err(why) if config.rnics.is_empty() => notes.push(why),
                    Err(why) => {
                        change.give_up();
                        return Err(why);
                    }
                },
            }
        }
        if !config.rnics.is_empty() {
            let listed = |nic: &Nic| config.rnics.iter().any(|one| one.name == nic.config.name);
            let gone = self.nics.iter().enumerate();
            let gone = gone.filter(|(_, nic)| !nic.retired && !listed(nic));
            change.removed = gone.map(|(place, _)| place).collect();
        }
        Ok(change)
    }

    fn open_rnic(
        &mut self,
        config: &Config,
        wanted: &RnicConfig,
    ) -> Result<Vec<PortParts<N>>, String> {
        let name = &wanted.name;
        match wanted.kind {
            RnicKind::Dpdk(_) => {
                Err(format!("rnic {name}: DPDK takes ports when the gateway starts; restart it"))
            }
            RnicKind::Shm => Err(format!(
                "rnic {name}: peers learn of shared memory when the gateway starts; restart it"
            )),
            RnicKind::RoceUdp { .. } | RnicKind::RocePacket { .. } | RnicKind::Verbs(_) => {
                self.opener.open(config, wanted)
            }
        }
    }

    /// Uses what was opened, and begins to give up what is not wanted any more. Says what changes.
    pub(super) fn change_rnics(
        &mut self,
        now: Instant,
        change: RnicChange<N>,
        notes: &mut Vec<String>,
    ) {
        for (config, parts) in change.added {
            notes.push(format!("rnic {}: added", config.name));
            let ports = parts.into_iter().map(|part| self.add_port(now, part)).collect();
            self.nics.push(Nic::new(config, ports));
        }
        for (place, retired) in [(change.revived, false), (change.removed, true)]
            .into_iter()
            .flat_map(|(places, retired)| places.into_iter().map(move |place| (place, retired)))
        {
            let Nic { config, ports, .. } = &self.nics[place];
            let what =
                if retired { "removed as soon as nothing needs it" } else { "kept after all" };
            notes.push(format!("rnic {}: {what}", config.name));
            for port in ports.clone() {
                self.network.set_wanted(port, !retired);
                match retired {
                    true => self.endpoint.groups_mut().retire_port(now, port),
                    false => self.endpoint.groups_mut().revive_port(now, port),
                }
            }
            self.nics[place].retired = retired;
        }
        self.settle(now);
    }

    pub(super) fn add_port(&mut self, now: Instant, part: PortParts<N>) -> PortId {
        let PortParts { name, kind, device, lan, subnet, rnic, poller, traffic } = part;
        let address = rnic.as_ref().map(|rnic| rnic.port().gid.to_ip());
        self.network.add(Place::of(&name, (&kind, &device), address));
        if let Some(events) = rnic.as_ref().and_then(Rnic::descriptor)
            && let Err(error) = self.reactor.watch(events, Token::Rnic)
        {
            tracing::warn!(rnic = name, %error, "nobody hears what an RNIC says");
        }
        self.ports.push(PortInfo { kind, device, traffic });
        let groups = self.endpoint.groups_mut();
        groups.pollers_mut().push(poller);
        let port = groups.add_port(groups::Port::new(name, lan, subnet, rnic));
        self.decide_anew();
        self.carrier_changed(now, port);
        port
    }

    /// Closes RNICs that are given up and that nothing needs any more.
    pub(super) fn close_rnics(&mut self, now: Instant) {
        if self.nics.iter().all(|nic| !nic.retired) || now < self.look_at_rnics {
            return;
        }
        self.look_at_rnics = now + super::LIFE_SIGN;
        self.endpoint.groups_mut().vacate_retired(now);
        self.settle(now);
        let at_rest = self.endpoint.groups().retired_at_rest();
        let relays = |port: &PortId| {
            self.endpoint.groups().pollers()[port.0].counters.connections.get() > 0
                || self.sessions.iter().any(|(_, session)| session.is_on(*port))
        };
        let rests = |port: &PortId| at_rest.contains(port) && !relays(port);
        let is_over = |nic: &Nic| nic.retired && nic.ports.iter().all(rests);
        let Some(place) = self.nics.iter().position(is_over) else { return };
        // The last poller stays: it relays what stays TCP.
        if self.nics.len() == 1 {
            return;
        }
        for port in self.nics.remove(place).ports {
            let groups = self.endpoint.groups_mut();
            groups.pollers_mut()[port.0].stop();
            if let Some(events) = groups.ports()[port.0].rnic.as_ref().and_then(Rnic::descriptor) {
                self.reactor.forget(events);
            }
            self.endpoint.groups_mut().close_port(port);
        }
    }
}

impl<N: Rnic> RnicChange<N> {
    /// Ends what was begun: the configuration is not taken.
    pub(super) fn give_up(self) {
        let ports = self.added.into_iter().flat_map(|(_, ports)| ports);
        ports.map(|port| port.poller).for_each(|mut poller| PollerHandle::stop(&mut poller));
    }
}
