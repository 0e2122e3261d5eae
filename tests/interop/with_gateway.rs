//! Our gateway in the place of a kernel: the same scenarios, the same outcomes.

use crate::testbed::Pairing;
use crate::{blocked, failover, fallback, fidelity, operator, programs, time_wait, transfers};

/// Files must arrive as they were sent, whichever end has Linux' own SMC-R.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn bulk_from_linux() {
    transfers::bulk(Pairing::LinuxToGateway);
}

#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn bulk_to_linux() {
    transfers::bulk(Pairing::GatewayToLinux);
}

/// A hundred users at once must all be served over SMC-R, on the one link group there is.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn crowd_from_linux() {
    transfers::crowd(Pairing::LinuxToGateway);
}

#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn crowd_to_linux() {
    transfers::crowd(Pairing::GatewayToLinux);
}

/// What people run must not notice that one of two kernels has become a gateway.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn programs_from_linux() {
    programs::programs(Pairing::LinuxToGateway);
}

#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn programs_to_linux() {
    programs::programs(Pairing::GatewayToLinux);
}

/// Ends, resets, pauses and urgent bytes must reach a kernel's application as from another kernel.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn streams_from_linux() {
    fidelity::ends_as_between_kernels(Pairing::LinuxToGateway);
}

#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn streams_to_linux() {
    fidelity::ends_as_between_kernels(Pairing::GatewayToLinux);
}

/// A cable is pulled on either side, and users must not notice.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn loss_of_an_rnic_from_linux() {
    failover::losses(Pairing::LinuxToGateway);
}

#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn loss_of_an_rnic_to_linux() {
    failover::losses(Pairing::GatewayToLinux);
}

/// Users whose Linux has no UEID, another one, or no RNIC that works must not notice that their
/// peer has a gateway, and their operators must be told why it is TCP, on both sides.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn fallbacks_from_linux() {
    fallback::fall_back(Pairing::LinuxToGateway);
}

#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn fallbacks_to_linux() {
    fallback::fall_back(Pairing::GatewayToLinux);
}

/// Thousands of short connections per second must not use up ports, whoever is at the other end.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn ports_after_connections_from_linux() {
    time_wait::the_gateway_keeps_no_ports(Pairing::LinuxToGateway);
}

#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn ports_after_connections_to_linux() {
    time_wait::the_gateway_keeps_no_ports(Pairing::GatewayToLinux);
}

/// A firewall that drops RoCE, one way or both, must cost users of a kernel's SMC-R no byte.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn blocked_roce_from_linux() {
    blocked::stays_tcp(Pairing::LinuxToGateway);
}

#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn blocked_roce_to_linux() {
    blocked::stays_tcp(Pairing::GatewayToLinux);
}

/// Operators of a mixed fleet must see which host is at the other end, and what it speaks.
#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn host_from_linux_is_named() {
    operator::is_told_who_the_peer_is(Pairing::LinuxToGateway);
}

#[test]
#[ignore = "needs the guests of scripts/linux-rig; run by scripts/test interop"]
fn host_to_linux_is_named() {
    operator::is_told_who_the_peer_is(Pairing::GatewayToLinux);
}
