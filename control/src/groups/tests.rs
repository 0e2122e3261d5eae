//! Two hosts, their link groups, and nothing else.

mod contact;
mod links;
mod rig;
