//! Does what an endpoint asks for, as the control thread of a gateway does; with sockets in memory.

use std::time::Duration;

use smcgate::device::{Networks, Subnets};
use smcgate::groups::Pollers;
use smcgate::rendezvous::{Arrival, Effect, Limit, Surroundings};
use smcgate::slab::Key;
use smcr_engine::streams::Streams;
use smcr_engine::{Command, Established};
use smcr_proto::wire::clc::{Diagnosis, Frame, Ipv4Subnet};
use smcr_rnic::dice::Chance;

use super::blame::Scope;
use super::call::{Carried, Dial, Way};
use super::mutants::Planted;
use super::node::SOURCE_MAX;
use super::pipe::Segment;
use super::{CLIENT, INTRUDER, SERVER, World, address_of, key};
use crate::tcp::{self, Sockets};

impl World {
    /// An application has connected to its gateway.
    pub(super) fn arrive(&mut self, number: usize) {
        let call = &mut self.calls[number];
        let host = call.hosts[CLIENT];
        call.sides[CLIENT].way = Way::Talking;
        let listener = if call.hosts[SERVER] == INTRUDER { TO_INTRUDER } else { TO_OTHER };
        let source = ([10, 1, 0, 1], 1_000).into();
        let upstream = self.nodes[host].servers[usize::from(listener - TO_OTHER)];
        let arrival = Arrival {
            listener,
            source,
            upstream,
            offered: false,
            port: None,
            dialled: false,
            stays: None,
            follows: None,
        };
        let endpoint = &mut self.nodes[host].endpoint;
        endpoint.arrived(self.now, key(number), arrival);
        self.drain(host);
    }

    /// TCP between the gateways of a call comes up, step by step. Returns whether it did.
    pub(super) fn dialled(&mut self, number: usize) -> bool {
        let call = &self.calls[number];
        let asleep = |side: usize| {
            let host = call.hosts[side];
            host != INTRUDER && self.nodes[host].is_asleep()
        };
        let due = |at: Option<_>| at.is_some_and(|at| at <= self.now);
        let arrives = due(call.dial.arrives) && !asleep(SERVER);
        let answered = due(call.dial.answered) && !asleep(CLIENT);
        let upstream = due(call.dial.upstream) && !asleep(SERVER);
        if arrives {
            self.calls[number].dial.arrives = None;
            self.accept(number);
        }
        if answered {
            self.calls[number].dial.answered = None;
            self.answered(number);
        }
        if upstream {
            self.calls[number].dial.upstream = None;
            self.upstream_answers(number);
        }
        arrives || answered || upstream
    }

    /// A gateway accepts what another host connects.
    fn accept(&mut self, number: usize) {
        let call = &mut self.calls[number];
        let [client, server] = call.hosts;
        call.sides[SERVER].way = Way::Talking;
        if server == INTRUDER {
            return;
        }
        let blends_in = self.intruder.as_ref().is_some_and(|intruder| intruder.blends_in);
        if client == INTRUDER && !blends_in && self.has_its_share(server) {
            // As a listener does that has `max_per_source`.
            self.met.note("a source has its share of connections");
            self.calls[number].sides[SERVER].way = Way::Over;
            self.send(number, SERVER, Segment::Reset);
            return;
        }
        let call = &self.calls[number];
        // Whoever can send from the address of another cannot be told from it.
        let client = if client == INTRUDER && blends_in { 1 - server } else { client };
        let source = (address_of(client), 2_000).into();
        let (offered, port) = (call.dial.offers, Some(call.ports[SERVER]));
        let upstream = std::net::Ipv4Addr::LOCALHOST.into();
        let arrival = Arrival {
            listener: FROM_PEERS,
            source,
            upstream,
            offered,
            port,
            dialled: false,
            stays: None,
            follows: None,
        };
        let endpoint = &mut self.nodes[server].endpoint;
        endpoint.arrived(self.now, key(number), arrival);
        self.drain(server);
    }

    /// Whether the intruder has as many connections to a gateway as one source may have.
    fn has_its_share(&self, server: usize) -> bool {
        let endings = &self.nodes[server].closed;
        let live = self.calls.iter().filter(|call| {
            let side = &call.sides[SERVER];
            let ended = side.connection.is_some_and(|name| endings.contains_key(&name));
            call.hosts == [INTRUDER, server]
                && !matches!(side.way, Way::Over | Way::Unborn)
                && !ended
        });
        // This one counts, too.
        live.count() > SOURCE_MAX
    }

