//! The access log: one line about each connection that is over.
//!
//! ```text
//!   control thread ─► records (bounded) ─► writer thread ─► file, journald or syslog
//! ```
//! The control thread never waits: a record for which there is no room is dropped and counted, and
//! so is a line that cannot be written. The writer has a thread of its own, because a disk or a
//! daemon may stand still. It exists only where a log is wanted.
//!
//! Why no crate for journald or syslog: those that there are write to fixed places, and a message
//! is a few lines here (see `line`).

mod line;
mod obstacle;
mod output;
mod record;

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use smcr_engine::clock::Clock;
use smcr_engine::mailbox::{Receiver, Sender, Waker, mailbox};

pub use self::obstacle::Obstacle;
use self::output::Output;
pub use self::record::{Record, first_byte};
use crate::config::{self, LogTarget, Share};
use crate::entropy;
use crate::supervise;
use crate::termination::Termination;

/// The control thread's end of the access log.
pub struct AccessLog {
    clock: Clock,
    desk: Arc<Desk>,
    /// None where no log is wanted.
    writer: Option<Writer>,
    is_wanted: bool,
    sample: Share,
    dice: Box<dyn FnMut() -> u32 + Send>,
}

/// Asks the writer to open the file again. Harmless where there is none.
#[derive(Clone, Debug)]
pub struct Reopener(Arc<Desk>);

/// How many lines there were so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Lines that were written.
    pub written: u64,
    /// Lines that were not: nobody took them fast enough, or at all.
    pub dropped: u64,
}

/// What the writer shares with others.
#[derive(Debug)]
struct Desk {
    orders: Mutex<Orders>,
    waker: Waker,
    written: AtomicU64,
    dropped: AtomicU64,
}

/// What the writer shall do, beside writing.
#[derive(Debug, Default)]
struct Orders {
    change: Option<config::AccessLog>,
    reopen: bool,
    stop: bool,
}

/// The writer's thread.
struct Writer {
    records: Sender<Record>,
    /// Disconnected when the thread has ended.
    over: mpsc::Receiver<()>,
}

impl AccessLog {
    /// A log as `config` says.
    ///
    /// # Errors
    ///
    /// When the process is out of descriptors.
    pub fn new(clock: Clock, config: &config::AccessLog) -> io::Result<Self> {
        let desk = Desk {
            orders: Mutex::default(),
            waker: Waker::new()?,
            written: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
        };
        let mut log = Self {
            clock,
            desk: Arc::new(desk),
            writer: None,
            is_wanted: false,
            sample: config.sample,
            dice: Box::new(entropy::numbers()),
        };
        log.change(config);
        Ok(log)
    }

    /// Whether lines could be written where `config` says. Nothing is created there.
    ///
    /// # Errors
    ///
    /// Why not. A daemon that is not there now may come later, so that is no error.
    pub fn check(config: &config::AccessLog) -> Result<(), Obstacle> {
        let LogTarget::File(path) = &config.to else { return Ok(()) };
        obstacle::look_at(path)
    }

    /// Why `config` is wrong about the place, in a line that names the key; none if it is not, or
    /// if what is in the way may pass.
    pub fn mistake(config: &config::AccessLog) -> Option<String> {
        let why = Self::check(config).err()?.wrong()?;
        let path = config.to.parts().1.unwrap_or(Path::new("")).display();
        Some(format!("access_log.path: {path}: {why}"))
    }

    /// From now on it is as `config` says. The file is opened again, too.
    pub fn change(&mut self, config: &config::AccessLog) {
        self.sample = config.sample;
        self.is_wanted = config.to != LogTarget::None;
        if self.is_wanted && self.writer.is_none() {
            match Writer::start(self.clock, &self.desk) {
                Ok(writer) => self.writer = Some(writer),
                Err(error) => tracing::warn!(%error, "there is no access log"),
            }
        }
        self.desk.order(|orders| orders.change = Some(config.clone()));
    }

    /// Has the file opened again.
    pub fn reopener(&self) -> Reopener {
        Reopener(Arc::clone(&self.desk))
    }

