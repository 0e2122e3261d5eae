//! Who is to blame: all trouble that was made, what it may have touched, and when.
//!
//! A connection that did not end well must have a reason, and so must one that took long to come
//! up. Trouble is a reason only for what it can reach: a reset for its connection, a path that
//! failed for the link groups that had a link on it, a control thread that stood still for what it
//! had to do. It is a reason only for what it can cause: a spare link that fails costs nobody a
//! connection, and data is lost only in a link group of which the network lost a message. And it
//! is one only for a while: what breaks before, or long after, broke for another reason.

use std::collections::BTreeSet;
use std::time::Duration;

use smcgate::groups::GroupId;
use smcr_engine::handoff::Ending;
use smcr_proto::Instant;

use super::call::{Call, Carried};
use super::{CONNECT_TIMEOUT, HANDSHAKE_TIMEOUT};

/// What trouble may touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// A connection, by its number, for as long as it lives.
    Call(usize),
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

/// A link of a group lost messages that the network had acknowledged.
#[derive(Clone, Copy, Debug)]
struct Loss {
    at: Instant,
    host: usize,
    id: GroupId,
}

/// All trouble of a run.
#[derive(Debug, Default)]
pub(crate) struct Blame {
    all: Vec<Trouble>,
    /// When control threads stood still, in order.
    standstills: Vec<(Instant, Instant)>,
    /// What the network has lost, in order.
    losses: Vec<Loss>,
    /// Groups that were hit by trouble, as a host names them, and that both gateways had then.
    common: BTreeSet<(usize, GroupId)>,
}

