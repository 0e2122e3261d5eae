//! The loop.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use smcr_memory::{Region, SendPool};
use smcr_proto::Instant;
use smcr_rnic::{Completion, Fabric};

use crate::affinity::Affinity;
use crate::clock::Clock;
use crate::connections::{Backlog, Connections, Far, Relay, Smc, Socket, Tcp};
use crate::counters::Counters;
use crate::forward::Outbox;
use crate::gauges::{Gauges, Reading};
use crate::handoff::{Command, ConnectionId, Ending, Established, LinkId, Owners, Report};
use crate::idle::{Advice, Idle, Taken};
use crate::limits::{
    COMMANDS_MAX, EVENTS_PER_TURN_MAX, FILL_PER_TURN_MAX, OBEY_PER_TURN_MAX, REAP_PER_TURN_MAX,
};
use crate::links::Links;
use crate::mailbox::{Receiver, Sender, Waker};
use crate::moves::{Move, Moves};
use crate::relay::crossing::Sieve;
use crate::streams::{Event, Key, Streams};

/// The commands that a poller over `F` and `S` obeys.
pub type CommandOf<F, S> = Command<<F as Fabric>::Qp, <S as Streams>::Stream>;

/// What a poller shares with other threads.
pub struct Ends<F: Fabric, S: Streams> {
    /// From the control thread.
    pub commands: Receiver<CommandOf<F, S>>,
    /// Wakes this poller; the same that `commands` uses.
    pub waker: Waker,
    /// To the control thread.
    pub reports: Sender<Report<S::Stream>>,
    /// To every poller of the process, by index; the one at `index` is never used.
    pub neighbours: Vec<Sender<CommandOf<F, S>>>,
    /// Which of them this poller is.
    pub index: u8,
    /// Which poller has which connection; shared by all.
    pub owners: Arc<Owners>,
    /// What anybody may read.
    pub counters: Arc<Counters>,
    /// What anybody may read, per connection.
    pub gauges: Arc<Gauges>,
    /// Called now and then, and before each sleep, to publish what the fabric counts.
    pub observe: Box<dyn FnMut(&F) + Send>,
}

/// One polling thread: a fabric, its links, their connections and sockets.
pub struct Poller<F: Fabric, S: Streams> {
    pub(crate) fabric: F,
    pub(crate) streams: S,
    pub(crate) ends: Ends<F, S>,
    pub(crate) pool: SendPool,
    pub(crate) links: Links,
    pub(crate) connections: Connections<S::Stream>,
    pub(crate) work: WorkLists,
    pub(crate) moves: Moves,
    /// What neighbours must be told, each by index.
    pub(crate) outboxes: Vec<Outbox<F::Qp, S::Stream>>,
    /// Where bytes rest between two sockets.
    pub(crate) scratch: Box<[u8]>,
    /// What sockets have not taken, of all connections over TCP.
    pub(crate) backlog_bytes: usize,
    completions: Vec<Completion>,
    events: Vec<Event>,
    /// Reports that found the queue full. Bounded by what the poller has to report about.
    delayed: VecDeque<Report<S::Stream>>,
    /// Something was reported this turn, and the control thread may sleep.
    reported: bool,
    sweep_at: Instant,
    stopping: bool,
}

/// Connections with something to do, each at most once per list.
#[derive(Debug, Default)]
pub(crate) struct WorkLists {
    pub(crate) drain: Vec<u16>,
    pub(crate) fill: Vec<u16>,
    pub(crate) flush: Vec<u16>,
    /// The list being worked off; what cannot be finished goes to the next turn's.
    pub(crate) current: Vec<u16>,
}

impl WorkLists {
    /// Whether a turn had to leave something to the next one.
    fn is_left(&self) -> bool {
        !(self.drain.is_empty() && self.fill.is_empty() && self.flush.is_empty())
    }
}

