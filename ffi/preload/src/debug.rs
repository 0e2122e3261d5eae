//! A line on standard error for each decision, if `SMCGATE_DEBUG` asks for it.

use std::fmt::{self, Write as _};

use crate::settings::settings;
use crate::sys;

/// Says something about a descriptor.
pub(crate) fn say(fd: i32, what: fmt::Arguments<'_>) {
    if settings().is_none_or(|settings| !settings.debug) {
        return;
    }
    let mut line = Line { bytes: [0; LINE_MAX], length: 0 };
    // A line that is too long is cut.
    writeln!(line, "smcgate[{}]: {fd}: {what}", sys::process_id()).ok();
    if let Some(stderr) = sys::borrow(libc::STDERR_FILENO) {
        // Nobody is left to tell if standard error is gone.
        rustix::io::write(stderr, &line.bytes[..line.length]).ok();
    }
}

const LINE_MAX: usize = 256;

/// A line without a heap.
struct Line {
    bytes: [u8; LINE_MAX],
    length: usize,
}

impl fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = &mut self.bytes[self.length..];
        let length = text.len().min(room.len());
        room[..length].copy_from_slice(&text.as_bytes()[..length]);
        self.length += length;
        if length == text.len() { Ok(()) } else { Err(fmt::Error) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_line_is_cut() {
        let mut line = Line { bytes: [0; LINE_MAX], length: 0 };
        assert!(write!(line, "{}", "x".repeat(200)).is_ok());
        assert!(write!(line, "{}", "y".repeat(200)).is_err());
        assert_eq!((line.length, line.bytes[199], line.bytes[255]), (256, b'x', b'y'));
    }
}
