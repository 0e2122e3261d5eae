//! What users see when the far end is faulty or gone.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::Duration;

use rustix::process::Signal;

use crate::clock::{now, wait_until};
use crate::gateway::{Gateway, Pair, SETTLE_LIMIT, Setup, local};
use crate::hosts::{Host, Hosts, accept, set_limit};

const PORT: u16 = 7010;
const LIMIT: Duration = Duration::from_secs(15);
/// So many bytes are under way in streams when a gateway is killed in the midst of them.
const STREAMED: u64 = 64 << 20;

/// Linux's SMC_CLC_DECL_PEERNOSMC: the handshake of the peer carried no SMC option.
const PEER_HAS_NO_SMC: u32 = 0x0301_0000;
/// Linux's SMC_CLC_DECL_IPSEC: IPsec protects the connection.
const IPSEC: u32 = 0x0302_0000;

/// Most peers in the world have no SMC-R. Connections to them work, and an operator can see why
/// they are not accelerated.
// RFC 7609 3.1 #3: stay on TCP without both options
// RFC 7609 3.5.1.1 #7: hand over TCP without both options
// RFC 7609 3.5.1.6.4 #1: plain TCP without both options
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_peer_without_smc_r() {
    let hosts = Hosts::new("smoke_peer_without_smc_r");
    let a = Setup::new("gateway-a", &hosts.a).towards(hosts.b.address, PORT);
    let a = a.start(&hosts, &hosts.a);
    let listener = hosts.b.listen(hosts.b.at(PORT));
    for _ in 0..3 {
        let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
        assert_echo(&client, &accept(&listener, LIMIT));
    }
    let stats = a.stats();
    assert_eq!((stats.totals.connections_smc, stats.totals.connections_tcp), (0, 3));
    let [fallback] = &stats.fallbacks[..] else { panic!("one reason: {:?}", stats.fallbacks) };
    assert_eq!((fallback.code, fallback.count), (PEER_HAS_NO_SMC, 3), "{}", fallback.name);
}

/// If IPsec is to encrypt what goes between two hosts, RDMA must not carry the bytes past it. A
/// policy counts from the next connection on, at either host.
// RFC 7609 5.5 #1: no SMC-R under IPsec
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn connections_that_ipsec_protects_stay_tcp() {
    let hosts = Hosts::new("connections_that_ipsec_protects_stay_tcp");
    let pair = Pair::start(&hosts, &[PORT]);
    let listener = hosts.b.listen(local(PORT));
    let exchange = || {
        let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
        assert_echo(&client, &accept(&listener, LIMIT));
    };
    let selector = |from: &Host, to: &Host| {
        let text = format!("src {}/32 dst {}/32 dir out", from.address, to.address);
        text.split(' ').map(str::to_owned).collect::<Vec<_>>()
    };
    // The policy says "use": one that says "require" would drop everything, as there are no keys.
    let template = "tmpl proto esp mode transport level use".split(' ').map(str::to_owned);
    exchange();
    for (from, to) in [(&hosts.a, &hosts.b), (&hosts.b, &hosts.a)] {
        let words = ["xfrm", "policy", "add"].map(str::to_owned).into_iter();
        let words: Vec<_> = words.chain(selector(from, to)).chain(template.clone()).collect();
        from.ip(&words.iter().map(String::as_str).collect::<Vec<_>>());
        exchange();
        let words = ["xfrm", "policy", "delete"].map(str::to_owned).into_iter();
        let words: Vec<_> = words.chain(selector(from, to)).collect();
        from.ip(&words.iter().map(String::as_str).collect::<Vec<_>>());
    }
    exchange();
    let stats = pair.a.stats();
    assert_eq!((stats.totals.connections_smc, stats.totals.connections_tcp), (2, 2));
    for gateway in [&pair.a, &pair.b] {
        let fallbacks = gateway.stats().fallbacks;
        assert!(fallbacks.iter().any(|fallback| fallback.code == IPSEC), "{fallbacks:?}");
    }
}

/// A client that never heard of SMC-R may talk to a listener that offers it.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn plain_client_of_an_smc_listener() {
    let hosts = Hosts::new("plain_client_of_an_smc_listener");
    let b = Pair::server_side(&hosts, &[PORT]).start(&hosts, &hosts.b);
    let listener = hosts.b.listen(local(PORT));
    let client = hosts.a.connect(hosts.b.at(PORT)).expect("the gateway listens");
    assert_echo(&client, &accept(&listener, LIMIT));
    let stats = b.stats();
    assert_eq!((stats.totals.connections_smc, stats.totals.connections_tcp), (0, 1));
}

