//! Path MTU discovery: how large the packets of a queue pair may be.
//!
//! Routers and tunnels between two hosts may carry less than the hosts' devices do, and a path may
//! shrink under a stream. Many networks drop the ICMP messages that report this, and anybody can
//! forge them. So we rely on probes only, as RFC 4821 and RFC 8899 recommend.
//!
//! # Probes
//!
//! A probe is a WRITE ONLY packet of some size with the PSN of the last acknowledged packet. Every
//! responder takes it for a duplicate: it executes nothing and acknowledges that PSN again (IBTA
//! 9.7.5.1.1). So a lost probe costs nothing and a delivered one does no harm; even if a responder
//! executed it, its rkey gives access to nothing. The acknowledgement does not tell which probe it
//! is for. Therefore only one probe is outstanding at a time, and only while no acknowledgement of
//! another packet can be in flight.
//!
//! # Growing
//!
//! A queue pair begins with packets that every path carries ([`PAYLOAD_FIRST`]). As soon as its
//! peer has acknowledged anything, it probes the size that both ends agreed on, and if that is
//! lost, smaller ones. New requests wait meanwhile, for two round trips. Later it probes again from
//! time to time, while there is something to send.
//!
//! # Shrinking
//!
//! If a packet was retransmitted several times and is still not acknowledged, we suspect that the
//! path drops packets of its size (a black hole, in the words of RFC 4821). While in doubt, the
//! queue pair sends nothing but probes. If a probe of the same size passes, the packet was only
//! unlucky. If no probe passes, the size is not the cause. Otherwise we search for the largest size
//! that passes, and split all unacknowledged requests again into packets of that size, which reuse
//! the same PSNs.
//!
//! # Why no byte can be wrong
//!
//! The old and the new packets have the same PSNs but different contents. If the responder took an
//! old packet for a new one, bytes would be missing or a message would be executed twice. So the
//! new packets must begin exactly at the PSN that the responder expects, and no old packet may
//! arrive after them.
//!
//! - **Position.** The last probes are sent when all old packets are gone. The responder answers
//!   with the PSN before the oldest packet, so it expects that packet. If it had executed more, it
//!   would answer with a later PSN. That is progress, which ends the doubt, and the old packets
//!   stay as they are.
//! - **Gone from the network.** No old packet is sent for [`PACKET_LIFE`] before the last probes.
//!   This is the timeout that Linux SMC gives its NICs, and by definition twice the lifetime of a
//!   packet. Every reliable connection relies on old packets being gone before their numbers are
//!   reused.
//! - **Gone from the peer.** A peer that is not scheduled may hold packets much longer, but in the
//!   order of their arrival: when it answers a probe, it has processed all earlier packets. The
//!   requests are only split again after four answers, each to another probe: that any packet
//!   passes, which size passes, and two about the position. A peer that does not run gives none.

use std::time::Duration;

use smcr_proto::Instant;

use super::congestion::TIMEOUT_MAX;

/// The path MTU discovery of one queue pair.
#[derive(Debug)]
pub(super) struct Path {
    /// The largest payload to try: what both ends have agreed on, or with dense packets what this
    /// host's device and route carry.
    ceiling: u32,
    /// The payload of full packets now.
    payload: u32,
    state: State,
    probe: Option<Probe>,
    /// The running timer: for an answer to the probe, or for old packets to be gone.
    wait: Option<Wait>,
    /// How long to wait until larger sizes are probed again.
    raise_after: Duration,
    /// When the size was last lowered.
    lowered_at: Option<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// No probe is sent. Larger sizes are probed at `raise_at`, if there are any.
    Settled {
        raise_at: Option<Instant>,
    },
    /// Larger sizes are probed. Sizes from `refused` on do not pass, or exceed the agreed size.
    Searching {
        refused: u32,
        /// The present size has been confirmed once, and is probed a second time.
        again: bool,
    },
    Doubting(Doubt),
}

