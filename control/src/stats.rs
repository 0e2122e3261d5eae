//! What a gateway says about itself: the JSON of `GET /stats`, `GET /connections` and
//! `GET /history`, as types.
//!
//! The gateway fills them, the admin thread and the command line show them. Numbers that only grow
//! count from the start of the process; every name carries its unit unless it is a plain count.
//! Adding a key keeps [`SCHEMA`]; renaming or removing one raises it.

mod confinement;
mod connections;
mod durations;
mod history;
mod listeners;
mod peers;
mod pollers;

use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

pub use confinement::Confinement;
pub use connections::{
    Candidate, Connection, ConnectionPage, ConnectionQuery, FallbackReason, Process, SharedMemory,
    Sort, Transport,
};
pub use durations::{ByTransport, Durations, Spread};
pub use history::{Columns, History, SAMPLE_EVERY, Sample};
pub use listeners::{Listener, Upstream};
pub use peers::{Measured, Peer};
pub use pollers::{Poller, Residence};

use crate::config::Config;
use crate::operate::{OperateError, Operation};

/// Version of these documents. A reader that knows another one should say so and stop.
pub const SCHEMA: u32 = 1;

/// Most rows of one page of connections.
pub const PER_PAGE_MAX: u32 = 1_000;

/// An answer that comes as soon as the gateway gets round to it; or none, because it has too many
/// questions already, or has ended.
pub type Answering<T> = oneshot::Receiver<T>;

/// Who can answer the admin thread's questions.
///
/// All but [`operate`](Self::operate) return at once. Answers are made from counters and snapshots:
/// a scrape never waits for the data path.
pub trait Provider: Send + Sync + 'static {
    /// The gateway now.
    fn stats(&self) -> Answering<Stats>;
    /// What the history keeps of now.
    fn sample(&self) -> Answering<Sample>;
    /// As [`stats`](Self::stats), but without [`Stats::link_groups`], for whoever asks often:
    /// however many connections there are, it costs the same.
    fn figures(&self) -> Answering<Stats>;
    /// One page of its connections; see [`ConnectionPage::select`].
    fn connections(&self, query: ConnectionQuery) -> Answering<ConnectionPage>;
    /// Whether new connections would be served, at this listener if one is named.
    fn ready(&self, listener: Option<String>) -> Answering<Readiness>;
    /// The configuration in force.
    fn config(&self) -> Answering<Config>;
    /// Waits, so it is not called on the admin thread.
    ///
    /// Obeys an operator. The answer says that the work has begun, which may take its time, and
    /// what was done already, in words.
    ///
    /// # Errors
    ///
    /// Why not.
    fn operate(&self, operation: Operation) -> Result<Vec<String>, OperateError>;
}

/// Everything about one gateway.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stats {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Version of the program.
    pub version: String,
    /// Seconds since the process started.
    pub uptime_s: u64,
    /// Since the start.
    pub totals: Totals,
    /// Now.
    pub active: Active,
    /// Why connections stayed TCP, the most frequent reason first, without those that never
    /// occurred.
    pub fallbacks: Vec<Fallback>,
    /// The link groups that exist.
    pub link_groups: Vec<LinkGroup>,
    /// The polling threads.
    pub pollers: Vec<Poller>,
    /// The RNICs in use.
    pub rnics: Vec<Rnic>,
    /// The listeners of the configuration.
    pub listeners: Vec<Listener>,
    /// Servers to which SMC-R is used, and how fast it is beside TCP; those that were used last.
    pub peers: Vec<Peer>,
    /// Memory that the gateway reserved for its data path.
    pub memory: Memory,
    /// What the process may do no more.
    pub confinement: Confinement,
}

