//! A Decline that crosses ours.
//!
//! Both sides may decline in the same moment. The bytes that follow our Decline on the TCP
//! connection belong to the application, with one exception: the peer's own Decline, if it was sent
//! before ours arrived.

use super::{EYECATCHER, Frame, HEADER_LEN, Header, Kind};

/// What follows our Decline on the TCP connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crossing {
    /// Too few bytes to tell.
    Undecided,
    /// A Decline of so many bytes. What follows it is the application's.
    Decline(usize),
    /// Bytes of the application.
    None,
}

impl Crossing {
    /// Looks at the first bytes that came after our Decline.
    ///
    /// No other message can cross. We decline in place of a message that the peer waits for, so the
    /// peer has no message to send but a Decline, and sends it once.
    // RFC 7609 C.1 #3: never answer a Decline
    // RFC 7609 C.6 #2: never parse application data as CLC
    pub fn of(bytes: &[u8]) -> Self {
        let seen = bytes.len().min(EYECATCHER.len());
        if bytes[..seen] != EYECATCHER[..seen] {
            return Self::None;
        }
        if bytes.len() < HEADER_LEN {
            return Self::Undecided;
        }
        let Ok(Header { kind: Kind::Decline, length }) = Header::decode(bytes) else {
            return Self::None;
        };
        if bytes.len() < length {
            return Self::Undecided;
        }
        match Frame::decode(&bytes[..length]) {
            Ok(_) => Self::Decline(length),
            Err(_) => Self::None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::super::{Decline, DeclineV2, Diagnosis, v2::OsType};
    use super::*;
    use crate::vocabulary::PeerId;

    fn declines() -> [Vec<u8>; 2] {
        let peer_id = PeerId([7; 8]);
        let decline = Decline { out_of_sync: false, peer_id, diagnosis: Diagnosis::TIMED_OUT };
        let second = DeclineV2 { decline, os: OsType::LINUX, information: [0; 4] };
        [Frame::Decline(decline), Frame::DeclineV2(second)]
            .map(|frame| frame.encode().as_bytes().to_vec())
    }

    /// Wherever TCP cuts it, a Decline is taken out whole, and not one byte behind it.
    #[test]
    fn a_decline_is_found_however_it_is_cut() {
        for decline in declines() {
            for len in 0..decline.len() {
                assert_eq!(Crossing::of(&decline[..len]), Crossing::Undecided, "{len}");
            }
            assert_eq!(Crossing::of(&decline), Crossing::Decline(decline.len()));
            let behind = [&decline[..], b"SSH-2.0"].concat();
            assert_eq!(Crossing::of(&behind), Crossing::Decline(decline.len()));
        }
    }

    /// An application's bytes are its own from the first that cannot be of a Decline, and other
    /// messages of CLC, which nobody can have sent now, are an application's that records such.
    #[test]
    fn all_else_is_the_applications() {
        assert_eq!(Crossing::of(b"S"), Crossing::None);
        for decline in declines() {
            let len = decline.len();
            // The eye catcher, the type, the length, the version, and the other eye catcher.
            for (at, seen) in
                [(0, 1), (1, 2), (2, 3), (3, 4), (4, 8), (6, 8), (7, 8), (len - 1, len)]
            {
                let mut bytes = decline.clone();
                bytes[at] = 0x01;
                assert_eq!(Crossing::of(&bytes[..seen]), Crossing::None, "{at}");
                assert_eq!(Crossing::of(&bytes), Crossing::None, "{at}");
            }
        }
    }
}
