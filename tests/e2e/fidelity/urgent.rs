//! What applications do with TCP's urgent byte: send it out of band, wait for it, find its place.

use std::io::Read;
use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::RecvFlags;
use socket2::SockRef;

use super::SILENCE_LIMIT;
use super::tape::Tape;
use crate::pattern::StreamDigest;

impl Tape {
    /// Writes one byte out of band.
    pub(super) fn write_urgent(&mut self, byte: u8) {
        match SockRef::from(self.stream()).send_out_of_band(&[byte]) {
            Ok(count) => self.saw(format!("wrote {count} urgent byte")),
            Err(error) => self.saw_broken_write(&error),
        }
    }

    /// Receives urgent bytes among the others from now on (SO_OOBINLINE).
    pub(super) fn read_urgent_in_line(&mut self) {
        let inline = SockRef::from(self.stream()).set_out_of_band_inline(true);
        inline.expect("an open socket");
    }

    /// Waits until an urgent byte has come.
    pub(super) fn await_urgent(&mut self) {
        let mut set = [PollFd::new(self.stream(), PollFlags::PRI)];
        let limit = Timespec::try_from(SILENCE_LIMIT).expect("seconds");
        let found = poll(&mut set, Some(&limit)).expect("an open socket");
        let urgent = set[0].revents().contains(PollFlags::PRI);
        self.saw(if urgent { "urgent" } else { "nothing urgent" });
        assert_eq!(found > 0, urgent, "nothing else was asked for");
    }

    /// Reads the urgent byte out of band.
    pub(super) fn read_urgent(&mut self) {
        let mut room = [0; 2];
        match rustix::net::recv(self.stream(), &mut room, RecvFlags::OOB) {
            Ok((_, count)) => self.saw(format!("read urgent {:?}", &room[..count])),
            Err(error) => self.saw(format!("read no urgent byte: {error}")),
        }
    }

    /// Reads until the mark is reached. Call it when an urgent byte has come: before that, a read
    /// may pass over the mark.
    pub(super) fn read_to_mark(&mut self) {
        let mut all = Vec::new();
        let mut buffer = vec![0; 4096];
        while !smcr_os::tcp::is_at_mark(self.stream().as_fd()).expect("an open socket") {
            match self.stream().read(&mut buffer) {
                Ok(0) => return self.saw("the end before the mark"),
                Ok(count) => all.extend_from_slice(&buffer[..count]),
                Err(error) => return self.saw_broken_read(&error),
            }
        }
        self.saw(format!("read {:?}, then the mark", StreamDigest::of(&all)));
    }
}
