//! A hostile host on the network of RNICs: what it says and writes must not touch what others do.
//!
//! It has an RNIC and queue pairs of its own, which lead to whoever accepts them. On those it
//! forges CDC and LLC messages and writes to memory that was offered to others. The worst is
//! assumed: it knows all tokens, keys, addresses and queue pairs. How it came by its links is not
//! told here.

use smcgate::groups::{Groups, Pollers, QpOf};
use smcr_memory::{Region, SendPool};
use smcr_proto::wire::cdc::{Cdc, Cursor, is_cdc};
use smcr_proto::wire::clc::Offer;
use smcr_proto::wire::llc::{
    AddLink, ConfirmLink, ConfirmRkey, DeleteLink, DeleteReason, DeleteRkey, Llc, RkeyOnLink,
    TestLink,
};
use smcr_proto::{
    AlertToken, Gid, Instant, LinkNumber, LinkUserId, MacAddress, Mtu, PeerId, Rkey, RmbeSize,
};
use smcr_rnic::dice::{Chance, Dice};
use smcr_rnic::sim::{self, Network};
use smcr_rnic::{
    Completion, Domain, Fabric as _, Message, Messages, Opening as _, Port, QpAddress, QpId, Rnic,
    Status, Tag, Work,
};

/// The hostile host.
pub(crate) struct Rogue {
    pub(crate) dice: Dice,
    rnic: sim::Rnic,
    fabric: sim::Fabric,
    domain: Domain,
    pool: SendPool,
    links: Vec<Link>,
    pub(crate) attempts: Attempts,
}

/// A queue pair that leads to a host.
struct Link {
    qp: QpId,
    /// Which host.
    host: usize,
    ours: QpAddress,
    /// Whether SMC-Rv2 is spoken on it.
    v2: bool,
}

/// What arrived of what it has tried.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Attempts {
    /// CDC messages that were acknowledged.
    pub(crate) cdc: u64,
    /// LLC messages that were acknowledged.
    pub(crate) llc: u64,
    /// Writes that were refused.
    pub(crate) refused: u64,
    /// Writes that were acknowledged: none may be.
    pub(crate) written: u64,
}

/// What it knows of other hosts, by host.
#[derive(Default)]
pub(crate) struct Known {
    /// The elements and queue pairs that the peers of this host offered to it.
    pub(crate) offers: [Vec<Offer>; 2],
    /// The tokens of connections of this host.
    pub(crate) tokens: [Vec<AlertToken>; 2],
}

impl Known {
    /// Everything there is to know of the link groups of these hosts but those with the rogue.
    pub(crate) fn of<N: Rnic, P: Pollers<QpOf<N>>>(hosts: [&Groups<N, P>; 2]) -> Self {
        let mut known = Self::default();
        for (host, groups) in hosts.into_iter().enumerate() {
            let leads_here = |link: &smcgate::groups::Link<N::Opening>| {
                link.theirs.is_some_and(|theirs| theirs.gid == GID)
            };
            let others = groups.iter().filter(|(_, group)| !group.links.iter().any(leads_here));
            for (token, member) in others.flat_map(|(_, group)| &group.members) {
                known.tokens[host].push(token.token());
                known.offers[host].extend(member.peer);
            }
        }
        known
    }
}

impl Rogue {
    pub(crate) fn new(seed: u64, network: &Network) -> Self {
        let (mut rnic, fabric) = network.rnic(Port { gid: GID, mac: MAC, mtu: Mtu::B1024 });
        let region = Region::new(POOL_BYTES as usize).expect("a little memory");
        rnic.send_from(&region).expect("nothing is exhausted yet");
        let domain = rnic.open_domain().expect("nothing is exhausted yet");
        Self {
            dice: Dice::new(seed ^ 0x726f_6775),
            rnic,
            fabric,
            domain,
            pool: SendPool::new(region, POOL_BYTES),
            links: Vec::new(),
            attempts: Attempts::default(),
        }
    }

    /// A queue pair that must still learn its peer.
    pub(crate) fn open(&mut self) -> Option<sim::Opening> {
        self.rnic.open_for(self.domain, Messages::Long).ok()
    }

    /// An element that nobody will write, in the name of `id`, by this queue pair.
    pub(crate) fn offer(&mut self, id: PeerId, opening: &sim::Opening) -> Offer {
        let QpAddress { gid, mac, qpn, psn, mtu } = opening.address();
        Offer {
            first_contact: true,
            peer_id: id,
            gid,
            mac,
            qpn,
            rkey: Rkey(self.word()),
            rmbe_index: 1,
            alert_token: AlertToken(self.word()),
            rmbe_size: SIZE,
            mtu,
            rmb_address: 0,
            psn,
        }
    }

