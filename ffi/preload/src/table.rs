//! What we believe of each descriptor number.
//!
//! Entries are hints: see the rules of the crate.

use std::sync::atomic::{AtomicI32, AtomicU16, AtomicU32, AtomicU64, Ordering, Ordering::Relaxed};

use smcgate_rings::Application;

use crate::mappings::{Kept, Mappings, Used};
use crate::{places, sys, watch};

/// Numbers below this have an entry. Sockets with greater numbers stay TCP.
pub(crate) const DESCRIPTORS_MAX: usize = 1 << 16;

/// What a descriptor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Nothing that concerns us.
    Other,
    /// A TCP socket that the program has made, and that is not connected as far as we know.
    Fresh,
    /// A TCP socket that was marked and is being connected. Whether it becomes SMC-R is asked when
    /// the connection is there, at its next use.
    Pending,
    /// The same, while a thread asks.
    Settling,
    /// A Unix socket that stands for a TCP connection.
    Switched,
    /// A TCP socket that listens.
    Listening,
    /// A TCP connection that was accepted, whose client may begin with a rendezvous that nobody
    /// runs.
    Suspect,
}

/// What else we remember, one bit each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flag {
    /// The program has shut down reading.
    ReadingShut = 0x08,
    /// The program has shut down writing.
    WritingShut = 0x10,
    /// The program knows that the connection was reset.
    ResetTold = 0x20,
    /// The gateway has marked the socket: its SYN offers SMC-R.
    Marked = 0x40,
    /// The socket may have other descriptors, which could not be switched.
    Shared = 0x80,
    /// The connection was reset before it was switched, and the program does not know yet.
    ResetUntold = 0x100,
    /// The program may ask by another `connect` whether it is connected, and hears once that it is.
    ConnectUntold = 0x200,
    /// The bytes go by shared memory. If it is not mapped, the gateway must be asked for it.
    Ringed = 0x400,
    /// The program has set SO_RCVLOWAT.
    LowWater = 0x800,
    /// The program has set SO_BROADCAST, which means nothing to TCP.
    Broadcast = 0x1000,
    /// The program has set SO_NO_CHECK, which means nothing to TCP.
    NoCheck = 0x2000,
}

/// What we believe of one descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry(u16);

impl Entry {
    pub(crate) const OTHER: Self = Self(0);

    pub(crate) fn kind(self) -> Kind {
        match self.0 & KIND {
            1 => Kind::Fresh,
            2 => Kind::Pending,
            3 => Kind::Settling,
            4 => Kind::Switched,
            5 => Kind::Listening,
            6 => Kind::Suspect,
            _ => Kind::Other,
        }
    }

    pub(crate) fn has(self, flag: Flag) -> bool {
        self.0 & flag as u16 != 0
    }

    /// Whether reading and writing need no second look.
    pub(crate) fn is_plain(self) -> bool {
        match self.kind() {
            Kind::Other | Kind::Fresh | Kind::Listening => true,
            Kind::Pending | Kind::Settling | Kind::Switched | Kind::Suspect => false,
        }
    }
}

/// The bits of an entry that are its kind.
const KIND: u16 = 0x07;

/// The entries of all descriptors, with what else is remembered of them.
pub(crate) struct Table<const N: usize> {
    entries: [AtomicU16; N],
    /// Options of TCP that a Unix socket does not have; see `options`.
    options: [AtomicU64; N],
    /// From when on the gateway is told again that a socket listens, in seconds.
    tell_again: [AtomicU32; N],
    /// The sizes of buffers that the program has set on a connection with rings, and not zero; that
    /// for sending is in the upper half.
    buffers: [AtomicU64; N],
    /// The rings of connections that have some.
    mappings: Mappings<N>,
    /// The process whose descriptors these are.
    owner: AtomicI32,
}

/// Of this process.
pub(crate) static TABLE: Table<DESCRIPTORS_MAX> = Table::new();

impl<const N: usize> Table<N> {
    pub(crate) const fn new() -> Self {
        Self {
            entries: [const { AtomicU16::new(0) }; N],
            options: [const { AtomicU64::new(0) }; N],
            tell_again: [const { AtomicU32::new(0) }; N],
            buffers: [const { AtomicU64::new(0) }; N],
            mappings: Mappings::new(),
            owner: AtomicI32::new(0),
        }
    }

    fn slot(&self, fd: i32) -> Option<&AtomicU16> {
        self.entries.get(usize::try_from(fd).ok()?)
    }

