//! What others may read of each connection while the poller runs.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::limits::CONNECTIONS_MAX;

/// A table of one row per slot. The poller writes with plain stores; anybody reads.
#[derive(Debug)]
pub struct Gauges {
    rows: Box<[Row]>,
}

/// One connection.
#[derive(Debug, Default)]
struct Row {
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
}

impl Gauges {
    /// A table of zeroes.
    #[allow(clippy::new_without_default, reason = "a large allocation deserves a call")]
    pub fn new() -> Self {
        Self { rows: std::iter::repeat_with(Row::default).take(CONNECTIONS_MAX).collect() }
    }

    /// Says how far the connection in `slot` has come, in bytes read from and written to its near
    /// socket.
    pub fn set(&self, slot: u16, bytes_in: u64, bytes_out: u64) {
        let row = &self.rows[usize::from(slot)];
        row.bytes_in.store(bytes_in, Ordering::Relaxed);
        row.bytes_out.store(bytes_out, Ordering::Relaxed);
    }

    /// Bytes in and out of the connection in `slot`.
    pub fn get(&self, slot: u16) -> (u64, u64) {
        let row = &self.rows[usize::from(slot)];
        (row.bytes_in.load(Ordering::Relaxed), row.bytes_out.load(Ordering::Relaxed))
    }
}