    /// Connects a queue pair to the one that `host` has offered.
    pub(crate) fn connect(
        &mut self,
        now: Instant,
        (host, v2): (usize, bool),
        opening: sim::Opening,
        theirs: &Offer,
    ) {
        let Offer { gid, mac, qpn, psn, mtu, .. } = *theirs;
        let ours = opening.address();
        if let Ok(qp) = opening.connect(QpAddress { gid, mac, qpn, psn, mtu }) {
            let qp = self.fabric.adopt(now, qp);
            self.links.push(Link { qp, host, ours, v2 });
        }
    }

    /// Does something that it should not on one of its links, if it has any.
    pub(crate) fn forge(&mut self, known: &Known) {
        if self.links.is_empty() {
            return;
        }
        let link = self.dice.index(self.links.len());
        match self.dice.below(100) {
            0 => self.write(link, known),
            1..=10 => self.forge_llc(link, known),
            _ => self.forge_cdc(link, known),
        }
    }

    /// Takes in what its queue pairs brought. Returns whether there was anything.
    pub(crate) fn turn(&mut self, now: Instant) -> bool {
        let mut completions = Vec::with_capacity(64);
        self.fabric.poll(now, &mut completions);
        let moved = !completions.is_empty();
        for completion in completions {
            match completion {
                Completion::Received { qp, message } => self.hear(qp, message),
                Completion::Wrote { lease, status, .. } => {
                    self.pool.take_back(lease);
                    match status {
                        Status::Done => self.attempts.written += 1,
                        Status::Flushed => self.attempts.refused += 1,
                    }
                }
                Completion::Sent { tag, status, .. } => {
                    self.attempts.cdc += u64::from(tag == OF_CDC && status == Status::Done);
                    self.attempts.llc += u64::from(tag == OF_LLC && status == Status::Done);
                }
                Completion::ReceivedLong { .. } => {}
                Completion::Broke { qp, .. } => {
                    self.links.retain(|link| link.qp != qp);
                    self.fabric.release(now, qp);
                }
            }
        }
        self.fabric.transmit(now);
        moved
    }

    /// Answers what a first contact waits for; the layout is the same in both versions.
    fn hear(&mut self, qp: QpId, mut message: Message) {
        let is_request = message[0] & 0x0f == CONFIRM_LINK && message[3] & REPLY == 0;
        let Some(link) = self.links.iter().find(|link| link.qp == qp) else { return };
        if is_cdc(&message) || !is_request {
            return;
        }
        let [_, qpn @ ..] = link.ours.qpn.0.to_be_bytes();
        message[3] |= REPLY;
        message[4..10].copy_from_slice(&link.ours.mac.0);
        message[10..26].copy_from_slice(&link.ours.gid.0);
        message[26..29].copy_from_slice(&qpn);
        self.send(qp, message, OF_LLC);
    }

    /// Sends a message, if the queue pair takes one.
    fn send(&mut self, qp: QpId, message: Message, tag: Tag) {
        if self.fabric.room(qp) > 0 {
            self.fabric.post(qp, &mut vec![Work::Send { message, tag }]);
        }
    }

    /// From now on it has no links.
    pub(crate) fn depart(&mut self, now: Instant) {
        for Link { qp, .. } in self.links.drain(..) {
            self.fabric.release(now, qp);
        }
    }

    fn word(&mut self) -> u32 {
        u32::try_from(self.dice.below(1 << 32)).expect("32 bits")
    }

    pub(crate) fn any_of<T: Copy>(&mut self, all: &[T]) -> Option<T> {
        (!all.is_empty()).then(|| all[self.dice.index(all.len())])
    }