    /// A gateway hears that its connect to another host succeeded.
    fn answered(&mut self, number: usize) {
        let host = self.calls[number].hosts[CLIENT];
        let endpoint = &mut self.nodes[host].endpoint;
        endpoint.connected(self.now, key(number));
        self.drain(host);
    }

    fn upstream_answers(&mut self, number: usize) {
        let host = self.calls[number].hosts[SERVER];
        let endpoint = &mut self.nodes[host].endpoint;
        if self.refuses && self.dice.roll(Chance::percent(5)) {
            self.blame.note(self.now, Scope::Call(number));
            endpoint.refused(key(number));
        } else {
            endpoint.connected(self.now, key(number));
        }
        self.drain(host);
    }

    /// What a gateway finds when it looks at the network around a connection. As in production, a
    /// server does not look for the SMC option again: it did so when it accepted.
    fn surroundings(&mut self, number: usize, side: usize) -> Surroundings {
        let subnet = Ipv4Subnet { network: [10, 0, 0, 0], prefix_bits: 8 };
        let call = &self.calls[number];
        let seen = self.planted != Some(Planted::SeesNoPolicies);
        let invented = self.planted == Some(Planted::InventsPolicies);
        let protected = seen && call.sides[side].is_protected(self.now) || invented;
        let base = Surroundings { port: Some(call.ports[side]), protected, ..Default::default() };
        if side == CLIENT {
            let subnets = Subnets { ipv4: subnet, ..Subnets::default() };
            Surroundings { offered: call.dial.offers, subnets, ..base }
        } else {
            let networks = Networks { subnets: vec![subnet], prefixes: Vec::new() };
            Surroundings { networks, ..base }
        }
    }

    /// Reads what came by TCP for a rendezvous, and notices the end of TCP beside SMC-R.
    pub(super) fn read(&mut self, number: usize, side: usize) -> bool {
        let host = self.calls[number].hosts[side];
        let mut moved = false;
        loop {
            let here = &mut self.calls[number].sides[side];
            if !matches!(here.way, Way::Talking) {
                return self.watch(number, side) | moved;
            }
            let endpoint = &mut self.nodes[host].endpoint;
            let room = endpoint.room(key(number)).min(here.inbox.readable().len());
            if !here.hears {
                return moved;
            }
            if here.inbox.reset {
                here.inbox.clear();
                if std::mem::replace(&mut here.told_end, true) {
                    return moved;
                }
                endpoint.broke(key(number));
            } else if room > 0 {
                // A socket gives what it has, or less.
                let len = 1 + self.dice.index(room);
                // Whoever reads an urgent byte must know that it is one: a rendezvous does not.
                assert!(!here.inbox.is_urgent(), "call {number}: an urgent byte is read as CLC");
                let bytes = here.inbox.take(len);
                endpoint.received(key(number), &bytes);
            } else if here.inbox.is_empty() && here.inbox.ended && !here.told_end {
                here.told_end = true;
                endpoint.ended(key(number));
            } else {
                return moved;
            }
            moved = true;
            self.drain(host);
        }
    }

    /// Notices the end of the TCP connection beside SMC-R. [`SUSPECT_AFTER`] later, it aborts the
    /// connection if TCP was reset, and otherwise probes the links of its group.
    fn watch(&mut self, number: usize, side: usize) -> bool {
        let honest = self.calls[number].is_honest();
        let here = &mut self.calls[number].sides[side];
        if !matches!(here.way, Way::Smc) {
            return false;
        }
        assert!(!honest || here.inbox.is_empty(), "call {number}: one side only is TCP");
        let over = here.inbox.ended || here.inbox.reset;
        if over && here.suspected.is_none() && !here.told_end {
            here.told_end = true;
            here.suspected = Some(self.now + SUSPECT_AFTER);
        }
        if here.suspected.is_none_or(|at| at > self.now) {
            return false;
        }
        here.suspected = None;
        let connection = here.connection.expect("what is open has a name");
        let group = here.group.expect("what is SMC-R is of a group");
        let reset = here.inbox.reset;
        let host = self.calls[number].hosts[side];
        let groups = self.nodes[host].endpoint.groups_mut();
        if reset {
            groups.abort(connection);
        } else {
            groups.probe(self.now, group);
        }
        self.drain(host);
        true
    }

    /// Notes what both gateways of a connection call it, once they have it.
    fn introduce(&mut self, number: usize) {
        let call = &self.calls[number];
        let [client, server] = call.sides.each_ref().map(|side| side.connection);
        if let (Some(client), Some(server)) = (client, server) {
            let ears = [(call.hosts[CLIENT], client.token()), (call.hosts[SERVER], server.token())];
            let mut tokens = self.tokens.lock().expect("nobody panics with it");
            tokens.extend([(ears[0], ears[1]), (ears[1], ears[0])]);
        }
    }

