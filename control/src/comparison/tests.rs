use smcr_engine::handoff::Tally;

use super::*;

const T0: Instant = Instant(5_000_000_000);
const SECOND: Duration = Duration::from_secs(1);
const FASTEST: Preference = Preference { fastest: true, compare_every: 50 };
const MILLI: Duration = Duration::from_millis(1);

fn server() -> SocketAddr {
    SocketAddr::from(([10, 8, 0, 2], 7010))
}

/// A connection that has carried 16 MiB in this time, its first answer after this one.
fn sample(first_byte: Duration, time: Duration) -> Sample {
    Sample { first_byte: Some(first_byte), carried: Some((16 << 20, time)) }
}

/// Connections, one each tenth of a second, as fast as `smc` and `tcp` say, until one of the given
/// number was SMC-R. Returns the transport of each.
fn play(
    comparisons: &mut Comparisons,
    now: &mut Instant,
    count: usize,
    (smc, tcp): (Sample, Sample),
) -> Vec<Option<Diagnosis>> {
    let one = |_| {
        *now = *now + SECOND / 10;
        let stays = comparisons.choose(*now, server(), FASTEST);
        let (transport, sample) = match stays {
            None => (Transport::SmcR, smc),
            Some(_) => (Transport::Tcp, tcp),
        };
        comparisons.note((*now, *now), server(), transport, sample);
        stays
    };
    (0..count).map(one).collect()
}

fn share(chosen: &[Option<Diagnosis>], wanted: Option<Diagnosis>) -> usize {
    chosen.iter().filter(|one| **one == wanted).count()
}

/// Where SMC-R is faster, nearly all connections have it; the rest is compared, and nobody whose
/// server has no SMC-R is.
#[test]
fn a_small_share_is_compared() {
    let (mut comparisons, mut now) = (Comparisons::default(), T0);
    for _ in 0..20 {
        comparisons.note((now, now), server(), Transport::Tcp, sample(MILLI, 20 * MILLI));
    }
    assert!(comparisons.rows(now).is_empty());
    let speeds = (sample(MILLI, 10 * MILLI), sample(MILLI, 20 * MILLI));
    let chosen = play(&mut comparisons, &mut now, 1_000, speeds);
    let compared = share(&chosen, Some(Diagnosis::TCP_TO_COMPARE));
    assert_eq!(share(&chosen, None) + compared, 1_000);
    assert!((20..=40).contains(&compared), "{compared}");
    let row = &comparisons.rows(now)[0];
    assert_eq!((row.address.as_str(), row.slower.as_str()), ("10.8.0.2:7010", ""));
    assert_eq!((row.smc.first_byte_ns, row.tcp.first_byte_ns), (1_000_000, 1_000_000));
    assert!(row.smc.bytes_per_s.abs_diff(1_677_721_600) < 20_000, "{row:?}");
}

/// A switch begins to drop RoCE, and later stops: connections notice within seconds, both times.
#[test]
fn what_is_slower_is_left_and_taken_up_again() {
    let (mut comparisons, mut now) = (Comparisons::default(), T0);
    let tcp = sample(MILLI, 20 * MILLI);
    play(&mut comparisons, &mut now, 100, (sample(MILLI, 10 * MILLI), tcp));
    let slow = sample(MILLI, 900 * MILLI);
    let chosen = play(&mut comparisons, &mut now, 50, (slow, tcp));
    assert!(share(&chosen, Some(Diagnosis::TCP_IS_FASTER)) > 30, "{chosen:?}");
    assert_eq!(comparisons.rows(now)[0].slower, "throughput");
    // An hour later, hardly anybody pays for the trials.
    let chosen = play(&mut comparisons, &mut now, 36_000, (slow, tcp));
    assert!(share(&chosen, None) <= 460, "{} trials", share(&chosen, None));
    let chosen = play(&mut comparisons, &mut now, 120, (sample(MILLI, 10 * MILLI), tcp));
    assert!(chosen[100..].iter().all(|one| *one != Some(Diagnosis::TCP_IS_FASTER)), "{chosen:?}");
    assert_eq!(comparisons.rows(now)[0].slower, "");
}

/// An answer that comes late is noticed too, unless SMC-R makes up for it with more bytes per
/// second; and the rendezvous itself, a fraction of a millisecond, is nothing to complain of.
#[test]
fn late_answers_count_unless_more_is_carried() {
    let (fast, level) = (Sample { carried: None, ..sample(MILLI, MILLI) }, MILLI / 2);
    for (smc, tcp, expected) in [
        (sample(40 * MILLI, 20 * MILLI), sample(MILLI, 20 * MILLI), "first byte"),
        (sample(40 * MILLI, 10 * MILLI), sample(MILLI, 20 * MILLI), ""),
        (sample(MILLI, 20 * MILLI), sample(level, 20 * MILLI), ""),
        (Sample { first_byte: Some(9 * MILLI), ..fast }, fast, "first byte"),
    ] {
        let (mut comparisons, mut now) = (Comparisons::default(), T0);
        play(&mut comparisons, &mut now, 60, (smc, tcp));
        assert_eq!(comparisons.rows(now)[0].slower, expected, "{smc:?} and {tcp:?}");
    }
}

