//! Which ends of which connections have another congestion control: for the program, the privilege
//! to load eBPF is needed.

use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{bind, connect};

use super::*;

fn of(socket: impl AsFd) -> String {
    sockopt::tcp_congestion(socket).unwrap()
}

fn listener(address: impl Into<IpAddr>) -> TcpListener {
    TcpListener::bind(SocketAddr::new(address.into(), 0)).unwrap()
}

/// A connection of an application that would be paced, to `target`: both ends.
fn call(target: &TcpListener) -> [OwnedFd; 2] {
    let socket = paced(target.local_addr().unwrap());
    connect(&socket, &target.local_addr().unwrap()).unwrap();
    [socket, target.accept().unwrap().0.into()]
}

/// A socket that will use bbr, whatever the host's default is.
fn paced(target: SocketAddr) -> OwnedFd {
    let family = if target.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket(family, SocketType::STREAM, None).unwrap();
    sockopt::set_tcp_congestion(&socket, "bbr").unwrap();
    socket
}

/// Binds `socket` to a port whose last user has just closed: until the other end has acknowledged
/// that, which a busy machine does later, the port is taken.
fn bind_when_free(socket: &OwnedFd, at: SocketAddr) {
    let is_bound = (0..10_000).any(|_| {
        let Err(error) = bind(socket, &at) else { return true };
        assert_eq!(error, Errno::ADDRINUSE);
        thread::sleep(Duration::from_millis(1));
        false
    });
    assert!(is_bound, "{at} stays in use");
}

/// The kernel has bbr, or the module can be loaded.
fn has_bbr() -> bool {
    let all = fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control").unwrap();
    all.split_ascii_whitespace().any(|name| name == "bbr")
}

#[test]
#[ignore = "needs the privilege to load eBPF; run by scripts/test e2e"]
fn both_ends_of_our_connections_are_spared_and_no_others() {
    assert!(has_bbr(), "the kernel needs tcp_bbr for this");
    for address in [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()] {
        let (ours, foreign, application) =
            (listener(address), listener(address), listener(address));
        let program = Program::load().unwrap();
        let loopback = Loopback::Both(program);
        let ours = TcpListener::from({
            let at = ours.local_addr().unwrap();
            let socket = OwnedFd::from(ours);
            loopback.suit_listener(&socket, at);
            socket
        });
        // Applications that call us, and somebody else.
        assert_eq!(call(&ours).map(of), ["reno", "reno"]);
        assert_eq!(of(&call(&foreign)[0]), "bbr");

        // We call an application whose sockets would be paced, and somebody else calls it.
        let target = application.local_addr().unwrap();
        sockopt::set_tcp_congestion(&application, "bbr").unwrap();
        // Its port is chosen by bind, as connect takes one that others have in TIME_WAIT, where
        // nobody could bind to it below.
        let socket = paced(target);
        bind(&socket, &SocketAddr::new(address, 0)).unwrap();
        loopback.suit_client(&socket, target.ip());
        connect(&socket, &target).unwrap();
        let (accepted, from) = application.accept().unwrap();
        assert_eq!([of(&socket), of(accepted)], ["reno", "reno"]);
        assert_eq!(call(&application).map(of), ["bbr", "bbr"]);

        // Somebody else gets a port that was ours. The accepted end is closed, and whoever has seen
        // that before closing leaves no TIME_WAIT behind.
        assert_eq!(rustix::io::read(&socket, &mut [0; 1]), Ok(0));
        drop(socket);
        let other = paced(target);
        bind_when_free(&other, from);
        connect(&other, &target).unwrap();
        assert_eq!(of(application.accept().unwrap().0), "bbr");
    }
}

/// Whoever chose otherwise has a reason.
#[test]
#[ignore = "needs the privilege to load eBPF; run by scripts/test e2e"]
fn an_application_keeps_what_does_not_pace() {
    let ours = listener(Ipv4Addr::LOCALHOST);
    let program = Program::load().unwrap();
    let target = ours.local_addr().unwrap();
    program.note_listener(target.port()).unwrap();
    let socket = paced(target);
    sockopt::set_tcp_congestion(&socket, "cubic").unwrap();
    connect(&socket, &target).unwrap();
    assert_eq!(of(socket), "cubic");
}

/// An operator who wants to see what the host does gets that.
#[test]
fn nothing_is_changed_where_the_operator_says_so() {
    let ours = listener(Ipv4Addr::LOCALHOST);
    let before = of(&ours);
    let target = ours.local_addr().unwrap();
    let ours = OwnedFd::from(ours);
    let loopback = Loopback::choose(CongestionControl::Host);
    loopback.suit_listener(&ours, target);
    loopback.suit_accepted(&ours, target.ip());
    loopback.suit_client(&ours, target.ip());
    assert_eq!(of(&ours), before);
    let client = TcpStream::connect(target).unwrap();
    assert_eq!(of(client), before);
}
