//! Which port of which device, and which of its GIDs.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use rdma_core::{Context, GidEntry, Library, Limits};
use smcr_proto::{Gid, MacAddress, Mtu};

use crate::Port;

/// Which port to open.
#[derive(Clone, Copy, Debug)]
pub struct Config<'a> {
    /// The name of the device, such as `mlx5_0` or `rxe0`.
    pub device: &'a str,
    /// Its port, from 1.
    pub port: u8,
    /// The index of the GID to use. If it is not given, it is that of the first IPv4 address.
    pub gid_index: Option<u32>,
    /// The largest path MTU to announce. If it is not given, it is that of the port.
    pub mtu_max: Option<Mtu>,
}

impl<'a> Config<'a> {
    /// The first port, with a GID of our choice.
    pub fn on(device: &'a str) -> Self {
        Self { device, port: 1, gid_index: None, mtu_max: None }
    }
}

/// Why a device cannot be used, in one line that names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenError {
    device: String,
    cause: String,
    may_pass: bool,
}

impl OpenError {
    pub(super) fn new(device: &str, cause: impl Into<String>) -> Self {
        Self { device: device.into(), cause: cause.into(), may_pass: false }
    }

    /// The same, where something is not there that may still come.
    fn not_yet(device: &str, cause: &str) -> Self {
        Self { may_pass: true, ..Self::new(device, cause) }
    }

    /// Whether the device, its link or its address is not there, and may come.
    pub fn may_pass(&self) -> bool {
        self.may_pass
    }
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RDMA device {}: {}", self.device, self.cause)
    }
}

impl Error for OpenError {}

/// An open device, and the port that we use.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) context: Arc<Context>,
    pub(super) limits: Limits,
    pub(super) number: u8,
    pub(super) port: Port,
    pub(super) gid_index: u8,
    /// The index that the operator wants.
    wanted: Option<u32>,
    /// The largest path MTU that the operator allows.
    mtu_max: Option<Mtu>,
    /// The port has no GID that we could use.
    is_lost: bool,
}

/// What another table of GIDs means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// Our address is the same.
    None,
    /// There is no address that we could use.
    Lost,
    /// The address that was lost is there again.
    Back,
    /// Our address is another one.
    Moved {
        /// There was none before.
        was_lost: bool,
    },
}

impl Device {
    pub(super) fn open(library: &'static Library, config: &Config<'_>) -> Result<Self, OpenError> {
        let fail = |cause: String| OpenError::new(config.device, cause);
        let not_yet = |cause: &str| OpenError::not_yet(config.device, cause);
        let refuses = |error| fail(format!("the driver refuses: {error}"));
        let context = Context::open(library, config.device).map_err(|error| match error {
            rdma_core::OpenError::Absent(others) if others.is_empty() => {
                not_yet("this host has no RDMA device")
            }
            rdma_core::OpenError::Absent(_) => not_yet("this host has no such RDMA device"),
            rdma_core::OpenError::Refused(error) => refuses(error),
        })?;
        let number = config.port;
        let state = context.port(number).map_err(|_| fail(format!("it has no port {number}")))?;
        if !state.ethernet {
            return Err(fail(format!("port {number} is not Ethernet, so it has no RoCE")));
        }
        if !state.active {
            return Err(not_yet(&format!("port {number} is down")));
        }
        let gids = context.gids(number).map_err(refuses)?;
        let (gid, mac, gid_index) = address(&gids, config.gid_index, None).map_err(not_yet)?;
        let (wanted, mtu_max) = (config.gid_index, config.mtu_max);
        let port = Port { gid, mac, mtu: at_most(mtu_max, Mtu(state.mtu)) };
        let limits = context.limits().map_err(refuses)?;
        Ok(Self { context, limits, number, port, gid_index, wanted, mtu_max, is_lost: false })
    }

    /// Reads the path MTU of the port again. It follows the MTU of the network device, which may be
    /// changed at any time, and the driver does not always report that.
    pub(super) fn look_at_mtu(&mut self) {
        // A device that does not answer goes, and that is reported.
        let Ok(state) = self.context.port(self.number) else { return };
        // While the network device is being taken away, the code is none that has a size.
        let mtu = Mtu(state.mtu);
        if mtu.bytes().is_some() {
            self.port.mtu = at_most(self.mtu_max, mtu);
        }
    }

