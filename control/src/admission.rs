//! Which new connections a listener lets in: so many at once and so many in a second, in all and of
//! each source.
//!
//! What exceeds a limit is refused, waits, or comes in without SMC-R, as its operator says. What
//! comes in without SMC-R takes no place of those that the limits are about.

mod rates;
mod waiting;

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use smcr_proto::Instant;

use crate::config::{Bounds, OverLimit};
use crate::sources::Sources;
use rates::{Bucket, SourceRates};
use waiting::WAITING_MAX;
pub use waiting::Waiting;

/// A connection that was accepted, and for which nothing was done yet.
#[derive(Debug)]
pub struct Caller {
    /// Its socket.
    pub accepted: OwnedFd,
    /// Who has connected.
    pub from: SocketAddr,
    /// For whom: the same, or a client of that proxy.
    pub source: SocketAddr,
    /// Where the client wanted to go, if the proxy has said so.
    pub wanted: Option<SocketAddr>,
}

/// Whether a connection takes a place of those that the limits are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It does.
    Within,
    /// It exceeded a limit, and has come in without SMC-R.
    Over,
}

/// A limit that a connection may exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// `connections_max`.
    Connections,
    /// `max_per_source`.
    Source,
    /// `rate_max`.
    Rate,
    /// `rate_per_source`.
    SourceRate,
}

impl Limit {
    /// Whether it is a limit of one source, so that it holds up nobody else.
    pub fn is_of_source(self) -> bool {
        match self {
            Self::Source | Self::SourceRate => true,
            Self::Connections | Self::Rate => false,
        }
    }

    /// What has run out, and the consequence.
    pub fn consequence(self) -> &'static str {
        match self {
            Self::Connections => "connections: new ones are refused",
            Self::Source => "connections of one source: its new ones are refused",
            Self::Rate => "new connections in a second: more are refused",
            Self::SourceRate => "new connections of one source in a second: more are refused",
        }
    }
}

/// What a listener has let in, and what it has not.
#[derive(Debug, Default)]
pub struct Admission {
    /// Connections within the limits.
    within: u32,
    /// Others.
    over: u32,
    /// Connections of proxies that have not said yet for whom they are.
    nameless: u32,
    /// Those within the limits, by who made them.
    sources: Sources,
    rate: Bucket,
    source_rates: SourceRates,
    /// Those that wait for their turn.
    pub waiting: Waiting<Caller>,
    /// What became of them.
    pub counts: Counts,
}

/// What became of connections that exceeded a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Refused, by [`Limit`].
    refused: [u64; 4],
    /// Let in after they had waited.
    pub waited: u64,
    /// Let in without SMC-R.
    pub without_smc: u64,
}

impl Counts {
    /// How many were refused because of this limit.
    pub fn refused(&self, limit: Limit) -> u64 {
        self.refused[limit as usize]
    }

    /// One was refused because of this limit.
    pub fn refuse(&mut self, limit: Limit) {
        self.refused[limit as usize] += 1;
    }
}

impl Admission {
    /// How many connections there are.
    pub fn active(&self) -> u32 {
        self.within + self.over + self.nameless
    }

    /// The limit that one more connection of `source` would exceed now.
    pub fn exceeded(&self, now: Instant, bounds: &Bounds, source: IpAddr) -> Option<Limit> {
        self.exceeded_by_any(now, bounds).or_else(|| self.exceeded_by(now, bounds, source))
    }

    /// The limit that one more connection would exceed now, whoever makes it.
    pub fn exceeded_by_any(&self, now: Instant, bounds: &Bounds) -> Option<Limit> {
        if self.within + self.nameless >= bounds.connections_max {
            return Some(Limit::Connections);
        }
        let too_fast = bounds.rate_max.is_some_and(|rate| !self.rate.has_room(now, rate));
        too_fast.then_some(Limit::Rate)
    }

    /// The limit of its own that one more connection of `source` would exceed now.
    fn exceeded_by(&self, now: Instant, bounds: &Bounds, source: IpAddr) -> Option<Limit> {
        if self.sources.of(source) >= bounds.max_per_source {
            return Some(Limit::Source);
        }
        let rate = bounds.rate_per_source;
        let too_fast = rate.is_some_and(|rate| !self.source_rates.has_room(now, source, rate));
        too_fast.then_some(Limit::SourceRate)
    }

    /// One of those that wait whose turn it is, and that exceeds no limit any more.
    pub fn next_waiting(&mut self, now: Instant, bounds: &Bounds) -> Option<Caller> {
        if self.exceeded_by_any(now, bounds).is_some() {
            self.waiting.hold_all();
            return None;
        }
        let Self { sources, source_rates, waiting, .. } = self;
        waiting.next(|source| {
            let rate = bounds.rate_per_source;
            sources.of(source) < bounds.max_per_source
                && rate.is_none_or(|rate| source_rates.has_room(now, source, rate))
        })
    }

