//! Cuts a TCP stream into CLC messages, however its segments are cut.

use super::{EYECATCHER, EYECATCHER_SMC_D, Frame, HEADER_LEN, Header, field};
use crate::wire::Malformed;

/// The longest message we read, in bytes: room for every Proposal that deployed stacks send, with
/// all prefixes, EIDs and ISM devices they may list.
pub const FRAME_MAX: usize = 1024;

/// Collects the bytes of a TCP stream until they are a message.
///
/// 1. Read from the socket, at most [`wanted`] bytes if the surplus should stay there, and hand
///    the bytes to [`feed`].
/// 2. Call [`next_frame`] as long as the rendezvous expects a message and one is there. No further:
///    what follows the last message is not one.
/// 3. When the rendezvous is over, and the stream belongs to the application, its first bytes are
///    [`leftover`], then those that `feed` did not take.
///
/// [`wanted`]: Self::wanted
/// [`feed`]: Self::feed
/// [`next_frame`]: Self::next_frame
/// [`leftover`]: Self::leftover
#[derive(Clone, Debug)]
pub struct Framer {
    buffer: [u8; FRAME_MAX],
    len: usize,
}

impl Framer {
    /// At the beginning of a stream.
    pub const fn new() -> Self {
        Self { buffer: [0; FRAME_MAX], len: 0 }
    }

    /// How many bytes are missing until the message, or first its header, is complete. A reader
    /// that never feeds more has no leftover. Zero if [`next_frame`](Self::next_frame) has
    /// something to say already.
    pub fn wanted(&self) -> usize {
        match self.frame_len() {
            Ok(len) => len.saturating_sub(self.len),
            Err(_) => 0,
        }
    }

    /// Takes bytes that came from the socket, and says how many: fewer than offered once a whole
    /// message and more are waiting. The rest remains the caller's.
    #[must_use = "bytes that were not taken are still the caller's"]
    pub fn feed(&mut self, bytes: &[u8]) -> usize {
        let taken = bytes.len().min(FRAME_MAX - self.len);
        self.buffer[self.len..self.len + taken].copy_from_slice(&bytes[..taken]);
        self.len += taken;
        taken
    }

    /// The next message, if all of it has arrived.
    ///
    /// # Errors
    ///
    /// [`Malformed`], as soon as the bytes show it, and at every further call: nobody can tell
    /// where the next message begins behind a malformed one. The bytes stay in `leftover`.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, Malformed> {
        let frame_len = self.frame_len()?;
        if self.len < frame_len {
            return Ok(None);
        }
        let frame = Frame::decode(&self.buffer[..frame_len])?;
        self.buffer.copy_within(frame_len..self.len, 0);
        self.len -= frame_len;
        Ok(Some(frame))
    }

    // RFC 7609 C.6 #2: never parse application data as CLC
    /// Bytes that were fed and belong to no message that [`next_frame`](Self::next_frame) returned.
    pub fn leftover(&self) -> &[u8] {
        &self.buffer[..self.len]
    }

    /// Where the message that has begun will end, as far as is known: at least behind its header.
    fn frame_len(&self) -> Result<usize, Malformed> {
        if self.len >= HEADER_LEN {
            return Header::decode(&self.buffer).map(|header| header.length);
        }
        // RFC 7609 C.6 #1: application data instead of CLC: error
        // The first bytes show whether an application without SMC speaks here.
        let seen = self.len.min(field::EYECATCHER.end);
        let begins = |eyecatcher: [u8; 4]| self.buffer[..seen] == eyecatcher[..seen];
        match begins(EYECATCHER) || begins(EYECATCHER_SMC_D) {
            true => Ok(HEADER_LEN),
            false => Err(Malformed::Eyecatcher),
        }
    }
}

impl Default for Framer {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests;
