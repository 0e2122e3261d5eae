//! A function that unwinding asks for where it was built for glibc, and the library for musl.

use std::ffi::{c_int, c_void};

/// Where the unwinding tables of an address are. We do not know: then all objects are walked over,
/// as musl has it.
#[unsafe(no_mangle)]
extern "C" fn _dl_find_object(_address: *mut c_void, _result: *mut c_void) -> c_int {
    -1
}
