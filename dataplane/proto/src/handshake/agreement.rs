//! Which version of SMC-R two peers speak, decided once per connection.
//!
//! The client offers versions in its Proposal, the server chooses: version 2 if both have an EID in
//! common, else version 1 if both have it, else neither. In version 2 the first-contact extensions
//! then settle the release and the size of the link group: the server answers with the smaller of
//! both wishes, the client repeats the answer. All of this is what Linux does.

use super::HandshakeError;
use crate::error::PeerMisbehaved;
use crate::limits::{CONNECTIONS_PER_GROUP_MIN, LINKS_PER_GROUP_MAX};
use crate::vocabulary::Gid;
use crate::wire::clc::v2::{
    Capabilities, Eid, Eids, FirstContact, Gids, HostName, OfferV2, OsType, ProposalExtension,
    ProposalV2, RELEASE, VendorOptions,
};
use crate::wire::clc::{Diagnosis, Proposal};

/// What a side says of itself in version 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolicyV2 {
    /// The communities we belong to, the preferred one first. See [`Eid::with_ours`].
    pub eids: Eids,
    /// The newest release we speak: 0 or 1.
    pub release: u8,
    /// The most connections that we put into one link group, at least 16.
    pub max_connections: u8,
    /// The most links that we have in one link group, 1 to 8.
    pub max_links: u8,
    /// What we call our host.
    pub host_name: HostName,
    /// Whether connections may carry one stream after another, if the peer can do that, too.
    pub many_streams: bool,
    /// Whether all our RNICs may send [dense packets](VendorOptions::DENSE_PACKETS), and take them.
    pub dense_packets: bool,
}

/// What a server accepts on one connection, given the RNIC that would carry it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Whether version 1 is spoken.
    pub v1: bool,
    /// Version 2 is spoken, with this.
    pub v2: Option<PolicyV2>,
}

impl Policy {
    /// Version 1, and nothing else.
    pub const V1: Self = Self { v1: true, v2: None };
}

/// What the peers have agreed on for this connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "there is no heap, and a rendezvous has one of them")]
pub enum Agreement {
    /// RFC 7609.
    V1,
    /// Version 2, with this.
    V2(AgreementV2),
}

/// What the peers have agreed on for a connection of version 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AgreementV2 {
    /// The EID they have in common.
    pub eid: Eid,
    /// The release both speak. Void in a subsequent contact, where the group's counts.
    pub release: u8,
    /// The most connections in the link group: in release 0 our own limit. Void in a subsequent
    /// contact.
    pub max_connections: u8,
    /// The most links in the link group: in release 0 our own limit, until CONFIRM LINK has settled
    /// it. Void in a subsequent contact.
    pub max_links: u8,
    /// Whether connections may carry one [stream](crate::connection::Streams) after another: at
    /// first what we offer, and what holds once the peer's extension has come. Void in a subsequent
    /// contact.
    pub many_streams: bool,
    /// Whether RNICs may send [dense packets](VendorOptions::DENSE_PACKETS): at first what we
    /// offer, and what holds once the peer's extension has come. Void in a subsequent contact.
    pub dense_packets: bool,
    /// The peer's extension of a first contact, when it has come: who the peer is, and whether it
    /// believes that no router is between the ports; see [`AgreementV2::objection`].
    pub peer: Option<FirstContact>,
    /// Server of a first contact, when the Confirm has come: the ports over which the client may
    /// have further links.
    pub gids: Gids,
}

/// How packets reach the peer's RNIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// It is in our subnet: packets go to the MAC address that it names.
    Direct,
    /// A router is between: packets go to the next hop, which the RNIC finds out.
    ViaGateway,
}

impl AgreementV2 {
    /// Why a client cannot open a link over `path`, its own route to the server's GID; `None` if it
    /// can. A server's word that the link is direct is believed, as Linux believes it. But without
    /// a route no packet of ours would arrive.
    pub fn objection(&self, path: Option<Path>) -> Option<Diagnosis> {
        let direct = self.peer.is_none_or(|peer| peer.direct);
        match path {
            None => Some(Diagnosis::NO_ROUTE),
            Some(Path::Direct) if !direct => Some(Diagnosis::INDIRECT_MISMATCH),
            Some(Path::Direct | Path::ViaGateway) => None,
        }
    }

    /// Our extension of a first contact, for Accept or Confirm.
    pub(super) fn first_contact(&self, host_name: HostName, direct: bool) -> FirstContact {
        let offers = [
            (self.many_streams, VendorOptions::MANY_STREAMS),
            (self.dense_packets, VendorOptions::DENSE_PACKETS),
        ];
        let vendor_options = offers
            .into_iter()
            .filter(|(offered, _)| *offered)
            .fold(VendorOptions::default(), |all, (_, option)| all.with(option));
        let capabilities = Capabilities {
            max_connections: self.max_connections,
            max_links: self.max_links,
            features: 0,
            vendor_options,
        };
        FirstContact {
            direct,
            os: OsType::LINUX,
            release: self.release,
            host_name,
            capabilities: (self.release > 0).then_some(capabilities),
        }
    }

    /// Takes in the extension that a client repeats in its Confirm.
    ///
    /// # Errors
    ///
    /// [`HandshakeError::Disagreed`] if it is not what we have settled.
    pub(super) fn confirm(&mut self, message: &OfferV2) -> Result<(), HandshakeError> {
        if message.eid != self.eid {
            return Err(PeerMisbehaved::IdentityChanged.into());
        }
        // A subsequent contact carries no extension.
        let Some(peer) = message.first_contact else { return Ok(()) };
        if peer.release != self.release {
            return Err(HandshakeError::Disagreed(Diagnosis::RELEASE));
        }
        if let Some(theirs) = peer.capabilities {
            if theirs.max_connections != self.max_connections {
                return Err(HandshakeError::Disagreed(Diagnosis::MAX_CONNECTIONS));
            }
            if theirs.max_links != self.max_links {
                return Err(HandshakeError::Disagreed(Diagnosis::MAX_LINKS));
            }
        }
        self.note_peer(peer);
        self.gids = message.gids;
        Ok(())
    }

