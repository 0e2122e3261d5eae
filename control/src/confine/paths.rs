//! Files that the gateway may open once it has started, by Landlock.

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt as _;
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
        let is_root = geteuid().is_root();
        // They may be links to where another program puts what it has learned, such as
        // systemd-resolved.
        let names = NAMES.iter().flat_map(|name| places_to_read_again(Path::new(name), is_root));
        paths.read.extend(names);
        paths.read.extend(places_to_read_again(file, is_root));
        paths.write.extend(needs.meeting.iter().chain(&needs.written).cloned());
        if needs.verbs {
            paths.read.extend(owned(&["/etc/libibverbs.d"]));
            paths.write.extend(owned(&["/dev/infiniband"]));
        }
        if needs.programs {
            paths.read.extend(owned(&["/etc/iproute2", "/usr/share/iproute2"]));
            let programs = env::var_os("PATH").unwrap_or_default();
            let programs = ["nft", "ip"].into_iter().flat_map(|name| places_of(name, &programs));
            paths.run.extend(folders_of(programs.chain(owned(&LOADERS))));
        }
        Some(paths)
    }

    /// Those that are single files.
    pub(super) fn files(&self) -> Files {
        let of = |path: &PathBuf| Some((path.clone(), Files::identity(path)?));
        let (files, folders): (Vec<_>, Vec<_>) = self.read.iter().partition(|path| path.is_file());
        let real = |path: &PathBuf| path.canonicalize().ok();
        Files {
            files: files.into_iter().filter_map(of).collect(),
            folders: folders.into_iter().filter_map(real).collect(),
        }
    }
}

/// Files that may be read, and which they were.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Files {
    files: Vec<(PathBuf, (u64, u64))>,
    /// Whatever is in these may be read.
    folders: Vec<PathBuf>,
}

impl Files {
    /// Those in whose place another file is now, which may not be read.
    pub(super) fn replaced(&self) -> Vec<&Path> {
        let is_readable = |path: &Path| {
            let real = path.canonicalize();
            real.is_ok_and(|real| self.folders.iter().any(|folder| real.starts_with(folder)))
        };
        let replaced = |(path, before): &&(PathBuf, _)| {
            Self::identity(path).is_some_and(|now| now != *before) && !is_readable(path)
        };
        self.files.iter().filter(replaced).map(|(path, _)| path.as_path()).collect()
    }

    /// Which file is at `path`. To learn that, nobody opens it.
    fn identity(path: &Path) -> Option<(u64, u64)> {
        let metadata = path.metadata().ok()?;
        Some((metadata.dev(), metadata.ino()))
    }
}

/// What must be readable for `file` to be read again: its folder, because to the kernel a file that
/// was put in its place is another one; and if it is a link, the folder to which it leads.
fn places_to_read_again(file: &Path, is_root: bool) -> Vec<PathBuf> {
    let place_of = |file: &Path| {
        let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        // Where everybody has files, root could read what is secret.
        let is_shared = folder.canonicalize().is_ok_and(|it| it.components().count() <= 2);
        if is_root && is_shared { file.to_owned() } else { folder.to_owned() }
    };
    let mut places = vec![place_of(file)];
    places.extend(file.canonicalize().ok().map(|real| place_of(&real)));
    places.dedup();
    places
}

/// Where a program may be that is started by its name, if these are the folders of programs.
fn places_of(name: &str, folders: &OsStr) -> Vec<PathBuf> {
    let places = env::split_paths(folders).map(|folder| folder.join(name));
    places.filter(|path| path.is_file()).collect()
}

