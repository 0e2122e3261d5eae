//! `[local]`: connections with applications on this host.

use std::path::PathBuf;

use super::error::ConfigError;
use super::limits::CONNECTIONS_MAX;
use super::section::{Section, Source};
use super::{CONGESTION_CONTROLS, Config, CongestionControl, Listener, Upstream};

/// Connections with applications on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Local {
    /// Who chooses their congestion control on loopback.
    pub congestion_control: CongestionControl,
    /// Where programs with the preload library come in, if they may.
    pub door: Option<Door>,
}

/// Where programs with the preload library come in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Door {
    /// The path of a Unix socket.
    pub socket: PathBuf,
    /// Who may use it, by user. With `gids` empty, too: everybody.
    pub uids: Vec<u32>,
    /// Who may use it, by group.
    pub gids: Vec<u32>,
    /// How many connections a process may have.
    pub connections_per_process: u32,
    /// Whether programs that want it may pass their bytes by shared memory.
    pub rings: bool,
    /// Which two of them, at both ends of a connection, may do so without the gateway.
    pub shortcuts: Shortcuts,
    /// How often a connection is used before its programs do.
    pub shortcut_after: u32,
}

/// Which programs may pass bytes without the gateway: each trusts the other a little more than a
/// TCP peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shortcuts {
    /// None.
    Never,
    /// Both of one user.
    SameUser,
    /// All.
    Always,
}

impl Shortcuts {
    /// Whether programs of these users may.
    pub fn are_for(self, one: u32, other: u32) -> bool {
        match self {
            Self::Never => false,
            // Those whom this namespace does not know all look like one.
            Self::SameUser => one == other && one != UNKNOWN,
            Self::Always => true,
        }
    }
}

impl Local {
    pub(super) fn read(source: Source<'_>, mut table: Section<'_>) -> Result<Self, ConfigError> {
        let idle = OF_DOOR.into_iter().find(|key| table.has(key) && !table.has("socket"));
        if let Some(key) = idle {
            return Err(table.error(key, "has no effect without \"socket\""));
        }
        let congestion_control =
            table.word("congestion_control", &CONGESTION_CONTROLS, CongestionControl::Auto)?;
        let ids = |table: &mut Section<'_>, key| -> Result<Vec<u32>, ConfigError> {
            let ids = table.numbers(key, &(0..u64::from(u32::MAX)))?;
            Ok(ids.iter().filter_map(|id| u32::try_from(id.value).ok()).collect())
        };
        let (uids, gids) = (ids(&mut table, "uids")?, ids(&mut table, "gids")?);
        let connections_per_process =
            table.count("connections_per_process", 1..CONNECTIONS_MAX + 1, CONNECTIONS_MAX)?;
        let rings = table.boolean("rings", true)?;
        let shortcuts = table.word("shortcuts", &SHORTCUTS, Shortcuts::SameUser)?;
        let shortcut_after = table.count("shortcut_after", 0..1 << 31, SHORTCUT_AFTER)?;
        let socket = table.text("socket")?;
        if let Some(path) = socket.as_ref().filter(|path| path.value.len() > PATH_MAX) {
            let why = format!("is longer than {PATH_MAX} bytes, the most of a Unix socket");
            return Err(path.error(source, why));
        }
        table.finish()?;
        let door = socket.map(|path| Door {
            socket: PathBuf::from(path.value),
            uids,
            gids,
            connections_per_process,
            rings,
            shortcuts,
            shortcut_after,
        });
        Ok(Self { congestion_control, door })
    }
}

impl Door {
    /// Whether a process of this user and group may use it.
    pub fn admits(&self, uid: u32, gid: u32) -> bool {
        let all = self.uids.is_empty() && self.gids.is_empty();
        all || uid == 0 || self.uids.contains(&uid) || self.gids.contains(&gid)
    }
}

