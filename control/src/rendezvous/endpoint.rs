//! All rendezvous of a gateway.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::time::Duration;

use smcr_engine::Report;
use smcr_proto::Instant;
use smcr_proto::wire::clc::Diagnosis;
use smcr_rnic::Rnic;

use super::effect::{Closed, Counts, Effect, Limit, Stage, Told, Why};
use super::facts::{Arrival, Settings, Surroundings};
use super::negotiation::Negotiator;
use super::shared::Shared;
use super::state::{Rendezvous, State};
use super::waiting::Wait;
use crate::deadlines::Deadlines;
use crate::groups::{self, Event, GroupId, Groups, Pollers, Proof, QpOf};
use crate::paths::Far;
use crate::slab::Key;

/// All rendezvous of a gateway, and what they share. It does no IO and reads no clock.
///
/// - [`arrived`](Self::arrived), [`surveyed`](Self::surveyed), [`connected`](Self::connected),
///   [`refused`](Self::refused), [`received`](Self::received), [`ended`](Self::ended),
///   [`broke`](Self::broke), [`abort`](Self::abort), [`reported`](Self::reported),
///   [`handle_timeout`](Self::handle_timeout) and [`drain`](Self::drain) feed inputs; so does
///   whatever is done to [`groups_mut`](Self::groups_mut).
/// - [`poll_effect`](Self::poll_effect) drains what the owner must do. Call it until `None` after
///   every input, and do each effect before the next call. That may make further inputs: they are
///   queued, and nothing calls back.
/// - [`poll_timeout`](Self::poll_timeout) says when to call `handle_timeout`, at the latest.
/// - All other methods only read.
///
/// Owners name connections by [`Key`]s of their choice. An input for a connection that the endpoint
/// does not know any more has no effect. Inputs must carry non-decreasing `now`; given the same
/// inputs, there are the same effects in the same order.
pub struct Endpoint<N: Rnic, P: Pollers<QpOf<N>>> {
    table: BTreeMap<Key, Box<Rendezvous>>,
    shared: Shared<N, P>,
    /// Rendezvous that may have something to do, in the order in which they are looked at.
    ready: VecDeque<Key>,
    deadlines: Deadlines<Key>,
    /// Rendezvous whose deadlines had passed when `handle_timeout` was last called.
    due: VecDeque<Key>,
}

impl<N: Rnic, P: Pollers<QpOf<N>>> Endpoint<N, P> {
    /// No rendezvous yet.
    pub fn new(settings: Settings, groups: Groups<N, P>) -> Self {
        Self {
            table: BTreeMap::new(),
            shared: Shared::new(settings, groups),
            ready: VecDeque::new(),
            deadlines: Deadlines::default(),
            due: VecDeque::new(),
        }
    }

    /// The operator has decided anew. What goes on, goes on by what it began with.
    ///
    /// # Panics
    ///
    /// If there are fewer listeners than before: connections name theirs by number.
    pub fn change(&mut self, settings: Settings, groups: groups::Settings) {
        self.shared.change(settings);
        self.shared.groups.change(groups);
    }

    /// A connection was accepted.
    ///
    /// # Panics
    ///
    /// If `key` names another connection.
    pub fn arrived(&mut self, now: Instant, key: Key, arrival: Arrival) {
        let mut one = Box::new(Rendezvous::new(now, key, arrival));
        // Where the peer proposes, a place is taken when its Proposal comes.
        let offers = self.shared.terms(arrival.listener).offers_to(arrival.upstream);
        let limited = offers && arrival.stays.is_none();
        one.has_place = limited && self.shared.places.take(arrival.listener);
        let waits = limited && !one.has_place;
        let before = self.table.insert(key, one);
        assert!(before.is_none(), "a key names one connection");
        if waits {
            self.shared.places.wait(now, arrival.listener, key);
        } else {
            self.begin(now, key);
        }
    }

    /// What there is around the connection to the peer now: the answer to
    /// [`Effect::Survey`].
    pub fn surveyed(&mut self, key: Key, surroundings: Surroundings) {
        if let Some(one) = self.table.get_mut(&key) {
            (one.surroundings, one.surveyed) = (surroundings, true);
            self.ready.push_back(key);
        }
    }

    /// The upstream is connected.
    pub fn connected(&mut self, now: Instant, key: Key) {
        if let Some(one) = self.table.get_mut(&key) {
            one.connected = true;
            one.deadline = Some(now + self.shared.settings.handshake_timeout);
            self.ready.push_back(key);
        }
    }

    /// The upstream is not connected, and will not be.
    pub fn refused(&mut self, key: Key) {
        self.fail(key, Why::Refused);
    }

