//! Whom to ask what names mean: the name servers of the configuration, or those that the files of
//! this host name.
//!
//! The files change while the gateway runs: DHCP, a VPN or NetworkManager names other servers. So
//! they are read again and again. A file that cannot be read or understood changes nothing, because
//! somebody may be about to write it. And a gateway that runs as root cannot read one that was
//! replaced, because Landlock permits the file that was there at the start.

use std::fs;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use hickory_resolver::config::{
    ConnectionConfig, NameServerConfig, ResolveHosts, ResolverConfig, ResolverOpts,
};
use hickory_resolver::lookup::Lookup;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::op::Query;
use hickory_resolver::proto::rr::{Name, RecordType};
use hickory_resolver::system_conf::parse_resolv_conf;
use hickory_resolver::{Hosts, TokioResolver};

/// Who is asked now.
pub(super) struct Whom {
    servers: Servers,
    /// Names that no server is asked for.
    hosts: Watched<Arc<Hosts>>,
    /// Somebody could be asked already.
    is_known: bool,
}

/// Name servers, and how they are asked.
enum Servers {
    /// Those of the configuration.
    Configured(Asked),
    /// Those of this host.
    OfHost(Watched<Asked>),
}

type Asked = (ResolverConfig, ResolverOpts);

impl Whom {
    /// `servers`, or those of this host if there are none.
    pub(super) fn new(servers: &[SocketAddr]) -> Self {
        Self::of_files(servers, RESOLV_CONF.into(), HOSTS.into())
    }

    /// The same, where a host has its files elsewhere.
    pub(super) fn of_files(servers: &[SocketAddr], resolv_conf: PathBuf, hosts: PathBuf) -> Self {
        let servers = match servers.is_empty() {
            true => Servers::OfHost(Watched::new(resolv_conf, |text| {
                parse_resolv_conf(text).map_err(|error| error.to_string())
            })),
            false => Servers::Configured(configured(servers)),
        };
        let hosts = Watched::new(hosts, |text| {
            let mut hosts = Hosts::default();
            hosts.read_hosts_conf(text).map_err(|error| error.to_string())?;
            Ok(Arc::new(hosts))
        });
        Self { servers, hosts, is_known: false }
    }

    /// The addresses that the file of this host has for `name`, as far as it has been read. No
    /// server has to be asked then, also if they are all of one family.
    pub(super) fn in_hosts(&self, name: &str) -> Vec<IpAddr> {
        let (Some(hosts), Ok(name)) = (&self.hosts.said, Name::from_str(name)) else {
            return Vec::new();
        };
        let of = |family| hosts.lookup_static_host(&Query::query(name.clone(), family));
        let found = [RecordType::A, RecordType::AAAA].into_iter().filter_map(of);
        let addresses = |found: Lookup| {
            let answers = found.answers().iter().filter_map(|record| record.data.ip_addr());
            answers.collect::<Vec<_>>()
        };
        found.flat_map(addresses).collect()
    }

    /// Reads the files again. Returns who is to be asked from now on; none if that stays as it is,
    /// or if nobody can be asked, which the log then says.
    pub(super) fn renewed(&mut self) -> Option<TokioResolver> {
        let mut is_news = self.hosts.read_again();
        let asked = match &mut self.servers {
            Servers::Configured(asked) => {
                is_news |= !self.is_known;
                Some(&*asked)
            }
            Servers::OfHost(file) => {
                is_news |= file.read_again();
                file.said.as_ref()
            }
        };
        let (config, options) = asked.filter(|_| is_news)?;
        let provider = TokioRuntimeProvider::default();
        let mut builder = TokioResolver::builder_with_config(config.clone(), provider);
        *builder.options_mut() = options.clone();
        // Without a cache: what is over is asked for, and nothing else is.
        builder.options_mut().cache_size = 0;
        // It would read the file by itself, and take one that it may not read for an empty one.
        builder.options_mut().use_hosts_file = ResolveHosts::Never;
        let built = builder.build();
        let refused = built.inspect_err(|error| tracing::warn!(%error, "no server can be asked"));
        let mut resolver = refused.ok()?;
        resolver.set_hosts(self.hosts.said.clone().unwrap_or_default());
        self.is_known = true;
        Some(resolver)
    }
}

/// A file that may change at any time.
struct Watched<T> {
    path: PathBuf,
    parse: fn(&[u8]) -> Result<T, String>,
    /// What was read last, whether or not it could be understood.
    text: Option<Vec<u8>>,
    /// What it said when it could be understood last.
    said: Option<T>,
    /// Why it cannot be used now. The log has it already.
    trouble: Option<String>,
}

impl<T> Watched<T> {
    fn new(path: PathBuf, parse: fn(&[u8]) -> Result<T, String>) -> Self {
        Self { path, parse, text: None, said: None, trouble: None }
    }

    /// Reads it again. Returns whether it says something else than before.
    fn read_again(&mut self) -> bool {
        let understood = match fs::read(&self.path) {
            // The text is compared rather than the time of the last change: two changes may have
            // the same one.
            Ok(text) if self.text.as_ref() == Some(&text) => return false,
            Ok(text) => {
                let understood = (self.parse)(&text);
                self.text = Some(text);
                understood
            }
            Err(error) => Err(unreadable(&error)),
        };
        let trouble = understood.map(|said| self.said = Some(said)).err();
        let is_news = trouble.is_none();
        if let Some(why) = &trouble
            && self.trouble != trouble
        {
            let file = self.path.display();
            tracing::warn!(%file, why, "cannot be used; what it said before stays in force");
        }
        self.trouble = trouble;
        is_news
    }
}

