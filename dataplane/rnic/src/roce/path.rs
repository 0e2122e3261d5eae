//! How large the packets of a queue pair may be: what its path carries, found out by asking.
//!
//! Routers and tunnels between two hosts may take less than their devices do, and a path may shrink
//! under a stream. What routers say of it (ICMP) is dropped by many networks and can be forged by
//! anybody, so here only what arrives counts, as RFC 4821 and RFC 8899 have it.
//!
//! # Questions
//!
//! A question is a WRITE ONLY packet of some size with the number of the last packet that was
//! acknowledged. Every responder takes it for a repetition: it carries nothing out, and answers
//! with that number (IBTA 9.7.5.1.1). So a question costs nothing when it is lost and cannot do
//! harm when it arrives; even if somebody did carry it out, its key opens nothing. An answer does
//! not tell which question it is for. Therefore one is asked at a time, and only while no answer to
//! anything else can be on its way.
//!
//! # Growing
//!
//! A queue pair begins with packets that every path carries ([`PAYLOAD_FIRST`]). As soon as its
//! peer has acknowledged anything it asks for the size that was agreed on, and if that does not
//! pass, for smaller ones. New requests wait meanwhile, for two round trips. Later it asks again
//! now and then, while there is something to send.
//!
//! # Shrinking
//!
//! A packet that was sent several times and is still not acknowledged makes us doubt the path. In
//! doubt nothing is sent but questions. Does a packet of that size pass? Then it was only unlucky.
//! Does nothing pass? Then the size is not to blame. Else the largest size that passes is looked
//! for, and what is not acknowledged is cut anew, for it, under the same packet numbers.
//!
//! # Why no byte can be wrong
//!
//! Packets of the old and the new cut have the same numbers and other contents. If the responder
//! took one of the old cut for one of the new, bytes would be missing or a message be carried out
//! twice. So the new cut must begin exactly at the packet that the responder expects, and none of
//! the old one may arrive after it began.
//!
//! - **Position.** The last questions are asked when all of the old cut are gone, and answered with
//!   the number before the oldest packet: the responder expects that one. Had it carried out
//!   more, the answer would name a later number. That is progress, which ends the doubt, with the
//!   old cut intact.
//! - **Gone from the network.** Nothing of the old cut is sent for [`PACKET_LIFE`] before the last
//!   questions. That is the timeout that Linux SMC gives its NICs, and by definition twice the life
//!   of a packet. Every reliable connection counts on old packets to die before numbers return.
//! - **Gone from the peer.** A peer that is not scheduled may keep packets much longer, but in the
//!   order in which they came: when it answers a question, what came before is taken in. The doubt
//!   ends with a new cut only after four answers, to one question each: that anything arrives, what
//!   size arrives, and the last ones. A peer that does not run gives none of them.

use std::time::Duration;

use smcr_proto::Instant;

use super::congestion::TIMEOUT_MAX;

/// What a queue pair knows of its path.
#[derive(Debug)]
pub(super) struct Path {
    /// The largest payload that both ends have agreed on.
    ceiling: u32,
    /// The payload of full packets now.
    payload: u32,
    state: State,
    question: Option<Question>,
    /// What is waited for: an answer, or the end of the old packets.
    wait: Option<Wait>,
    /// How long it is this time until a larger size is tried.
    raise_after: Duration,
    /// When the size last fell.
    fell: Option<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing is asked; larger sizes are tried then, if there are any.
    Settled {
        raise_at: Option<Instant>,
    },
    /// Larger sizes are tried. Those from `refused` on do not pass, or are more than was agreed on.
    Climbing {
        refused: u32,
        /// The size that is asked for now has been answered once.
        again: bool,
    },
    Doubting(Doubt),
}

/// A packet with `lost` bytes of payload does not come across.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Doubt {
    lost: u32,
    /// When all packets that were sent are gone from the network.
    gone_at: Instant,
    step: Step,
}

/// What is being found out, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Whether others of that size pass.
    Size,
    /// Whether anything passes.
    Life,
    /// Which size passes.
    Smaller,
    /// Nothing; this one passes, but old packets may still be on their way.
    Draining(u32),
    /// Where the responder is; asked so many times more.
    Position { found: u32, rounds: u32 },
}

/// A packet that asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Question {
    payload: u32,
    /// It is on its way; else it waits to be sent.
    left: bool,
    /// How many more times it may be asked.
    tries: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wait {
    since: Instant,
    until: Instant,
}

/// What follows for the queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Nothing, or another question.
    Nothing,
    /// Packets may have this payload from now on.
    Grown(u32),
    /// The size is not to blame: go on with the packets as they are.
    GoOn,
    /// What is not acknowledged must be cut anew for this payload.
    Cut(u32),
}

