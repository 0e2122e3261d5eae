//! Takes dense packets apart: packets of our RNICs in software with several requests (`dense` in
//! `smcr-rnic`).

use super::frame::{Datagram, array};
use super::layout::{BTH, ICRC, RETH, opcode};

/// The head of a part: opcode, whether another part follows, length.
const HEAD: usize = 4;

/// Where a part ends, and whether another one follows.
fn measure(bytes: &[u8]) -> Option<(usize, bool)> {
    let [opcode, more, l1, l0] = array(bytes, 0)?;
    let reth = if opcode == opcode::WRITE_ONLY { RETH } else { 0 };
    let payload = usize::from(u16::from_be_bytes([l1, l0]));
    Some((HEAD + reth + payload.next_multiple_of(4), more == 1))
}

/// The length of the packet at the start of `bytes`, if it has captured all heads.
pub(super) fn packet_bytes(bytes: &[u8]) -> Option<usize> {
    let mut end = BTH;
    loop {
        let (len, more) = measure(bytes.get(end..)?)?;
        end += len;
        if !more {
            return Some(end + ICRC);
        }
    }
}

/// Calls `show` for each part of a packet, as far as the capture has them, in the form of the
/// packet that it would otherwise be. Returns whether there was one.
pub(super) fn parts(packet: Datagram<'_>, show: &mut dyn FnMut(Datagram<'_>)) -> bool {
    let Some(mut header) = array::<BTH>(packet.bytes, 0).filter(|it| it[0] == opcode::DENSE) else {
        return false;
    };
    let mut any = false;
    let mut rest = &packet.bytes[BTH..];
    while let Some((len, more)) = measure(rest) {
        any = true;
        let padding = rest[3].wrapping_neg() & 3;
        header[0] = rest[0];
        header[1] = header[1] & 0xcf | padding << 4;
        let body = &rest[HEAD..len.min(rest.len())];
        let wire_bytes = BTH + len - HEAD + ICRC;
        let mut bytes = [&header[..], body].concat();
        if body.len() == len - HEAD {
            bytes.resize(wire_bytes, 0);
        }
        show(Datagram { bytes: &bytes, wire_bytes });
        let psn = u32::from_be_bytes([0, header[9], header[10], header[11]]).wrapping_add(1);
        header[9..].copy_from_slice(&psn.to_be_bytes()[1..]);
        rest = rest.get(len..).filter(|_| more).unwrap_or_default();
    }
    any
}
