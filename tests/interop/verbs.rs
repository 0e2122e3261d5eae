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
    assert!(said.contains("15 passed; 0 failed"), "{said}");

    // The last test of ours removes the device while it has it open.
    let said = rig.one.run(&[suite, "--ignored", "--exact", REMOVAL]);
    assert!(said.contains("1 passed; 0 failed"), "{said}");
    let seen = rig.one.run(&["rdma", "link"]);
    assert!(!seen.contains("rxe0"), "{seen}");
}

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
