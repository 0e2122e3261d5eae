//! What gateways say to each other about links and rkeys, heard on the way: LLC arrives whole,
//! garbled or not at all.
//!
//! A network that keeps its contract does neither: a queue pair delivers or breaks. So this is a
//! peer that talks nonsense, or one that forgets to answer, without another implementation of it.
//! What is garbled are the four bytes that every message begins with, and where nothing but link
//! management is at stake any other: a peer that lies about addresses in its own memory hurts
//! itself, and no protocol could tell.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use smcgate::groups::{GroupId, PortId};
use smcr_engine::ConnectionId;
use smcr_proto::Qpn;
use smcr_proto::link_group::Role;
use smcr_proto::wire::cdc::is_cdc;
use smcr_proto::wire::llc::Llc;
use smcr_rnic::Message;
use smcr_rnic::dice::{Chance, Dice};
use smcr_rnic::sim::{Network, Parcel};

use super::reach::{Met, Talk};
use super::rendezvous::Hosts;

/// All LLC of a world.
pub(crate) struct Wire {
    line: Arc<Mutex<Line>>,
    /// Who hears what arrives on a queue pair.
    ears: BTreeMap<Qpn, (Group, Role)>,
    talks: BTreeMap<Group, Talk>,
    /// Groups whose messages were meddled with.
    touched: BTreeSet<Group>,
    /// Groups that lost messages which an RNIC had acknowledged.
    lossy: BTreeSet<Group>,
    /// Where connections are: of which group, at which poller.
    homes: BTreeMap<Connection, (Group, PortId)>,
    met: Met,
}

/// A link group, as its server calls it, and which host that is.
type Group = (usize, GroupId);
/// A connection, and which host calls it so.
type Connection = (usize, ConnectionId);

/// What happens on the way, and what was said.
struct Line {
    dice: Dice,
    noise: Chance,
    heard: Vec<Heard>,
    meddled: u64,
}

/// A message that arrived, or should have.
struct Heard {
    qpn: Qpn,
    fate: Fate,
    /// `None` if it makes no sense.
    llc: Option<Llc>,
}

/// What becomes of a message on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Arrives,
    Lost,
    Garbled,
}

impl Wire {
    /// Listens to a network, in silence so far.
    pub(crate) fn new(network: &Network, seed: u64) -> Self {
        // Dice of its own: what else happens under a seed does not depend on it.
        let dice = Dice::new(seed ^ 0x006c_6c63);
        let line = Line { dice, noise: Chance::NEVER, heard: Vec::new(), meddled: 0 };
        let line = Arc::new(Mutex::new(line));
        let ours = Arc::clone(&line);
        network.tap(move |parcel, messages| locked(&line).pass(parcel, messages));
        Self {
            line: ours,
            ears: BTreeMap::new(),
            talks: BTreeMap::new(),
            touched: BTreeSet::new(),
            lossy: BTreeSet::new(),
            homes: BTreeMap::new(),
            met: Met::default(),
        }
    }

    /// From now on so many messages are lost or garbled.
    pub(crate) fn make_noise(&self, noise: Chance) {
        locked(&self.line).noise = noise;
    }

    /// Messages that were lost or garbled.
    pub(crate) fn meddled(&self) -> u64 {
        locked(&self.line).meddled
    }

    /// What was met so far.
    pub(crate) fn met(&self) -> &Met {
        &self.met
    }

    /// Whether messages of the group of this connection were meddled with.
    pub(crate) fn is_touched(&self, host: usize, connection: ConnectionId) -> bool {
        self.homes.get(&(host, connection)).is_some_and(|(group, _)| self.touched.contains(group))
    }

    /// Whether the group of this connection lost messages which an RNIC had acknowledged.
    pub(crate) fn has_lost(&self, host: usize, connection: ConnectionId) -> bool {
        self.homes.get(&(host, connection)).is_some_and(|(group, _)| self.lossy.contains(group))
    }