    /// Reads the table of GIDs again, and keeps the address if it is still there.
    pub(super) fn look_at_gids(&mut self) -> Change {
        // If the device does not answer, it goes, and that is reported.
        let Ok(gids) = self.context.gids(self.number) else { return Change::None };
        let was_lost = self.is_lost;
        let found = address(&gids, self.wanted, Some(self.port.gid));
        self.is_lost = found.is_err();
        let Ok((gid, mac, gid_index)) = found else {
            return if was_lost { Change::None } else { Change::Lost };
        };
        self.gid_index = gid_index;
        let port = Port { gid, mac, ..self.port };
        let has_moved = port != self.port;
        self.port = port;
        match (has_moved, was_lost) {
            (true, was_lost) => Change::Moved { was_lost },
            (false, true) => Change::Back,
            (false, false) => Change::None,
        }
    }
}

/// The path MTU of a port, unless the operator wants a smaller one.
fn at_most(most: Option<Mtu>, mtu: Mtu) -> Mtu {
    most.map_or(mtu, |most| most.min(mtu))
}

/// The address to use, and its index: that of `current`, if the operator wants no index and the
/// table still has it.
fn address(
    gids: &[GidEntry],
    wanted: Option<u32>,
    current: Option<Gid>,
) -> Result<(Gid, MacAddress, u8), &'static str> {
    let is_current = |entry: &&GidEntry| entry.over_udp && Some(Gid(entry.gid)) == current;
    let kept = gids.iter().find(is_current).filter(|_| wanted.is_none()).copied();
    let chosen = match kept {
        Some(kept) => kept,
        None => choose(gids, wanted)?,
    };
    let mac = gids.iter().find_map(mac_of).ok_or("the port has no link-local GID")?;
    let index = u8::try_from(chosen.index).map_err(|_| "the index of its GID is over 255")?;
    Ok((Gid(chosen.gid), mac, index))
}

/// The GID that SMC-Rv2 uses: an IPv4 address, over UDP.
fn choose(gids: &[GidEntry], wanted: Option<u32>) -> Result<GidEntry, &'static str> {
    let is_ipv4 = |entry: &&GidEntry| entry.over_udp && Gid(entry.gid).to_ipv4().is_some();
    let found = match wanted {
        Some(index) => gids.iter().find(|entry| entry.index == index),
        None => gids.iter().find(is_ipv4),
    };
    found.copied().ok_or(match wanted {
        Some(_) => "the port has no GID with the index of gid_index",
        None => "no GID is an IPv4 address over UDP (RoCEv2): does its network device have one?",
    })
}

/// The Ethernet address inside a link-local GID, which the kernel makes of it.
fn mac_of(entry: &GidEntry) -> Option<MacAddress> {
    match entry.gid {
        [0xfe, 0x80, 0, 0, 0, 0, 0, 0, a, b, c, 0xff, 0xfe, d, e, f] => {
            Some(MacAddress([a ^ 2, b, c, d, e, f]))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(index: u32, ip: &str, over_udp: bool) -> GidEntry {
        let gid = Gid::from_ip(ip.parse().unwrap()).0;
        GidEntry { gid, index, over_udp, interface: 1 }
    }

    /// A GID of the wrong type makes every rendezvous fail: Linux takes IPv4 over UDP only.
    #[test]
    fn the_first_ipv4_address_over_udp_is_chosen() {
        let gids = [
            entry(0, "fe80::5054:ff:fe00:101", false),
            entry(1, "fe80::5054:ff:fe00:101", true),
            entry(2, "10.9.0.11", false),
            entry(3, "10.9.0.11", true),
            entry(4, "10.9.0.12", true),
        ];
        assert_eq!(choose(&gids, None).unwrap().index, 3);
        assert_eq!(choose(&gids, Some(4)).unwrap().index, 4);
        assert!(choose(&gids, Some(5)).unwrap_err().contains("gid_index"));
        assert!(choose(&gids[..3], None).unwrap_err().contains("IPv4"));
        assert_eq!(mac_of(&gids[0]), Some(MacAddress([0x52, 0x54, 0, 0, 1, 1])));
        assert_eq!(mac_of(&gids[3]), None);
    }
}
