//! Programs at both ends: they send bytes that can be told from all others, and check what comes.

use std::collections::VecDeque;

use crate::tcp;

/// A program with one TCP connection.
#[derive(Debug)]
pub(crate) struct Application {
    tcp: tcp::Application,
    /// Decides what it sends.
    seed: u64,
    /// Decides what it must receive.
    peer_seed: u64,
    wanted: u64,
    sent: u64,
    /// Where in its stream the urgent bytes stand that it has not sent yet.
    urgent: VecDeque<u64>,
    /// Where those stand that it sent.
    urgent_sent: Vec<u64>,
    write_max: usize,
    read_max: usize,
    received: u64,
    asleep: bool,
    /// It will say FIN when all is sent.
    will_finish: bool,
    finished: bool,
    /// Resets or closes when so many bytes were sent.
    gone: bool,
    heard: Heard,
}

/// What a program has heard last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// Bytes, or nothing yet.
    Bytes,
    /// The end of the stream.
    End,
    /// That the connection is broken.
    Reset,
}

impl Application {
    pub(crate) fn new(tcp: tcp::Application, seed: u64, peer_seed: u64) -> Self {
        Self {
            tcp,
            seed,
            peer_seed,
            wanted: 0,
            sent: 0,
            urgent: VecDeque::new(),
            urgent_sent: Vec::new(),
            write_max: usize::MAX,
            read_max: usize::MAX,
            received: 0,
            asleep: false,
            will_finish: false,
            finished: false,
            gone: false,
            heard: Heard::Bytes,
        }
    }

    /// Writes `len` more bytes, as fast as they are taken.
    pub(crate) fn write(&mut self, len: usize) {
        assert!(!self.will_finish, "nothing follows the end");
        self.wanted += len as u64;
    }

    /// Writes one more byte, which is urgent.
    pub(crate) fn write_urgent(&mut self) {
        self.urgent.push_back(self.wanted);
        self.write(1);
    }

    /// The first `len` bytes went out before its connection was handed over.
    pub(crate) fn has_sent(&mut self, len: u64) {
        self.wanted += len;
        self.sent += len;
    }

    /// Writes at most so many bytes at once.
    pub(crate) fn write_at_most(&mut self, len: usize) {
        self.write_max = len;
    }

    /// Reads at most so many bytes at once.
    pub(crate) fn read_at_most(&mut self, len: usize) {
        self.read_max = len;
    }

    /// FIN, after what is still to be written.
    pub(crate) fn finish(&mut self) {
        self.will_finish = true;
    }

    /// FIN, at once, and RST as soon as all that was sent was read.
    pub(crate) fn finish_and_break(&mut self) {
        self.gone = true;
        self.tcp.finish_and_break();
    }

    /// RST, at once.
    pub(crate) fn reset(&mut self) {
        self.gone = true;
        self.tcp.reset();
    }

    /// Closes, at once.
    pub(crate) fn close(&mut self) {
        self.gone = true;
        self.tcp.close();
    }

    /// Says that its end is to be a reset.
    pub(crate) fn reset_at_end(&mut self) {
        self.tcp.reset_at_end();
    }

    /// Reads nothing until it wakes.
    pub(crate) fn sleep(&mut self) {
        self.asleep = true;
    }

    pub(crate) fn wake(&mut self) {
        self.asleep = false;
    }

    /// Takes one look around: one write, one read. Returns whether anything moved.
    pub(crate) fn act(&mut self) -> bool {
        if self.gone || self.heard == Heard::Reset {
            return false;
        }
        let wrote = self.write_some();
        let read = !self.asleep && self.heard == Heard::Bytes && self.read_some();
        wrote || read
    }

    fn write_some(&mut self) -> bool {
        let left = usize::try_from(self.wanted - self.sent).expect("tests are small");
        let len = left.min(self.write_max).min(self.tcp.room());
        let before_urgent = self.urgent.front().map(|at| at - self.sent);
        if len > 0 && before_urgent == Some(0) {
            let byte = pattern(self.seed, self.sent);
            self.sent += self.tcp.write_urgent(byte).expect("there was room") as u64;
            self.urgent_sent.extend(self.urgent.pop_front());
        } else if len > 0 {
            let most = before_urgent.map_or(len, |bytes| usize::try_from(bytes).unwrap_or(len));
            let bytes = bytes(self.seed, self.sent, len.min(most));
            self.sent += self.tcp.write(&bytes).expect("there was room") as u64;
        }
        let finishes = self.will_finish && !self.finished && self.sent == self.wanted;
        if finishes {
            self.tcp.finish();
            self.finished = true;
        }
        len > 0 || finishes
    }

    fn read_some(&mut self) -> bool {
        match self.tcp.read(self.read_max) {
            tcp::Read::Nothing => return false,
            tcp::Read::Finished => self.heard = Heard::End,
            tcp::Read::Reset => self.heard = Heard::Reset,
            tcp::Read::Bytes(came) => {
                let right = bytes(self.peer_seed, self.received, came.len());
                if let Some(wrong) = came.iter().zip(&right).position(|(one, other)| one != other) {
                    panic!("byte {} is not what was sent", self.received + wrong as u64);
                }
                self.received += came.len() as u64;
            }
        }
        true
    }

