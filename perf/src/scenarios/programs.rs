//! Benchmarks that others have published figures of, as their users run them: each brings its own
//! server and its own load.
//!
//! | name | server | load |
//! |---|---|---|
//! | iperf3 | `iperf3 -s` | one stream, and a connection for control |
//! | sockperf | `sockperf sr --tcp` | ping-pong of 64 bytes on one connection |
//! | redis | redis-server | redis-benchmark: GET of 64 bytes, 32 connections |
//! | pgbench | PostgreSQL, a process per connection | select-only transactions, 8 connections |
//!
//! Estimates: iperf3 is as STR, and sockperf as RR-1. Redis adds 2 µs of its own to each request of
//! RR-32, and its load 3. PostgreSQL adds 40 to 60 µs and two switches between processes to each of
//! RR-8, so paths differ by a tenth of what they differ by elsewhere.

use std::net::SocketAddr;
use std::time::Duration;

use super::{LoadResult, Service};
use crate::latency::Latency;

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Program {
    Iperf3,
    Sockperf,
    Redis,
    Pgbench,
}

impl Program {
    /// All of them.
    pub(crate) const ALL: [Self; 4] = [Self::Iperf3, Self::Sockperf, Self::Redis, Self::Pgbench];

    /// The name of the scenario.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Iperf3 => "iperf3",
            Self::Sockperf => "sockperf",
            Self::Redis => "redis",
            Self::Pgbench => "pgbench",
        }
    }

    /// Its server.
    pub(crate) fn service(self) -> Service {
        match self {
            Self::Iperf3 => Service::Iperf3,
            Self::Sockperf => Service::Sockperf,
            Self::Redis => Service::Redis,
            Self::Pgbench => Service::Postgres,
        }
    }

    /// The program of which server it is.
    pub(crate) fn serving(service: Service) -> Option<Self> {
        Self::ALL.into_iter().find(|program| program.service() == service)
    }

    /// How many connections carry the load.
    pub(crate) fn connections(self) -> u32 {
        match self {
            Self::Iperf3 => 2,
            Self::Sockperf => 1,
            Self::Redis => 32,
            Self::Pgbench => 8,
        }
    }

    /// The command that starts its server on `port`, with its files in `folder`.
    pub(crate) fn server(self, port: u16, folder: &str) -> Vec<String> {
        let script = match self {
            Self::Iperf3 => format!("exec iperf3 --server --port {port}"),
            Self::Sockperf => format!("exec sockperf server --tcp --ip 0.0.0.0 --port {port}"),
            Self::Redis => {
                format!(
                    "exec redis-server --port {port} --bind 0.0.0.0 --save '' --protected-mode no"
                )
            }
            Self::Pgbench => {
                POSTGRES.replace("$port", &port.to_string()).replace("$folder", folder)
            }
        };
        ["sh", "-ec", &script].map(str::to_owned).to_vec()
    }

    /// The command that loads the server at `target`.
    pub(crate) fn load(self, target: SocketAddr, duration: Duration) -> Vec<String> {
        let (ip, port, seconds) = (target.ip(), target.port(), duration.as_secs_f64().ceil());
        let connections = self.connections();
        let line = match self {
            Self::Iperf3 => format!("iperf3 --client {ip} --port {port} --time {seconds} --json"),
            Self::Sockperf => format!(
                "sockperf ping-pong --tcp --ip {ip} --port {port} --time {seconds} --msg-size 64 \
                 --full-rtt"
            ),
            // It counts requests, not seconds.
            Self::Redis => format!(
                "redis-benchmark -h {ip} -p {port} -c {connections} -t get -d 64 -n {}",
                seconds * REDIS_PER_S
            ),
            Self::Pgbench => format!(
                "pgbench --host {ip} --port {port} --username postgres --no-vacuum --select-only \
                 --client {connections} --time {seconds} postgres"
            ),
        };
        line.split_whitespace().map(str::to_owned).collect()
    }

    /// Reads the report of its load.
    ///
    /// # Errors
    ///
    /// With a sentence that says what is missing.
    pub(crate) fn parse(self, output: &str) -> Result<LoadResult, String> {
        let parsed = match self {
            Self::Iperf3 => iperf3(output),
            Self::Sockperf => sockperf(output),
            Self::Redis => redis(output),
            Self::Pgbench => pgbench(output),
        };
        let connections_opened = self.connections().into();
        match parsed {
            Ok(result) => Ok(LoadResult { connections_opened, ..result }),
            Err(missing) => Err(format!("{} printed no {missing}", self.name())),
        }
    }
}

