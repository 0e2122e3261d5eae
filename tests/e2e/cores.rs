//! Which cores gateways take for themselves, and what they leave to others.

use std::fs;
use std::net::Ipv4Addr;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::process::Signal;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::Value;

use crate::clock::{Deadline, wait_until};
use crate::failure::assert_echo;
use crate::gateway::{Gateway, Pair, Setup, local, smcgate};
use crate::hosts::{Host, Hosts, accept};
use crate::process::Process;

const PORT: u16 = 7010;
const LIMIT: Duration = Duration::from_secs(60);

/// Gateways in several containers or network namespaces of one machine used to share its last core
/// and to leave the others idle. A core is free again when its gateway dies, however it dies.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_gateways_hold_different_cores() {
    let hosts = Hosts::new("smoke_gateways_hold_different_cores");
    let host_c = Host::new(&format!("{}c", hosts.a.name), "lo", Ipv4Addr::LOCALHOST);
    host_c.ip(&["link", "set", "lo", "up"]);
    let start = |name: &str, host| {
        let relay = ((local(PORT), "tcp"), (local(PORT + 1), "tcp"));
        Setup::new(name, host).listener(relay.0, relay.1).start(&hosts, host)
    };
    let count = sched_getaffinity(None).expect("the kernel's interface is large enough").count();

    let mut running = vec![start("gateway-a", &hosts.a)];
    let mut taken = vec![place(&running[0]).core.expect("a core is free")];
    for (name, host) in [("gateway-b", &hosts.b), ("gateway-c", &host_c)] {
        let gateway = start(name, host);
        let place = place(&gateway);
        if taken.len() < count as usize {
            let core = place.core.unwrap_or_else(|| panic!("{name}: {}", place.reason));
            assert!(place.pinned && !taken.contains(&core), "{core} beside {taken:?}");
            taken.push(core);
        } else {
            assert_eq!((place.core, place.pinned), (None, false), "{taken:?} of {count}");
            assert!(place.reason.contains("free cores: 0 for 1"), "{}", place.reason);
            assert!(gateway.process.log().contains(&place.reason), "the log says why");
            let doctor = smcgate(&hosts, "doctor", &["doctor"]).expect_success("doctor");
            assert!(doctor.contains("each held by a poller"), "{doctor}");
            let file = hosts.logs.join("gateway-c.toml");
            let file = file.to_str().expect("our own paths are text");
            let check = smcgate(&hosts, "check", &["check", "-c", file]).expect_success("check");
            assert!(check.contains(", 1 not pinned"), "{check}");
        }
        running.push(gateway);
    }

    let first = &mut running[0].process;
    first.signal(Signal::KILL);
    first.wait(LIMIT);
    let again = start("gateway-a-again", &hosts.a);
    assert_eq!(place(&again).core, Some(taken[0]));
}

/// Where a gateway's only poller runs.
struct Place {
    core: Option<u64>,
    pinned: bool,
    reason: String,
}

fn place(gateway: &Gateway<'_>) -> Place {
    let mut stats = Value::Null;
    wait_until("the poller has begun", LIMIT, || {
        stats = serde_json::from_str(&gateway.get("/stats")).expect("JSON");
        let poller = &stats["pollers"][0];
        poller["core"].is_null() || poller["pinned"] == true
    });
    let poller = &stats["pollers"][0];
    Place {
        core: poller["core"].as_u64(),
        pinned: poller["pinned"] == true,
        reason: poller["placement"].as_str().expect("a reason").to_owned(),
    }
}

#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_idle_gateways_use_no_core() {
    assert_idle_gateways_use_no_core("smoke_idle_gateways_use_no_core", "");
}

#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn idle_gateways_without_cores_use_none() {
    let table = "\n[poll]\npin = false\n";
    assert_idle_gateways_use_no_core("idle_gateways_without_cores_use_none", table);
}

/// A gateway without traffic must use no CPU time, whether the machine is idle or busy.
fn assert_idle_gateways_use_no_core(name: &str, table: &str) {
    let hosts = Hosts::new(name);
    let [a, b] = [Pair::client_side(&hosts, &[PORT]), Pair::server_side(&hosts, &[PORT])];
    let pair = Pair::start_these(&hosts, a.table(table), b.table(table));
    let listener = hosts.b.listen(local(PORT));
    let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
    let server = accept(&listener, LIMIT);
    assert_echo(&client, &server);
    thread::sleep(SETTLED);
    assert_idle(&pair, "alone");
    let busy: Vec<_> = (0..2)
        .map(|number| {
            let mut command = Command::new("sh");
            command.args(["-c", "while :; do :; done"]);
            Process::start(&hosts.a, &hosts.logs, &format!("busy-{number}"), &mut command)
        })
        .collect();
    // A connection makes the pollers notice that others want their cores.
    for _ in 0..50 {
        assert_echo(&client, &server);
    }
    thread::sleep(SETTLED);
    assert_idle(&pair, "beside two busy loops");
    drop(busy);
}