    /// Writes about a connection that has ended so, unless nobody wants to read it.
    pub fn ended(&mut self, end: Termination, record: impl FnOnce() -> Record) {
        let is_bad = end != Termination::Closed;
        if !self.is_wanted || !is_bad && !self.sample.has((self.dice)()) {
            return;
        }
        let sent = self.writer.as_ref().is_some_and(|writer| writer.records.send(record()).is_ok());
        if !sent {
            self.desk.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// How many lines there were so far.
    pub fn counts(&self) -> Counts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts { written: read(&self.desk.written), dropped: read(&self.desk.dropped) }
    }
}

impl Drop for AccessLog {
    fn drop(&mut self) {
        let Some(writer) = self.writer.take() else { return };
        self.desk.order(|orders| orders.stop = true);
        // It writes what it has, unless the disk stands still. Nobody sends anything here.
        let _ = writer.over.recv_timeout(FAREWELL);
    }
}

impl Reopener {
    /// Has the file opened again, because somebody has moved it.
    pub fn reopen(&self) {
        self.0.order(|orders| orders.reopen = true);
    }
}

impl Desk {
    fn order(&self, order: impl FnOnce(&mut Orders)) {
        order(&mut self.orders.lock().expect("nobody panics while holding it"));
        self.waker.wake();
    }

    fn take_orders(&self) -> Orders {
        std::mem::take(&mut self.orders.lock().expect("nobody panics while holding it"))
    }

    fn has_orders(&self) -> bool {
        let orders = self.orders.lock().expect("nobody panics while holding it");
        orders.change.is_some() || orders.reopen || orders.stop
    }

    /// Sleeps until there is something to do.
    fn wait(&self, records: &Receiver<Record>) {
        self.waker.about_to_sleep();
        if records.is_empty() && !self.has_orders() {
            let descriptor = self.waker.descriptor();
            // An interrupted sleep is a short one.
            let _ = poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], None);
        }
        self.waker.awake();
    }
}

impl Writer {
    fn start(clock: Clock, desk: &Arc<Desk>) -> io::Result<Self> {
        let (records, waiting) = mailbox(RECORDS_MAX, desk.waker.clone());
        let (is_over, over) = mpsc::channel::<()>();
        let desk = Arc::clone(desk);
        let (mut output, mut is_over) = (None, Some(is_over));
        supervise::spawn("access-log", move || {
            write(clock, &desk, &waiting, &mut output);
            drop(is_over.take());
        })?;
        Ok(Self { records, over })
    }
}

/// The writer: writes what there is to write to `output` until it shall stop.
fn write(clock: Clock, desk: &Desk, records: &Receiver<Record>, output: &mut Option<Output>) {
    loop {
        desk.wait(records);
        // Orders come first: what has come since then is meant for the new place. Lines from before
        // may go there as well.
        let Orders { change, reopen, stop } = desk.take_orders();
        if change.as_ref().is_some_and(|config| config.to == LogTarget::None) {
            write_waiting(desk, records, output.as_mut());
        }
        match (&mut *output, change) {
            (None, Some(config)) => *output = Some(Output::new(clock, config)),
            (Some(output), Some(config)) => output.change(config),
            (Some(output), None) if reopen => output.reopen(),
            (_, None) => {}
        }
        write_waiting(desk, records, output.as_mut());
        if stop {
            return;
        }
    }
}

/// Writes what has come, and counts it.
fn write_waiting(desk: &Desk, records: &Receiver<Record>, mut output: Option<&mut Output>) {
    let mut batch = Vec::new();
    while !records.is_empty() {
        batch.extend(std::iter::from_fn(|| records.receive()).take(BATCH));
        let written = output.as_mut().map_or(0, |output| output.write(&batch));
        let dropped = batch.len() - written;
        desk.written.fetch_add(written as u64, Ordering::Relaxed);
        desk.dropped.fetch_add(dropped as u64, Ordering::Relaxed);
        batch.clear();
    }
}

/// Records that wait for the writer: more than come in a second where every connection is short.
const RECORDS_MAX: usize = 8_192;
/// Lines that are written at once.
const BATCH: usize = 256;
/// How long the end of the process waits for the last lines.
const FAREWELL: Duration = Duration::from_secs(1);

#[cfg(test)]
pub(crate) mod tests {
    use std::fs;

    use smcr_proto::Instant;
    use smcr_proto::wire::clc::Diagnosis;

    use super::*;
    use crate::config::Config;
    use crate::stats::Transport;
    use crate::termination::Party;

