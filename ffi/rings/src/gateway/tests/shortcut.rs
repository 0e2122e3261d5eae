//! Two programs at both ends of a connection, with a gateway in between that they leave out.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::*;
use crate::Shortcut;
use crate::shortcut::Item;

mod everybody_at_once;

/// A program, and the gateway's end of its connection.
struct Party {
    near: OwnedFd,
    gateway: Arc<Gateway>,
    app: OwnedFd,
    program: Application,
}

impl Party {
    fn new() -> Self {
        let Pair { near, gateway, app, program } = Pair::new();
        Self { near, gateway: Arc::new(gateway), app, program }
    }

    /// Asks for the shortcut, and maps it.
    fn join(&mut self) {
        let number = self.program.word(Word::Offered).load(SeqCst);
        let shortcut = Shortcut::map(self.gateway.shortcut_memory().unwrap(), number).unwrap();
        self.program = self.program.with(Some(shortcut));
        self.program.join(self.app.as_fd());
        self.gateway.hear(self.near.as_fd(), false);
    }

    fn writes(&self, bytes: &[u8]) -> usize {
        writes(&self.program, &self.app, bytes)
    }

    fn reads(&self, most: usize) -> Vec<u8> {
        reads(&self.program, &self.app, most)
    }

    fn is_readable(&self) -> bool {
        sees(&self.app, PollFlags::IN, 0) == PollFlags::IN
    }

    fn is_kicked(&self) -> bool {
        let mut room = [0; 100];
        recv(&self.near, &mut room[..], RecvFlags::DONTWAIT).is_ok_and(|(len, _)| len > 0)
    }

    /// What the gateway does for the program when it looks.
    fn serve(&self) {
        if self.gateway.look().wants_token {
            self.gateway.serve(self.near.as_fd());
        }
    }
}

/// What a gateway does with what a program has given it. Returns how many bytes it has read.
fn relay(from: &Party, to: &Party) -> usize {
    relay_held(from, to, &mut Vec::new()).0
}

/// The same; what finds no room is held. Returns how many bytes it has read, and written.
fn relay_held(from: &Party, to: &Party, held: &mut Vec<u8>) -> (usize, usize) {
    let mut bytes = vec![0; 50_000];
    let most = if held.len() < 300_000 { bytes.len() } else { 0 };
    let read = |span: &Span<'_>| out(span, &mut bytes);
    let read = from.gateway.read(from.near.as_fd(), most, read).unwrap_or(0);
    held.extend(&bytes[..read]);
    if held.is_empty() {
        return (read, 0);
    }
    let put = to.gateway.write(to.near.as_fd(), |span| into(span, held)).unwrap_or(0);
    held.drain(..put);
    (read, put)
}

fn offered() -> [Party; 2] {
    let parties = [Party::new(), Party::new()];
    Gateway::offer_shortcut(&parties[0].gateway, &parties[1].gateway, 0);
    parties
}

fn joined() -> [Party; 2] {
    let mut parties = offered();
    parties.iter_mut().for_each(Party::join);
    parties
}

#[test]
fn a_program_that_has_used_its_connection_asks_once() {
    let parties = [Party::new(), Party::new()];
    let [one, other] = &parties;
    assert_eq!((one.program.wants_shortcut(|| 7), one.gateway.has_shortcut()), (None, false));
    assert!(one.gateway.shortcut_memory().is_err());
    Gateway::offer_shortcut(&one.gateway, &other.gateway, 2);
    let asked: Vec<_> = (0..9).filter_map(|_| one.program.wants_shortcut(|| 7)).collect();
    assert_eq!((asked, other.program.wants_shortcut(|| 7)), (vec![1], None));
    // Of two processes one might not reach the gateway.
    assert!((0..9).all(|_| other.program.wants_shortcut(|| 8).is_none()));
    assert!(!other.gateway.has_shortcut(), "it is made when somebody asks");
    assert!(one.gateway.shortcut_memory().is_ok() && other.gateway.has_shortcut());
    assert!(Arc::ptr_eq(&one.gateway.other_end().unwrap(), &other.gateway));
}

