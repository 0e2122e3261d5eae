//! One gateway: the production poller over a simulated NIC, and a little control thread.
//!
//! The stand-in does what `control` does with reports and commands, and nothing about rendezvous:
//! connections are established because a test says so.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use smcr_engine::counters::Counters;
use smcr_engine::gauges::Gauges;
use smcr_engine::handoff::{Activity, Ending, Owners, PeerElement};
use smcr_engine::limits::{COMMANDS_MAX, FILL_PER_TURN_MAX};
use smcr_engine::mailbox::{Receiver, Sender, Waker, mailbox};
use smcr_engine::poller::{CommandOf, Ends};
use smcr_engine::{Command, ConnectionId, Established, LinkId, Poller, Report};
use smcr_memory::{Region, Rmb, Rmbe};
use smcr_proto::ring::Ring;
use smcr_proto::{AlertToken, Gid, Instant, MacAddress, Mtu, RmbeSize};
use smcr_rnic::sim::{self, Network};
use smcr_rnic::{Domain, Message, Opening, Port, QpAddress, Registration, Rnic};

use crate::tcp::{Sockets, Stream};

/// How large things are.
#[derive(Clone, Debug)]
pub(crate) struct Sizes {
    pub(crate) rmbe: RmbeSize,
    pub(crate) send_chunks: usize,
    pub(crate) socket_bytes: usize,
    pub(crate) reports: usize,
    pub(crate) elements: usize,
}

impl Sizes {
    pub(crate) const USUAL: Self = Self {
        rmbe: RmbeSize::from_notation(0),
        send_chunks: 16,
        socket_bytes: 40_000,
        reports: 8_192,
        elements: 255,
    };

    fn ring(&self) -> Ring {
        Ring::new(self.rmbe.bytes())
    }
}

/// How a connection ended, as its poller reported it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Closed {
    pub(crate) ending: Ending,
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
}

/// A slot, its element, and what the peer is told about them.
pub(crate) struct Element {
    pub(crate) id: ConnectionId,
    pub(crate) rmbe: Rmbe,
    pub(crate) described: PeerElement,
}

/// One gateway.
pub(crate) struct Host {
    pub(crate) poller: Poller<sim::Fabric, Sockets>,
    pub(crate) sockets: Sockets,
    pub(crate) counters: Arc<Counters>,
    pub(crate) closed: BTreeMap<ConnectionId, Closed>,
    pub(crate) llc: Vec<(LinkId, Message)>,
    pub(crate) broken: BTreeSet<LinkId>,
    pub(crate) retired: BTreeSet<LinkId>,
    /// The control thread reads no reports.
    pub(crate) control_asleep: bool,
    sizes: Sizes,
    rnic: sim::Rnic,
    domain: Domain,
    commands: Sender<CommandOf<sim::Fabric, Sockets>>,
    pending: Receiver<Report<Stream>>,
    rmb: Rmb,
    registration: Registration,
    free: VecDeque<ConnectionId>,
    awake: bool,
    /// Wakes the control thread, which sleeps until then.
    waker: Waker,
    waits_for_reports: bool,
}

impl Host {
    pub(crate) fn new(network: &Network, number: u8, sizes: Sizes) -> Self {
        let gid = Gid::from_ipv4([10, 9, 0, number]);
        let mac = MacAddress([2, 0, 0, 0, 0, number]);
        let (mut rnic, fabric) = network.rnic(Port { gid, mac, mtu: Mtu::B1024 });
        let domain = rnic.open_domain().unwrap();
        let region = Region::new(sizes.elements * sizes.rmbe.bytes() as usize).unwrap();
        let rmb = Rmb::carve(region, sizes.rmbe);
        let registration = rnic.register(domain, rmb.region()).unwrap();
        let waker = Waker::new().unwrap();
        let (commands, obeyed) = mailbox(COMMANDS_MAX, waker.clone());
        let control = Waker::new().unwrap();
        let (reports, pending) = mailbox(sizes.reports, control.clone());
        let (counters, sockets) = (Arc::new(Counters::default()), Sockets::default());
        let ends = Ends {
            commands: obeyed,
            waker,
            reports,
            neighbours: Vec::new(),
            index: 0,
            owners: Arc::new(Owners::new()),
            counters: Arc::clone(&counters),
            gauges: Arc::new(Gauges::new()),
            observe: Box::new(|_| {}),
        };
        let memory = Region::new(sizes.send_chunks * FILL_PER_TURN_MAX as usize).unwrap();
        let slots = 0..u16::from(rmb.elements());
        Self {
            poller: Poller::new(fabric, sockets.clone(), ends, memory),
            sockets,
            counters,
            closed: BTreeMap::new(),
            llc: Vec::new(),
            broken: BTreeSet::new(),
            retired: BTreeSet::new(),
            control_asleep: false,
            sizes,
            rnic,
            domain,
            commands,
            pending,
            rmb,
            registration,
            free: slots.map(|slot| ConnectionId { slot, generation: 1 }).collect(),
            awake: true,
            waker: control,
            waits_for_reports: false,
        }
    }

