//! What is in the way of the access log's file, found out without creating it.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::{Access, AtFlags, CWD, OFlags, accessat};
use rustix::io::Errno;

use crate::confine;

/// Why lines cannot be written now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// The configuration names a place that nobody can write to, or not we. It stays so.
    Wrong(String),
    /// It may pass without us: a disk is full or broken, or nobody reads a pipe. Until then lines
    /// are dropped and counted.
    Passing(String),
}

impl Obstacle {
    /// Why the configuration is wrong; none if the obstacle may pass.
    pub fn wrong(self) -> Option<String> {
        match self {
            Self::Wrong(why) => Some(why),
            Self::Passing(_) => None,
        }
    }

    fn of(error: &io::Error) -> Self {
        let why = format!("{error}{}", confine::what_root_lacks(error));
        match Errno::from_io_error(error) {
            Some(
                Errno::NOENT
                | Errno::NOTDIR
                | Errno::ISDIR
                | Errno::ACCESS
                | Errno::PERM
                | Errno::LOOP
                | Errno::NAMETOOLONG
                | Errno::INVAL,
            ) => Self::Wrong(why),
            Some(_) | None => Self::Passing(why),
        }
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Wrong(why) | Self::Passing(why)) = self;
        f.write_str(why)
    }
}

/// Looks whether lines could be appended to the file at `path`.
///
/// # Errors
///
/// [`Obstacle`]. Nothing was created.
pub(super) fn look_at(path: &Path) -> Result<(), Obstacle> {
    let may = |path: &Path, how: Access| {
        accessat(CWD, path, how, AtFlags::EACCESS).map_err(|error| Obstacle::of(&error.into()))
    };
    match fs::metadata(path) {
        Ok(it) if it.is_dir() => Err(Obstacle::of(&Errno::ISDIR.into())),
        Ok(it) if it.is_file() => {
            let flags =
                i32::try_from(OFlags::NONBLOCK.bits()).expect("a flag of open(2) is an int");
            let opened = OpenOptions::new().append(true).custom_flags(flags).open(path);
            opened.map(drop).map_err(|error| Obstacle::of(&error))
        }
        // Whoever reads a pipe would see its end if we opened it, and closed it again.
        Ok(_) => may(path, Access::WRITE_OK),
        Err(error) if error.kind() == io::ErrorKind::NotFound => match path.parent() {
            Some(folder) if folder.is_dir() => may(folder, Access::WRITE_OK | Access::EXEC_OK),
            Some(_) | None => Err(Obstacle::Wrong("there is no such directory".to_owned())),
        },
        Err(error) => Err(Obstacle::of(&error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A gateway whose disk is full must start, as systemd starts none again whose configuration is
    /// wrong.
    #[test]
    fn what_may_pass_is_told_from_what_is_wrong() {
        let of = |errno: Errno| Obstacle::of(&errno.into());
        for passing in [Errno::NOSPC, Errno::ROFS, Errno::IO, Errno::NXIO, Errno::MFILE] {
            assert!(matches!(of(passing), Obstacle::Passing(_)), "{passing:?}");
        }
        for wrong in [Errno::ACCESS, Errno::ISDIR, Errno::NOTDIR, Errno::NOENT] {
            assert!(matches!(of(wrong), Obstacle::Wrong(_)), "{wrong:?}");
        }
    }

    /// Whoever only asks must find the world as it was.
    #[test]
    fn nothing_is_created_by_looking() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        assert_eq!(look_at(&path), Ok(()));
        assert!(!path.exists());
        let none = look_at(&folder.path().join("no/log")).unwrap_err();
        assert_eq!(none.to_string(), "there is no such directory");
        assert!(matches!(look_at(folder.path()), Err(Obstacle::Wrong(_))));
        let below = look_at(Path::new("/dev/null/log")).unwrap_err();
        assert!(below.wrong().is_some());
        rustix::fs::mkfifoat(CWD, &path, 0o600.into()).unwrap();
        assert_eq!(look_at(&path), Ok(()), "somebody may read it later");
    }
}
