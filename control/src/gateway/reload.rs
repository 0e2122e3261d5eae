//! Another configuration, without ending a connection.
//!
//! What can fail comes first, and leaves everything as it was. Listeners are the same if name and
//! roles are; all others come and go. One that goes keeps its number for as long as it has
//! connections. A socket that is bound where a new listener wants to be changes hands, so that no
//! connection is refused in between.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};

use smcr_proto::Instant;
use smcr_rnic::Rnic;

use super::Gateway;
use super::accept::BEGIN_MAX;
use super::settings::{group_settings, settings};
use crate::config::{self, Config, Protocol};
use crate::idle::Limits;
use crate::intercept::Led;
use crate::listener::{Common, Listener, who_has_it};
use crate::operate::OperateError;
use crate::reactor::Token;
use crate::reload::Prepared;
use crate::smc_option::OptionSource;

/// Where a listener of the new configuration will be, and on what it will listen.
struct Planned {
    slot: usize,
    /// It takes the place of what was in the slot before.
    is_new: bool,
    socket: Listens,
}

/// On what a listener listens.
enum Listens {
    /// Its own socket, as before.
    AsBefore,
    /// A socket that was just made.
    Fresh(OwnedFd),
    /// The socket of a listener that was there before, in this slot.
    Inherited(OwnedFd, usize),
    /// None: the operator has drained it.
    Not,
}

impl<N: Rnic> Gateway<N> {
    /// Puts another configuration in force. Returns what has changed, in words.
    ///
    /// # Errors
    ///
    /// Why not; then everything is as it was.
    pub(super) fn reload(
        &mut self,
        now: Instant,
        prepared: Prepared,
    ) -> Result<Vec<String>, OperateError> {
        if self.draining.is_some() {
            return Err(OperateError::Refused("the gateway is stopping".to_owned()));
        }
        // The configuration knows nothing of them.
        self.close_doors(now);
        let Prepared { mut config, names, log_mistake, order } = prepared;
        if order < self.reloaded {
            // To resolve its names took longer.
            let why = "a configuration that was read later is in force already";
            return Err(OperateError::Refused(why.to_owned()));
        }
        // What comes by a restart only needs nothing before it.
        let at_restart = keep_what_needs_a_restart(&self.config, &mut config);
        // A folder that we have given up looks like one that we may not use.
        if let Some(why) = self.confinement.refuses(&config).or(log_mistake) {
            return Err(OperateError::Refused(why));
        }
        let mut notes = self.confinement.lost();
        notes.extend(at_restart);
        let common = self.common.after(&config);
        let plan = self.plan(&config, &common).map_err(OperateError::Refused)?;
        let rnics = self.open_rnics(&mut config, &names, &mut notes);
        let rnics = rnics.map_err(OperateError::Refused)?;
        if let Err(why) = self.lead(&config, &plan) {
            rnics.give_up();
            return Err(OperateError::Refused(why));
        }
        // From here on nothing fails.
        self.reloaded = order;
        self.renew_kept();
        self.change_rnics(now, rnics, &mut notes);
        notes.extend(self.what_changes(&config, &plan));
        self.place(now, &config, plan, common);
        for (name, addresses) in &names {
            self.name_means(name, addresses);
        }
        if let OptionSource::Assume(peers) = &mut self.option {
            peers.clone_from(&config.smc.assume_peers);
        }
        crate::log::change(config.log);
        self.access_log.change(&config.access_log);
        self.network.change(crate::pnet::PnetTable::new(&config));
        self.network.need_policies(&config);
        self.config = config;
        crate::measure::serve();
        self.watch_names();
        self.decide_anew();
        self.settle(now);
        Ok(notes)
    }

    /// Tells everybody what the configuration says now.
    pub(super) fn decide_anew(&mut self) {
        let kinds: Vec<_> = self.ports.iter().map(|port| &port.kind).collect();
        let speaks = (&self.option, &self.listeners[..]);
        let settings = settings(&self.config, self.peer_id, &kinds, speaks);
        self.endpoint.change(settings, group_settings(&self.config, self.peer_id));
        let limits = self.listeners.iter().map(|one| Limits::of(&one.config.bounds));
        self.idle.change(limits.collect());
    }

