//! The command line: parses the arguments and calls the module that carries them out.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::again::Answers;
use crate::beside::{Beside, burn};
use crate::failure::{Doing as _, Failure, Result};
use crate::record::Results;
use crate::rig::janitor::clean;
use crate::rig::paths::{Path, Pin};
use crate::run::{Plan, run};
use crate::scenarios::{
    LoadResult, Scenario, crowd, open_loop, round_trip, short_connections as crr, stream,
};
use crate::serve::{Behaviour, listen, serve};
use crate::{compare, plot, report};

/// Measures smcgate against direct TCP and HAProxy.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Measure, in two network namespaces of its own (needs root); print a Markdown table.
    Run(RunArguments),
    /// Print the table of a result file again.
    Report { file: PathBuf },
    /// Draw a result file as SVG: distributions of latency, and growth with connections.
    Plot {
        file: PathBuf,
        /// The folder for the pictures.
        #[arg(long)]
        out: PathBuf,
    },
    /// Print the medians of two result files side by side. Where the machine is uneven, measure
    /// both builds in one run instead: `run --before`.
    Compare { before: PathBuf, after: PathBuf },
    /// Serve until killed.
    Serve {
        behaviour: Behaviour,
        #[arg(long)]
        listen: SocketAddr,
    },
    /// Load a server and print the result.
    Load(LoadArguments),
    /// Wait for the end of standard input, then remove a folder and network namespaces.
    #[command(hide = true)]
    Clean { folder: PathBuf, namespaces: Vec<String> },
    /// Keep a core busy until killed.
    #[command(hide = true)]
    Burn,
    /// Print the body of an HTTP server's answer to GET, if the status is 200.
    Get {
        #[arg(long)]
        target: SocketAddr,
        #[arg(long)]
        path: String,
        /// Ask again and again, this long after each answer, until killed. Answers that do not come
        /// are counted.
        #[arg(long, value_parser = parse_seconds)]
        every: Option<Duration>,
    },
}

