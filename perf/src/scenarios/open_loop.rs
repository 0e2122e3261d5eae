//! RRO(n, r): r requests per second over n connections, however slow the answers are.
//!
//! A closed loop slows down with the system that it measures, and so hides queues. Here every
//! request has a time at which it is due, and its latency counts from that time, including the wait
//! for a free connection.
//!
//! Estimate: below a third of the RR(n) throughput nothing queues, and p50 is that of RR(1) less
//! one sleep; at 90 % of it, the queue is about ten deep and p99 a few milliseconds.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use super::LoadResult;
use super::round_trip::{Client, MESSAGE_BYTES, connect_all, result_of_loop};
use super::window::{LOOK_EVERY, Tally, Window, is_late};
use crate::clock::now_ns;
use crate::failure::{Doing as _, Failure, Result};
use crate::readiness::{Interest, Readiness};

const TIMER: u64 = u64::MAX;

/// The state of the load: free connections, and requests that wait for one.
struct OpenLoop {
    /// None where it was given up.
    clients: Vec<Option<Client>>,
    free: Vec<usize>,
    /// When the request in flight on each connection was due.
    due_at: Vec<u64>,
    /// When it was sent; none where nothing is in flight.
    sent_at: Vec<Option<u64>>,
    /// The due times of requests that wait for a free connection, oldest first.
    waiting: VecDeque<u64>,
    window: Window,
    tally: Tally,
}

/// Sends `rate_per_s` requests per second for `duration` after a warm-up. Every request that is due
/// in this time is sent and recorded, however late.
///
/// # Errors
///
/// As [`super::round_trip::run`]; also when the path falls more than 5 seconds behind the rate.
pub(crate) fn run(
    target: SocketAddr,
    connections: u32,
    rate_per_s: u32,
    duration: Duration,
) -> Result<LoadResult> {
    let mut readiness = Readiness::new()?;
    let clients = connect_all(target, connections, MESSAGE_BYTES, &readiness)?;
    let interval_ns = (1_000_000_000 / u64::from(rate_per_s)).max(1);
    let mut timer = Some(periodic(interval_ns)?);
    readiness.add(timer.as_ref().expect("just made"), TIMER, Interest::Read)?;
    let mut due_at = now_ns();
    let mut load = OpenLoop {
        free: (0..clients.len()).rev().collect(),
        due_at: vec![0; clients.len()],
        sent_at: vec![None; clients.len()],
        clients: clients.into_iter().map(Some).collect(),
        waiting: VecDeque::new(),
        window: Window::begin(duration),
        tally: Tally::new(),
    };
    let mut ready = Vec::new();
    while timer.is_some() || load.is_waiting() {
        readiness.wait(LOOK_EVERY, &mut ready)?;
        for &token in &ready {
            if token != TIMER {
                load.receive(usize::try_from(token).expect("tokens are our own indexes"))?;
                continue;
            }
            for _ in 0..timer.as_ref().map_or(Ok(0), expirations)? {
                due_at += interval_ns;
                if load.window.is_open(due_at) {
                    load.waiting.push_back(due_at);
                } else {
                    // Closing the timer ends its events. What waits and what is in flight remains.
                    timer = None;
                    break;
                }
            }
        }
        load.send_due()?;
        load.give_up_late();
        if load.waiting.front().is_some_and(|&due_at| is_late(due_at, now_ns())) {
            return Err(Failure::new(format!("{rate_per_s} requests per second are too many")));
        }
    }
    result_of_loop(connections, &load.tally, MESSAGE_BYTES, load.window.elapsed_ns())
}

impl OpenLoop {
    fn receive(&mut self, index: usize) -> Result<()> {
        // What came before it was given up may still be told.
        let Some(client) = &mut self.clients[index] else { return Ok(()) };
        if client.receive()? {
            self.sent_at[index] = None;
            self.free.push(index);
            self.tally.count(&self.window, self.due_at[index], now_ns());
        }
        Ok(())
    }

    fn send_due(&mut self) -> Result<()> {
        while let (Some(&index), Some(&due_at)) = (self.free.last(), self.waiting.front()) {
            self.free.pop();
            self.waiting.pop_front();
            self.due_at[index] = due_at;
            self.sent_at[index] = Some(now_ns());
            self.clients[index].as_mut().expect("one that is free is not given up").send()?;
        }
        Ok(())
    }

    /// Closes connections without an answer. What is due goes by the others.
    fn give_up_late(&mut self) {
        for index in self.window.late(&self.sent_at) {
            self.sent_at[index] = None;
            self.tally.give_up(self.due_at[index], now_ns());
            self.clients[index] = None;
        }
    }

    fn is_waiting(&self) -> bool {
        !self.waiting.is_empty() || self.sent_at.iter().any(Option::is_some)
    }
}

fn periodic(interval_ns: u64) -> Result<OwnedFd> {
    let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
    let timer =
        timerfd_create(TimerfdClockId::Monotonic, flags).doing(|| "timerfd_create".into())?;
    let interval = Timespec {
        tv_sec: i64::try_from(interval_ns / 1_000_000_000).expect("a rate is at least 1 per s"),
        tv_nsec: i64::try_from(interval_ns % 1_000_000_000).expect("a remainder fits"),
    };
    let setting = Itimerspec { it_interval: interval, it_value: interval };
    timerfd_settime(&timer, TimerfdTimerFlags::empty(), &setting)
        .doing(|| "timerfd_settime".into())?;
    Ok(timer)
}

/// How many intervals have passed since the last call.
fn expirations(timer: &OwnedFd) -> Result<u64> {
    let mut count = [0; 8];
    match rustix::io::read(timer, &mut count) {
        Ok(_) => Ok(u64::from_ne_bytes(count)),
        Err(Errno::AGAIN) => Ok(0),
        Err(error) => Err(error).doing(|| "reading the timer".into()),
    }
}
