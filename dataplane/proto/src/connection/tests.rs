//! Scenarios of RFC 7609, 4.3 to 4.8: what two connections say to each other.
//!
//! `figures` has those that the RFC draws, `closing` how connections end, `swarm` what chance does;
//! `streams` has what is ours.

use super::*;
use crate::limits::CDC_UNDER_WAY_MAX;
use crate::ring::Position;
use crate::vocabulary::RmbeSize;
use crate::wire::cdc::Cursor;

mod closing;
mod figures;
mod streams;
mod swarm;

const T0: Instant = Instant(0);
const PATIENCE: Duration = Duration::from_secs(5);
const TOKEN: AlertToken = AlertToken(0x0102_0304);

fn connection(element: Ring, peer_element: Ring) -> Connection {
    Connection::new(ConnectionSetup {
        peer_token: TOKEN,
        element,
        peer_element,
        close_wait: PATIENCE,
        streams: Streams::One,
    })
}

fn bytes(capacity: u32) -> Connection {
    connection(Ring::new(capacity), Ring::new(capacity))
}

/// Carries the one message that is due from `source` to `target`, and shows it.
fn carry(source: &mut Connection, target: &mut Connection) -> (Cdc, Progress) {
    let message = source.poll_cdc().expect("a message is due");
    assert_eq!(source.poll_cdc(), None, "one message says everything");
    let progress = target.handle_cdc(T0, &message).unwrap();
    (message, progress)
}

/// Takes a connection to another link, where `kept` bytes may have to be written again.
fn change_link(connection: &mut Connection, kept: u64) {
    assert_eq!(connection.leave(()), None);
    assert_eq!(connection.poll_cdc(), None, "nothing more is said on the old link");
    connection.depart(kept);
}

fn consume_all(connection: &mut Connection) -> u32 {
    let len = connection.readable().len();
    connection.consume(len);
    len
}

fn cursor(wrap: u16, count: u32) -> Cursor {
    Cursor { wrap, count }
}

/// What Linux sends first, and what it would drop: see dialect 5.
// RFC 7609 4.3 #2: begin numbering messages at 1
// RFC 7609 A.4 #3: sequence number at byte 2, from 1
// RFC 7609 4.5.1 #10: set R only for diagnosis
#[test]
fn the_first_message_is_number_one_and_carries_the_peers_token() {
    let mut us = bytes(16_384);
    assert_eq!(us.poll_cdc(), None);
    us.produce(100);
    let message = us.poll_cdc().unwrap();
    let expected = Cdc { sequence: 1, token: TOKEN, producer: cursor(0, 100), ..Cdc::default() };
    assert_eq!(message, expected);
}

/// A writer that said B sleeps until it hears from us; one byte is worth a message then.
// RFC 7609 4.3 #1: store what CDC messages say
// RFC 7609 4.5.1 #6: while B holds, report any consumption
// RFC 7609 4.5.1 #7: without B, ordinary updates again
// RFC 7609 4.7.4 #7: tell blocked writer at once
#[test]
fn a_blocked_writer_hears_of_every_byte_until_it_takes_b_back() {
    let (mut a, mut b) = (bytes(65_536), bytes(65_536));
    a.set_bytes_waiting(true);
    a.produce(1000);
    carry(&mut a, &mut b);
    assert_eq!(b.poll_cdc(), None, "nothing is consumed yet");
    b.consume(1);
    let (message, _) = carry(&mut b, &mut a);
    assert_eq!(message.consumer, cursor(0, 1));

    a.set_bytes_waiting(false);
    a.produce(1);
    carry(&mut a, &mut b);
    b.consume(1);
    assert_eq!(b.poll_cdc(), None);
}

/// Bytes that come when the element is full have no message to travel with: B is said before. The
/// reader would keep small reads to itself otherwise, and those bytes would wait for a tenth of
/// the element instead of a few bytes. It costs the reader nothing if none come.
// RFC 7609 4.7.4 #4: set B when bytes are left
// RFC 7609 4.7.4 #9: set B when element is full
#[test]
fn a_full_element_is_announced_with_b() {
    let (mut a, mut b) = (bytes(16_384), bytes(16_384));
    a.produce(16_383);
    assert!(!carry(&mut a, &mut b).0.writer_blocked);
    a.produce(1);
    assert!(carry(&mut a, &mut b).0.writer_blocked);
    b.consume(1);
    assert_eq!(carry(&mut b, &mut a).1.writable_bytes, 1);
    consume_all(&mut b);
    carry(&mut b, &mut a);
    a.shutdown_write();
    assert!(!carry(&mut a, &mut b).0.writer_blocked, "nothing can wait behind the end");
}

