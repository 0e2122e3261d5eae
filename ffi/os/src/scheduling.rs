//! How the kernel schedules the calling thread.
//!
//! The calls are made by number, because musl's wrappers refuse them.

use std::io;

use libc::c_long;

/// How much a thread is in a hurry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// As threads usually are (`SCHED_OTHER`).
    Ordinary,
    /// It has the share of an ordinary one, but when it wakes up, it does not interrupt whoever
    /// runs (`SCHED_BATCH`).
    Batch,
    /// It runs before all ordinary threads (`SCHED_RR`, of the lowest real-time priority).
    RealTime,
}

/// Whether the calling thread is an ordinary one (`SCHED_OTHER`).
pub fn is_ordinary() -> bool {
    // SAFETY: the call asks for a thread, zero being the calling one.
    let policy = unsafe { libc::syscall(libc::SYS_sched_getscheduler, SELF) };
    policy & !i64::from(libc::SCHED_RESET_ON_FORK) == i64::from(libc::SCHED_OTHER)
}

/// Makes the calling thread one of `class`; its nice value stays. Threads and processes that it
/// starts are ordinary ones, whatever it is.
///
/// # Errors
///
/// What `sched_setscheduler(2)` says: `EPERM` for a thread that may not become real-time, for want
/// of CAP_SYS_NICE or RLIMIT_RTPRIO, or because its cgroup has no real-time budget.
pub fn set(class: Class) -> io::Result<()> {
    let (policy, sched_priority) = match class {
        Class::Ordinary => (libc::SCHED_OTHER, 0),
        Class::Batch => (libc::SCHED_BATCH, 0),
        Class::RealTime => (libc::SCHED_RR, 1),
    };
    // Also for an ordinary thread: without CAP_SYS_NICE the flag cannot be taken away.
    let policy = c_long::from(policy | libc::SCHED_RESET_ON_FORK);
    let parameters = libc::sched_param { sched_priority };
    // SAFETY: the call asks for a thread, zero being the calling one, a policy and its parameters,
    // which it only reads: `parameters` is a live local.
    let result =
        unsafe { libc::syscall(libc::SYS_sched_setscheduler, SELF, policy, &raw const parameters) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The calling thread. A whole register: filters of system calls may look at all of it.
const SELF: c_long = 0;

#[cfg(test)]
mod tests {
    use super::*;

    /// The policy of the calling thread, by what the kernel says: field 41 of its `stat`, and its
    /// nice value, field 19.
    fn policy_and_nice() -> (String, String) {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        (fields[41 - 3].to_owned(), fields[19 - 3].to_owned())
    }

    /// A thread that may not (this test, if it is not root) stays as it is.
    #[test]
    fn a_thread_changes_its_class_and_is_as_before_afterwards() {
        std::thread::spawn(|| {
            set(Class::Ordinary).unwrap();
            let before = policy_and_nice();
            assert!(is_ordinary() && before.0 == "0", "{before:?}");
            let may = set(Class::RealTime).is_ok();
            assert_eq!(policy_and_nice().0, if may { "2" } else { "0" });
            assert_ne!(is_ordinary(), may);
            let child = std::thread::spawn(policy_and_nice).join().unwrap();
            assert_eq!(child.0, "0", "what it starts is ordinary");
            set(Class::Batch).unwrap();
            assert_eq!((policy_and_nice().0.as_str(), is_ordinary()), ("3", false));
            set(Class::Ordinary).unwrap();
            assert_eq!((policy_and_nice(), is_ordinary()), (before, true));
        })
        .join()
        .unwrap();
    }
}
