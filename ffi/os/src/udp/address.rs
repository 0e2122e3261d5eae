//! Socket addresses of both families in the kernel's binary form.

use std::mem;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use libc::{c_int, sa_family_t, sockaddr_in, sockaddr_in6, socklen_t};

/// Room for a `sockaddr_in` or a `sockaddr_in6`.
#[repr(C, align(4))]
#[derive(Clone, Copy, Debug)]
pub(super) struct Name([u8; NAME_LEN]);

impl Name {
    /// All zero: no address.
    pub(super) const NONE: Self = Self([0; NAME_LEN]);
    /// How many bytes the kernel may write.
    #[allow(clippy::cast_possible_truncation, reason = "28")]
    pub(super) const LEN: socklen_t = NAME_LEN as socklen_t;

    /// The binary form of `address`, and its length in bytes.
    pub(super) fn of(address: SocketAddr) -> (Self, socklen_t) {
        let mut name = Self::NONE;
        let bytes = &mut name.0;
        bytes[PORT..PORT + 2].copy_from_slice(&address.port().to_be_bytes());
        let (family, len) = match address {
            SocketAddr::V4(address) => {
                bytes[V4_ADDRESS..V4_ADDRESS + 4].copy_from_slice(&address.ip().octets());
                (libc::AF_INET, size_of::<sockaddr_in>())
            }
            SocketAddr::V6(address) => {
                bytes[V6_ADDRESS..V6_ADDRESS + 16].copy_from_slice(&address.ip().octets());
                bytes[SCOPE..].copy_from_slice(&address.scope_id().to_ne_bytes());
                (libc::AF_INET6, size_of::<sockaddr_in6>())
            }
        };
        bytes[..PORT].copy_from_slice(&to_family(family).to_ne_bytes());
        (name, socklen_t::try_from(len).expect("28 at most"))
    }

    /// The address that the kernel wrote, if it is an IPv4 or IPv6 address.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        let port = u16::from_be_bytes(self.part(PORT));
        match c_int::from(sa_family_t::from_ne_bytes(self.part(0))) {
            libc::AF_INET => {
                let ip = Ipv4Addr::from(self.part::<4>(V4_ADDRESS));
                Some(SocketAddrV4::new(ip, port).into())
            }
            libc::AF_INET6 => {
                let ip = Ipv6Addr::from(self.part::<16>(V6_ADDRESS));
                let scope = u32::from_ne_bytes(self.part(SCOPE));
                Some(SocketAddrV6::new(ip, port, 0, scope).into())
            }
            _ => None,
        }
    }

    fn part<const N: usize>(&self, at: usize) -> [u8; N] {
        *self.0[at..].first_chunk().expect("the fields lie inside")
    }
}

#[allow(clippy::cast_possible_truncation, reason = "the number of a family is small")]
fn to_family(family: c_int) -> sa_family_t {
    family as sa_family_t
}

const NAME_LEN: usize = size_of::<sockaddr_in6>();
const PORT: usize = 2;
const V4_ADDRESS: usize = 4;
const V6_ADDRESS: usize = 8;
const SCOPE: usize = 24;

// The layout of the kernel's structures.
const _: () = assert!(mem::offset_of!(sockaddr_in, sin_port) == PORT);
const _: () = assert!(mem::offset_of!(sockaddr_in, sin_addr) == V4_ADDRESS);
const _: () = assert!(mem::offset_of!(sockaddr_in6, sin6_port) == PORT);
const _: () = assert!(mem::offset_of!(sockaddr_in6, sin6_addr) == V6_ADDRESS);
const _: () = assert!(mem::offset_of!(sockaddr_in6, sin6_scope_id) == SCOPE);
const _: () = assert!(NAME_LEN == SCOPE + 4 && NAME_LEN > size_of::<sockaddr_in>());
const _: () = assert!(align_of::<Name>() >= align_of::<sockaddr_in6>());

#[cfg(test)]
mod tests {
    use super::*;

    /// A link-local address without its scope would be unreachable.
    #[test]
    fn addresses_read_back_from_the_kernels_form() {
        let scoped = SocketAddrV6::new("fe80::7".parse().unwrap(), 4791, 0, 3);
        for address in ["10.1.2.3:4791".parse().unwrap(), scoped.into()] {
            let (name, len) = Name::of(address);
            assert_eq!(name.address(), Some(address));
            assert_eq!(len, if address.is_ipv4() { 16 } else { 28 });
        }
        assert_eq!(Name::NONE.address(), None);
    }
}
