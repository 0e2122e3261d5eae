//! The flows that RFC 7609 draws: Figures 16 to 21, and the examples of 4.5.1, as transcripts.
//!
//! The elements are those of the figures: 10,000 bytes, an eye catcher in the first four, so that
//! cursors begin at 4 and wrap to 4. A cursor is written `wrap:count`. Windows are in bytes of
//! data, of which there are 9,996; the texts of the RFC speak of 10,000.

use std::format;
use std::string::String;
use std::vec::Vec;

use super::*;

const ELEMENT: Ring = Ring::with_eye_catcher(10_000);
const KIB: u32 = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Host {
    A,
    B,
}

use Host::{A, B};

/// Two hosts, and what went over the wire between them.
struct Flow {
    hosts: [Connection; 2],
    lines: Vec<String>,
}

impl Flow {
    /// A connection that has carried nothing.
    fn new(element: Ring) -> Self {
        let host = || connection(element, element);
        Self { hosts: [host(), host()], lines: Vec::new() }
    }

    /// A connection on which Host A sent `bytes`, all of them consumed and known to be.
    fn after(bytes: u32) -> Self {
        let mut flow = Self::new(ELEMENT);
        let mut left = bytes;
        while left > 0 {
            let len = left.min(ELEMENT.capacity());
            flow.host(A).set_bytes_waiting(true);
            flow.write(A, len);
            flow.say(A);
            flow.read(B, len);
            flow.say(B);
            left -= len;
        }
        flow.host(A).set_bytes_waiting(false);
        flow.lines.clear();
        flow
    }

    fn host(&mut self, host: Host) -> &mut Connection {
        &mut self.hosts[host as usize]
    }

    /// RDMA writes of `len` bytes.
    fn write(&mut self, host: Host, len: u32) {
        let span = self.host(host).produce(len);
        self.note_writes(host, span);
    }

    /// The same, the last byte being urgent.
    fn write_urgent(&mut self, host: Host, len: u32) {
        let span = self.host(host).produce_urgent(len);
        self.note_writes(host, span);
    }

    fn note_writes(&mut self, host: Host, span: Span) {
        for piece in span.pieces().iter().filter(|piece| !piece.is_empty()) {
            self.lines.push(format!("{host:?} writes {}-{}", piece.start, piece.end - 1));
        }
    }

    /// The application takes `len` bytes.
    fn read(&mut self, host: Host, len: u32) {
        assert_eq!(self.host(host).readable().len(), len, "all that is there");
        self.host(host).consume(len);
    }

    /// The one CDC message that is due, delivered.
    fn say(&mut self, host: Host) -> Progress {
        let other = if host == A { B } else { A };
        let message = self.host(host).poll_cdc().expect("a message is due");
        self.assert_silent(host);
        let progress = self.host(other).handle_cdc(T0, &message).unwrap();
        let mut line = format!(
            "{host:?} says {}:{} heard {}:{}",
            message.producer.wrap,
            message.producer.count,
            message.consumer.wrap,
            message.consumer.count
        );
        for (flag, letter) in [
            (message.writer_blocked, " B"),
            (message.urgent_pending, " P"),
            (message.urgent_present, " U"),
            (message.update_requested, " R"),
            (message.failover_validation, " F"),
        ] {
            line += if flag { letter } else { "" };
        }
        self.lines.push(line);
        progress
    }

    /// No message is due.
    fn assert_silent(&mut self, host: Host) {
        assert_eq!(self.host(host).poll_cdc(), None, "{host:?}");
    }

    fn assert_was(&self, lines: &[&str]) {
        assert_eq!(self.lines, lines);
    }
}

