use std::net::Ipv4Addr;
use std::process::Command;

use super::*;

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 8, 0, 1));
const THERE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 8, 0, 2));
const ELSEWHERE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 0, 2));

/// What Linux 6.18 says of `src 10.8.0.0/24 dst 10.8.0.2/32 proto tcp dport 7010 dir out
/// priority 5 tmpl src 10.8.0.1 dst 10.8.0.2 proto esp mode transport level use`.
fn message() -> Vec<u8> {
    let mut bytes = vec![0; INFO_LEN];
    bytes[..4].copy_from_slice(&[10, 8, 0, 2]);
    bytes[16..20].copy_from_slice(&[10, 8, 0, 0]);
    bytes[32..36].copy_from_slice(&[0x1b, 0x62, 0xff, 0xff]);
    bytes[40..45].copy_from_slice(&[2, 0, 0x20, 0x18, 6]);
    bytes[152] = 5;
    // Its number, and that it is for what leaves.
    bytes[156..164].copy_from_slice(&[1, 0, 0, 0, 1, 0, 0, 0]);
    let template = [0x44, 0, 5, 0, 10, 8, 0, 2];
    let kind = [0x0a, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    [bytes, template.to_vec(), vec![0; 60], kind.to_vec()].concat()
}

fn policy(from: (&str, u8), to: (&str, u8), priority: u32, protects: bool) -> Policy {
    let network = |(address, bits): (&str, u8)| Prefix { address: address.parse().unwrap(), bits };
    let (from, to) = (network(from), network(to));
    Policy { from, to, from_port: (0, 0), to_port: (0, 0), priority, protects }
}

fn at(address: IpAddr) -> SocketAddr {
    SocketAddr::new(address, 40_000)
}

fn protect(policies: &[&Policy], local: IpAddr, peer: SocketAddr) -> bool {
    let known = policies.iter().copied().cloned().collect();
    let list = || Ok(Vec::new());
    let mut policies = Policies { changes: None, list, known, stale: false, hidden: None };
    policies.protect(at(local), peer)
}

#[test]
fn a_policy_is_read_as_the_kernel_writes_it() {
    let expected =
        Policy { to_port: (7010, 0xffff), ..policy(("10.8.0.0", 24), ("10.8.0.2", 32), 5, true) };
    assert_eq!(Policy::parse(&message()), Some(expected.clone()));
    let without_template = &message()[..INFO_LEN];
    assert_eq!(Policy::parse(without_template), Some(Policy { protects: false, ..expected }));
    for (at, byte) in [(160, 0), (44, 17)] {
        let mut other = message();
        other[at] = byte;
        assert_eq!(Policy::parse(&other), None, "inbound, or for UDP");
    }
    for len in 0..INFO_LEN {
        assert_eq!(Policy::parse(&message()[..len]), None);
    }
}

/// A policy that exempts marked packets had a lower number than the one that protects ours, and
/// they went by RDMA.
// RFC 7609 5.5 #1: no SMC-R under IPsec
#[test]
fn a_policy_for_some_packets_does_not_exempt_ours() {
    let device = |mut bytes: Vec<u8>| {
        bytes[48] = 3;
        bytes
    };
    let with = |attribute: &[u8]| {
        let attribute = attribute.to_vec();
        move |bytes: Vec<u8>| [bytes, attribute.clone()].concat()
    };
    let mark = with(&[12, 0, 21, 0, 7, 0, 0, 0, 0xff, 0, 0, 0]);
    let interface = with(&[8, 0, 31, 0, 7, 0, 0, 0]);
    let kind = with(&[0x0a, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    let exempting = || message()[..INFO_LEN].to_vec();
    for bytes in [device(exempting()), mark(exempting()), interface(exempting())] {
        assert_eq!(Policy::parse(&bytes), None);
    }
    assert!(Policy::parse(&kind(exempting())).is_some_and(|policy| !policy.protects));
    for bytes in [device(message()), mark(message()), interface(message())] {
        assert!(Policy::parse(&bytes).is_some_and(|policy| policy.protects));
    }
}

/// Bytes that somebody wants encrypted must not go out in the clear because RDMA is faster.
// RFC 7609 5.5 #1: no SMC-R under IPsec
#[test]
fn the_first_policy_that_fits_decides() {
    let hosts = policy(("10.8.0.1", 32), ("10.8.0.2", 32), 20, true);
    let network = policy(("0.0.0.0", 0), ("10.0.0.0", 8), 30, true);
    let exempt = policy(("10.8.0.0", 16), ("10.8.0.2", 32), 10, false);
    let port = Policy { to_port: (443, 0xffff), ..hosts.clone() };
    let all_v6 = policy(("::", 0), ("::", 0), 1, true);
    let plain = SocketAddr::new(THERE, 80);
    assert!(!protect(&[], HERE, plain));
    assert!(protect(&[&hosts], HERE, plain));
    assert!(!protect(&[&hosts], HERE, SocketAddr::new(ELSEWHERE, 80)));
    assert!(!protect(&[&hosts], THERE, at(HERE)));
    assert!(protect(&[&hosts, &network], HERE, at(ELSEWHERE)));
    assert!(!protect(&[&network, &hosts, &exempt], HERE, plain), "the lowest number");
    assert_eq!(
        [80, 443].map(|to| protect(&[&port], HERE, SocketAddr::new(THERE, to))),
        [false, true]
    );
    assert!(!protect(&[&all_v6], HERE, plain));
    assert!(!protect(&[&all_v6], "::ffff:10.8.0.1".parse().unwrap(), plain));
    assert!(protect(&[&all_v6], "fd00::1".parse().unwrap(), at("fd00::2".parse().unwrap())));
}

/// A policy changes while the host is out of descriptors: what was known before is wrong, perhaps.
/// It was used until a policy changed again, and bytes that were to be encrypted went by RDMA.
// RFC 7609 5.5 #1: no SMC-R under IPsec
#[test]
fn policies_that_could_not_be_listed_are_asked_for_again() {
    let (kernel, changes) = std::os::unix::net::UnixDatagram::pair().unwrap();
    let list = || Ok(vec![policy(("10.8.0.1", 32), ("10.8.0.2", 32), 20, true)]);
    let mut policies =
        Policies { changes: Some(changes.into()), list, known: vec![], stale: false, hidden: None };
    assert!(!policies.protect(at(HERE), at(THERE)), "nothing has changed yet");
    policies.list = || Err(Errno::MFILE.into());
    kernel.send(b"a policy changed").unwrap();
    for _ in 0..2 {
        assert!(policies.protect(at(HERE), at(THERE)), "nobody can say");
        assert!(policies.protect(at(HERE), at(ELSEWHERE)), "nor here");
    }
    policies.list = list;
    assert!(policies.protect(at(HERE), at(THERE)), "the new policy counts");
    assert!(!policies.protect(at(HERE), at(ELSEWHERE)));
    policies.list = || panic!("what is known is not asked for again");
    assert!(policies.protect(at(HERE), at(THERE)));
}

/// A host that was short of descriptors when the gateway started was never asked again, and nothing
/// was protected. One that does not show us its policies need not be asked again.
// RFC 7609 5.5 #1: no SMC-R under IPsec
#[test]
fn policies_that_could_not_be_listed_at_the_start_are_asked_for_again() {
    let (_kernel, socket) = std::os::unix::net::UnixDatagram::pair().unwrap();
    let changes = || Ok(socket.try_clone().unwrap().into());
    let mut policies = Policies::begin(changes(), || Err(Errno::MFILE.into()));
    assert!(policies.protect(at(HERE), at(THERE)), "nobody can say");
    policies.list = || Ok(Vec::new());
    assert!(!policies.protect(at(HERE), at(THERE)));
    for lasting in [|| Err(Errno::PERM.into()), || Err(Errno::OPNOTSUPP.into())] {
        let mut policies = Policies::begin(changes(), lasting);
        policies.list = || panic!("it refused");
        assert!(!policies.protect(at(HERE), at(THERE)));
    }
    let mut policies = Policies::begin(Err(Errno::PROTONOSUPPORT.into()), || panic!("whom"));
    assert!(!policies.protect(at(HERE), at(THERE)));
    assert!(policies.hidden.is_some(), "a relay of TCP does not warn");
    policies.need();
    assert!(policies.hidden.is_none(), "it is said once");
}

/// A policy changes between two questions of one turn of the control thread. The second was
/// answered by what had been true for the first.
// RFC 7609 5.5 #1: no SMC-R under IPsec
#[test]
fn each_answer_is_by_the_policies_of_now() {
    let (kernel, changes) = std::os::unix::net::UnixDatagram::pair().unwrap();
    let list = || Ok(vec![policy(("10.8.0.1", 32), ("10.8.0.2", 32), 20, true)]);
    let (changes, known) = (Some(changes.into()), vec![]);
    let mut policies = Policies { changes, list, known, stale: false, hidden: None };
    assert!(!policies.protect(at(HERE), at(THERE)));
    kernel.send(b"a policy changed").unwrap();
    assert!(policies.protect(at(HERE), at(THERE)));
}

/// A policy that is added while the gateway runs counts for the next connection.
// RFC 7609 5.5 #1: no SMC-R under IPsec
#[test]
#[ignore = "changes the policies of its network namespace; run by scripts/test e2e"]
fn a_change_of_the_policies_is_noticed() {
    let mut policies = Policies::of_this_host();
    assert!(policies.changes.is_some(), "this namespace tells");
    let ip = |arguments: &str| {
        let words = arguments.split_whitespace();
        assert!(Command::new("ip").args(words).status().expect("iproute2").success());
    };
    let selector = "src 10.8.0.1/32 dst 10.8.0.2/32 proto tcp dport 7010 dir out";
    let peer = SocketAddr::new(THERE, 7010);
    assert!(!policies.protect(at(HERE), peer));
    ip(&format!("xfrm policy add {selector} tmpl proto esp mode transport level use"));
    assert!(policies.protect(at(HERE), peer));
    assert!(!policies.protect(at(HERE), SocketAddr::new(THERE, 7011)));
    ip(&format!("xfrm policy delete {selector}"));
    assert!(!policies.protect(at(HERE), peer));
}
