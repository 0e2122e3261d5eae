//! Why connections stay TCP, in words for an operator.
//!
//! Codes are for machines and for `smcss`. Each has one sentence that says what it means, and one
//! that says what to do.

use smcr_proto::wire::clc::Diagnosis;

/// One code in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Words {
    /// What it means: one sentence.
    pub meaning: &'static str,
    /// What to do about it: one sentence.
    pub remedy: &'static str,
}

/// What a code means and what to do about it. Peers may use codes that we do not know.
pub fn words(code: Diagnosis) -> Words {
    let found = WORDS.iter().find(|(known, _, _)| *known == code);
    let (meaning, remedy) = found.map_or(UNKNOWN, |(_, meaning, remedy)| (meaning, remedy));
    Words { meaning, remedy }
}

const UNKNOWN: (&str, &str) = (
    "The peer declined with a code that this gateway does not know.",
    "Look the code up in the documentation of the peer's system.",
);

// Neither IBM's SMC-D nor its virtual devices exist here, so a peer that misses them wants another
// protocol than ours.
const WANTS_SMC_D: &str = "Switch SMC-R on at the peer; this gateway has no SMC-D.";
const DECLINES: &str = "Read the peer's log or `smcss -a`: it is the peer that decided so.";
const ASK_THE_PEER: &str = "Look at the log of both gateways at the time of the connection; if it \
                            happens again, report it as a defect.";

