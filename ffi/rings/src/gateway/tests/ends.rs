//! How a stream ends.

use super::*;

#[test]
fn the_end_comes_behind_the_bytes() {
    let pair = Pair::new();
    pair.app_writes(b"last");
    pair.program.finish(pair.app.as_fd());
    assert_eq!(pair.app_writes(b"more"), 0);
    assert!(pair.program.is_finished() && pair.gateway.look().readable);
    assert_eq!(pair.gateway_reads(2).unwrap(), b"la");
    assert_eq!(pair.gateway_reads(9).unwrap(), b"st");
    assert_eq!(pair.gateway_reads(9).unwrap(), b"");
    // The other direction goes on, and its kicks arrive.
    let len = RING_LEN as usize;
    assert_eq!(pair.gateway_writes(&pattern(0, 2 * len)).unwrap(), len);
    pair.gateway.fall_asleep();
    assert_eq!(pair.app_reads(len).len(), len);
    assert!(pair.gateway.hear(pair.near.as_fd(), false));
    // News of the end comes once.
    assert!(!pair.gateway.look().readable);
}

#[test]
fn a_program_that_is_gone_has_ended_or_left_bytes_unread() {
    for (unread, token, reset) in
        [(0, false, false), (0, true, false), (5, true, true), (5, false, true)]
    {
        let mut pair = Pair::new();
        pair.app_writes(b"last");
        pair.gateway_writes(&pattern(0, 5)).unwrap();
        if !token {
            recv(&pair.app, &mut [0; 1][..], RecvFlags::empty()).unwrap();
        }
        // As a thread does that reads while the token is still on its way.
        pair.gateway.word(Word::ReceiveTail).store(5 - unread, SeqCst);
        pair.app = rustix::fs::memfd_create("other", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        pair.gateway.hear(pair.near.as_fd(), true);
        assert_eq!(pair.gateway.has_dropped_bytes(pair.near.as_fd()), reset);
        assert_eq!(pair.gateway_reads(9).unwrap(), b"last");
        let end = pair.gateway_reads(9).map_err(|error| error.kind());
        let wanted = if reset { Err(io::ErrorKind::ConnectionReset) } else { Ok(Vec::new()) };
        assert_eq!(end, wanted, "{unread} {token}");
    }
}

/// The kernel takes bytes that a socket has not read when it is closed for a reset, also kicks.
#[test]
fn kicks_make_no_reset_of_an_end() {
    let mut pair = Pair::new();
    pair.app_writes(b"x");
    pair.app_writes(b"y");
    pair.gateway_reads(9).unwrap();
    pair.gateway.close(pair.near.as_fd());
    pair.app_writes(b"z");
    pair.near = rustix::fs::memfd_create("other", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    assert_eq!(recv(&pair.app, &mut [0; 1][..], RecvFlags::empty()).unwrap().0, 0);
}

/// TCP still takes what comes for a program that has shut down reading. Only one that is gone makes
/// its peer see a reset.
#[test]
fn shutting_down_reading_does_not_end_the_stream() {
    let mut pair = Pair::awake();
    rustix::net::shutdown(&pair.app, rustix::net::Shutdown::Read).unwrap();
    assert_eq!(pair.gateway_writes(b"late").unwrap(), 4);
    assert_eq!(pair.app_reads(9), b"late");
    pair.app = rustix::fs::memfd_create("other", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    pair.gateway.word(Word::Token).store(0, SeqCst);
    assert_eq!(pair.gateway_writes(b"x").unwrap_err().kind(), io::ErrorKind::BrokenPipe);
}