/// The suspicion that the path drops packets with `lost` bytes of payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Doubt {
    lost: u32,
    /// When all packets sent before are gone from the network.
    gone_at: Instant,
    step: Step,
}

/// The steps of black hole detection, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Probe whether other packets of the lost size pass.
    Size,
    /// Probe whether an empty packet passes.
    Life,
    /// Probe which smaller size passes.
    Smaller,
    /// This size passes. Wait until old packets are gone, without probes.
    Draining(u32),
    /// Probe which PSN the responder expects, and `rounds` times more.
    Position { found: u32, rounds: u32 },
}

/// The outstanding probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Probe {
    payload: u32,
    /// It is in flight; otherwise it waits to be sent.
    in_flight: bool,
    /// How many more times it may be sent.
    tries: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wait {
    since: Instant,
    until: Instant,
}

/// What the requester must do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Nothing; another probe may follow.
    Nothing,
    /// Use this payload for new requests.
    Grown(u32),
    /// Continue with the packets as they are: their size was not the cause.
    GoOn,
    /// Split all unacknowledged requests again into packets with this payload.
    Resegment(u32),
}

impl Path {
    /// Creates the state of a new queue pair that tries up to `ceiling` bytes of payload; the host
    /// knows that `known` bytes pass.
    pub(super) fn new(ceiling: u32, known: u32) -> Self {
        let payload = ceiling.min(known).min(PAYLOAD_FIRST);
        let mut path = Self {
            ceiling,
            payload,
            state: State::Settled { raise_at: None },
            probe: None,
            wait: None,
            raise_after: RAISE_AFTER_MIN,
            lowered_at: None,
        };
        if payload < ceiling {
            path.state = State::Searching { refused: ceiling + 1, again: false };
            path.start_probe(ceiling);
        }
        path
    }

    /// The payload of full packets now.
    pub(super) fn payload(&self) -> u32 {
        self.payload
    }

    /// Whether the size is in doubt, so that only probes may be sent.
    pub(super) fn is_doubted(&self) -> bool {
        matches!(self.state, State::Doubting(_))
    }

    /// Whether a probe is outstanding or about to be sent, so that new requests must wait.
    pub(super) fn is_probing(&self) -> bool {
        self.probe.is_some()
    }

    /// The payload of the probe that must be sent, if any.
    pub(super) fn probe(&self) -> Option<u32> {
        self.probe.filter(|probe| !probe.in_flight).map(|probe| probe.payload)
    }

    /// Records that the probe was sent. Its answer should arrive within `timeout`.
    pub(super) fn probe_sent(&mut self, now: Instant, timeout: Duration) {
        let probe = self.probe.as_mut().expect("the caller built this probe");
        probe.in_flight = true;
        probe.tries -= 1;
        self.wait = Some(Wait { since: now, until: now + timeout });
    }

