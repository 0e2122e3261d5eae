//! The environment of DPDK (EAL): memory, drivers and a thread for interrupts. It starts once in a
//! process and stays until the process ends.

use std::env;
use std::ffi::{CStr, CString, c_char};
use std::fs;
use std::path::PathBuf;
use std::process;
use std::sync::Mutex;
use std::thread;

use dpdk_sys::Table;
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_getaffinity};

use crate::Error;

/// The memory that DPDK has its packets in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Huge pages, of which this many are free.
    Huge(u64),
    /// Ordinary pages, because the host reserves no huge ones.
    Small,
}

impl Pages {
    /// What this host has now.
    pub fn of_host() -> Self {
        let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        Self::in_meminfo(&text)
    }

    fn in_meminfo(text: &str) -> Self {
        let field = |name: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(name))?;
            value.trim().parse::<u64>().ok()
        };
        match (field("HugePages_Total:"), field("HugePages_Free:")) {
            (Some(1..), Some(free)) => Self::Huge(free),
            _ => Self::Small,
        }
    }
}

/// Starts DPDK, if no earlier call did. `extra` are arguments of EAL beside our own.
///
/// # Errors
///
/// [`Error`], if there is no DPDK, if it does not start (now or before), or if it was started with
/// other arguments.
///
/// # Panics
///
/// If the process has no more threads.
pub fn start(extra: &[String]) -> Result<(), Error> {
    static STARTED: Mutex<Option<Start>> = Mutex::new(None);
    let table = dpdk_sys::table().map_err(Error::Unavailable)?;
    let mut started = STARTED.lock().expect("nobody panics while holding it");
    if let Some(before) = started.as_ref() {
        let same = before.extra == extra;
        return if same { before.result.clone() } else { Err(Error::StartedOtherwise) };
    }
    let prefix = format!("smcgate-{}", process::id());
    let arguments = arguments(&prefix, Pages::of_host(), extra);
    // EAL pins the thread that starts it.
    let starting = thread::Builder::new().name("dpdk-eal".into());
    let starting = starting.spawn(move || init(table, &arguments));
    let result = starting.expect("a process can have one more thread").join();
    let result = result.expect("starting DPDK does not panic");
    remove_folder(&prefix);
    *started = Some(Start { extra: extra.to_vec(), result: result.clone() });
    result
}

/// The one start of DPDK in this process.
struct Start {
    extra: Vec<String>,
    result: Result<(), Error>,
}

/// The version of DPDK that this process has loaded, or would load.
///
/// # Errors
///
/// [`Error::Unavailable`].
pub fn version() -> Result<&'static str, Error> {
    let table = dpdk_sys::table().map_err(Error::Unavailable)?;
    // SAFETY: it asks for nothing.
    let version = unsafe { (table.version)() };
    // SAFETY: the table promises a string that a zero ends and that lives for ever.
    let version = unsafe { CStr::from_ptr(version) };
    Ok(version.to_str().unwrap_or("of a name that is not UTF-8"))
}

/// Runs EAL's initialization on this thread.
fn init(table: &Table, arguments: &[String]) -> Result<(), Error> {
    let arguments = arguments.iter().map(|argument| CString::new(argument.as_str()));
    let arguments: Vec<CString> = arguments
        .collect::<Result<_, _>>()
        .map_err(|_| Error::NotStarted("an argument contains a zero byte".into()))?;
    let count = i32::try_from(arguments.len()).expect("a configuration file is not that long");
    // EAL keeps them and reorders the array, so both are left to it.
    let raw = arguments.into_iter().map(CString::into_raw);
    let argv: &'static mut [*mut c_char] =
        raw.chain([std::ptr::null_mut()]).collect::<Vec<_>>().leak();
    // SAFETY: `start` asks for
    // - one call in a process: `start` above makes it under a lock, and keeps the result;
    // - as many writable strings that live for ever as it is told: `into_raw` and `leak`.
    let status = unsafe { (table.start)(count, argv.as_mut_ptr()) };
    let log = take_log(table);
    if status == 0 {
        return Ok(());
    }
    let reason = Errno::from_raw_os_error(status).to_string();
    Err(Error::NotStarted(log.unwrap_or(reason).trim_end_matches('.').to_owned()))
}

/// The arguments of EAL. Whoever names memory in `extra` decides about memory.
fn arguments(prefix: &str, pages: Pages, extra: &[String]) -> Vec<String> {
    let has = |names: &[&str]| {
        extra.iter().any(|given| names.iter().any(|name| given.split('=').next() == Some(name)))
    };
    let mut all = vec![
        "smcgate".into(),
        format!("--lcores=0@({})", cores()),
        "--no-telemetry".into(),
        format!("--file-prefix={prefix}"),
    ];
    // To allow a device that no driver takes keeps EAL from taking those that nobody named: ports
    // are added one by one.
    if !has(&["-a", "--allow", "-b", "--block", "--no-pci"]) {
        all.extend(["-a".into(), "0000:00:00.0".into()]);
    }
    let small = has(&["--no-huge"])
        || (pages == Pages::Small && !has(&["--in-memory", "--huge-dir", "--socket-mem"]));
    if small {
        // Without huge pages, all memory is reserved at start.
        all.extend(["--no-huge".into(), "--no-shconf".into()]);
        if !has(&["-m"]) {
            all.extend(["-m".into(), SMALL_MEGABYTES.to_string()]);
        }
    } else if !has(&["--in-memory", "--huge-dir"]) {
        // It needs no mounted file system, and leaves no files.
        all.push("--in-memory".into());
    }
    let given = extra.iter().filter(|given| *given != "--no-huge");
    all.extend(given.cloned());
    all
}

