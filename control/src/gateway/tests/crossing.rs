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
// RFC 7609 C.1 #3: never answer a Decline
// RFC 7609 C.6 #2: never parse application data as CLC
#[test]
fn a_decline_that_crosses_ours_reaches_nobody() {
    // A gateway remembers a peer to which RoCE does not get through: each time another one.
    let rigs = [Rig::server(60, ""), Rig::server(61, ""), Rig::client(62, ""), Rig::client(63, "")];
    for (side, rigs) in rigs.chunks(2).enumerate() {
        for (index, (rig, frame)) in rigs.iter().zip(declines()).enumerate() {
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
    for (ends, number) in [(false, 64), (true, 65)] {
        let rig = Rig::client(number, "");
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

/// A firewall between the RNICs is found out once: the connections that follow are TCP without
/// delay, with a reason that tells the operator what to look for, whichever side remembers.
#[test]
fn a_path_that_failed_is_remembered() {
    let near = Rig::client(66, "");
    let (_peer, _application) = declined_by_client(&near);
    let mut application = connect(near.gateway);
    let mut peer = Peer::new(near.accept());
    let Some(Frame::Decline(decline)) = peer.hear() else { panic!("no Proposal") };
    assert_eq!(decline.diagnosis, Diagnosis::NO_ROCE_PATH);
    assert_echo(&mut application, &mut peer.socket);

    let far = Rig::server(67, "");
    let (_peer, _server) = declined_by_server(&far);
    let mut peer = Peer::new(connect(far.gateway));
    let mut server = far.accept();
    peer.say(&peer.proposal());
    let Some(Frame::Decline(decline)) = peer.hear() else { panic!("no Accept") };
    assert_eq!(decline.diagnosis, Diagnosis::NO_ROCE_PATH);
    assert_echo(&mut peer.socket, &mut server);
    for rig in [&near, &far] {
        let fallbacks = rig.stats().fallbacks;
        assert!(fallbacks.iter().any(|one| one.name == "NO_ROCE_PATH"), "{fallbacks:?}");
    }
}

/// One connection finds out whether RoCE gets through again; if not, it stays TCP before its users
/// notice.
#[test]
fn a_trial_is_short() {
    let near = Rig::client(68, "");
    let (_peer, _application) = declined_by_client(&near);
    std::thread::sleep(Duration::from_millis(1_050));
    let mut application = connect(near.gateway);
    let mut trial = Peer::new(near.accept());
    assert!(matches!(trial.hear(), Some(Frame::Proposal(_))));
    let _other = connect(near.gateway);
    let mut other = Peer::new(near.accept());
    assert!(matches!(other.hear(), Some(Frame::Decline(_))), "one at a time");
    trial.say(&Frame::Accept(trial.offer(HERE)));
    assert!(matches!(trial.hear(), Some(Frame::Confirm(_))));
    trial.socket.set_read_timeout(Some(Duration::from_millis(1_100))).unwrap();
    assert!(matches!(trial.hear(), Some(Frame::Decline(_))), "before 1.3 s have passed");
    assert_echo(&mut application, &mut trial.socket);
}
