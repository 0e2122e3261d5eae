//! How connections end: RFC 7609, 4.8, and what Linux makes of it.

use super::*;

/// The usual end of a request: one side closes, the other follows. Both elements are free then.
// RFC 7609 4.8.1 #5: closing both directions sends C
// RFC 7609 4.8.1 #10: peer's C: PeerCloseWait to Closed
// RFC 7609 4.8.1 #13: peer's D or C: to AppCloseWait1
// RFC 7609 4.8.1 #17: close after peer's C: to Closed
// RFC 7609 3.5.4 #2: reuse element when both are done
// RFC 7609 4.4.2 #1: reuse only after both say done
// RFC 7609 4.8.1 #1: begin and end as Closed
#[test]
fn close_and_close() {
    let (mut a, mut b) = (bytes(16_384), bytes(16_384));
    a.close(T0);
    assert_eq!(a.state(), State::PeerCloseWait1(Half::Closed));
    let (message, progress) = carry(&mut a, &mut b);
    assert!(message.connection_closed && !message.sending_done && !message.abnormal_close);
    assert!(progress.peer_done && progress.peer_closed && !progress.reset);
    assert_eq!((b.state(), b.window()), (State::AppCloseWait1(Half::Closed), 0));

    b.close(T0);
    assert_eq!(b.state(), State::Closed);
    assert!(!b.is_closed(), "the peer does not know yet");
    carry(&mut b, &mut a);
    assert!(a.is_closed() && b.is_closed());
    assert_eq!((a.poll_timeout(), b.poll_timeout()), (None, None));
}

/// `ssh host command < file`: the client has nothing more to say and waits for the answer.
// RFC 7609 4.8.1 #6: end of writing sends D
// RFC 7609 4.8.1 #8: peer's D: to PeerCloseWait2
#[test]
fn half_close_keeps_the_other_direction_open() {
    let (mut a, mut b) = (bytes(16_384), bytes(16_384));
    a.produce(7);
    a.shutdown_write();
    let (message, progress) = carry(&mut a, &mut b);
    assert!(message.sending_done && !message.connection_closed);
    assert_eq!((progress.readable_bytes, progress.peer_done), (7, true));
    assert!(!progress.peer_closed);
    assert_eq!((a.window(), b.window()), (0, 16_384));
    assert_eq!(a.poll_timeout(), None, "the answer may take days");

    consume_all(&mut b);
    b.produce(9);
    let (_, progress) = carry(&mut b, &mut a);
    assert_eq!((progress.readable_bytes, progress.peer_done), (9, false));
    consume_all(&mut a);
    b.shutdown_write();
    assert!(carry(&mut b, &mut a).1.peer_done);
    assert_eq!(a.state(), State::PeerCloseWait2(Half::Done));
    assert_eq!(b.state(), State::AppCloseWait2);

    a.close(T0);
    let (message, progress) = carry(&mut a, &mut b);
    assert!(message.sending_done && message.connection_closed, "flags are levels");
    assert!(progress.peer_closed && !progress.peer_done, "that was said before");
    b.close(T0);
    carry(&mut b, &mut a);
    assert!(a.is_closed() && b.is_closed());
}

// RFC 7609 4.8.1 #24: both sides may close at once
#[test]
fn simultaneous_close() {
    let (mut a, mut b) = (bytes(16_384), bytes(16_384));
    a.close(T0);
    b.close(T0);
    let (from_a, from_b) = (a.poll_cdc().unwrap(), b.poll_cdc().unwrap());
    a.handle_cdc(T0, &from_b).unwrap();
    b.handle_cdc(T0, &from_a).unwrap();
    assert!(a.is_closed() && b.is_closed());
}

/// A Linux peer may say C and D in one byte.
#[test]
fn done_and_closed_at_once() {
    let mut us = bytes(16_384);
    let message =
        Cdc { sequence: 1, sending_done: true, connection_closed: true, ..Cdc::default() };
    let progress = us.handle_cdc(T0, &message).unwrap();
    assert!(progress.peer_done && progress.peer_closed);
    assert_eq!(us.state(), State::AppCloseWait1(Half::Closed));
    let progress = us.handle_cdc(T0, &Cdc { sequence: 2, ..message }).unwrap();
    assert_eq!(progress, Progress::default(), "news is news once");
}