    /// A connection over TCP that has carried so many bytes from its client.
    pub(crate) fn record(bytes_in: u64) -> Record {
        Record {
            listener: "to \"b\"".to_owned(),
            accepted: Instant(1_000_000_000),
            ended: Instant(3_000_000_000),
            source: Some("10.8.0.1:40000".parse().unwrap()),
            original: None,
            target: Some("10.8.0.2:7002".parse().unwrap()),
            transport: Some(Transport::Tcp),
            reason: Some(Diagnosis::NO_SMC_OPTION),
            group: None,
            setup: Some(Duration::from_micros(1_500)),
            first_byte: Some(Duration::from_micros(250)),
            bytes_in,
            bytes_out: 20,
            end: Termination::Reset,
            by: Some(Party::Client),
        }
    }

    /// A table `[access_log]` with these lines.
    pub(crate) fn config(lines: &str) -> config::AccessLog {
        let listener = "[[listener]]\nname='a'\nbind='127.0.0.1:1'\nupstream='127.0.0.1:2'\n";
        let text = format!("{listener}[access_log]\n{lines}\n");
        Config::parse(&text, "a.toml").unwrap().access_log
    }

    fn to_file(path: &Path, more: &str) -> config::AccessLog {
        let path = path.display();
        config(&format!("to='file'\npath='{path}'\nformat='%{{bytes_in}} %{{end}}'\n{more}"))
    }

    /// What the log with this configuration has written when it is over.
    fn write(path: &Path, more: &str, records: impl Iterator<Item = Record>) -> Vec<String> {
        let mut log = AccessLog::new(Clock::new(), &to_file(path, more)).unwrap();
        for record in records {
            log.ended(record.end, || record);
        }
        let desk = Arc::clone(&log.desk);
        drop(log);
        let text = fs::read_to_string(path).unwrap();
        let lines: Vec<_> = text.lines().map(str::to_owned).collect();
        assert_eq!(desk.written.load(Ordering::Relaxed), lines.len() as u64);
        lines
    }

    #[test]
    fn the_last_lines_are_written_before_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let lines = write(&folder.path().join("log"), "", (0..600).map(record));
        let expected: Vec<_> = (0..600).map(|number| format!("{number} reset")).collect();
        assert_eq!(lines, expected);
    }

    /// A share is enough to see what is usual, and never hides what went wrong.
    #[test]
    fn whatever_ended_badly_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let end = |number| [Termination::Closed, Termination::LinkLost][usize::from(number == 77)];
        let records = (0..2_000).map(|number| Record { end: end(number), ..record(number) });
        let lines = write(&folder.path().join("log"), "sample=0.1", records);
        assert!((100..320).contains(&lines.len()), "{}", lines.len());
        assert!(lines.iter().any(|line| line == "77 link-lost"));
    }

    /// A disk that stands still must not hold up a connection, nor take all memory.
    #[test]
    fn what_nobody_takes_is_dropped_and_counted() {
        let mut log = AccessLog::new(Clock::new(), &config("")).unwrap();
        log.ended(Termination::Reset, || panic!("nobody wants it"));
        let (records, waiting) = mailbox(4, log.desk.waker.clone());
        let (_standing, over) = mpsc::channel();
        (log.writer, log.is_wanted) = (Some(Writer { records, over }), true);
        (0..5).for_each(|number| log.ended(Termination::Reset, || record(number)));
        assert_eq!(log.counts(), Counts { written: 0, dropped: 1 });
        drop(waiting);
    }

    #[test]
    fn another_configuration_moves_the_log() {
        let folder = tempfile::tempdir().unwrap();
        let [first, second] = ["a", "b"].map(|name| folder.path().join(name));
        let mut log = AccessLog::new(Clock::new(), &config("")).unwrap();
        log.change(&to_file(&first, ""));
        log.ended(Termination::Reset, || record(1));
        log.change(&to_file(&second, ""));
        let until = Clock::new();
        while log.counts().written < 1 {
            assert!(until.now() < Instant(5_000_000_000), "{:?}", log.counts());
            std::thread::sleep(Duration::from_millis(1));
        }
        log.change(&config(""));
        log.ended(Termination::Reset, || panic!("nobody wants it"));
        drop(log);
        let both = [first, second].map(|path| fs::read_to_string(path).unwrap_or_default());
        assert_eq!(both.concat(), "1 reset\n");
        let mistake = AccessLog::mistake(&to_file(folder.path(), "")).unwrap();
        assert!(mistake.starts_with("access_log.path: /"), "{mistake}");
    }
}
