//! First contacts that are under way: at most one with each peer; other rendezvous with that peer
//! wait for it.

use std::collections::BTreeMap;

use crate::groups::GroupId;
use crate::slab::Key;

/// Who waits for the outcome of a first contact.
#[derive(Debug, Default)]
pub(super) struct FirstContact {
    /// The rendezvous that it is part of, unless that has ended already.
    pub(super) founder: Option<Key>,
    /// Rendezvous with the same peer that wait for the outcome, oldest first.
    pub(super) waiting: Vec<Key>,
}

/// First contacts by the link groups that they found.
#[derive(Debug, Default)]
pub(super) struct FirstContacts(BTreeMap<GroupId, FirstContact>);

impl FirstContacts {
    /// `founder` begins the first contact that founds `group`.
    pub(super) fn begin(&mut self, group: GroupId, founder: Key) {
        let contact = FirstContact { founder: Some(founder), waiting: Vec::new() };
        let before = self.0.insert(group, contact);
        assert!(before.is_none(), "a group is founded once");
    }

    /// Lets `key` wait for the outcome.
    pub(super) fn wait(&mut self, group: GroupId, key: Key) {
        let contact = self.0.get_mut(&group).expect("a group that is being founded has a founder");
        contact.waiting.push(key);
    }

    /// Removes the founder. Returns true if `key` was the founder: the caller must then end the
    /// group.
    pub(super) fn leave(&mut self, group: GroupId, key: Key) -> bool {
        let founder = self.0.get_mut(&group).map(|contact| &mut contact.founder);
        founder.is_some_and(|founder| founder.take_if(|founder| *founder == key).is_some())
    }

    /// The first contact failed. Returns the founder the first time only, so that it is told once.
    pub(super) fn fail(&mut self, group: GroupId) -> Option<Key> {
        self.0.get_mut(&group)?.founder.take()
    }

    /// The first contact is over, successful or not. Returns none if it had ended before.
    pub(super) fn end(&mut self, group: GroupId) -> Option<FirstContact> {
        self.0.remove(&group)
    }
}
