//! Two processes, one of which is killed.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

use smcr_proto::{Gid, Mtu, Psn, Qpn};

use super::super::directory::mac_of;
use super::*;
use crate::QpAddress;

/// What the other process is told in its environment.
const DIRECTORY: &str = "SMCGATE_SHM_DIRECTORY";

/// The address of a queue pair, and a window, as the two processes tell each other.
fn to_line(address: QpAddress, window: &Registration) -> String {
    let gid: Vec<_> = address.gid.0.iter().map(u8::to_string).collect();
    let numbers =
        [address.qpn.0.into(), address.psn.0.into(), window.rkey.0.into(), window.address];
    let numbers = numbers.map(|number: u64| number.to_string());
    format!("peer {} {}", gid.join(" "), numbers.join(" "))
}

fn from_line(line: &str) -> (QpAddress, Rkey, u64) {
    let words: Vec<u64> = line.split(' ').skip(1).map(|word| word.parse().unwrap()).collect();
    let small = |at: usize| u32::try_from(words[at]).unwrap();
    let gid = Gid(std::array::from_fn(|at| u8::try_from(words[at]).unwrap()));
    let (qpn, psn) = (Qpn(small(16)), Psn(small(17)));
    let address = QpAddress { gid, mac: mac_of(gid), qpn, psn, mtu: Mtu::B1024 };
    (address, Rkey(small(18)), words[19])
}

/// The other process: it writes and announces what it has written, until it is killed.
#[test]
#[ignore = "the process that others of these tests start, and kill"]
fn other_process() {
    let directory = std::env::var(DIRECTORY).expect("it is started by another test");
    let (mut rnic, mut fabric) = open(&directory, 1).unwrap().remove(0);
    let domain = rnic.open_domain().unwrap();
    let region = Region::shared(1 << 16).unwrap();
    let window = rnic.register(domain, &region).unwrap();
    let opening = rnic.open(domain).unwrap();
    println!("\n{}", to_line(opening.address(), &window));
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line).unwrap();
    let (peer, rkey, address) = from_line(line.trim());
    let qp = fabric.adopt(now(), opening.connect(peer).unwrap());
    let mut pool = SendPool::new(Region::new(1 << 20).unwrap(), 1 << 16);
    let mut number = 0_u64;
    loop {
        while fabric.room(qp) >= 2 && number.is_multiple_of(2) {
            let filled = pool.fill(1 << 12, |room| {
                room.copy_in(&[number.to_le_bytes()[0]; 1 << 12]);
                Ok::<_, Infallible>(1 << 12)
            });
            let Some(filled) = filled else { break };
            let lease = filled.unwrap().unwrap();
            let address = address + (number / 2 % 16) * 4_096;
            let write = Work::Write { lease, rkey, address, tag: Tag(1) };
            let mut message = [0; MESSAGE_LEN];
            message[..8].copy_from_slice(&number.to_le_bytes());
            fabric.post(qp, &mut vec![write, Work::Send { message, tag: Tag(2) }]);
            number += 2;
        }
        let mut out = Vec::with_capacity(64);
        fabric.poll(now(), &mut out);
        fabric.transmit(now());
        for completion in out {
            match completion {
                Completion::Wrote { lease, .. } => pool.take_back(lease),
                Completion::Broke { cause, .. } => panic!("nobody has killed it: {cause:?}"),
                Completion::Sent { .. }
                | Completion::Received { .. }
                | Completion::ReceivedLong { .. } => {}
            }
        }
    }
}

fn start(directory: &TempDir) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "shm::tests::killed::other_process", "--ignored", "--nocapture"])
        .env(DIRECTORY, directory.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// A gateway is killed. Its peer must notice at once, also when it sleeps, and go on with others.
#[test]
fn who_is_killed_breaks_its_own_queue_pairs() {
    let directory = tempfile::tempdir().unwrap();
    let (mut a, mut b) = (Nic::new(&directory), Nic::new(&directory));
    let neighbours = connect(&mut a, &mut b);
    works([&mut a, &mut b], neighbours);

    let mut other = start(&directory);
    let output = BufReader::new(other.stdout.take().unwrap());
    let line = output.lines().map(Result::unwrap).find(|line| line.starts_with("peer "));
    let (peer, ..) = from_line(&line.unwrap());
    let (region, window) = a.window(1 << 16);
    let opening = a.rnic.open(a.domain).unwrap();
    let line = to_line(opening.address(), &window);
    writeln!(other.stdin.as_mut().unwrap(), "{line}").unwrap();
    let qp = a.fabric.adopt(now(), opening.connect(peer).unwrap());
    until(&mut [&mut a], |nics| nics[0].received() > 1_000);
    other.kill().unwrap();
    other.wait().unwrap();
    let start = now();
    while a.broke(qp).is_none() {
        a.sleep();
        a.turn();
    }
    assert!(now().since(start) < Duration::from_secs(9));
    // What it has announced is there, or what it wrote to the same place afterwards.
    let last = a.last_received().unwrap()[0];
    let mut bytes = [0; 4_096];
    region.copy_out(usize::from(last / 2 % 16) * 4_096, &mut bytes);
    assert!(bytes.iter().all(|byte| byte % 32 == last % 32), "{last}: {bytes:?}");
    assert_eq!(a.broke(qp), Some(QpError::RetriesExceeded));
    assert!(a.rnic.has_route(peer.gid), "its socket is still there");
    works([&mut a, &mut b], neighbours);
    let after = Nic::new(&directory);
    assert!(!a.rnic.has_route(peer.gid), "who comes removes it");
    drop(after);
}
