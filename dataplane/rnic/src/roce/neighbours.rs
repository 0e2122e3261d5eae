//! Who has which Ethernet address: ARP for IPv4, neighbour discovery for IPv6. No I/O and no clock.
//!
//! A DPDK port has no kernel behind it that would know, and a packet socket is not told. We ask for
//! the address of a next hop when a packet for it comes. That packet is lost; the queue pair sends
//! it again. Where no kernel does it, we answer those who ask for our address.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use smcr_proto::{Instant, MacAddress};

use super::frame::{ETHERNET_LEN, IPV6, IPV6_LEN, checksum_over_ipv6};

/// An address of our own, and how to leave its network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Home {
    pub(super) mac: MacAddress,
    pub(super) address: IpAddr,
    /// How many of its bits its network has in common.
    pub(super) prefix: u8,
    /// The router to all other networks, if there is one.
    pub(super) gateway: Option<IpAddr>,
}

impl Home {
    /// Where packets to `target` go first; none if there is no way.
    pub(super) fn next_hop(&self, target: IpAddr) -> Option<IpAddr> {
        let shared = match (self.address, target) {
            (IpAddr::V4(own), IpAddr::V4(target)) => {
                (own.to_bits() ^ target.to_bits()).leading_zeros()
            }
            (IpAddr::V6(own), IpAddr::V6(target)) => {
                (own.to_bits() ^ target.to_bits()).leading_zeros()
            }
            _ => return None,
        };
        if shared >= u32::from(self.prefix) { Some(target) } else { self.gateway }
    }
}

/// What is known of the neighbours of one port.
#[derive(Debug)]
pub(super) struct Neighbours {
    home: Home,
    /// Whether to answer questions for our address, as nobody else does.
    answers: bool,
    known: HashMap<IpAddr, Known>,
    /// Whom we have asked for, and when.
    asked: HashMap<IpAddr, Instant>,
    /// Frames to send.
    outbox: VecDeque<Vec<u8>>,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    mac: MacAddress,
    since: Instant,
    /// Something says that it may have changed since.
    is_doubtful: bool,
}

impl Neighbours {
    pub(super) fn new(home: Home) -> Self {
        let (known, asked, outbox) = (HashMap::new(), HashMap::new(), VecDeque::new());
        Self { home, answers: true, known, asked, outbox }
    }

    /// The same, where the kernel answers questions for our address, for as long as it has it.
    pub(super) fn beside_kernel(home: Home) -> Self {
        Self { answers: false, ..Self::new(home) }
    }

    /// The Ethernet address to which packets for `target` go; none if it is not known, or not yet.
    pub(super) fn find(&mut self, now: Instant, target: IpAddr) -> Option<MacAddress> {
        let hop = self.home.next_hop(target)?;
        let known = self.known.get(&hop).copied();
        let is_fresh =
            known.is_some_and(|known| now.since(known.since) < FRESH && !known.is_doubtful);
        if !is_fresh {
            self.ask(now, hop);
        }
        // An old address serves until the answer comes, or for long enough to be wrong.
        known.filter(|known| now.since(known.since) < VALID).map(|known| known.mac)
    }

    /// Asks for the Ethernet address of `hop`, unless that was done a moment ago.
    fn ask(&mut self, now: Instant, hop: IpAddr) {
        if self.asked.get(&hop).is_some_and(|asked| now.since(*asked) < ASK_AGAIN) {
            return;
        }
        if self.asked.len() >= NEIGHBOURS_MAX {
            self.asked.retain(|_, asked| now.since(*asked) < ANSWER_WAIT);
        }
        // So many questions without an answer: this one waits for the next packet.
        if self.asked.len() >= NEIGHBOURS_MAX || self.outbox.len() >= OUTBOX_MAX {
            return;
        }
        self.asked.insert(hop, now);
        let question = match (self.home.address, hop) {
            (IpAddr::V4(own), IpAddr::V4(hop)) => {
                let asker = (self.home.mac, own);
                arp(REQUEST, (BROADCAST, NOBODY), asker, hop)
            }
            (IpAddr::V6(own), IpAddr::V6(hop)) => solicitation(self.home.mac, own, hop),
            _ => unreachable!("a next hop is of the family of our address"),
        };
        self.outbox.push_back(question);
    }

