//! Properties of the source itself. A rule that is not here is an opinion.
#![allow(clippy::unwrap_used, reason = "a test stops where it cannot go on")]

#[path = "tidy/circles.rs"]
mod circles;
#[path = "tidy/rules.rs"]
mod rules;

use std::fs;
use std::path::{Path, PathBuf};

use circles::check_circles;
use rules::{File, check_file, check_script, check_top_level};

/// Everything at the top of the repository, except dotfiles. Nothing else may be there.
const TOP_LEVEL: [&str; 14] = [
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE",
    "README.md",
    "SECURITY.md",
    "control",
    "dataplane",
    "ffi",
    "packaging",
    "perf",
    "scripts",
    "tests",
];

/// Folders of modules that build on each other in one direction only.
const WITHOUT_CIRCLES: [&str; 7] = [
    "control/src",
    "control/src/groups",
    "control/src/rendezvous",
    "dataplane/engine/src",
    "dataplane/engine/src/relay",
    "dataplane/proto/src",
    "dataplane/rnic/src",
];

#[test]
fn tidy() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut complaints = check_top_level(&names(root), &TOP_LEVEL);
    let mut rust_files = 0;
    for path in files(root) {
        let name = path.strip_prefix(root).unwrap().to_str().expect("names are UTF-8");
        let Ok(text) = fs::read_to_string(&path) else { continue }; // Captures and the like.
        if name.ends_with(".rs") {
            rust_files += 1;
            complaints.extend(check_file(&File { name, text: &text }));
        }
        if name.starts_with("scripts/") || name.ends_with(".sh") {
            complaints.extend(check_script(&File { name, text: &text }));
        }
    }
    assert!(rust_files > 20, "the source was not found below {}", root.display());
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

/// The names in a folder, without dotfiles and build results.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    let names = entries.map(|name| name.into_string().expect("names are UTF-8"));
    let mut names: Vec<_> =
        names.filter(|name| !name.starts_with('.') && name != "target").collect();
    names.sort();
    names
}

/// All files below a folder, in the order of their names.
fn files(folder: &Path) -> Vec<PathBuf> {
    let paths = names(folder).into_iter().map(|name| folder.join(name));
    let paths = paths.filter(|path| !path.is_symlink());
    paths.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

#[test]
fn imports_make_no_circle() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    for folder in WITHOUT_CIRCLES {
        let read = |path: PathBuf| {
            let name = path.strip_prefix(root).unwrap().to_str().expect("names are UTF-8");
            (name.to_owned(), fs::read_to_string(&path).expect("it is source"))
        };
        let texts: Vec<_> = files(&root.join(folder)).into_iter().map(read).collect();
        assert!(texts.len() > 5, "the source was not found in {folder}");
        let files: Vec<_> = texts.iter().map(|(name, text)| File { name, text }).collect();
        let complaints = check_circles(folder, &files);
        assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
    }
}
