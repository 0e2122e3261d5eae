//! The program.

#![forbid(unsafe_code)]

pub mod config;
