//! The paths from a load to its server: direct, through a pair of HAProxy or nginx, or through a
//! gateway pair.
//!
//! | | namespace A listens | namespace B listens | server |
//! |---|---|---|---|
//! | direct | | | 10.8.0.2:7010 + service |
//! | haproxy | 127.0.0.1:6100 + service | 10.8.0.2:6200 + service | 127.0.0.1:7010 + service |
//! | nginx | 127.0.0.1:6300 + service | 10.8.0.2:6400 + service | 127.0.0.1:7010 + service |
//! | smcgate | 127.0.0.1:7100 + service | 10.8.0.2:7200 + service | 127.0.0.1:7010 + service |
//! | intercepted | 10.8.0.2:7200 + service | the same | 127.0.0.1:7010 + service |
//! | preload | | | 10.8.0.2:8010 + service |
//! | preload-rings | | | 10.8.0.2:8110 + service |
//! | host-direct | | | 10.8.0.2:7010 + service |
//! | host-preload | | | 10.8.0.2:8010 + service |
//! | host-rings | | | 10.8.0.2:8110 + service |
//!
//! On the paths `preload` and `preload-rings`, load and server have the preload library, and give
//! their sockets to the gateways themselves; with rings, bytes go by shared memory. On those whose
//! names begin with `host`, the load runs in namespace B, too, beside one gateway for both.
//!
//! The gateways of all kinds of RNICs have the same ports: one pair of them runs at a time.

use std::fmt;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::str::FromStr;

use super::namespaces::{ADDRESS_B, DEVICE_A, DEVICE_B, Host};
use crate::scenarios::Service;

/// First port of the servers in namespace B.
pub(crate) const SERVER_PORT: u16 = 7010;
/// First port of the servers in namespace B that have the preload library.
pub(crate) const PRELOADED_PORT: u16 = 8010;
/// The same, and their bytes go by rings.
pub(crate) const RINGED_PORT: u16 = 8110;
/// The address of each gateway's `GET /stats`, inside its namespace.
pub(crate) const ADMIN: &str = "127.0.0.1:9180";

const HAPROXY_PORTS: Ports = Ports { a: 6100, b: 6200 };
const NGINX_PORTS: Ports = Ports { a: 6300, b: 6400 };
const SMCGATE_PORTS: Ports = Ports { a: 7100, b: 7200 };
/// What the addresses of ports of DPDK begin with: a network that the kernel does not know.
const PORT_NETWORK: &str = "10.9.0.";

/// A path from load to server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// Only the veth pair.
    Direct,
    /// HAProxy in both namespaces, TCP mode, one thread each.
    Haproxy,
    /// nginx in both namespaces, its stream module, one process each.
    Nginx,
    /// smcgate in both namespaces, SMC-R between them over RNICs of this kind.
    Smcgate(Rnic),
    /// The same gateways over `roce-udp`. The load connects to the far one, and eBPF leads its
    /// connections to the near one.
    Intercepted,
    /// The same gateways, with the preload library in load and server.
    Preload(Rnic),
    /// The same, and bytes go between program and gateway by rings in shared memory.
    Rings(Rnic),
    /// From the load to a server on the same host, without proxies.
    HostDirect,
    /// The same with the preload library in both, and one gateway, whose RNIC is of kind `shm`.
    HostPreload,
    /// The same, and bytes go by rings.
    HostRings,
}

/// The RNICs of a pair of gateways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rnic {
    /// `roce-udp` over the veth pair.
    RoceUdp,
    /// `shm`, for the connections of the veth pair.
    Shm,
    /// `roce-packet` over the veth pair.
    Packet,
    /// `dpdk`, ports on the veth pair.
    AfPacket,
    /// `dpdk`, ports that shared memory joins: no kernel in the path of packets.
    Memif,
}

/// Which build of the gateways, where two are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Build {
    /// The one that is measured.
    After,
    /// The one it is compared with, in the same rounds.
    Before,
}

/// Where the gateways' pollers run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pin {
    /// They choose themselves, as with users' default configuration.
    Auto,
    /// On core 0 in namespace A, on core 1 in namespace B.
    Fixed,
    /// Wherever the scheduler puts them.
    Off,
}

/// First listening ports of a pair of proxies.
#[derive(Clone, Copy)]
struct Ports {
    a: u16,
    b: u16,
}

impl Ports {
    /// Where the proxy in `host` listens for `service`, and where it connects to.
    fn hop(self, host: Host, service: Service) -> (String, String) {
        let offset = service.port_offset();
        let between = format!("{ADDRESS_B}:{}", self.b + offset);
        match host {
            Host::A => (format!("127.0.0.1:{}", self.a + offset), between),
            Host::B => (between, format!("127.0.0.1:{}", SERVER_PORT + offset)),
        }
    }
}

