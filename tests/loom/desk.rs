//! A poller of which only the mail is left, and one connection that changes hands.

use smcr_proto::AlertToken;
use smcr_proto::wire::cdc::Cdc;

use crate::mail::{Letter, Mail, Place};
use crate::mailbox::{Waker, mailbox};
use crate::names::{ConnectionId, GroupId};
use crate::owners::Owners;
use crate::sync::Arc;

/// The connection.
const CONNECTION: ConnectionId = ConnectionId { slot: 1, generation: 1 };
/// Its link group.
const GROUP: GroupId = GroupId(7);

/// What a poller has and hears.
#[derive(Debug)]
pub struct Desk {
    mail: Mail<()>,
    has_connection: bool,
    /// Messages that came while the connection was on its way here.
    parked: usize,
    /// Messages that the connection has taken in here.
    pub taken_in: usize,
}

/// As many desks as there are names in `N`. The first has the connection.
pub fn desks<const N: usize>() -> [Desk; N] {
    let owners = Arc::new(Owners::new());
    owners.set(CONNECTION, GROUP, 0);
    let ends = [(); N].map(|()| mailbox(4, Waker::new().expect("it never fails")));
    let neighbours = Arc::new(ends.iter().map(|(sender, _)| sender.clone()).collect());
    let mut index = 0;
    ends.map(|(_, letters)| {
        let mail = Mail::new(letters, Arc::clone(&neighbours), Arc::clone(&owners), index);
        index += 1;
        Desk { mail, has_connection: index == 1, parked: 0, taken_in: 0 }
    })
}

impl Desk {
    /// Gives the connection to another desk.
    pub fn hand_over(&mut self, to: u8) {
        assert!(std::mem::take(&mut self.has_connection));
        self.mail.hand_over(CONNECTION, GROUP, to, ());
    }

    /// A message about the connection comes by a link of this desk.
    pub fn hear(&mut self) {
        let token = u32::from(CONNECTION.generation) << 16 | u32::from(CONNECTION.slot);
        let message = Cdc { token: AlertToken(token), ..Cdc::default() };
        match self.mail.place_of(CONNECTION, GROUP) {
            _ if self.has_connection => self.taken_in += 1,
            Place::Coming => self.parked += 1,
            Place::At(desk) => {
                self.mail.pass_on(desk, GROUP, message.into()).expect("few messages")
            }
            place @ (Place::Here | Place::Foreign | Place::Unknown) => {
                panic!("lost: {place:?}")
            }
        }
    }

    /// Reads one letter, if there is one. Returns whether there was.
    pub fn read(&mut self) -> bool {
        match self.mail.receive() {
            None => return false,
            Some(Letter::Adopt(())) => {
                self.has_connection = true;
                self.taken_in += std::mem::take(&mut self.parked);
            }
            Some(Letter::Deliver { .. }) => self.hear(),
            Some(Letter::Abort { .. } | Letter::CloseKept { .. }) => panic!("nobody says that"),
        }
        true
    }

    /// Whether the connection is here.
    pub fn has_connection(&self) -> bool {
        self.has_connection
    }
}
