//! How the ends of a queue pair in shared memory wake each other.

#[path = "../../../dataplane/rnic/src/shm/nap.rs"]
mod nap;
pub mod ring;
mod sync;
