//! Two endpoints that share a link group with two links. A later connection uses a link only when
//! that link has proved that it carries.

use std::collections::HashMap;
use std::sync::Arc;

use smcr_engine::handoff::{Activity, Unheard};
use smcr_engine::{Established, LinkId, LlcBytes, Report};
use smcr_proto::Qpn;

use super::*;

/// A client and a server, joined by their CLC and LLC messages.
pub(super) struct Two {
    pub(super) now: Instant,
    pub(super) hosts: [Host; 2],
    /// LLC messages of these queue pairs stay on their way.
    slow: Vec<Qpn>,
    /// RNICs acknowledge only much later: messages come sooner than what says that ours have.
    late_acknowledgements: bool,
    /// When a policy comes that protects the connections of the client.
    pub(super) policy_comes: Policy,
}

/// When IPsec begins to protect the connections of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Policy {
    Never,
    /// The Accept is on its way.
    WithAccept,
    /// It does already.
    InForce,
    /// Nobody can say from the time on when the Accept is on its way: the surroundings of the
    /// connection cannot be looked at.
    UnknownWithAccept,
    /// Nobody can say any more.
    Unknown,
}

pub(super) struct Host {
    pub(super) endpoint: Tested,
    /// Connections that were handed over, with their elements.
    pub(super) relayed: Vec<(ConnectionId, smcr_memory::Rmbe)>,
    /// Connections that were aborted.
    pub(super) aborted: Vec<ConnectionId>,
    activities: HashMap<LinkId, Arc<Activity>>,
    /// LLC messages that are on their way for long: the link, and the message.
    late: Vec<(LinkId, LlcBytes)>,
    /// How often the network was looked at, which is done for each answer to the peer.
    surveys: usize,
}

pub(super) const CLIENT: usize = 0;
pub(super) const SERVER_HOST: usize = 1;

impl Two {
    /// Two hosts with two RNICs each, and a connection that has joined them by two links.
    pub(super) fn joined() -> Self {
        let network = Network::new(1, Odds::CALM);
        let host = |number, side| Host {
            endpoint: endpoint_in(&network, (number, 2), side, |_| {}),
            relayed: Vec::new(),
            aborted: Vec::new(),
            activities: HashMap::new(),
            late: Vec::new(),
            surveys: 0,
        };
        let hosts = [host(9, Side::Client), host(2, Side::Server)];
        let mut two = Self {
            now: START,
            hosts,
            slow: Vec::new(),
            late_acknowledgements: false,
            policy_comes: Policy::Never,
        };
        two.call(1);
        assert_eq!(two.links().map(|links| links.len()), [2, 2]);
        assert_eq!(two.became_smc(), [1, 1]);
        two
    }

    /// An application connects to the client, and both hosts do what can be done without delay.
    pub(super) fn call(&mut self, index: u32) {
        self.hosts[CLIENT].endpoint.arrived(self.now, key(index), arrival(77));
        self.settle();
    }

    pub(super) fn wait(&mut self, time: Duration) {
        self.now = self.now + time;
        for host in &mut self.hosts {
            host.endpoint.handle_timeout(self.now);
        }
        self.settle();
    }

    /// Lets both hosts talk until neither has anything to say.
    pub(super) fn settle(&mut self) {
        self.hosts.iter_mut().for_each(|host| host.surveys = 0);
        while self.step(CLIENT) | self.step(SERVER_HOST) {}
    }

    /// Does what one host demands. Returns whether that was anything.
    fn step(&mut self, from: usize) -> bool {
        let mut moved = false;
        while let Some(effect) = self.hosts[from].endpoint.poll_effect(self.now) {
            self.act(from, effect);
            moved = true;
        }
        let commands = self.hosts[from].endpoint.groups_mut().pollers_mut();
        for command in std::mem::take(&mut commands.0) {
            match command {
                Command::AddLink { link, activity, .. } => {
                    self.hosts[from].activities.insert(link, activity);
                }
                Command::SendLlc { link, message } => self.carry(from, link, message),
                Command::RetireLink { .. }
                | Command::FailConnections { .. }
                | Command::FailLink { .. }
                | Command::MoveConnections { .. } => panic!("both links are well"),
                Command::Relay { connection, established, .. } => match *established {
                    Established::Smc { rmbe, .. } => {
                        self.hosts[from].relayed.push((connection, rmbe));
                    }
                    Established::Tcp { .. } => panic!("link groups relay no TCP"),
                },
                Command::Abort { connection } => {
                    self.hosts[from].aborted.push(connection);
                }
                Command::Forget { .. }
                | Command::NextStream { .. }
                | Command::CloseKept { .. }
                | Command::Stop => {}
            }
            moved = true;
        }
        moved
    }

