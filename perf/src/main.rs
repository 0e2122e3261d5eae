//! `smcgate-perf`: the latency and throughput harness.
//!
//! `run` measures direct TCP, a HAProxy pair and a smcgate pair, interleaved, between two network
//! namespaces that it creates; `report` and `compare` read its result files. `serve` and `load` are
//! the applications that it measures with, and can be used alone.
//!
//! ```text
//!   namespace A                                           namespace B
//!   load ─► (nothing | HAProxy | smcgate) ═══ veth ═══ (nothing | HAProxy | smcgate) ─► serve
//! ```
//!
//! The harness measures and asserts no thresholds: asserting is the job of tests.

#![forbid(unsafe_code)]

mod again;
mod beside;
mod cli;
mod clock;
mod compare;
mod failure;
mod latency;
mod machine;
mod plot;
mod readiness;
mod record;
mod report;
mod rig;
mod run;
mod scenarios;
mod serve;
mod summary;

use std::panic;
use std::process::{self, ExitCode};

fn main() -> ExitCode {
    // A load with a thread less would be another load.
    let print = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        print(panic);
        process::abort();
    }));
    match cli::dispatch() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("smcgate-perf: {failure}");
            ExitCode::FAILURE
        }
    }
}
