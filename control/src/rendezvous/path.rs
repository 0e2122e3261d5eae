//! Whether RoCE gets through to a peer that TCP reaches.

use std::time::Duration;

use smcr_proto::Instant;
use smcr_proto::wire::clc::{Diagnosis, Offer};
use smcr_rnic::Rnic;

use crate::gateway::Gateway;
use crate::groups::GroupId;
use crate::paths::{Far, Way};
use crate::reactor::Key;
use crate::sessions::{Session, Talk, Waiting};

impl<N: Rnic> Gateway<N> {
    /// Whether a rendezvous with `far` may end in SMC-R.
    pub(super) fn consult(&mut self, now: Instant, key: Key, far: Far) -> Way {
        let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key) else { return Way::Closed };
        if shaking.trial {
            return Way::Trial;
        }
        let way = self.paths.consult(now, far);
        shaking.far = Some(far);
        shaking.trial = way == Way::Trial;
        way
    }

    /// Has a first contact that is a trial end before users notice: the path is likely to be as
    /// bad as before. The time is that of some round trips, of which TCP has just shown one.
    pub(super) fn hurry_trial(&mut self, now: Instant, key: Key, group: GroupId) {
        let Some(Session::Shaking(shaking)) = self.sessions.at(key) else { return };
        if !shaking.trial {
            return;
        }
        let wait = match &shaking.conversation.talk {
            Talk::Client(_) => TRIAL_OF_CLIENT,
            Talk::Server(_) | Talk::Pending(..) | Talk::Plain(_) | Talk::Connecting => {
                TRIAL_OF_SERVER
            }
        };
        let round_trip = now.since(shaking.said_at).min(ROUND_TRIP_MAX);
        self.groups.hurry(group, wait + 2 * round_trip);
    }

    /// Has a rendezvous wait until a link of a group has shown that it carries. Returns whether
    /// there is time for it.
    pub(super) fn wait_for_proof(
        &mut self,
        now: Instant,
        key: Key,
        group: GroupId,
        accept: Option<Offer>,
    ) -> bool {
        let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key) else { return false };
        let wait = if shaking.trial { TRIAL_OF_LINK } else { PROOF_WAIT };
        let until = *shaking.proof_by.get_or_insert(now + wait);
        if until <= now {
            self.path_failed(now, key);
            return false;
        }
        shaking.waiting = Some(Waiting { group, until, accept, for_proof: true });
        self.groups.probe(now, group);
        self.proving.push(key);
        true
    }

    /// An LLC message has come, perhaps the one that shows that a link carries.
    pub(crate) fn serve_proven(&mut self, now: Instant) {
        for key in std::mem::take(&mut self.proving) {
            let Some(Session::Shaking(shaking)) = self.sessions.at(key) else { continue };
            let Some(waiting) = &shaking.waiting else { continue };
            if self.groups.proven_link(now, waiting.group).is_none() {
                self.proving.push(key);
                continue;
            }
            // Whoever doubted the path need not any more.
            self.path_worked(key);
            self.try_again(now, key);
        }
    }

    /// RoCE did not get through for this rendezvous.
    pub(super) fn path_failed(&mut self, now: Instant, key: Key) {
        let Some(far) = self.far_of(key) else { return };
        tracing::info!(?far, "RoCE does not get through: connections stay TCP");
        self.paths.failed(now, far);
    }

    /// RoCE got through.
    pub(crate) fn path_worked(&mut self, key: Key) {
        if let Some(far) = self.far_of(key)
            && self.paths.worked(far)
        {
            tracing::info!(?far, "RoCE gets through again");
        }
    }

    /// The peer has declined: perhaps for what it found out about the path.
    pub(super) fn note_decline(&mut self, now: Instant, key: Key, diagnosis: Diagnosis) {
        match diagnosis {
            Diagnosis::NO_ROCE_PATH => {
                if let Some(far) = self.far_of(key) {
                    self.paths.doubted(now, far);
                }
            }
            Diagnosis::CONFIRM_LINK_TIMED_OUT => self.path_failed(now, key),
            _ => {}
        }
    }

    /// This rendezvous finds out nothing more.
    pub(super) fn end_trial(&mut self, now: Instant, key: Key) {
        let Some(Session::Shaking(shaking)) = self.sessions.at_mut(key) else { return };
        if std::mem::take(&mut shaking.trial)
            && let Some(far) = shaking.far
        {
            self.paths.unclear(now, far);
        }
    }

    fn far_of(&self, key: Key) -> Option<Far> {
        let Some(Session::Shaking(shaking)) = self.sessions.at(key) else { return None };
        shaking.far
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
