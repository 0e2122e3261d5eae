//! The PNET table: which RNIC is on the same physical network as a network device.
//!
//! PNET identifiers never travel on the wire: each host knows its own cabling. Without an entry, a
//! device has the RNIC that stands on it, or one that stands on no network device. If there is
//! neither it gets a soft RNIC of its own, so that nothing has to be configured.

use crate::config::{Config, RnicConfig};

/// The table, from the configuration.
#[derive(Clone, Debug, Default)]
pub struct PnetTable {
    rnics: Vec<RnicConfig>,
    /// Network device, and index into `rnics`.
    entries: Vec<(String, usize)>,
}

impl PnetTable {
    /// The table that `config` describes.
    ///
    /// # Panics
    ///
    /// If an entry names an RNIC that is not there: [`Config::parse`] has refused such files.
    pub fn new(config: &Config) -> Self {
        let index_of = |name: &str| {
            let found = config.rnics.iter().position(|rnic| rnic.name == name);
            found.expect("the configuration was checked")
        };
        let entries =
            config.pnet.iter().map(|entry| (entry.device.clone(), index_of(&entry.rnic))).collect();
        Self { rnics: config.rnics.clone(), entries }
    }

    /// The RNIC for connections of `device`: that of its entry, else the one that stands on the
    /// device, else the first that stands on no network device and is in no entry, else a soft RNIC
    /// on the device named `soft-DEVICE`, which the caller may have to create.
    pub fn rnic_for(&self, device: &str) -> RnicConfig {
        // RFC 7609 2 #2: keep a group in one VLAN
        // RFC 7609 5.1 #1: RoCE stays in its VLAN
        // RFC 7609 5.1 #2: no RoCE without VLAN access
        let by_entry = self.entries.iter().find(|(name, _)| name == device);
        let by_device = || self.rnics.iter().find(|rnic| rnic.network_device() == Some(device));
        let is_listed = |index| self.entries.iter().any(|(_, listed)| *listed == index);
        let free = || {
            let all = self.rnics.iter().enumerate();
            let mut free =
                all.filter(|(index, rnic)| rnic.network_device().is_none() && !is_listed(*index));
            free.next().map(|(_, rnic)| rnic)
        };
        let found = by_entry.map(|(_, index)| &self.rnics[*index]);
        match found.or_else(by_device).or_else(free) {
            Some(rnic) => rnic.clone(),
            None => RnicConfig::soft(format!("soft-{device}"), device),
        }
    }

    /// Whether the RNIC is a soft one that nobody creates: where the operator lists some, there are
    /// no others.
    pub fn lacks(&self, rnic: &RnicConfig) -> bool {
        !self.rnics.is_empty() && self.rnics.iter().all(|listed| listed.name != rnic.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RnicKind;

    fn table(text: &str) -> PnetTable {
        let listener = "[[listener]]\nname='a'\nbind='127.0.0.1:1'\nupstream='x:2'\n";
        PnetTable::new(&Config::parse(&format!("{listener}{text}"), "gate.toml").unwrap())
    }

    #[test]
    fn an_entry_wins_over_the_rnics_own_device() {
        let table = table(
            "[[rnic]]\nname='r0'\ndevice='va'\n[[rnic]]\nname='r1'\ndevice='vb'\nmtu=2048\n\
             [[pnet]]\ndevice='va'\nrnic='r1'\n[[pnet]]\ndevice='vlan7'\nrnic='r0'\n",
        );
        assert_eq!(
            (table.rnic_for("va").name, table.rnic_for("va").mtu),
            ("r1".into(), Some(2048))
        );
        assert_eq!(table.rnic_for("vlan7").name, "r0");
        assert_eq!(table.rnic_for("vb").name, "r1", "by its own device");
    }

    /// Peers on this host come by any device, and so does whoever is to be told that it is none.
    #[test]
    fn shared_memory_serves_every_device_that_has_no_rnic() {
        let table = table(
            "[[rnic]]\nname='local'\nkind='shm'\ndevice='/run/shm'\n\
             [[rnic]]\nname='r0'\ndevice='va'\n[[pnet]]\ndevice='vc'\nrnic='r0'\n",
        );
        let found = ["va", "vb", "vc", "lo"].map(|device| table.rnic_for(device).name);
        assert_eq!(found, ["r0", "local", "r0", "local"]);
    }

    /// A VLAN is a device of its own. A stream of a VLAN whose RDMA took the untagged device, or
    /// that of another VLAN, would be seen by the wrong ones.
    // RFC 7609 2 #2: keep a group in one VLAN
    // RFC 7609 5.1 #1: RoCE stays in its VLAN
    // RFC 7609 5.1 #2: no RoCE without VLAN access
    #[test]
    fn a_vlan_does_not_use_the_rnic_of_the_device_below_it() {
        let table = table("[[rnic]]\nname='r0'\ndevice='va'\n[[rnic]]\nname='r7'\ndevice='va.7'\n");
        let found = ["va", "va.7", "va.8"].map(|device| table.rnic_for(device));
        assert_eq!(found.each_ref().map(|rnic| &rnic.name[..]), ["r0", "r7", "soft-va.8"]);
        assert_eq!(found.each_ref().map(|rnic| &rnic.device[..]), ["va", "va.7", "va.8"]);
    }

    /// The shortest configuration is the most common one.
    #[test]
    fn without_any_rnic_each_device_has_a_soft_one() {
        let rnic = table("").rnic_for("eth0");
        assert_eq!((rnic.name.as_str(), rnic.device.as_str()), ("soft-eth0", "eth0"));
        assert_eq!(rnic.kind, RnicKind::RoceUdp { address: None });
    }

    /// A port of DPDK is on no network device that a connection could name, and it shall serve
    /// those of all devices as soon as it is configured.
    #[test]
    fn an_rnic_on_no_network_device_serves_those_that_have_no_other() {
        let port = |name: &str, host: u8| {
            let device = format!("device='net_{name}'\naddress='10.8.0.{host}/24'\n");
            format!("[[rnic]]\nname='{name}'\nkind='dpdk'\n{device}")
        };
        let soft = "[[rnic]]\nname='r0'\ndevice='va'\n";
        let all = format!("{soft}{}{}", port("p0", 1), port("p1", 2));
        let name = |text: &str, device: &str| table(text).rnic_for(device).name;
        assert_eq!([name(&all, "va"), name(&all, "vb"), name(&all, "lo")], ["r0", "p0", "p0"]);
        let listed = format!("{all}[[pnet]]\ndevice='vb'\nrnic='p0'\n");
        assert_eq!([name(&listed, "vb"), name(&listed, "vc")], ["p0", "p1"]);
        assert_eq!(name(&all, "net_p0"), "p0");
    }
}
