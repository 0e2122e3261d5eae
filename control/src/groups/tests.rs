//! Two hosts, their link groups, and nothing else.

mod claims;
mod contact;
mod leaving;
mod links;
mod rig;
