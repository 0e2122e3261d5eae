//! What operators see of connections.

use std::net::SocketAddr;

use smcr_engine::gauges::Stage as RelayStage;
use smcr_proto::Instant;
use smcr_rnic::Rnic;

use super::{Gateway, v2_row, version_of};
use crate::config::Protocol;
use crate::gateway::effects::reading;
use crate::listener::Listener as ListenerAtWork;
use crate::rendezvous::Stage;
use crate::sessions::{Carried, Open, Session};
use crate::slab::Key;
use crate::stats::{
    Candidate, Connection, ConnectionPage, ConnectionQuery, FallbackReason, Transport,
};

impl<N: Rnic> Gateway<N> {
    /// The page that `query` asks for. Rows are built of those connections only that are on it;
    /// of all that its filters leave if words are searched for.
    pub(super) fn connections(&self, now: Instant, query: &ConnectionQuery) -> ConnectionPage {
        let candidates = self.sessions.iter().filter_map(|(key, session)| {
            let (listener, transport) = match session {
                Session::Negotiating(one) => (one.listener, Transport::Tcp),
                Session::Open(open) => (open.listener, open.transport.name()),
                Session::Kept(_) => return None,
            };
            let listener = &self.listeners[usize::from(listener)].config.name;
            query.wants(listener, transport).then(|| self.candidate(now, key, session))
        });
        ConnectionPage::select(candidates, query, |(key, session)| self.row(now, key, session))
    }

    fn candidate<'a>(
        &self,
        now: Instant,
        key: Key,
        session: &'a Session,
    ) -> Candidate<(Key, &'a Session)> {
        let (carried, age_s) = match session {
            Session::Negotiating(_) | Session::Kept(_) => (0, 0.0),
            Session::Open(open) => {
                let reading = reading(self.endpoint.groups(), open);
                (reading.bytes_in.saturating_add(reading.bytes_out), age_s(now, open))
            }
        };
        Candidate { of: (key, session), carried, age_s }
    }

    fn row(&self, now: Instant, key: Key, session: &Session) -> Connection {
        let id = u64::from(key.generation) << 32 | u64::from(key.index);
        match session {
            Session::Negotiating(one) => {
                let state = match self.stage(key) {
                    Stage::Waiting => "waiting",
                    Stage::Connecting => "connecting",
                };
                self.early_row(id, one.listener, [one.source, one.target], state)
            }
            Session::Open(open) => self.open_row(now, (id, key), open),
            Session::Kept(_) => panic!("no candidate is one that is over"),
        }
    }

    fn stage(&self, key: Key) -> Stage {
        self.endpoint.stage(key).expect("whose sockets are here has a rendezvous")
    }

    /// The row of a connection that no poller has yet.
    fn early_row(&self, id: u64, at: u16, ends: [SocketAddr; 2], state: &str) -> Connection {
        let listener = &self.listeners[usize::from(at)];
        let [app, peer] = app_and_peer(listener, ends);
        Connection {
            id,
            listener: listener.config.name.clone(),
            transport: Transport::Tcp,
            app,
            peer,
            bytes_in: 0,
            bytes_out: 0,
            state: state.to_owned(),
            fallback: None,
            link_group: None,
            link: None,
            version: None,
            v2: None,
            process: None,
            memory: None,
            age_s: 0.0,
        }
    }

    fn open_row(&self, now: Instant, (id, key): (u64, Key), open: &Open) -> Connection {
        let listener = &self.listeners[usize::from(open.listener)];
        let [app, peer] = app_and_peer(listener, [open.source, open.target]);
        let member = self.endpoint.groups().member(open.connection);
        let reading = reading(self.endpoint.groups(), open);
        let state = match reading.stage {
            RelayStage::Active => "active",
            RelayStage::HalfClosed => "half-closed",
            RelayStage::Closing => "closing",
        };
        let (transport, reason, group) = match &open.transport {
            Carried::Smc { group, .. } => (Transport::SmcR, None, Some(*group)),
            Carried::Tcp { reason, .. } => (Transport::Tcp, *reason, None),
        };
        let row = group.and_then(|group| self.endpoint.groups().at(group));
        Connection {
            id,
            listener: listener.config.name.clone(),
            transport,
            app,
            peer,
            bytes_in: reading.bytes_in,
            bytes_out: reading.bytes_out,
            state: state.to_owned(),
            fallback: reason.map(|code| FallbackReason { code: code.0, name: format!("{code:?}") }),
            link_group: group.map(|group| group.0),
            link: member.and_then(|member| self.endpoint.groups().number_of(member.link)),
            version: row.map(version_of),
            v2: row.and_then(v2_row),
            process: open.process.as_deref().cloned(),
            memory: self.local.as_ref().and_then(|local| local.memory_of(key)),
            age_s: age_s(now, open),
        }
    }
}

fn age_s(now: Instant, open: &Open) -> f64 {
    now.since(open.came).as_secs_f64()
}

/// The address of the application and that of the peer, of the two `ends` of a connection: the one
/// that has connected to us, and the one that we connect to.
fn app_and_peer(listener: &ListenerAtWork, ends: [SocketAddr; 2]) -> [String; 2] {
    let [accepted, connected] = ends.map(|end| end.to_string());
    match listener.config.accept {
        Protocol::Tcp => [accepted, connected],
        Protocol::Smc => [connected, accepted],
    }
}