    /// Where each listener of `config` will be.
    fn plan(&self, config: &Config, common: &Common) -> Result<Vec<Planned>, String> {
        let mut free = (0..).filter(|slot| self.listeners.get(*slot).is_none_or(Listener::is_gone));
        let plan = |wanted: &config::Listener| {
            let same = self.listeners.iter().position(|old| is_same(old, wanted));
            let slot = same.or_else(|| free.next()).expect("numbers do not end");
            let is_drained = same.is_some_and(|slot| self.listeners[slot].drained);
            let socket = match same {
                _ if is_drained => Listens::Not,
                Some(slot) if self.listeners[slot].config.bind == wanted.bind => Listens::AsBefore,
                Some(_) | None => self.socket_for(wanted, common).map_err(|error| {
                    let (name, at, hint) = (&wanted.name, wanted.bind, who_has_it(&error));
                    format!("listener {name} cannot listen at {at}: {error}{hint}")
                })?,
            };
            Ok(Planned { slot, is_new: same.is_none(), socket })
        };
        config.listeners.iter().map(plan).collect()
    }

    fn socket_for(&self, wanted: &config::Listener, common: &Common) -> std::io::Result<Listens> {
        let there = self.listeners.iter().enumerate();
        let mut there = there.filter(|(_, old)| old.config.bind == wanted.bind);
        match there.find_map(|(slot, old)| Some((slot, old.socket.as_ref()?))) {
            Some((slot, socket)) => Ok(Listens::Inherited(socket.try_clone()?, slot)),
            None => Ok(Listens::Fresh(common.listen(wanted, &self.option)?)),
        }
    }

    /// Leads connections to the listeners that will be there.
    fn lead(&mut self, config: &Config, plan: &[Planned]) -> Result<(), String> {
        let led = config.listeners.iter().zip(plan).filter_map(|(config, planned)| {
            let socket = match &planned.socket {
                Listens::AsBefore => self.listeners[planned.slot].socket.as_ref()?,
                Listens::Fresh(socket) | Listens::Inherited(socket, _) => socket,
                Listens::Not => return None,
            };
            Some(Led { index: number(planned.slot), config, socket: socket.as_fd() })
        });
        let led = led.collect::<Vec<_>>();
        self.interception.change(&led).map_err(|why| why.to_string())
    }

    /// What `config` will change, in words.
    fn what_changes(&self, config: &Config, plan: &[Planned]) -> Vec<String> {
        let mut notes = Vec::new();
        for (wanted, planned) in config.listeners.iter().zip(plan) {
            let name = &wanted.name;
            if planned.is_new {
                notes.push(format!("listener {name}: added"));
            } else if self.listeners[planned.slot].config != *wanted {
                notes.push(format!("listener {name}: changed"));
            }
            let is_passed = self.common.passed().at(wanted.bind).is_some();
            if is_passed && wanted.accept == Protocol::Smc && !self.option.is_for_others() {
                // At the start no such listener was there, so that the program sees our own only.
                let why = "has SMC-R after a restart: its socket was passed";
                notes.push(format!("listener {name}: {why}"));
            }
        }
        for (slot, old) in self.listeners.iter().enumerate() {
            let goes = !old.retired && !old.local;
            if goes && plan.iter().all(|planned| planned.is_new || planned.slot != slot) {
                let (name, active) = (&old.config.name, old.admission.active());
                notes.push(format!("listener {name}: removed; {active} connections go on"));
            }
        }
        for (what, is_other) in [
            ("limits", self.config.limits != config.limits),
            ("smc", self.config.smc != config.smc),
            ("pnet", self.config.pnet != config.pnet),
            ("log", self.config.log != config.log),
            ("access_log", self.config.access_log != config.access_log),
            ("drain_timeout", self.config.drain_timeout != config.drain_timeout),
        ] {
            if is_other {
                notes.push(format!("{what}: changed"));
            }
        }
        notes
    }

    /// Puts all listeners where they shall be.
    fn place(&mut self, now: Instant, config: &Config, plan: Vec<Planned>, common: Common) {
        self.change_local(config, &common);
        for slot in 0..self.listeners.len() {
            if self.listeners[slot].local {
                continue;
            }
            let planned = plan.iter().find(|planned| planned.slot == slot && !planned.is_new);
            match planned.map(|planned| &planned.socket) {
                // They have come to what it was before.
                Some(Listens::AsBefore | Listens::Not) => while self.begin_some(slot) {},
                Some(Listens::Fresh(_) | Listens::Inherited(..)) => self.close(now, slot),
                None => {
                    self.close(now, slot);
                    // They would be let in by the rules of nobody.
                    self.turn_waiting_away(now, slot);
                    self.listeners[slot].retired = true;
                }
            }
        }
        for (wanted, planned) in config.listeners.iter().zip(plan) {
            let Planned { slot, is_new, socket } = planned;
            let (wanted, common) = (wanted.clone(), common.clone());
            if !is_new {
                self.listeners[slot].change(wanted, common);
            } else {
                self.put_listener(slot, Listener::new(wanted, common, None));
            }
            self.listen_on(now, slot, socket);
        }
        self.mind_passed();
    }

