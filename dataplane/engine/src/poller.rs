//! The loop of a polling thread.
//!
//! The poller keeps the tables, the queues and the turn. The work of a connection is in `relay`: a
//! relay borrows what it needs, and returns requests that only the poller can fulfil. Input comes
//! from sockets (here), from other threads (`commands`) and from the RNIC (`completions`).

mod commands;
mod completions;
mod kept;
mod pacing;
mod place;
mod retire;
mod sweep;

use std::sync::Arc;
use std::time::Duration;

use smcr_memory::{Region, SendPool};
use smcr_os::Placed;
use smcr_proto::Instant;
use smcr_rnic::{Completion, Fabric};

use crate::affinity::Affinity;
use crate::connections::Connections;
use crate::counters::Counters;
use crate::gauges::Gauges;
use crate::handoff::{Command, LetterOf, Report};
use crate::idle::{Advice, Idle, Taken};
use crate::kernel::Kernel;
use crate::limits::{
    EVENTS_PER_TURN_MAX, FILL_PER_TURN_MAX, HOT_RINGS_MAX, REAP_PER_TURN_MAX, SEND_CHUNK_BYTES,
};
use crate::links::Links;
use crate::load::Load;
use crate::mail::{Mail, Neighbours};
use crate::mailbox::{Receiver, Sender, Waker};
use crate::moves::Moves;
use crate::names::ConnectionId;
use crate::nearness::Nearness;
use crate::owners::Owners;
use crate::priority::Priority;
use crate::relay::{Migrant, Outcome, Relay};
use crate::reports::Reports;
use crate::requests::Request;
use crate::stages::Sampler;
use crate::streams::{Event, Streams};
use crate::turn::{List, Turn, WorkLists};
use crate::waits::Waits;

use self::place::Place;
use self::sweep::Sweep;

/// The commands that a poller over `F` and `S` obeys.
pub type CommandOf<F, S> = Command<<F as Fabric>::Qp, <S as Streams>::Stream>;

/// What a poller shares with other threads.
pub struct Ends<F: Fabric, S: Streams> {
    /// From the control thread.
    pub commands: Receiver<CommandOf<F, S>>,
    /// From the other pollers.
    pub letters: Receiver<LetterOf<S::Stream>>,
    /// Wakes this poller; the same that `commands` and `letters` use.
    pub waker: Waker,
    /// To the control thread.
    pub reports: Sender<Report<S::Stream>>,
    /// To every poller of the process, by index; the one at `index` is never used.
    pub neighbours: Arc<Neighbours<LetterOf<S::Stream>>>,
    /// Which of them this poller is.
    pub index: u8,
    /// Which poller has which connection; shared by all.
    pub owners: Arc<Owners>,
    /// Counters that any thread may read.
    pub counters: Arc<Counters>,
    /// Gauges of each connection that any thread may read.
    pub gauges: Arc<Gauges>,
    /// Called now and then, and before each sleep, to publish what the fabric counts.
    pub observe: Box<dyn FnMut(&F) + Send>,
}

/// One polling thread: a fabric, its links, their connections and sockets.
pub struct Poller<F: Fabric, S: Streams> {
    fabric: F,
    streams: S,
    pool: SendPool,
    links: Links,
    connections: Connections<S::Stream>,
    work: WorkLists,
    moves: Moves,
    mail: Mail<Migrant<S::Stream>>,
    reports: Reports<S::Stream>,
    /// A buffer for bytes on their way from one socket to another.
    scratch: Placed,
    /// Bytes that sockets have not taken yet, of all connections over TCP.
    backlog_bytes: usize,
    shared: Shared<F, S>,
    arrived: Arrived,
    nearness: Nearness,
    load: Load,
    sampler: Sampler,
    sweep: Sweep,
    stopping: bool,
}

/// The queues and the numbers that the poller shares with other threads.
struct Shared<F: Fabric, S: Streams> {
    commands: Receiver<CommandOf<F, S>>,
    waker: Waker,
    counters: Arc<Counters>,
    gauges: Arc<Gauges>,
    observe: Box<dyn FnMut(&F) + Send>,
}

/// Buffers for what is being handled. Between two turns they are empty, but keep their memory.
#[derive(Debug)]
struct Arrived {
    completions: Vec<Completion>,
    events: Vec<Event>,
    /// The slots of connections that a sweep looks at, whose timers are looked at.
    swept: Vec<u16>,
}