    /// Notes whose queue pairs these are, which have lost messages since the last call.
    pub(crate) fn note_losses(&mut self, pairs: Vec<[Qpn; 2]>) {
        let groups = pairs.iter().flatten().filter_map(|end| self.ears.get(end));
        self.lossy.extend(groups.map(|(group, _)| *group));
    }

    /// Makes sense of what was said since the last call: who with whom, and about what.
    pub(crate) fn follow(&mut self, hosts: &Hosts) {
        for (index, host) in hosts.iter().enumerate() {
            for (id, group) in host.groups.iter().filter(|(_, group)| group.role == Role::Server) {
                for link in &group.links {
                    let theirs = link.theirs.map(|theirs| (theirs.qpn, Role::Client));
                    for (qpn, role) in theirs.into_iter().chain([(link.ours.qpn, Role::Server)]) {
                        self.ears.insert(qpn, ((index, id), role));
                    }
                }
            }
        }
        for (index, host) in hosts.iter().enumerate() {
            for (_, group) in host.groups.iter() {
                let mut ears = group.links.iter().filter_map(|link| self.ears.get(&link.ours.qpn));
                let Some((name, _)) = ears.next() else { continue };
                for (connection, member) in &group.members {
                    let home = self.homes.insert((index, *connection), (*name, member.port));
                    if home.is_some_and(|(_, port)| port != member.port) {
                        self.met.note("a connection changes pollers");
                    }
                }
            }
        }
        self.listen();
    }

    fn listen(&mut self) {
        let heard = std::mem::take(&mut locked(&self.line).heard);
        for Heard { qpn, fate, llc } in heard {
            let ear = self.ears.get(&qpn);
            match fate {
                Fate::Arrives => {
                    let (Some((group, hears)), Some(llc)) = (ear, llc) else { continue };
                    self.talks.entry(*group).or_default().hear(*hears, &llc, &mut self.met);
                }
                Fate::Lost => self.met.note("an LLC message is lost"),
                Fate::Garbled => self.met.note("an LLC message is garbled"),
            }
            if let Some((group, _)) = ear.filter(|_| fate != Fate::Arrives) {
                self.touched.insert(*group);
            }
        }
    }
}

impl Line {
    fn pass(&mut self, parcel: &Parcel, messages: &mut Vec<Message>) {
        messages.retain_mut(|message| {
            if is_cdc(message) {
                return true;
            }
            let llc = Llc::decode(message).ok();
            let fate = match self.dice.roll(self.noise) {
                false => Fate::Arrives,
                true if self.dice.roll(Chance::percent(50)) => Fate::Lost,
                true => Fate::Garbled,
            };
            if fate == Fate::Garbled {
                self.garble(message);
            }
            self.meddled += u64::from(fate != Fate::Arrives);
            self.heard.push(Heard { qpn: parcel.qpn, fate, llc });
            fate != Fate::Lost
        });
    }

    /// Flips one bit.
    fn garble(&mut self, message: &mut Message) {
        let len = if says_addresses(message) { HEADER_LEN } else { message.len() };
        let at = self.dice.index(len);
        message[at] ^= 1 << self.dice.below(8);
        // One bit does not make a CDC message of any other.
        assert!(!is_cdc(message));
    }
}

/// Whether a message tells where somebody may write, in either version.
fn says_addresses(message: &Message) -> bool {
    let [kind, ..] = message;
    [ADD_LINK_CONTINUATION, CONFIRM_RKEY, CONFIRM_RKEY_CONTINUATION].contains(&(kind & 0x0f))
}

fn locked(line: &Mutex<Line>) -> MutexGuard<'_, Line> {
    // A test that expects a panic goes on with the world afterwards.
    line.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What every message has: type, length and flags.
const HEADER_LEN: usize = 4;
const ADD_LINK_CONTINUATION: u8 = 3;
const CONFIRM_RKEY: u8 = 6;
const CONFIRM_RKEY_CONTINUATION: u8 = 8;
