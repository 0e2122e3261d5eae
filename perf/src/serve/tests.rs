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

/// The same, but it never answers the first connection.
fn server_after_a_silent_one(behaviour: Behaviour) -> SocketAddr {
    let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        listener.set_nonblocking(false).unwrap();
        let _silent = listener.accept().unwrap();
        listener.set_nonblocking(true).unwrap();
        serve(behaviour, &listener)
    });
    address
}

/// Throughput and latency must come from the same answers.
#[test]
fn every_recorded_round_trip_is_in_the_histogram() {
    // The largest do not fit into the buffers of sockets.
    for bytes in [1, 64, round_trip::MESSAGE_BYTES_MAX] {
        let result = round_trip::run(server(Behaviour::Echo), 3, bytes, BRIEFLY).unwrap();
        let latency = result.latency.unwrap();
        let answered = result.requests_per_s.unwrap() * result.elapsed_s;
        // Each connection may have a request in flight when the window begins, and when it ends.
        assert!((answered - latency.count as f64).abs() < 3.5, "{answered} {latency:?}");
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

/// In an open loop the client sets the rate: whatever is due is sent, and answered.
#[test]
fn an_open_loop_keeps_its_rate() {
    let duration = Duration::from_millis(200);
    let result = open_loop::run(server(Behaviour::Echo), 4, 1_000, duration).unwrap();
    // Those due during a warm-up of 250 ms, and during 200 ms.
    assert!((448..=450).contains(&result.requests_total), "{}", result.requests_total);
    assert!((199..=201).contains(&result.latency.unwrap().count));
}

/// A path that is too slow leaves a queue when the time is over. The requests in it have waited
/// longest: without them, an overloaded path would have a better p99 than it has.
#[test]
fn an_open_loop_records_what_waits_at_the_end() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let each = Duration::from_millis(10);
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; round_trip::MESSAGE_BYTES];
        while stream.read_exact(&mut request).is_ok() {
            thread::sleep(each);
            stream.write_all(&request).unwrap();
        }
    });
    let duration = Duration::from_millis(250);
    let result = open_loop::run(address, 1, 400, duration).unwrap();
    let latency = result.latency.unwrap();
    assert!((198..=200).contains(&result.requests_total), "{}", result.requests_total);
    assert!((99..=101).contains(&latency.count), "{}", latency.count);
    // 200 answers take two seconds, and the last request is due after half of one.
    assert!(latency.p99_ns > 1_400_000_000, "{}", latency.p99_ns);
    assert!(result.requests_per_s.unwrap() <= 101.0, "answers within the window only");
}

/// One connection that hangs must not hide behind others that work: it is an error, and its wait is
/// among those of the others. It costs no other path its measurement.
#[test]
fn a_connection_without_an_answer_is_an_error_that_took_long() {
    let duration = Duration::from_millis(500);
    let silent = || server_after_a_silent_one(Behaviour::Echo);
    let closed = thread::spawn(move || round_trip::run(silent(), 3, 64, duration));
    let open = open_loop::run(silent(), 3, 100, duration).unwrap();
    let closed = closed.join().unwrap().unwrap();
    for result in [open, closed] {
        assert_eq!((result.errors, result.connections_opened), (1, 3));
        assert!(result.requests_total > 10, "{}", result.requests_total);
        let longest = result.latency.unwrap().max_ns;
        assert!(longest >= 5_000_000_000, "{longest}");
    }
}

/// Where nothing is answered there are no figures.
#[test]
fn a_path_that_answers_nobody_is_not_measured() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let failure = round_trip::run(address, 2, 64, BRIEFLY).unwrap_err().to_string();
    assert_eq!(failure, "2 of 2 connections had no answer within 5s");
}

/// Of short connections some fail where ports run out, so that one is an error in the result.
#[test]
fn a_short_connection_without_an_answer_is_an_error() {
    let silent = server_after_a_silent_one(Behaviour::Crr);
    let result = short_connections::run(silent, Side::Server, 4, BRIEFLY).unwrap();
    assert_eq!(result.errors, 1);
    assert_eq!(result.connections_opened, result.requests_total + 1);
}

/// Figures beside a thousand idle connections mean nothing if a proxy has ended some of them.
#[test]
fn an_idle_connection_that_ends_ends_the_run() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        let mut request = [0; round_trip::MESSAGE_BYTES];
        for number in 0..2 {
            let (mut stream, _) = listener.accept().unwrap();
            while stream.read_exact(&mut request).is_ok() {
                stream.write_all(&request).unwrap();
                if number == 0 {
                    thread::sleep(BRIEFLY);
                    break;
                }
            }
        }
    });
    let failure = crowd::idle(address, 1, 2 * BRIEFLY, BRIEFLY).unwrap_err().to_string();
    assert!(failure.contains("idle connections"), "{failure}");
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
        assert_eq!(result.connections_opened, result.requests_total, "none is cut off");
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
