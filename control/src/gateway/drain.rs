//! Listeners that take no connections for a while, because an operator says so.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use smcr_proto::Instant;
use smcr_rnic::Rnic;

use super::Gateway;
use super::accept::ACCEPT_MAX;
use super::reload::number;
use crate::config::Protocol;
use crate::intercept::Led;
use crate::listener::{Listener, accept_from, reset};
use crate::operate::OperateError;
use crate::reactor::Token;
use crate::smc_option::Ports;

impl<N: Rnic> Gateway<N> {
    /// Takes no new connections at the listener of this name, or at all of them. Open ones go on;
    /// with `close_idle`, those on which nothing moves are closed, spread over that time. Returns
    /// what was done, in words.
    ///
    /// # Errors
    ///
    /// If there is no such listener.
    pub(super) fn drain_listeners(
        &mut self,
        now: Instant,
        name: Option<&str>,
        close_idle: Option<Duration>,
    ) -> Result<Vec<String>, OperateError> {
        let slots = self.slots_of(name)?;
        for slot in &slots {
            self.listeners[*slot].drained = true;
        }
        // First of all new connections are led elsewhere: what comes meanwhile is taken in.
        if let Err(why) = self.lead_to_open() {
            tracing::warn!(why, "connections are still intercepted");
        }
        let is_local = |slot: &usize| {
            let one = &self.listeners[*slot];
            one.local && one.config.accept == Protocol::Smc
        };
        if slots.iter().any(is_local) {
            self.leave_listeners_alone();
        }
        for slot in &slots {
            self.close(now, *slot);
            self.close_all_kept(Some(number(*slot)));
            if let Some(over) = close_idle {
                self.idle.close_over(now, *slot, over);
            }
        }
        self.mind_passed();
        let note = |slot: &usize| {
            let Listener { config, admission, .. } = &self.listeners[*slot];
            let active = admission.active();
            format!("listener {}: drained; {active} connections go on", config.name)
        };
        Ok(slots.iter().map(note).collect())
    }

    /// Takes connections again at the listener of this name, or at all of them. Returns what was
    /// done, in words.
    ///
    /// # Errors
    ///
    /// If there is no such listener, or its address is taken: then it stays drained, and the others
    /// do not.
    pub(super) fn undrain_listeners(
        &mut self,
        name: Option<&str>,
    ) -> Result<Vec<String>, OperateError> {
        if self.draining.is_some() {
            return Err(OperateError::Refused("the gateway is stopping".to_owned()));
        }
        let (mut notes, mut failed) = (Vec::new(), Vec::new());
        for slot in self.slots_of(name)? {
            let listener = &mut self.listeners[slot];
            if !listener.drained {
                continue;
            }
            let (name, bind) = (&listener.config.name, listener.config.bind);
            let socket = match listener.local {
                // What programs listen on is theirs.
                true => Ok(None),
                false => self.common.listen(&listener.config, &self.option).map(Some),
            };
            match socket {
                Ok(socket) => {
                    notes.push(format!("listener {name}: takes connections again"));
                    (listener.socket, listener.drained) = (socket, false);
                    self.idle.close_no_more(slot);
                    self.open(slot);
                }
                Err(error) => failed.push(format!("listener {name} at {bind}: {error}")),
            }
        }
        self.mind_passed();
        failed.extend(self.lead_to_open().err());
        match failed.is_empty() {
            true => Ok(notes),
            false => Err(OperateError::Refused(failed.join("; "))),
        }
    }

    /// Why a load balancer should send nobody here, or nobody to the listener of this name.
    pub(super) fn reasons_to_stay_away(&self, name: Option<&str>) -> Vec<String> {
        if self.draining.is_some() {
            return vec!["the gateway is stopping".to_owned()];
        }
        let Ok(slots) = self.slots_of(name) else {
            return vec![format!("there is no listener {}", name.unwrap_or_default())];
        };
        let drained = slots.iter().filter(|slot| self.listeners[**slot].drained);
        let reasons: Vec<_> = drained
            .map(|slot| format!("listener {} is drained", self.listeners[*slot].config.name))
            .collect();
        // One of several that is drained is a reason for those who ask about it.
        if reasons.len() < slots.len() { Vec::new() } else { reasons }
    }

    /// Hears of connections at sockets that were passed to us and that no listener has, and of no
    /// others.
    pub(super) fn mind_passed(&self) {
        for (number, (address, socket)) in (0..).zip(self.common.passed().iter()) {
            let has_it = |one: &Listener| one.socket.is_some() && one.config.bind == address;
            self.reactor.forget(socket);
            if self.listeners.iter().any(has_it) {
                continue;
            }
            self.answer_no_more(socket, address.port());
            if self.draining.is_some() {
                // They are for the next process that gets the socket.
                continue;
            }
            if let Err(error) = self.reactor.watch(socket, Token::Passed(number)) {
                tracing::error!(%address, %error, "nobody refuses connections there; restart");
            }
        }
    }

    /// Has connections that come to a socket that no listener has answer the SMC option no more:
    /// nobody would hear the messages that follow, or the server would, as data.
    fn answer_no_more(&self, socket: &OwnedFd, port: u16) {
        let open = |one: &&Listener| one.socket.is_some() && one.config.accept == Protocol::Smc;
        let mut others = self.listeners.iter().filter(open).peekable();
        if others.peek().is_none() {
            self.option.forget_listener(socket, Ports::Any);
        }
        // What is noted is the port, which another address may have as well.
        if others.all(|one| one.config.bind.port() != port) {
            self.option.forget_listener(socket, Ports::Own);
        }
    }

    /// Resets connections that wait at a socket that no listener has: nobody else would say that
    /// they are not served. Others are served in between.
    pub(super) fn refuse_passed(&mut self, number: u16) {
        let socket = self.common.passed().iter().nth(number.into());
        let Some((_, socket)) = socket else { return };
        let refuse = || {
            for _ in 0..ACCEPT_MAX {
                match accept_from(socket) {
                    Ok(accepted) => reset(accepted),
                    Err(Errno::CONNABORTED) => {}
                    Err(error) => return Some(error),
                }
            }
            None
        };
        if let Some(Errno::MFILE | Errno::NFILE) = refuse() {
            // Each is closed before the next one is accepted, so that one descriptor is enough.
            self.overload.with_spare(refuse);
        }
    }

    /// Leads connections to the listeners that listen.
    fn lead_to_open(&mut self) -> Result<(), String> {
        let open = self.listeners.iter().enumerate().filter(|(_, one)| !one.drained);
        let led = open.filter_map(|(slot, one)| {
            let socket = one.socket.as_ref()?.as_fd();
            Some(Led { index: number(slot), config: &one.config, socket })
        });
        let led = led.collect::<Vec<_>>();
        self.interception.change(&led).map_err(|why| why.to_string())
    }

    /// The listeners of this name, or all.
    fn slots_of(&self, name: Option<&str>) -> Result<Vec<usize>, OperateError> {
        let fits = |one: &Listener| !one.retired && name.is_none_or(|name| one.config.name == name);
        // Listeners of a measurement are none of the operator's.
        let is_door = |slot: usize| self.doors.as_ref().is_some_and(|doors| doors.has(slot));
        let all = self.listeners.iter().enumerate();
        let all = all.filter(|(slot, one)| fits(one) && !is_door(*slot));
        let found: Vec<usize> = all.map(|(slot, _)| slot).collect();
        match (found.is_empty(), name) {
            (true, Some(name)) => Err(OperateError::Unknown(format!("listener {name}"))),
            _ => Ok(found),
        }
    }
}
