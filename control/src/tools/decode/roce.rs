//! Describes RoCE packets in words: writes and their targets, acknowledgements, and messages.

use std::net::IpAddr;

use super::dense;
use super::frame::{Datagram, array};
use super::layout::{AETH, BTH, ICRC, RETH, opcode};
use super::messages;
use super::sends::{Part, Sends};
use super::words::Words;

/// Calls `show` for every packet in `datagram`, which went from one address to another.
///
/// A capture on a host that offloads segmentation shows a whole train of packets under one UDP
/// header. Only the last of a train may be shorter, so the length of the first gives the
/// boundaries.
pub(super) fn packets(
    datagram: Datagram<'_>,
    between: (IpAddr, IpAddr),
    sends: &mut Sends,
    show: &mut dyn FnMut(Words),
) {
    let Datagram { mut bytes, mut wire_bytes } = datagram;
    let train = packet_bytes(bytes).filter(|&length| length < wire_bytes);
    while let Some(length) = train.filter(|&length| length < wire_bytes && length < bytes.len()) {
        let one = Datagram { bytes: &bytes[..length], wire_bytes: length };
        requests(one, between, sends, show);
        bytes = &bytes[length..];
        wire_bytes -= length;
    }
    requests(Datagram { bytes, wire_bytes }, between, sends, show);
}

/// Calls `show` for every request in one packet. A dense one may have several.
fn requests(
    whole: Datagram<'_>,
    between: (IpAddr, IpAddr),
    sends: &mut Sends,
    show: &mut dyn FnMut(Words),
) {
    if !dense::parts(whole, &mut |part| show(packet(part, between, sends))) {
        show(packet(whole, between, sends));
    }
}

/// The length of the packet at the start of `bytes`, if its own headers give it.
fn packet_bytes(bytes: &[u8]) -> Option<usize> {
    let padding = usize::from(bytes.get(1)? >> 4 & 3);
    match *bytes.first()? {
        opcode::WRITE_ONLY => {
            let payload_bytes = u32::from_be_bytes(array(bytes, BTH + 12)?);
            usize::try_from(payload_bytes).ok()?.checked_add(BTH + RETH + padding + ICRC)
        }
        opcode::SEND_ONLY => Some(BTH + messages::announced_bytes(bytes.get(BTH..)?)? + ICRC),
        opcode::ACKNOWLEDGE => Some(BTH + AETH + ICRC),
        opcode::DENSE => dense::packet_bytes(bytes),
        _ => None,
    }
}

/// Describes one packet.
fn packet(
    Datagram { bytes, wire_bytes }: Datagram<'_>,
    (source, target): (IpAddr, IpAddr),
    sends: &mut Sends,
) -> Words {
    let Some(header) = array::<BTH>(bytes, 0) else {
        return Words::new("RoCE").number("length", wire_bytes as u64).text("cut", "in its header");
    };
    let [opcode, flags, _, _, _, qpn @ .., _, psn_0, psn_1, psn_2] = header;
    let [qpn_0, qpn_1, qpn_2] = qpn;
    let qpn = u32::from_be_bytes([0, qpn_0, qpn_1, qpn_2]);
    let psn = u32::from_be_bytes([0, psn_0, psn_1, psn_2]);
    let place = Words::new("").hex("qp", qpn, 6).number("psn", psn);
    let name = match opcode_name(opcode) {
        Some(name) => name.to_owned(),
        None => format!("opcode {opcode:#04x}"),
    };
    match opcode {
        opcode::SEND_FIRST | opcode::SEND_MIDDLE | opcode::SEND_LAST | opcode::SEND_ONLY => {
            let padding = usize::from(flags >> 4 & 3);
            let end = wire_bytes.saturating_sub(ICRC + padding);
            let Some(payload) = bytes.get(BTH..end) else {
                return Words::new(name).with(place).text("cut", "by the capture");
            };
            let mut part = |part| sends.part((source, target, qpn), psn, part, payload);
            let message = match opcode {
                opcode::SEND_FIRST => part(Part::First),
                opcode::SEND_MIDDLE => part(Part::Middle),
                opcode::SEND_LAST => part(Part::Last),
                _ => Some(payload.to_vec()),
            };
            match message.as_deref().and_then(messages::words) {
                Some(message) => message.with(place),
                None => Words::new(name).with(place).number("length", payload.len() as u64),
            }
        }
        opcode::WRITE_FIRST
        | opcode::WRITE_ONLY
        | opcode::WRITE_ONLY_IMMEDIATE
        | opcode::READ_REQUEST => Words::new(name).with(place).with(remote(bytes)),
        opcode::READ_RESPONSE_FIRST
        | opcode::READ_RESPONSE_LAST
        | opcode::READ_RESPONSE_ONLY
        | opcode::ATOMIC_ACKNOWLEDGE => Words::new(name).with(place),
        opcode::ACKNOWLEDGE => acknowledgement(bytes, place),
        _ => {
            let payload = wire_bytes.saturating_sub(BTH + ICRC);
            Words::new(name).with(place).number("length", payload as u64)
        }
    }
}

