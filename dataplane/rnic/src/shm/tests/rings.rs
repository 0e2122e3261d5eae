//! Rings, from the side of a peer that writes into them whatever it likes.

use std::sync::atomic::Ordering;

use smcr_memory::Region;

use super::super::ring::{Nonsense, Received, Ring, State};
use super::bells;
use crate::{LONG_MESSAGE_MAX, MESSAGE_LEN};

/// Both ends, and their memory.
fn rings() -> (Ring, Ring, Region) {
    let [one, other] = bells();
    let memory = Ring::memory().unwrap();
    let peers = Ring::memory_of_peer(memory.descriptor().unwrap()).unwrap();
    (Ring::new(memory.clone(), true, one), Ring::new(peers, false, other), memory)
}

fn message(n: u64, len: usize) -> Vec<u8> {
    let byte = |at: usize| (n ^ at as u64).to_le_bytes()[0];
    (0..len).map(byte).collect()
}

/// Messages of all lengths, so many that the ring wraps at every place.
#[test]
fn what_goes_in_comes_out_in_order() {
    let (mut sender, mut receiver, _) = rings();
    let lengths = [MESSAGE_LEN, 45, 56, 57, 120, 121, 5_000, LONG_MESSAGE_MAX];
    let (mut sent, mut received) = (0, 0);
    while received < 20_000 {
        let len = lengths[usize::try_from(sent % 61).unwrap() % lengths.len()];
        if sent < 20_000 && sender.has_room(len).unwrap() {
            sender.push(&message(sent, len));
            sent += 1;
            continue;
        }
        assert_eq!(receiver.pop(), Ok(None), "nobody has told it");
        sender.tell();
        while let Some(one) = receiver.pop().unwrap() {
            let len = lengths[usize::try_from(received % 61).unwrap() % lengths.len()];
            let expected = message(received, len);
            match one {
                Received::Short(bytes) => assert_eq!(bytes[..], expected),
                Received::Long(bytes) => assert!(bytes[..] == expected, "{received}"),
            }
            received += 1;
        }
        assert!(!sender.has_room(LONG_MESSAGE_MAX).unwrap() || sent == 20_000 || received == sent);
        receiver.give_back();
        assert!(sender.has_room(LONG_MESSAGE_MAX).unwrap());
    }
}

#[test]
fn a_state_is_seen() {
    let (one, other, memory) = rings();
    assert_eq!((one.state_of_peer(), other.state_of_peer()), (Ok(State::Fine), Ok(State::Fine)));
    one.say(State::Violated);
    assert_eq!(
        (one.state_of_peer(), other.state_of_peer()),
        (Ok(State::Fine), Ok(State::Violated))
    );
    memory.word(CALLER + STATE).store(4, Ordering::Release);
    assert_eq!(other.state_of_peer(), Err(Nonsense));
}

// Where the words of the caller are.
const CALLER: usize = 0;
const TAIL: usize = 0;
const HEAD: usize = size_of::<usize>();
const STATE: usize = 2 * size_of::<usize>();
const SLOTS: usize = 512;
const FIRST_SLOT: usize = 4_096;

/// A tail that is too far ahead, or goes back, would make us read slots that are not filled.
#[test]
fn a_tail_outside_of_the_ring_is_refused() {
    for read in [0, 1, SLOTS - 1, SLOTS, 3 * SLOTS + 7] {
        let (mut hostile, mut victim, memory) = rings();
        for n in 0..read {
            assert!(hostile.has_room(MESSAGE_LEN).unwrap());
            hostile.push(&message(n as u64, MESSAGE_LEN));
            hostile.tell();
            assert!(victim.pop().unwrap().is_some());
            victim.give_back();
        }
        for tail in [read.wrapping_sub(1), read + SLOTS + 1, usize::MAX - 1, usize::MAX / 2] {
            memory.word(CALLER + TAIL).store(tail, Ordering::Release);
            assert_eq!(victim.has_message(), Err(Nonsense), "{tail} after {read}");
            assert_eq!(victim.pop(), Err(Nonsense), "{tail} after {read}");
        }
        // As far as there are slots it may go, whatever is in them.
        memory.word(CALLER + TAIL).store(read + SLOTS, Ordering::Release);
        assert_eq!(victim.has_message(), Ok(true));
    }
}

/// A head that is too far ahead would make us overwrite what was not read, and one that goes back
/// would make us wait for ever.
#[test]
fn a_head_outside_of_the_ring_is_refused() {
    let (_hostile, mut victim, memory) = rings();
    for n in 0..SLOTS {
        assert!(victim.has_room(MESSAGE_LEN).unwrap());
        victim.push(&message(n as u64, MESSAGE_LEN));
    }
    assert_eq!(victim.has_room(MESSAGE_LEN), Ok(false));
    memory.word(CALLER + HEAD).store(1, Ordering::Release);
    assert_eq!(victim.has_room(MESSAGE_LEN), Err(Nonsense), "it was told of nothing");
    victim.tell();
    for head in [SLOTS + 1, usize::MAX, usize::MAX / 2] {
        memory.word(CALLER + HEAD).store(head, Ordering::Release);
        assert_eq!(victim.has_room(MESSAGE_LEN), Err(Nonsense), "{head}");
    }
    memory.word(CALLER + HEAD).store(2, Ordering::Release);
    assert_eq!(victim.has_room(MESSAGE_LEN), Ok(true));
    (0..2).for_each(|_| victim.push(&message(0, MESSAGE_LEN)));
    memory.word(CALLER + HEAD).store(1, Ordering::Release);
    assert_eq!(victim.has_room(MESSAGE_LEN), Err(Nonsense), "it goes back");
}

/// A length that is not that of a message, or of one that was not filled in, would make us read
/// what is not there.
#[test]
fn a_length_that_no_message_has_is_refused() {
    for len in [0, 1, MESSAGE_LEN - 1, 57, LONG_MESSAGE_MAX, LONG_MESSAGE_MAX + 1, usize::MAX] {
        let (mut hostile, mut victim, memory) = rings();
        hostile.push(&message(1, MESSAGE_LEN));
        hostile.tell();
        memory.word(FIRST_SLOT).store(len, Ordering::Relaxed);
        assert_eq!(victim.pop(), Err(Nonsense), "{len}");
    }
}

/// The callee maps what the caller has made, if it is what both mean.
#[test]
fn memory_of_another_length_is_not_that_of_a_ring() {
    for len in [4_096, 1 << 20] {
        let region = Region::shared(len).unwrap();
        assert!(Ring::memory_of_peer(region.descriptor().unwrap()).is_err(), "{len}");
    }
}
