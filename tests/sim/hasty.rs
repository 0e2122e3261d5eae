//! Gateways that end connections too hastily, imitated on the way: CDC messages are rewritten into
//! those that such a gateway would have sent or understood.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use smcr_proto::wire::cdc::{Cdc, is_cdc};
use smcr_proto::{AlertToken, Gid};
use smcr_rnic::Message;
use smcr_rnic::sim::{Network, Parcel};

/// Which gateway, and the token by which its peer speaks of a connection there.
pub(crate) type Ear = (usize, AlertToken);
/// From each side of a connection to the other.
pub(crate) type Tokens = Arc<Mutex<BTreeMap<Ear, Ear>>>;

/// What such a gateway does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// An element is given to the next connection when the peer has said D, but not that it writes
    /// nothing again: C (RFC 4.8.1).
    ReuseAfterClose,
    /// The same, where the connection was aborted and the peer may not have heard of it.
    ReuseAfterAbort,
    /// One gateway says C before all that it wrote has arrived, and writes it again on another link
    /// although the other side has said C (RFC 4.8.1).
    ReplayAfterClosed,
}

/// Plants a fault in all gateways of a network. `tokens` are to be kept by whoever knows them.
pub(crate) fn plant(network: &Network, fault: Fault, tokens: &Tokens) {
    let mut hasty = Hasty::new(fault, Tokens::clone(tokens));
    network.tap(move |parcel, messages| {
        for message in messages.iter_mut().filter(|message| is_cdc(message)) {
            hasty.pass(parcel, message);
        }
    });
}

/// Gateways that do not wait for the last word of the other side.
pub(crate) struct Hasty {
    fault: Fault,
    tokens: Tokens,
    /// Sides of connections that have heard D, and that have said C or A.
    heard_done: BTreeSet<Ear>,
    said_closed: BTreeSet<Ear>,
    said_abort: BTreeSet<Ear>,
}

impl Hasty {
    pub(crate) fn new(fault: Fault, tokens: Tokens) -> Self {
        let [heard_done, said_closed, said_abort] = [(); 3].map(|()| BTreeSet::new());
        Self { fault, tokens, heard_done, said_closed, said_abort }
    }

    /// Rewrites a CDC message into the one that a faulty gateway would have sent or understood.
    pub(crate) fn pass(&mut self, parcel: &Parcel, message: &mut Message) {
        let Ok(mut cdc) = Cdc::decode(message) else { return };
        let Gid([.., number]) = parcel.target;
        let hears = (usize::from(number) - 1, cdc.token);
        let tokens = self.tokens.lock().expect("nobody panics with it");
        let Some(speaks) = tokens.get(&hears).copied().filter(|_| !cdc.failover_validation) else {
            return;
        };
        if cdc.sending_done {
            self.heard_done.insert(hears);
        }
        if cdc.connection_closed {
            self.said_closed.insert(speaks);
        }
        if cdc.abnormal_close {
            self.said_abort.insert(speaks);
        }
        // Both have said D, and this side says nothing of whether all has arrived.
        let both_done = cdc.sending_done && self.heard_done.contains(&speaks);
        let (speaker, _) = speaks;
        match self.fault {
            Fault::ReuseAfterAbort => cdc.abnormal_close |= self.said_abort.contains(&hears),
            Fault::ReuseAfterClose => cdc.connection_closed |= both_done,
            Fault::ReplayAfterClosed if speaker == 0 => cdc.connection_closed |= both_done,
            Fault::ReplayAfterClosed => {
                cdc.connection_closed &= self.said_closed.contains(&hears);
            }
        }
        *message = cdc.encode();
    }
}