    /// Asks everybody again before long: behind a link that was down there may be somebody else.
    pub(super) fn doubt_all(&mut self) {
        self.known.values_mut().for_each(|known| known.is_doubtful = true);
    }

    /// Asks `sender` again before long if we know it under another Ethernet address than `mac`: it
    /// may have restarted. Until it answers, the old one serves: `mac` may be a lie.
    fn doubt_unless(&mut self, sender: IpAddr, mac: MacAddress) {
        if let Some(known) = self.known.get_mut(&sender) {
            known.is_doubtful |= known.mac != mac;
        }
    }

    /// The next frame to send.
    pub(super) fn poll_frame(&mut self) -> Option<Vec<u8>> {
        self.outbox.pop_front()
    }

    /// Handles a frame, if it is a question for our address, an answer to a question of ours, or
    /// what a neighbour tells everybody.
    pub(super) fn handle(&mut self, now: Instant, frame: &[u8]) {
        let news = match self.home.address {
            IpAddr::V4(own) => read_arp(frame, own),
            IpAddr::V6(own) => read_discovery(frame, own),
        };
        let Some(news) = news else { return };
        // Somebody who answers questions that nobody asked wants packets of others.
        let was_asked = self.asked.get(&news.sender).is_some_and(|a| now.since(*a) < ANSWER_WAIT);
        let is_valid = news.mac.0[0] & 1 == 0 && news.mac.0 != [0; 6];
        match news.kind {
            Kind::Question if is_valid => {
                self.doubt_unless(news.sender, news.mac);
                self.answer(news);
            }
            Kind::Probe => self.answer(news),
            Kind::Answer if is_valid && was_asked => {
                self.asked.remove(&news.sender);
                if self.known.len() >= NEIGHBOURS_MAX {
                    self.known.retain(|_, known| now.since(known.since) < FRESH);
                }
                if self.known.len() < NEIGHBOURS_MAX || self.known.contains_key(&news.sender) {
                    let known = Known { mac: news.mac, since: now, is_doubtful: false };
                    self.known.insert(news.sender, known);
                }
            }
            // An address that moves to another host or port is announced (RFC 5227 3, RFC 4861
            // 7.2.6).
            Kind::Answer if is_valid => self.doubt_unless(news.sender, news.mac),
            Kind::Question | Kind::Answer => {}
        }
    }

    /// Tells our Ethernet address to who has asked for it.
    fn answer(&mut self, question: News) {
        if !self.answers || self.outbox.len() >= OUTBOX_MAX {
            return;
        }
        let answer = match (self.home.address, question.sender) {
            (IpAddr::V4(own), IpAddr::V4(asker)) => {
                arp(REPLY, (question.mac, question.mac), (self.home.mac, own), asker)
            }
            (IpAddr::V6(own), IpAddr::V6(asker)) => {
                let own = (self.home.mac, own);
                match question.kind {
                    // It has no address yet to which an answer could go.
                    Kind::Probe => advertisement(own, ALL_NODES, [OVERRIDE, 0, 0, 0]),
                    Kind::Question | Kind::Answer => {
                        advertisement(own, (question.mac, asker), [SOLICITED | OVERRIDE, 0, 0, 0])
                    }
                }
            }
            _ => unreachable!("what was read is of the family of our address"),
        };
        self.outbox.push_back(answer);
    }
}

/// What a frame says about a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct News {
    kind: Kind,
    sender: IpAddr,
    mac: MacAddress,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The sender wants to know our Ethernet address.
    Question,
    /// The sender wants our address if nobody has it.
    Probe,
    /// The sender tells its own.
    Answer,
}

/// An ARP packet: `kind`, whom the frame goes to, whom it names as asked, who sends it and whose
/// address it is about.
fn arp(
    kind: u16,
    (to, named): (MacAddress, MacAddress),
    (mac, own): (MacAddress, Ipv4Addr),
    other: Ipv4Addr,
) -> Vec<u8> {
    let mut frame = Vec::with_capacity(FRAME_MIN);
    frame.extend(to.0);
    frame.extend(mac.0);
    frame.extend(ARP.to_be_bytes());
    frame.extend(ARP_HEADER);
    frame.extend(kind.to_be_bytes());
    frame.extend(mac.0);
    frame.extend(own.octets());
    frame.extend(named.0);
    frame.extend(other.octets());
    frame.resize(FRAME_MIN, 0);
    frame
}

