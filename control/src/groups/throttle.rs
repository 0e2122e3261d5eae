//! When what peers do wrong may be logged again: a peer must not fill the disk.

use std::time::Duration;

use smcr_proto::Instant;

/// When each kind of offence was last logged.
#[derive(Debug, Default)]
pub(super) struct Offences {
    pub(super) claims: Throttle,
    pub(super) out_of_sync: Throttle,
    pub(super) llc: Throttle,
}

/// Says when an event may be logged again.
#[derive(Debug, Default)]
pub struct Throttle {
    last: Option<Instant>,
    left_out: u64,
}

impl Throttle {
    /// Whether to log an event; if so, how many were left out since the last one.
    pub fn pass(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.since(last) < LOG_EVERY) {
            self.left_out += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.left_out))
    }
}

/// How often one kind of offence is logged at most.
const LOG_EVERY: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_offences_is_a_line_now_and_then() {
        let mut throttle = Throttle::default();
        let at = |ms: u64| Instant(ms * 1_000_000);
        assert_eq!(throttle.pass(at(1)), Some(0));
        let lines: Vec<_> = (2..6_000).filter_map(|ms| throttle.pass(at(ms))).collect();
        assert_eq!(lines, [4_999], "how many were left out is said");
    }
}
