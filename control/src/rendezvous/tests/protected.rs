//! IPsec policies that come while a client is on its way to SMC-R.

use smcr_engine::Report;
use smcr_engine::handoff::{Ending, Tally};

use super::proof::{CLIENT, Policy, SERVER_HOST, Two};
use super::*;

/// The connections of the client that IPsec has kept on TCP.
fn kept_on_tcp(two: &Two) -> Option<u64> {
    two.hosts[CLIENT].endpoint.fallbacks().get(&Diagnosis::IPSEC).copied()
}

/// An operator protects the connections to a server just after a client has proposed. A client that
/// looked at the policies before its Proposal only would write past that protection. So would one
/// that took it for an answer that nobody could say.
// RFC 7609 5.5 #1: no SMC-R under IPsec
#[test]
fn a_policy_that_comes_with_the_accept_counts() {
    for policy in [Policy::WithAccept, Policy::UnknownWithAccept] {
        let mut two = Two::joined();
        two.wait(Duration::from_secs(1));
        two.policy_comes = policy;
        two.call(2);
        assert_eq!((kept_on_tcp(&two), two.became_smc()), (Some(1), [1, 1]), "{policy:?}");
    }
}

/// The server offers an element that another connection of the client still has, so the Confirm
/// waits; and the policy comes meanwhile. The connection that still has it was reset all the same.
// RFC 7609 5.5 #1: no SMC-R under IPsec
#[test]
fn a_policy_that_comes_before_an_element_is_free_counts() {
    for policy in [Policy::Never, Policy::InForce, Policy::Unknown] {
        let mut two = Two::joined();
        (2..=4).for_each(|index| two.call(index));
        assert_eq!(two.became_smc(), [4, 4], "all elements of the RMB are in use");
        // The first connection is over for the server, and its element is the one that is free.
        let (now, server) = (two.now, &mut two.hosts[SERVER_HOST]);
        let (connection, rmbe) = server.relayed.swap_remove(0);
        let (ending, streams) = (Ending::Graceful, [None, None]);
        let (rmbe, settled, tally) = (Some(rmbe), true, Tally::default());
        let kept = false;
        let closed = Report::Closed { connection, ending, tally, rmbe, settled, streams, kept };
        assert!(server.endpoint.reported(now, closed).is_some());
        two.call(5);
        assert_eq!(two.hosts[CLIENT].endpoint.len(), 1, "it waits for the element");
        two.policy_comes = policy;
        two.wait(Duration::from_millis(200));
        let protected = policy != Policy::Never;
        assert_eq!(kept_on_tcp(&two), protected.then_some(1), "{policy:?}");
        let aborted = two.hosts[CLIENT].aborted.len();
        assert_eq!(aborted, if protected { 0 } else { 1 }, "{policy:?}");
        assert_eq!(two.became_smc(), if protected { [4, 4] } else { [5, 5] });
    }
}