/// RST from the application: the other application must see one as well, and both elements become
/// free without a C.
// RFC 7609 4.8.2 #3: abort sends A: to PeerAbortWait
// RFC 7609 4.8.2 #10: answer A with A
#[test]
fn abort_is_answered_with_abort() {
    let (mut a, mut b) = (bytes(16_384), bytes(16_384));
    b.produce(100);
    carry(&mut b, &mut a);
    a.abort(T0);
    assert_eq!((a.state(), a.readable().len()), (State::PeerAbortWait, 0));
    let (message, progress) = carry(&mut a, &mut b);
    assert!(message.abnormal_close && progress.reset);
    assert_eq!(b.state(), State::ProcessAbort);
    let (message, progress) = carry(&mut b, &mut a);
    assert!(message.abnormal_close);
    assert!(!progress.reset, "we know");
    assert!(a.is_closed() && b.is_closed());
}

/// Both applications are killed at the same moment.
// RFC 7609 4.8.2 #12: both sides may abort at once
#[test]
fn crossing_aborts_close_both_sides() {
    let (mut a, mut b) = (bytes(16_384), bytes(16_384));
    a.abort(T0);
    b.abort(T0);
    let (from_a, from_b) = (a.poll_cdc().unwrap(), b.poll_cdc().unwrap());
    a.handle_cdc(T0, &from_b).unwrap();
    b.handle_cdc(T0, &from_a).unwrap();
    assert!(a.is_closed() && b.is_closed());
}

/// What arrived before the reset can be read, as TCP allows; reading it says nothing to the peer.
#[test]
fn bytes_that_came_before_a_reset_are_readable() {
    let (mut a, mut b) = (bytes(16_384), bytes(16_384));
    a.set_bytes_waiting(true);
    a.produce(100);
    carry(&mut a, &mut b);
    a.abort(T0);
    carry(&mut a, &mut b);
    carry(&mut b, &mut a);
    assert_eq!(consume_all(&mut b), 100);
    assert_eq!(b.poll_cdc(), None);
    assert!(b.is_closed());
}

/// RFC 4.8.1, 4A: the peer has closed and can never read what we still hold. A silent end would
/// make our application believe that it was read.
// RFC 7609 4.8.1 #15: reset if C meets pending data
#[test]
fn a_peer_that_closes_on_a_blocked_writer_resets_it() {
    let (mut a, mut b) = (bytes(16_384), bytes(16_384));
    a.produce(16_384);
    a.set_bytes_waiting(true);
    carry(&mut a, &mut b);
    consume_all(&mut b);
    b.close(T0);
    let (_, progress) = carry(&mut b, &mut a);
    assert!(progress.peer_closed && progress.reset);
    assert_eq!(progress.writable_bytes, 0);
    let (message, _) = carry(&mut a, &mut b);
    assert!(message.abnormal_close);
    assert!(a.is_closed() && b.is_closed());
}

/// An application that exits without reading what it was sent resets the connection, as over TCP.
// RFC 7609 4.8.1 #3: closing with unread data aborts
#[test]
#[should_panic(expected = "abort")]
fn closing_with_unread_bytes_is_our_bug() {
    let (mut a, mut b) = (bytes(16_384), bytes(16_384));
    a.produce(1);
    carry(&mut a, &mut b);
    b.close(T0);
}

/// A Linux sender whose two seconds of linger are over says D, and writes the rest of its buffer
/// later. Those bytes are part of the stream.
#[test]
fn bytes_behind_an_early_end_are_taken_until_we_close() {
    let mut us = bytes(16_384);
    let full = Cdc {
        sequence: 1,
        producer: cursor(1, 0),
        connection_closed: true,
        writer_blocked: true,
        ..Cdc::default()
    };
    assert_eq!(us.handle_cdc(T0, &full).unwrap().readable_bytes, 16_384);
    consume_all(&mut us);
    let update = us.poll_cdc().expect("the writer is blocked");
    assert_eq!(update.consumer, cursor(1, 0));
    let rest = Cdc { sequence: 2, producer: cursor(1, 50), ..full };
    assert_eq!(us.handle_cdc(T0, &rest).unwrap().readable_bytes, 50);
    consume_all(&mut us);

    us.close(T0);
    us.poll_cdc().unwrap();
    let late = Cdc { sequence: 3, producer: cursor(1, 60), ..full };
    assert_eq!(us.handle_cdc(T0, &late), Ok(Progress::default()));
    assert!(us.readable().is_empty() && us.is_closed());
}

