//! What pollers say, turned into events, logs and releases; and the end of it all.

use std::os::fd::OwnedFd;
use std::time::Duration;

use smcr_engine::handoff::Ending;
use smcr_engine::{ConnectionId, Report};
use smcr_proto::Instant;
use smcr_proto::wire::llc::DeleteReason;
use smcr_rnic::Rnic;

use crate::config::Transport;
use crate::gateway::Gateway;
use crate::groups::Event;
use crate::listener::{connect_outcome, reset};
use crate::reactor::Key;
use crate::sessions::{Carried, Open, Session};

impl<N: Rnic> Gateway<N> {
    /// Takes in what all pollers said.
    pub(crate) fn take_reports(&mut self, now: Instant) {
        for index in 0..self.ports.len() {
            while let Some(report) = self.groups.pollers()[index].reports.receive() {
                self.report(now, report);
                self.heed_groups(now);
            }
        }
    }

    /// Does what follows from what became of link groups.
    pub(crate) fn heed_groups(&mut self, now: Instant) {
        while let Some(event) = self.groups.poll_event() {
            match event {
                Event::Established(group) => {
                    let founding = self.foundings.remove(&group).unwrap_or_default();
                    if let Some(founder) = founding.founder {
                        self.path_worked(founder);
                        self.link_confirmed(now, founder);
                    }
                    for key in founding.waiting {
                        self.resume(now, key);
                    }
                }
                Event::FirstContactFailed { group, committed } => {
                    let founding = self.foundings.get_mut(&group);
                    if let Some(founder) = founding.and_then(|founding| founding.founder.take()) {
                        self.link_failed(now, founder, committed);
                    }
                }
                Event::ElementsChanged(group) => self.serve_waiting(now, group),
                Event::Ended(group) => {
                    let founding = self.foundings.remove(&group).unwrap_or_default();
                    if let Some(founder) = founding.founder {
                        self.link_failed(now, founder, true);
                    }
                    for key in founding.waiting {
                        self.resume(now, key);
                    }
                    self.serve_waiting(now, group);
                }
            }
        }
    }

    fn report(&mut self, now: Instant, report: Report<OwnedFd>) {
        match report {
            Report::LlcReceived { link, message, .. } => {
                self.groups.llc_received(now, link, message.as_bytes());
                self.serve_proven(now);
            }
            Report::LinkBroke { link, cause } => self.groups.link_broke(now, link, cause),
            Report::LinkRetired { link } => self.groups.link_retired(now, link),
            Report::Moved { connection, link, rkey, address } => {
                self.groups.connection_moved(connection, link, rkey, address);
            }
            Report::LinkVacated { link } => self.groups.link_vacated(now, link),
            Report::Closed { connection, ending, bytes_in, bytes_out, rmbe, settled, streams } => {
                // Whatever was not reset yet is finished in both directions, or of no more use.
                drop(streams);
                self.bytes_closed.0 += bytes_in;
                self.bytes_closed.1 += bytes_out;
                self.groups.closed(now, connection, rmbe, settled);
                self.closed(now, connection, ending);
            }
        }
    }

    fn closed(&mut self, now: Instant, connection: ConnectionId, ending: Ending) {
        let key = self.session_of[usize::from(connection.slot)].take();
        let key = key.expect("a poller closes what it was given");
        let Some(Session::Open(open)) = self.sessions.remove(key) else {
            panic!("a slot leads to an open session");
        };
        self.listeners[usize::from(open.listener)].leave(open.source.ip());
        tracing::debug!(
            session = key.index,
            source = %open.source,
            ?ending,
            ms = now.since(open.since).as_millis(),
            "connection closed"
        );
        let Carried::Smc { tcp, ended, .. } = open.transport else { return };
        let connected = self.listeners[usize::from(open.listener)].config.connect;
        // RFC 7609 3.5.4-1, 4.8-1
        if connected == Transport::Smc && ending == Ending::Graceful && !ended {
            self.farewells.wait(now, key, tcp);
        } else {
            end_tcp(tcp, ending);
        }
    }

    /// The peer has ended the TCP connection that `key` calls, in one direction or with a reset.
    pub(crate) fn tcp_ended(&mut self, now: Instant, key: Key) {
        match self.sessions.at_mut(key) {
            Some(Session::Open(Open { transport: Carried::Smc { ended, .. }, .. })) => {
                *ended = true;
                self.suspects.push_back((now, key));
            }
            // What is beside nothing else, or is still being spoken on, tells by itself.
            Some(Session::Open(_) | Session::Shaking(_) | Session::Waiting(_)) => {}
            None => self.farewells.ended(key),
        }
    }