    /// The owner tries another upstream, in place of one that has not accepted.
    pub fn redirected(&mut self, now: Instant, key: Key, upstream: IpAddr) {
        let Some(one) = self.table.get_mut(&key) else { return };
        let connect = Negotiator { now, one, shared: &mut self.shared }.begin_again(upstream);
        self.deadlines.set(key, one.poll_timeout());
        self.shared.effects.push_back(connect);
    }

    /// The upstream has not answered, and there is no other.
    pub fn unanswered(&mut self, key: Key) {
        self.fail(key, Why::Unanswered);
    }

    /// How many bytes of the peer may be [`received`](Self::received) now. What exceeds it belongs
    /// to whoever gets the connection.
    pub fn room(&self, key: Key) -> usize {
        let talking = self.table.get(&key).and_then(|one| one.talking());
        talking.map_or(0, |talking| talking.conversation.room())
    }

    /// The peer sent these bytes on the TCP connection.
    ///
    /// # Panics
    ///
    /// If there is no [`room`](Self::room) for it.
    pub fn received(&mut self, key: Key, bytes: &[u8]) {
        // It may be over: the bytes were read before the owner learned of that.
        let Some(one) = self.table.get_mut(&key) else { return };
        let talking = one.talking_mut().expect("there is no room where nobody talks");
        talking.conversation.feed(bytes);
        self.ready.push_back(key);
    }

    /// The peer has ended its direction of the TCP connection. Has no effect unless the handshake
    /// is under way.
    pub fn ended(&mut self, key: Key) {
        // It may be over, or stay TCP whatever the peer says: then its poller sees the end.
        let Some(talking) = self.table.get_mut(&key).and_then(|one| one.talking_mut()) else {
            return;
        };
        match talking.wait {
            // The peer has sent all its CLC messages.
            Some(Wait::Holder(_)) => talking.conversation.end_in_order(),
            Some(
                Wait::Place | Wait::FirstContact(_) | Wait::Element { .. } | Wait::Proof { .. },
            )
            | None => talking.conversation.end(),
        }
        self.ready.push_back(key);
    }

    /// The TCP connection to the peer cannot be read or written.
    pub fn broke(&mut self, key: Key) {
        self.fail(key, Why::Broke);
    }

    /// The owner gives a connection up.
    pub fn abort(&mut self, key: Key) {
        self.fail(key, Why::Aborted);
    }

    /// From now on no new connection becomes SMC-R; connections whose rendezvous has not begun are
    /// reset.
    pub fn drain(&mut self) {
        self.shared.draining = true;
        let queued = self.table.iter().filter(|(_, one)| matches!(one.state, State::Queued));
        let keys: Vec<Key> = queued.map(|(key, _)| *key).collect();
        for key in keys {
            self.fail(key, Why::Stopping);
        }
    }

    /// Handles a report of a poller. Returns what it tells of a connection, if it does.
    pub fn reported(&mut self, now: Instant, report: Report<P::Stream>) -> Option<Told<P::Stream>> {
        let groups = &mut self.shared.groups;
        match report {
            Report::LlcReceived { link, message, .. } => {
                groups.llc_received(now, link, message.as_bytes());
                self.resume_proven(now);
            }
            Report::LinkBroke { link, cause } => {
                groups.link_broke(now, link, cause);
                self.resume_proven(now);
            }
            Report::LinkRetired { link } => groups.link_retired(now, link),
            Report::Moved { connection, link, rkey, address } => {
                groups.connection_moved(connection, link, rkey, address);
            }
            Report::LinkVacated { link } => groups.link_vacated(now, link),
            Report::StreamEnded { connection, tally, near } => {
                return Some(Told::StreamEnded { connection, tally, near });
            }
            Report::StreamBegun { connection } => return Some(Told::StreamBegun { connection }),
            Report::StreamRefused { connection, near, moved } => {
                return Some(Told::StreamRefused { connection, near, moved });
            }
            Report::Closed { connection, ending, tally, rmbe, settled, streams, kept } => {
                groups.closed(now, connection, rmbe, settled);
                return Some(Told::Closed(Closed { connection, ending, tally, streams, kept }));
            }
        }
        None
    }

