//! Peers that want memory of a gateway rather than service.

use smcr_engine::limits::LLC_UNHEARD_MAX;

use crate::foreign::{LINK, Stage};

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
