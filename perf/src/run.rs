//! `run` measures every scenario over every path, interleaved, so that other activity on the
//! machine affects all paths alike.

use std::fs;
use std::ops::Add;
use std::path::PathBuf;
use std::time::Duration;

use crate::again::missed;
use crate::beside::Beside;
use crate::clock::{now_ns, ns, try_until};
use crate::failure::{Doing as _, Failure, Result};
use crate::machine::{Machine, Switches, commit_of, machine_cpu_s, version};
use crate::record::{BEFORE, Measurement, Results, SCHEMA};
use crate::report;
use crate::rig::bench::{Bench, Options};
use crate::rig::calls::Calls;
use crate::rig::namespaces::Host;
use crate::rig::paths::{Build, Path, Pin};
use crate::rig::process::Process;
use crate::rig::time_wait::TimeWaits;
use crate::rig::totals::GatewayTotals;
use crate::rig::watch::Watch;
use crate::scenarios::{Congestion, LoadResult, Scenario};

/// How long a gateway may take to count the connections that it has carried. Whether it is too busy
/// to answer, it says after two seconds.
const PROOF_LIMIT: Duration = Duration::from_secs(10);

/// What `run` measures, and where it writes the results.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) scenarios: Vec<Scenario>,
    pub(crate) rounds: u32,
    pub(crate) duration: Duration,
    pub(crate) paths: Vec<Path>,
    pub(crate) smcgate: PathBuf,
    /// Of which commit they are, if somebody says so.
    pub(crate) commit: Option<String>,
    /// The gateways that those are compared with.
    pub(crate) before: Option<PathBuf>,
    pub(crate) before_commit: Option<String>,
    pub(crate) is_counting_calls: bool,
    pub(crate) idle_policy: String,
    pub(crate) pin: Pin,
    pub(crate) local: String,
    /// How long programs watch their rings before they sleep, in microseconds; none: they decide.
    pub(crate) spin_us: Option<u32>,
    /// Whether programs have sessions of their `own`, or `one` together.
    pub(crate) sessions: String,
    pub(crate) unconfined: bool,
    pub(crate) mtu: u32,
    pub(crate) beside: Vec<Beside>,
    pub(crate) date: Option<String>,
    pub(crate) out: Option<PathBuf>,
}

/// Measures, writes the records, prints the table.
///
/// # Errors
///
/// When something cannot be started or measured, or when a connection through the gateways was
/// not SMC-R. Nothing is written then.
pub(crate) fn run(plan: &Plan) -> Result<()> {
    let mut bench = Bench::start(Options {
        paths: plan.paths.clone(),
        services: plan.scenarios.iter().map(|scenario| scenario.service()).collect(),
        smcgate: plan.smcgate.clone(),
        before: plan.before.clone(),
        idle_policy: plan.idle_policy.clone(),
        pin: plan.pin,
        local: plan.local.clone(),
        spin_us: plan.spin_us,
        own_sessions: plan.sessions == "own",
        unconfined: plan.unconfined,
        mtu: plan.mtu,
    })?;
    let (mtu, settings) = (bench.namespaces().mtu_bytes()?, bench.namespaces().settings()?);
    let mut machine = Machine::describe(plan.date.clone(), mtu, settings);
    machine.version = version(&plan.smcgate);
    machine.commit = plan.commit.clone().unwrap_or_else(|| commit_of(&plan.smcgate));
    if let Some(before) = &plan.before {
        machine.version_before = version(before);
        machine.commit_before = plan.before_commit.clone().unwrap_or_else(|| commit_of(before));
    }
    let mut measurements = Vec::new();
    for round in 1..=plan.rounds {
        for &scenario in &plan.scenarios {
            for &beside in &plan.beside {
                bench.run_beside(beside)?;
                for (path, build) in plan.subjects(round) {
                    bench.set_out(path, build)?;
                    let default = &machine.congestion_control;
                    let mut measurement =
                        measure(&mut bench, scenario, path, round, default, plan)?;
                    if build == Build::Before {
                        measurement.path += BEFORE;
                    }
                    eprintln!("{}", report::progress(&measurement));
                    measurements.push(measurement);
                }
            }
        }
    }
    drop(bench);
    let results = Results { machine, measurements };
    if let Some(out) = &plan.out {
        fs::write(out, results.to_json_lines()).doing(|| format!("writing {}", out.display()))?;
    }
    print!("{}", report::markdown(&results));
    Ok(())
}

