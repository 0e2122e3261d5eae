//! RNICs that nobody has listed, where the network is there later than the gateway.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use smcr_engine::clock::Clock;
use smcr_engine::mailbox::Waker;
use smcr_rnic::any;

use super::rig::{connect, halted, open_port};
use crate::config::{self, Config, Protocol, RnicConfig, Upstream};
use crate::device::Devices;
use crate::gateway::{Arrivals, Gateway, Names, OpenRnics, PortParts};
use crate::groups::PortId;
use crate::reload::Prepared;
use crate::start::choose_nics;

const LO: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Chooses as the gateway does, and opens at an address that no other test has.
struct OneMore {
    address: Ipv4Addr,
    clock: Clock,
    waker: Waker,
}

impl OpenRnics<any::Nic> for OneMore {
    fn wanted(&self, config: &Config, names: &Names, by: Arrivals<'_>) -> Vec<RnicConfig> {
        choose_nics(config, &Devices::read().unwrap(), names, by)
    }

    fn open(
        &mut self,
        config: &Config,
        nic: &RnicConfig,
    ) -> Result<Vec<PortParts<any::Nic>>, String> {
        assert_eq!(nic.name, "soft-lo");
        Ok(vec![open_port(config, self.address, self.clock, &self.waker)])
    }
}

/// A gateway whose only port is for no device, as if nothing could be opened at its start. Its
/// listener is `changed` then.
fn without_rnic(
    number: u8,
    changed: impl Fn(&mut config::Listener),
) -> (Gateway<any::Nic>, SocketAddr) {
    let (mut gateway, at) = halted(number, "");
    gateway.network.set_wanted(PortId(0), false);
    let mut config = gateway.config.clone();
    config.listeners.iter_mut().for_each(changed);
    // No name has an address, and the rig's opener opens nothing.
    let prepared = Prepared { config, names: BTreeMap::new(), log_mistake: None, order: 0 };
    gateway.reload(gateway.clock.now(), prepared).unwrap();
    let address = Ipv4Addr::new(127, 77, number, 2);
    let (clock, waker) = (gateway.clock, gateway.mail.waker.clone());
    gateway.opener = Box::new(OneMore { address, clock, waker });
    gateway.expire(gateway.clock.now());
    assert_eq!((gateway.ports.len(), gateway.network.port_for(LO)), (1, None));
    (gateway, at)
}

/// DNS is often not there yet when a host starts. Connections that come when it is had stayed TCP
/// for as long as the gateway lived.
#[test]
fn a_name_that_has_an_address_only_later_gets_an_rnic_then() {
    let (mut gateway, _) = without_rnic(214, |it| {
        it.connect = Protocol::Smc;
        it.upstream.all = vec![Upstream::Name { host: "db.invalid".to_owned(), port: 9 }];
    });
    gateway.name_means("db.invalid", &[LO]);
    gateway.expire(gateway.clock.now());
    assert_eq!((gateway.ports.len(), gateway.network.port_for(LO)), (2, Some(PortId(1))));
    // Whatever else changes, it is there now.
    gateway.name_means("db.invalid", &[IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2))]);
    gateway.expire(gateway.clock.now() + Duration::from_secs(2));
    assert_eq!(gateway.ports.len(), 2);
}

/// A cable is plugged in, or DHCP gives the host an address, after the gateway has started.
#[test]
fn a_device_that_comes_later_gets_an_rnic_then() {
    let (mut gateway, _) = without_rnic(217, |it| it.connect = Protocol::Smc);
    gateway.network_changed(gateway.clock.now());
    gateway.expire(gateway.clock.now());
    assert_eq!((gateway.ports.len(), gateway.network.port_for(LO)), (2, Some(PortId(1))));
}

/// The kernel says nothing of routes. A device without an RNIC, by which peers come that have
/// SMC-R, gets one for those that come later.
#[test]
fn a_device_by_which_peers_come_gets_an_rnic() {
    let (mut gateway, at) = without_rnic(215, |it| it.accept = Protocol::Smc);
    let _client = connect(at);
    let place = gateway.listeners.iter().position(|it| it.socket.is_some()).unwrap();
    gateway.accept(gateway.clock.now(), u16::try_from(place).unwrap());
    gateway.begin_arrived();
    assert_eq!(gateway.ports.len(), 1, "it has come before");
    gateway.expire(gateway.clock.now());
    assert_eq!((gateway.ports.len(), gateway.network.port_for(LO)), (2, Some(PortId(1))));
}

/// Who lists RNICs wants no others.
#[test]
fn where_rnics_are_listed_none_is_added() {
    let (mut gateway, _) = without_rnic(216, |it| {
        it.connect = Protocol::Smc;
        it.upstream.all = vec![Upstream::Name { host: "db.invalid".to_owned(), port: 9 }];
    });
    gateway.config.rnics.push(RnicConfig::soft("elsewhere", "none0"));
    gateway.name_means("db.invalid", &[LO]);
    gateway.expire(gateway.clock.now());
    assert_eq!(gateway.ports.len(), 1);
}