    /// Looks after SMC-R connections whose TCP connection ended a while ago.
    ///
    /// A peer that closes a connection ends both; the CDC message that says so is usually the
    /// first to arrive. A peer that died ends TCP alone, by FIN: whether it did, a probe shows. A
    /// reset of the TCP connection is one of the connection (RFC 4.8.2).
    pub(crate) fn expire_suspects(&mut self, now: Instant) {
        let mut groups = Vec::new();
        while let Some((_, key)) =
            self.suspects.pop_front_if(|(since, _)| now.since(*since) >= SUSPECT_AFTER)
        {
            let Some(Session::Open(open)) = self.sessions.at(key) else { continue };
            let Carried::Smc { group, tcp, .. } = &open.transport else { continue };
            // RFC 7609 4.8.2-11
            if connect_outcome(tcp).is_err() {
                self.groups.abort(open.connection);
            } else {
                // RFC 7609 2.1-17
                groups.push(*group);
            }
        }
        groups.sort_unstable();
        groups.dedup();
        for group in groups {
            self.groups.probe(now, group);
        }
    }

    /// Stops accepting; what goes on may finish. Connections that the kernel has completed but
    /// nobody has accepted are reset: their applications try elsewhere at once.
    pub(crate) fn drain(&mut self, now: Instant) {
        if self.draining.is_some() {
            return;
        }
        let limit = self.config.drain_timeout;
        tracing::info!(
            connections = self.sessions.len(),
            ms = limit.as_millis(),
            "stopping: no new connections are accepted, open ones may finish"
        );
        for listener in &mut self.listeners {
            listener.socket = None;
        }
        self.dismiss_waiting();
        self.draining = Some(now + limit);
    }

    /// Resets connections whose rendezvous has not begun.
    fn dismiss_waiting(&mut self) {
        let waiting = self.sessions.iter().filter(|(_, one)| matches!(one, Session::Waiting(_)));
        let keys: Vec<Key> = waiting.map(|(key, _)| key).collect();
        for key in keys {
            let Some(Session::Waiting(newcomer)) = self.sessions.remove(key) else { continue };
            self.listeners[usize::from(newcomer.listener)].leave(newcomer.source.ip());
            reset(newcomer.socket);
        }
    }

    /// Nothing is left to wait for.
    pub(crate) fn is_drained(&self) -> bool {
        self.draining.is_some() && self.sessions.is_empty()
    }

    /// Their time is over: resets whatever is left.
    pub(crate) fn abort_all(&mut self) {
        self.draining = Some(Instant(u64::MAX));
        let keys: Vec<Key> = self.sessions.iter().map(|(key, _)| key).collect();
        tracing::warn!(connections = keys.len(), "no time is left: resetting the rest");
        for key in keys {
            match self.sessions.at(key) {
                Some(Session::Open(_)) => self.abort_open(key),
                Some(Session::Shaking(_)) => self.fail(key, "the gateway stops"),
                Some(Session::Waiting(_)) => panic!("nobody waits while the gateway stops"),
                None => {}
            }
        }
    }

    /// Takes leave of peers, then ends the pollers.
    pub(crate) fn close_down(&mut self) {
        let now = self.clock.now();
        let groups: Vec<_> = self.groups.iter().map(|(id, _)| id).collect();
        for group in groups {
            // RFC 7609 4.8.3-1
            self.groups.shut_down(now, group, DeleteReason::OPERATOR);
        }
        // DELETE LINK has no answer worth waiting for, but must leave before the queue pair goes.
        let until = now + FAREWELL;
        while !self.groups.is_empty() && self.clock.now() < until {
            for poller in self.groups.pollers_mut() {
                poller.catch_up();
            }
            self.take_reports(self.clock.now());
            std::thread::sleep(Duration::from_millis(1));
        }
        for poller in self.groups.pollers_mut() {
            poller.stop();
        }
        self.farewells.cut_all_short();
        tracing::info!("stopped");
    }
}

/// Ends the TCP connection beside an SMC-R connection that ended this way.
fn end_tcp(tcp: OwnedFd, ending: Ending) {
    match ending {
        Ending::Graceful => drop(tcp),
        // RFC 7609 4.8.1-22
        Ending::ResetByApplication
        | Ending::ResetByPeer
        | Ending::LinkLost
        | Ending::DataLost
        | Ending::PeerMisbehaved
        | Ending::Stalled
        | Ending::Aborted => reset(tcp),
    }
}

/// How long a connection may outlive its TCP connection before its peer is asked to prove itself.
const SUSPECT_AFTER: Duration = Duration::from_millis(300);
/// How long a stop waits for queue pairs to be given up.
const FAREWELL: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// A stack at the other end that waits on TCP must learn there how the connection ended: an end
    /// of stream after a stall would look as if all had been delivered.
    // RFC 7609 4.8-1, 4.8.1-22
    #[test]
    fn tcp_ends_as_smc_r_did() {
        for (ending, outcome) in [
            (Ending::Graceful, Ok(0)),
            (Ending::Stalled, Err(ErrorKind::ConnectionReset)),
            (Ending::LinkLost, Err(ErrorKind::ConnectionReset)),
            (Ending::ResetByApplication, Err(ErrorKind::ConnectionReset)),
        ] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let mut far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (near, _) = listener.accept().unwrap();
            end_tcp(near.into(), ending);
            assert_eq!(far.read(&mut [0]).map_err(|error| error.kind()), outcome, "{ending:?}");
        }
    }
}
