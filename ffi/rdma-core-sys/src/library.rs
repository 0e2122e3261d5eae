//! Finds libibverbs and the functions that we call.
#![allow(missing_docs, reason = "the manual pages of libibverbs describe these names")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::mem;
use std::ops::Deref;

use crate::types::*;

/// Why libibverbs cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Missing {
    /// The file cannot be opened; what the loader says about it, which names the file.
    File(String),
    /// The file has no function of this name: it is of a version that we do not know.
    Function {
        /// The file.
        file: String,
        /// The function.
        name: &'static str,
    },
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(loader) => write!(f, "{loader}"),
            Self::Function { file, name } => write!(f, "{file} has no function {name}"),
        }
    }
}

/// libibverbs. Whoever has a value may rely on what the functions do: there is no safe way to make
/// one of other functions.
pub struct Library(Functions);

impl Library {
    /// A library of the caller's own.
    ///
    /// # Safety
    ///
    /// The functions keep all promises of libibverbs.
    pub const unsafe fn new(functions: Functions) -> Self {
        Self(functions)
    }
}

impl Deref for Library {
    type Target = Functions;

    fn deref(&self) -> &Functions {
        &self.0
    }
}

/// Declares [`Functions`] with these, and the loader of [`Library`].
macro_rules! functions {
    ($($name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions of libibverbs, by their addresses.
        pub struct Functions {
            $(pub $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Library {
            /// Opens the library `file` and finds all functions. It stays open for ever.
            ///
            /// # Errors
            ///
            /// [`Missing`] says what is not there.
            ///
            /// # Safety
            ///
            /// If the loader finds a file of this name, it is libibverbs: its functions have the
            /// signatures of the C headers, and its constructors may run now.
            pub unsafe fn open(file: &CStr) -> Result<Self, Missing> {
                // SAFETY: `dlopen` asks for a string that ends with zero, which a `CStr` is, and
                // for constructors that may run, which the caller promised.
                let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW) };
                if handle.is_null() {
                    return Err(Missing::File(loader_says()));
                }
                $(
                    let name = concat!(stringify!($name), "\0");
                    let name = CStr::from_bytes_with_nul(name.as_bytes()).expect("one zero byte");
                    // SAFETY: `dlsym` asks for a handle of `dlopen` that is open, which it stays
                    // for ever, and for a string that ends with zero.
                    let symbol = unsafe { libc::dlsym(handle, name.as_ptr()) };
                    if symbol.is_null() {
                        let file = file.to_string_lossy().into_owned();
                        return Err(Missing::Function { file, name: stringify!($name) });
                    }
                    // SAFETY: `transmute` asks for a function of this signature at the address:
                    // the caller promised that the file is libibverbs, and the signature is that
                    // of its headers.
                    let $name = unsafe {
                        mem::transmute::<
                            *mut c_void,
                            unsafe extern "C" fn($($argument),*) $(-> $result)?
                        >(symbol)
                    };
                )*
                Ok(Self(Functions { $($name,)* }))
            }
        }
    };
}

functions! {
    ibv_get_device_list(*mut c_int) -> *mut *mut ibv_device;
    ibv_free_device_list(*mut *mut ibv_device);
    ibv_get_device_name(*mut ibv_device) -> *const c_char;
    ibv_open_device(*mut ibv_device) -> *mut ibv_context;
    ibv_close_device(*mut ibv_context) -> c_int;
    ibv_query_device(*mut ibv_context, *mut ibv_device_attr) -> c_int;
    ibv_query_port(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
    _ibv_query_gid_table(*mut ibv_context, *mut ibv_gid_entry, usize, u32, usize) -> isize;
    ibv_alloc_pd(*mut ibv_context) -> *mut ibv_pd;
    ibv_dealloc_pd(*mut ibv_pd) -> c_int;
    ibv_reg_mr_iova2(*mut ibv_pd, *mut c_void, usize, u64, c_uint) -> *mut ibv_mr;
    ibv_dereg_mr(*mut ibv_mr) -> c_int;
    ibv_create_comp_channel(*mut ibv_context) -> *mut ibv_comp_channel;
    ibv_destroy_comp_channel(*mut ibv_comp_channel) -> c_int;
    ibv_create_cq(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int)
        -> *mut ibv_cq;
    ibv_destroy_cq(*mut ibv_cq) -> c_int;
    ibv_get_cq_event(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
    ibv_ack_cq_events(*mut ibv_cq, c_uint);
    ibv_create_qp(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    ibv_modify_qp(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    ibv_destroy_qp(*mut ibv_qp) -> c_int;
    ibv_get_async_event(*mut ibv_context, *mut ibv_async_event) -> c_int;
    ibv_ack_async_event(*mut ibv_async_event);
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").finish_non_exhaustive()
    }
}

/// The loader's last complaint.
fn loader_says() -> String {
    // SAFETY: `dlerror` asks for nothing.
    let message = unsafe { libc::dlerror() };
    assert!(!message.is_null(), "dlopen has just failed in this thread");
    // SAFETY: `from_ptr` asks for a string that ends with zero and stays: it stays until this
    // thread calls the loader again, and it is copied before.
    unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An operator who has no libibverbs must read which file is missing.
    #[test]
    fn a_missing_file_is_named() {
        // SAFETY: there is no file of this name.
        let missing = unsafe { Library::open(c"libibverbs-of-nobody.so.1") }.unwrap_err();
        assert!(missing.to_string().contains("libibverbs-of-nobody.so.1"), "{missing}");
    }

    /// A library of another version must not be called: the line names the first function that it
    /// lacks.
    #[test]
    fn a_missing_function_is_named() {
        // SAFETY: libc's constructors ran long ago, and no function is found that could be called.
        let missing = unsafe { Library::open(c"libc.so.6") }.unwrap_err();
        let name = "ibv_get_device_list";
        assert_eq!(missing, Missing::Function { file: "libc.so.6".into(), name });
        assert_eq!(missing.to_string(), "libc.so.6 has no function ibv_get_device_list");
    }
}
