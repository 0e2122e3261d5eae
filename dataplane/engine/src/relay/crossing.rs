//! The first bytes of a peer that may have declined while we did.
//!
//! If both sides decline at once, the peer's Decline comes after we have sent ours, perhaps late.
//! It is not for the application. So the first bytes of the peer are checked whenever they come,
//! and held back as long as they may be the beginning of a Decline.

use std::time::Duration;

use smcr_proto::Instant;
use smcr_proto::wire::clc::Crossing;

/// Looks at what a peer sends first after our Decline.
#[derive(Debug)]
pub(crate) struct Sieve {
    /// The bytes that have come. None of them was passed on.
    held: Vec<u8>,
    /// Until when they are held back.
    until: Option<Instant>,
}

impl Sieve {
    /// Begins with what the rendezvous has read already.
    pub(crate) fn new(held: Vec<u8>) -> Self {
        Self { held, until: None }
    }

    /// Takes in bytes of the peer. Returns the application's bytes as soon as it is clear which
    /// these are; then the sieve is needed no more.
    pub(super) fn sift(&mut self, now: Instant, bytes: &[u8]) -> Option<Vec<u8>> {
        self.held.extend_from_slice(bytes);
        match Crossing::of(&self.held) {
            Crossing::Undecided if self.held.is_empty() => None,
            Crossing::Undecided => {
                let until = *self.until.get_or_insert(now + HOLD);
                (until <= now).then(|| self.release())
            }
            Crossing::Decline(len) => Some(self.held.split_off(len)),
            Crossing::None => Some(self.release()),
        }
    }

    /// Whether bytes have been held back for long enough.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| until <= now)
    }

    /// Returns the bytes that are held back: they are the application's.
    pub(super) fn release(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.held)
    }
}

/// How long bytes are held back that may become a Decline. A message of 28 bytes comes in two
/// pieces only if the network loses one of them, and TCP sends that again much sooner.
const HOLD: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use smcr_proto::PeerId;
    use smcr_proto::wire::clc::{Decline, Diagnosis, EYECATCHER, Frame};

    use super::*;

    const T0: Instant = Instant(1_000);

    fn decline() -> Vec<u8> {
        let peer_id = PeerId([3; 8]);
        let decline = Decline { out_of_sync: false, peer_id, diagnosis: Diagnosis::TIMED_OUT };
        Frame::Decline(decline).encode().as_bytes().to_vec()
    }

    /// One wrong byte at the beginning of a stream, and no program would trust the gateway again:
    /// wherever the network cuts, the application gets its own bytes, all of them.
    #[test]
    fn a_decline_is_taken_out_wherever_it_is_cut() {
        let banner = b"220 mail.example\r\n";
        let stream = [&decline()[..], banner].concat();
        for first in 0..stream.len() {
            for second in first..stream.len() {
                let mut sieve = Some(Sieve::new(stream[..first].to_vec()));
                let mut heard = Vec::new();
                for piece in [&[][..], &stream[first..second], &stream[second..]] {
                    match &mut sieve {
                        None => heard.extend_from_slice(piece),
                        Some(one) => {
                            if let Some(found) = one.sift(T0, piece) {
                                heard.extend(found);
                                sieve = None;
                            }
                        }
                    }
                }
                assert_eq!(heard, banner, "{first} {second}");
            }
        }
    }

    /// An application may begin as a Decline does and then wait for an answer: it gets one.
    #[test]
    fn what_may_be_a_decline_is_not_held_back_for_ever() {
        for len in [1, 3, 4, 7, 12] {
            let mut bytes = decline();
            bytes.truncate(len);
            let mut sieve = Sieve::new(Vec::new());
            assert_eq!(sieve.sift(T0 + HOLD * 9, &[]), None, "nothing has come");
            let came = T0 + HOLD * 10;
            assert_eq!(sieve.sift(came, &bytes), None);
            assert!(!sieve.is_due(came + HOLD / 2) && sieve.is_due(came + HOLD));
            assert_eq!(sieve.sift(came + HOLD / 2, &[]), None);
            assert_eq!(sieve.sift(came + HOLD, &[]), Some(bytes));
        }
        let mut sieve = Sieve::new(EYECATCHER[..2].to_vec());
        assert_eq!(sieve.sift(T0, b"?"), Some([&EYECATCHER[..2], b"?"].concat()));
    }
}