/// If nobody listens, the client must learn it at once: a timeout looks like a broken network.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn refused_upstream_is_a_reset() {
    let hosts = Hosts::new("refused_upstream_is_a_reset");
    // On one port nobody listens behind gateway B, on the other nobody on host b at all.
    const UNUSED_PORT: u16 = 7011;
    let b = Pair::server_side(&hosts, &[PORT]).start(&hosts, &hosts.b);
    let a = Setup::new("gateway-a", &hosts.a)
        .towards(hosts.b.address, PORT)
        .towards(hosts.b.address, UNUSED_PORT)
        .start(&hosts, &hosts.a);
    for port in [PORT, UNUSED_PORT] {
        match hosts.a.connect(local(port)) {
            // The reset may arrive before `connect` returns.
            Err(error) => assert!(is_refusal(&error), "port {port}: {error}"),
            Ok(mut client) => {
                set_limit(&client, LIMIT);
                let error = client.read(&mut [0]).expect_err("a reset, not an end or an answer");
                assert_eq!(error.kind(), ErrorKind::ConnectionReset, "port {port}");
            }
        }
    }
    for gateway in [&a, &b] {
        gateway.holdings_at_rest();
    }
}

/// Whether `connect` failed because the peer refused, not because nobody answered.
pub(crate) fn is_refusal(error: &std::io::Error) -> bool {
    [ErrorKind::ConnectionRefused, ErrorKind::ConnectionReset].contains(&error.kind())
}

/// A scanner or a broken stack that connects to a gateway must not disturb other connections.
// RFC 7609 C.6 #4: protocol error ends TCP
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn malformed_rendezvous_disturbs_nobody() {
    let hosts = Hosts::new("malformed_rendezvous_disturbs_nobody");
    // Both sides assume SMC-R, so that gateway B accepts our client without the option.
    let b = Pair::server_side(&hosts, &[PORT]).assume(hosts.a.address).start(&hosts, &hosts.b);
    let _a = Setup::new("gateway-a", &hosts.a)
        .towards(hosts.b.address, PORT)
        .assume(hosts.b.address)
        .start(&hosts, &hosts.a);
    let listener = hosts.b.listen(local(PORT));
    let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
    let server = accept(&listener, LIMIT);
    assert_echo(&client, &server);
    assert_eq!(b.stats().totals.connections_smc, 1);

    for (count, (what, bytes)) in (1..).zip(malformed_proposals()) {
        let mut broken = hosts.a.connect(hosts.b.at(PORT)).expect("the gateway listens");
        set_limit(&broken, LIMIT);
        broken.write_all(&bytes).expect("the connection is up");
        let mut answer = Vec::new();
        match broken.read_to_end(&mut answer) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{what}"),
        }
        wait_until(&format!("{what} is counted"), SETTLE_LIMIT, || {
            b.stats().totals.handshakes_failed == count
        });
        assert_echo(&client, &server);
    }
    drop((client, server));
    b.holdings_at_rest();
}

/// CLC Proposals (RFC 7609, A.2.1) that no stack may send, each wrong in one way.
fn malformed_proposals() -> Vec<(&'static str, Vec<u8>)> {
    const EYECATCHER: [u8; 4] = [0xE2, 0xD4, 0xC3, 0xD9];
    const PROPOSAL: u8 = 1;
    const LEN: u8 = 52;
    let mut proposal = vec![0; usize::from(LEN)];
    proposal[..4].copy_from_slice(&EYECATCHER);
    proposal[4] = PROPOSAL;
    proposal[6] = LEN;
    proposal[7] = 0x10; // Version 1.
    proposal[8..16].copy_from_slice(&[0, 1, 2, 0, 0, 0, 0, 1]); // Peer id.
    proposal[48..].copy_from_slice(&EYECATCHER);
    let with = |change: fn(&mut Vec<u8>)| {
        let mut bytes = proposal.clone();
        change(&mut bytes);
        bytes
    };
    vec![
        ("a foreign eye catcher", with(|bytes| bytes[0] = 0)),
        ("an unknown type", with(|bytes| bytes[4] = 0x77)),
        ("a length below that of the header", with(|bytes| bytes[6] = 3)),
        ("a length beyond all messages", with(|bytes| bytes[5] = 0xFF)),
        ("a foreign trailer", with(|bytes| bytes[51] = 0)),
        ("an offset beyond the message", with(|bytes| bytes[38] = 0xFF)),
        ("an Accept where a Proposal belongs", with(|bytes| bytes[4] = 2)),
    ]
}

