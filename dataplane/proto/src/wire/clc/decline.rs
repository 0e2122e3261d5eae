//! CLC Decline and its diagnosis codes (RFC A.2.5).
//!
//! ```text
//!   0     8         16          20         24    28
//!   | hdr | peer id | diagnosis | reserved | eye |
//! ```
//! Every peer takes this form. Whoever proposes in version 2 may get the longer one of
//! [`v2`](super::v2), which tells more.

use core::ops::Range;

use super::{EYECATCHER, EncodedFrame, FLAG, TRAILER_LEN, VERSION, field as header_field, kind};
use crate::vocabulary::PeerId;
use crate::wire::{Malformed, array, flag_if, put, u32_at};

/// Length of the message in bytes.
// RFC 7609 A.2.5 #1: Decline: type 4, 28 bytes
pub const LEN: usize = 28;

mod field {
    use super::{LEN, Range, TRAILER_LEN};

    // RFC 7609 A.2.5 #4: Decline's peer id at byte 8
    pub(super) const PEER_ID: Range<usize> = 8..16;
    // RFC 7609 A.2.5 #5: Decline's diagnosis at byte 16
    pub(super) const DIAGNOSIS: Range<usize> = 16..20; // 20..24 is reserved
    const _: () = assert!(DIAGNOSIS.end + 4 + TRAILER_LEN == LEN);
}

/// Why a peer declined, as it travels in CLC Decline.
///
/// The space is open: a code we do not know is carried and logged, never rejected. It is not even
/// stable: older kernels meant "IPsec in use" by the code that newer ones use for `NO_DEVICE`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Diagnosis(pub u32);