/// As long as a busy program ran on a poller's core, an answer used to take 4 ms instead of 45 µs.
/// The poller must leave the core to the program, and take it back when the program has ended. As
/// long as it must do without, whatever it carries raises its priority, and silence ends that.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_a_busy_core_is_left_and_taken_back() {
    let hosts = Hosts::new("smoke_a_busy_core_is_left_and_taken_back");
    let pair = Pair::start(&hosts, &[PORT]);
    let listener = hosts.b.listen(local(PORT));
    let open = || {
        let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
        (client, accept(&listener, LIMIT))
    };
    let gateways = [&pair.a, &pair.b];
    let cores = gateways.map(|gateway| place(gateway).core);
    assert!(cores.iter().all(Option::is_some), "two cores are needed to leave any: {cores:?}");
    let both = |is_so: &dyn Fn(&Value) -> bool| {
        gateways.iter().all(|gateway| {
            let stats: Value = serde_json::from_str(&gateway.get("/stats")).expect("JSON");
            is_so(&stats["pollers"][0])
        })
    };
    // A poller notices a neighbour only while it works.
    let talk = |(client, server): &(_, _)| (0..50).for_each(|_| assert_echo(client, server));
    let both_are = |contended: bool, ends: &_| {
        talk(ends);
        both(&|poller| {
            let is_contended = poller["counters"]["contended"] == 1;
            let says_so = poller["placement"].as_str().is_some_and(|it| it.contains("others need"));
            is_contended == contended && says_so == contended && poller["pinned"] != contended
        })
    };
    // Not in a container whose cgroup has no real-time budget.
    let chrt = Command::new("chrt").args(["-r", "1", "true"]).output();
    let may_be_realtime = chrt.expect("util-linux is installed").status.success();
    let raised = |it: u8| {
        both(&|poller| {
            let counters = &poller["counters"];
            let realtime = it * u8::from(may_be_realtime);
            counters["priority_raised"] == it && counters["realtime"] == realtime
        })
    };
    let first = open();
    wait_until("the cores are free", LIMIT, || both_are(false, &first));
    // On each, or a poller would find a free one and stay there for a while.
    let allowed = sched_getaffinity(None).expect("the kernel's interface is large enough");
    let busy: Vec<_> = (0..CpuSet::MAX_CPU)
        .filter(|core| allowed.is_set(*core))
        .map(|core| {
            let mut command = Command::new("taskset");
            command.args(["-c", &core.to_string(), "sh", "-c", "while :; do :; done"]);
            Process::start(&hosts.a, &hosts.logs, &format!("busy-{core}"), &mut command)
        })
        .collect();
    wait_until("the pollers have left their cores", LIMIT, || both_are(true, &first));
    wait_until("few bytes raise their priority", LIMIT, || {
        talk(&first);
        raised(1)
    });
    wait_until("in silence it is as usual", LIMIT, || raised(0));
    wait_until("few bytes raise it again", LIMIT, || {
        talk(&first);
        raised(1)
    });
    drop(first);
    wait_until("without connections it is as usual", LIMIT, || raised(0));
    drop(busy);
    let second = open();
    wait_until("the pollers are back", LIMIT, || both_are(false, &second));
}

/// An application that gives the core back late, each time that it is offered, is offered it no
/// more for a while. The poller stays on its core, and what it carries goes on.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn a_core_that_is_used_for_long_is_not_offered() {
    let hosts = Hosts::new("a_core_that_is_used_for_long_is_not_offered");
    let pair = Pair::start(&hosts, &[PORT]);
    let listener = hosts.b.listen(local(PORT));
    let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
    let server = accept(&listener, LIMIT);
    let core = place(&pair.a).core.expect("a free core is needed to share it");
    let poller = || {
        (0..50).for_each(|_| assert_echo(&client, &server));
        let stats: Value = serde_json::from_str(&pair.a.get("/stats")).expect("JSON");
        stats["pollers"][0].clone()
    };
    let refrainings = |poller: &Value| poller["counters"]["refrainings"].as_u64().expect("counted");
    wait_until("the core is free", LIMIT, || poller()["counters"]["contended"] == 0);

    let ends = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut own = CpuSet::new();
            own.set(usize::try_from(core).expect("a number of a core"));
            sched_setaffinity(None, &own).expect("the poller is there, too");
            // Also when the test has failed.
            let last = Deadline::after(2 * LIMIT);
            while !ends.load(Ordering::Relaxed) && !last.passed() {
                let busy = Deadline::after(Duration::from_micros(300));
                while !busy.passed() {}
                thread::sleep(Duration::from_micros(10));
            }
        });
        wait_until("the poller refrains", LIMIT, || {
            let poller = poller();
            refrainings(&poller) > 0 && poller["counters"]["refraining"] == 1
        });
        ends.store(true, Ordering::Relaxed);
    });
    wait_until("it makes offers again, and they are short", LIMIT, || {
        let (before, soon) = (poller(), Deadline::after(Duration::from_millis(1500)));
        while !soon.passed() {
            poller();
        }
        let after = poller();
        let is_settled = refrainings(&after) == refrainings(&before);
        is_settled && after["counters"]["refraining"] == 0 && after["pinned"] == true
    });
}

/// How long a gateway may stay awake after work.
const SETTLED: Duration = Duration::from_millis(300);

/// One of three spans of three seconds must be quiet: links that have just come up have something
/// to do now and then, and what the host does meanwhile may be charged to whoever is interrupted.
fn assert_idle(pair: &Pair<'_>, when: &str) {
    /// In units of `USER_HZ`, 100 per second.
    const TICKS_MAX: u64 = 2;
    let both = || [&pair.a, &pair.b].map(|gateway| cpu_ticks(gateway.process.id()));
    let used = || {
        let before = both();
        thread::sleep(Duration::from_secs(3));
        let used = before.into_iter().zip(both()).map(|(before, after)| after - before);
        used.max().expect("there are two")
    };
    let mut spans = Vec::new();
    while spans.last().is_none_or(|ticks| *ticks > TICKS_MAX) {
        assert!(spans.len() < 3, "{spans:?} ticks in 3 s each, {when}");
        spans.push(used());
    }
}

/// CPU time that process `id` has used, user and system.
fn cpu_ticks(id: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).expect("it runs");
    let (_, behind_name) = stat.rsplit_once(')').expect("a name in brackets");
    let ticks = behind_name.split_whitespace().skip(11).take(2);
    ticks.map(|ticks| ticks.parse::<u64>().expect("the kernel prints numbers")).sum()
}