impl Path {
    /// All of them.
    const ALL: [Self; 16] = [
        Self::Direct,
        Self::Haproxy,
        Self::Nginx,
        Self::Smcgate(Rnic::RoceUdp),
        Self::Smcgate(Rnic::Shm),
        Self::Smcgate(Rnic::Packet),
        Self::Smcgate(Rnic::AfPacket),
        Self::Smcgate(Rnic::Memif),
        Self::Intercepted,
        Self::Preload(Rnic::RoceUdp),
        Self::Preload(Rnic::Shm),
        Self::Rings(Rnic::RoceUdp),
        Self::Rings(Rnic::Shm),
        Self::HostDirect,
        Self::HostPreload,
        Self::HostRings,
    ];

    /// The kind of RNIC between its gateways; none without gateways.
    pub(crate) fn rnic(self) -> Option<Rnic> {
        match self {
            Self::Direct | Self::HostDirect | Self::Haproxy | Self::Nginx => None,
            Self::HostPreload | Self::HostRings => Some(Rnic::Shm),
            Self::Intercepted => Some(Rnic::RoceUdp),
            Self::Smcgate(rnic) | Self::Preload(rnic) | Self::Rings(rnic) => Some(rnic),
        }
    }

    /// The port of the server of `service`.
    pub(crate) fn server_port(self, service: Service) -> u16 {
        let first = match self {
            Self::Direct | Self::HostDirect => SERVER_PORT,
            Self::Haproxy | Self::Nginx | Self::Smcgate(_) | Self::Intercepted => SERVER_PORT,
            Self::Preload(_) | Self::HostPreload => PRELOADED_PORT,
            Self::Rings(_) | Self::HostRings => RINGED_PORT,
        };
        first + service.port_offset()
    }

    /// Whether load and server have the preload library.
    pub(crate) fn is_preloaded(self) -> bool {
        matches!(self, Self::Preload(_) | Self::HostPreload) || self.has_rings()
    }

    /// Where the load runs, and the gateway that carries its connections.
    pub(crate) fn load_host(self) -> Host {
        match self {
            Self::HostDirect | Self::HostPreload | Self::HostRings => Host::B,
            Self::Direct | Self::Haproxy | Self::Nginx | Self::Intercepted => Host::A,
            Self::Smcgate(_) | Self::Preload(_) | Self::Rings(_) => Host::A,
        }
    }

    /// Whether their bytes go by rings.
    pub(crate) fn has_rings(self) -> bool {
        matches!(self, Self::Rings(_) | Self::HostRings)
    }

    /// The address to which a load in namespace A connects to reach `service` over this path.
    pub(crate) fn target(self, service: Service) -> SocketAddr {
        let address = match self {
            Self::Direct
            | Self::Preload(_)
            | Self::Rings(_)
            | Self::HostDirect
            | Self::HostPreload
            | Self::HostRings => {
                format!("{ADDRESS_B}:{}", self.server_port(service))
            }
            Self::Haproxy => HAPROXY_PORTS.hop(Host::A, service).0,
            Self::Nginx => NGINX_PORTS.hop(Host::A, service).0,
            Self::Smcgate(_) => SMCGATE_PORTS.hop(Host::A, service).0,
            Self::Intercepted => SMCGATE_PORTS.hop(Host::A, service).1,
        };
        address.parse().expect("made of constants")
    }
}

impl Path {
    /// The ports on which the proxies in namespaces A and B listen for `service`; none for
    /// direct, and where there are none.
    pub(crate) fn listeners(self, service: Service) -> [Option<u16>; 2] {
        let offset = service.port_offset();
        let ports = match self {
            Self::Direct | Self::Preload(_) | Self::Rings(_) => return [None; 2],
            Self::HostDirect | Self::HostPreload | Self::HostRings => return [None; 2],
            Self::Haproxy => HAPROXY_PORTS,
            Self::Nginx => NGINX_PORTS,
            Self::Smcgate(_) | Self::Intercepted => SMCGATE_PORTS,
        };
        [ports.a, ports.b].map(|first| Some(first + offset))
    }
}

/// The HAProxy configuration of `host`: TCP mode, one thread, otherwise the defaults.
pub(crate) fn haproxy_configuration(host: Host) -> String {
    let mut text = String::from(
        "global\n  nbthread 1\n  maxconn 9500\n\
         defaults\n  mode tcp\n  maxconn 9500\n  timeout connect 5s\n  timeout client 300s\n  \
         timeout server 300s\n",
    );
    for service in Service::ALL {
        let (bind, upstream) = HAPROXY_PORTS.hop(host, service);
        let name = service.name();
        write!(text, "listen {name}\n  bind {bind}\n  server {name} {upstream}\n")
            .expect("a string takes all");
    }
    text
}

