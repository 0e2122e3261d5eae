//! Our backend for real RNICs, on the soft RNIC of a guest's kernel.

use std::path::PathBuf;

use crate::hosts::Hosts;
use crate::rig::Rig;

/// The backend must keep all promises of a fabric on a driver that we did not write, while another
/// program uses the same RNIC. Afterwards nothing of ours may be open: the kernel removes a device
/// only when nobody has it open.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn our_backend_keeps_its_promises_on_the_soft_rnic_of_linux() {
    let hosts = Hosts::new("verbs-conformance");
    let rig = Rig::new(&hosts);
    rig.one.create_rdma("rxe0", "eth0");
    let seen = rig.one.run(&["ibv_devinfo", "-d", "rxe0"]);
    assert!(seen.contains("PORT_ACTIVE"), "{seen}");

    let suite = conformance();
    let suite = suite.to_str().expect("a path of ours is UTF-8");
    let said = rig.one.run(&["sh", "-ec", BESIDE_ANOTHER, suite]);
    assert!(passed(&said) >= PROMISES, "{said}");

    // The last test of ours removes the device while it has it open.
    let said = rig.one.run(&[suite, "--ignored", "--exact", REMOVAL]);
    assert_eq!(passed(&said), 1, "{said}");
    let seen = rig.one.run(&["rdma", "link"]);
    assert!(!seen.contains("rxe0"), "{seen}");
}

/// Our backend for real RNICs and our soft RNIC must understand each other through a driver that we
/// did not write, whichever of the two sends.
///
/// One test is left out: of sixteen queue pairs at full speed, some are given up in some runs,
/// because their retries are exceeded. They share one emulated core, and the socket buffer of our
/// soft RNIC overflows.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn the_soft_rnics_of_linux_and_ours_understand_each_other() {
    let hosts = Hosts::new("verbs-cross");
    let rig = Rig::new(&hosts);
    rig.one.run(&["sh", "-ec", NAMESPACE]);
    rig.one.create_rdma("rxe0", "near");
    let suite = conformance();
    let suite = suite.to_str().expect("a path of ours is UTF-8");
    let options = ["--ignored", "--test-threads=1", "cross_from", "--skip", "many_queue_pairs"];
    let said = rig.one.run(&[&[suite], &options[..]].concat());
    // In either direction, but for the one that is left out.
    assert!(passed(&said) >= 2 * (PROMISES - 1), "{said}");
    rig.one.run(&["sh", "-ec", "rdma link delete rxe0; ip netns delete far"]);
}

/// How many tests a suite says have passed.
///
/// # Panics
///
/// If some have failed, or it does not say.
fn passed(said: &str) -> usize {
    let result = said.lines().find_map(|line| line.strip_prefix("test result: ok. "));
    let count = result.and_then(|result| result.split_once(" passed; 0 failed;"));
    count.and_then(|(count, _)| count.parse().ok()).unwrap_or_else(|| panic!("{said}"))
}

/// How many promises of a fabric there are at least. A suite that has lost some proves nothing.
const PROMISES: usize = 15;
/// Makes a network namespace for the soft RNIC that is ours: that of Linux has the UDP port here.
const NAMESPACE: &str = "\
    ip netns add far\n\
    ip link add near type veth peer name far netns far\n\
    ip address add 10.77.0.1/24 dev near\n\
    ip link set near up\n\
    ip -n far address add 10.77.0.2/24 dev far\n\
    ip -n far link set far up\n\
    ip -n far link set lo up\n";
/// The test that removes the device under load.
const REMOVAL: &str = "unplug::a_soft_rnic_is_let_go";
/// Runs the conformance suite, whose path is `$0`, beside a latency test of the distribution.
const BESIDE_ANOTHER: &str = "\
    ib_send_lat -d rxe0 -x 1 -n 1000 -F >/dev/null &\n\
    server=$!\n\
    sleep 1\n\
    ib_send_lat -d rxe0 -x 1 -n 1000 -F 10.9.0.11 &\n\
    client=$!\n\
    cd /tmp\n\
    \"$0\" --ignored --test-threads=1 verbs_on_rxe\n\
    wait $client\n\
    wait $server\n";

/// The program of the conformance suite, which `scripts/test` builds before the guests boot. Cargo
/// keeps old ones beside it.
fn conformance() -> PathBuf {
    let own = std::env::current_exe().expect("/proc is mounted");
    let folder = own.parent().expect("it is in a folder");
    let files = folder.read_dir().expect("a folder of ours").map(|entry| entry.expect("readable"));
    let is_suite = |name: &str| name.starts_with("conformance-") && !name.contains('.');
    let suites = files.filter(|file| file.file_name().to_str().is_some_and(is_suite));
    let newest = suites.max_by_key(|file| {
        let about = file.metadata().expect("it is there");
        about.modified().expect("the file system keeps times")
    });
    newest.expect("cargo test -p smcgate-tests --test conformance --no-run").path()
}
