//! CLC Decline of version 2: that of version 1, and four more words.
//!
//! ```text
//!   0     8         16          20        21         24                       40    44
//!   | hdr | peer id | diagnosis | os|rsvd | reserved | diagnosis information  | eye |
//! ```

use core::ops::Range;

use super::super::{Decline, EncodedFrame, FLAG, TRAILER_LEN, decline, kind};
use super::{OsType, VERSION};
use crate::wire::{Malformed, flag_if, put, u32_at};

/// Length of the message in bytes.
pub(in crate::wire::clc) const LEN: usize = 44;

mod field {
    use super::{LEN, Range, TRAILER_LEN};

    pub(super) const OS: usize = 20; // its low half and 21..24 are reserved
    pub(super) const INFORMATION: [Range<usize>; 4] = [24..28, 28..32, 32..36, 36..40];
    const _: () = assert!(INFORMATION[3].end + TRAILER_LEN == LEN);
}

/// A refusal; TCP goes on. Linux sends this form to whoever proposed in version 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeclineV2 {
    /// What version 1 would say.
    pub decline: Decline,
    /// What the peer runs.
    pub os: OsType,
    /// For those who service the peer. Linux sends zeros.
    pub information: [u32; 4],
}

impl DeclineV2 {
    /// Decodes one framed message. The frame layer has checked its length.
    pub(in crate::wire::clc) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        Ok(Self {
            decline: Decline::decode(bytes)?,
            os: OsType(bytes[field::OS] >> 4),
            information: field::INFORMATION.map(|field| u32_at(bytes, field)),
        })
    }

    pub(in crate::wire::clc) fn encode(&self) -> EncodedFrame {
        let flags = flag_if(self.decline.out_of_sync, FLAG);
        let mut frame = EncodedFrame::of_version(VERSION, kind::DECLINE, LEN, flags);
        decline::put_fields(&mut frame.bytes, &self.decline);
        frame.bytes[field::OS] = self.os.to_high_half();
        for (field, word) in field::INFORMATION.into_iter().zip(self.information) {
            put(&mut frame.bytes, field, &word.to_be_bytes());
        }
        frame
    }
}
