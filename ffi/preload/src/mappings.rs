//! The rings that are mapped in this process, and which numbers they belong to.
//!
//! A connection may have several numbers, and threads may use its rings while another one closes
//! the last of them. So each mapping counts its numbers and those who use it now, and whoever is
//! the last unmaps it. Nobody waits for anybody.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use smcgate_rings::{Application, Shortcut};

/// All mappings, and the numbers below `N`.
///
/// # Invariants
///
/// - **MAPPED** As long as the uses of a slot are neither zero nor [`BUSY`], its address is that
///   of rings that are mapped, and its connection is theirs. A shortcut that it has is mapped, too.
pub(crate) struct Mappings<const N: usize> {
    /// Of each number its slot and one, or zero.
    of_number: [AtomicU32; N],
    slots: [Slot; N],
    /// Where a free slot is looked for.
    next: AtomicUsize,
    /// Whether there ever were some.
    is_used: AtomicBool,
}

struct Slot {
    address: AtomicUsize,
    /// How long the rings are: as they were checked when they were mapped.
    lengths: AtomicU64,
    connection: AtomicU64,
    /// Where its shortcut is mapped, and which side of that it is; zero if it is not.
    shortcut: AtomicUsize,
    /// The numbers that the connection has, and who uses it now.
    uses: AtomicU32,
}

/// The uses of a slot that somebody fills or empties.
const BUSY: u32 = u32::MAX;

/// Rings that stay mapped as long as this lives. It must not live while its owner waits in a
/// function of the C library: a thread may be cancelled there.
pub(crate) struct Used<'a> {
    slot: &'a Slot,
    /// One more than the index of the slot.
    number: u32,
    pub(crate) rings: Application,
}

/// The same without a borrow. Whoever has it must [`release`](Self::release) it.
#[derive(Clone, Copy)]
pub(crate) struct Kept {
    slot: &'static Slot,
    /// One more than the index of the slot.
    number: u32,
    rings: Application,
}

impl Kept {
    /// The rings, as they are now: a shortcut may have come.
    #[inline]
    pub(crate) fn rings(&self) -> Application {
        // SAFETY: `rings` asks for a use, which this value has until it is released.
        unsafe { self.slot.rings() }.unwrap_or(self.rings)
    }

    pub(crate) fn release(self) {
        self.slot.release();
    }
}

impl Used<'static> {
    pub(crate) fn keep(self) -> Kept {
        let kept = Kept { slot: self.slot, number: self.number, rings: self.rings };
        std::mem::forget(self);
        kept
    }
}

impl Used<'_> {
    /// A shortcut was mapped for these rings. If another thread was faster, it is unmapped.
    pub(crate) fn take_shortcut(&mut self, shortcut: Shortcut) {
        let (none, place) = (0, shortcut.place());
        let result =
            self.slot.shortcut.compare_exchange(none, place, Ordering::AcqRel, Ordering::Acquire);
        if result.is_err() {
            // SAFETY: `unmap` asks that nobody uses it: nobody else has heard of it.
            unsafe { shortcut.unmap() };
        }
        // SAFETY: `rings` asks for a use, which this value has as long as it lives.
        self.rings = unsafe { self.slot.rings() }.unwrap_or(self.rings);
    }

    /// The gateway's number of the connection.
    pub(crate) fn connection(&self) -> u64 {
        self.slot.connection.load(Ordering::Relaxed)
    }
}

impl Drop for Used<'_> {
    fn drop(&mut self) {
        self.slot.release();
    }
}

impl Slot {
    const fn new() -> Self {
        Self {
            address: AtomicUsize::new(0),
            lengths: AtomicU64::new(0),
            connection: AtomicU64::new(0),
            shortcut: AtomicUsize::new(0),
            uses: AtomicU32::new(0),
        }
    }

    /// The rings, with their shortcut if that is mapped.
    ///
    /// # Safety
    ///
    /// The caller has a use of the slot, and gives it back when the result is used no more.
    unsafe fn rings(&self) -> Option<Application> {
        // SAFETY: `at` asks that the rings stay mapped: by MAPPED, as long as there is that use.
        let rings = unsafe { Application::at(self.place()) }?;
        // SAFETY: the same of the shortcut.
        let shortcut = unsafe { Shortcut::at(self.shortcut.load(Ordering::Acquire)) };
        Some(rings.with(shortcut))
    }

