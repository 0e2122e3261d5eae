//! The paths from a load to its server: direct, through a HAProxy pair, or through a gateway pair.
//!
//! | | namespace A listens | namespace B listens | server |
//! |---|---|---|---|
//! | direct | | | 10.8.0.2:7010 + service |
//! | haproxy | 127.0.0.1:6100 + service | 10.8.0.2:6200 + service | 127.0.0.1:7010 + service |
//! | smcgate | 127.0.0.1:7100 + service | 10.8.0.2:7200 + service | 127.0.0.1:7010 + service |

use std::fmt;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::str::FromStr;

use super::namespaces::{ADDRESS_B, DEVICE_A, DEVICE_B, Host};
use crate::scenarios::Service;

/// First port of the servers in namespace B.
pub(crate) const SERVER_PORT: u16 = 7010;
/// The address of each gateway's `GET /stats`, inside its namespace.
pub(crate) const ADMIN: &str = "127.0.0.1:9180";

const HAPROXY_PORTS: Ports = Ports { a: 6100, b: 6200 };
const SMCGATE_PORTS: Ports = Ports { a: 7100, b: 7200 };

/// A path from load to server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// Only the veth pair.
    Direct,
    /// HAProxy in both namespaces, TCP mode, one thread each.
    Haproxy,
    /// smcgate in both namespaces, SMC-R between them.
    Smcgate,
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
    /// The address to which a load in namespace A connects to reach `service` over this path.
    pub(crate) fn target(self, service: Service) -> SocketAddr {
        let address = match self {
            Self::Direct => format!("{ADDRESS_B}:{}", SERVER_PORT + service.port_offset()),
            Self::Haproxy => HAPROXY_PORTS.hop(Host::A, service).0,
            Self::Smcgate => SMCGATE_PORTS.hop(Host::A, service).0,
        };
        address.parse().expect("made of constants")
    }
}

impl Path {
    /// The ports on which the proxies in namespaces A and B listen for `service`; none for direct.
    pub(crate) fn listeners(self, service: Service) -> [Option<u16>; 2] {
        let offset = service.port_offset();
        let ports = match self {
            Self::Direct => return [None; 2],
            Self::Haproxy => HAPROXY_PORTS,
            Self::Smcgate => SMCGATE_PORTS,
        };
        [ports.a, ports.b].map(|first| Some(first + offset))
    }
}

/// The HAProxy configuration of `host`: TCP mode, one thread, otherwise the defaults.
pub(crate) fn haproxy_configuration(host: Host) -> String {
    let mut text = String::from(
        "global\n  nbthread 1\n  maxconn 8000\n\
         defaults\n  mode tcp\n  maxconn 8000\n  timeout connect 5s\n  timeout client 60s\n  \
         timeout server 60s\n",
    );
    for service in Service::ALL {
        let (bind, upstream) = HAPROXY_PORTS.hop(host, service);
        let name = service.name();
        write!(text, "listen {name}\n  bind {bind}\n  server {name} {upstream}\n")
            .expect("a string takes all");
    }
    text
}

/// The smcgate configuration of `host`. `pin` holds further keys of `[poll]`.
pub(crate) fn smcgate_configuration(host: Host, idle_policy: &str, pin: &str) -> String {
    let (device, accept, connect) = match host {
        Host::A => (DEVICE_A, "tcp", "smc"),
        Host::B => (DEVICE_B, "smc", "tcp"),
    };
    let mut text = format!(
        "[admin]\nlisten = \"{ADMIN}\"\n\n\
         [poll]\npolicy = \"{idle_policy}\"\n{pin}\n\
         [[rnic]]\nname = \"soft0\"\nkind = \"roce-udp\"\ndevice = \"{device}\"\n"
    );
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
            Self::Smcgate => "smcgate",
        })
    }
}

impl FromStr for Path {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Self::Direct, Self::Haproxy, Self::Smcgate];
        all.into_iter()
            .find(|path| path.to_string() == text)
            .ok_or_else(|| format!("unknown path {text:?}: direct, haproxy or smcgate"))
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
        for ports in [HAPROXY_PORTS, SMCGATE_PORTS] {
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
        assert_eq!(seen.len(), (2 * 2 + 1) * Service::ALL.len());
    }

    /// The gateway's configuration is an interface that issue 2 fixes: these very keys.
    #[test]
    fn the_gateway_is_configured_as_users_do() {
        let a = smcgate_configuration(Host::A, "adaptive", "cores = [0]\n");
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
        let b = smcgate_configuration(Host::B, "spin", "cores = [1]\n");
        for line in ["cores = [1]", "accept = \"smc\"", "upstream = \"127.0.0.1:7014\""] {
            assert!(b.lines().any(|l| l == line), "{line} is missing in\n{b}");
        }
    }
}
