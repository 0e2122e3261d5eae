//! What a rendezvous finds out about the RoCE path to its peer.

use std::time::Duration;

use smcr_proto::Instant;

use crate::paths::{Far, Paths, Way};

/// What one rendezvous has to do with what is known of the path to its peer.
#[derive(Debug)]
pub(super) struct PathCheck {
    /// Who is at the other end, once that decides whether there is SMC-R.
    far: Option<Far>,
    /// It finds out whether RoCE gets through again.
    trial: bool,
    /// When we last said something.
    pub(super) said_at: Instant,
    /// Until when a link must have shown that it carries.
    proof_by: Option<Instant>,
}

impl PathCheck {
    /// Nothing was said yet.
    pub(super) fn new(now: Instant) -> Self {
        Self { far: None, trial: false, said_at: now, proof_by: None }
    }

    /// Whether a rendezvous with `far` may end in SMC-R.
    pub(super) fn is_closed(&mut self, now: Instant, far: Far, paths: &mut Paths) -> bool {
        if self.trial {
            return false;
        }
        let way = paths.consult(now, far);
        self.far = Some(far);
        self.trial = way == Way::Trial;
        way == Way::Closed
    }

    /// How long the first contact of a trial may take: it ends before users notice, as the path is
    /// likely to be as bad as before. The time is that of some round trips, of which TCP has just
    /// shown one. None if it is no trial.
    pub(super) fn hurry(&self, now: Instant, is_client: bool) -> Option<Duration> {
        let wait = if is_client { TRIAL_OF_CLIENT } else { TRIAL_OF_SERVER };
        let round_trip = now.since(self.said_at).min(ROUND_TRIP_MAX);
        self.trial.then(|| wait + 2 * round_trip)
    }

    /// Until when a link may show that it carries, counted from the first time that this is asked.
    pub(super) fn proof_by(&mut self, now: Instant) -> Instant {
        let wait = if self.trial { TRIAL_OF_LINK } else { PROOF_WAIT };
        *self.proof_by.get_or_insert(now + wait)
    }

    /// RoCE did not get through for this rendezvous.
    pub(super) fn failed(&self, now: Instant, paths: &mut Paths) {
        if let Some(far) = self.far {
            tracing::info!(?far, "RoCE does not get through: connections stay TCP");
            paths.failed(now, far);
        }
    }

    /// RoCE got through.
    pub(super) fn worked(&self, paths: &mut Paths) {
        if let Some(far) = self.far
            && paths.worked(far)
        {
            tracing::info!(?far, "RoCE gets through again");
        }
    }

    /// The peer has declined because it doubts the path.
    pub(super) fn doubted(&self, now: Instant, paths: &mut Paths) {
        if let Some(far) = self.far {
            paths.doubted(now, far);
        }
    }

    /// This rendezvous finds out nothing more.
    pub(super) fn end_trial(&mut self, now: Instant, paths: &mut Paths) {
        if std::mem::take(&mut self.trial) {
            let far = self.far.expect("a trial is one of the path to somebody");
            paths.unclear(now, far);
        }
    }
}

/// How long the links of a group may take to show that they carry, before a new connection stays
/// TCP: much longer than a host that is well and busy needs.
const PROOF_WAIT: Duration = Duration::from_millis(500);
/// The same for a trial.
const TRIAL_OF_LINK: Duration = Duration::from_millis(40);
/// How long a first contact may take that is a trial, from our Confirm, beside two round trips.
const TRIAL_OF_CLIENT: Duration = Duration::from_millis(28);
/// The same from our CONFIRM LINK.
const TRIAL_OF_SERVER: Duration = Duration::from_millis(20);
/// What a round trip is at most believed to take: the peer may have had other things to do.
const ROUND_TRIP_MAX: Duration = Duration::from_millis(50);