impl<F: Fabric, S: Streams> Poller<F, S> {
    /// A poller with nothing to do. `memory` becomes its send pool.
    pub fn new(fabric: F, streams: S, ends: Ends<F, S>, memory: Region) -> Self {
        let outboxes = ends.neighbours.iter().map(|_| Outbox::default()).collect();
        Self {
            fabric,
            streams,
            ends,
            moves: Moves::default(),
            outboxes,
            pool: SendPool::new(memory, FILL_PER_TURN_MAX),
            links: Links::default(),
            connections: Connections::new(),
            work: WorkLists::default(),
            scratch: vec![0; FILL_PER_TURN_MAX as usize].into(),
            backlog_bytes: 0,
            completions: Vec::with_capacity(REAP_PER_TURN_MAX),
            events: Vec::with_capacity(EVENTS_PER_TURN_MAX),
            delayed: VecDeque::new(),
            reported: false,
            sweep_at: Instant(0),
            stopping: false,
        }
    }

    /// Turns until told to stop.
    ///
    /// The thread runs where `affinity` says; whether on its own core, `idle` decides.
    pub fn run(&mut self, clock: Clock, mut idle: Idle, affinity: &Affinity) {
        let mut now = clock.now();
        let mut on_core = idle.wants_core();
        loop {
            let moved = self.turn(now);
            // Before any sleep: nobody wakes a thread that was told to stop.
            if self.stopping {
                return;
            }
            now = clock.now();
            match idle.after_turn(now, moved) {
                Advice::Turn => {}
                Advice::Yield => {
                    std::thread::yield_now();
                    now = clock.now();
                    let taken = idle.after_offer(now);
                    self.ends.counters.yields_taken_up.add((taken != Taken::No).into());
                    self.ends.counters.yields_lost.add((taken == Taken::Lost).into());
                }
                Advice::Sleep => {
                    self.sleep(now, moved);
                    now = clock.now();
                }
            }
            if idle.wants_core() != on_core {
                on_core = !on_core;
                self.change_place(on_core, affinity);
            }
        }
    }

    /// Goes back to the thread's own core, or leaves it to others.
    fn change_place(&self, on_core: bool, affinity: &Affinity) {
        let counters = &self.ends.counters;
        counters.contended.set((!on_core).into());
        counters.contentions.add((!on_core).into());
        let moved = if on_core { affinity.pin() } else { affinity.unpin() };
        // Elsewhere or not, the poller works.
        counters.place_refused.add(moved.is_err().into());
        counters.pinned.set((on_core && affinity.has_core() && moved.is_ok()).into());
    }

    /// One turn of the loop. Returns whether anything moved, so that the caller can decide to idle.
    ///
    /// Each step does a bounded amount of work (see `limits`), so a turn is bounded too. The order
    /// is that of the data: what a step frees, the next one uses in the same turn.
    pub fn turn(&mut self, now: Instant) -> bool {
        let mut moved = false;
        moved |= self.obey(now); //    commands from the control thread
        moved |= self.look(); //       sockets that can be read or written again
        moved |= self.reap(now); //    completions: leases home, CDC messages received
        moved |= self.drain(now); //   RMB elements -> TCP sockets
        moved |= self.fill(now); //    TCP sockets  -> send chunks -> RDMA writes
        moved |= self.flush(now); //   RDMA writes, then the CDC messages that announce them
        moved |= self.expire(now); //  timers, and reports that had to wait
        self.ends.counters.turns.add(1);
        self.ends.counters.turns_idle.add((!moved).into());
        moved
    }

    /// Sleeps until something happens, unless something has. `moved` is what the last turn said:
    /// what it left behind without moving anything waits for others.
    fn sleep(&mut self, now: Instant, moved: bool) {
        self.ends.waker.about_to_sleep();
        let deadline = self.next_deadline(now);
        let ready = self.has_commands() || (moved && self.work.is_left());
        let asleep = !ready && deadline.is_none_or(|deadline| deadline > now);
        if asleep {
            self.ends.counters.sleeps.add(1);
            self.publish();
            self.streams.sleep(deadline.map(|deadline| deadline.since(now)));
        }
        self.ends.waker.awake();
    }