#[derive(Debug, Args)]
struct RunArguments {
    /// Workloads: RR-n, RR-nxb (requests of b bytes instead of 64), RRO-n@r (r requests per
    /// second), BURST-n (newcomers), IDLE-n (RR-1 beside idle connections), SCRAPED-n (the
    /// same, while metrics are read), STR, STR-cubic, STR-reverse, FANIN-n (streams at once), CRR,
    /// CRR-beside-STR, CRR-sustained (a minute at least), CRR-sustained-client (clients close
    /// first); and with programs of others RR-32-http
    /// and CRR-http (wrk, nginx), iperf3, sockperf, redis, pgbench.
    #[arg(long, value_delimiter = ',', default_value = "RR-1,RR-32,STR,CRR")]
    scenarios: Vec<Scenario>,
    /// direct, haproxy, nginx (its stream module), smcgate (RNICs of kind roce-udp), smcgate-shm,
    /// smcgate-packet (of kind roce-packet), smcgate-af-packet and smcgate-memif (both of dpdk);
    /// preload and preload-shm (load and server have the preload library), preload-rings and
    /// preload-rings-shm (and their bytes go by shared memory); host-direct, host-preload and
    /// host-rings (load and server on one host; with the library, one gateway, its RNIC of shm).
    #[arg(long, value_delimiter = ',', default_value = "direct,haproxy,smcgate")]
    paths: Vec<Path>,
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Length of each measurement.
    #[arg(long, default_value = "3", value_parser = parse_seconds)]
    seconds: Duration,
    /// The gateway's binary; by default the one in this binary's folder.
    #[arg(long)]
    smcgate: Option<PathBuf>,
    /// The binary of another build. On every path with gateways, it is measured in turn with the
    /// one above, and a table compares the two, round by round.
    #[arg(long, value_name = "BINARY")]
    before: Option<PathBuf>,
    /// Of which commit the gateway's binary is. Without this, it is known only of a binary in the
    /// folder `target` of its repository.
    #[arg(long, value_name = "COMMIT")]
    commit: Option<String>,
    /// Of which commit the other build is.
    #[arg(long, value_name = "COMMIT", requires = "before")]
    before_commit: Option<String>,
    /// Count the system calls of proxies, too, with `perf` (`scripts/setup perf` installs it). It
    /// slows them. Only for loads that are the same from their first moments to their end.
    #[arg(long)]
    calls: bool,
    /// On the paths with rings, programs watch them for so many microseconds before they sleep; by
    /// default as long as they find worth it.
    #[arg(long, value_name = "MICROSECONDS")]
    spin: Option<u32>,
    /// The gateways' idle policy.
    #[arg(long, default_value = "adaptive", value_parser = ["spin", "adaptive", "block"])]
    poll: String,
    /// Cores of the gateways' pollers: auto (they choose), fixed (one core each) or off (the
    /// scheduler decides).
    #[arg(long, default_value = "auto")]
    pin: Pin,
    /// Who chooses the congestion control of connections with the gateways on loopback: auto (they
    /// do), or host.
    #[arg(long, default_value = "auto", value_parser = ["auto", "host"])]
    local: String,
    /// Sessions of the programs: one (that of the harness), or own (each its own, as services
    /// have). Where the kernel groups by session (autogroup), a nice value means nothing to
    /// programs of other sessions.
    #[arg(long, default_value = "one", value_parser = ["one", "own"])]
    sessions: String,
    /// Gateways keep what they may do (`[confine]`): for tools that have them write files, as
    /// `scripts/profile` does.
    #[arg(long)]
    unconfined: bool,
    /// MTU of the network between the hosts.
    #[arg(
        long,
        default_value_t = 1500,
        value_parser = clap::value_parser!(u32).range(1280..=65_535)
    )]
    mtu: u32,
    /// Busy loops during the measurements: alone (none), or LOOPS@NICE.
    #[arg(long, value_delimiter = ',', default_value = "alone")]
    beside: Vec<Beside>,
    /// Date to write into the file; by default the present time.
    #[arg(long)]
    date: Option<String>,
    /// Write JSON lines here.
    #[arg(long)]
    out: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct LoadArguments {
    kind: LoadKind,
    #[arg(long)]
    target: SocketAddr,
    #[arg(long, default_value = "3", value_parser = parse_seconds)]
    seconds: Duration,
    /// Connections open at a time: 32 for crr, 1 otherwise, unless given.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    connections: Option<u32>,
    /// rr: bytes of a request.
    #[arg(long, default_value_t = round_trip::MESSAGE_BYTES, value_parser = parse_bytes)]
    bytes: usize,
    /// rr: send this many requests of 64 bytes per second instead of waiting for answers (open
    /// loop).
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    rate: Option<u32>,
    /// str: receive from a source instead of sending to a sink.
    #[arg(long)]
    reverse: bool,
    /// crr: beside a stream to this sink.
    #[arg(long)]
    beside: Option<SocketAddr>,
    /// crr: as a client that closes first, with an echo server.
    #[arg(long, conflicts_with = "beside")]
    closes_first: bool,
    /// str: congestion control of this end.
    #[arg(long)]
    congestion: Option<String>,
    /// Print one JSON object, histogram included.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LoadKind {
    /// Requests to an echo server.
    Rr,
    /// Newcomers at an echo server, all at once.
    Burst,
    /// Requests to an echo server on one connection, beside idle ones.
    Idle,
    /// One stream to a sink, or several.
    Str,
    /// Connect, request, response, close with a crr server.
    Crr,
}

/// Parses the arguments and carries them out.
///
/// # Errors
///
/// With the sentence to print before exit code 1.
pub(crate) fn dispatch() -> Result<()> {
    match Arguments::parse().command {
        Command::Run(arguments) => run(&plan(arguments)?),
        Command::Report { file } => {
            let results = Results::read(&file)?;
            results.check_rounds().doing(|| file.display().to_string())?;
            print!("{}", report::markdown(&results));
            Ok(())
        }
        Command::Plot { file, out } => {
            for name in plot::draw(&Results::read(&file)?, &out)? {
                println!("{}", out.join(name).display());
            }
            Ok(())
        }
        Command::Compare { before, after } => {
            let (before, after) = (Results::read(&before)?, Results::read(&after)?);
            print!("{}", compare::markdown(&before, &after));
            Ok(())
        }
        Command::Serve { behaviour, listen: address } => {
            let listener = listen(address)?;
            println!("serving {behaviour:?} on {address}");
            serve(behaviour, &listener)
        }
        Command::Load(arguments) => load(&arguments),
        Command::Clean { folder, namespaces } => {
            clean(&folder, &namespaces);
            Ok(())
        }
        Command::Burn => burn(),
        Command::Get { target, path, every: None } => {
            print!("{}", get(target, &path)?);
            Ok(())
        }
        Command::Get { target, path, every: Some(pause) } => {
            let mut answers = Answers::default();
            loop {
                print!("{}", answers.next(get(target, &path)));
                std::thread::sleep(pause);
            }
        }
    }
}

