//! Programs that break the rules, or stop in between.

use super::*;

/// A process that has the socket and not the rings takes it for the stream: a program that was
/// started by `exec` and is linked statically, or one that reads and writes without the library.
#[test]
fn bytes_that_come_by_the_socket_are_not_lost_silently() {
    let pair = Pair::awake();
    send(&pair.app, b"\0\0HTTP", SendFlags::empty()).unwrap();
    pair.gateway.hear(pair.near.as_fd(), false);
    assert!(pair.gateway.look().readable);
    assert_eq!(pair.gateway_reads(9).unwrap_err().kind(), io::ErrorKind::InvalidData);
}

/// If the copy that a signal handler has interrupted never goes on, nobody knows what is in the
/// ring.
#[test]
fn who_cannot_write_for_ever_ends_the_stream() {
    let pair = Pair::awake();
    let write = || pair.program.write_slice(pair.app.as_fd(), b"x", thread());
    pair.gateway.word(Word::Writing).store(thread(), SeqCst);
    let first = write();
    let last = (0..5000).map(|_| write()).find(|result| *result != first);
    assert_eq!((first, last), (Err(Held::ByThisThread), Some(Err(Held::ForEver))));
    pair.gateway.hear(pair.near.as_fd(), false);
    assert_eq!(pair.gateway.readable(), Err(Broken));
}

/// A worker may be killed after it has taken the token, and before it says so. Others wait, too.
#[test]
fn a_token_that_nobody_has_is_given_again() {
    let pair = Pair::awake();
    pair.gateway_writes(b"abc").unwrap();
    recv(&pair.app, &mut [0; 1][..], RecvFlags::empty()).unwrap();
    pair.program.watch();
    pair.gateway.serve(pair.near.as_fd());
    assert_eq!(pair.app_sees(PollFlags::IN), PollFlags::empty(), "he may still say so");
    assert_eq!(pair.gateway.unread_at(), Some(0));
    pair.gateway.miss();
    pair.gateway.serve(pair.near.as_fd());
    assert_eq!(pair.app_sees(PollFlags::IN), PollFlags::IN);
    pair.gateway.serve(pair.near.as_fd());
    assert_eq!(pair.gateway.word(Word::Spinning).load(SeqCst), 0);
    pair.program.cease_to_watch();
    assert_eq!(pair.gateway.word(Word::Spinning).load(SeqCst), 0);
    assert_eq!(recv(&pair.app, &mut [0; 9][..], RecvFlags::empty()).unwrap().0, 1, "one");
}

/// Whatever the application writes into its indexes, it harms its own stream only.
#[test]
fn broken_indexes_are_an_error() {
    let len = RING_LEN;
    for head in [len + 1, u32::MAX, 1 << 31] {
        let pair = Pair::awake();
        pair.gateway.word(Word::SendHead).store(head, SeqCst);
        assert_eq!(pair.gateway.readable(), Err(Broken));
        assert!(pair.gateway.look().readable && !pair.gateway.look().readable, "news once");
        let error = pair.gateway_reads(9).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
    let pair = Pair::awake();
    pair.app_writes(b"abcd");
    assert_eq!(pair.gateway.readable(), Ok(4));
    pair.gateway.word(Word::SendHead).store(3, SeqCst);
    assert_eq!(pair.gateway.readable(), Err(Broken), "it goes back");
    for tail in [1, u32::MAX, len] {
        let pair = Pair::awake();
        pair.gateway.word(Word::ReceiveTail).store(tail, SeqCst);
        assert_eq!(pair.gateway.unread(), Err(Broken));
        let error = pair.gateway_writes(b"x").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}

#[test]
fn only_memory_of_this_kind_is_mapped() {
    let file = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&file, 4096 + 2 * u64::from(RING_LEN)).unwrap();
    assert!(Application::map(file.as_fd()).is_err(), "it can shrink");
    rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::SHRINK).unwrap();
    assert!(Application::map(file.as_fd()).is_err(), "it says nothing");
    let gateway = Gateway::create().unwrap();
    let program = Application::map(gateway.memory()).unwrap();
    // SAFETY: it is mapped.
    let same = unsafe { Application::at(program.place()) }.unwrap();
    same.token_taken();
    // SAFETY: nobody uses it any more.
    unsafe { program.unmap() };
    assert!(Application::fits());
}

/// Another process of the same program may have other rights. It must not make this one reach
/// beyond the memory.
#[test]
fn lengths_are_not_read_again() {
    let pair = Pair::awake();
    let place = pair.program.place();
    let memory = std::fs::File::from(pair.gateway.memory().try_clone_to_owned().unwrap());
    std::os::unix::fs::FileExt::write_at(&memory, &(1_u32 << 24).to_ne_bytes(), 8).unwrap();
    // SAFETY: it is mapped.
    let same = unsafe { Application::at(place) }.unwrap();
    assert_eq!((same.place(), same.room()), (place, RING_LEN));
}
