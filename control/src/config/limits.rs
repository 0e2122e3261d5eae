//! `[limits]`: bounds of the whole process.

use super::error::ConfigError;
use super::section::Section;

/// Bounds of the whole process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections at once. Each holds two descriptors.
    pub connections_max: u32,
    /// Rendezvous at once. More connections than these wait, and stay TCP if they wait too long.
    pub handshakes_max: u32,
    /// Connections of peers that offered SMC-R and have not sent a Proposal yet. If there are more,
    /// the oldest are reset.
    pub silent_max: u32,
    /// The bytes that RMB elements in use may take, if the operator has set a limit; see
    /// [`rmb_bytes`](Self::rmb_bytes).
    pub rmb_bytes: Option<u64>,
}

impl Limits {
    /// The bytes that RMB elements in use may take, in a process that may have `memory` bytes in
    /// all. Connections that would need more stay TCP.
    pub fn rmb_bytes(&self, memory: Option<u64>) -> u64 {
        let share = memory.map_or(RMB_BYTES, |memory| RMB_BYTES.min(memory / 2));
        self.rmb_bytes.unwrap_or(share)
    }
}

/// The table `[limits]`.
pub(super) fn read(mut table: Section<'_>) -> Result<Limits, ConfigError> {
    let rmb_bytes = match table.has("rmb_bytes") {
        true => Some(table.number("rmb_bytes", 0..RMB_BYTES_MAX + 1, 0)?.value),
        // The section is asked for the key even so, because that makes it a known one.
        false => table.number("rmb_bytes", 0..RMB_BYTES_MAX + 1, 0).map(|_| None)?,
    };
    let limits = Limits {
        connections_max: table.count("connections_max", 1..CONNECTIONS_MAX + 1, 9000)?,
        handshakes_max: table.count("handshakes_max", 1..65_537, 1024)?,
        silent_max: table.count("silent_max", 1..65_537, 1024)?,
        rmb_bytes,
    };
    table.finish()?;
    Ok(limits)
}

/// Default of the memory for RMB elements, on a host that has twice as much: elements of default
/// size for more connections than a process has descriptors for. Pages come into being as
/// connections fill them.
const RMB_BYTES: u64 = 4 << 30;
/// A larger number is a slip of the pen.
const RMB_BYTES_MAX: u64 = 1 << 40;
/// As many as the pollers have slots for.
#[expect(clippy::cast_possible_truncation, reason = "asserted below")]
pub(super) const CONNECTIONS_MAX: u32 = smcr_engine::limits::CONNECTIONS_MAX as u32;
const _: () = assert!(smcr_engine::limits::CONNECTIONS_MAX < 1 << 32);

#[cfg(test)]
mod tests {
    use super::*;

    /// In a container with half a gigabyte, four gigabytes of elements end with the process.
    #[test]
    fn the_default_is_half_of_what_the_process_may_have() {
        let limits =
            |rmb_bytes| Limits { connections_max: 1, handshakes_max: 1, silent_max: 1, rmb_bytes };
        let open = limits(None);
        assert_eq!(open.rmb_bytes(Some(512 << 20)), 256 << 20);
        assert_eq!([open.rmb_bytes(Some(1 << 40)), open.rmb_bytes(None)], [4 << 30; 2]);
        assert_eq!(limits(Some(1 << 20)).rmb_bytes(Some(1 << 19)), 1 << 20, "as it is written");
    }
}
