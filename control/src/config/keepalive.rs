//! TCP keepalive: how the kernel probes a TCP connection on which nothing happens (RFC 4.5.3).

use std::time::Duration;

use super::error::ConfigError;
use super::section::Section;

/// When the kernel probes a silent TCP connection, and when it gives up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpKeepalive {
    /// Silence before the first probe, in whole seconds; zero leaves keepalive off.
    pub idle: Duration,
    /// From one probe to the next, in whole seconds, at least one.
    pub interval: Duration,
    /// Probes without an answer after which the connection is reset.
    pub count: u32,
}

impl TcpKeepalive {
    /// Reads the table `tcp_keepalive` of `parent`.
    pub(super) fn read(parent: &mut Section<'_>) -> Result<Self, ConfigError> {
        let mut table = parent.table("tcp_keepalive")?;
        let keepalive = Self {
            idle: table.duration("idle", IDLE)?,
            interval: table.duration("interval", INTERVAL)?,
            count: table.count("count", 1..COUNT_MAX + 1, COUNT)?,
        };
        // RFC 7609 4.5.3 #7: configurable TCP keepalive interval
        for (key, time, least) in [
            ("idle", keepalive.idle, Duration::ZERO),
            ("interval", keepalive.interval, Duration::from_secs(1)),
        ] {
            if time < least || time > TIME_MAX || time.subsec_nanos() != 0 {
                let why = "TCP counts whole seconds, up to 32767 of them; write \"5s\"";
                return Err(table.error(key, why));
            }
        }
        table.finish()?;
        Ok(keepalive)
    }
}

// Peers and applications that died without a word are gone after 195 s; a network that is away for
// a minute costs nothing that is idle.
const IDLE: Duration = Duration::from_secs(120);
const INTERVAL: Duration = Duration::from_secs(15);
const COUNT: u32 = 5;
/// The most that Linux takes, for both times.
const TIME_MAX: Duration = Duration::from_secs(32_767);
/// The most that Linux takes.
const COUNT_MAX: u32 = 127;
