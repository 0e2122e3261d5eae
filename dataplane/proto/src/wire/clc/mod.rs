//! CLC: the rendezvous over the TCP stream, before application data (RFC 3.2, A.2).

pub mod accept;
pub mod decline;
pub mod proposal;
