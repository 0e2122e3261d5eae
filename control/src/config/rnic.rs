//! `[[rnic]]`: the NICs to use.

use std::net::IpAddr;
use std::num::NonZero;

use smcr_rnic::roce::packet::Version;

use super::error::ConfigError;
use super::section::{Placed, Section, Source};
use super::{CORES_MAX, Cidr, Unique};
use crate::rdma;

/// One NIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RnicConfig {
    /// What logs, counters and `[[pnet]]` call it. Unique.
    pub name: String,
    /// What kind of NIC it is, with what only this kind needs to know.
    pub kind: RnicKind,
    /// The device it stands on, in the words of its kind; of shared memory, the directory in which
    /// its peers are.
    pub device: String,
    /// Threads that poll it: 1 to 64. Each link group is on one of them.
    pub pollers: u32,
    /// The core of its first poller; chosen by `[poll]` if absent, as those of the others are.
    pub core: Option<usize>,
    /// Largest RoCE payload of a packet, in bytes: 256, 512, 1024, 2048 or 4096. The largest that
    /// fits the device's MTU if absent.
    pub mtu: Option<u32>,
    /// The physical network it is on, in the operator's words. A link group has links on all RNICs
    /// of one network. All RNICs are on the same one if nobody says otherwise.
    pub pnet: String,
}

impl RnicConfig {
    /// The soft RNIC of a network device of which the configuration says nothing.
    pub fn soft(name: impl Into<String>, device: impl Into<String>) -> Self {
        let (name, device, pnet) = (name.into(), device.into(), String::new());
        let kind = RnicKind::RoceUdp { address: None };
        Self { name, kind, device, pollers: 1, core: None, mtu: None, pnet }
    }

    /// The network device of the kernel that it stands on, if it stands on one.
    pub fn network_device(&self) -> Option<&str> {
        self.kind.network_device(&self.device)
    }
}

/// The kinds of NIC this program can drive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RnicKind {
    /// `"roce-udp"`: RoCEv2 in software, over UDP sockets.
    RoceUdp {
        /// The address of the device that is its GID; the device's first IPv4 address if absent,
        /// or its best IPv6 address where it has no other.
        address: Option<IpAddr>,
    },
    /// `"roce-packet"`: RoCE in software, over a packet socket.
    RocePacket {
        /// Which address of the device is its GID; chosen as for `RoceUdp` if absent.
        address: Option<IpAddr>,
        /// Which RoCE it speaks.
        version: Version,
    },
    /// `"dpdk"`: RoCEv2 in software, over a port of DPDK.
    Dpdk(DpdkPort),
    /// `"shm"`: shared memory, to gateways on this host that use the same directory.
    Shm,
    /// `"verbs"`: an RNIC, by libibverbs. Its device is the name of an RDMA device.
    Verbs(VerbsPort),
}

/// Which port of an RNIC, and which of its addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbsPort {
    /// Its number, from 1.
    pub number: u8,
    /// The index of its GID; that of its first IPv4 address of RoCEv2 if absent.
    pub gid_index: Option<u32>,
    /// The network device that has this address, as the kernel said when the configuration was
    /// read.
    pub network: Option<String>,
}

/// The network that a port of DPDK is in. No device of the kernel has its address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DpdkPort {
    /// Its address, which is its GID.
    pub address: IpAddr,
    /// How many bits of it the addresses of its network have in common.
    pub prefix_bits: u8,
    /// The VLAN of its network, at most 4094, if frames have tags.
    pub vlan: Option<NonZero<u16>>,
    /// The router to other networks.
    pub gateway: Option<IpAddr>,
    /// Arguments of EAL beside our own. DPDK starts once, with those of all its ports.
    pub eal: Vec<String>,
}

impl RnicKind {
    /// What the configuration and operators call it.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::RoceUdp { .. } => "roce-udp",
            Self::RocePacket { .. } => "roce-packet",
            Self::Dpdk(_) => "dpdk",
            Self::Shm => "shm",
            Self::Verbs(_) => "verbs",
        }
    }

    /// Whether its ports have addresses of RoCE v1, the only ones over which Linux speaks SMC-Rv1.
    pub const fn carries_roce_v1(&self) -> bool {
        match self {
            Self::RocePacket { version, .. } => matches!(version, Version::V1),
            // We use those of RoCE v2 only, also of an RNIC that has both.
            Self::RoceUdp { .. } | Self::Dpdk(_) | Self::Shm | Self::Verbs(_) => false,
        }
    }

    /// Whether it takes dense packets (`smcr_proto::wire::clc::v2::VendorOptions::DENSE_PACKETS`),
    /// or sends no packets at all. Hardware has those of InfiniBand only.
    pub const fn packs_densely(&self) -> bool {
        match self {
            Self::RoceUdp { .. } | Self::RocePacket { .. } | Self::Dpdk(_) | Self::Shm => true,
            Self::Verbs(_) => false,
        }
    }

    /// The network device of the kernel that an RNIC of this kind on `device` stands on. Without
    /// one it has a network of its own, or none.
    pub fn network_device<'a>(&'a self, device: &'a str) -> Option<&'a str> {
        match self {
            Self::RoceUdp { .. } | Self::RocePacket { .. } => Some(device),
            Self::Verbs(port) => port.network.as_deref(),
            Self::Dpdk(_) | Self::Shm => None,
        }
    }
}

