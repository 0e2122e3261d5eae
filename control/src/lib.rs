//! The gateway.
#![forbid(unsafe_code)]

pub mod admin;
pub mod cli;
pub mod client;
pub mod config;
pub mod decode;
pub mod log;
pub mod stats;
