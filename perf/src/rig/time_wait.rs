//! Counts connections in TIME_WAIT for each application and proxy.
//!
//! In the rig an application and its proxy share a namespace. Their ports tell them apart: a socket
//! whose local port is a listener's belongs to whoever listens there, one whose remote port is a
//! listener's to whoever connects there.

use serde::{Deserialize, Serialize};

use super::paths::Path;
use crate::scenarios::Service;

/// How many connections each host of a path has in TIME_WAIT.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TimeWaits {
    /// Connections of the load.
    pub(crate) client: u64,
    /// Connections of the proxy in namespace A, on both sides.
    pub(crate) proxy_a: u64,
    /// Those of them that hold a port of A towards B.
    pub(crate) proxy_a_towards_b: u64,
    /// Connections of the proxy in namespace B, on both sides.
    pub(crate) proxy_b: u64,
    /// Connections of the server.
    pub(crate) server: u64,
}

impl TimeWaits {
    /// Counts the lines of `ss -Htan state time-wait` in namespace A and in namespace B.
    pub(crate) fn count(ss: [&str; 2], path: Path, service: Service) -> Self {
        let [listens_a, listens_b] = path.listeners(service);
        let server = path.server_port(service);
        let mut sum = Self::default();
        for (local, remote) in ss[0].lines().filter_map(ports) {
            if Some(remote) == listens_a || (listens_a.is_none() && remote == server) {
                sum.client += 1;
            } else if Some(local) == listens_a {
                sum.proxy_a += 1;
            } else if Some(remote) == listens_b {
                sum.proxy_a += 1;
                sum.proxy_a_towards_b += 1;
            }
        }
        for (local, remote) in ss[1].lines().filter_map(ports) {
            if local == server {
                sum.server += 1;
            } else if Some(local) == listens_b || (listens_b.is_some() && remote == server) {
                sum.proxy_b += 1;
            }
        }
        sum
    }
}

/// The local and the remote port of a line `0 0 10.8.0.1:40000 10.8.0.2:7203`.
fn ports(line: &str) -> Option<(u16, u16)> {
    let mut ends = line.split_whitespace().skip(2);
    let mut port = || ends.next()?.rsplit_once(':')?.1.parse().ok();
    Some((port()?, port()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rig::paths::Rnic;

    /// The count that shows whether ports run out must be that of the right program.
    #[test]
    fn each_socket_is_counted_where_it_belongs() {
        let a = "0 0 127.0.0.1:40000 127.0.0.1:7103\n0 0 127.0.0.1:7103 127.0.0.1:40001\n\
                 0 0 10.8.0.1:40002 10.8.0.2:7203\n0 0 10.8.0.1:40003 10.8.0.2:7203\n\
                 0 0 10.8.0.1:40004 10.8.0.2:7013\n";
        let b = "0 0 10.8.0.2:7203 10.8.0.1:40005\n0 0 127.0.0.1:40006 127.0.0.1:7013\n\
                 0 0 127.0.0.1:7013 127.0.0.1:40007\n0 0 127.0.0.1:9180 127.0.0.1:40008\n";
        let expected =
            TimeWaits { client: 1, proxy_a: 3, proxy_a_towards_b: 2, proxy_b: 2, server: 1 };
        assert_eq!(TimeWaits::count([a, b], Path::Smcgate(Rnic::RoceUdp), Service::Crr), expected);
        let direct = TimeWaits { client: 1, server: 1, ..TimeWaits::default() };
        assert_eq!(TimeWaits::count([a, b], Path::Direct, Service::Crr), direct);
        assert_eq!(TimeWaits::count([a, b], Path::Haproxy, Service::Http), TimeWaits::default());
    }
}
