//! Small rings, all of them: every start, every length, every cursor.

use std::format;
use std::vec::Vec;

use super::*;

/// Every ring of up to `capacity` bytes, with and without an eye catcher.
fn rings(capacity: u32) -> impl Iterator<Item = Ring> {
    (1..=capacity)
        .flat_map(|bytes| [Ring::new(bytes), Ring::with_eye_catcher(bytes + EYE_CATCHER_BYTES)])
}

/// The floors worth trying in a ring: the first laps, and those where the wrap count overflows.
fn floors(ring: Ring) -> impl Iterator<Item = Position> {
    let capacity = u64::from(ring.capacity());
    [0, 65_534, 65_535, 131_071, 1 << 40]
        .into_iter()
        .flat_map(move |lap| (0..2 * capacity).map(move |offset| Position(lap * capacity + offset)))
}

/// What the sender of a cursor may mean by it, by definition: every position of the window, under
/// its one name, and under the second name that Linux takes for the beginning of a lap.
fn window(floor: Position, ring: Ring) -> Vec<(Cursor, Position)> {
    let mut names = Vec::new();
    for gained in 0..=u64::from(ring.capacity()) {
        let position = floor + gained;
        let cursor = position.to_cursor(ring);
        names.push((cursor, position));
        if cursor.count == ring.origin() {
            let end = ring.origin() + ring.capacity();
            names.push((Cursor { wrap: cursor.wrap.wrapping_sub(1), count: end }, position));
        }
    }
    names
}

/// A stream goes on unharmed across the end of the ring and across the 65,536th lap, and a peer
/// that announces what it cannot have written is caught, whatever it announces.
// RFC 7609 4.3 #6: count wraps of each cursor
// RFC 7609 4.7.4 #3: count wraps of producer cursor
// RFC 7609 4.7.4 #5: equal cursors, other wrap: full
// RFC 7609 A.4 #13: wrap cursor at element size
// RFC 7609 A.4 #14: wrap count is two bytes
#[test]
fn resolves_the_window_and_nothing_else() {
    for ring in rings(3) {
        for floor in floors(ring) {
            let names = window(floor, ring);
            let lap = floor.to_cursor(ring).wrap;
            for wrap_gained in [0, 1, 2, 3, 32_767, 32_768, 65_533, 65_534, 65_535] {
                let wrap = lap.wrapping_add(wrap_gained);
                for count in 0..ring.origin() + ring.capacity() + 3 {
                    let cursor = Cursor { wrap, count };
                    let expected = names
                        .iter()
                        .find_map(|(name, position)| (*name == cursor).then_some(*position))
                        .ok_or(OutOfWindow);
                    assert_eq!(
                        cursor.resolve(floor, ring),
                        expected,
                        "{cursor:?} {floor:?} {ring:?}"
                    );
                }
            }
        }
    }
}

/// The same with all 65,536 wrap counts, for one ring.
#[test]
fn resolves_no_wrap_count_but_two() {
    let ring = Ring::new(2);
    let floor = Position(2 * 65_535 + 1);
    let names = window(floor, ring);
    let resolved = (0..=u16::MAX)
        .flat_map(|wrap| (0..4).map(move |count| Cursor { wrap, count }))
        .filter_map(|cursor| Some((cursor, cursor.resolve(floor, ring).ok()?)))
        .collect::<Vec<_>>();
    assert_eq!(resolved.len(), names.len());
    assert!(names.iter().all(|name| resolved.contains(name)), "{resolved:?}");
}

/// The cursors of a captured transfer of 300,000 bytes through an element of 64 KiB.
// RFC 7609 A.4 #12: cursors begin and wrap at 0
// RFC 7609 A.4 #13: wrap cursor at element size
#[test]
fn follows_a_linux_writer() {
    let ring = Ring::of_element(RmbeSize::KIB_64, false);
    let mut produced = Position(0);
    for (wrap, count) in [(1, 0), (2, 0), (3, 0), (4, 0), (4, 37_856)] {
        let cursor = Cursor { wrap, count };
        produced = cursor.resolve(produced, ring).unwrap();
        assert_eq!(produced.to_cursor(ring), cursor);
    }
    assert_eq!(produced, Position(300_000));
}

