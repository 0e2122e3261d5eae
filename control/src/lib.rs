//! The program.

#![forbid(unsafe_code)]

pub mod config;
pub mod device;
pub mod pnet;
pub mod smc_option;
