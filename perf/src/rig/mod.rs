//! The test rig that a run builds and removes: namespaces, servers, proxies.

pub(crate) mod bench;
pub(crate) mod calls;
pub(crate) mod folder;
pub(crate) mod janitor;
pub(crate) mod namespaces;
pub(crate) mod paths;
pub(crate) mod process;
pub(crate) mod time_wait;
pub(crate) mod totals;
pub(crate) mod watch;
