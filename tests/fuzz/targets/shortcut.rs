//! What a program does to the memory that it shares with the program at the other end, and to what
//! it shares with the gateway.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use smcgate_rings::{Gateway, Program, RING_LEN};

use super::Input;

/// One end, as its program and the gateway have it.
struct Party {
    near: UnixStream,
    app: UnixStream,
    gateway: Arc<Gateway>,
    program: Program,
}

/// Lets an honest program read and write, and the gateway look after both, while the other program
/// scribbles over all words that it can reach.
///
/// # Panics
///
/// If more bytes are moved than there can be.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let [honest, hostile] = joined();
    let open = |memory: BorrowedFd<'_>| {
        File::from(memory.try_clone_to_owned().expect("there are descriptors"))
    };
    let between = open(hostile.gateway.shortcut_memory().expect("it was made"));
    let own = open(hostile.gateway.memory());
    let mut room = vec![0; 2 * RING_LEN as usize];
    for _ in 0..STEPS_MAX {
        let Some(step) = input.byte() else { break };
        let party = if input.byte().unwrap_or(0) & 1 == 0 { &honest } else { &hostile };
        let socket = party.near.as_fd();
        match step % 10 {
            0..3 => {
                // The words of both sides of the shortcut.
                let (place, value) = (u64::from(input.byte().unwrap_or(0)), input.word());
                between.write_at(&value.to_ne_bytes(), place % 128 * 4).expect("it is writable");
            }
            3 => {
                let (place, value) = (u64::from(input.byte().unwrap_or(0)), input.word());
                own.write_at(&value.to_ne_bytes(), place % 64 * 64).expect("it is writable");
            }
            4 => {
                let most = usize::from(input.short()) * 8 % room.len();
                let read = honest.program.read(honest.app.as_fd(), &mut room[..most]);
                assert!(read <= most && read <= 2 * RING_LEN as usize);
            }
            5 => {
                let most = usize::from(input.short()) * 8 % room.len();
                let written = honest.program.write(honest.app.as_fd(), &room[..most], THREAD);
                assert!(written.is_ok_and(|written| written <= RING_LEN as usize));
                if input.byte() == Some(1) {
                    honest.program.make_unwritable(honest.app.as_fd());
                }
            }
            6 => {
                party.gateway.look();
                party.gateway.agree();
            }
            7 => {
                party.gateway.hear(socket, input.byte() == Some(1));
                party.gateway.has_lost_bytes(socket);
            }
            8 if party.gateway.is_awake() => party.gateway.fall_asleep(),
            8 => party.gateway.wake_up(),
            _ => {
                if input.byte() == Some(1) {
                    party.gateway.miss();
                }
                if party.gateway.must_drain() {
                    party.gateway.drain(socket);
                }
                party.gateway.serve(socket);
            }
        }
        assert!(honest.program.readable() <= 2 * RING_LEN && honest.program.room() <= RING_LEN);
    }
}

fn joined() -> [Party; 2] {
    let party = || {
        let (near, app) = UnixStream::pair().expect("there are descriptors");
        near.set_nonblocking(true).expect("it is a socket");
        app.set_nonblocking(true).expect("it is a socket");
        let gateway = Arc::new(Gateway::create().expect("there are descriptors"));
        let program = Program::of(&gateway).expect("it is ours");
        Party { near, app, gateway, program }
    };
    let mut both = [party(), party()];
    Gateway::offer_shortcut(&both[0].gateway, &both[1].gateway, 0);
    for (party, number) in both.iter_mut().zip(1..) {
        let joined = party.program.join(&party.gateway, party.app.as_fd(), number);
        joined.expect("it was offered");
    }
    both
}

/// The only one.
const THREAD: u32 = 1;
/// Longer inputs find nothing that shorter ones do not.
const STEPS_MAX: usize = 500;
