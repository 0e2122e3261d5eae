//! The option on real SYNs, for which the privilege to load eBPF is needed.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::time::Duration;

use rustix::net::{AddressFamily, RecvFlags, SocketType};
use socket2::{Domain, Socket, Type};

use super::*;

const SMC_OPTION: [u8; 6] = [254, 6, 0xe2, 0xd4, 0xc3, 0xd9];

/// What each end sees, and what was on the wire.
#[derive(Debug, PartialEq, Eq)]
struct Outcome {
    syn_had_it: bool,
    syn_ack_had_it: bool,
    server_sees_it: bool,
    client_sees_it: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Marked,
    Plain,
}

/// Both ends answer the same question in the same way, or one would send CLC to a plain socket.
// RFC 7609 3.5.1.1 #3: answer only a SYN with option
// RFC 7609 3.5.1.1 #6: look up peer's option after handshake
// RFC 7609 B.1 #4: handle option unseen by applications
#[test]
#[ignore = "needs the privilege to load eBPF; run by scripts/test e2e"]
fn both_ends_see_the_option_only_if_both_are_marked() {
    let option = load();
    for address in [SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), (Ipv6Addr::LOCALHOST, 0).into()] {
        let outcome = |client, server| connect(&option, &option, address, client, server);
        let agreed = |agreed| Outcome {
            syn_had_it: agreed,
            syn_ack_had_it: agreed,
            server_sees_it: agreed,
            client_sees_it: agreed,
        };
        assert_eq!(outcome(End::Marked, End::Marked), agreed(true), "{address}");
        assert_eq!(outcome(End::Plain, End::Plain), agreed(false), "{address}");
        assert_eq!(outcome(End::Plain, End::Marked), agreed(false), "{address}");
        let offered = Outcome { syn_had_it: true, ..agreed(false) };
        assert_eq!(outcome(End::Marked, End::Plain), offered, "{address}");
    }
}

/// Two gateways of one host share a cgroup, so each one's program meets the other's sockets.
#[test]
#[ignore = "needs the privilege to load eBPF; run by scripts/test e2e"]
fn two_gateways_on_one_host_do_not_disturb_each_other() {
    let a = load();
    let b = load();
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let outcome = connect(&a, &b, address, End::Marked, End::Marked);
    assert!(outcome.client_sees_it && outcome.server_sees_it, "{outcome:?}");
    let outcome = connect(&a, &b, address, End::Marked, End::Plain);
    assert!(!outcome.client_sees_it && !outcome.syn_ack_had_it, "{outcome:?}");
}

/// A gateway that is gone leaves sockets that connect as plain TCP, and live connections alone.
#[test]
#[ignore = "needs the privilege to load eBPF; run by scripts/test e2e"]
fn dropping_the_program_detaches_it() {
    let option = load();
    let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    listener.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
    option.mark_listener(&listener, Ports::Own).unwrap();
    listener.listen(8).unwrap();
    let address = listener.local_addr().unwrap();
    let client = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    option.mark_client(&client).unwrap();
    drop(option);

    client.connect(&address).unwrap();
    let (server, _) = listener.accept().unwrap();
    let syn = smcr_os::tcp::saved_syn(server.as_fd()).unwrap();
    assert!(!syn.is_empty() && !has_option(&syn));
}

/// A gateway must not answer for listeners of one that has died: nobody would run the rendezvous,
/// and its messages would reach the application.
#[test]
#[ignore = "needs the privilege to load eBPF; run by scripts/test e2e"]
fn another_gateways_listeners_are_its_own() {
    let (dead, alive) = (load(), load());
    let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    listener.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
    dead.mark_listener(&listener, Ports::Own).unwrap();
    listener.listen(8).unwrap();
    let address = listener.local_addr().unwrap();
    let connect = || {
        let client = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        alive.mark_client(&client).unwrap();
        client.connect(&address).unwrap();
        let (server, _) = listener.accept().unwrap();
        (alive.peer_offered(&client), server)
    };
    let (offered, server) = connect();
    assert!(offered && dead.peer_offered(&server));
    drop(dead);
    let (offered, server) = connect();
    assert!(has_option(&smcr_os::tcp::saved_syn(server.as_fd()).unwrap()), "the client offers");
    assert!(!offered, "and nobody answers");
    // One that takes its place knows the listener as soon as it is told.
    let place = alive.mark_listener(&listener, Ports::Own).unwrap();
    let (offered, server) = connect();
    assert!(offered && alive.peer_offered(&server));
    alive.forget(&place);
    let (offered, plain) = connect();
    assert!(!offered && !alive.peer_offered(&plain), "both ends agree that it is TCP");
    assert!(alive.take(server.as_fd()) && !alive.take(server.as_fd()), "once");
    assert!(alive.peer_offered(&server), "and it is still known what the peer has offered");
}

