//! `smcgate doctor --peer ADDRESS`: is SMC-R to that peer faster than TCP.
//!
//! The running gateway opens two listeners for a while, one of which connects by SMC-R, and the
//! other by TCP. Through each of them we measure with the server behind the peer's listener, in
//! turn, so that both see the same network and the same load.

use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::process::ExitCode;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;
use smcr_engine::clock::Clock;

use crate::measure::{DOWN, ROUND_TRIPS, UP};
use crate::operate::Operation;
use crate::stats::ConnectionQuery;
use crate::tools::client::Client;

/// Measures, and prints both transports side by side. Succeeds if SMC-R is used and is not slower.
///
/// # Errors
///
/// With one line, if nothing could be measured.
pub fn run(peer: SocketAddr, admin: SocketAddr, json: bool) -> Result<ExitCode, String> {
    let client = Client::new(admin);
    let doors = client.operate(&Operation::Measure { peer });
    let doors = doors.map_err(|error| error.to_string())?;
    let door = |name: &str| {
        let found = doors.iter().find_map(|note| note.strip_prefix(name)?.trim().parse().ok());
        found.ok_or_else(|| format!("the gateway has opened no listener for {name}"))
    };
    let (smc, tcp): (SocketAddr, SocketAddr) = (door("smc")?, door("tcp")?);
    let clock = Clock::new();
    let mut figures = [Figures::default(), Figures::default()];
    let before = fallback(&client, smc, peer)?;
    for _ in 0..ROUNDS {
        for (door, figures) in [smc, tcp].into_iter().zip(&mut figures) {
            figures.measure(clock, door).map_err(|error| no_answer(peer, &error))?;
        }
    }
    // Meanwhile it may have come to an end.
    let why = before.or(fallback(&client, smc, peer)?);
    let [smc, tcp] = figures.map(|figures| figures.medians());
    let report = Report { schema: 1, peer, fallback: why, slower: slower(&smc, &tcp), smc, tcp };
    let text = if json {
        serde_json::to_string_pretty(&report).expect("strings and numbers only") + "\n"
    } else {
        report.text()
    };
    // A reader that has seen enough, such as `head`, is no reason to fail.
    let _ = io::stdout().write_all(text.as_bytes());
    let is_good = report.fallback.is_none() && report.slower.is_empty();
    Ok(if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Why connections to the peer are not SMC-R; none if they are.
fn fallback(client: &Client, door: SocketAddr, peer: SocketAddr) -> Result<Option<String>, String> {
    let probe = || {
        let mut one = connect(door, ROUND_TRIPS)?;
        one.write_all(&[0])?;
        // By the first answer it is decided.
        one.read_exact(&mut [0])?;
        Ok((one.local_addr()?.to_string(), one))
    };
    let (own, _connection) = probe().map_err(|error| no_answer(peer, &error))?;
    let query =
        ConnectionQuery { listener: Some("doctor-smc".to_owned()), ..ConnectionQuery::default() };
    let page = client.all_connections(&query).map_err(|error| error.to_string())?;
    let reason = |name: Option<String>| name.unwrap_or_else(|| "no reason given".to_owned());
    let row = page.connections.into_iter().find(|row| row.app == own);
    let row = row.ok_or("the gateway does not show the connection that was made")?;
    Ok(row.link_group.is_none().then(|| reason(row.fallback.map(|it| it.name))))
}

fn no_answer(peer: SocketAddr, error: &io::Error) -> String {
    format!(
        "nobody measures at {peer} ({error}): the gateway there needs a listener with accept = \
         \"smc\" and upstream = \"measure\" at this address"
    )
}

/// Bytes per second and nanoseconds, one of each round.
#[derive(Debug, Default)]
struct Figures {
    round_trip_p50: Vec<u64>,
    round_trip_p99: Vec<u64>,
    up: Vec<u64>,
    down: Vec<u64>,
}

/// What was measured of one transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct Medians {
    round_trip_ns_p50: u64,
    round_trip_ns_p99: u64,
    up_bytes_per_s: u64,
    down_bytes_per_s: u64,
}

#[derive(Debug, Serialize)]
struct Report {
    schema: u32,
    peer: SocketAddr,
    /// Why SMC-R was not used.
    fallback: Option<String>,
    /// In what SMC-R is slower.
    slower: Vec<&'static str>,
    smc: Medians,
    tcp: Medians,
}

impl Figures {
    /// One round through `door`.
    fn measure(&mut self, clock: Clock, door: SocketAddr) -> io::Result<()> {
        let times = round_trips(clock, door)?;
        self.round_trip_p50.push(times.value_at_quantile(0.5));
        self.round_trip_p99.push(times.value_at_quantile(0.99));
        self.up.push(upload(clock, door)?);
        self.down.push(download(clock, door)?);
        Ok(())
    }

    fn medians(mut self) -> Medians {
        let middle = |values: &mut Vec<u64>| {
            values.sort_unstable();
            values[values.len() / 2]
        };
        Medians {
            round_trip_ns_p50: middle(&mut self.round_trip_p50),
            round_trip_ns_p99: middle(&mut self.round_trip_p99),
            up_bytes_per_s: middle(&mut self.up),
            down_bytes_per_s: middle(&mut self.down),
        }
    }
}

/// In what SMC-R is slower by more than a tenth, which is what rounds differ in anyway.
fn slower(smc: &Medians, tcp: &Medians) -> Vec<&'static str> {
    let much_more = |larger: u64, smaller: u64| larger / 11 > smaller / 10;
    let found = [
        ("round trip", much_more(smc.round_trip_ns_p50, tcp.round_trip_ns_p50)),
        ("to the peer", much_more(tcp.up_bytes_per_s, smc.up_bytes_per_s)),
        ("from the peer", much_more(tcp.down_bytes_per_s, smc.down_bytes_per_s)),
    ];
    found.into_iter().filter(|(_, is_slower)| *is_slower).map(|(what, _)| what).collect()
}

