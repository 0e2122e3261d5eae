//! What a gateway that has given something up takes from a reload.

use super::rig::halted;
use crate::config::{CongestionControl, OptionMode};
use crate::confine::Confinement;
use crate::reload::Prepared;

/// What a restart alone can bring needs nothing before the restart: the rest of the file comes into
/// force.
#[test]
fn what_takes_a_restart_anyway_refuses_no_reload() {
    let (mut gateway, _) = halted(101, "[local]\ncongestion_control = \"host\"\n");
    gateway.confinement = Confinement::as_if_begun(&gateway.config);
    let mut config = gateway.config.clone();
    config.local.congestion_control = CongestionControl::Auto;
    config.smc.option = OptionMode::Auto;
    config.limits.connections_max -= 1;
    let now = gateway.clock.now();
    let notes = gateway.reload(now, Prepared::of(config)).unwrap();
    let later = |what: &str| format!("{what}: takes effect after a restart");
    assert_eq!(notes, [later("local"), later("smc.option"), "limits: changed".to_owned()]);
}
