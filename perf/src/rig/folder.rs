//! Where a run keeps its files.

use std::fs;
use std::path::{Path, PathBuf};

use crate::failure::{Doing as _, Result};

/// A temporary folder for configurations and logs. The janitor removes it.
#[derive(Debug)]
pub(crate) struct Folder(PathBuf);

impl Folder {
    /// The path of this process' folder, whether it is there or not.
    pub(crate) fn of_this_process() -> PathBuf {
        std::env::temp_dir().join(format!("smcgate-perf-{}", std::process::id()))
    }

    /// Makes it.
    ///
    /// # Errors
    ///
    /// When it cannot be made.
    pub(crate) fn create() -> Result<Self> {
        let path = Self::of_this_process();
        fs::create_dir_all(&path).doing(|| format!("creating {}", path.display()))?;
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