/// A peer that has read a full element to its end and closes has lost nothing of ours.
// RFC 7609 4.8.1 #15: reset if C meets pending data
#[test]
fn a_peer_that_closes_on_a_full_element_resets_nobody() {
    let (mut a, mut b) = (bytes(16_384), bytes(16_384));
    a.produce(16_384);
    assert!(carry(&mut a, &mut b).0.writer_blocked);
    consume_all(&mut b);
    b.close(T0);
    let (_, progress) = carry(&mut b, &mut a);
    assert!(progress.peer_closed && !progress.reset);
}

/// R, an operator's question on the other side: is your application reading at all?
// RFC 7609 4.5.1 #8: report next consumption after R
// RFC 7609 4.5.1 #9: answer R if cursor is old
#[test]
fn a_requested_update_is_sent_when_there_is_news() {
    let (mut a, mut b) = (bytes(65_536), bytes(65_536));
    a.produce(10);
    carry(&mut a, &mut b);
    b.consume(1);
    a.produce(1);
    let message = a.poll_cdc().unwrap();
    b.handle_cdc(T0, &Cdc { update_requested: true, ..message }).unwrap();
    assert_eq!(b.poll_cdc().unwrap().consumer, cursor(0, 1));
    assert_eq!(b.poll_cdc(), None);
    b.consume(1);
    assert_eq!(b.poll_cdc().unwrap().consumer, cursor(0, 2));
}

/// A failover delivers old messages late. Taken in, they would move cursors backwards.
// RFC 7609 A.4 #5: discard messages with lower number
// RFC 7609 A.4 #7: repeated number changes nothing
#[test]
fn stale_messages_are_dropped_and_equal_ones_are_not() {
    let (mut a, mut b) = (bytes(65_536), bytes(65_536));
    a.produce(10);
    let first = a.poll_cdc().unwrap();
    a.produce(10);
    let second = a.poll_cdc().unwrap();
    assert_eq!(b.handle_cdc(T0, &second).unwrap().readable_bytes, 20);
    assert_eq!(b.handle_cdc(T0, &first), Ok(Progress::default()));
    assert_eq!(b.readable().len(), 20);
    let again = Cdc { sending_done: true, ..second };
    assert!(b.handle_cdc(T0, &again).unwrap().peer_done);
}

/// After 65,535 messages the number becomes 0; a connection must not stop there.
// RFC 7609 A.4 #6: compare numbers that wrap
// RFC 7609 4.3 #2: begin numbering messages at 1
#[test]
fn sequence_numbers_wrap() {
    let (mut a, mut b) = (bytes(65_536), bytes(65_536));
    for sequence in 1..=70_000_u32 {
        a.produce(1);
        let (message, progress) = carry(&mut a, &mut b);
        assert_eq!(u32::from(message.sequence), sequence % 65_536);
        assert_eq!(progress.readable_bytes, 1);
        consume_all(&mut b);
        if let Some(update) = b.poll_cdc() {
            a.handle_cdc(T0, &update).unwrap();
        }
    }
}

/// A peer that lies about cursors is reset, and must not have changed anything before that.
// RFC 7609 A.4 #11: producer stays within consumer cursor
#[test]
fn cursors_out_of_the_window_are_an_offence_and_change_nothing() {
    let (mut a, mut b) = (bytes(65_536), bytes(65_536));
    a.produce(40_000);
    carry(&mut a, &mut b);
    b.consume(10);
    let honest = Cdc { sequence: 2, token: TOKEN, producer: cursor(0, 40_000), ..Cdc::default() };
    for (message, offence) in [
        // Beyond what we released, though not beyond what was consumed.
        (Cdc { producer: cursor(1, 5), ..honest }, PeerMisbehaved::OverranOurElement),
        // Before the stream began.
        (Cdc { producer: cursor(u16::MAX, 65_535), ..honest }, PeerMisbehaved::OutOfWindow),
        (Cdc { producer: cursor(0, 65_537), ..honest }, PeerMisbehaved::OutOfWindow),
        (Cdc { producer: cursor(7, 0), ..honest }, PeerMisbehaved::OutOfWindow),
        (Cdc { consumer: cursor(0, 1), ..honest }, PeerMisbehaved::ConsumedTheFuture),
    ] {
        let message = Cdc { connection_closed: true, writer_blocked: true, ..message };
        assert_eq!(b.handle_cdc(T0, &message), Err(offence), "{message:?}");
        assert_eq!((b.readable().len(), b.window()), (39_990, 65_536));
        assert_eq!((b.state(), b.poll_cdc()), (State::Active, None));
    }
    assert_eq!(b.handle_cdc(T0, &honest), Ok(Progress::default()));
}