/// The tables of `[[rnic]]`.
pub(super) fn rnics(
    source: Source<'_>,
    tables: Vec<Section<'_>>,
) -> Result<Vec<RnicConfig>, ConfigError> {
    let mut names = Unique::new("another rnic");
    let mut devices = Unique::new("another rnic");
    let mut addresses = Unique::new("another rnic");
    let mut found = Vec::new();
    for mut table in tables {
        let name = table.required("name")?;
        table.rename(format!("rnic.{}", name.value));
        let device = table.required("device")?;
        let kind = kind(source, &mut table, &device.value, &mut addresses)?;
        let pollers = pollers(source, &mut table, &kind)?;
        let core = optional_core(&mut table)?;
        let mtu = match table.number("mtu", 256..4097, 0)? {
            Placed { value: 0, .. } => None,
            mtu if mtu.value.is_power_of_two() => u32::try_from(mtu.value).ok(),
            mtu => {
                let why =
                    format!("{} is no RoCE MTU; write 256, 512, 1024, 2048 or 4096", mtu.value);
                return Err(mtu.error(source, why));
            }
        };
        if kind == RnicKind::Shm && mtu.is_some() {
            return Err(table.error("mtu", NO_PACKETS));
        }
        let pnet = table.text("pnet")?.map(|text| text.value).unwrap_or_default();
        table.finish()?;
        names.insert(source, &name)?;
        devices.insert(source, &device)?;
        let (name, device) = (name.value, device.value);
        found.push(RnicConfig { name, kind, device, pollers, core, mtu, pnet });
    }
    Ok(found)
}

/// What kind an RNIC is. Where the operator names none, this is the place that chooses: an RDMA
/// device is used as such, and any other one by software.
fn kind(
    source: Source<'_>,
    table: &mut Section<'_>,
    device: &str,
    addresses: &mut Unique,
) -> Result<RnicKind, ConfigError> {
    let is_rdma = rdma::devices().iter().any(|name| name == device);
    let fitting = if is_rdma { Word::Verbs } else { Word::RoceUdp };
    Ok(match table.word("kind", &WORDS, fitting)? {
        Word::RoceUdp => {
            let address = optional_address(source, table, "address")?;
            RnicKind::RoceUdp { address: address.map(|address| address.value) }
        }
        Word::RocePacket => {
            let address = optional_address(source, table, "address")?;
            let version = table.number("version", 1..3, 2)?;
            let version = if version.value == 1 { Version::V1 } else { Version::V2 };
            if let Some(address) = address.as_ref().filter(|_| version == Version::V1) {
                return Err(address.error(source, OF_MAC.to_owned()));
            }
            RnicKind::RocePacket { address: address.map(|address| address.value), version }
        }
        Word::Dpdk => RnicKind::Dpdk(dpdk_port(source, table, addresses)?),
        Word::Shm if table.has("address") => return Err(table.error("address", NO_PACKETS)),
        Word::Shm => RnicKind::Shm,
        Word::Verbs if table.has("address") => return Err(table.error("address", OF_DEVICE)),
        Word::Verbs => {
            let number = table.number("port", 1..256, 1)?.value;
            let number = u8::try_from(number).expect("its range was checked");
            let absent = u64::MAX;
            let index = table.number("gid_index", 0..256, absent)?.value;
            let gid_index = if index == absent { None } else { u32::try_from(index).ok() };
            let network = rdma::network_device(device, number, gid_index);
            RnicKind::Verbs(VerbsPort { number, gid_index, network })
        }
    })
}

/// The words for kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word {
    RoceUdp,
    RocePacket,
    Dpdk,
    Shm,
    Verbs,
}

