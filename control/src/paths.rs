//! Which peers TCP reaches and RoCE does not, as far as connections have found out.
//!
//! A firewall, or a network without RoCE, costs the first connection more than a second, because
//! nothing reports that UDP port 4791 is closed. The gateway remembers that, and the connections
//! that follow are TCP at once. Now and then one of them tries again. It waits so briefly for an
//! answer that users do not notice.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use smcr_proto::{Gid, Instant};

/// Who is at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Far {
    /// The server that we connect to.
    Server(IpAddr),
    /// A client that connected to us: from where, and the port of its RNIC.
    Client(IpAddr, Gid),
}

/// What a new connection may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Nothing speaks against SMC-R.
    Open,
    /// It did not work lately: this connection finds out whether it does again.
    Trial,
    /// It did not work lately, and it is not the time to try again, or another one does.
    Closed,
}

/// What is known of a peer to which RoCE did not get through.
#[derive(Clone, Copy, Debug)]
struct Doubt {
    /// How often in a row.
    failures: u32,
    /// When it is tried again.
    again_at: Instant,
    /// A connection tries, and has until then to say how it went.
    trial_until: Option<Instant>,
}

/// What is known of the paths to all peers. A peer of which nothing is known is not doubted.
#[derive(Debug, Default)]
pub struct Paths {
    doubts: HashMap<Far, Doubt>,
}

impl Paths {
    /// What a new connection to `far` may do. After [`Way::Trial`] the caller must report the
    /// outcome: `failed`, `worked` or `unclear`.
    pub fn consult(&mut self, now: Instant, far: Far) -> Way {
        let Some(doubt) = self.doubts.get_mut(&far) else { return Way::Open };
        let tried = doubt.trial_until.is_some_and(|until| now < until);
        if tried || now < doubt.again_at {
            return Way::Closed;
        }
        doubt.trial_until = Some(now + TRIAL_MAX);
        Way::Trial
    }

    /// Whether a new connection to `far` would find its way closed now. Takes no trial.
    pub fn is_closed(&self, now: Instant, far: Far) -> bool {
        self.doubts.get(&far).is_some_and(|doubt| {
            now < doubt.again_at || doubt.trial_until.is_some_and(|until| now < until)
        })
    }

    /// RoCE did not get through. If several connections find that out at once, it counts once.
    pub fn failed(&mut self, now: Instant, far: Far) {
        self.make_room(far);
        let doubt = self.doubts.entry(far).or_insert(Doubt {
            failures: 0,
            again_at: now,
            trial_until: None,
        });
        if now < doubt.again_at {
            return;
        }
        let wait = AGAIN_FIRST * 2_u32.pow(doubt.failures.min(DOUBLINGS_MAX));
        *doubt = Doubt {
            failures: doubt.failures.saturating_add(1),
            again_at: now + wait.min(AGAIN_MAX),
            trial_until: None,
        };
    }

    /// The peer declined because RoCE did not get through to us. It decides itself when it tries
    /// again.
    pub fn doubted(&mut self, now: Instant, far: Far) {
        self.make_room(far);
        let again_at = now + AGAIN_FIRST;
        let doubt = self.doubts.entry(far);
        let doubt = doubt.or_insert(Doubt { failures: 0, again_at, trial_until: None });
        doubt.again_at = doubt.again_at.max(again_at);
        doubt.trial_until = None;
    }

    /// RoCE gets through. Returns whether it did not before.
    pub fn worked(&mut self, far: Far) -> bool {
        !self.doubts.is_empty() && self.doubts.remove(&far).is_some()
    }

    /// A trial ended for another reason, and has shown nothing.
    pub fn unclear(&mut self, now: Instant, far: Far) {
        if let Some(doubt) = self.doubts.get_mut(&far)
            && doubt.trial_until.take().is_some()
        {
            doubt.again_at = now + AGAIN_FIRST;
        }
    }

    /// Forgets the peer that was not heard of for longest, if there is no room for another.
    fn make_room(&mut self, far: Far) {
        if self.doubts.len() < DOUBTS_MAX || self.doubts.contains_key(&far) {
            return;
        }
        let oldest = self.doubts.iter().min_by_key(|(_, doubt)| doubt.again_at);
        if let Some(oldest) = oldest.map(|(far, _)| *far) {
            self.doubts.remove(&oldest);
        }
    }
}

