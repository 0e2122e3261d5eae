//! libibverbs as its C headers describe it: structures, constants, and functions found at run time.
//!
//! No logic lives here. Structures have only the fields that we use; the rest is padding. The test
//! `headers` compares every offset and constant with the installed headers. We open the library
//! with `dlopen`, so that one binary works with and without it. The calls that the headers define
//! inline go through the table in [`ibv_context`].
//!
//! Names are those of the headers, and the manual pages of libibverbs describe them.

mod library;
mod types;

pub use library::{Functions, Library, Missing};
pub use types::*;
