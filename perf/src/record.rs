//! Result files of JSON lines: the first line describes the machine, each other one a measurement.
//! Field names end with their unit.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::beside::Beside;
use crate::failure::{Doing as _, Failure, Result};
use crate::latency::Latency;
use crate::machine::Machine;
use crate::rig::paths::Pin;
use crate::rig::time_wait::TimeWaits;
use crate::scenarios::Scenario;

/// Version of the format of a line. Fields may be added without changing it.
pub(crate) const SCHEMA: u32 = 1;

/// Behind the path of measurements of the build that others are compared with.
pub(crate) const BEFORE: &str = "@before";

/// One line.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "record", rename_all = "snake_case")]
pub(crate) enum Record {
    Machine(Box<Machine>),
    Measurement(Box<Measurement>),
}

/// The result of one workload over one path in one round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Measurement {
    /// [`SCHEMA`].
    pub(crate) schema: u32,
    /// Name of the workload: `RR-32`, `STR`, …
    pub(crate) scenario: String,
    /// `direct`, `haproxy`, `smcgate`, or `smcgate-` and a kind of RNIC; with [`BEFORE`] behind it,
    /// where the gateways are those that the others are compared with.
    pub(crate) path: String,
    /// The busy loops beside the measurement: `alone`, or `LOOPS@NICE`.
    #[serde(default = "alone")]
    pub(crate) beside: String,
    /// Where the gateways' pollers ran: `auto`, `fixed` or `off`.
    #[serde(default = "fixed")]
    pub(crate) pin: String,
    /// Who chose the congestion control of connections with the gateways on loopback: `auto`, they
    /// did; `host`, also before they could.
    #[serde(default = "host")]
    pub(crate) local: String,
    /// The gateways' `[poll] policy`.
    #[serde(default = "adaptive")]
    pub(crate) poll: String,
    /// Whether the programs had sessions of their `own`, or `one` together.
    #[serde(default = "one")]
    pub(crate) sessions: String,
    /// How long programs watched their rings before they slept; none: as they decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) spin_us: Option<u32>,
    /// Whether the gateways kept what they may do.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) unconfined: bool,
    /// 1 is the first round.
    pub(crate) round: u32,
    /// The time in which throughput and latency were measured.
    pub(crate) elapsed_s: f64,
    /// The time in which work, packets and memory were observed: from before the load began until
    /// after it ended. None in older files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) observed_s: Option<f64>,
    pub(crate) connections: u32,
    /// Bytes of a request, or of a write of a stream.
    pub(crate) message_bytes: Option<usize>,
    /// TCP congestion control of both namespaces.
    pub(crate) congestion_control: String,
    pub(crate) gbit_per_s: Option<f64>,
    pub(crate) requests_per_s: Option<f64>,
    /// Of the stream beside short connections.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) beside_gbit_per_s: Option<f64>,
    /// Round trips; in CRR, from connect to the server's close.
    pub(crate) rtt: Option<Latency>,
    /// Half a round trip, with one connection only.
    pub(crate) one_way_p50_ns: Option<u64>,
    pub(crate) one_way_p99_ns: Option<u64>,
    pub(crate) bytes_total: u64,
    pub(crate) requests_total: u64,
    pub(crate) connections_opened: u64,
    /// Connections or requests that failed.
    pub(crate) errors: u64,
    /// User and system time of both proxies; zero where there is none.
    pub(crate) cpu_s_proxies: f64,
    /// Busy time of all cores: proxies, applications, interrupts, and whatever else ran, except
    /// the busy loops that the harness started.
    pub(crate) cpu_s_machine: f64,
    /// Resident size before the load, the sum of both proxies; zero in older files.
    #[serde(default)]
    pub(crate) rss_bytes_proxies_before: u64,
    /// Largest resident size that each had during the load, the sum of both; in older files, since
    /// the run began.
    pub(crate) peak_rss_bytes_proxies: u64,
    /// Resident size, the sum of both, when most connections had been idle for seconds; none of
    /// other loads, and in older files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rss_bytes_proxies_at_rest: Option<u64>,
    /// How often threads of both proxies went to sleep; none in older files.
    #[serde(default)]
    pub(crate) sleeps_proxies: Option<u64>,
    /// How often they lost their cores to others, or offered them.
    #[serde(default)]
    pub(crate) preemptions_proxies: Option<u64>,
    /// System calls of both proxies per second, if they were counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) calls_per_s_proxies: Option<f64>,
    /// How many connections gateway A made over SMC-R during this measurement.
    pub(crate) connections_smc: Option<u64>,
    /// How many stayed TCP. Always zero in a file, because otherwise the run fails.
    pub(crate) connections_tcp: Option<u64>,
    /// RoCE packets that gateway A received and sent during this measurement. Shared memory has
    /// none.
    #[serde(default)]
    pub(crate) packets: Option<u64>,
    /// Short connections per second in each 5 seconds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) per_s_each_5s: Vec<f64>,
    /// Connections in TIME_WAIT when a sustained load ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) time_waits: Option<TimeWaits>,
}

