//! Streams that follow one another on one connection.

use std::collections::VecDeque;
use std::vec::Vec;

use proptest::prelude::*;

use super::*;

/// The side that begins streams, and the one that follows.
fn pair() -> [Connection; 2] {
    [Streams::Begins, Streams::Follows].map(of)
}

fn of(streams: Streams) -> Connection {
    Connection::new(ConnectionSetup {
        peer_token: TOKEN,
        element: Ring::new(16_384),
        peer_element: Ring::new(16_384),
        close_wait: PATIENCE,
        streams,
    })
}

/// Carries the one message that is due, and reports it as delivered.
fn say(source: &mut Connection, target: &mut Connection) -> (Cdc, Progress) {
    let (message, progress) = carry(source, target);
    source.cdc_acknowledged(message.sequence);
    (message, progress)
}

fn is_kept(side: &Connection) -> bool {
    side.after_stream() == AfterStream::Keep
}

/// A stream of some bytes each way that both sides have ended.
fn stream(begins: &mut Connection, follows: &mut Connection) {
    begins.produce(100);
    say(begins, follows);
    assert_eq!(consume_all(follows), 100);
    follows.produce(10);
    follows.shutdown_write();
    say(follows, begins);
    consume_all(begins);
    begins.shutdown_write();
    say(begins, follows);
}

/// What each side says of a connection that has carried a stream and may carry another.
fn assert_between([begins, follows]: &[Connection; 2]) {
    assert_eq!([begins, follows].map(Connection::after_stream), [AfterStream::Keep; 2]);
    assert!(!begins.is_closed() && !follows.is_closed());
    assert_eq!([begins, follows].map(|side| (side.window(), side.poll_timeout())), [(0, None); 2]);
}

#[test]
fn one_stream_follows_another() {
    let mut sides = pair();
    let [a, b] = &mut sides;
    for odd in [false, true, false, true] {
        assert!(!is_kept(a) && !is_kept(b));
        stream(a, b);
        assert_between(&[a.clone(), b.clone()]);
        a.begin_stream();
        let (message, progress) = say(a, b);
        assert_eq!((message.odd_stream, message.sending_done), (!odd, false));
        assert!(progress.begun && !progress.peer_done && progress.readable_bytes == 0);
        assert_eq!(
            [&*a, &*b].map(|side| (side.state(), side.window())),
            [(State::Active, 16_384); 2]
        );
        assert_eq!(b.poll_cdc(), None, "nothing need be said to it");
    }
}

/// Most short connections: a request that is there when they begin, an answer, and the end.
#[test]
fn a_message_may_begin_a_stream_and_end_its_half() {
    let [mut a, mut b] = pair();
    stream(&mut a, &mut b);
    a.begin_stream();
    a.produce(7);
    a.shutdown_write();
    let (_, progress) = say(&mut a, &mut b);
    let expected =
        Progress { readable_bytes: 7, peer_done: true, begun: true, ..Progress::default() };
    assert_eq!(progress, expected);
    consume_all(&mut b);
    b.shutdown_write();
    say(&mut b, &mut a);
    assert_between(&[a, b]);
}

/// Bytes that nobody has read yet would be taken for bytes of the next stream. So the side that
/// follows says when it has read everything, and only if it has not said so before.
#[test]
fn a_stream_begins_when_the_last_one_is_consumed() {
    let [mut a, mut b] = pair();
    b.shutdown_write();
    say(&mut b, &mut a);
    a.produce(100);
    a.shutdown_write();
    say(&mut a, &mut b);
    b.consume(40);
    assert_eq!(b.poll_cdc(), None);
    assert!(!is_kept(&a) && !is_kept(&b));
    b.consume(60);
    assert!(!is_kept(&b), "it has something to say");
    assert_eq!(say(&mut b, &mut a).0.consumer, cursor(0, 100));
    assert_between(&[a, b]);
}

/// What was said last may still be on its way, or lost with a link: a message that replaces it
/// would hide where one stream ends and the next begins.
#[test]
fn a_stream_begins_when_the_peer_has_all_of_the_last_one() {
    let [mut a, mut b] = pair();
    b.shutdown_write();
    say(&mut b, &mut a);
    a.shutdown_write();
    let (message, _) = carry(&mut a, &mut b);
    assert_eq!((a.after_stream(), b.after_stream()), (AfterStream::Wait, AfterStream::Keep));
    a.cdc_acknowledged(message.sequence);
    assert!(is_kept(&a));
    a.leave(());
    assert!(!is_kept(&a), "it is between two links");
}

