//! What the process gives up once it has what takes privilege: capabilities, files, system calls.
//!
//! ```text
//!   eBPF, sockets, interception ─► begin ─► RNICs, pollers, all other threads ─► seal ─► serve
//!                                   capabilities, no_new_privs, Landlock          seccomp
//! ```
//!
//! The first three are for the thread that gives them up and for those that it starts, so no other
//! may run yet. A system call can be given up for all threads at once. What stays follows from the
//! configuration ([`needs`]), and a reload that needs more is refused.

mod calls;
mod capabilities;
mod denied;
pub mod needs;
mod paths;

use std::fs;
use std::path::Path;

use rustix::thread::{CapabilitySet, set_no_new_privs};
use smcr_os::seccomp::filter_all_threads;

pub use self::denied::what_root_lacks;
use crate::config::{Config, Confine};
use crate::stats;
use needs::{Means, Needs};
use paths::{Files, Paths};

/// What this process has given up.
#[derive(Debug, Default)]
pub struct Confinement {
    /// What was kept of what was given up.
    kept: Needs,
    /// By what it was given up.
    means: Means,
    /// Files that may be read, where their folders may not.
    files: Files,
    /// What is in force, in words.
    row: stats::Confinement,
}

impl Confinement {
    /// Gives up, for this thread and those that it starts from now on, all that `config`, which was
    /// read from `file`, does not need. Where the kernel cannot do it, the log says so.
    pub fn begin(config: &Config, file: &Path) -> Self {
        let needs = Needs::of(config);
        let Confine { seccomp, landlock, drop_capabilities } = config.confine;
        let threads = fs::read_dir("/proc/self/task").map_or(1, Iterator::count);
        if config.confine.is_on() && threads > 1 {
            let others = threads - 1;
            tracing::warn!(others, "threads that run already keep capabilities and files");
        }
        if config.confine.is_on()
            && let Err(error) = set_no_new_privs(true)
        {
            tracing::warn!(%error, "this process may still gain privileges");
        }
        let mut means = Means::default();
        let dropped = match capabilities::kept(&needs) {
            _ if !drop_capabilities => OFF.to_owned(),
            None => FOR_DPDK.to_owned(),
            Some(kept) => said("capabilities", &mut means.capabilities, {
                capabilities::drop_all_but(kept).map_err(|error| error.to_string()).map(on)
            }),
        };
        let mut files = Files::default();
        let landlock = match Paths::of(&needs, file) {
            _ if !landlock => OFF.to_owned(),
            None => FOR_DPDK.to_owned(),
            Some(paths) => {
                files = paths.files();
                said("landlock", &mut means.landlock, paths::restrict_to(&paths))
            }
        };
        let seccomp = if seccomp { String::new() } else { OFF.to_owned() };
        let row = stats::Confinement { dropped, landlock, seccomp, ..Default::default() };
        Self { kept: needs, means, files, row }
    }

    /// What a gateway with `config` has given up by dropping its capabilities, for tests whose
    /// process must keep them.
    #[cfg(test)]
    pub(crate) fn as_if_begun(config: &Config) -> Self {
        let means = Means { capabilities: true, ..Means::default() };
        Self { kept: Needs::of(config), means, ..Self::default() }
    }

    /// Gives up, for all threads, the system calls that are not needed any more.
    pub fn seal(&mut self) {
        if self.row.seccomp != OFF {
            let install = |(filter, refusals): &calls::Filter| {
                filter_all_threads(filter, *refusals).map_err(|error| error.to_string())
            };
            let filters = calls::filters(&self.kept);
            let outcome = filters.and_then(|filters| filters.iter().try_for_each(install));
            self.row.seccomp = said("seccomp", &mut self.means.seccomp, outcome.map(on));
        }
        let threads = Threads::of_this_process();
        self.row.capabilities = capabilities::names(threads.capabilities);
        self.row.no_new_privs = threads.no_new_privs;
        let stats::Confinement { dropped, landlock, seccomp, capabilities, .. } = &self.row;
        tracing::info!(dropped, landlock, seccomp, kept = capabilities.join(" "), "confined");
    }

    /// What is in force.
    pub fn row(&self) -> stats::Confinement {
        self.row.clone()
    }

    /// Which files cannot be read any more, because somebody has put others in their place; each in
    /// one line.
    pub fn lost(&self) -> Vec<String> {
        let lost = self.files.replaced().into_iter().filter(|_| self.means.landlock);
        let why = "is another file than at the start, which root may not read; restart the gateway";
        lost.map(|path| format!("{}: {why}", path.display())).collect()
    }