    /// Puts what is counted elsewhere where others can read it.
    fn publish(&mut self) {
        (self.ends.observe)(&self.fabric);
        self.ends.counters.send_bytes_lent.set(self.pool.bytes_in_use());
        self.ends.counters.backlog_bytes.set(self.backlog_bytes as u64);
    }

    /// When this poller must turn again, at the latest.
    pub fn next_deadline(&mut self, now: Instant) -> Option<Instant> {
        let fabric = self.fabric.prepare_sleep(now);
        let retiring = self.links.retiring().next().is_some();
        let sweep = (self.connections.busy() > 0 || retiring).then_some(self.sweep_at);
        // Nobody says when the control thread has made room for them.
        let reports = (!self.delayed.is_empty()).then_some(now);
        let neighbours = self.has_mail().then_some(now + MAIL_AGAIN);
        [fabric, sweep, reports, neighbours].into_iter().flatten().min()
    }

    /// Whether somebody has told this poller something that it has not obeyed yet.
    pub fn has_commands(&self) -> bool {
        !self.ends.commands.is_empty()
    }

    /// Send leases that a NIC holds, or that wait for their announcement. Zero when nothing is on
    /// its way.
    pub fn leases_out(&self) -> u32 {
        self.pool.leases_out()
    }

    /// Does what the control thread says.
    pub(crate) fn obey(&mut self, now: Instant) -> bool {
        let mut moved = false;
        for _ in 0..OBEY_PER_TURN_MAX {
            let Some(command) = self.ends.commands.receive() else { break };
            self.obey_one(now, command);
            moved = true;
        }
        moved
    }

    fn obey_one(&mut self, now: Instant, command: CommandOf<F, S>) {
        match command {
            Command::AddLink { link, group, qp, activity } => {
                activity.note(now);
                let qp = self.fabric.adopt(now, qp);
                self.links.add((link, group), qp, activity, self.fabric.room(qp));
            }
            Command::SendLlc { link, message } => self.send_llc(now, link, message),
            Command::FailConnections { link } => self.fail_connections(now, link),
            Command::RetireLink { link } => {
                if let Some(link) = self.links.by_id(link) {
                    link.retire_by.get_or_insert(now + LAST_WORDS_WAIT);
                }
                self.retire_link(now, link);
            }
            Command::Expect { connection, group } => self.connections.expect(connection, group),
            Command::Forget { connection } => self.connections.forget(connection),
            Command::Relay { connection, established } => {
                self.admit(now, connection, *established);
            }
            Command::Abort { connection } => {
                if self.connections.relay(connection).is_some() {
                    self.reset(now, connection.slot, Ending::Aborted);
                } else if let Some(neighbour) = self.elsewhere(connection) {
                    self.send_mail(neighbour, Command::Abort { connection });
                }
            }
            Command::FailLink { link } => self.fail_link(now, link),
            Command::MoveConnections { from, to, to_poller, keys, only } => {
                self.move_connections(now, Move::new(from, to, to_poller, keys), only);
            }
            Command::Adopt(migrant) => self.adopt(now, *migrant),
            Command::Deliver { group, message } => self.deliver(now, group, &message),
            Command::Stop => self.stopping = true,
        }
    }

    /// Breaks the queue pair of a link of which the control thread knows that it is down.
    fn fail_link(&mut self, now: Instant, id: LinkId) {
        if let Some(link) = self.links.by_id(id) {
            link.broken = true;
            self.fabric.fail(now, link.qp);
        }
    }

    /// Gives up the queue pair of a link that is to be retired, once its last words are delivered
    /// and what it brought is taken in. The peer has forgotten what our NIC has acknowledged.
    pub(crate) fn retire_link(&mut self, now: Instant, id: LinkId) {
        let Some(link) = self.links.by_id(id) else { return };
        let Some(by) = link.retire_by else { return };
        // A peer that is never ready for a message does not let the queue pair break either.
        // RFC 7609 3.5.4-7
        if link.llc_outstanding > 0 && !link.broken && now < by {
            return;
        }
        if !link.emptied {
            self.fail_link(now, id);
            return;
        }
        // Commands and completions come before anything is gathered, and flush posts all of it.
        assert!(link.writes.is_empty() && link.sends.is_empty());
        let Some(link) = self.links.remove(id) else { return };
        self.fabric.release(now, link.qp);
        self.report(Report::LinkRetired { link: id });
    }

