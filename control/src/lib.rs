//! The gateway.
#![forbid(unsafe_code)]

pub mod admin;
pub mod config;
pub mod stats;