    /// Takes in the peer's extension of a first contact.
    fn note_peer(&mut self, peer: FirstContact) {
        let theirs = peer.capabilities.map(|theirs| theirs.vendor_options).unwrap_or_default();
        self.many_streams &= theirs.contain(VendorOptions::MANY_STREAMS);
        self.dense_packets &= theirs.contain(VendorOptions::DENSE_PACKETS);
        self.peer = Some(peer);
    }
}

impl PolicyV2 {
    /// # Panics
    ///
    /// If a number is one that no peer would accept: the numbers are ours.
    pub(super) fn check(&self) {
        assert!(self.release <= RELEASE, "release {}", self.release);
        assert!(self.max_connections >= CONNECTIONS_PER_GROUP_MIN, "{}", self.max_connections);
        assert!((1..=LINKS_PER_GROUP_MAX).contains(&self.max_links), "{} links", self.max_links);
        assert!(!self.eids.as_slice().is_empty(), "no EID is none in common");
    }

    /// What a client proposes with the RoCEv2 port `gid`.
    pub(super) fn extension(&self, gid: Gid) -> ProposalExtension {
        ProposalExtension {
            release: self.release,
            gid,
            max_connections: self.max_connections,
            max_links: self.max_links,
            features: 0,
            eids: self.eids,
        }
    }

    /// What a server makes of a client's extension: the client's first EID that is ours as well,
    /// and the smaller of both wishes.
    fn answer(&self, theirs: &ProposalExtension) -> Result<AgreementV2, Diagnosis> {
        let is_ours = |eid: &Eid| self.eids.as_slice().contains(eid);
        let common = theirs.eids.as_slice().iter().copied().find(is_ours);
        let eid = common.ok_or(Diagnosis::NO_COMMON_EID)?;
        let release = self.release.min(theirs.release);
        let mut agreement = self.agreement(eid, release);
        if release > 0 {
            agreement.max_connections = self.max_connections.min(theirs.max_connections);
            agreement.max_links = self.max_links.min(theirs.max_links);
        }
        if agreement.max_connections < CONNECTIONS_PER_GROUP_MIN {
            return Err(Diagnosis::MAX_CONNECTIONS);
        }
        if agreement.max_links == 0 {
            return Err(Diagnosis::MAX_LINKS);
        }
        Ok(agreement)
    }

    /// What a client makes of the server's Accept.
    ///
    /// # Errors
    ///
    /// [`HandshakeError::Disagreed`] if it is no answer to what we offered.
    pub(super) fn accept(&self, message: &OfferV2) -> Result<AgreementV2, HandshakeError> {
        if !self.eids.as_slice().contains(&message.eid) {
            return Err(HandshakeError::Disagreed(Diagnosis::NO_COMMON_EID));
        }
        let Some(peer) = message.first_contact else {
            return Ok(self.agreement(message.eid, self.release));
        };
        if peer.release > self.release {
            return Err(HandshakeError::Disagreed(Diagnosis::RELEASE));
        }
        let mut agreement = self.agreement(message.eid, peer.release);
        if let Some(theirs) = peer.capabilities {
            let connections = CONNECTIONS_PER_GROUP_MIN..=self.max_connections;
            if !connections.contains(&theirs.max_connections) {
                return Err(HandshakeError::Disagreed(Diagnosis::MAX_CONNECTIONS));
            }
            if !(1..=self.max_links).contains(&theirs.max_links) {
                return Err(HandshakeError::Disagreed(Diagnosis::MAX_LINKS));
            }
            agreement.max_connections = theirs.max_connections;
            agreement.max_links = theirs.max_links;
        }
        agreement.note_peer(peer);
        Ok(agreement)
    }

    fn agreement(&self, eid: Eid, release: u8) -> AgreementV2 {
        AgreementV2 {
            eid,
            release,
            max_connections: self.max_connections,
            max_links: self.max_links,
            many_streams: self.many_streams && release > 0,
            dense_packets: self.dense_packets && release > 0,
            peer: None,
            gids: Gids::new(),
        }
    }
}

impl Policy {
    /// What a server makes of a Proposal of version 1.
    pub(super) fn answer_v1(&self, proposal: &Proposal) -> Result<Agreement, Diagnosis> {
        match (self.v1, proposal.offers_smc_r_v1) {
            (true, true) => Ok(Agreement::V1),
            (false, true) => Err(Diagnosis::VERSION_MISMATCH),
            (_, false) => Err(Diagnosis::MODE_MISMATCH),
        }
    }

    /// What a server makes of a Proposal of version 2, which may offer either version.
    pub(super) fn answer(&self, proposal: &ProposalV2) -> Result<Agreement, Diagnosis> {
        let v1 = self.answer_v1(&proposal.v1);
        let v2 = match (&self.v2, &proposal.v2) {
            (Some(ours), Some(theirs)) => ours.answer(theirs),
            (None, Some(_)) => Err(Diagnosis::VERSION_MISMATCH),
            (_, None) => return v1,
        };
        match (v2, v1) {
            (Ok(agreement), _) => Ok(Agreement::V2(agreement)),
            (Err(_), Ok(agreement)) => Ok(agreement),
            (Err(diagnosis), Err(_)) => Err(diagnosis),
        }
    }
}