    /// When [`expire`](Self::expire) has something to do even if nothing is to be sent.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        self.wait.map(|wait| wait.until)
    }

    /// How long the timer ran, if it has expired.
    pub(super) fn waited(&self, now: Instant) -> Option<Duration> {
        // Time after its end does not count, because we did not run then.
        let ended = self.wait.filter(|wait| wait.until <= now);
        ended.map(|wait| wait.until.since(wait.since))
    }

    /// Handles timers. `has_work` says that the requester has packets to send.
    pub(super) fn expire(&mut self, now: Instant, has_work: bool) -> Outcome {
        if let State::Settled { raise_at } = self.state {
            if has_work
                && raise_at.is_some_and(|at| at <= now)
                && let Some(next) = self.next_above()
            {
                // The next size is probed first: it is likely to be lost too. If it passes, the
                // agreed size follows.
                self.state = State::Searching { refused: self.ceiling + 1, again: false };
                self.start_probe(next);
            }
            return Outcome::Nothing;
        }
        if self.wait.is_none_or(|wait| now < wait.until) {
            return Outcome::Nothing;
        }
        self.wait = None;
        match (&mut self.probe, self.state) {
            (Some(probe), _) if probe.tries > 0 => {
                probe.in_flight = false;
                Outcome::Nothing
            }
            (Some(Probe { payload, .. }), _) => {
                let payload = *payload;
                self.probe = None;
                self.unanswered(now, payload)
            }
            (None, State::Doubting(doubt @ Doubt { step: Step::Draining(found), .. })) => {
                let step = Step::Position { found, rounds: ROUNDS };
                self.probe_in_doubt(Doubt { step, ..doubt }, found);
                Outcome::Nothing
            }
            (None, state) => unreachable!("no timer runs in {state:?}"),
        }
    }

    /// Processes an acknowledgement of the PSN before the oldest packet, which answers a probe.
    pub(super) fn answered(&mut self, now: Instant) -> Outcome {
        let Some(Probe { payload, .. }) = self.probe.filter(|probe| probe.in_flight) else {
            return Outcome::Nothing;
        };
        self.probe = None;
        self.wait = None;
        match self.state {
            State::Settled { .. } => unreachable!("no probe is outstanding"),
            // A late acknowledgement of a retransmitted packet looks like an answer to a probe, so
            // each size is confirmed twice.
            State::Searching { refused, again: false } => {
                self.state = State::Searching { refused, again: true };
                self.start_probe(payload);
                Outcome::Nothing
            }
            State::Searching { refused, again: true } => {
                self.payload = payload;
                self.search(now, refused);
                Outcome::Grown(payload)
            }
            State::Doubting(doubt) => self.answered_in_doubt(now, doubt, payload),
        }
    }

    /// Starts black hole detection: a packet with `lost` bytes of payload was sent several times
    /// and not acknowledged. All packets sent so far are gone from the network at `gone_at`.
    pub(super) fn doubt(&mut self, lost: u32, gone_at: Instant) {
        assert!(lost > PAYLOAD_MIN, "there is no smaller size to try");
        self.wait = None;
        self.probe_in_doubt(Doubt { lost, gone_at, step: Step::Size }, lost);
    }

    /// The peer has acknowledged new packets, which ends black hole detection: either packets of
    /// this size pass, or they will be suspected again.
    pub(super) fn progress(&mut self, now: Instant) {
        if self.is_doubted() {
            self.settle(now);
        }
    }

    /// Processes the answer to a probe of black hole detection.
    fn answered_in_doubt(&mut self, now: Instant, doubt: Doubt, payload: u32) -> Outcome {
        match doubt.step {
            Step::Size => {
                self.settle(now);
                Outcome::GoOn
            }
            Step::Life => self.try_smaller(now, doubt, doubt.lost),
            Step::Smaller => {
                self.state = State::Doubting(Doubt { step: Step::Draining(payload), ..doubt });
                self.wait = Some(Wait { since: now, until: now.max(doubt.gone_at) });
                Outcome::Nothing
            }
            Step::Draining(_) => unreachable!("no probe is outstanding"),
            Step::Position { found, rounds: 0 } => {
                self.shrink(now, found);
                Outcome::Resegment(found)
            }
            Step::Position { found, rounds } => {
                let step = Step::Position { found, rounds: rounds - 1 };
                self.probe_in_doubt(Doubt { step, ..doubt }, found);
                Outcome::Nothing
            }
        }
    }

    /// A probe of `payload` bytes was not answered in all its tries.
    fn unanswered(&mut self, now: Instant, payload: u32) -> Outcome {
        match self.state {
            State::Settled { .. } => unreachable!("no probe is outstanding"),
            State::Searching { .. } => {
                self.search(now, payload);
                Outcome::Nothing
            }
            State::Doubting(doubt) => match doubt.step {
                Step::Size => {
                    self.probe_in_doubt(Doubt { step: Step::Life, ..doubt }, 0);
                    Outcome::Nothing
                }
                Step::Smaller => self.try_smaller(now, doubt, payload),
                Step::Life | Step::Position { .. } => {
                    self.settle(now);
                    Outcome::GoOn
                }
                Step::Draining(_) => unreachable!("no probe is outstanding"),
            },
        }
    }

    /// Probes the next size below `payload`, if there is one.
    fn try_smaller(&mut self, now: Instant, doubt: Doubt, payload: u32) -> Outcome {
        match PAYLOADS.into_iter().rev().find(|smaller| *smaller < payload) {
            Some(smaller) => {
                self.probe_in_doubt(Doubt { step: Step::Smaller, ..doubt }, smaller);
                Outcome::Nothing
            }
            None => {
                self.settle(now);
                Outcome::GoOn
            }
        }
    }

    /// Enters a step of black hole detection and probes `payload`.
    fn probe_in_doubt(&mut self, doubt: Doubt, payload: u32) {
        self.state = State::Doubting(doubt);
        self.start_probe(payload);
    }

    /// Probes the next larger size that may pass, given that `refused` does not.
    fn search(&mut self, now: Instant, refused: u32) {
        let next = match refused > self.ceiling {
            true => Some(self.ceiling).filter(|ceiling| *ceiling > self.payload),
            false => self.next_above().filter(|next| *next < refused),
        };
        match next {
            Some(next) => {
                self.state = State::Searching { refused, again: false };
                self.start_probe(next);
            }
            None => {
                self.settle(now);
                self.wait_longer();
            }
        }
    }

    /// The next size above the present one.
    fn next_above(&self) -> Option<u32> {
        let below = PAYLOADS.into_iter().filter(|next| *next < self.ceiling);
        below.chain([self.ceiling]).find(|next| self.payload < *next)
    }

    fn start_probe(&mut self, payload: u32) {
        assert!(self.wait.is_none());
        self.probe = Some(Probe { payload, in_flight: false, tries: TRIES });
    }

    /// Lowers the payload. If the path shrinks again and again, larger sizes are probed ever less
    /// often.
    fn shrink(&mut self, now: Instant, payload: u32) {
        self.payload = payload;
        match self.lowered_at {
            Some(before) if now.since(before) < 2 * RAISE_AFTER_MAX => self.wait_longer(),
            Some(_) | None => self.raise_after = RAISE_AFTER_MIN,
        }
        self.lowered_at = Some(now);
        self.settle(now);
    }

    /// Stops probing until larger sizes are tried again.
    fn settle(&mut self, now: Instant) {
        self.probe = None;
        self.wait = None;
        let raise_at = (self.payload < self.ceiling).then(|| now + self.raise_after);
        self.state = State::Settled { raise_at };
    }

    /// Doubles the time until larger sizes are tried again.
    fn wait_longer(&mut self) {
        self.raise_after = (2 * self.raise_after).min(RAISE_AFTER_MAX);
    }
}

/// The payloads that are probed: the path MTUs that end points can agree on, and between them the
/// sizes that fit usual paths with 80 bytes of headers, as over IPv6: 1500 bytes, tunnels on such
/// paths (1420), and 1280.
const PAYLOADS: [u32; 8] = [PAYLOAD_MIN, 512, PAYLOAD_FIRST, 1200, 1340, 1420, 2048, 4096];
/// The smallest path MTU that both ends can agree on.
pub(super) const PAYLOAD_MIN: u32 = 256;
/// The path MTU that Linux uses on devices with 1500 bytes. It leaves room for tunnels on the way.
const PAYLOAD_FIRST: u32 = 1024;
/// How often a probe is sent before its size counts as lost.
const TRIES: u32 = 3;
/// How many probes of the responder's position follow the first.
const ROUNDS: u32 = 1;
/// How long to wait until larger sizes are tried again: at first, and at most.
const RAISE_AFTER_MIN: Duration = Duration::from_secs(2);
const RAISE_AFTER_MAX: Duration = Duration::from_secs(64);
/// How long a packet and its acknowledgement may be in flight.
pub(super) const PACKET_LIFE: Duration = TIMEOUT_MAX;

#[cfg(test)]
mod tests;
