//! A host that speaks SMC-R by hand. It has an RNIC, a link group and a queue pair of its own, and
//! says over them whatever a test tells it to say.

use std::io::{Read, Write};
use std::net::{SocketAddrV4, TcpStream};
use std::time::Duration;

use smcr_engine::clock::Clock;
use smcr_memory::{Region, Rmb};
use smcr_proto::handshake::{Agreement, AgreementV2, Client, ClientAction, PolicyV2};
use smcr_proto::link::Keepalive;
use smcr_proto::link_group::{Action, LinkGroup, Setup, UNNUMBERED, Version};
use smcr_proto::wire::cdc::{self, Cdc};
use smcr_proto::wire::clc::proposal::Ipv4Subnet;
use smcr_proto::wire::clc::v2::{Eid, Eids, Gids, HostName, RELEASE};
use smcr_proto::wire::clc::{Frame, Framer, Offer, Proposal};
use smcr_proto::wire::llc::{LEN, v2};
use smcr_proto::{AlertToken, LinkNumber, LinkUserId, PeerId, RmbeSize};
use smcr_rnic::roce::udp::{self, Config, Place, Udp};
use smcr_rnic::roce::{Fabric, Rnic};
use smcr_rnic::{Completion, Fabric as _, Messages, Opening, QpAddress, QpError, QpId};
use smcr_rnic::{Rnic as _, Tag, Work};

use crate::clock::Deadline;
use crate::hosts::{Host, set_limit};

/// How long any answer may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// Sends what stands in `proposal` from `host`, and returns what is answered.
pub(crate) fn propose(host: &Host, at: SocketAddrV4, proposal: &[u8]) -> (TcpStream, Frame) {
    let mut socket = host.connect(at).expect("the gateway listens");
    set_limit(&socket, LIMIT);
    socket.write_all(proposal).expect("the connection is up");
    let answer = next_frame(&mut socket);
    (socket, answer)
}

fn next_frame(socket: &mut TcpStream) -> Frame {
    let mut framer = Framer::new();
    loop {
        if let Some(frame) = framer.next_frame().expect("our gateway makes no nonsense") {
            return frame;
        }
        let mut bytes = vec![0; framer.wanted()];
        let len = socket.read(&mut bytes).expect("an answer");
        assert!(len > 0, "an answer");
        assert_eq!(framer.feed(&bytes[..len]), len);
    }
}

/// The client of a link group of SMC-Rv2 with one link.
pub(crate) struct Stranger {
    clock: Clock,
    fabric: Fabric<Udp>,
    qp: QpId,
    group: LinkGroup,
    number: LinkNumber,
    confirmed: bool,
    /// Why the gateway's RNIC, or ours, has had enough.
    pub(crate) broke: Option<QpError>,
    /// Kept as long as the gateway may write there.
    _memory: (Rnic, Rmb),
    _socket: TcpStream,
}

impl Stranger {
    /// Founds a link group with the gateway that listens at `at`, in the name of `peer_id`, whoever
    /// that is.
    ///
    /// # Panics
    ///
    /// If the gateway does not let us.
    pub(crate) fn found(host: &Host, at: SocketAddrV4, peer_id: PeerId) -> Self {
        let socket = host.connect(at).expect("the gateway listens");
        set_limit(&socket, LIMIT);
        host.enter(|| Self::handshake(host.device, socket, peer_id))
    }

    fn handshake(device: &str, mut socket: TcpStream, peer_id: PeerId) -> Self {
        let clock = Clock::new();
        let opened = udp::open(&Config::on(Place::Device(device)));
        let (mut rnic, mut fabric) = opened.expect("nobody else has the port of RoCEv2 here");
        let smcr_rnic::Port { gid, mac, mtu } = rnic.port();
        let mut client = Client::with_v2(clock.now(), proposal(peer_id, &rnic), policy(), gid);
        say(&mut socket, &mut client);
        client.handle_frame(next_frame(&mut socket)).expect("an Accept");
        let Some(ClientAction::OpenLink(theirs)) = client.poll_action() else {
            panic!("not a first contact: whoever has a group with this name is told on");
        };
        let Some(&Agreement::V2(terms)) = client.agreement() else {
            panic!("version 2 was offered: {:?}", client.agreement());
        };

        let domain = rnic.open_domain().expect("the RNIC is new");
        let size = RmbeSize::from_notation(0);
        let region = Region::new(size.bytes() as usize).expect("memory");
        let rmb = Rmb::carve(region, size);
        let registration = rnic.register(domain, rmb.region()).expect("the RNIC is new");
        let opening = rnic.open_for(domain, Messages::Long).expect("the RNIC is new");
        let ours = opening.address();
        let offer = Offer {
            first_contact: true,
            peer_id,
            gid,
            mac,
            qpn: ours.qpn,
            rkey: registration.rkey,
            rmbe_index: 1,
            alert_token: AlertToken(1),
            rmbe_size: size,
            mtu,
            rmb_address: registration.address,
            psn: ours.psn,
        };
        client.provide_v2(offer, Gids::from_items([gid]).expect("one fits"));
        let theirs = address(&theirs);
        let qp = opening.connect(theirs).expect("there is a route");
        let qp = fabric.adopt(clock.now(), qp);
        let setup = setup(peer_id, &terms, ours, theirs);
        let group = LinkGroup::new_client(clock.now(), setup);
        say(&mut socket, &mut client);
        let mut stranger = Self {
            clock,
            fabric,
            qp,
            group,
            number: UNNUMBERED,
            confirmed: false,
            broke: None,
            _memory: (rnic, rmb),
            _socket: socket,
        };
        let deadline = Deadline::after(LIMIT);
        while !stranger.confirmed {
            assert!(!deadline.passed(), "CONFIRM LINK is late: {:?}", stranger.broke);
            stranger.turn();
        }
        stranger
    }

