//! What an operator can do about an RNIC that cannot be opened.

use std::io::{self, ErrorKind};
use std::net::IpAddr;

use smcr_os::netdev::NetworkDevice;
use smcr_rnic::any::OpenError;

use crate::config::{RnicConfig, RnicKind};
use crate::confine::what_root_lacks;
use crate::device::Devices;
use crate::rdma;

/// What to write after `error`, which says why `nic` cannot be opened.
pub(super) fn remedy(nic: &RnicConfig, devices: &Devices, error: &OpenError) -> String {
    match (&nic.kind, error) {
        // Its errors say what to do.
        (RnicKind::Dpdk(_), _) => String::new(),
        (RnicKind::RoceUdp { address }, OpenError::Host(error)) => {
            on_device(&nic.device, *address, devices, error.kind())
        }
        (RnicKind::RocePacket { .. }, _) if devices.named(&nic.device).is_some_and(is_other) => {
            "; use the kind \"roce-udp\" there".to_owned()
        }
        (RnicKind::RocePacket { address, .. }, OpenError::Host(error)) => {
            on_device(&nic.device, *address, devices, error.kind())
        }
        (RnicKind::Shm, OpenError::Shm(error)) => in_directory(error.why()),
        (RnicKind::Verbs(_), _) => instead_of_rdma(&nic.device, &rdma::devices()),
        (RnicKind::RoceUdp { .. } | RnicKind::RocePacket { .. } | RnicKind::Shm, _) => {
            DOCTOR.to_owned()
        }
    }
}

/// The same for an RNIC in shared memory, where the kernel said `why`.
fn in_directory(why: &io::Error) -> String {
    let lacks = what_root_lacks(why);
    let remedy = match why.kind() == ErrorKind::NotFound {
        true => "; create it, or correct `device`",
        false if !lacks.is_empty() => lacks,
        false if why.kind() == ErrorKind::PermissionDenied => {
            "; the user of the gateway must be able to write there"
        }
        false => DOCTOR,
    };
    remedy.to_owned()
}

/// The same for an RNIC in software, on the network device `name`.
fn on_device(name: &str, address: Option<IpAddr>, devices: &Devices, refusal: ErrorKind) -> String {
    let Some(device) = devices.named(name) else {
        let names = devices.all().iter().map(|device| device.name.clone());
        return format!("; correct `device`: this host has {}", listed(names));
    };
    let has = |wanted: IpAddr| devices.owner_of(wanted).is_some_and(|owner| owner == device);
    match address {
        _ if device.addresses.is_empty() => {
            format!("; give it one: `ip address add ADDRESS/PREFIX dev {name}`")
        }
        Some(address) if !has(address) => {
            let own = addresses(device);
            format!("; correct `address`, or leave it out: {name} has {own}")
        }
        Some(_) | None if refusal == ErrorKind::AddrInUse => IN_USE.to_owned(),
        Some(_) | None if refusal == ErrorKind::PermissionDenied => NOT_PERMITTED.to_owned(),
        Some(_) | None => DOCTOR.to_owned(),
    }
}

/// The same for an RNIC by libibverbs, where the kernel knows the RDMA devices `there`.
fn instead_of_rdma(name: &str, there: &[String]) -> String {
    if there.iter().any(|one| one == name) {
        return DOCTOR.to_owned();
    }
    match there {
        [] => "; use the kind \"roce-udp\", which needs none, or load the driver of the RNIC: \
               `rdma link` lists what there is"
            .to_owned(),
        [..] => format!("; correct `device`: this host has {}", listed(there.iter().cloned())),
    }
}

/// Whether there are no Ethernet frames.
fn is_other(device: &NetworkDevice) -> bool {
    !device.is_ethernet()
}

fn addresses(device: &NetworkDevice) -> String {
    listed(device.addresses.iter().map(|(address, _)| address.to_string()))
}

fn listed(names: impl Iterator<Item = String>) -> String {
    names.collect::<Vec<_>>().join(", ")
}

const IN_USE: &str =
    "; `ss -lunp` shows who has UDP port 4791 there: stop it, or choose another address";
const NOT_PERMITTED: &str =
    "; it takes CAP_NET_RAW: give it to the gateway, or use the kind \"roce-udp\"";
const DOCTOR: &str = "; `smcgate doctor` says what this host can do";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::start::ports::open;

    /// The line that an operator reads, for an RNIC that cannot be opened.
    fn line(rest: &str) -> String {
        let text = format!(
            "[[rnic]]\nname='x'\n{rest}\n\
             [[listener]]\nname='a'\nbind='127.0.0.1:1'\nupstream='127.0.0.1:2'\n"
        );
        let config = crate::config::Config::parse(&text, "a.toml").unwrap();
        let opened = open(&config.rnics[0], &[], &Devices::read().unwrap());
        opened.err().expect("it cannot be opened").why
    }

    /// The README promises cause and remedy in one line.
    #[test]
    fn each_failure_says_what_to_do() {
        for (rnic, cause, remedy) in [
            ("device='nix0'", "there is no such network device", "; correct `device`: this host"),
            (
                "kind='shm'\ndevice='/nix/nix'",
                "directory /nix/nix: there is no such directory",
                "; create it, or correct `device`",
            ),
            (
                "device='lo'\naddress='10.99.99.99'",
                "no network device has the address 10.99.99.99",
                "; correct `address`, or leave it out: lo has 127.0.0.1",
            ),
            (
                "kind='roce-packet'\ndevice='lo'",
                "it is no Ethernet device",
                "; use the kind \"roce-udp\" there",
            ),
        ] {
            let line = line(rnic);
            assert!(line.starts_with(&format!("{cause}{remedy}")), "{line}");
        }
    }

    /// What this host may lack is told from what it shows.
    #[test]
    fn a_device_is_looked_at_before_the_error_is() {
        let lo = Devices::read().unwrap();
        let here = |refusal| on_device("lo", None, &lo, refusal);
        assert!(here(ErrorKind::AddrInUse).contains("ss -lunp"));
        assert!(here(ErrorKind::PermissionDenied).contains("CAP_NET_RAW"));
        assert_eq!(here(ErrorKind::InvalidInput), DOCTOR);
        let bare = NetworkDevice { addresses: vec![], ..lo.named("lo").unwrap().clone() };
        let bare = Devices::from_iter([bare]);
        let said = on_device("lo", None, &bare, ErrorKind::AddrNotAvailable);
        assert_eq!(said, "; give it one: `ip address add ADDRESS/PREFIX dev lo`");
    }

    #[test]
    fn an_rdma_device_is_one_of_those_that_there_are() {
        let others = ["mlx5_0".to_owned(), "mlx5_1".to_owned()];
        let said = instead_of_rdma("mlx5_2", &others);
        assert_eq!(said, "; correct `device`: this host has mlx5_0, mlx5_1");
        assert!(instead_of_rdma("mlx5_2", &[]).starts_with("; use the kind \"roce-udp\""));
        assert_eq!(instead_of_rdma("mlx5_1", &others), DOCTOR);
    }
}