impl Plan {
    /// What is measured in `round`, in its order. Of two builds, another one is first each time:
    /// whatever the first one leaves behind, the second one does not always meet it.
    fn subjects(&self, round: u32) -> Vec<(Path, Build)> {
        let builds: &[Build] = match (&self.before, round % 2) {
            (None, _) => &[Build::After],
            (Some(_), 0) => &[Build::After, Build::Before],
            (Some(_), _) => &[Build::Before, Build::After],
        };
        let of = |path: &Path| if path.rnic().is_some() { builds } else { &[Build::After] };
        self.paths.iter().flat_map(|path| of(path).iter().map(|&build| (*path, build))).collect()
    }
}

/// Measures one workload over one path in one round.
fn measure(
    bench: &mut Bench,
    scenario: Scenario,
    path: Path,
    round: u32,
    default_congestion: &str,
    plan: &Plan,
) -> Result<Measurement> {
    let congestion = match scenario.congestion() {
        Congestion::HostDefault => None,
        Congestion::Cubic => Some("cubic"),
    };
    bench.namespaces().use_congestion_control(congestion)?;
    if path.rnic().is_some() {
        bench.await_silence()?;
    }
    let seen = observe(bench, scenario, path, plan)?;
    let Observed { load, work, carried, .. } = seen;
    let rtt = load.latency;
    let one_way = |ns: u64| scenario.is_single_round_trip().then_some(ns / 2);
    Ok(Measurement {
        schema: SCHEMA,
        scenario: scenario.to_string(),
        path: path.to_string(),
        beside: bench.beside().to_string(),
        pin: plan.pin.to_string(),
        local: plan.local.clone(),
        poll: plan.idle_policy.clone(),
        sessions: plan.sessions.clone(),
        spin_us: plan.spin_us,
        unconfined: plan.unconfined,
        round,
        elapsed_s: load.elapsed_s,
        observed_s: Some(seen.observed_s),
        connections: scenario.connections(),
        message_bytes: scenario.message_bytes(),
        congestion_control: congestion.unwrap_or(default_congestion).to_owned(),
        gbit_per_s: load.gbit_per_s,
        requests_per_s: load.requests_per_s,
        beside_gbit_per_s: load.beside_gbit_per_s,
        one_way_p50_ns: rtt.as_ref().and_then(|rtt| one_way(rtt.p50_ns)),
        one_way_p99_ns: rtt.as_ref().and_then(|rtt| one_way(rtt.p99_ns)),
        rtt,
        bytes_total: load.bytes_total,
        requests_total: load.requests_total,
        connections_opened: load.connections_opened,
        errors: load.errors,
        cpu_s_proxies: work.map_or(0.0, |work| work.cpu_s),
        cpu_s_machine: seen.cpu_s_machine,
        rss_bytes_proxies_before: seen.rss_bytes_before,
        peak_rss_bytes_proxies: seen.peak_rss_bytes,
        rss_bytes_proxies_at_rest: seen.rss_bytes_at_rest,
        sleeps_proxies: work.map(|work| work.switches.sleeps),
        preemptions_proxies: work.map(|work| work.switches.preemptions),
        calls_per_s_proxies: seen.calls_per_s,
        connections_smc: carried.map(|carried| carried.connections_smc),
        connections_tcp: carried.map(|carried| carried.connections_tcp),
        packets: carried.map(|carried| carried.packets).filter(|packets| *packets > 0),
        per_s_each_5s: if scenario.is_sustained() { load.per_s_each_5s } else { Vec::new() },
        time_waits: seen.time_waits,
    })
}

/// What was seen while a load ran.
struct Observed {
    load: LoadResult,
    /// For how long.
    observed_s: f64,
    /// Of both proxies; none where there are none.
    work: Option<Work>,
    rss_bytes_before: u64,
    peak_rss_bytes: u64,
    /// Beside a crowd that rests.
    rss_bytes_at_rest: Option<u64>,
    calls_per_s: Option<f64>,
    cpu_s_machine: f64,
    /// By the gateways.
    carried: Option<GatewayTotals>,
    time_waits: Option<TimeWaits>,
}