    /// Why `config` can come into force by a restart only, in one line; none if that is not so.
    pub fn refuses(&self, config: &Config) -> Option<String> {
        let missing = self.kept.missing_for(&Needs::of(config), self.means);
        (!missing.is_empty()).then(|| {
            let missing = missing.join(", and ");
            format!("the gateway has given up what it takes for {missing}; restart it")
        })
    }
}

fn on((): ()) -> String {
    ON.to_owned()
}

/// What is in force, or why it is not.
fn said(what: &str, is_in_force: &mut bool, outcome: Result<String, String>) -> String {
    *is_in_force = outcome.is_ok();
    outcome.unwrap_or_else(|why| {
        tracing::warn!(why, "{what}: this host does not confine the gateway by it");
        format!("not possible: {why}")
    })
}

/// What this host can do to confine a gateway, each with why not.
pub fn possible() -> [(&'static str, Result<String, String>); 2] {
    let actions = fs::read_to_string("/proc/sys/kernel/seccomp/actions_avail");
    let seccomp = match actions {
        Ok(actions) if actions.split_whitespace().any(|action| action == "errno") => {
            calls::filters(&Needs::default()).map(|_| "seccomp".to_owned())
        }
        Ok(_) | Err(_) => Err("this kernel has no seccomp".to_owned()),
    };
    [("landlock", paths::available()), ("seccomp", seccomp)]
}

/// What the threads of this process have in common.
struct Threads {
    /// What any of them may do.
    capabilities: CapabilitySet,
    /// Whether none of them can gain privileges.
    no_new_privs: bool,
}

impl Threads {
    fn of_this_process() -> Self {
        let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
        let texts = tasks.map(|task| fs::read_to_string(task.path().join("status")));
        // One that has ended meanwhile can do nothing.
        Self::of(texts.flatten())
    }

    /// What their `/proc/PID/task/ID/status` say.
    fn of(texts: impl Iterator<Item = String>) -> Self {
        let mut all = Self { capabilities: CapabilitySet::empty(), no_new_privs: true };
        for text in texts {
            let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name));
            let permitted = field("CapPrm:").map(|text| u64::from_str_radix(text.trim(), 16));
            let permitted = permitted.and_then(Result::ok).unwrap_or(u64::MAX);
            all.capabilities |= CapabilitySet::from_bits_retain(permitted);
            all.no_new_privs &= field("NoNewPrivs:").is_some_and(|text| text.trim() == "1");
        }
        all
    }
}

const ON: &str = "on";
const OFF: &str = "off, as configured";
const FOR_DPDK: &str = "off: what DPDK needs is not known";

#[cfg(test)]
mod tests {
    use super::*;

    /// One thread that was forgotten is a way out for whoever has taken over another one.
    #[test]
    fn what_one_thread_may_all_may() {
        let status = |caps: &str, nnp: &str| {
            format!("Name:\tx\nCapPrm:\t{caps}\nNoNewPrivs:\t{nnp}\nSeccomp:\t2\n")
        };
        let [few, more] = ["0000000000000400", "0000000000001000"];
        let all = Threads::of([status(few, "1"), status(more, "1")].into_iter());
        let names = capabilities::names(all.capabilities);
        assert_eq!(names, ["CAP_NET_BIND_SERVICE", "CAP_NET_ADMIN"]);
        assert!(all.no_new_privs);
        assert!(!Threads::of([status(few, "1"), status(few, "0")].into_iter()).no_new_privs);
    }

    /// Without a confinement, any reload may come into force.
    #[test]
    fn a_reload_is_refused_only_if_something_was_given_up() {
        let text = "[[listener]]\nname='a'\nbind='127.0.0.1:1'\nupstream='127.0.0.1:2'\n";
        let packet = format!("{text}[[rnic]]\nname='r'\nkind='roce-packet'\ndevice='va'\n");
        let [few, more] = [text, &packet].map(|text| Config::parse(text, "a.toml").unwrap());
        assert_eq!(Confinement::default().refuses(&more), None);
        let confined = Confinement::as_if_begun(&few);
        assert_eq!(confined.refuses(&few), None);
        let why = confined.refuses(&more).unwrap();
        assert!(why.contains("roce-packet") && why.ends_with("restart it"), "{why}");
    }

    /// `doctor` says what this machine can do.
    #[test]
    fn this_kernel_can_confine() {
        for (what, can) in possible() {
            can.unwrap_or_else(|why| panic!("{what}: {why}"));
        }
    }
}
