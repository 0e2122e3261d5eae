//! RoCEv2 packets: BTH, RETH and AETH (InfiniBand Architecture Specification 9.2, 9.3, 9.7).
//!
//! A packet here is the payload of a UDP datagram: headers, payload, zero to three bytes of
//! padding, and the ICRC, which [`icrc`](super::icrc) computes and checks. All fields are
//! big-endian.

use smcr_proto::{Psn, Qpn, Rkey};

use super::dense::Parts;
use super::psn::PSN_MASK;

/// Length of the base transport header.
pub(super) const BTH_LEN: usize = 12;
/// Length of the RDMA extended transport header.
pub(super) const RETH_LEN: usize = 16;
/// Length of the acknowledge extended transport header.
pub(super) const AETH_LEN: usize = 4;
/// Length of the invariant CRC behind everything else.
pub(super) const ICRC_LEN: usize = 4;
/// Length of an acknowledgement.
pub(super) const ACKNOWLEDGE_LEN: usize = BTH_LEN + AETH_LEN + ICRC_LEN;

/// Why a packet is dropped without an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Malformed {
    /// Shorter than its headers, or not a whole number of words.
    Length,
    /// Not an operation of the reliable connected service, or a response to requests that we never
    /// send.
    Opcode,
    /// A transport header version that is not zero.
    Version,
    /// A partition other than the default one.
    Partition,
}

/// A parsed packet. Its ICRC is not checked yet, so the caller must not trust it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packet<'a> {
    /// The queue pair it is for.
    pub(crate) target: Qpn,
    /// Its sequence number.
    pub(crate) psn: Psn,
    /// The sender requests an acknowledgement.
    pub(crate) ack_request: bool,
    /// Its operation and payload.
    pub(crate) body: Body<'a>,
}

/// The operation and payload of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Body<'a> {
    /// A packet of a message; usually the only one.
    Send {
        /// The message begins with it.
        first: bool,
        /// More packets of this message follow.
        more: bool,
        /// Its bytes.
        payload: &'a [u8],
    },
    /// The first packet of a write, or the only one.
    Write {
        /// Its target.
        reth: Reth,
        /// More packets of this write follow.
        more: bool,
        /// Its first bytes.
        payload: &'a [u8],
    },
    /// The next packet of a write.
    WriteOn {
        /// More packets of this write follow.
        more: bool,
        /// Its next bytes.
        payload: &'a [u8],
    },
    /// Several sends and writes, each with a PSN of its own.
    Dense(Parts<'a>),
    /// An acknowledgement or NAK.
    Acknowledge(Aeth),
    /// A congestion notification packet: routers have marked our packets.
    Congestion,
    /// A request that this NIC does not serve: reads, atomics, immediate data.
    Unserved,
}

/// The RDMA extended transport header (RETH): the target of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reth {
    /// The address of the first byte, in the target's registration.
    pub(crate) address: u64,
    /// The remote key of the target's region.
    pub(crate) rkey: Rkey,
    /// The length of the whole write in bytes.
    pub(crate) len: u32,
}

/// The acknowledge extended transport header (AETH).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Aeth {
    /// Tells acknowledgements and the kinds of NAKs apart.
    pub(crate) syndrome: Syndrome,
    /// How many messages the responder has completed: 24 bits.
    pub(crate) msn: u32,
}

/// The syndrome of an AETH. The code space is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Syndrome(pub(crate) u8);

impl Syndrome {
    /// Acknowledgement: all packets up to this PSN have arrived. It carries no credits.
    pub(super) const ACK: Self = Self(0x1f);
    /// RNR NAK: there is no room for the message with this PSN. Try again in 10 microseconds.
    pub(super) const NOT_READY: Self = Self(0x21);
    /// NAK: an earlier packet is missing. The responder expects this PSN.
    pub(super) const SEQUENCE_ERROR: Self = Self(0x60);
    /// NAK: the request breaks the rules of the transport.
    pub(super) const INVALID_REQUEST: Self = Self(0x61);
    /// NAK: the request addresses memory that it may not access.
    pub(super) const ACCESS_ERROR: Self = Self(0x62);
    /// NAK: the responder failed to execute the request.
    pub(super) const OPERATION_ERROR: Self = Self(0x63);
}

/// The base transport header (BTH) of a packet to be built.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bth {
    /// The operation.
    pub(super) opcode: u8,
    /// The solicited event bit, which wakes the receiver. It is set in the last packet of each
    /// message, since Linux arms its completion queue for solicited completions only.
    pub(super) solicited: bool,
    /// Bytes of payload, which determine the padding.
    pub(super) payload_len: usize,
    /// The queue pair it is for.
    pub(crate) target: Qpn,
    /// Request an acknowledgement.
    pub(crate) ack_request: bool,
    /// Its sequence number.
    pub(crate) psn: Psn,
}

