//! Connections of proxies, which say by a PROXY header who connected to them, before anything else
//! happens.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use smcr_proto::Instant;
use smcr_rnic::Rnic;

use super::Gateway;
use crate::admission::{Caller, Limit};
use crate::listener::{Listener, reset};
use crate::proxy_header::{self, READ_MAX, Said};
use crate::reactor::Token;
use crate::slab::{Key, Slab};
use crate::termination::Termination;

/// Connections whose header is awaited.
#[derive(Debug, Default)]
pub(super) struct Introductions {
    table: Slab<Introduction>,
    /// In the order in which they came, with the end of their patience.
    until: VecDeque<(Instant, Key)>,
}

#[derive(Debug)]
struct Introduction {
    listener: u16,
    proxy: SocketAddr,
    accepted: OwnedFd,
}

impl Introductions {
    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    /// When the first of them has waited for too long, at the latest.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.until.front().map(|(until, _)| *until)
    }
}

impl<N: Rnic> Gateway<N> {
    /// Awaits the header of a connection that `proxy` has made to listener `index`, unless that has
    /// as many connections as it may have. Returns whether work was started for it.
    pub(super) fn await_header(
        &mut self,
        now: Instant,
        index: u16,
        (accepted, proxy): (OwnedFd, SocketAddr),
    ) -> bool {
        let Listener { config, admission, .. } = &mut self.listeners[usize::from(index)];
        if !admission.may_come_nameless(&config.bounds) {
            let caller = Caller { accepted, from: proxy, source: proxy, wanted: None };
            self.refuse(now, index, caller, Limit::Connections);
            return false;
        }
        admission.enter_nameless();
        let one = Introduction { listener: index, proxy, accepted };
        let key = self.introductions.table.insert(one);
        self.introductions.until.push_back((now + PATIENCE, key));
        let accepted = &self.introductions.table.at(key).expect("just put in").accepted;
        // What has come already is reported at once.
        if self.reactor.watch_edges(accepted, Token::Introduction(key)).is_err() {
            self.turn_away(now, key, "no room to watch its socket", Termination::Limit);
        }
        true
    }

    /// Something has come on a connection whose header is awaited.
    pub(super) fn hear_header(&mut self, now: Instant, key: Key) {
        // It may have been turned away while the event was on its way.
        let Some(one) = self.introductions.table.at(key) else { return };
        let mut bytes = [0; READ_MAX];
        let said = match recv(&one.accepted, &mut bytes, RecvFlags::PEEK) {
            // A health check that only connects.
            Ok((0, _)) => Said::Nonsense("it ended without a PROXY header"),
            Ok((len, _)) => proxy_header::read(&bytes[..len]),
            Err(Errno::AGAIN | Errno::INTR) => return,
            Err(_) => Said::Nonsense("it was reset"),
        };
        match said {
            Said::More => {}
            Said::Header { len, ends } => self.introduced(now, key, len, ends),
            Said::Nonsense(why) => self.turn_away(now, key, why, Termination::NoHeader),
        }
    }

    /// The header of a connection has come, and is so long: the client may come in.
    fn introduced(
        &mut self,
        now: Instant,
        key: Key,
        len: usize,
        ends: Option<(SocketAddr, SocketAddr)>,
    ) {
        let one = self.introductions.table.at(key).expect("its header has come");
        let mut header = [0; READ_MAX];
        // It was there just now, and nobody else reads.
        if recv(&one.accepted, &mut header[..len], RecvFlags::empty()) != Ok((len, len)) {
            return self.turn_away(now, key, "it was reset", Termination::NoHeader);
        }
        let one = self.introductions.table.remove(key).expect("its header has come");
        let Introduction { listener, proxy, accepted } = one;
        self.reactor.forget(&accepted);
        self.listeners[usize::from(listener)].admission.leave_nameless();
        let (source, wanted) = ends.map_or((proxy, None), |(from, to)| (from, Some(to)));
        self.admit(now, listener, Caller { accepted, from: proxy, source, wanted });
    }

    /// Resets a connection whose header does not come, or is none.
    fn turn_away(&mut self, now: Instant, key: Key, why: &str, end: Termination) {
        let Some(one) = self.introductions.table.remove(key) else { return };
        self.turned_away(now, one.listener, Some(one.proxy), end);
        let listener = &mut self.listeners[usize::from(one.listener)];
        listener.admission.leave_nameless();
        let name = &listener.config.name;
        tracing::debug!(listener = name, proxy = %one.proxy, why, "a connection is reset");
        reset(one.accepted);
    }

    /// Turns those away whose header has not come.
    pub(super) fn expire_introductions(&mut self, now: Instant) {
        while let Some((_, key)) = self.introductions.until.pop_front_if(|(until, _)| *until <= now)
        {
            self.turn_away(now, key, "no PROXY header has come", Termination::NoHeader);
        }
    }

    /// Turns all of them away: the gateway stops.
    pub(super) fn turn_all_away(&mut self, now: Instant) {
        while let Some((_, key)) = self.introductions.until.pop_front() {
            self.turn_away(now, key, "the gateway stops", Termination::Stopped);
        }
    }
}

/// A proxy sends the header as soon as it is connected.
const PATIENCE: Duration = Duration::from_secs(3);
