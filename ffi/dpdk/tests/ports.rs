//! Ports of DPDK's virtual devices: frames, links, and why a port cannot be opened.
#![allow(clippy::unwrap_used, reason = "a test stops where it cannot go on")]

use std::num::NonZero;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{self, Command};
use std::thread::sleep;
use std::time::Duration;

use dpdk::{Error, Link, Port, Wishes};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketType};

/// Opens a port in this process, where DPDK runs without huge pages.
fn open(device: &str) -> Result<Port, Error> {
    dpdk::start(&["--no-huge".into()]).expect("DPDK starts");
    Port::open(device, Wishes::default())
}

/// The two ends of a shared-memory link, named by `number`, which no other test uses.
fn memif(number: u32) -> [String; 2] {
    let socket = socket(number);
    ["server", "client"].map(|role| {
        let index = 2 * number + u32::from(role == "client");
        let socket = socket.display();
        format!("net_memif{index},role={role},socket={socket},socket-abstract=no")
    })
}

fn socket(number: u32) -> PathBuf {
    std::env::temp_dir().join(format!("smcgate-memif-{}-{number}", process::id()))
}

/// Waits until the link of `port` is in a state; links change on another thread.
fn await_link(port: &mut Port, wanted: Link) {
    for _ in 0..1_000 {
        if port.link() == wanted {
            return;
        }
        // A port of shared memory notices what its peer did when it receives.
        port.receive();
        sleep(Duration::from_millis(5));
    }
    panic!("the link is {:?}, not {wanted:?}", port.link());
}

/// A frame of an experimental type, which nobody else sends.
fn frame(seed: u8, len: usize) -> Vec<u8> {
    let pattern = (0..=u8::MAX).cycle().map(|at| seed.wrapping_mul(31) ^ at);
    let mut bytes: Vec<u8> = pattern.take(len).collect();
    bytes[..6].fill(0xff);
    bytes[6..12].copy_from_slice(&[2, 0, 0, 0, 0, seed]);
    bytes[12..14].copy_from_slice(&[0x88, 0xb5]);
    bytes
}

/// Sends frames through `from` and finds them at `to`: all, in order, with every byte.
fn carries(from: &mut Port, to: &mut Port, count: u8) {
    let frames: Vec<_> = (0..count).map(|seed| frame(seed, 64 + 5 * usize::from(seed))).collect();
    let mut sent = 0;
    let mut found = Vec::new();
    for _ in 0..2_000 {
        let room = from.vacate((frames.len() - sent).min(7));
        let mut lens = Vec::new();
        for index in 0..room {
            let bytes = &frames[sent + index];
            from.room(index)[..bytes.len()].copy_from_slice(bytes);
            lens.push(u32::try_from(bytes.len()).unwrap());
        }
        sent += from.transmit(&lens, false);
        for index in 0..to.receive() {
            let bytes = to.frame(index);
            // The kernel sends frames of its own through a network device.
            if bytes[12..14] == [0x88, 0xb5] {
                found.push(bytes.to_vec());
            }
        }
        if found.len() == frames.len() {
            break;
        }
        sleep(Duration::from_millis(1));
    }
    assert!(found == frames, "{} of {} frames came", found.len(), frames.len());
}

#[test]
fn shared_memory_carries_frames_both_ways_until_an_end_goes() {
    let [server, client] = memif(1);
    let mut server = open(&server).unwrap();
    assert_eq!(server.driver(), "net_memif");
    assert_eq!((server.link(), server.mtu()), (Link::Down, 2034));
    for _ in 0..3 {
        let mut other = open(&client).unwrap();
        await_link(&mut server, Link::Up);
        await_link(&mut other, Link::Up);
        carries(&mut server, &mut other, 200);
        carries(&mut other, &mut server, 200);
        assert_ne!(server.mac(), other.mac());
        drop(other);
        await_link(&mut server, Link::Down);
        assert_eq!(server.transmit(&[], false), 0);
    }
    drop(server);
    assert!(!socket(1).exists());
}