fn iperf3(output: &str) -> Result<LoadResult, String> {
    let report: serde_json::Value =
        serde_json::from_str(output).map_err(|error| format!("JSON: {error}"))?;
    let received = &report["end"]["sum_received"];
    let bits_per_s = received["bits_per_second"].as_f64().ok_or("sum_received")?;
    Ok(LoadResult {
        elapsed_s: received["seconds"].as_f64().ok_or("seconds")?,
        bytes_total: received["bytes"].as_u64().ok_or("bytes")?,
        gbit_per_s: Some(bits_per_s / 1e9),
        ..LoadResult::default()
    })
}

fn sockperf(output: &str) -> Result<LoadResult, String> {
    let after = |label: &str| {
        let (_, rest) = output.rsplit_once(label).ok_or_else(|| format!("'{label}'"))?;
        let number = rest.trim_start_matches([' ', '=', ':']);
        let end = number.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(number.len());
        number[..end].parse::<f64>().map_err(|_| format!("number after '{label}'"))
    };
    // "[Valid Duration] RunTime=2.000 sec; SentMessages=61; ReceivedMessages=60", then statistics
    // in microseconds.
    let (elapsed_s, requests) = (after("RunTime")?, after("ReceivedMessages")?);
    let latency = Latency {
        count: whole(requests),
        min_ns: Some(whole(after("<MIN> observation")? * 1e3)),
        mean_ns: after("avg-rtt")? * 1e3,
        p50_ns: whole(after("percentile 50.000")? * 1e3),
        p90_ns: Some(whole(after("percentile 90.000")? * 1e3)),
        p99_ns: whole(after("percentile 99.000")? * 1e3),
        p999_ns: Some(whole(after("percentile 99.900")? * 1e3)),
        max_ns: whole(after("<MAX> observation")? * 1e3),
        histogram_ns: Vec::new(),
    };
    Ok(answered(requests, elapsed_s, Some(latency)))
}

fn redis(output: &str) -> Result<LoadResult, String> {
    let completed = output.lines().find_map(|line| line.split_once(" requests completed in "));
    let (requests, seconds) = completed.ok_or("requests completed")?;
    let number = |text: &str| text.trim().parse::<f64>().map_err(|_| format!("number: '{text}'"));
    let elapsed_s = number(seconds.trim_end_matches("seconds"))?;
    // A line of labels, avg min p50 p95 p99 max, then a line of milliseconds.
    let mut lines = output.lines().skip_while(|line| !line.contains("latency summary"));
    let figures = lines.nth(2).ok_or("latency summary")?.split_whitespace().map(number);
    let figures: Vec<f64> = figures.collect::<Result<_, _>>()?;
    let [mean, min, p50, _p95, p99, max] = figures[..] else {
        return Err("latency summary of six figures".to_owned());
    };
    let ns = |ms: f64| whole(ms * 1e6);
    let latency = Latency {
        count: whole(number(requests)?),
        min_ns: Some(ns(min)),
        mean_ns: mean * 1e6,
        p50_ns: ns(p50),
        // It prints this one instead.
        p90_ns: None,
        p99_ns: ns(p99),
        p999_ns: None,
        max_ns: ns(max),
        histogram_ns: Vec::new(),
    };
    Ok(answered(number(requests)?, elapsed_s, Some(latency)))
}

fn pgbench(output: &str) -> Result<LoadResult, String> {
    let after = |label: &str| {
        let line = output.lines().find_map(|line| line.strip_prefix(label));
        let number = line.and_then(|rest| rest.split_whitespace().next());
        number.and_then(|number| number.parse::<f64>().ok()).ok_or_else(|| format!("'{label}'"))
    };
    let (requests, rate) =
        (after("number of transactions actually processed: ")?, after("tps = ")?);
    let failed = after("number of failed transactions: ")?;
    // Of latency it prints a mean, and nothing else.
    Ok(LoadResult { errors: whole(failed), ..answered(requests, requests / rate, None) })
}

/// So many answers in so many seconds.
fn answered(requests: f64, elapsed_s: f64, latency: Option<Latency>) -> LoadResult {
    LoadResult {
        elapsed_s,
        requests_total: whole(requests),
        requests_per_s: Some(requests / elapsed_s),
        latency,
        ..LoadResult::default()
    }
}