    fn act(&mut self, from: usize, effect: Effect) {
        let host = &mut self.hosts[from];
        match effect {
            Effect::Survey { key } => {
                host.surveys += 1;
                assert!(host.surveys < 20, "it waits by asking again and again");
                let protected = from == CLIENT && self.policy_comes == Policy::InForce;
                let unknown = from == CLIENT && self.policy_comes == Policy::Unknown;
                let found = Surroundings { protected, ..surroundings() };
                host.endpoint.surveyed(key, if unknown { Surroundings::default() } else { found });
            }
            Effect::Unanswered { .. } => panic!("everybody answers"),
            Effect::Connect { key, .. } => {
                host.endpoint.connected(self.now, key);
                if from == CLIENT {
                    self.hosts[SERVER_HOST].endpoint.arrived(self.now, key, arrival(9));
                }
            }
            Effect::Send { key, frame } => {
                if matches!(frame, Frame::Accept(_)) {
                    self.policy_comes = match self.policy_comes {
                        Policy::WithAccept => Policy::InForce,
                        Policy::UnknownWithAccept => Policy::Unknown,
                        other @ (Policy::Never | Policy::InForce | Policy::Unknown) => other,
                    };
                }
                self.hosts[1 - from].endpoint.received(key, frame.encode().as_bytes());
            }
            Effect::HandOver { connection, rmbe, .. } => {
                host.endpoint.groups_mut().hand_over(connection, (), rmbe, None, false);
            }
            Effect::StayTcp { .. } => {}
            Effect::NextStream { .. } | Effect::Reset { .. } | Effect::Exhausted { .. } => {
                panic!("{effect:?}")
            }
        }
    }

    /// Brings a message to the other host, whose RNIC acknowledges it.
    fn carry(&mut self, from: usize, link: LinkId, message: LlcBytes) {
        let of = |host: &Host| -> Vec<_> {
            let groups = host.endpoint.groups().iter();
            let links = groups.flat_map(|(_, group)| &group.links);
            links.map(|link| (link.id, link.ours.qpn, link.theirs.map(|it| it.qpn))).collect()
        };
        let ours = of(&self.hosts[from]).into_iter().find(|(id, ..)| *id == link);
        let (_, qpn, _) = ours.expect("nobody has given the link up");
        if self.slow.contains(&qpn) {
            self.hosts[from].late.push((link, message));
            return;
        }
        let theirs = of(&self.hosts[1 - from]).into_iter().find(|(.., end)| *end == Some(qpn));
        let (there, ..) = theirs.expect("the other end of the link");
        if !self.late_acknowledgements {
            self.hosts[from].activities[&link].prove(self.now);
        }
        let unheard = Unheard::default();
        let report = Report::LlcReceived { link: there, message, unheard };
        assert!(self.hosts[1 - from].endpoint.reported(self.now, report).is_none());
    }

    /// The links of each host, by their queue pairs, oldest first.
    fn links(&self) -> [Vec<(LinkId, Qpn)>; 2] {
        self.hosts.each_ref().map(|host| {
            let (_, group) = host.endpoint.groups().iter().next().expect("a link group");
            group.links.iter().map(|link| (link.id, link.ours.qpn)).collect()
        })
    }

    pub(super) fn became_smc(&self) -> [u64; 2] {
        self.hosts.each_ref().map(|host| host.endpoint.counts().connections_smc)
    }

    /// The first link stops carrying LLC, but the server does not know that: it has just had an
    /// acknowledgement on it, and names it in the next Accept.
    fn slow_down_the_first_link(&mut self) {
        let ends = self.links().map(|links| links[0]);
        self.slow = ends.map(|(_, qpn)| qpn).to_vec();
        self.hosts[SERVER_HOST].activities[&ends[SERVER_HOST].0].prove(self.now);
    }
}