    /// Whether one may come that says later for whom it is.
    pub fn may_come_nameless(&self, bounds: &Bounds) -> bool {
        let most = match bounds.over_limit {
            OverLimit::Refuse => bounds.connections_max,
            // It may have to wait once it has said so.
            OverLimit::Wait => bounds.connections_max.saturating_add(WAITING_MAX),
            OverLimit::Tcp => u32::MAX,
        };
        self.within + self.nameless < most
    }

    /// Counts one that says later for whom it is.
    pub fn enter_nameless(&mut self) {
        self.nameless += 1;
    }

    /// It has said so, or is over.
    pub fn leave_nameless(&mut self) {
        self.nameless -= 1;
    }

    /// A connection of `source` begins: it counts for the rates.
    pub fn spend(&mut self, now: Instant, bounds: &Bounds, source: IpAddr) {
        if let Some(rate) = bounds.rate_max {
            self.rate.take(now, rate);
        }
        if let Some(rate) = bounds.rate_per_source {
            self.source_rates.take(now, source, rate);
        }
    }

    /// Counts a connection.
    pub fn enter(&mut self, source: IpAddr, standing: Standing) {
        match standing {
            Standing::Within => {
                self.within += 1;
                self.sources.enter(source);
            }
            Standing::Over => self.over += 1,
        }
    }

    /// A connection is over.
    pub fn leave(&mut self, source: IpAddr, standing: Standing) {
        match standing {
            Standing::Within => {
                self.within -= 1;
                self.sources.leave(source);
            }
            Standing::Over => self.over -= 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn bounds(lines: &str) -> Bounds {
        let text =
            format!("[[listener]]\nname='a'\nbind='127.0.0.1:1'\nupstream='127.0.0.1:2'\n{lines}");
        Config::parse(&text, "a.toml").unwrap().listeners[0].bounds.clone()
    }

    fn source(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    #[test]
    fn each_limit_is_named_when_it_is_exceeded() {
        let bounds = bounds(
            "connections_max=4\nmax_per_source=2\nrate_max=100\nrate_burst=3\n\
             rate_per_source=1\nrate_per_source_burst=2",
        );
        let mut admission = Admission::default();
        let second = |at: u64| Instant(at * 1_000_000_000);
        let exceeded = |it: &Admission, at, last| it.exceeded(second(at), &bounds, source(last));
        let enter = |it: &mut Admission, at, last| {
            it.spend(second(at), &bounds, source(last));
            it.enter(source(last), Standing::Within);
        };
        assert_eq!(exceeded(&admission, 1, 1), None);
        enter(&mut admission, 1, 1);
        enter(&mut admission, 1, 1);
        assert_eq!(exceeded(&admission, 1, 1), Some(Limit::Source));
        admission.leave(source(1), Standing::Within);
        assert_eq!(exceeded(&admission, 1, 1), Some(Limit::SourceRate));
        assert_eq!(exceeded(&admission, 2, 1), None, "one more in the next second");
        enter(&mut admission, 1, 2);
        assert_eq!(exceeded(&admission, 1, 3), Some(Limit::Rate));
        enter(&mut admission, 2, 3);
        enter(&mut admission, 2, 4);
        assert_eq!(exceeded(&admission, 3, 5), Some(Limit::Connections));
        assert_eq!(admission.active(), 4);
    }

    /// Connections that say nothing hold a descriptor each, and there could be as many as the
    /// process may have. Where others wait, or come in without SMC-R, these may do so as well.
    #[test]
    fn who_has_no_name_yet_takes_a_place() {
        let most = |over: &str| {
            let bounds = bounds(&format!("connections_max=2\nover_limit='{over}'"));
            let mut admission = Admission::default();
            admission.enter(source(1), Standing::Within);
            let mut come = 0;
            while come < 5_000 && admission.may_come_nameless(&bounds) {
                admission.enter_nameless();
                come += 1;
            }
            assert_eq!(admission.active(), come + 1);
            assert_eq!(
                admission.exceeded(Instant(0), &bounds, source(2)),
                Some(Limit::Connections)
            );
            (0..come).for_each(|_| admission.leave_nameless());
            assert_eq!(admission.exceeded(Instant(0), &bounds, source(2)), None);
            come
        };
        assert_eq!(["refuse", "wait", "tcp"].map(most), [1, 1_025, 5_000]);
    }

    /// Connections that came in over the limit, and last for months, must not keep all later ones
    /// from SMC-R.
    #[test]
    fn what_is_over_the_limit_takes_no_place_within_it() {
        let bounds = bounds("connections_max=1\nover_limit='tcp'");
        let mut admission = Admission::default();
        admission.enter(source(1), Standing::Within);
        admission.enter(source(2), Standing::Over);
        assert_eq!((admission.active(), admission.sources.of(source(2))), (2, 0));
        admission.leave(source(1), Standing::Within);
        assert_eq!(admission.exceeded(Instant(0), &bounds, source(3)), None);
        admission.leave(source(2), Standing::Over);
        assert_eq!(admission.active(), 0);
    }
}
