//! `smcgate exec`: runs a program with the library that lets the gateway of this host take its TCP
//! connections over.

use std::convert::Infallible;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fmt, path};

use smcr_os::broken_pipe;

use crate::cli::Exec;

/// Why the program does not run: the exit code, and one line.
pub type Refusal = (u8, String);

/// Becomes the program.
///
/// # Errors
///
/// If the library is not there (2), or the program cannot be run (126) or is not there (127).
pub fn become_program(arguments: &Exec) -> Result<Infallible, Refusal> {
    let beside = env::current_exe().ok();
    let beside = beside.as_deref().and_then(Path::parent);
    let folders = beside.into_iter().chain([Path::new(INSTALLED)]);
    let library = |libc| library(arguments.library.as_deref(), folders.clone(), libc);
    let own = library(Libc::Own)?;
    let Some((program, rest)) = arguments.program.split_first() else {
        return Err((2, "exec: which program?".to_owned()));
    };
    // A program of which nothing can be learned may start others.
    let preloaded = match find(program).as_deref().map_or(Ok(Libc::Own), libc_of) {
        Ok(Libc::Own) => Ok(own),
        Ok(Libc::Other) => library(Libc::Other).map_err(|_| (Obstacle::OtherLibc, None)),
        Err(why) => Err((why, Some(own))),
    };
    if let Err((why, _)) = &preloaded {
        let program = program.display();
        // Nobody is left to tell if standard error is gone.
        writeln!(io::stderr(), "smcgate: {program} {why}: its connections stay TCP").ok();
    }
    let mut command = Command::new(program);
    command.args(rest);
    // With a library for another libc, its dynamic loader would end it.
    if let Some(library) = preloaded.map_or_else(|(_, library)| library, Some) {
        command.envs(variables(arguments, &library, env::var_os(PRELOAD)));
    }
    broken_pipe::hand_on(&mut command);
    let error = command.exec();
    let code = if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
    Err((code, format!("{}: {error}", program.display())))
}

/// Where the library is: at the place that was named, or in one of these folders. That for another
/// libc is beside it.
fn library<'a>(
    named: Option<&Path>,
    folders: impl Iterator<Item = &'a Path>,
    libc: Libc,
) -> Result<PathBuf, Refusal> {
    let places: Vec<PathBuf> = match (named, libc) {
        (Some(path), Libc::Own) => vec![path.to_owned()],
        (Some(path), Libc::Other) => vec![path.with_file_name(NAME_FOR_OTHER)],
        (None, Libc::Own) => folders.flat_map(|folder| NAMES.map(|it| folder.join(it))).collect(),
        (None, Libc::Other) => folders.map(|folder| folder.join(NAME_FOR_OTHER)).collect(),
    };
    let found = places.iter().find(|path| path.is_file());
    let found = found.and_then(|path| path.canonicalize().ok());
    let separator = |byte: &u8| byte.is_ascii_whitespace() || *byte == b':';
    match found {
        // The dynamic loader takes what is behind one of these for another library.
        Some(path) if path.as_os_str().as_bytes().iter().any(separator) => {
            let path = path.display();
            Err((2, format!("{path}: no path with a blank or a colon can be preloaded")))
        }
        Some(path) => Ok(path),
        None => {
            let places: Vec<_> = places.iter().map(|path| path.display().to_string()).collect();
            let places = places.join(", ");
            Err((2, format!("the library to be preloaded is not there: {places}; see --library")))
        }
    }
}

/// What is added to the environment; `preload` is what is preloaded anyway.
fn variables(
    arguments: &Exec,
    library: &Path,
    preload: Option<OsString>,
) -> Vec<(&'static str, OsString)> {
    let mut libraries = library.as_os_str().to_owned();
    if let Some(others) = preload.filter(|others| !others.is_empty()) {
        libraries.push(":");
        libraries.push(others);
    }
    // The program may change its folder.
    let socket = arguments.socket.as_ref();
    let socket = socket.map(|path| path::absolute(path).unwrap_or_else(|_| path.clone()));
    let text = |text: &Option<String>| text.as_ref().map(OsString::from);
    let optional = [
        ("SMCGATE_SOCKET", socket.map(OsString::from)),
        ("SMCGATE_PORTS", text(&arguments.ports)),
        ("SMCGATE_NETWORKS", text(&arguments.networks)),
        ("SMCGATE_NOT_PORTS", text(&arguments.not_ports)),
        ("SMCGATE_NOT_NETWORKS", text(&arguments.not_networks)),
        ("SMCGATE_RINGS", arguments.rings.then(|| "1".into())),
        ("SMCGATE_SPIN_US", arguments.spin.map(|spin| spin.to_string().into())),
        ("SMCGATE_DEBUG", arguments.debug.then(|| "1".into())),
    ];
    let optional = optional.into_iter().filter_map(|(name, value)| Some((name, value?)));
    [(PRELOAD, libraries)].into_iter().chain(optional).collect()
}