/// A server names one link, and the client asks both whether they work. The other one answers
/// first: the client goes on waiting, and sends its Confirm when the link that it is to use has
/// answered. It asked the links again, as fast as the other one answered, for half a second.
#[test]
fn the_proof_of_another_link_ends_no_wait() {
    let mut two = Two::joined();
    two.wait(Duration::from_secs(1));
    two.slow_down_the_first_link();
    two.call(2);
    assert_eq!(two.became_smc(), [1, 1], "the link has not answered");
    assert!(two.hosts[CLIENT].late.len() == 1 && two.hosts[CLIENT].surveys <= 2);
    two.slow.clear();
    for (link, message) in std::mem::take(&mut two.hosts[CLIENT].late) {
        two.carry(CLIENT, link, message);
    }
    two.settle();
    assert_eq!(two.became_smc(), [2, 2]);
}

/// A peer whose control thread is busy answers late, as after thousands of connections have ended
/// at once. Its RNIC has acknowledged the question, which is the proof; nobody says so.
#[test]
fn an_acknowledgement_is_proof_enough() {
    let mut two = Two::joined();
    two.wait(Duration::from_secs(1));
    two.slow_down_the_first_link();
    two.call(2);
    assert_eq!(two.became_smc(), [1, 1], "the link has not answered");
    let ends = two.links().map(|links| links[0]);
    two.hosts[CLIENT].activities[&ends[CLIENT].0].prove(two.now);
    two.wait(Duration::from_millis(60));
    assert_eq!(two.became_smc(), [2, 2]);
}

/// An RNIC acknowledges the answer and what came with it later than the answer is here. The answer
/// is proof enough, or the rendezvous would look for another one 50 ms later.
#[test]
fn an_answer_is_proof_enough() {
    let mut two = Two::joined();
    two.wait(Duration::from_secs(1));
    two.late_acknowledgements = true;
    two.call(2);
    assert_eq!(two.became_smc(), [2, 2]);
}

/// One of two paths does not carry RoCE, and it is the one that the server chooses. The other works
/// all the time, which says nothing about the first: connections stay TCP at once, and do not each
/// wait for a proof that does not come.
#[test]
fn the_proof_of_another_link_opens_no_path() {
    let mut two = Two::joined();
    two.wait(Duration::from_secs(1));
    two.slow_down_the_first_link();
    two.call(2);
    two.wait(Duration::from_millis(500));
    let client = &two.hosts[CLIENT].endpoint;
    assert_eq!(client.fallbacks()[&Diagnosis::NO_ROCE_PATH], 1);
    two.wait(Duration::from_millis(1_100));
    two.slow_down_the_first_link();
    two.call(3);
    assert_eq!(two.hosts[CLIENT].endpoint.len(), 1, "it tries the path");
    two.call(4);
    let client = &two.hosts[CLIENT].endpoint;
    assert_eq!((client.fallbacks()[&Diagnosis::NO_ROCE_PATH], client.len()), (2, 1));
    assert_eq!(two.became_smc(), [1, 1]);
}

/// After thousands of connections have come at once, a control thread comes back to one of them
/// only when the time for its proof is over. The proof had come in time: connections do not stay
/// TCP because nobody had looked.
#[test]
fn a_proof_counts_that_came_while_nobody_looked() {
    for busy in [CLIENT, SERVER_HOST] {
        let mut two = Two::joined();
        two.wait(Duration::from_secs(1));
        two.slow_down_the_first_link();
        if busy == SERVER_HOST {
            two.slow = two.links().concat().into_iter().map(|(_, qpn)| qpn).collect();
            two.wait(Duration::from_secs(1));
        }
        two.call(2);
        assert_eq!(two.became_smc(), [1, 1], "the link has not answered");
        let ends = two.links().map(|links| links[0]);
        let heard_at = two.now + Duration::from_millis(10);
        two.hosts[busy].activities[&ends[busy].0].prove(heard_at);
        two.slow.clear();
        two.wait(Duration::from_millis(700));
        assert_eq!(two.became_smc(), [2, 2], "host {busy}");
        let fallbacks = two.hosts.each_ref().map(|host| host.endpoint.fallbacks().len());
        assert_eq!(fallbacks, [0, 0]);
    }
}
