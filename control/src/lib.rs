//! The program.

#![forbid(unsafe_code)]

pub mod config;
pub mod smc_option;
