//! What gateways give up once they have started, and that they do their work without it.

use std::fs;
use std::os::unix::fs::{chown, symlink};

use crate::failure::assert_echo;
use crate::gateway::{Gateway, Pair, Setup, local, smcgate};
use crate::hosts::{Hosts, accept};

const PORT: u16 = 7010;

/// Of a gateway that somebody has taken over, nothing must be left to take the host with.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn smoke_gateways_give_up_what_they_do_not_need() {
    let hosts = Hosts::new("smoke_gateways_give_up_what_they_do_not_need");
    let log = hosts.logs.join("access.log");
    let log = format!("[access_log]\nto = \"file\"\npath = \"{}\"\n", log.display());
    // For programs of this host there is a thread more.
    let log = format!("{log}[local]\nsocket = \"{}\"\n", hosts.logs.join("door").display());
    let near = Pair::client_side(&hosts, &[PORT]).table(&log);
    let far = Pair::server_side(&hosts, &[PORT]);
    let pair = Pair::start_these(&hosts, near, far.table("\n[confine]\nseccomp = false\n"));
    let listener = hosts.b.listen(local(PORT));
    let client = hosts.a.connect(local(PORT)).expect("the gateway listens");
    assert_echo(&client, &accept(&listener, std::time::Duration::from_secs(10)));
    pair.assert_all_smc(1);

    // Network administration, ports below 1024, priority, and maps of eBPF.
    let kept = (1 << 12) | (1 << 10) | (1 << 23) | (1_u64 << 39);
    for (gateway, filters) in [(&pair.a, "2"), (&pair.b, "0")] {
        let threads = threads(gateway);
        assert!(threads.len() >= 4, "{threads:?}");
        for status in &threads {
            let field = |name: &str| {
                let line = status.lines().find_map(|line| line.strip_prefix(name));
                line.expect("the kernel says it").trim()
            };
            for set in ["CapPrm:", "CapEff:", "CapBnd:"] {
                let set = u64::from_str_radix(field(set), 16).expect("hexadecimal");
                assert_eq!(set, kept, "{set:#x} in {status}");
            }
            assert_eq!((field("NoNewPrivs:"), field("Seccomp:")), ("1", filters), "{status}");
        }
    }

    // What it says of itself is true.
    let said = &serde_json::from_str::<serde_json::Value>(&pair.a.get("/stats")).expect("JSON");
    let said = &said["confinement"];
    let names = ["CAP_NET_BIND_SERVICE", "CAP_NET_ADMIN", "CAP_SYS_NICE", "CAP_BPF"];
    assert_eq!(said["capabilities"], serde_json::json!(names), "{said}");
    for what in ["dropped", "landlock", "seccomp"] {
        assert!(said[what].as_str().is_some_and(|said| said.starts_with("on")), "{said}");
    }

    // Its configuration may not lead it to files that are none of its business.
    let ours = hosts.logs.join("gateway-a.toml");
    let elsewhere = tempfile::tempdir().expect("there is room");
    let elsewhere = elsewhere.path().join("a.toml");
    fs::copy(&ours, &elsewhere).expect("it was written");
    let reload = smcgate(&hosts, "reload", &["reload"]);
    assert_eq!(reload.status.code(), Some(0), "{}", reload.stderr);
    fs::remove_file(&ours).expect("the directory is ours");
    symlink(&elsewhere, &ours).expect("the directory is ours");
    let reload = smcgate(&hosts, "reload-elsewhere", &["reload"]);
    assert_eq!(reload.status.code(), Some(2), "{}", reload.stderr);
    assert!(reload.stderr.contains("Permission denied"), "{}", reload.stderr);
    assert!(reload.stderr.contains("restart it"), "{}", reload.stderr);
}

/// A gateway of root that meets others in the directory of another user gives up what would let it
/// in. The operator, who is root and may do everything, must learn that.
#[test]
#[ignore = "needs root and network namespaces; run by scripts/test e2e"]
fn root_learns_why_it_may_not_use_a_directory_of_others() {
    let hosts = Hosts::new("root_learns_why_it_may_not_use_a_directory_of_others");
    let place = tempfile::tempdir().expect("there is room");
    chown(place.path(), Some(65_534), None).expect("we are root");
    let directory = place.path().to_str().expect("it is plain");
    let setup = Setup::of_kind("in-vain", ("local", "shm"), directory, "");
    let setup = setup.towards(hosts.b.address, PORT);
    let (code, said) = setup.start_in_vain(&hosts, &hosts.a);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("CAP_DAC_OVERRIDE") && said.contains(directory), "{said}");
}

/// What each of its threads may do.
fn threads(gateway: &Gateway<'_>) -> Vec<String> {
    let tasks = format!("/proc/{}/task", gateway.process.id());
    let tasks = fs::read_dir(tasks).expect("it runs").flatten();
    tasks.flat_map(|task| fs::read_to_string(task.path().join("status"))).collect()
}