/// What was written before comes by the gateway, and nothing passes it.
#[test]
fn no_byte_passes_another() {
    let [mut one, mut other] = offered();
    one.join();
    assert_eq!(one.writes(b"first "), 6);
    other.join();
    assert_eq!((one.writes(b"second "), one.writes(b"third")), (7, 5));
    assert_eq!((other.program.readable(), other.reads(99)), (0, vec![]));
    assert_eq!((one.program.unsent(), one.program.room()), (6, RING_LEN - 12));
    assert_eq!(relay(&one, &other), 6);
    assert_eq!(relay(&one, &other), 0, "the gateway has no more");
    assert_eq!((other.program.readable(), other.program.arrived()), (18, 18));
    let mut room = [0_u8; 15];
    let part = iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
    // SAFETY: the part is a live exclusive slice.
    assert_eq!(unsafe { other.program.read(other.app.as_fd(), &[part], true) }, 15);
    assert_eq!(&room, b"first second th", "a look across both");
    assert_eq!(other.reads(3), b"fir");
    assert_eq!(other.reads(9), b"st second");
    assert_eq!((other.reads(99), other.program.readable()), (b" third".to_vec(), 0));
    assert_eq!((one.program.unsent(), one.gateway.readable()), (0, Ok(0)));
    // The other direction has not turned before.
    assert_eq!(other.writes(b"back"), 4);
    assert_eq!(one.reads(99), b"back");
    assert_eq!((one.gateway.short_totals(), other.gateway.short_totals()), ((12, 4), (4, 12)));
}

#[test]
fn bytes_wrap() {
    let [one, other] = joined();
    let mut at = 0;
    for len in [1, 1000, 100_000, 131_072, 7, 99_999, 40_000, 131_071] {
        assert_eq!(one.writes(&pattern(at, len)), len);
        assert_eq!(other.reads(len + 5), pattern(at, len));
        at += len;
    }
    assert_eq!(other.gateway.short_totals(), (0, at as u64));
}

/// To every kind of poll the socket must look as if the bytes went by it.
#[test]
fn who_sleeps_gets_a_token_and_who_looks_gets_none() {
    let [one, other] = joined();
    [&one, &other].iter().for_each(|it| it.gateway.fall_asleep());
    one.writes(b"abc");
    assert!(one.is_kicked() && !other.is_readable());
    other.serve();
    assert!(other.is_readable() && !other.gateway.look().is_any());
    one.gateway.fall_asleep();
    one.writes(b"def");
    assert!(!one.is_kicked(), "it has a token");
    assert_eq!(other.reads(99), b"abcdef");
    assert!(!other.is_readable());
    other.program.watch();
    one.writes(b"ghi");
    assert!(!one.is_kicked() && !other.gateway.look().is_any(), "it looks");
    assert_eq!(other.reads(1), b"g");
    other.program.cease_to_watch();
    other.program.keep_readable(other.app.as_fd());
    assert!(other.is_kicked(), "it wants a token for the rest");
    other.serve();
    assert!(other.is_readable());
    assert_eq!(other.reads(9), b"hi");
    // While the gateway looks by itself, nobody kicks.
    [&one, &other].iter().for_each(|it| it.gateway.wake_up());
    one.writes(b"j");
    assert!(!one.is_kicked());
    other.serve();
    assert!(other.is_readable());
}

/// Whoever watched was killed, and nobody has kicked: the gateway finds out.
#[test]
fn who_does_not_look_any_more_is_missed() {
    let [one, other] = joined();
    other.program.watch();
    one.writes(b"abc");
    assert!(!one.is_kicked() && !other.gateway.look().is_any());
    assert!(other.gateway.unread_at().is_some());
    other.gateway.miss();
    other.gateway.serve(other.near.as_fd());
    assert!(other.is_readable());
    assert_eq!(other.reads(9), b"abc");
    one.writes(b"def");
    assert!(one.is_kicked(), "nobody watches now");
}

