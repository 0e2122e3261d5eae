//! A network that carries TCP and no RoCE: a firewall that drops UDP port 4791, both ways or one.
//!
//! Nothing tells the gateways about the firewall. Whatever each of them finds out, and whenever it
//! does, applications must see exactly their own bytes and no reset, and soon no delay either.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::Command;
use std::thread;
use std::time::Duration;

use crate::clock::{Deadline, now};
use crate::gateway::{Gateway, Pair, local};
use crate::hosts::{Host, Hosts, set_limit};

/// The first of three ports, one for each of [`Conversation::ALL`], in that order.
const PORT: u16 = 7010;
/// Connections of each scenario.
const CONNECTIONS: usize = 200;
/// The first connections, all at once, may wait until a first contact has failed.
const EARLY: usize = 10;
/// How long each of the others may take, from `connect` to the last byte.
const DELAY_LIMIT: Duration = Duration::from_millis(50);
/// Pause between two connections, in which the gateways try SMC-R in the background.
const PAUSE: Duration = Duration::from_millis(10);
/// A connection that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(20);
/// How soon SMC-R must be used again after the firewall has opened.
const RECOVERY_LIMIT: Duration = Duration::from_secs(60);
/// Bytes of one connection each way.
const LEN: usize = 20_000;

/// What two applications do with a connection.
#[derive(Clone, Copy, Debug)]
enum Conversation {
    /// The client asks, the server answers, several times.
    Echo,
    /// The server speaks first, as those of SSH and SMTP do.
    Banner,
    /// The client says all it has and half-closes, as `nc -N` does.
    HalfClose,
}

impl Conversation {
    const ALL: [Self; 3] = [Self::Echo, Self::Banner, Self::HalfClose];
    const PORTS: [u16; 3] = [PORT, PORT + 1, PORT + 2];

    fn serve(self, mut client: TcpStream) {
        prepare(&client);
        // The client sees it, too, if something goes wrong here.
        let _ = match self {
            Self::Echo => echo(&mut client),
            Self::Banner => client.write_all(&text(b'b')).and_then(|()| echo(&mut client)),
            Self::HalfClose => {
                let mut all = Vec::new();
                client.read_to_end(&mut all).and_then(|_| client.write_all(&all))
            }
        };
    }

    /// What the client has read from beginning to end, and what it should have read.
    fn ask(self, server: &mut TcpStream) -> std::io::Result<(Vec<u8>, Vec<u8>)> {
        prepare(server);
        let question = text(b'q');
        let mut heard = Vec::new();
        let expected = match self {
            Self::Echo => {
                for part in question.chunks(LEN / 4) {
                    server.write_all(part)?;
                    let from = heard.len();
                    heard.resize(from + part.len(), 0);
                    server.read_exact(&mut heard[from..])?;
                }
                question
            }
            Self::Banner => {
                heard.resize(LEN, 0);
                server.read_exact(&mut heard)?;
                server.write_all(&question)?;
                [text(b'b'), question].concat()
            }
            Self::HalfClose => {
                server.write_all(&question)?;
                question
            }
        };
        server.shutdown(Shutdown::Write)?;
        server.read_to_end(&mut heard)?;
        Ok((heard, expected))
    }
}

/// Sets time limits, and disables Nagle's algorithm, whose delays would be taken for ours.
fn prepare(stream: &TcpStream) {
    set_limit(stream, LIMIT);
    stream.set_nodelay(true).expect("an open socket");
}

fn echo(client: &mut TcpStream) -> std::io::Result<()> {
    let mut bytes = [0; 4096];
    loop {
        match client.read(&mut bytes)? {
            0 => return Ok(()),
            len => client.write_all(&bytes[..len])?,
        }
    }
}

/// Bytes in which no two places look alike.
fn text(mark: u8) -> Vec<u8> {
    (0..u16::MAX)
        .flat_map(|at| [mark, at.to_be_bytes()[0], at.to_be_bytes()[1]])
        .take(LEN)
        .collect()
}

