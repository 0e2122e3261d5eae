//! Counts what a thread takes from the heap. The library takes nothing, which tests see by this.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

#[global_allocator]
static HEAP: Counting = Counting;

thread_local! {
    static TAKEN: Cell<u64> = const { Cell::new(0) };
}

/// How often `act` takes something from the heap in this thread.
pub(crate) fn taken_by(act: impl FnOnce()) -> u64 {
    let before = TAKEN.get();
    act();
    TAKEN.get() - before
}

fn count() {
    TAKEN.set(TAKEN.get() + 1);
}

// SAFETY: `GlobalAlloc` asks for what `System` does, to which each call goes on unchanged. To count
// needs no heap: the number has no destructor, and is there from the start.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller promises what `alloc` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        // SAFETY: the caller promises what `dealloc` asks for.
        unsafe { System.dealloc(place, layout) }
    }
}

mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::{AsFd as _, AsRawFd as _};

    use libc::{c_int, iovec};
    use rustix::event::epoll::{CreateFlags, EventData, EventFlags, add, create};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;
    use crate::attach::{rings_of, shorten_if_due};
    use crate::connect::connect;
    use crate::pair::Pair;
    use crate::ringed::{receive, send};
    use crate::switch::{Kept, switch};
    use crate::sys::{self, Own};
    use crate::table::{Kind, TABLE};
    use crate::{places, watch};

    const NOW: c_int = libc::MSG_DONTWAIT;

    fn part(bytes: &mut [u8]) -> iovec {
        iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }
    }

    /// Programs call it in signal handlers, and after `fork` of a process with threads.
    #[test]
    fn to_read_and_to_write_takes_nothing_from_the_heap() {
        let pair = Pair::new(77);
        let (fd, mut bytes) = (pair.fd(), [7; 300]);
        let taken = taken_by(|| {
            for _ in 0..200 {
                pair.comes(b"hello");
                let parts = [part(&mut bytes)];
                // SAFETY: the part is a live exclusive array.
                assert_eq!(unsafe { receive(fd, &parts, 0) }, 5);
                // SAFETY: as above.
                assert_eq!(unsafe { receive(fd, &parts, NOW) }, -1);
                // SAFETY: as above.
                assert_eq!(unsafe { send(fd, &parts, NOW) }, 300);
                pair.goes(300);
                watch::cease();
                let (used, socket) = rings_of(fd).unwrap();
                shorten_if_due(used, socket);
            }
        });
        assert_eq!(taken, 0);
    }

    #[test]
    fn to_connect_and_to_switch_takes_nothing_from_the_heap() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let tcp = TcpStream::connect(at).unwrap();
        let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC);
        let (unix, _far) = socketpair(family, SocketType::STREAM, flags, None).unwrap();
        let fd = tcp.as_raw_fd();
        // Unseen: the kernel is asked who waits for it.
        let set = create(CreateFlags::CLOEXEC).unwrap();
        places::epoll_made(set.as_raw_fd());
        add(&set, &tcp, EventData::new_u64(7), EventFlags::IN).unwrap();
        let taken = taken_by(|| {
            assert_eq!(connect(fd, Some(at), || sys::fail(libc::EISCONN)), -1);
            let kept = Kept::of(tcp.as_fd());
            TABLE.set(fd, Kind::Pending);
            switch(fd, &kept, Own::new(unix), None).unwrap();
            TABLE.forget(fd);
        });
        assert_eq!(taken, 0);
        assert_eq!(taken_by(|| drop(std::hint::black_box(Box::new(7)))), 1, "it is counted");
    }
}