/// With eye catchers the first byte of data is the fifth of the element, in every lap; otherwise
/// the application would read "SMCR" in its stream, or lose four bytes.
#[test]
fn cursors_skip_the_eye_catcher() {
    let ring = Ring::of_element(RmbeSize::KIB_64, true);
    assert_eq!((ring.capacity(), ring.origin()), (65_532, 4));
    assert_eq!(Position(0).to_cursor(ring), Cursor { wrap: 0, count: 4 });
    assert_eq!(Position(65_531).to_cursor(ring), Cursor { wrap: 0, count: 65_535 });
    assert_eq!(Position(65_532).to_cursor(ring), Cursor { wrap: 1, count: 4 });
    assert_eq!(Cursor { wrap: 0, count: 3 }.resolve(Position(0), ring), Err(OutOfWindow));
}

/// No count can make arithmetic overflow, whatever a peer sends and however old the connection is.
#[test]
fn extreme_cursors_are_out_of_window() {
    let ring = Ring::new(16_384);
    for floor in [Position(0), Position(u64::MAX - 16_384), Position(u64::MAX)] {
        for wrap in [0, 1, u16::MAX] {
            let cursor = Cursor { wrap, count: u32::MAX };
            assert_eq!(cursor.resolve(floor, ring), Err(OutOfWindow));
        }
    }
    let last = Position(u64::MAX);
    let next_lap = Cursor { wrap: last.to_cursor(ring).wrap.wrapping_add(1), count: 0 };
    assert_eq!(next_lap.resolve(last, ring), Err(OutOfWindow));
}

/// The offsets of a span, byte by byte, by definition.
fn offsets(ring: Ring, start: u32, len: u32) -> Vec<u32> {
    (0..len).map(|byte| ring.origin() + (start + byte) % ring.capacity()).collect()
}

fn concatenated(pieces: [Range<u32>; 2]) -> Vec<u32> {
    pieces.into_iter().flatten().collect()
}

/// A byte that is in no piece is lost to the stream, one that is in two is sent twice. No byte
/// lands in the eye catcher.
// RFC 7609 4.2 #4: use the element as a ring
// RFC 7609 4.7.4 #1: write wrapped data in two pieces
// RFC 7609 4.7.4 #6: read a full element in order
#[test]
fn pieces_and_halves_cover_a_span_in_order() {
    for ring in rings(6) {
        for start in 0..2 * ring.capacity() {
            for len in 0..=ring.capacity() {
                let span = ring.span(Position(u64::from(start)), len);
                let expected = offsets(ring, start, len);
                assert_eq!(concatenated(span.pieces()), expected);
                assert_eq!((span.len(), span.is_empty()), (len, len == 0));
                for cut in 0..=len {
                    let (first, second) = span.split_at(cut);
                    assert_eq!((first.len(), second.len()), (cut, len - cut));
                    let halves =
                        [concatenated(first.pieces()), concatenated(second.pieces())].concat();
                    assert_eq!(halves, expected);
                }
            }
        }
    }
}

/// The end of a ring is the beginning of the next lap; a piece that begins at the end would be an
/// address outside the peer's element.
#[test]
fn a_full_span_from_the_start_is_one_piece() {
    let span = Ring::new(8).span(Position(16), 8);
    assert_eq!(span.pieces(), [0..8, 0..0]);
    assert_eq!(span.split_at(8).1.pieces(), [0..0, 0..0]);
}

#[test]
fn positions_measure_distances() {
    let mut position = Position(5) + 7;
    position += 3;
    assert_eq!(position.since(Position(5)), 10);
    assert_eq!(position.since_u32(Position(15)), 0);
    assert_eq!(format!("{position:?}"), "Position(15)");
}

#[test]
#[should_panic(expected = "is later than")]
fn distances_are_not_negative() {
    let _ = Position(1).since(Position(2));
}

#[test]
#[should_panic(expected = "3 bytes in a ring of 2")]
fn spans_fit_their_ring() {
    let _ = Ring::new(2).span(Position(0), 3);
}
