//! Streams in which every position is recognisable, and digests of what arrived.

use std::io::{self, Read, Write};

use sha2::{Digest, Sha256};

/// A reproducible stream of bytes without a period: no two blocks are alike, so that any byte that
/// is lost, repeated or out of place changes the digest.
pub(crate) struct Pattern {
    state: u64,
    sum: Sha256,
    bytes: u64,
}

impl Pattern {
    pub(crate) fn new(seed: u64) -> Self {
        Self { state: seed ^ 0x9E37_79B9_7F4A_7C15, sum: Sha256::new(), bytes: 0 }
    }

    /// The next `buffer.len()` bytes.
    pub(crate) fn fill(&mut self, buffer: &mut [u8]) {
        for word in buffer.chunks_mut(8) {
            self.state ^= self.state << 13;
            self.state ^= self.state >> 7;
            self.state ^= self.state << 17;
            word.copy_from_slice(&self.state.to_le_bytes()[..word.len()]);
        }
        self.sum.update(&*buffer);
        self.bytes += buffer.len() as u64;
    }

    pub(crate) fn digest(self) -> StreamDigest {
        StreamDigest { bytes: self.bytes, sum: self.sum.finalize().into() }
    }
}

/// Length and SHA-256 of a stream.
#[derive(PartialEq, Eq)]
pub(crate) struct StreamDigest {
    pub(crate) bytes: u64,
    sum: [u8; 32],
}

impl StreamDigest {
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self { bytes: bytes.len() as u64, sum: Sha256::digest(bytes).into() }
    }
}

impl std::fmt::Debug for StreamDigest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [a, b, c, d, ..] = self.sum;
        write!(f, "{} bytes, sha256 {a:02x}{b:02x}{c:02x}{d:02x}…", self.bytes)
    }
}

/// Writes `bytes` of the pattern of `seed`. Returns their length and digest.
pub(crate) fn send(stream: &mut impl Write, seed: u64, bytes: u64) -> io::Result<StreamDigest> {
    let mut pattern = Pattern::new(seed);
    let mut buffer = vec![0; 128 * 1024];
    let mut left = bytes;
    while left > 0 {
        let piece = usize::try_from(left).unwrap_or(buffer.len()).min(buffer.len());
        pattern.fill(&mut buffer[..piece]);
        stream.write_all(&buffer[..piece])?;
        left -= piece as u64;
    }
    Ok(pattern.digest())
}

/// Reads to the end of the stream. Returns length and digest of what came.
pub(crate) fn receive(stream: &mut impl Read) -> io::Result<StreamDigest> {
    let mut sum = Sha256::new();
    let mut bytes = 0;
    let mut buffer = vec![0; 128 * 1024];
    loop {
        match stream.read(&mut buffer)? {
            0 => return Ok(StreamDigest { bytes, sum: sum.finalize().into() }),
            count => {
                sum.update(&buffer[..count]);
                bytes += count as u64;
            }
        }
    }
}
