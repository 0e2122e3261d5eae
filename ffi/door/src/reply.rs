//! What the gateway answers.
//!
//! ```text
//!   0       4         5      6       7          8         12
//!   | magic | version | kind | flags | reserved | seconds |
//! ```

use crate::{MAGIC, Malformed, VERSION, kind};

/// The answer to a [`Request`](crate::Request).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The socket is marked.
    Marked,
    /// The connection is plain TCP, and stays what it is.
    Leave {
        /// For so long the library need not ask again about this peer, or this listening socket.
        seconds: u32,
    },
    /// Beside this message comes a Unix socket. It takes the place of the TCP socket.
    Switch {
        /// Behind the socket comes a memfd: the bytes go by the rings in it, and the socket says
        /// when there are any. After [`Attach`](crate::Request::Attach) the memfd comes alone.
        rings: bool,
    },
    /// It was done.
    Done,
}

impl Reply {
    /// The bytes of every reply.
    pub const LEN: usize = 12;

    /// The message.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = VERSION;
        let (kind, flags, seconds) = match *self {
            Self::Marked => (MARKED, 0, 0),
            Self::Leave { seconds } => (LEAVE, 0, seconds),
            Self::Switch { rings } => (SWITCH, if rings { RINGS } else { 0 }, 0),
            Self::Done => (DONE, 0, 0),
        };
        bytes[5] = kind;
        bytes[6] = flags;
        bytes[8..].copy_from_slice(&seconds.to_be_bytes());
        bytes
    }

    /// Decodes one message.
    ///
    /// # Errors
    ///
    /// Why it is none.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let bytes: &[u8; Self::LEN] = bytes.try_into().map_err(|_| Malformed::Length)?;
        let seconds = bytes[8..].first_chunk().expect("the range is that long");
        match kind(bytes)? {
            MARKED => Ok(Self::Marked),
            LEAVE => Ok(Self::Leave { seconds: u32::from_be_bytes(*seconds) }),
            SWITCH => Ok(Self::Switch { rings: bytes[6] & RINGS != 0 }),
            DONE => Ok(Self::Done),
            other => Err(Malformed::Kind(other)),
        }
    }
}

const MARKED: u8 = 1;
const LEAVE: u8 = 2;
const SWITCH: u8 = 3;
const DONE: u8 = 4;
/// Flag: with shared memory.
const RINGS: u8 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_come_as_they_were_sent() {
        let all = [
            Reply::Marked,
            Reply::Leave { seconds: 1 << 20 },
            Reply::Switch { rings: false },
            Reply::Switch { rings: true },
            Reply::Done,
        ];
        for reply in all {
            assert_eq!(Reply::decode(&reply.encode()), Ok(reply));
        }
        assert_eq!(&all[1].encode(), b"SMCg\x01\x02\x00\x00\x00\x10\x00\x00");
    }

    #[test]
    fn what_is_no_reply_is_refused() {
        assert_eq!(Reply::decode(b"SMCg"), Err(Malformed::Length));
        assert_eq!(Reply::decode(b"SMCg\x01\x05\0\0\0\0\0\0"), Err(Malformed::Kind(5)));
    }
}