impl<F: Fabric, S: Streams> Poller<F, S> {
    /// A poller with nothing to do. `memory` becomes its send pool.
    pub fn new(fabric: F, streams: S, ends: Ends<F, S>, memory: Region) -> Self {
        let Ends { commands, waker, counters, gauges, observe, .. } = ends;
        Self {
            fabric,
            streams,
            pool: SendPool::new(memory, SEND_CHUNK_BYTES),
            links: Links::default(),
            connections: Connections::new(),
            work: WorkLists::default(),
            moves: Moves::default(),
            mail: Mail::new(ends.letters, ends.neighbours, ends.owners, ends.index),
            reports: Reports::new(ends.reports),
            scratch: Placed::for_received(FILL_PER_TURN_MAX as usize),
            backlog_bytes: 0,
            shared: Shared { commands, waker, counters, gauges, observe },
            arrived: Arrived {
                completions: Vec::with_capacity(REAP_PER_TURN_MAX),
                events: Vec::with_capacity(EVENTS_PER_TURN_MAX + 2 * HOT_RINGS_MAX),
                swept: Vec::new(),
            },
            nearness: Nearness::default(),
            load: Load::default(),
            sampler: Sampler::default(),
            sweep: Sweep::default(),
            stopping: false,
        }
    }
}

impl<F: Fabric> Poller<F, Kernel> {
    /// Turns until told to stop.
    ///
    /// `affinity` says which core is the thread's own, and `idle` decides whether it runs there.
    pub fn run(&mut self, mut idle: Idle, affinity: &Affinity, mut priority: Priority) {
        // That of the timer which ends a sleep: by another one, it would ring too late.
        let clock = self.streams.clock();
        let mut now = clock.now();
        let mut place = Place::at_first(&idle, affinity, Waits::of_this_thread());
        loop {
            let moved = self.turn(now);
            // Before any sleep: nobody wakes a thread that was told to stop.
            if self.stopping {
                self.set_priority(now, &place, &mut priority, &mut idle);
                return;
            }
            now = clock.now();
            let advice = idle.after_turn(now, moved);
            // Before the core is offered: whether somebody takes it up must not depend on us.
            self.set_priority(now, &place, &mut priority, &mut idle);
            match advice {
                Advice::Turn => {}
                Advice::Yield => {
                    std::thread::yield_now();
                    now = clock.now();
                    let taken = idle.after_offer(now);
                    self.shared.counters.yields_taken_up.add((taken != Taken::No).into());
                    self.shared.counters.yields_lost.add((taken == Taken::Lost).into());
                }
                Advice::Sleep => {
                    self.sleep(now, moved, priority.deadline());
                    let before = std::mem::replace(&mut now, clock.now());
                    self.nearness.slept(before, now);
                    self.load.slept(before, now);
                }
            }
            self.settle(&idle, &mut place, affinity);
            self.draw_near(now, &idle, affinity);
        }
    }
}

impl<F: Fabric, S: Streams> Poller<F, S> {
    /// One turn of the loop. Returns whether anything moved, so that the caller can decide to idle.
    ///
    /// Each step does a bounded amount of work (see `limits`), so a turn is bounded too. The order
    /// is that of the data: what a step frees, the next one uses in the same turn.
    pub fn turn(&mut self, now: Instant) -> bool {
        let mut moved = false;
        moved |= self.obey(now); //    commands from the control thread
        moved |= self.read(now); //    letters from other pollers
        moved |= self.look(now); //    sockets that can be read or written again
        moved |= self.reap(now); //    completions: leases back, CDC messages received
        moved |= self.drain(now); //   RMB elements -> TCP sockets
        moved |= self.fill(now); //    TCP sockets  -> send chunks -> RDMA writes
        moved |= self.flush(now); //   RDMA writes, then the CDC messages that announce them
        // Before the core is offered: for an application of this host it may be there by now.
        if self.fabric.has_completions() {
            moved |= self.reap(now);
            moved |= self.drain(now);
        }
        self.rest(); //                links without unfinished work
        moved |= self.expire(now); //  timers, and what other threads must be told
        self.shared.counters.turns.add(1);
        self.shared.counters.turns_idle.add((!moved).into());
        moved
    }

    /// Sleeps until something happens, or until `limit`, unless something has happened already.
    /// `moved` is the result of the last turn: if that moved nothing, the work that it left waits
    /// for an event.
    fn sleep(&mut self, now: Instant, moved: bool, limit: Option<Instant>) {
        self.shared.waker.about_to_sleep();
        let deadline = self.next_deadline(now).into_iter().chain(limit).min();
        let is_left = || self.work.is_left() || self.links.may_go_on(&self.pool);
        let ready = self.has_commands() || (moved && is_left());
        let asleep = !ready && deadline.is_none_or(|deadline| deadline > now);
        if asleep {
            self.shared.counters.sleeps.add(1);
            self.publish();
            self.streams.sleep(now, deadline);
        }
        self.shared.waker.awake();
    }

