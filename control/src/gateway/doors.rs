//! Two listeners that exist for a while, by which `smcgate doctor` reaches a peer: one connects by
//! SMC-R, the other by TCP.

use std::net::SocketAddr;
use std::time::Duration;

use smcr_proto::Instant;
use smcr_rnic::Rnic;

use super::Gateway;
use super::reload::number;
use crate::config::Config;
use crate::listener::{Listener, local_address};
use crate::operate::OperateError;
use crate::reactor::Token;

/// The listeners of a measurement.
#[derive(Debug)]
pub(super) struct Doors {
    slots: Vec<usize>,
    until: Instant,
}

impl Doors {
    /// Whether the listener in `slot` is one of them.
    pub(super) fn has(&self, slot: usize) -> bool {
        self.slots.contains(&slot)
    }

    /// When they are closed.
    pub(super) fn until(&self) -> Instant {
        self.until
    }
}

impl<N: Rnic> Gateway<N> {
    /// Opens two listeners whose connections go to `peer`, for a minute. Returns their transports
    /// and addresses, such as `smc 127.0.0.1:40001`.
    ///
    /// # Errors
    ///
    /// If the gateway stops, or has no descriptor left.
    pub(super) fn open_doors(
        &mut self,
        now: Instant,
        peer: SocketAddr,
    ) -> Result<Vec<String>, OperateError> {
        if self.draining.is_some() {
            return Err(OperateError::Refused("the gateway is stopping".to_owned()));
        }
        // Those of a measurement that is over; of two at once, the later one goes on.
        self.close_doors(now);
        let mut doors = Doors { slots: Vec::new(), until: now + OPEN_FOR };
        let mut notes = Vec::new();
        for connect in ["smc", "tcp"] {
            match self.open_door(peer, connect) {
                Ok((slot, at)) => {
                    doors.slots.push(slot);
                    notes.push(format!("{connect} {at}"));
                }
                Err(why) => {
                    self.doors = Some(doors);
                    // Somebody may have connected to the first one.
                    self.decide_anew();
                    self.close_doors(now);
                    return Err(OperateError::Refused(format!("no listener: {why}")));
                }
            }
        }
        self.doors = Some(doors);
        self.decide_anew();
        Ok(notes)
    }

    fn open_door(
        &mut self,
        peer: SocketAddr,
        connect: &str,
    ) -> Result<(usize, SocketAddr), std::io::Error> {
        let text = format!(
            "[[listener]]\nname = \"doctor-{connect}\"\nbind = \"127.0.0.1:1\"\n\
             connect = \"{connect}\"\nupstream = \"{peer}\"\n"
        );
        let config = Config::parse(&text, "doctor").map_err(std::io::Error::other)?;
        let mut config = config.listeners.into_iter().next().expect("one was written");
        config.bind.set_port(0);
        let socket = self.common.listen(&config, &self.option)?;
        let at = local_address(&socket).ok_or(std::io::ErrorKind::AddrNotAvailable)?;
        config.bind = at;
        let slot = self.listeners.iter().position(Listener::is_gone);
        let slot = slot.unwrap_or(self.listeners.len());
        self.reactor.watch(&socket, Token::Listener(number(slot)))?;
        let listener = Listener::new(config, self.common.clone(), Some(socket));
        self.put_listener(slot, listener);
        Ok((slot, at))
    }

    /// Closes the listeners of a measurement; their connections go on.
    pub(super) fn close_doors(&mut self, now: Instant) {
        let Some(Doors { slots, .. }) = self.doors.take() else { return };
        for slot in slots {
            self.close(now, slot);
            self.listeners[slot].retired = true;
        }
        self.decide_anew();
    }
}

/// As long as a measurement may take.
const OPEN_FOR: Duration = Duration::from_secs(60);