    /// Whether there is an entry for this number.
    pub(crate) fn covers(&self, fd: i32) -> bool {
        self.slot(fd).is_some()
    }

    #[inline]
    pub(crate) fn of(&self, fd: i32) -> Entry {
        self.slot(fd).map_or(Entry::OTHER, |slot| Entry(slot.load(Relaxed)))
    }

    /// Replaces an entry. It loses its flags.
    pub(crate) fn set(&self, fd: i32, kind: Kind) {
        if let Some(slot) = self.slot(fd) {
            slot.store(kind as u16, Ordering::Release);
            self.forget_rings(fd);
        }
    }

    /// A connection whose bytes go by rings has this number now. If they are none, or find no room,
    /// the gateway is asked for them.
    pub(crate) fn set_ringed(&self, fd: i32, rings: Option<Application>, connection: u64) {
        let Some(slot) = self.slot(fd) else { return };
        self.set_buffers(fd, 0);
        if let Some(rings) = rings {
            self.mappings.insert(fd, rings, connection);
        }
        slot.store(Kind::Switched as u16 | Flag::Ringed as u16, Ordering::Release);
    }

    /// The rings of this number have come later than itself.
    pub(crate) fn attach(&self, fd: i32, rings: Application, connection: u64) -> bool {
        self.mappings.insert(fd, rings, connection)
    }

    /// Whether the number has these rings still.
    pub(crate) fn is_at(&self, fd: i32, kept: &Kept) -> bool {
        self.mappings.is_at(fd, kept)
    }

    /// Whether there ever were rings in this process.
    pub(crate) fn has_rings(&self) -> bool {
        self.mappings.is_used()
    }

