//! What others may read of each connection while the poller runs.

use crate::limits::CONNECTIONS_MAX;
use crate::sync::{AtomicU8, AtomicU32, AtomicU64, Ordering};

/// A table of one row per slot. The poller writes with plain stores, now and then; anybody reads.
#[derive(Debug)]
pub struct Gauges {
    rows: Box<[Row]>,
}

/// One connection.
#[derive(Debug, Default)]
struct Row {
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
    failovers: AtomicU32,
    /// The stage, and whether it is paced.
    stage: AtomicU8,
}

/// How far a connection has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// Read from its near socket.
    pub bytes_in: u64,
    /// Written to its near socket.
    pub bytes_out: u64,
    /// Times it changed its link.
    pub failovers: u32,
    /// Where it is in its life.
    pub stage: Stage,
    /// It has something to carry, and waits until it may.
    pub paced: bool,
}

/// Where a connection is in its life, for people to read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Stage {
    /// Both directions are open.
    #[default]
    Active,
    /// One direction has ended.
    HalfClosed,
    /// Both have, or it was reset; the peer's last word is awaited.
    Closing,
}

impl Gauges {
    /// A table of zeroes.
    #[allow(clippy::new_without_default, reason = "a large allocation deserves a call")]
    pub fn new() -> Self {
        Self { rows: std::iter::repeat_with(Row::default).take(CONNECTIONS_MAX).collect() }
    }

    /// Says how far the connection in `slot` has come.
    pub fn set(&self, slot: u16, reading: Reading) {
        let row = &self.rows[usize::from(slot)];
        row.bytes_in.store(reading.bytes_in, Ordering::Relaxed);
        row.bytes_out.store(reading.bytes_out, Ordering::Relaxed);
        row.failovers.store(reading.failovers, Ordering::Relaxed);
        let paced = if reading.paced { PACED } else { 0 };
        row.stage.store(reading.stage as u8 | paced, Ordering::Relaxed);
    }

    /// How far the connection in `slot` had come at the last look.
    pub fn read(&self, slot: u16) -> Reading {
        let row = &self.rows[usize::from(slot)];
        let stages = [Stage::Active, Stage::HalfClosed, Stage::Closing];
        let stage = row.stage.load(Ordering::Relaxed);
        Reading {
            bytes_in: row.bytes_in.load(Ordering::Relaxed),
            bytes_out: row.bytes_out.load(Ordering::Relaxed),
            failovers: row.failovers.load(Ordering::Relaxed),
            stage: stages[usize::from(stage & !PACED)],
            paced: stage & PACED != 0,
        }
    }
}

/// Stands beside the stage of a connection that is paced.
const PACED: u8 = 0x80;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_is_read_and_slots_do_not_mix() {
        let gauges = Gauges::new();
        let (stage, paced) = (Stage::Closing, true);
        let reading = Reading { bytes_in: 1, bytes_out: 2, failovers: 3, stage, paced };
        gauges.set(7, reading);
        assert_eq!((gauges.read(7), gauges.read(6)), (reading, Reading::default()));
        gauges.set(7, Reading { stage: Stage::HalfClosed, ..reading });
        assert_eq!(gauges.read(7).stage, Stage::HalfClosed);
    }
}