/// The folders of programs: an upgrade puts other files in their place, which must still take the
/// rules of an interception away.
fn folders_of(programs: impl IntoIterator<Item = PathBuf>) -> Vec<PathBuf> {
    let real = programs.into_iter().filter_map(|path| path.canonicalize().ok());
    let folders: BTreeSet<_> = real.filter_map(|path| path.parent().map(Path::to_owned)).collect();
    folders.into_iter().collect()
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
    use std::os::unix::fs::symlink;
    use std::process::Command;
    use std::sync::Barrier;

    use super::*;

    fn in_a_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
        std::thread::spawn(work).join().unwrap()
    }

    /// What `work` finds that is restricted to `paths`, after somebody else has done something.
    fn restricted<T: Send>(
        paths: &Paths,
        others: impl FnOnce(),
        work: impl FnOnce() -> T + Send,
    ) -> T {
        let (restricted, done) = (Barrier::new(2), Barrier::new(2));
        std::thread::scope(|scope| {
            let worker = scope.spawn(|| {
                restrict_to(paths).expect("this kernel has Landlock");
                restricted.wait();
                done.wait();
                work()
            });
            restricted.wait();
            others();
            done.wait();
            worker.join().unwrap()
        })
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

    /// The rules of an interception are taken away by programs, also after an upgrade.
    #[test]
    fn programs_can_be_run_only_where_they_are_needed() {
        let run = |programs| {
            let needs = Needs { programs, ..Needs::default() };
            Paths::of(&needs, Path::new("a.toml")).unwrap().run
        };
        assert!(run(false).is_empty());
        let some = run(true);
        assert!(some.iter().any(|path| path.join("ip").exists()), "{some:?}");
        assert!(some.iter().all(|path| path.is_dir()), "{some:?}");
    }

    #[test]
    fn a_program_that_was_upgraded_can_be_run() {
        let folder = tempfile::tempdir().unwrap();
        let [program, newer] = ["nft", "nft.new"].map(|name| folder.path().join(name));
        for path in [&program, &newer] {
            fs::copy("/bin/true", path).unwrap();
        }
        let mut paths = Paths::of(&Needs::default(), Path::new("a.toml")).unwrap();
        let loaders = LOADERS.map(PathBuf::from);
        paths.run =
            folders_of(places_of("nft", folder.path().as_os_str()).into_iter().chain(loaders));
        let run = || Command::new(&program).status().unwrap().success();
        assert!(restricted(&paths, || fs::rename(&newer, &program).unwrap(), run));
    }

    /// An operator may keep configurations elsewhere, and a link where programs look for them.
    #[test]
    fn a_configuration_that_is_a_link_can_be_read_again() {
        let [here, there] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let link = here.path().join("a.toml");
        let [real, newer] = ["b.toml", "b.new"].map(|name| there.path().join(name));
        fs::write(&real, "before").unwrap();
        symlink(&real, &link).unwrap();
        let paths = Paths::of(&Needs::default(), &link).unwrap();
        fs::write(&newer, "after").unwrap();
        let rename = || fs::rename(&newer, &real).unwrap();
        let text = restricted(&paths, rename, || fs::read_to_string(&link).unwrap());
        assert_eq!(text, "after");
    }

    /// Root that reads its configuration in /etc must not read the passwords there.
    #[test]
    fn root_gets_no_folder_of_everybody() {
        let places = |file: &str, is_root| places_to_read_again(Path::new(file), is_root);
        let path = |text: &str| vec![PathBuf::from(text)];
        assert_eq!(places("/etc/x.toml", true), path("/etc/x.toml"));
        assert_eq!(places("/x.toml", true), path("/x.toml"));
        assert_eq!(places("/etc/x.toml", false), path("/etc"));
        assert_eq!(places("/etc/apt/x.toml", true), path("/etc/apt"));
        assert_eq!(places("x.toml", false), path("."));
    }

    /// A single file that somebody has replaced cannot be read: operators must learn it.
    #[test]
    fn a_file_that_was_replaced_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let [path, newer] = ["hosts", "hosts.new"].map(|name| folder.path().join(name));
        for path in [&path, &newer] {
            fs::write(path, "").unwrap();
        }
        let paths = Paths { read: vec![path.clone(), "/proc".into()], ..Paths::default() };
        let files = paths.files();
        assert!(files.replaced().is_empty());
        fs::rename(&newer, &path).unwrap();
        assert_eq!(files.replaced(), [&path]);
    }

    /// systemd-resolved puts a new file in place of the one to which /etc/resolv.conf leads. The
    /// gateway must be able to read it, and must not tell operators to restart.
    #[test]
    fn a_link_into_a_folder_that_may_be_read_is_followed() {
        let [etc, run] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let link = etc.path().join("resolv.conf");
        let [real, newer] = ["stub.conf", "stub.new"].map(|name| run.path().join(name));
        fs::write(&real, "before").unwrap();
        symlink(&real, &link).unwrap();
        let mut paths = Paths::of(&Needs::default(), Path::new("a.toml")).unwrap();
        paths.read.push(link.clone());
        paths.read.extend(places_to_read_again(&link, true));
        let files = paths.files();
        fs::write(&newer, "after").unwrap();
        let rename = || fs::rename(&newer, &real).unwrap();
        let text = restricted(&paths, rename, || fs::read_to_string(&link).unwrap());
        assert_eq!(text, "after");
        assert_eq!(files.replaced(), [""; 0].map(Path::new));
    }
}