/// A peer that never answers our C must not keep the element for ever (4.8.1, last note).
// RFC 7609 4.4.2 #2: reuse element after a timeout
// RFC 7609 4.8.1 #21: limit closing by a timer
// RFC 7609 4.8.1 #23: free element after closing timeout
// RFC 7609 4.8.2 #7: limit PeerAbortWait by a timer
#[test]
fn a_silent_peer_is_given_up() {
    for (end, states) in [
        (
            Connection::close as fn(&mut Connection, Instant) -> bool,
            State::PeerCloseWait1(Half::Closed),
        ),
        (Connection::abort, State::PeerAbortWait),
    ] {
        let mut us = bytes(16_384);
        end(&mut us, T0);
        assert_eq!(us.state(), states);
        assert_eq!(us.poll_timeout(), Some(T0 + PATIENCE));
        assert!(!us.handle_timeout(T0 + PATIENCE / 2));
        assert_eq!(us.state(), states);
        assert!(us.handle_timeout(T0 + PATIENCE));
        assert!(us.is_closed(), "even if nothing could be sent");
        assert_eq!((us.poll_cdc(), us.poll_timeout()), (None, None));
        assert!(!us.handle_timeout(T0 + PATIENCE * 2));
    }
}

/// The clock of a close runs from our C; what the peer says meanwhile does not put it off.
#[test]
fn patience_is_not_renewed() {
    let mut us = bytes(16_384);
    us.shutdown_write();
    us.poll_cdc().unwrap();
    us.close(T0);
    us.poll_cdc().unwrap();
    let done = Cdc { sequence: 1, sending_done: true, ..Cdc::default() };
    us.handle_cdc(T0 + PATIENCE / 2, &done).unwrap();
    assert_eq!(us.state(), State::PeerCloseWait2(Half::Closed));
    assert_eq!(us.poll_timeout(), Some(T0 + PATIENCE));
}

/// Linux answers an A that crosses its C with nothing at all: its C must do.
#[test]
fn a_close_that_crosses_our_abort_ends_it() {
    let mut us = bytes(16_384);
    us.abort(T0);
    us.poll_cdc().unwrap();
    let closed = Cdc { sequence: 1, connection_closed: true, ..Cdc::default() };
    us.handle_cdc(T0, &closed).unwrap();
    assert!(us.is_closed());
}

/// After our C the peer may be gone; an abort then must not leave the element waiting for it, nor
/// swallow the C.
#[test]
fn abort_after_close_still_says_closed() {
    let mut us = bytes(16_384);
    us.close(T0);
    us.abort(T0);
    let message = us.poll_cdc().unwrap();
    assert!(message.connection_closed && !message.abnormal_close);
    assert!(us.is_closed());
}

/// The last announcement and the end of the stream travel together.
#[test]
fn the_last_bytes_and_the_end_share_a_message() {
    let (mut a, mut b) = (bytes(16_384), bytes(16_384));
    a.produce(10);
    a.close(T0);
    let (message, progress) = carry(&mut a, &mut b);
    assert_eq!((message.producer, message.connection_closed), (cursor(0, 10), true));
    assert_eq!((progress.readable_bytes, progress.peer_closed), (10, true));
}

/// The link breaks while we wait for a peer that never answers: patience ends that, too.
#[test]
fn a_failover_does_not_outlive_our_patience() {
    let mut us = bytes(16_384);
    us.abort(T0);
    change_link(&mut us, 0);
    assert!(us.handle_timeout(T0 + PATIENCE));
    assert_eq!((us.is_closed(), us.poll_cdc()), (true, None));
    change_link(&mut us, 0);
    assert_eq!(us.poll_cdc(), None, "nothing is left to move");
    assert!(us.is_heard(), "nobody waits for that");
}

