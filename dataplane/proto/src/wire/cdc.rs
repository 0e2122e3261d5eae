//! The CDC message: two cursors and two flag bytes (RFC A.4).
//!
//! ```text
//!   0    1    2     4       8    10     12      16   18     20      24   25   26       44
//!   | FE | 44 | seq | token | rsv| wrap | count | rsv| wrap | count | f0 | f1 | reserved |
//!                           |---- producer -----|---- consumer -----|
//! ```
//! `f0` is B P U R F and three reserved bits, `f1` is D C A S K and three, from the high bit on. S
//! and K are ours, and zero in what others send (see [`Streams`](crate::connection::Streams)).

use core::ops::Range;

use crate::vocabulary::AlertToken;
use crate::wire::{Malformed, flag_if, put, u16_at, u32_at};

/// Length of the message in bytes.
pub const LEN: usize = 44;

/// The first byte of every CDC message, and of no LLC message.
// RFC 7609 A.4 #1: CDC: type FE, length 44
// RFC 7609 A.3 #5: opcode 11 marks CDC
pub const TYPE: u8 = 0xfe;

mod field {
    use super::{LEN, Range};

    pub(super) const TYPE: usize = 0;
    pub(super) const LENGTH: usize = 1;
    // RFC 7609 A.4 #3: sequence number at byte 2, from 1
    pub(super) const SEQUENCE: Range<usize> = 2..4;
    // RFC 7609 A.4 #8: CDC's alert token at byte 4
    pub(super) const TOKEN: Range<usize> = 4..8; // 8..10 is reserved
    // RFC 7609 A.4 #9: producer cursor at bytes 10, 12
    pub(super) const PRODUCER_WRAP: Range<usize> = 10..12;
    pub(super) const PRODUCER_COUNT: Range<usize> = 12..16; // 16..18 is reserved
    // RFC 7609 A.4 #10: consumer cursor at bytes 18, 20
    pub(super) const CONSUMER_WRAP: Range<usize> = 18..20;
    pub(super) const CONSUMER_COUNT: Range<usize> = 20..24;
    pub(super) const PRODUCER_FLAGS: usize = 24;
    pub(super) const STATE_FLAGS: usize = 25;
    pub(super) const RESERVED: Range<usize> = 26..44;
    const _: () = assert!(RESERVED.end == LEN);
}

mod flag {
    // RFC 7609 A.4 #16: B means sender is blocked
    pub(super) const WRITER_BLOCKED: u8 = 0x80;
    // RFC 7609 A.4 #17: P means urgent data pending
    pub(super) const URGENT_PENDING: u8 = 0x40;
    // RFC 7609 A.4 #18: U means urgent byte before cursor
    pub(super) const URGENT_PRESENT: u8 = 0x20;
    // RFC 7609 A.4 #19: R asks for consumer cursor
    pub(super) const UPDATE_REQUESTED: u8 = 0x10;
    // RFC 7609 A.4 #20: F means failover validation
    pub(super) const FAILOVER_VALIDATION: u8 = 0x08;

    // RFC 7609 A.4 #21: D means sender writes no more
    pub(super) const SENDING_DONE: u8 = 0x80;
    // RFC 7609 A.4 #22: C means sender closed the connection
    pub(super) const CONNECTION_CLOSED: u8 = 0x40;
    // RFC 7609 A.4 #23: A means abnormal end
    pub(super) const ABNORMAL_CLOSE: u8 = 0x20;
    /// The number of the stream, modulo two. Reserved in the RFC.
    pub(super) const ODD_STREAM: u8 = 0x10;
    /// Another stream may follow. Reserved in the RFC.
    pub(super) const KEEPS: u8 = 0x08;
}

/// A cursor as it travels: how often the ring wrapped, and the offset within it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    /// How many times the ring has wrapped, modulo 2^16.
    pub wrap: u16,
    /// Offset in bytes within the element.
    pub count: u32,
}

/// One connection data control message.
// RFC 7609 3.4 #2: CDC describes data and state
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cdc {
    /// Counts messages of the connection; the first is 1, after 65,535 comes 0.
    pub sequence: u16,
    /// The alert token that the receiver chose for this connection.
    pub token: AlertToken,
    /// Where the sender will write next in the receiver's element.
    pub producer: Cursor,
    /// Up to where the sender has consumed its own element.
    pub consumer: Cursor,
    /// B: the sender has bytes that do not fit into the window, or the window is closed.
    pub writer_blocked: bool,
    /// P: urgent data is on its way.
    pub urgent_pending: bool,
    /// U: the byte before the producer cursor is urgent.
    pub urgent_present: bool,
    /// R: answer with your consumer cursor.
    pub update_requested: bool,
    /// F: this message validates a failover and carries no cursors.
    pub failover_validation: bool,
    /// D: the sender writes no more.
    pub sending_done: bool,
    /// C: the connection is closed, and the receiver's element will not be written again.
    pub connection_closed: bool,
    /// A: the connection is reset.
    pub abnormal_close: bool,
    /// S: the stream that D and C are about is the second of its connection, or the fourth, and so
    /// on. Not in the RFC.
    pub odd_stream: bool,
    /// K: the sender keeps the connection for the next stream. Not in the RFC.
    pub keeps: bool,
}