    fn place(&self) -> (usize, u64) {
        (self.address.load(Ordering::Relaxed), self.lengths.load(Ordering::Relaxed))
    }

    /// One use more, unless there is none any more.
    fn retain(&self) -> bool {
        let more = |uses| (uses != 0 && uses != BUSY).then(|| uses + 1);
        self.uses.fetch_update(Ordering::Acquire, Ordering::Relaxed, more).is_ok()
    }

    fn release(&self) {
        let less = |uses| Some(if uses == 1 { BUSY } else { uses - 1 });
        if self.uses.fetch_update(Ordering::AcqRel, Ordering::Relaxed, less) != Ok(1) {
            return;
        }
        // SAFETY: `at` asks that the rings are mapped: by MAPPED, since there was a use until now.
        if let Some(rings) = unsafe { Application::at(self.place()) } {
            // SAFETY: `unmap` asks that nobody uses them, now or later: this was the last use, and
            // nobody can begin another one.
            unsafe { rings.unmap() };
        }
        // SAFETY: the same of the shortcut.
        if let Some(shortcut) = unsafe { Shortcut::at(self.shortcut.swap(0, Ordering::Acquire)) } {
            // SAFETY: as above.
            unsafe { shortcut.unmap() };
        }
        self.uses.store(0, Ordering::Release);
    }
}

impl<const N: usize> Mappings<N> {
    pub(crate) const fn new() -> Self {
        Self {
            of_number: [const { AtomicU32::new(0) }; N],
            slots: [const { Slot::new() }; N],
            next: AtomicUsize::new(0),
            is_used: AtomicBool::new(false),
        }
    }

    /// The number belongs to these rings from now on. If there is no room, they are unmapped.
    /// Returns whether there was.
    pub(crate) fn insert(&self, fd: RawFd, rings: Application, connection: u64) -> bool {
        let Some(index) = self.number(fd).and_then(|_| self.claim()) else {
            // SAFETY: `unmap` asks that nobody uses them: nobody else has heard of them.
            unsafe { rings.unmap() };
            return false;
        };
        self.is_used.store(true, Ordering::Relaxed);
        let slot = &self.slots[index];
        let (address, lengths) = rings.place();
        slot.address.store(address, Ordering::Relaxed);
        slot.lengths.store(lengths, Ordering::Relaxed);
        slot.connection.store(connection, Ordering::Relaxed);
        slot.uses.store(1, Ordering::Release);
        self.put(fd, index + 1);
        true
    }

    /// Whether the number has these rings still.
    pub(crate) fn is_at(&self, fd: RawFd, kept: &Kept) -> bool {
        self.number(fd).is_some_and(|number| number.load(Ordering::Relaxed) == kept.number)
    }

    /// Whether there ever were rings.
    pub(crate) fn is_used(&self) -> bool {
        self.is_used.load(Ordering::Relaxed)
    }

    /// A slot that nobody uses. It is busy now.
    fn claim(&self) -> Option<usize> {
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        (0..N).map(|step| first.wrapping_add(step) % N).find(|index| {
            let uses = &self.slots[*index].uses;
            uses.compare_exchange(0, BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok()
        })
    }

    /// The number `to` is another name of `from`.
    pub(crate) fn copy(&self, from: RawFd, to: RawFd) {
        let index = self.number(from).map_or(0, |number| number.load(Ordering::Acquire));
        let index = usize::try_from(index).unwrap_or(0);
        let is_there = index.checked_sub(1).is_some_and(|index| self.slots[index].retain());
        if self.number(to).is_some() {
            self.put(to, if is_there { index } else { 0 });
        }
    }

    /// The number is closed, or about to be something else.
    pub(crate) fn forget(&self, fd: RawFd) {
        if self.has(fd) {
            self.put(fd, 0);
        }
    }

    /// Whether the number has rings.
    #[inline]
    pub(crate) fn has(&self, fd: RawFd) -> bool {
        self.number(fd).is_some_and(|number| number.load(Ordering::Relaxed) != 0)
    }

    /// The rings of this number.
    #[inline]
    pub(crate) fn of(&self, fd: RawFd) -> Option<Used<'_>> {
        let number = self.number(fd)?;
        let index = number.load(Ordering::Acquire);
        let slot = &self.slots[usize::try_from(index).ok()?.checked_sub(1)?];
        if !slot.retain() {
            return None;
        }
        // While we looked, the slot may have become that of another connection.
        if number.load(Ordering::Acquire) != index {
            slot.release();
            return None;
        }
        // SAFETY: `rings` asks for a use, which the value has as long as it lives.
        let rings = unsafe { slot.rings() };
        let Some(rings) = rings else {
            slot.release();
            return None;
        };
        Some(Used { slot, number: index, rings })
    }