/// Figure 16: with the window open nobody is asked to say anything back. A gateway that did would
/// double the messages of every request.
// RFC 7609 2.1 #13: read only up to producer cursor
// RFC 7609 4.3 #4: writer sets the producer cursor
// RFC 7609 4.7.1 #4: producer cursor says what is readable
// RFC 7609 4.7.1 #5: no update for unconstrained window
#[test]
fn scenario_1_send_flow_window_unconstrained() {
    let mut flow = Flow::new(ELEMENT);
    flow.write(A, 1_000);
    let progress = flow.say(A);
    assert_eq!(progress, Progress { readable_bytes: 1_000, ..Progress::default() });
    flow.read(B, 1_000);
    flow.assert_silent(B);
    flow.assert_was(&["A writes 4-1003", "A says 0:1004 heard 0:4"]);
}

/// Figure 17: the consumer cursor rides on the data of the other direction, for free.
// RFC 7609 4.3 #5: owner sets the consumer cursor
// RFC 7609 4.5.1 #5: consumer cursor in every message
// RFC 7609 4.7.2 #1: response carries the consumer cursor
// RFC 7609 4.7.2 #2: do not tell a cursor twice
#[test]
fn scenario_2_send_and_receive_flow_window_unconstrained() {
    let mut flow = Flow::new(ELEMENT);
    flow.write(A, 1_000);
    flow.say(A);
    assert_eq!(flow.host(A).window(), 8_996);
    flow.read(B, 1_000);
    flow.write(B, 500);
    let progress = flow.say(B);
    assert_eq!((progress.readable_bytes, progress.writable_bytes), (500, 1_000));
    assert_eq!(flow.host(A).window(), 9_996);
    flow.assert_silent(B);
    flow.assert_was(&[
        "A writes 4-1003",
        "A says 0:1004 heard 0:4",
        "B writes 4-503",
        "B says 0:504 heard 0:1004",
    ]);
}

/// Figure 18: the sender hears of consumption before its window is gone, and not earlier.
// RFC 7609 4.7.3 #1: window from last told cursor
// RFC 7609 4.7.3 #2: report consumption below half window
#[test]
fn scenario_3_send_flow_window_constrained() {
    let mut flow = Flow::new(ELEMENT);
    flow.write(A, 3_000);
    flow.say(A);
    flow.read(B, 3_000);
    flow.assert_silent(B);
    assert_eq!(flow.host(A).window(), 6_996, "the last cursor it was told, not what was consumed");
    flow.write(A, 4_000);
    flow.say(A);
    assert_eq!(flow.host(A).window(), 2_996);
    flow.read(B, 4_000);
    let progress = flow.say(B);
    assert_eq!((progress.writable_bytes, flow.host(A).window()), (7_000, 9_996));
    flow.assert_was(&[
        "A writes 4-3003",
        "A says 0:3004 heard 0:4",
        "A writes 3004-7003",
        "A says 0:7004 heard 0:4",
        "B says 0:4 heard 0:7004",
    ]);
}

/// Figure 19: full elements look like empty ones but for the wrap count, and B wakes the writer.
// RFC 7609 2.1 #14: write only up to consumer cursor
// RFC 7609 4.7.4 #1: write wrapped data in two pieces
// RFC 7609 4.7.4 #3: count wraps of producer cursor
// RFC 7609 4.7.4 #4: set B when bytes are left
// RFC 7609 4.7.4 #5: equal cursors, other wrap: full
// RFC 7609 4.7.4 #6: read a full element in order
// RFC 7609 4.7.4 #7: tell blocked writer at once
// RFC 7609 4.7.4 #8: resume writing when window opens
// RFC 7609 2.1 #16: report consumption by consumer cursor
// RFC 7609 A.4 #15: equal cursors mean all consumed
#[test]
fn scenario_4_large_send_full_window_writes() {
    let mut flow = Flow::after(9_996 + 1_000);
    let mut left = 20_000;
    while left > 0 {
        let len = flow.host(A).window().min(left);
        left -= len;
        flow.host(A).set_bytes_waiting(left > 0);
        flow.write(A, len);
        assert_eq!(flow.say(A).readable_bytes, len);
        if left > 0 {
            assert_eq!(flow.host(A).window(), 0);
            assert_eq!(flow.host(B).readable().pieces(), [1004..10_000, 4..1004]);
            flow.read(B, len);
            assert_eq!(flow.say(B).writable_bytes, 9_996);
        } else {
            flow.read(B, 8);
            flow.assert_silent(B);
        }
    }
    flow.assert_was(&[
        "A writes 1004-9999",
        "A writes 4-1003",
        "A says 2:1004 heard 0:4 B",
        "B says 0:4 heard 2:1004",
        "A writes 1004-9999",
        "A writes 4-1003",
        "A says 3:1004 heard 0:4 B",
        "B says 0:4 heard 3:1004",
        "A writes 1004-1011",
        "A says 3:1012 heard 0:4",
    ]);
}

