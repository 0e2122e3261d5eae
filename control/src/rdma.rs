//! The RDMA devices of this host, as the kernel shows them: real RNICs, and soft ones of its own.
//!
//! Only files are read, so this works without libibverbs.

use std::fs;
use std::path::{Path, PathBuf};

use smcr_proto::Gid;

/// The names of all devices, such as `mlx5_0`, sorted.
pub fn devices() -> Vec<String> {
    Devices::of_host().names()
}

/// The network device that an RNIC stands on: whose address the GID is that it will use.
///
/// `gid_index` is the operator's choice. Without one, the GID is the first IPv4 address of RoCEv2.
pub fn network_device(device: &str, port: u8, gid_index: Option<u32>) -> Option<String> {
    Devices::of_host().network_device(device, port, gid_index)
}

/// A folder with a folder for each device.
struct Devices {
    folder: PathBuf,
}

impl Devices {
    fn of_host() -> Self {
        Self { folder: PathBuf::from("/sys/class/infiniband") }
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let mut names: Vec<_> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    fn network_device(&self, device: &str, port: u8, gid_index: Option<u32>) -> Option<String> {
        let port = self.folder.join(device).join("ports").join(port.to_string());
        let index = match gid_index {
            Some(index) => index,
            None => (0..GIDS_MAX).find(|index| is_ipv4_over_udp(&port, *index))?,
        };
        line(&port, "gid_attrs/ndevs", index)
    }
}

/// Whether this GID of a port is an IPv4 address of RoCEv2.
fn is_ipv4_over_udp(port: &Path, index: u32) -> bool {
    let gid = line(port, "gids", index).and_then(|gid| gid.parse().ok());
    line(port, "gid_attrs/types", index).as_deref() == Some("RoCE v2")
        && gid.is_some_and(|gid| Gid::from_ip(std::net::IpAddr::V6(gid)).to_ipv4().is_some())
}

/// The line that `folder` of a port has for the GID with this index. Entries without a GID cannot
/// be read.
fn line(port: &Path, folder: &str, index: u32) -> Option<String> {
    let text = fs::read_to_string(port.join(folder).join(index.to_string())).ok()?;
    Some(text.trim().to_owned()).filter(|line| !line.is_empty())
}

/// An index has eight bits in the verbs.
const GIDS_MAX: u32 = 256;

#[cfg(test)]
mod tests {
    use super::*;

    /// Devices that a test made up, which go with it.
    struct Made(PathBuf);

    impl Made {
        fn new(name: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("rdma-{name}-{}", std::process::id()));
            fs::create_dir_all(&folder).unwrap();
            Self(folder)
        }

        fn gid(&self, port: &str, index: u32, (gid, kind, device): (&str, &str, &str)) {
            for (folder, text) in
                [("gids", gid), ("gid_attrs/types", kind), ("gid_attrs/ndevs", device)]
            {
                let folder = self.0.join(port).join(folder);
                fs::create_dir_all(&folder).unwrap();
                fs::write(folder.join(index.to_string()), format!("{text}\n")).unwrap();
            }
        }
    }

    impl Drop for Made {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// The names are those of a ConnectX port with a VLAN. An RNIC whose network device is not
    /// found would serve the connections of others.
    #[test]
    fn an_rnic_stands_on_the_device_whose_address_it_uses() {
        let made = Made::new("stands");
        let (local, ipv4) = ("fe80:0000:0000:0000:5054:00ff:fe00:0101", "0000:0000:0000:0000:0000");
        let port = "mlx5_0/ports/1";
        made.gid(port, 0, (local, "IB/RoCE v1", "eth0"));
        made.gid(port, 1, (local, "RoCE v2", "eth0"));
        made.gid(port, 2, (&format!("{ipv4}:ffff:0a09:000b"), "IB/RoCE v1", "eth0.7"));
        made.gid(port, 3, (&format!("{ipv4}:ffff:0a09:000b"), "RoCE v2", "eth0.7"));
        made.gid(port, 4, (&format!("{ipv4}:ffff:0a09:000c"), "RoCE v2", "eth0"));
        let devices = Devices { folder: made.0.clone() };
        assert_eq!(devices.names(), ["mlx5_0"]);
        let behind = |device: &str, port, index| devices.network_device(device, port, index);
        assert_eq!(behind("mlx5_0", 1, None).as_deref(), Some("eth0.7"));
        assert_eq!(behind("mlx5_0", 1, Some(4)).as_deref(), Some("eth0"));
        for (device, port, index) in
            [("mlx5_0", 1, Some(9)), ("mlx5_0", 2, None), ("rxe0", 1, None)]
        {
            assert_eq!(behind(device, port, index), None, "{device} {port} {index:?}");
        }
    }
}