#[test]
fn frames_of_other_vlans_are_not_received() {
    let vlan = |number| Wishes { vlan: NonZero::new(number), ..Wishes::default() };
    for (index, (here, there, meet)) in
        [(0, 0, true), (100, 100, true), (4_094, 4_094, true), (100, 0, false), (0, 100, false)]
            .into_iter()
            .chain([(100, 200, false)])
            .enumerate()
    {
        let [server, client] = memif(20 + u32::try_from(index).unwrap());
        drop(open(&server).unwrap());
        let mut server = Port::open(&server, vlan(here)).unwrap();
        let mut client = Port::open(&client, vlan(there)).unwrap();
        await_link(&mut server, Link::Up);
        await_link(&mut client, Link::Up);
        if meet {
            carries(&mut server, &mut client, 200);
            carries(&mut client, &mut server, 200);
            continue;
        }
        let mut sent = 0;
        for round in 0..100 {
            assert_eq!(server.vacate(1), 1);
            let bytes = frame(round, 64);
            server.room(0)[..bytes.len()].copy_from_slice(&bytes);
            sent += server.transmit(&[64], false);
            assert_eq!(client.receive(), 0, "{here} is not {there}");
            sleep(Duration::from_millis(1));
        }
        assert!(sent > 50, "{sent} frames left");
    }
}

/// Drivers that have no filter refuse to set one. That is no reason to refuse the port.
#[test]
fn a_port_that_filters_nothing_may_be_in_a_group() {
    let [server, client] = memif(30);
    let wishes = Wishes { group: Some([0x33, 0x33, 0xff, 0, 0, 1]), ..Wishes::default() };
    drop(open(&server).unwrap());
    let mut server = Port::open(&server, wishes).unwrap();
    let mut client = Port::open(&client, wishes).unwrap();
    await_link(&mut server, Link::Up);
    await_link(&mut client, Link::Up);
    carries(&mut server, &mut client, 10);
}

#[test]
fn a_port_moves_between_threads() {
    let [server, client] = memif(2);
    let (mut server, mut client) = (open(&server).unwrap(), open(&client).unwrap());
    await_link(&mut server, Link::Up);
    for _ in 0..3 {
        let thread = std::thread::spawn(move || {
            await_link(&mut client, Link::Up);
            carries(&mut server, &mut client, 50);
            (server, client)
        });
        (server, client) = thread.join().unwrap();
        carries(&mut client, &mut server, 50);
    }
}

#[test]
fn frames_of_shared_memory_may_be_as_long_as_its_buffers() {
    let [server, client] = memif(3);
    let mut server = open(&format!("{server},bsize=9014")).unwrap();
    let mut client = open(&format!("{client},bsize=9014")).unwrap();
    await_link(&mut server, Link::Up);
    await_link(&mut client, Link::Up);
    assert_eq!(server.mtu(), 9000);
    let long = frame(1, 9014);
    let mut sent = 0;
    for _ in 0..1_000 {
        // The end that receives first gives the sender its buffers.
        if client.receive() == 1 {
            break;
        }
        if sent == 0 {
            assert!(server.vacate(1) == 1 && server.room(0).len() >= 9014);
            server.room(0)[..9014].copy_from_slice(&long);
            sent += server.transmit(&[9014], false);
        }
        sleep(Duration::from_millis(1));
    }
    assert!(client.frame(0) == long);
}

#[test]
fn room_that_is_not_sent_is_given_again() {
    let [server, _] = memif(4);
    let mut port = open(&server).unwrap();
    // Nobody is connected, so nothing can be sent; many times more than there are buffers.
    for _ in 0..1_000 {
        assert_eq!(port.vacate(64), 64);
        port.room(63)[0] = 1;
        assert_eq!(port.transmit(&[64; 64], false), 0);
    }
    assert_eq!(port.vacate(1000), dpdk::BURST_MAX);
}

/// A server that was killed leaves its socket behind. It must be able to start again, and must not
/// take the socket from one that lives.
#[test]
fn a_socket_that_was_left_behind_does_not_stop_a_server() {
    let [server, _] = memif(9);
    drop(UnixListener::bind(socket(9)).unwrap());
    let first = open(&server).unwrap();
    // Another process could have another `id` at this socket.
    assert!(open(&format!("{},id=1", server.replace("memif", "memif1"))).is_ok());
    assert!(socket(9).exists(), "somebody listens there still");
    drop(first);
}