    /// Does all that an endpoint asks for.
    pub(super) fn drain(&mut self, host: usize) {
        while let Some(effect) = self.nodes[host].endpoint.poll_effect(self.now) {
            self.perform(host, effect);
        }
    }

    fn perform(&mut self, host: usize, effect: Effect) {
        match effect {
            Effect::Connect { key, offer, hear } => {
                let number = key.index as usize;
                self.dial(number, self.side_of(number, host), (offer, hear));
            }
            Effect::Unanswered { key } => self.nodes[host].endpoint.unanswered(key),
            Effect::Send { key, frame } => {
                let number = key.index as usize;
                let side = self.side_of(number, host);
                self.assert_zero(&frame);
                self.assert_unprotected(number, side, &frame);
                self.overhear(number, &frame);
                self.note_confirm(number, &frame);
                if self.calls[number].sides[side].inbox.reset {
                    self.nodes[host].endpoint.broke(key);
                } else {
                    let bytes = frame.encode().as_bytes().to_vec();
                    self.send(number, side, Segment::Bytes(bytes));
                }
            }
            Effect::Survey { key } => self.survey(key, host),
            Effect::HandOver { key, connection, group, rmbe, .. } => {
                let number = key.index as usize;
                let side = self.side_of(number, host);
                let here = &mut self.calls[number].sides[side];
                let stream = here.app.take().expect("it is handed over once");
                (here.connection, here.opened) = (Some(connection), Some(self.now));
                (here.way, here.carried) = (Way::Smc, Some(Carried::Smc));
                here.group = Some(group);
                let groups = self.nodes[host].endpoint.groups_mut();
                groups.hand_over(connection, stream, rmbe, None, false);
                self.introduce(number);
            }
            Effect::NextStream { .. } => panic!("connections have one stream"),
            Effect::StayTcp { key, connection, port, reason, leftover, declined } => {
                let number = key.index as usize;
                let side = self.side_of(number, host);
                let (wire, far) = tcp::connection(self.socket_bytes);
                if reason == Some(Diagnosis::IPSEC) {
                    self.assert_protected(number);
                }
                let here = &mut self.calls[number].sides[side];
                let near = here.app.take().expect("it is handed over once");
                (here.connection, here.opened) = (Some(connection), Some(self.now));
                here.way = Way::Tcp { wire, wire_ended: false, told_end: false };
                here.carried = Some(Carried::Tcp);
                let (from_near, from_far, allowance) = (Vec::new(), leftover, None);
                let tcp = Box::new(Established::Tcp { near, far, from_near, from_far, declined });
                let relay = Command::Relay { connection, established: tcp, allowance };
                self.nodes[host].endpoint.groups_mut().pollers_mut().command(port, relay);
            }
            Effect::Reset { key, why } => {
                let number = key.index as usize;
                let side = self.side_of(number, host);
                let call = &mut self.calls[number];
                call.sides[side].why = Some(why);
                call.last = self.now;
                call.note_break(self.now);
                self.reset(number, host);
            }
            Effect::Exhausted { limit, .. } => self.met.note(match limit {
                Limit::Memory => "memory has run out",
                Limit::Slots => "slots have run out",
                Limit::Places => "places for rendezvous have run out",
            }),
        }
    }

    fn survey(&mut self, key: Key, host: usize) {
        let side = self.side_of(key.index as usize, host);
        let surroundings = self.surroundings(key.index as usize, side);
        self.nodes[host].endpoint.surveyed(key, surroundings);
    }

    /// A side begins to connect to its upstream, with the SMC option in the SYN if it `offers`
    /// that. `hears`: it wants to be told what comes.
    fn dial(&mut self, number: usize, side: usize, (offers, hears): (bool, bool)) {
        let wait = self.dice.duration(&(self.slow / 20..=self.slow));
        let call = &mut self.calls[number];
        call.sides[side].hears = hears;
        if side == CLIENT {
            call.dial.offers = offers;
            call.dial.arrives = Some(self.now + wait);
            call.dial.answered = Some(self.now + wait * 2);
        } else {
            call.dial.upstream = Some(self.now + wait / 4);
        }
    }