    fn number(&self, fd: RawFd) -> Option<&AtomicU32> {
        self.of_number.get(usize::try_from(fd).ok()?)
    }

    /// Gives a number a slot and one, of which it has a use, or none.
    fn put(&self, fd: RawFd, index: usize) {
        let index = u32::try_from(index).unwrap_or(0);
        let before = self.number(fd).map_or(0, |number| number.swap(index, Ordering::AcqRel));
        if let Some(before) = before.checked_sub(1) {
            self.slots[before as usize].release();
        }
    }
}

#[cfg(test)]
mod tests {
    use smcgate_rings::Gateway;

    use super::*;

    fn rings() -> (Gateway, Application) {
        let gateway = Gateway::create().unwrap();
        let rings = Application::map(gateway.memory()).unwrap();
        (gateway, rings)
    }

    /// Whether the memory is mapped. Other tests map other memory, perhaps at the same place.
    fn is_mapped(gateway: &Gateway) -> bool {
        let inode = rustix::fs::fstat(gateway.memory()).unwrap().st_ino.to_string();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let count = maps.lines().filter(|it| it.split_whitespace().nth(4) == Some(&inode)).count();
        // The gateway's own mapping is one.
        count > 1
    }

    #[test]
    fn rings_stay_until_the_last_number_and_the_last_user_have_gone() {
        let all = Mappings::<8>::new();
        let (gateway, rings) = rings();
        let place = rings.place();
        assert!(all.of(3).is_none());
        assert!(all.insert(3, rings, 77));
        all.copy(3, 5);
        all.copy(3, 3);
        all.forget(3);
        assert!(all.of(3).is_none() && all.has(5));
        let used = all.of(5).unwrap();
        assert_eq!((used.connection(), used.rings.place()), (77, place));
        all.forget(5);
        assert!(all.of(5).is_none() && is_mapped(&gateway), "somebody uses it");
        drop(used);
        assert!(!is_mapped(&gateway));
    }

    #[test]
    fn a_number_that_gets_others_loses_those_that_it_had() {
        let all = Mappings::<8>::new();
        let ((first_gateway, first), (second_gateway, second)) = (rings(), rings());
        assert!(all.insert(3, first, 1) && all.insert(3, second, 2));
        assert!(!is_mapped(&first_gateway) && is_mapped(&second_gateway));
        assert_eq!(all.of(3).unwrap().connection(), 2);
        all.copy(4, 3);
        assert!(!all.has(3) && !is_mapped(&second_gateway), "a number without rings was copied");
    }

    #[test]
    fn numbers_without_room_get_none() {
        let all = Mappings::<2>::new();
        for fd in [-1, 2, i32::MAX] {
            let (gateway, rings) = rings();
            assert!(!all.insert(fd, rings, 1) && !is_mapped(&gateway));
            all.copy(fd, 0);
            all.copy(0, fd);
            assert!(all.of(fd).is_none() && !all.has(fd));
        }
    }

    /// Threads read while another one closes the number and opens it again.
    #[test]
    fn who_uses_rings_never_finds_them_unmapped() {
        static ALL: Mappings<4> = Mappings::new();
        let gateway = Gateway::create().unwrap();
        std::thread::scope(|scope| {
            let users: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        let mut uses = 0_u32;
                        while uses < 2_000 {
                            if let Some(used) = ALL.of(1) {
                                assert_eq!(used.rings.readable(), 0);
                                uses += 1;
                            }
                            std::thread::yield_now();
                        }
                    })
                })
                .collect();
            while users.iter().any(|user| !user.is_finished()) {
                ALL.insert(1, Application::map(gateway.memory()).unwrap(), 1);
                std::thread::yield_now();
                ALL.forget(1);
            }
        });
    }
}
