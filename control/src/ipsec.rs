//! Whether IPsec protects a connection. RDMA would carry its bytes past that protection, so such a
//! connection stays TCP (RFC 5.5).
//!
//! The kernel lists its policies over netlink and says when one changes (linux/xfrm.h). What counts
//! is the policy for packets that leave: of those that fit, the one with the lowest number decides.
//! Whether keys have been agreed on already does not matter.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, sendto, socket_with,
};

/// The policies of this network namespace.
#[derive(Debug)]
pub struct Policies {
    /// Readable when a policy changed; none where the kernel does not say.
    changes: Option<OwnedFd>,
    /// Asks the kernel for all policies.
    list: fn() -> io::Result<Vec<Policy>>,
    known: Vec<Policy>,
    /// A policy changed, and the kernel has not listed them since: what is known may be wrong.
    stale: bool,
    /// Why the kernel does not show them, until somebody is told.
    hidden: Option<io::Error>,
}

/// What happens to packets that leave.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Policy {
    from: Prefix,
    to: Prefix,
    /// The ports that it is for, as value and mask.
    from_port: (u16, u16),
    to_port: (u16, u16),
    /// The lowest number decides.
    priority: u32,
    protects: bool,
}

/// The addresses that share their first bits with one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Prefix {
    address: IpAddr,
    bits: u8,
}

impl Policies {
    /// Those of this network namespace, as long as the value lives.
    pub fn of_this_host() -> Self {
        Self::begin(watch(), list)
    }

    fn begin(changes: io::Result<OwnedFd>, list: fn() -> io::Result<Vec<Policy>>) -> Self {
        match changes.and_then(|changes| Ok((changes, list_if_allowed(list)?))) {
            Ok((changes, known)) => {
                let (stale, known) = (known.is_none(), known.unwrap_or_default());
                Self { changes: Some(changes), list, known, stale, hidden: None }
            }
            Err(error) => {
                let (known, hidden) = (Vec::new(), Some(error));
                Self { changes: None, list, known, stale: false, hidden }
            }
        }
    }

    /// Warns, once, if the policies cannot be known. A gateway calls it as soon as it may speak
    /// SMC-R: one that only relays TCP needs no policies, and not the privilege to see them.
    pub fn need(&mut self) {
        if let Some(error) = self.hidden.take() {
            tracing::warn!(%error, "connections that IPsec protects will not be noticed");
        }
    }

    /// Readable when a policy has changed since it was last asked; none where the kernel does not
    /// say.
    pub fn descriptor(&self) -> Option<&OwnedFd> {
        self.changes.as_ref()
    }

    /// Whether packets of a TCP connection are to be protected on their way from `local` to `peer`,
    /// by the policies of now: each answer costs a system call that looks for changes.
    ///
    /// While the policies are not known the answer is yes: bytes that somebody wants encrypted must
    /// not travel unprotected because a list could not be read.
    pub fn protect(&mut self, local: SocketAddr, peer: SocketAddr) -> bool {
        self.refresh();
        if self.stale {
            return true;
        }
        let fits = self.known.iter().filter(|policy| policy.covers(local, peer));
        fits.min_by_key(|policy| policy.priority).is_some_and(|policy| policy.protects)
    }

    /// Lists the policies again if one has changed, or if that failed the last time.
    fn refresh(&mut self) {
        if !self.have_changed() && !self.stale {
            return;
        }
        match (self.list)() {
            Ok(known) => {
                self.known = known;
                if std::mem::take(&mut self.stale) {
                    tracing::info!("the IPsec policies are known again");
                }
            }
            // Each connection asks again, so the log says it once.
            Err(error) if !std::mem::replace(&mut self.stale, true) => warn_of_stale(&error),
            Err(_) => {}
        }
    }

