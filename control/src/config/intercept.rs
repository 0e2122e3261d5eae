//! `intercept` and its keys: connections that applications make to somebody else.

use std::fmt;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use super::Protocol;
use super::error::ConfigError;
use super::network::{Cidr, Upstream};
use super::section::{Placed, Section, Source};

/// Which connections come to a listener although they are meant for somebody else, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Intercept {
    /// By what.
    pub way: InterceptWay,
    /// To these ports, of which none is in two ranges.
    pub ports: Vec<RangeInclusive<u16>>,
    /// To these networks; none: to everybody.
    pub networks: Vec<Cidr>,
    /// Of applications in these cgroups and below; none: of all. For eBPF only.
    pub cgroups: Vec<PathBuf>,
}

/// By what connections are intercepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InterceptWay {
    /// eBPF at `connect`.
    Ebpf,
    /// NAT: the kernel remembers where they wanted to go.
    Redirect,
    /// TPROXY: they arrive with the addresses that they have.
    Tproxy,
}

/// Which address a server sees connections come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceAddress {
    /// That of this gateway's host.
    Gateway,
    /// That of the client.
    Client,
    /// That of this gateway's host; a PROXY header, version 1, says that of the client.
    ProxyV1,
    /// The same, version 2.
    ProxyV2,
}

/// The words of `source`.
pub(super) const SOURCES: [(&str, SourceAddress); 4] = [
    ("gateway", SourceAddress::Gateway),
    ("client", SourceAddress::Client),
    ("proxy-v1", SourceAddress::ProxyV1),
    ("proxy-v2", SourceAddress::ProxyV2),
];

/// Reads `proxy_from` of a listener that accepts `accept`.
pub(super) fn proxies(
    source: Source<'_>,
    table: &mut Section<'_>,
    accept: Protocol,
) -> Result<Vec<Cidr>, ConfigError> {
    let mut networks = Vec::new();
    for text in table.texts("proxy_from")? {
        if accept == Protocol::Smc {
            let why = "is for listeners with accept = \"tcp\": over SMC-R the header would come \
                       after the rendezvous; have the gateway at the client's host read it";
            return Err(text.error(source, why));
        }
        networks.push(text.value.parse().map_err(|why: String| text.error(source, why))?);
    }
    Ok(networks)
}

impl Intercept {
    /// Reads the keys of a listener at `bind`, which accepts `accept`. Without `intercept` there is
    /// nothing to read.
    pub(super) fn read(
        source: Source<'_>,
        table: &mut Section<'_>,
        upstream: &Placed<Upstream>,
        (bind, accept): (SocketAddr, Protocol),
    ) -> Result<Option<Self>, ConfigError> {
        let way = table.optional_word("intercept", &WAYS)?;
        let ports = table.port_ranges("intercept_ports")?;
        let networks = table.texts("intercept_networks")?;
        let cgroups = table.texts("intercept_cgroups")?;
        let Some(way) = way else {
            if upstream.value == Upstream::OriginalDst {
                let why = "is missing: say how connections that are meant for others come here; \
                           write \"ebpf\", \"redirect\" or \"tproxy\"";
                return Err(table.error("intercept", why));
            }
            let key = match (ports.first(), networks.first(), cgroups.first()) {
                (Some(_), ..) => "intercept_ports",
                (None, Some(_), _) => "intercept_networks",
                (None, None, Some(_)) => "intercept_cgroups",
                (None, None, None) => return Ok(None),
            };
            return Err(table.error(key, "has no effect without \"intercept\""));
        };
        if upstream.value != Upstream::OriginalDst {
            let why = "connections that are intercepted go on to where they wanted to; write \
                       upstream = \"original-dst\"";
            return Err(upstream.error(source, why));
        }
        if ports.is_empty() {
            return Err(table.error("intercept_ports", "is missing: write [7010, \"8000-8099\"]"));
        }
        if let Some(cgroup) = cgroups.first().filter(|_| way != InterceptWay::Ebpf) {
            return Err(cgroup.error(source, "only intercept = \"ebpf\" knows cgroups"));
        }
        let cgroups: Result<Vec<_>, _> =
            cgroups.iter().map(|cgroup| absolute(source, cgroup)).collect();
        let networks: Result<Vec<_>, _> = networks
            .iter()
            .map(|text| text.value.parse().map_err(|why: String| text.error(source, why)))
            .collect();
        if let Some(range) = ports.iter().find(|range| range.value.contains(&bind.port()))
            && keeps_addresses(way, accept)
        {
            let why = "has the listener's own port, to which connections are not led here, as they \
                       may be meant for it; bind it to a port that is not intercepted";
            return Err(range.error(source, why));
        }
        let ports = disjoint(source, ports)?;
        Ok(Some(Self { way, ports, networks: networks?, cgroups: cgroups? }))
    }

    /// Whether connections to this port are intercepted, wherever they go.
    pub fn has_port(&self, port: u16) -> bool {
        self.ports.iter().any(|range| range.contains(&port))
    }
}

/// Which connections, in words.
impl fmt::Display for Intercept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (word, _) = WAYS.iter().find(|(_, way)| *way == self.way).expect("each has a word");
        write!(f, "by {word}: to ports")?;
        for range in &self.ports {
            match (range.start(), range.end()) {
                (first, last) if first == last => write!(f, " {first}")?,
                (first, last) => write!(f, " {first}-{last}")?,
            }
        }
        for network in &self.networks {
            write!(f, ", to {network}")?;
        }
        for cgroup in &self.cgroups {
            write!(f, ", of {}", cgroup.display())?;
        }
        Ok(())
    }
}

