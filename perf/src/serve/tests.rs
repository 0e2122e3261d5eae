//! Tests of loads against servers over loopback. They assert no figure, only that it comes from
//! real traffic.

use std::thread;

use super::*;
use crate::scenarios::short_connections::Side;
use crate::scenarios::{crowd, open_loop, round_trip, short_connections, stream};

const BRIEFLY: Duration = Duration::from_millis(50);

/// A server of its own for each test; it ends with the test process.
fn server(behaviour: Behaviour) -> SocketAddr {
    let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || serve(behaviour, &listener));
    address
}

/// Throughput and latency must come from the same answers.
#[test]
fn every_recorded_round_trip_is_in_the_histogram() {
    // The largest do not fit into the buffers of sockets.
    for bytes in [1, 64, round_trip::MESSAGE_BYTES_MAX] {
        let result = round_trip::run(server(Behaviour::Echo), 3, bytes, BRIEFLY).unwrap();
        let latency = result.latency.unwrap();
        let recorded = result.requests_per_s.unwrap() * result.elapsed_s;
        assert!((recorded - latency.count as f64).abs() < 0.5, "{recorded} {latency:?}");
        assert!(latency.count > 0 && result.requests_total > latency.count, "warm-up is left out");
        assert_eq!(result.bytes_total, result.requests_total * 2 * bytes as u64);
        assert_eq!((result.connections_opened, result.errors), (3, 0));
    }
}

/// Each newcomer counts once, and idle connections are open while the other one is measured.
#[test]
fn a_crowd_is_served() {
    let result = crowd::burst(server(Behaviour::Echo), 100).unwrap();
    assert_eq!((result.connections_opened, result.requests_total), (100, 100));
    assert_eq!(result.latency.unwrap().count, 100);
    let result = crowd::idle(server(Behaviour::Echo), 100, BRIEFLY, BRIEFLY).unwrap();
    assert_eq!(result.connections_opened, 101);
    assert!(result.latency.unwrap().count > 0);
}

/// A path that alters bytes must not be measured as if it worked.
#[test]
fn a_wrong_answer_ends_the_round_trips() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 64]).unwrap();
        stream.write_all(&[b'?'; 64]).unwrap();
        thread::sleep(Duration::from_secs(5));
    });
    let failure = round_trip::run(address, 1, 64, BRIEFLY).unwrap_err().to_string();
    assert!(failure.contains("changed bytes"), "{failure}");
}

/// In an open loop the client sets the rate, so a rate below the server's limit must be kept.
#[test]
fn an_open_loop_keeps_its_rate() {
    let rate_per_s = 1_000;
    let duration = Duration::from_millis(200);
    let answered = [(); 3].map(|()| {
        let result = open_loop::run(server(Behaviour::Echo), 4, rate_per_s, duration).unwrap();
        result.requests_total
    });
    // 450 requests are due; on a loaded machine the last ones may still be in flight. One of three
    // runs may meet a moment in which the machine stands still.
    let kept = answered.iter().filter(|total| (300..=460).contains(*total)).count();
    assert!(kept >= 2, "{answered:?}");
}

/// The receiver's count is the figure of STR, so it must be of all bytes sent.
#[test]
fn a_sink_counts_what_was_sent() {
    let result = stream::send(server(Behaviour::Sink), None, BRIEFLY).unwrap();
    assert!(result.bytes_total >= WRITE_BYTES as u64);
    let gbit = result.gbit_per_s.unwrap() * result.elapsed_s;
    assert!((gbit * 1e9 / 8.0 - result.bytes_total as f64).abs() < 1.0);
}

/// The other direction: counted at the client, warm-up left out.
#[test]
fn a_source_sends_until_the_client_closes() {
    let result = stream::receive(server(Behaviour::Source), None, BRIEFLY).unwrap();
    let counted = result.gbit_per_s.unwrap() * result.elapsed_s * 1e9 / 8.0;
    assert!(counted > 0.0 && counted < result.bytes_total as f64);
}

/// Each short connection is one request, answered in full.
#[test]
fn short_connections_are_answered_in_full() {
    for (behaviour, closes_first, answer) in
        [(Behaviour::Crr, Side::Server, 1024), (Behaviour::Echo, Side::Client, 64)]
    {
        let result = short_connections::run(server(behaviour), closes_first, 4, BRIEFLY).unwrap();
        assert_eq!(result.errors, 0);
        assert!(result.requests_total > 4);
        assert_eq!(result.connections_opened, result.requests_total + 4);
        assert_eq!(result.bytes_total, result.requests_total * (64 + answer));
    }
}

/// A closed port must end a run at once: refused connections answer fastest of all.
#[test]
fn refused_connections_are_not_a_result() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    for closes_first in [Side::Server, Side::Client] {
        let failure = short_connections::run(address, closes_first, 4, BRIEFLY).unwrap_err();
        assert!(failure.to_string().contains("failed"), "{closes_first:?}: {failure}");
    }
}