fn read_arp(frame: &[u8], own: Ipv4Addr) -> Option<News> {
    let body = frame.get(ETHERNET_LEN..)?.first_chunk::<28>()?;
    if frame[12..14] != ARP.to_be_bytes() || body[..6] != ARP_HEADER {
        return None;
    }
    let (sender, about) = (&body[14..18], &body[24..]);
    let kind = match u16::from_be_bytes([body[6], body[7]]) {
        // Either kind may announce (RFC 5227 3).
        REQUEST | REPLY if sender == about && about != own.octets() => Kind::Answer,
        REQUEST if about == own.octets() => Kind::Question,
        REPLY if about == own.octets() => Kind::Answer,
        _ => return None,
    };
    let sender = Ipv4Addr::from(*sender.first_chunk::<4>()?);
    let mac = MacAddress(*body[8..].first_chunk::<6>()?);
    Some(News { kind, sender: sender.into(), mac })
}

/// Asks the neighbours for the Ethernet address of `hop`.
fn solicitation(mac: MacAddress, own: Ipv6Addr, hop: Ipv6Addr) -> Vec<u8> {
    discovery((mac, own), group_of(hop), SOLICITATION, [0; 4], (hop, SOURCE_OPTION))
}

/// The group of all whose addresses end like `address`, with its Ethernet address: where neighbours
/// ask for one of them (RFC 4291 2.7.1).
pub(super) fn group_of(address: Ipv6Addr) -> (MacAddress, Ipv6Addr) {
    let [.., a, b, c] = address.octets();
    let group = Ipv6Addr::from([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, a, b, c]);
    (MacAddress([0x33, 0x33, 0xff, a, b, c]), group)
}

/// Tells `to` our Ethernet address.
fn advertisement(
    own: (MacAddress, Ipv6Addr),
    to: (MacAddress, Ipv6Addr),
    flags: [u8; 4],
) -> Vec<u8> {
    discovery(own, to, ADVERTISEMENT, flags, (own.1, TARGET_OPTION))
}

fn discovery(
    (mac, own): (MacAddress, Ipv6Addr),
    (to, target): (MacAddress, Ipv6Addr),
    kind: u8,
    flags: [u8; 4],
    (about, option): (Ipv6Addr, u8),
) -> Vec<u8> {
    let mut body = vec![kind, 0, 0, 0];
    body.extend(flags);
    body.extend(about.octets());
    body.extend([option, 1]);
    body.extend(mac.0);
    let sum = checksum_over_ipv6(own, target, ICMPV6, (&body, &[]));
    body[2..4].copy_from_slice(&sum.to_be_bytes());
    let len = u16::try_from(body.len()).expect("it has 32 bytes");
    let mut frame = Vec::with_capacity(ETHERNET_LEN + IPV6_LEN + body.len());
    frame.extend(to.0);
    frame.extend(mac.0);
    frame.extend(IPV6.to_be_bytes());
    frame.extend([0x60, 0, 0, 0]);
    frame.extend(len.to_be_bytes());
    frame.extend([ICMPV6, NEIGHBOUR_HOPS]);
    frame.extend(own.octets());
    frame.extend(target.octets());
    frame.extend(body);
    frame
}