/// A Linux peer that changes the link goes back to what it knows to be delivered, and writes again
/// from there. What it says before it has, an update for instance, has an older producer cursor
/// than we know. That is no news, and no lie: the connection was just saved.
#[test]
fn a_producer_that_goes_back_after_a_failover_is_no_offence() {
    let (mut linux, mut us) = (bytes(65_536), bytes(65_536));
    linux.produce(60_000);
    carry(&mut linux, &mut us);
    us.consume(50_000);
    carry(&mut us, &mut linux);
    linux.produce(20_000);
    carry(&mut linux, &mut us);
    assert_eq!(us.readable().len(), 30_000);
    let validation = Cdc { sequence: 1, failover_validation: true, ..Cdc::default() };
    assert_eq!(us.handle_cdc(T0, &validation), Ok(Progress::default()));
    let update = Cdc { sequence: 3, producer: cursor(0, 60_000), ..Cdc::default() };
    let stale = Cdc { urgent_pending: true, urgent_present: true, ..update };
    for message in [update, stale] {
        assert_eq!(us.handle_cdc(T0, &message), Ok(Progress::default()));
        assert_eq!((us.readable().len(), us.urgent_position()), (30_000, None));
    }
    let more = Cdc { sequence: 4, producer: cursor(1, 20_000), ..update };
    assert_eq!(us.handle_cdc(T0, &more).unwrap().readable_bytes, 85_536 - 80_000);
}

/// A Linux peer whose program has heard our end, and writes on, loses its RNIC: its kernel goes on
/// over another link, does not say so, and does not write again what was under way. What it
/// announces next is partly not there. A program must not get those bytes; that cursors of ours
/// were lost on the way costs nothing.
#[test]
fn bytes_behind_a_missing_message_are_not_believed() {
    let (mut linux, mut us) = (bytes(65_536), bytes(65_536));
    us.produce(10);
    carry(&mut us, &mut linux);
    linux.produce(100);
    carry(&mut linux, &mut us);
    let update = Cdc { sequence: 3, producer: cursor(0, 100), ..Cdc::default() };
    let update = Cdc { consumer: cursor(0, 10), ..update };
    assert_eq!(us.handle_cdc(T0, &update).unwrap().writable_bytes, 10);
    let more = |sequence, count| Cdc { sequence, producer: cursor(0, count), ..update };
    us.shutdown_write();
    let missing = Err(PeerMisbehaved::MessagesMissing);
    assert_eq!(us.handle_cdc(T0, &more(5, 300)), missing);
    assert_eq!(us.readable().len(), 100);

    // Dropped by ourselves, or announced by F: then what comes late on the old link is no gap.
    us.expect_gap();
    assert_eq!(us.handle_cdc(T0, &more(5, 300)).unwrap().readable_bytes, 200);
    let validation = Cdc { sequence: 5, failover_validation: true, ..Cdc::default() };
    us.handle_cdc(T0, &validation).unwrap();
    assert_eq!(us.handle_cdc(T0, &more(6, 350)).unwrap().readable_bytes, 50);
    assert_eq!(us.handle_cdc(T0, &more(9, 400)).unwrap().readable_bytes, 50);
    assert_eq!(us.handle_cdc(T0, &more(11, 500)), missing, "once");
}

