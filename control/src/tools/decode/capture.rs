//! Reads capture files, pcap and pcapng, as a sequence of frames.

use std::io::{self, Read};

use pcap_file::pcap::PcapReader;
use pcap_file::pcapng::blocks::interface_description::{
    InterfaceDescriptionBlock, InterfaceDescriptionOption,
};
use pcap_file::pcapng::{Block, PcapNgReader};
use pcap_file::{PcapError, TsResolution};

use super::{DecodeError, frame};

/// The first block of every pcapng file.
const PCAPNG_MAGIC: [u8; 4] = [0x0a, 0x0d, 0x0d, 0x0a];
/// Ticks per second of an interface that does not give its resolution.
const MICROSECONDS: u64 = 1_000_000;
const NANOS_PER_SECOND: u64 = 1_000_000_000;

/// One captured frame.
#[derive(Debug)]
pub(super) struct Frame<'a> {
    /// Nanoseconds since 1970.
    pub(super) time_ns: u64,
    /// The registered number of the link type.
    pub(super) link: u32,
    pub(super) bytes: &'a [u8],
}

/// How a file ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileEnd {
    /// After its last frame.
    Complete,
    /// In the middle of a frame, because the writer was killed, or in bytes that are no frame.
    Damaged,
}

/// Calls `each` for every frame of the capture, until it fails.
pub(super) fn frames(
    mut input: impl Read,
    each: &mut dyn FnMut(Frame<'_>) -> io::Result<()>,
) -> Result<FileEnd, DecodeError> {
    let mut magic = [0; 4];
    input.read_exact(&mut magic).map_err(|_| DecodeError::NotACapture)?;
    let input = io::Cursor::new(magic).chain(input);
    if magic == PCAPNG_MAGIC { pcapng(input, each) } else { pcap(input, each) }
}

fn pcap(
    input: impl Read,
    each: &mut dyn FnMut(Frame<'_>) -> io::Result<()>,
) -> Result<FileEnd, DecodeError> {
    let mut reader = PcapReader::new(input).map_err(|_| DecodeError::NotACapture)?;
    let header = reader.header();
    let link = known(u32::from(header.datalink))?;
    let fraction_ns = match header.ts_resolution {
        TsResolution::MicroSecond => 1_000,
        TsResolution::NanoSecond => 1,
    };
    // The raw reader is used because the checked one refuses frames that the snap length cut.
    while let Some(packet) = reader.next_raw_packet() {
        let packet = match packet {
            Ok(packet) => packet,
            Err(error) => return ended(error),
        };
        let fraction = u64::from(packet.ts_frac) * fraction_ns;
        let time_ns = u64::from(packet.ts_sec) * NANOS_PER_SECOND + fraction;
        each(Frame { time_ns, link, bytes: &packet.data }).map_err(DecodeError::Output)?;
    }
    Ok(FileEnd::Complete)
}

fn pcapng(
    input: impl Read,
    each: &mut dyn FnMut(Frame<'_>) -> io::Result<()>,
) -> Result<FileEnd, DecodeError> {
    let mut reader = PcapNgReader::new(input).map_err(|_| DecodeError::NotACapture)?;
    // The resolutions of the interfaces in the current section. The reader has such a list too, but
    // lends it to nobody while one of its blocks is in use.
    let mut interfaces = Vec::new();
    loop {
        let block = match reader.next_block() {
            None => return Ok(FileEnd::Complete),
            Some(Err(error)) => return ended(error),
            Some(Ok(block)) => block,
        };
        if let Block::SectionHeader(_) = &block {
            interfaces.clear();
        } else if let Block::InterfaceDescription(interface) = &block {
            interfaces.push((u32::from(interface.linktype), ticks_per_second(interface)));
        } else if let Block::EnhancedPacket(packet) = &block {
            let interface = usize::try_from(packet.interface_id).unwrap_or(usize::MAX);
            let Some(&(link, per_second)) = interfaces.get(interface) else {
                return Ok(FileEnd::Damaged);
            };
            // The reader assumes that every tick is a nanosecond.
            let ticks = packet.timestamp.as_nanos();
            let time_ns = ticks * u128::from(NANOS_PER_SECOND) / u128::from(per_second);
            let time_ns = u64::try_from(time_ns).unwrap_or(u64::MAX);
            let link = known(link)?;
            let frame = Frame { time_ns, link, bytes: &packet.data };
            each(frame).map_err(DecodeError::Output)?;
        }
    }
}

/// The resolution of the interface's time stamps: a power of ten, or of two if the high bit is set.
fn ticks_per_second(interface: &InterfaceDescriptionBlock<'_>) -> u64 {
    let exponent = interface.options.iter().find_map(|option| {
        if let InterfaceDescriptionOption::IfTsResol(exponent) = option {
            Some(*exponent)
        } else {
            None
        }
    });
    match exponent {
        None => Some(MICROSECONDS),
        Some(exponent @ 0..=0x7f) => 10_u64.checked_pow(u32::from(exponent)),
        Some(exponent) => 2_u64.checked_pow(u32::from(exponent & 0x7f)),
    }
    .unwrap_or(MICROSECONDS)
}

fn known(link: u32) -> Result<u32, DecodeError> {
    if frame::is_known(link) { Ok(link) } else { Err(DecodeError::UnknownLinkType(link)) }
}

/// Converts an error of the reader: the file is damaged, unless reading it failed.
fn ended(error: PcapError) -> Result<FileEnd, DecodeError> {
    match error {
        PcapError::IoError(error) if error.kind() != io::ErrorKind::UnexpectedEof => {
            Err(DecodeError::Input(error))
        }
        PcapError::IoError(_)
        | PcapError::IncompleteBuffer
        | PcapError::InvalidField(_)
        | PcapError::Utf8Error(_)
        | PcapError::FromUtf8Error(_)
        | PcapError::InvalidInterfaceId(_) => Ok(FileEnd::Damaged),
    }
}
