//! CLC messages on a TCP stream, however it is cut, and the two sides of a rendezvous that hear
//! them.

use smcr_proto::handshake::{
    Agreement, Client, ClientAction, Policy, PolicyV2, Server, ServerAction,
};
use smcr_proto::wire::clc::v2::{Eid, Gids, HostName};
use smcr_proto::wire::clc::{Diagnosis, Frame, Framer, Ipv4Subnet, Ipv6Prefix, Offer, Proposal};
use smcr_proto::{
    AlertToken, Gid, Instant, MacAddress, Malformed, Mtu, PeerId, Psn, Qpn, Rkey, RmbeSize,
};

const T0: Instant = Instant(0);
const US: PeerId = PeerId([8; 8]);

/// Hears what is behind the first byte, which says how the stream is cut and what goes wrong here.
///
/// # Panics
///
/// If the messages depend on how the stream is cut, or a message changes when it is sent on.
pub fn run(data: &[u8]) {
    let Some((how, stream)) = data.split_first() else { return };
    let heard = hear(stream, usize::MAX);
    let piece = usize::from(how >> 3) + 1;
    assert_eq!(hear(stream, piece), heard, "in pieces of {piece}");
    let (frames, _) = heard;
    for frame in &frames {
        if is_sendable(frame) {
            let again = frame.encode();
            assert_eq!(hear(again.as_bytes(), usize::MAX), (vec![*frame], None));
        }
    }
    let luck = how & 7;
    for with_v2 in [false, true] {
        be_client(&frames, with_v2, luck);
        be_server(&frames, with_v2, luck);
    }
}

/// The messages of a stream that arrives in pieces of `piece` bytes, and how it ended.
fn hear(stream: &[u8], piece: usize) -> (Vec<Frame>, Option<Malformed>) {
    let (mut framer, mut frames) = (Framer::new(), Vec::new());
    for mut bytes in stream.chunks(piece) {
        while !bytes.is_empty() {
            bytes = &bytes[framer.feed(bytes)..];
            loop {
                match framer.next_frame() {
                    Ok(Some(frame)) => frames.push(frame),
                    Ok(None) => break,
                    Err(error) => return (frames, Some(error)),
                }
            }
            assert!(framer.wanted() > 0, "it waits for something");
        }
    }
    (frames, None)
}

/// Whether we could have sent it: what a peer may leave out or add, we would not.
fn is_sendable(frame: &Frame) -> bool {
    match frame {
        Frame::Proposal(proposal) => proposal.offers_smc_r_v1,
        Frame::ProposalV2(proposal) => proposal.v1.offers_smc_r_v1,
        Frame::Accept(_) | Frame::Confirm(_) | Frame::AcceptV2(_) | Frame::ConfirmV2(_) => true,
        Frame::Decline(_) | Frame::DeclineV2(_) => true,
    }
}

fn be_client(frames: &[Frame], with_v2: bool, luck: u8) {
    let mut client = match with_v2 {
        true => Client::with_v2(T0, proposal(), policy(), offer(true).gid),
        false => Client::new(T0, proposal()),
    };
    let mut over = drive_client(&mut client, luck);
    for frame in frames {
        if over {
            return;
        }
        over = client.handle_frame(*frame).is_err() || drive_client(&mut client, luck);
    }
    if let (false, Some(at)) = (over, client.poll_timeout()) {
        client.handle_timeout(at).expect_err("nothing came in time");
        assert_eq!(client.poll_action(), None, "it is over");
    }
}