/// What F excuses are messages of the link that failed, and there are no more of those than a send
/// queue holds. A link that fails long after that, and without a word, is not excused by it.
#[test]
fn a_failover_that_is_long_past_excuses_nothing() {
    for late in [CDC_UNDER_WAY_MAX, CDC_UNDER_WAY_MAX + 1] {
        let mut us = bytes(65_536);
        let more = |sequence: u16| {
            let producer = cursor(0, sequence.into());
            Cdc { sequence, producer, ..Cdc::default() }
        };
        us.handle_cdc(T0, &more(1)).unwrap();
        us.handle_cdc(T0, &more(2)).unwrap();
        us.handle_cdc(T0, &Cdc { failover_validation: true, ..more(2) }).unwrap();
        for sequence in 3..=2 + late {
            assert_eq!(us.handle_cdc(T0, &more(sequence)).unwrap().readable_bytes, 1);
        }
        us.shutdown_write();
        let behind = us.handle_cdc(T0, &more(2 + late + 3));
        if late == CDC_UNDER_WAY_MAX {
            assert_eq!(behind.unwrap().readable_bytes, 3, "the last of them may be the lost ones");
        } else {
            assert_eq!(behind, Err(PeerMisbehaved::MessagesMissing));
        }
    }
}

/// A program asks, says its end and waits for the answer, and the first words of it are lost with
/// the link: the peer has said nothing before the gap, and what it says behind it is worth no more.
#[test]
fn the_first_messages_may_be_missing_too() {
    let mut us = bytes(65_536);
    us.shutdown_write();
    let more = |sequence, count| Cdc { sequence, producer: cursor(0, count), ..Cdc::default() };
    assert_eq!(us.arrival(&more(2, 200), None), Arrival::Waits);
    assert_eq!(us.handle_cdc(T0, &more(2, 200)), Err(PeerMisbehaved::MessagesMissing));
    assert_eq!(us.readable().len(), 0);
    assert_eq!(us.arrival(&more(1, 100), None), Arrival::InOrder);
    assert_eq!(us.handle_cdc(T0, &more(1, 100)).unwrap().readable_bytes, 100);
    assert_eq!(us.handle_cdc(T0, &more(2, 200)).unwrap().readable_bytes, 100);
}

/// While both programs write, every peer that changes the link says so, and a gap is of our own
/// making: a poller that has just taken a connection over hears its link before what the last owner
/// passes on. Users would see healthy connections reset by a failover. Once the peer has said its
/// end, what is missing counts.
#[test]
fn messages_that_overtake_each_other_are_believed_until_the_end() {
    let mut us = bytes(65_536);
    let more = |sequence, count| Cdc { sequence, producer: cursor(0, count), ..Cdc::default() };
    assert_eq!(us.handle_cdc(T0, &more(1, 100)).unwrap().readable_bytes, 100);
    assert_eq!(us.handle_cdc(T0, &more(4, 400)).unwrap().readable_bytes, 300);
    assert_eq!(us.handle_cdc(T0, &more(3, 300)), Ok(Progress::default()));
    let last = Cdc { sending_done: true, ..more(6, 600) };
    assert_eq!(us.handle_cdc(T0, &last), Err(PeerMisbehaved::MessagesMissing));
    assert_eq!(us.readable().len(), 400);
}

/// Bytes that were written but not announced cannot have been consumed.
#[test]
fn consuming_what_was_not_announced_is_an_offence() {
    let mut us = bytes(16_384);
    us.produce(100);
    let message = Cdc { sequence: 1, consumer: cursor(0, 100), ..Cdc::default() };
    assert_eq!(us.handle_cdc(T0, &message), Err(PeerMisbehaved::ConsumedTheFuture));
    us.poll_cdc();
    assert_eq!(us.handle_cdc(T0, &message).unwrap().writable_bytes, 100);
    assert_eq!(us.window(), 16_384);
}

#[test]
#[should_panic(expected = "window")]
fn writing_beyond_the_window_is_our_bug() {
    bytes(16_384).produce(16_385);
}

#[test]
#[should_panic(expected = "readable")]
fn consuming_what_nobody_wrote_is_our_bug() {
    bytes(16_384).consume(1);
}