/// The first packet of a message of several.
pub(super) const SEND_FIRST: u8 = 0x00;
/// A packet of a message, neither first nor last.
pub(super) const SEND_MIDDLE: u8 = 0x01;
/// The last packet of a message of several.
pub(super) const SEND_LAST: u8 = 0x02;
/// A message in one packet.
pub(super) const SEND_ONLY: u8 = 0x04;
/// The first packet of a write of several.
pub(super) const WRITE_FIRST: u8 = 0x06;
/// A packet of a write, neither first nor last.
pub(super) const WRITE_MIDDLE: u8 = 0x07;
/// The last packet of a write of several.
pub(super) const WRITE_LAST: u8 = 0x08;
/// A write in one packet.
pub(super) const WRITE_ONLY: u8 = 0x0a;
/// An acknowledgement or NAK.
pub(super) const ACKNOWLEDGE: u8 = 0x11;
/// A congestion notification packet.
pub(super) const CONGESTION: u8 = 0x81;
/// Several requests in one packet: the first of the opcodes for manufacturers.
pub(super) const DENSE: u8 = 0xc0;
/// Zeros between BTH and ICRC of a congestion notification packet.
const CONGESTION_REST_LEN: usize = 16;
/// Length of a congestion notification packet.
pub(super) const CONGESTION_LEN: usize = BTH_LEN + CONGESTION_REST_LEN + ICRC_LEN;

/// Length in bytes of a packet with `headers` bytes before `payload` bytes, including padding and
/// ICRC.
pub(super) const fn packet_len(headers: usize, payload: usize) -> usize {
    headers + payload.next_multiple_of(4) + ICRC_LEN
}

/// Length of a packet that [`build_probe`] builds.
pub(super) fn probe_len(payload: u32) -> usize {
    packet_len(BTH_LEN + RETH_LEN, payload as usize)
}

/// Builds a path MTU probe without its ICRC: a write with the PSN of an earlier packet, which the
/// responder acknowledges as a duplicate but does not execute. If it did, the rkey would give it
/// access to nothing.
pub(super) fn build_probe((target, psn): (Qpn, Psn), payload: u32, out: &mut [u8]) {
    let header = Bth {
        opcode: WRITE_ONLY,
        solicited: false,
        payload_len: payload as usize,
        target,
        ack_request: true,
        psn,
    };
    out[..BTH_LEN].copy_from_slice(&header.encode());
    let reth = Reth { address: 0, rkey: Rkey(0), len: payload };
    out[BTH_LEN..BTH_LEN + RETH_LEN].copy_from_slice(&reth.encode());
    out[BTH_LEN + RETH_LEN..].fill(0);
}

/// Builds a congestion notification packet (CNP) for a queue pair, without its ICRC (IBTA A17.9.3).
pub(super) fn build_congestion(target: Qpn, out: &mut [u8]) {
    let header = Bth {
        opcode: CONGESTION,
        solicited: false,
        payload_len: 0,
        target,
        ack_request: false,
        psn: Psn(0),
    };
    out.fill(0);
    out[..BTH_LEN].copy_from_slice(&header.encode());
    out[MARKS_AT] = BACKWARD_MARK;
}

impl<'a> Packet<'a> {
    /// Parses `bytes`, which reach from the BTH to the ICRC.
    pub(crate) fn parse(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let (bth, rest) = bytes.split_first_chunk::<BTH_LEN>().ok_or(Malformed::Length)?;
        let [opcode, flags, pkey_high, pkey_low, _, q2, q1, q0, ack, p2, p1, p0] = *bth;
        if bytes.len() < BTH_LEN + ICRC_LEN || !bytes.len().is_multiple_of(4) {
            return Err(Malformed::Length);
        }
        if flags & 0x0f != 0 {
            return Err(Malformed::Version);
        }
        // The top bit tells full from limited members; the default partition is all ones below.
        if u16::from_be_bytes([pkey_high, pkey_low]) & 0x7fff != 0x7fff {
            return Err(Malformed::Partition);
        }
        let pad = usize::from(flags >> 4 & 3);
        Ok(Self {
            target: Qpn(u32::from_be_bytes([0, q2, q1, q0])),
            psn: Psn(u32::from_be_bytes([0, p2, p1, p0])),
            ack_request: ack & 0x80 != 0,
            body: Body::parse(opcode, &rest[..rest.len() - ICRC_LEN], pad)?,
        })
    }
}