/// The driver of a server dies of a client that hangs up before it was greeted: its interrupt
/// thread goes on waiting for a descriptor that is closed. So a client gives a server time.
#[test]
fn a_client_does_not_hang_up_on_a_slow_server() {
    let listener = net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    net::bind(&listener, &SocketAddrUnix::new(socket(10)).unwrap()).unwrap();
    net::listen(&listener, 8).unwrap();
    let [_, client] = memif(10);
    let mut client = open(&client).unwrap();
    for _ in 0..60 {
        assert_eq!(client.link(), Link::Down);
        sleep(Duration::from_millis(1));
    }
    net::accept(&listener).unwrap();
    rustix::io::ioctl_fionbio(&listener, true).unwrap();
    assert_eq!(net::accept(&listener).unwrap_err(), Errno::WOULDBLOCK, "one call, no second");
    drop(client);
    std::fs::remove_file(socket(10)).unwrap();
}

#[test]
fn a_device_that_cannot_be_opened_says_why() {
    let [server, _] = memif(5);
    let first = open(&server).unwrap();
    assert_eq!(open(&server).map(drop), Err(Error::Busy));
    drop(first);
    drop(open(&server).unwrap());

    let refused = |device: &str, what: &str| {
        let error = open(device).map(drop).expect_err("such a device is not there").to_string();
        assert!(error.contains(what) && error.lines().count() == 1, "{device}: {error}");
    };
    refused("net_nonsense0", "failed to parse device \"net_nonsense0\"");
    refused("0000:ff:1f.7", "Cannot find device (0000:ff:1f.7)");
    refused("net_af_packet0,iface=smcgate-none", "smcgate-none: No such device");
    let error = dpdk::start(&["--huge-dir=/nowhere".into()]).expect_err("it runs already");
    assert_eq!(error, Error::StartedOtherwise);
}

/// A pair of network devices, which go with it.
struct Veth(String);

impl Veth {
    fn new(name: &str) -> Self {
        let veth = Self(format!("{name}a"));
        let peer = format!("{name}b");
        ip(&["link", "add", &veth.0, "type", "veth", "peer", "name", &peer]);
        ip(&["link", "set", &veth.0, "up"]);
        ip(&["link", "set", &peer, "up"]);
        veth
    }
}

impl Drop for Veth {
    fn drop(&mut self) {
        drop(Command::new("ip").args(["link", "del", &self.0]).output());
    }
}

fn ip(arguments: &[&str]) {
    let status = Command::new("ip").args(arguments).status().expect("iproute2 is installed");
    assert!(status.success(), "ip {arguments:?}");
}

#[test]
#[ignore = "needs root"]
fn a_network_device_carries_frames_and_shows_its_link() {
    let veth = Veth::new("sgdp");
    let mut a = open("net_af_packet10,iface=sgdpa").unwrap();
    let mut b = open("net_af_packet11,iface=sgdpb").unwrap();
    assert_eq!(open("net_af_packet12,iface=sgdpa").map(drop), Err(Error::Busy));
    carries(&mut a, &mut b, 100);
    carries(&mut b, &mut a, 100);
    await_link(&mut a, Link::Up);
    ip(&["link", "set", "sgdpb", "down"]);
    await_link(&mut b, Link::Down);
    await_link(&mut a, Link::Down);
    ip(&["link", "set", "sgdpb", "up"]);
    await_link(&mut a, Link::Up);
    drop(veth);
    await_link(&mut a, Link::Gone);
    await_link(&mut b, Link::Gone);
    a.receive();
    a.transmit(&[], false);
}

#[test]
#[ignore = "needs root"]
fn a_tap_makes_a_network_device_that_shows_its_link() {
    drop(open("net_tap0,iface=sgtap").unwrap());
    let wishes = Wishes { group: Some([0x33, 0x33, 0xff, 0, 0, 1]), ..Wishes::default() };
    let mut tap = Port::open("net_tap0,iface=sgtap", wishes).unwrap();
    assert_eq!(tap.driver(), "net_tap");
    assert!(tap.sums_ipv4());
    await_link(&mut tap, Link::Up);
    ip(&["link", "set", "sgtap", "down"]);
    await_link(&mut tap, Link::Down);
    drop(tap);
    let shown = Command::new("ip").args(["link", "show", "sgtap"]).output().unwrap();
    assert!(!shown.status.success(), "the device went with the port");
}