/// Figure 20: after an urgent byte nothing may follow until the peer has consumed it, and the
/// peer must say so at once. Linux waits for that as well.
// RFC 7609 4.7.5 #1: P and U announce urgent data
// RFC 7609 4.7.5 #3: U locates the urgent byte
// RFC 7609 4.7.5 #4: always report urgent consumption
// RFC 7609 4.7.5 #5: wait until urgent byte is consumed
// RFC 7609 4.7.5 #6: clear P and U with next data
#[test]
fn scenario_5_urgent_data_window_unconstrained() {
    let mut flow = Flow::after(9_996 + 996);
    flow.write_urgent(A, 500);
    let progress = flow.say(A);
    assert!(progress.urgent && flow.host(B).is_urgent_pending());
    assert_eq!(flow.host(B).urgent_position(), Some(499));
    assert_eq!(flow.host(A).window(), 0, "nothing follows");

    flow.host(B).consume(499);
    flow.assert_silent(B);
    assert_eq!(flow.host(B).urgent_position(), Some(0));
    flow.read(B, 1);
    assert_eq!(flow.host(B).urgent_position(), None);
    assert_eq!(flow.say(B).writable_bytes, 9_996);

    flow.write(A, 1_000);
    let progress = flow.say(A);
    assert!(!progress.urgent && !flow.host(B).is_urgent_pending());
    flow.read(B, 1_000);
    flow.assert_silent(B);
    flow.assert_was(&[
        "A writes 1000-1499",
        "A says 1:1500 heard 0:4 P U",
        "B says 0:4 heard 1:1500",
        "A writes 1500-2499",
        "A says 1:2500 heard 0:4",
    ]);
}

/// Figure 21: a reader in front of a full element hears that urgent data is behind it; B goes with
/// the urgent byte.
// RFC 7609 4.7.6 #1: P alone while window is closed
// RFC 7609 4.7.6 #3: send urgent data when window opens
// RFC 7609 4.7.6 #4: clear B when nothing waits
// RFC 7609 4.7.6 #5: hold data behind urgent byte
#[test]
fn scenario_6_urgent_data_window_closed() {
    let mut flow = Flow::after(9_996 + 996);
    flow.host(A).set_bytes_waiting(true);
    flow.write(A, 9_996);
    flow.say(A);
    flow.lines.clear();

    flow.host(A).announce_urgent();
    let progress = flow.say(A);
    assert_eq!(progress, Progress::default());
    assert!(flow.host(B).is_urgent_pending());
    assert_eq!(flow.host(B).urgent_position(), None);
    flow.host(A).announce_urgent();
    flow.assert_silent(A);

    flow.read(B, 9_996);
    assert_eq!(flow.say(B).writable_bytes, 9_996);
    flow.host(A).set_bytes_waiting(false);
    flow.write_urgent(A, 500);
    assert!(flow.say(A).urgent);
    assert_eq!(flow.host(A).window(), 0);
    flow.read(B, 500);
    flow.say(B);
    flow.write(A, 1_000);
    flow.say(A);
    flow.assert_was(&[
        "A says 2:1000 heard 0:4 B P",
        "B says 0:4 heard 2:1000",
        "A writes 1000-1499",
        "A says 2:1500 heard 0:4 P U",
        "B says 0:4 heard 2:1500",
        "A writes 1500-2499",
        "A says 2:2500 heard 0:4",
    ]);
}

