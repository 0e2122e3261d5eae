//! The production poller in a simulated network, under a virtual clock.
//!
//! Scenarios are transcripts of what two applications do and see; each runs over SMC-R, and over
//! the fallback where that must look the same. The swarm does at random what nobody thought of.
#![allow(clippy::unwrap_used, reason = "a test stops where it cannot go on")]

mod application;
mod closing;
mod cluster;
mod declines;
mod dormant;
mod failover;
mod flood;
mod flows;
mod foreign;
mod gateways;
mod habits;
mod hasty;
mod host;
mod hostile;
mod paced;
mod rendezvous;
mod rogue;
mod streams;
mod swarm;
mod tcp;
mod transfer;
mod trouble;

/// 1024 bytes.
pub(crate) const KIB: usize = 1 << 10;
/// 1024 times 1024 bytes.
pub(crate) const MIB: usize = 1 << 20;
/// How often everybody looks around in a pause, at most.
pub(crate) const PAUSE_STEPS: u32 = 300;
