//! An allocator that counts, so that a thread can say how often it has asked for memory.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;

/// Allocates with `A`, and counts for each thread how often.
///
/// ```
/// use std::alloc::System;
/// use smcr_os::counting::{Counting, allocations};
///
/// #[global_allocator]
/// static ALLOCATOR: Counting<System> = Counting(System);
///
/// let before = allocations();
/// drop(Box::new(7));
/// assert_eq!(allocations(), before + 1);
/// ```
#[derive(Debug)]
pub struct Counting<A>(pub A);

/// How often the calling thread has asked a [`Counting`] allocator for memory, or to move some.
pub fn allocations() -> u64 {
    // A thread that is ending has lost its number, and nobody asks for it.
    COUNT.try_with(Cell::get).unwrap_or_default()
}

thread_local! {
    // Constant and without a destructor: to reach it allocates nothing.
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

fn count() {
    let _ = COUNT.try_with(|count| count.set(count.get().wrapping_add(1)));
}

// SAFETY: `GlobalAlloc` asks that the blocks are those of the layouts that were asked for, and that
// nothing unwinds. `A` promises the first, and gets every call as it came; `count` does not panic.
unsafe impl<A: GlobalAlloc> GlobalAlloc for Counting<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: `alloc` asks for a layout that is not empty: our caller has promised that.
        unsafe { self.0.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: `alloc_zeroed` asks for what `alloc` does: our caller has promised that.
        unsafe { self.0.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, len: usize) -> *mut u8 {
        count();
        // SAFETY: `realloc` asks for a block of `A` with its layout, and for a length that is not
        // zero and that fits: our caller has promised that of us, and our blocks are those of `A`.
        unsafe { self.0.realloc(block, layout, len) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: `dealloc` asks for a block of `A` with its layout: as above.
        unsafe { self.0.dealloc(block, layout) }
    }
}