/// In a container that cannot see the root of the cgroups, sockets that others have made cannot
/// have the option. Those of the gateway itself must not lose it for that.
#[test]
#[ignore = "needs root, to be in such a container; run by scripts/test e2e"]
fn where_no_root_is_seen_own_sockets_have_the_option() {
    if std::env::var_os(INSIDE).is_none() {
        pass_inside("smc_option::tests::where_no_root_is_seen_own_sockets_have_the_option");
    } else {
        assert!(cgroup::Root::open().is_err(), "nothing is tested");
        let option = SmcOption::load(true).unwrap_or_else(|unavailable| panic!("{unavailable}"));
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let outcome = connect(&option, &option, address, End::Marked, End::Marked);
        assert!(outcome.client_sees_it && outcome.server_sees_it, "{outcome:?}");
    }
}

/// Set in the container.
const INSIDE: &str = "SMCGATE_TEST_INSIDE";

/// Has the same test pass in a container without a namespace of cgroups: it is in a part of the
/// tree, and that part is all it sees.
fn pass_inside(test: &str) {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let of_v2 = mounts.lines().find(|line| line.contains(" - cgroup2 ")).expect("cgroup v2");
    let all = of_v2.split(' ').nth(4).expect("a mount has a place");
    let part = format!("{all}/smcgate-{}", std::process::id());
    let own = tempfile::tempdir().unwrap();
    let script = format!(
        "echo $$ > {part}/cgroup.procs && exec unshare -m sh -c '\
         mount --bind {part} {own} && umount -l {all} && \
         exec setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin \"$@\"' sh \"$@\"",
        own = own.path().display(),
    );
    std::fs::create_dir(&part).expect("we are root");
    let mut again = std::process::Command::new("sh");
    again.args(["-c", &script, "sh"]).arg(std::env::current_exe().unwrap());
    let output = again.args(["--ignored", "--exact", test]).env(INSIDE, "1").output();
    std::fs::remove_dir(&part).expect("nobody is in it");
    let output = output.unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{output:?}");
}

/// Connections that come faster than they are accepted must not be mistaken for plain ones: the
/// server would then relay CLC messages to the application.
#[test]
#[ignore = "needs the privilege to load eBPF; run by scripts/test e2e"]
fn every_connection_of_a_burst_is_recognised() {
    let option = load();
    let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    listener.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
    option.mark_listener(&listener, Ports::Own).unwrap();
    listener.listen(128).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::scope(|scope| {
        let option = &option;
        scope.spawn(move || {
            for _ in 0..200 {
                let client = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
                option.mark_client(&client).unwrap();
                client.connect(&address).unwrap();
                assert!(option.peer_offered(&client));
            }
        });
        // Asking without a pause finds connections that the kernel is still working on.
        listener.set_nonblocking(true).unwrap();
        for number in 0..200 {
            let (server, _) = loop {
                match listener.accept() {
                    Ok(accepted) => break accepted,
                    Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
                }
            };
            assert!(option.peer_offered(&server), "connection {number}");
        }
    });
}

/// The configured list decides alone, for both roles, and no socket is touched.
#[test]
fn assumed_peers_are_those_of_the_list() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let source = OptionSource::Assume(vec!["10.8.0.0/24".parse().unwrap()]);
    source.mark_listener(&listener, Ports::Own).unwrap();
    source.mark_client(&listener).unwrap();
    assert!(source.peer_offered(&listener, "10.8.0.2:1".parse().unwrap()));
    assert!(!source.peer_offered(&listener, "10.8.1.2:1".parse().unwrap()));
    let sentence = "SMC-R is assumed, without a TCP option, of the peers 10.8.0.0/24";
    assert_eq!(source.to_string(), sentence);
    let none = OptionSource::None("no".into());
    assert!(!none.peer_offered(&listener, "10.8.0.2:1".parse().unwrap()));
}

