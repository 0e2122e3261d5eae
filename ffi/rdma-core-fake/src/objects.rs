//! Objects that the caller of libibverbs knows by their addresses.

use std::mem;

/// Makes an object that the caller knows by address, all zero but for what `fill` sets.
pub(crate) fn make<T>(fill: impl FnOnce(&mut T)) -> *mut T {
    // SAFETY: `zeroed` asks for a type that may be all zero: integers and raw pointers.
    let mut object: Box<T> = Box::new(unsafe { mem::zeroed() });
    fill(&mut object);
    Box::into_raw(object)
}

/// Ends an object that `make` made.
pub(crate) fn end<T>(object: *mut T) {
    // SAFETY: `from_raw` asks for an address that `into_raw` gave, once: the caller of libibverbs
    // destroys what it created, once.
    drop(unsafe { Box::from_raw(object) });
}

/// What the caller's pointer points to, for as long as the call.
pub(crate) fn at<'a, T>(object: *mut T) -> &'a mut T {
    // SAFETY: the caller of libibverbs passes objects that exist, and that the library owns or may
    // change during the call.
    unsafe { &mut *object }
}
