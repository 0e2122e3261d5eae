//! The right to intercept in one network namespace, which one process has at a time.

use std::fmt;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net;

/// The right to intercept in this network namespace. It ends with this, and with the process,
/// however that ends.
#[derive(Debug)]
pub struct Claim {
    _name: net::UnixListener,
}

/// Why somebody has no right to intercept.
#[derive(Debug)]
pub enum NoClaim {
    /// Another process has it.
    Taken,
    /// The kernel says why.
    Failed(io::Error),
}

impl Claim {
    /// Takes the right.
    ///
    /// # Errors
    ///
    /// [`NoClaim`].
    pub fn take() -> Result<Self, NoClaim> {
        let why = |error: io::Error| match error.kind() == io::ErrorKind::AddrInUse {
            true => NoClaim::Taken,
            false => NoClaim::Failed(error),
        };
        // Abstract names belong to a network namespace, and are free again when their owner is
        // gone.
        let name = net::SocketAddr::from_abstract_name(NAME).map_err(why)?;
        Ok(Self { _name: net::UnixListener::bind_addr(&name).map_err(why)? })
    }
}

impl fmt::Display for NoClaim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Taken => {
                f.write_str("another gateway intercepts connections in this network namespace")
            }
            Self::Failed(error) => write!(f, "the right to intercept cannot be taken: {error}"),
        }
    }
}

impl std::error::Error for NoClaim {}

const NAME: &[u8] = b"smcgate intercept";
