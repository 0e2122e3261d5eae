//! Who keeps ports in TIME_WAIT where one end of SMC-R is a kernel.

use std::time::Duration;

use crate::clock::wait_until;
use crate::gateway::SETTLE_LIMIT;
use crate::hosts::Hosts;
use crate::place::Place;
use crate::rig::Rig;
use crate::road::{Course, Road};

const PORT: u16 = 7010;
/// Connections at once, in each order of closing.
const TIMES: u32 = 100;
/// Client, server, and who closes first.
const ORDERS: [(&str, &str, &str); 3] = [
    ("send=100 shut drain", "echo", "client"),
    ("send=100 drain", "receive=100 send=100", "server"),
    ("send=100 receive=100", "receive=100 send=100", "both"),
];

/// A gateway that connects to servers of Linux has as many ports towards each of them as it has
/// towards another gateway, and must not be left with them in TIME_WAIT either. What a kernel keeps
/// is said, not judged: between two kernels it is the same.
pub(crate) fn the_gateway_keeps_no_ports(course: Course) {
    let hosts = Hosts::new(&format!("time-wait-{course:?}"));
    let rig = Rig::new(&hosts);
    let road = Road::open(&rig, &hosts, course, &[PORT]);
    let gateway = road.gateway.as_ref().expect("a course with a gateway");
    for (client, server, first) in ORDERS {
        road.play(PORT, TIMES, client, server);
        wait_until("nothing is left of them", SETTLE_LIMIT, || {
            let active = gateway.stats().active;
            (active.smc, active.farewells) == (0, 0)
        });
        // A FIN that answers ours may be on its way.
        std::thread::sleep(Duration::from_millis(200));
        let kernel = road.kernels()[0];
        let [ours, theirs] = [(&rig.host, kernel), (kernel, &rig.host)]
            .map(|(place, other)| time_waits(place, other));
        println!("{course:?}, {first} first: TIME_WAIT: {ours} at the gateway, {theirs} at Linux");
        if course == Course::GatewayToLinux {
            assert_eq!(ours, 0, "{first} first: ports of the gateway in TIME_WAIT");
        }
    }
    assert_eq!(gateway.stats().totals.tcp_cut_short, 0, "Linux ends TCP in time");
    road.assert_all_smc(3 * u64::from(TIMES));
    road.assert_at_rest();
}

/// How many connections with `other` are in TIME_WAIT at `place`.
fn time_waits(place: &Place<'_>, other: &Place<'_>) -> usize {
    let other = other.at(0).ip().to_string();
    place.run(&["ss", "-Htan", "state", "time-wait", "dst", &other]).lines().count()
}