fn plan(arguments: RunArguments) -> Result<Plan> {
    let smcgate = match arguments.smcgate {
        Some(path) => path,
        None => {
            let myself = std::env::current_exe().doing(|| "finding this binary".into())?;
            myself.with_file_name("smcgate")
        }
    };
    if arguments.paths.iter().any(|path| path.rnic().is_some()) && !smcgate.exists() {
        return Err(Failure::new(format!(
            "{} is not there: build it, name it with --smcgate, or leave smcgate out of --paths",
            smcgate.display()
        )));
    }
    if let Some(before) = arguments.before.as_ref().filter(|before| !before.exists()) {
        return Err(Failure::new(format!("{} is not there", before.display())));
    }
    if let Some(scenario) = arguments.scenarios.iter().find(|scenario| !scenario.is_steady())
        && arguments.calls
    {
        return Err(Failure::new(format!(
            "{scenario}: --calls counts for a part of the time, and this load is not the same all \
             the time; leave one of them out"
        )));
    }
    Ok(Plan {
        scenarios: each_once(arguments.scenarios),
        rounds: arguments.rounds,
        duration: arguments.seconds,
        paths: each_once(arguments.paths),
        smcgate,
        before: arguments.before,
        commit: arguments.commit,
        before_commit: arguments.before_commit,
        is_counting_calls: arguments.calls,
        idle_policy: arguments.poll,
        pin: arguments.pin,
        local: arguments.local,
        spin_us: arguments.spin,
        sessions: arguments.sessions,
        unconfined: arguments.unconfined,
        mtu: arguments.mtu,
        beside: each_once(arguments.beside),
        date: arguments.date,
        out: arguments.out,
    })
}

/// The list without repetitions: what is named twice would have each of its rounds twice, and so
/// intervals that are too narrow. `RR-1` and `RR-1x64` are the same scenario.
fn each_once<T: PartialEq>(list: Vec<T>) -> Vec<T> {
    let mut once = Vec::new();
    for item in list {
        if !once.contains(&item) {
            once.push(item);
        }
    }
    once
}

fn load(arguments: &LoadArguments) -> Result<()> {
    let LoadArguments { target, seconds, connections, .. } = *arguments;
    let congestion = arguments.congestion.as_deref();
    let result = match (arguments.kind, arguments.rate) {
        (LoadKind::Rr, None) => {
            round_trip::run(target, connections.unwrap_or(1), arguments.bytes, seconds)
        }
        (LoadKind::Rr, Some(rate)) => {
            open_loop::run(target, connections.unwrap_or(1), rate, seconds)
        }
        (LoadKind::Burst, _) => crowd::burst(target, connections.unwrap_or(1)),
        (LoadKind::Idle, _) => {
            crowd::idle(target, connections.unwrap_or(1), crowd::SETTLE, seconds)
        }
        (LoadKind::Str, _) if arguments.reverse => stream::receive(target, congestion, seconds),
        (LoadKind::Str, _) => match connections {
            None | Some(1) => stream::send(target, congestion, seconds),
            Some(connections) => stream::fan_in(target, connections, seconds),
        },
        (LoadKind::Crr, _) => {
            let connections = connections.unwrap_or(crr::CONCURRENT);
            let closes_first =
                if arguments.closes_first { crr::Side::Client } else { crr::Side::Server };
            match arguments.beside {
                None => crr::run(target, closes_first, connections, seconds),
                Some(sink) => crr::run_beside(target, sink, connections, seconds),
            }
        }
    }?;
    if arguments.json {
        println!("{}", serde_json::to_string(&result).expect("results are plain data"));
    } else {
        println!("{}", sentence(&result));
    }
    Ok(())
}

