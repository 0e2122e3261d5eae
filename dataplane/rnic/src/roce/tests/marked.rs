//! Marks of congested routers.

use super::*;

/// Sends a megabyte in pieces.
fn stream(couple: &mut Couple) {
    let bytes = pattern(50_000, 1);
    for tag in 0..20 {
        couple.write(0, 0, &bytes, tag);
        couple.nodes[0].send([7; 44], 100 + tag);
        couple.run_until_quiet();
    }
    assert_eq!(couple.nodes[1].read(0, bytes.len()), bytes);
    assert_eq!(couple.nodes[1].received.len(), 20);
}

/// A router marks packets rather than dropping them: the sender slows down, and nothing is lost
/// that would have to be sent again.
#[test]
fn a_sender_hears_of_marks_and_loses_nothing() {
    let odds = Odds { mark: Chance::percent(10), ..Odds::default() };
    let mut couple = Couple::new(3, odds);
    stream(&mut couple);
    let (sender, receiver) = (couple.counters(0), couple.counters(1));
    assert!(receiver.marked_in > 50, "{receiver:?}");
    assert!(0 < receiver.cnps_out && receiver.cnps_out <= receiver.marked_in, "{receiver:?}");
    assert_eq!(sender.cnps_in, receiver.cnps_out);
    assert_eq!((sender.retransmits, sender.timeouts), (0, 0));
    assert_eq!((sender.malformed, receiver.malformed), (0, 0));
}

/// A peer whose packets may not be marked, as those of Linux, would not tell us of marks. Ours must
/// not be marked either, lest we crowd out everybody else.
#[test]
fn whoever_does_not_react_gets_packets_that_cannot_be_marked() {
    let odds = Odds { mark: Chance::percent(50), ..Odds::default() };
    let mut couple = Couple::new(3, odds);
    couple.network.clear_ecn();
    stream(&mut couple);
    couple.network.keep_ecn();
    stream_again(&mut couple);
    let counters = [0, 1].map(|node| couple.counters(node));
    assert!(counters.iter().all(|it| (it.marked_in, it.cnps_out) == (0, 0)), "{counters:?}");
}

fn stream_again(couple: &mut Couple) {
    couple.nodes[1].received.clear();
    stream(couple);
}

/// Notices go to whoever sends, even if it is not waited for: a queue pair that only receives has
/// no other reason to do anything.
#[test]
fn a_notice_does_not_wait_for_an_acknowledgement() {
    let odds = Odds { mark: Chance::ALWAYS, ..Odds::default() };
    let mut couple = Couple::new(3, odds);
    couple.nodes[0].send([7; 44], 1);
    couple.turn();
    couple.turn();
    couple.turn();
    assert_eq!((couple.counters(1).cnps_out, couple.counters(1).acks_out), (1, 0));
    couple.run_until_quiet();
    assert_eq!(couple.counters(0).cnps_in, couple.counters(1).cnps_out);
}
