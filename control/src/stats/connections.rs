//! The connections of a gateway, page by page.

use serde::{Deserialize, Serialize};

use super::{GroupV2, SCHEMA};

/// How a connection travels between the gateways.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Transport {
    /// RDMA.
    #[serde(rename = "smc-r")]
    SmcR,
    /// Relayed socket to socket.
    #[serde(rename = "tcp")]
    Tcp,
}

impl Transport {
    /// The word of the JSON: `smc-r` or `tcp`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::SmcR => "smc-r",
            Self::Tcp => "tcp",
        }
    }

    /// The transport with this name; `smc` is understood too.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "smc-r" | "smc" => Some(Self::SmcR),
            "tcp" => Some(Self::Tcp),
            _ => None,
        }
    }
}

/// One connection through the gateway.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Connection {
    /// Unique within the process.
    pub id: u64,
    /// Name of its listener.
    pub listener: String,
    /// How it travels.
    pub transport: Transport,
    /// The application's end: address and port.
    pub app: String,
    /// The far end towards the other gateway or server: address and port.
    pub peer: String,
    /// Bytes read from the application; its socket is the one that does not lead to the peer.
    pub bytes_in: u64,
    /// Bytes written to the application.
    pub bytes_out: u64,
    /// Where it is in its life: `waiting`, `connecting`, `active`, `half-closed`, `closing`.
    pub state: String,
    /// Why it is not SMC-R; none if it is, or if nobody asked for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<FallbackReason>,
    /// Its link group, if it is SMC-R.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_group: Option<u32>,
    /// The number of the link it sends on, if it is SMC-R.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<u8>,
    /// The version of SMC-R, if it is SMC-R: 1 or 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u8>,
    /// What its link group agreed on, if that is of version 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub v2: Option<GroupV2>,
    /// Seconds since it was accepted.
    pub age_s: f64,
}

/// Why one connection stayed TCP.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FallbackReason {
    /// The diagnosis code, as in CLC Decline.
    pub code: u32,
    /// The code in words.
    pub name: String,
}

/// Which connections are asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionQuery {
    /// Only those of this listener.
    pub listener: Option<String>,
    /// Only those that travel so.
    pub transport: Option<Transport>,
    /// Which page; the first is 1.
    pub page: u32,
    /// Rows of a page, from 1 to [`PER_PAGE_MAX`](super::PER_PAGE_MAX).
    pub per_page: u32,
}

impl ConnectionQuery {
    /// Whether a row with these properties is asked for; to be used before a row is built.
    pub fn wants(&self, listener: &str, transport: Transport) -> bool {
        self.listener.as_deref().is_none_or(|wanted| wanted == listener)
            && self.transport.is_none_or(|wanted| wanted == transport)
    }
}

impl Default for ConnectionQuery {
    fn default() -> Self {
        Self { listener: None, transport: None, page: 1, per_page: 100 }
    }
}

/// One page of connections.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ConnectionPage {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Connections that match the filters, on all pages.
    pub total: u64,
    /// This page; the first is 1.
    pub page: u32,
    /// Most rows of a page.
    pub per_page: u32,
    /// The rows.
    pub connections: Vec<Connection>,
}

impl ConnectionPage {
    /// The page that `query` asks for, out of all connections in a stable order.
    ///
    /// A page behind the last one is empty; `total` is right all the same.
    pub fn select(all: impl IntoIterator<Item = Connection>, query: &ConnectionQuery) -> Self {
        let skip = u64::from(query.page.saturating_sub(1)) * u64::from(query.per_page);
        let mut total = 0;
        let mut connections = Vec::new();
        for row in all {
            if !query.wants(&row.listener, row.transport) {
                continue;
            }
            if total >= skip && connections.len() < query.per_page as usize {
                connections.push(row);
            }
            total += 1;
        }
        Self { schema: SCHEMA, total, page: query.page, per_page: query.per_page, connections }
    }
}