fn parse_bytes(text: &str) -> std::result::Result<usize, String> {
    match text.parse() {
        Ok(bytes @ 1..=round_trip::MESSAGE_BYTES_MAX) => Ok(bytes),
        Ok(_) | Err(_) => Err(format!("write 1 to {}", round_trip::MESSAGE_BYTES_MAX)),
    }
}

/// A result as text for people.
fn sentence(result: &LoadResult) -> String {
    let mut parts = Vec::new();
    if let Some(gbit_per_s) = result.gbit_per_s {
        parts.push(format!("{gbit_per_s:.2} Gbit/s"));
    }
    if let Some(gbit_per_s) = result.beside_gbit_per_s {
        parts.push(format!("beside {gbit_per_s:.2} Gbit/s"));
    }
    if let Some(requests_per_s) = result.requests_per_s {
        parts.push(format!("{requests_per_s:.0} requests/s"));
    }
    if let Some(latency) = &result.latency {
        let us = |ns: u64| ns as f64 / 1e3;
        parts.push(format!("p50 {:.1} µs, p99 {:.1} µs", us(latency.p50_ns), us(latency.p99_ns)));
    }
    if result.errors > 0 {
        parts.push(format!("{} errors", result.errors));
    }
    parts.join(", ")
}

/// The body of the answer to `GET path`. HTTP/1.0 is used because there the end of the connection
/// ends the body.
fn get(target: SocketAddr, path: &str) -> Result<String> {
    let limit = Duration::from_secs(5);
    let mut stream =
        TcpStream::connect_timeout(&target, limit).doing(|| format!("connecting to {target}"))?;
    stream.set_read_timeout(Some(limit)).doing(|| "SO_RCVTIMEO".into())?;
    let request = format!("GET {path} HTTP/1.0\r\nHost: {target}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).doing(|| "sending the request".into())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).doing(|| "reading the answer".into())?;
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .ok_or_else(|| Failure::new(format!("{target} does not speak HTTP")))?;
    let status = head.lines().next().unwrap_or_default();
    if status.split_whitespace().nth(1) == Some("200") {
        Ok(body.to_owned())
    } else {
        Err(Failure::new(format!("GET {path}: {status}")))
    }
}

fn parse_seconds(text: &str) -> std::result::Result<Duration, String> {
    match text.parse() {
        Ok(seconds @ 0.01..=3600.0) => Ok(Duration::from_secs_f64(seconds)),
        Ok(_) | Err(_) => Err("expected seconds, from 0.01 to 3600".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::again::missed;

    /// A scrape that a busy gateway refuses must not end a run, and is told.
    #[test]
    fn an_answer_that_does_not_come_is_counted() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let target = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            for answer in ["200 OK\r\n\r\na 1\n", "503 Busy\r\n\r\nno\n", "200 OK\r\n\r\na 2\n"] {
                let (mut stream, _) = listener.accept().unwrap();
                let _ = stream.read(&mut [0; 512]).unwrap();
                stream.write_all(format!("HTTP/1.0 {answer}").as_bytes()).unwrap();
            }
        });
        let mut answers = Answers::default();
        let log: String = (0..3).map(|_| answers.next(get(target, "/metrics"))).collect();
        server.join().unwrap();
        let missed = missed(&log).unwrap().unwrap();
        assert!(missed.ends_with("1 of 2: GET /metrics: HTTP/1.0 503 Busy"), "{missed}");
        assert!(log.starts_with("a 1\n") && log.ends_with("a 2\n"), "{log}");
    }

    /// A scenario that is measured twice in each round has twice as many ratios, which are not
    /// independent: the interval around their median would be too narrow.
    #[test]
    fn what_is_named_twice_is_measured_once() {
        let line = "smcgate-perf run --scenarios RR-1,CRR,RR-1x64,RR-1 --paths direct,direct \
                    --beside alone,1@5,alone";
        let Command::Run(arguments) = Arguments::parse_from(line.split_whitespace()).command else {
            panic!("{line}");
        };
        let plan = plan(arguments).unwrap();
        let names: Vec<_> = plan.scenarios.iter().map(Scenario::to_string).collect();
        assert_eq!(names, ["RR-1", "CRR"]);
        assert_eq!((plan.paths.len(), plan.beside.len()), (1, 2));
    }
}
