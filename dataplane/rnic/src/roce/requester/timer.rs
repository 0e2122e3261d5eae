//! The retransmission timer: how long to wait for an acknowledgement, and for how long the peer has
//! been silent.

use std::time::Duration;

use smcr_proto::Instant;

use super::super::responder::{ACK_DELAY, may_hold_back};
use super::super::wire::Syndrome;
use super::Requester;
use crate::QpError;

/// A running retransmission timer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wait {
    since: Instant,
    pub(super) until: Instant,
    /// The peer may hold back the acknowledgement that we wait for.
    patient: bool,
}

impl Requester {
    /// Starts the timer at the departure of a packet, unless it runs. Starts it again if with this
    /// packet so much is in flight that the peer no longer holds the acknowledgement back.
    pub(super) fn wait_for_answer(&mut self, now: Instant) {
        if self.wait.is_none_or(|wait| wait.patient && !self.is_patient()) {
            self.restart_wait(now);
        }
    }

    /// Starts the timer again.
    pub(super) fn restart_wait(&mut self, now: Instant) {
        let patient = self.is_patient();
        let timeout = self.congestion.timeout();
        let timeout = if patient { timeout.max(PATIENCE) } else { timeout };
        let until = now + timeout.min(SILENCE_MAX - self.silence);
        self.wait = Some(Wait { since: now, until, patient });
    }

    /// Stops the retransmission timer, because the oldest packet was lost or delayed. Fails if the
    /// peer has been silent for too long.
    pub(super) fn stop_waiting(&mut self, now: Instant) -> Result<(), QpError> {
        if let Some(wait) = self.wait.take() {
            // Only the time up to the timeout counts as silence of the peer. After it, we did not
            // run, and the acknowledgement may have been waiting in the socket.
            self.silence += now.min(wait.until).since(wait.since);
        }
        if self.silence >= SILENCE_MAX { Err(QpError::RetriesExceeded) } else { Ok(()) }
    }

    /// Whether the peer may hold back the acknowledgement of what is in flight, if it is one of our
    /// kind.
    fn is_patient(&self) -> bool {
        let (oldest, next) = (self.oldest.mark, self.next.mark);
        may_hold_back(next.sequence - oldest.sequence, next.cost - oldest.cost)
    }
}

/// The wait that the code in an RNR NAK asks for (IBTA 9.7.5.2.8).
pub(super) fn not_ready_wait(syndrome: Syndrome) -> Duration {
    const HUNDREDTHS_MS: [u32; 32] = [
        65_536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384, 24_576, 32_768, 49_152,
    ];
    10 * Duration::from_micros(HUNDREDTHS_MS[usize::from(syndrome.0 & 0x1f)].into())
}

/// The shortest timeout while the peer may hold the acknowledgement back. What remains after its
/// delay is for a poller that wakes late, as pollers do beside busy programs.
const PATIENCE: Duration = ACK_DELAY.saturating_add(Duration::from_micros(1500));
/// How long the peer may be silent before the queue pair breaks. Linux SMC makes hardware NICs wait
/// 8 times 134 ms; but a process on a busy machine may not run for a second, and breaking resets
/// all applications on the link. A peer that was killed must be noticed within two seconds.
pub(super) const SILENCE_MAX: Duration = Duration::from_millis(1500);
