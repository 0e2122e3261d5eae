//! `peers` and `gids`, of `[smc]` and of listeners: who may be a peer.
//!
//! SMC-R hands the keys of our memory to whoever speaks it, and sends packets to whatever address
//! it names. Where the network does not decide who that can be, the operator does. Hosts that are
//! not listed are served over TCP.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use smcr_proto::Gid;

use super::Cidr;
use super::error::ConfigError;
use super::section::{Section, Source};

/// Who may be a peer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Peers {
    /// Where its end of the TCP connection is; none: anywhere.
    sources: Option<Arc<[Cidr]>>,
    /// Where its RNICs are; none: anywhere.
    gids: Option<Arc<[Cidr]>>,
}

impl Peers {
    /// Reads both keys of a table.
    pub(super) fn read(source: Source<'_>, table: &mut Section<'_>) -> Result<Self, ConfigError> {
        Ok(Self {
            sources: networks(source, table, "peers")?,
            gids: networks(source, table, "gids")?,
        })
    }

    /// These lists; what they leave open, as `others` say.
    #[must_use]
    pub fn or(&self, others: &Self) -> Self {
        Self {
            sources: self.sources.clone().or_else(|| others.sources.clone()),
            gids: self.gids.clone().or_else(|| others.gids.clone()),
        }
    }

    /// Whether the peer may have its end of the TCP connection there.
    pub fn admit_source(&self, source: IpAddr) -> bool {
        admits(self.sources.as_deref(), source)
    }

    /// Whether the peer may have this port. Where RNICs are listed, one whose address is none of
    /// IPv4 or IPv6 (RoCE v1 derives it from the MAC address) is looked up as IPv6.
    pub fn admit_gid(&self, gid: Gid) -> bool {
        admits(self.gids.as_deref(), gid.to_ip())
    }

    /// The networks of its ends of TCP connections, and those of its RNICs; none: anywhere.
    pub(super) fn lists(&self) -> (Option<&[Cidr]>, Option<&[Cidr]>) {
        (self.sources.as_deref(), self.gids.as_deref())
    }

    /// Whether anybody may be one.
    pub fn admit_anybody(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for Peers {
    /// For `check`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |networks: &[Cidr]| match networks {
            [] => "nobody".to_owned(),
            some => some.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
        };
        match &self.sources {
            None => f.write_str("whoever reaches us")?,
            Some(sources) => f.write_str(&list(sources))?,
        }
        match &self.gids {
            None => Ok(()),
            Some(gids) => write!(f, "; RNICs: {}", list(gids)),
        }
    }
}

fn admits(networks: Option<&[Cidr]>, address: IpAddr) -> bool {
    networks.is_none_or(|networks| networks.iter().any(|network| network.contains(address)))
}

/// The networks of a list; none if the key is not there, which is not the same as an empty list.
fn networks(
    source: Source<'_>,
    table: &mut Section<'_>,
    key: &'static str,
) -> Result<Option<Arc<[Cidr]>>, ConfigError> {
    if !table.has(key) {
        // The section is asked for the key even so, because that makes it a known one.
        table.texts(key)?;
        return Ok(None);
    }
    let mut networks = Vec::new();
    for text in table.texts(key)? {
        networks.push(text.value.parse().map_err(|why: String| text.error(source, why))?);
    }
    Ok(Some(networks.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    const LISTENER: &str = "name='a'\nbind='127.0.0.1:1'\nupstream='127.0.0.1:2'\n";

    /// The lists of the only listener of this file.
    fn lists(of_listener: &str, of_smc: &str) -> Peers {
        let text = format!("[[listener]]\n{LISTENER}{of_listener}\n[smc]\n{of_smc}");
        Config::parse(&text, "gate.toml").unwrap().listeners[0].peers.clone()
    }

    fn admits(peers: &Peers, source: &str, gid: [u8; 4]) -> (bool, bool) {
        (peers.admit_source(source.parse().unwrap()), peers.admit_gid(Gid::from_ipv4(gid)))
    }

    /// Without a list anybody is a peer; with one that is empty, nobody.
    #[test]
    fn whoever_is_not_listed_is_no_peer() {
        let near = [10, 9, 0, 1];
        let open = lists("", "");
        assert!(open.admit_anybody());
        assert_eq!(admits(&open, "192.0.2.1", near), (true, true));
        let closed = lists("", "peers = []\ngids = []");
        assert_eq!(admits(&closed, "192.0.2.1", near), (false, false));
        let listed = lists("", "peers = ['10.8.0.0/24', 'fd00::/8']\ngids = ['10.9.0.0/16']");
        assert!(!listed.admit_anybody());
        assert_eq!(admits(&listed, "10.8.0.7", near), (true, true));
        assert_eq!(admits(&listed, "::ffff:10.8.0.7", [10, 8, 0, 1]), (true, false));
        assert_eq!(admits(&listed, "10.8.1.7", near), (false, true));
        assert!(listed.admit_source("fd00::7".parse().unwrap()));
        assert!(!listed.admit_gid(Gid([0xfe; 16])), "RoCE v1 has no address of IPv4");
    }

    /// A listener may be for other peers than the rest of the gateway, and say so key by key.
    #[test]
    fn a_listener_has_lists_of_its_own_or_those_of_the_gateway() {
        let both = "peers = ['10.8.0.0/24']\ngids = ['10.8.0.0/24']";
        let peers = lists("peers = ['10.7.0.1']", both);
        assert_eq!(admits(&peers, "10.7.0.1", [10, 8, 0, 1]), (true, true));
        assert_eq!(admits(&peers, "10.8.0.1", [10, 7, 0, 1]), (false, false));
        assert_eq!(peers.to_string(), "10.7.0.1/32; RNICs: 10.8.0.0/24");
        assert_eq!(lists("", "").to_string(), "whoever reaches us");
        assert_eq!(lists("peers = []", "").to_string(), "nobody");
    }

    #[test]
    fn what_is_no_network_is_refused() {
        let text = format!("[[listener]]\n{LISTENER}gids=['host']");
        let complaint = Config::parse(&text, "gate.toml").unwrap_err().to_string();
        let expected = "gate.toml:5: listener.a.gids: \"host\" is no address; write one such as \
                        \"10.8.0.2\" or \"10.8.0.0/24\"";
        assert_eq!(complaint, expected);
    }
}