/// RFC 4.6: the first words on a new link say what the old one is known to have delivered; then
/// everything is said again under a new number.
// RFC 7609 4.6.1 #2: keep SS of delivered writes
// RFC 7609 4.6.1 #4: F message first on new link
// RFC 7609 4.6.1 #5: F message carries SS
// RFC 7609 4.6.1 #6: ignore other fields of F message
// RFC 7609 4.6.1 #8: validate before resuming
// RFC 7609 4.6.2 #3: combine repeated writes
// RFC 7609 4.6.2 #4: higher number for combined writes
// RFC 7609 A.4 #4: do not number failover validation
// RFC 7609 4.3 #3: number messages, not bytes
// RFC 7609 4.6.1 #1: always validate at failover
// RFC 7609 4.8.1 #2: Active after the rendezvous
#[test]
fn failover_validates_and_repeats() {
    let (mut a, mut b) = (bytes(65_536), bytes(65_536));
    a.produce(10);
    carry(&mut a, &mut b);
    a.cdc_acknowledged(1);
    a.produce(10);
    let lost = a.poll_cdc().unwrap();
    assert_eq!((lost.sequence, a.is_heard()), (2, false));

    change_link(&mut a, 10);
    assert_eq!(a.replay(), None, "first F");
    let validation = a.poll_cdc().unwrap();
    let expected = Cdc { sequence: 1, token: TOKEN, failover_validation: true, ..Cdc::default() };
    assert_eq!(validation, expected);
    assert_eq!(a.poll_cdc(), None, "first the bytes");
    let rest = Ring::new(65_536).span(Position(10), 10);
    assert_eq!(a.replay(), Some(Replay { done: 0, rest }));
    a.replayed(4);
    assert_eq!(a.replay(), Some(Replay { done: 4, rest: rest.split_at(4).1 }));
    a.replayed(6);
    let repeated = a.poll_cdc().unwrap();
    assert_eq!((repeated.sequence, repeated.producer), (3, cursor(0, 20)));
    assert_eq!((a.poll_cdc(), a.replay()), (None, None));

    assert_eq!(b.handle_cdc(T0, &validation), Ok(Progress::default()));
    assert_eq!(b.handle_cdc(T0, &repeated).unwrap().readable_bytes, 10);
    assert_eq!(b.state(), State::Active);
}

/// The message that announced an urgent byte is lost with its link: the one that repeats it on the
/// next link announces it as urgent again, and still nothing follows.
// RFC 7609 4.6.2 #3: combine repeated writes
#[test]
fn a_failover_keeps_the_urgent_byte() {
    let (mut a, mut b) = (bytes(65_536), bytes(65_536));
    a.produce_urgent(10);
    a.poll_cdc().unwrap();
    change_link(&mut a, 10);
    assert!(a.poll_cdc().unwrap().failover_validation);
    a.replayed(10);
    let (repeated, progress) = carry(&mut a, &mut b);
    assert!(repeated.urgent_pending && repeated.urgent_present && progress.urgent);
    assert_eq!((b.urgent_position(), a.window()), (Some(9), 0));
    consume_all(&mut b);
    carry(&mut b, &mut a);
    assert_eq!(a.window(), 65_536);
}

/// Linux takes P without new bytes for a promise, and forgets the urgent byte that it has: its
/// program gets none, its cursor stays before it for ever, and our window stays closed. U changes
/// nothing there, and is for those who have missed the message that brought the byte.
// RFC 7609 4.7.5 #1: P and U announce urgent data
#[test]
fn nothing_but_the_urgent_byte_announces_it() {
    let (mut a, mut b) = (bytes(65_536), bytes(65_536));
    a.produce_urgent(1);
    let (first, _) = carry(&mut a, &mut b);
    assert!(first.urgent_pending && first.urgent_present);
    b.produce(40_000);
    carry(&mut b, &mut a);
    consume_all(&mut a);
    let (update, _) = carry(&mut a, &mut b);
    a.shutdown_write();
    let (end, _) = carry(&mut a, &mut b);
    a.cdc_acknowledged(end.sequence);
    change_link(&mut a, 0);
    assert!(a.poll_cdc().unwrap().failover_validation);
    let (repeated, _) = carry(&mut a, &mut b);
    for message in [update, end, repeated] {
        assert!(!message.urgent_pending && message.urgent_present, "{message:?}");
    }
    assert_eq!(b.urgent_position(), Some(0));
}

/// RFC 4.6.1: bytes that the old NIC acknowledged and then lost cannot be had again. The stream
/// has a hole, and only a reset tells the application.
// RFC 7609 2.3 #8: reset when failover validation fails
// RFC 7609 4.6.1 #3: keep SR of arrived writes
// RFC 7609 4.6.1 #9: wait briefly, then reset on gap
#[test]
fn failover_with_lost_data_resets_the_connection() {
    let (mut a, mut b) = (bytes(65_536), bytes(65_536));
    a.produce(10);
    let lost = a.poll_cdc().unwrap();
    a.cdc_acknowledged(lost.sequence);
    change_link(&mut a, 0);
    let progress = b.handle_cdc(T0, &a.poll_cdc().unwrap()).unwrap();
    assert!(progress.reset);
    assert_eq!(b.state(), State::PeerAbortWait);
    assert!(b.poll_cdc().unwrap().abnormal_close);
}