    /// Bytes that were taken from it.
    pub(crate) fn sent(&self) -> u64 {
        self.sent
    }

    /// Where in its stream the urgent bytes stood that it sent.
    pub(crate) fn urgent_sent(&self) -> &[u64] {
        &self.urgent_sent
    }

    /// Where in the stream that came the urgent bytes stood.
    pub(crate) fn urgent_received(&self) -> Vec<u64> {
        self.tcp.marks()
    }

    /// Bytes that came, each checked.
    pub(crate) fn received(&self) -> u64 {
        self.received
    }

    pub(crate) fn heard(&self) -> Heard {
        self.heard
    }

    /// Whether it reset or closed its connection.
    pub(crate) fn is_gone(&self) -> bool {
        self.gone
    }

    /// Whether it has reset its connection: at once, or by a close that left bytes unread.
    pub(crate) fn has_reset(&self) -> bool {
        self.tcp.has_reset()
    }

    /// Whether it reads whatever comes.
    pub(crate) fn is_reading(&self) -> bool {
        !self.asleep && !self.gone && self.heard == Heard::Bytes
    }

    /// Whether it writes no more than it was told to.
    pub(crate) fn will_finish(&self) -> bool {
        self.will_finish
    }

    /// Whether it said FIN.
    pub(crate) fn has_finished(&self) -> bool {
        self.finished
    }

    /// Whether its stream had an end: it said FIN, or closed its connection, and that is no reset.
    pub(crate) fn has_ended(&self) -> bool {
        self.finished || self.tcp.has_finished() && !self.tcp.is_to_reset()
    }

    /// Whether it has bytes that nobody takes.
    pub(crate) fn is_blocked(&self) -> bool {
        self.sent < self.wanted
    }

    /// Whether something waits to be read.
    pub(crate) fn is_readable(&self) -> bool {
        self.tcp.is_readable()
    }
}

/// `len` bytes from `at` of the stream of `seed`.
pub(crate) fn bytes(seed: u64, at: u64, len: usize) -> Vec<u8> {
    let (number, skipped) = (at / 8, usize::try_from(at % 8).expect("less than a word"));
    let wanted = skipped + len;
    let mut bytes = Vec::with_capacity(wanted + 8);
    // By words: byte by byte, swarms would spend a third of their time here.
    for number in (number..).take(wanted.div_ceil(8)) {
        bytes.extend_from_slice(&word(seed, number));
    }
    bytes.truncate(wanted);
    bytes.drain(..skipped);
    bytes
}

/// The byte at `at` of the stream of `seed`.
fn pattern(seed: u64, at: u64) -> u8 {
    bytes(seed, at, 1)[0]
}

/// The word at `number` of the stream of `seed`.
fn word(seed: u64, number: u64) -> [u8; 8] {
    let mixed = (number.wrapping_add(seed << 40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed ^ (mixed >> 32)).to_be_bytes()
}

/// Judges what went in and what came out at both ends of a connection that is over. Returns whether
/// each end heard everything, and the end of it. An end that has closed hears no end; it must have
/// heard everything before, because bytes that come later are answered by a reset.
///
/// # Panics
///
/// If an end still waits; if it believes that it has heard everything, and has not, or hears an end
/// of a stream that was reset instead; or if an ordinary byte came as urgent. TCP has one urgent
/// byte at a time, so an earlier one may have come as an ordinary byte; the last one may not.
pub(crate) fn judge_streams([one, other]: [&Application; 2], story: &str) -> bool {
    let mut well = true;
    for (writer, reader) in [(one, other), (other, one)] {
        assert!(reader.received() <= writer.sent(), "{story}");
        assert!(reader.is_gone() || reader.heard() != Heard::Bytes, "{story}: it waits");
        let all = reader.received() == writer.sent();
        // Complete, or it knows that it is not.
        assert!(all || reader.is_gone() || reader.heard() != Heard::End, "{story}: cut short");
        // Else what a crash has cut off would look whole.
        assert!(
            writer.has_ended() || reader.heard() != Heard::End,
            "{story}: heard an end that nobody sent"
        );
        let (sent, came) = (writer.urgent_sent(), reader.urgent_received());
        let invented = came.iter().find(|at| !sent.contains(at));
        assert_eq!(invented, None, "{story}: an ordinary byte came as urgent");
        assert!(came.is_sorted_by(|a, b| a < b), "{story}: {came:?} came as urgent");
        let last_came = came.last() == sent.last();
        assert!(!all || last_came, "{story}: {sent:?} were urgent, {came:?} came so");
        let closed = reader.is_gone() && !reader.has_reset();
        well &= all && (closed || reader.heard() == Heard::End);
    }
    well
}
