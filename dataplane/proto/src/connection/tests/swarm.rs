//! Two connections back to back, with messages under way for as long as chance will have it.

use std::collections::VecDeque;
use std::vec::Vec;

use proptest::prelude::*;

use super::*;

/// One side: the machine, and an application with a number of bytes to send.
struct Host {
    connection: Connection,
    to_write: u64,
    written: u64,
    read: u64,
    /// The end of the peer's stream was seen.
    ended: bool,
    /// Messages under way to this host, oldest first: a reliable queue pair keeps the order.
    inbound: VecDeque<Cdc>,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Write(u32),
    Read(u32),
    Announce,
    Deliver,
}

impl Host {
    fn new(element: u32, peer_element: u32, to_write: u64) -> Self {
        let connection = connection(Ring::new(element), Ring::new(peer_element));
        let inbound = VecDeque::new();
        Self { connection, to_write, written: 0, read: 0, ended: false, inbound }
    }

    fn write(&mut self, most: u32) {
        let rest = self.to_write - self.written;
        let window = self.connection.window();
        let len = u64::from(window.min(most)).min(rest);
        self.connection.produce(u32::try_from(len).unwrap());
        self.written += len;
        self.connection.set_bytes_waiting(self.written < self.to_write);
        if self.written == self.to_write {
            self.connection.shutdown_write();
        }
    }

    fn read(&mut self, most: u32) {
        let len = self.connection.readable().len().min(most);
        self.connection.consume(len);
        self.read += u64::from(len);
    }

    fn announce(&mut self) -> Option<Cdc> {
        let over = self.ended && self.connection.readable().is_empty();
        if over && self.written == self.to_write {
            self.connection.close(T0);
        }
        self.connection.poll_cdc()
    }

    /// Returns whether there was something to deliver.
    fn deliver(&mut self) -> bool {
        let Some(message) = self.inbound.pop_front() else { return false };
        let before = self.connection.readable().len();
        let progress = self.connection.handle_cdc(T0, &message).unwrap();
        assert_eq!(self.connection.readable().len(), before + progress.readable_bytes);
        assert!(!progress.reset);
        self.ended |= progress.peer_done;
        true
    }
}

fn turn(hosts: &mut [Host; 2], side: usize, step: Step) -> bool {
    match step {
        Step::Write(most) => hosts[side].write(most),
        Step::Read(most) => hosts[side].read(most),
        Step::Announce => {
            let message = hosts[side].announce();
            let due = message.is_some();
            hosts[1 - side].inbound.extend(message);
            return due;
        }
        Step::Deliver => return hosts[side].deliver(),
    }
    false
}

fn steps() -> impl Strategy<Value = Vec<(usize, Step)>> {
    let step = prop_oneof![
        (1..20_000_u32).prop_map(Step::Write),
        (1..20_000_u32).prop_map(Step::Read),
        Just(Step::Announce),
        Just(Step::Deliver),
    ];
    prop::collection::vec((0..2_usize, step), 0..400)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever the pace of either application and of the messages: every byte arrives, no window
    /// is overrun (the machines would say so), nobody waits for ever, and both elements are free
    /// in the end.
    #[test]
    fn streams_arrive_and_connections_close(
        elements in (0..3_u32, 0..3_u32).prop_map(|(a, b)| (16_384 << a, 16_384 << b)),
        to_write in (0..200_000_u64, 0..200_000_u64),
        steps in steps(),
        last_read in 1..30_000_u32,
    ) {
        let mut hosts = [
            Host::new(elements.0, elements.1, to_write.0),
            Host::new(elements.1, elements.0, to_write.1),
        ];
        for (side, step) in steps {
            turn(&mut hosts, side, step);
        }
        // Now the applications and the network just work, until nothing moves any more.
        let mut moved = true;
        while moved {
            moved = false;
            for side in [0, 1] {
                let before = (hosts[side].written, hosts[side].read);
                for step in [Step::Write(u32::MAX), Step::Read(last_read), Step::Announce] {
                    moved |= turn(&mut hosts, side, step);
                }
                moved |= turn(&mut hosts, 1 - side, Step::Deliver);
                moved |= (hosts[side].written, hosts[side].read) != before;
            }
        }
        for side in [0, 1] {
            prop_assert_eq!(hosts[side].written, hosts[side].to_write, "stalled");
            prop_assert_eq!(hosts[1 - side].read, hosts[side].to_write, "lost");
            prop_assert!(hosts[side].connection.is_closed());
        }
    }

    /// Garbage from a peer is an error or harmless, never a panic: it would end every connection
    /// of the process.
    #[test]
    fn no_message_of_a_peer_is_fatal(
        messages in prop::collection::vec(
            (any::<[u16; 2]>(), any::<[u32; 2]>(), any::<[bool; 10]>(), 0..3_u16), 1..40),
        streams in prop::sample::select(&[Streams::One, Streams::Begins, Streams::Follows]),
    ) {
        let mut us = bytes(16_384);
        us.streams = streams;
        us.produce(1000);
        for (wraps, counts, flags, step) in messages {
            let sequence = us.incoming.received.wrapping_add(step);
            let message = Cdc {
                sequence,
                token: TOKEN,
                producer: cursor(wraps[0] % 3, counts[0] % 16_390),
                consumer: cursor(wraps[1] % 2, counts[1] % 2000),
                writer_blocked: flags[0],
                urgent_pending: flags[1],
                urgent_present: flags[2],
                update_requested: flags[3],
                failover_validation: flags[4],
                sending_done: flags[5],
                connection_closed: flags[6],
                abnormal_close: flags[7],
                odd_stream: flags[8],
                keeps: flags[9],
            };
            let before = us.clone();
            if us.handle_cdc(T0, &message).is_err() {
                prop_assert_eq!(us.readable(), before.readable());
                prop_assert_eq!(us.state(), before.state());
            }
            consume_all(&mut us);
            us.produce(us.window().min(10));
            us.poll_cdc();
        }
    }
}
