//! Rings in shared memory, by which a program and the gateway pass the bytes of one stream.
//!
//! A connection of a program with the preload library has a Unix socket, by which its bytes go
//! (level 1). Where both sides want it, they go by two rings in a memfd instead (level 2), and the
//! socket says only when there is something to do: to poll, epoll and select it looks as if the
//! bytes went by it. The [`Gateway`] makes the memory, and an [`Application`] maps it.
//!
//! The elements of an RMB are not shared themselves: an RMB is registered with an RNIC as a whole,
//! and a program must not see the elements of others. So the gateway copies between the rings and
//! the memory of whatever RNIC there is.
//!
//! The two sides have words in the first page, each on a cache line of its own:
//!
//! | word | who writes | meaning |
//! |---|---|---|
//! | `send.head`, `receive.tail` | application | how many bytes it has put in, and taken out |
//! | `send.tail`, `receive.head` | gateway | the same of the gateway |
//! | `token` | both | 1: a byte lies in the application's socket, which makes it readable |
//! | `wants_token` | application | it has left bytes in the ring, and no token |
//! | `asleep` | both | not 0: the gateway looks at the rings only after a *kick* |
//! | `blocked` | gateway | the receive ring was full, and somebody waits for room |
//! | `spinning` | both | so many threads watch the receive ring: no token is needed |
//! | `finished` | application | it sends no more; kicks need the socket, which is not shut down |
//! | `ended` | gateway | it sends no more; the socket has ended, too |
//! | `closed` | gateway | the connection is over; the number may be another file by now |
//! | `writing` | application | the thread that does so now |
//! | those behind it | both | how the two programs of one gateway leave it out: see [`Shortcut`] |
//!
//! A kick is a byte that the application sends by its socket, and zero. Whoever goes to sleep says
//! so first and then looks at the rings again; whoever changes a word looks afterwards whether the
//! other side sleeps. Both put a fence between the two, so at least one of them sees the other.
//!
//! If the ring is full, more such bytes make the socket unwritable, and the gateway leaves them
//! there until half of the ring is free. What is not zero comes from a process that has the socket
//! and knows nothing of rings: the gateway resets the connection, rather than lose these bytes.
//!
//! The gateway trusts nothing in the memory: it keeps its own indexes, and those of the application
//! are checked ([`Broken`]). What a hostile program does there harms its own stream, and no other.
//! No reference to a byte of the rings exists: they are copied by address.
//!
//! The half of the gateway is there with the feature `gateway` only: the preload library, which is
//! built for other C libraries, too, does without. The half of the application uses no heap, and no
//! function of the C library that the preload library replaces.

mod application;
#[cfg(feature = "gateway")]
mod gateway;
mod layout;
mod lock;
#[cfg(feature = "gateway")]
mod program;
mod shortcut;
#[cfg(feature = "gateway")]
mod span;
mod transfer;

pub use application::Application;
#[cfg(feature = "gateway")]
pub use gateway::{Broken, Gateway, News};
pub use layout::RING_LEN;
pub use lock::{Held, thread};
#[cfg(feature = "gateway")]
pub use program::Program;
pub use shortcut::Shortcut;
#[cfg(feature = "gateway")]
pub use span::Span;