impl Config {
    /// What connections of programs with the preload library are to the gateway: those of two
    /// listeners that have no address. The first connects to peers, the second accepts from them.
    ///
    /// # Panics
    ///
    /// Never: their text is ours.
    pub fn local_listeners(&self) -> Vec<Listener> {
        if self.local.door.is_none() {
            return Vec::new();
        }
        let listener = |name: &str, keys: &str| {
            let text = format!(
                "[[listener]]\nname = \"{name}\"\nbind = \"0.0.0.0:1\"\n\
                 upstream = \"192.0.2.1:2\"\n{keys}\n"
            );
            let defaults = Self::parse(&text, "local").expect("this text is a configuration");
            let mut one = defaults.listeners.into_iter().next().expect("it has one");
            one.upstream.all = vec![Upstream::OriginalDst];
            one.bounds.connections_max = self.limits.connections_max;
            one.bounds.max_per_source = self.limits.connections_max;
            one.peers = self.smc.peers.clone();
            one
        };
        vec![
            listener(LOCAL_CONNECT, "connect = \"smc\""),
            listener(LOCAL_ACCEPT, "accept = \"smc\""),
        ]
    }
}

/// Keys about programs that come in at `socket`.
const OF_DOOR: [&str; 6] =
    ["uids", "gids", "connections_per_process", "rings", "shortcuts", "shortcut_after"];
/// The name of the listener whose connections local programs make.
pub const LOCAL_CONNECT: &str = "local-connect";
/// The name of the listener whose connections local programs accept.
pub const LOCAL_ACCEPT: &str = "local-accept";
/// What operators call them.
pub(super) const SHORTCUTS: [(&str, Shortcuts); 3] = [
    ("never", Shortcuts::Never),
    ("same-user", Shortcuts::SameUser),
    ("always", Shortcuts::Always),
];
/// What users of other namespaces are called (`overflowuid`).
const UNKNOWN: u32 = 65534;
/// For fewer messages a shortcut is not worth the question for it.
const SHORTCUT_AFTER: u32 = 32;
/// `sun_path` has 108 bytes, and a zero at the end.
const PATH_MAX: usize = 107;

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(text, "a.toml").map_err(|error| error.to_string())
    }

    /// Who has nothing but programs with the library needs no address for a listener.
    #[test]
    fn a_door_alone_is_a_configuration() {
        let config = parse("[local]\nsocket = '/run/smcgate/local.sock'\n[smc]\npeers=[]").unwrap();
        assert!(config.listeners.is_empty());
        let all = config.local_listeners();
        assert_eq!(all.len(), 2);
        assert!(all.iter().all(|one| one.peers == config.smc.peers));
        let without = parse("[local]\ncongestion_control = 'host'").unwrap_err();
        assert!(without.contains("listener") && without.contains("[local]"), "{without}");
    }

    /// Who forgot the socket believes that these programs may come in, and no others.
    #[test]
    fn keys_of_the_door_need_the_door() {
        for key in [
            "uids = [1]",
            "gids = [1]",
            "connections_per_process = 2",
            "rings = false",
            "shortcuts = 'never'",
            "shortcut_after = 3",
        ] {
            let listener = "[[listener]]\nname='a'\nbind='127.0.0.1:1'\nupstream='x:2'\n";
            let alone = format!("{listener}[local]\n{key}\n");
            let name = key.split(' ').next().unwrap();
            let expected = format!("a.toml:5: local.{name}: has no effect without \"socket\"");
            assert_eq!(parse(&alone).unwrap_err(), expected);
            parse(&format!("{alone}socket = '/run/a'\n")).unwrap();
        }
    }

    #[test]
    fn who_may_use_it() {
        let door = |keys: &str| {
            let text = format!("[local]\nsocket = '/run/a'\n{keys}");
            parse(&text).unwrap().local.door.unwrap()
        };
        assert!(door("").admits(1000, 1000));
        let some = door("uids = [1000]\ngids = [33]");
        let found = [(1000, 5), (5, 33), (0, 0), (5, 5)].map(|(uid, gid)| some.admits(uid, gid));
        assert_eq!(found, [true, true, true, false]);
        let long = format!("[local]\nsocket = '/{}'", "x".repeat(107));
        assert!(parse(&long).unwrap_err().contains("local.socket"));
    }
}
