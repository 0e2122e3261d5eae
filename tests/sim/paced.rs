//! Connections that may carry so many bytes in a second: judged by bytes over virtual time.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use smcr_engine::allowance::Allowance;
use smcr_engine::handoff::Ending;
use smcr_rnic::sim::Odds;

use crate::application::Heard;
use crate::cluster::{Cluster, Side, Transport};
use crate::host::Sizes;
use crate::{KIB, MIB};
use Side::{Client, Server};

/// Bytes in a second.
const RATE: u64 = 1_000_000;
const SECOND: Duration = Duration::from_secs(1);

/// A cluster whose first gateway limits what all of its connections carry together, and each.
fn limited(sizes: Sizes, together: u64, each: u64) -> (Cluster, Arc<Allowance>) {
    let mut cluster = Cluster::new(1, Odds::CALM, sizes);
    let allowance = Arc::new(Allowance::default());
    allowance.set(together, each);
    cluster.host(Client).allowance = Some(Arc::clone(&allowance));
    (cluster, allowance)
}

fn received(cluster: &mut Cluster, side: Side, connections: &[usize]) -> u64 {
    connections.iter().map(|one| cluster.application(side, *one).received()).sum()
}

/// What may arrive in a second at this rate: within a tenth, and the burst at the beginning. Up to
/// one buffer's worth is on its way.
fn about(rate: u64) -> RangeInclusive<u64> {
    rate * 9 / 10 - 40_000..=rate * 11 / 10 + 40_000
}

/// What an operator has limited takes as long as it should, in either direction and whatever the
/// other one carries; and a poller that waits sleeps.
#[test]
fn a_stream_is_as_fast_as_it_may_be() {
    for transport in Transport::BOTH {
        for (together, each) in [(RATE, 0), (0, RATE), (5 * RATE, RATE), (RATE, 5 * RATE)] {
            let (mut cluster, _) = limited(Sizes::USUAL, together, each);
            let one = cluster.connect(transport);
            for side in Side::BOTH {
                cluster.application(side, one).write(4 * MIB);
            }
            cluster.run_for(SECOND);
            for side in Side::BOTH {
                let came = received(&mut cluster, side, &[one]);
                assert!(about(RATE).contains(&came), "{transport:?} {together} {each}: {came}");
            }
            let counters = &cluster.host(Client).counters;
            assert!(counters.paced.get() > 100);
            // A wait lasts a millisecond, and there is one for each direction.
            let turns = counters.turns.get();
            assert!(turns < 20_000, "{transport:?}: {turns} turns");
            cluster.run_for(5 * SECOND);
            for side in Side::BOTH {
                assert_eq!(received(&mut cluster, side, &[one]), 4 * MIB as u64);
                cluster.application(side, one).finish();
            }
            cluster.run_for(SECOND);
            assert!(cluster.closed(one).iter().all(|end| end.ending == Ending::Graceful));
            cluster.assert_nothing_stalls();
            cluster.assert_nothing_is_left();
        }
    }
}

/// Twenty connections of one listener share what it may carry, and none goes short; those of
/// another listener do not notice.
#[test]
fn connections_share_what_their_listener_may_carry() {
    for transport in Transport::BOTH {
        for side in Side::BOTH {
            let (mut cluster, _) = limited(Sizes::USUAL, RATE, 0);
            let limited: Vec<_> = (0..20).map(|_| cluster.connect(transport)).collect();
            cluster.host(Client).allowance = Some(Arc::new(Allowance::default()));
            let free = cluster.connect(transport);
            for one in limited.iter().chain([&free]) {
                cluster.application(side, *one).write(MIB);
            }
            // Nothing of the other listener waits for a timer.
            cluster.run_until_quiet();
            assert_eq!(received(&mut cluster, side.other(), &[free]), MIB as u64);
            cluster.run_for(2 * SECOND);
            let all = received(&mut cluster, side.other(), &limited);
            // Buffers that were filled before somebody had to wait add to what has arrived.
            assert!(about(2 * RATE).contains(&all), "{transport:?} {side:?}: {all}");
            for one in &limited {
                let came = received(&mut cluster, side.other(), &[*one]);
                assert!(came * 20 > all / 2 && came * 20 < all * 2, "{came} of {all}");
            }
        }
    }
}

/// Two RNICs carry connections of one listener. The poller that was asked first took all that they
/// may carry together, and the others' applications heard nothing.
#[test]
fn pollers_share_what_their_listener_may_carry() {
    for rate in [64 * KIB as u64, RATE, 50 * RATE] {
        for side in Side::BOTH {
            let (mut cluster, _) = limited(Sizes { rnics: 2, ..Sizes::USUAL }, rate, 0);
            let first: Vec<_> = (0..3).map(|_| cluster.connect(Transport::Smc)).collect();
            cluster.add_link_between([1, 1]);
            let second = cluster.connect(Transport::Smc);
            for one in first.iter().chain([&second]) {
                cluster.application(side, *one).write(128 * MIB);
            }
            cluster.run_for(2 * SECOND);
            let all = received(&mut cluster, side.other(), &first)
                + received(&mut cluster, side.other(), &[second]);
            for one in first.iter().chain([&second]) {
                let came = received(&mut cluster, side.other(), &[*one]);
                assert!(came * 4 > all / 2 && came * 4 < all * 2, "{side:?}: {came} of {all}");
            }
        }
    }
}