impl Report {
    fn text(&self) -> String {
        let micros = |nanos: u64| format!("{:.1} us", nanos as f64 / 1e3);
        let gigabits = |bytes: u64| format!("{:.2} Gbit/s", bytes as f64 * 8.0 / 1e9);
        let (smc, tcp) = (&self.smc, &self.tcp);
        let mut text = format!("{:<22}{:>16}{:>16}\n", self.peer.to_string(), "SMC-R", "TCP");
        for (what, smc, tcp) in [
            ("round trip, p50", micros(smc.round_trip_ns_p50), micros(tcp.round_trip_ns_p50)),
            ("round trip, p99", micros(smc.round_trip_ns_p99), micros(tcp.round_trip_ns_p99)),
            ("to the peer", gigabits(smc.up_bytes_per_s), gigabits(tcp.up_bytes_per_s)),
            ("from the peer", gigabits(smc.down_bytes_per_s), gigabits(tcp.down_bytes_per_s)),
        ] {
            let _ = writeln!(text, "{what:<22}{smc:>16}{tcp:>16}");
        }
        text + &match (&self.fallback, &self.slower[..]) {
            (Some(why), _) => {
                format!("WARN  SMC-R was not used ({why}): both columns are TCP\n")
            }
            (None, []) => "OK    SMC-R is used, and is not slower than TCP\n".to_owned(),
            (None, slower) => format!(
                "WARN  SMC-R is slower than TCP in: {}; with prefer = \"fastest\" connections stay \
                 TCP as long as that lasts\n",
                slower.join(", ")
            ),
        }
    }
}

fn connect(door: SocketAddr, wish: u8) -> io::Result<TcpStream> {
    let mut server = TcpStream::connect_timeout(&door, LIMIT)?;
    server.set_nodelay(true)?;
    server.set_read_timeout(Some(LIMIT))?;
    server.set_write_timeout(Some(LIMIT))?;
    server.write_all(&[wish])?;
    Ok(server)
}

/// How long 64 bytes take there and back.
fn round_trips(clock: Clock, door: SocketAddr) -> io::Result<Histogram<u64>> {
    let mut server = connect(door, ROUND_TRIPS)?;
    let most = u64::try_from(LIMIT.as_nanos()).expect("seconds");
    let mut times = Histogram::new_with_max(most, 3).expect("three digits are allowed");
    let mut bytes = [0; 64];
    let end = clock.now() + TIME;
    while clock.now() < end {
        let began = clock.now();
        server.write_all(&bytes)?;
        server.read_exact(&mut bytes)?;
        let nanos = u64::try_from(clock.now().since(began).as_nanos()).unwrap_or(u64::MAX);
        times.saturating_record(nanos);
    }
    Ok(times)
}

