//! Two hosts, their link groups, and nothing else.

mod claims;
mod contact;
mod dense;
mod leaving;
mod links;
mod rig;