/// Whether a received message is a CDC message; otherwise it is for [`Llc::decode`].
///
/// [`Llc::decode`]: crate::wire::llc::Llc::decode
pub const fn is_cdc(bytes: &[u8; LEN]) -> bool {
    bytes[field::TYPE] == TYPE
}

impl Cdc {
    /// Decodes one received message.
    ///
    /// # Errors
    ///
    /// [`Malformed::UnknownType`] if this is no CDC message, [`Malformed::Length`] if its length
    /// field is not 44.
    pub fn decode(bytes: &[u8; LEN]) -> Result<Self, Malformed> {
        if !is_cdc(bytes) {
            return Err(Malformed::UnknownType(bytes[field::TYPE]));
        }
        if usize::from(bytes[field::LENGTH]) != LEN {
            return Err(Malformed::Length);
        }
        let producer_flag = |bit: u8| bytes[field::PRODUCER_FLAGS] & bit != 0;
        let state_flag = |bit: u8| bytes[field::STATE_FLAGS] & bit != 0;
        Ok(Self {
            sequence: u16_at(bytes, field::SEQUENCE),
            token: AlertToken(u32_at(bytes, field::TOKEN)),
            producer: Cursor {
                wrap: u16_at(bytes, field::PRODUCER_WRAP),
                count: u32_at(bytes, field::PRODUCER_COUNT),
            },
            consumer: Cursor {
                wrap: u16_at(bytes, field::CONSUMER_WRAP),
                count: u32_at(bytes, field::CONSUMER_COUNT),
            },
            writer_blocked: producer_flag(flag::WRITER_BLOCKED),
            urgent_pending: producer_flag(flag::URGENT_PENDING),
            urgent_present: producer_flag(flag::URGENT_PRESENT),
            update_requested: producer_flag(flag::UPDATE_REQUESTED),
            failover_validation: producer_flag(flag::FAILOVER_VALIDATION),
            sending_done: state_flag(flag::SENDING_DONE),
            connection_closed: state_flag(flag::CONNECTION_CLOSED),
            abnormal_close: state_flag(flag::ABNORMAL_CLOSE),
            odd_stream: state_flag(flag::ODD_STREAM),
            keeps: state_flag(flag::KEEPS),
        })
    }

    /// The message as it travels.
    #[must_use]
    pub fn encode(&self) -> [u8; LEN] {
        // RFC 7609 A.4 #26: send reserved CDC bytes as zero
        let mut bytes = [0; LEN];
        bytes[field::TYPE] = TYPE;
        bytes[field::LENGTH] = LENGTH;
        put(&mut bytes, field::SEQUENCE, &self.sequence.to_be_bytes());
        put(&mut bytes, field::TOKEN, &self.token.0.to_be_bytes());
        put(&mut bytes, field::PRODUCER_WRAP, &self.producer.wrap.to_be_bytes());
        put(&mut bytes, field::PRODUCER_COUNT, &self.producer.count.to_be_bytes());
        put(&mut bytes, field::CONSUMER_WRAP, &self.consumer.wrap.to_be_bytes());
        put(&mut bytes, field::CONSUMER_COUNT, &self.consumer.count.to_be_bytes());
        bytes[field::PRODUCER_FLAGS] = flag_if(self.writer_blocked, flag::WRITER_BLOCKED)
            | flag_if(self.urgent_pending, flag::URGENT_PENDING)
            | flag_if(self.urgent_present, flag::URGENT_PRESENT)
            | flag_if(self.update_requested, flag::UPDATE_REQUESTED)
            | flag_if(self.failover_validation, flag::FAILOVER_VALIDATION);
        bytes[field::STATE_FLAGS] = flag_if(self.sending_done, flag::SENDING_DONE)
            | flag_if(self.connection_closed, flag::CONNECTION_CLOSED)
            | flag_if(self.abnormal_close, flag::ABNORMAL_CLOSE)
            | flag_if(self.odd_stream, flag::ODD_STREAM)
            | flag_if(self.keeps, flag::KEEPS);
        bytes
    }
}