    /// Says something about a connection of somebody else.
    fn forge_cdc(&mut self, link: usize, known: &Known) {
        let Link { qp, host, .. } = self.links[link];
        let live = self.any_of(&known.tokens[host]);
        let guessed = AlertToken(self.word() & TOKENS_MASK);
        let token = live.filter(|_| !self.dice.roll(Chance::percent(10))).unwrap_or(guessed);
        let dice = &mut self.dice;
        let sequence = u16::try_from(dice.below(1 << 16)).expect("16 bits");
        let sequence = [1, 2, 3, sequence][dice.index(4)];
        let mut cursor = || Cursor {
            wrap: u16::try_from(dice.below(3)).expect("few laps"),
            count: u32::try_from(dice.below(16 * 1024)).expect("a small element"),
        };
        let (producer, consumer) = (cursor(), cursor());
        let mut often = || dice.roll(Chance::percent(20));
        let cdc = Cdc {
            token,
            sequence,
            producer,
            consumer,
            abnormal_close: often(),
            sending_done: often(),
            connection_closed: often(),
            failover_validation: often(),
            urgent_pending: often(),
            urgent_present: often(),
            writer_blocked: often(),
            odd_stream: often(),
            keeps: often(),
            ..Cdc::default()
        };
        self.send(qp, cdc.encode(), OF_CDC);
    }

    /// Says something about links and keys, which may be those of others.
    fn forge_llc(&mut self, link: usize, known: &Known) {
        let Link { qp, v2, .. } = self.links[link];
        let host = self.dice.index(2);
        let Some(known) = self.any_of(&known.offers[host]) else { return };
        let reply = self.dice.roll(Chance::percent(30));
        let link = LinkNumber(u8::try_from(self.dice.below(5)).expect("few"));
        let Offer { mac, gid, qpn, rkey, rmb_address: address, mtu, psn, .. } = known;
        let on_link = RkeyOnLink { link, rkey, address };
        let message = match self.dice.below(6) {
            0 => Llc::TestLink(TestLink { reply, user_data: [6; 16] }),
            1 => Llc::DeleteLink(DeleteLink {
                reply,
                all: self.dice.roll(Chance::percent(50)),
                orderly: self.dice.roll(Chance::percent(50)),
                link,
                reason: DeleteReason::OPERATOR,
            }),
            2 => Llc::AddLink(AddLink {
                reply,
                rejected: self.dice.roll(Chance::percent(50)),
                reason: 0,
                mac,
                gid,
                qpn,
                link,
                mtu,
                psn,
            }),
            3 => Llc::ConfirmRkey(ConfirmRkey {
                reply,
                negative: self.dice.roll(Chance::percent(30)),
                retry: false,
                other_links: 1,
                rkey,
                address,
                others: [on_link; 2],
            }),
            4 => Llc::DeleteRkey(DeleteRkey {
                reply,
                negative: false,
                count: 1,
                error_mask: 0,
                rkeys: [rkey; 8],
            }),
            _ => Llc::ConfirmLink(ConfirmLink {
                reply,
                no_eyecatcher: true,
                mac,
                gid,
                qpn,
                link,
                user_id: LinkUserId(6),
                max_links: 2,
            }),
        };
        let mut message = message.encode();
        if v2 {
            // Types of version 2 have it in their high half, and lengths have two bytes.
            message[0] |= 0x20;
        }
        self.send(qp, message, OF_LLC);
    }

    /// Writes to memory that a host offered to somebody else. That costs the rogue its link.
    fn write(&mut self, link: usize, known: &Known) {
        let Link { qp, host, .. } = self.links[link];
        // The elements of `host` are in the offers that the other host has got.
        let Some(known) = self.any_of(&known.offers[1 - host]) else { return };
        let address = known.rmbe_address();
        let rkey = match self.dice.below(3) {
            0 => Rkey(self.word()),
            _ => known.rkey,
        };
        if self.fabric.room(qp) == 0 {
            return;
        }
        let filled = self.pool.fill(WRITE_BYTES, |room| {
            room.copy_in(&vec![0x66; room.len()]);
            Ok::<_, ()>(room.len())
        });
        let Some(Ok(Some(lease))) = filled else { return };
        self.fabric.post(qp, &mut vec![Work::Write { lease, rkey, address, tag: OF_CDC }]);
    }
}

/// Where it is.
pub(crate) const GID: Gid = Gid::from_ipv4([10, 66, 0, 66]);
pub(crate) const MAC: MacAddress = MacAddress([2, 6, 6, 6, 6, 6]);
/// The size of the elements that it offers.
pub(crate) const SIZE: RmbeSize = RmbeSize::from_notation(0);
const POOL_BYTES: u32 = 65_536;
const WRITE_BYTES: u32 = 100;
/// Tokens that it tries unseen.
const TOKENS_MASK: u32 = (1 << 20) - 1;
const OF_CDC: Tag = Tag(1);
const OF_LLC: Tag = Tag(2);
/// What is alike in both versions of CONFIRM LINK: its type, and the flag of a reply.
const CONFIRM_LINK: u8 = 1;
const REPLY: u8 = 0x80;
