//! Names of upstreams, looked up again each time that what was heard of them is over.
//!
//! A thread of its own asks the name servers; the control thread hears of the answers in its
//! mailbox. An answer that does not come changes nothing: the addresses from before stay.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use hickory_resolver::TokioResolver;
use hickory_resolver::config::{ConnectionConfig, NameServerConfig, ResolverConfig, ResolverOpts};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use smcr_engine::mailbox::Sender;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::supervise;

/// What a name means now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// The name.
    pub name: String,
    /// Its addresses, IPv4 first; or why there are none.
    pub addresses: Result<Vec<IpAddr>, String>,
}

/// The thread that resolves. It ends when this is dropped.
#[derive(Debug)]
pub struct Resolver {
    names: UnboundedSender<BTreeSet<String>>,
}

impl Resolver {
    /// Starts the thread. It asks `servers`, or those of the host if there are none, and says what
    /// it hears to `report`.
    ///
    /// # Errors
    ///
    /// When the thread cannot be started.
    pub fn start(servers: Vec<SocketAddr>, report: Sender<Resolved>) -> io::Result<Self> {
        let (names, mut wanted) = unbounded_channel();
        let mut last = BTreeSet::new();
        supervise::spawn("resolver", move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .on_thread_start(supervise::may_panic)
                .build();
            let runtime = runtime.expect("there are descriptors for it, or there will be");
            runtime.block_on(serve(&servers, &mut wanted, &mut last, &report));
        })?;
        Ok(Self { names })
    }

    /// From now on these names are wanted, and no others.
    pub fn want(&self, names: BTreeSet<String>) {
        // The thread has ended only if no name can be looked up here, which it has said.
        let _ = self.names.send(names);
    }
}

/// Looks up the names in `last`, and then what is wanted instead.
async fn serve(
    servers: &[SocketAddr],
    wanted: &mut UnboundedReceiver<BTreeSet<String>>,
    last: &mut BTreeSet<String>,
    report: &Sender<Resolved>,
) {
    let resolver = loop {
        match resolver(servers) {
            Ok(resolver) => break resolver,
            Err(_) if wanted.is_closed() => return,
            Err(error) => tracing::warn!(error, "names of upstreams cannot be looked up again"),
        }
        // A file that says who is asked may be in the middle of a change.
        sleep(AGAIN_AFTER).await;
    };
    let mut watched: BTreeMap<String, JoinHandle<()>> = BTreeMap::new();
    loop {
        match timeout(AGAIN_AFTER, wanted.recv()).await {
            Ok(Some(names)) => {
                *last = names;
                // Those that were watched before are looked up now, too: a new listener may need
                // them.
                watched.values().for_each(JoinHandle::abort);
                watched.clear();
            }
            Ok(None) => return,
            // Only a panic ends one by itself.
            Err(_) => watched.retain(|_, task| !task.is_finished()),
        }
        for name in &*last {
            let watch = || tokio::spawn(watch(resolver.clone(), name.clone(), report.clone()));
            watched.entry(name.clone()).or_insert_with(watch);
        }
    }
}

/// Without a cache: what is over is asked for, and nothing else is.
fn resolver(servers: &[SocketAddr]) -> Result<TokioResolver, String> {
    let provider = TokioRuntimeProvider::default();
    let mut builder = if servers.is_empty() {
        TokioResolver::builder(provider).map_err(|error| error.to_string())?
    } else {
        let servers = servers.iter().map(|server| {
            let mut connections = vec![ConnectionConfig::udp(), ConnectionConfig::tcp()];
            connections.iter_mut().for_each(|one| one.port = server.port());
            NameServerConfig::new(server.ip(), true, connections)
        });
        let config = ResolverConfig::from_parts(None, Vec::new(), servers.collect());
        let mut builder = TokioResolver::builder_with_config(config, provider);
        *builder.options_mut() = ResolverOpts::default();
        builder
    };
    builder.options_mut().cache_size = 0;
    builder.build().map_err(|error| error.to_string())
}