/// What a peer sends after the end is not looked at: its cursors may be of another connection.
#[test]
fn a_closed_connection_takes_nothing_in() {
    let (mut a, mut b) = (bytes(16_384), bytes(16_384));
    a.abort(T0);
    carry(&mut a, &mut b);
    carry(&mut b, &mut a);
    for producer in [cursor(0, 10), cursor(9, 9)] {
        let late = Cdc { sequence: 9, producer, ..Cdc::default() };
        assert_eq!(b.handle_cdc(T0, &late), Ok(Progress::default()));
        assert!(b.readable().is_empty());
    }
}

/// A level that nobody took back after the last byte was written loses nothing when the peer
/// closes.
#[test]
fn a_stale_blocked_writer_is_no_reason_for_a_reset() {
    let (mut a, mut b) = (bytes(16_384), bytes(16_384));
    a.set_bytes_waiting(true);
    a.produce(10);
    a.shutdown_write();
    carry(&mut a, &mut b);
    consume_all(&mut b);
    b.close(T0);
    let (_, progress) = carry(&mut b, &mut a);
    assert!(progress.peer_closed && !progress.reset);
    assert_eq!(a.state(), State::AppFinCloseWait);
}

/// Whatever both applications do at the same moment, in whatever way the messages cross: both
/// elements become free, and nobody waits for a timer.
// RFC 7609 4.8.1 #24: both sides may close at once
// RFC 7609 4.8.2 #12: both sides may abort at once
#[test]
fn ends_that_cross_end_both_sides() {
    type End = fn(&mut Connection) -> bool;
    let half: End = Connection::shutdown_write;
    let close: End = |connection| connection.close(T0);
    let abort: End = |connection| connection.abort(T0);
    for first in [half, close, abort] {
        for second in [half, close, abort] {
            let mut hosts = [bytes(16_384), bytes(16_384)];
            first(&mut hosts[0]);
            second(&mut hosts[1]);
            let crossing = hosts.each_mut().map(|host| host.poll_cdc().unwrap());
            let [from_first, from_second] = crossing;
            hosts[0].handle_cdc(T0, &from_second).unwrap();
            hosts[1].handle_cdc(T0, &from_first).unwrap();
            for _ in 0..4 {
                let [first, second] = &mut hosts;
                finish(first, second);
                finish(second, first);
            }
            let states = hosts.each_ref().map(Connection::state);
            assert!(hosts.iter().all(Connection::is_closed), "{states:?}");
            assert!(hosts.iter().all(|host| host.poll_timeout().is_none()));
        }
    }
}

/// The application behind `source` closes, if it has not aborted, and all that is due is delivered.
fn finish(source: &mut Connection, target: &mut Connection) {
    if source.state() != State::PeerAbortWait {
        source.close(T0);
    }
    while let Some(message) = source.poll_cdc() {
        target.handle_cdc(T0, &message).unwrap();
    }
}

/// The peer may give our words another meaning once its element serves another connection: behind
/// C or A nothing is said, and nothing is written.
// RFC 7609 4.8.1 #12: write nothing after C
// RFC 7609 A.4 #25: send nothing after C or A
#[test]
fn nothing_follows_close_or_abort() {
    for end in [Connection::close as fn(&mut Connection, Instant) -> bool, Connection::abort] {
        let (mut a, mut b) = (bytes(16_384), bytes(16_384));
        b.set_bytes_waiting(true);
        b.produce(16_384);
        carry(&mut b, &mut a);
        consume_all(&mut a);
        carry(&mut a, &mut b);
        end(&mut a, T0);
        a.poll_cdc().unwrap();
        assert_eq!(a.window(), 0);
        a.announce_urgent();
        a.shutdown_write();
        b.produce(100);
        let message = Cdc { update_requested: true, ..b.poll_cdc().unwrap() };
        a.handle_cdc(T0, &message).unwrap();
        assert_eq!(a.poll_cdc(), None, "{:?}", a.state());
        a.abort(T0);
        assert_eq!(a.poll_cdc(), None, "{:?}", a.state());
    }
}
