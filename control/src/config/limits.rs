//! `[limits]`: bounds of the whole process.

use super::error::ConfigError;
use super::section::Section;

/// Bounds of the whole process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections at once. Each holds two descriptors.
    pub connections_max: u32,
    /// Rendezvous at once; connections beyond stay TCP.
    pub handshakes_max: u32,
    /// Memory that RMBs may take, in bytes; connections beyond stay TCP.
    pub rmb_bytes: u64,
}

/// The table `[limits]`.
pub(super) fn read(mut table: Section<'_>) -> Result<Limits, ConfigError> {
    let limits = Limits {
        connections_max: table.count("connections_max", 1..CONNECTIONS_MAX + 1, 9000)?,
        handshakes_max: table.count("handshakes_max", 1..65_537, 1024)?,
        rmb_bytes: table.number("rmb_bytes", 0..RMB_BYTES_MAX + 1, RMB_BYTES)?.value,
    };
    table.finish()?;
    Ok(limits)
}

/// Default of the memory for RMBs: elements of default size for more connections than a process has
/// descriptors for. Pages come into being as connections fill them.
const RMB_BYTES: u64 = 4 << 30;
/// More is a slip of the pen.
const RMB_BYTES_MAX: u64 = 1 << 40;
/// Two descriptors each must fit in what a Linux process can be given (`fs.nr_open`).
pub(super) const CONNECTIONS_MAX: u32 = 500_000;
