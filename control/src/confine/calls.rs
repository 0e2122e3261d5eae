//! System calls that the gateway may make once it has started, by seccomp.
//!
//! What is not listed fails with ENOSYS, as a call does that a kernel does not have: libraries know
//! how to go on without it. The lists come from traces of gateways in the end-to-end tests.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};
use smcr_os::seccomp::{Instruction, Refusals};

use super::needs::Needs;

/// A filter, and whether it matters what it refuses.
pub(super) type Filter = (Vec<Instruction>, Refusals);

/// The filters for a gateway with these needs, to be installed in this order.
///
/// # Errors
///
/// When there are none for this kind of processor.
pub(super) fn filters(needs: &Needs) -> Result<[Filter; 2], String> {
    let refuse = SeccompAction::Errno(libc::ENOSYS.cast_unsigned());
    // The C library asks for each new thread whether the kernel has it. Its flags are in memory,
    // where no filter sees them, so it must use the older call.
    let clone3 = [(libc::SYS_clone3, Vec::new())].into();
    let older = compile(clone3, SeccompAction::Allow, refuse.clone())?;
    let mut rules = rules(needs);
    rules.insert(libc::SYS_clone3, Vec::new());
    let others = compile(rules, refuse, SeccompAction::Allow)?;
    Ok([(older, Refusals::Silent), (others, Refusals::Logged)])
}

/// A filter that does `then` with calls that fit one of `rules`, and `otherwise` with all others.
fn compile(
    rules: BTreeMap<i64, Vec<SeccompRule>>,
    otherwise: SeccompAction,
    then: SeccompAction,
) -> Result<Vec<Instruction>, String> {
    let architecture = std::env::consts::ARCH.try_into();
    let architecture = architecture.map_err(|_| format!("none for {}", std::env::consts::ARCH))?;
    let filter = SeccompFilter::new(rules, otherwise, then, architecture);
    let program: Result<BpfProgram, _> = filter.and_then(TryInto::try_into);
    let program = program.map_err(|error| error.to_string())?;
    let instruction = |it: &seccompiler::sock_filter| Instruction {
        code: it.code,
        jt: it.jt,
        jf: it.jf,
        k: it.k,
    };
    Ok(program.iter().map(instruction).collect())
}

/// The calls that are allowed.
fn rules(needs: &Needs) -> BTreeMap<i64, Vec<SeccompRule>> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    let mut allow = |calls: &[i64]| rules.extend(calls.iter().map(|call| (*call, Vec::new())));
    allow(&ALWAYS);
    allow(&OLD);
    if needs.programs {
        allow(&PROGRAMS);
        allow(&OLD_PROGRAMS);
    }
    if needs.dpdk {
        allow(&DPDK);
    }
    rules.extend(conditional(needs));
    rules
}

/// Calls that are allowed with some arguments only.
fn conditional(needs: &Needs) -> Vec<(i64, Vec<SeccompRule>)> {
    let any_of = |which: u8, values: &[u64]| {
        let rule = |value: &u64| when(&[(which, SeccompCmpOp::Eq, *value)]);
        values.iter().map(rule).collect::<Vec<_>>()
    };
    let mut families = vec![libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];
    if needs.packets || needs.dpdk {
        families.push(libc::AF_PACKET);
    }
    let families: Vec<u64> = families.iter().map(|family| family.unsigned_abs().into()).collect();
    let mut options = vec![libc::PR_SET_NAME, libc::PR_GET_NAME, PR_GET_THP_DISABLE, PR_SET_VMA];
    if needs.programs {
        // `ip` asks for its capabilities, and drops them.
        options.extend([libc::PR_CAPBSET_READ, libc::PR_CAP_AMBIENT]);
    }
    let options: Vec<u64> = options.iter().map(|option| option.unsigned_abs().into()).collect();
    let mut commands = MAPS.to_vec();
    if needs.loads_ebpf {
        commands.extend(PROGRAMS_OF_EBPF);
    }
    // A thread, or with programs a process; never one in namespaces of its own.
    let threads = u64::from(libc::CLONE_THREAD.unsigned_abs());
    let namespaces = NAMESPACES.iter().fold(0, |all, flag| all | u64::from(flag.unsigned_abs()));
    let clone = match needs.programs {
        false => when(&[(0, SeccompCmpOp::MaskedEq(threads), threads)]),
        true => when(&[(0, SeccompCmpOp::MaskedEq(namespaces), 0)]),
    };
    let mut rules = vec![
        (libc::SYS_socket, any_of(0, &families)),
        (libc::SYS_prctl, any_of(0, &options)),
        (libc::SYS_bpf, any_of(0, &commands)),
        (libc::SYS_clone, vec![clone]),
    ];
    if !needs.dpdk {
        // A thread changes its class by itself; none does so to another one.
        let rule = |policy: i32| {
            let policy = u64::from((policy | libc::SCHED_RESET_ON_FORK).unsigned_abs());
            when(&[(0, SeccompCmpOp::Eq, 0), (1, SeccompCmpOp::Eq, policy)])
        };
        let mut policies = [libc::SCHED_OTHER, libc::SCHED_BATCH].map(rule).to_vec();
        if needs.realtime {
            policies.push(rule(libc::SCHED_RR));
        }
        rules.push((libc::SYS_sched_setscheduler, policies));
    }
    rules
}

