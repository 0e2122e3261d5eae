//! What runs have met of what can be said about links and rkeys, exchange by exchange.
//!
//! Counted where messages arrive, so a collision is one that somebody had to resolve: what belongs
//! to one exchange arrives before the other side has heard the end of another (RFC 3.5.5.3).

use std::collections::BTreeMap;

use smcr_proto::link_group::Role;
use smcr_proto::wire::llc::{AddLink, ConfirmLink, ConfirmRkey, DeleteLink, DeleteRkey, Llc};

/// How often what was met.
#[derive(Clone, Debug, Default)]
pub(crate) struct Met(BTreeMap<&'static str, u64>);

impl Met {
    pub(crate) fn note(&mut self, what: &'static str) {
        self.note_times(what, 1);
    }

    pub(crate) fn note_times(&mut self, what: &'static str, times: u64) {
        if times == 0 {
            return;
        }
        *self.0.entry(what).or_default() += times;
    }

    pub(crate) fn add(&mut self, other: &Self) {
        other.0.iter().for_each(|(what, times)| self.note_times(what, *times));
    }

    pub(crate) fn has(&self, what: &str) -> bool {
        self.0.contains_key(what)
    }

    pub(crate) fn times(&self, what: &str) -> u64 {
        self.0.get(what).copied().unwrap_or(0)
    }

    /// What thousands of runs must meet and these did not.
    pub(crate) fn missing(&self) -> Vec<&'static str> {
        EXPECTED.into_iter().filter(|what| !self.0.contains_key(what)).collect()
    }
}

/// What goes on in one group, as far as it was heard.
#[derive(Debug, Default)]
pub(crate) struct Talk {
    adding: bool,
    deleting: bool,
    /// The server's rkeys, and the client's.
    telling: [bool; 2],
}

impl Talk {
    /// A message arrived at the side that has this role.
    pub(crate) fn hear(&mut self, hears: Role, llc: &Llc, met: &mut Met) {
        self.collide(hears, llc, met);
        match llc {
            Llc::AddLink(AddLink { reply: false, .. }) if hears == Role::Client => {
                *self = Self { adding: true, ..Self::default() };
            }
            Llc::AddLink(AddLink { rejected: true, .. }) => {
                met.note("a link is refused");
                self.adding = false;
            }
            Llc::ConfirmLink(ConfirmLink { reply: true, .. }) => {
                if std::mem::take(&mut self.adding) {
                    met.note("a link is added");
                }
            }
            Llc::DeleteLink(message) => self.hear_delete(hears, message, met),
            Llc::ConfirmRkey(ConfirmRkey { reply, negative, .. }) => {
                self.telling[hears.speaker(*reply)] = !reply;
                match (reply, negative) {
                    (true, true) => met.note("rkeys are refused"),
                    (true, false) => met.note("rkeys are confirmed"),
                    (false, _) => {}
                }
            }
            Llc::DeleteRkey(DeleteRkey { reply, .. }) => {
                self.telling[hears.speaker(*reply)] = !reply;
                if *reply {
                    met.note("rkeys are deleted");
                }
            }
            Llc::AddLink(_)
            | Llc::AddLinkContinuation(_)
            | Llc::ConfirmLink(_)
            | Llc::ConfirmRkeyContinuation(_)
            | Llc::TestLink(_) => {}
        }
    }

    fn hear_delete(&mut self, hears: Role, message: &DeleteLink, met: &mut Met) {
        match (message.reply, message.all, hears) {
            (false, true, Role::Client) => met.note("a server deletes a group"),
            (false, true, Role::Server) => met.note("a client deletes a group"),
            (false, false, Role::Client) => {
                met.note("a server deletes a link");
                *self = Self { deleting: true, ..Self::default() };
            }
            (false, false, Role::Server) => met.note("a client asks to delete a link"),
            (true, _, Role::Server) => self.deleting = false,
            (true, _, Role::Client) => {}
        }
    }

    /// Notes what `llc` runs into.
    fn collide(&self, hears: Role, llc: &Llc, met: &mut Met) {
        if llc.is_reply() {
            return;
        }
        let [servers, clients] = self.telling;
        // Links are the server's business: what it says itself runs into nothing.
        let under_way = match hears {
            Role::Server => {
                [(self.adding, ADD), (self.deleting, DELETE), (servers, RKEYS_OF_SERVER)]
            }
            Role::Client => [(false, ADD), (false, DELETE), (clients, RKEYS_OF_CLIENT)],
        };
        for [test, add, delete, delete_all, rkeys] in
            under_way.into_iter().filter_map(|(is_open, names)| is_open.then_some(names))
        {
            match llc {
                Llc::TestLink(_) => met.note(test),
                Llc::AddLink(_) => met.note(add),
                Llc::DeleteLink(DeleteLink { all: true, .. }) => met.note(delete_all),
                Llc::DeleteLink(_) => met.note(delete),
                Llc::ConfirmRkey(_) | Llc::DeleteRkey(_) => met.note(rkeys),
                Llc::AddLinkContinuation(_)
                | Llc::ConfirmLink(_)
                | Llc::ConfirmRkeyContinuation(_) => {}
            }
        }
    }
}

/// Who told rkeys, as an index.
trait Speaker {
    /// Of a message that this side hears, and that answers one of its own if `reply`.
    fn speaker(self, reply: bool) -> usize;
}

impl Speaker for Role {
    fn speaker(self, reply: bool) -> usize {
        usize::from((self == Self::Server) != reply)
    }
}

/// What runs into the addition of a link.
const ADD: [&str; 5] = [
    "TEST LINK while a link is added",
    "ADD LINK while a link is added",
    "DELETE LINK while a link is added",
    "DELETE LINK of all while a link is added",
    "rkeys while a link is added",
];
/// What runs into the deletion of a link.
const DELETE: [&str; 5] = [
    "TEST LINK while a link is deleted",
    "ADD LINK while a link is deleted",
    "DELETE LINK while a link is deleted",
    "DELETE LINK of all while a link is deleted",
    "rkeys while a link is deleted",
];
/// What runs into what a server tells of its rkeys.
const RKEYS_OF_SERVER: [&str; 5] = [
    "TEST LINK while a server tells rkeys",
    "ADD LINK while a server tells rkeys",
    "DELETE LINK while a server tells rkeys",
    "DELETE LINK of all while a server tells rkeys",
    "rkeys while a server tells rkeys",
];
/// What runs into what a client tells of its rkeys.
const RKEYS_OF_CLIENT: [&str; 5] = [
    "TEST LINK while a client tells rkeys",
    "ADD LINK while a client tells rkeys",
    "DELETE LINK while a client tells rkeys",
    "DELETE LINK of all while a client tells rkeys",
    "rkeys while a client tells rkeys",
];
/// What thousands of runs must have met.
const EXPECTED: [&str; 12] = [
    "a client asks to delete a link",
    "a connection changes pollers",
    "a link is added",
    "a link is refused",
    "a port is gone",
    "a server deletes a link",
    "an LLC message is garbled",
    "an LLC message is lost",
    "no memory for a connection",
    "rkeys are confirmed",
    "rkeys are deleted",
    "rkeys are refused",
];