/// The value for older files, whose measurements all ran alone.
fn alone() -> String {
    Beside::default().to_string()
}

/// The value for older files, whose gateways all ran on fixed cores.
fn fixed() -> String {
    Pin::Fixed.to_string()
}

/// The value for older files.
fn adaptive() -> String {
    "adaptive".to_owned()
}

/// The value for older files.
fn one() -> String {
    "one".to_owned()
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_false(value: &bool) -> bool {
    !value
}

/// The value for older files.
fn host() -> String {
    "host".to_owned()
}

impl Measurement {
    /// Short connections per second in the last 20 s over those in the first 20 s.
    pub(crate) fn endurance(&self) -> Option<f64> {
        let rates = &self.per_s_each_5s;
        if rates.len() < 2 * ENDURANCE_INTERVALS {
            return None;
        }
        let first: f64 = rates[..ENDURANCE_INTERVALS].iter().sum();
        let last: f64 = rates[rates.len() - ENDURANCE_INTERVALS..].iter().sum();
        (first > 0.0).then(|| last / first)
    }

    /// The workload's label in tables: its name, the busy loops beside it, and whether they and
    /// the programs have sessions of their own.
    pub(crate) fn label(&self) -> String {
        let mut label = self.scenario.clone();
        if self.beside != alone() {
            label += &format!(" beside {}", self.beside);
        }
        if self.sessions != one() {
            label += &format!(" ({} sessions)", self.sessions);
        }
        label
    }

    /// Whether the work of proxies and machine was for nothing but the requests or the bytes that
    /// were measured.
    pub(crate) fn can_divide_work(&self) -> bool {
        // Nobody knows what was for a stream and what for the requests beside it, or what was for a
        // crowd that came and settled before the requests.
        self.beside_gbit_per_s.is_none() && !self.is_beside_crowd()
    }

    /// The time in which packets were counted. In older files it is almost that of the measurement,
    /// except where a crowd came before it: then it is unknown.
    pub(crate) fn counted_s(&self) -> Option<f64> {
        self.observed_s.or_else(|| (!self.is_beside_crowd()).then_some(self.elapsed_s))
    }

    fn is_beside_crowd(&self) -> bool {
        self.scenario.parse::<Scenario>().is_ok_and(Scenario::is_idle)
    }

    /// `cpu_s` per gigabyte (10⁹ bytes) of a stream.
    pub(crate) fn per_gb(&self, cpu_s: f64) -> Option<f64> {
        self.gbit_per_s?;
        (self.bytes_total > 0).then(|| cpu_s / (self.bytes_total as f64 / 1e9))
    }

    /// `cpu_s` per million requests.
    pub(crate) fn per_million_requests(&self, cpu_s: f64) -> Option<f64> {
        (self.requests_total > 0).then(|| cpu_s / (self.requests_total as f64 / 1e6))
    }
}

/// How many intervals make 20 s.
const ENDURANCE_INTERVALS: usize = 4;

/// A result file in memory.
#[derive(Debug)]
pub(crate) struct Results {
    pub(crate) machine: Machine,
    pub(crate) measurements: Vec<Measurement>,
}

impl Results {
    /// The file's text.
    pub(crate) fn to_json_lines(&self) -> String {
        let machine = Record::Machine(Box::new(self.machine.clone()));
        let measurements = self.measurements.iter().cloned().map(Box::new);
        let records = std::iter::once(machine).chain(measurements.map(Record::Measurement));
        records
            .map(|record| serde_json::to_string(&record).expect("records are plain data") + "\n")
            .collect()
    }

    /// Reads a file.
    ///
    /// # Errors
    ///
    /// When a line is not a record, which the message names, or when the file describes no machine.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).doing(|| format!("reading {}", path.display()))?;
        let mut machine = None;
        let mut measurements = Vec::new();
        for (number, line) in text.lines().enumerate() {
            match serde_json::from_str(line)
                .doing(|| format!("{}:{}", path.display(), number + 1))?
            {
                Record::Machine(description) => machine = Some(*description),
                Record::Measurement(measurement) => measurements.push(*measurement),
            }
        }
        let machine =
            machine.ok_or_else(|| Failure::new(format!("{} has no machine", path.display())))?;
        Ok(Self { machine, measurements })
    }

    /// Checks that each scenario has been measured once over each path in each round.
    ///
    /// # Errors
    ///
    /// Which one is there twice. Medians of such a file, and the intervals around them, would be of
    /// rounds that never were.
    pub(crate) fn check_rounds(&self) -> Result<()> {
        let mut seen = HashSet::new();
        for measurement in &self.measurements {
            let Measurement { path, round, .. } = measurement;
            let label = measurement.label();
            if !seen.insert((label.clone(), path, round)) {
                return Err(Failure::new(format!(
                    "{label} over {path} is there twice in round {round}: are these several runs \
                     in one file?"
                )));
            }
        }
        Ok(())
    }
}

