//! Where a run keeps its files.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use crate::failure::{Doing as _, Result};

/// A temporary folder for configurations and logs. The janitor removes it.
#[derive(Debug)]
pub(crate) struct Folder(PathBuf);

impl Folder {
    /// The path of this process' folder, whether it is there or not.
    fn of_this_process() -> PathBuf {
        std::env::temp_dir().join(format!("smcgate-perf-{}", std::process::id()))
    }

    /// Makes it.
    ///
    /// # Errors
    ///
    /// When it cannot be made, or is there already.
    pub(crate) fn create() -> Result<Self> {
        Self::create_at(Self::of_this_process())
    }

    /// Everybody can guess the name. If somebody else has made the folder, or a symbolic link, then
    /// programs of root would use files of theirs.
    fn create_at(path: PathBuf) -> Result<Self> {
        let create = fs::create_dir(&path);
        // Servers that are not root have folders of their own in it.
        let permit =
            create.and_then(|()| fs::set_permissions(&path, Permissions::from_mode(0o711)));
        permit.doing(|| format!("creating {}", path.display()))?;
        Ok(Self(path))
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file and returns its path.
    ///
    /// # Errors
    ///
    /// When it cannot be written.
    pub(crate) fn write(&self, name: &str, text: &str) -> Result<String> {
        let path = self.0.join(name);
        fs::write(&path, text).doing(|| format!("writing {}", path.display()))?;
        Ok(path.to_string_lossy().into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In a folder of somebody else, the harness would run configurations of theirs as root.
    #[test]
    fn a_folder_that_is_there_is_not_used() {
        let path = std::env::temp_dir().join(format!("folder-{}", std::process::id()));
        let folder = Folder::create_at(path.clone()).unwrap();
        let mode = fs::metadata(folder.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o711);
        let failure = Folder::create_at(path.clone()).unwrap_err().to_string();
        fs::remove_dir(&path).unwrap();
        assert!(failure.contains("exists"), "{failure}");
    }
}