/// Whether connections come with the addresses that they have, by which alone they can be told from
/// those that are made to the listener itself.
fn keeps_addresses(way: InterceptWay, accept: Protocol) -> bool {
    match (way, accept) {
        (InterceptWay::Tproxy, _) | (InterceptWay::Ebpf, Protocol::Smc) => true,
        (InterceptWay::Ebpf, Protocol::Tcp) | (InterceptWay::Redirect, _) => false,
    }
}

/// A cgroup below the root that this process sees.
fn absolute(source: Source<'_>, cgroup: &Placed<String>) -> Result<PathBuf, ConfigError> {
    let is_way_up = cgroup.value.split('/').any(|part| part == "..");
    if !cgroup.value.starts_with('/') || is_way_up {
        let why = format!("\"{}\" is no cgroup; write one such as \"/apps\"", cgroup.value);
        return Err(cgroup.error(source, why));
    }
    Ok(PathBuf::from(&cgroup.value))
}

fn disjoint(
    source: Source<'_>,
    ports: Vec<Placed<RangeInclusive<u16>>>,
) -> Result<Vec<RangeInclusive<u16>>, ConfigError> {
    let mut found: Vec<RangeInclusive<u16>> = Vec::new();
    for range in ports {
        let (first, last) = (*range.value.start(), *range.value.end());
        if found.iter().any(|other| first <= *other.end() && *other.start() <= last) {
            return Err(range.error(source, "has a port that is in the list before"));
        }
        found.push(range.value);
    }
    Ok(found)
}

const WAYS: [(&str, InterceptWay); 3] = [
    ("ebpf", InterceptWay::Ebpf),
    ("redirect", InterceptWay::Redirect),
    ("tproxy", InterceptWay::Tproxy),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn read(lines: &str) -> Result<Intercept, String> {
        let text = format!(
            "[[listener]]\nname = 'out'\nbind = '127.0.0.1:15001'\nconnect = 'smc'\n{lines}\n"
        );
        let config = Config::parse(&text, "a.toml").map_err(|error| error.to_string())?;
        Ok(config.listeners[0].intercept.clone().expect("it intercepts"))
    }

    #[test]
    fn what_the_issue_writes_is_read() {
        let intercept = read(
            "upstream = 'original-dst'\nintercept = 'ebpf'\n\
             intercept_ports = [7010, '8000-8099']\nintercept_networks = ['10.8.0.0/24']\n\
             intercept_cgroups = ['/apps']",
        );
        let expected = Intercept {
            way: InterceptWay::Ebpf,
            ports: vec![7010..=7010, 8000..=8099],
            networks: vec!["10.8.0.0/24".parse().unwrap()],
            cgroups: vec!["/apps".into()],
        };
        assert_eq!(intercept, Ok(expected.clone()));
        let shown = "by ebpf: to ports 7010 8000-8099, to 10.8.0.0/24, of /apps";
        assert_eq!(expected.to_string(), shown);
        assert!(expected.has_port(8099) && !expected.has_port(8100));
        let least = read("upstream = 'original-dst'\nintercept = 'tproxy'\nintercept_ports = [1]");
        assert_eq!(least.map(|least| least.networks.len()), Ok(0));
    }

    /// A header that a gateway sends by TCP would come before the CLC messages of the rendezvous.
    #[test]
    fn a_proxy_header_goes_by_tcp_only() {
        let text = |connect: &str| {
            format!(
                "[[listener]]\nname = 'in'\nbind = '127.0.0.1:1'\nupstream = '127.0.0.1:2'\n\
                 connect = '{connect}'\nsource = 'proxy-v2'\n"
            )
        };
        let source = Config::parse(&text("tcp"), "a.toml").unwrap().listeners[0].source;
        assert_eq!(source, SourceAddress::ProxyV2);
        let error = Config::parse(&text("smc"), "a.toml").unwrap_err().to_string();
        assert!(error.contains("in.source") && error.contains("a.toml:1"), "{error}");
    }

    /// Each of these would intercept nothing, or what nobody wanted.
    #[test]
    fn half_an_interception_is_an_error() {
        for (lines, key, why) in [
            ("upstream = 'original-dst'", "out.intercept", "\"ebpf\", \"redirect\" or \"tproxy\""),
            ("upstream = 'original-dst'\nintercept = 'ebpf'", "intercept_ports", "is missing"),
            (
                "upstream = '10.8.0.2:1'\nintercept = 'ebpf'\nintercept_ports = [1]",
                "upstream",
                "\"original-dst\"",
            ),
            ("upstream = '10.8.0.2:1'\nintercept_ports = [1]", "intercept_ports", "no effect"),
            ("upstream = 'original-dst'\nintercept = 'bpf'", "intercept", "is not known"),
            (
                "upstream = 'original-dst'\nintercept = 'redirect'\nintercept_ports = [1]\n\
                 intercept_cgroups = ['/apps']",
                "intercept_cgroups",
                "only intercept = \"ebpf\"",
            ),
            (
                "upstream = 'original-dst'\nintercept = 'ebpf'\nintercept_ports = [1]\n\
                 intercept_cgroups = ['apps']",
                "intercept_cgroups",
                "\"/apps\"",
            ),
            (
                "upstream = 'original-dst'\nintercept = 'ebpf'\nintercept_ports = ['9-8']",
                "intercept_ports",
                "9-8",
            ),
            (
                "upstream = 'original-dst'\nintercept = 'ebpf'\nintercept_ports = [5, '4-6']",
                "intercept_ports",
                "before",
            ),
            (
                "upstream = 'original-dst'\nintercept = 'tproxy'\nintercept_ports = \
                 ['15000-15002']",
                "intercept_ports",
                "own port",
            ),
        ] {
            let error = read(lines).expect_err(lines);
            assert!(error.contains(key) && error.contains(why), "{lines}\n{error}");
        }
    }
}