/// What nobody has read may never be read: the side that begins closes, as without streams.
#[test]
fn a_connection_with_unread_bytes_is_not_kept() {
    let [mut a, mut b] = pair();
    a.produce(100);
    b.shutdown_write();
    say(&mut b, &mut a);
    a.shutdown_write();
    say(&mut a, &mut b);
    assert_eq!(a.after_stream(), AfterStream::Close);
    assert!(a.close(T0));
    assert!(say(&mut a, &mut b).1.peer_closed);
    consume_all(&mut b);
    assert_eq!(b.after_stream(), AfterStream::Close);
    b.close(T0);
    say(&mut b, &mut a);
    assert!(a.is_closed() && b.is_closed());
}

/// At the other end of one connection may be a gateway, at that of another one a program.
#[test]
fn who_does_not_say_k_gets_no_other_stream() {
    let mut a = of(Streams::Begins);
    let mut b = of(Streams::One);
    stream(&mut a, &mut b);
    assert_eq!([&a, &b].map(|side| side.after_stream()), [AfterStream::Close; 2]);
}

/// Either side may end a connection at any time, as the RFC has it: nothing is different then.
// RFC 7609 4.8.1 #10: peer's C: PeerCloseWait to Closed
// RFC 7609 4.8.1 #17: close after peer's C: to Closed
#[test]
fn either_side_may_close_between_streams() {
    for closes in [0, 1] {
        let mut sides = pair();
        let [a, b] = &mut sides;
        stream(a, b);
        let (first, second) = if closes == 0 { (a, b) } else { (b, a) };
        assert!(first.close(T0) && first.poll_timeout() == Some(T0 + PATIENCE));
        let (message, progress) = say(first, second);
        assert!(message.connection_closed && progress.peer_closed && !progress.reset);
        assert!(!is_kept(first) && !is_kept(second));
        assert!(second.close(T0));
        say(second, first);
        assert!(first.is_closed() && second.is_closed());
    }
}

/// A gateway that is drained says C to a connection on which a stream has just begun. It must not
/// be reset for that.
#[test]
fn a_stream_that_crosses_a_close_goes_on() {
    let [mut a, mut b] = pair();
    stream(&mut a, &mut b);
    a.begin_stream();
    a.produce(7);
    let begins = a.poll_cdc().unwrap();
    b.close(T0);
    let (message, progress) = say(&mut b, &mut a);
    assert!(message.connection_closed);
    assert_eq!(progress, Progress::default(), "that is about the stream before");
    assert!(b.handle_cdc(T0, &begins).unwrap().begun);
    a.cdc_acknowledged(begins.sequence);
    assert_eq!((b.readable().len(), b.poll_timeout()), (7, None));
    consume_all(&mut b);
    b.produce(3);
    let (message, progress) = say(&mut b, &mut a);
    assert!(!message.connection_closed && progress.readable_bytes == 3 && !progress.peer_closed);
    assert!(!a.has_peer_left() && !a.has_peer_said(Half::Done));
}

/// What comes behind the end of a stream must not be taken for a part of the next one.
#[test]
fn bytes_behind_the_last_stream_are_an_offence() {
    let [mut a, mut b] = pair();
    stream(&mut a, &mut b);
    a.begin_stream();
    say(&mut a, &mut b);
    let honest = b.clone().poll_cdc();
    assert_eq!(honest, None);
    let (sequence, token) = (a.incoming.received.wrapping_add(1), TOKEN);
    let late = Cdc {
        sequence,
        token,
        producer: cursor(0, 11),
        consumer: cursor(0, 100),
        sending_done: true,
        ..Cdc::default()
    };
    assert_eq!(a.handle_cdc(T0, &late), Err(PeerMisbehaved::UnexpectedMessage));
    assert_eq!((a.readable().len(), a.state()), (0, State::Active));
    let known = Cdc { producer: cursor(0, 10), ..late };
    assert_eq!(a.handle_cdc(T0, &known), Ok(Progress::default()));
}

/// The same with a C that was not said yet, and never will be.
#[test]
fn a_stream_overtakes_a_close() {
    let [mut a, mut b] = pair();
    stream(&mut a, &mut b);
    a.begin_stream();
    b.close(T0);
    assert!(say(&mut a, &mut b).1.begun);
    assert_eq!((b.state(), b.poll_cdc()), (State::Active, None));
}

