//! What a rendezvous finds out about the RoCE path to its peer.

use std::time::Duration;

use smcr_proto::Instant;

use crate::paths::{Far, Paths, Way};

/// What one rendezvous knows, and finds out, about the RoCE path to its peer.
#[derive(Debug)]
pub(super) struct PathCheck {
    /// Who is at the other end; set when the rendezvous asks what is known of the path.
    far: Option<Far>,
    /// This rendezvous finds out whether RoCE packets reach the peer again.
    trial: bool,
    /// When we last sent a CLC message.
    pub(super) said_at: Instant,
    /// Deadline for a link to prove that it works.
    proof_by: Option<Instant>,
}

impl PathCheck {
    /// No CLC message was sent yet, and the path was not asked about.
    pub(super) fn new(now: Instant) -> Self {
        Self { far: None, trial: false, said_at: now, proof_by: None }
    }

    /// Whether this rendezvous must stay TCP, because RoCE packets did not reach `far` lately.
    pub(super) fn is_closed(&mut self, now: Instant, far: Far, paths: &mut Paths) -> bool {
        if self.trial {
            return false;
        }
        let way = paths.consult(now, far);
        self.far = Some(far);
        self.trial = way == Way::Trial;
        way == Way::Closed
    }

    /// How long the first contact of a trial may take; none if this is no trial. The path is
    /// probably as bad as before, so the time is too short for users to notice: a fixed wait, and
    /// two round trips as long as the one that TCP has just taken.
    pub(super) fn hurry(&self, now: Instant, is_client: bool) -> Option<Duration> {
        let wait = if is_client { TRIAL_OF_CLIENT } else { TRIAL_OF_SERVER };
        let round_trip = now.since(self.said_at).min(ROUND_TRIP_MAX);
        self.trial.then(|| wait + 2 * round_trip)
    }

    /// Deadline for a link to prove that it works; it starts at the first call.
    pub(super) fn proof_by(&mut self, now: Instant) -> Instant {
        let wait = if self.trial { TRIAL_OF_LINK } else { PROOF_WAIT };
        *self.proof_by.get_or_insert(now + wait)
    }

    /// RoCE packets of this rendezvous did not reach the peer.
    pub(super) fn failed(&self, now: Instant, paths: &mut Paths) {
        if let Some(far) = self.far {
            tracing::info!(?far, "RoCE does not get through: connections stay TCP");
            paths.failed(now, far);
        }
    }

    /// RoCE packets reached the peer.
    pub(super) fn worked(&self, paths: &mut Paths) {
        if let Some(far) = self.far
            && paths.worked(far)
        {
            tracing::info!(?far, "RoCE gets through again");
        }
    }

    /// The peer has declined because it believes that RoCE packets get lost on the path.
    pub(super) fn doubted(&self, now: Instant, paths: &mut Paths) {
        if let Some(far) = self.far {
            paths.doubted(now, far);
        }
    }

    /// Ends the trial, if this rendezvous is one: without a result so far, it has shown nothing.
    pub(super) fn end_trial(&mut self, now: Instant, paths: &mut Paths) {
        if std::mem::take(&mut self.trial) {
            let far = self.far.expect("a trial is one of the path to somebody");
            paths.unclear(now, far);
        }
    }
}

/// How long the links of a group may take to prove that they work, before a new connection stays
/// TCP: much longer than a healthy but busy host needs.
const PROOF_WAIT: Duration = Duration::from_millis(500);
/// How often to look whether they have, without hearing of it. A proof is good for longer.
pub(super) const PROOF_LOOK: Duration = Duration::from_millis(50);
/// The same for a trial.
const TRIAL_OF_LINK: Duration = Duration::from_millis(40);
/// How long the first contact of a trial may take after our Confirm, in addition to two round
/// trips.
const TRIAL_OF_CLIENT: Duration = Duration::from_millis(28);
/// The same after our CONFIRM LINK.
const TRIAL_OF_SERVER: Duration = Duration::from_millis(20);
/// The longest time that counts as one round trip: beyond it, the peer was probably busy.
const ROUND_TRIP_MAX: Duration = Duration::from_millis(50);
