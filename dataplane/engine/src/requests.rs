//! What a work request was for. Its mark, which hardware calls `wr_id`, comes back with its
//! completion.

use smcr_proto::AlertToken;
use smcr_proto::wire::cdc::Cdc;
use smcr_rnic::Tag;

use crate::names::ConnectionId;

/// What a work request was for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// An LLC message: it belongs to no connection.
    Llc,
    /// A write of new bytes of this connection, which keeps them until the peer has heard of them.
    Write(ConnectionId),
    /// A write of bytes that another link lost, and of which this connection has a copy.
    Replay(ConnectionId),
    /// A CDC message of this connection.
    Cdc(ConnectionId, Said),
}

/// What a CDC message said, as far as its completion matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Said {
    /// Everything, under this sequence number.
    All(u16),
    /// F alone: it announces nothing.
    Validation,
}

impl Request {
    /// The request that carries `message`.
    pub(crate) fn of_cdc(connection: ConnectionId, message: &Cdc) -> Self {
        let said = match message.failover_validation {
            true => Said::Validation,
            false => Said::All(message.sequence),
        };
        Self::Cdc(connection, said)
    }

    /// The mark: a token in the lower half, what it is about in the upper.
    pub(crate) fn tag(self) -> Tag {
        let (connection, about) = match self {
            Self::Llc => return LLC,
            Self::Write(connection) => (connection, WRITE),
            Self::Replay(connection) => (connection, REPLAY),
            Self::Cdc(connection, Said::Validation) => (connection, VALIDATION),
            Self::Cdc(connection, Said::All(sequence)) => (connection, sequence.into()),
        };
        Tag(u64::from(connection.token().0) | about << 32)
    }

    /// What `tag` marks.
    pub(crate) fn of(tag: Tag) -> Self {
        if tag == LLC {
            return Self::Llc;
        }
        let token = u32::try_from(tag.0 & 0xffff_ffff).expect("thirty-two bits were left");
        let connection = ConnectionId::from_token(AlertToken(token));
        match tag.0 >> 32 {
            WRITE => Self::Write(connection),
            REPLAY => Self::Replay(connection),
            VALIDATION => Self::Cdc(connection, Said::Validation),
            sequence => {
                let sequence = u16::try_from(sequence).expect("we made no other mark");
                Self::Cdc(connection, Said::All(sequence))
            }
        }
    }
}

const LLC: Tag = Tag(u64::MAX);
// Values above 16 bits, so that they differ from every sequence number.
const WRITE: u64 = 1 << 16;
const REPLAY: u64 = 2 << 16;
const VALIDATION: u64 = 3 << 16;

#[cfg(test)]
mod tests {
    use super::*;

    /// A completion that is taken for that of another request loses bytes, or a lease.
    #[test]
    fn a_mark_says_what_it_marks() {
        let mut marks = vec![Request::Llc];
        for generation in [1, u16::MAX] {
            for slot in [0, u16::MAX] {
                let id = ConnectionId { slot, generation };
                marks.extend([Request::Write(id), Request::Replay(id)]);
                let said = [Said::Validation, Said::All(0), Said::All(1), Said::All(u16::MAX)];
                marks.extend(said.map(|said| Request::Cdc(id, said)));
            }
        }
        for request in &marks {
            assert_eq!(Request::of(request.tag()), *request);
        }
    }
}