/// The other gateway is killed and cannot say goodbye. Applications must learn it soon, and once
/// it is back, new connections must be as fast as before.
// RFC 7609 2.2.4 #5: one peer id per stack instance
// RFC 7609 2.2.4 #6: new peer id after restart
// RFC 7609 4.8.3 #2: detect dead peer by its links
// RFC 7609 A.2.1 #3: new instance number after restart
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn killed_gateway_under_load() {
    let hosts = Hosts::new("killed_gateway_under_load");
    let Pair { a, b } = Pair::start(&hosts, &[PORT]);
    let listener = hosts.b.listen(local(PORT));
    let warm = hosts.a.connect(local(PORT)).expect("the gateway listens");
    assert_echo(&warm, &accept(&listener, LIMIT));
    drop(warm);
    let before = a.holdings_at_rest();
    let groups_before = a.stats().link_groups;
    let written = a.stats().counter("rdma_out");

    let clients = (0..8).map(|_| {
        let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
        (client, accept(&listener, LIMIT))
    });
    let (clients, servers): (Vec<_>, Vec<_>) = clients.unzip();
    thread::scope(|scope| {
        for mut server in servers {
            scope.spawn(move || drop(std::io::copy(&mut server, &mut std::io::sink())));
        }
        // Half of the clients stream, the others wait for an answer.
        let noticing = clients.into_iter().enumerate().map(|(number, client)| {
            scope.spawn(move || if number % 2 == 0 { stream(client) } else { wait(client) })
        });
        let noticing: Vec<_> = noticing.collect();
        wait_until("the clients stream", LIMIT, || {
            a.stats().counter("rdma_out") > written + STREAMED
        });
        b.process.signal(Signal::KILL);
        let killed = now();
        for client in noticing {
            let noticed = client.join().expect("the client hears of it");
            let after = noticed.saturating_sub(killed);
            assert!(noticed >= killed, "broken before the gateway was killed");
            assert!(after < Duration::from_secs(12), "noticed after {after:?}");
        }
        drop(b);
    });
    wait_until("gateway A has let go", SETTLE_LIMIT, || a.stats().active.smc == 0);

    let [old] = &groups_before[..] else { panic!("one group: {groups_before:?}") };
    let b = Pair::server_side(&hosts, &[PORT]).start(&hosts, &hosts.b);
    let smc = a.stats().totals.connections_smc;
    let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
    assert_echo(&client, &accept(&listener, LIMIT));
    drop(client);
    assert_smc_grew_by_one(&a, smc);
    assert_smc_grew_by_one(&b, 0);
    let groups = a.stats().link_groups;
    let [new] = &groups[..] else { panic!("one group: {groups:?}") };
    // Two bytes of instance in hexadecimal, and the MAC address of the same NIC.
    assert!(new.peer_id != old.peer_id && new.peer_id[4..] == old.peer_id[4..], "{new:?} {old:?}");
    a.holdings_back_to(&before);
}

fn assert_smc_grew_by_one(gateway: &Gateway<'_>, before: u64) {
    let stats = gateway.stats();
    assert_eq!(stats.totals.connections_smc, before + 1, "{:?}", stats.fallbacks);
}

/// Writes until the connection breaks. Returns when it did.
fn stream(mut client: TcpStream) -> Duration {
    set_limit(&client, LIMIT);
    let piece = [1; 64 * 1024];
    loop {
        if let Err(error) = client.write_all(&piece) {
            let broken = [ErrorKind::ConnectionReset, ErrorKind::BrokenPipe];
            assert!(broken.contains(&error.kind()), "{error}");
            return now();
        }
    }
}

/// Waits for an answer until the connection is reset. Returns when it was.
fn wait(mut client: TcpStream) -> Duration {
    set_limit(&client, LIMIT);
    let error = client.read(&mut [0]).expect_err("a reset, not an end or an answer");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    now()
}

/// One question and one answer.
pub(crate) fn assert_echo(mut client: &TcpStream, mut server: &TcpStream) {
    set_limit(client, LIMIT);
    let mut seen = [0; 5];
    client.write_all(b"hello").expect("the connection is up");
    server.read_exact(&mut seen).expect("the question arrives");
    assert_eq!(&seen, b"hello");
    server.write_all(b"there").expect("the connection is up");
    client.read_exact(&mut seen).expect("the answer arrives");
    assert_eq!(&seen, b"there");
}
