//! The cgroup v2 that this process is in: what an eBPF program about its sockets is attached to.

use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};

/// Opens the cgroup of this process.
///
/// Not every process can see it: `ip netns exec`, for example, mounts another `/sys` over it. Then
/// this mounts the file system once more, at no path, for as long as it takes to open the cgroup.
///
/// # Errors
///
/// Why not, in words that continue a sentence.
pub(crate) fn open_own() -> Result<OwnedFd, String> {
    let read = |path: &str| fs::read_to_string(path).map_err(|error| format!("{path}: {error}"));
    let cgroup = read("/proc/self/cgroup")?;
    if let Some(directory) = own_directory(&read("/proc/self/mountinfo")?, &cgroup)
        && let Ok(open) = open_cgroup2(rustix::fs::CWD, &directory)
    {
        return Ok(open);
    }
    let own = cgroup.lines().find_map(|line| line.strip_prefix("0::/"));
    let own = own.ok_or("the kernel has only v1")?;
    let root =
        mount_nowhere().map_err(|error| format!("none is mounted, and mounting: {error}"))?;
    let below = Path::new(if own.is_empty() { "." } else { own });
    open_cgroup2(&root, below).map_err(|error| format!("{}: {error}", below.display()))
}

/// The root of all cgroups that this process can reach: of the host, or of its container.
///
/// It stays open, because a process that has given up its privileges cannot mount the file system
/// any more, and may not read it either.
#[derive(Debug)]
pub(crate) struct Root(OwnedFd);

impl Root {
    /// Opens it.
    ///
    /// # Errors
    ///
    /// Why not, in words that continue a sentence.
    pub(crate) fn open() -> Result<Self, String> {
        let root = mount_nowhere().and_then(|root| open_cgroup2(&root, Path::new(".")));
        root.or_else(|error| {
            let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
            let directory = root_directory(&mounts).ok_or(error)?;
            open_cgroup2(rustix::fs::CWD, &directory)
        })
        .map(Self)
        .map_err(|error| format!("the root of the cgroups cannot be opened: {error}"))
    }

    /// Whether it is the root of the host, which all applications are below of.
    pub(crate) fn is_of_host(&self) -> bool {
        // The one cgroup in which nothing can be counted.
        rustix::fs::statat(&self.0, "cgroup.events", AtFlags::empty()).is_err()
    }

    /// Opens the cgroup at `path`, which begins with `/`, this root.
    ///
    /// # Errors
    ///
    /// Why not: whether that is because there is none, [`is_absent`] says.
    pub(crate) fn below(&self, path: &Path) -> rustix::io::Result<OwnedFd> {
        let below = path.strip_prefix("/").unwrap_or(path);
        let below = if below.as_os_str().is_empty() { Path::new(".") } else { below };
        open_cgroup2(&self.0, below)
    }
}

/// Whether a cgroup could not be opened because it is not there. Every other error, such as that
/// descriptors have run out, says nothing about the cgroup.
pub(crate) fn is_absent(error: Errno) -> bool {
    [Errno::NOENT, Errno::NOTDIR, Errno::NODEV].contains(&error)
}

impl From<Root> for OwnedFd {
    fn from(root: Root) -> Self {
        root.0
    }
}

impl AsFd for Root {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Opens a directory, if it belongs to cgroup v2 and not to another file system mounted over it.
///
/// It can be named, and not be read, which is enough to attach programs: Landlock would have to
/// allow more.
fn open_cgroup2(at: impl AsFd, directory: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let open = rustix::fs::openat(at, directory, flags, Mode::empty())?;
    if rustix::fs::fstatfs(&open)?.f_type != CGROUP2_MAGIC {
        return Err(Errno::NOENT);
    }
    Ok(open)
}

fn mount_nowhere() -> rustix::io::Result<OwnedFd> {
    let filesystem = rustix::mount::fsopen("cgroup2", FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_create(&filesystem)?;
    let flags = FsMountFlags::FSMOUNT_CLOEXEC;
    rustix::mount::fsmount(&filesystem, flags, MountAttrFlags::empty())
}

/// The directory of the cgroup that this process is in, from its `mountinfo` and `cgroup` files
/// below `/proc/self`.
///
/// On hybrid hosts cgroup v2 is mounted below the tree of v1 (`unified`), so the mount is looked up
/// and not assumed. `None` if there is no mount of cgroup v2 that shows our cgroup.
pub(crate) fn own_directory(mountinfo: &str, cgroup: &str) -> Option<PathBuf> {
    let own = cgroup.lines().find_map(|line| line.strip_prefix("0::"))?;
    mounts(mountinfo).find_map(|(root, point)| {
        let below = own.strip_prefix(root.trim_end_matches('/'))?;
        // A cgroup outside our cgroup namespace is shown as a way up.
        let outside = below.split('/').any(|part| part == "..");
        if outside || !(below.is_empty() || below.starts_with('/')) {
            return None;
        }
        let point = PathBuf::from(unescape(point));
        Some(point.join(below.trim_start_matches('/')))
    })
}

/// Where the highest cgroup is mounted that a mount shows, from `mountinfo`.
///
/// In a container that has a namespace of cgroups, and the tree of its host mounted beside its own,
/// the kernel shows how far that tree begins above: `/../..`.
fn root_directory(mountinfo: &str) -> Option<PathBuf> {
    // The kernel writes all ways up first, and of one mount over another the later one counts.
    let height = |root: &str| {
        let steps = root.split('/').filter(|part| !part.is_empty());
        steps.map(|step| if step == ".." { 1 } else { -1 }).sum::<i32>()
    };
    // A part of the tree that we are not below of is nobody's root.
    let roots = mounts(mountinfo).filter(|(root, _)| height(root) >= 0);
    let (_, point) = roots.max_by_key(|(root, _)| height(root))?;
    Some(PathBuf::from(unescape(point)))
}

/// What of cgroup v2 is mounted, and where.
fn mounts(mountinfo: &str) -> impl Iterator<Item = (&str, &str)> {
    mountinfo.lines().filter_map(|line| {
        let (mount, filesystem) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let is_v2 = filesystem.split(' ').next() == Some("cgroup2");
        is_v2.then_some((fields.next()?, fields.next()?))
    })
}

/// Undoes the kernel's `\040` for blanks and the like.
fn unescape(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (digits, rest) = part.split_at_checked(3).unwrap_or((part, ""));
        match u8::from_str_radix(digits, 8) {
            Ok(byte) => plain.push(char::from(byte)),
            Err(_) => plain.push_str(digits),
        }
        plain.push_str(rest);
    }
    plain
}

/// `CGROUP2_SUPER_MAGIC` of the kernel's `magic.h`.
const CGROUP2_MAGIC: rustix::fs::FsWord = 0x6367_7270;

#[cfg(test)]
mod tests {
    use super::*;