/// Bytes per second to the peer, until its server has said that it has them.
fn upload(clock: Clock, door: SocketAddr) -> io::Result<u64> {
    let mut server = connect(door, UP)?;
    let bytes = vec![0; PORTION];
    let (began, mut sent) = (clock.now(), 0);
    while clock.now().since(began) < TIME {
        server.write_all(&bytes)?;
        sent += bytes.len() as u64;
    }
    server.shutdown(Shutdown::Write)?;
    // What is buffered on the way arrives first.
    server.set_read_timeout(Some(UPLOAD_LIMIT))?;
    let mut count = [0; 8];
    server.read_exact(&mut count)?;
    if u64::from_be_bytes(count) != sent {
        return Err(io::Error::other("its server counts other bytes than were sent"));
    }
    Ok(per_second(sent, clock.now().since(began)))
}

/// Bytes per second from the peer.
fn download(clock: Clock, door: SocketAddr) -> io::Result<u64> {
    let mut server = connect(door, DOWN)?;
    let mut bytes = vec![0; PORTION];
    let (began, mut received) = (clock.now(), 0);
    while clock.now().since(began) < TIME {
        match server.read(&mut bytes)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            len => received += len as u64,
        }
    }
    Ok(per_second(received, clock.now().since(began)))
}

fn per_second(bytes: u64, time: Duration) -> u64 {
    let per_second = u128::from(bytes) * 1_000_000_000 / time.as_nanos().max(1);
    u64::try_from(per_second).unwrap_or(u64::MAX)
}

/// Each transport in turn, so often.
const ROUNDS: usize = 3;
/// How long each of the three parts of a round takes.
const TIME: Duration = Duration::from_millis(500);
/// Whoever is silent for longer does not answer.
const LIMIT: Duration = Duration::from_secs(5);
/// How long the peer may take for what was sent but had not arrived.
const UPLOAD_LIMIT: Duration = Duration::from_secs(15);
/// Bytes that are read or written at once.
const PORTION: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    const LEVEL: Medians = Medians {
        round_trip_ns_p50: 100_000,
        round_trip_ns_p99: 200_000,
        up_bytes_per_s: 1_000_000_000,
        down_bytes_per_s: 1_000_000_000,
    };

    /// A warning that says nothing new each time is not read any more.
    #[test]
    fn small_differences_are_none() {
        assert_eq!(slower(&LEVEL, &LEVEL), [""; 0]);
        let near = Medians { round_trip_ns_p50: 109_000, up_bytes_per_s: 920_000_000, ..LEVEL };
        assert_eq!(slower(&near, &LEVEL), [""; 0]);
        let far = Medians { round_trip_ns_p50: 112_000, down_bytes_per_s: 890_000_000, ..LEVEL };
        assert_eq!(slower(&far, &LEVEL), ["round trip", "from the peer"]);
    }

    #[test]
    fn both_are_shown_side_by_side() {
        let smc = Medians { round_trip_ns_p50: 25_100, ..LEVEL };
        let peer = "10.8.0.2:7700".parse().unwrap();
        let report = Report {
            schema: 1,
            peer,
            fallback: None,
            slower: slower(&smc, &LEVEL),
            smc,
            tcp: LEVEL,
        };
        assert_eq!(
            report.text(),
            "10.8.0.2:7700                    SMC-R             TCP\n\
             round trip, p50                25.1 us        100.0 us\n\
             round trip, p99               200.0 us        200.0 us\n\
             to the peer                8.00 Gbit/s     8.00 Gbit/s\n\
             from the peer              8.00 Gbit/s     8.00 Gbit/s\n\
             OK    SMC-R is used, and is not slower than TCP\n"
        );
        let report = Report { fallback: Some("NO_ROCE_PATH".to_owned()), ..report };
        assert!(report.text().contains("NO_ROCE_PATH"));
    }
}