/// [`LEN`] as the length field has it.
#[expect(clippy::cast_possible_truncation, reason = "44 fits into a byte")]
const LENGTH: u8 = LEN as u8;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::tests::{assert_reserved, bits, hex};

    /// Sent by an old Linux kernel, published by hwipl/smc-go: the first message of a connection,
    /// announcing 13 bytes. The cursor is 13, not 17: there is no eye catcher in the element.
    const LINUX_FIRST_MESSAGE: &str = "fe 2c 0001 00000003 0000 0000 0000000d";

    // RFC 7609 A.4 #1: CDC: type FE, length 44
    // RFC 7609 A.4 #8: CDC's alert token at byte 4
    // RFC 7609 A.4 #9: producer cursor at bytes 10, 12
    // RFC 7609 A.4 #12: cursors begin and wrap at 0
    // RFC 7609 A.4 #26: send reserved CDC bytes as zero
    // RFC 7609 3.4 #1: CDC messages are SENDs of 44 bytes
    // RFC 7609 3.4 #2: CDC describes data and state
    #[test]
    fn decodes_what_linux_sends() {
        let bytes = hex(LINUX_FIRST_MESSAGE);
        assert!(is_cdc(&bytes));
        let message = Cdc::decode(&bytes).unwrap();
        let expected = Cdc {
            sequence: 1,
            token: AlertToken(3),
            producer: Cursor { wrap: 0, count: 13 },
            ..Cdc::default()
        };
        assert_eq!(message, expected);
        assert_eq!(message.encode(), bytes);
    }

    /// The RFC's letters, one bit each. A flag in another's place would reset a connection whose
    /// peer only half-closed it.
    // RFC 7609 A.4 #16: B means sender is blocked
    // RFC 7609 A.4 #17: P means urgent data pending
    // RFC 7609 A.4 #18: U means urgent byte before cursor
    // RFC 7609 A.4 #19: R asks for consumer cursor
    // RFC 7609 A.4 #20: F means failover validation
    // RFC 7609 A.4 #21: D means sender writes no more
    // RFC 7609 A.4 #22: C means sender closed the connection
    // RFC 7609 A.4 #23: A means abnormal end
    #[test]
    fn every_flag_has_its_bit() {
        let with = |at: usize, bit: u8| {
            let mut bytes = hex(LINUX_FIRST_MESSAGE);
            bytes[at] = bit;
            Cdc::decode(&bytes).unwrap()
        };
        assert!(with(24, 0x80).writer_blocked);
        assert!(with(24, 0x40).urgent_pending);
        assert!(with(24, 0x20).urgent_present);
        assert!(with(24, 0x10).update_requested);
        assert!(with(24, 0x08).failover_validation);
        assert!(with(25, 0x80).sending_done);
        assert!(with(25, 0x40).connection_closed);
        assert!(with(25, 0x20).abnormal_close);
        assert!(with(25, 0x10).odd_stream);
        assert!(with(25, 0x08).keeps);
    }

    // RFC 7609 A.4 #1: CDC: type FE, length 44
    // RFC 7609 A.3 #5: opcode 11 marks CDC
    #[test]
    fn refuses_what_is_no_cdc_message() {
        let mut bytes = hex(LINUX_FIRST_MESSAGE);
        bytes[1] = 43;
        assert_eq!(Cdc::decode(&bytes), Err(Malformed::Length));
        bytes[0] = 0x07;
        assert!(!is_cdc(&bytes));
        assert_eq!(Cdc::decode(&bytes), Err(Malformed::UnknownType(0x07)));
    }

    #[test]
    fn ignores_reserved_bytes() {
        let reserved =
            bits(&[(8..10, 0xff), (16..18, 0xff), (24..25, 0x07), (25..26, 0x07), (26..44, 0xff)]);
        assert_reserved(&hex(LINUX_FIRST_MESSAGE), &reserved, Cdc::decode);
    }

    fn any_cursor() -> impl Strategy<Value = Cursor> {
        any::<(u16, u32)>().prop_map(|(wrap, count)| Cursor { wrap, count })
    }

    prop_compose! {
        fn any_cdc()(
            (sequence, token, flags) in any::<(u16, u32, [bool; 10])>(),
            producer in any_cursor(),
            consumer in any_cursor(),
        ) -> Cdc {
            let [b, p, u, r, f, d, c, a, s, k] = flags;
            Cdc {
                sequence,
                token: AlertToken(token),
                producer,
                consumer,
                writer_blocked: b,
                urgent_pending: p,
                urgent_present: u,
                update_requested: r,
                failover_validation: f,
                sending_done: d,
                connection_closed: c,
                abnormal_close: a,
                odd_stream: s,
                keeps: k,
            }
        }
    }

    proptest! {
        #[test]
        fn survives_the_wire(message in any_cdc()) {
            prop_assert!(is_cdc(&message.encode()));
            prop_assert_eq!(Cdc::decode(&message.encode()), Ok(message));
        }

        /// Whatever a peer sends, it cannot end the process.
        #[test]
        fn decodes_any_bytes(bytes in any::<[u8; LEN]>()) {
            let _ = Cdc::decode(&bytes);
        }
    }
}