/// Sums since the process started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Totals {
    /// Connections that were carried by SMC-R.
    pub connections_smc: u64,
    /// Connections that were relayed as TCP, fallbacks included.
    pub connections_tcp: u64,
    /// Bytes read from applications: from the sockets that do not lead to an SMC-R peer.
    pub bytes_in: u64,
    /// Bytes written to applications.
    pub bytes_out: u64,
    /// CLC rendezvous that broke the protocol or timed out; a Decline is not one of them.
    pub handshakes_failed: u64,
    /// Of `connections_smc`, those that needed no rendezvous, because an SMC-R connection was kept
    /// for them.
    pub streams_followed: u64,
    /// Connections that could have been SMC-R but for a limit of ours, and stayed TCP.
    pub refused_smc: u64,
    /// Connections that were closed at once, because a limit was reached or the upstream refused.
    pub refused_tcp: u64,
    /// Links that went down while another link could take their connections.
    pub links_failed_over: u64,
    /// Links that went down while no other link could take their connections.
    pub links_lost: u64,
    /// Link groups that ended for any other reason than that they were idle.
    pub groups_lost: u64,
    /// Connections that went on over another link.
    pub connections_moved: u64,
    /// Connections that were reset because the peer gave their RMB element to another (RFC 4.4.2).
    pub rmbe_conflicts: u64,
    /// TCP connections beside SMC-R that were reset, because the peer did not end them within two
    /// seconds after the SMC-R connection ended, or because too many of them waited for that.
    pub tcp_cut_short: u64,
    /// Connections of local programs whose bytes went by shared memory.
    pub rings: u64,
    /// Ends of connections within this host whose program has asked to pass the bytes without the
    /// gateway.
    pub shortcuts: u64,
    /// Times that an address claimed to be the peer of a link group that another address founded.
    /// It got no part of that group.
    pub foreign_claims: u64,
    /// Times that a peer said that it does not know its link group, whose links were tested then.
    pub groups_out_of_sync: u64,
    /// Times that a client had too many link groups without a connection: one of them was ended, or
    /// the first contact was declined.
    pub crowded_sources: u64,
    /// Further links that were refused because the peer's RNIC is not in `gids`.
    pub links_not_listed: u64,
    /// Connections of peers that had not sent a Proposal, and that were reset because too many
    /// peers had not.
    pub silent_cut_short: u64,
    /// Connections that were reset because nothing moved on them for `idle_timeout`.
    pub idle_closed: u64,
    /// Connections that were reset because one direction had ended, and nothing moved in the other
    /// for `half_closed_timeout`.
    pub half_closed_closed: u64,
    /// Connections that were reset because they were as old as `age_max` allows.
    pub aged_closed: u64,
    /// Connections whose set-up waited for the end of the one that had the peer's RMB element.
    pub offers_held: u64,
    /// RMB elements that rested before another connection got them, because the peer had not said
    /// that it writes them no more.
    pub rmbes_rested: u64,
    /// Lines of the access log that were written.
    pub access_log_written: u64,
    /// Lines of the access log that were not: the disk was full, or nobody took them fast enough.
    pub access_log_dropped: u64,
    /// Panics of threads without which connections go on; each has begun anew.
    pub panics_survived: u64,
}

/// Connections that exist now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Active {
    /// Carried by SMC-R.
    pub smc: u64,
    /// Relayed as TCP.
    pub tcp: u64,
    /// In the rendezvous: accepted, but not yet with a poller.
    pub connecting: u64,
    /// Accepted, and waiting for a place among the rendezvous (`limits.handshakes_max`), or until
    /// it is looked at for the first time.
    pub waiting: u64,
    /// SMC-R connections that have ended, but whose TCP connection waits for the peer to end it.
    pub farewells: u64,
    /// SMC-R connections that have carried a connection, and wait for another one.
    pub kept: u64,
    /// Closed connections whose RMB elements wait until the peer is done with them too (RFC 4.4.2).
    pub parked: u64,
    /// Connections of local programs whose bytes go by shared memory.
    pub rings: u64,
    /// Those of them that are ends of a connection within this host, and pass the bytes without the
    /// gateway.
    pub shortcuts: u64,
    /// Link groups.
    pub link_groups: u64,
    /// Links of all link groups.
    pub links: u64,
}

/// One reason to stay TCP.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Fallback {
    /// The diagnosis code, as in CLC Decline and in Linux's `smcss`.
    pub code: u32,
    /// The code in words.
    pub name: String,
    /// How many connections.
    pub count: u64,
    /// What the code means: one sentence.
    pub meaning: String,
    /// What to do about it: one sentence.
    pub remedy: String,
}

