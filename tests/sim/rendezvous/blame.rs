//! Who is to blame: all trouble that was made, what it may have touched, and when.
//!
//! A connection that did not end well must have a reason. Trouble is one only for what it can
//! reach: a reset for its connection, a path that failed for the link groups that had a link on it,
//! a control thread that stood still for what that had to do. And only for a while: what breaks
//! before, or long after, broke for another reason.

use std::time::Duration;

use smcgate::groups::GroupId;
use smcr_engine::handoff::Ending;
use smcr_proto::Instant;

use super::call::{Call, Carried};

/// What trouble may touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// A connection, by its number, for as long as it lives.
    Call(usize),
    /// The same, because one of its applications has reset or closed it.
    Left(usize),
    /// A link group of a host: one of its links failed. `spare` if it had others then, that must
    /// take over.
    Group { host: usize, id: GroupId, spare: bool },
    /// What the control threads have to do: rendezvous, and connections over SMC-R.
    Control,
    /// Rendezvous that go on, other than those of which it is known what group they led to.
    Talks,
    /// How long rendezvous take, and nothing else.
    Waits,
}

/// Some trouble, and when it may be felt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Trouble {
    scope: Scope,
    from: Instant,
    until: Instant,
}

/// All trouble of a run.
#[derive(Debug, Default)]
pub(crate) struct Blame(Vec<Trouble>);

impl Blame {
    /// Trouble happens now.
    pub(crate) fn note(&mut self, now: Instant, scope: Scope) {
        match scope {
            Scope::Call(_) | Scope::Left(_) => self.push(now, Instant(u64::MAX), scope),
            // Two links that fail are two troubles.
            Scope::Group { .. } => self.push(now, now + FELT, scope),
            Scope::Control | Scope::Talks | Scope::Waits => {
                self.note_until(now, now + FELT, scope);
            }
        }
    }

    /// Trouble has begun at `from`, or goes on. It is felt no longer than until then.
    pub(crate) fn note_until(&mut self, from: Instant, until: Instant, scope: Scope) {
        let goes_on = |one: &&mut Trouble| one.scope == scope && one.until >= from;
        match self.0.iter_mut().rev().find(goes_on) {
            Some(one) => one.until = one.until.max(until),
            None => self.push(from, until, scope),
        }
    }

    /// A link group still has a link on a port that is down.
    pub(crate) fn note_group_still(&mut self, now: Instant, host: usize, id: GroupId) {
        let is_it = |scope| {
            matches!(scope, Scope::Group { host: at, id: which, .. }
            if (at, which) == (host, id))
        };
        match self.0.iter_mut().rev().find(|one| is_it(one.scope) && one.until >= now) {
            Some(one) => one.until = one.until.max(now + FELT),
            None => self.note(now, Scope::Group { host, id, spare: false }),
        }
    }

    fn push(&mut self, from: Instant, until: Instant, scope: Scope) {
        self.0.push(Trouble { scope, from, until });
    }

    /// A control thread has stood still since then, and goes on. Peers wait for it a good second.
    pub(crate) fn note_standstill(&mut self, now: Instant, since: Instant) {
        self.note_until(since, now + FELT, Scope::Waits);
        if since + PATIENCE_OF_PEERS <= now {
            self.note_until(since + PATIENCE_OF_PEERS, now + FELT, Scope::Control);
        }
    }

    /// Whether trouble explains that this connection did not end well. `endings` are what its
    /// pollers say of it.
    pub(crate) fn explains(
        &self,
        number: usize,
        call: &Call,
        endings: [Option<Ending>; 2],
    ) -> bool {
        let Some(broke) = call.broke else {
            // An application left without a word of reset to the other.
            let own = [Scope::Call(number), Scope::Left(number)];
            return self.0.iter().any(|one| own.contains(&one.scope));
        };
        let lost = |ending: &Ending| matches!(ending, Ending::LinkLost | Ending::DataLost);
        let by_link = endings.iter().flatten().any(lost);
        let vanished = endings.contains(&Some(Ending::DataLost));
        self.0.iter().any(|one| {
            let in_time = one.from <= broke && broke <= one.until;
            in_time
                && one.touches(number, call, broke)
                && match one.scope {
                    Scope::Call(_) | Scope::Left(_) | Scope::Control | Scope::Talks => true,
                    Scope::Group { .. } if call.was_talking(broke) => true,
                    Scope::Group { .. } => by_link && (vanished || !self.must_survive(one)),
                    Scope::Waits => false,
                }
        })
    }

