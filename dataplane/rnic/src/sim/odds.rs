//! How slow and how faulty a simulated network is.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::dice::Chance;

/// How slow and how faulty a network is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Odds {
    /// How long a request, or the acknowledgement of one, is in flight.
    pub latency: RangeInclusive<Duration>,
    /// How likely a poll stops before each further completion, although there are more.
    pub hold_back: Chance,
    /// How likely a piece of a write becomes visible before it must, each time it may.
    pub early: Chance,
    /// How likely a `transmit` with something to send breaks the queue pair instead.
    pub break_on_transmit: Chance,
    /// How likely an end that breaks loses messages and bytes that it had acknowledged, but not
    /// shown to its host (RFC 7609, 4.6.1).
    pub lose_on_break: Chance,
    /// How likely a request or an acknowledgement takes `straggling` instead of `latency`.
    pub straggle: Chance,
    /// The latency of such stragglers.
    pub straggling: RangeInclusive<Duration>,
    /// How likely opening or registering something fails with [`Exhausted`](crate::Exhausted).
    pub exhausted: Chance,
    /// How likely a NIC that is added pins what it registers, as hardware does.
    pub pins: Chance,
    /// How likely a NIC says that its port went down. Then it also says that the port is back.
    pub port_events: Chance,
    /// How long a sender waits before it retries a peer that is not ready.
    pub retransmit: Duration,
    /// How long a peer may stay silent before the queue pair breaks.
    pub retry_timeout: Duration,
}

impl Odds {
    /// Nothing breaks, and written bytes become visible exactly when they must.
    pub const CALM: Self = Self {
        latency: Duration::from_micros(5)..=Duration::from_micros(5),
        hold_back: Chance::NEVER,
        early: Chance::NEVER,
        break_on_transmit: Chance::NEVER,
        lose_on_break: Chance::NEVER,
        straggle: Chance::NEVER,
        straggling: Duration::from_millis(1)..=Duration::from_millis(100),
        exhausted: Chance::NEVER,
        port_events: Chance::NEVER,
        pins: Chance::percent(50),
        retransmit: Duration::from_millis(1),
        retry_timeout: Duration::from_millis(500),
    };

    /// Nothing breaks by itself, but everything comes as late and as reordered as the contract
    /// allows, and a queue pair that a test breaks may lose as much as it may.
    pub const MALICIOUS: Self = Self {
        latency: Duration::from_micros(1)..=Duration::from_micros(300),
        hold_back: Chance::percent(20),
        early: Chance::percent(15),
        lose_on_break: Chance::percent(50),
        straggle: Chance(500),
        port_events: Chance::percent(50),
        ..Self::CALM
    };
}
