//! A setting of libibverbs that is only read from the environment.
//!
//! When a device is pulled out, the calls that destroy its objects fail, and the drivers leave the
//! memory of these objects behind. With this variable the library lets them free it. The library
//! reads the variable when it is loaded, which is when the program opens its first RNIC.

use std::ffi::c_int;

/// The C library calls this before `main`, when the process has one thread.
#[used]
// SAFETY: the section asks for functions of this signature, which may be called before `main`: ours
// needs nothing of the standard library.
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = set;

extern "C" fn set() {
    let keep_what_the_operator_set: c_int = 0;
    // SAFETY: `setenv` asks for two strings that end with zero, and that no other thread uses the
    // environment: there is no other thread before `main`.
    unsafe { libc::setenv(NAME.as_ptr(), c"1".as_ptr(), keep_what_the_operator_set) };
}

const NAME: &std::ffi::CStr = c"RDMAV_ALLOW_DISASSOC_DESTROY";

#[cfg(test)]
mod tests {
    /// Without it each removal of a device leaks the memory that the driver has for its objects.
    #[test]
    fn the_library_will_find_the_variable() {
        let name = super::NAME.to_str().expect("ASCII");
        assert!(std::env::var_os(name).is_some(), "{name}");
    }
}
