//! A connection that writes down what it saw, in words that do not depend on the route.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::{Receiver, Sender};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use socket2::SockRef;

use super::SILENCE_LIMIT;
use crate::hosts::set_limit;
use crate::pattern::{self, Pattern, StreamDigest};

/// One side's connection and what it saw.
///
/// It writes down content, end of stream and reset. It does not write down how bytes were cut into
/// reads, nor which of several errors a broken connection reported first: on TCP, too, these are a
/// matter of chance.
pub(super) struct Tape {
    /// None after [`Tape::close`] or [`Tape::reset`], or if there never was one.
    stream: Option<TcpStream>,
    events: Vec<String>,
    to_other: Sender<()>,
    from_other: Receiver<()>,
}

impl Tape {
    pub(super) fn new(
        stream: io::Result<TcpStream>,
        to_other: Sender<()>,
        from_other: Receiver<()>,
    ) -> Self {
        let mut tape = Self { stream: None, events: Vec::new(), to_other, from_other };
        match stream {
            Ok(stream) => {
                set_limit(&stream, SILENCE_LIMIT);
                stream.set_nodelay(true).expect("an open socket");
                tape.stream = Some(stream);
            }
            // A gateway's reset may be faster than the return of `connect`: see `see_refusal`.
            Err(error) if is_refusal(&error) => tape.saw("refused"),
            Err(error) => panic!("connect: {error}"),
        }
        tape
    }

    pub(super) fn into_events(self) -> Vec<String> {
        self.events
    }

    /// Writes `bytes` bytes of the pattern of `seed`; the kernel decides how they are cut.
    pub(super) fn write(&mut self, seed: u64, bytes: u64) {
        let result = pattern::send(&mut self.stream(), seed, bytes);
        match result {
            Ok(digest) => self.saw(format!("wrote {digest:?}")),
            Err(error) => self.saw_broken_write(&error),
        }
    }

    /// Writes the pattern of `seed` in pieces of these sizes, each with one system call.
    pub(super) fn write_pieces(&mut self, seed: u64, sizes: impl Iterator<Item = usize>) {
        let mut pattern = Pattern::new(seed);
        for size in sizes {
            let mut piece = vec![0; size];
            pattern.fill(&mut piece);
            if let Err(error) = self.stream().write_all(&piece) {
                return self.saw_broken_write(&error);
            }
        }
        self.saw(format!("wrote {:?}", pattern.digest()));
    }

    /// Writes pieces like [`Tape::write_pieces`], half-closes, and meanwhile reads to the end.
    pub(super) fn write_pieces_and_read(&mut self, seed: u64, sizes: impl Iterator<Item = usize>) {
        let mut reading = self.stream().try_clone().expect("an open socket");
        let read = thread::spawn(move || pattern::receive(&mut reading));
        self.write_pieces(seed, sizes);
        self.finish();
        match read.join().expect("reading does not panic") {
            Ok(digest) => self.saw(format!("read {digest:?}, then the end")),
            Err(error) => self.saw_broken_read(&error),
        }
    }

    /// Writes while nobody reads, until there has been no room for a second. Then tells the other
    /// side and writes the rest, `bytes` in all.
    pub(super) fn write_unread(&mut self, seed: u64, bytes: usize) {
        let mut all = vec![0; bytes];
        let mut pattern = Pattern::new(seed);
        pattern.fill(&mut all);
        self.stream().set_write_timeout(Some(Duration::from_secs(1))).expect("an open socket");
        let mut written = 0;
        let blocked = loop {
            match self.stream().write(&all[written..]) {
                Ok(count) if written + count == bytes => break false,
                Ok(count) => written += count,
                Err(error) if is_timeout(&error) => break true,
                Err(error) => return self.saw_broken_write(&error),
            }
        };
        self.saw(format!("was held back before the end: {blocked}"));
        self.stream().set_write_timeout(Some(SILENCE_LIMIT)).expect("an open socket");
        self.tell();
        match self.stream().write_all(&all[written..]) {
            Ok(()) => self.saw(format!("wrote {:?}", pattern.digest())),
            Err(error) => self.saw_broken_write(&error),
        }
    }

    /// Writes while nobody reads, until there has been no room for a moment.
    pub(super) fn write_until_held_back(&mut self) {
        self.stream().set_write_timeout(Some(Duration::from_millis(300))).expect("an open socket");
        let piece = [7; 64 * 1024];
        loop {
            match self.stream().write(&piece) {
                Ok(_) => {}
                Err(error) if is_timeout(&error) => return self.saw("was held back"),
                Err(error) => return self.saw_broken_write(&error),
            }
        }
    }

    /// Waits until the connection breaks, without reading what has come.
    pub(super) fn await_break(&mut self) {
        let limit = Timespec::try_from(SILENCE_LIMIT).expect("some seconds");
        // What is wrong is reported in any case.
        let mut polled = [PollFd::new(self.stream(), PollFlags::empty())];
        poll(&mut polled, Some(&limit)).expect("an open socket");
        let is_broken = polled[0].revents().contains(PollFlags::ERR | PollFlags::HUP);
        self.saw(format!("broke: {is_broken}"));
    }

