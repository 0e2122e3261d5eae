//! Memory that others write.
//!
//! A peer's NIC writes RMB elements while we run, and our NIC reads send chunks while we go on.
//! Neither takes part in Rust's rules, so no plain reference to such a byte ever exists. Bytes move
//! by atomic copy between this memory and slices of ours, or by address through a system call.
//! These are all the ways: [`Region::copy_in`], [`Region::copy_out`], [`Region::copy_from`],
//! [`Region::zero`], single words by [`Region::word`], and `smcr_os::receive` and `send` on the
//! [`Foreign`](smcr_os::Foreign) values made here, which [`foreign`] also copies to and from memory
//! that a local program shares. What the kernel reads or writes in a system call
//! is no access of Rust code, as little as that of a NIC. Nor is what another process does to a
//! region that it [shares](Region::shared).
//!
//! What the protocol promises (an honest peer writes only where we said there is room) makes the
//! *contents* right. It is never used for memory safety: a dishonest peer can make us forward
//! garbage to the socket it chose, nothing worse.
//!
//! - `contested`: copies that stay defined when others write at the same time.
//! - [`foreign`]: the same between such memory and that of another process.
//! - [`region`]: a mapping, shared by whoever still needs it; the owner of all below.
//! - `occupants`: who may write to its pages, and when they can be given back.
//! - [`rmb`]: a region carved into elements of one size, which come and go by value.
//! - [`send_pool`]: chunks that sockets fill and NICs empty; what is lent comes back as a
//!   [`Lease`].

mod contested;
pub mod foreign;
mod occupants;
pub mod region;
pub mod rmb;
pub mod send_pool;
mod sync;

pub use region::{Backing, Pinned, Placer, Region, Unfinished};
pub use rmb::{Rmb, Rmbe};
pub use send_pool::{Lease, SendPool, Vacant};
