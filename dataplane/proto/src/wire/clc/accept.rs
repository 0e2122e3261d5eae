//! CLC Accept and Confirm: one queue pair, one RMB element (RFC A.2.3, A.2.4).

use crate::vocabulary::{AlertToken, Gid, MacAddress, Mtu, PeerId, Psn, Qpn, Rkey, RmbeSize};

/// One side's queue pair and RMB element. The bodies of Accept and Confirm are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// F: a new link group begins with this connection. Old clients leave it clear in Confirm.
    pub first_contact: bool,
    /// Who offers.
    pub peer_id: PeerId,
    /// Its RNIC port.
    pub gid: Gid,
    /// The port's Ethernet address.
    pub mac: MacAddress,
    /// Its queue pair.
    pub qpn: Qpn,
    /// Opens its RMB.
    pub rkey: Rkey,
    /// Which element of the RMB; the first is 1.
    pub rmbe_index: u8,
    /// What it wants to see in CDC messages.
    pub alert_token: AlertToken,
    /// Size of each element of the RMB.
    pub rmbe_size: RmbeSize,
    /// The largest path MTU its port can use.
    pub mtu: Mtu,
    /// Where the RMB (not the element) begins.
    pub rmb_address: u64,
    /// The first PSN it will send.
    pub psn: Psn,
}
