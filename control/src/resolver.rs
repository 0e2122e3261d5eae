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
        let (names, wanted) = unbounded_channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        std::thread::Builder::new()
            .name("resolver".to_owned())
            .spawn(move || runtime.block_on(serve(&servers, wanted, &report)))?;
        Ok(Self { names })
    }

    /// From now on these names are wanted, and no others.
    pub fn want(&self, names: BTreeSet<String>) {
        // The thread has ended only if it panicked, which was printed.
        let _ = self.names.send(names);
    }
}

async fn serve(
    servers: &[SocketAddr],
    mut wanted: UnboundedReceiver<BTreeSet<String>>,
    report: &Sender<Resolved>,
) {
    let resolver = match resolver(servers) {
        Ok(resolver) => resolver,
        Err(error) => {
            tracing::warn!(error, "names of upstreams cannot be looked up again");
            return;
        }
    };
    let mut watched: BTreeMap<String, JoinHandle<()>> = BTreeMap::new();
    while let Some(names) = wanted.recv().await {
        watched.retain(|name, task| {
            let stays = names.contains(name);
            if !stays {
                task.abort();
            }
            stays
        });
        for name in names {
            let watch = watch(resolver.clone(), name.clone(), report.clone());
            watched.entry(name).or_insert_with(|| tokio::spawn(watch));
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
    loop {
        let (addresses, again_after) = match resolver.lookup_ip(name.as_str()).await {
            Ok(found) => {
                let records = found.as_lookup().answers();
                let seconds = records.iter().map(|record| record.ttl).min().unwrap_or(0);
                let mut addresses: Vec<IpAddr> = found.iter().collect();
                // Servers change the order from answer to answer, which is no news.
                addresses.sort_unstable_by_key(|ip| (ip.is_ipv6(), *ip));
                addresses.dedup();
                let valid = Duration::from_secs(seconds.into());
                (Ok(addresses), valid.clamp(VALID_MIN, VALID_MAX))
            }
            Err(error) => (Err(error.to_string()), AGAIN_AFTER),
        };
        // Where the control thread is far behind, the next answer will do.
        let _ = report.send(Resolved { name: name.clone(), addresses });
        tokio::time::sleep(again_after).await;
    }
}

/// Nobody is asked more often about one name, whatever the answer says.
const VALID_MIN: Duration = Duration::from_secs(1);
/// An operator who has changed an entry waits no longer than this.
const VALID_MAX: Duration = Duration::from_secs(300);
/// When a name is looked up again that could not be.
const AGAIN_AFTER: Duration = Duration::from_secs(5);