/// An acknowledgement may be lost on our link while the peer says over another one that it has read
/// the bytes. Newer bytes then stand in their place. If we wrote the old ones again, the peer's
/// program would get bytes that it has had before.
#[test]
fn what_the_peer_has_read_is_not_written_again() {
    let (mut a, mut b) = (bytes(16_384), bytes(16_384));
    a.produce(16_384);
    carry(&mut a, &mut b);
    b.consume(16_384);
    carry(&mut b, &mut a);
    a.produce(16_000);
    assert_eq!(carry(&mut a, &mut b).1.readable_bytes, 16_000);
    assert_eq!(a.leave(()), None);
    // All of it is kept: no acknowledgement has come.
    assert_eq!(a.depart(32_384), ((), 16_000));
    assert!(a.poll_cdc().unwrap().failover_validation);
    let rest = Ring::new(16_384).span(Position(16_384), 16_000);
    assert_eq!(a.replay(), Some(Replay { done: 0, rest }));
}

/// Nobody reads what is written for a peer that has closed, or for a program that was reset; the
/// message with the last word still goes out.
// RFC 7609 4.8.1 #12: write nothing after C
#[test]
fn what_nobody_would_read_is_not_written_again() {
    for validated in [false, true] {
        let mut us = bytes(16_384);
        us.produce(100);
        us.poll_cdc().unwrap();
        change_link(&mut us, 100);
        let validates = |us: &mut Connection| us.poll_cdc().unwrap().failover_validation;
        assert!(!validated || validates(&mut us));
        us.forget_replay();
        us.abort(T0);
        assert!(validated || validates(&mut us));
        assert_eq!(us.replay(), None);
        assert!(us.poll_cdc().unwrap().abnormal_close);
        us.cdc_acknowledged(2);
        assert!(us.is_heard());
    }
}

/// Two links break one after the other, the second before anything was heard over it: the way leads
/// on from wherever the connection is, and the first order is void.
// RFC 7609 2.3 #3: move connections of a failed link
#[test]
fn a_connection_on_its_way_may_be_sent_elsewhere() {
    let setup = ConnectionSetup {
        peer_token: TOKEN,
        element: Ring::new(16_384),
        peer_element: Ring::new(16_384),
        close_wait: PATIENCE,
        streams: Streams::One,
    };
    let mut us = Connection::<&str>::new(setup);
    us.produce(100);
    us.poll_cdc().unwrap();
    assert_eq!((us.leave("second"), us.leave("third")), (None, Some("second")));
    assert_eq!(us.depart(100), ("third", 100));
    assert!(us.poll_cdc().unwrap().failover_validation);
    us.replayed(60);
    assert_eq!(us.leave("fourth"), None);
    assert_eq!((us.poll_cdc(), us.replay()), (None, None));
    assert_eq!(us.depart(100), ("fourth", 100));
    assert!(us.poll_cdc().unwrap().failover_validation, "on each link");
    us.leave("fifth");
    us.lose();
    assert!(us.is_lost() && us.poll_cdc().is_none());
    assert_eq!(us.into_route(), Some("fifth"));
}

/// A message that waits is taken in when what it waits for has come, which may come on another
/// queue: in the meantime others queue up behind it, and F explains the gap that they wait behind.
// RFC 7609 4.6.1 #8: validate before resuming
#[test]
fn what_arrives_early_waits_for_what_comes_late() {
    let mut us = bytes(65_536);
    let more = |sequence, count| Cdc { sequence, producer: cursor(0, count), ..Cdc::default() };
    let validation = |sequence| Cdc { failover_validation: true, ..more(sequence, 0) };
    us.handle_cdc(T0, &more(1, 100)).unwrap();
    us.shutdown_write();
    assert_eq!(us.arrival(&more(2, 200), None), Arrival::InOrder);
    assert_eq!(us.arrival(&validation(1), None), Arrival::InOrder);
    assert_eq!(us.arrival(&validation(3), None), Arrival::Waits);

    let gap = more(5, 500);
    assert_eq!(us.arrival(&gap, None), Arrival::Waits);
    for (message, arrival) in [
        (more(6, 600), Arrival::Waits),
        (more(5, 500), Arrival::InOrder),
        (more(2, 200), Arrival::InOrder),
        (validation(3), Arrival::WaitsFirst),
        (validation(1), Arrival::InOrder),
    ] {
        assert_eq!(us.arrival(&message, Some(&gap)), arrival, "{message:?}");
    }
    let first = validation(3);
    for (message, arrival) in [
        (more(4, 400), Arrival::Waits),
        (more(3, 300), Arrival::InOrder),
        (validation(4), Arrival::Waits),
    ] {
        assert_eq!(us.arrival(&message, Some(&first)), arrival, "{message:?}");
    }
    assert!(!us.is_gap_filled(&gap) && !us.is_gap_filled(&first));
    us.handle_cdc(T0, &more(2, 200)).unwrap();
    us.handle_cdc(T0, &more(3, 300)).unwrap();
    assert!(us.is_gap_filled(&first) && !us.is_gap_filled(&gap));
    us.handle_cdc(T0, &more(4, 400)).unwrap();
    assert!(us.is_gap_filled(&gap));
    assert!(!us.has_peer_moved());
    us.handle_cdc(T0, &first).unwrap();
    assert!(us.has_peer_moved());
}