/// Starts the servers of host b, which serve until the test is over.
fn serve(hosts: &Hosts) {
    for (conversation, port) in Conversation::ALL.into_iter().zip(Conversation::PORTS) {
        let listener: TcpListener = hosts.b.listen(local(port));
        thread::spawn(move || {
            while let Ok((client, _)) = listener.accept() {
                thread::spawn(move || conversation.serve(client));
            }
        });
    }
}

/// Makes one connection. Returns what was wrong with it, and how long it took.
fn one(hosts: &Hosts, index: usize) -> (Option<String>, Duration) {
    let which = index % Conversation::ALL.len();
    let (conversation, port) = (Conversation::ALL[which], Conversation::PORTS[which]);
    let began = now();
    let outcome = hosts.a.connect(local(port)).and_then(|mut server| conversation.ask(&mut server));
    let took = now() - began;
    let wrong = match outcome {
        Ok((heard, expected)) if heard == expected => None,
        Ok((heard, expected)) => {
            let at = heard.iter().zip(&expected).position(|(a, b)| a != b);
            let from = at.unwrap_or(heard.len().min(expected.len()));
            let seen = &heard[from..heard.len().min(from + 48)];
            Some(format!("{index} {conversation:?}, after {took:?}: from byte {from}: {seen:02x?}"))
        }
        Err(error) => Some(format!("{index} {conversation:?}, after {took:?}: {error}")),
    };
    (wrong, took)
}

/// Makes `count` connections, one after another.
fn converse(hosts: &Hosts, count: usize) -> (Vec<String>, Vec<Duration>) {
    let one_then_pause = |index| {
        let outcome = one(hosts, index);
        thread::sleep(PAUSE);
        outcome
    };
    let (wrong, took): (Vec<_>, _) = (0..count).map(one_then_pause).unzip();
    (wrong.into_iter().flatten().collect(), took)
}

/// Makes `count` connections, all at once.
fn converse_at_once(hosts: &Hosts, count: usize) -> (Vec<String>, Vec<Duration>) {
    let (wrong, took): (Vec<_>, _) = thread::scope(|scope| {
        let all: Vec<_> = (0..count).map(|index| scope.spawn(move || one(hosts, index))).collect();
        all.into_iter().map(|one| one.join().expect("it panics nowhere")).unzip()
    });
    (wrong.into_iter().flatten().collect(), took)
}

/// Makes `host` drop incoming RoCE packets.
fn block(host: &Host) {
    block_by(host, "input");
}

/// Makes `host` drop the RoCE packets that pass this hook.
fn block_by(host: &Host, hook: &str) {
    let rules = format!(
        "add table inet cut\n\
         add chain inet cut {hook} {{ type filter hook {hook} priority 0; }}\n\
         add rule inet cut {hook} udp dport 4791 drop\n"
    );
    nft(host, &rules);
}

fn unblock(host: &Host) {
    nft(host, "delete table inet cut\n");
}