fn read_discovery(frame: &[u8], own: Ipv6Addr) -> Option<News> {
    let ip = frame.get(ETHERNET_LEN..)?.first_chunk::<IPV6_LEN>()?;
    let body = frame.get(ETHERNET_LEN + IPV6_LEN..)?;
    let body = body.get(..usize::from(u16::from_be_bytes([ip[4], ip[5]])))?;
    // The largest number of hops shows that no router has forwarded it.
    let is_near = ip[6..8] == [ICMPV6, NEIGHBOUR_HOPS];
    if frame[12..14] != IPV6.to_be_bytes() || !is_near || body.len() < 24 || body[1] != 0 {
        return None;
    }
    let source = Ipv6Addr::from(*ip[8..].first_chunk::<16>()?);
    let target = Ipv6Addr::from(*ip[24..].first_chunk::<16>()?);
    let about = Ipv6Addr::from(*body[8..].first_chunk::<16>()?);
    // Over the sum itself, a right one leaves nothing.
    if checksum_over_ipv6(source, target, ICMPV6, (body, &[])) != 0 {
        return None;
    }
    let option = |wanted: u8| -> Option<MacAddress> {
        let (kind, mac) = (body.get(24..26)?, body.get(26..)?.first_chunk::<6>()?);
        (*kind == [wanted, 1]).then_some(MacAddress(*mac))
    };
    match body[0] {
        // Who probes has no address, so it names no Ethernet address either (RFC 4861 7.1.1).
        SOLICITATION if about == own && source.is_unspecified() => {
            let is_valid = target.is_multicast() && option(SOURCE_OPTION).is_none();
            is_valid.then_some(News { kind: Kind::Probe, sender: source.into(), mac: NOBODY })
        }
        SOLICITATION if about == own => {
            let mac = option(SOURCE_OPTION)?;
            Some(News { kind: Kind::Question, sender: source.into(), mac })
        }
        ADVERTISEMENT => {
            let mac = option(TARGET_OPTION)?;
            Some(News { kind: Kind::Answer, sender: about.into(), mac })
        }
        _ => None,
    }
}

/// The most neighbours that are known, and the most that are asked for.
const NEIGHBOURS_MAX: usize = 4096;
/// The most frames that wait to be sent.
const OUTBOX_MAX: usize = 64;
/// How long an address is used without asking again.
const FRESH: Duration = Duration::from_secs(30);
/// How long an address is used while nobody answers.
const VALID: Duration = Duration::from_secs(60);
/// How long to wait before the same question.
const ASK_AGAIN: Duration = Duration::from_millis(200);
/// How long an answer is believed to be one.
const ANSWER_WAIT: Duration = Duration::from_secs(3);

/// The shortest frame, without its checksum.
const FRAME_MIN: usize = 60;
const BROADCAST: MacAddress = MacAddress([0xff; 6]);
const NOBODY: MacAddress = MacAddress([0; 6]);
const ARP: u16 = 0x0806;
/// Ethernet and IPv4, and the lengths of their addresses.
const ARP_HEADER: [u8; 6] = [0, 1, 8, 0, 6, 4];
const REQUEST: u16 = 1;
const REPLY: u16 = 2;
const ICMPV6: u8 = 58;
const NEIGHBOUR_HOPS: u8 = 255;
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
/// In the first byte of the flags: it answers a question of its receiver.
const SOLICITED: u8 = 0x40;
/// In the first byte of the flags: it replaces what was known.
const OVERRIDE: u8 = 0x20;
/// Everybody on the link: whom a neighbour tells that it has another Ethernet address.
const ALL_NODES: (MacAddress, Ipv6Addr) =
    (MacAddress([0x33, 0x33, 0, 0, 0, 1]), Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1));