impl Path {
    /// Nothing is known but that both ends have agreed on `ceiling`, and that the host takes
    /// packets with `known` bytes of payload to the peer.
    pub(super) fn new(ceiling: u32, known: u32) -> Self {
        let payload = ceiling.min(known).min(PAYLOAD_FIRST);
        let mut path = Self {
            ceiling,
            payload,
            state: State::Settled { raise_at: None },
            question: None,
            wait: None,
            raise_after: RAISE_AFTER_MIN,
            fell: None,
        };
        if payload < ceiling {
            path.state = State::Climbing { refused: ceiling + 1, again: false };
            path.ask(ceiling);
        }
        path
    }

    /// The payload of full packets now.
    pub(super) fn payload(&self) -> u32 {
        self.payload
    }

    /// Nothing is sent but questions.
    pub(super) fn is_doubted(&self) -> bool {
        matches!(self.state, State::Doubting(_))
    }

    /// Something is asked, or about to be: what is new must wait.
    pub(super) fn is_asking(&self) -> bool {
        self.question.is_some()
    }

    /// The payload of the question that is to be sent, if one is.
    pub(super) fn question(&self) -> Option<u32> {
        self.question.filter(|question| !question.left).map(|question| question.payload)
    }

    /// The question was sent. An answer should be there within `patience`.
    pub(super) fn asked(&mut self, now: Instant, patience: Duration) {
        let question = self.question.as_mut().expect("the caller has looked at it");
        question.left = true;
        question.tries -= 1;
        self.wait = Some(Wait { since: now, until: now + patience });
    }