/// Why a file cannot be read, and what to do about it.
fn unreadable(error: &io::Error) -> String {
    match error.kind() == ErrorKind::PermissionDenied {
        true => format!(
            "{error}; a gateway that runs as root may read only the file that was there at its \
             start: restart it if the file was replaced"
        ),
        false => error.to_string(),
    }
}

/// The name servers that the configuration names.
fn configured(servers: &[SocketAddr]) -> Asked {
    let servers = servers.iter().map(|server| {
        let mut connections = vec![ConnectionConfig::udp(), ConnectionConfig::tcp()];
        connections.iter_mut().for_each(|one| one.port = server.port());
        NameServerConfig::new(server.ip(), true, connections)
    });
    let config = ResolverConfig::from_parts(None, Vec::new(), servers.collect());
    (config, ResolverOpts::default())
}

/// Where a host names its name servers.
const RESOLV_CONF: &str = "/etc/resolv.conf";
/// Where a host says itself what names mean.
const HOSTS: &str = "/etc/hosts";

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::path::Path;

    use super::*;

    /// The files of a host, and who asks because of them.
    fn host(folder: &Path) -> (PathBuf, PathBuf, Whom) {
        let [resolv_conf, hosts] = ["resolv.conf", "hosts"].map(|name| folder.join(name));
        let whom = Whom::of_files(&[], resolv_conf.clone(), hosts.clone());
        (resolv_conf, hosts, whom)
    }

    /// The name servers that `whom` asks.
    fn asked(whom: &Whom) -> Vec<IpAddr> {
        match &whom.servers {
            Servers::OfHost(Watched { said: Some((config, _)), .. }) => {
                config.name_servers().iter().map(|server| server.ip).collect()
            }
            Servers::OfHost(_) => Vec::new(),
            Servers::Configured(_) => panic!("those of the host are asked"),
        }
    }

    fn ip(last: u8) -> IpAddr {
        IpAddr::from([127, 0, 0, last])
    }

    /// A line of one family is an answer, as it is for the library of the host.
    #[test]
    fn what_the_file_says_needs_no_server() {
        let folder = tempfile::tempdir().unwrap();
        let (resolv_conf, hosts, mut whom) = host(folder.path());
        fs::write(&resolv_conf, "nameserver 127.0.0.1\n").unwrap();
        fs::write(&hosts, "127.0.0.2 four both\n::2 six both\n").unwrap();
        assert!(whom.in_hosts("four").is_empty(), "it was not read yet");
        whom.renewed().unwrap();
        let six: IpAddr = "::2".parse().unwrap();
        for (name, addresses) in
            [("four", vec![ip(2)]), ("six", vec![six]), ("both", vec![ip(2), six]), ("x", vec![])]
        {
            assert_eq!(whom.in_hosts(name), addresses, "{name}");
        }
    }

    /// A laptop that gets other name servers by DHCP, or by a VPN, must not ask the old ones.
    #[test]
    fn name_servers_of_the_host_may_change() {
        let folder = tempfile::tempdir().unwrap();
        let (resolv_conf, _, mut whom) = host(folder.path());
        assert!(whom.renewed().is_none(), "there is no file yet");
        for last in [2, 3] {
            fs::write(&resolv_conf, format!("nameserver 127.0.0.{last}\n")).unwrap();
            assert!(whom.renewed().is_some());
            assert_eq!(asked(&whom), [ip(last)]);
            assert!(whom.renewed().is_none(), "nothing has changed since");
        }
        // As NetworkManager does it.
        let newer = folder.path().join("newer");
        fs::write(&newer, "nameserver 127.0.0.4\n").unwrap();
        fs::rename(newer, &resolv_conf).unwrap();
        assert!(whom.renewed().is_some());
        assert_eq!(asked(&whom), [ip(4)]);
    }

    /// Somebody who writes a file may not be done yet, and a gateway that has given up a folder
    /// cannot read in it: whoever was asked before is asked on.
    #[test]
    fn what_cannot_be_read_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let (resolv_conf, hosts, mut whom) = host(folder.path());
        fs::write(&resolv_conf, "nameserver 127.0.0.2\n").unwrap();
        fs::write(&hosts, "10.0.0.7 db.example\n").unwrap();
        assert!(whom.renewed().is_some());
        for text in ["", "nameserv", "nameserver no-address\n"] {
            fs::write(&resolv_conf, text).unwrap();
            assert!(whom.renewed().is_none(), "{text}");
            assert_eq!(asked(&whom), [ip(2)], "{text}");
        }
        for path in [&resolv_conf, &hosts] {
            fs::remove_file(path).unwrap();
            fs::create_dir(path).unwrap();
            assert!(whom.renewed().is_none());
        }
        assert_eq!(asked(&whom), [ip(2)]);
        assert!(whom.hosts.said.is_some());
        fs::remove_dir(&resolv_conf).unwrap();
        fs::write(&resolv_conf, "nameserver 127.0.0.3\n").unwrap();
        assert!(whom.renewed().is_some());
        assert_eq!(asked(&whom), [ip(3)]);
    }

    /// Servers of the configuration take the place of the host's.
    #[test]
    fn servers_of_the_configuration_stay() {
        let folder = tempfile::tempdir().unwrap();
        let [resolv_conf, hosts] = ["resolv.conf", "hosts"].map(|name| folder.path().join(name));
        let servers = ["127.0.0.2:5353".parse().unwrap()];
        let mut whom = Whom::of_files(&servers, resolv_conf.clone(), hosts.clone());
        assert!(whom.renewed().is_some());
        fs::write(&resolv_conf, "nameserver 127.0.0.3\n").unwrap();
        assert!(whom.renewed().is_none());
        fs::write(&hosts, "10.0.0.7 db.example\n").unwrap();
        assert!(whom.renewed().is_some());
    }
}
