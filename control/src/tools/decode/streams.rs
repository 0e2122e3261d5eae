//! Finds the rendezvous in TCP streams: the option on the SYN, and the CLC messages.
//!
//! CLC messages are at the very beginning of each direction of a connection (RFC 3.2). So a stream
//! is followed from its first byte, in order, however TCP segmented it, and dropped at the first
//! bytes that are no CLC message: they belong to the application.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;

use smcr_proto::wire::clc::{EYECATCHER, HEADER_LEN};

use super::clc::clc_words;
use super::frame::{Segment, u16_at};
use super::words::Words;

/// Experimental TCP option whose value is the eye catcher (RFC 7609, A.1).
const OPTION: u8 = 254;
/// The most out-of-order segments that are kept per stream.
const AHEAD_MAX: usize = 64;
/// The longest CLC message that is accepted, since the length field may hold any value.
const MESSAGE_MAX: usize = 4096;

/// One direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Flow {
    source: (IpAddr, u16),
    target: (IpAddr, u16),
}

/// All directions whose beginning was seen.
#[derive(Debug, Default)]
pub(super) struct Streams {
    flows: HashMap<Flow, Direction>,
}

#[derive(Debug)]
enum Direction {
    /// CLC messages may still come.
    Rendezvous {
        /// Sequence number of the byte behind `bytes`.
        next: u32,
        bytes: Vec<u8>,
        /// By sequence number.
        ahead: BTreeMap<u32, Vec<u8>>,
    },
    /// The rendezvous is over: the rest belongs to the application.
    Over,
}

impl Direction {
    fn beginning_at(next: u32) -> Self {
        Self::Rendezvous { next, bytes: Vec::new(), ahead: BTreeMap::new() }
    }
}

impl Streams {
    /// Processes one segment, in the order of the capture, and calls `show` for each message that
    /// it completes.
    pub(super) fn segment(
        &mut self,
        source: IpAddr,
        target: IpAddr,
        segment: &Segment<'_>,
        show: &mut dyn FnMut(Words),
    ) {
        let flow =
            Flow { source: (source, segment.source_port), target: (target, segment.target_port) };
        let mut sequence = segment.sequence;
        if segment.has(Segment::SYN) {
            sequence = sequence.wrapping_add(1);
            self.flows.insert(flow, Direction::beginning_at(sequence));
            if has_option(segment.options) {
                let name = if segment.has(Segment::ACK) { "TCP SYN-ACK" } else { "TCP SYN" };
                show(Words::new(name).flags(&[(true, "SMC option")]));
            }
        }
        if !segment.payload.is_empty() {
            if segment.payload.starts_with(&EYECATCHER) {
                // Captures may begin after the SYN.
                self.flows.entry(flow).or_insert_with(|| Direction::beginning_at(sequence));
            }
            if let Some(stream) = self.flows.get_mut(&flow)
                && let Direction::Rendezvous { next, bytes, ahead } = stream
            {
                arrange(sequence, segment.payload, next, bytes, ahead);
                if drain(bytes, show) {
                    *stream = Direction::Over;
                }
            }
        }
        if segment.has(Segment::FIN) || segment.has(Segment::RST) {
            self.flows.remove(&flow);
        }
    }
}

/// Appends `payload` to `bytes` if it is next in order, and then the segments that waited for it.
/// Otherwise keeps it.
fn arrange(
    sequence: u32,
    payload: &[u8],
    next: &mut u32,
    bytes: &mut Vec<u8>,
    ahead: &mut BTreeMap<u32, Vec<u8>>,
) {
    let is_ahead = |sequence: u32, next: u32| sequence.wrapping_sub(next).wrapping_sub(1) < 1 << 31;
    if is_ahead(sequence, *next) {
        if ahead.len() < AHEAD_MAX {
            ahead.insert(sequence, payload.to_vec());
        }
        return;
    }
    let mut append = |sequence: u32, payload: &[u8], next: &mut u32| {
        let seen = usize::try_from(next.wrapping_sub(sequence)).unwrap_or(usize::MAX);
        if let Some(fresh) = payload.get(seen..) {
            bytes.extend_from_slice(fresh);
            // A segment is shorter than 4 GiB.
            *next = next.wrapping_add(u32::try_from(fresh.len()).unwrap_or(0));
        }
    };
    append(sequence, payload, next);
    while let Some(sequence) = ahead.keys().copied().find(|&it| !is_ahead(it, *next)) {
        let payload = ahead.remove(&sequence).unwrap_or_default();
        append(sequence, &payload, next);
    }
}

/// Shows and removes all complete messages at the start of `bytes`. Returns whether the rendezvous
/// is over.
fn drain(bytes: &mut Vec<u8>, show: &mut dyn FnMut(Words)) -> bool {
    loop {
        let seen = bytes.len().min(EYECATCHER.len());
        // The last byte of the eye catcher differs if the message offers SMC-D only.
        let compared = seen.min(EYECATCHER.len() - 1);
        if bytes[..compared] != EYECATCHER[..compared] {
            return true;
        }
        let Some(length) = u16_at(bytes, 5).map(usize::from) else { return false };
        if !(HEADER_LEN..=MESSAGE_MAX).contains(&length) {
            show(Words::new("CLC").text("malformed", "length").number("length", length as u64));
            return true;
        }
        if bytes.len() < length {
            return false;
        }
        show(clc_words(&bytes[..length]));
        bytes.drain(..length);
    }
}

/// Whether the options of a SYN contain the one that offers SMC-R.
fn has_option(mut options: &[u8]) -> bool {
    while let Some(&kind) = options.first() {
        let length = match kind {
            0 => return false,
            1 => 1,
            _ => usize::from(options.get(1).copied().unwrap_or(0)).max(2),
        };
        let Some(option) = options.get(..length) else { return false };
        if kind == OPTION && option[2..].starts_with(&EYECATCHER) {
            return true;
        }
        options = &options[length..];
    }
    false
}