    /// Writes until the connection breaks, as a server streaming to a client that has left.
    pub(super) fn write_until_broken(&mut self) {
        let piece = [7; 64 * 1024];
        // More than all buffers on the way can hold, so that a lost reset shows as silence.
        for _ in 0..4096 {
            if let Err(error) = self.stream().write_all(&piece) {
                return self.saw_broken_write(&error);
            }
            thread::sleep(Duration::from_micros(200));
        }
        self.saw("wrote everything, and nobody minded");
    }

    /// Reads exactly `bytes` bytes.
    pub(super) fn read(&mut self, bytes: usize) {
        let mut all = vec![0; bytes];
        match self.stream().read_exact(&mut all) {
            Ok(()) => self.saw(format!("read {:?}", StreamDigest::of(&all))),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => self.saw("end too early"),
            Err(error) => self.saw_broken_read(&error),
        }
    }

    /// Reads to the end of the stream.
    pub(super) fn read_to_end(&mut self) {
        match pattern::receive(&mut self.stream()) {
            Ok(digest) => self.saw(format!("read {digest:?}, then the end")),
            Err(error) => self.saw_broken_read(&error),
        }
    }

    /// Reads `bytes` bytes and writes them back, `rounds` times.
    pub(super) fn echo(&mut self, bytes: usize, rounds: u32) {
        let mut buffer = vec![0; bytes];
        for round in 0..rounds {
            let result = self.stream().read_exact(&mut buffer);
            if let Err(error) = result.and_then(|()| self.stream().write_all(&buffer)) {
                return self.saw(format!("{error} in round {round}"));
            }
        }
        self.saw(format!("echoed {rounds} times"));
    }

    /// Writes one byte and awaits its echo, `rounds` times, as a user who types.
    pub(super) fn type_and_see(&mut self, rounds: u32) {
        for round in 0..rounds {
            let key = [u8::try_from(round % 251).expect("below 251")];
            let mut seen = [0];
            let result = self.stream().write_all(&key);
            if let Err(error) = result.and_then(|()| self.stream().read_exact(&mut seen)) {
                return self.saw(format!("{error} in round {round}"));
            }
            assert_eq!(seen, key, "round {round}");
        }
        self.saw(format!("typed {rounds} keys and saw each"));
    }

    /// Half-closes: no more from this side.
    pub(super) fn finish(&mut self) {
        match self.stream().shutdown(Shutdown::Write) {
            Ok(()) => self.saw("half-closed"),
            Err(error) => self.saw(format!("could not half-close: {}", error.kind())),
        }
    }

    /// Stops reading from the other side.
    pub(super) fn stop_reading(&mut self) {
        let result = self.stream().shutdown(Shutdown::Read);
        self.saw(format!("stopped reading: {}", result.is_ok()));
    }

    pub(super) fn close(&mut self) {
        self.stream = None;
    }

    /// Ends the connection with RST, as an application that crashed with unread data.
    pub(super) fn reset(&mut self) {
        let stream = self.stream.take().expect("still open");
        SockRef::from(&stream).set_linger(Some(Duration::ZERO)).expect("an open socket");
    }

    /// Sleeps, as an application that is busy with something else.
    pub(super) fn sleep_ms(&self, milliseconds: u64) {
        thread::sleep(Duration::from_millis(milliseconds));
    }

    /// Lets the other side go on. The signal does not use the connection.
    pub(super) fn tell(&self) {
        // The other side may have ended, because it saw the connection break.
        self.to_other.send(()).unwrap_or_default();
    }

    /// Waits for the other side's [`Tape::tell`].
    pub(super) fn listen(&self) {
        self.from_other.recv_timeout(SILENCE_LIMIT * 2).expect("the other side tells");
    }

    /// Sees a refused connection, however the route shows it.
    ///
    /// A gateway accepts before it knows that the server refuses, so that `connect` succeeds.
    /// Therefore a reset that follows at once, before any byte, counts as the refusal.
    pub(super) fn see_refusal(&mut self) {
        let Some(stream) = &mut self.stream else { return };
        match stream.read(&mut [0]) {
            Err(error) if error.kind() == ErrorKind::ConnectionReset => self.saw("refused"),
            Ok(count) => self.saw(format!("was not refused: read {count}")),
            Err(error) => self.saw(format!("was not refused: {}", error.kind())),
        }
    }

    pub(super) fn stream(&self) -> &TcpStream {
        self.stream.as_ref().expect("still open")
    }

    pub(super) fn saw(&mut self, event: impl Into<String>) {
        self.events.push(event.into());
    }

    /// After a reset TCP fails the first write with one error and the next with another.
    pub(super) fn saw_broken_write(&mut self, error: &io::Error) {
        if [ErrorKind::ConnectionReset, ErrorKind::BrokenPipe].contains(&error.kind()) {
            self.saw("write broke");
        } else {
            self.saw(format!("write failed: {}", error.kind()));
        }
    }

    pub(super) fn saw_broken_read(&mut self, error: &io::Error) {
        self.saw(format!("read failed: {}", error.kind()));
    }
}

fn is_refusal(error: &io::Error) -> bool {
    [ErrorKind::ConnectionRefused, ErrorKind::ConnectionReset].contains(&error.kind())
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}
