//! Options that make the kernel split and coalesce the datagrams of a UDP socket (GSO and GRO).

use std::io;
use std::os::fd::BorrowedFd;

use crate::option;

/// Makes every send on `socket` leave as datagrams of `bytes` each, the last one shorter.
///
/// # Errors
///
/// As `setsockopt(2)`. Kernels before 4.18 lack this option.
pub fn split_sends(socket: BorrowedFd<'_>, bytes: u16) -> io::Result<()> {
    option::set(socket, libc::SOL_UDP, libc::UDP_SEGMENT, bytes.into())
}

/// Lets one receive on `socket` return several coalesced datagrams of one sender.
///
/// # Errors
///
/// As `setsockopt(2)`. Kernels before 5.0 lack this option.
pub fn join_receives(socket: BorrowedFd<'_>) -> io::Result<()> {
    option::set(socket, libc::SOL_UDP, libc::UDP_GRO, 1)
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsFd;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_send_is_split_and_one_receive_without_joining_sees_the_first_part() {
        let receiver = UdpSocket::bind("127.0.0.1:0").unwrap();
        receiver.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        split_sends(sender.as_fd(), 100).unwrap();
        sender.send_to(&[7; 250], receiver.local_addr().unwrap()).unwrap();
        let mut datagram = [0; 1000];
        let lengths = [(); 3].map(|()| receiver.recv(&mut datagram).unwrap());
        assert_eq!(lengths, [100, 100, 50]);
    }

    #[test]
    fn one_receive_with_joining_sees_the_whole_train() {
        let receiver = UdpSocket::bind("127.0.0.1:0").unwrap();
        receiver.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        join_receives(receiver.as_fd()).unwrap();
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        split_sends(sender.as_fd(), 100).unwrap();
        sender.send_to(&[7; 250], receiver.local_addr().unwrap()).unwrap();
        let mut datagram = [0; 1000];
        assert_eq!(receiver.recv(&mut datagram).unwrap(), 250);
    }
}