    /// Takes over a connection from the rendezvous.
    fn admit(&mut self, now: Instant, id: ConnectionId, established: Established<S::Stream>) {
        let key = Key { slot: id.slot, generation: id.generation, far: false };
        let mut watched = true;
        let (near, far) = match established {
            Established::Smc { near, link, group, rmbe, peer } => {
                self.ends.counters.connections_smc.add(1);
                (near, Far::Smc(Smc::new((link, group), rmbe, peer)))
            }
            Established::Tcp { near, far, from_near, from_far, declined } => {
                self.ends.counters.connections_tcp.add(1);
                watched &= self.watch(Key { far: true, ..key }, &far);
                let socket = Socket::new(far);
                let outbound = Backlog::new(from_near);
                let (inbound, sieve) = match declined {
                    false => (Backlog::new(from_far), None),
                    true => (Backlog::default(), Some(Sieve::new(from_far))),
                };
                (near, Far::Tcp(Tcp { socket, outbound, inbound, held: 0, sieve }))
            }
        };
        watched &= self.watch(key, &near);
        let group = far.group();
        let near = Some(Socket::new(near));
        let queued = crate::connections::Queued::default();
        let parked = self.connections.insert(Relay {
            id,
            near,
            far,
            ending: None,
            bytes_in: 0,
            bytes_out: 0,
            failovers: 0,
            queued,
        });
        self.ends.owners.set(id, group, self.ends.index);
        self.ends.counters.connections.set(self.connections.busy() as u64);
        self.ends.gauges.set(id.slot, Reading::default());
        for (index, cdc) in parked.iter().enumerate() {
            self.expect_gap_before(id, index);
            self.receive_cdc(now, id, cdc);
        }
        if !watched {
            // Nothing would ever be read from it.
            self.reset(now, id.slot, Ending::Aborted);
        } else if group.is_some() {
            self.settle_on_link(now, id.slot);
        } else {
            // What the rendezvous read already may be all that ever comes.
            self.queue_fill(id.slot);
        }
    }

    pub(crate) fn watch(&mut self, key: Key, stream: &S::Stream) -> bool {
        let watched = self.streams.watch(key, stream).is_ok();
        self.ends.counters.watch_failures.add((!watched).into());
        watched
    }

    /// Takes in what became possible on sockets.
    fn look(&mut self) -> bool {
        let mut events = std::mem::take(&mut self.events);
        self.streams.poll(&mut events);
        let moved = !events.is_empty();
        for event in events.drain(..) {
            let id = ConnectionId { slot: event.key.slot, generation: event.key.generation };
            let Some(relay) = self.connections.relay(id) else { continue };
            let socket = match (&mut relay.far, event.key.far) {
                (Far::Tcp(tcp), true) => Some(&mut tcp.socket),
                (Far::Smc(_), true) => None,
                (Far::Smc(_) | Far::Tcp(_), false) => relay.near.as_mut(),
            };
            let Some(socket) = socket else { continue };
            socket.readable |= event.readable;
            socket.writable |= event.writable;
            socket.ending |= event.ending;
            socket.failed |= event.failed;
            socket.urgent |= event.urgent;
            socket.unseen &= !event.readable;
            if event.readable {
                self.queue_fill(id.slot);
            }
            if event.writable {
                self.queue_drain(id.slot);
            }
        }
        self.events = events;
        moved
    }

    /// Takes in what the fabric brought.
    fn reap(&mut self, now: Instant) -> bool {
        let mut completions = std::mem::take(&mut self.completions);
        self.fabric.poll(now, &mut completions);
        let moved = !completions.is_empty();
        for completion in completions.drain(..) {
            self.complete(now, completion);
        }
        self.completions = completions;
        moved
    }