    /// When [`expire`](Self::expire) has something to do even if nothing is to be sent.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        self.wait.map(|wait| wait.until)
    }

    /// How long was waited in vain, if a wait has ended.
    pub(super) fn waited(&self, now: Instant) -> Option<Duration> {
        // What exceeds it is time in which we did not run.
        let ended = self.wait.filter(|wait| wait.until <= now);
        ended.map(|wait| wait.until.since(wait.since))
    }

    /// Looks at the clock. `has_work` says that something is to be sent.
    pub(super) fn expire(&mut self, now: Instant, has_work: bool) -> Outcome {
        if let State::Settled { raise_at } = self.state {
            if has_work
                && raise_at.is_some_and(|at| at <= now)
                && let Some(next) = self.next_above()
            {
                // One step first, which is likely to be lost; then all the rest.
                self.state = State::Climbing { refused: self.ceiling + 1, again: false };
                self.ask(next);
            }
            return Outcome::Nothing;
        }
        if self.wait.is_none_or(|wait| now < wait.until) {
            return Outcome::Nothing;
        }
        self.wait = None;
        match (&mut self.question, self.state) {
            (Some(question), _) if question.tries > 0 => {
                question.left = false;
                Outcome::Nothing
            }
            (Some(Question { payload, .. }), _) => {
                let payload = *payload;
                self.question = None;
                self.unanswered(now, payload)
            }
            (None, State::Doubting(doubt @ Doubt { step: Step::Draining(found), .. })) => {
                let step = Step::Position { found, rounds: ROUNDS };
                self.inquire(Doubt { step, ..doubt }, found);
                Outcome::Nothing
            }
            (None, state) => unreachable!("nothing is waited for in {state:?}"),
        }
    }

    /// The peer has answered with the number before the oldest packet.
    pub(super) fn answered(&mut self, now: Instant) -> Outcome {
        let Some(Question { payload, .. }) = self.question.filter(|question| question.left) else {
            return Outcome::Nothing;
        };
        self.question = None;
        self.wait = None;
        match self.state {
            State::Settled { .. } => unreachable!("nothing is asked"),
            // Late answers to what was repeated look like answers to questions.
            State::Climbing { refused, again: false } => {
                self.state = State::Climbing { refused, again: true };
                self.ask(payload);
                Outcome::Nothing
            }
            State::Climbing { refused, again: true } => {
                self.payload = payload;
                self.climb(now, refused);
                Outcome::Grown(payload)
            }
            State::Doubting(doubt) => self.heard(now, doubt, payload),
        }
    }

    /// A packet with `lost` bytes of payload was sent several times in vain. All that were sent
    /// are gone from the network at `gone_at`.
    pub(super) fn doubt(&mut self, lost: u32, gone_at: Instant) {
        assert!(lost > PAYLOAD_MIN, "nothing smaller could be tried");
        self.wait = None;
        self.inquire(Doubt { lost, gone_at, step: Step::Size }, lost);
    }

    /// The peer has acknowledged something new: whatever was doubted, the packets as they are come
    /// across, or will be doubted again.
    pub(super) fn progress(&mut self, now: Instant) {
        if self.is_doubted() {
            self.settle(now);
        }
    }

    /// What was asked in doubt was answered.
    fn heard(&mut self, now: Instant, doubt: Doubt, payload: u32) -> Outcome {
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
            Step::Draining(_) => unreachable!("nothing is asked"),
            Step::Position { found, rounds: 0 } => {
                self.shrink(now, found);
                Outcome::Cut(found)
            }
            Step::Position { found, rounds } => {
                let step = Step::Position { found, rounds: rounds - 1 };
                self.inquire(Doubt { step, ..doubt }, found);
                Outcome::Nothing
            }
        }
    }

    /// A question about `payload` bytes was not answered, however often it was asked.
    fn unanswered(&mut self, now: Instant, payload: u32) -> Outcome {
        match self.state {
            State::Settled { .. } => unreachable!("nothing is asked"),
            State::Climbing { .. } => {
                self.climb(now, payload);
                Outcome::Nothing
            }
            State::Doubting(doubt) => match doubt.step {
                Step::Size => {
                    self.inquire(Doubt { step: Step::Life, ..doubt }, 0);
                    Outcome::Nothing
                }
                Step::Smaller => self.try_smaller(now, doubt, payload),
                Step::Life | Step::Position { .. } => {
                    self.settle(now);
                    Outcome::GoOn
                }
                Step::Draining(_) => unreachable!("nothing is asked"),
            },
        }
    }

    /// Asks for the next size below `payload`, if there is one.
    fn try_smaller(&mut self, now: Instant, doubt: Doubt, payload: u32) -> Outcome {
        match PAYLOADS.into_iter().rev().find(|smaller| *smaller < payload) {
            Some(smaller) => {
                self.inquire(Doubt { step: Step::Smaller, ..doubt }, smaller);
                Outcome::Nothing
            }
            None => {
                self.settle(now);
                Outcome::GoOn
            }
        }
    }

    /// Takes a step in doubt: asks for `payload`.
    fn inquire(&mut self, doubt: Doubt, payload: u32) {
        self.state = State::Doubting(doubt);
        self.ask(payload);
    }

    /// Asks for the next size that is worth it, knowing that `refused` does not pass.
    fn climb(&mut self, now: Instant, refused: u32) {
        let next = match refused > self.ceiling {
            true => Some(self.ceiling).filter(|ceiling| *ceiling > self.payload),
            false => self.next_above().filter(|next| *next < refused),
        };
        match next {
            Some(next) => {
                self.state = State::Climbing { refused, again: false };
                self.ask(next);
            }
            None => {
                self.settle(now);
                self.wait_longer();
            }
        }
    }

    /// The size after the one that is in use.
    fn next_above(&self) -> Option<u32> {
        PAYLOADS.into_iter().find(|next| self.payload < *next && *next <= self.ceiling)
    }

    fn ask(&mut self, payload: u32) {
        assert!(self.wait.is_none());
        self.question = Some(Question { payload, left: false, tries: TRIES });
    }

    /// From now on packets have that payload at most. A path that shrinks again and again is left
    /// alone for longer and longer.
    fn shrink(&mut self, now: Instant, payload: u32) {
        self.payload = payload;
        match self.fell {
            Some(before) if now.since(before) < 2 * RAISE_AFTER_MAX => self.wait_longer(),
            Some(_) | None => self.raise_after = RAISE_AFTER_MIN,
        }
        self.fell = Some(now);
        self.settle(now);
    }

    /// Nothing is asked until a larger size may be worth a try.
    fn settle(&mut self, now: Instant) {
        self.question = None;
        self.wait = None;
        let raise_at = (self.payload < self.ceiling).then(|| now + self.raise_after);
        self.state = State::Settled { raise_at };
    }

    /// The next time it takes longer until a larger size is tried.
    fn wait_longer(&mut self) {
        self.raise_after = (2 * self.raise_after).min(RAISE_AFTER_MAX);
    }
}

/// Payloads that are tried: those that end points agree on, and between them what fits usual paths
/// with 80 bytes of headers, as over IPv6: 1500 bytes, those of tunnels on them (1420), and 1280.
const PAYLOADS: [u32; 8] = [PAYLOAD_MIN, 512, PAYLOAD_FIRST, 1200, 1340, 1420, 2048, 4096];
/// The smallest that both ends can have agreed on.
pub(super) const PAYLOAD_MIN: u32 = 256;
/// What Linux uses where devices take 1500 bytes. It leaves room for tunnels on the way.
const PAYLOAD_FIRST: u32 = 1024;
/// How often a question is asked.
const TRIES: u32 = 3;
/// Questions about the position of the responder, beyond the first.
const ROUNDS: u32 = 1;
/// How long after a size was found a larger one is tried: at first, and at most.
const RAISE_AFTER_MIN: Duration = Duration::from_secs(2);
const RAISE_AFTER_MAX: Duration = Duration::from_secs(64);
/// How long a packet, and the answer to it, may be on their way.
pub(super) const PACKET_LIFE: Duration = TIMEOUT_MAX;

#[cfg(test)]
mod tests;
