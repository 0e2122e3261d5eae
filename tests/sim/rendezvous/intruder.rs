//! The third host: it speaks CLC by hand, and breaks what rules it can.
//!
//! It replays what the gateways have said to each other: Proposals as they were, without a peer id,
//! or with its own port; Accepts and Confirms that name the links and elements of others. It calls
//! groups out of sync, also in the name of another, resets, floods and keeps silent. On the links
//! that it gets it does what a [`Rogue`] does. It knows all that the gateways know; it has no TCP
//! address but its own.

use std::collections::BTreeMap;
use std::time::Duration;

use smcgate::groups::PortId;
use smcr_proto::wire::clc::v2::{Gids, OfferV2, ProposalV2};
use smcr_proto::wire::clc::{Decline, Diagnosis, Frame, Framer, Offer, Proposal};
use smcr_proto::{PeerId, Rkey};
use smcr_rnic::dice::Chance;
use smcr_rnic::sim::{self, Network};

use super::blame::Scope;
use super::pipe::Segment;
use super::{CLIENT, INTRUDER, SERVER, World};
use crate::gateways::gateway::peer_id;
use crate::rogue::{GID, Known, MAC, Rogue};

/// The hostile host.
pub(crate) struct Intruder {
    pub(crate) rogue: Rogue,
    /// Nobody can tell its TCP connections from those of others.
    pub(crate) blends_in: bool,
    /// Its TCP connections that go on, by the number of the call.
    visits: BTreeMap<usize, Visit>,
    pub(crate) tried: Tried,
}

/// What it has done by TCP.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tried {
    /// Proposals in the name of another.
    pub(crate) replays: u64,
    /// Accepts that name a link of another.
    pub(crate) accepts: u64,
    /// Confirms that name the link and the element of another.
    pub(crate) confirms: u64,
    /// Declines that say that the other side is out of sync.
    pub(crate) out_of_sync: u64,
    /// Those of them that have the peer id of another.
    pub(crate) in_the_name: u64,
    /// Connections at once.
    pub(crate) floods: u64,
    /// Connections on which it never said anything.
    pub(crate) silences: u64,
    /// First contacts of its own.
    pub(crate) contacts: u64,
}

/// One of its TCP connections.
struct Visit {
    /// Which side of the call it is.
    side: usize,
    plan: Plan,
    framer: Framer,
    /// What its Confirm or Accept named.
    opening: Option<sim::Opening>,
}

/// What it does when it has an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plan {
    /// Goes on as if it were honest.
    Join,
    /// Names the link and the element of another.
    Forge,
    /// Says that it does not know the group.
    OutOfSync,
    Reset,
    Silence,
    /// Says what makes no sense.
    Nonsense,
}

impl Intruder {
    pub(crate) fn new(seed: u64, network: &Network) -> Self {
        let rogue = Rogue::new(seed, network);
        let (visits, tried) = (BTreeMap::new(), Tried::default());
        Self { rogue, blends_in: false, visits, tried }
    }

    /// Does one thing that it should not.
    pub(crate) fn act(&mut self, world: &mut World) -> bool {
        match self.rogue.dice.below(100) {
            0..=11 => self.call(world),
            12..=15 => self.be_called(world),
            16 | 17 if self.tried.floods == 0 => self.flood(world),
            18..=21 => self.abandon(world),
            _ => {
                let known = self.known(world);
                (0..4).for_each(|_| self.rogue.forge(&known));
            }
        }
        true
    }

    /// Has more connections to one gateway than that admits: silent ones, or ones that propose and
    /// say no more; all as one host, or each as another. Once in a run, because it has a price.
    fn flood(&mut self, world: &mut World) {
        self.tried.floods += 1;
        // Whoever waits for a place gets it, or stays TCP.
        world.blame.note_until(world.now, world.now + CROWDED, Scope::Waits);
        let victim = self.rogue.dice.index(2);
        let kind = self.rogue.dice.index(4);
        let proposals = proposals(world);
        for _ in 0..FLOOD {
            let Some(number) = self.begin_call(world, victim, Plan::Silence) else { return };
            let Some(mut proposal) = self.rogue.any_of(&proposals) else { continue };
            match kind {
                0 => continue,
                1 => {}
                _ => self.rogue.dice.fill(&mut proposal.v1.peer_id.0),
            }
            self.propose(world, number, &proposal);
        }
    }

