//! The gateway.
#![forbid(unsafe_code)]

pub mod admin;
pub mod check;
pub mod cli;
pub mod client;
pub mod config;
pub mod decode;
pub mod device;
pub mod doctor;
pub mod log;
pub mod pnet;
pub mod smc_option;
pub mod stats;
