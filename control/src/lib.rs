//! The gateway.
#![forbid(unsafe_code)]

pub mod stats;
