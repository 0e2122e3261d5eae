//! `[[rnic]]`: the NICs to use.

use std::net::IpAddr;

use super::error::ConfigError;
use super::section::{Placed, Section, Source};
use super::{CORES_MAX, RnicConfig, RnicKind, Unique};

/// The tables of `[[rnic]]`.
pub(super) fn rnics(
    source: Source<'_>,
    tables: Vec<Section<'_>>,
) -> Result<Vec<RnicConfig>, ConfigError> {
    let mut names = Unique::new("rnic");
    let mut devices = Unique::new("rnic");
    let mut found = Vec::new();
    for mut table in tables {
        let name = table.required("name")?;
        table.rename(format!("rnic.{}", name.value));
        let kind = table.word("kind", &RNIC_KINDS, RnicKind::RoceUdp)?;
        let device = table.required("device")?;
        let address = optional_address(source, &mut table)?;
        let pollers = table.count("pollers", 1..POLLERS_MAX + 1, 1)?;
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
        if kind == RnicKind::Shm && (address.is_some() || mtu.is_some()) {
            let key = if address.is_some() { "address" } else { "mtu" };
            return Err(table.error(key, "there are no packets in shared memory; remove this"));
        }
        let pnet = table.text("pnet")?.map(|text| text.value).unwrap_or_default();
        table.finish()?;
        names.insert(source, &name)?;
        devices.insert(source, &device)?;
        found.push(RnicConfig {
            name: name.value,
            kind,
            device: device.value,
            address,
            pollers,
            core,
            mtu,
            pnet,
        });
    }
    Ok(found)
}

fn optional_address(
    source: Source<'_>,
    table: &mut Section<'_>,
) -> Result<Option<IpAddr>, ConfigError> {
    let Some(text) = table.text("address")? else { return Ok(None) };
    match text.value.parse() {
        Ok(address) => Ok(Some(address)),
        Err(_) => {
            let why = format!("\"{}\" is no address; write one such as \"fd00::1\"", text.value);
            Err(text.error(source, why))
        }
    }
}

fn optional_core(table: &mut Section<'_>) -> Result<Option<usize>, ConfigError> {
    let absent = u64::MAX;
    let core = table.number("core", 0..CORES_MAX, absent)?.value;
    Ok(if core == absent { None } else { usize::try_from(core).ok() })
}

/// Pollers of one RNIC: more sockets than that do not make it faster.
const POLLERS_MAX: u32 = 64;
const RNIC_KINDS: [(&str, RnicKind); 2] =
    [(RnicKind::RoceUdp.name(), RnicKind::RoceUdp), (RnicKind::Shm.name(), RnicKind::Shm)];
