//! Both sides decline: what the other says then is not for the application.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use smcr_proto::Gid;
use smcr_proto::wire::clc::{DeclineV2, Diagnosis, EYECATCHER, Frame, v2::OsType};

use super::decline;
use super::rig::{Peer, Rig, assert_echo, connect};

const HERE: Gid = Gid::from_ipv4([127, 77, 0, 1]);

/// What a peer says that declines: in the short form, and in the long one of version 2.
fn declines() -> [Frame; 2] {
    let short = decline(Diagnosis::CONFIRM_LINK_TIMED_OUT);
    let Frame::Decline(decline) = short else { panic!("a Decline") };
    [short, Frame::DeclineV2(DeclineV2 { decline, os: OsType::LINUX, information: [0; 4] })]
}

/// Has the gateway decline, because the link is never confirmed: its peer and the application.
fn declined_by_server(rig: &Rig) -> (Peer, TcpStream) {
    let mut peer = Peer::new(connect(rig.gateway));
    let server = rig.accept();
    peer.say(&peer.proposal());
    assert!(matches!(peer.hear(), Some(Frame::Accept(_))));
    peer.say(&Frame::Confirm(peer.offer(HERE)));
    assert!(matches!(peer.hear(), Some(Frame::Decline(_))));
    (peer, server)
}

fn declined_by_client(rig: &Rig) -> (Peer, TcpStream) {
    let application = connect(rig.gateway);
    let mut peer = Peer::new(rig.accept());
    assert!(matches!(peer.hear(), Some(Frame::Proposal(_))));
    peer.say(&Frame::Accept(peer.offer(HERE)));
    assert!(matches!(peer.hear(), Some(Frame::Confirm(_))));
    assert!(matches!(peer.hear(), Some(Frame::Decline(_))));
    (peer, application)
}

/// A peer declined before it heard that we had: its Decline crosses ours, and the application gets
/// what comes behind it, however the network cuts that, and whoever speaks first.
// RFC 7609 C.1-3, C.6-2
#[test]
fn a_decline_that_crosses_ours_reaches_nobody() {
    let rigs = [Rig::server(60, ""), Rig::client(61, "")];
    for (side, rig) in rigs.iter().enumerate() {
        for (index, frame) in declines().into_iter().enumerate() {
            let (mut peer, mut application) =
                if side == 0 { declined_by_server(rig) } else { declined_by_client(rig) };
            let bytes = frame.encode();
            let (head, tail) = bytes.as_bytes().split_at(3 + 10 * index);
            if index == 0 {
                // The other direction waits for nobody.
                application.write_all(b"first").unwrap();
                let mut seen = [0; 5];
                peer.socket.read_exact(&mut seen).unwrap();
                assert_eq!(&seen, b"first");
            }
            peer.socket.write_all(head).unwrap();
            std::thread::sleep(Duration::from_millis(20));
            peer.socket.write_all(&[tail, b"hello"].concat()).unwrap();
            let mut seen = [0; 5];
            application.read_exact(&mut seen).unwrap();
            assert_eq!(&seen, b"hello", "side {side}");
            assert_echo(&mut peer.socket, &mut application);
        }
    }
}

/// An application's own bytes may begin as a Decline does, and may be all it says before it waits
/// for an answer, or ends.
#[test]
fn bytes_that_are_like_a_decline_arrive() {
    let rig = Rig::client(62, "");
    for ends in [false, true] {
        let (mut peer, mut application) = declined_by_client(&rig);
        peer.socket.write_all(&EYECATCHER[..3]).unwrap();
        if ends {
            peer.socket.shutdown(std::net::Shutdown::Write).unwrap();
        }
        let mut seen = [0; 3];
        application.read_exact(&mut seen).unwrap();
        assert_eq!(seen, EYECATCHER[..3]);
        if ends {
            assert_eq!(application.read(&mut [0]).unwrap(), 0);
        } else {
            assert_echo(&mut peer.socket, &mut application);
        }
    }
}