fn dpdk_port(
    source: Source<'_>,
    table: &mut Section<'_>,
    addresses: &mut Unique,
) -> Result<DpdkPort, ConfigError> {
    let text = table.required("address")?;
    let wrong = |why: &str| {
        let how = "write the address of the port with the prefix of its network: \"10.8.0.1/24\"";
        text.error(source, format!("\"{}\" {why}; {how}", text.value))
    };
    let (address, _) = text.value.split_once('/').ok_or_else(|| wrong("has no prefix"))?;
    let network: Cidr = text.value.parse().map_err(|_| wrong("is no address with a prefix"))?;
    let address: IpAddr = address.parse().map_err(|_| wrong("is no address with a prefix"))?;
    if address.is_unspecified() || address.is_loopback() || address.is_multicast() {
        return Err(wrong("is no address that a port can have"));
    }
    addresses.insert(source, &Placed { value: address.to_string(), ..text })?;
    let gateway = match optional_address(source, table, "gateway")? {
        Some(gateway) if gateway.value == address || !network.contains(gateway.value) => {
            let why = format!("{} is no other address of {network}", gateway.value);
            return Err(gateway.error(source, format!("{why}; write that of the router there")));
        }
        gateway => gateway.map(|gateway| gateway.value),
    };
    let vlan = table.number("vlan", 1..4095, 0)?.value;
    let vlan = NonZero::new(u16::try_from(vlan).expect("its range was checked"));
    let eal = table.texts("eal")?.into_iter().map(|text| text.value).collect();
    Ok(DpdkPort { address, prefix_bits: network.prefix_bits(), vlan, gateway, eal })
}

fn optional_address(
    source: Source<'_>,
    table: &mut Section<'_>,
    key: &'static str,
) -> Result<Option<Placed<IpAddr>>, ConfigError> {
    let Some(text) = table.text(key)? else { return Ok(None) };
    match text.value.parse() {
        Ok(value) => Ok(Some(Placed { value, path: text.path, span: text.span })),
        Err(_) => {
            let why = format!("\"{}\" is no address; write one such as \"fd00::1\"", text.value);
            Err(text.error(source, why))
        }
    }
}

/// How many threads poll an RNIC.
fn pollers(
    source: Source<'_>,
    table: &mut Section<'_>,
    kind: &RnicKind,
) -> Result<u32, ConfigError> {
    let pollers = table.number("pollers", 1..POLLERS_MAX + 1, 1)?;
    let single = match kind {
        RnicKind::Dpdk(_) => "a port of DPDK",
        RnicKind::RocePacket { .. } => "a packet socket",
        RnicKind::RoceUdp { .. } | RnicKind::Shm | RnicKind::Verbs(_) => "",
    };
    if pollers.value > 1 && !single.is_empty() {
        let why = "has one poller, as nothing steers packets to several; leave it out";
        return Err(pollers.error(source, format!("{single} {why}")));
    }
    Ok(u32::try_from(pollers.value).expect("its range was checked"))
}

fn optional_core(table: &mut Section<'_>) -> Result<Option<usize>, ConfigError> {
    let absent = u64::MAX;
    let core = table.number("core", 0..CORES_MAX, absent)?.value;
    Ok(if core == absent { None } else { usize::try_from(core).ok() })
}

/// Pollers of one RNIC: more sockets than that do not make it faster.
const POLLERS_MAX: u64 = 64;
const NO_PACKETS: &str = "there are no packets in shared memory; remove this";
const OF_DEVICE: &str = "an RNIC has the addresses of its network device; choose by gid_index";
/// Why an RNIC with RoCE v1 has no address to configure.
const OF_MAC: &str = "the GID of RoCE v1 follows from the MAC address of the device; leave it out";
const WORDS: [(&str, Word); 5] = [
    ("roce-udp", Word::RoceUdp),
    ("roce-packet", Word::RocePacket),
    ("dpdk", Word::Dpdk),
    ("shm", Word::Shm),
    ("verbs", Word::Verbs),
];

#[cfg(test)]
mod tests {
    use crate::config::Config;

    use super::*;

    const PORT: &str = "[[rnic]]\nname='port0'\nkind='dpdk'\ndevice='net_memif0,role=server'\n";

    fn parse(rnics: &str) -> Result<Vec<RnicConfig>, String> {
        let listener = "[[listener]]\nname='a'\nbind='[::]:7'\nupstream='[fd00::2]:8'\n";
        let config = Config::parse(&format!("{listener}{rnics}"), "gate.toml");
        config.map(|config| config.rnics).map_err(|error| error.to_string())
    }