#[test]
fn a_full_ring_makes_the_socket_unwritable_until_half_is_free() {
    let [one, other] = joined();
    let len = RING_LEN as usize;
    assert_eq!(one.writes(&pattern(0, len + 1)), len);
    assert!(one.program.make_unwritable(one.app.as_fd()));
    let writable = || sees(&one.app, PollFlags::OUT, 0) == PollFlags::OUT;
    one.gateway.hear(one.near.as_fd(), false);
    assert!(!writable() && !one.gateway.must_drain());
    other.serve();
    [&one, &other].iter().for_each(|it| it.gateway.fall_asleep());
    other.reads(len / 2 - 1);
    assert!(!other.is_kicked());
    other.reads(1);
    assert!(other.is_kicked() && one.gateway.look().wants_token && one.gateway.must_drain());
    one.gateway.drain(one.near.as_fd());
    one.gateway.serve(one.near.as_fd());
    assert!(writable());
    assert_eq!(one.writes(&pattern(0, len)), len / 2);
    other.serve();
    other.gateway.fall_asleep();
    other.reads(len);
    assert!(!other.is_kicked(), "nobody waits");
}

/// A program that comes by another way than `fork` has the connection, but not the shortcut.
#[test]
fn nobody_reads_or_writes_without_the_shortcut() {
    let [one, other] = joined();
    let (mine, others) = (one.program.with(None), other.program.with(None));
    assert_eq!((mine.lacked_shortcut(), others.lacked_shortcut()), (Some(1), Some(2)));
    assert!(one.program.lacked_shortcut().is_none());
    assert_eq!(one.writes(b"abc"), 3);
    assert!(others.has_news() && others.spin(|| false));
    assert_eq!(mine.write_slice(one.app.as_fd(), b"def", thread()), Err(Held::Unmapped));
    assert_eq!(other.reads(9), b"abc");
}

/// TCP answers bytes for nobody by a reset.
#[test]
fn bytes_for_a_program_that_is_gone_are_noticed() {
    let [one, other] = joined();
    let Party { near, gateway, app, program } = other;
    let lost = || gateway.has_lost_bytes(near.as_fd());
    // A token lies there that nobody will take.
    one.writes(b"a");
    gateway.serve(near.as_fd());
    assert_eq!(reads(&program, &app, 1), b"a");
    one.writes(b"b");
    gateway.serve(near.as_fd());
    drop(app);
    assert!(!lost(), "nobody has heard of it");
    gateway.hear(near.as_fd(), true);
    assert!(lost() && gateway.has_dropped_bytes(near.as_fd()));
    one.gateway.fall_asleep();
    one.writes(b"c");
    assert!(one.is_kicked() && gateway.look().wants_token && lost());
    assert!(!gateway.look().wants_token, "it is news once");
}

/// A thread that began before there was a shortcut says nothing of what it changes.
#[test]
fn what_was_not_said_is_said_before_anybody_sleeps() {
    let [one, other] = joined();
    let (mine, theirs) = (other.program.shortcut().unwrap(), one.program.shortcut().unwrap());
    for item in [Item::Watched, Item::Token, Item::Tail] {
        mine.own(item).store(7, SeqCst);
        assert!(other.reads(9).is_empty(), "and so it goes to sleep");
        assert_eq!(theirs.other(item).load(SeqCst), 0);
        mine.own(item).store(7, SeqCst);
        other.gateway.agree();
        assert_eq!(theirs.other(item).load(SeqCst), 0);
    }
    // One may have a token from before.
    let mut late = offered();
    late[0].join();
    late[1].gateway.send_token(late[1].near.as_fd()).unwrap();
    recv(&late[1].app, &mut [0; 1][..], RecvFlags::empty()).unwrap();
    late[1].program.token_taken();
    late[1].join();
    assert!(!late[0].program.shortcut().unwrap().is_other_attentive());
}

/// Nothing tells of bytes that do not begin, or that nobody can read yet.
#[test]
fn bytes_that_cannot_be_read_are_no_news() {
    let [one, other] = joined();
    other.program.shortcut().unwrap().own(Item::Head).store(9, SeqCst);
    assert!(!one.gateway.look().is_any() && !one.gateway.has_unread());
    assert_eq!((one.program.readable(), one.gateway.unread_at()), (0, None));
}

/// A thread that writes into what room there is must not hide that another one waits.
#[test]
fn who_waits_for_room_is_not_forgotten() {
    let [one, other] = joined();
    let len = RING_LEN as usize;
    one.writes(&pattern(0, len));
    assert!(one.program.make_unwritable(one.app.as_fd()));
    one.gateway.hear(one.near.as_fd(), false);
    other.serve();
    other.reads(10);
    assert_eq!(one.writes(b"more"), 4);
    [&one, &other].iter().for_each(|it| it.gateway.fall_asleep());
    other.reads(len / 2 + 10);
    assert!(other.is_kicked());
}