/// Looks a name up for as long as it is wanted.
async fn watch(resolver: TokioResolver, name: String, report: Sender<Resolved>) {
    let mut families = Families::default();
    loop {
        let (addresses, again_after) = match look_up(&resolver, &name).await {
            // Of the two queries, one for each family, one may just have got lost.
            Ok((addresses, _)) if families.misses_one(&addresses) => {
                (Err("a family of addresses is missing".to_owned()), VALID_MIN)
            }
            Ok((addresses, valid)) => (Ok(addresses), valid),
            Err(why) => (Err(why), AGAIN_AFTER),
        };
        let told = report.send(Resolved { name: name.clone(), addresses });
        // The control thread may be far behind.
        sleep(if told.is_ok() { again_after } else { VALID_MIN }).await;
    }
}

/// What a name means, IPv4 first, and for how long.
async fn look_up(resolver: &TokioResolver, name: &str) -> Result<(Vec<IpAddr>, Duration), String> {
    let found = resolver.lookup_ip(name).await.map_err(|error| error.to_string())?;
    let records = found.as_lookup().answers();
    let seconds = records.iter().map(|record| record.ttl).min().unwrap_or(0);
    let mut addresses: Vec<IpAddr> = found.iter().collect();
    // Servers change the order from answer to answer, which is no news.
    addresses.sort_unstable_by_key(|ip| (ip.is_ipv6(), *ip));
    addresses.dedup();
    if addresses.is_empty() {
        return Err("the answer has no address".to_owned());
    }
    Ok((addresses, Duration::from_secs(seconds.into()).clamp(VALID_MIN, VALID_MAX)))
}

/// What `names` mean, as `servers` say now. Names of which they do not say anything are left out.
///
/// # Errors
///
/// If the servers cannot be asked.
pub fn look_up_now(
    servers: &[SocketAddr],
    names: &BTreeSet<String>,
) -> io::Result<BTreeMap<String, Vec<IpAddr>>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let resolver = resolver(servers).map_err(io::Error::other)?;
    runtime.block_on(async {
        let ask = |name: &String| {
            let (resolver, name) = (resolver.clone(), name.clone());
            tokio::spawn(async move {
                let answer = timeout(ANSWER_WITHIN, look_up(&resolver, &name)).await;
                Some((name, answer.ok()?.ok()?.0))
            })
        };
        let asked: Vec<_> = names.iter().map(ask).collect();
        let mut found = BTreeMap::new();
        for one in asked {
            found.extend(one.await.ok().flatten());
        }
        Ok(found)
    })
}

/// Which families of addresses a name had in the last answer that counted.
#[derive(Debug, Default)]
struct Families {
    had: [bool; 2],
    /// The last answer did not count.
    doubted: bool,
}

impl Families {
    /// Whether an answer lacks a family that was there before, for the first time.
    fn misses_one(&mut self, addresses: &[IpAddr]) -> bool {
        let has = [false, true].map(|v6| addresses.iter().any(|ip| ip.is_ipv6() == v6));
        let misses = (self.had[0] && !has[0]) || (self.had[1] && !has[1]);
        self.doubted = misses && !self.doubted;
        if !self.doubted {
            self.had = has;
        }
        self.doubted
    }
}

/// Nobody is asked more often about one name, whatever the answer says.
const VALID_MIN: Duration = Duration::from_secs(1);
/// An operator who has changed an entry waits no longer than this.
const VALID_MAX: Duration = Duration::from_secs(300);
/// When a name is looked up again that could not be.
const AGAIN_AFTER: Duration = Duration::from_secs(5);
/// How long the start, or a reload, waits for name servers.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    /// One lost query must not take half of the addresses away; a name that loses them does.
    #[test]
    fn a_family_is_gone_when_it_is_missing_twice() {
        let [v4, v6] = ["10.0.0.1", "fd00::1"].map(|text| text.parse::<IpAddr>().unwrap());
        let mut families = Families::default();
        let answers = [&[v4, v6][..], &[v6], &[v4, v6], &[v4], &[v4], &[v4], &[v6], &[v6]];
        let doubts = answers.map(|answer| families.misses_one(answer));
        assert_eq!(doubts, [false, true, false, true, false, false, true, false]);
    }
}
