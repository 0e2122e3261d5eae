//! Which sockets of local programs offer SMC-R in their SYNs, or answer it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use smcgate_door::Reply;
use smcr_proto::Instant;
use smcr_rnic::Rnic;

use super::{LATER_S, SOON_S};
use crate::gateway::Gateway;
use crate::slab::Key;
use crate::smc_option::{OptionSource, Ports};

impl<N: Rnic> Gateway<N> {
    /// Has the SYN of `socket` offer SMC-R, if a connection to `peer` may become SMC-R.
    pub(super) fn mark(
        &mut self,
        now: Instant,
        caller: Key,
        peer: SocketAddr,
        socket: &OwnedFd,
    ) -> Reply {
        let marked = match self.obstacle(now, caller, peer) {
            Some(seconds) => Err(seconds),
            None => self.option.mark_client(socket).map_err(|_| SOON_S),
        };
        match marked {
            Ok(()) => Reply::Marked,
            Err(seconds) => {
                // It may have been marked for another peer before.
                self.option.unmark(socket);
                Reply::Leave { seconds }
            }
        }
    }

    /// Whether the option tells which peers have SMC-R. A list of addresses does not do: it names
    /// no ports, and programs connect to all of them.
    pub(super) fn is_marking(&self) -> bool {
        matches!(self.option, OptionSource::Ebpf(_))
    }

    /// What keeps a connection of a program to `peer` from becoming SMC-R: for so many seconds.
    fn obstacle(&self, now: Instant, caller: Key, peer: SocketAddr) -> Option<u32> {
        let local = self.local.as_ref()?;
        let listener = &self.listeners[usize::from(local.connects)];
        let may = self.has_room_for(caller) && self.may_have_room(HERE);
        if self.draining.is_some() || listener.drained || !may {
            Some(SOON_S)
        } else if !self.is_marking() || self.is_out_of_reach(peer.ip()) {
            Some(LATER_S)
        } else if self.endpoint.offers(now, local.connects, peer.ip()) {
            None
        } else {
            Some(SOON_S)
        }
    }

    /// Whether `peer` is on loopback, as the address of nobody is, too, and no RNIC goes with that
    /// device: a rendezvous there would fail each time, and leave two hops behind.
    fn is_out_of_reach(&self, peer: IpAddr) -> bool {
        let peer = match peer.to_canonical() {
            IpAddr::V4(Ipv4Addr::UNSPECIFIED) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(Ipv6Addr::UNSPECIFIED) => Ipv6Addr::LOCALHOST.into(),
            peer @ (IpAddr::V4(_) | IpAddr::V6(_)) => peer,
        };
        peer.is_loopback() && !self.network.is_served(peer)
    }

    /// Has the SYN-ACKs of a listening socket answer SMC-R.
    pub(super) fn mark_listener(&mut self, now: Instant, caller: Key, socket: &OwnedFd) -> Reply {
        let Some(local) = &mut self.local else { return Reply::Leave { seconds: SOON_S } };
        if self.draining.is_some() || self.listeners[usize::from(local.accepts)].drained {
            return Reply::Leave { seconds: SOON_S };
        }
        if !matches!(self.option, OptionSource::Ebpf(_)) {
            return Reply::Leave { seconds: LATER_S };
        }
        if !local.places.have_room() {
            local.places.displace().iter().for_each(|place| self.option.forget(place));
        }
        let uid = local.door.caller(caller).expect("it has just asked").process.uid;
        match self.option.mark_listener(socket, Ports::Own) {
            Ok(place) => {
                place.into_iter().for_each(|place| local.places.note(now, place, uid));
                Reply::Marked
            }
            Err(_) => Reply::Leave { seconds: SOON_S },
        }
    }

    /// From now on nobody answers for the listening sockets of programs, until they ask again.
    pub(in crate::gateway) fn leave_listeners_alone(&mut self) {
        if let Some(local) = &mut self.local {
            local.places.drain().for_each(|place| self.option.forget(&place));
        }
    }
}

/// The source of connections that nobody has made yet. None of them ever waits.
const HERE: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
