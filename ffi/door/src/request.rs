//! What the library asks for.
//!
//! ```text
//!   0       4         5      6       7          8         32           40
//!   | magic | version | kind | flags | reserved | address | connection |
//! ```

use core::net::SocketAddr;

use crate::{MAGIC, Malformed, VERSION, address, kind};

/// A request of the library. [`Attach`](Self::Attach), [`Shortcut`](Self::Shortcut) and
/// [`Reset`](Self::Reset) bring the Unix socket that proves that the connection is the
/// application's, the others a TCP socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Offer SMC-R in the SYN of this socket, which the application is about to connect to `peer`.
    ///
    /// Answers: [`Marked`](crate::Reply::Marked) or [`Leave`](crate::Reply::Leave).
    Mark {
        /// Where it will connect to.
        peer: SocketAddr,
    },
    /// This socket was marked, and is connected now. If its peer has offered SMC-R, run the
    /// rendezvous.
    ///
    /// Answers: [`Switch`](crate::Reply::Switch) or [`Leave`](crate::Reply::Leave).
    Connected {
        /// The application can wait until it is known whether the connection becomes SMC-R. It then
        /// gets its TCP socket back if that fails. Otherwise, and after a while, the gateway
        /// relays.
        waits: bool,
        /// The bytes shall go by shared memory, if the gateway offers that.
        rings: bool,
        /// And without the gateway, if it offers that; all processes of the application can.
        shortcut: bool,
    },
    /// Answer SMC-R in the SYN-ACKs of this listening socket.
    ///
    /// Answers: [`Marked`](crate::Reply::Marked) or [`Leave`](crate::Reply::Leave).
    Listen,
    /// This socket was accepted from a listening socket that is marked, and its SYN had the option.
    ///
    /// Answers: [`Switch`](crate::Reply::Switch) or [`Leave`](crate::Reply::Leave).
    Accepted {
        /// The bytes shall go by shared memory, if the gateway offers that.
        rings: bool,
        /// And without the gateway, if it offers that; all processes of the application can.
        shortcut: bool,
    },
    /// The application wants this connection reset as soon as nobody has this Unix socket any more,
    /// and is about to close it. What it has written before comes first.
    ///
    /// Answer: [`Done`](crate::Reply::Done).
    Reset {
        /// The number of the connection, from its [`Name`](crate::Name).
        connection: u64,
    },
    /// The application has this Unix socket, and has not mapped the shared memory by which its
    /// bytes go: it has inherited the socket over `exec`, or got it from another program.
    ///
    /// Answers: [`Switch`](crate::Reply::Switch) with the memory alone, or
    /// [`Leave`](crate::Reply::Leave).
    Attach {
        /// The number of the connection, from its [`Name`](crate::Name).
        connection: u64,
        /// The application can do without the gateway, if others who have the socket do.
        shortcut: bool,
    },
    /// The application has this Unix socket and the shared memory, in which the gateway has offered
    /// a shortcut to the program at the other end.
    ///
    /// Answers: [`Switch`](crate::Reply::Switch) with the shortcut's memory alone, or
    /// [`Leave`](crate::Reply::Leave).
    Shortcut {
        /// The number of the connection, from its [`Name`](crate::Name).
        connection: u64,
    },
}

impl Request {
    /// The bytes of every request.
    pub const LEN: usize = 40;

