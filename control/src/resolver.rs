//! Names of upstreams, looked up again each time that what was heard of them is over.
//!
//! A thread of its own asks the name servers; the control thread hears of the answers in its
//! mailbox. An answer that does not come changes nothing: the addresses from before stay. Who is
//! asked (`whom`) may change at any time.

mod whom;

use std::collections::{BTreeMap, BTreeSet};
use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use hickory_resolver::TokioResolver;
use smcr_engine::clock::Clock;
use smcr_engine::mailbox::Sender;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use self::whom::Whom;
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
    /// Starts the thread. It asks `servers`; if there are none, those that the files of the host
    /// name at the time. What it hears it says to `report`.
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
            let whom = Whom::new(&servers);
            runtime.block_on(serve(whom, &mut wanted, &mut last, &report));
        })?;
        Ok(Self { names })
    }

    /// From now on these names are wanted, and no others.
    pub fn want(&self, names: BTreeSet<String>) {
        // The thread ends only after this.
        let _ = self.names.send(names);
    }
}

/// Looks up the names in `last`, and then what is wanted instead, by asking `whom`.
async fn serve(
    mut whom: Whom,
    wanted: &mut UnboundedReceiver<BTreeSet<String>>,
    last: &mut BTreeSet<String>,
    report: &Sender<Resolved>,
) {
    // None until somebody can be asked.
    let mut resolvers: Option<watch::Sender<TokioResolver>> = None;
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
        if last.is_empty() {
            continue;
        }
        match (whom.renewed(), &resolvers) {
            (Some(resolver), Some(resolvers)) => drop(resolvers.send_replace(resolver)),
            (Some(resolver), None) => resolvers = Some(watch::Sender::new(resolver)),
            (None, _) => {}
        }
        let Some(resolvers) = &resolvers else { continue };
        for name in &*last {
            let watch =
                || tokio::spawn(watch_name(resolvers.subscribe(), name.clone(), report.clone()));
            watched.entry(name.clone()).or_insert_with(watch);
        }
    }
}

/// Looks a name up for as long as it is wanted, and at once when somebody else is to be asked.
async fn watch_name(
    mut resolvers: watch::Receiver<TokioResolver>,
    name: String,
    report: Sender<Resolved>,
) {
    let mut families = Families::default();
    loop {
        let resolver = resolvers.borrow_and_update().clone();
        let asked = unless(resolvers.changed(), look_up(&resolver, &name)).await;
        // A server that is not there any more is not waited for.
        let Some(answer) = asked else { continue };
        let (addresses, again_after) = match answer {
            // Of the two queries, one for each family, one may just have got lost.
            Ok((addresses, _)) if families.misses_one(&addresses) => {
                tracing::debug!(name, "a family of addresses is missing");
                (None, VALID_MIN)
            }
            Ok((addresses, valid)) => (Some(Ok(addresses)), valid),
            Err(why) => (Some(Err(why)), AGAIN_AFTER),
        };
        let tell = |addresses| report.send(Resolved { name: name.clone(), addresses }).is_ok();
        // The control thread may be far behind.
        let is_told = addresses.is_none_or(tell);
        let pause = sleep(if is_told { again_after } else { VALID_MIN });
        unless(resolvers.changed(), pause).await;
    }
}

/// What `work` comes to; none if `other` is over before it.
async fn unless<T>(other: impl Future, work: impl Future<Output = T>) -> Option<T> {
    let (mut other, mut work) = (pin!(other), pin!(work));
    poll_fn(|context| match work.as_mut().poll(context) {
        Poll::Ready(outcome) => Poll::Ready(Some(outcome)),
        Poll::Pending => other.as_mut().poll(context).map(|_| None),
    })
    .await
}

/// What a name means, IPv4 first, and for how long.
async fn look_up(resolver: &TokioResolver, name: &str) -> Result<(Vec<IpAddr>, Duration), String> {
    let found = resolver.lookup_ip(name).await.map_err(|error| error.to_string())?;
    let records = found.as_lookup().answers();
    let seconds = records.iter().map(|record| record.ttl).min().unwrap_or(0);
    let addresses = in_order(found.iter().collect());
    if addresses.is_empty() {
        return Err("the answer has no address".to_owned());
    }
    Ok((addresses, Duration::from_secs(seconds.into()).clamp(VALID_MIN, VALID_MAX)))
}

/// What `names` mean now, as far as anybody says so in time: `servers`, or if there are none, those
/// that the files of this host name, and its library. Whoever is silent takes 5 s, however many
/// names there are. Names of which nobody says anything are left out.
pub fn look_up_now(
    servers: &[SocketAddr],
    names: &BTreeSet<String>,
) -> BTreeMap<String, Vec<IpAddr>> {
    let clock = Clock::new();
    let begun = clock.now();
    let mut found = ask_servers(servers, names).unwrap_or_else(|error| {
        tracing::warn!(%error, "the name servers cannot be asked");
        BTreeMap::new()
    });
    if servers.is_empty() {
        let is_in_time = || clock.now().since(begun) < ANSWER_WITHIN;
        ask_library(names, &mut found, is_in_time);
    }
    found
}

