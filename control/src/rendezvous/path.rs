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
    /// When this rendezvous has first asked links to prove that they work, and until when they
    /// may.
    asked: Option<(Instant, Instant)>,
}

impl PathCheck {
    /// No CLC message was sent yet, and the path was not asked about.
    pub(super) fn new(now: Instant) -> Self {
        Self { far: None, trial: false, said_at: now, asked: None }
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
        self.asked.get_or_insert((now, now + wait)).1
    }

    /// How old a proof may be: it counts if it came just now, or since this rendezvous has asked. A
    /// control thread may be so busy that it looks only when the deadline has passed.
    pub(super) fn proof_age(&self, now: Instant) -> Duration {
        self.asked.map_or(FRESH, |(at, _)| now.since(at).max(FRESH))
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

/// How long a proof is good for those who have not asked for it. A busy link proves itself with
/// each message; asking one that rests costs a round trip.
const FRESH: Duration = Duration::from_millis(100);
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