    /// Whoever gets an element gets it without a trace of those who had it before: asked when it is
    /// told to a peer, who cannot have written it yet.
    fn assert_zero(&self, frame: &Frame) {
        let offer = match frame {
            Frame::Accept(offer) | Frame::Confirm(offer) => offer,
            Frame::AcceptV2(offer) | Frame::ConfirmV2(offer) => &offer.offer,
            Frame::Proposal(_) | Frame::ProposalV2(_) | Frame::Decline(_) | Frame::DeclineV2(_) => {
                return;
            }
        };
        let (address, len) = (offer.rmbe_address(), offer.rmbe_size.bytes());
        let bytes = self.network.peek(offer.gid, offer.rkey, address, len);
        let bytes = bytes.expect("what is offered can be written");
        let dirty = bytes.iter().position(|byte| *byte != 0);
        assert_eq!(dirty, None, "a new element is not zero");
    }

    /// Nobody goes on towards SMC-R once IPsec protects the connection: it would pass IPsec by. A
    /// server that has sent its Accept leaves the rest to the client.
    fn assert_unprotected(&self, number: usize, side: usize, frame: &Frame) {
        let goes_on = match frame {
            Frame::Proposal(_)
            | Frame::ProposalV2(_)
            | Frame::Accept(_)
            | Frame::AcceptV2(_)
            | Frame::Confirm(_)
            | Frame::ConfirmV2(_) => true,
            Frame::Decline(_) | Frame::DeclineV2(_) => false,
        };
        let protected = self.calls[number].sides[side].is_protected(self.now);
        assert!(!(goes_on && protected), "call {number}: IPsec protects it, and yet {frame:?}");
    }

    /// Nobody names IPsec as the reason for TCP unless a policy protects the connection, at
    /// whichever side. A hostile host may say so.
    fn assert_protected(&mut self, number: usize) {
        let call = &self.calls[number];
        let protected = call.sides.iter().any(|side| side.is_protected(self.now));
        let honest = !call.hosts.contains(&INTRUDER);
        assert!(protected || !honest, "call {number}: nobody's IPsec protects it");
        self.met.note_times("IPsec protects a connection", protected.into());
    }

    /// Notes the link that a Confirm names, unless that link is new.
    fn note_confirm(&mut self, number: usize, frame: &Frame) {
        let offer = match frame {
            Frame::Confirm(offer) => offer,
            Frame::ConfirmV2(confirm) => &confirm.offer,
            Frame::Proposal(_)
            | Frame::ProposalV2(_)
            | Frame::Accept(_)
            | Frame::AcceptV2(_)
            | Frame::Decline(_)
            | Frame::DeclineV2(_) => return,
        };
        self.calls[number].confirmed = (!offer.first_contact).then_some(offer.qpn);
    }

    /// Resets both sockets of a side.
    fn reset(&mut self, number: usize, host: usize) {
        let side = self.side_of(number, host);
        let call = &mut self.calls[number];
        let here = &mut call.sides[side];
        here.way = Way::Over;
        if let Some(stream) = here.app.take() {
            Sockets::default().reset_on_close(&stream);
        }
        if side == CLIENT && call.dial.arrives.take().is_some()
            || matches!(call.sides[SERVER].way, Way::Unborn)
        {
            // Nobody else has heard of it: the application that waits there never will.
            call.dial = Dial::default();
            if let Some(stream) = call.sides[SERVER].app.take() {
                Sockets::default().reset_on_close(&stream);
            }
            call.sides[SERVER].way = Way::Over;
            return;
        }
        self.send(number, side, Segment::Reset);
    }

    /// Notes what the gateways say to each other, for those who should not know it.
    fn overhear(&mut self, number: usize, frame: &Frame) {
        if self.calls[number].is_honest() && self.overheard.len() < OVERHEARD_MAX {
            self.overheard.push(*frame);
        }
    }

    /// The application at one side of a call is gone before its rendezvous has ended.
    pub(crate) fn break_off(&mut self, number: usize, side: usize) {
        let host = self.calls[number].hosts[side];
        if host != INTRUDER
            && !self.nodes[host].is_asleep()
            && matches!(self.calls[number].sides[side].way, Way::Talking)
        {
            self.blame.note(self.now, Scope::Call(number));
            self.nodes[host].endpoint.abort(key(number));
            self.drain(host);
        }
    }
}

/// The listeners of a gateway.
const FROM_PEERS: u16 = 0;
const TO_OTHER: u16 = 1;
const TO_INTRUDER: u16 = 2;
/// How long a gateway takes to act on the end of the TCP connection beside SMC-R.
const SUSPECT_AFTER: Duration = Duration::from_millis(300);
/// More messages than anybody can make use of.
const OVERHEARD_MAX: usize = 1_000;