/// Each code with a name: what it means, what to do.
#[rustfmt::skip]
const WORDS: [(Diagnosis, &str, &str); Diagnosis::ALL.len()] = [
    (Diagnosis::OUT_OF_MEMORY,
     "One side had no memory left for receive buffers (RMBs), or no queue pair.",
     "Raise limits.rmb_bytes, or lower smc.rmbe_size; for RNICs of kind verbs, raise \
      LimitMEMLOCK (`ulimit -l`) too."),
    (Diagnosis::TOO_BUSY,
     "More connections were being set up at once than the gateway takes, or it was stopping.",
     "If it happens in normal operation, raise limits.handshakes_max."),
    (Diagnosis::TCP_IS_FASTER,
     "TCP to this peer has been faster than SMC-R lately, and the listener prefers the faster.",
     "Compare both by smcgate doctor --peer and look for what slows RoCE down; it is tried again."),
    (Diagnosis::TCP_TO_COMPARE,
     "One of the few connections that stay TCP so that SMC-R can be compared with it.",
     "Nothing: this is how the gateway finds out which is faster."),
    (Diagnosis::TIMED_OUT,
     "The peer did not answer during the set-up in time.",
     "Check the load and the log of the peer; smc.handshake_timeout says how long we wait."),
    (Diagnosis::CONFIRM_LINK_TIMED_OUT,
     "The first message over RDMA (CONFIRM LINK) did not arrive.",
     "Let UDP port 4791 pass in both directions between the RNICs, and check routes and MTU."),
    (Diagnosis::ADD_LINK_TIMED_OUT,
     "The peer did not answer when a further link was offered.",
     "Let UDP port 4791 pass on every path between the RNICs, and check the log of the peer."),
    (Diagnosis::NO_ROCE_PATH,
     "TCP reaches the peer, but RDMA packets did not lately, so they are not tried for a while.",
     "Let UDP port 4791 pass in both directions between the RNICs; it is tried again by itself."),
    (Diagnosis::CONFIGURATION,
     "The peer says that its configuration does not allow SMC-R.",
     DECLINES),
    (Diagnosis::PEER_NOT_LISTED,
     "One side lists who may be a peer, and the other is not among them.",
     "If it should be, add it to peers, and its RNICs to gids, of [smc] or of the listener."),
    (Diagnosis::OVER_LIMIT,
     "A limit of the listener was reached, and its over_limit is \"tcp\".",
     "Raise the limit of the listener if such a load is normal."),
    (Diagnosis::NO_SMC_OPTION,
     "The other end does not offer SMC-R: its SYN or SYN-ACK came without the TCP option.",
     "Nothing, if no SMC-R runs there; else run smcgate doctor on both hosts, and look for a \
      firewall that removes TCP option 254."),
    (Diagnosis::IPSEC,
     "IPsec protects this connection, and RDMA would bypass it.",
     "Leave it so, or exempt the traffic between the gateways from the IPsec policy."),
    (Diagnosis::NO_DEVICE,
     "The peer has no RDMA device for this connection.",
     "Give the peer an RNIC on the network over which the connection comes."),
    (Diagnosis::NO_SMC_D_DEVICE,
     "The peer looked for SMC-D and has no device for it.",
     WANTS_SMC_D),
    (Diagnosis::NO_SMC_R_DEVICE,
     "One side has no RNIC for the network over which the connection goes, or none that is up.",
     "See the state of the RNICs; add an [[rnic]] for that network device, or a [[pnet]]."),
    (Diagnosis::NO_ISM_V2,
     "The peer's platform has no SMC-D of version 2.",
     WANTS_SMC_D),
    (Diagnosis::NO_V2_EXTENSION,
     "A proposal lacks the part about SMC version 2.",
     "Let both sides have a version in common: smc.versions here, `smcr ueid` on Linux."),
    (Diagnosis::NO_SMC_D_V2_EXTENSION,
     "A proposal lacks the part about SMC-D of version 2.",
     WANTS_SMC_D),
    (Diagnosis::NO_SEID,
     "A proposal lacks a system EID, which only SMC-D needs.",
     WANTS_SMC_D),
    (Diagnosis::NO_SMC_D_V2_DEVICE,
     "The peer has no device for SMC-D of version 2.",
     WANTS_SMC_D),
    (Diagnosis::NO_COMMON_EID,
     "The two sides belong to no common community (EID).",
     "Give both the same one: smc.eids here, `smcr ueid add` on Linux."),
    (Diagnosis::RELEASE,
     "The two sides do not agree on a release of SMC version 2.",
     "Update the older side."),
    (Diagnosis::MAX_CONNECTIONS,
     "The two sides do not agree on the most connections of a link group.",
     DECLINES),
    (Diagnosis::MAX_LINKS,
     "The two sides do not agree on the most links of a link group.",
     DECLINES),
    (Diagnosis::MODE_MISMATCH,
     "One side wants SMC-R, the other SMC-D.",
     WANTS_SMC_D),
    (Diagnosis::RMBE_EYE_CATCHER,
     "The peer's buffers have a format that this side does not take.",
     DECLINES),
    (Diagnosis::UNSUPPORTED_OPTION,
     "The peer's application set a socket option that SMC-R does not have, such as fast open.",
     "Run the application without that option if the connection shall be accelerated."),
    (Diagnosis::NO_COMMON_SUBNET,
     "SMC-R version 1 needs both sides in one subnet, and they are not.",
     "Use version 2 (smc.versions = [2]), which crosses routers."),
    (Diagnosis::VLAN_LOOKUP,
     "The peer could not find out the VLAN of the connection.",
     DECLINES),
    (Diagnosis::VLAN_REGISTRATION,
     "The peer could not register the VLAN with its device.",
     DECLINES),
    (Diagnosis::NO_ACTIVE_LINK,
     "The link group had no link that works at that moment.",
     "See the states of links and RNICs; new connections make a new group."),
    (Diagnosis::SERVER_LINK_NOT_FOUND,
     "The server named a link that this side does not have.",
     ASK_THE_PEER),
    (Diagnosis::VERSION_MISMATCH,
     "The two sides have no version of SMC in common.",
     "Compare smc.versions of both; Linux speaks version 1 over RoCE v1 only."),
    (Diagnosis::DMB_LIMIT,
     "The peer's SMC-D device has no buffer left.",
     WANTS_SMC_D),
    (Diagnosis::NO_ROUTE,
     "One side has no route to the address of the other's RNIC.",
     "Add a route to it (`ip route get ADDRESS` on both hosts), or give the RNIC another address."),
    (Diagnosis::INDIRECT_MISMATCH,
     "One side believes that the other is in its subnet, and the other does not.",
     "Give the devices of both RNICs the same prefix length."),
    (Diagnosis::OUT_OF_SYNC,
     "The server used a link group that the client no longer has, as after a restart.",
     "Nothing: the server forgets that group, and the next connection makes a new one."),
    (Diagnosis::PEER_DECLINED,
     "The peer declined, without a reason that is known here.",
     DECLINES),
    (Diagnosis::INTERNAL,
     "The peer had an internal error.",
     DECLINES),
    (Diagnosis::RKEY_HANDLING,
     "A key to memory could not be kept.",
     ASK_THE_PEER),
    (Diagnosis::QUEUE_PAIR_NOT_READY,
     "A queue pair could not be connected to that of the peer.",
     "Check that the RNICs reach each other and agree on RoCE version and MTU; the log has more."),
    (Diagnosis::RKEY_REGISTRATION,
     "Memory could not be registered with the RNIC, or the peer did not confirm its key.",
     "Check the limit of locked memory (`ulimit -l`) and the log of the peer."),
];

#[cfg(test)]
mod tests {
    use super::*;

    /// An operator must never read a number without words, and never an empty or endless one.
    #[test]
    fn every_code_has_words() {
        for &code in Diagnosis::ALL {
            let Words { meaning, remedy } = words(code);
            assert_ne!((meaning, remedy), UNKNOWN, "{code:?}");
            for sentence in [meaning, remedy] {
                assert!(sentence.ends_with('.') && sentence.len() < 140, "{code:?}: {sentence}");
                assert!(!sentence.contains("  "), "{code:?}: {sentence}");
            }
        }
        assert_eq!(words(Diagnosis(0x1234)).meaning, UNKNOWN.0);
    }
}