    /// Publishes numbers that are counted elsewhere.
    fn publish(&mut self) {
        (self.shared.observe)(&self.fabric);
        self.shared.counters.send_bytes_lent.set(self.pool.bytes_in_use());
        self.shared.counters.backlog_bytes.set(self.backlog_bytes as u64);
        self.shared.counters.allocations.set(smcr_os::counting::allocations());
    }

    /// When this poller must turn again, at the latest.
    pub fn next_deadline(&mut self, now: Instant) -> Option<Instant> {
        let fabric = self.fabric.prepare_sleep(now);
        let retiring = self.links.retiring().next().is_some();
        let sweep = (self.connections.busy() > 0 || retiring).then_some(self.sweep.at());
        // The control thread does not tell us when its queue has room again, so we must look.
        let reports = self.reports.are_delayed().then_some(now);
        let mail = self.mail.waits().then_some(now + MAIL_AGAIN);
        let paced = self.work.paced.next_deadline();
        [fabric, sweep, reports, mail, paced].into_iter().flatten().min()
    }

    /// Whether commands or letters wait for this poller.
    pub fn has_commands(&self) -> bool {
        !self.shared.commands.is_empty() || self.mail.has_come()
    }

    /// Leases of the send pool that a work request uses, or whose bytes the peer may not know of.
    /// Zero when nothing is on its way.
    pub fn leases_out(&self) -> u32 {
        self.pool.leases_out()
    }

    /// Notes which sockets can be read or written again.
    fn look(&mut self, now: Instant) -> bool {
        let mut events = std::mem::take(&mut self.arrived.events);
        self.fabric.note_signs(self.streams.poll(&mut events));
        let moved = !events.is_empty();
        let (mut asks, mut came_from) = (self.nearness.asks(), None);
        for mut event in events.drain(..) {
            let id = ConnectionId { slot: event.key.slot, generation: event.key.generation };
            let (connections, turn) = self.lend(now);
            // The connection may have ended, or its socket may be reset, before the event comes.
            let Some(relay) = connections.relay(id) else { continue };
            if relay.turn() != event.key.turn {
                continue;
            }
            let Some(socket) = relay.socket(event.key.far) else { continue };
            turn.streams.complete(&socket.stream, &mut event);
            socket.note(&event);
            if event.readable {
                if asks {
                    came_from = turn.streams.core_of(&socket.stream);
                    asks = false;
                }
                turn.work.queue_fill(&mut relay.queued);
            }
            if event.writable {
                turn.work.queue_drain(&mut relay.queued);
            }
        }
        self.arrived.events = events;
        self.nearness.note(came_from);
        moved
    }

    /// Takes in the completions of the RNIC.
    fn reap(&mut self, now: Instant) -> bool {
        let mut completions = std::mem::take(&mut self.arrived.completions);
        self.fabric.poll(now, &mut completions);
        let moved = !completions.is_empty();
        for completion in completions.drain(..) {
            self.complete(now, completion);
        }
        self.arrived.completions = completions;
        moved
    }

    /// Writes bytes that peers have announced to sockets.
    fn drain(&mut self, now: Instant) -> bool {
        let slots = self.work.take(List::Drain);
        self.work_off(now, slots, |relay, turn| relay.drain(turn))
    }

    /// Reads sockets, and gathers RDMA writes of the bytes.
    fn fill(&mut self, now: Instant) -> bool {
        let slots = self.work.take(List::Fill);
        // Those come first that waited for room. What they leave is for the next turn.
        let mut moved = self.resume_waiting(now);
        moved |= self.work_off(now, slots, |relay, turn| match relay.queued.was_resumed() {
            true => Outcome::Rests,
            false => relay.fill(turn),
        });
        moved | self.resume_paced(now)
    }

    /// Goes on with connections that wait for their links, as long as those take more. Of thousands
    /// that wait, a turn looks at those alone for which there is room.
    fn resume_waiting(&mut self, now: Instant) -> bool {
        let mut moved = false;
        let mut passed = 0;
        while let Some((link, slot)) = self.links.next_waiting(&mut passed, &self.pool) {
            let Some((relay, mut turn)) = self.open(now, slot) else { continue };
            if relay.queued.resume(link) {
                let outcome = relay.fill(&mut turn);
                moved |= self.conclude(now, slot, outcome);
            }
        }
        moved
    }