/// It may be gone before there is a shortcut.
#[test]
fn an_end_that_came_before_the_offer_counts() {
    let [one, other] = [Party::new(), Party::new()];
    other.gateway.hear(other.near.as_fd(), true);
    Gateway::offer_shortcut(&one.gateway, &other.gateway, 0);
    assert_eq!(one.program.word(Word::Abandoned).load(SeqCst), 1);
    assert_eq!(other.program.word(Word::Abandoned).load(SeqCst), 0);
}

#[test]
fn what_is_no_shortcut_is_not_mapped() {
    let [one, _other] = joined();
    let memory = one.gateway.shortcut_memory().unwrap();
    for number in [0, 3, u32::MAX] {
        assert!(Shortcut::map(memory, number).is_err());
    }
    assert!(Shortcut::map(one.gateway.memory(), 1).is_ok(), "it has the same length");
    let file = std::fs::File::open("/dev/null").unwrap();
    assert!(Shortcut::map(file.as_fd(), 1).is_err());
}

/// The other program writes into the shortcut whatever it likes.
#[test]
fn a_hostile_program_sends_nonsense_at_worst() {
    let [one, other] = joined();
    let theirs = other.program.shortcut().unwrap();
    let values = [0, 1, 7, RING_LEN - 1, RING_LEN, RING_LEN + 1, 1 << 31, u32::MAX];
    let items = [
        Item::Head,
        Item::Tail,
        Item::Watched,
        Item::Token,
        Item::Blocked,
        Item::Ready,
        Item::Open,
        Item::Start,
    ];
    for value in values {
        for item in items {
            // Its own words, and those of its victim.
            theirs.own(item).store(value, SeqCst);
            theirs.other(item).store(value, SeqCst);
            let bytes = one.reads(2 * RING_LEN as usize);
            assert!(bytes.len() <= RING_LEN as usize && one.program.readable() <= RING_LEN);
            let written = one.writes(&pattern(0, 2 * RING_LEN as usize));
            assert!(written <= RING_LEN as usize && one.program.room() <= RING_LEN);
            one.program.make_unwritable(one.app.as_fd());
            for party in [&one, &other] {
                party.gateway.hear(party.near.as_fd(), false);
                party.gateway.look();
                party.gateway.serve(party.near.as_fd());
                party.gateway.has_lost_bytes(party.near.as_fd());
            }
        }
    }
}

/// Neither the other program nor the gateway may be held up by words that change all the time.
#[test]
fn nobody_waits_for_words_to_stand_still() {
    let [one, other] = joined();
    let (theirs, is_over) = (other.program.shortcut().unwrap(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let changes = |word: &AtomicU32| {
            while !is_over.load(SeqCst) {
                word.fetch_add(1, SeqCst);
            }
        };
        for item in [Item::Token, Item::Watched, Item::Tail] {
            // The victim's side.
            scope.spawn(move || changes(theirs.other(item)));
        }
        let program = other.program;
        scope.spawn(move || changes(program.word(Word::Spinning)));
        for _ in 0..10_000 {
            assert!(one.reads(9).is_empty());
            other.gateway.agree();
            other.gateway.serve(other.near.as_fd());
        }
        is_over.store(true, SeqCst);
    });
}

/// What is left in the socket must come out when there is room, whoever has forgotten to say so.
#[test]
fn room_is_noticed_whoever_waits_for_it() {
    let [one, other] = joined();
    let len = RING_LEN as usize;
    one.writes(&pattern(0, len));
    // Filler of somebody who found no room before there was a shortcut.
    send(&one.app, &[0; FILLER_LEN], SendFlags::DONTWAIT).unwrap();
    one.gateway.hear(one.near.as_fd(), false);
    other.serve();
    [&one, &other].iter().for_each(|it| it.gateway.fall_asleep());
    other.reads(len / 2 + 1);
    assert!(other.is_kicked() && one.gateway.must_drain());
    one.gateway.drain(one.near.as_fd());
    assert!(one.gateway.look().wants_token, "nobody waits any more");
    one.gateway.serve(one.near.as_fd());
    assert!(!one.gateway.look().is_any());
}