/// The nginx configuration of `host` as a proxy: one process, otherwise the defaults of its stream
/// module, but for half-closed connections, which it would end.
pub(crate) fn nginx_stream_configuration(host: Host, folder: &str) -> String {
    let mut text = format!(
        "load_module /usr/lib/nginx/modules/ngx_stream_module.so;\n\
         daemon off;\nmaster_process off;\npid {folder}/nginx-{host:?}.pid;\nerror_log stderr;\n\
         events {{ worker_connections 19500; }}\nstream {{\n  proxy_half_close on;\n"
    );
    for service in Service::ALL {
        let (bind, upstream) = NGINX_PORTS.hop(host, service);
        writeln!(text, "  server {{ listen {bind} backlog=4096; proxy_pass {upstream}; }}")
            .expect("a string takes all");
    }
    text + "}\n"
}

impl Rnic {
    /// The table `[[rnic]]` of `host`. What both gateways share is in `folder`.
    fn table(self, host: Host, folder: &str) -> String {
        let (device, number, role) = match host {
            Host::A => (DEVICE_A, 1, "client"),
            Host::B => (DEVICE_B, 2, "server"),
        };
        let port = format!("address = \"{PORT_NETWORK}{number}/24\"\neal = [\"--no-huge\"]\n");
        let (kind, device, more) = match self {
            Self::RoceUdp => ("roce-udp", device.to_owned(), String::new()),
            Self::Packet => ("roce-packet", device.to_owned(), String::new()),
            Self::Shm => ("shm", folder.to_owned(), String::new()),
            Self::AfPacket => ("dpdk", format!("net_af_packet0,iface={device}"), port),
            Self::Memif => {
                let socket = format!("socket={folder}/memif.sock,socket-abstract=no,bsize=4608");
                ("dpdk", format!("net_memif0,role={role},{socket}"), port)
            }
        };
        format!("[[rnic]]\nname = \"rnic0\"\nkind = \"{kind}\"\ndevice = \"{device}\"\n{more}")
    }
}

/// A listener to which eBPF leads the connections that go to the far gateway.
pub(crate) fn intercepting() -> String {
    let first = SMCGATE_PORTS.b;
    format!(
        "\n[[listener]]\nname = \"intercepted\"\nbind = \"127.0.0.1:{}\"\naccept = \"tcp\"\n\
         connect = \"smc\"\nupstream = \"original-dst\"\nintercept = \"ebpf\"\n\
         intercept_ports = [\"{first}-{}\"]\nintercept_networks = [\"{ADDRESS_B}/32\"]\n",
        first - 1,
        first + 99
    )
}

/// The smcgate configuration of `host`. `poll` holds the keys of `[poll]`, and `folder` is for what
/// both gateways share.
pub(crate) fn smcgate_configuration(host: Host, rnic: Rnic, poll: &str, folder: &str) -> String {
    let (accept, connect) = match host {
        Host::A => ("tcp", "smc"),
        Host::B => ("smc", "tcp"),
    };
    let rnic = rnic.table(host, folder);
    let mut text = format!("[admin]\nlisten = \"{ADMIN}\"\n\n[poll]\n{poll}\n{rnic}");
    for service in Service::ALL {
        let (bind, upstream) = SMCGATE_PORTS.hop(host, service);
        let name = service.name();
        write!(
            text,
            "\n[[listener]]\nname = \"{name}\"\nbind = \"{bind}\"\naccept = \"{accept}\"\n\
             connect = \"{connect}\"\nupstream = \"{upstream}\"\n"
        )
        .expect("a string takes all");
    }
    text
}

/// Has a gateway keep what it may do.
pub(crate) const UNCONFINED: &str =
    "\n[confine]\nseccomp = false\nlandlock = false\ndrop_capabilities = false\n";