/// The file of a program, as a shell looks for it.
fn find(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Some(program.into());
    }
    let path = env::var_os("PATH")?;
    env::split_paths(&path).map(|folder| folder.join(program)).find(|path| path.is_file())
}

/// Which C library a program has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Libc {
    /// The same as we.
    Own,
    Other,
}

/// Why nothing can be preloaded into a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Obstacle {
    Static,
    SetUserId,
    OtherMachine,
    OtherLibc,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Static => "is linked statically",
            Self::SetUserId => "changes its user or group (set-uid)",
            Self::OtherMachine => "is for another kind of processor",
            Self::OtherLibc if IS_MUSL => "is for glibc, and there is no libsmcgate-glibc.so",
            Self::OtherLibc => "is for musl, and there is no libsmcgate-musl.so",
        })
    }
}

/// Which C library a program has, or what is in the way of preloading, as far as the file shows it.
/// A script is as good as its interpreter.
fn libc_of(program: &Path) -> Result<Libc, Obstacle> {
    const SET_ID: u32 = 0o6000;
    if fs::metadata(program).is_ok_and(|file| file.permissions().mode() & SET_ID != 0) {
        return Err(Obstacle::SetUserId);
    }
    in_file(program).unwrap_or(Ok(Libc::Own))
}

/// The same of what is in the file, if that says it.
fn in_file(program: &Path) -> Option<Result<Libc, Obstacle>> {
    let mut head = Vec::new();
    File::open(program).ok()?.take(HEAD_MAX).read_to_end(&mut head).ok()?;
    match head.strip_prefix(b"#!") {
        Some(line) => {
            let words = line.split(|byte| byte.is_ascii_whitespace());
            let interpreter = words.into_iter().find(|word| !word.is_empty())?;
            let mut head = Vec::new();
            let file = File::open(OsStr::from_bytes(interpreter)).ok()?;
            file.take(HEAD_MAX).read_to_end(&mut head).ok()?;
            in_elf(&head)
        }
        None => in_elf(&head),
    }
}

/// The same of the head of an ELF file.
///
/// ```text
///   0    4       5      18        32              54           56
///   |ELF | class | data | machine | first program | their size | their number |
///   0      8                  32
///   | kind | place in file .. | size in file |     a program header
/// ```
fn in_elf(head: &[u8]) -> Option<Result<Libc, Obstacle>> {
    const CLASS_64: u8 = 2;
    const LITTLE_ENDIAN: u8 = 1;
    const INTERPRETER: u32 = 3;
    let half = |at: usize| Some(u16::from_le_bytes(*head.get(at..)?.first_chunk()?));
    let long = |at: usize| {
        let long = u64::from_le_bytes(*head.get(at..)?.first_chunk()?);
        usize::try_from(long).ok()
    };
    if !head.starts_with(b"\x7fELF") {
        return None;
    }
    if head.get(4..6)? != [CLASS_64, LITTLE_ENDIAN] || half(18)? != MACHINE {
        return Some(Err(Obstacle::OtherMachine));
    }
    let (first, size, count) = (long(32)?, usize::from(half(54)?), usize::from(half(56)?));
    for index in 0..count {
        let at = first.checked_add(size.checked_mul(index)?)?;
        // A file whose headers are elsewhere says nothing.
        let kind = u32::from_le_bytes(*head.get(at..)?.first_chunk()?);
        if kind == INTERPRETER {
            let (begin, length) = (long(at + 8)?, long(at + 32)?);
            let loader = head.get(begin..begin.checked_add(length)?)?;
            let is_musl = loader.windows(MUSL.len()).any(|part| part == MUSL);
            return Some(Ok(if is_musl == IS_MUSL { Libc::Own } else { Libc::Other }));
        }
    }
    Some(Err(Obstacle::Static))
}