/// One link group (RFC 2.2).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LinkGroup {
    /// Unique within the process.
    pub id: u32,
    /// `client` or `server`: our role in its first contact.
    pub role: String,
    /// Of the protocol: 1 or 2.
    pub version: u8,
    /// What the peers of version 2 agreed on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub v2: Option<GroupV2>,
    /// The peer id, in hexadecimal.
    pub peer_id: String,
    /// `single`, `symmetric`, `asymmetric-local` (one RNIC of ours), `asymmetric-peer` (one RNIC of
    /// the peer's), or `none` while no link carries connections.
    #[serde(rename = "type")]
    pub kind: String,
    /// Connections in it now.
    pub connections: u32,
    /// Its links.
    pub links: Vec<Link>,
    /// RMBs of ours that its peer may write.
    pub rmbs: u32,
}

/// What only link groups of SMC-Rv2 have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GroupV2 {
    /// The release both sides speak: 0 or 1.
    pub release: u8,
    /// The EID they have in common.
    pub eid: String,
    /// What the peer calls its host.
    pub peer_host: String,
    /// What the peer runs: `Linux`, `z/OS`, `AIX`, or a number.
    pub peer_os: String,
    /// Whether no router is between the ports.
    pub direct: bool,
    /// Connections of the group, at most.
    pub max_connections: u8,
    /// Links of the group, at most.
    pub max_links: u8,
    /// Whether packets may hold several requests, and be of other sizes than path MTUs.
    pub dense_packets: bool,
}

/// One link: a queue pair of ours and one of the peer's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Link {
    /// Unique within the process; the peer knows it as our link user ID.
    pub id: u32,
    /// The link number.
    pub number: u8,
    /// `opening`, `confirming`, `active`, `probing` or `down`.
    pub state: String,
    /// Name of our RNIC.
    pub rnic: String,
    /// Our queue pair.
    pub qpn: u32,
    /// The peer's queue pair.
    pub peer_qpn: u32,
    /// The peer's port.
    pub peer_gid: String,
    /// Connections that send on it.
    pub connections: u32,
    /// Bytes of payload that its packets have at most, as the path to the peer allows; 0 if that is
    /// not known.
    pub payload: u32,
}

/// One RNIC.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Rnic {
    /// Its name in the configuration.
    pub name: String,
    /// `roce-udp`, and so on, as in the configuration.
    pub kind: String,
    /// The network device below it.
    pub device: String,
    /// Its port address.
    pub gid: String,
    /// `up`, or `down` for new links.
    pub state: String,
    /// Links on it.
    pub links: u32,
    /// Path MTU in bytes, as it is announced: the payload of a full RoCE packet, if not dense.
    pub mtu: u32,
    /// RoCE packets received.
    pub packets_in: u64,
    /// RoCE packets sent, repetitions included.
    pub packets_out: u64,
    /// RoCE packets sent again.
    pub retransmits: u64,
    /// Times that a path turned out to carry larger packets.
    pub path_raised: u64,
    /// Times that a path turned out not to carry packets that were sent: they were cut anew.
    pub path_lowered: u64,
    /// Congestion notification packets received: routers have marked packets of ours.
    pub cnps_in: u64,
    /// Congestion notification packets sent: routers have marked packets of peers.
    pub cnps_out: u64,
    /// Packets dropped because their ICRC was wrong.
    pub icrc_errors: u64,
    /// Packets whose PSN is so far from the expected one that the peer cannot have sent them:
    /// somebody sends from its address and guesses.
    pub psn_errors: u64,
    /// Packets dropped because no queue pair has their number, or because it has another peer.
    pub unknown_qp: u64,
    /// Requests refused because their RKey or bounds were wrong.
    pub rkey_errors: u64,
}

/// Memory reserved for the data path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Memory {
    /// Bytes of RMBs registered with RNICs.
    pub rmb_bytes: u64,
    /// RMB elements in all.
    pub rmbes: u64,
    /// RMB elements that belong to a connection, parked ones included.
    pub rmbes_used: u64,
    /// Bytes of send chunks registered with RNICs.
    pub send_bytes: u64,
    /// Bytes of send chunks that hold data now.
    pub send_bytes_used: u64,
}

/// Whether new connections would be served.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Readiness {
    /// Why not, in words for an operator; empty means ready.
    pub reasons: Vec<String>,
}

