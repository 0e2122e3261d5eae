//! Connections of a listener to itself, each of which would make another one, for ever.

use std::net::{IpAddr, SocketAddr};

/// Whether a connection to `target` comes to a listener at `bind`. `is_here` says which addresses
/// are this host's, beyond those of loopback.
pub(crate) fn comes_back(
    bind: SocketAddr,
    target: SocketAddr,
    is_here: impl Fn(IpAddr) -> bool,
) -> bool {
    let (own, to) = (bind.ip().to_canonical(), target.ip().to_canonical());
    if bind.port() != target.port() {
        return false;
    }
    // Whoever connects to no address in particular reaches this host by loopback.
    let is_local = to.is_loopback() || to.is_unspecified() || is_here(to);
    match (own.is_unspecified(), to.is_unspecified()) {
        // One at all addresses of IPv6 has those of IPv4, too.
        (true, _) => is_local && (own.is_ipv6() || to.is_ipv4()),
        (false, true) => own.is_loopback() && own.is_ipv4() == to.is_ipv4(),
        (false, false) => own == to,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn what_comes_back_is_found() {
        let ours: [IpAddr; 2] = ["10.8.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
        for (bind, target, expected) in [
            ("10.8.0.2:1", "10.8.0.2:1", true),
            ("10.8.0.2:1", "10.8.0.2:2", false),
            ("10.8.0.2:1", "127.0.0.1:1", false),
            ("0.0.0.0:1", "127.0.0.1:1", true),
            ("0.0.0.0:1", "127.9.9.9:1", true),
            ("0.0.0.0:1", "10.8.0.2:1", true),
            ("0.0.0.0:1", "10.8.0.3:1", false),
            ("0.0.0.0:1", "[::1]:1", false),
            ("0.0.0.0:1", "0.0.0.0:1", true),
            ("127.0.0.1:1", "0.0.0.0:1", true),
            ("10.8.0.2:1", "0.0.0.0:1", false),
            ("[::]:1", "127.0.0.1:1", true),
            ("[::]:1", "[fd00::2]:1", true),
            ("[::]:1", "10.8.0.2:1", true),
            ("[::1]:1", "[::]:1", true),
            ("[::ffff:10.8.0.2]:1", "10.8.0.2:1", true),
        ] {
            let found = comes_back(bind.parse().unwrap(), target.parse().unwrap(), |address| {
                ours.contains(&address)
            });
            assert_eq!(found, expected, "{bind} {target}");
        }
    }

    /// Such a listener takes all descriptors of the gateway with its first connection.
    #[test]
    fn a_listener_that_leads_to_itself_is_an_error() {
        let text = "[[listener]]\nname = 'a'\nbind = '0.0.0.0:7001'\nconnect = 'smc'\n\
                    upstream = ['10.8.0.9:7001', 'UPSTREAM:7001']\n";
        let ours = ["10.8.0.2".parse().unwrap()];
        for (upstream, is_wrong) in [("127.0.0.1", true), ("10.8.0.2", true), ("10.8.0.3", false)] {
            let text = text.replace("UPSTREAM", upstream);
            let read = Config::parse_at(&text, "a.toml", &ours);
            assert_eq!(read.is_err(), is_wrong, "{upstream}");
            let Err(error) = read else { continue };
            assert_eq!((error.line(), error.key()), (Some(5), "listener.a.upstream"));
            assert!(error.to_string().contains("this listener itself"), "{error}");
        }
        let elsewhere = Config::parse(&text.replace("UPSTREAM", "10.8.0.2"), "a.toml");
        assert!(elsewhere.is_ok(), "nobody says what host it is for");
    }
}
