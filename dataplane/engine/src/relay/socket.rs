//! A TCP socket, and what edge-triggered events have said of it.

use std::io;

use crate::streams::Event;

/// A TCP socket and what is known of it from edge-triggered events.
#[derive(Debug)]
pub(crate) struct Socket<S> {
    pub(crate) stream: S,
    /// A read may bring something.
    pub(crate) readable: bool,
    /// A write may take something.
    pub(crate) writable: bool,
    /// An event has reported the end of the stream or an error: a short read does not mean that
    /// nothing follows.
    pub(crate) ending: bool,
    /// It is broken. When the bytes before that are read, a read reports the error, unless it has
    /// been told already.
    pub(crate) failed: bool,
    /// The error has been told already, to a write or behind the bytes of a read. A read behind the
    /// last bytes then says that the stream has ended, and it has not.
    pub(crate) told: bool,
    /// An event has reported the end of the stream, and no error before that: it is there.
    pub(crate) ends: bool,
    /// An urgent byte has come and was not read yet.
    pub(crate) urgent: bool,
    /// The last read filled its buffer, so bytes may be waiting for which no new event will come.
    pub(crate) unseen: bool,
    /// The application sends no more: FIN was read.
    pub(crate) eof: bool,
    /// We sent FIN.
    pub(crate) finished: bool,
}

impl<S> Socket<S> {
    pub(crate) fn new(stream: S) -> Self {
        // Writable until the kernel says otherwise; readable when it says so, which it does at
        // once if bytes are waiting.
        Self {
            stream,
            readable: false,
            writable: true,
            ending: false,
            failed: false,
            told: false,
            ends: false,
            urgent: false,
            unseen: false,
            eof: false,
            finished: false,
        }
    }

    /// Takes in an event of this socket.
    pub(crate) fn note(&mut self, event: &Event) {
        self.readable |= event.readable;
        self.writable |= event.writable;
        self.ending |= event.ending;
        self.ends |= event.ending && !event.failed && !self.failed;
        self.failed |= event.failed;
        self.urgent |= event.urgent;
        self.unseen &= !event.readable;
    }

    /// It is broken, and a write has said so by `error`. A read still brings the bytes before that.
    pub(crate) fn note_error(&mut self, error: &io::Error) {
        (self.failed, self.readable, self.writable) = (true, true, false);
        // EPIPE is different. TCP says it if the end of the stream came before the reset. A Unix
        // socket says it in any case, and keeps its error for the reads.
        self.told |= error.kind() != io::ErrorKind::BrokenPipe && !self.ends;
    }

    /// It is broken, and may have sent bytes before that were not read yet.
    pub(crate) fn has_last_bytes(&self) -> bool {
        self.failed && self.readable && !self.eof
    }

    /// After a read, another one in the same turn brings what belongs to the bytes of the first:
    /// an urgent byte behind them, or the end of the stream. Not a reset, as far as we know: the
    /// bytes before it must have left. And not more of a stream than a turn may read.
    pub(crate) fn is_worth_another_read(&self) -> bool {
        self.urgent || (self.ending && !self.failed && !self.unseen)
    }

    /// Both directions have ended.
    pub(crate) fn is_done(&self) -> bool {
        self.eof && self.finished
    }
}