/// The processors that this process may use, as EAL writes them.
fn cores() -> String {
    let set = sched_getaffinity(None).expect("the kernel tells a thread its processors");
    let cores = (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core));
    cores.map(|core| core.to_string()).collect::<Vec<_>>().join(",")
}

/// Removes the folder that EAL makes for files, of which it has none here.
fn remove_folder(prefix: &str) {
    let roots = ["RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR"].into_iter().filter_map(env::var_os);
    let roots = roots.map(PathBuf::from).chain(["/var/run".into(), "/tmp".into()]);
    for root in roots {
        // It fails for all but one, where the folder is. If it has files, it stays.
        drop(fs::remove_dir(root.join("dpdk").join(prefix)));
    }
}

/// What DPDK has logged since the last call, in one line, without what says nothing.
pub(crate) fn take_log(table: &Table) -> Option<String> {
    let mut text = [0_u8; 4096];
    let room = u32::try_from(text.len()).expect("it is short");
    // SAFETY: it asks for a buffer of that many bytes: `text`, which is exclusive.
    let len = unsafe { (table.take_log)(text.as_mut_ptr().cast(), room) };
    reasons(&String::from_utf8_lossy(&text[..len as usize]))
}

/// The lines of a log that say why something failed.
fn reasons(log: &str) -> Option<String> {
    let lines = log.lines().map(|line| line.strip_prefix("EAL: ").unwrap_or(line).trim());
    let says_why = |line: &&str| !line.is_empty() && !NO_REASONS.iter().any(|no| line.contains(no));
    let mut lines: Vec<&str> = lines.filter(says_why).collect();
    lines.dedup();
    (!lines.is_empty()).then(|| lines.join("; "))
}

/// The memory that DPDK gets where there are no huge pages: room for the packets of a few ports.
const SMALL_MEGABYTES: u32 = 256;
/// Parts of lines that DPDK logs in any case, or beside a line that says more.
const NO_REASONS: [&str; 10] = [
    "Detected ",
    "Selected IOVA mode",
    "Physical addresses are unavailable",
    "VFIO support",
    "hugepages reported on node",
    "no mounted hugetlbfs found",
    "FATAL: ",
    "mp action",
    "Failed to attach device on primary process",
    "TELEMETRY",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|&text| text.into()).collect()
    }

    #[test]
    fn memory_is_huge_where_the_host_reserves_huge_pages() {
        let none = "HugePages_Total:       0\nHugePages_Free:        0\n";
        assert_eq!(Pages::in_meminfo(none), Pages::Small);
        let all_taken = "HugePages_Total:      64\nHugePages_Free:        0\n";
        assert_eq!(Pages::in_meminfo(all_taken), Pages::Huge(0));
        assert_eq!(Pages::in_meminfo(""), Pages::Small);

        let small = arguments("p", Pages::Small, &[]);
        assert!(small.ends_with(&strings(&["--no-huge", "--no-shconf", "-m", "256"])), "{small:?}");
        let huge = arguments("p", Pages::Huge(1), &[]);
        assert!(huge.ends_with(&strings(&["--in-memory"])), "{huge:?}");
    }

    #[test]
    fn who_names_memory_decides_about_it() {
        let chosen = arguments("p", Pages::Huge(1), &strings(&["--no-huge", "-m", "64"]));
        let end = ["--no-huge", "--no-shconf", "-m", "64"];
        assert!(chosen.ends_with(&strings(&end)), "{chosen:?}");
        let chosen = arguments("p", Pages::Small, &strings(&["--huge-dir=/dev/hugepages"]));
        assert!(!chosen.iter().any(|given| given == "--no-huge" || given == "--in-memory"));
        let chosen = arguments("p", Pages::Small, &strings(&["--block=0000:01:00.0"]));
        assert!(!chosen.iter().any(|given| given == "-a"));
    }

    #[test]
    fn a_log_gives_its_reasons_in_one_line() {
        let log = "EAL: Detected CPU lcores: 2\n\
                   rte_pmd_init_internals(): net_af_packet0: ioctl failed (SIOCGIFINDEX):No such \
                   device\nEAL: Failed to attach device on primary process\n";
        let reason = "rte_pmd_init_internals(): net_af_packet0: ioctl failed \
                      (SIOCGIFINDEX):No such device";
        assert_eq!(reasons(log).as_deref(), Some(reason));
        assert_eq!(reasons("EAL: Selected IOVA mode 'VA'\n"), None);
    }
}
