//! The part of netlink that SMC's three families need: requests, dumps, attributes.
//!
//! Netlink uses the byte order of the machine.

use std::io;

use rustix::fd::OwnedFd;
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketType, netlink, recv, send, socket,
};

/// Flags of a request.
const REQUEST: u16 = 0x01;
const ACKNOWLEDGE: u16 = 0x04;
const DUMP: u16 = 0x300;

/// Types of messages that are about netlink itself.
const ERROR: u16 = 2;
const DONE: u16 = 3;

const HEADER_BYTES: usize = 16;
const ATTRIBUTE_HEADER_BYTES: usize = 4;
/// Upper bound of what the kernel puts into one datagram.
const DATAGRAM_BYTES: usize = 65_536;

/// The attribute of the controller that holds a family's number, and the one for its name.
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;
const CONTROLLER: u16 = 0x10;
const GET_FAMILY: u8 = 3;

/// A socket to one family.
pub(crate) struct Netlink {
    socket: OwnedFd,
    /// Type of its messages.
    family: u16,
    /// Whether messages begin with the header of generic netlink.
    generic: bool,
}

impl Netlink {
    /// Opens `NETLINK_SOCK_DIAG`, whose messages are of this type.
    pub(crate) fn diagnosis(family: u16) -> io::Result<Self> {
        Ok(Self { socket: open(netlink::SOCK_DIAG)?, family, generic: false })
    }

    /// Opens the generic family of this name.
    pub(crate) fn generic(name: &str) -> io::Result<Self> {
        let socket = open(netlink::GENERIC)?;
        let controller = Self { socket, family: CONTROLLER, generic: true };
        let answers = controller.ask(&generic_header(GET_FAMILY, &string(FAMILY_NAME, name)), 0)?;
        let answer = answers.first().ok_or(io::ErrorKind::NotFound)?;
        let family = Attributes(answer).find(FAMILY_ID).and_then(|bytes| bytes.first_chunk());
        let family = u16::from_ne_bytes(*family.ok_or(io::ErrorKind::InvalidData)?);
        Ok(Self { family, ..controller })
    }

    /// Asks the kernel to do something.
    pub(crate) fn command(&self, command: u8, attributes: &[u8]) -> io::Result<()> {
        self.ask(&generic_header(command, attributes), ACKNOWLEDGE).map(drop)
    }

    /// Asks the kernel to list something. Returns the attributes of each item.
    pub(crate) fn list(&self, command: u8) -> io::Result<Vec<Vec<u8>>> {
        self.ask(&generic_header(command, &[]), DUMP)
    }

    /// Asks the kernel to list what `request` describes. Returns what follows each message header.
    pub(crate) fn dump(&self, request: &[u8]) -> io::Result<Vec<Vec<u8>>> {
        self.ask(request, DUMP)
    }

    /// Sends a request and collects the payloads of its answer.
    fn ask(&self, payload: &[u8], flags: u16) -> io::Result<Vec<Vec<u8>>> {
        let mut request = Vec::new();
        let length = u32::try_from(HEADER_BYTES + payload.len());
        request.extend(length.map_err(|_| io::ErrorKind::InvalidInput)?.to_ne_bytes());
        request.extend(self.family.to_ne_bytes());
        request.extend((REQUEST | flags).to_ne_bytes());
        request.extend([0; 8]); // Sequence and port number: this socket asks one thing at a time.
        request.extend(payload);
        send(&self.socket, &request, SendFlags::empty())?;

        let skip = if self.generic { GENERIC_HEADER_BYTES } else { 0 };
        let mut answers = Vec::new();
        let mut datagram = vec![0; DATAGRAM_BYTES];
        loop {
            let (length, _) = recv(&self.socket, &mut datagram, RecvFlags::empty())?;
            let mut messages = &datagram[..length];
            while let Some((kind, payload)) = next_message(&mut messages)? {
                match kind {
                    DONE => return Ok(answers),
                    ERROR => return verdict(payload).map(|()| answers),
                    _ => answers.push(payload.get(skip..).unwrap_or_default().to_vec()),
                }
            }
            // A single answer has no end message.
            if flags == 0 {
                return Ok(answers);
            }
        }
    }
}

fn open(protocol: Protocol) -> io::Result<OwnedFd> {
    Ok(socket(AddressFamily::NETLINK, SocketType::RAW, Some(protocol))?)
}

/// Takes the next message: its type and what follows its header.
fn next_message<'a>(messages: &mut &'a [u8]) -> io::Result<Option<(u16, &'a [u8])>> {
    if messages.is_empty() {
        return Ok(None);
    }
    let length = messages.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes));
    let length = length.and_then(|length| usize::try_from(length).ok());
    let message = length.and_then(|length| messages.get(..length));
    let message = message.filter(|message| message.len() >= HEADER_BYTES);
    let message = message.ok_or(io::ErrorKind::InvalidData)?;
    *messages = messages.get(aligned(message.len())..).unwrap_or_default();
    Ok(Some((u16::from_ne_bytes([message[4], message[5]]), &message[HEADER_BYTES..])))
}