/// What name servers say of `names`, all of which they are asked about at once.
fn ask_servers(
    servers: &[SocketAddr],
    names: &BTreeSet<String>,
) -> io::Result<BTreeMap<String, Vec<IpAddr>>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut whom = Whom::new(servers);
    let resolver = whom.renewed();
    // For a name of which the file has one family only, a silent server would be asked for the
    // other, and both be lost.
    let listed = names.iter().map(|name| (name.clone(), in_order(whom.in_hosts(name))));
    let mut found: BTreeMap<_, _> = listed.filter(|(_, listed)| !listed.is_empty()).collect();
    let resolver = match resolver {
        Some(resolver) => resolver,
        None if found.is_empty() => return Err(io::Error::other("nobody is there to be asked")),
        None => return Ok(found),
    };
    runtime.block_on(async {
        let ask = |name: &String| {
            let (resolver, name) = (resolver.clone(), name.clone());
            tokio::spawn(async move {
                let answer = timeout(ANSWER_WITHIN, look_up(&resolver, &name)).await;
                Some((name, answer.ok()?.ok()?.0))
            })
        };
        let asked: Vec<_> =
            names.iter().filter(|name| !found.contains_key(*name)).map(ask).collect();
        for one in asked {
            found.extend(one.await.ok().flatten());
        }
        Ok(found)
    })
}

/// Adds to `found` what the library of this host knows of those of `names` that are not there: it
/// may know some that no name server does. It may also wait for seconds at each, and nobody can
/// tell it for how long: so it is asked while `is_in_time` only. On threads of their own it could
/// be asked about all names at once, but those that still wait when the gateway gives its
/// privileges up would keep them.
fn ask_library(
    names: &BTreeSet<String>,
    found: &mut BTreeMap<String, Vec<IpAddr>>,
    is_in_time: impl Fn() -> bool,
) {
    for name in names {
        if found.contains_key(name) || !is_in_time() {
            continue;
        }
        match (name.as_str(), 0).to_socket_addrs() {
            Ok(all) => {
                let addresses = in_order(all.map(|address| address.ip()).collect());
                found.extend((!addresses.is_empty()).then(|| (name.clone(), addresses)));
            }
            Err(error) => tracing::debug!(name, %error, "the library does not know it either"),
        }
    }
}

/// IPv4 first, each once. Servers change the order from answer to answer, which is no news.
fn in_order(mut addresses: Vec<IpAddr>) -> Vec<IpAddr> {
    addresses.sort_unstable_by_key(|ip| (ip.is_ipv6(), *ip));
    addresses.dedup();
    addresses
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
/// When a name is looked up again that could not be; and how often the host's files are read.
const AGAIN_AFTER: Duration = Duration::from_secs(5);
/// How long the start, or a reload, waits for name servers that are silent.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use std::fs;

    use smcr_engine::mailbox::{Waker, mailbox};

    use super::*;

    /// What the host itself says of a name counts without a restart.
    #[test]
    fn a_name_in_the_file_of_hosts_is_followed() {
        let folder = tempfile::tempdir().unwrap();
        let [resolv_conf, hosts] = ["resolv.conf", "hosts"].map(|name| folder.path().join(name));
        // Nobody answers there.
        fs::write(&resolv_conf, "nameserver 127.0.0.1\n").unwrap();
        let (report, reports) = mailbox(8, Waker::new().unwrap());
        let (names, mut wanted) = unbounded_channel();
        names.send(["db.example".to_owned()].into()).unwrap();
        let serving = std::thread::spawn({
            let whom = Whom::of_files(&[], resolv_conf, hosts.clone());
            move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                let mut last = BTreeSet::new();
                runtime.unwrap().block_on(serve(whom, &mut wanted, &mut last, &report));
            }
        });
        for last in [7, 8] {
            // Of both families: a server is asked for one that is not there.
            let addresses = [format!("10.0.0.{last}"), format!("fd00::{last}")];
            let lines = addresses.each_ref().map(|ip| format!("{ip} db.example\n"));
            fs::write(&hosts, lines.concat()).unwrap();
            let expected = Ok(addresses.map(|ip| ip.parse::<IpAddr>().unwrap()).into());
            let is_heard = |_| {
                std::thread::sleep(Duration::from_millis(50));
                reports.receive().is_some_and(|heard| heard.addresses == expected)
            };
            assert!((0..400).any(is_heard), "{expected:?}");
        }
        drop(names);
        serving.join().unwrap();
    }

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
