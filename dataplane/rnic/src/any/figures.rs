//! What NICs of all kinds count.

use super::Fabric;

/// What the fabrics of all kinds count, as far as a kind has such a thing. They count packets since
/// the fabric was created unless they say otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Received, including those that were dropped.
    pub packets_in: u64,
    /// Sent, including those that were sent again.
    pub packets_out: u64,
    /// Sent again.
    pub retransmits: u64,
    /// How often a path turned out to carry larger packets.
    pub path_raised: u64,
    /// How often a path turned out not to carry packets that were sent.
    pub path_lowered: u64,
    /// Congestion notification packets received: routers have marked packets of ours.
    pub cnps_in: u64,
    /// Congestion notification packets sent.
    pub cnps_out: u64,
    /// Dropped because the ICRC was wrong.
    pub icrc_errors: u64,
    /// With a PSN that the peer cannot have used.
    pub psn_errors: u64,
    /// Dropped because they were for no queue pair of their sender.
    pub unknown_qp: u64,
    /// Requests refused because their key or range was wrong.
    pub rkey_errors: u64,
}

impl Fabric {
    /// What it has counted so far.
    pub fn figures(&self) -> Figures {
        match self {
            Self::Roce(fabric) => {
                let counters = fabric.counters();
                Figures {
                    packets_in: counters.packets_in,
                    packets_out: counters.packets_out,
                    retransmits: counters.retransmits,
                    path_raised: counters.path_raised,
                    path_lowered: counters.path_lowered,
                    cnps_in: counters.cnps_in,
                    cnps_out: counters.cnps_out,
                    icrc_errors: counters.icrc_errors,
                    psn_errors: counters.psn_errors,
                    unknown_qp: counters.unknown_qp,
                    rkey_errors: counters.rkey_errors,
                }
            }
            // A message is its packet, and so is a write.
            Self::Shm(fabric) => {
                let counters = fabric.inner().counters();
                Figures {
                    packets_in: counters.messages_in,
                    packets_out: counters.messages_out + counters.writes_out,
                    ..Figures::default()
                }
            }
            // Nobody sees the packets of an RNIC.
            Self::Verbs(_) => Figures::default(),
        }
    }
}