/// The error of an error message; error number zero means success.
fn verdict(payload: &[u8]) -> io::Result<()> {
    let code = payload.first_chunk().ok_or(io::ErrorKind::InvalidData)?;
    match i32::from_ne_bytes(*code) {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(-code)),
    }
}

const GENERIC_HEADER_BYTES: usize = 4;

fn generic_header(command: u8, attributes: &[u8]) -> Vec<u8> {
    const VERSION: u8 = 1;
    [&[command, VERSION, 0, 0], attributes].concat()
}

/// An attribute with these bytes.
pub(crate) fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(ATTRIBUTE_HEADER_BYTES + value.len()).expect("we send short ones");
    let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend(value);
    bytes.resize(aligned(bytes.len()), 0);
    bytes
}

/// An attribute with a text that ends in a zero byte.
pub(crate) fn string(kind: u16, value: &str) -> Vec<u8> {
    attribute(kind, &[value.as_bytes(), &[0]].concat())
}

/// The attributes of a message, or inside another.
#[derive(Clone, Copy)]
pub(crate) struct Attributes<'a>(pub(crate) &'a [u8]);

impl<'a> Attributes<'a> {
    /// The value of the first of this kind.
    pub(crate) fn find(self, kind: u16) -> Option<&'a [u8]> {
        let mut rest = self.0;
        loop {
            let header: &[u8; ATTRIBUTE_HEADER_BYTES] = rest.first_chunk()?;
            let length = usize::from(u16::from_ne_bytes([header[0], header[1]]));
            let value = rest.get(ATTRIBUTE_HEADER_BYTES..length)?;
            // The two highest bits mean: it has attributes inside, or is in network byte order.
            if u16::from_ne_bytes([header[2], header[3]]) & 0x3FFF == kind {
                return Some(value);
            }
            rest = rest.get(aligned(length)..)?;
        }
    }

    /// The attributes inside the first of this kind; none if there is no such attribute.
    pub(crate) fn inside(self, kind: u16) -> Self {
        Attributes(self.find(kind).unwrap_or_default())
    }

    /// The number in the first of this kind, whatever its width.
    pub(crate) fn number(self, kind: u16) -> Option<u64> {
        let value = self.find(kind)?;
        let mut bytes = [0; 8];
        bytes.get_mut(..value.len())?.copy_from_slice(value);
        Some(u64::from_le_bytes(bytes)).filter(|_| cfg!(target_endian = "little"))
    }

    /// The text in the first of this kind; empty if there is no such attribute.
    pub(crate) fn text(self, kind: u16) -> String {
        text(self.find(kind).unwrap_or_default())
    }
}

/// A text that ends at its first zero byte or at the end of its field, without padding blanks.
pub(crate) fn text(bytes: &[u8]) -> String {
    let bytes = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(bytes).trim_end().to_owned()
}

fn aligned(length: usize) -> usize {
    length.next_multiple_of(4)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The reader goes from attribute to attribute; one wrong step would yield nonsense.
    #[test]
    fn attributes_are_found_behind_padded_ones() {
        let inner = attribute(2, &7_u32.to_ne_bytes());
        let bytes = [string(1, "NET"), attribute(3 | 0x8000, &inner), string(4, "x")].concat();
        let attributes = Attributes(&bytes);
        assert_eq!(attributes.text(1), "NET");
        assert_eq!(attributes.inside(3).number(2), Some(7));
        assert_eq!(attributes.text(4), "x");
        assert_eq!(attributes.find(5), None);
        assert_eq!(Attributes(&bytes[..bytes.len() - 5]).find(4), None, "cut off");
    }

    #[test]
    fn messages_are_split_where_their_lengths_say() {
        let message = |kind: u16, payload: &[u8]| {
            let length = u32::try_from(HEADER_BYTES + payload.len()).unwrap();
            let mut bytes = length.to_ne_bytes().to_vec();
            bytes.extend(kind.to_ne_bytes());
            bytes.resize(HEADER_BYTES, 0);
            bytes.extend(payload);
            bytes.resize(aligned(bytes.len()), 0);
            bytes
        };
        let bytes = [message(20, b"one"), message(3, b"")].concat();
        let mut rest = &bytes[..];
        assert_eq!(next_message(&mut rest).unwrap(), Some((20, &b"one"[..])));
        assert_eq!(next_message(&mut rest).unwrap(), Some((3, &b""[..])));
        assert_eq!(next_message(&mut rest).unwrap(), None);
        let mut short = &bytes[..10];
        assert!(next_message(&mut short).is_err());
    }
}
