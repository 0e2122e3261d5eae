use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::mpsc;
use std::thread;

use pcap_file::pcapng::{Block, PcapNgReader};
use smcr_proto::{Gid, Instant, MacAddress, Mtu};
use smcr_rnic::sim::{Network, Odds};
use smcr_rnic::tracer::{Introduced, Traced};
use smcr_rnic::{Fabric as _, Opening as _, Port, Rnic as _, Tag, Work, sim};

use super::*;
use crate::tools::capture::{CaptureError, Captured, capture};

/// Two connected NICs; the first tap is of the first.
struct Pair {
    fabrics: [Traced<sim::Fabric>; 2],
    qp: smcr_rnic::QpId,
    admin: AdminAddress,
}

/// Captures show the first of them.
fn pair() -> Pair {
    tapped(&["hw0"])
}

/// Captures show as many of them as there are names. A desk of its own, as tests run at the same
/// time.
fn tapped(names: &[&str]) -> Pair {
    static NEXT: AtomicU16 = AtomicU16::new(1);
    let admin = AdminAddress::from(([127, 66, 0, 1], NEXT.fetch_add(1, Ordering::Relaxed)));
    let port = |n: u8| Port {
        gid: Gid::from_ipv4([10, 0, 0, n]),
        mac: MacAddress([2, 0, 0, 0, 0, n]),
        mtu: Mtu::B1024,
    };
    let network = Network::new(1, Odds::CALM);
    let [(mut a, fabric_a), (mut b, fabric_b)] = [1, 2].map(|n| network.rnic(port(n)));
    let mut fabrics = [Traced::new(fabric_a), Traced::new(fabric_b)];
    let (domain_a, domain_b) = (a.open_domain().unwrap(), b.open_domain().unwrap());
    let (first, second) = (a.open(domain_a).unwrap(), b.open(domain_b).unwrap());
    let (at_a, at_b) = (first.address(), second.address());
    let qp = fabrics[0].adopt(Instant(0), Introduced::connect(first, at_b).unwrap());
    fabrics[1].adopt(Instant(0), Introduced::connect(second, at_a).unwrap());
    let (tap, new_taps) = mpsc::channel();
    for (name, fabric) in names.iter().zip(&mut fabrics) {
        let tracer = fabric.tracer(port(1).mac);
        let (rnic, description) = ((*name).to_owned(), "sim".to_owned());
        tap.send(Tapped { rnic, description, tracer }).unwrap();
    }
    spawn(admin, Clock::new(), new_taps).unwrap();
    Pair { fabrics, qp, admin }
}

impl Pair {
    /// Sends messages until the client has what it wants.
    fn send_until(&mut self, done: impl Fn() -> bool) {
        let mut now = 1;
        while !done() {
            now += 1_000_000;
            self.turn(now);
            thread::sleep(Duration::from_micros(200));
        }
    }

    /// Sends a message, if there is room for one, and receives what has come.
    fn turn(&mut self, now: u64) {
        let mut out = Vec::with_capacity(16);
        self.fabrics.iter_mut().for_each(|fabric| fabric.poll(Instant(now), &mut out));
        if self.fabrics[0].room(self.qp) > 0 {
            let mut work = vec![Work::Send { message: [7; 44], tag: Tag(now) }];
            self.fabrics[0].post(self.qp, &mut work);
        }
        self.fabrics.iter_mut().for_each(|fabric| fabric.transmit(Instant(now)));
    }

    /// A client whose capture has begun, and that reads nothing of it yet.
    fn client(&self) -> UnixStream {
        let mut client = UnixStream::connect_addr(&address_of(self.admin)).unwrap();
        client.write_all(b"{}\n").unwrap();
        let mut answer = [0; b"{\"error\":null}\n".len()];
        client.read_exact(&mut answer).unwrap();
        assert_eq!(answer, *b"{\"error\":null}\n");
        // The head of the file comes when all taps are on.
        poll(&mut [PollFd::new(&client, PollFlags::IN)], None).unwrap();
        client
    }
}

/// The interface and the time of each frame that is there in full.
fn frames(file: &[u8]) -> Vec<(u32, Duration)> {
    let mut reader = PcapNgReader::new(file).unwrap();
    let mut frames = Vec::new();
    while let Some(Ok(block)) = reader.next_block() {
        if let Block::EnhancedPacket(packet) = block {
            frames.push((packet.interface_id, packet.timestamp));
        }
    }
    frames
}

