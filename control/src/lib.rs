//! The program.

#![forbid(unsafe_code)]

pub mod check;
pub mod config;
pub mod device;
pub mod doctor;
pub mod pnet;
pub mod smc_option;
