//! The emulators of the guests.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Says something to the emulator of a guest.
///
/// # Panics
///
/// If it complains.
pub(crate) fn monitor(guest: u8, command: &str) {
    let stream = UnixStream::connect(path(guest)).expect("the emulator listens");
    stream.set_read_timeout(Some(LIMIT)).expect("not zero");
    let mut said = String::new();
    let mut listen = |prompts: usize| {
        while said.matches(PROMPT).count() < prompts {
            let mut bytes = [0; 4_096];
            let count = (&stream).read(&mut bytes).expect("the emulator answers");
            assert!(count > 0, "the emulator hung up: {said}");
            said += &String::from_utf8_lossy(&bytes[..count]);
        }
    };
    listen(1);
    (&stream).write_all(format!("{command}\n").as_bytes()).expect("the emulator reads");
    listen(2);
    assert!(!said.contains("Error"), "{said}");
}

/// Pulls the plug of a guest that does not answer; `scripts/linux-rig` boots it again.
pub(crate) fn pull_plug(guest: u8) {
    // Nobody listens if the emulator has ended by itself.
    if let Ok(mut stream) = UnixStream::connect(path(guest)) {
        stream.write_all(b"quit\n").ok();
        // Until it is gone.
        stream.set_read_timeout(Some(LIMIT)).expect("not zero");
        stream.read_to_end(&mut Vec::new()).ok();
    }
}

fn path(guest: u8) -> PathBuf {
    let folder = std::env::var("SMCGATE_RIG_LOG").expect("scripts/linux-rig sets it");
    Path::new(&folder).join(format!("guest{guest}.monitor"))
}

const PROMPT: &str = "(qemu) ";
const LIMIT: Duration = Duration::from_secs(60);
