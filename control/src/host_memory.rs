//! How much memory this process may have: what the host has, or less where a cgroup says so.

use std::fs;
use std::path::{Path, PathBuf};

use crate::ebpf::cgroup::own_directory;

/// The memory of the host in bytes, or the smallest limit of the cgroups that this process is in.
/// `None` if the kernel shows neither. Swap does not count.
pub fn limit() -> Option<u64> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let host = total(&read("/proc/meminfo"));
    let (mounts, cgroup) = (read("/proc/self/mountinfo"), read("/proc/self/cgroup"));
    let second = own_directory(&mounts, &cgroup).and_then(|own| smallest(&own, "memory.max"));
    let first = first_version(&mounts, &cgroup);
    let first = first.and_then(|own| smallest(&own, "memory.limit_in_bytes"));
    [host, second, first].into_iter().flatten().min()
}

/// `MemTotal` of `/proc/meminfo`, in bytes.
fn total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib * 1024)
}

/// The smallest number in the files of that name in `own` and in the directories above it. The file
/// of a cgroup without a limit says `max`, and the uppermost cgroup has no such file.
fn smallest(own: &Path, file: &str) -> Option<u64> {
    let limits = own.ancestors().filter_map(|directory| {
        let text = fs::read_to_string(directory.join(file)).ok()?;
        text.trim().parse().ok()
    });
    limits.min()
}

/// The directory of this process in the hierarchy of version 1 that has the memory controller.
fn first_version(mounts: &str, cgroup: &str) -> Option<PathBuf> {
    let own = cgroup.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        controllers.split(',').any(|one| one == "memory").then_some(path)
    })?;
    mounts.lines().find_map(|line| {
        let (mount, filesystem) = line.split_once(" - ")?;
        let mut words = filesystem.split(' ');
        let is_cgroup = words.next() == Some("cgroup");
        let has_memory = words.nth(1)?.split(',').any(|option| option == "memory");
        let mut fields = mount.split(' ').skip(3);
        let (root, point) = (fields.next()?, fields.next()?);
        // A container may see only its own part of the tree, at the top of the mount.
        let below = own.strip_prefix(root.trim_end_matches('/')).unwrap_or("");
        (is_cgroup && has_memory).then(|| Path::new(point).join(below.trim_start_matches('/')))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_a_host_is_read() {
        let text = "MemTotal:        8029516 kB\nMemFree:          123456 kB\n";
        assert_eq!(total(text), Some(8_029_516 * 1024));
        assert_eq!(total("MemFree: 1 kB\n"), None);
        assert!(limit().is_some_and(|bytes| bytes > 1 << 20), "{:?}", limit());
    }

    /// In a container, what counts is the limit of any group that it is in, however far above.
    #[test]
    fn the_smallest_limit_above_counts() {
        let top = tempfile::tempdir().unwrap();
        let own = top.path().join("pod/container");
        fs::create_dir_all(&own).unwrap();
        assert_eq!(smallest(&own, "memory.max"), None);
        fs::write(own.join("memory.max"), "max\n").unwrap();
        fs::write(top.path().join("pod/memory.max"), "536870912\n").unwrap();
        fs::write(top.path().join("memory.max"), "1073741824\n").unwrap();
        assert_eq!(smallest(&own, "memory.max"), Some(512 << 20));
        fs::write(own.join("memory.max"), "268435456\n").unwrap();
        assert_eq!(smallest(&own, "memory.max"), Some(256 << 20));
    }

    #[test]
    fn hosts_with_the_first_version_are_understood() {
        let mounts = "36 32 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
        let own = "9:cpu,cpuacct:/x\n8:memory:/system.slice/it\n0::/system.slice/it\n";
        let expected = Path::new("/sys/fs/cgroup/memory/system.slice/it");
        assert_eq!(first_version(mounts, own).as_deref(), Some(expected));
        let inside = "36 32 0:31 /docker/a /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
        let found = first_version(inside, "8:memory:/docker/a\n");
        assert_eq!(found.as_deref(), Some(Path::new("/sys/fs/cgroup/memory")));
        assert_eq!(first_version("", own), None);
    }
}
