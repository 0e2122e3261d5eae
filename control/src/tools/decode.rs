//! Captures in the words of SMC-R: what `smcgate decode` prints.
//!
//! tcpdump shows a connection over SMC-R as a TCP handshake, a hundred odd bytes, and silence; the
//! rest is UDP to port 4791. This reads pcap and pcapng files and prints one line per message: the
//! TCP option, CLC messages, RDMA writes and acknowledgements, LLC and CDC messages.
//!
//! The file is untrusted: damage ends the output early and is reported, and is never a panic.

mod capture;
mod clc;
mod dense;
mod frame;
mod layout;
mod messages;
mod roce;
mod sends;
mod streams;
mod words;

use std::fmt;
use std::io::{self, Read};
use std::net::SocketAddr;

pub use words::{MessageLine, Words};

use capture::FileEnd;
use frame::{Content, Packet};
use sends::Sends;
use streams::Streams;

/// Why a file could not be decoded, or not to its end.
#[derive(Debug)]
pub enum DecodeError {
    /// Neither pcap nor pcapng.
    NotACapture,
    /// Its frames have a link type we do not read; the number is the registered one.
    UnknownLinkType(u32),
    /// Reading failed.
    Input(io::Error),
    /// Printing failed.
    Output(io::Error),
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotACapture => f.write_str("neither a pcap nor a pcapng file"),
            Self::UnknownLinkType(number) => write!(
                f,
                "link type {number} is none of Ethernet, Linux cooked and raw IP; capture with -i"
            ),
            Self::Input(error) => write!(f, "cannot be read: {error}"),
            Self::Output(error) => write!(f, "cannot print: {error}"),
        }
    }
}

impl std::error::Error for DecodeError {}

/// What was in a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Frames, of whatever protocol.
    pub frames: u64,
    /// Lines shown.
    pub lines: u64,
    /// The file ended in the middle of a frame, or in bytes that are none: lines may be missing.
    pub damaged: bool,
}

/// Decodes a capture and calls `show` for each message, in the order of the file.
///
/// # Errors
///
/// [`DecodeError`]; what `show` was called for before that remains true. A damaged end is not an
/// error but [`Summary::damaged`].
pub fn decode(
    input: impl Read,
    show: &mut dyn FnMut(&MessageLine) -> io::Result<()>,
) -> Result<Summary, DecodeError> {
    let mut summary = Summary::default();
    let mut streams = Streams::default();
    let mut sends = Sends::default();
    let mut origin_ns = None;
    let mut lines = Vec::new();
    let end = capture::frames(input, &mut |frame| {
        summary.frames += 1;
        let origin_ns = *origin_ns.get_or_insert(frame.time_ns);
        let time_ns = frame.time_ns.saturating_sub(origin_ns);
        if let Some(packet) = frame::dissect(frame.link, frame.bytes) {
            packet_lines(&packet, time_ns, &mut streams, &mut sends, &mut lines);
        }
        for line in lines.drain(..) {
            summary.lines += 1;
            show(&line)?;
        }
        Ok(())
    })?;
    summary.damaged = end == FileEnd::Damaged;
    Ok(summary)
}

fn packet_lines(
    packet: &Packet<'_>,
    time_ns: u64,
    streams: &mut Streams,
    sends: &mut Sends,
    lines: &mut Vec<MessageLine>,
) {
    let Packet { source, target, content } = *packet;
    match content {
        Content::Tcp(segment) => {
            let source_name = SocketAddr::new(source, segment.source_port).to_string();
            let target_name = SocketAddr::new(target, segment.target_port).to_string();
            streams.segment(source, target, &segment, &mut |words| {
                let (source, target) = (source_name.clone(), target_name.clone());
                lines.push(MessageLine { time_ns, source, target, words });
            });
        }
        Content::Roce(datagram) => roce::packets(datagram, (source, target), sends, &mut |words| {
            let (source, target) = (source.to_string(), target.to_string());
            lines.push(MessageLine { time_ns, source, target, words });
        }),
    }
}

#[cfg(test)]
mod tests;
