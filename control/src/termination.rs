//! How connections end, in words that stay the same: for access logs, and for whoever counts them.

use smcr_engine::handoff::{End, Ending, Tally};

use crate::admission::Limit;
use crate::config::Protocol;
use crate::rendezvous::Why;
use crate::upstreams::NoUpstream;

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Termination {
    /// Both ends have finished.
    Closed,
    /// One of the two ends has reset it.
    Reset,
    /// Its link broke, and there was no other.
    LinkLost,
    /// Bytes were lost that an RNIC had acknowledged.
    DataLost,
    /// The SMC-R peer broke the protocol.
    PeerError,
    /// The SMC-R peer did not answer the end in time.
    Stalled,
    /// The TCP connection beside SMC-R was reset, or its keepalive failed.
    TcpLost,
    /// Nothing has moved for too long.
    Idle,
    /// One direction has ended, and nothing has moved in the other for too long.
    HalfClosed,
    /// It was too old.
    Aged,
    /// The gateway stops.
    Stopped,
    /// The gateway gave it up for another reason.
    Aborted,
    /// The upstream refused it.
    UpstreamRefused,
    /// The upstream did not answer in time.
    UpstreamTimeout,
    /// No upstream is known, or all are down.
    NoUpstream,
    /// The peer reset or ended the TCP connection during the rendezvous.
    HandshakeBroke,
    /// The rendezvous failed when it could no longer become TCP.
    HandshakeFailed,
    /// Too many peers sent no Proposal.
    Displaced,
    /// A limit on connections, pollers or descriptors.
    Limit,
    /// Its source has as many connections as it may have.
    SourceLimit,
    /// More connections came in a second than may come.
    RateLimit,
    /// More came of its source than may come.
    SourceRateLimit,
    /// It was not intercepted, so nobody knows where it wants to go.
    NotIntercepted,
    /// No PROXY header has come.
    NoHeader,
    /// The client had gone before it was accepted.
    Gone,
}

/// Who ended a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Party {
    /// The client, or what is between it and us.
    Client,
    /// The server, or what is between it and us.
    Server,
    /// The SMC-R peer itself.
    Peer,
    /// Nobody: the network failed.
    Network,
    /// This gateway.
    Gateway,
}

impl Termination {
    /// All of them.
    pub const ALL: [Self; 25] = [
        Self::Closed,
        Self::Reset,
        Self::LinkLost,
        Self::DataLost,
        Self::PeerError,
        Self::Stalled,
        Self::TcpLost,
        Self::Idle,
        Self::HalfClosed,
        Self::Aged,
        Self::Stopped,
        Self::Aborted,
        Self::UpstreamRefused,
        Self::UpstreamTimeout,
        Self::NoUpstream,
        Self::HandshakeBroke,
        Self::HandshakeFailed,
        Self::Displaced,
        Self::Limit,
        Self::SourceLimit,
        Self::RateLimit,
        Self::SourceRateLimit,
        Self::NotIntercepted,
        Self::NoHeader,
        Self::Gone,
    ];

    /// How a connection ended that a poller had. `cut` is how we have ended it, if we have.
    pub fn of(ending: Ending, cut: Option<Self>) -> Self {
        match ending {
            Ending::Graceful => Self::Closed,
            Ending::ResetByApplication | Ending::ResetByPeer => Self::Reset,
            Ending::LinkLost => Self::LinkLost,
            Ending::DataLost => Self::DataLost,
            Ending::PeerMisbehaved => Self::PeerError,
            Ending::Stalled => Self::Stalled,
            Ending::Aborted => cut.unwrap_or(Self::Aborted),
        }
    }