code_points! {
    Diagnosis {
        /// No memory for an RMB or a queue pair.
        OUT_OF_MEMORY = 0x0101_0000,
        /// More rendezvous at once than the host takes, or it is stopping. Ours alone: other stacks
        /// show the number.
        TOO_BUSY = 0x0102_0000,
        /// TCP to this peer has been faster of late, and the operator prefers what is. Ours alone:
        /// other stacks show the number.
        TCP_IS_FASTER = 0x0104_0000,
        /// One of the few connections that stay TCP so that SMC-R can be compared with it. Ours
        /// alone: other stacks show the number.
        TCP_TO_COMPARE = 0x0104_0001,
        /// The peer was silent for too long.
        TIMED_OUT = 0x0200_0000,
        /// CONFIRM LINK, or its answer, did not come.
        CONFIRM_LINK_TIMED_OUT = 0x0201_0000,
        /// ADD LINK, or its answer, did not come.
        ADD_LINK_TIMED_OUT = 0x0202_0000,
        /// TCP reaches the peer, RoCE did not lately. Ours alone: other stacks show the number.
        NO_ROCE_PATH = 0x0203_0000,
        /// Configuration error.
        CONFIGURATION = 0x0300_0000,
        /// The operator of one side has listed who may be a peer, and the other is not among them.
        /// Ours alone: other stacks show the number.
        PEER_NOT_LISTED = 0x0300_0001,
        /// The connection exceeds a limit of a listener, whose operator lets such connections in
        /// without SMC-R. Ours alone: other stacks show the number.
        OVER_LIMIT = 0x0300_0002,
        /// The peer's SYN did not carry the SMC option.
        NO_SMC_OPTION = 0x0301_0000,
        /// The connection uses IPsec.
        IPSEC = 0x0302_0000,
        /// No device for SMC-R or SMC-D on the path.
        NO_DEVICE = 0x0303_0000,
        /// No device for SMC-D on the path.
        NO_SMC_D_DEVICE = 0x0303_0001,
        /// No device for SMC-R on the path.
        NO_SMC_R_DEVICE = 0x0303_0002,
        /// The platform has no ISM of version 2.
        NO_ISM_V2 = 0x0303_0003,
        /// The Proposal lacks the extension of version 2.
        NO_V2_EXTENSION = 0x0303_0004,
        /// The Proposal lacks the SMC-D extension of version 2.
        NO_SMC_D_V2_EXTENSION = 0x0303_0005,
        /// The Proposal lacks a system EID.
        NO_SEID = 0x0303_0006,
        /// No device for SMC-D of version 2.
        NO_SMC_D_V2_DEVICE = 0x0303_0007,
        /// The peers have no EID in common.
        NO_COMMON_EID = 0x0303_0008,
        /// The peers do not agree on a release of version 2.
        RELEASE = 0x0303_0009,
        /// The peers do not agree on the most connections of a link group.
        MAX_CONNECTIONS = 0x0303_000a,
        /// The peers do not agree on the most links of a link group.
        MAX_LINKS = 0x0303_000b,
        /// One wants SMC-R, the other SMC-D.
        MODE_MISMATCH = 0x0304_0000,
        /// The peer's RMB elements begin with an eye catcher.
        RMBE_EYE_CATCHER = 0x0305_0000,
        /// A socket option that SMC cannot honour, such as fast open.
        UNSUPPORTED_OPTION = 0x0306_0000,
        /// No subnet or IPv6 prefix in common.
        NO_COMMON_SUBNET = 0x0307_0000,
        /// The VLAN of the connection could not be determined.
        VLAN_LOOKUP = 0x0308_0000,
        /// The VLAN could not be registered with the ISM device.
        VLAN_REGISTRATION = 0x0309_0000,
        /// The link group has no active link.
        NO_ACTIVE_LINK = 0x030a_0000,
        /// The link that the server named does not exist.
        SERVER_LINK_NOT_FOUND = 0x030b_0000,
        /// No version of SMC in common.
        VERSION_MISMATCH = 0x030c_0000,
        /// The SMC-D device has no memory buffer left.
        DMB_LIMIT = 0x030d_0000,
        /// No route to the peer's RoCEv2 address.
        NO_ROUTE = 0x030e_0000,
        /// One peer believes that the other is in its subnet, the other does not.
        INDIRECT_MISMATCH = 0x030f_0000,
        /// The server knows a link group that the client does not.
        OUT_OF_SYNC = 0x0400_0000,
        /// The peer declined. Never sent; Linux shows it locally.
        PEER_DECLINED = 0x0500_0000,
        /// Internal error.
        INTERNAL = 0x0999_0000,
        /// An rkey could not be kept.
        RKEY_HANDLING = 0x0999_0001,
        /// The queue pair could not be made ready.
        QUEUE_PAIR_NOT_READY = 0x0999_0002,
        /// Memory could not be registered, or the peer did not confirm its rkey.
        RKEY_REGISTRATION = 0x0999_0003,
    }
}

/// A refusal; TCP goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decline {
    /// S: the receiver believes in a link group that does not exist here.
    pub out_of_sync: bool,
    /// Who declines.
    pub peer_id: PeerId,
    /// Why.
    pub diagnosis: Diagnosis,
}

impl Decline {
    /// Decodes one framed message, of either version.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        if !bytes.ends_with(&EYECATCHER) {
            return Err(Malformed::Trailer);
        }
        Ok(Self {
            // RFC 7609 A.2.5 #2: S means out of sync
            out_of_sync: bytes[header_field::VERSION_AND_FLAGS] & FLAG != 0,
            peer_id: PeerId(array(bytes, field::PEER_ID)),
            diagnosis: Diagnosis(u32_at(bytes, field::DIAGNOSIS)),
        })
    }

    pub(super) fn encode(&self) -> EncodedFrame {
        let flags = flag_if(self.out_of_sync, FLAG);
        let mut frame = EncodedFrame::of_version(VERSION, kind::DECLINE, LEN, flags);
        put_fields(&mut frame.bytes, self);
        frame
    }
}

/// Writes what both versions have.
pub(super) fn put_fields(bytes: &mut [u8], decline: &Decline) {
    // RFC 7609 A.2.1 #1: peer id in every CLC message
    put(bytes, field::PEER_ID, &decline.peer_id.0);
    put(bytes, field::DIAGNOSIS, &decline.diagnosis.0.to_be_bytes());
}