/// Who asks and is answered beside a stream of the same listener waits for its turn, not for the
/// end of the stream; and who has a rate of its own does not wait at all.
#[test]
fn a_question_is_answered_beside_a_stream() {
    for transport in Transport::BOTH {
        for (together, each, most) in [(RATE, 0, 20), (0, RATE, 2)] {
            let (mut cluster, _) = limited(Sizes::USUAL, together, each);
            let [stream, question] = [(), ()].map(|()| cluster.connect(transport));
            cluster.application(Client, stream).write(4 * MIB);
            cluster.run_for(SECOND);
            for count in 1..=20 {
                let asked = cluster.now();
                cluster.application(Client, question).write(64);
                while received(&mut cluster, Server, &[question]) < 64 * count {
                    cluster.run_for(Duration::from_micros(100));
                    let waited = cluster.now().since(asked).as_millis();
                    assert!(waited <= most, "{transport:?}: {waited} ms");
                }
            }
        }
    }
}

/// A limit follows a connection to another poller, also while it waits.
#[test]
fn a_failover_keeps_the_limit() {
    let (mut cluster, _) = limited(Sizes { rnics: 2, ..Sizes::USUAL }, RATE, 0);
    let first = cluster.add_link_between([0, 0]);
    let all: Vec<_> = (0..4).map(|_| cluster.connect(Transport::Smc)).collect();
    cluster.add_link_between([1, 1]);
    for one in &all {
        for side in Side::BOTH {
            cluster.application(side, *one).write(MIB);
        }
    }
    cluster.run_for(SECOND);
    cluster.break_this(first);
    cluster.run_for(SECOND);
    for side in Side::BOTH {
        let came = received(&mut cluster, side, &all);
        assert!(about(2 * RATE).contains(&came), "{side:?}: {came}");
    }
    assert!(cluster.host(Client).sum(|it| it.connections_moved_in.get()) == 4);
    cluster.run_for(4 * SECOND);
    for side in Side::BOTH {
        assert_eq!(received(&mut cluster, side, &all), 4 * MIB as u64, "nobody waits for ever");
    }
}

/// A reload changes what connections may carry that exist already, and those that wait go on.
#[test]
fn a_limit_changes_under_a_stream() {
    for transport in Transport::BOTH {
        let (mut cluster, allowance) = limited(Sizes::USUAL, 0, 0);
        let one = cluster.connect(transport);
        cluster.application(Client, one).write(100 * KIB);
        cluster.run_until_quiet();
        assert_eq!(received(&mut cluster, Server, &[one]), 100 * KIB as u64);
        for (together, each) in [(RATE, 0), (0, RATE)] {
            allowance.set(together, each);
            cluster.run_for(SECOND);
            let before = received(&mut cluster, Server, &[one]);
            cluster.application(Client, one).write(8 * MIB);
            cluster.run_for(SECOND);
            let came = received(&mut cluster, Server, &[one]) - before;
            assert!(about(RATE).contains(&came), "{transport:?}: {came}");
            allowance.set(0, 0);
            cluster.run_for(SECOND);
            let came = received(&mut cluster, Server, &[one]) - before;
            assert_eq!(came, 8 * MIB as u64, "{transport:?}");
        }
    }
}

/// An application that goes away while its bytes wait is noticed, and leaves nothing behind.
#[test]
fn the_end_of_a_stream_does_not_wait_for_ever() {
    for transport in Transport::BOTH {
        for resets in [true, false] {
            let (mut cluster, _) = limited(Sizes::USUAL, 64 * KIB as u64, 0);
            let all: Vec<_> = (0..10).map(|_| cluster.connect(transport)).collect();
            for one in &all {
                cluster.application(Client, *one).write(30 * KIB);
                cluster.application(Server, *one).write(30 * KIB);
            }
            cluster.run_for(SECOND);
            for one in &all {
                match resets {
                    true => cluster.application(Client, *one).reset(),
                    false => {
                        cluster.application(Client, *one).finish();
                        cluster.application(Server, *one).finish();
                    }
                }
            }
            cluster.run_for(if resets { SECOND } else { 10 * SECOND });
            for one in &all {
                assert!(cluster.is_closed(*one), "{transport:?} {resets}");
                let heard = cluster.application(Server, *one).heard();
                assert_eq!(heard, if resets { Heard::Reset } else { Heard::End });
            }
            cluster.assert_nothing_is_left();
        }
    }
}

/// Applications that break off with full buffers use up nothing of what the others may carry.
#[test]
fn resets_cost_the_others_nothing() {
    for transport in Transport::BOTH {
        let (mut cluster, _) = limited(Sizes::USUAL, RATE, 0);
        let stays = cluster.connect(transport);
        cluster.application(Client, stays).write(4 * MIB);
        let others: Vec<_> = (0..20).map(|_| cluster.connect(transport)).collect();
        for one in &others {
            cluster.application(Client, *one).write(MIB);
        }
        cluster.run_for(SECOND);
        for one in &others {
            cluster.application(Client, *one).reset();
        }
        cluster.run_for(SECOND / 10);
        let before = received(&mut cluster, Server, &[stays]);
        cluster.run_for(SECOND);
        let came = received(&mut cluster, Server, &[stays]) - before;
        assert!(about(RATE).contains(&came), "{transport:?}: {came}");
    }
}