/// A reset is about the connection, whichever stream its message names.
// RFC 7609 4.8.2 #10: answer A with A
#[test]
fn a_reset_that_crosses_a_stream_ends_it() {
    let [mut a, mut b] = pair();
    stream(&mut a, &mut b);
    a.begin_stream();
    let begins = a.poll_cdc().unwrap();
    b.abort(T0);
    assert!(say(&mut b, &mut a).1.reset);
    b.handle_cdc(T0, &begins).unwrap();
    assert_eq!(b.state(), State::PeerAbortWait);
    say(&mut a, &mut b);
    assert!(a.is_closed() && b.is_closed());
}

/// A stream that is reset as soon as it has begun.
#[test]
fn a_stream_may_begin_with_its_reset() {
    let [mut a, mut b] = pair();
    stream(&mut a, &mut b);
    a.begin_stream();
    a.abort(T0);
    let (_, progress) = say(&mut a, &mut b);
    assert!(progress.begun && progress.reset);
    say(&mut b, &mut a);
    assert!(a.is_closed() && b.is_closed());
}

/// A peer that begins a stream when it must not would mix two: it is reset.
#[test]
fn a_stream_that_begins_too_early_is_an_offence_and_changes_nothing() {
    let too_early = Err(PeerMisbehaved::UnexpectedMessage);
    let begins = |sequence| Cdc { sequence, token: TOKEN, odd_stream: true, ..Cdc::default() };
    // We have not ended our half.
    let mut us = of(Streams::Follows);
    assert_eq!(us.handle_cdc(T0, &begins(1)), too_early);
    // It has not read what we sent.
    us.produce(10);
    us.shutdown_write();
    us.poll_cdc().unwrap();
    assert_eq!(us.handle_cdc(T0, &begins(1)), too_early);
    let read = Cdc { consumer: cursor(0, 10), ..begins(1) };
    assert!(us.clone().handle_cdc(T0, &read).unwrap().begun);
    // We have not read what it sent, or have not said so.
    let sent = Cdc { producer: cursor(0, 5), odd_stream: false, ..read };
    us.handle_cdc(T0, &sent).unwrap();
    let next = Cdc { producer: cursor(0, 5), sequence: 2, ..read };
    assert_eq!(us.handle_cdc(T0, &next), too_early);
    us.consume(5);
    assert_eq!(us.handle_cdc(T0, &next), too_early);
    assert_eq!((us.state(), us.odd_stream), (State::PeerCloseWait1(Half::Done), false));
    // It has closed: there is no next one.
    let closed = Cdc { sequence: 3, connection_closed: true, ..sent };
    us.handle_cdc(T0, &closed).unwrap();
    us.shutdown_write();
    assert_eq!(us.handle_cdc(T0, &Cdc { sequence: 4, ..next }), too_early);
}

/// Other implementations may use the bit for something else one day: it means nothing to us unless
/// both sides have agreed on it.
#[test]
fn without_an_agreement_the_bit_means_nothing() {
    let mut us = of(Streams::One);
    us.produce(5);
    us.shutdown_write();
    assert!(!us.poll_cdc().unwrap().odd_stream);
    let message = Cdc {
        sequence: 1,
        token: TOKEN,
        odd_stream: true,
        sending_done: true,
        consumer: cursor(0, 5),
        ..Cdc::default()
    };
    let progress = us.handle_cdc(T0, &message).unwrap();
    assert!(progress.peer_done && !progress.begun && !is_kept(&us));
}

/// A stream begins on a link that fails at that moment: what is said on the new link says it, too.
// RFC 7609 4.6.1 #4: F message first on new link
#[test]
fn a_stream_begins_on_another_link() {
    let [mut a, mut b] = pair();
    stream(&mut a, &mut b);
    a.begin_stream();
    a.produce(7);
    let lost = a.poll_cdc().unwrap();
    change_link(&mut a, 7);
    let (validation, _) = carry(&mut a, &mut b);
    assert!(validation.failover_validation && validation.sequence < lost.sequence);
    a.replayed(7);
    let (message, progress) = say(&mut a, &mut b);
    assert!(message.odd_stream && progress.begun && progress.readable_bytes == 7);
}

/// One side: the connection, and how far its application is with which stream.
struct Host {
    connection: Connection,
    /// What each stream of this side carries.
    streams: Vec<u64>,
    /// Which of them is the present one.
    at: usize,
    written: u64,
    read: u64,
    /// The end of the peer's half was seen.
    ended: bool,
    inbound: VecDeque<Cdc>,
    /// Messages that the other side has taken in, and we have not heard of.
    unacknowledged: VecDeque<u16>,
    /// What came of each stream.
    came: Vec<u64>,
}