    /// Gets itself some links, as an honest host does.
    pub(crate) fn settle(&mut self, world: &mut World) -> bool {
        for _ in 0..4 {
            self.call(world);
        }
        self.visits.values_mut().for_each(|visit| visit.plan = Plan::Join);
        true
    }

    /// Takes in what its queue pairs and its TCP connections brought.
    pub(crate) fn turn(&mut self, world: &mut World) -> bool {
        let mut moved = self.rogue.turn(world.now);
        let numbers: Vec<usize> = self.visits.keys().copied().collect();
        for number in numbers {
            moved |= self.listen(world, number);
        }
        moved
    }

    /// It is gone: all its connections are reset, and its links are silent.
    pub(crate) fn depart(&mut self, world: &mut World) -> bool {
        for (number, visit) in std::mem::take(&mut self.visits) {
            world.send(number, visit.side, Segment::Reset);
        }
        self.rogue.depart(world.now);
        true
    }

    fn any_plan(&mut self) -> Plan {
        use Plan::{Forge, Join, Nonsense, OutOfSync, Reset, Silence};
        let plans = [Join, Join, Join, Forge, OutOfSync, OutOfSync, Reset, Silence, Nonsense];
        plans[self.rogue.dice.index(plans.len())]
    }

    fn begin(&mut self, number: usize, side: usize, plan: Plan) {
        self.visits.insert(number, Visit { side, plan, framer: Framer::new(), opening: None });
    }

    /// Connects to a gateway, and proposes in the name of the other one.
    fn call(&mut self, world: &mut World) {
        let victim = self.rogue.dice.index(2);
        let plan = self.any_plan();
        let Some(number) = self.begin_call(world, victim, plan) else { return };
        if self.rogue.dice.roll(Chance::percent(15)) {
            self.tried.silences += 1;
            return;
        }
        let proposals = proposals(world);
        let Some(proposal) = self.rogue.any_of(&proposals) else { return };
        self.tried.replays += 1;
        let proposal = self.altered(&proposal);
        self.propose(world, number, &proposal);
    }

    /// Connects to a gateway. Returns none if it has enough connections.
    fn begin_call(&mut self, world: &mut World, victim: usize, plan: Plan) -> Option<usize> {
        if self.visits.len() >= VISITS_MAX {
            return None;
        }
        let ports = world.nodes[victim].gids.len();
        let port = PortId(self.rogue.dice.index(ports));
        let number = world.connect(INTRUDER, victim, [port, port]);
        self.begin(number, CLIENT, plan);
        Some(number)
    }

    fn propose(&mut self, world: &mut World, number: usize, proposal: &ProposalV2) {
        let ProposalV2 { v1, v2 } = *proposal;
        let frame = match v2 {
            Some(_) => Frame::ProposalV2(ProposalV2 { v1, v2 }),
            None => Frame::Proposal(Proposal { ..v1 }),
        };
        self.say(world, number, &frame);
    }

    /// A Proposal that was overheard: exact, without a peer id, with its own port, or both.
    fn altered(&mut self, proposal: &ProposalV2) -> ProposalV2 {
        let ProposalV2 { mut v1, mut v2 } = *proposal;
        let mut often = || self.rogue.dice.roll(Chance::percent(40));
        if often() {
            v1.peer_id = PeerId::default();
        }
        if often() {
            (v1.gid, v1.mac) = (GID, MAC);
            if let Some(extension) = &mut v2 {
                extension.gid = GID;
            }
        }
        ProposalV2 { v1, v2 }
    }

    /// An application of a gateway connects to it.
    fn be_called(&mut self, world: &mut World) {
        if self.visits.len() >= VISITS_MAX {
            return;
        }
        let caller = self.rogue.dice.index(2);
        let ports = world.nodes[caller].gids.len();
        let port = PortId(self.rogue.dice.index(ports));
        let number = world.connect(caller, INTRUDER, [port, port]);
        let plan = self.any_plan();
        self.begin(number, SERVER, plan);
    }

    /// Resets one of its connections.
    fn abandon(&mut self, world: &mut World) {
        let numbers: Vec<usize> = self.visits.keys().copied().collect();
        let Some(number) = self.rogue.any_of(&numbers) else { return };
        self.reset(world, number);
    }