/// The median of `values`. For an even number of them, the mean of the two in the middle.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(sorted[half]),
        _ => Some(f64::midpoint(sorted[half - 1], sorted[half])),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A measurement whose figures the tests of reports vary.
    pub(crate) fn measurement(scenario: &str, path: &str, round: u32) -> Measurement {
        Measurement {
            schema: SCHEMA,
            scenario: scenario.into(),
            path: path.into(),
            beside: alone(),
            pin: fixed(),
            local: host(),
            poll: adaptive(),
            sessions: one(),
            spin_us: None,
            unconfined: false,
            round,
            elapsed_s: 3.0,
            observed_s: None,
            connections: 1,
            message_bytes: Some(64),
            congestion_control: "bbr".into(),
            gbit_per_s: None,
            requests_per_s: None,
            beside_gbit_per_s: None,
            rtt: None,
            one_way_p50_ns: None,
            one_way_p99_ns: None,
            bytes_total: 0,
            requests_total: 0,
            connections_opened: 1,
            errors: 0,
            cpu_s_proxies: 0.0,
            cpu_s_machine: 0.0,
            rss_bytes_proxies_before: 0,
            peak_rss_bytes_proxies: 0,
            rss_bytes_proxies_at_rest: None,
            sleeps_proxies: None,
            preemptions_proxies: None,
            calls_per_s_proxies: None,
            connections_smc: None,
            connections_tcp: None,
            packets: None,
            per_s_each_5s: Vec::new(),
            time_waits: None,
        }
    }

    /// A made-up machine.
    pub(crate) fn machine() -> Machine {
        Machine {
            date: "2026-11-21T00:00:00Z".into(),
            commit: "0123456789ab".into(),
            commit_before: String::new(),
            version: "smcgate 0.1.0".into(),
            version_before: String::new(),
            cpu_model: "Abacus".into(),
            cores: 2,
            memory_bytes: 1 << 33,
            kernel: "6.18".into(),
            congestion_control: "bbr".into(),
            mtu_bytes: 1500,
            programs: Vec::new(),
            settings: vec!["net.core.somaxconn = 4096".into()],
        }
    }

    /// One outlier round must not decide a published figure.
    #[test]
    fn medians_ignore_outliers() {
        assert_eq!(median([3.0, 1000.0, 1.0]), Some(3.0));
        assert_eq!(median([4.0, 1.0, 2.0, 1000.0]), Some(3.0));
        assert_eq!(median([]), None);
    }

    /// Two runs in one file have each round twice, and the intervals of medians would say that
    /// there were twice as many.
    #[test]
    fn a_round_that_is_there_twice_is_refused() {
        let beside = Measurement { beside: "1@5".into(), ..measurement("RR-1", "smcgate", 1) };
        let mut measurements = vec![
            measurement("RR-1", "smcgate", 1),
            measurement("RR-1", "smcgate", 2),
            measurement("RR-1", "smcgate@before", 1),
            measurement("RR-1", "haproxy", 1),
            beside,
        ];
        let check = |measurements: &[Measurement]| {
            Results { machine: machine(), measurements: measurements.to_vec() }.check_rounds()
        };
        check(&measurements).unwrap();
        measurements.push(measurement("RR-1", "smcgate", 2));
        let failure = check(&measurements).unwrap_err().to_string();
        assert!(failure.contains("RR-1 over smcgate is there twice in round 2"), "{failure}");
    }

    /// `report` and `compare` must read files that `run` wrote long ago.
    #[test]
    fn files_read_back_what_was_written() {
        let mut stream = measurement("STR", "smcgate", 2);
        stream.gbit_per_s = Some(17.5);
        stream.bytes_total = 2_000_000_000;
        let results = Results { machine: machine(), measurements: vec![stream] };
        let path = std::env::temp_dir().join(format!("records-{}.jsonl", std::process::id()));
        fs::write(&path, results.to_json_lines()).unwrap();
        let read = Results::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert_eq!(read.to_json_lines(), results.to_json_lines());
        assert_eq!(read.measurements[0].per_gb(3.0), Some(1.5));
        assert_eq!(read.measurements[0].per_million_requests(3.0), None);
    }
}