    /// The word in logs. Words stay as they are, so that operators can search for them.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Reset => "reset",
            Self::LinkLost => "link-lost",
            Self::DataLost => "data-lost",
            Self::PeerError => "peer-error",
            Self::Stalled => "stalled",
            Self::TcpLost => "tcp-lost",
            Self::Idle => "idle",
            Self::HalfClosed => "half-closed",
            Self::Aged => "aged",
            Self::Stopped => "stopped",
            Self::Aborted => "aborted",
            Self::UpstreamRefused => "upstream-refused",
            Self::UpstreamTimeout => "upstream-timeout",
            Self::NoUpstream => "no-upstream",
            Self::HandshakeBroke => "handshake-broke",
            Self::HandshakeFailed => "handshake-failed",
            Self::Displaced => "displaced",
            Self::Limit => "limit",
            Self::SourceLimit => "source-limit",
            Self::RateLimit => "rate-limit",
            Self::SourceRateLimit => "source-rate-limit",
            Self::NotIntercepted => "not-intercepted",
            Self::NoHeader => "no-header",
            Self::Gone => "gone",
        }
    }

    /// Who ended it so; none if that is known only of the single connection.
    fn party(self) -> Option<Party> {
        match self {
            Self::Closed | Self::Reset => None,
            Self::LinkLost | Self::DataLost | Self::TcpLost => Some(Party::Network),
            Self::PeerError | Self::Stalled | Self::HandshakeBroke | Self::HandshakeFailed => {
                Some(Party::Peer)
            }
            Self::UpstreamRefused | Self::UpstreamTimeout => Some(Party::Server),
            Self::NoHeader | Self::Gone => Some(Party::Client),
            Self::Idle
            | Self::HalfClosed
            | Self::Aged
            | Self::Stopped
            | Self::Aborted
            | Self::NoUpstream
            | Self::Displaced
            | Self::Limit
            | Self::SourceLimit
            | Self::RateLimit
            | Self::SourceRateLimit
            | Self::NotIntercepted => Some(Party::Gateway),
        }
    }

    /// Who ended a connection so that no poller had.
    pub fn by(self) -> Option<Party> {
        self.party()
    }

    /// Who ended a connection so that a poller had, at a listener that accepts `accepts`; none if
    /// both were found at once.
    pub fn by_of(self, accepts: Protocol, ending: Ending, tally: &Tally) -> Option<Party> {
        let end = match ending {
            Ending::ResetByPeer => Some(End::Far),
            // Over SMC-R it is the near socket that reports a reset, and there is no other.
            Ending::ResetByApplication => tally.ended_by,
            Ending::Graceful => tally.ended_by,
            Ending::LinkLost
            | Ending::DataLost
            | Ending::PeerMisbehaved
            | Ending::Stalled
            | Ending::Aborted => return self.party(),
        };
        let is_client = |end| (end == End::Near) == (accepts == Protocol::Tcp);
        end.map(|end| if is_client(end) { Party::Client } else { Party::Server })
    }
}

impl From<Why> for Termination {
    fn from(why: Why) -> Self {
        match why {
            Why::Refused => Self::UpstreamRefused,
            Why::Unanswered => Self::UpstreamTimeout,
            Why::Broke | Why::Ended => Self::HandshakeBroke,
            Why::Failed | Why::BadConfirm => Self::HandshakeFailed,
            Why::Displaced => Self::Displaced,
            Why::NoSlot => Self::Limit,
            Why::Stopping => Self::Stopped,
            Why::Aborted => Self::Aborted,
        }
    }
}

impl From<Limit> for Termination {
    fn from(limit: Limit) -> Self {
        match limit {
            Limit::Connections => Self::Limit,
            Limit::Source => Self::SourceLimit,
            Limit::Rate => Self::RateLimit,
            Limit::SourceRate => Self::SourceRateLimit,
        }
    }
}

impl From<NoUpstream> for Termination {
    fn from(why: NoUpstream) -> Self {
        match why {
            NoUpstream::Unresolved | NoUpstream::AllDown => Self::NoUpstream,
            NoUpstream::AllTried => Self::UpstreamRefused,
        }
    }
}

impl Party {
    /// The word in logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Server => "server",
            Self::Peer => "peer",
            Self::Network => "network",
            Self::Gateway => "gateway",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Field;

    /// What the near socket of a gateway is depends on which side of it the applications are.
    #[test]
    fn who_ended_it_is_said_as_the_client_sees_it() {
        let by = |accepts, ending, ended_by| {
            let tally = Tally { ended_by, ..Tally::default() };
            Termination::of(ending, None).by_of(accepts, ending, &tally).map(Party::name)
        };
        let (tcp, smc) = (Protocol::Tcp, Protocol::Smc);
        assert_eq!(by(tcp, Ending::Graceful, Some(End::Near)), Some("client"));
        assert_eq!(by(smc, Ending::Graceful, Some(End::Near)), Some("server"));
        assert_eq!(by(tcp, Ending::ResetByApplication, Some(End::Far)), Some("server"));
        assert_eq!(by(tcp, Ending::ResetByPeer, Some(End::Near)), Some("server"));
        assert_eq!(by(smc, Ending::ResetByPeer, None), Some("client"));
        assert_eq!(by(tcp, Ending::Graceful, None), None);
        assert_eq!(by(tcp, Ending::LinkLost, Some(End::Near)), Some("network"));
    }

    /// Operators look words up that they find in a log.
    #[test]
    fn the_readme_explains_every_word() {
        let readme = include_str!("../../README.md");
        let ends = Termination::ALL.map(Termination::name);
        let fields = Field::ALL.map(Field::name);
        for word in ends.into_iter().chain(fields) {
            assert!(readme.contains(&format!("`{word}`")), "{word}");
        }
        let parties = [Party::Client, Party::Server, Party::Peer, Party::Network, Party::Gateway];
        assert!(parties.iter().all(|party| readme.contains(&format!("`{}`", party.name()))));
    }

    #[test]
    fn what_we_have_cut_says_why() {
        let of = Termination::of;
        assert_eq!(of(Ending::Aborted, Some(Termination::Idle)).name(), "idle");
        assert_eq!(of(Ending::Aborted, None).name(), "aborted");
        assert_eq!(of(Ending::Graceful, Some(Termination::Idle)).name(), "closed");
    }
}