/// Does what the machine wants, and fails to where `luck` has a bit. Whether it is over.
fn drive_client(client: &mut Client, luck: u8) -> bool {
    let (mut over, mut failed) = (false, false);
    while let Some(action) = client.poll_action() {
        assert!(!over, "{action:?} behind the end");
        match action {
            ClientAction::Send(frame) => assert!(!frame.encode().as_bytes().is_empty()),
            ClientAction::OpenLink(_) | ClientAction::JoinLink(_) if luck & 1 != 0 => {
                client.refuse(Diagnosis::NO_ROUTE, luck & 2 != 0);
            }
            ClientAction::OpenLink(theirs) | ClientAction::JoinLink(theirs) => {
                let ours = offer(theirs.first_contact);
                match client.agreement().expect("an Accept settles it") {
                    Agreement::V1 => client.provide(ours),
                    Agreement::V2(_) => client.provide_v2(ours, Gids::new()),
                }
                if theirs.first_contact && luck & 2 != 0 {
                    failed = client.link_failed(luck & 4 != 0).is_err();
                } else if theirs.first_contact && luck & 4 != 0 {
                    client.link_confirmed();
                }
            }
            ClientAction::Done | ClientAction::FallBack => over = true,
        }
    }
    over || failed
}

fn be_server(frames: &[Frame], with_v2: bool, luck: u8) {
    let policy = Policy { v1: true, v2: with_v2.then(policy) };
    let mut server = Server::with_policy(T0, US, policy);
    let mut over = false;
    for frame in frames {
        if over {
            return;
        }
        over = server.handle_frame(*frame).is_err() || drive_server(&mut server, luck);
    }
    if let (false, Some(at)) = (over, server.poll_timeout()) {
        server.handle_timeout(at).expect_err("nothing came in time");
        assert_eq!(server.poll_action(), None, "it is over");
    }
}

/// The same for a server.
fn drive_server(server: &mut Server, luck: u8) -> bool {
    let (mut over, mut failed) = (false, false);
    while let Some(action) = server.poll_action() {
        assert!(!over, "{action:?} behind the end");
        match action {
            ServerAction::Send(frame) => assert!(!frame.encode().as_bytes().is_empty()),
            ServerAction::Provide(_) if luck & 1 != 0 => server.refuse(Diagnosis::NO_ROUTE),
            ServerAction::Provide(_) => match (server.objection(), server.agreement()) {
                (Some(diagnosis), _) => server.refuse(diagnosis),
                (None, Some(Agreement::V2(_))) => {
                    server.provide_v2(T0, offer(luck & 2 == 0), true);
                }
                (None, _) => server.provide(T0, offer(luck & 2 == 0)),
            },
            ServerAction::ConnectLink(_) if luck & 4 != 0 => server.link_confirmed(),
            ServerAction::ConnectLink(_) => failed = server.link_failed(luck & 2 != 0).is_err(),
            ServerAction::JoinLink(_) => {}
            ServerAction::Done | ServerAction::FallBack => over = true,
        }
    }
    over || failed
}

fn policy() -> PolicyV2 {
    PolicyV2 {
        eids: Eid::with_ours(&[Eid::new("A").expect("a name")]).expect("one name"),
        release: 1,
        max_connections: 255,
        max_links: 8,
        host_name: HostName::new("here"),
        many_streams: true,
        dense_packets: true,
    }
}

fn proposal() -> Proposal {
    let Offer { peer_id, gid, mac, .. } = offer(true);
    Proposal {
        peer_id,
        gid,
        mac,
        subnet: Ipv4Subnet { network: [10, 0, 0, 0], prefix_bits: 24 },
        prefixes: [Ipv6Prefix::default(); 8],
        prefix_count: 0,
        offers_smc_r_v1: true,
    }
}

fn offer(first_contact: bool) -> Offer {
    Offer {
        first_contact,
        peer_id: US,
        gid: Gid::from_ipv4([10, 0, 0, 8]),
        mac: MacAddress([2, 0, 0, 0, 0, 8]),
        qpn: Qpn(8),
        rkey: Rkey(1),
        rmbe_index: 1,
        alert_token: AlertToken(7),
        rmbe_size: RmbeSize::KIB_64,
        mtu: Mtu::B1024,
        rmb_address: 0x1000,
        psn: Psn(0),
    }
}
