//! Which TCP connection a Unix socket stands for.

use std::os::fd::BorrowedFd;

use rustix::net::{AddressFamily, SocketAddrAny, SocketAddrUnix, getpeername, getsockname};
use smcgate_door::Name;

/// The name of a Unix socket of ours; none if the descriptor is anything else.
pub(crate) fn of(socket: BorrowedFd<'_>) -> Option<Name> {
    let address = getsockname(socket).ok()?;
    let address = unix(address)?;
    // The kernel leaves out the zero by which abstract names begin.
    let name = address.abstract_name()?;
    let mut path = [0; Name::LEN];
    path.get_mut(1..=name.len())?.copy_from_slice(name);
    Name::decode(path.get(..=name.len())?)
}

/// Whether the gateway has given its end a name.
pub(crate) fn is_peer_named(socket: BorrowedFd<'_>) -> bool {
    let peer = getpeername(socket).ok().flatten().and_then(unix);
    peer.is_some_and(|peer| peer.abstract_name().is_some_and(|name| !name.is_empty()))
}

fn unix(address: SocketAddrAny) -> Option<SocketAddrUnix> {
    if address.address_family() != AddressFamily::UNIX {
        return None;
    }
    address.try_into().ok()
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsFd;

    use rustix::net::{SocketFlags, SocketType, bind, socketpair};

    use super::*;

    #[test]
    fn a_name_is_read_back_and_tells_the_ends_apart() {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .unwrap();
        assert_eq!(of(ours.as_fd()), None);
        let name = Name {
            connection: u64::from(std::process::id()) << 32 | 77,
            local: "10.8.0.1:4711".parse().unwrap(),
            peer: "10.8.0.2:80".parse().unwrap(),
            rings: false,
        };
        let address = SocketAddrUnix::new_abstract_name(&name.encode()[1..]).unwrap();
        bind(&ours, &address).unwrap();
        assert_eq!(of(ours.as_fd()), Some(name));
        assert!(!is_peer_named(ours.as_fd()));
        bind(&theirs, &SocketAddrUnix::new_unnamed()).unwrap();
        assert!(is_peer_named(ours.as_fd()));
        drop(theirs);
        assert!(is_peer_named(ours.as_fd()), "and stays named");
    }

    #[test]
    fn other_descriptors_have_no_such_name() {
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        assert_eq!(of(udp.as_fd()), None);
        assert!(!is_peer_named(udp.as_fd()));
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(of(file.as_fd()), None);
    }
}
