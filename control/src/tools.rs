//! The operators' tools: every command of `smcgate` except `run`.
//!
//! Nothing here runs inside a gateway, and no module of a gateway uses it. A tool reads a
//! configuration, looks at this host, asks a gateway through its admin endpoint, or reads a
//! capture.

pub mod bench;
pub mod capture;
pub mod check;
pub mod client;
pub mod decode;
pub mod doctor;
pub mod documents;
pub mod exec;
pub mod intercept;
pub mod top;
pub mod units;