    /// Whether the kernel has said since the last call that a policy changed.
    fn have_changed(&self) -> bool {
        // A kernel that could not be asked at the start is not asked again; the log has said so.
        let Some(changes) = &self.changes else { return false };
        let mut changed = false;
        loop {
            // What it says does not matter, and the kernel throws away what does not fit.
            match recv(changes, &mut [0; 64], RecvFlags::DONTWAIT) {
                // If messages were lost, something changed that they were about.
                Ok(_) | Err(Errno::NOBUFS | Errno::INTR) => changed = true,
                Err(Errno::AGAIN) => return changed,
                // The socket does not work any more, so every look may be the one that matters.
                Err(_) => return true,
            }
        }
    }
}

impl Policy {
    fn covers(&self, local: SocketAddr, peer: SocketAddr) -> bool {
        let is_for = |(value, mask): (u16, u16), port: u16| port & mask == value & mask;
        self.from.has(local.ip())
            && self.to.has(peer.ip())
            && is_for(self.from_port, local.port())
            && is_for(self.to_port, peer.port())
    }

    /// A policy in a message of the kernel (`xfrm_userpolicy_info`); none if it is for other
    /// packets than those of TCP that leave.
    ///
    /// A policy may be for marked packets only, or for those of one device or XFRM interface, and
    /// we do not know whether ours are such. If it protects them, it counts; if it exempts them, it
    /// does not: it must not hide another one that protects ours.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let family = short(bytes, 40)?;
        let network = |at: usize, bits: usize| {
            let address: [u8; 16] = bytes.get(at..at + 16)?.try_into().ok()?;
            let address = match family {
                AF_INET => IpAddr::from(*address.first_chunk::<4>()?),
                _ => IpAddr::from(address),
            };
            Some(Prefix { address, bits: *bytes.get(bits)? })
        };
        // Ports are in network order, whatever the host's is.
        let port = |at: usize| Some(u16::from_be(short(bytes, at)?));
        let protocol = *bytes.get(44)?;
        let outbound = *bytes.get(INFO_LEN - 8)? == DIRECTION_OUT;
        let attributes = bytes.get(INFO_LEN..)?;
        let has = |wanted: [u16; 2]| {
            split(attributes, ATTRIBUTE_HEADER_LEN)
                .filter_map(|attribute| short(attribute, 2))
                .any(|kind| wanted.contains(&kind))
        };
        let protects = has([TEMPLATE; 2]);
        let is_for_some = long(bytes, 48)? != 0 || has([MARK, INTERFACE]);
        let policy = Self {
            to: network(0, 42)?,
            from: network(16, 43)?,
            to_port: (port(32)?, port(34)?),
            from_port: (port(36)?, port(38)?),
            priority: long(bytes, 152)?,
            protects,
        };
        let counts = outbound && (protocol == 0 || protocol == TCP);
        (counts && (protects || !is_for_some)).then_some(policy)
    }
}

impl Prefix {
    fn has(self, address: IpAddr) -> bool {
        let wide = |address: IpAddr| match address.to_canonical() {
            IpAddr::V4(address) => (u128::from(address.to_bits()) << 96, true),
            IpAddr::V6(address) => (Ipv6Addr::to_bits(address), false),
        };
        let ((own, own_is_v4), (other, other_is_v4)) = (wide(self.address), wide(address));
        let mask = u128::MAX.checked_shl(128 - u32::from(self.bits.min(128))).unwrap_or(0);
        own_is_v4 == other_is_v4 && own & mask == other & mask
    }
}

/// A socket that hears of policies.
fn watch() -> io::Result<OwnedFd> {
    let socket = open(SocketFlags::NONBLOCK)?;
    bind(&socket, &SocketAddrNetlink::new(0, POLICY_CHANGES))?;
    Ok(socket)
}

