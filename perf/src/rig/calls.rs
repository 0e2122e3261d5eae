//! Counts the system calls of programs, by `perf stat`.
//!
//! The kernel runs a tracepoint for each call then, some 0.1 µs. So rates and latencies of a run
//! with it are lower than those without.

use std::process::Command;
use std::time::Duration;

use super::process::Process;
use crate::failure::{Failure, Result};

/// How long after the start of a load counting begins: its connections stand, and are warm.
const DELAY: Duration = Duration::from_millis(400);
/// How much longer than asked for `perf` may take.
const GRACE: Duration = Duration::from_secs(10);

/// A count under way.
#[derive(Debug)]
pub(crate) struct Calls {
    perf: Process,
    counted: Duration,
}

impl Calls {
    /// Begins to count the calls of `programs` a moment from now, until four fifths of `duration`
    /// have passed.
    ///
    /// # Errors
    ///
    /// When `perf` is not installed.
    pub(crate) fn begin(
        programs: &[Process],
        duration: Duration,
        folder: &std::path::Path,
    ) -> Result<Self> {
        let ids: Vec<String> = programs.iter().map(|program| program.id().to_string()).collect();
        let counted = duration.mul_f64(0.8);
        let mut command = Command::new("perf");
        command.args(["stat", "-x,", "-e", "raw_syscalls:sys_enter", "-D"]);
        command.arg(DELAY.as_millis().to_string()).args(["-p", &ids.join(","), "--", "sleep"]);
        command.arg((DELAY + counted).as_secs_f64().to_string());
        let perf = Process::start("perf-stat", command, folder).map_err(|failure| {
            Failure::new(format!("{failure}; scripts/setup perf installs perf"))
        })?;
        Ok(Self { perf, counted })
    }

    /// Waits for the end of the count: calls per second of all the programs together.
    ///
    /// # Errors
    ///
    /// When `perf` has counted nothing, because the kernel does not let it, say.
    pub(crate) fn finish(self) -> Result<f64> {
        let output = self.perf.output_within(self.counted + GRACE)?;
        let calls = parse(&output).ok_or_else(|| {
            Failure::new(format!("perf counted no system calls; it says: {}", output.trim()))
        })?;
        Ok(calls / self.counted.as_secs_f64())
    }
}

/// The count in the output of `perf stat -x,`.
fn parse(output: &str) -> Option<f64> {
    let line = output.lines().find(|line| line.contains(",raw_syscalls:sys_enter,"))?;
    line.split(',').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is not counted must not be published as no calls.
    #[test]
    fn reads_what_perf_prints() {
        let counted = "Events disabled\nEvents enabled\n\
                       1068328,,raw_syscalls:sys_enter,389407766,100.00,,\n";
        assert_eq!(parse(counted), Some(1_068_328.0));
        let silent = "<not counted>,,raw_syscalls:sys_enter,0,100.00,,\n";
        assert_eq!(parse(silent), None);
        assert_eq!(parse("event syntax error: 'raw_syscalls:sys_enter'"), None);
    }
}