    /// The rings of this number.
    #[inline]
    pub(crate) fn rings(&self, fd: i32) -> Option<Used<'_>> {
        self.mappings.of(fd)
    }

    fn forget_rings(&self, fd: i32) {
        if self.mappings.has(fd) && self.is_owner() {
            watch::forget(fd);
            self.mappings.forget(fd);
        }
    }

    /// Changes the kind of an entry, which keeps its flags.
    pub(crate) fn become_kind(&self, fd: i32, kind: Kind) {
        if let Some(slot) = self.slot(fd) {
            let change = |bits: u16| Some(bits & !KIND | kind as u16);
            // The closure always returns something, so this cannot fail.
            slot.fetch_update(Relaxed, Relaxed, change).ok();
        }
    }

    pub(crate) fn raise(&self, fd: i32, flag: Flag) {
        if let Some(slot) = self.slot(fd) {
            slot.fetch_or(flag as u16, Relaxed);
        }
    }

    pub(crate) fn change(&self, fd: i32, flag: Flag, is_raised: bool) {
        if is_raised {
            self.raise(fd, flag);
        } else {
            self.take(fd, flag);
        }
    }

    /// Takes a flag back. Returns whether it was there.
    pub(crate) fn take(&self, fd: i32, flag: Flag) -> bool {
        let flag = flag as u16;
        self.slot(fd).is_some_and(|slot| slot.fetch_and(!flag, Relaxed) & flag != 0)
    }

    /// Lets one thread ask about a pending connection. Returns whether it is the one that called.
    pub(crate) fn begin_settling(&self, fd: i32) -> bool {
        let begin = |bits: u16| {
            (bits & KIND == Kind::Pending as u16).then_some(bits & !KIND | Kind::Settling as u16)
        };
        self.slot(fd).is_some_and(|slot| slot.fetch_update(Relaxed, Relaxed, begin).is_ok())
    }

    /// The number is closed, or about to be something else.
    ///
    /// A child of `vfork` closes descriptors of its own, but shares this memory with its parent,
    /// whose descriptors stay open: it changes nothing.
    pub(crate) fn forget(&self, fd: i32) {
        if let Some(slot) = self.slot(fd)
            && slot.load(Relaxed) != 0
            && self.is_owner()
        {
            slot.store(0, Relaxed);
            watch::forget(fd);
            self.mappings.forget(fd);
        }
    }

    /// The number `to` is another name of `from` now.
    pub(crate) fn copy(&self, from: i32, to: i32) {
        places::copied(from, to);
        let entry = self.of(from);
        if entry == Entry::OTHER {
            return self.forget(to);
        }
        if let Some(slot) = self.slot(to)
            && self.is_owner()
        {
            slot.store(entry.0, Relaxed);
            self.set_options(to, self.options(from));
            self.set_buffers(to, self.buffers(from));
            watch::forget(to);
            self.mappings.copy(from, to);
        }
    }

    /// What `set_options` has said of this number.
    pub(crate) fn options(&self, fd: i32) -> u64 {
        let slot = usize::try_from(fd).ok().and_then(|fd| self.options.get(fd));
        slot.map_or(0, |slot| slot.load(Relaxed))
    }

    pub(crate) fn set_options(&self, fd: i32, options: u64) {
        if let Some(slot) = usize::try_from(fd).ok().and_then(|fd| self.options.get(fd)) {
            slot.store(options, Relaxed);
        }
    }

    /// What `set_buffers` has said of this number.
    pub(crate) fn buffers(&self, fd: i32) -> u64 {
        let slot = usize::try_from(fd).ok().and_then(|fd| self.buffers.get(fd));
        slot.map_or(0, |slot| slot.load(Relaxed))
    }

    pub(crate) fn set_buffers(&self, fd: i32, buffers: u64) {
        if let Some(slot) = usize::try_from(fd).ok().and_then(|fd| self.buffers.get(fd)) {
            slot.store(buffers, Relaxed);
        }
    }

    /// Whether the gateway should hear again that this socket listens.
    pub(crate) fn is_due(&self, fd: i32, now: u32) -> bool {
        let slot = usize::try_from(fd).ok().and_then(|fd| self.tell_again.get(fd));
        slot.is_some_and(|slot| slot.load(Relaxed) <= now)
    }

    pub(crate) fn set_due(&self, fd: i32, at: u32) {
        if let Some(slot) = usize::try_from(fd).ok().and_then(|fd| self.tell_again.get(fd)) {
            slot.store(at, Relaxed);
        }
    }

    /// These are the descriptors of the calling process.
    pub(crate) fn own(&self) {
        self.owner.store(sys::process_id(), Relaxed);
    }

    /// Whether the calling process is the one whose descriptors these are; see
    /// [`forget`](Self::forget).
    pub(crate) fn is_owner(&self) -> bool {
        let owner = self.owner.load(Relaxed);
        owner == 0 || sys::is_sandboxed() || owner == sys::process_id()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_what_was_said_last() {
        let table = Table::<8>::new();
        assert_eq!(table.of(3).kind(), Kind::Other);
        for kind in [
            Kind::Fresh,
            Kind::Pending,
            Kind::Settling,
            Kind::Switched,
            Kind::Listening,
            Kind::Suspect,
            Kind::Other,
        ] {
            table.set(3, kind);
            assert_eq!(table.of(3).kind(), kind);
        }
        table.set(3, Kind::Fresh);
        table.raise(3, Flag::Marked);
        table.become_kind(3, Kind::Pending);
        assert!(table.of(3).has(Flag::Marked) && table.of(3).kind() == Kind::Pending);
        table.set_options(3, 7);
        table.copy(3, 5);
        assert_eq!((table.of(5), table.options(5)), (table.of(3), 7));
        table.forget(3);
        assert_eq!(table.of(3), Entry::OTHER);
        assert!(table.of(5).has(Flag::Marked), "the copy stays");
        table.copy(3, 5);
        assert_eq!(table.of(5), Entry::OTHER);
    }

    #[test]
    fn one_thread_settles() {
        let table = Table::<8>::new();
        assert!(!table.begin_settling(1));
        table.set(1, Kind::Pending);
        assert!(table.begin_settling(1));
        assert!(!table.begin_settling(1));
    }

    /// Python closes descriptors between `vfork` and `exec`.
    #[test]
    fn only_the_process_itself_forgets() {
        let table = Table::<8>::new();
        table.set(1, Kind::Listening);
        table.owner.store(sys::process_id() + 1, Relaxed);
        table.forget(1);
        table.copy(2, 1);
        assert_eq!(table.of(1).kind(), Kind::Listening);
        table.own();
        table.forget(1);
        assert_eq!(table.of(1).kind(), Kind::Other);
    }

    #[test]
    fn numbers_without_an_entry_are_left_alone() {
        let table = Table::<8>::new();
        for fd in [-1, 8, i32::MAX, i32::MIN] {
            table.set(fd, Kind::Switched);
            table.raise(fd, Flag::Marked);
            table.set_options(fd, 1);
            assert_eq!((table.of(fd), table.options(fd)), (Entry::OTHER, 0));
            assert!(!table.covers(fd) && !table.begin_settling(fd) && !table.is_due(fd, 9));
        }
    }
}