/// Describes the peer's memory that a request addresses.
fn remote(bytes: &[u8]) -> Words {
    let words = Words::new("");
    let Some(reth) = array::<RETH>(bytes, BTH) else { return words.text("cut", "by the capture") };
    let (address, rest) = reth.split_at(8);
    let (rkey, length) = rest.split_at(4);
    let number = |bytes: &[u8]| bytes.iter().fold(0_u64, |sum, &byte| sum << 8 | u64::from(byte));
    words
        .hex("address", number(address), 16)
        .hex("rkey", number(rkey), 8)
        .number("length", number(length))
}

/// Describes an ACK, RNR NAK or NAK by its syndrome.
fn acknowledgement(bytes: &[u8], place: Words) -> Words {
    let Some([syndrome, msn_0, msn_1, msn_2]) = array::<AETH>(bytes, BTH) else {
        return Words::new("ACKNOWLEDGE").with(place).text("cut", "by the capture");
    };
    let msn = u32::from_be_bytes([0, msn_0, msn_1, msn_2]);
    let (kind, value) = (syndrome >> 5, syndrome & 0x1f);
    let words = match (kind, value) {
        (0, _) => Words::new("ACK").with(place),
        (1, timer) => Words::new("RNR NAK").with(place).number("timer", timer),
        (3, 0) => Words::new("NAK").with(place).text("for", "PSN sequence error"),
        (3, 1) => Words::new("NAK").with(place).text("for", "invalid request"),
        (3, 2) => Words::new("NAK").with(place).text("for", "remote access error"),
        (3, 3) => Words::new("NAK").with(place).text("for", "remote operational error"),
        (3, 4) => Words::new("NAK").with(place).text("for", "invalid RD request"),
        (_, _) => Words::new("ACKNOWLEDGE").with(place).hex("syndrome", syndrome, 2),
    };
    words.number("msn", msn)
}

/// The name of an operation, if we know it.
fn opcode_name(opcode: u8) -> Option<&'static str> {
    const RELIABLE_CONNECTED: [&str; 24] = [
        "SEND FIRST",
        "SEND MIDDLE",
        "SEND LAST",
        "SEND LAST with immediate",
        "SEND ONLY",
        "SEND ONLY with immediate",
        "WRITE FIRST",
        "WRITE MIDDLE",
        "WRITE LAST",
        "WRITE LAST with immediate",
        "WRITE ONLY",
        "WRITE ONLY with immediate",
        "READ REQUEST",
        "READ RESPONSE FIRST",
        "READ RESPONSE MIDDLE",
        "READ RESPONSE LAST",
        "READ RESPONSE ONLY",
        "ACKNOWLEDGE",
        "ATOMIC ACKNOWLEDGE",
        "COMPARE SWAP",
        "FETCH ADD",
        "reserved",
        "SEND LAST with invalidate",
        "SEND ONLY with invalidate",
    ];
    match opcode {
        0x64 => Some("UD SEND ONLY"),
        0x65 => Some("UD SEND ONLY with immediate"),
        0x81 => Some("CONGESTION NOTIFICATION"),
        opcode::DENSE => Some("DENSE"),
        _ => RELIABLE_CONNECTED.get(usize::from(opcode)).copied(),
    }
}
