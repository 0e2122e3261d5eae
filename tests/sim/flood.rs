//! Peers that want memory of a gateway rather than service.

use std::time::Duration;

use smcr_engine::limits::{
    BACKLOG_BYTES_MAX, FILL_PER_TURN_MAX, FILL_WHILE_CROWDED, LLC_UNHEARD_MAX,
};
use smcr_rnic::sim::Odds;

use crate::cluster::{Cluster, Side, Transport};
use crate::foreign::{LINK, Stage};
use crate::host::Sizes;
use crate::{KIB, MIB};

/// A peer that talks about links faster than anybody can listen, while the control thread is busy
/// with others, gets no memory for it: it loses its link. What an honest peer says is kept.
#[test]
fn a_peer_that_talks_too_much_about_links_loses_its_own() {
    for (count, kept) in [(LLC_UNHEARD_MAX, true), (10_000, false)] {
        let mut stage = Stage::new();
        stage.run();
        stage.host.control_asleep = true;
        stage.flood(count);
        stage.host.control_asleep = false;
        stage.host.turn(stage.now);
        assert_eq!(stage.host.llc.len(), LLC_UNHEARD_MAX);
        assert_eq!(stage.host.broken.contains(&LINK), !kept);
        assert_eq!(stage.host.counters.links_flooded.get(), u64::from(!kept));
        // Who listens in time hears more than that.
        stage.host.llc.clear();
        if kept {
            (0..10).for_each(|_| stage.flood(count));
            assert_eq!((stage.host.llc.len(), stage.host.broken.len()), (10 * count, 0));
        }
    }
}

/// A peer that asks for answers and takes none of them in gets no memory for them either.
#[test]
fn a_peer_that_listens_to_nothing_loses_its_link() {
    let mut stage = Stage::new();
    stage.run();
    for _ in 0..10_000 {
        stage.host.send_llc(LINK, [7; 44]);
        // The peer does not poll, so that nothing is acknowledged.
        stage.host.turn(stage.now);
    }
    assert!(stage.host.broken.contains(&LINK));
    assert_eq!(stage.host.counters.links_flooded.get(), 1);
}

/// A peer that takes nothing in, while applications have much for it, had all of the send pool of
/// a poller: nobody else got a byte until its link broke. It has half of it, and no more of what is
/// left than any other.
#[test]
fn a_peer_that_takes_nothing_in_has_a_share_of_the_send_pool() {
    let sizes = Sizes { rnics: 2, send_chunks: 4, ..Sizes::USUAL };
    let mut cluster = Cluster::new(1, Odds::CALM, sizes);
    let stuck: Vec<usize> = (0..60).map(|_| cluster.connect(Transport::Smc)).collect();
    cluster.add_link_between([0, 1]);
    let late = cluster.connect(Transport::Smc);
    for number in &stuck {
        cluster.application(Side::Client, *number).write(16 * KIB);
    }
    // The first poller of the server does not even know of its link: it acknowledges nothing.
    let turn = |cluster: &mut Cluster| {
        for number in stuck.iter().chain([&late]) {
            for side in Side::BOTH {
                cluster.application(side, *number).act();
            }
        }
        cluster.turn_at(Side::Client, 0);
        cluster.turn_at(Side::Server, 1);
        cluster.pass_time();
    };
    (0..200).for_each(|_| turn(&mut cluster));
    for _ in 0..10 {
        cluster.application(Side::Client, late).write(10 * KIB);
        (0..50).for_each(|_| turn(&mut cluster));
    }
    assert_eq!(cluster.application(Side::Server, late).received(), 100 * KIB as u64);
    let client = cluster.host(Side::Client);
    assert!(client.broken.is_empty(), "nothing was given back");
    let put_off = client.sum(|counters| counters.blocked_on_share.get());
    assert!(put_off > 0, "there was more for it than its share");
    // With thousands that wait, a turn that asked each of them took half a millisecond.
    assert!(put_off <= stuck.len() as u64, "each was put off once, and then waited: {put_off}");
}

/// Who waits for room in the send pool keeps its place, although its application says more all the
/// time: it had lost it by each event, and got nothing while others had something for the link.
#[test]
fn who_waits_for_room_keeps_its_place_when_more_comes() {
    let sizes = Sizes { send_chunks: 2, ..Sizes::USUAL };
    let mut cluster = Cluster::new(1, Odds::CALM, sizes);
    let crowd: Vec<usize> = (0..60).map(|_| cluster.connect(Transport::Smc)).collect();
    let trickling = cluster.connect(Transport::Smc);
    for number in &crowd {
        cluster.application(Side::Client, *number).write(MIB);
    }
    for _ in 0..600 {
        cluster.application(Side::Client, trickling).write(10);
        cluster.step();
        cluster.pass_time();
    }
    let received = cluster.application(Side::Server, trickling).received();
    assert!(received >= 3_000, "it got {received} bytes through of 6,000");
    let put_off = cluster.host(Side::Client).sum(|counters| counters.blocked_on_share.get());
    assert!(put_off > 1_000, "there was room for all: {put_off}");
}

/// What slow readers have not taken waits on the heap of their poller, 128 KiB for each connection
/// and direction. A thousand of them took hundreds of megabytes; now there is an end, behind which
/// all get on in smaller steps.
#[test]
fn slow_readers_take_so_much_memory_together_and_no_more() {
    let sizes = Sizes { socket_bytes: 140_000, ..Sizes::USUAL };
    let mut cluster = Cluster::new(1, Odds::CALM, sizes);
    let count = 250;
    let pairs: Vec<usize> = (0..count).map(|_| cluster.connect(Transport::Tcp)).collect();
    for number in &pairs {
        cluster.application(Side::Server, *number).sleep();
        cluster.application(Side::Client, *number).write(400 * KIB);
    }
    cluster.run_for(Duration::from_secs(1));
    let backlog = |cluster: &Cluster| cluster.hosts[0].counters.backlog_bytes.get();
    let most = BACKLOG_BYTES_MAX + FILL_PER_TURN_MAX as usize + count * FILL_WHILE_CROWDED;
    let held = usize::try_from(backlog(&cluster)).unwrap();
    assert!((BACKLOG_BYTES_MAX..most).contains(&held), "{held}");
    for number in &pairs {
        cluster.application(Side::Server, *number).wake();
    }
    cluster.run_for(Duration::from_secs(1));
    assert_eq!(backlog(&cluster), 0);
    for number in pairs {
        assert_eq!(cluster.application(Side::Server, number).received(), 400 * KIB as u64);
    }
}
