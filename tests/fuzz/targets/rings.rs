//! What a program does to the memory that it shares with the gateway, and to its socket.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;

use smcgate_rings::{Gateway, RING_LEN, Span};

use super::Input;

/// Lets the gateway read and write, while a program scribbles over all words and fills its socket.
///
/// # Panics
///
/// If the gateway moves more bytes than there can be.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let (near, app) = UnixStream::pair().expect("there are descriptors");
    let gateway = Gateway::create().expect("there are descriptors");
    let memory = File::from(gateway.memory().try_clone_to_owned().expect("there are descriptors"));
    near.set_nonblocking(true).expect("it is a socket");
    app.set_nonblocking(true).expect("it is a socket");
    let mut app = Some(app);
    for _ in 0..STEPS_MAX {
        let Some(step) = input.byte() else { break };
        let socket = near.as_fd();
        match step % 10 {
            0..3 => {
                let (place, value) = (u64::from(input.byte().unwrap_or(0)), input.word());
                memory.write_at(&value.to_ne_bytes(), place % 64 * 64).expect("it is writable");
            }
            3 => {
                let most = usize::from(input.short());
                let mut had = 0;
                let read = gateway.read(socket, most, |span| taken(span, &mut had));
                assert!(had <= most && !read.is_ok_and(|len| len > most));
                if gateway.must_drain() {
                    gateway.drain(socket);
                }
            }
            4 => {
                let mut had = 0;
                let wanted = input.word() as usize;
                let written = gateway.write(socket, |span| taken(span, &mut had).min(wanted));
                assert!(!written.is_ok_and(|len| len > RING_LEN as usize));
            }
            5 => {
                gateway.look();
            }
            6 => {
                gateway.hear(socket, input.byte() == Some(1));
            }
            7 if gateway.is_awake() => gateway.fall_asleep(),
            7 => gateway.wake_up(),
            8 => {
                if input.byte() == Some(1) {
                    gateway.miss();
                }
                gateway.serve(socket);
                gateway.has_dropped_bytes(socket);
            }
            _ if input.byte() == Some(7) => app = None,
            _ => {
                let noise = vec![0; usize::from(input.short())];
                // It may be full, or gone.
                let _ = app.as_ref().map(|mut app| app.write(&noise));
            }
        }
        assert!(!gateway.readable().is_ok_and(|len| len > RING_LEN));
        assert!(!gateway.unread().is_ok_and(|len| len > RING_LEN));
    }
}

fn taken(span: &Span<'_>, had: &mut usize) -> usize {
    *had = span.len();
    assert!(*had <= RING_LEN as usize);
    *had
}

/// Longer inputs find nothing that shorter ones do not.
const STEPS_MAX: usize = 500;