    /// Whether any trouble may have touched this connection in its life, other than that an
    /// application left.
    pub(crate) fn has_touched(&self, number: usize, call: &Call) -> bool {
        self.0.iter().any(|one| {
            let from = one.from.max(call.born);
            let met = from <= one.until.min(call.last);
            let counts = match one.scope {
                Scope::Left(_) | Scope::Waits => false,
                Scope::Call(_) | Scope::Group { .. } | Scope::Control | Scope::Talks => true,
            };
            met && counts && one.touches(number, call, from)
        })
    }

    /// Whether a link of this connection's group failed while others were there to take over.
    pub(crate) fn spared(&self, call: &Call) -> bool {
        self.0.iter().any(|one| {
            let Scope::Group { host, id, .. } = one.scope else { return false };
            let mut sides = call.hosts.iter().zip(&call.sides);
            let side = sides.find(|(at, side)| **at == host && side.group == Some(id));
            let opened = side.and_then(|(_, side)| side.opened);
            let relayed = opened.is_some_and(|at| at <= one.from && one.from <= call.last);
            relayed && self.must_survive(one)
        })
    }

    /// Whether any trouble may make a rendezvous of that time last longer.
    pub(crate) fn may_delay(&self, number: usize, from: Instant, until: Instant) -> bool {
        self.0.iter().any(|one| {
            let other = |scope| {
                matches!(scope, Scope::Call(other) | Scope::Left(other)
                if other != number)
            };
            !other(one.scope) && one.from <= until && from <= one.until
        })
    }

    /// Whether nothing but the spare links of the group failed at about that time.
    fn must_survive(&self, one: &Trouble) -> bool {
        let Scope::Group { host, id, spare: true } = one.scope else { return false };
        let near = |other: &&Trouble| {
            let group = matches!(other.scope, Scope::Group { host: at, id: which, .. }
                if (at, which) == (host, id));
            let control = other.scope == Scope::Control;
            let close = other.from <= one.from + FELT && one.from <= other.until + FELT;
            (group || control) && close
        };
        self.0.iter().filter(near).count() == 1
    }
}

impl Trouble {
    /// Whether this connection was within its reach at that time.
    fn touches(&self, number: usize, call: &Call, at: Instant) -> bool {
        match self.scope {
            Scope::Call(other) | Scope::Left(other) => other == number,
            Scope::Group { host, id, .. } => {
                let side = call.hosts.iter().position(|one| *one == host);
                let group = side.and_then(|side| call.sides[side].group);
                // Whose group is not known may have tried to get into this one.
                group == Some(id) || group.is_none() && call.was_talking(at)
            }
            Scope::Control => {
                let relayed = call.sides.iter().all(|side| side.carried == Some(Carried::Tcp));
                !relayed || call.was_talking(at)
            }
            Scope::Talks => {
                let known = call.sides.iter().all(|side| side.group.is_some());
                !known && call.was_talking(at)
            }
            Scope::Waits => call.was_talking(at),
        }
    }
}

impl Call {
    /// Whether its rendezvous was going on at either side, or had just ended.
    fn was_talking(&self, at: Instant) -> bool {
        let talked = |opened: Option<Instant>| opened.is_none_or(|opened| at <= opened);
        self.born <= at && self.sides.iter().any(|side| talked(side.opened))
    }
}

/// How long trouble may be felt: an idle link is probed after three seconds, and a peer has two to
/// answer.
pub(crate) const FELT: Duration = Duration::from_secs(6);
/// How long peers wait at least before they give up a control thread that does not answer.
const PATIENCE_OF_PEERS: Duration = Duration::from_secs(1);