    /// In a gateway started by `ip netns exec` no mount shows the cgroup. If the gateway needed
    /// one, it would never speak SMC-R.
    #[test]
    #[ignore = "needs the privilege to mount; run by scripts/test e2e"]
    fn the_cgroup_can_be_opened_where_no_mount_shows_it() {
        let root = mount_nowhere().expect("root may mount");
        assert!(open_cgroup2(&root, Path::new(".")).is_ok());
        assert!(open_own().is_ok());
        assert!(Root::open().unwrap().below(Path::new("/")).is_ok());
    }

    /// A program attached to another directory would see no socket of ours.
    #[test]
    fn a_directory_of_another_file_system_is_no_cgroup() {
        let not_one = open_cgroup2(rustix::fs::CWD, Path::new("/"));
        assert_eq!(not_one.unwrap_err(), Errno::NOENT);
    }

    /// Programs must not be taken off a cgroup that could only not be looked at.
    #[test]
    fn what_cannot_be_opened_may_be_there() {
        for gone in [Errno::NOENT, Errno::NOTDIR, Errno::NODEV] {
            assert!(is_absent(gone), "{gone}");
        }
        for unknown in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::ACCESS, Errno::INTR] {
            assert!(!is_absent(unknown), "{unknown}");
        }
    }

    const UNIFIED: &str = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n\
        41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:7 - cgroup2 cgroup2 rw\n";
    const PURE: &str = "25 22 0:23 / /sys/fs/cgroup rw - cgroup2 none rw,nsdelegate\n";

    #[test]
    fn pure_and_hybrid_hosts() {
        let own = "8:pids:/\n0::/system.slice/smcgate.service\n";
        let service = "system.slice/smcgate.service";
        let at = |mountinfo| own_directory(mountinfo, own).unwrap();
        assert_eq!(at(PURE), Path::new("/sys/fs/cgroup").join(service));
        assert_eq!(at(UNIFIED), Path::new("/sys/fs/cgroup/unified").join(service));
        let root = own_directory(PURE, "0::/\n").unwrap();
        assert_eq!(root, Path::new("/sys/fs/cgroup"));
    }

    /// In a container the mount shows a part of the tree, and its path may hold blanks.
    #[test]
    fn a_mount_of_a_part_of_the_tree() {
        let mountinfo = "9 8 0:23 /pod/a /cg\\040v2 rw - cgroup2 none rw\n";
        let at = |own| own_directory(mountinfo, own);
        assert_eq!(at("0::/pod/a/x\n"), Some(PathBuf::from("/cg v2/x")));
        assert_eq!(at("0::/pod/a\n"), Some(PathBuf::from("/cg v2/")));
        assert_eq!(at("0::/pod/ab\n"), None, "a neighbour with a longer name");
        assert_eq!(at("0::/other\n"), None);
    }

    /// A gateway in a pod leads connections of other pods only if it finds the tree of the node,
    /// which is mounted beside its own.
    #[test]
    fn the_root_is_the_highest_that_is_mounted() {
        let own = "30 29 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
        let node = "31 29 0:26 /../../.. /host/cgroup ro - cgroup2 cgroup2 rw\n";
        let sibling = "32 29 0:26 /../other /elsewhere ro - cgroup2 cgroup2 rw\n";
        let root = |text: &str| root_directory(text).unwrap();
        assert_eq!(root(&format!("{own}{node}{sibling}")), Path::new("/host/cgroup"));
        assert_eq!(root(&format!("{node}{own}")), Path::new("/host/cgroup"));
        assert_eq!(root(own), Path::new("/sys/fs/cgroup"));
        assert_eq!(own_directory(&format!("{node}{own}"), "0::/\n").unwrap(), root(own));
        assert_eq!(root(UNIFIED), Path::new("/sys/fs/cgroup/unified"));
        assert_eq!(root_directory(""), None);
        let part = "30 29 0:26 /kubepods/a /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
        assert_eq!(root_directory(part), None, "what is above cannot be seen");
    }

    #[test]
    fn nothing_to_attach_to() {
        assert_eq!(own_directory(PURE, "8:pids:/\n"), None, "only v1");
        assert_eq!(own_directory("", "0::/\n"), None, "no mount");
        assert_eq!(own_directory(PURE, "0::/../outside\n"), None, "outside our namespace");
    }
}