impl Host {
    fn new(streams: Streams, sizes: Vec<u64>) -> Self {
        Self {
            connection: of(streams),
            streams: sizes,
            at: 0,
            written: 0,
            read: 0,
            ended: false,
            inbound: VecDeque::new(),
            unacknowledged: VecDeque::new(),
            came: Vec::new(),
        }
    }

    fn write(&mut self, most: u32) {
        let size = self.streams[self.at];
        let len = u64::from(self.connection.window().min(most)).min(size - self.written);
        self.connection.produce(u32::try_from(len).unwrap());
        self.written += len;
        if self.written == size {
            self.connection.shutdown_write();
        }
    }

    fn read(&mut self, most: u32) {
        let len = self.connection.readable().len().min(most);
        self.connection.consume(len);
        self.read += u64::from(len);
    }

    /// Notes that the peer's half of the present stream is over.
    fn next(&mut self) {
        self.came.push(self.read);
        (self.at, self.written, self.read, self.ended) = (self.at + 1, 0, 0, false);
    }

    fn begin(&mut self) -> bool {
        let may = self.at + 1 < self.streams.len() && is_kept(&self.connection);
        if may {
            assert!(self.ended && self.written == self.streams[self.at]);
            self.next();
            self.connection.begin_stream();
        }
        may
    }

    fn deliver(&mut self) -> bool {
        let Some(message) = self.inbound.pop_front() else { return false };
        let unread = self.connection.readable().len();
        let progress = self.connection.handle_cdc(T0, &message).unwrap();
        assert!(!progress.reset);
        if progress.begun {
            assert_eq!(unread, 0, "bytes of two streams");
            self.next();
        }
        self.ended |= progress.peer_done;
        self.unacknowledged.push_back(message.sequence);
        true
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Write(u32),
    Read(u32),
    Announce,
    Deliver,
    Acknowledge,
    Begin,
}

fn turn(hosts: &mut [Host; 2], side: usize, step: Step) -> bool {
    match step {
        Step::Write(most) => hosts[side].write(most),
        Step::Read(most) => hosts[side].read(most),
        Step::Announce => {
            let message = hosts[side].connection.poll_cdc();
            hosts[1 - side].inbound.extend(message);
            return message.is_some();
        }
        Step::Deliver => return hosts[side].deliver(),
        Step::Acknowledge => {
            let Some(number) = hosts[1 - side].unacknowledged.pop_front() else { return false };
            hosts[side].connection.cdc_acknowledged(number);
            return true;
        }
        Step::Begin => return side == 0 && hosts[0].begin(),
    }
    false
}

fn steps() -> impl Strategy<Value = Vec<(usize, Step)>> {
    let step = prop_oneof![
        (1..20_000_u32).prop_map(Step::Write),
        (1..20_000_u32).prop_map(Step::Read),
        Just(Step::Announce),
        Just(Step::Deliver),
        Just(Step::Acknowledge),
        Just(Step::Begin),
    ];
    prop::collection::vec((0..2_usize, step), 0..600)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever the pace of applications, messages and acknowledgements: each stream arrives whole,
    /// with no byte of another one, and nobody waits for ever.
    #[test]
    fn every_stream_arrives_as_it_was_sent(
        sizes in prop::collection::vec((0..40_000_u64, 0..40_000_u64), 1..6),
        steps in steps(),
        last_read in 1..30_000_u32,
    ) {
        let (ours, theirs): (Vec<_>, Vec<_>) = sizes.into_iter().unzip();
        let mut hosts = [
            Host::new(Streams::Begins, ours.clone()),
            Host::new(Streams::Follows, theirs.clone()),
        ];
        for (side, step) in steps {
            turn(&mut hosts, side, step);
        }
        let mut moved = true;
        while moved {
            moved = false;
            for side in [0, 1] {
                let before = (hosts[side].written, hosts[side].read);
                for step in [Step::Write(u32::MAX), Step::Read(last_read)] {
                    turn(&mut hosts, side, step);
                }
                for step in [Step::Announce, Step::Acknowledge, Step::Begin, Step::Deliver] {
                    moved |= turn(&mut hosts, side, step);
                }
                moved |= (hosts[side].written, hosts[side].read) != before;
            }
        }
        for host in &mut hosts {
            prop_assert!(is_kept(&host.connection), "stalled");
            host.next();
        }
        prop_assert_eq!(&hosts[1].came, &ours);
        prop_assert_eq!(&hosts[0].came, &theirs);
    }
}