    /// Looks after what is late, and wakes the control thread if there are reports for it.
    fn expire(&mut self, now: Instant) -> bool {
        let mut moved = self.post_mail();
        if now >= self.sweep_at {
            self.sweep_at = now + SWEEP_EVERY;
            self.publish();
            let slots: Vec<u16> = self.connections.slots().collect();
            for slot in slots {
                moved |= self.expire_connection(now, slot);
            }
            let retiring: Vec<LinkId> = self.links.retiring().collect();
            for link in retiring {
                self.retire_link(now, link);
            }
        }
        while let Some(report) = self.delayed.pop_front() {
            if let Err(report) = self.ends.reports.push(report) {
                self.delayed.push_front(report);
                break;
            }
            self.reported = true;
            moved = true;
        }
        // Last, behind everything that may have had something to report.
        if std::mem::take(&mut self.reported) {
            self.ends.reports.wake();
        }
        moved
    }

    /// Tells the control thread; wakes it at the end of the turn.
    pub(crate) fn report(&mut self, report: Report<S::Stream>) {
        self.reported = true;
        if !self.delayed.is_empty() {
            self.delayed.push_back(report);
        } else if let Err(report) = self.ends.reports.push(report) {
            self.ends.counters.reports_delayed.add(1);
            self.delayed.push_back(report);
        }
    }

    pub(crate) fn queue_drain(&mut self, slot: u16) {
        if let Some(relay) = self.connections.at(slot)
            && !std::mem::replace(&mut relay.queued.drain, true)
        {
            self.work.drain.push(slot);
        }
    }

    pub(crate) fn queue_fill(&mut self, slot: u16) {
        if let Some(relay) = self.connections.at(slot)
            && !std::mem::replace(&mut relay.queued.fill, true)
        {
            self.work.fill.push(slot);
        }
    }

    pub(crate) fn queue_flush(&mut self, slot: u16) {
        if let Some(relay) = self.connections.at(slot)
            && !std::mem::replace(&mut relay.queued.flush, true)
        {
            self.work.flush.push(slot);
        }
    }
}

/// How long the last words of a link may take.
const LAST_WORDS_WAIT: Duration = Duration::from_secs(2);

/// How often the whole table is looked at for timers that ran out. They are seconds long.
const SWEEP_EVERY: Duration = Duration::from_millis(250);
/// How soon a neighbour whose queue was full is tried again: nobody says when it has room.
const MAIL_AGAIN: Duration = Duration::from_micros(50);

const _: () = assert!(COMMANDS_MAX >= OBEY_PER_TURN_MAX);

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use smcr_rnic::sim;

    use super::*;
    use crate::idle::Policy;
    use crate::kernel::Kernel;
    use crate::mailbox::mailbox;

    /// A gateway that was told to stop hung for ever, where its poller went to sleep right after
    /// the turn in which it heard so: beside busy programs, or with `spin_us = 0`.
    #[test]
    fn a_thread_that_never_spins_ends_when_it_is_told_to() {
        let waker = Waker::new().unwrap();
        let (control, commands) = mailbox(COMMANDS_MAX, waker.clone());
        let (reports, _control) = mailbox(1, Waker::new().unwrap());
        let (over, ended) = mpsc::channel();
        std::thread::spawn(move || {
            let kernel = Kernel::new([waker.descriptor()]).unwrap();
            let ends = Ends::<Option<sim::Fabric>, Kernel> {
                commands,
                waker: waker.clone(),
                reports,
                neighbours: Vec::new(),
                index: 0,
                owners: Arc::new(Owners::new()),
                counters: Arc::default(),
                gauges: Arc::new(Gauges::new()),
                observe: Box::new(|_| {}),
            };
            let idle = Idle::new(Policy::Adaptive, Duration::ZERO);
            let affinity = Affinity::of_this_thread().unwrap();
            let memory = Region::new(1 << 20).unwrap();
            Poller::new(None, kernel, ends, memory).run(Clock::new(), idle, &affinity);
            over.send(()).unwrap();
        });
        control.send(Command::Stop).expect("there is room");
        ended.recv_timeout(Duration::from_secs(20)).expect("the thread ends");
    }
}
