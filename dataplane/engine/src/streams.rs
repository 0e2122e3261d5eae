//! TCP sockets, as the poller sees them. The kernel's are in [`kernel`](crate::kernel); a
//! simulator brings its own.

use std::io;

use smcr_memory::Vacant;
use smcr_memory::rmb::Readable;
use smcr_proto::Instant;
use smcr_rnic::Signs;

/// Which socket: its connection's slot, and one of two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// The connection.
    pub slot: u16,
    /// Uses of the slot, so that late events reach nobody else.
    pub generation: u16,
    /// The second socket of a relay between two.
    pub far: bool,
    /// How many streams the connection has carried before, modulo 256: late events reach no other.
    pub turn: u8,
}

impl Key {
    /// As a number of 41 bits.
    pub(crate) fn pack(self) -> u64 {
        let name = u64::from(self.slot) | u64::from(self.generation) << 16;
        name | u64::from(self.far) << 32 | u64::from(self.turn) << 33
    }

    /// The key that is packed like this.
    pub(crate) fn unpack(data: u64) -> Self {
        let half =
            |shift: u32| u16::try_from(data >> shift & 0xffff).expect("sixteen bits were left");
        let turn = u8::try_from(data >> 33 & 0xff).expect("eight bits were left");
        Self { slot: half(0), generation: half(16), far: data >> 32 & 1 == 1, turn }
    }
}

/// What became possible on a socket since it was last impossible.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// Which socket.
    pub key: Key,
    /// Bytes, the end, or an error can be read.
    pub readable: bool,
    /// There is room to write, or an error.
    pub writable: bool,
    /// The end of the stream or an error is waiting behind the bytes: from now on a short read does
    /// not mean that nothing follows.
    pub ending: bool,
    /// An urgent byte has come and was not read yet.
    pub urgent: bool,
    /// The connection is broken; the error is waiting behind the bytes.
    pub failed: bool,
    /// It is not the socket that says so, but the memory that a local program shares with us.
    pub by_rings: bool,
}

/// What the next read of a socket would begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ahead {
    /// Nothing has come: the end of the stream, perhaps.
    Nothing,
    /// Ordinary bytes.
    Bytes,
    /// The urgent byte. A read of one byte brings it alone.
    Urgent,
}

/// All sockets of one poller, and the place where it sleeps.
pub trait Streams {
    /// A connected, nonblocking socket. Its urgent bytes are read in their place, and a read stops
    /// before one: whoever made it has seen to that (`SO_OOBINLINE`) before any byte could come.
    type Stream: Send;

    /// Begins to report events of `stream`. The first report says what is possible already.
    ///
    /// # Errors
    ///
    /// When the kernel has no room; the stream is unchanged.
    fn watch(&mut self, key: Key, stream: &Self::Stream) -> io::Result<()>;

    /// Ends what `watch` began, so that another thread can watch `stream`. Events that were under
    /// way may still be reported.
    fn unwatch(&mut self, stream: &Self::Stream);

    /// `stream` is over, and somebody else closes it. Keeps nothing of it: else its memory would
    /// stay until the next event, which may be hours away.
    fn release(&mut self, _stream: &Self::Stream) {}

    /// Appends what became possible, without waiting. Returns what is known of the RNIC.
    fn poll(&mut self, events: &mut Vec<Event>) -> Signs;

    /// Completes an event of `stream`, where only the stream itself knows what it means.
    fn complete(&mut self, _stream: &Self::Stream, _event: &mut Event) {}

    /// Sleeps until an event, a wake-up or `deadline`. May return early.
    fn sleep(&mut self, now: Instant, deadline: Option<Instant>);

    /// Reads into `room`; zero is the end of the stream.
    ///
    /// # Errors
    ///
    /// `WouldBlock`, or what became of the connection.
    fn read(&mut self, stream: &Self::Stream, room: &Vacant<'_>) -> io::Result<usize>;

    /// Writes from an RMB element.
    ///
    /// # Errors
    ///
    /// `WouldBlock`, or what became of the connection.
    fn write(&mut self, stream: &Self::Stream, bytes: &Readable<'_>) -> io::Result<usize>;

    /// Reads into a slice; zero is the end of the stream.
    ///
    /// # Errors
    ///
    /// `WouldBlock`, or what became of the connection.
    fn read_slice(&mut self, stream: &Self::Stream, room: &mut [u8]) -> io::Result<usize>;

    /// Writes from a slice.
    ///
    /// # Errors
    ///
    /// `WouldBlock`, or what became of the connection.
    fn write_slice(&mut self, stream: &Self::Stream, bytes: &[u8]) -> io::Result<usize>;

    /// Writes one byte as urgent: what TCP calls out of band (`MSG_OOB`).
    ///
    /// # Errors
    ///
    /// `WouldBlock`, or what became of the connection.
    fn write_urgent(&mut self, stream: &Self::Stream, byte: u8) -> io::Result<()>;

    /// How many bytes the application of `stream` has sent and got in a way that passes us by.
    fn bypassed(&self, _stream: &Self::Stream) -> (u64, u64) {
        (0, 0)
    }

    /// The time now, in a turn that began at `turn`.
    fn time(&self, turn: Instant) -> Instant;

    /// The core on which the last segment of `stream` came in, if that is known. Over loopback it
    /// is the one on which the application ran that sent it.
    fn core_of(&self, stream: &Self::Stream) -> Option<usize>;

    /// Whether a read would bring bytes now. Asked only when it changes what a peer is told.
    fn has_more(&mut self, stream: &Self::Stream) -> bool;

    /// Whether the application has closed its end, and wants that to be a reset: not only will no
    /// more bytes come, nobody reads what is written either. Asked at the end of a stream, and
    /// where the bytes before it find no room.
    fn is_to_reset(&self, stream: &Self::Stream) -> bool;

    /// What a read would begin with. Asked only where an urgent byte may be.
    fn ahead(&mut self, stream: &Self::Stream) -> Ahead;

    /// Says that no more will be written: FIN.
    fn finish(&mut self, stream: &Self::Stream);

    /// Makes the coming close a reset: RST.
    fn reset_on_close(&mut self, stream: &Self::Stream);
}

/// Whether an error on a socket is the end of the connection, and not that there is nothing to read
/// or no room to write.
pub(crate) fn is_reset(error: &io::Error) -> bool {
    use io::ErrorKind as E;
    !matches!(error.kind(), E::WouldBlock | E::Interrupted)
}
