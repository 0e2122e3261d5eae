//! The functions of the C library, or of another preloaded library, that ours stand in front of.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{
    FILE, Ioctl, c_int, c_uint, c_ulong, epoll_event, fd_set, iovec, loff_t, msghdr, nfds_t, off_t,
    pollfd, sigset_t, size_t, sockaddr, socklen_t, ssize_t, timespec, timeval,
};

macro_rules! real_functions {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        $(
            /// The function of this name.
            ///
            /// # Safety
            ///
            /// As the C library asks for it.
            #[inline]
            pub(crate) unsafe fn $name($($argument: $type),*) -> $result {
                type Function = unsafe extern "C-unwind" fn($($type),*) -> $result;
                let found = find(Which::$name);
                // SAFETY: null is none, and anything else is the function of this name, which has
                // this type in the headers of the C library.
                let function: Option<Function> = unsafe { std::mem::transmute(found) };
                match function {
                    // SAFETY: the caller promises what the function asks for.
                    Some(function) => unsafe { function($($argument),*) },
                    // No program can call what its C library does not have.
                    None => crate::sys::fail(libc::ENOSYS),
                }
            }
        )*

        #[expect(non_camel_case_types, reason = "they are the names of the C library")]
        #[derive(Clone, Copy)]
        enum Which {
            $($name),*
        }

        const ALL: &[Which] = &[$(Which::$name),*];
        const NAMES: &[&str] = &[$(concat!(stringify!($name), "\0")),*];
    };
}

real_functions! {
    accept4(fd: c_int, address: *mut sockaddr, length: *mut socklen_t, flags: c_int) -> c_int;
    close(fd: c_int) -> c_int;
    close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int;
    connect(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int;
    dup(fd: c_int) -> c_int;
    dup2(fd: c_int, to: c_int) -> c_int;
    dup3(fd: c_int, to: c_int, flags: c_int) -> c_int;
    epoll_create(size: c_int) -> c_int;
    epoll_create1(flags: c_int) -> c_int;
    epoll_ctl(epoll: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) -> c_int;
    epoll_pwait(
        epoll: c_int, events: *mut epoll_event, count: c_int, timeout: c_int, mask: *const sigset_t
    ) -> c_int;
    epoll_pwait2(
        epoll: c_int, events: *mut epoll_event, count: c_int, timeout: *const timespec,
        mask: *const sigset_t
    ) -> c_int;
    epoll_wait(epoll: c_int, events: *mut epoll_event, count: c_int, timeout: c_int) -> c_int;
    fcntl(fd: c_int, command: c_int, argument: *mut c_void) -> c_int;
    fcntl64(fd: c_int, command: c_int, argument: *mut c_void) -> c_int;
    getpeername(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int;
    getsockname(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int;
    getsockopt(
        fd: c_int, level: c_int, name: c_int, value: *mut c_void, length: *mut socklen_t
    ) -> c_int;
    fclose(stream: *mut FILE) -> c_int;
    ioctl(fd: c_int, request: Ioctl, argument: *mut c_void) -> c_int;
    listen(fd: c_int, backlog: c_int) -> c_int;
    poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int;
    ppoll(
        fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t
    ) -> c_int;
    pselect(
        count: c_int, reading: *mut fd_set, writing: *mut fd_set, urgent: *mut fd_set,
        timeout: *const timespec, mask: *const sigset_t
    ) -> c_int;
    prctl(
        option: c_int, second: c_ulong, third: c_ulong, fourth: c_ulong, fifth: c_ulong
    ) -> c_int;
    read(fd: c_int, buffer: *mut c_void, length: size_t) -> ssize_t;
    readv(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t;
    recv(fd: c_int, buffer: *mut c_void, length: size_t, flags: c_int) -> ssize_t;
    recvfrom(
        fd: c_int, buffer: *mut c_void, length: size_t, flags: c_int,
        address: *mut sockaddr, address_length: *mut socklen_t
    ) -> ssize_t;
    recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t;
    recvmmsg(
        fd: c_int, messages: *mut libc::mmsghdr, count: c_uint, flags: c_int,
        timeout: *mut timespec
    ) -> c_int;
    select(
        count: c_int, reading: *mut fd_set, writing: *mut fd_set, urgent: *mut fd_set,
        timeout: *mut timeval
    ) -> c_int;
    send(fd: c_int, buffer: *const c_void, length: size_t, flags: c_int) -> ssize_t;
    sendfile(to: c_int, from: c_int, offset: *mut off_t, length: size_t) -> ssize_t;
    sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t;
    sendmmsg(fd: c_int, messages: *mut libc::mmsghdr, count: c_uint, flags: c_int) -> c_int;
    sendto(
        fd: c_int, buffer: *const c_void, length: size_t, flags: c_int,
        address: *const sockaddr, address_length: socklen_t
    ) -> ssize_t;
    setsockopt(
        fd: c_int, level: c_int, name: c_int, value: *const c_void, length: socklen_t
    ) -> c_int;
    shutdown(fd: c_int, how: c_int) -> c_int;
    socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    splice(
        from: c_int, from_offset: *mut loff_t, to: c_int, to_offset: *mut loff_t,
        length: size_t, flags: c_uint
    ) -> ssize_t;
    write(fd: c_int, buffer: *const c_void, length: size_t) -> ssize_t;
    writev(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t;
    __poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, room: size_t) -> c_int;
    __ppoll_chk(
        fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t,
        room: size_t
    ) -> c_int;
    __read_chk(fd: c_int, buffer: *mut c_void, length: size_t, room: size_t) -> ssize_t;
    __recv_chk(
        fd: c_int, buffer: *mut c_void, length: size_t, room: size_t, flags: c_int
    ) -> ssize_t;
    __recvfrom_chk(
        fd: c_int, buffer: *mut c_void, length: size_t, room: size_t, flags: c_int,
        address: *mut sockaddr, address_length: *mut socklen_t
    ) -> ssize_t;
}

/// Where the functions are; null as long as nobody has looked.
static FOUND: [AtomicPtr<c_void>; ALL.len()] =
    [const { AtomicPtr::new(ptr::null_mut()) }; ALL.len()];

/// Finds all functions, so that nothing is looked up in a signal handler.
pub(crate) fn find_all() {
    for which in ALL {
        find(*which);
    }
}

/// Where a function is; null if there is none.
fn find(which: Which) -> *mut c_void {
    let found = &FOUND[which as usize];
    let function = found.load(Ordering::Acquire);
    if !function.is_null() {
        return function;
    }
    // SAFETY: `dlsym` asks for a handle, and RTLD_NEXT is one, and for a name that ends with zero,
    // as all of them do.
    let function = unsafe { libc::dlsym(libc::RTLD_NEXT, NAMES[which as usize].as_ptr().cast()) };
    found.store(function, Ordering::Release);
    function
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_functions_are_there_and_can_be_called() {
        find_all();
        for which in ALL {
            assert!(!find(*which).is_null(), "{}", NAMES[*which as usize]);
        }
        // SAFETY: -1 is no descriptor, which the call survives.
        assert_eq!(unsafe { close(-1) }, -1);
        assert_eq!(crate::sys::errno(), libc::EBADF);
    }
}
