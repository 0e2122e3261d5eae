//! Tests with the output of wrk 4.1.0.

use super::*;

const REPORT: &str = "\
Running 2s test @ http://10.8.0.2:7014/
  1 threads and 32 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency   412.15us    1.02ms  21.30ms   97.10%
    Req/Sec    70.10k     3.20k   75.00k    65.00%
  Latency Distribution
     50%  410.00us
     75%  480.00us
     90%  600.00us
     99%    0.90ms
  140213 requests in 2.00s, 31.50MB read
  Socket errors: connect 0, read 12, write 0, timeout 1
Requests/sec:  70102.31
Transfer/sec:     15.75MB
";

/// These figures are published as they are read here.
#[test]
fn reads_what_wrk_prints() {
    let result = parse(REPORT, KeepAlive::Yes).unwrap();
    let latency = result.latency.unwrap();
    assert_eq!((latency.p50_ns, latency.p90_ns, latency.p99_ns), (410_000, Some(600_000), 900_000));
    assert_eq!((latency.max_ns, latency.count), (21_300_000, 140_213));
    assert_eq!(result.requests_per_s, Some(70_102.31));
    assert_eq!(result.bytes_total, 33_030_144);
    assert_eq!((result.connections_opened, result.errors), (32, 13));
    assert!((result.elapsed_s - 2.0).abs() < 1e-9);
}

/// With `Connection: close` every request is a connection, and the SMC count must match that.
#[test]
fn without_keep_alive_requests_are_connections() {
    assert_eq!(parse(REPORT, KeepAlive::No).unwrap().connections_opened, 140_213);
}

/// A crashed wrk must not become a row of zeros.
#[test]
fn an_empty_report_is_refused() {
    for line in ["50%", "99%", "Requests/sec:", "requests in", "Latency "] {
        let cut: String = REPORT
            .lines()
            .filter(|text| !text.contains(line))
            .map(|text| format!("{text}\n"))
            .collect();
        assert!(parse(&cut, KeepAlive::Yes).is_err(), "{line}");
    }
}

/// An error page served fast is not a result.
#[test]
fn error_pages_count_as_errors() {
    let report = REPORT.replace("Requests/sec:", "  Non-2xx or 3xx responses: 7\nRequests/sec:");
    assert_eq!(parse(&report, KeepAlive::Yes).unwrap().errors, 20);
}