/// nginx in one process, serving a page of 13 bytes without touching the disk or a log.
pub(crate) fn nginx_configuration(folder: &str) -> String {
    let port = SERVER_PORT + Service::Http.port_offset();
    format!(
        "daemon off;\nmaster_process off;\npid {folder}/nginx.pid;\nerror_log stderr;\n\
         events {{ worker_connections 4096; }}\n\
         http {{\n  access_log off;\n  keepalive_requests 1000000000;\n  \
         client_body_temp_path {folder};\n  proxy_temp_path {folder};\n  \
         fastcgi_temp_path {folder};\n  uwsgi_temp_path {folder};\n  scgi_temp_path {folder};\n  \
         server {{ listen 0.0.0.0:{port} backlog=4096; \
         location / {{ return 200 \"hello, world\\n\"; }} }}\n}}\n"
    )
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Direct => "direct",
            Self::Haproxy => "haproxy",
            Self::Nginx => "nginx",
            Self::Smcgate(Rnic::RoceUdp) => "smcgate",
            Self::Smcgate(Rnic::Shm) => "smcgate-shm",
            Self::Smcgate(Rnic::Packet) => "smcgate-packet",
            Self::Smcgate(Rnic::AfPacket) => "smcgate-af-packet",
            Self::Smcgate(Rnic::Memif) => "smcgate-memif",
            Self::Preload(Rnic::RoceUdp) => "preload",
            Self::Preload(Rnic::Shm) => "preload-shm",
            Self::Preload(Rnic::Packet) => "preload-packet",
            Self::Preload(Rnic::AfPacket) => "preload-af-packet",
            Self::Preload(Rnic::Memif) => "preload-memif",
            Self::Intercepted => "intercepted",
            Self::HostDirect => "host-direct",
            Self::HostPreload => "host-preload",
            Self::HostRings => "host-rings",
            Self::Rings(Rnic::RoceUdp) => "preload-rings",
            Self::Rings(Rnic::Shm) => "preload-rings-shm",
            Self::Rings(Rnic::Packet) => "preload-rings-packet",
            Self::Rings(Rnic::AfPacket) => "preload-rings-af-packet",
            Self::Rings(Rnic::Memif) => "preload-rings-memif",
        })
    }
}

impl FromStr for Path {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|path| path.to_string() == text).ok_or_else(|| {
            let names = Self::ALL.map(|path| path.to_string()).join(", ");
            format!("unknown path {text:?}: there are {names}")
        })
    }
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Fixed => "fixed",
            Self::Off => "off",
        })
    }
}

impl FromStr for Pin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Self::Auto, Self::Fixed, Self::Off];
        all.into_iter()
            .find(|pin| pin.to_string() == text)
            .ok_or_else(|| format!("unknown pinning {text:?}: auto, fixed or off"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With two proxies on one port, or a proxy that reaches the wrong server, nobody would notice
    /// that the figures are wrong.
    #[test]
    fn every_hop_leads_to_the_next() {
        let mut seen = Vec::new();
        for ports in [HAPROXY_PORTS, NGINX_PORTS, SMCGATE_PORTS] {
            for service in Service::ALL {
                let (bind_a, upstream_a) = ports.hop(Host::A, service);
                let (bind_b, upstream_b) = ports.hop(Host::B, service);
                assert_eq!(upstream_a, bind_b);
                let port = SERVER_PORT + service.port_offset();
                assert_eq!(upstream_b, format!("127.0.0.1:{port}"));
                seen.extend([bind_a, bind_b, upstream_b]);
            }
        }
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), (3 * 2 + 1) * Service::ALL.len());
    }

    /// The gateway's configuration is an interface that issue 2 fixes: these very keys.
    #[test]
    fn the_gateway_is_configured_as_users_do() {
        let poll = "policy = \"adaptive\"\ncores = [0]\n";
        let a = smcgate_configuration(Host::A, Rnic::RoceUdp, poll, "/tmp");
        for line in [
            "listen = \"127.0.0.1:9180\"",
            "policy = \"adaptive\"",
            "cores = [0]",
            "kind = \"roce-udp\"",
            "device = \"va\"",
            "bind = \"127.0.0.1:7100\"",
            "accept = \"tcp\"",
            "connect = \"smc\"",
            "upstream = \"10.8.0.2:7200\"",
        ] {
            assert!(a.lines().any(|l| l == line), "{line} is missing in\n{a}");
        }
        let b = smcgate_configuration(Host::B, Rnic::Memif, "cores = [1]\n", "/tmp");
        for line in [
            "cores = [1]",
            "kind = \"dpdk\"",
            "address = \"10.9.0.2/24\"",
            "accept = \"smc\"",
            "upstream = \"127.0.0.1:7014\"",
        ] {
            assert!(b.lines().any(|l| l == line), "{line} is missing in\n{b}");
        }
        assert!(b.contains("role=server,socket=/tmp/memif.sock"), "{b}");
    }

    #[test]
    fn names_of_paths_are_read_as_they_are_written() {
        for path in Path::ALL {
            assert_eq!(path.to_string().parse(), Ok(path));
        }
        assert!(
            "smc".parse::<Path>().unwrap_err().contains("haproxy, nginx, smcgate, smcgate-shm")
        );
    }
}