/// Applications of all kinds share a server: some download, most chat. Nothing follows from who
/// happened to have which transport.
#[test]
fn a_mixture_of_applications_proves_nothing() {
    for seed in 0..200 {
        let mut dice = smcr_rnic::dice::Dice::new(seed);
        let (mut comparisons, mut now) = (Comparisons::default(), T0);
        for _ in 0..300 {
            now = now + SECOND / 10;
            let chats = dice.below(10) > 0;
            let time = if chats { 3_000 * MILLI } else { 10 * MILLI };
            let stays = comparisons.choose(now, server(), FASTEST);
            assert_ne!(stays, Some(Diagnosis::TCP_IS_FASTER), "seed {seed}");
            let transport = if stays.is_none() { Transport::SmcR } else { Transport::Tcp };
            comparisons.note((now, now), server(), transport, sample(MILLI, time));
        }
    }
}

/// Whoever wants SMC-R has it, and is told.
#[test]
fn who_wants_smc_r_is_only_told() {
    let (mut comparisons, mut now) = (Comparisons::default(), T0);
    let smc = Preference { fastest: false, compare_every: 5 };
    for _ in 0..100 {
        now = now + SECOND / 10;
        let stays = comparisons.choose(now, server(), smc);
        assert_ne!(stays, Some(Diagnosis::TCP_IS_FASTER));
        let (transport, time) = match stays {
            None => (Transport::SmcR, SECOND),
            Some(_) => (Transport::Tcp, MILLI),
        };
        comparisons.note((now, now), server(), transport, sample(MILLI, time));
    }
    assert_eq!(comparisons.rows(now)[0].slower, "throughput");
    let never = Preference { compare_every: 0, ..smc };
    assert!((0..100).all(|_| comparisons.choose(now, server(), never).is_none()));
}

/// What the user of an application thinks about before it asks is not the network's fault.
#[test]
fn thinking_is_not_waiting() {
    let at = |ms: u64| Instant(T0.0 + ms * 1_000_000);
    let tally = |first_in: Option<u64>, first_out: Option<u64>| Tally {
        bytes_in: 1,
        bytes_out: 1 << 20,
        first_in: first_in.map(at),
        first_out: first_out.map(at),
        ended_by: None,
    };
    let sample = |tally: Tally| Sample::of(at(1_000), at(0), at(2), &tally);
    let first = |tally: Tally| sample(tally).first_byte.map(|time| time.as_millis());
    assert_eq!(first(tally(Some(500), Some(503))), Some(5));
    assert_eq!(first(tally(Some(2), Some(3))), Some(3));
    assert_eq!(first(tally(None, Some(7))), Some(7), "the server speaks first");
    assert_eq!(first(tally(Some(9), Some(7))), Some(7));
    assert_eq!(first(tally(Some(9), None)), None);
    let carried = sample(tally(Some(2), Some(500))).carried;
    assert_eq!(carried, Some((1 << 20, Duration::from_millis(500))));
    let few = Tally { bytes_out: 9, ..tally(Some(2), Some(500)) };
    assert_eq!(sample(few).carried, None);
}

/// Whoever reaches many servers costs no more than this, and the newest are remembered.
#[test]
fn few_servers_are_remembered() {
    let mut comparisons = Comparisons::default();
    for index in 0..PEERS_MAX + 10 {
        let peer = SocketAddr::from((u32::try_from(index).unwrap().to_be_bytes(), 1));
        let now = T0 + MILLI * u32::try_from(index).unwrap();
        comparisons.note((now, now), peer, Transport::SmcR, sample(MILLI, MILLI));
    }
    assert_eq!(comparisons.peers.len(), PEERS_MAX);
    let rows = comparisons.rows(T0 + SECOND);
    assert_eq!((rows.len(), rows[0].address.as_str()), (ROWS_MAX, "0.0.4.9:1"));
}

/// A stream from before, and connections that end at last, are no trials: they neither end the
/// verdict nor keep the next trial away.
#[test]
fn only_later_connections_are_trials() {
    let (mut comparisons, mut now) = (Comparisons::default(), T0);
    let (slow, tcp) = (sample(MILLI, SECOND), sample(MILLI, 20 * MILLI));
    play(&mut comparisons, &mut now, 60, (slow, tcp));
    assert_eq!(comparisons.rows(now)[0].slower, "throughput");
    for fast in [MILLI, SECOND] {
        for _ in 0..200 {
            now = now + SECOND / 10;
            comparisons.note((now, T0), server(), Transport::SmcR, sample(MILLI, fast));
        }
        assert_eq!(comparisons.rows(now)[0].slower, "throughput");
        assert_eq!(comparisons.choose(now, server(), FASTEST), None, "a trial is due");
    }
}
