//! What a program of this host says to the gateway, and what it is answered.

use smcgate_door::{Name, Reply, Request};

/// Reads `data` as each kind of message, and as the name of a socket.
///
/// # Panics
///
/// If what is read is not what would be written of it, but for bytes that are reserved.
pub fn run(data: &[u8]) {
    if let Ok(request) = Request::decode(data) {
        assert_eq!(Request::decode(&request.encode()), Ok(request));
    }
    if let Ok(reply) = Reply::decode(data) {
        assert_eq!(Reply::decode(&reply.encode()), Ok(reply));
    }
    if let Some(name) = Name::decode(data) {
        assert_eq!(Name::decode(&name.encode()), Some(name));
    }
}