    pub(crate) fn command(&mut self, command: CommandOf<sim::Fabric, Sockets>) {
        self.awake = true;
        assert!(self.commands.send(command).is_ok(), "tests command less than fits");
    }

    /// A queue pair that must still learn its peer.
    pub(crate) fn open(&mut self) -> sim::Opening {
        self.rnic.open(self.domain).unwrap()
    }

    pub(crate) fn add_link(&mut self, link: LinkId, opening: sim::Opening, peer: QpAddress) {
        let qp = opening.connect(peer).unwrap();
        self.command(Command::AddLink { link, qp, activity: Arc::new(Activity::default()) });
    }

    pub(crate) fn has_slot(&self) -> bool {
        !self.free.is_empty()
    }

    /// A slot for a connection. Slots are used again as soon as possible.
    pub(crate) fn take_slot(&mut self) -> Option<ConnectionId> {
        self.free.pop_front()
    }

    /// A slot and an element, and what the peer must know of them.
    pub(crate) fn take_element(&mut self) -> Option<Element> {
        let id = self.take_slot()?;
        let rmbe = self.rmb.take().expect("as many elements as slots");
        let described = self.describe(id.token(), &rmbe);
        Some(Element { id, rmbe, described })
    }

    /// The rendezvous failed after [`Self::take_element`].
    pub(crate) fn abandon(&mut self, id: ConnectionId, rmbe: Rmbe) {
        self.command(Command::Forget { connection: id });
        self.give_back(id, Some(rmbe));
    }

    fn describe(&self, token: AlertToken, element: &Rmbe) -> PeerElement {
        let offset = u64::from(element.index() - 1) * u64::from(element.capacity());
        PeerElement {
            rkey: self.registration.rkey,
            address: self.registration.address + offset,
            ring: self.sizes.ring(),
            token,
        }
    }

    pub(crate) fn relay(&mut self, connection: ConnectionId, established: Established<Stream>) {
        let established = Box::new(established);
        self.command(Command::Relay { connection, established });
    }

    /// Turns once if the poller has reason to be awake, and lets the control thread read what was
    /// reported. Returns whether anything moved.
    pub(crate) fn turn(&mut self, now: Instant) -> bool {
        let due = self.poller.next_deadline(now).is_some_and(|deadline| deadline <= now);
        let woken = self.awake || self.sockets.has_news() || due;
        if woken {
            self.awake = self.poller.turn(now);
        }
        let controlled = self.control_turn();
        (woken && self.awake) || controlled
    }

    /// The control thread takes a turn if it was woken, and sleeps again.
    fn control_turn(&mut self) -> bool {
        if self.control_asleep {
            // Not at its queue: nobody can wake it, and it will look when it comes back.
            self.waker.awake();
            self.waits_for_reports = false;
            return false;
        }
        if self.waits_for_reports && !is_readable(&self.waker) {
            return false;
        }
        self.waker.awake();
        let moved = self.control();
        self.waker.about_to_sleep();
        self.waits_for_reports = true;
        moved | self.control()
    }

    /// Takes in what the poller reported, as the control thread does.
    fn control(&mut self) -> bool {
        let mut moved = false;
        while let Some(report) = self.pending.receive() {
            moved = true;
            match report {
                Report::LlcReceived { link, message } => self.llc.push((link, message)),
                Report::LinkBroke { link, .. } => {
                    self.broken.insert(link);
                    self.command(Command::FailConnections { link });
                    self.command(Command::RetireLink { link });
                }
                Report::Moved { .. } | Report::LinkVacated { .. } => {
                    unreachable!("nothing was told to move")
                }
                Report::LinkRetired { link } => assert!(self.retired.insert(link)),
                Report::Closed { connection, ending, bytes_in, bytes_out, rmbe, streams } => {
                    drop(streams);
                    let closed = Closed { ending, bytes_in, bytes_out };
                    assert_eq!(self.closed.insert(connection, closed), None, "closed twice");
                    self.give_back(connection, rmbe);
                }
            }
        }
        moved
    }

    /// The slot, and its element if it had one, may serve others.
    fn give_back(&mut self, connection: ConnectionId, rmbe: Option<Rmbe>) {
        if let Some(rmbe) = rmbe {
            self.rmb.give_back(rmbe);
        }
        let generation = connection.generation.checked_add(1).unwrap_or(1);
        self.free.push_front(ConnectionId { generation, ..connection });
    }

    /// Panics unless everything that was lent is home and every slot is free.
    pub(crate) fn assert_nothing_is_left(&self) {
        assert_eq!(self.poller.leases_out(), 0, "send leases");
        assert_eq!(self.rmb.in_use(), 0, "RMB elements");
        assert_eq!(self.free.len(), usize::from(self.rmb.elements()), "slots");
        assert_eq!(self.counters.connections.get(), 0);
    }
}

pub(crate) fn is_readable(waker: &Waker) -> bool {
    let descriptor = waker.descriptor();
    let mut set = [PollFd::from_borrowed_fd(descriptor, PollFlags::IN)];
    poll(&mut set, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
}