/// What `list` returns, or none if it may work later.
///
/// # Errors
///
/// If the kernel has no policies, or does not show them to this process.
fn list_if_allowed(list: fn() -> io::Result<Vec<Policy>>) -> io::Result<Option<Vec<Policy>>> {
    use io::ErrorKind::{PermissionDenied, Unsupported};
    match list() {
        Ok(policies) => Ok(Some(policies)),
        Err(error) if matches!(error.kind(), PermissionDenied | Unsupported) => Err(error),
        Err(error) => {
            warn_of_stale(&error);
            Ok(None)
        }
    }
}

fn warn_of_stale(error: &io::Error) {
    let what = "the IPsec policies cannot be listed; new connections stay TCP until they can";
    tracing::warn!(%error, "{what}");
}

/// All policies for what leaves.
///
/// # Errors
///
/// If the kernel refuses, or they changed while it listed them, so that some may be missing.
fn list() -> io::Result<Vec<Policy>> {
    let socket = open(SocketFlags::empty())?;
    let mut request = [0; HEADER_LEN + ID_LEN];
    let len = u32::try_from(request.len()).expect("a request is short");
    request[..4].copy_from_slice(&len.to_ne_bytes());
    request[4..6].copy_from_slice(&GET_POLICY.to_ne_bytes());
    request[6..8].copy_from_slice(&(REQUEST | DUMP).to_ne_bytes());
    sendto(&socket, &request, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
    let mut policies = Vec::new();
    let mut bytes = vec![0; 65_536];
    loop {
        let (received, _) = recv(&socket, &mut bytes[..], RecvFlags::empty())?;
        for message in split(&bytes[..received], HEADER_LEN) {
            if short(message, 6).is_some_and(|flags| flags & INTERRUPTED != 0) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            match message.get(4..6).map(|kind| u16::from_ne_bytes([kind[0], kind[1]])) {
                Some(NEW_POLICY) => policies.extend(Policy::parse(&message[HEADER_LEN..])),
                Some(ERROR) => return Err(refusal(&message[HEADER_LEN..])),
                Some(DONE) | None => return Ok(policies),
                Some(_) => {}
            }
        }
    }
}

fn open(flags: SocketFlags) -> io::Result<OwnedFd> {
    let flags = flags | SocketFlags::CLOEXEC;
    Ok(socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(netlink::XFRM))?)
}

fn refusal(bytes: &[u8]) -> io::Error {
    let code = long(bytes, 0).map_or(0, u32::cast_signed);
    io::Error::from_raw_os_error(code.wrapping_neg())
}

/// The messages, or attributes, of which each begins with its length and is padded to four bytes.
/// The length is of four bytes in messages and of two in attributes, as `header` tells.
fn split(mut bytes: &[u8], header: usize) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let len = match header {
            HEADER_LEN => long(bytes, 0)? as usize,
            _ => short(bytes, 0)?.into(),
        };
        let piece = bytes.get(..len).filter(|piece| piece.len() >= header)?;
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some(piece)
    })
}

fn short(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|bytes| u16::from_ne_bytes(*bytes))
}

fn long(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
}

// Of linux/netlink.h: the header of a message, and kinds and flags of messages.
const HEADER_LEN: usize = 16;
const ATTRIBUTE_HEADER_LEN: usize = 4;
const ERROR: u16 = 2;
const DONE: u16 = 3;
const REQUEST: u16 = 0x1;
const DUMP: u16 = 0x300;
const INTERRUPTED: u16 = 0x10;
// Of linux/xfrm.h: sizes of `xfrm_userpolicy_id` and `xfrm_userpolicy_info`, and what is in them.
const ID_LEN: usize = 64;
const INFO_LEN: usize = 168;
const NEW_POLICY: u16 = 0x13;
const GET_POLICY: u16 = 0x15;
const TEMPLATE: u16 = 5;
const MARK: u16 = 21;
const INTERFACE: u16 = 31;
const DIRECTION_OUT: u8 = 1;
/// The group of messages that tell of policies: the fourth, as a bit.
const POLICY_CHANGES: u32 = 1 << 3;
const AF_INET: u16 = 2;
const TCP: u8 = 6;

#[cfg(test)]
mod tests;
