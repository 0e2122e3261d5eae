//! Whether pollers may run before other programs, as they do while those need their cores.

use std::{fs, io, thread};

use rustix::process::{getpriority_process, setpriority_process};
use smcr_os::scheduling::{self, Class};

use super::Finding;
use crate::config::BOOST;

/// What a poller may do about its place among other threads.
pub(super) struct Tried {
    /// To raise its nice value by the steps that `poll.boost` has by default.
    nice: io::Result<()>,
    /// To become real-time.
    realtime: io::Result<()>,
    /// Whether it can learn for how long it has waited for a core.
    counts_waits: bool,
}

impl Tried {
    /// Tries all of it on a thread that ends afterwards.
    pub(super) fn on_this_host() -> Self {
        let attempt = || {
            let raised = getpriority_process(None).map(|usual| (usual - i32::from(BOOST)).max(-20));
            let nice = raised.and_then(|raised| setpriority_process(None, raised));
            let waits = fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
            let realtime = match scheduling::is_ordinary() {
                true => scheduling::set(Class::RealTime),
                // What somebody has chosen for this process stays.
                false => Ok(()),
            };
            Self { nice: nice.map_err(Into::into), realtime, counts_waits: counts_waits(&waits) }
        };
        thread::spawn(attempt).join().expect("it only asks")
    }
}

/// Whether a kernel that says this of a thread that runs counts anything: how often it was given a
/// core comes last. (The time for which it had one is up to date only later.)
fn counts_waits(schedstat: &str) -> bool {
    schedstat.split_whitespace().nth(2).is_some_and(|times| times != "0")
}

pub(super) fn finding(tried: &Tried) -> Finding {
    let name = "priority";
    let mut lacks = Vec::new();
    if let Err(error) = &tried.nice {
        lacks.push(format!("raise their nice value by {BOOST} ({error})"));
    }
    if let Err(error) = &tried.realtime {
        lacks.push(format!("become real-time ({error})"));
    }
    if !lacks.is_empty() {
        let found = format!(
            "beside programs that need their cores, pollers may not {}",
            lacks.join(", nor ")
        );
        let advice = "give them CAP_SYS_NICE, or LimitNICE= and LimitRTPRIO=1; where cgroups have \
                      real-time budgets, theirs needs one";
        return Finding::warn(name, found, advice);
    }
    let may = "pollers may run before other programs that need their cores";
    if tried.counts_waits {
        return Finding::ok(name, may);
    }
    let found = format!(
        "{may}, but those that carry streams may miss it, and those that carry short \
         connections do not let others go on: this kernel does not count waits"
    );
    Finding::warn(name, found, "use a kernel with CONFIG_SCHED_INFO, and a /proc that shows it")
}

#[cfg(test)]
mod tests {
    use rustix::process::{Resource, getrlimit};
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

    use super::*;
    use crate::tools::doctor::Level;

    fn refused() -> io::Result<()> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    #[test]
    fn what_is_refused_is_said() {
        let all = || Tried { nice: Ok(()), realtime: Ok(()), counts_waits: true };
        assert_eq!(finding(&all()).level, Level::Ok);
        for (tried, says, says_not) in [
            (Tried { nice: refused(), ..all() }, "nice value", "real-time"),
            (Tried { realtime: refused(), ..all() }, "become real-time", "nice value"),
            (
                Tried { nice: refused(), realtime: refused(), ..all() },
                "nor become real-time",
                "count",
            ),
            (Tried { counts_waits: false, ..all() }, "does not count", "may not"),
        ] {
            let finding = finding(&tried);
            assert_eq!(finding.level, Level::Warn);
            assert!(
                finding.found.contains(says) && !finding.found.contains(says_not),
                "{finding:?}"
            );
        }
    }

    /// A kernel without CONFIG_SCHED_INFO says three times nothing.
    #[test]
    fn a_kernel_that_does_not_count_is_known() {
        for (line, counts) in [("0 119 1\n", true), ("0 0 0\n", false), ("", false)] {
            assert_eq!(counts_waits(line), counts, "{line:?}");
        }
    }

    /// Neither does the attempt leave a trace in this thread.
    #[test]
    fn the_outcome_is_that_of_who_may_or_may_not() {
        let before = getpriority_process(None).unwrap();
        let tried = Tried::on_this_host();
        assert_eq!((getpriority_process(None).unwrap(), scheduling::is_ordinary()), (before, true));
        let direct = thread::spawn(|| scheduling::set(Class::RealTime)).join().unwrap();
        assert_eq!(tried.realtime.is_ok(), direct.is_ok());
        let nobody = thread::spawn(|| {
            let mut sets = capabilities(None).unwrap();
            sets.effective.remove(CapabilitySet::SYS_NICE);
            set_capabilities(None, sets).unwrap();
            Tried::on_this_host()
        });
        let nobody = nobody.join().unwrap();
        let permits = |limit, least| getrlimit(limit).current.is_none_or(|most| most >= least);
        assert_eq!(nobody.realtime.is_ok(), permits(Resource::Rtprio, 1));
        let raised = (before - i32::from(BOOST)).max(-20);
        assert_eq!(
            nobody.nice.is_ok(),
            permits(Resource::Nice, (20 - raised).unsigned_abs().into())
        );
    }
}
