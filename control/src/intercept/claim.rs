//! The right to intercept in one network namespace, which one process has at a time.

use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::geteuid;
use smcr_os::credentials::{self, Credentials};

/// The right to intercept in this network namespace. It ends with this, and with the process,
/// however that ends.
#[derive(Debug)]
pub struct Claim {
    _name: net::UnixListener,
}

/// Why somebody has no right to intercept.
#[derive(Debug)]
pub enum NoClaim {
    /// Another process has it; none if nobody knows which.
    Taken(Option<Holder>),
    /// The kernel says why.
    Failed(io::Error),
}

/// Who has the right to intercept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its number, which is zero if it is in a PID namespace that we cannot see into.
    process: u32,
    user: u32,
}

impl Claim {
    /// Takes the right.
    ///
    /// # Errors
    ///
    /// [`NoClaim`].
    pub fn take() -> Result<Self, NoClaim> {
        Self::take_name(NAME)
    }

    fn take_name(name: &[u8]) -> Result<Self, NoClaim> {
        let why = |error: io::Error| match error.kind() == io::ErrorKind::AddrInUse {
            true => NoClaim::Taken(Holder::of(name).ok()),
            false => NoClaim::Failed(error),
        };
        // Abstract names belong to a network namespace, and are free again when their owner is
        // gone. They have no owner in a file system, so every user can take this one before us.
        let address = net::SocketAddr::from_abstract_name(name).map_err(why)?;
        Ok(Self { _name: net::UnixListener::bind_addr(&address).map_err(why)? })
    }
}

impl Holder {
    /// Who listens at an abstract `name`: the kernel notes it when a socket begins to.
    fn of(name: &[u8]) -> io::Result<Self> {
        // Whoever accepts nothing must not keep us waiting.
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
        let Credentials { pid, uid, .. } = credentials::of_peer(socket.as_fd())?;
        Ok(Self { process: pid, user: uid })
    }

    /// Whether it may be a gateway as far as its user is concerned: others can take the name, but
    /// not intercept.
    fn is_trusted(self) -> bool {
        [0, geteuid().as_raw()].contains(&self.user)
    }
}

impl NoClaim {
    /// What to do about it, to be put behind why.
    pub fn remedy(&self) -> String {
        match self {
            Self::Taken(Some(holder)) if holder.is_trusted() => {
                "; stop it first, or give one gateway all listeners".to_owned()
            }
            Self::Taken(Some(_)) => "; end it, unless it is a gateway of yours".to_owned(),
            Self::Taken(None) => "; `ss -xap` shows who has @smcgate intercept".to_owned(),
            Self::Failed(_) => String::new(),
        }
    }
}

impl fmt::Display for NoClaim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Taken(Some(holder)) if holder.is_trusted() => write!(
                f,
                "another gateway intercepts connections in this network namespace ({holder})"
            ),
            Self::Taken(Some(holder)) => write!(
                f,
                "a stranger, who is neither root nor the user of this gateway, has the name that \
                 gives the right to intercept in this network namespace ({holder})"
            ),
            Self::Taken(None) => f.write_str(
                "another gateway intercepts connections in this network namespace, or a process \
                 that is none has its name",
            ),
            Self::Failed(error) => write!(f, "the right to intercept cannot be taken: {error}"),
        }
    }
}

impl std::error::Error for NoClaim {}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.process {
            0 => f.write_str("a process of another PID namespace")?,
            process => write!(f, "process {process}")?,
        }
        write!(f, ", user {}", self.user)
    }
}

const NAME: &[u8] = b"smcgate intercept";

#[cfg(test)]
mod tests {
    use rustix::net::{bind, listen, socket};

    use super::*;

    fn name(of: &str) -> Vec<u8> {
        format!("smcgate test {of} {}", std::process::id()).into_bytes()
    }

    /// An operator must learn which process to stop.
    #[test]
    fn who_has_the_right_is_named() {
        let name = name("named");
        let first = Claim::take_name(&name).unwrap();
        let why = Claim::take_name(&name).unwrap_err();
        let us = format!("process {}, user {}", std::process::id(), geteuid().as_raw());
        assert!(why.to_string().contains("another gateway intercepts"), "{why}");
        assert!(why.to_string().contains(&us), "{why}");
        drop(first);
        Claim::take_name(&name).unwrap();
    }

    /// Any user can take the name, without being able to intercept anything: who looks for another
    /// gateway would not find one.
    #[test]
    fn a_stranger_is_called_one() {
        let user = geteuid().as_raw() + 1;
        let why = NoClaim::Taken(Some(Holder { process: 4711, user }));
        let said = format!("{why}{}", why.remedy());
        assert!(said.contains("a stranger") && said.contains("process 4711"), "{said}");
        assert!(said.contains(&format!("user {user}")) && said.contains("; end it"), "{said}");
        let root = NoClaim::Taken(Some(Holder { process: 0, user: 0 }));
        assert!(root.to_string().contains("another gateway"), "{root}");
        assert!(root.to_string().contains("PID namespace, user 0"), "{root}");
    }

    /// A holder that accepts nothing must not keep us waiting once its queue is full.
    #[test]
    fn a_holder_may_say_nothing() {
        let name = name("silent");
        let holder = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        let address = SocketAddrUnix::new_abstract_name(&name).unwrap();
        bind(&holder, &address).unwrap();
        let unknown = || {
            let why = Claim::take_name(&name).unwrap_err();
            assert!(matches!(why, NoClaim::Taken(None)), "{why}");
            assert!(why.remedy().contains("ss -xap"), "{why}");
        };
        unknown();
        listen(&holder, 0).unwrap();
        let there = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        connect(&there, &address).unwrap();
        unknown();
    }
}
