//! `smcgate capture`: what goes over the RNICs of a running gateway, into a file.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::capture::{Answer, Request, address_of};

/// What was captured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Captured {
    /// How many frames are in the file.
    pub frames: u64,
    /// How many are missing because they came faster than they could be written.
    pub dropped: u64,
    /// Whether the capture has its end. Otherwise the gateway has stopped, or has given us up
    /// because we read nothing.
    pub is_complete: bool,
}

/// Why there is no capture. Displays on one line.
#[derive(Debug)]
pub enum CaptureError {
    /// Nobody answers.
    Silent(SocketAddr, io::Error),
    /// The gateway will not, and says why.
    Refused(SocketAddr, String),
    /// What arrives cannot be read.
    Input(io::Error),
    /// The file cannot be written.
    Output(io::Error),
}

impl fmt::Display for CaptureError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Silent(admin, error) => write!(
                f,
                "gateway at {admin}: nobody answers ({error}); is the gateway running in this \
                 network namespace, and is this its [admin] listen?"
            ),
            Self::Refused(admin, why) => write!(f, "gateway at {admin}: {why}"),
            Self::Input(error) => write!(f, "the capture broke off: {error}"),
            Self::Output(error) => write!(f, "the capture cannot be written: {error}"),
        }
    }
}

impl std::error::Error for CaptureError {}

/// Asks the gateway with this admin endpoint, and copies the capture to `out` until the gateway
/// ends it: after `request.count` frames, or because somebody called what `on_stop` was given.
///
/// # Errors
///
/// [`CaptureError`].
pub fn capture(
    admin: SocketAddr,
    request: &Request,
    out: &mut dyn Write,
    on_stop: impl FnOnce(Box<dyn Fn() + Send>) -> io::Result<()>,
) -> Result<Captured, CaptureError> {
    let silent = |error| CaptureError::Silent(admin, error);
    let mut stream = UnixStream::connect_addr(&address_of(admin)).map_err(silent)?;
    stream.set_read_timeout(Some(PATIENCE)).map_err(silent)?;
    let line = serde_json::to_string(request).map_err(io::Error::other).map_err(silent)?;
    // Whoever may not ask is told so, and not listened to.
    let asked = stream.write_all(format!("{line}\n").as_bytes());
    let mut input = BufReader::with_capacity(1 << 16, stream);
    let mut line = String::new();
    let answered = input.read_line(&mut line);
    if line.is_empty() {
        asked.and(answered.map(drop)).map_err(silent)?;
    }
    let answer: Answer =
        serde_json::from_str(&line).map_err(|error| CaptureError::Input(error.into()))?;
    if let Some(why) = answer.error {
        return Err(CaptureError::Refused(admin, why));
    }
    let stream = input.get_ref();
    stream.set_read_timeout(None).map_err(CaptureError::Input)?;
    let stop = stream.try_clone().map_err(CaptureError::Input)?;
    on_stop(Box::new(move || {
        // It is gone already if this fails.
        stop.shutdown(Shutdown::Write).ok();
    }))
    .map_err(CaptureError::Input)?;
    copy(&mut input, out)
}

/// Copies pcapng block by block, so that the file is whole whatever happens to the gateway.
fn copy<R: Read>(input: &mut BufReader<R>, out: &mut dyn Write) -> Result<Captured, CaptureError> {
    let mut captured = Captured::default();
    let mut block = Vec::new();
    loop {
        block.clear();
        let got = input.by_ref().take(HEAD_LEN).read_to_end(&mut block);
        if got.map_err(CaptureError::Input)? < usize::try_from(HEAD_LEN).unwrap_or_default() {
            break;
        }
        let number = |bytes: &[u8], at: usize| {
            let bytes = bytes.get(at..).and_then(<[u8]>::first_chunk);
            bytes.map_or(0, |bytes| u32::from_ne_bytes(*bytes))
        };
        let rest = u64::from(number(&block, 4)).saturating_sub(HEAD_LEN);
        let got = input.by_ref().take(rest).read_to_end(&mut block);
        if got.map_err(CaptureError::Input)? as u64 != rest {
            break;
        }
        match number(&block, 0) {
            PACKET => captured.frames += 1,
            STATISTICS => {
                // The only option follows behind the interface and the time.
                let low = u64::from(number(&block, 24));
                captured.dropped += low | u64::from(number(&block, 28)) << 32;
                captured.is_complete = true;
            }
            _ => {}
        }
        out.write_all(&block).map_err(CaptureError::Output)?;
        if input.buffer().is_empty() {
            out.flush().map_err(CaptureError::Output)?;
        }
    }
    Ok(captured)
}

/// How long a gateway may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Type and length of a block.
const HEAD_LEN: u64 = 8;
/// The type of a block that holds a frame.
const PACKET: u32 = 6;
/// The type of a block that says how many frames are missing.
const STATISTICS: u32 = 5;
