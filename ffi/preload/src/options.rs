//! Options of TCP and IP, which a Unix socket does not have.
//!
//! Those that programs set and read again are remembered. All others are asked of a TCP socket that
//! is made for the question: it knows the defaults of this host, and refuses what TCP refuses.

use std::os::fd::BorrowedFd;

use libc::c_int;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use smcgate_door::Name;

use crate::sys::{self, Own};

/// Where an option is remembered, and what it may be.
struct Field {
    name: c_int,
    shift: u32,
    bits: u32,
    least: i32,
}

const FIELDS: [Field; 7] = [
    Field { name: libc::TCP_NODELAY, shift: 0, bits: 1, least: i32::MIN },
    Field { name: libc::TCP_CORK, shift: 1, bits: 1, least: i32::MIN },
    Field { name: libc::TCP_QUICKACK, shift: 2, bits: 1, least: i32::MIN },
    Field { name: libc::TCP_KEEPCNT, shift: 3, bits: 7, least: 1 },
    Field { name: libc::TCP_KEEPIDLE, shift: 10, bits: 15, least: 1 },
    Field { name: libc::TCP_KEEPINTVL, shift: 25, bits: 15, least: 1 },
    // In milliseconds: four hours and more count as four hours.
    Field { name: libc::TCP_USER_TIMEOUT, shift: 40, bits: 24, least: 0 },
];

impl Field {
    fn mask(&self) -> u64 {
        (1 << self.bits) - 1
    }

    fn get(&self, options: u64) -> i32 {
        let value = options >> self.shift & self.mask();
        i32::try_from(value).unwrap_or(i32::MAX)
    }

    fn set(&self, options: u64, value: i32) -> Result<u64, Errno> {
        let most = self.mask();
        let value = match (self.bits, u64::try_from(value)) {
            (1, _) => u64::from(value != 0),
            _ if value < self.least => return Err(Errno::INVAL),
            (24, Ok(value)) => value.min(most),
            (_, Ok(value)) if value <= most => value,
            (_, Ok(_) | Err(_)) => return Err(Errno::INVAL),
        };
        Ok(options & !(most << self.shift) | value << self.shift)
    }
}

fn field(level: c_int, name: c_int) -> Option<&'static Field> {
    (level == libc::IPPROTO_TCP).then(|| FIELDS.iter().find(|field| field.name == name)).flatten()
}

/// The options of a TCP socket, to be remembered.
pub(crate) fn of_socket(tcp: BorrowedFd<'_>) -> u64 {
    let mut options = 0;
    for field in &FIELDS {
        let mut value = [0; 4];
        let length = sys::socket_option(tcp, libc::IPPROTO_TCP, field.name, &mut value);
        if length == Ok(value.len()) {
            options = field.set(options, i32::from_ne_bytes(value)).unwrap_or(options);
        }
    }
    options
}

/// Reads an option of a switched socket into `value`; returns its length. None if the Unix socket
/// itself should be asked. `state` is that of the connection in `struct tcp_info`.
pub(crate) fn read(
    name: Name,
    options: u64,
    (level, option): (c_int, c_int),
    value: &mut [u8],
    state: impl FnOnce() -> u8,
) -> Option<Result<usize, Errno>> {
    if let Some(field) = field(level, option) {
        return Some(Ok(put(value, field.get(options))));
    }
    match (level, option) {
        (libc::SOL_SOCKET, libc::SO_DOMAIN) => Some(Ok(put(value, family(name)))),
        (libc::SOL_SOCKET, libc::SO_PROTOCOL) => Some(Ok(put(value, libc::IPPROTO_TCP))),
        (libc::IPPROTO_TCP, libc::TCP_INFO) => {
            let length = ask_tcp(name, |tcp| sys::socket_option(tcp, level, option, value));
            if let Some(place) = value.first_mut() {
                *place = state();
            }
            Some(length)
        }
        (libc::IPPROTO_TCP | libc::IPPROTO_IP | libc::IPPROTO_IPV6, _) => {
            Some(ask_tcp(name, |tcp| sys::socket_option(tcp, level, option, value)))
        }
        _ => None,
    }
}

/// Sets an option of a switched socket. Returns what is to be remembered from now on. None if it is
/// the Unix socket's own.
pub(crate) fn write(
    name: Name,
    options: u64,
    (level, option): (c_int, c_int),
    value: &[u8],
) -> Option<Result<u64, Errno>> {
    if let Some(field) = field(level, option) {
        let value = value.first_chunk().ok_or(Errno::INVAL);
        return Some(value.and_then(|value| field.set(options, i32::from_ne_bytes(*value))));
    }
    match (level, option) {
        // A Unix socket refuses it.
        (libc::SOL_SOCKET, libc::SO_REUSEPORT) => Some(Ok(options)),
        (libc::IPPROTO_TCP | libc::IPPROTO_IP | libc::IPPROTO_IPV6, _) => {
            let set = ask_tcp(name, |tcp| sys::set_socket_option(tcp, level, option, value));
            Some(set.map(|()| options))
        }
        _ => None,
    }
}