    /// The message.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = VERSION;
        let flag = |is_set, flag| if is_set { flag } else { 0 };
        let (kind, flags, peer, connection) = match *self {
            Self::Mark { peer } => (MARK, 0, peer, 0),
            Self::Connected { waits, rings, shortcut } => {
                let flags = flag(waits, WAITS) | flag(rings, RINGS) | flag(shortcut, SHORT);
                (CONNECTED, flags, address::NOWHERE, 0)
            }
            Self::Listen => (LISTEN, 0, address::NOWHERE, 0),
            Self::Accepted { rings, shortcut } => {
                (ACCEPTED, flag(rings, RINGS) | flag(shortcut, SHORT), address::NOWHERE, 0)
            }
            Self::Reset { connection } => (RESET, 0, address::NOWHERE, connection),
            Self::Attach { connection, shortcut } => {
                (ATTACH, flag(shortcut, SHORT), address::NOWHERE, connection)
            }
            Self::Shortcut { connection } => (SHORTCUT, 0, address::NOWHERE, connection),
        };
        bytes[5] = kind;
        bytes[6] = flags;
        bytes[8..32].copy_from_slice(&address::encode(peer));
        bytes[32..].copy_from_slice(&connection.to_be_bytes());
        bytes
    }

    /// Decodes one message.
    ///
    /// # Errors
    ///
    /// Why it is none.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let bytes: &[u8; Self::LEN] = bytes.try_into().map_err(|_| Malformed::Length)?;
        let peer = bytes[8..32].first_chunk().expect("the range is that long");
        let connection = bytes[32..].first_chunk().expect("the range is that long");
        let connection = u64::from_be_bytes(*connection);
        let [waits, rings, shortcut] = [WAITS, RINGS, SHORT].map(|flag| bytes[6] & flag != 0);
        match kind(bytes)? {
            MARK => Ok(Self::Mark { peer: address::decode(peer)? }),
            CONNECTED => Ok(Self::Connected { waits, rings, shortcut }),
            LISTEN => Ok(Self::Listen),
            ACCEPTED => Ok(Self::Accepted { rings, shortcut }),
            RESET => Ok(Self::Reset { connection }),
            ATTACH => Ok(Self::Attach { connection, shortcut }),
            SHORTCUT => Ok(Self::Shortcut { connection }),
            other => Err(Malformed::Kind(other)),
        }
    }
}

const MARK: u8 = 1;
const CONNECTED: u8 = 2;
const LISTEN: u8 = 3;
const ACCEPTED: u8 = 4;
const RESET: u8 = 5;
const ATTACH: u8 = 6;
const SHORTCUT: u8 = 7;
/// Flag: the application can wait.
const WAITS: u8 = 1;
/// Flag: the application can use shared memory. Older gateways ignore it.
const RINGS: u8 = 2;
/// Flag: and a shortcut. Older gateways ignore it.
const SHORT: u8 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Request; 12] = [
        Request::Mark {
            peer: SocketAddr::new(core::net::IpAddr::V4(core::net::Ipv4Addr::LOCALHOST), 80),
        },
        Request::Mark {
            peer: SocketAddr::new(core::net::IpAddr::V6(core::net::Ipv6Addr::LOCALHOST), 7010),
        },
        Request::Connected { waits: false, rings: true, shortcut: true },
        Request::Connected { waits: true, rings: false, shortcut: false },
        Request::Connected { waits: true, rings: true, shortcut: false },
        Request::Listen,
        Request::Accepted { rings: false, shortcut: false },
        Request::Accepted { rings: true, shortcut: true },
        Request::Reset { connection: u64::MAX - 1 },
        Request::Attach { connection: 7, shortcut: false },
        Request::Attach { connection: 7, shortcut: true },
        Request::Shortcut { connection: 1 << 40 },
    ];

    #[test]
    fn requests_come_as_they_were_sent() {
        for request in ALL {
            assert_eq!(Request::decode(&request.encode()), Ok(request));
        }
    }

    /// The two programs may be of different versions: the file of a library stays open as long as
    /// its program runs.
    #[test]
    fn the_layout_is_written_down() {
        let bytes = ALL[0].encode();
        assert_eq!(&bytes[..16], b"SMCg\x01\x01\x00\x00\x04\x00\x00\x50\x00\x00\x00\x00");
        assert_eq!(&bytes[16..20], [127, 0, 0, 1]);
        assert!(bytes[20..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn what_is_no_request_is_refused() {
        let good = Request::Listen.encode();
        let with = |at: usize, byte: u8| {
            let mut bytes = good;
            bytes[at] = byte;
            Request::decode(&bytes)
        };
        assert_eq!(Request::decode(&good[..39]), Err(Malformed::Length));
        assert_eq!(Request::decode(&[]), Err(Malformed::Length));
        assert_eq!(with(0, b's'), Err(Malformed::Magic));
        assert_eq!(with(4, 2), Err(Malformed::Version(2)));
        assert_eq!(with(5, 9), Err(Malformed::Kind(9)));
        let mut mark = ALL[0].encode();
        mark[8] = 5;
        assert_eq!(Request::decode(&mark), Err(Malformed::Address(5)));
        assert_eq!(with(7, 255), Ok(Request::Listen), "reserved");
    }
}