    fn reset(&mut self, world: &mut World, number: usize) {
        let visit = self.visits.remove(&number).expect("it goes on");
        world.send(number, visit.side, Segment::Reset);
    }

    fn say(&mut self, world: &mut World, number: usize, frame: &Frame) {
        let side = self.visits[&number].side;
        world.send(number, side, Segment::Bytes(frame.encode().as_bytes().to_vec()));
    }

    /// Reads what came on one connection, and answers it.
    fn listen(&mut self, world: &mut World, number: usize) -> bool {
        let visit = self.visits.get_mut(&number).expect("it goes on");
        let inbox = &mut world.calls[number].sides[visit.side].inbox;
        if inbox.reset || inbox.ended {
            self.reset(world, number);
            return true;
        }
        let taken = visit.framer.feed(inbox.readable());
        inbox.take(taken);
        match visit.framer.next_frame() {
            Ok(None) => return taken > 0,
            // It is TCP by now.
            Err(_) => self.reset(world, number),
            Ok(Some(frame)) => self.answer(world, number, &frame),
        }
        true
    }

    fn answer(&mut self, world: &mut World, number: usize, frame: &Frame) {
        match self.visits[&number].plan {
            Plan::Silence => {}
            Plan::Reset => self.reset(world, number),
            Plan::Nonsense => {
                let side = self.visits[&number].side;
                let mut bytes = vec![0; 1 + self.rogue.dice.index(100)];
                self.rogue.dice.fill(&mut bytes);
                world.send(number, side, Segment::Bytes(bytes));
            }
            Plan::OutOfSync => {
                self.tried.out_of_sync += 1;
                let peer_id = self.any_name(world, number, frame);
                let diagnosis = Diagnosis::OUT_OF_SYNC;
                let decline = Decline { out_of_sync: true, peer_id, diagnosis };
                self.say(world, number, &Frame::Decline(decline));
            }
            plan @ (Plan::Join | Plan::Forge) => match frame {
                Frame::Accept(accept) => self.confirm(world, number, accept, None, plan),
                Frame::AcceptV2(accept) => {
                    self.confirm(world, number, &accept.offer, Some(accept), plan);
                }
                Frame::Proposal(_) | Frame::ProposalV2(_) => {
                    self.accept(world, number, frame, plan)
                }
                Frame::Confirm(confirm) => self.connect(world, number, SERVER, confirm, false),
                Frame::ConfirmV2(confirm) => {
                    self.connect(world, number, SERVER, &confirm.offer, true);
                }
                Frame::Decline(_) | Frame::DeclineV2(_) => self.reset(world, number),
            },
        }
    }

    /// In whose name it speaks: of the gateway that it answers, of the other one, whose groups are
    /// at stake, or in nobody's.
    fn any_name(&mut self, world: &World, number: usize, frame: &Frame) -> PeerId {
        let visit = &self.visits[&number];
        let asked = world.calls[number].hosts[1 - visit.side];
        match self.rogue.dice.index(4) {
            0 => claimed(frame).unwrap_or_default(),
            1 => PeerId::default(),
            _ => {
                self.tried.in_the_name += 1;
                peer_id(u8::try_from(2 - asked).expect("hosts are numbered from one"))
            }
        }
    }

    /// What it knows of the links and elements that gateways have with each other.
    fn known(&self, world: &World) -> Known {
        let [one, other] = &world.nodes;
        Known::of([one.endpoint.groups(), other.endpoint.groups()])
    }

    /// Answers an Accept: with a queue pair of its own, or with what another has offered.
    fn confirm(
        &mut self,
        world: &mut World,
        number: usize,
        accept: &Offer,
        v2: Option<&OfferV2>,
        plan: Plan,
    ) {
        let victim = world.calls[number].hosts[SERVER];
        let offer = if plan == Plan::Forge || !accept.first_contact {
            let offers = self.known(world).offers[victim].clone();
            let Some(known) = self.rogue.any_of(&offers) else { return };
            self.tried.confirms += 1;
            Offer { first_contact: accept.first_contact, ..known }
        } else {
            let Some(opening) = self.rogue.open() else { return };
            let offer = self.rogue.offer(PeerId([6; 8]), &opening);
            self.visits.get_mut(&number).expect("it goes on").opening = Some(opening);
            self.tried.contacts += 1;
            self.connect(world, number, CLIENT, accept, v2.is_some());
            offer
        };
        let frame = match v2 {
            None => Frame::Confirm(offer),
            Some(accept) => Frame::ConfirmV2(OfferV2 { offer, gids: Gids::new(), ..*accept }),
        };
        self.say(world, number, &frame);
    }

