//! Where connections go: another upstream where one does not accept, checks, and what names mean.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::Duration;

use smcr_engine::mailbox::{Receiver, Sender};
use smcr_proto::Instant;
use smcr_rnic::Rnic;

use super::Gateway;
use super::reload::number;
use crate::config::{Protocol, comes_back};
use crate::listener::{connect_outcome, reset};
use crate::reactor::{Event, Token};
use crate::resolver::{Resolved, Resolver};
use crate::slab::{Key, Slab};

/// What looks names up again.
pub struct Lookups {
    /// Name servers; none: those of the host.
    pub servers: Vec<SocketAddr>,
    /// Where answers go, and where they come from.
    pub answers: (Sender<Resolved>, Receiver<Resolved>),
    /// The thread, as soon as there are names.
    resolver: Option<Resolver>,
    /// Names that could not be looked up when they were last.
    failing: BTreeSet<String>,
}

impl Lookups {
    /// Nobody is asked before there is a name.
    pub fn new(servers: Vec<SocketAddr>, answers: (Sender<Resolved>, Receiver<Resolved>)) -> Self {
        Self { servers, answers, resolver: None, failing: BTreeSet::new() }
    }

    /// Tells the log of a name whether it can be looked up, once each time that this changes: its
    /// addresses may become stale meanwhile.
    fn note(&mut self, name: &str, outcome: Result<(), &str>) {
        match outcome {
            Ok(()) if self.failing.remove(name) => {
                tracing::info!(upstream = name, "can be looked up again");
            }
            Ok(()) => {}
            Err(why) if self.failing.insert(name.to_owned()) => tracing::warn!(
                upstream = name,
                why,
                "cannot be looked up; its addresses, if it had any, stay as they are"
            ),
            Err(why) => tracing::debug!(upstream = name, why, "still cannot be looked up"),
        }
    }
}

/// Checks that are under way.
#[derive(Debug, Default)]
pub(super) struct Checks {
    table: Slab<Knock>,
}

#[derive(Debug)]
struct Knock {
    listener: u16,
    target: SocketAddr,
    socket: OwnedFd,
    until: Instant,
}

impl Checks {
    /// When the first of them has waited for too long.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.table.iter().map(|(_, knock)| knock.until).min()
    }
}

impl<N: Rnic> Gateway<N> {
    /// The upstream of a session does not accept. Tries the next one, if there is one.
    pub(super) fn not_accepted(&mut self, now: Instant, key: Key, error: &io::Error) {
        match self.next_upstream(now, key, error) {
            Some(next) => self.endpoint.redirected(now, key, next.ip()),
            None => self.endpoint.refused(key),
        }
    }

    /// The upstream of a session has not answered for too long. Tries the next one, if there is
    /// one.
    pub(super) fn not_answered(&mut self, now: Instant, key: Key) {
        let error = io::ErrorKind::TimedOut.into();
        match self.next_upstream(now, key, &error) {
            Some(next) => self.endpoint.redirected(now, key, next.ip()),
            None => self.endpoint.unanswered(key),
        }
    }

    /// Notes that the target of a session has failed, and gives it another one.
    fn next_upstream(&mut self, now: Instant, key: Key, error: &io::Error) -> Option<SocketAddr> {
        let one = self.sessions.negotiating_mut(key)?;
        let failed = one.target;
        let listener = &mut self.listeners[usize::from(one.listener)];
        let name = &listener.config.name;
        tracing::debug!(listener = name, upstream = %failed, %error, "upstream did not accept");
        let is_its_fault = speaks_of_the_far_end(error);
        let out = is_its_fault.then(|| listener.pool.failed(now, failed)).flatten();
        if let Some(out_for) = out {
            let ms = out_for.as_millis();
            tracing::warn!(listener = name, upstream = %failed, ms, "upstream is left alone");
        }
        one.tried.push(failed);
        let is_enough = one.tried.len() >= TRIES_MAX;
        let next = (!is_enough).then(|| listener.pool.choose(now, one.source.ip(), &one.tried));
        let comes_back = |target| {
            comes_back(listener.config.bind, target, |address| self.network.is_here(address))
        };
        match next {
            Some(Ok(next)) if !listener.pool.is_original_dst() && !comes_back(next) => {
                listener.pool.leave(failed);
                listener.pool.enter(next);
                (one.target, one.upstream, one.connected) = (next, None, false);
                one.left_alone.clear();
                if one.accepts == Protocol::Tcp {
                    (one.local, one.offered) = (None, None);
                }
                Some(next)
            }
            Some(_) | None => {
                listener.refused += 1;
                None
            }
        }
    }