impl Readiness {
    /// Nothing stands in the way.
    pub fn is_ready(&self) -> bool {
        self.reasons.is_empty()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A row with distinct values, for every test that needs one.
    pub(crate) fn row(id: u64, listener: &str, transport: Transport) -> Connection {
        Connection {
            id,
            listener: listener.to_owned(),
            transport,
            app: format!("127.0.0.1:{}", 40_000 + id),
            peer: "10.8.0.2:7002".to_owned(),
            bytes_in: 1_000 + id,
            bytes_out: 2_000 + id,
            state: "active".to_owned(),
            fallback: None,
            link_group: None,
            link: None,
            version: None,
            v2: None,
            process: None,
            memory: None,
            age_s: 1.5,
        }
    }

    /// The page that `query` asks for, of connections whose rows are there already.
    pub(crate) fn page_of(
        rows: impl IntoIterator<Item = Connection>,
        query: &ConnectionQuery,
    ) -> ConnectionPage {
        let wanted = |row: &Connection| query.wants(&row.listener, row.transport);
        let rows: Vec<_> = rows.into_iter().filter(wanted).collect();
        let candidates = rows.iter().map(|of| {
            let carried = of.bytes_in + of.bytes_out;
            Candidate { of, carried, age_s: of.age_s }
        });
        ConnectionPage::select(candidates, query, Connection::clone)
    }

    /// An answer that is there already.
    pub(crate) fn answered<T: std::fmt::Debug>(answer: T) -> Answering<T> {
        let (to, answering) = oneshot::channel();
        to.send(answer).unwrap();
        answering
    }

    /// Dashboards and the end-to-end tests read these very keys; renaming breaks them silently.
    #[test]
    fn stats_have_the_promised_keys() {
        let stats = Stats {
            fallbacks: vec![Fallback::default()],
            link_groups: vec![LinkGroup { links: vec![Link::default()], ..Default::default() }],
            pollers: vec![Poller::default()],
            rnics: vec![Rnic::default()],
            listeners: vec![Listener::default()],
            peers: vec![Peer::default()],
            ..Stats::default()
        };
        let json = serde_json::to_value(&stats).unwrap();
        for (place, keys) in [
            (
                "",
                "schema version uptime_s totals active fallbacks link_groups pollers rnics \
                 listeners peers",
            ),
            (
                "/totals",
                "connections_smc connections_tcp bytes_in bytes_out handshakes_failed links_lost",
            ),
            ("/active", "smc tcp"),
            ("/fallbacks/0", "code name count meaning remedy"),
            ("/peers/0/smc", "samples first_byte_ns bytes_per_s"),
            ("/link_groups/0", "id role version peer_id type connections links rmbs"),
            (
                "/link_groups/0/links/0",
                "id number state rnic qpn peer_qpn peer_gid connections payload",
            ),
            ("/pollers/0", "core pinned placement turns turns_idle connections stages"),
            (
                "/rnics/0",
                "name kind device gid state links mtu packets_in packets_out retransmits \
                 path_raised path_lowered cnps_in cnps_out icrc_errors psn_errors \
                 unknown_qp rkey_errors",
            ),
        ] {
            let object = json.pointer(place).unwrap().as_object().unwrap();
            for key in keys.split(' ') {
                assert!(object.contains_key(key), "{place}/{key} is missing");
            }
        }
    }

    /// An operator who pages through a listener's connections sees each of them exactly once.
    #[test]
    fn pages_cover_the_filtered_rows_once() {
        let all = || {
            (0..10).map(|id| {
                let transport = if id % 2 == 0 { Transport::SmcR } else { Transport::Tcp };
                row(id, if id < 7 { "to-b" } else { "from-a" }, transport)
            })
        };
        let query = |page| ConnectionQuery {
            listener: Some("to-b".to_owned()),
            transport: Some(Transport::SmcR),
            page,
            per_page: 3,
            ..ConnectionQuery::default()
        };
        let ids = |page| {
            let page = page_of(all(), &query(page));
            assert_eq!(page.total, 4);
            page.connections.iter().map(|row| row.id).collect::<Vec<_>>()
        };
        assert_eq!(ids(1), [0, 2, 4]);
        assert_eq!(ids(2), [6]);
        assert_eq!(ids(3), [0; 0]);
    }

    /// `smcgate stats` of one version must read a gateway of another that has more or fewer keys.
    #[test]
    fn unknown_and_missing_keys_are_tolerated() {
        let stats: Stats =
            serde_json::from_str(r#"{"schema":1,"brand_new":[],"active":{"smc":2,"tcp":1}}"#)
                .unwrap();
        assert_eq!((stats.active.smc, stats.active.tcp, stats.active.parked), (2, 1, 0));
    }
}