/// When a path that failed for the first time is tried again; each time after that, the wait
/// doubles.
const AGAIN_FIRST: Duration = Duration::from_secs(1);
/// And when it has failed for long. A minute after the trouble there have been three trials.
const AGAIN_MAX: Duration = Duration::from_secs(16);
const DOUBLINGS_MAX: u32 = 4;
const _: () = assert!(AGAIN_FIRST.as_secs() << DOUBLINGS_MAX == AGAIN_MAX.as_secs());
/// A trial that has not ended by then is over; another connection may try.
const TRIAL_MAX: Duration = Duration::from_secs(10);
/// Peers that are remembered at most.
const DOUBTS_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const T0: Instant = Instant(5_000_000_000);
    const SECOND: Duration = Duration::from_secs(1);

    fn far(host: u8) -> Far {
        Far::Server(Ipv4Addr::new(10, 0, 0, host).into())
    }

    /// Users of a network without RoCE shall not notice that it is tried, and its operator who
    /// opens it shall not wait: one connection tries, seldom, and never longer than a quarter of a
    /// minute apart.
    #[test]
    fn one_connection_tries_at_growing_intervals() {
        let mut paths = Paths::default();
        assert_eq!(paths.consult(T0, far(1)), Way::Open);
        paths.failed(T0, far(1));
        let mut at = T0;
        for wait in [1, 2, 4, 8, 16, 16, 16] {
            assert_eq!(paths.consult(at + (SECOND * wait - SECOND / 100), far(1)), Way::Closed);
            at = at + SECOND * wait;
            assert_eq!(paths.consult(at, far(1)), Way::Trial);
            assert_eq!(paths.consult(at, far(1)), Way::Closed, "one at a time");
            paths.failed(at, far(1));
            paths.failed(at, far(1));
        }
        assert_eq!(paths.consult(at, far(2)), Way::Open);
        assert!(paths.worked(far(1)) && !paths.worked(far(1)));
        assert_eq!(paths.consult(at, far(1)), Way::Open);
    }

    /// A trial whose application goes away says nothing about the path. If a trial is forgotten,
    /// there must be another one.
    #[test]
    fn a_trial_without_an_outcome_is_not_the_last() {
        let mut paths = Paths::default();
        paths.failed(T0, far(1));
        let due = T0 + SECOND;
        assert_eq!(paths.consult(due, far(1)), Way::Trial);
        paths.unclear(due, far(1));
        assert_eq!(paths.consult(due, far(1)), Way::Closed);
        assert_eq!(paths.consult(due + SECOND, far(1)), Way::Trial);
        assert_eq!(paths.consult(due + SECOND + TRIAL_MAX, far(1)), Way::Trial);
        paths.unclear(due, far(2));
        assert_eq!(paths.consult(due, far(2)), Way::Open);
    }

    /// Both ends remember, and try again when both may: asking a peer that still doubts is cheap,
    /// and does not count as a failure.
    #[test]
    fn a_peer_that_doubts_is_asked_again_soon() {
        let mut paths = Paths::default();
        paths.doubted(T0, far(1));
        assert_eq!(paths.consult(T0 + SECOND / 2, far(1)), Way::Closed);
        for again in 1..9 {
            assert_eq!(paths.consult(T0 + SECOND * again, far(1)), Way::Trial);
            paths.doubted(T0 + SECOND * again, far(1));
        }
        paths.failed(T0 + SECOND * 20, far(1));
        assert_eq!(paths.consult(T0 + SECOND * 21, far(1)), Way::Trial);
    }

    /// Whoever connects from many addresses costs no more than this.
    #[test]
    fn few_peers_are_remembered() {
        let mut paths = Paths::default();
        for index in 0..DOUBTS_MAX + 10 {
            let gid = Gid::from_ipv4(u32::try_from(index).unwrap().to_be_bytes());
            let at = T0 + SECOND * u32::try_from(index).unwrap();
            paths.failed(at, Far::Client(Ipv4Addr::LOCALHOST.into(), gid));
        }
        assert_eq!(paths.doubts.len(), DOUBTS_MAX);
        let last = Gid::from_ipv4(u32::try_from(DOUBTS_MAX + 9).unwrap().to_be_bytes());
        assert_eq!(paths.consult(T0, Far::Client(Ipv4Addr::LOCALHOST.into(), last)), Way::Closed);
    }
}
