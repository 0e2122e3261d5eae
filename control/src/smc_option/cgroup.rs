//! Which directory is this process's own cgroup v2.

use std::path::PathBuf;

/// The directory of the cgroup that this process is in, from its `mountinfo` and `cgroup` files
/// below `/proc/self`.
///
/// On hybrid hosts cgroup v2 is mounted below the tree of v1 (`unified`), so the mount is looked up
/// and not assumed. `None` if there is no mount of cgroup v2 that shows our cgroup.
pub(super) fn own_directory(mountinfo: &str, cgroup: &str) -> Option<PathBuf> {
    let own = cgroup.lines().find_map(|line| line.strip_prefix("0::"))?;
    mountinfo.lines().find_map(|line| {
        let (mount, filesystem) = line.split_once(" - ")?;
        if filesystem.split(' ').next() != Some("cgroup2") {
            return None;
        }
        let mut fields = mount.split(' ').skip(3);
        let (root, point) = (fields.next()?, fields.next()?);
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

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

    #[test]
    fn nothing_to_attach_to() {
        assert_eq!(own_directory(PURE, "8:pids:/\n"), None, "only v1");
        assert_eq!(own_directory("", "0::/\n"), None, "no mount");
        assert_eq!(own_directory(PURE, "0::/../outside\n"), None, "outside our namespace");
    }
}