/// What operators get is what every tool for captures reads: interfaces, frames, directions, times,
/// and how many frames are missing.
#[test]
fn a_client_gets_as_many_frames_as_it_asked_for() {
    let mut pair = pair();
    let request = Request { count: Some(20), ..Request::default() };
    let admin = pair.admin;
    let client = thread::spawn(move || {
        let mut file = Vec::new();
        let captured = capture(admin, &request, &mut file, |_| Ok(())).unwrap();
        (captured, file)
    });
    pair.send_until(|| client.is_finished());
    let (captured, file) = client.join().unwrap();
    assert_eq!(captured, Captured { frames: 20, dropped: 0, is_complete: true });
    let mut reader = PcapNgReader::new(&file[..]).unwrap();
    let (mut interfaces, mut frames, mut statistics) = (Vec::new(), 0, 0);
    let mut last = Duration::ZERO;
    while let Some(block) = reader.next_block() {
        match block.unwrap().into_owned() {
            Block::InterfaceDescription(interface) => interfaces.push(interface),
            Block::EnhancedPacket(packet) => {
                assert_eq!((packet.interface_id, packet.original_len), (0, 14 + 20 + 8 + 60));
                assert_eq!(packet.options, [EnhancedPacketOption::Flags(OUTBOUND)]);
                assert_eq!(packet.data[14 + 20 + 8 + 12..][..44], [7; 44]);
                assert!(packet.timestamp > last, "in order, and a date of our days");
                last = packet.timestamp;
                frames += 1;
            }
            Block::InterfaceStatistics(found) => {
                assert_eq!(found.options[0], InterfaceStatisticsOption::IsbIfDrop(0));
                statistics += 1;
            }
            Block::SectionHeader(_)
            | Block::Packet(_)
            | Block::SimplePacket(_)
            | Block::NameResolution(_)
            | Block::SystemdJournalExport(_)
            | Block::Unknown(_) => panic!("nobody writes such a block here"),
        }
    }
    assert_eq!((interfaces.len(), frames, statistics), (1, 20, 1));
    assert!(last > Duration::from_secs(1_700_000_000));
    let name = InterfaceDescriptionOption::IfName(Cow::Borrowed("hw0"));
    assert!(interfaces[0].options.contains(&name));
}

/// Whoever reads a capture of a busy gateway reads side by side what its RNICs did at the same
/// time. The first of several taps used to be read alone for as long as it had anything.
#[test]
fn frames_of_several_rnics_come_in_the_order_of_time() {
    let mut pair = tapped(&["hw0", "hw1"]);
    let mut client = pair.client();
    // As nobody reads, most of them wait in the taps.
    (1..=3_000).for_each(|now| pair.turn(now * 1_000));
    client.shutdown(std::net::Shutdown::Write).unwrap();
    let mut file = Vec::new();
    client.read_to_end(&mut file).unwrap();
    let frames = frames(&file);
    for interface in [0, 1] {
        let count = frames.iter().filter(|(of, _)| *of == interface).count();
        assert!(count > 2_000, "{count} frames of interface {interface}");
    }
    assert!(frames.is_sorted_by_key(|(_, at)| *at));
}

/// A pager that was left open kept the taps on for ever, and whoever wanted to capture after that
/// was told that no gateway runs.
#[test]
fn a_client_that_reads_nothing_is_given_up() {
    let mut pair = tapped(&["hw0", "hw1"]);
    let mut client = pair.client();
    (1..=3_000).for_each(|now| pair.turn(now * 1_000));
    let request = Request { count: Some(0), ..Request::default() };
    let again = || capture(pair.admin, &request, &mut Vec::new(), |_| Ok(()));
    let refused = again().unwrap_err().to_string();
    assert!(refused.ends_with("another capture goes on"), "{refused}");
    let served = (0..100).find_map(|_| {
        thread::sleep(Duration::from_millis(100));
        again().ok()
    });
    assert_eq!(served, Some(Captured { frames: 0, dropped: 0, is_complete: true }));
    let mut file = Vec::new();
    client.read_to_end(&mut file).unwrap();
    assert!(frames(&file).len() < 5_000, "the rest was not written");
}

/// Ctrl-C ends a capture that asks for no number, and the file is whole.
#[test]
fn a_client_that_stops_gets_the_end() {
    let pair = pair();
    let stopped = |stop: Box<dyn Fn() + Send>| {
        stop();
        Ok(())
    };
    for _ in 0..3 {
        let mut file = Vec::new();
        let captured = capture(pair.admin, &Request::default(), &mut file, stopped).unwrap();
        assert_eq!(captured, Captured { frames: 0, dropped: 0, is_complete: true });
    }
}

#[test]
fn whoever_gets_nothing_hears_why() {
    let pair = pair();
    let refused = |request: &Request| {
        let outcome = capture(pair.admin, request, &mut Vec::new(), |_| Ok(()));
        outcome.unwrap_err().to_string()
    };
    let unknown = Request { rnic: Some("hw7".to_owned()), ..Request::default() };
    let at = pair.admin;
    assert_eq!(
        refused(&unknown),
        format!("gateway at {at}: there is no RNIC named hw7; there are: hw0")
    );
    // A first client is served and goes on.
    let mut first = UnixStream::connect_addr(&address_of(at)).unwrap();
    first.write_all(b"{}\n").unwrap();
    let mut line = String::new();
    BufReader::new(first.try_clone().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "{\"error\":null}\n");
    assert_eq!(refused(&Request::default()), format!("gateway at {at}: another capture goes on"));
    drop(first);
    let nobody = AdminAddress::from(([127, 66, 0, 2], 1));
    let silent = capture(nobody, &Request::default(), &mut Vec::new(), |_| Ok(()));
    assert!(matches!(silent, Err(CaptureError::Silent(..))), "{silent:?}");
}

/// Nonsense, or nothing at all, costs the next client nothing but a moment.
#[test]
fn clients_that_say_nonsense_are_told_so() {
    let pair = pair();
    let say = |what: &[u8]| {
        let mut client = UnixStream::connect_addr(&address_of(pair.admin)).unwrap();
        client.write_all(what).unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        let mut said = String::new();
        client.read_to_string(&mut said).unwrap();
        said
    };
    for nonsense in [&b""[..], b"{\n", b"{\"do\": 1}\n", b"GET / HTTP/1.1\r\n\r\n", &[0xff; 4_000]]
    {
        let said = say(nonsense);
        assert!(said.starts_with("{\"error\":\"") && said.lines().count() == 1, "{said}");
    }
}
