//! The CLC rendezvous: which connections become SMC-R, and which stay TCP.
//!
//! On the client side the connection to the peer is made first; on the server side the connection
//! to the application is, and Accept is not sent before it is there: an upstream that refuses is
//! then a reset, seen by the application at the far end, and nothing has to be undone.
//!
//! Nothing here knows a socket or a clock. Inputs go into an [`Endpoint`], which says by
//! [`Effect`]s what its owner must do. The gateway runs it over sockets, the simulator over pipes
//! that delay and cut as a seed dictates.
//!
//! - [`endpoint`] has all rendezvous of a gateway, and queues of what is to be done;
//! - `state` is one rendezvous, `beginning` its first step, and `negotiation` the next; `client`
//!   and `server` answer what the machines of the two sides ask;
//! - `waiting` is what an answer may have to wait for, `resources` what it takes of a link group;
//! - [`conversation`] is what is said in a rendezvous;
//! - `path` keeps connections from links that carry nothing;
//! - `shared` is what rendezvous share: link groups, places, and what they have learned;
//! - [`facts`] is what an owner tells, [`effect`] what it is told.

mod beginning;
mod client;
pub mod conversation;
pub mod effect;
pub mod endpoint;
pub mod facts;
pub mod fallbacks;
mod first_contacts;
mod negotiation;
mod path;
mod resources;
mod server;
mod shared;
mod state;
mod waiting;

pub use effect::{Closed, Counts, Effect, Limit, Stage, Told, Why};
pub use endpoint::Endpoint;
pub use facts::{Arrival, Settings, Side, Surroundings, Terms};

#[cfg(test)]
mod tests;