impl<'a> Body<'a> {
    /// Parses `rest`, the bytes between BTH and ICRC.
    fn parse(opcode: u8, rest: &'a [u8], pad: usize) -> Result<Self, Malformed> {
        let unpadded = |rest: &'a [u8]| {
            rest.len().checked_sub(pad).map(|len| &rest[..len]).ok_or(Malformed::Length)
        };
        match opcode {
            SEND_FIRST | SEND_MIDDLE | SEND_LAST | SEND_ONLY => Ok(Self::Send {
                first: opcode == SEND_FIRST || opcode == SEND_ONLY,
                more: opcode == SEND_FIRST || opcode == SEND_MIDDLE,
                payload: unpadded(rest)?,
            }),
            WRITE_FIRST | WRITE_ONLY => {
                let (reth, rest) = rest.split_first_chunk().ok_or(Malformed::Length)?;
                let more = opcode == WRITE_FIRST;
                Ok(Self::Write { reth: Reth::parse(reth), more, payload: unpadded(rest)? })
            }
            WRITE_MIDDLE | WRITE_LAST => {
                Ok(Self::WriteOn { more: opcode == WRITE_MIDDLE, payload: unpadded(rest)? })
            }
            ACKNOWLEDGE => match *rest {
                [syndrome, m2, m1, m0] => {
                    let msn = u32::from_be_bytes([0, m2, m1, m0]);
                    Ok(Self::Acknowledge(Aeth { syndrome: Syndrome(syndrome), msn }))
                }
                _ => Err(Malformed::Length),
            },
            CONGESTION if rest.len() == CONGESTION_REST_LEN => Ok(Self::Congestion),
            CONGESTION => Err(Malformed::Length),
            DENSE => Parts::parse(unpadded(rest)?).map(Self::Dense),
            // Sends with immediates; writes with immediates; reads; atomics;
            // sends that invalidate; flush and atomic write.
            0x03 | 0x05 | 0x09 | 0x0b | 0x0c | 0x13 | 0x14 | 0x16 | 0x17 | 0x1c | 0x1d => {
                Ok(Self::Unserved)
            }
            // Responses to reads and atomics, reserved codes, and all other transport services.
            0x0d..=0x10 | 0x12 | 0x15 | 0x18..=0x1b | 0x1e..=0x80 | 0x82..=0xbf | 0xc1..=0xff => {
                Err(Malformed::Opcode)
            }
        }
    }
}

impl Reth {
    /// Reads the header.
    pub(super) fn parse(bytes: &[u8; RETH_LEN]) -> Self {
        let [a7, a6, a5, a4, a3, a2, a1, a0, k3, k2, k1, k0, l3, l2, l1, l0] = *bytes;
        Self {
            address: u64::from_be_bytes([a7, a6, a5, a4, a3, a2, a1, a0]),
            rkey: Rkey(u32::from_be_bytes([k3, k2, k1, k0])),
            len: u32::from_be_bytes([l3, l2, l1, l0]),
        }
    }

    /// Encodes the header.
    pub(super) fn encode(self) -> [u8; RETH_LEN] {
        let mut bytes = [0; RETH_LEN];
        bytes[..8].copy_from_slice(&self.address.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.rkey.0.to_be_bytes());
        bytes[12..].copy_from_slice(&self.len.to_be_bytes());
        bytes
    }
}

impl Aeth {
    /// Encodes the header.
    pub(super) fn encode(self) -> [u8; AETH_LEN] {
        let [_, m2, m1, m0] = self.msn.to_be_bytes();
        [self.syndrome.0, m2, m1, m0]
    }
}

impl Bth {
    /// Encodes the header. It sets MigReq, as host channel adapters do, and the default partition.
    pub(super) fn encode(self) -> [u8; BTH_LEN] {
        let [_, q2, q1, q0] = self.target.0.to_be_bytes();
        let [_, p2, p1, p0] = (self.psn.0 & PSN_MASK).to_be_bytes();
        let pad = [0x00, 0x30, 0x20, 0x10][self.payload_len % 4];
        let flags = u8::from(self.solicited) << 7 | MIGRATION_STATE | pad;
        let ack = u8::from(self.ack_request) << 7;
        [self.opcode, flags, 0xff, 0xff, 0, q2, q1, q0, ack, p2, p1, p0]
    }
}