fn load() -> SmcOption {
    SmcOption::load(false).unwrap_or_else(|unavailable| panic!("{unavailable}"))
}

fn connect(
    client_gateway: &SmcOption,
    server_gateway: &SmcOption,
    address: SocketAddr,
    client_end: End,
    server_end: End,
) -> Outcome {
    let domain = Domain::for_address(address);
    let listener = Socket::new(domain, Type::STREAM, None).unwrap();
    listener.bind(&address.into()).unwrap();
    match server_end {
        End::Marked => drop(server_gateway.mark_listener(&listener, Ports::Own).unwrap()),
        End::Plain => smcr_os::tcp::save_syn(listener.as_fd()).unwrap(),
    }
    listener.listen(8).unwrap();
    let address = listener.local_addr().unwrap().as_socket().unwrap();
    let wire = Wire::open();
    let client = Socket::new(domain, Type::STREAM, None).unwrap();
    if client_end == End::Marked {
        client_gateway.mark_client(&client).unwrap();
    }
    client.connect(&address.into()).unwrap();
    let (server, _) = listener.accept().unwrap();
    let outcome = Outcome {
        syn_had_it: has_option(&wire.next_syn(address.port(), SYN)),
        syn_ack_had_it: has_option(&wire.next_syn(address.port(), SYN | ACK)),
        server_sees_it: server_gateway.peer_offered(&server),
        client_sees_it: client_gateway.peer_offered(&client),
    };
    if server_end == End::Plain {
        // The kernel's own memory of the SYN agrees with what the wire showed.
        let syn = smcr_os::tcp::saved_syn(server.as_fd()).unwrap();
        assert_eq!(has_option(&syn), outcome.syn_had_it);
    }
    say_something(client.into(), server.into());
    outcome
}

/// Options are for the handshake; the connection itself must work as ever.
fn say_something(mut client: TcpStream, mut server: TcpStream) {
    use std::io::{Read, Write};
    client.write_all(b"hello").unwrap();
    let mut heard = [0; 5];
    server.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"hello");
}

/// Every packet of this network namespace, without its Ethernet header.
struct Wire {
    socket: Socket,
}

const SYN: u8 = 0x02;
const ACK: u8 = 0x10;

impl Wire {
    fn open() -> Self {
        let every_protocol = rustix::net::Protocol::from_raw(
            std::num::NonZero::new(u32::from(3_u16.to_be())).unwrap(),
        );
        let socket =
            rustix::net::socket(AddressFamily::PACKET, SocketType::DGRAM, Some(every_protocol))
                .expect("who may load eBPF may look at packets");
        let socket = Socket::from(socket);
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        Self { socket }
    }

    /// The IP packet of the next segment with these flags from or to `port`.
    fn next_syn(&self, port: u16, flags: u8) -> Vec<u8> {
        loop {
            let mut packet = vec![0; 2048];
            let (len, _) =
                rustix::net::recv(&self.socket, &mut packet[..], RecvFlags::empty()).unwrap();
            packet.truncate(len);
            let Some(tcp) = tcp_header(&packet) else { continue };
            let own = port.to_be_bytes();
            if (tcp[..2] == own || tcp[2..4] == own) && tcp[13] & (SYN | ACK) == flags {
                return packet;
            }
        }
    }
}

fn tcp_header(packet: &[u8]) -> Option<&[u8]> {
    let (protocol, at) = match packet.first()? >> 4 {
        4 => (*packet.get(9)?, usize::from(packet[0] & 0xf) * 4),
        6 => (*packet.get(6)?, 40),
        _ => return None,
    };
    let tcp = packet.get(at..)?;
    (protocol == 6 && tcp.len() >= 20).then_some(tcp)
}

/// Walks the options of the segment, as a peer does, so that a damaged list fails too.
fn has_option(packet: &[u8]) -> bool {
    let tcp = tcp_header(packet).expect("a TCP segment");
    let mut options = &tcp[20..usize::from(tcp[12] >> 4) * 4];
    let mut found = false;
    while let [kind, rest @ ..] = options {
        options = match *kind {
            0 => break,
            1 => rest,
            254 => {
                assert!(!found, "once");
                assert_eq!(options[..6], SMC_OPTION);
                found = true;
                &options[6..]
            }
            _ => &options[usize::from(rest[0])..],
        };
    }
    found
}
