//! Files that the gateway may open once it has started, by Landlock.

use std::env;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, LandlockStatus, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus,
    path_beneath_rules,
};
use rustix::process::geteuid;

use super::needs::Needs;

/// What may be read, written and run. What is not there is left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Paths {
    read: Vec<PathBuf>,
    write: Vec<PathBuf>,
    run: Vec<PathBuf>,
}

impl Paths {
    /// What a gateway with these needs, and its configuration in `file`, opens while it runs; none
    /// if nobody knows.
    pub(super) fn of(needs: &Needs, file: &Path) -> Option<Self> {
        if needs.dpdk {
            return None;
        }
        let owned = |paths: &[&str]| paths.iter().map(PathBuf::from).collect::<Vec<_>>();
        let mut paths = Self { read: owned(&READ), write: owned(&WRITE), run: Vec::new() };
        // Files that are replaced are other files to the kernel, so it is better to name their
        // folder. But root could read what is secret there.
        paths.read.extend(if geteuid().is_root() { owned(&NAMES) } else { owned(&["/etc"]) });
        let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
        paths.read.push(folder.unwrap_or(Path::new(".")).to_owned());
        paths.write.extend(needs.meeting.iter().chain(&needs.written).cloned());
        if needs.verbs {
            paths.read.extend(owned(&["/etc/libibverbs.d"]));
            paths.write.extend(owned(&["/dev/infiniband"]));
        }
        if needs.programs {
            paths.read.extend(owned(&["/etc/iproute2", "/usr/share/iproute2"]));
            paths.run.extend(owned(&LOADERS));
            paths.run.extend(["nft", "ip"].iter().flat_map(|name| places_of(name)));
        }
        Some(paths)
    }
}

/// Where a program may be that is started by its name.
fn places_of(name: &str) -> Vec<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).map(|folder| folder.join(name)).filter(|path| path.is_file()).collect()
}

/// Denies this thread, and those that it starts from now on, every file except `paths`. Returns
/// what is in force, in words.
///
/// # Errors
///
/// Why nothing is.
pub(super) fn restrict_to(paths: &Paths) -> Result<String, String> {
    let why = |error: landlock::RulesetError| error.to_string();
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let write = AccessFs::from_all(NEWEST) & !AccessFs::Execute;
    let run = read | AccessFs::Execute;
    let rules = Ruleset::default()
        .handle_access(AccessFs::from_all(NEWEST))
        .and_then(Ruleset::create)
        .and_then(|it| it.add_rules(path_beneath_rules(&paths.read, read)))
        .and_then(|it| it.add_rules(path_beneath_rules(&paths.write, write)))
        .and_then(|it| it.add_rules(path_beneath_rules(&paths.run, run)))
        .map_err(why)?;
    let status = rules.restrict_self().map_err(why)?;
    match status.ruleset {
        RulesetStatus::FullyEnforced => Ok("on".to_owned()),
        RulesetStatus::PartiallyEnforced => {
            Ok(format!("on, as far as this kernel can ({})", version(&status.landlock)))
        }
        RulesetStatus::NotEnforced => Err(version(&status.landlock)),
    }
}

/// What this kernel knows of Landlock. Restricts nothing that anybody does.
///
/// # Errors
///
/// Why it is not to be had.
pub(super) fn available() -> Result<String, String> {
    // The version is told to those who restrict themselves only, so a thread does.
    let thread = std::thread::Builder::new().spawn(|| {
        let rules = Ruleset::default().handle_access(AccessFs::MakeBlock);
        let rules = rules.and_then(Ruleset::create).and_then(|it| it.restrict_self());
        rules.map(|status| status.landlock)
    });
    let status = thread.map_err(|error| error.to_string())?.join();
    let status = status.map_err(|_| "its thread ended".to_owned())?;
    match status.map_err(|error| error.to_string())? {
        status @ LandlockStatus::Available { .. } => Ok(version(&status)),
        status @ (LandlockStatus::NotEnabled | LandlockStatus::NotImplemented) => {
            Err(version(&status))
        }
    }
}

fn version(status: &LandlockStatus) -> String {
    match status {
        LandlockStatus::NotEnabled => "Landlock is not enabled in this kernel".to_owned(),
        LandlockStatus::NotImplemented => "this kernel has no Landlock".to_owned(),
        LandlockStatus::Available { effective_abi, kernel_abi } => {
            let version = kernel_abi.map_or_else(|| effective_abi.to_string(), |it| it.to_string());
            format!("Landlock version {version}")
        }
    }
}

/// The newest version that we ask for; older kernels do what they can.
const NEWEST: ABI = ABI::V5;

/// What the kernel says of itself, and libraries that are loaded when they are needed.
const READ: [&str; 10] = [
    "/proc",
    "/sys",
    "/usr/lib",
    "/lib",
    "/lib64",
    "/dev/urandom",
    // Where /etc/resolv.conf leads, depending on who makes it.
    "/run/systemd/resolve",
    "/run/NetworkManager",
    "/run/resolvconf",
    "/run/connman",
];
/// Locks on cores; and what a process without input reads.
const WRITE: [&str; 2] = ["/dev/shm", "/dev/null"];
/// What the C library reads to find out what a name means.
const NAMES: [&str; 7] = [
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/host.conf",
    "/etc/gai.conf",
    "/etc/services",
    "/etc/ld.so.cache",
];
/// What the kernel starts before a program that shares libraries.
const LOADERS: [&str; 2] = ["/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1"];

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::ErrorKind;

    use super::*;

    fn in_a_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
        std::thread::spawn(work).join().unwrap()
    }

    /// A gateway that somebody has taken over must not read what others keep from it.
    #[test]
    fn only_what_is_listed_can_be_opened() {
        let [ours, others] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let file = ours.path().join("a.toml");
        fs::write(&file, "ours").unwrap();
        fs::write(others.path().join("secret"), "theirs").unwrap();
        let secret = others.path().join("secret");
        in_a_thread(move || {
            let needs = Needs { written: [others.path().to_owned()].into(), ..Needs::default() };
            let paths = Paths::of(&Needs::default(), &file).unwrap();
            let in_force = restrict_to(&paths).expect("this kernel has Landlock");
            assert!(in_force.starts_with("on"), "{in_force}");
            let denied = |outcome: std::io::Result<()>| outcome.unwrap_err().kind();
            assert_eq!(fs::read_to_string(&file).unwrap(), "ours");
            assert_eq!(denied(fs::write(&file, "theirs")), ErrorKind::PermissionDenied);
            assert_eq!(denied(fs::read(&secret).map(drop)), ErrorKind::PermissionDenied);
            assert_eq!(denied(fs::read_dir("/").map(drop)), ErrorKind::PermissionDenied);
            fs::read_to_string("/proc/self/status").unwrap();
            fs::read_to_string("/etc/hosts").unwrap();
            assert!(Paths::of(&needs, &file).unwrap().write.contains(&others.path().to_owned()));
        });
    }

    /// The rules of an interception are taken away by these two, and by nothing else.
    #[test]
    fn programs_can_be_run_only_where_they_are_needed() {
        let run = |programs| {
            let needs = Needs { programs, ..Needs::default() };
            Paths::of(&needs, Path::new("a.toml")).unwrap().run
        };
        assert!(run(false).is_empty());
        let some = run(true);
        assert!(some.iter().any(|path| path.ends_with("ip")), "{some:?}");
        let known = |path: &PathBuf| {
            let name = path.file_name().unwrap().to_str().unwrap();
            ["ip", "nft"].contains(&name) || name.starts_with("ld-linux")
        };
        assert!(some.iter().all(known), "{some:?}");
    }
}
