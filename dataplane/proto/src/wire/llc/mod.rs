//! LLC: management of links and rkeys over the queue pair, 44 bytes each (RFC 3.3, A.3).

pub mod add_link;
pub mod confirm_link;
pub mod delete_link;
pub mod rkeys;
pub mod test_link;

/// Length of every LLC and CDC message of SMC-Rv1, in bytes.
pub const LEN: usize = 44;