/// What is in the name of the dynamic loader of musl.
const MUSL: &[u8] = b"/ld-musl-";
/// Whether the library is for musl, as this program is.
const IS_MUSL: bool = cfg!(target_env = "musl");
const PRELOAD: &str = "LD_PRELOAD";
/// As it is installed, and as it is built.
const NAMES: [&str; 2] = ["libsmcgate.so", "libsmcgate_preload.so"];
/// That for the other libc.
const NAME_FOR_OTHER: &str = if IS_MUSL { "libsmcgate-glibc.so" } else { "libsmcgate-musl.so" };
const INSTALLED: &str = "/usr/lib/smcgate";
/// Program headers follow the header of the file.
const HEAD_MAX: u64 = 4096;
/// The kind of processor that this program is for, as ELF has it.
const MACHINE: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::{Cli, Command};

    fn parsed(arguments: &[&str]) -> Exec {
        let all = [&["smcgate", "exec"], arguments].concat();
        let Command::Exec(exec) = Cli::parse_from(all).command else { panic!("it is exec") };
        exec
    }

    #[test]
    fn a_program_gets_its_arguments_and_the_library_its_variables() {
        let exec = parsed(&["--ports", "80", "--socket", "/s", "--", "nginx", "-g", "--ports"]);
        assert_eq!(exec.program, ["nginx", "-g", "--ports"]);
        let library = Path::new("/l.so");
        let set = variables(&exec, library, Some("/other.so".into()));
        let expected =
            [("LD_PRELOAD", "/l.so:/other.so"), ("SMCGATE_SOCKET", "/s"), ("SMCGATE_PORTS", "80")];
        assert_eq!(set, expected.map(|(name, value)| (name, value.into())));
        let exec = parsed(&["--rings", "--spin", "20", "true"]);
        let expected = [("LD_PRELOAD", "/l.so"), ("SMCGATE_RINGS", "1"), ("SMCGATE_SPIN_US", "20")];
        let expected = expected.map(|(name, value)| (name, OsString::from(value)));
        assert_eq!(variables(&exec, library, None), expected);
        let set = variables(&parsed(&["--debug", "true"]), library, Some("".into()));
        let expected = [("LD_PRELOAD", "/l.so"), ("SMCGATE_DEBUG", "1")];
        assert_eq!(set, expected.map(|(name, value)| (name, value.into())));
    }

    #[test]
    fn without_a_library_it_says_where_it_has_looked() {
        let folder = tempfile::tempdir().unwrap();
        let library = |named| library(named, [folder.path()].into_iter(), Libc::Own);
        let (code, why) = library(None).unwrap_err();
        let place = folder.path().join("libsmcgate.so").display().to_string();
        assert!(code == 2 && why.contains(&place), "{why}");
        let (code, why) = library(Some(Path::new("/nowhere.so"))).unwrap_err();
        assert!(code == 2 && why.contains("/nowhere.so"), "{why}");
        fs::write(folder.path().join("libsmcgate.so"), "").unwrap();
        assert_eq!(library(None).unwrap(), folder.path().join("libsmcgate.so"));
        let other = folder.path().join(NAME_FOR_OTHER);
        let named = folder.path().join("libsmcgate.so");
        for named in [None, Some(&*named)] {
            fs::remove_file(&other).ok();
            let other_library = || super::library(named, [folder.path()].into_iter(), Libc::Other);
            assert!(other_library().is_err());
            fs::write(&other, "").unwrap();
            assert_eq!(other_library().unwrap(), other);
        }
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join("libsmcgate.so");
        fs::write(&library, "").unwrap();
        let library = library.to_str().unwrap();
        let run = |program| become_program(&parsed(&["--library", library, program])).unwrap_err();
        assert_eq!(run("/nowhere/program").0, 127);
        assert_eq!(run("/").0, 126);
        let blank = folder.path().join("a b.so");
        fs::write(&blank, "").unwrap();
        let (code, why) = super::library(Some(&blank), [].into_iter(), Libc::Own).unwrap_err();
        assert!(code == 2 && why.contains("blank"), "{why}");
    }

    #[test]
    fn what_cannot_be_preloaded_is_recognised() {
        let shell = find(OsStr::new("sh")).expect("it is in PATH");
        assert_eq!(libc_of(&shell), Ok(Libc::Own));
        let mut head = fs::read(&shell).unwrap();
        head.truncate(4096);
        assert_eq!(in_elf(&head), Some(Ok(Libc::Own)));
        let kinds = |head: &mut Vec<u8>| {
            for index in 0..usize::from(head[56]) {
                head[64 + 56 * index] = 1;
            }
        };
        let mut musl = head.clone();
        let name = b"/lib64/ld-linux";
        let loader = head.windows(name.len()).position(|part| part == name).unwrap();
        musl[loader..loader + name.len()].copy_from_slice(b"/lib64/ld-musl-");
        assert_eq!(in_elf(&musl), Some(Ok(Libc::Other)));
        // A name that begins beyond the end, which no loader has.
        let header = (64..64 + 56 * usize::from(head[56])).step_by(56);
        let header = header.into_iter().find(|at| musl[*at] == 3).unwrap();
        musl[header + 8..header + 16].fill(0xff);
        assert_eq!(in_elf(&musl), None);
        kinds(&mut head);
        assert_eq!(in_elf(&head), Some(Err(Obstacle::Static)));
        head[18] ^= 1;
        assert_eq!(in_elf(&head), Some(Err(Obstacle::OtherMachine)));
        for length in 0..64 {
            in_elf(&head[..length]);
        }
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("script");
        fs::write(&script, "#! /bin/sh -e\ntrue\n").unwrap();
        assert_eq!(libc_of(&script), Ok(Libc::Own));
        fs::set_permissions(&script, fs::Permissions::from_mode(0o4755)).unwrap();
        assert_eq!(libc_of(&script), Err(Obstacle::SetUserId));
    }
}
