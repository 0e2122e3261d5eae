//! Where lines go: a file, or a socket of a daemon on this host.
//!
//! What cannot be written now is given up, and counted by whoever asked. A line is written as a
//! whole or not at all.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::time::Duration;

use rustix::fs::OFlags;
use smcr_engine::clock::Clock;

use super::line::{write_field, write_fields, write_line, write_syslog_head};
use super::record::Record;
use crate::config::{AccessLog, LineFormat, LogTarget};
use crate::confine;

/// Where lines go, and what is open there.
#[derive(Debug)]
pub(super) struct Output {
    config: AccessLog,
    clock: Clock,
    /// None while it cannot be opened.
    open: Option<Open>,
    /// The last attempt has failed, and that was said.
    fails: bool,
}

#[derive(Debug)]
enum Open {
    File {
        file: File,
        /// The last line in it is not whole, and could not be removed.
        torn: bool,
    },
    Socket(UnixDatagram),
}

/// Lines, one behind the other.
#[derive(Debug, Default)]
struct Lines {
    bytes: Vec<u8>,
    /// Where each of them ends.
    ends: Vec<usize>,
}

impl Output {
    pub(super) fn new(clock: Clock, config: AccessLog) -> Self {
        let mut output = Self { config, clock, open: None, fails: false };
        output.reopen();
        output
    }

    /// From now on lines go where `config` says.
    pub(super) fn change(&mut self, config: AccessLog) {
        if config.to != self.config.to {
            self.open = None;
        }
        self.config = config;
        self.reopen();
    }

    /// Opens the place again, because somebody may have moved the file away. If it cannot be
    /// opened, the one that is open stays.
    pub(super) fn reopen(&mut self) {
        match open(&self.config.to) {
            Ok(open) => self.open = open,
            Err(error) => self.failed(&error),
        }
    }

    /// Writes a line about each of `records`. Returns how many have been written.
    pub(super) fn write(&mut self, records: &[Record]) -> usize {
        if self.open.is_none() {
            self.reopen();
        }
        let lines = self.lines(records);
        let (path, open) = (self.config.to.parts().1, &mut self.open);
        let (Some(path), Some(open)) = (path, open) else { return 0 };
        let (written, outcome) = match open {
            Open::File { file, torn } => lines.append_to(file, torn),
            Open::Socket(socket) => lines.send_to(socket, path),
        };
        match outcome {
            Ok(()) if self.fails => {
                self.fails = false;
                tracing::info!(path = %path.display(), "the access log is written again");
            }
            Ok(()) => {}
            Err(error) => self.failed(&error),
        }
        written
    }

    fn failed(&mut self, error: &io::Error) {
        if !self.fails {
            self.fails = true;
            let (to, path) = self.config.to.parts();
            let path = path.unwrap_or(Path::new("")).display();
            let hint = confine::what_root_lacks(error);
            tracing::warn!(to, %path, %error, hint, "lines of the access log are dropped");
        }
    }

    fn lines(&self, records: &[Record]) -> Lines {
        let (format, clock) = (&self.config.format, &self.clock);
        let mut lines = Lines::default();
        for record in records {
            let out = &mut lines.bytes;
            match &self.config.to {
                LogTarget::None => {}
                LogTarget::File(_) => {
                    write_line(format, clock, record, out);
                    out.push(b'\n');
                }
                LogTarget::Journald(_) => write_entry(format, clock, record, out),
                LogTarget::Syslog(_) => {
                    write_syslog_head(clock, record, out);
                    write_line(format, clock, record, out);
                }
            }
            lines.ends.push(lines.bytes.len());
        }
        lines
    }
}

/// An entry of the journal: the line for people, and each field for `journalctl`.
fn write_entry(format: &LineFormat, clock: &Clock, record: &Record, out: &mut Vec<u8>) {
    let mut line = Vec::new();
    write_line(format, clock, record, &mut line);
    write_field("MESSAGE", &line, out);
    write_field("PRIORITY", b"6", out);
    write_field("SYSLOG_IDENTIFIER", b"smcgate", out);
    write_fields(clock, record, out);
}

impl Lines {
    /// Appends them to a file. Returns how many were appended as a whole, and why not all.
    fn append_to(&self, file: &mut File, torn: &mut bool) -> (usize, io::Result<()>) {
        // Whoever reads the file takes what is left of a torn line for one that is wrong, and must
        // not lose the next one with it.
        if *torn {
            if let Err(error) = file.write_all(b"\n") {
                return (0, Err(error));
            }
            *torn = false;
        }
        let (at, outcome) = write_some(file, &self.bytes);
        let whole = self.ends.partition_point(|end| *end <= at);
        let rest = at - whole.checked_sub(1).map_or(0, |last| self.ends[last]);
        if rest > 0 {
            *torn = remove_last(file, rest as u64).is_err();
        }
        (whole, outcome)
    }

    /// Sends each of them to the socket at `path`. Returns how many were taken, and why not all.
    fn send_to(&self, socket: &UnixDatagram, path: &Path) -> (usize, io::Result<()>) {
        let mut start = 0;
        for (number, end) in self.ends.iter().enumerate() {
            if let Err(error) = socket.send_to(&self.bytes[start..*end], path) {
                // The others would not fare better, and each might take as long.
                return (number, Err(error));
            }
            start = *end;
        }
        (self.ends.len(), Ok(()))
    }
}