/// A call each of whose arguments that are named is so.
fn when(conditions: &[(u8, SeccompCmpOp, u64)]) -> SeccompRule {
    let condition = |(argument, is, value): &(u8, SeccompCmpOp, u64)| {
        let condition =
            SeccompCondition::new(*argument, SeccompCmpArgLen::Qword, is.clone(), *value);
        condition.expect("calls have six arguments")
    };
    SeccompRule::new(conditions.iter().map(condition).collect()).expect("it has a condition")
}

/// What every gateway does: sockets, events, time, memory, threads, and files that it reads.
const ALWAYS: [i64; 128] = [
    // Streams and packets.
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_listen,
    libc::SYS_recvfrom,
    libc::SYS_recvmmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendmmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_socketpair,
    // Events and time.
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    libc::SYS_gettimeofday,
    libc::SYS_inotify_add_watch,
    libc::SYS_inotify_init1,
    libc::SYS_inotify_rm_watch,
    libc::SYS_nanosleep,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_gettime,
    libc::SYS_timerfd_settime,
    // Memory.
    libc::SYS_brk,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_memfd_create,
    libc::SYS_mincore,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_msync,
    libc::SYS_munlock,
    libc::SYS_munmap,
    // Threads and signals.
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_get_robust_list,
    libc::SYS_getcpu,
    libc::SYS_getpriority,
    libc::SYS_getrandom,
    libc::SYS_getrlimit,
    libc::SYS_getrusage,
    libc::SYS_gettid,
    libc::SYS_prlimit64,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_setpriority,
    libc::SYS_sigaltstack,
    libc::SYS_tgkill,
    // Who and where we are.
    libc::SYS_capget,
    libc::SYS_getcwd,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getuid,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    // Files and descriptors.
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fallocate,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchown,
    libc::SYS_fcntl,
    libc::SYS_fdatasync,
    libc::SYS_flock,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_getdents64,
    libc::SYS_ioctl,
    libc::SYS_linkat,
    libc::SYS_lseek,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_pipe2,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_read,
    libc::SYS_readlinkat,
    libc::SYS_readv,
    libc::SYS_renameat2,
    libc::SYS_splice,
    libc::SYS_statfs,
    libc::SYS_statx,
    libc::SYS_umask,
    libc::SYS_unlinkat,
    libc::SYS_write,
    libc::SYS_writev,
];
/// The same, by names that newer kinds of processors do not have.
#[cfg(target_arch = "x86_64")]
const OLD: [i64; 17] = [
    libc::SYS_access,
    libc::SYS_arch_prctl,
    libc::SYS_dup2,
    libc::SYS_epoll_create,
    libc::SYS_epoll_wait,
    libc::SYS_getdents,
    libc::SYS_lstat,
    libc::SYS_open,
    libc::SYS_pipe,
    libc::SYS_poll,
    libc::SYS_readlink,
    libc::SYS_rename,
    libc::SYS_select,
    libc::SYS_stat,
    libc::SYS_time,
    libc::SYS_unlink,
    libc::SYS_chmod,
];
#[cfg(not(target_arch = "x86_64"))]
const OLD: [i64; 0] = [];
/// What it takes to run `nft` and `ip`, and what those do beyond it.
const PROGRAMS: [i64; 12] = [
    libc::SYS_capset,
    libc::SYS_chdir,
    libc::SYS_execve,
    libc::SYS_kill,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_send_signal,
    libc::SYS_setgroups,
    libc::SYS_setpgid,
    libc::SYS_setsid,
    libc::SYS_fadvise64,
    libc::SYS_wait4,
    libc::SYS_waitid,
];
#[cfg(target_arch = "x86_64")]
const OLD_PROGRAMS: [i64; 3] = [libc::SYS_fork, libc::SYS_vfork, libc::SYS_getpgrp];
#[cfg(not(target_arch = "x86_64"))]
const OLD_PROGRAMS: [i64; 0] = [];
/// What DPDK does beyond it.
const DPDK: [i64; 6] = [
    libc::SYS_get_mempolicy,
    libc::SYS_mbind,
    libc::SYS_mkdirat,
    libc::SYS_sched_setscheduler,
    libc::SYS_set_mempolicy,
    libc::SYS_uname,
];
/// Commands of `bpf(2)` about maps and links that exist.
const MAPS: [u64; 9] = [
    1,  // BPF_MAP_LOOKUP_ELEM
    2,  // BPF_MAP_UPDATE_ELEM
    3,  // BPF_MAP_DELETE_ELEM
    4,  // BPF_MAP_GET_NEXT_KEY
    15, // BPF_OBJ_GET_INFO_BY_FD
    21, // BPF_MAP_LOOKUP_AND_DELETE_ELEM
    24, // BPF_MAP_LOOKUP_BATCH
    27, // BPF_MAP_DELETE_BATCH
    34, // BPF_LINK_DETACH
];
/// Commands of `bpf(2)` that load and attach programs, and try what the kernel knows.
const PROGRAMS_OF_EBPF: [u64; 9] = [
    0,  // BPF_MAP_CREATE
    5,  // BPF_PROG_LOAD
    8,  // BPF_PROG_ATTACH
    9,  // BPF_PROG_DETACH
    18, // BPF_BTF_LOAD
    22, // BPF_MAP_FREEZE
    28, // BPF_LINK_CREATE
    35, // BPF_PROG_BIND_MAP
    36, // BPF_TOKEN_CREATE, for which libbpf asks everywhere
];
const NAMESPACES: [i32; 8] = [
    libc::CLONE_NEWCGROUP,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWNET,
    libc::CLONE_NEWNS,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWUTS,
    0x80, // CLONE_NEWTIME
];
/// The allocator asks for it, and names its memory.
const PR_GET_THP_DISABLE: i32 = 42;
const PR_SET_VMA: i32 = 0x5356_4d41;

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd as _;
    use std::process::Command;

    use rustix::io::Errno;
    use rustix::net::{AddressFamily, SocketType};
    use rustix::thread::{move_into_link_name_space, set_no_new_privs};
    use smcr_os::scheduling::{self, Class};
    use smcr_os::seccomp::filter_this_thread;

    use super::*;

    fn confined<T: Send + 'static>(needs: Needs, work: impl FnOnce() -> T + Send + 'static) -> T {
        let confined = move || {
            set_no_new_privs(true).unwrap();
            for (filter, refusals) in filters(&needs).unwrap() {
                filter_this_thread(&filter, refusals).unwrap();
            }
            work()
        };
        std::thread::spawn(confined).join().unwrap()
    }

    /// Whoever takes a gateway over must not start anything, nor leave its namespaces; its work
    /// must go on.
    #[test]
    fn connections_and_threads_go_on_and_programs_do_not_start() {
        confined(Needs::default(), || {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let accepting = std::thread::spawn(move || listener.accept().unwrap().0);
            let mut server = accepting.join().unwrap();
            client.write_all(b"x").unwrap();
            server.read_exact(&mut [0]).unwrap();
            let program = Command::new("/bin/true").status().unwrap_err();
            assert_eq!(program.raw_os_error(), Some(libc::ENOSYS));
            let own = std::fs::File::open("/proc/self/ns/net").unwrap();
            let moved = move_into_link_name_space(own.as_fd(), None);
            assert_eq!(moved.unwrap_err(), Errno::NOSYS);
            let packets = rustix::net::socket(AddressFamily::PACKET, SocketType::RAW, None);
            assert_eq!(packets.unwrap_err(), Errno::NOSYS);
        });
    }

    /// A poller becomes real-time by itself, if the configuration lets it.
    #[test]
    fn who_never_becomes_real_time_may_not() {
        let needs = |realtime| Needs { realtime, ..Needs::default() };
        let refused = confined(needs(false), || scheduling::set(Class::RealTime)).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::ENOSYS));
        // If not, that is for want of a right.
        let permitted = confined(needs(true), || scheduling::set(Class::RealTime));
        assert_ne!(permitted.err().and_then(|e| e.raw_os_error()), Some(libc::ENOSYS));
        confined(needs(true), || scheduling::set(Class::Ordinary)).unwrap();
        confined(needs(false), || scheduling::set(Class::Batch)).unwrap();
    }

    /// The rules of an interception are taken away by programs.
    #[test]
    fn programs_start_where_they_are_needed() {
        let needs = Needs { programs: true, ..Needs::default() };
        confined(needs, || assert!(Command::new("/bin/true").status().unwrap().success()));
    }
}
