//! The whole conversation between the control thread and one polling thread, and what its pollers
//! say to each other.

use std::sync::Arc;

use smcr_memory::Rmbe;
use smcr_proto::Rkey;
use smcr_rnic::QpError;

pub use crate::allowance::Allowance;
pub use crate::mail::Neighbours;
pub use crate::names::{
    Activity, ConnectionId, End, Ending, GroupId, KeyChange, LinkId, LlcBytes, PeerElement, Tally,
    Unheard,
};
pub use crate::owners::{Owner, Owners};
use crate::relay::Migrant;

/// What one poller says to another. Nobody else can write or open it.
pub type LetterOf<Stream> = crate::mail::Letter<Migrant<Stream>>;

/// Control thread to poller. What a variant carries is moved, never shared.
#[derive(Debug)]
pub enum Command<Qp, Stream> {
    /// Take over this queue pair.
    AddLink {
        /// Its name from now on.
        link: LinkId,
        /// Whose link it is: only connections of this group are spoken of on it.
        group: GroupId,
        /// The queue pair, in RTS.
        qp: Qp,
        /// Where to note that something came.
        activity: Arc<Activity>,
    },
    /// Post this LLC message, in order with the CDC messages of its link.
    SendLlc {
        /// Which link. For a long message, one whose queue pair was opened for such.
        link: LinkId,
        /// The message.
        message: LlcBytes,
    },
    /// End every connection on this link without a word to the peer, and reset their sockets.
    FailConnections {
        /// Which link.
        link: LinkId,
    },
    /// Give the queue pair up once what it brought is taken in, then answer
    /// [`Report::LinkRetired`].
    RetireLink {
        /// Which link.
        link: LinkId,
    },
    /// The rendezvous failed: this connection will not come, and its slot is free. [`Owners`] do
    /// not know it any more.
    Forget {
        /// Which connection.
        connection: ConnectionId,
    },
    /// Relay. Before the peer of an SMC-R connection could know the token, [`Owners`] were told of
    /// the connection.
    Relay {
        /// Its name; answered by one [`Report::Closed`].
        connection: ConnectionId,
        /// What to relay between.
        established: Box<Established<Stream>>,
        /// How fast.
        allowance: Option<Arc<Allowance>>,
    },
    /// Reset this connection on both sides.
    Abort {
        /// Which connection.
        connection: ConnectionId,
    },
    /// The link is down, whatever its queue pair believes: let what is outstanding end now. Nothing
    /// is reported of it.
    FailLink {
        /// Which link.
        link: LinkId,
    },
    /// Continue connections of one link on another (RFC 4.6): each waits for its outstanding
    /// requests to end, well or not, then moves, and is answered by [`Report::Moved`] from the
    /// poller that has it then. One whose element has no key on the new link is reset.
    MoveConnections {
        /// The link to leave; broken or alive.
        from: LinkId,
        /// The link to take, of which its poller has been told.
        to: LinkId,
        /// The index of that poller.
        to_poller: u8,
        /// The RMBs of the peer as both links see them.
        keys: Vec<KeyChange>,
        /// Only these. `None` is all there are and all that still come, and vacates `from` for
        /// good: answered by one [`Report::LinkVacated`].
        only: Option<Vec<ConnectionId>>,
    },
    /// A connection that has carried a stream carries another one (see
    /// [`Streams`](smcr_proto::connection::Streams)): one that we begin, or one that the peer has
    /// begun ([`Report::StreamBegun`]). Answered by [`Report::StreamEnded`], or by
    /// [`Report::StreamRefused`], or by [`Report::Closed`] if the connection ends with it.
    NextStream {
        /// Which connection.
        connection: ConnectionId,
        /// The application's socket.
        near: Stream,
        /// How fast.
        allowance: Option<Arc<Allowance>>,
    },
    /// No other stream shall follow on this connection: close it, unless one has begun.
    CloseKept {
        /// Which connection.
        connection: ConnectionId,
    },
    /// Finish the turn and end the thread.
    Stop,
}

/// A connection as the rendezvous leaves it.
#[derive(Debug)]
pub enum Established<Stream> {
    /// One socket and SMC-R.
    Smc {
        /// The application's socket.
        near: Stream,
        /// The link to send on.
        link: LinkId,
        /// Its link group.
        group: GroupId,
        /// Our element, zeroed.
        rmbe: Rmbe,
        /// The peer's element.
        peer: PeerElement,
        /// How many streams it may carry, and who begins them.
        streams: smcr_proto::connection::Streams,
    },
    /// Two sockets.
    Tcp {
        /// The socket that we accepted.
        near: Stream,
        /// The socket that we connected.
        far: Stream,
        /// Read from `near` during the rendezvous, but meant for the application behind `far`.
        from_near: Vec<u8>,
        /// Read from `far`, meant for `near`.
        from_far: Vec<u8>,
        /// We declined on `far`, whose peer may have done so, too, before it heard: a Decline that
        /// comes first, in `from_far` or later, is for nobody.
        declined: bool,
    },
}

/// Poller to control thread.
#[derive(Debug)]
pub enum Report<Stream> {
    /// An LLC message came.
    LlcReceived {
        /// On which link.
        link: LinkId,
        /// The message.
        message: LlcBytes,
        /// Gone with the report.
        unheard: Unheard,
    },
    /// The queue pair of this link broke. Its connections stand still until the control thread
    /// says what becomes of them.
    LinkBroke {
        /// Which link.
        link: LinkId,
        /// Why.
        cause: QpError,
    },
    /// The answer to [`Command::RetireLink`]: the queue pair is gone.
    LinkRetired {
        /// Which link.
        link: LinkId,
    },
    /// This poller has the connection now, and sends on this link.
    Moved {
        /// Which connection.
        connection: ConnectionId,
        /// The link it continues on.
        link: LinkId,
        /// What the RMB of the peer's element is called there.
        rkey: Rkey,
        /// Where the peer's element is there.
        address: u64,
    },
    /// No connection of this poller sends on the link any more, after
    /// [`Command::MoveConnections`].
    LinkVacated {
        /// Which link.
        link: LinkId,
    },
    /// A stream has ended in good order, and its connection is kept for another one.
    StreamEnded {
        /// Which connection.
        connection: ConnectionId,
        /// What the stream has carried.
        tally: Tally,
        /// Its socket, to be closed where that may take its time.
        near: Stream,
    },
    /// The peer has begun the next stream: the answer is [`Command::NextStream`], or
    /// [`Command::Abort`].
    StreamBegun {
        /// Of which connection.
        connection: ConnectionId,
    },
    /// The answer to a [`Command::NextStream`] that came too late. Nothing was read of the socket.
    StreamRefused {
        /// Which connection.
        connection: ConnectionId,
        /// The application's socket.
        near: Stream,
        /// The connection has moved to another poller. If not, it is over, or will be soon.
        moved: bool,
    },
    /// A connection ended, and its slot is free.
    Closed {
        /// Which connection.
        connection: ConnectionId,
        /// How.
        ending: Ending,
        /// What it has carried.
        tally: Tally,
        /// Our element, if it was an SMC-R connection.
        rmbe: Option<Rmbe>,
        /// Whether nobody writes that element any more: the peer said so, and nothing that it
        /// posted before can still be under way.
        settled: bool,
        /// The sockets, to be closed where that may take its time.
        streams: [Option<Stream>; 2],
        /// It was kept for a stream that did not come: what it had carried was reported before.
        kept: bool,
    },
}