/// Where the BTH has the marks of congestion.
const MARKS_AT: usize = 4;
/// The BECN bit: the way there is congested.
const BACKWARD_MARK: u8 = 0x40;
/// The MigReq bit of BTH.
const MIGRATION_STATE: u8 = 0x40;

#[cfg(test)]
mod tests {
    use super::*;

    /// Captured from Linux `rdma_rxe`: WRITE_ONLY of five bytes.
    const RXE_WRITE: &str = "0a30ffff000001238000020400000000000020000000000700000005\
                             00070e151c000000aa5fefa7";

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<_> = hex.chars().filter(char::is_ascii_hexdigit).collect();
        let byte = |pair: &[char]| u8::from_str_radix(&String::from_iter(pair), 16).unwrap();
        digits.chunks(2).map(byte).collect()
    }

    #[test]
    fn reads_a_write_of_linux() {
        let bytes = bytes(RXE_WRITE);
        let packet = Packet::parse(&bytes).unwrap();
        assert_eq!((packet.target, packet.psn, packet.ack_request), (Qpn(0x123), Psn(0x204), true));
        let Body::Write { reth, more: false, payload } = packet.body else { panic!("{packet:?}") };
        assert_eq!(reth, Reth { address: 0x2000, rkey: Rkey(7), len: 5 });
        assert_eq!(payload, [0, 7, 14, 21, 28]);
    }

    #[test]
    fn writes_what_linux_writes_but_for_the_migration_bit() {
        let wire = bytes(RXE_WRITE);
        let bth = Bth {
            opcode: WRITE_ONLY,
            solicited: false,
            payload_len: 5,
            target: Qpn(0x123),
            ack_request: true,
            psn: Psn(0x204),
        };
        let mut built = bth.encode().to_vec();
        assert_eq!(built[1], 0x70);
        built[1] ^= MIGRATION_STATE;
        built.extend(Reth { address: 0x2000, rkey: Rkey(7), len: 5 }.encode());
        assert_eq!(built, wire[..BTH_LEN + RETH_LEN]);
        assert_eq!(packet_len(BTH_LEN + RETH_LEN, 5), wire.len());
    }

    #[test]
    fn reads_a_not_ready_answer_of_linux() {
        let bytes = bytes("1100ffff000001230000010025000000cf5f4669");
        let packet = Packet::parse(&bytes).unwrap();
        let aeth = Aeth { syndrome: Syndrome(0x25), msn: 0 };
        assert_eq!(packet.body, Body::Acknowledge(aeth));
        assert_eq!(aeth.encode(), bytes[BTH_LEN..BTH_LEN + AETH_LEN]);
    }

    /// As the specification has it: BECN set, PSN zero, sixteen zeros.
    #[test]
    fn a_congestion_notice_reads_back() {
        let mut packet = [0xee; CONGESTION_LEN];
        build_congestion(Qpn(0x123), &mut packet);
        assert_eq!(packet[..BTH_LEN], [0x81, 0x40, 0xff, 0xff, 0x40, 0, 1, 0x23, 0, 0, 0, 0]);
        assert_eq!(packet[BTH_LEN..], [0; 20]);
        let read = Packet::parse(&packet).unwrap();
        assert_eq!((read.target, read.body), (Qpn(0x123), Body::Congestion));
        assert_eq!(Packet::parse(&packet[..28]), Err(Malformed::Length));
    }

    /// Packets that are not for this service are dropped without an answer, so that nobody can make
    /// us send.
    #[test]
    fn drops_foreign_packets() {
        let whole = bytes(RXE_WRITE);
        let with = |at: usize, value: u8| {
            let mut bytes = whole.clone();
            bytes[at] = value;
            bytes
        };
        assert_eq!(Packet::parse(&with(0, 0x81)), Err(Malformed::Length), "congestion notice");
        assert_eq!(Packet::parse(&with(0, 0x64)), Err(Malformed::Opcode), "datagram service");
        assert_eq!(Packet::parse(&with(0, 0x10)), Err(Malformed::Opcode), "read response");
        assert_eq!(Packet::parse(&with(1, 0x31)), Err(Malformed::Version));
        assert_eq!(Packet::parse(&with(2, 0x80)), Err(Malformed::Partition));
        assert!(Packet::parse(&with(2, 0x7f)).is_ok(), "limited members of the partition");
        for len in (0..32).chain([33, 34, 35, 37]) {
            assert_eq!(Packet::parse(&whole[..len]), Err(Malformed::Length), "{len}");
        }
        assert_eq!(Packet::parse(&with(0, 0x0c)).unwrap().body, Body::Unserved);
    }
}