const SOURCE_OPTION: u8 = 1;
const TARGET_OPTION: u8 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    fn home(number: u8, address: &str) -> Home {
        let mac = MacAddress([2, 0, 0, 0, 0, number]);
        let gateway = Some(address.parse().unwrap());
        let prefix = if address.contains(':') { 64 } else { 24 };
        Home { mac, address: address.parse().unwrap(), prefix, gateway }
    }

    fn at(milliseconds: u64) -> Instant {
        Instant::default() + Duration::from_millis(milliseconds)
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// Two neighbours find each other, over IPv4 and over IPv6.
    #[test]
    fn a_question_is_answered_and_the_answer_is_kept() {
        for (here, there) in [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2")] {
            let mut a = Neighbours::new(home(1, here));
            let mut b = Neighbours::new(home(2, there));
            assert_eq!(a.find(at(0), ip(there)), None);
            assert_eq!(a.find(at(1), ip(there)), None);
            let question = a.poll_frame().expect("it asks");
            assert_eq!(a.poll_frame(), None, "once");
            b.handle(at(2), &question);
            let answer = b.poll_frame().expect("it answers");
            assert_eq!(answer[..6], [2, 0, 0, 0, 0, 1], "only to who asked");
            // A frame may be longer than what it carries.
            a.handle(at(3), &[&answer[..], &[0; 4]].concat());
            assert_eq!(a.find(at(4), ip(there)), Some(MacAddress([2, 0, 0, 0, 0, 2])));
            assert_eq!((a.poll_frame(), b.poll_frame()), (None, None));
            // Later it asks again, and uses what it knows until that is too old.
            assert!(a.find(at(31_000), ip(there)).is_some() && a.poll_frame().is_some());
            assert_eq!(a.find(at(61_000), ip(there)), None);
        }
    }

    /// The kernel knows whether the address is still there. If we answered when it has moved to
    /// another host, two hosts would have it.
    #[test]
    fn questions_are_left_to_the_kernel_where_there_is_one() {
        for (here, there) in [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2")] {
            let mut a = Neighbours::new(home(1, here));
            let mut b = Neighbours::beside_kernel(home(2, there));
            assert_eq!(a.find(at(0), ip(there)), None);
            b.handle(at(0), &a.poll_frame().unwrap());
            assert_eq!(b.poll_frame(), None);
            assert_eq!(b.find(at(0), ip(here)), None);
            a.handle(at(0), &b.poll_frame().expect("it asks"));
            b.handle(at(0), &a.poll_frame().expect("who has no kernel answers"));
            assert!(b.find(at(0), ip(here)).is_some());
        }
    }

    #[test]
    fn a_lost_question_is_asked_again() {
        let mut a = Neighbours::new(home(1, "10.0.0.1"));
        for time in [0, 200, 400] {
            assert_eq!(a.find(at(time), ip("10.0.0.2")), None);
            assert!(a.poll_frame().is_some());
            assert_eq!(a.find(at(time + 199), ip("10.0.0.2")), None);
            assert!(a.poll_frame().is_none());
        }
    }

    #[test]
    fn nobody_is_believed_who_was_not_asked() {
        for (here, there) in [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2")] {
            let mut a = Neighbours::new(home(1, here));
            let mut b = Neighbours::new(home(2, there));
            assert_eq!(a.find(at(0), ip(there)), None);
            b.handle(at(0), &a.poll_frame().unwrap());
            let answer = b.poll_frame().unwrap();
            let mut other = Neighbours::new(home(1, here));
            other.handle(at(0), &answer);
            other.find(at(0), ip(there));
            assert_eq!(other.known.len(), 0);
            a.handle(at(3_000), &answer);
            assert_eq!(a.known.len(), 0, "that late it is no answer");
        }
    }

    #[test]
    fn what_is_damaged_or_for_others_is_ignored() {
        for (here, there, stranger) in
            [("10.0.0.1", "10.0.0.2", "10.0.0.3"), ("fd00::1", "fd00::2", "fd00::3")]
        {
            let mut a = Neighbours::new(home(1, here));
            let mut b = Neighbours::new(home(2, there));
            a.find(at(0), ip(stranger));
            b.handle(at(0), &a.poll_frame().unwrap());
            assert_eq!(b.poll_frame(), None, "another one is asked for");
            a.find(at(0), ip(there));
            let question = a.poll_frame().unwrap();
            for len in 0..42 {
                b.handle(at(0), &question[..len]);
            }
            assert_eq!(b.poll_frame(), None);
        }
        let mut a = Neighbours::new(home(1, "fd00::1"));
        let mut b = Neighbours::new(home(2, "fd00::2"));
        a.find(at(0), ip("fd00::2"));
        let question = a.poll_frame().unwrap();
        for at_byte in ETHERNET_LEN + 6..question.len() {
            let mut damaged = question.clone();
            damaged[at_byte] ^= 1;
            b.handle(at(0), &damaged);
            assert_eq!(b.poll_frame(), None, "byte {at_byte}");
        }
    }

    #[test]
    fn other_networks_are_behind_the_router() {
        let home = Home { gateway: Some(ip("10.0.0.9")), ..home(1, "10.0.0.1") };
        assert_eq!(home.next_hop(ip("10.0.0.200")), Some(ip("10.0.0.200")));
        assert_eq!(home.next_hop(ip("10.0.1.1")), Some(ip("10.0.0.9")));
        assert_eq!(Home { gateway: None, ..home }.next_hop(ip("10.0.1.1")), None);
        assert_eq!(
            Home { gateway: None, prefix: 0, ..home }.next_hop(ip("8.8.8.8")),
            Some(ip("8.8.8.8"))
        );
        assert_eq!(home.next_hop(ip("fd00::1")), None);
    }

    /// `a`, which knows `there` as the one with Ethernet address 2.
    fn acquainted(here: &str, there: &str) -> Neighbours {
        let (mut a, mut b) = (Neighbours::new(home(1, here)), Neighbours::new(home(2, there)));
        assert_eq!(a.find(at(0), ip(there)), None);
        b.handle(at(0), &a.poll_frame().expect("it asks"));
        a.handle(at(0), &b.poll_frame().expect("it answers"));
        assert_eq!(a.find(at(1), ip(there)), Some(MacAddress([2, 0, 0, 0, 0, 2])));
        a
    }

    /// A peer that restarts may have another Ethernet address, and asks for ours before it sends.
    /// We answered, and went on to send to its old address for half a minute. What its question
    /// says is no proof, though: only an answer to a question of ours is believed.
    #[test]
    fn a_neighbour_that_asks_from_another_ethernet_address_is_asked_for_it() {
        for (here, there) in [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2")] {
            for really in [3, 2] {
                let mut a = acquainted(here, there);
                let mut newcomer = Neighbours::new(home(3, there));
                assert_eq!(newcomer.find(at(1_000), ip(here)), None);
                a.handle(at(1_000), &newcomer.poll_frame().unwrap());
                assert_eq!(a.poll_frame().expect("it answers")[..6], [2, 0, 0, 0, 0, 3]);
                let old = Some(MacAddress([2, 0, 0, 0, 0, 2]));
                assert_eq!(a.find(at(1_001), ip(there)), old, "it may be a lie");
                let question = a.poll_frame().expect("it asks at once");
                let mut owner = Neighbours::new(home(really, there));
                owner.handle(at(1_002), &question);
                a.handle(at(1_002), &owner.poll_frame().unwrap());
                let now = Some(MacAddress([2, 0, 0, 0, 0, really]));
                assert_eq!(a.find(at(1_003), ip(there)), now);
                assert_eq!(a.poll_frame(), None, "it knows again");
            }
        }
    }

    /// An address moves to another host or port without a question, as bonds and routers with a
    /// shared address do: that is announced to all. We went on to send to the old one for half a
    /// minute. An announcement is no proof either.
    #[test]
    fn a_neighbour_that_announces_another_ethernet_address_is_asked_for_it() {
        let mac = MacAddress([2, 0, 0, 0, 0, 3]);
        let (v4, v6) = (Ipv4Addr::new(10, 0, 0, 2), "fd00::2".parse().unwrap());
        let unsolicited = discovery(
            (mac, v6),
            ALL_NODES,
            ADVERTISEMENT,
            [OVERRIDE, 0, 0, 0],
            (v6, TARGET_OPTION),
        );
        for (here, there, announcement) in [
            ("10.0.0.1", "10.0.0.2", arp(REQUEST, (BROADCAST, NOBODY), (mac, v4), v4)),
            ("10.0.0.1", "10.0.0.2", arp(REPLY, (BROADCAST, BROADCAST), (mac, v4), v4)),
            ("fd00::1", "fd00::2", unsolicited),
        ] {
            let mut a = acquainted(here, there);
            a.handle(at(1_000), &announcement);
            assert_eq!(a.poll_frame(), None, "nothing was asked");
            let old = Some(MacAddress([2, 0, 0, 0, 0, 2]));
            assert_eq!(a.find(at(1_001), ip(there)), old, "it may be a lie");
            let question = a.poll_frame().expect("it asks at once");
            let mut newcomer = Neighbours::new(home(3, there));
            newcomer.handle(at(1_002), &question);
            a.handle(at(1_002), &newcomer.poll_frame().unwrap());
            assert_eq!(a.find(at(1_003), ip(there)), Some(mac));
            let mut stranger = Neighbours::new(home(1, here));
            stranger.handle(at(0), &announcement);
            assert_eq!(stranger.known.len(), 0, "whom nobody has looked for");
        }
    }

    /// Behind a link that was down there may be somebody else.
    #[test]
    fn after_the_link_was_down_everybody_is_asked_again() {
        let mut a = acquainted("10.0.0.1", "10.0.0.2");
        a.doubt_all();
        assert!(a.find(at(1_000), ip("10.0.0.2")).is_some() && a.poll_frame().is_some());
        let mut restarted = Neighbours::new(home(3, "10.0.0.2"));
        assert_eq!(a.find(at(1_200), ip("10.0.0.2")), Some(MacAddress([2, 0, 0, 0, 0, 2])));
        restarted.handle(at(1_200), &a.poll_frame().expect("nobody has answered"));
        a.handle(at(1_200), &restarted.poll_frame().unwrap());
        assert_eq!(a.find(at(1_201), ip("10.0.0.2")), Some(MacAddress([2, 0, 0, 0, 0, 3])));
    }

    /// The probe of a host that wants to know whether its new address is free, with these options.
    fn probe(address: &str, options: &[u8]) -> Vec<u8> {
        let address: Ipv6Addr = address.parse().unwrap();
        let [.., a, b, c] = address.octets();
        let group = Ipv6Addr::from([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, a, b, c]);
        let mut body = vec![SOLICITATION, 0, 0, 0, 0, 0, 0, 0];
        body.extend(address.octets());
        body.extend(options);
        let source = Ipv6Addr::UNSPECIFIED;
        let sum = checksum_over_ipv6(source, group, ICMPV6, (&body, &[]));
        body[2..4].copy_from_slice(&sum.to_be_bytes());
        let mut frame = vec![0x33, 0x33, 0xff, a, b, c, 2, 0, 0, 0, 0, 9, 0x86, 0xdd];
        frame.extend([0x60, 0, 0, 0, 0, u8::try_from(body.len()).unwrap(), ICMPV6, 255]);
        frame.extend([source.octets(), group.octets()].concat());
        frame.extend(body);
        frame
    }

    /// Another host took our address as its own: it probed whether somebody has it, and we said
    /// nothing. It has no address yet, so the answer goes to all (RFC 4861 7.2.4).
    #[test]
    fn who_wants_our_address_learns_that_it_is_taken() {
        // Linux adds a nonce.
        for options in [&[][..], &[14, 1, 1, 2, 3, 4, 5, 6]] {
            let mut a = Neighbours::new(home(1, "fd00::1"));
            a.handle(at(0), &probe("fd00::1", options));
            let answer = a.poll_frame().expect("it answers");
            assert_eq!(answer[..6], [0x33, 0x33, 0, 0, 0, 1]);
            let target = Ipv6Addr::from(*answer[38..].first_chunk::<16>().unwrap());
            assert_eq!(target, Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1));
            assert_eq!(answer[58], 0x20, "nobody with an address has asked: it is no answer");
            let news = read_discovery(&answer, "fd00::9".parse().unwrap()).expect("it is valid");
            assert_eq!((news.kind, news.sender), (Kind::Answer, ip("fd00::1")));
            a.handle(at(0), &probe("fd00::2", options));
            assert_eq!(a.poll_frame(), None, "another address");
        }
        let mut a = Neighbours::new(home(1, "fd00::1"));
        a.handle(at(0), &probe("fd00::1", &[SOURCE_OPTION, 1, 2, 0, 0, 0, 0, 9]));
        assert_eq!(a.poll_frame(), None, "who has no address names none");
        let mut beside = Neighbours::beside_kernel(home(1, "fd00::1"));
        beside.handle(at(0), &probe("fd00::1", &[]));
        assert_eq!(beside.poll_frame(), None, "the kernel does it");
    }

    #[test]
    fn memory_is_bounded() {
        let mut a = Neighbours::new(Home { prefix: 0, ..home(1, "10.0.0.1") });
        for number in 0..10_000_u32 {
            a.find(at(0), Ipv4Addr::from_bits(number).into());
            let _: Option<Vec<u8>> = a.poll_frame();
        }
        assert_eq!(a.asked.len(), NEIGHBOURS_MAX);
        // Questions that nobody answered make room.
        a.find(at(4_000), ip("10.0.0.2"));
        assert!(a.asked.len() == 1 && a.poll_frame().is_some());
        for number in 0..100 {
            a.find(at(5_000), Ipv4Addr::from_bits(number).into());
        }
        assert_eq!(a.outbox.len(), OUTBOX_MAX);
    }
}