/// Runs a load, and looks at the proxies and the machine before and behind it.
fn observe(bench: &mut Bench, scenario: Scenario, path: Path, plan: &Plan) -> Result<Observed> {
    let carried_before = gateway_totals(bench, path)?;
    let duration = scenario.duration(plan.duration);
    let is_counting = plan.is_counting_calls && !bench.proxies(path).is_empty();
    let calls = is_counting.then(|| bench.count_calls(path, duration)).transpose()?;
    let began = now_ns();
    let before = Work::of(bench.proxies(path));
    let rss_bytes_before = bench.proxies(path).iter().map(Process::rss_bytes).sum();
    bench.proxies(path).iter().try_for_each(Process::forget_peak_rss)?;
    let machine_before = machine_cpu_s() - bench.beside_cpu_s();
    let pids: Vec<_> = bench.proxies(path).iter().map(Process::id).collect();
    let watch = (scenario.is_idle() && !pids.is_empty()).then(|| Watch::begin(pids));
    let load = loaded(bench, scenario, path, duration)?;
    let rss_bytes_at_rest = watch.and_then(Watch::a_second_ago);
    let time_waits = scenario.is_sustained().then(|| bench.time_waits(scenario, path));
    let time_waits = time_waits.transpose()?;
    let cpu_s_machine = machine_cpu_s() - bench.beside_cpu_s() - machine_before;
    let proxies = bench.proxies(path);
    let work = (!proxies.is_empty()).then(|| Work::of(proxies).since(&before));
    let observed_s = (now_ns() - began) as f64 / 1e9;
    let peak_rss_bytes = proxies.iter().map(Process::peak_rss_bytes).sum();
    proxies.iter_mut().try_for_each(Process::check_alive)?;
    let calls_per_s = calls.map(Calls::finish).transpose()?;
    let carried = match carried_before {
        None => None,
        Some(before) => {
            let proof = prove_smc(bench, path.load_host(), before, &load);
            Some(proof.doing(|| format!("{scenario} over {path}"))?)
        }
    };
    Ok(Observed {
        load,
        observed_s,
        work,
        rss_bytes_before,
        peak_rss_bytes,
        rss_bytes_at_rest,
        calls_per_s,
        cpu_s_machine,
        carried,
        time_waits,
    })
}

/// What programs have done so far, all together.
#[derive(Clone, Copy, Debug)]
struct Work {
    cpu_s: f64,
    switches: Switches,
}

impl Work {
    fn of(programs: &[Process]) -> Self {
        Self {
            cpu_s: programs.iter().map(Process::cpu_s).sum(),
            switches: programs.iter().map(Process::switches).fold(Switches::default(), Add::add),
        }
    }

    /// What was done after `before`. A thread that has ended takes its switches along.
    fn since(&self, before: &Self) -> Self {
        let Switches { sleeps, preemptions } = before.switches;
        Self {
            cpu_s: self.cpu_s - before.cpu_s,
            switches: Switches {
                sleeps: self.switches.sleeps.saturating_sub(sleeps),
                preemptions: self.switches.preemptions.saturating_sub(preemptions),
            },
        }
    }
}

/// Runs the load, and what reads the metrics of gateways meanwhile.
fn loaded(bench: &Bench, scenario: Scenario, path: Path, duration: Duration) -> Result<LoadResult> {
    let is_scraped = matches!(scenario, Scenario::Scraped { .. }) && path.rnic().is_some();
    let mut scrapers = if is_scraped { bench.scrape()? } else { Vec::new() };
    let load = bench.load(scenario, path, duration).map_err(|failure| match path.rnic() {
        None => failure,
        Some(_) => {
            let [a, b] = [Host::A, Host::B].map(|host| bench.gateway_events(host));
            let events = format!("since they started, gateway A: {a}; gateway B: {b}");
            Failure::new(format!("{failure}; {events}"))
        }
    })?;
    for scraper in &mut scrapers {
        scraper.check_alive()?;
        if let Some(missed) = missed(&scraper.printed()?)? {
            eprintln!("{scenario} over {path}: {missed}");
        }
    }
    Ok(load)
}

/// The totals so far of the gateway beside the load; `None` on other paths.
fn gateway_totals(bench: &Bench, path: Path) -> Result<Option<GatewayTotals>> {
    match path.rnic() {
        None => Ok(None),
        Some(_) => {
            let until = now_ns() + ns(PROOF_LIMIT);
            let totals = || bench.gateway_totals(path.load_host());
            try_until(until, Duration::from_millis(100), totals).map(Some)
        }
    }
}

/// Queries the gateway in `host` until its totals include every connection of `load`, or
/// [`PROOF_LIMIT`] has passed: it may publish its counters a moment after the connections ended, or
/// be too busy to answer.
fn prove_smc(
    bench: &Bench,
    host: Host,
    before: GatewayTotals,
    load: &LoadResult,
) -> Result<GatewayTotals> {
    let until = now_ns() + ns(PROOF_LIMIT);
    let proof = try_until(until, Duration::from_millis(100), || {
        carried_by_smc(before, bench.gateway_totals(host)?, load)
    });
    proof.map_err(|failure| {
        let events = bench.gateway_events(host);
        Failure::new(format!("{failure}; since it started: {events}"))
    })
}