/// As many bytes of a number as there is room for, as the kernel does it.
pub(crate) fn put(value: &mut [u8], number: c_int) -> usize {
    let bytes = number.to_ne_bytes();
    let length = value.len().min(bytes.len());
    value[..length].copy_from_slice(&bytes[..length]);
    length
}

fn family(name: Name) -> c_int {
    if name.local.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 }
}

fn ask_tcp<T>(
    name: Name,
    ask: impl FnOnce(BorrowedFd<'_>) -> Result<T, Errno>,
) -> Result<T, Errno> {
    use std::os::fd::AsFd as _;
    let family = if name.local.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let tcp = Own::new(socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?);
    ask(tcp.as_fd())
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    use super::*;

    const NAME: Name = Name {
        connection: 1,
        local: std::net::SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 1),
        peer: std::net::SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 2),
        rings: false,
    };
    const TCP: c_int = libc::IPPROTO_TCP;

    fn number(options: u64, level: c_int, option: c_int) -> Result<i32, Errno> {
        let mut value = [0; 4];
        let length = read(NAME, options, (level, option), &mut value, || 0);
        let length = length.expect("it is answered")?;
        assert_eq!(length, 4);
        Ok(i32::from_ne_bytes(value))
    }

    #[test]
    fn what_is_set_is_read_again_and_disturbs_nothing_else() {
        let mut options = 0;
        let wanted = [1, 1, 0, 127, 32_767, 32_767, 90_000];
        for (field, value) in FIELDS.iter().zip(wanted) {
            let set = write(NAME, options, (TCP, field.name), &i32::to_ne_bytes(value));
            options = set.expect("it is remembered").unwrap();
        }
        for (field, value) in FIELDS.iter().zip(wanted) {
            assert_eq!(number(options, TCP, field.name), Ok(value), "{}", field.name);
        }
        let refused = |name, value| {
            write(NAME, options, (TCP, name), &i32::to_ne_bytes(value)).unwrap().unwrap_err()
        };
        for (name, value) in
            [(libc::TCP_KEEPIDLE, 0), (libc::TCP_KEEPCNT, 128), (libc::TCP_USER_TIMEOUT, -1)]
        {
            assert_eq!(refused(name, value), Errno::INVAL);
        }
        assert_eq!(write(NAME, 0, (TCP, libc::TCP_NODELAY), &[1]).unwrap(), Err(Errno::INVAL));
    }

    #[test]
    fn a_connection_takes_its_options_along() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        tcp.set_nodelay(true).unwrap();
        let idle = i32::to_ne_bytes(45);
        sys::set_socket_option(tcp.as_fd(), TCP, libc::TCP_KEEPIDLE, &idle).unwrap();
        let options = of_socket(tcp.as_fd());
        assert_eq!(number(options, TCP, libc::TCP_NODELAY), Ok(1));
        assert_eq!(number(options, TCP, libc::TCP_KEEPIDLE), Ok(45));
        assert_eq!(number(options, TCP, libc::TCP_KEEPCNT), Ok(9), "the default of this host");
    }

    #[test]
    fn everything_else_is_as_a_tcp_socket_says() {
        assert_eq!(number(0, libc::SOL_SOCKET, libc::SO_DOMAIN), Ok(libc::AF_INET));
        assert_eq!(number(0, libc::SOL_SOCKET, libc::SO_PROTOCOL), Ok(TCP));
        assert_eq!(number(0, libc::IPPROTO_IP, libc::IP_TTL), Ok(64));
        assert_eq!(number(0, TCP, 9999), Err(Errno::NOPROTOOPT));
        assert_eq!(write(NAME, 0, (TCP, 9999), &[0; 4]).unwrap(), Err(Errno::NOPROTOOPT));
        assert_eq!(write(NAME, 5, (libc::IPPROTO_IP, libc::IP_TOS), &[8, 0, 0, 0]), Some(Ok(5)));
        let mut info = [0; 104];
        assert_eq!(read(NAME, 0, (TCP, libc::TCP_INFO), &mut info, || 8), Some(Ok(104)));
        assert_eq!(info[0], 8);
        assert_eq!(read(NAME, 0, (libc::SOL_SOCKET, libc::SO_ERROR), &mut info, || 8), None);
    }
}