/// The three examples of 4.5.1: small reads cost no messages, useful ones do.
///
/// Each has the window that the sender sees, the one that the receiver would grant, and whether it
/// says so.
// RFC 7609 4.5.1 #1: compute window from both cursors
// RFC 7609 4.5.1 #2: update when window is below half
// RFC 7609 4.5.1 #3: no update above half window
// RFC 7609 4.5.1 #4: no update below a tenth
#[test]
fn consumer_updates_follow_the_examples_of_the_rfc() {
    const FULL: u32 = 64 * KIB;
    for (seen, granted, due) in [
        (50 * KIB, FULL, false),            // a. Plenty of space for the sender.
        (30 * KIB, 31 * KIB, false),        // b. Less than half, but a gain of less than a tenth.
        (30 * KIB, FULL, true),             // c.
        (32 * KIB, FULL, true),             // Half of it is open: Linux speaks, so do we.
        (32 * KIB + 1, FULL, false),        // A byte more than half.
        (30 * KIB, 30 * KIB + 6553, false), // A byte short of a tenth.
        (30 * KIB, 30 * KIB + 6554, true),
    ] {
        let mut flow = Flow::new(Ring::new(FULL));
        flow.write(A, FULL - seen);
        flow.say(A);
        assert_eq!(flow.host(A).window(), seen);
        flow.host(B).consume(granted - seen);
        if due {
            assert_eq!(flow.say(B).writable_bytes, granted - seen);
            assert_eq!(flow.host(A).window(), granted);
        }
        flow.assert_silent(B);
    }
}

/// Both writers are blocked at once: each must be told of every byte, or both sleep for ever.
// RFC 7609 4.5.1 #5: consumer cursor in every message
// RFC 7609 4.5.1 #6: while B holds, report any consumption
// RFC 7609 4.7.4 #7: tell blocked writer at once
#[test]
fn writers_blocked_both_ways_wake_each_other() {
    let mut flow = Flow::new(Ring::new(16 * KIB));
    for host in [A, B] {
        flow.host(host).set_bytes_waiting(true);
        flow.write(host, 16 * KIB);
    }
    flow.say(A);
    flow.say(B);
    for host in [A, B] {
        flow.assert_silent(host);
        flow.host(host).consume(1);
    }
    assert_eq!(flow.say(A).writable_bytes, 1);
    assert_eq!(flow.say(B).writable_bytes, 1);
    for host in [A, B] {
        assert_eq!(flow.host(host).window(), 1);
        flow.host(host).set_bytes_waiting(false);
        flow.write(host, 1);
        flow.say(host);
    }
    // Nothing waits, but both elements are full again.
    for host in [A, B] {
        flow.host(host).consume(1);
    }
    assert_eq!(flow.say(A).writable_bytes, 1);
    assert_eq!(flow.say(B).writable_bytes, 1);
}

/// Small writes wait for nothing: no timer, no acknowledgement, as with `TCP_NODELAY`. Those that
/// come while another message is made share it.
// RFC 7609 4.5.2 #1: send at once, whatever the size
// RFC 7609 4.5.2 #2: combine small sends
#[test]
fn small_sends_go_out_at_once_or_together() {
    let mut flow = Flow::new(ELEMENT);
    for _ in 0..3 {
        flow.write(A, 1);
        assert_eq!(flow.say(A).readable_bytes, 1);
    }
    for _ in 0..3 {
        flow.write(A, 1);
    }
    assert_eq!(flow.say(A).readable_bytes, 3);
    assert_eq!(flow.host(A).poll_timeout(), None);
    assert_eq!(flow.lines.len(), 3 * 2 + 3 + 1);
}