#[expect(clippy::cast_possible_truncation, reason = "rounded, and far below 2^53")]
#[expect(clippy::cast_sign_loss, reason = "counts and durations are not negative")]
fn whole(number: f64) -> u64 {
    number.round() as u64
}

/// How many requests make a second, more or less: what a HAProxy pair does on two cores.
const REDIS_PER_S: f64 = 50_000.0;

/// PostgreSQL with pgbench's tables, as the distribution configures it but for who may come in. It
/// does not run as root.
const POSTGRES: &str = "\
    bin=$(ls -d /usr/lib/postgresql/*/bin | tail -1)\n\
    as() { setpriv --reuid=postgres --regid=postgres --clear-groups \\\n\
        setpriv --pdeathsig KILL \"$@\"; }\n\
    install -d -o postgres $folder/postgres\n\
    cd $folder/postgres\n\
    as $bin/initdb --pgdata=data --auth=trust >&2\n\
    echo 'host all all 0.0.0.0/0 trust' >>data/pg_hba.conf\n\
    as $bin/pg_ctl --pgdata=data --wait --options=\"-k $folder/postgres -h ''\" start >&2\n\
    as $bin/pgbench --host=$folder/postgres --initialize --quiet postgres >&2\n\
    as $bin/pg_ctl --pgdata=data --wait stop >&2\n\
    exec setpriv --reuid=postgres --regid=postgres --clear-groups setpriv --pdeathsig KILL \\\n\
        $bin/postgres -D data -p $port -k $folder/postgres -h 0.0.0.0\n";

#[cfg(test)]
mod tests {
    use super::*;

    /// These become published figures, in units that differ from program to program.
    #[test]
    fn reports_are_read_with_their_units() {
        let json = r#"{"end":{"sum_received":{"seconds":2.0,"bytes":1000000000,
            "bits_per_second":4000000000.0}}}"#;
        let stream = Program::Iperf3.parse(json).unwrap();
        assert_eq!((stream.gbit_per_s, stream.bytes_total), (Some(4.0), 1_000_000_000));
        assert_eq!(stream.connections_opened, 2);

        let text = "sockperf: [Total Run] RunTime=1.000 sec; SentMessages=2; ReceivedMessages=1\n\
            sockperf: [Valid Duration] RunTime=0.500 sec; SentMessages=9; ReceivedMessages=8250\n\
            sockperf: \x1b[2;35m====> avg-rtt=66.983 (std-dev=34.274)\x1b[0m\n\
            sockperf: ---> <MAX> observation = 1581.664\n\
            sockperf: ---> percentile 99.900 =  263.188\n\
            sockperf: ---> percentile 99.000 =  120.837\n\
            sockperf: ---> percentile 90.000 =   86.199\n\
            sockperf: ---> percentile 50.000 =   74.017\n\
            sockperf: ---> <MIN> observation =    4.708\n";
        let pings = Program::Sockperf.parse(text).unwrap();
        assert_eq!((pings.requests_total, pings.requests_per_s), (8_250, Some(16_500.0)));
        let latency = pings.latency.unwrap();
        assert_eq!(
            (latency.p50_ns, latency.p99_ns, latency.min_ns),
            (74_017, 120_837, Some(4_708))
        );

        let text = "====== GET ======\n  100000 requests completed in 0.50 seconds\n\
            Summary:\n  throughput summary: 200000.00 requests per second\n\
            \x20 latency summary (msec):\n\
            \x20         avg       min       p50       p95       p99       max\n\
            \x20       0.124     0.024     0.119     0.159     0.255     1.055\n";
        let gets = Program::Redis.parse(text).unwrap();
        assert_eq!((gets.requests_total, gets.requests_per_s), (100_000, Some(200_000.0)));
        assert_eq!(gets.latency.unwrap().p99_ns, 255_000);

        let text = "number of transactions actually processed: 30000\n\
            number of failed transactions: 3 (0.010%)\nlatency average = 0.8 ms\n\
            tps = 10000.000000 (without initial connection time)\n";
        let transactions = Program::Pgbench.parse(text).unwrap();
        assert_eq!((transactions.requests_total, transactions.errors), (30_000, 3));
        assert!((transactions.elapsed_s - 3.0).abs() < 1e-9);
    }

    /// A program that could not connect has printed something else.
    #[test]
    fn a_report_without_figures_is_an_error() {
        for program in Program::ALL {
            let error = program.parse("connection refused").unwrap_err();
            assert!(error.starts_with(&format!("{} printed no ", program.name())), "{error}");
        }
    }
}