impl Blame {
    /// Trouble happens now.
    pub(crate) fn note(&mut self, now: Instant, scope: Scope) {
        match scope {
            Scope::Call(_) => self.push(now, Instant(u64::MAX), scope),
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
        match self.all.iter_mut().rev().find(goes_on) {
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
        match self.all.iter_mut().rev().find(|one| is_it(one.scope) && one.until >= now) {
            Some(one) => one.until = one.until.max(now + FELT),
            None => self.note(now, Scope::Group { host, id, spare: false }),
        }
    }

    fn push(&mut self, from: Instant, until: Instant, scope: Scope) {
        self.all.push(Trouble { scope, from, until });
    }

    /// A group that is hit by trouble is one of the two gateways, not of a host beside them.
    pub(crate) fn note_common(&mut self, host: usize, id: GroupId) {
        self.common.insert((host, id));
    }

    /// The network has lost acknowledged messages on a link of this group. Nobody else may miss
    /// anything.
    pub(crate) fn note_loss(&mut self, now: Instant, host: usize, id: GroupId) {
        self.losses.push(Loss { at: now, host, id });
    }

    /// A control thread has stood still since then, and goes on. Peers wait for it a good second.
    pub(crate) fn note_standstill(&mut self, now: Instant, since: Instant) {
        match self.standstills.iter_mut().rev().find(|(_, until)| *until >= since) {
            Some((_, until)) => *until = now.max(*until),
            None => self.standstills.push((since, now)),
        }
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
        if call.was_left() {
            return true;
        }
        let Some(broke) = call.broke else { return false };
        let ended = |as_this: Ending| endings.contains(&Some(as_this));
        let (by_link, vanished) = (ended(Ending::LinkLost), ended(Ending::DataLost));
        let talking = call.was_talking(broke);
        // A poller learns of it from the control thread, and reports an aborted connection.
        let told = talking || !call.is_smc() || ended(Ending::Aborted);
        let began = self.all.iter().any(|one| {
            let in_time = one.from <= broke && broke <= one.until;
            in_time
                && one.touches(number, call, broke)
                && match one.scope {
                    Scope::Call(_) => told,
                    Scope::Talks => true,
                    Scope::Group { .. } | Scope::Control if vanished => self.has_lost(one, call),
                    // Whoever names a link that was left is led to one of the others.
                    Scope::Group { .. } => (talking || by_link) && !self.must_survive(one),
                    Scope::Control => talking || by_link,
                    Scope::Waits => false,
                }
        });
        // One side may be aborted, and the other lose its link before it hears of that.
        let went_on = |what: &dyn Fn(&Trouble) -> bool| {
            let felt = |one: &&Trouble| broke <= one.until && one.from <= call.last;
            let mut felt = self.all.iter().filter(felt);
            felt.any(|one| what(one) && one.touches(number, call, one.from.max(broke)))
        };
        let fails = |one: &Trouble| match one.scope {
            Scope::Group { .. } => !self.must_survive(one),
            Scope::Control => true,
            // The link of a first contact goes with its rendezvous.
            Scope::Call(_) => talking && call.confirmed.is_none(),
            Scope::Talks | Scope::Waits => false,
        };
        // An acknowledgement counts for nothing when the NIC that gave it breaks.
        let has_lost = |one: &Trouble| self.has_lost(one, call);
        began && (!by_link || went_on(&fails)) && (!vanished || went_on(&has_lost))
    }

    /// Whether any trouble of its life might explain that this connection does not end well, other
    /// than that an application leaves.
    pub(crate) fn may_end(&self, number: usize, call: &Call) -> bool {
        self.all.iter().any(|one| {
            let from = one.from.max(call.born);
            let met = from <= one.until.min(call.last);
            let counts = match one.scope {
                Scope::Waits => false,
                Scope::Group { .. } => self.has_lost(one, call) || !self.must_survive(one),
                Scope::Call(_) | Scope::Control | Scope::Talks => true,
            };
            met && counts && one.touches(number, call, from)
        })
    }

    /// All trouble that this connection was in reach of, for a complaint.
    pub(crate) fn near(&self, number: usize, call: &Call) -> Vec<Trouble> {
        let reaches = |one: &&Trouble| {
            let from = one.from.max(call.born);
            from <= one.until.min(call.last) && one.touches(number, call, from)
        };
        self.all.iter().filter(reaches).copied().collect()
    }

    /// Whether a link of this connection's group failed while others were there to take over.
    pub(crate) fn spared(&self, call: &Call) -> bool {
        self.all.iter().any(|one| {
            let Scope::Group { host, id, .. } = one.scope else { return false };
            let mut sides = call.hosts.iter().zip(&call.sides);
            let side = sides.find(|(at, side)| **at == host && side.group == Some(id));
            let opened = side.and_then(|(_, side)| side.opened);
            let relayed = opened.is_some_and(|at| at <= one.from && one.from <= call.last);
            relayed && self.must_survive(one)
        })
    }

    /// How much longer trouble may have made the rendezvous of this connection, which ended then:
    /// for as long as control threads stood still, and for all that gateways wait for each other.
    pub(crate) fn delay(&self, number: usize, call: &Call, until: Instant) -> Duration {
        let delays = self.all.iter().any(|one| {
            let from = one.from.max(call.born);
            let reaches = one.touches(number, call, from) || self.may_have_held_up(one);
            from <= one.until.min(until) && reaches
        });
        if !delays {
            return Duration::ZERO;
        }
        let stood = self.standstills.iter().map(|(from, to)| {
            let (from, to) = (*from.max(&call.born), *to.min(&until));
            if from < to { to.since(from) } else { Duration::ZERO }
        });
        stood.sum::<Duration>() + GIVEN_UP
    }

    /// Whether a rendezvous may have waited for the group that this trouble hit, and was led to
    /// another one then: both gateways had it, and no link was known to take over.
    fn may_have_held_up(&self, trouble: &Trouble) -> bool {
        let Scope::Group { host, id, spare: false } = trouble.scope else { return false };
        self.common.contains(&(host, id))
    }

    /// Whether the network lost messages of this connection's group while this trouble was felt,
    /// and while the connection was there.
    fn has_lost(&self, trouble: &Trouble, call: &Call) -> bool {
        let (from, until) = (trouble.from.max(call.born), trouble.until.min(call.last));
        let mut losses = self.losses.iter().filter(|loss| from <= loss.at && loss.at <= until);
        losses.any(|loss| {
            let mut sides = call.hosts.iter().zip(&call.sides);
            sides.any(|(host, side)| *host == loss.host && side.group == Some(loss.id))
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
        self.all.iter().filter(near).count() == 1
    }
}

impl Trouble {
    /// Whether this connection was within its reach at that time.
    fn touches(&self, number: usize, call: &Call, at: Instant) -> bool {
        let known = call.sides.iter().any(|side| side.group.is_some());
        match self.scope {
            Scope::Call(other) => other == number,
            Scope::Group { host, id, .. } => {
                let side = call.hosts.iter().position(|one| *one == host);
                let group = side.and_then(|side| call.sides[side].group);
                // Whose group is not known may have tried to get into this one.
                group == Some(id) || !known && call.was_talking(at)
            }
            Scope::Control => {
                let relayed = call.sides.iter().all(|side| side.carried == Some(Carried::Tcp));
                !relayed || call.was_talking(at)
            }
            Scope::Talks => !known && call.was_talking(at),
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

    /// Whether it was SMC-R at both sides.
    fn is_smc(&self) -> bool {
        self.sides.iter().all(|side| side.carried == Some(Carried::Smc))
    }
}

/// How long trouble may be felt: an idle link is probed after three seconds, and a peer has two to
/// answer.
pub(crate) const FELT: Duration = Duration::from_secs(6);
/// How long peers wait at least before they give up a control thread that does not answer.
const PATIENCE_OF_PEERS: Duration = Duration::from_secs(1);
/// How long a rendezvous takes at most before its gateway gives it up: the time limit of the
/// connect, and that of the handshake.
const GIVEN_UP: Duration = CONNECT_TIMEOUT.saturating_add(HANDSHAKE_TIMEOUT);

/// Two groups are in trouble at the same time, and each has a connection that misses bytes. The
/// network has lost a message of one of them.
#[test]
fn a_loss_excuses_nobody_outside_its_group() {
    use smcgate::groups::PortId;

    use super::call::Program;

    let [start, felt, end] = [1, 2, 3].map(|seconds| Instant(seconds * 1_000_000_000));
    let call_of = |group| {
        let programs = [Program::None, Program::None];
        let mut call = Call::new(start, [0, 1], [PortId(0); 2], programs, [None, None]);
        for side in &mut call.sides {
            (side.group, side.carried) = (Some(group), Some(Carried::Smc));
            side.opened = Some(start);
        }
        call.note_break(end);
        call.last = end;
        call
    };
    let groups = [GroupId(1), GroupId(2)];
    let [unlucky, guilty] = groups.map(call_of);
    let endings = [Some(Ending::DataLost), Some(Ending::Aborted)];
    for scope in [None, Some(Scope::Control)] {
        let mut blame = Blame::default();
        for id in groups {
            blame.note(felt, scope.unwrap_or(Scope::Group { host: 0, id, spare: true }));
        }
        assert!(!blame.explains(0, &unlucky, endings), "nothing was lost");
        blame.note_loss(felt, 0, GroupId(1));
        assert!(blame.explains(0, &unlucky, endings));
        assert!(!blame.explains(1, &guilty, endings), "{scope:?}: others have lost something");
        assert!(!blame.may_end(1, &guilty) || scope.is_some());
    }
}

/// A server offers an element of a group that it is about to lose, and must wait for its peer
/// until the link is known to be dead. Then it founds another group. Whoever begins when the first
/// group is forgotten has not waited for it, nor has anybody for a group of a host beside the two.
#[test]
fn a_group_that_was_lost_may_have_held_up_a_rendezvous() {
    use smcgate::groups::PortId;

    use super::call::Program;

    let [lost, start] = [1, 2].map(|seconds| Instant(seconds * 1_000_000_000));
    let wait = Duration::from_secs(3);
    let later = lost + FELT + Duration::from_secs(1);
    for (common, spare, born, waited) in [
        (true, false, start, true),
        (true, true, start, false),
        (false, false, start, false),
        (true, false, later, false),
    ] {
        let mut blame = Blame::default();
        blame.note(lost, Scope::Group { host: 1, id: GroupId(1), spare });
        if common {
            blame.note_common(1, GroupId(1));
        }
        let programs = [Program::None, Program::None];
        let mut call = Call::new(born, [0, 1], [PortId(0); 2], programs, [None, None]);
        for side in &mut call.sides {
            (side.group, side.opened) = (Some(GroupId(2)), Some(born + wait));
        }
        let delay = blame.delay(0, &call, born + wait);
        assert_eq!(!delay.is_zero(), waited, "{:?}", (common, spare, born));
    }
}
