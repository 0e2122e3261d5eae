//! A stream, cut in every place.

use std::vec::Vec;

use super::super::tests::{LINUX_DECLINE, LINUX_PROPOSAL};
use super::*;
use crate::wire::clc::ProposalV2;
use crate::wire::tests::hex;

/// What a server sends whose application speaks first, and that declines before.
const BANNER: &[u8] = b"SSH-2.0-OpenSSH_9.2p1\r\n";

fn proposal() -> [u8; 52] {
    hex(LINUX_PROPOSAL)
}

fn decline() -> [u8; 28] {
    hex(LINUX_DECLINE)
}

/// The frame that these bytes are, fed in one piece.
fn frame(bytes: &[u8]) -> Frame {
    let mut framer = Framer::new();
    assert_eq!(framer.feed(bytes), bytes.len());
    framer.next_frame().unwrap().unwrap()
}

/// TCP may deliver one byte at a time; a message must come out with its last byte, not before.
#[test]
fn reads_byte_by_byte() {
    let mut framer = Framer::new();
    for message in [&proposal()[..], &decline()] {
        let (last, others) = message.split_last().unwrap();
        for byte in others {
            assert_eq!(framer.feed(&[*byte]), 1);
            assert_eq!(framer.next_frame(), Ok(None));
        }
        assert_eq!(framer.feed(&[*last]), 1);
        assert_eq!(framer.next_frame(), Ok(Some(frame(message))));
        assert_eq!(framer.leftover(), b"");
    }
}

/// Two messages and the application's first bytes, in all pieces of three: the messages come out,
/// and not one byte of the application is lost or mistaken.
// RFC 7609 C.6 #2: never parse application data as CLC
#[test]
fn reads_every_split() {
    let stream = [&proposal()[..], &decline(), BANNER].concat();
    for first in 0..=stream.len() {
        for second in first..=stream.len() {
            let mut framer = Framer::new();
            let mut frames = Vec::new();
            for piece in [&stream[..first], &stream[first..second], &stream[second..]] {
                assert_eq!(framer.feed(piece), piece.len());
                while frames.len() < 2
                    && let Some(frame) = framer.next_frame().unwrap()
                {
                    frames.push(frame);
                }
            }
            assert_eq!(frames, [frame(&proposal()), frame(&decline())]);
            assert_eq!(framer.leftover(), BANNER);
        }
    }
}

/// A reader that asks how much to read leaves the application's bytes in the socket.
#[test]
fn wants_no_byte_beyond_the_message() {
    let stream = [&decline()[..], BANNER].concat();
    let mut framer = Framer::new();
    assert_eq!(framer.wanted(), 8);
    assert_eq!(framer.feed(&stream[..5]), 5);
    assert_eq!(framer.wanted(), 3);
    assert_eq!(framer.feed(&stream[5..8]), 3);
    assert_eq!(framer.wanted(), 20);
    assert_eq!(framer.next_frame(), Ok(None));
    assert_eq!(framer.feed(&stream[8..28]), 20);
    assert_eq!(framer.wanted(), 0);
    assert_eq!(framer.next_frame(), Ok(Some(frame(&decline()))));
    assert_eq!(framer.leftover(), b"");
    assert_eq!(framer.wanted(), 8);
}

/// An application that never heard of SMC is recognised by its first byte, not after a timeout,
/// and its bytes are all there.
// RFC 7609 C.6 #1: application data instead of CLC: error
#[test]
fn recognises_a_stranger_at_once() {
    let mut framer = Framer::default();
    assert_eq!(framer.next_frame(), Ok(None));
    assert_eq!(framer.feed(b"S"), 1);
    assert_eq!(framer.next_frame(), Err(Malformed::Eyecatcher));
    assert_eq!(framer.wanted(), 0);
    assert_eq!(framer.feed(&BANNER[1..]), BANNER.len() - 1);
    assert_eq!(framer.next_frame(), Err(Malformed::Eyecatcher));
    assert_eq!(framer.leftover(), BANNER);

    // A deviation in the fourth byte is seen with the fourth byte.
    let mut framer = Framer::new();
    assert_eq!(framer.feed(&EYECATCHER[..3]), 3);
    assert_eq!(framer.next_frame(), Ok(None));
    assert_eq!(framer.feed(b"!"), 1);
    assert_eq!(framer.next_frame(), Err(Malformed::Eyecatcher));
}

/// A broken header is reported with the header: waiting for the rest of a message that nobody
/// sends would hold the connection until the timeout.
#[test]
fn refuses_a_broken_header_before_the_rest_arrives() {
    let mut framer = Framer::new();
    let mut header = [0; 8];
    header.copy_from_slice(&decline()[..8]);
    header[6] = 200;
    assert_eq!(framer.feed(&header), 8);
    assert_eq!(framer.wanted(), 0);
    assert_eq!(framer.next_frame(), Err(Malformed::Length));
    assert_eq!(framer.next_frame(), Err(Malformed::Length));
}

/// A flood behind a message cannot overrun the buffer; what is not taken stays the caller's.
#[test]
fn takes_no_more_than_it_can_hold() {
    let stream = [&decline()[..], &[b'x'; 2 * FRAME_MAX]].concat();
    let mut framer = Framer::new();
    assert_eq!(framer.feed(&stream), FRAME_MAX);
    assert_eq!(framer.feed(&stream[FRAME_MAX..]), 0);
    assert_eq!(framer.next_frame(), Ok(Some(frame(&decline()))));
    assert_eq!(framer.leftover(), &stream[28..FRAME_MAX]);
    assert_eq!(framer.feed(&stream[FRAME_MAX..]), 28);
    assert_eq!(framer.leftover(), &stream[28..FRAME_MAX + 28]);
}

/// The longest Proposal that may be is read whole.
#[test]
fn reads_the_longest_frame() {
    let mut bytes = [0; FRAME_MAX];
    bytes[..52].copy_from_slice(&proposal());
    bytes[field::LENGTH].copy_from_slice(&[4, 0]);
    bytes[field::VERSION_AND_FLAGS] = 0x28;
    bytes[FRAME_MAX - 4..].copy_from_slice(&EYECATCHER);
    let Frame::Proposal(v1) = frame(&proposal()) else { panic!() };
    assert_eq!(frame(&bytes), Frame::ProposalV2(ProposalV2 { v1, v2: None }));

    bytes[field::LENGTH].copy_from_slice(&[4, 1]);
    let mut framer = Framer::new();
    assert_eq!(framer.feed(&bytes), FRAME_MAX);
    assert_eq!(framer.next_frame(), Err(Malformed::Length));
}
