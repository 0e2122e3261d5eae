//! SMC-R connections that carry one stream after another.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use smcr_engine::ConnectionId;
use smcr_proto::Instant;

use super::{Carried, Negotiating, Open, Session, Sessions, place};
use crate::admission::Standing;
use crate::config::Protocol;
use crate::groups::GroupId;
use crate::slab::Key;
use crate::stats::Transport;

/// A stream that the peer has begun on a connection, as long as it has no upstream.
#[derive(Clone, Copy, Debug)]
pub struct Follows {
    /// The connection.
    pub connection: ConnectionId,
    /// Its group.
    pub group: GroupId,
    /// The peer has ended its direction of the TCP connection beside it.
    pub ended: bool,
    /// Since when that stands beside SMC-R.
    pub since: Instant,
    /// The connection is over by now.
    pub over: bool,
    /// Which round it is of; see [`Sessions::round`].
    pub round: u32,
}

/// The TCP connection of a rendezvous that has become SMC-R. Its kernel answers keepalive probes,
/// and nobody reads it.
// RFC 7609 4.5.3 #8: acknowledge TCP keepalive probes
#[derive(Debug)]
pub struct Beside {
    /// Its socket.
    pub tcp: OwnedFd,
    /// Our own address of it, if it is known.
    pub local: Option<SocketAddr>,
    /// The peer has ended its direction of it.
    pub ended: bool,
    /// Since when it stands beside SMC-R.
    pub since: Instant,
}

/// An SMC-R connection that has carried a stream, and may carry another one.
#[derive(Debug)]
pub struct Kept {
    /// The listener of the streams.
    pub listener: u16,
    /// What that listener accepts.
    pub accepts: Protocol,
    /// Its slot.
    pub connection: ConnectionId,
    /// Its group.
    pub group: GroupId,
    /// Who connected to us; at a client, for the last stream.
    pub source: SocketAddr,
    /// Where the last stream went.
    pub target: SocketAddr,
    /// The TCP connection beside it.
    pub beside: Beside,
    /// It is being closed.
    pub closing: bool,
    /// Which round it is of; see [`Sessions::round`].
    pub round: u32,
}

/// What a poller has closed.
#[derive(Debug)]
pub enum Over {
    /// A connection with its stream.
    Open(Open),
    /// A connection that was kept.
    Kept(Kept),
    /// A connection on which the peer had begun a stream that has no upstream yet. It is still
    /// there, and knows.
    Following,
}

/// A connection that goes on with another stream.
#[derive(Debug)]
pub struct Next {
    /// Whether it takes a place of those that are limited.
    pub standing: Standing,
    /// Who connected to us.
    pub source: SocketAddr,
    /// Where the client wanted to go, if somebody has said so.
    pub original: Option<SocketAddr>,
}

impl Sessions {
    /// A stream of a connection is over, and the connection is kept.
    ///
    /// # Panics
    ///
    /// If no session with SMC-R has that slot.
    pub fn keep(&mut self, connection: ConnectionId) -> (Key, Open) {
        let key = self.key_of(connection).expect("a poller keeps what it was given");
        let mut over = None;
        self.table.replace(key, |session| {
            let Session::Open(mut open) = session else { panic!("only a stream can be over") };
            let Carried::Smc { group } = open.transport else { panic!("TCP has one stream") };
            let kept = Kept {
                listener: open.listener,
                accepts: open.accepts,
                connection,
                group,
                source: open.source,
                target: open.target,
                beside: open.beside.take().expect("SMC-R has TCP beside it"),
                closing: false,
                round: open.round,
            };
            over = Some(open);
            Session::Kept(kept)
        });
        self.open[place(Transport::SmcR)] -= 1;
        (key, over.expect("it was just taken"))
    }

    /// A connection that was kept carries another stream.
    ///
    /// # Panics
    ///
    /// If `key` names none.
    pub fn go_on(&mut self, now: Instant, key: Key, next: Next) -> ConnectionId {
        let mut connection = None;
        self.table.replace(key, |session| {
            let Session::Kept(kept) = session else { panic!("only what is kept can go on") };
            connection = Some(kept.connection);
            let round = kept.round;
            Session::Open(Open {
                listener: kept.listener,
                standing: next.standing,
                accepts: kept.accepts,
                connection: kept.connection,
                source: next.source,
                target: kept.target,
                original: next.original,
                came: now,
                since: now,
                cut: None,
                moved: (0, now),
                half_closed: None,
                expired: false,
                called: false,
                round,
                transport: Carried::Smc { group: kept.group },
                beside: Some(kept.beside),
                left_alone: Vec::new(),
                process: None,
            })
        });
        self.open[place(Transport::SmcR)] += 1;
        connection.expect("it was just taken")
    }

    /// The peer has begun another stream on a connection that was kept: it goes to `target`.
    ///
    /// # Panics
    ///
    /// If `key` names none.
    pub fn follow(
        &mut self,
        now: Instant,
        key: Key,
        target: SocketAddr,
        wanted: Option<SocketAddr>,
    ) {
        self.table.replace(key, |session| {
            let Session::Kept(kept) = session else { panic!("only what is kept can go on") };
            let Kept { listener, accepts, connection, group, source, beside, round, .. } = kept;
            let follows = Follows {
                connection,
                group,
                ended: beside.ended,
                since: beside.since,
                over: false,
                round,
            };
            let (local, follows) = (beside.local, Some(follows));
            let at = (listener, accepts);
            let one = Negotiating::new(now, at, (source, target), beside.tcp);
            Session::Negotiating(Negotiating { wanted, local, follows, ..one })
        });
    }

    /// Takes in a connection that has lost its stream before a poller could have that.
    pub fn insert_kept(&mut self, kept: Kept) -> Key {
        let slot = usize::from(kept.connection.slot);
        let key = self.table.insert(Session::Kept(kept));
        self.by_slot[slot] = Some(key);
        key
    }

    /// The connection that `key` names, if it is kept.
    pub fn kept_mut(&mut self, key: Key) -> Option<&mut Kept> {
        match self.table.at_mut(key)? {
            Session::Kept(kept) => Some(kept),
            Session::Open(_) | Session::Negotiating(_) => None,
        }
    }
}