    /// Makes the CDC messages that are due, and posts the work requests of this turn. Nothing else
    /// posts.
    ///
    /// During a turn, writes and messages gather per link. Here they are posted: first all writes
    /// of all connections, then all messages. A queue pair keeps that order, so each message still
    /// comes after the bytes it announces; and equal packets stand together, which is what lets a
    /// NIC in software send many of them in one system call.
    fn flush(&mut self, now: Instant) -> bool {
        // LLC messages go first, because CDC messages may use up what room the writes have left in
        // a send queue.
        if self.links.send_llc(Request::Llc.tag()) {
            self.shared.counters.blocked_on_queue.add(1);
        }
        let slots = self.work.take(List::Flush);
        self.work_off(now, slots, |relay, turn| {
            relay.announce(turn);
            Outcome::Rests
        });
        let mut moved = false;
        for link in self.links.busy() {
            if !link.writes.is_empty() {
                self.fabric.post(link.qp, &mut link.writes);
                moved = true;
            }
            if !link.sends.is_empty() {
                // RFC 7609 2.1 #15: announce data after writing it
                self.fabric.post(link.qp, &mut link.sends);
                moved = true;
            }
        }
        self.fabric.transmit(now);
        self.sampler.posted(&self.shared.counters.stages, || self.streams.time(now));
        moved
    }

    /// Notes how much room the links have for the next turn.
    fn rest(&mut self) {
        for link in self.links.busy() {
            link.budget = self.fabric.room(link.qp);
        }
        self.links.rest();
    }

    /// Acts on deadlines that have passed, and wakes threads that have new letters or reports.
    fn expire(&mut self, now: Instant) -> bool {
        let mut moved = self.sweep(now);
        moved |= self.reports.retry();
        // These come last, because everything before them may write a letter or a report. An
        // adaptive poller may sleep after this turn although it has moved something.
        moved |= self.mail.post();
        self.reports.wake();
        moved
    }

    /// Gives every connection of a list its turn.
    fn work_off(
        &mut self,
        now: Instant,
        mut slots: Vec<u16>,
        act: impl Fn(&mut Relay<S::Stream>, &mut Turn<'_, S>) -> Outcome,
    ) -> bool {
        let mut moved = false;
        for slot in slots.drain(..) {
            // The connection may have ended or left this poller since it was queued.
            let Some((relay, mut turn)) = self.open(now, slot) else { continue };
            let outcome = act(relay, &mut turn);
            moved |= self.conclude(now, slot, outcome);
        }
        self.work.give_back(slots);
        moved
    }

    /// Lends the table of connections, and a turn for the one that the caller finds in it.
    fn lend(&mut self, now: Instant) -> (&mut Connections<S::Stream>, Turn<'_, S>) {
        let turn = Turn {
            now,
            streams: &mut self.streams,
            pool: &mut self.pool,
            links: &mut self.links,
            work: &mut self.work,
            scratch: &mut self.scratch,
            backlog_bytes: &mut self.backlog_bytes,
            counters: &self.shared.counters,
            sampler: &mut self.sampler,
        };
        (&mut self.connections, turn)
    }

    /// Lends the relay in `slot`, and a turn for it.
    fn open(&mut self, now: Instant, slot: u16) -> Option<(&mut Relay<S::Stream>, Turn<'_, S>)> {
        let (connections, turn) = self.lend(now);
        connections.at(slot).map(|relay| (relay, turn))
    }

    /// The same as [`Self::apply`], after a relay has carried bytes, if there were any.
    #[inline]
    fn conclude(&mut self, now: Instant, slot: u16, outcome: Outcome) -> bool {
        let moved = self.apply(now, slot, outcome);
        if moved {
            self.load.note(slot);
        }
        moved
    }

    /// Fulfils the request of the relay in `slot` after its turn. Returns whether anything moved.
    #[inline]
    fn apply(&mut self, now: Instant, slot: u16, outcome: Outcome) -> bool {
        match outcome {
            Outcome::Rests => false,
            Outcome::Moved => true,
            Outcome::Over | Outcome::News | Outcome::Left(_) => {
                self.change_tables(now, slot, outcome);
                true
            }
        }
    }

    /// Frees the slot of a relay, or takes the relay to another link; no other function does. If
    /// all connections have left that link meanwhile, the relay leaves it at once.
    fn change_tables(&mut self, now: Instant, slot: u16, mut outcome: Outcome) {
        self.tell_news(slot);
        loop {
            outcome = match outcome {
                Outcome::Rests | Outcome::Moved | Outcome::News => return,
                Outcome::Over => return self.retire(now, slot),
                Outcome::Left(route) => self.follow(now, slot, &route),
            };
        }
    }

    /// Tells the control thread; wakes it at the end of the turn.
    fn report(&mut self, report: Report<S::Stream>) {
        let delayed = self.reports.tell(report);
        self.shared.counters.reports_delayed.add(delayed.into());
    }
}

/// How soon we try a neighbour again whose queue was full: it does not tell us when it has room.
const MAIL_AGAIN: Duration = Duration::from_micros(50);

#[cfg(test)]
mod tests;
