//! What the preload library says to the gateway on this host, and what it is answered.
//!
//! The gateway listens at a Unix socket of type `SOCK_SEQPACKET`, the *door*. For each request the
//! library opens a connection, sends one [`Request`] with a TCP socket of the application beside it
//! (`SCM_RIGHTS`), and reads one [`Reply`], which may bring a socket, too. So the library needs no
//! state: nothing has to survive `fork` or `exec`, and threads share nothing.
//!
//! A connection that becomes SMC-R continues on a Unix stream socket, which takes the place of the
//! TCP socket in the application. Its name in the abstract name space is a [`Name`]: whoever holds
//! the descriptor learns from `getsockname` which TCP connection it stands for. Its other end
//! belongs to the gateway. That end has no name as long as the stream goes on, and gets one before
//! it ends in order: a stream that ended without a name was reset.
//!
//! A library that can use shared memory says so, and a gateway that offers it then sends a memfd
//! behind the Unix socket, which carries no bytes of the stream any more (`smcgate-rings`). Where
//! one of the two is older, the bytes go by the socket.
//!
//! Nothing here does IO.

#![no_std]
#![forbid(unsafe_code)]

mod address;
mod choice;
mod name;
mod reply;
mod request;

pub use choice::{Choice, Networks, NoChoice, Ports};
pub use name::Name;
pub use reply::Reply;
pub use request::Request;

/// Why bytes are no message of this protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// They are shorter or longer than every message.
    Length,
    /// They do not begin as messages do.
    Magic,
    /// They are of another version of this protocol.
    Version(u8),
    /// There is no such kind of message.
    Kind(u8),
    /// An address is neither of IPv4 nor of IPv6.
    Address(u8),
}

impl core::fmt::Display for Malformed {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Length => f.write_str("no message has this length"),
            Self::Magic => f.write_str("no message begins like this"),
            Self::Version(version) => {
                write!(f, "version {version} is not {VERSION}; update the older program")
            }
            Self::Kind(kind) => write!(f, "there is no message of kind {kind}"),
            Self::Address(family) => write!(f, "there is no address family {family}"),
        }
    }
}

impl core::error::Error for Malformed {}

/// Every message begins with this, and then with the version and the kind.
const MAGIC: [u8; 4] = *b"SMCg";
/// The version of all messages.
const VERSION: u8 = 1;

/// The kind of a message, if it is one.
fn kind(bytes: &[u8]) -> Result<u8, Malformed> {
    if bytes[..4] != MAGIC {
        return Err(Malformed::Magic);
    }
    if bytes[4] != VERSION {
        return Err(Malformed::Version(bytes[4]));
    }
    Ok(bytes[5])
}
