//! Our gateway in the place of a kernel: the same scenarios, the same outcomes.

use crate::testbed::Pairing;
use crate::{blocked, failover, fallback, fidelity, operator, programs, time_wait, transfers};

/// Files must arrive as they were sent, whichever end has Linux's own SMC-R.
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

/// A hundred users at once must all be served over SMC-R, on a single link group.
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

/// Programs must not notice that a gateway has taken the place of one of two kernels.
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

/// An application on a kernel must see ends, resets, pauses and urgent bytes as from a kernel.
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

/// Users must not notice when a cable is pulled, on either side.
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

/// If a Linux host has no UEID, another UEID or no working RNIC, its users must not notice that
/// their peer has a gateway, and the operators of both sides must be told why it is TCP.
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

/// Thousands of short connections per second must not use up ports, whatever the other end is.
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

/// A firewall that drops RoCE, one way or both ways, must not cost a kernel's users any byte.
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