    /// Has the listener in `slot` listen.
    fn listen_on(&mut self, now: Instant, slot: usize, socket: Listens) {
        let listener = &mut self.listeners[slot];
        let before = match socket {
            Listens::AsBefore => Some(slot),
            Listens::Not => None,
            Listens::Fresh(socket) => {
                listener.socket = Some(socket);
                None
            }
            Listens::Inherited(socket, before) => {
                listener.socket = Some(socket);
                Some(before)
            }
        };
        if let Some(before) = before {
            match listener.take_up(&self.option) {
                Ok(None) => {}
                Ok(Some(waiting)) => {
                    let socket = listener.socket.as_ref().expect("it has begun anew").as_fd();
                    let led = Led { index: number(slot), config: &listener.config, socket };
                    self.interception.listens_anew(led);
                    self.begin_late(now, before, waiting);
                }
                Err(error) => tracing::warn!(
                    listener = listener.config.name,
                    %error,
                    "not all options of its socket could be changed; restart the gateway"
                ),
            }
        }
        self.open(slot);
    }

    /// Begins connections that came to a listener before it was closed: they are served as it was.
    fn begin_late(&mut self, now: Instant, slot: usize, waiting: VecDeque<OwnedFd>) {
        let listener = &mut self.listeners[slot];
        listener.accepted += waiting.len() as u64;
        listener.arrived.extend(waiting);
        while self.begin_some(slot) {}
        if self.listeners[slot].retired {
            self.turn_waiting_away(now, slot);
        }
    }

    /// Hears of connections at the listener in `slot`, if it listens and nobody hears yet.
    pub(super) fn open(&mut self, slot: usize) {
        let listener = &self.listeners[slot];
        let Some(socket) = &listener.socket else { return };
        self.reactor.forget(socket);
        if let Err(error) = self.reactor.watch(socket, Token::Listener(number(slot))) {
            let listener = &listener.config.name;
            tracing::error!(listener, %error, "nobody hears of its connections; restart");
        }
    }

    /// Takes in what waits at the listener in `slot`, which then listens no more.
    pub(super) fn close(&mut self, now: Instant, slot: usize) {
        // However fast others come: so many can wait.
        let most = self.listeners[slot].config.backlog as usize / BEGIN_MAX + 1;
        for _ in 0..most {
            let has_more = self.accept(now, number(slot));
            while self.begin_some(slot) {}
            if !has_more {
                break;
            }
        }
        let Some(socket) = self.listeners[slot].socket.take() else { return };
        // Another listener may have it by now.
        self.reactor.forget(&socket);
    }
}

/// Whether `wanted` is what `old` was, perhaps elsewhere.
fn is_same(old: &Listener, wanted: &config::Listener) -> bool {
    let roles = |it: &config::Listener| (it.accept, it.connect);
    !old.retired
        && !old.local
        && old.config.name == wanted.name
        && roles(&old.config) == roles(wanted)
}

/// Listeners are numbered so in connections.
pub(super) fn number(slot: usize) -> u16 {
    u16::try_from(slot).expect("nobody has as many listeners")
}

/// Puts into `new` what only a restart can change. Returns what that is, in words.
fn keep_what_needs_a_restart(old: &Config, new: &mut Config) -> Vec<String> {
    let mut notes = Vec::new();
    let mut note = |what: &str, is_other: bool| {
        if is_other {
            notes.push(format!("{what}: takes effect after a restart"));
        }
    };
    note("admin", old.admin != new.admin);
    note("poll", old.poll != new.poll);
    note("local", old.local != new.local);
    note("dns", old.dns != new.dns);
    note("confine", old.confine != new.confine);
    note("smc.option", old.smc.option != new.smc.option);
    note("smc.send_pool", old.smc.send_pool != new.smc.send_pool);
    new.admin = old.admin.clone();
    new.poll = old.poll.clone();
    new.local = old.local.clone();
    new.dns = old.dns.clone();
    new.confine = old.confine;
    new.smc.option = old.smc.option;
    new.smc.send_pool = old.smc.send_pool;
    notes
}