fn nft(host: &Host, rules: &str) {
    let run = || Command::new("nft").arg(rules).output();
    let output = host.enter(run).expect("scripts/setup installs nft");
    assert!(output.status.success(), "{rules}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Runs conversations, and asserts that every byte is right, no connection is reset, and soon none
/// is delayed.
fn assert_undisturbed(hosts: &Hosts, what: &str) {
    let (mut wrong, first) = converse_at_once(hosts, EARLY);
    let (more, rest) = converse(hosts, CONNECTIONS - EARLY);
    wrong.extend(more);
    let longest = |times: &[Duration]| times.iter().max().copied().unwrap_or_default();
    let slow = rest.iter().filter(|time| **time > DELAY_LIMIT).count();
    println!(
        "{what}: {} of {CONNECTIONS} wrong; longest of the first {EARLY} {:?}, of the others \
         {:?}, {slow} of them above {DELAY_LIMIT:?}",
        wrong.len(),
        longest(&first),
        longest(&rest),
    );
    assert!(wrong.is_empty(), "{what}:\n{}", wrong.join("\n"));
    assert_eq!(slow, 0, "{what}: {rest:?}");
}

/// Makes connections until one uses SMC-R again.
fn assert_smc_again(hosts: &Hosts, pair: &Pair<'_>, what: &str) {
    let smc = |gateway: &Gateway<'_>| gateway.stats().totals.connections_smc;
    let (before, began) = (smc(&pair.b), now());
    let deadline = Deadline::after(RECOVERY_LIMIT);
    while smc(&pair.b) == before {
        assert!(!deadline.passed(), "{what}: no SMC-R within {RECOVERY_LIMIT:?}");
        let (wrong, _) = converse(hosts, 30);
        assert!(wrong.is_empty(), "{what}:\n{}", wrong.join("\n"));
    }
    println!("{what}: SMC-R again after {:?}", now() - began);
}

/// The most common firewall drops RoCE both ways, from the start. Then its operator opens it.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_blocked_from_the_start() {
    let hosts = Hosts::new("smoke_blocked_from_the_start");
    serve(&hosts);
    for host in [&hosts.a, &hosts.b] {
        block(host);
    }
    let pair = Pair::start(&hosts, &Conversation::PORTS);
    assert_undisturbed(&hosts, "blocked from the start");
    for host in [&hosts.a, &hosts.b] {
        unblock(host);
    }
    assert_smc_again(&hosts, &pair, "unblocked");
}

/// The firewall drops one way only: one side hears the other, and believes that it is heard, too.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn blocked_towards_the_server() {
    let hosts = Hosts::new("blocked_towards_the_server");
    one_way(&hosts, &hosts.b);
}

#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn blocked_towards_the_client() {
    let hosts = Hosts::new("blocked_towards_the_client");
    one_way(&hosts, &hosts.a);
}

/// If the firewall runs on the gateway's own host, the kernel reports the loss to the sender.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn blocked_at_the_source() {
    let hosts = Hosts::new("blocked_at_the_source");
    serve(&hosts);
    for host in [&hosts.a, &hosts.b] {
        block_by(host, "output");
    }
    let pair = Pair::start(&hosts, &Conversation::PORTS);
    assert_undisturbed(&hosts, "blocked at the source");
    for host in [&hosts.a, &hosts.b] {
        unblock(host);
    }
    assert_smc_again(&hosts, &pair, "unblocked");
}

fn one_way(hosts: &Hosts, deaf: &Host) {
    serve(hosts);
    block(deaf);
    let pair = Pair::start(hosts, &Conversation::PORTS);
    assert_undisturbed(hosts, &format!("blocked towards {}", deaf.device));
    unblock(deaf);
    assert_smc_again(hosts, &pair, "unblocked");
}

/// A link that has carried connections stops carrying anything. New connections must not be lost on
/// it.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_blocked_later() {
    let hosts = Hosts::new("smoke_blocked_later");
    serve(&hosts);
    let pair = Pair::start(&hosts, &Conversation::PORTS);
    let (wrong, _) = converse(&hosts, 6);
    assert!(wrong.is_empty(), "{wrong:?}");
    pair.assert_all_smc(6);
    for deaf in [vec![&hosts.a, &hosts.b], vec![&hosts.b], vec![&hosts.a]] {
        deaf.iter().for_each(|host| block(host));
        // Packets that were heard shortly before the block still count as a proof that all is well.
        thread::sleep(Duration::from_millis(500));
        let names: Vec<_> = deaf.iter().map(|host| host.device).collect();
        assert_undisturbed(&hosts, &format!("blocked later towards {names:?}"));
        deaf.iter().for_each(|host| unblock(host));
        assert_smc_again(&hosts, &pair, "unblocked");
    }
}