    /// Answers a Proposal: with a queue pair of its own, or with a link that the client has with
    /// somebody else.
    fn accept(&mut self, world: &mut World, number: usize, proposal: &Frame, plan: Plan) {
        let victim = world.calls[number].hosts[CLIENT];
        let accepts = world.overheard.iter().filter_map(|frame| match frame {
            Frame::AcceptV2(accept) if accept.offer.first_contact => Some(*accept),
            Frame::AcceptV2(_)
            | Frame::Accept(_)
            | Frame::Proposal(_)
            | Frame::Confirm(_)
            | Frame::Decline(_)
            | Frame::ProposalV2(_)
            | Frame::ConfirmV2(_)
            | Frame::DeclineV2(_) => None,
        });
        let in_v2: Vec<OfferV2> = accepts.collect();
        let offer = if plan == Plan::Forge {
            let offers = self.known(world).offers[victim].clone();
            let Some(known) = self.rogue.any_of(&offers) else { return };
            self.tried.accepts += 1;
            // The key of an RMB would prove that it is the host that it claims to be.
            let rkey = Rkey(known.rkey.0 ^ 1 << self.rogue.dice.below(32));
            Offer { first_contact: false, rkey, ..known }
        } else {
            let Some(opening) = self.rogue.open() else { return };
            let offer = self.rogue.offer(PeerId([6; 8]), &opening);
            self.visits.get_mut(&number).expect("it goes on").opening = Some(opening);
            self.tried.contacts += 1;
            offer
        };
        let speaks_v2 = matches!(proposal, Frame::ProposalV2(ProposalV2 { v2: Some(_), .. }));
        let frame = match self.rogue.any_of(&in_v2).filter(|_| speaks_v2) {
            None => Frame::Accept(offer),
            Some(model) => {
                let first_contact = model.first_contact.filter(|_| offer.first_contact);
                Frame::AcceptV2(OfferV2 { offer, first_contact, gids: Gids::new(), ..model })
            }
        };
        self.say(world, number, &frame);
    }

    /// Connects the queue pair that it offered to the one of the other side.
    fn connect(&mut self, world: &World, number: usize, side: usize, theirs: &Offer, v2: bool) {
        let visit = self.visits.get_mut(&number).expect("it goes on");
        if let Some(opening) = visit.opening.take() {
            let host = world.calls[number].hosts[1 - side];
            self.rogue.connect(world.now, (host, v2), opening, theirs);
        }
    }
}

/// Who the sender of a message says that it is.
fn claimed(frame: &Frame) -> Option<PeerId> {
    match frame {
        Frame::Proposal(proposal) => Some(proposal.peer_id),
        Frame::ProposalV2(proposal) => Some(proposal.v1.peer_id),
        Frame::Accept(offer) | Frame::Confirm(offer) => Some(offer.peer_id),
        Frame::AcceptV2(offer) | Frame::ConfirmV2(offer) => Some(offer.offer.peer_id),
        Frame::Decline(_) | Frame::DeclineV2(_) => None,
    }
}

/// The Proposals that were overheard.
fn proposals(world: &World) -> Vec<ProposalV2> {
    let proposals = world.overheard.iter().filter_map(|frame| match frame {
        Frame::Proposal(proposal) => Some(ProposalV2 { v1: *proposal, v2: None }),
        Frame::ProposalV2(proposal) => Some(*proposal),
        Frame::Accept(_)
        | Frame::Confirm(_)
        | Frame::Decline(_)
        | Frame::AcceptV2(_)
        | Frame::ConfirmV2(_)
        | Frame::DeclineV2(_) => None,
    });
    proposals.collect()
}

/// Connections that a flood opens at once: more than a gateway admits of one source, more than may
/// be silent there, and more than there are places for rendezvous.
const FLOOD: usize = 56;
/// The most connections that it has at once.
const VISITS_MAX: usize = 80;
/// How long a flood may be felt: its rendezvous are given up by then.
const CROWDED: Duration = Duration::from_secs(20);