    /// Begins the checks that are due, and gives up those that take too long.
    pub(super) fn check_upstreams(&mut self, now: Instant) {
        let late = self.checks.table.iter().filter(|(_, knock)| knock.until <= now);
        for key in late.map(|(key, _)| key).collect::<Vec<_>>() {
            self.knocked(key, false);
        }
        for slot in 0..self.listeners.len() {
            if self.listeners[slot].retired {
                continue;
            }
            for target in self.listeners[slot].pool.due_checks(now) {
                self.knock(now, slot, target);
            }
        }
    }

    fn knock(&mut self, now: Instant, slot: usize, target: SocketAddr) {
        let listener = &self.listeners[slot];
        let timeout = listener.pool.check().map_or(Duration::ZERO, |check| check.timeout);
        match listener.knock(target) {
            Ok((socket, false)) => {
                let (listener, until) = (number(slot), now + timeout);
                let key = self.checks.table.insert(Knock { listener, target, socket, until });
                let socket = &self.checks.table.at(key).expect("just put in").socket;
                if self.reactor.watch_connect(socket, Token::Check(key)).is_err() {
                    // That says nothing about the upstream.
                    self.checks.table.remove(key);
                }
            }
            Ok((socket, true)) => {
                reset(socket);
                self.answered(slot, target, true);
            }
            Err(error) if speaks_of_the_far_end(&error) => self.answered(slot, target, false),
            // What we lack says nothing about the upstream.
            Err(error) => tracing::debug!(upstream = %target, %error, "cannot be checked"),
        }
    }

    /// The connect of a check has ended.
    pub(super) fn check_event(&mut self, key: Key, event: Event) {
        // It may have been given up while the event was on its way.
        let Some(knock) = self.checks.table.at(key) else { return };
        let answers = !event.ending || connect_outcome(&knock.socket).is_ok();
        self.knocked(key, answers);
    }

    fn knocked(&mut self, key: Key, answers: bool) {
        let Some(Knock { listener, target, socket, .. }) = self.checks.table.remove(key) else {
            return;
        };
        // No port is left in TIME_WAIT.
        reset(socket);
        self.answered(usize::from(listener), target, answers);
    }

    fn answered(&mut self, slot: usize, upstream: SocketAddr, answers: bool) {
        let listener = &mut self.listeners[slot];
        let name = &listener.config.name;
        match listener.pool.checked(upstream, answers) {
            Some(true) => tracing::info!(listener = name, %upstream, "upstream is up again"),
            Some(false) => tracing::warn!(listener = name, %upstream, "upstream is down"),
            None => {}
        }
    }

    /// When an upstream must be checked, at the latest.
    pub(super) fn next_check(&self) -> Option<Instant> {
        let listeners = self.listeners.iter().filter(|one| !one.retired);
        let due = listeners.filter_map(|one| one.pool.poll_timeout());
        due.chain(self.checks.poll_timeout()).min()
    }

    /// Has the names of all upstreams looked up from time to time.
    pub(super) fn watch_names(&mut self) {
        let listeners = self.listeners.iter().filter(|one| !one.retired);
        let names: BTreeSet<String> =
            listeners.flat_map(|one| one.pool.names().map(str::to_owned)).collect();
        let Lookups { servers, answers, resolver, failing } = &mut self.lookups;
        failing.retain(|name| names.contains(name));
        if names.is_empty() && resolver.is_none() {
            return;
        }
        if resolver.is_none() {
            match Resolver::start(servers.clone(), answers.0.clone()) {
                Ok(started) => *resolver = Some(started),
                Err(error) => {
                    tracing::warn!(%error, "names of upstreams cannot be looked up again");
                }
            }
        }
        if let Some(resolver) = resolver {
            resolver.want(names);
        }
    }

    /// Hears what names mean now.
    pub(super) fn hear_names(&mut self) {
        while let Some(Resolved { name, addresses }) = self.lookups.answers.1.receive() {
            self.lookups.note(&name, addresses.as_ref().map(drop).map_err(String::as_str));
            if let Ok(addresses) = addresses {
                self.name_means(&name, &addresses);
            }
        }
    }

    /// A name means these addresses now.
    pub(super) fn name_means(&mut self, name: &str, addresses: &[IpAddr]) {
        let mut is_news = false;
        for listener in &mut self.listeners {
            is_news |= listener.pool.resolved(name, addresses);
        }
        if is_news {
            self.missing.heard_news();
            tracing::info!(upstream = name, ?addresses, "means these addresses now");
        }
    }
}

/// Whether an error says something about whoever was to be connected to. Others are about this
/// host, which may be out of descriptors or ports.
fn speaks_of_the_far_end(error: &io::Error) -> bool {
    use io::ErrorKind as E;
    let far = [
        E::ConnectionRefused,
        E::ConnectionReset,
        E::ConnectionAborted,
        E::TimedOut,
        E::HostUnreachable,
        E::NetworkUnreachable,
    ];
    far.contains(&error.kind())
}

/// How many addresses a connection tries at most.
const TRIES_MAX: usize = 5;
