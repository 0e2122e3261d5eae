//! What memory promises to those who hand its addresses to a NIC.

/// Where memory is, and how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Address of the first byte.
    pub address: u64,
    /// Length in bytes.
    pub len: usize,
}

/// Memory lent to a NIC, which reads it.
///
/// # Safety
///
/// While the value lives, the bytes of its extent stay mapped and in place, and nobody writes them.
pub unsafe trait Lent {
    /// The bytes. The same for the life of the value.
    fn extent(&self) -> Extent;
}

/// Memory that a NIC may read and write at any time.
///
/// # Safety
///
/// While the value lives, the bytes of its extent stay mapped and in place, and no Rust reference
/// to any of them exists, but to atomic words while one of them is accessed.
pub unsafe trait Exposed: Send + Sync {
    /// The bytes. The same for the life of the value.
    fn extent(&self) -> Extent;
}