/// The connections that a load added to the totals of gateway A. Fails if one was not SMC-R.
fn carried_by_smc(
    before: GatewayTotals,
    after: GatewayTotals,
    load: &LoadResult,
) -> Result<GatewayTotals> {
    let carried = GatewayTotals {
        connections_smc: after.connections_smc.saturating_sub(before.connections_smc),
        connections_tcp: after.connections_tcp.saturating_sub(before.connections_tcp),
        packets: after.packets.saturating_sub(before.packets),
    };
    if carried.connections_tcp > 0 {
        return Err(Failure::new(format!(
            "{} connections stayed TCP, so this is no measurement of SMC-R",
            carried.connections_tcp
        )));
    }
    // Loads wait for all of their connections, so only those that failed may be missing. Errors of
    // attempts that got no port are of no connection: whatever was answered must have been carried.
    let LoadResult { connections_opened: opened, requests_total: answered, errors, .. } = *load;
    let expected = opened.saturating_sub(errors).max(answered.min(opened)).max(1);
    if carried.connections_smc < expected {
        return Err(Failure::new(format!(
            "{} connections were made, but gateway A counts {} over SMC-R",
            load.connections_opened, carried.connections_smc
        )));
    }
    Ok(carried)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(connections_opened: u64, requests_total: u64) -> LoadResult {
        LoadResult { elapsed_s: 1.0, connections_opened, requests_total, ..LoadResult::default() }
    }

    fn totals(connections_smc: u64, connections_tcp: u64) -> GatewayTotals {
        GatewayTotals { connections_smc, connections_tcp, packets: 0 }
    }

    /// If one build were always second, it would always find the other one's caches and ports.
    #[test]
    fn builds_take_turns_in_being_first() {
        let mut plan = Plan {
            scenarios: Vec::new(),
            rounds: 2,
            duration: Duration::from_secs(1),
            paths: vec!["haproxy".parse().unwrap(), "smcgate".parse().unwrap()],
            smcgate: "after".into(),
            commit: None,
            before: Some("before".into()),
            before_commit: None,
            is_counting_calls: false,
            idle_policy: "adaptive".into(),
            pin: Pin::Auto,
            local: "auto".into(),
            spin_us: None,
            sessions: "one".into(),
            unconfined: false,
            mtu: 1500,
            beside: Vec::new(),
            date: None,
            out: None,
        };
        let builds = |plan: &Plan, round| {
            let subjects = plan.subjects(round).into_iter();
            subjects.map(|(path, build)| (path.to_string(), build)).collect::<Vec<_>>()
        };
        let haproxy = ("haproxy".to_owned(), Build::After);
        let ours = |build| ("smcgate".to_owned(), build);
        let (before, after) = (ours(Build::Before), ours(Build::After));
        assert_eq!(builds(&plan, 1), [haproxy.clone(), before.clone(), after.clone()]);
        assert_eq!(builds(&plan, 2), [haproxy.clone(), after.clone(), before]);
        plan.before = None;
        assert_eq!(builds(&plan, 1), [haproxy, after]);
    }

    /// A gateway that quietly fell back to TCP must not be published as SMC-R.
    #[test]
    fn one_connection_over_tcp_spoils_the_measurement() {
        let failure = carried_by_smc(totals(5, 3), totals(37, 4), &load(32, 9_000)).unwrap_err();
        assert!(failure.to_string().contains("stayed TCP"), "{failure}");
    }

    /// Nor may a measurement be published whose connections were not all counted.
    #[test]
    fn every_connection_must_be_counted_as_smc() {
        assert!(carried_by_smc(totals(5, 3), totals(36, 3), &load(32, 9_000)).is_err());
        assert!(carried_by_smc(totals(5, 3), totals(5, 3), &load(1, 0)).is_err());
        let carried = carried_by_smc(totals(5, 3), totals(37, 3), &load(32, 9_000)).unwrap();
        assert_eq!(carried, totals(32, 0));
    }

    /// What was not answered is missing only if the load has counted it as failed.
    #[test]
    fn only_connections_that_failed_are_excused() {
        let errors = |errors| LoadResult { errors, ..load(1_032, 1_000) };
        assert!(carried_by_smc(totals(0, 0), totals(1_000, 0), &errors(0)).is_err());
        assert!(carried_by_smc(totals(0, 0), totals(1_000, 0), &errors(32)).is_ok());
        // Attempts that got no port are no connections, and excuse none.
        assert!(carried_by_smc(totals(0, 0), totals(999, 0), &errors(500)).is_err());
        // A stream has no answers, but all of its connections are carried.
        assert!(carried_by_smc(totals(0, 0), totals(99, 0), &load(100, 0)).is_err());
    }
}
