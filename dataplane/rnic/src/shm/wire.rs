//! What the workers of two NICs say to each other, by the sockets of a queue pair.
//!
//! Each message is a packet of a fixed length. Numbers are in the order of this host, as both ends
//! are on it.

use smcr_proto::{Gid, Psn, Qpn, Rkey};

/// Length in bytes of every message.
pub(super) const LEN: usize = 48;

/// One end of a queue pair. The PSN is a random number that only the two ends know: it proves that
/// whoever names it was told of this queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name {
    pub(super) gid: Gid,
    pub(super) qpn: Qpn,
    pub(super) psn: Psn,
}

impl Name {
    /// Whether this end of a queue pair calls the other one, and not the other way round.
    pub(super) fn calls(&self, other: &Self) -> bool {
        (self.gid.0, self.qpn.0) < (other.gid.0, other.qpn.0)
    }
}

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// From the caller: who it is, and whom it looks for. The descriptor of the region with the
    /// rings comes with it.
    Hello { caller: Name, qpn: Qpn, psn: Psn },
    /// The same by another connection, which is to be the bell. Nothing else is said there.
    Bell { caller: Name, qpn: Qpn, psn: Psn },
    /// The callee is there.
    Welcome,
    /// May I have the region of this key?
    Ask(Rkey),
    /// Yes. Peers write its first byte at this address. The descriptor of the region comes with it.
    Grant { rkey: Rkey, address: u64 },
    /// No, and who asks such a thing is no peer of ours any more.
    Refuse(Rkey),
    /// The region of this key must not be written any more.
    Revoke(Rkey),
}

impl Message {
    /// How many descriptors come with it.
    pub(super) fn descriptors(&self) -> usize {
        match self {
            Self::Hello { .. } | Self::Grant { .. } => 1,
            Self::Bell { .. }
            | Self::Welcome
            | Self::Ask(_)
            | Self::Refuse(_)
            | Self::Revoke(_) => 0,
        }
    }

    pub(super) fn encode(&self) -> [u8; LEN] {
        let mut out = [0; LEN];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &FORM.to_ne_bytes());
        match self {
            Self::Hello { caller, qpn, psn } | Self::Bell { caller, qpn, psn } => {
                put(4, &[if matches!(self, Self::Hello { .. }) { 1 } else { 7 }]);
                put(8, &qpn.0.to_ne_bytes());
                put(12, &psn.0.to_ne_bytes());
                put(16, &caller.qpn.0.to_ne_bytes());
                put(20, &caller.psn.0.to_ne_bytes());
                put(24, &caller.gid.0);
            }
            Self::Welcome => put(4, &[2]),
            Self::Ask(rkey) => {
                put(4, &[3]);
                put(8, &rkey.0.to_ne_bytes());
            }
            Self::Grant { rkey, address } => {
                put(4, &[4]);
                put(8, &rkey.0.to_ne_bytes());
                put(16, &address.to_ne_bytes());
            }
            Self::Refuse(rkey) => {
                put(4, &[5]);
                put(8, &rkey.0.to_ne_bytes());
            }
            Self::Revoke(rkey) => {
                put(4, &[6]);
                put(8, &rkey.0.to_ne_bytes());
            }
        }
        out
    }

    /// The message in a packet; `None` if it is none of these, or of a process that has another
    /// form of rings.
    pub(super) fn decode(packet: &[u8]) -> Option<Self> {
        let packet: &[u8; LEN] = packet.try_into().ok()?;
        let number = |at: usize| {
            u32::from_ne_bytes(packet[at..at + 4].try_into().expect("four bytes of a packet"))
        };
        if number(0) != FORM {
            return None;
        }
        let rkey = Rkey(number(8));
        Some(match packet[4] {
            kind @ (1 | 7) => {
                let gid = Gid(packet[24..40].try_into().expect("sixteen bytes of a packet"));
                let caller = Name { gid, qpn: Qpn(number(16)), psn: Psn(number(20)) };
                let (qpn, psn) = (Qpn(number(8)), Psn(number(12)));
                if kind == 1 {
                    Self::Hello { caller, qpn, psn }
                } else {
                    Self::Bell { caller, qpn, psn }
                }
            }
            2 => Self::Welcome,
            3 => Self::Ask(rkey),
            4 => {
                let address = packet[16..24].try_into().expect("eight bytes of a packet");
                Self::Grant { rkey, address: u64::from_ne_bytes(address) }
            }
            5 => Self::Refuse(rkey),
            6 => Self::Revoke(rkey),
            _ => return None,
        })
    }
}

/// The form of messages and rings: the second byte grows with each change. Processes of another
/// word size have other rings.
pub(super) const FORM: u32 = 0x5348_0300 | usize::BITS;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_understood() {
        let caller = Name { gid: Gid([7; 16]), qpn: Qpn(8), psn: Psn(9) };
        let all = [
            Message::Hello { caller, qpn: Qpn(1), psn: Psn(2) },
            Message::Bell { caller, qpn: Qpn(1), psn: Psn(2) },
            Message::Welcome,
            Message::Ask(Rkey(u32::MAX)),
            Message::Grant { rkey: Rkey(3), address: u64::MAX - 1 },
            Message::Refuse(Rkey(4)),
            Message::Revoke(Rkey(5)),
        ];
        for message in all {
            assert_eq!(Message::decode(&message.encode()), Some(message));
        }
        let mut packet = Message::Welcome.encode();
        assert_eq!(Message::decode(&packet[..LEN - 1]), None);
        packet[4] = 0;
        assert_eq!(Message::decode(&packet), None);
        packet[4] = 2;
        packet[0] ^= 1;
        assert_eq!(Message::decode(&packet), None, "another form");
        packet[..4].copy_from_slice(&(0x5348_0200 | usize::BITS).to_ne_bytes());
        assert_eq!(Message::decode(&packet), None, "bells were pipes then");
    }
}