/// The window is what the peer's element has room for, whatever ours has.
// RFC 7609 4.5.1 #1: compute window from both cursors
#[test]
fn each_direction_has_its_own_element() {
    let us = connection(Ring::new(16_384), Ring::new(65_536));
    assert_eq!(us.window(), 65_536);
    assert_eq!(us.readable(), Ring::new(16_384).span(Position(0), 0));
}

/// When Linux would tell us of what its program has read: `unconfirmed` bytes, with `free` bytes of
/// window as we see it; dialect 5.
fn linux_tells(capacity: u32, unconfirmed: u32, free: u32, blocked: bool) -> bool {
    let limit = (capacity / 10).max(2_304);
    unconfirmed > limit && (free <= capacity / 2 || blocked)
}

/// A Linux writer sleeps until the update that another Linux would send; a later one would stop the
/// stream for ever. So ours comes in every case in which that does, and never after it.
// RFC 7609 4.5.1 #2: update when window is below half
// RFC 7609 4.5.1 #3: no update above half window
#[test]
fn updates_never_wait_for_longer_than_those_of_linux() {
    let mut told = 0;
    for size in (0..6).map(RmbeSize::from_notation) {
        let capacity = size.bytes();
        let step = capacity / 64;
        for written in (step..=capacity).step_by(step as usize) {
            for read in (1..=written).step_by(step as usize / 2 + 1) {
                for blocked in [false, true] {
                    let (mut linux, mut us) = (bytes(capacity), bytes(capacity));
                    linux.set_bytes_waiting(blocked);
                    linux.produce(written);
                    carry(&mut linux, &mut us);
                    us.consume(read);
                    if linux_tells(capacity, read, capacity - written, blocked) {
                        told += 1;
                        assert!(us.poll_cdc().is_some(), "{capacity} {written} {read} {blocked}");
                    }
                }
            }
        }
    }
    assert!(told > 10_000, "{told}");
}

/// The other way round: Linux keeps small reads to itself, and never answers R. Whatever is left of
/// the window is used; we never wait for half of it to be free again.
#[test]
fn a_little_window_is_used() {
    let mut us = bytes(65_536);
    us.produce(65_535);
    us.poll_cdc();
    assert_eq!(us.window(), 1);
    us.produce(1);
    us.set_bytes_waiting(true);
    let message = us.poll_cdc().unwrap();
    assert!(message.writer_blocked && !message.update_requested);
    let update = Cdc { sequence: 1, consumer: cursor(0, 1), ..Cdc::default() };
    assert_eq!(us.handle_cdc(T0, &update).unwrap().writable_bytes, 1);
    assert_eq!(us.window(), 1);
}

/// Kernels from 6.11 on have elements of up to 512 MB. Their cursors wrap there, and not before.
#[test]
fn elements_of_half_a_gigabyte_have_cursors() {
    let size = RmbeSize::from_notation(15);
    assert_eq!(size.bytes(), 1 << 29);
    let mut us = connection(Ring::new(16_384), Ring::new(size.bytes()));
    us.produce((1 << 29) - 1);
    assert_eq!(us.poll_cdc().unwrap().producer, cursor(0, (1 << 29) - 1));
    us.produce(1);
    assert_eq!(us.poll_cdc().unwrap().producer, cursor(1, 0));
    assert_eq!(us.window(), 0);
}