    /// Takes in what came, and answers the LLC messages among it.
    fn turn(&mut self) {
        let now = self.clock.now();
        let mut completions = Vec::with_capacity(64);
        self.fabric.poll(now, &mut completions);
        for completion in completions {
            match completion {
                Completion::Received { message, .. } if cdc::is_cdc(&message) => {}
                Completion::Received { message, .. } => self.hear(&message),
                Completion::ReceivedLong { message, .. } => self.hear(&message),
                Completion::Broke { cause, .. } => self.broke = Some(cause),
                Completion::Sent { .. } | Completion::Wrote { .. } => {}
            }
        }
        while let Some(action) = self.group.poll_action() {
            match action {
                Action::Send(number, llc) => {
                    let mut bytes = [0; v2::LEN_MAX];
                    let bytes = self.group.encode(number, &llc, &mut bytes);
                    let tag = Tag(0);
                    let work = match <[u8; LEN]>::try_from(bytes) {
                        Ok(message) => Work::Send { message, tag },
                        Err(_) => Work::SendLong { message: bytes.into(), tag },
                    };
                    self.fabric.post(self.qp, &mut vec![work]);
                }
                Action::LinkNumbered(number) => self.number = number,
                Action::LinkConfirmed(_) => self.confirmed = true,
                // It has one link and one connection, whatever the gateway would like.
                Action::OpenLink { .. }
                | Action::ConnectLink { .. }
                | Action::VacateLink(_)
                | Action::LinkProven(_)
                | Action::LinkFailed(..)
                | Action::RmbConfirmed(_)
                | Action::RmbRefused(_)
                | Action::RmbDeleted(_)
                | Action::RkeysDeleted(_)
                | Action::Terminate(_) => {}
            }
        }
        self.fabric.transmit(now);
        self.fabric.prepare_sleep(now);
    }

    fn hear(&mut self, message: &[u8]) {
        let heard = self.group.handle_bytes(self.clock.now(), self.number, message);
        heard.expect("our gateway makes no nonsense");
    }

    /// Sends CDC messages, as fast as the gateway's RNIC takes them.
    ///
    /// # Panics
    ///
    /// If it takes none for a while, or breaks the queue pair.
    pub(crate) fn say(&mut self, messages: impl IntoIterator<Item = Cdc>) {
        let mut work = Vec::new();
        for cdc in messages {
            work.push(Work::Send { message: cdc.encode(), tag: Tag(0) });
            if work.len() == BURST {
                self.post(&mut work);
            }
        }
        self.post(&mut work);
    }

    fn post(&mut self, work: &mut Vec<Work>) {
        let deadline = Deadline::after(LIMIT);
        while self.fabric.room(self.qp) < BURST {
            assert!(!deadline.passed(), "the gateway takes no messages");
            self.turn();
            assert_eq!(self.broke, None, "CDC messages that nobody expects break no queue pair");
        }
        self.fabric.post(self.qp, work);
        self.turn();
    }

    /// Lets pass what is under way: answers to the gateway, and retransmissions.
    pub(crate) fn idle(&mut self) {
        self.turn();
    }
}

/// An offer of SMC-Rv2, and of nothing else.
fn proposal(peer_id: PeerId, rnic: &Rnic) -> Proposal {
    let smcr_rnic::Port { gid, mac, .. } = rnic.port();
    Proposal {
        peer_id,
        gid,
        mac,
        subnet: Ipv4Subnet::default(),
        prefixes: Default::default(),
        prefix_count: 0,
        offers_smc_r_v1: false,
    }
}

/// The queue pair that an Accept names.
fn address(accept: &Offer) -> QpAddress {
    let Offer { gid, mac, qpn, psn, mtu, .. } = *accept;
    QpAddress { gid, mac, qpn, psn, mtu }
}

/// A link group as it was agreed on, with one link.
fn setup(peer_id: PeerId, terms: &AgreementV2, ours: QpAddress, theirs: QpAddress) -> Setup {
    let direct = terms.peer.is_some_and(|peer| peer.direct);
    Setup {
        peer_id,
        version: Version::V2 { max_connections: terms.max_connections, direct },
        ours,
        theirs,
        user_id: LinkUserId(1),
        eye_catcher: false,
        keepalive: Keepalive::default(),
        idle_wait: LIMIT,
        max_links: terms.max_links,
        retry_link: LIMIT,
        confirm_wait: None,
    }
}

fn policy() -> PolicyV2 {
    PolicyV2 {
        eids: Eids::from_items([Eid::SMCGATE]).expect("one fits"),
        release: RELEASE,
        max_connections: 255,
        max_links: 1,
        host_name: HostName::new("stranger"),
        many_streams: false,
        dense_packets: false,
    }
}

/// Writes the message that the machine wants said.
fn say(socket: &mut TcpStream, client: &mut Client) {
    let Some(ClientAction::Send(frame)) = client.poll_action() else {
        panic!("there is something to say");
    };
    socket.write_all(frame.encode().as_bytes()).expect("the connection is up");
}

/// Messages that are posted together.
const BURST: usize = 32;