    /// Takes note of all deadlines that have passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.due.extend(self.deadlines.until(now));
        self.shared.groups.expire(now);
    }

    /// When [`handle_timeout`](Self::handle_timeout) must be called, at the latest.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let groups = self.shared.groups.poll_timeout();
        let places = self.shared.places.poll_timeout();
        [self.deadlines.first(), places, groups].into_iter().flatten().min()
    }

    /// What the owner must do next.
    #[must_use]
    pub fn poll_effect(&mut self, now: Instant) -> Option<Effect> {
        loop {
            if let Some(effect) = self.shared.effects.pop_front() {
                return Some(effect);
            }
            if let Some(key) = self.ready.pop_front() {
                if let Some(effect) = self.step(now, key) {
                    return Some(effect);
                }
            } else if let Some(event) = self.shared.groups.poll_event() {
                self.heed(now, event);
            } else if let Some(key) = self.due.pop_front() {
                self.expire(now, key);
            } else if let Some((listener, key)) = self.shared.places.admit() {
                self.has_come_up(now, listener, key);
            } else if let Some(key) = self.shared.places.give_up(now) {
                self.has_waited_in_vain(now, key);
            } else {
                return None;
            }
        }
    }

    /// The link groups.
    pub fn groups(&self) -> &Groups<N, P> {
        &self.shared.groups
    }

    /// The link groups, for changes that do not involve a rendezvous. Drain
    /// [`poll_effect`](Self::poll_effect) afterwards.
    pub fn groups_mut(&mut self) -> &mut Groups<N, P> {
        &mut self.shared.groups
    }

    /// Whether a connection of this listener to `upstream` has a chance to become SMC-R.
    pub fn offers(&self, now: Instant, listener: u16, upstream: IpAddr) -> bool {
        let listed = self.shared.terms(listener).offers_to(upstream) && !self.shared.draining;
        listed && !self.shared.paths.is_closed(now, Far::Server(upstream))
    }

    /// How far a rendezvous is; none if it is over.
    pub fn stage(&self, key: Key) -> Option<Stage> {
        self.table.get(&key).map(|one| one.stage())
    }

    /// The owner has given a connection another stream, for which there was no rendezvous.
    pub fn note_stream(&mut self) {
        self.shared.counts.connections_smc += 1;
        self.shared.counts.streams_followed += 1;
    }

    /// A connection was over when it got another stream.
    pub fn take_back_stream(&mut self) {
        self.shared.counts.connections_smc -= 1;
        self.shared.counts.streams_followed -= 1;
    }

    /// What became of rendezvous so far.
    pub fn counts(&self) -> Counts {
        self.shared.counts
    }

    /// How many connections stayed TCP, by reason.
    pub fn fallbacks(&self) -> &BTreeMap<Diagnosis, u64> {
        self.shared.fallbacks.all()
    }

    /// How many rendezvous go on or wait.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// How many of them wait for a place.
    pub fn waiting(&self) -> usize {
        self.table.values().filter(|one| one.stage() == Stage::Waiting).count()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// Begins a rendezvous: asks the owner to connect to its upstream.
    fn begin(&mut self, now: Instant, key: Key) {
        let one = self.table.get_mut(&key).expect("who begins is here");
        let connect = Negotiator { now, one, shared: &mut self.shared }.begin();
        let displaced = match one.silent {
            true => self.shared.silent.enter(one.source.ip(), key),
            false => None,
        };
        self.deadlines.set(key, one.poll_timeout());
        self.shared.effects.push_back(connect);
        if let Some(oldest) = displaced {
            self.shared.counts.silent_cut_short += 1;
            self.fail(oldest, Why::Displaced);
        }
    }

    /// Acts on the deadline of a rendezvous, unless it was extended meanwhile: a rendezvous that
    /// waited for another one gets a new deadline when that one ends, and both may be due at once.
    fn expire(&mut self, now: Instant, key: Key) {
        if self.table.get(&key).and_then(|one| one.poll_timeout()).is_some_and(|at| at <= now) {
            self.with(now, key, |negotiator| negotiator.expire());
        }
    }

    /// Both sockets of a connection must be reset.
    fn fail(&mut self, key: Key, why: Why) {
        if let Some(one) = self.table.get_mut(&key) {
            one.state = State::Failed(why);
            self.ready.push_back(key);
        }
    }

    /// Calls `act` on a rendezvous, unless it is over, and queues its next step.
    fn with(&mut self, now: Instant, key: Key, act: impl FnOnce(&mut Negotiator<'_, N, P>)) {
        if let Some(one) = self.table.get_mut(&key) {
            act(&mut Negotiator { now, one, shared: &mut self.shared });
            self.ready.push_back(key);
        }
    }

    /// Takes the next step of a rendezvous. Returns what the owner must do for it.
    fn step(&mut self, now: Instant, key: Key) -> Option<Effect> {
        let one = self.table.get_mut(&key)?;
        let effect = Negotiator { now, one, shared: &mut self.shared }.step();
        match &effect {
            Some(
                Effect::HandOver { .. }
                | Effect::NextStream { .. }
                | Effect::StayTcp { .. }
                | Effect::Reset { .. },
            ) => {
                self.table.remove(&key);
                self.deadlines.set(key, None);
            }
            Some(
                Effect::Connect { .. }
                | Effect::Unanswered { .. }
                | Effect::Send { .. }
                | Effect::Exhausted { .. },
            ) => self.ready.push_front(key),
            // It goes on when that has been done.
            Some(Effect::Survey { .. }) | None => self.deadlines.set(key, one.poll_timeout()),
        }
        effect
    }

    /// Informs the rendezvous that an event of a link group concerns.
    fn heed(&mut self, now: Instant, event: Event) {
        match event {
            Event::Established(group) => {
                let contact = self.shared.first_contacts.end(group).unwrap_or_default();
                if let Some(founder) = contact.founder {
                    self.with(now, founder, |negotiator| negotiator.link_confirmed());
                }
                self.first_contact_over(now, group, &contact.waiting);
            }
            Event::FirstContactFailed { group, committed } => {
                if let Some(founder) = self.shared.first_contacts.fail(group) {
                    self.with(now, founder, |negotiator| negotiator.link_failed(committed));
                }
            }
            Event::ElementsChanged(group) => self.resume_waiting(now, group),
            Event::Ended(group) => {
                let contact = self.shared.first_contacts.end(group).unwrap_or_default();
                if let Some(founder) = contact.founder {
                    self.with(now, founder, |negotiator| negotiator.link_failed(true));
                }
                self.first_contact_over(now, group, &contact.waiting);
                self.resume_waiting(now, group);
            }
        }
    }

    /// Ends the waits for the outcome of a first contact.
    fn first_contact_over(&mut self, now: Instant, group: GroupId, waiting: &[Key]) {
        for key in waiting {
            let waits = |wait: &Wait| matches!(wait, Wait::FirstContact(other) if *other == group);
            self.with(now, *key, |negotiator| negotiator.end_wait(waits));
        }
    }

    /// The number of free elements of a group may have changed, or the group has ended: rendezvous
    /// that wait for one of its elements try again.
    fn resume_waiting(&mut self, now: Instant, group: GroupId) {
        let is_here = |(other, _): &mut (GroupId, Key)| *other == group;
        let keys: Vec<_> = self.shared.waiting.extract_if(.., is_here).collect();
        for (_, key) in keys {
            self.with(now, key, |negotiator| {
                negotiator.retry_offer();
                negotiator.end_wait(|wait| match wait {
                    Wait::Element { group: other, .. } | Wait::Proof { group: other, .. } => {
                        *other == group
                    }
                    Wait::Place | Wait::FirstContact(_) | Wait::Holder(_) => false,
                });
            });
        }
    }

    /// Resumes rendezvous that wait for the proof that a link works: an LLC message has come, which
    /// may be that proof, or a link has failed, which will give none any more.
    fn resume_proven(&mut self, now: Instant) {
        if self.shared.waiting.is_empty() {
            return;
        }
        let groups = &self.shared.groups;
        let proof = |wait: &Wait, age: Duration| match wait {
            Wait::Proof { group, link: Some(link), .. } => groups.proof_of(now, age, *group, *link),
            Wait::Proof { group, link: None, .. } => {
                let link = groups.proven_link(now, age, *group);
                if link.is_some() { Proof::Given } else { Proof::Awaited }
            }
            Wait::Place | Wait::FirstContact(_) | Wait::Element { .. } | Wait::Holder(_) => {
                Proof::Awaited
            }
        };
        let mut over = Vec::new();
        self.shared.waiting.retain(|(_, key)| {
            let one = self.table.get(key);
            let wait = one.and_then(|one| Some((one.wait()?, one.path.proof_age(now))));
            let proof = wait.map_or(Proof::Awaited, |(wait, age)| proof(wait, age));
            if proof != Proof::Awaited {
                over.push((*key, proof));
            }
            proof == Proof::Awaited
        });
        for (key, proof) in over {
            self.with(now, key, |negotiator| negotiator.proof_over(proof));
        }
    }

    /// Gives a place to a rendezvous that waited for one.
    fn has_come_up(&mut self, now: Instant, listener: u16, key: Key) {
        match self.table.get_mut(&key) {
            Some(one) if matches!(one.state, State::Queued) => {
                one.has_place = true;
                self.begin(now, key);
            }
            Some(one) if matches!(one.wait(), Some(Wait::Place)) => {
                one.has_place = true;
                let waits = |wait: &Wait| matches!(wait, Wait::Place);
                self.with(now, key, |negotiator| negotiator.end_wait(waits));
            }
            // The rendezvous has ended, or had to answer before it got the place.
            Some(_) | None => self.shared.places.leave(listener),
        }
    }

    /// A connection has waited for a place for too long: it stays TCP.
    fn has_waited_in_vain(&mut self, now: Instant, key: Key) {
        // It may be over by now.
        let Some(one) = self.table.get(&key) else { return };
        let is_queued = matches!(one.state, State::Queued);
        if is_queued || matches!(one.wait(), Some(Wait::Place)) {
            self.shared.exhausted(one.listener, Limit::Places);
            if is_queued {
                self.begin(now, key);
            } else {
                self.with(now, key, |negotiator| negotiator.reply(Err(Diagnosis::TOO_BUSY)));
            }
        }
    }
}