    /// A port of DPDK is in a network that the kernel knows nothing of, so the file says all.
    #[test]
    fn a_port_of_dpdk_has_a_network_of_its_own() {
        let keys =
            "address='10.8.0.1/24'\nvlan=100\ngateway='10.8.0.254'\neal=['--no-huge', '-m', '64']";
        let [rnic] = &parse(&format!("{PORT}{keys}")).unwrap()[..] else { panic!("one") };
        let port = DpdkPort {
            address: [10, 8, 0, 1].into(),
            prefix_bits: 24,
            vlan: NonZero::new(100),
            gateway: Some([10, 8, 0, 254].into()),
            eal: ["--no-huge", "-m", "64"].map(str::to_owned).to_vec(),
        };
        assert_eq!(rnic.kind, RnicKind::Dpdk(port));
        assert_eq!((rnic.device.as_str(), rnic.network_device()), ("net_memif0,role=server", None));
        let [rnic] = &parse(&format!("{PORT}address='fd00::1/64'")).unwrap()[..] else {
            panic!("one")
        };
        let RnicKind::Dpdk(port) = &rnic.kind else { panic!("{rnic:?}") };
        assert_eq!((port.address, port.prefix_bits), ("fd00::1".parse().unwrap(), 64));
        assert_eq!((port.vlan, port.gateway, &port.eal[..]), (None, None, &[][..]));
    }

    #[test]
    fn a_port_of_dpdk_without_a_network_is_refused() {
        let how = "write the address of the port with the prefix of its network: \"10.8.0.1/24\"";
        let refused = |keys: &str| parse(&format!("{PORT}{keys}")).unwrap_err();
        let missing = "is missing; every entry of this kind needs it";
        assert_eq!(refused(""), format!("gate.toml:5: rnic.port0.address: {missing}"));
        for (address, why) in [
            ("10.8.0.1", "has no prefix"),
            ("10.8.0.1/33", "is no address with a prefix"),
            ("224.0.0.1/4", "is no address that a port can have"),
        ] {
            let expected = format!("gate.toml:9: rnic.port0.address: \"{address}\" {why}; {how}");
            assert_eq!(refused(&format!("address='{address}'")), expected);
        }
        for (key, why) in [
            (
                "gateway='10.9.0.1'",
                "gateway: 10.9.0.1 is no other address of 10.8.0.1/24; write that of the router \
                 there",
            ),
            (
                "pollers=2",
                "pollers: a port of DPDK has one poller, as nothing steers packets to several; \
                 leave it out",
            ),
        ] {
            let expected = format!("gate.toml:10: rnic.port0.{why}");
            assert_eq!(refused(&format!("address='10.8.0.1/24'\n{key}")), expected);
        }
    }

    #[test]
    fn a_packet_socket_has_an_address_of_its_device_and_one_poller() {
        let packet = "[[rnic]]\nname='p'\nkind='roce-packet'\ndevice='va'\n";
        let [rnic] = &parse(&format!("{packet}address='10.8.0.1'")).unwrap()[..] else {
            panic!("one")
        };
        let (address, version) = (Some([10, 8, 0, 1].into()), Version::V2);
        assert_eq!(rnic.kind, RnicKind::RocePacket { address, version });
        assert_eq!(rnic.network_device(), Some("va"));
        let refused = parse(&format!("{packet}pollers=2")).unwrap_err();
        assert!(refused.contains("a packet socket has one poller"), "{refused}");
        let [rnic] = &parse(&format!("{packet}version=1")).unwrap()[..] else { panic!("one") };
        assert!(rnic.kind.carries_roce_v1());
        let refused = parse(&format!("{packet}version=1\naddress='10.8.0.1'")).unwrap_err();
        assert!(refused.contains("follows from the MAC address"), "{refused}");
        assert!(parse(&format!("{packet}version=3")).is_err());
    }

    /// An RNIC is named as RDMA tools name it; what only it has can be left out.
    #[test]
    fn an_rnic_has_a_port_and_a_gid() {
        let rnic = |keys: &str| {
            parse(&format!("[[rnic]]\nname='hw0'\nkind='verbs'\ndevice='nobody0'\n{keys}"))
        };
        let port =
            |number, gid_index| RnicKind::Verbs(VerbsPort { number, gid_index, network: None });
        assert_eq!(rnic("").unwrap()[0].kind, port(1, None));
        assert_eq!(rnic("port=2\ngid_index=0").unwrap()[0].kind, port(2, Some(0)));
        assert_eq!(rnic("").unwrap()[0].network_device(), None);
        for (keys, why) in [
            ("address='10.8.0.1'", "an RNIC has the addresses of its network device"),
            ("port=0", "write 1 to 255"),
            ("gid_index=256", "write 0 to 255"),
        ] {
            let error = rnic(keys).unwrap_err();
            assert!(error.contains(why) && error.lines().count() == 1, "{error}");
        }
    }

    /// Two ports with one address would answer the same question about it.
    #[test]
    fn ports_of_dpdk_have_addresses_of_their_own() {
        let other = PORT.replace("port0", "port1").replace("memif0", "memif1");
        let address = "address='10.8.0.1/24'\n";
        let found = parse(&format!("{PORT}{address}{other}{address}")).unwrap_err();
        assert!(found.contains("\"10.8.0.1\" is taken by another rnic"), "{found}");
    }
}
