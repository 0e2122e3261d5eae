//! Tests against a peer that we did not write: Linux guests whose kernel speaks SMC-R over rxe.
//!
//! ```text
//!   guest 1, 10.9.0.11      guest 2, 10.9.0.12      host h, 10.9.0.13: our gateway
//!        ╚═══════════════════════╩══════════════════════════╝
//! ```
//!
//! `scripts/test interop` boots the guests, by `scripts/linux-rig`, and runs this. All tests share
//! the two guests, so they run one after another, and each begins by loading the kernel's modules
//! anew. Logs and captures are in `target/interop/TEST/`.
//!
//! A test says who accepts, who connects, what each does with the connection (the steps of
//! `smcgate-guest`) and what each must have seen. No test is about speed: guests are emulated.

mod blocked;
#[path = "../e2e/capture.rs"]
mod capture;
#[path = "../e2e/clock.rs"]
#[allow(dead_code, reason = "shared with the end-to-end suite, which uses all of it")]
mod clock;
mod dialogue;
mod emulator;
mod failover;
mod fallback;
mod fidelity;
#[path = "../e2e/gateway.rs"]
#[allow(dead_code, reason = "shared with the end-to-end suite, which uses all of it")]
mod gateway;
mod hosts;
#[path = "../e2e/http.rs"]
mod http;
mod in_guest;
mod operator;
mod place;
mod ports;
mod preloaded;
#[path = "../e2e/process.rs"]
#[allow(dead_code, reason = "shared with the end-to-end suite, which uses all of it")]
mod process;
mod programs;
mod rig;
mod testbed;
mod time_wait;
mod transfers;
mod verbs;
mod with_gateway;