/// Writes as much of `bytes` as can be written. Returns how much that was, and why not all.
fn write_some(file: &mut File, bytes: &[u8]) -> (usize, io::Result<()>) {
    let mut at = 0;
    while at < bytes.len() {
        match file.write(&bytes[at..]) {
            Ok(0) => return (at, Err(ErrorKind::WriteZero.into())),
            Ok(len) => at += len,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return (at, Err(error)),
        }
    }
    (at, Ok(()))
}

/// Cuts `len` bytes off the end of a file.
fn remove_last(file: &File, len: u64) -> io::Result<()> {
    // A pipe has no length.
    let left = file.metadata()?.len().checked_sub(len).ok_or(ErrorKind::InvalidInput)?;
    file.set_len(left)
}

/// Opens the place that lines go to; none if they go nowhere.
fn open(to: &LogTarget) -> io::Result<Option<Open>> {
    match to {
        LogTarget::None => Ok(None),
        LogTarget::File(path) => Ok(Some(Open::File { file: open_file(path)?, torn: false })),
        LogTarget::Journald(_) | LogTarget::Syslog(_) => {
            let socket = UnixDatagram::unbound()?;
            socket.set_write_timeout(Some(PATIENCE))?;
            Ok(Some(Open::Socket(socket)))
        }
    }
}

/// Opens the file at `path` to append to it. A pipe that nobody reads, or that is full, is an
/// error: nobody waits for it.
pub(super) fn open_file(path: &Path) -> io::Result<File> {
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).expect("a flag of open(2) is an int");
    OpenOptions::new().append(true).create(true).mode(MODE).custom_flags(flags).open(path)
}

/// Others may not read who talks to whom.
const MODE: u32 = 0o640;
/// How long a daemon may take to make room for a line.
const PATIENCE: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::access_log::tests::{config, record};

    fn to_file(path: &Path) -> Output {
        let format = "format='%{bytes_in}'";
        Output::new(
            Clock::new(),
            config(&format!("to='file'\npath='{}'\n{format}", path.display())),
        )
    }

    #[test]
    fn lines_are_appended_and_a_moved_file_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let [path, moved] = ["log", "log.1"].map(|name| folder.path().join(name));
        let mut output = to_file(&path);
        assert_eq!(output.write(&[record(1), record(2)]), 2);
        fs::rename(&path, &moved).unwrap();
        assert_eq!(output.write(&[record(3)]), 1);
        output.reopen();
        assert_eq!(output.write(&[record(4)]), 1);
        assert_eq!(fs::read_to_string(&moved).unwrap(), "1\n2\n3\n");
        assert_eq!(fs::read_to_string(&path).unwrap(), "4\n");
        // Where nothing can be opened, the old file is better than none.
        fs::rename(&path, &moved).unwrap();
        fs::create_dir(&path).unwrap();
        output.reopen();
        assert_eq!(output.write(&[record(5)]), 1);
        assert_eq!(fs::read_to_string(&moved).unwrap(), "4\n5\n");
    }

    /// Half a line would spoil the next one for whoever reads them.
    #[test]
    fn a_line_that_was_cut_short_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let mut file = open_file(&path).unwrap();
        let lines = Lines { bytes: b"one\ntwo\n".to_vec(), ends: vec![4, 8] };
        let (mut torn, cut) = (false, Lines { bytes: b"one\ntw".to_vec(), ends: vec![4, 8] });
        assert_eq!(cut.append_to(&mut file, &mut torn).0, 1);
        assert_eq!((fs::read_to_string(&path).unwrap().as_str(), torn), ("one\n", false));
        assert_eq!(lines.append_to(&mut file, &mut torn).0, 2);
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\none\ntwo\n");
    }

    #[test]
    fn a_full_pipe_takes_nothing_and_blocks_nobody() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, 0o600.into()).unwrap();
        let mut output = to_file(&path);
        assert_eq!(output.write(&[record(1)]), 0, "nobody reads");
        let _reader = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let many = vec![record(1_000_000_000); 4_096];
        let written = (0..8).map(|_| output.write(&many)).sum::<usize>();
        assert!((1..8 * many.len()).contains(&written), "{written}");
    }

    #[test]
    fn daemons_get_one_message_for_each_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        for (to, begins, contains) in [
            ("syslog", "<134>", "]: 7"),
            ("journald", "MESSAGE=7\nPRIORITY=6\n", "\nSMCGATE_END=reset\nSMCGATE_BY=client\n"),
        ] {
            let lines = format!("to='{to}'\npath='{}'\nformat='%{{bytes_in}}'", path.display());
            let mut output = Output::new(Clock::new(), config(&lines));
            assert_eq!(output.write(&[record(6)]), 0, "no daemon is there");
            let daemon = UnixDatagram::bind(&path).unwrap();
            assert_eq!(output.write(&[record(7), record(8)]), 2);
            let mut bytes = [0; 4096];
            let len = daemon.recv(&mut bytes).unwrap();
            let text = String::from_utf8_lossy(&bytes[..len]);
            assert!(text.starts_with(begins) && text.contains(contains), "{text}");
            daemon.recv(&mut bytes).unwrap();
            fs::remove_file(&path).unwrap();
        }
    }
}
