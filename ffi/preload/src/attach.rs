//! The memory by which the bytes of a connection go: that which is mapped, and that for which the
//! gateway must be asked.

use std::os::fd::{AsFd as _, BorrowedFd, RawFd};

use libc::c_int;
use smcgate_door::Request;
use smcgate_rings::{Application, Shortcut};

use crate::debug::say;
use crate::door::{Answer, ask, ask_in_passing};
use crate::mappings::Used;
use crate::table::{Flag, TABLE};
use crate::{name, sys};

/// The rings of this number, and its socket. They must be those of the same connection each time:
/// while a thread waited, another one may have closed the number and opened it again.
///
/// # Errors
///
/// As below, and `EBADF` if it is another one.
pub(crate) fn rings_of_same(
    fd: RawFd,
    connection: &mut Option<u64>,
) -> Result<(Used<'static>, BorrowedFd<'static>), c_int> {
    let (used, socket) = rings_of(fd)?;
    if *connection.get_or_insert(used.connection()) != used.connection() {
        return Err(libc::EBADF);
    }
    Ok((used, socket))
}

/// The rings of this number, and its socket.
///
/// # Errors
///
/// `ENOTSOCK` if the number is something else by now; or what became of the connection.
pub(crate) fn rings_of(fd: RawFd) -> Result<(Used<'static>, BorrowedFd<'static>), c_int> {
    let socket = sys::borrow(fd).ok_or(libc::EBADF)?;
    let mut used = match TABLE.rings(fd) {
        Some(used) => used,
        None => attach(fd, socket)?,
    };
    if used.rings.is_closed() {
        // The number may have been closed behind our back.
        let connection = name::of(socket).map(|name| name.connection);
        if connection != Some(used.connection()) {
            drop(used);
            TABLE.forget(fd);
            return Err(libc::ENOTSOCK);
        }
    }
    if let Some(number) = used.rings.lacked_shortcut() {
        // Some of the bytes are where only that leads.
        let request = Request::Shortcut { connection: used.connection() };
        let may_ask = !sys::is_sandboxed();
        if !may_ask || !shorten(&mut used, socket, number, ask(request, Some(socket))) {
            return Err(libc::ECONNRESET);
        }
    }
    Ok((used, socket))
}

/// Asks the gateway for the rings of a socket that was inherited, or came from another process.
fn attach(fd: RawFd, socket: BorrowedFd<'static>) -> Result<Used<'static>, c_int> {
    let Some(name) = name::of(socket) else {
        TABLE.forget(fd);
        return Err(libc::ENOTSOCK);
    };
    if !TABLE.of(fd).has(Flag::ResetTold)
        && let Answer::Memory(memory) =
            ask(Request::Attach { connection: name.connection, shortcut: true }, Some(socket))
        && let Ok(rings) = Application::map(memory.as_fd())
        && TABLE.attach(fd, rings, name.connection)
        && let Some(used) = TABLE.rings(fd)
    {
        say(fd, format_args!("the gateway has given the rings again"));
        return Ok(used);
    }
    // Without the rings, what comes by the socket is no stream.
    if TABLE.of(fd).has(Flag::ResetTold) { Err(libc::EPIPE) } else { Err(libc::ECONNRESET) }
}

/// The connection was used. If it is time to ask for a shortcut to the other program, asks, unless
/// that would take long.
pub(crate) fn shorten_if_due(mut used: Used<'static>, socket: BorrowedFd<'static>) {
    let process = || sys::process_id().cast_unsigned();
    if sys::is_sandboxed() {
        return;
    }
    if let Some(number) = used.rings.wants_shortcut(process) {
        let connection = used.connection();
        let answer = ask_in_passing(Request::Shortcut { connection }, socket);
        if !shorten(&mut used, socket, number, answer) {
            used.rings.put_off_shortcut();
        }
    }
}

/// Takes the shortcut that the gateway has given, as the side with this number. Returns whether
/// there is one.
#[cold]
fn shorten(
    used: &mut Used<'static>,
    socket: BorrowedFd<'static>,
    number: u32,
    answer: Answer,
) -> bool {
    let Answer::Memory(memory) = answer else { return false };
    let Ok(shortcut) = Shortcut::map(memory.as_fd(), number) else { return false };
    // Before anybody in this process can write there.
    used.rings.begin_to_join();
    used.take_shortcut(shortcut);
    used.rings.join(socket);
    true
}
