//! The addresses to which the connections of a listener go, which of them work, and which one a
//! connection gets.
//!
//! ```text
//!   names ─(resolver)─► resolved ─┐
//!   connects ─► succeeded, failed ├─► Pool ─► choose
//!   checks ─► checked ────────────┘
//! ```
//! Nothing here opens a socket or reads a clock. An address is down while checks say so, and out
//! while connections to it have failed repeatedly: then it is tried again after a while, each time
//! in a row after twice as long. If all others are down or out, the last one is never out: whether
//! it is back is learned soonest by trying.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use smcr_proto::Instant;

use crate::config::{Balance, Check, Upstream, Upstreams};
use crate::measure;

/// The addresses of one listener.
#[derive(Debug)]
pub struct Pool {
    config: Upstreams,
    /// What the names among the upstreams mean; none as long as nobody knows.
    names: HashMap<String, Vec<IpAddr>>,
    targets: Vec<Target>,
    /// How many connects failed to addresses that are not among `targets` any more: they may come
    /// back, and whoever reads the counter takes one that falls for a restart.
    failed_before: BTreeMap<SocketAddr, u64>,
    /// The place of the next in turn.
    turn: usize,
}

/// One address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The address.
    pub address: SocketAddr,
    /// Connections that have it now.
    pub active: u32,
    /// Connects that failed, since the start.
    pub failed: u64,
    /// Connects that failed in a row.
    in_row: u32,
    /// It gets no connections until then.
    out_until: Option<Instant>,
    /// How often it has been out without a success in between.
    outs: u32,
    /// What checks say.
    health: Health,
    /// It is no upstream any more, but connections still have it.
    is_gone: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Health {
    is_down: bool,
    /// Outcomes in a row that speak against `is_down`.
    against: u32,
    /// When it is checked next.
    check_at: Instant,
}

/// Why a connection gets no address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoUpstream {
    /// None of the names has an address.
    Unresolved,
    /// All addresses are down.
    AllDown,
    /// The connection has tried all that there are.
    AllTried,
}

impl NoUpstream {
    /// The reason in words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unresolved => "the upstream's name has no address",
            Self::AllDown => "all upstreams are down",
            Self::AllTried => "no upstream has accepted",
        }
    }
}

impl Target {
    fn new(address: SocketAddr) -> Self {
        let health = Health { is_down: false, against: 0, check_at: Instant(0) };
        let (active, failed, in_row, outs) = (0, 0, 0, 0);
        Self { address, active, failed, in_row, out_until: None, outs, health, is_gone: false }
    }

    /// What it is for operators: `up`, `down` by checks, or `out` after failures.
    pub fn state(&self, now: Instant) -> &'static str {
        match (self.health.is_down, self.is_out(now)) {
            (true, _) => "down",
            (false, true) => "out",
            (false, false) => "up",
        }
    }

    fn is_out(&self, now: Instant) -> bool {
        self.out_until.is_some_and(|until| now < until)
    }

    /// How much it is meant for connections of `source`: the highest rank wins. Each client orders
    /// the addresses in its own way, so one that goes leaves its clients to all others.
    fn rank(&self, source: IpAddr) -> u64 {
        let mut hasher = DefaultHasher::new();
        (source.to_canonical(), self.address).hash(&mut hasher);
        hasher.finish()
    }
}

impl Pool {
    /// The addresses in `config`; names have none yet.
    pub fn new(config: Upstreams) -> Self {
        let mut pool = Self {
            config,
            names: HashMap::new(),
            targets: Vec::new(),
            failed_before: BTreeMap::new(),
            turn: 0,
        };
        pool.gather();
        pool
    }

    /// From now on `config` says which addresses there are. Those that stay keep what is known of
    /// them.
    pub fn change(&mut self, config: Upstreams) {
        if self.config.check != config.check {
            // What was found out in another way counts no more.
            let unknown = Health { is_down: false, against: 0, check_at: Instant(0) };
            self.targets.iter_mut().for_each(|target| target.health = unknown.clone());
        }
        if config.eject_after == 0 {
            self.targets.iter_mut().for_each(|target| target.out_until = None);
        }
        self.config = config;
        self.gather();
    }

    /// Whether each connection goes to where it wanted to.
    pub fn is_original_dst(&self) -> bool {
        self.config.is_original_dst()
    }

    /// The names whose addresses are needed.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.config.all.iter().filter_map(|one| match one {
            Upstream::Name { host, .. } => Some(host.as_str()),
            Upstream::Address(_) | Upstream::OriginalDst | Upstream::Measure => None,
        })
    }

    /// What names mean, as far as anybody has said.
    pub fn known(&self) -> impl Iterator<Item = (&str, &[IpAddr])> {
        self.names.iter().map(|(name, addresses)| (&name[..], &addresses[..]))
    }

    /// A name has these addresses now. Returns whether that is news.
    pub fn resolved(&mut self, name: &str, addresses: &[IpAddr]) -> bool {
        let is_ours = self.names().any(|ours| ours == name);
        let is_known = self.names.get(name).is_some_and(|known| known == addresses);
        if !is_ours || is_known {
            return false;
        }
        self.names.insert(name.to_owned(), addresses.to_vec());
        self.gather();
        true
    }

    /// The addresses, in the order of the configuration.
    pub fn targets(&self) -> impl Iterator<Item = &Target> {
        self.targets.iter().filter(|target| !target.is_gone)
    }

    /// How many connects failed to each address, also to those that are no upstreams any more.
    pub fn failures(&self) -> impl Iterator<Item = (SocketAddr, u64)> {
        let now = self.targets.iter().map(|target| (target.address, target.failed));
        let before = self.failed_before.iter().map(|(address, failed)| (*address, *failed));
        now.chain(before).filter(|(_, failed)| *failed > 0)
    }

    /// The address for a connection of `source` that has tried `tried` in vain.
    ///
    /// # Errors
    ///
    /// Why there is none.
    pub fn choose(
        &mut self,
        now: Instant,
        source: IpAddr,
        tried: &[SocketAddr],
    ) -> Result<SocketAddr, NoUpstream> {
        let up = self.places(|target| !target.is_gone && !target.health.is_down);
        if up.is_empty() {
            let is_unknown = self.targets().next().is_none();
            return Err(if is_unknown { NoUpstream::Unresolved } else { NoUpstream::AllDown });
        }
        let untried = |place: &usize| !tried.contains(&self.targets[*place].address);
        let untried: Vec<usize> = up.into_iter().filter(untried).collect();
        let is_in = |place: &usize| !self.targets[*place].is_out(now);
        let fit: Vec<usize> = untried.iter().copied().filter(is_in).collect();
        // Whoever would be refused may as well be refused by the server.
        let left = if fit.is_empty() { untried } else { fit };
        let place = self.pick(source, &left).ok_or(NoUpstream::AllTried)?;
        self.turn = place + 1;
        Ok(self.targets[place].address)
    }

    fn pick(&self, source: IpAddr, left: &[usize]) -> Option<usize> {
        // The next in turn comes first, and wins where others are as good.
        let count = self.targets.len();
        let distance = |place: &usize| (place + count - self.turn % count) % count;
        let by_turn = left.iter().copied().min_by_key(distance);
        match self.config.balance {
            Balance::RoundRobin => by_turn,
            Balance::LeastConnections => {
                let load = |place: &usize| (self.targets[*place].active, distance(place));
                left.iter().copied().min_by_key(load)
            }
            Balance::Source => {
                left.iter().copied().max_by_key(|place| self.targets[*place].rank(source))
            }
        }
    }

    /// A connection has got this address.
    pub fn enter(&mut self, address: SocketAddr) {
        if let Some(target) = self.at_mut(address) {
            target.active += 1;
        }
    }

    /// A connection that had it is over.
    pub fn leave(&mut self, address: SocketAddr) {
        // A connection that was intercepted has an address that is nobody's; after a reload it may
        // be one of ours, which has not counted it.
        let Some(target) = self.at_mut(address) else { return };
        target.active = target.active.saturating_sub(1);
        if target.is_gone && target.active == 0 {
            let failed = target.failed;
            self.targets.retain(|target| target.address != address);
            self.remember(address, failed);
        }
    }

    /// This address has accepted a connection.
    pub fn succeeded(&mut self, address: SocketAddr) {
        if let Some(target) = self.at_mut(address) {
            (target.in_row, target.outs, target.out_until) = (0, 0, None);
        }
    }

    /// This address has refused a connection, or not answered. Returns for how long it gets no
    /// more, if that begins now.
    pub fn failed(&mut self, now: Instant, address: SocketAddr) -> Option<Duration> {
        let (after, first) = (self.config.eject_after, self.config.eject_for);
        let target = self.at_mut(address)?;
        target.failed += 1;
        target.in_row += 1;
        if after == 0 || target.in_row < after || target.is_out(now) {
            return None;
        }
        let out_for = first.saturating_mul(1 << target.outs.min(OUTS_MAX)).min(OUT_MAX.max(first));
        target.out_until = Some(now + out_for);
        target.outs += 1;
        Some(out_for)
    }

    /// How addresses are checked, if they are.
    pub fn check(&self) -> Option<Check> {
        self.config.check
    }

    /// The addresses that are to be checked now. Each is due again after the interval.
    pub fn due_checks(&mut self, now: Instant) -> Vec<SocketAddr> {
        let Some(check) = self.config.check else { return Vec::new() };
        let is_due = |target: &&mut Target| !target.is_gone && target.health.check_at <= now;
        let due = self.targets.iter_mut().filter(is_due);
        let due = due.map(|target| {
            target.health.check_at = now + check.interval;
            target.address
        });
        due.collect()
    }

    /// When an address must be checked, at the latest.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.config.check?;
        self.targets().map(|target| target.health.check_at).min()
    }

    /// A check has ended. Returns what the address is now, if that has changed: up or not.
    pub fn checked(&mut self, address: SocketAddr, answers: bool) -> Option<bool> {
        let check = self.config.check?;
        let target = self.at_mut(address)?;
        let health = &mut target.health;
        if answers != health.is_down {
            health.against = 0;
            return None;
        }
        health.against += 1;
        let enough = if answers { check.rise } else { check.fall };
        if health.against < enough {
            return None;
        }
        (health.is_down, health.against) = (!answers, 0);
        if answers {
            (target.in_row, target.outs, target.out_until) = (0, 0, None);
        }
        Some(answers)
    }

    fn places(&self, fits: impl Fn(&Target) -> bool) -> Vec<usize> {
        let all = self.targets.iter().enumerate();
        all.filter(|(_, target)| fits(target)).map(|(place, _)| place).collect()
    }

    fn at_mut(&mut self, address: SocketAddr) -> Option<&mut Target> {
        self.targets.iter_mut().find(|target| target.address == address)
    }

    /// Lists the addresses that there are now.
    fn gather(&mut self) {
        let mut targets: Vec<Target> = Vec::new();
        for one in &self.config.all {
            let addresses = match one {
                Upstream::Address(address) => vec![*address],
                Upstream::Name { host, port } => {
                    let known = self.names.get(host).into_iter().flatten();
                    known.map(|ip| SocketAddr::new(*ip, *port)).collect()
                }
                Upstream::OriginalDst => Vec::new(),
                Upstream::Measure => measure::address().into_iter().collect(),
            };
            for address in addresses {
                if targets.iter().all(|other| other.address != address) {
                    let known = self.targets.iter().find(|old| old.address == address);
                    let known = known.cloned().unwrap_or_else(|| Target::new(address));
                    let before = self.failed_before.remove(&address).unwrap_or(0);
                    let failed = known.failed + before;
                    targets.push(Target { is_gone: false, failed, ..known });
                }
            }
        }
        // Name servers that take turns name them again soon.
        for old in std::mem::take(&mut self.targets) {
            if targets.iter().any(|other| other.address == old.address) {
                continue;
            }
            if old.active > 0 {
                targets.push(Target { is_gone: true, ..old });
            } else {
                self.remember(old.address, old.failed);
            }
        }
        self.targets = targets;
    }

    /// Keeps the count of an address that is not among the targets any more.
    fn remember(&mut self, address: SocketAddr, failed: u64) {
        if failed > 0 {
            self.failed_before.insert(address, failed);
        }
        // A name whose addresses never come twice must not take memory without end.
        if self.failed_before.len() > FAILED_BEFORE_MAX {
            self.failed_before.pop_first();
        }
    }
}

/// How many addresses are remembered that are no upstreams any more.
const FAILED_BEFORE_MAX: usize = 256;

/// More doublings are not counted.
const OUTS_MAX: u32 = 10;
/// The longest time that an address is out, unless the operator wants it longer from the first.
const OUT_MAX: Duration = Duration::from_secs(300);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    const NOW: Instant = Instant(1_000_000_000);

    fn pool(lines: &str) -> Pool {
        let text = format!("[[listener]]\nname = 'a'\nbind = '127.0.0.1:1'\n{lines}\n");
        Pool::new(Config::parse(&text, "a.toml").unwrap().listeners[0].upstream.clone())
    }

    fn three(more: &str) -> Pool {
        pool(&format!("upstream = ['10.0.0.1:1', '10.0.0.2:1', '10.0.0.3:1']\n{more}"))
    }

    fn at(host: u8) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, host], 1))
    }

    fn client(host: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, host])
    }

    fn choices(pool: &mut Pool, count: u8) -> Vec<SocketAddr> {
        (0..count).map(|host| pool.choose(NOW, client(host), &[]).unwrap()).collect()
    }

    #[test]
    fn connections_are_spread_as_the_operator_says() {
        let mut pool = three("");
        assert_eq!(choices(&mut pool, 4), [at(1), at(2), at(3), at(1)]);
        let mut pool = three("balance = 'least-connections'");
        for expected in [1, 2, 3, 1] {
            let chosen = pool.choose(NOW, client(1), &[]).unwrap();
            assert_eq!(chosen, at(expected));
            pool.enter(chosen);
        }
        pool.leave(at(3));
        assert_eq!(pool.choose(NOW, client(1), &[]), Ok(at(3)));
    }

    /// A cache that loses one of its servers must not lose what the others have.
    #[test]
    fn a_client_keeps_its_server_when_another_one_goes() {
        let mut pool = three("balance = 'source'");
        let before = choices(&mut pool, 200);
        assert_eq!(choices(&mut pool, 200), before);
        for host in 1..=3 {
            let count = before.iter().filter(|chosen| **chosen == at(host)).count();
            assert!((40..=95).contains(&count), "{count} of 200 at {host}");
        }
        for _ in 0..3 {
            pool.failed(NOW, at(2));
        }
        for (old, new) in before.iter().zip(choices(&mut pool, 200)) {
            assert!(*old == new || *old == at(2), "{old} became {new}");
            assert_ne!(new, at(2));
        }
    }

    #[test]
    fn who_fails_repeatedly_is_left_alone_for_longer_each_time() {
        let mut pool = three("eject_after = 2\neject_for = '1s'");
        assert_eq!(pool.failed(NOW, at(1)), None);
        pool.succeeded(at(1));
        assert_eq!(pool.failed(NOW, at(1)), None, "the success has ended the row");
        let mut now = NOW;
        for seconds in [1, 2, 4] {
            let out_for = Duration::from_secs(seconds);
            assert_eq!(pool.failed(now, at(1)), Some(out_for));
            assert_eq!(pool.targets().next().unwrap().state(now), "out");
            assert!(pool.choose(now, client(1), &[]).is_ok_and(|chosen| chosen != at(1)));
            now = now + out_for;
            assert_eq!(pool.targets().next().unwrap().state(now), "up");
        }
        pool.succeeded(at(1));
        assert_eq!((pool.failed(now, at(1)), pool.targets().next().unwrap().failed), (None, 6));
        let mut never = three("eject_after = 0");
        assert!((0..100).all(|_| never.failed(NOW, at(1)).is_none()));
    }

    /// Name servers that take turns must not make us forget how many connections an address has,
    /// nor that it does not work.
    #[test]
    fn who_is_not_named_for_a_while_is_remembered() {
        let mut pool = pool("upstream = 'db.example:1'\nbalance = 'least-connections'");
        let ips = [1, 2].map(|host| at(host).ip());
        pool.resolved("db.example", &ips);
        for _ in 0..3 {
            pool.enter(at(1));
        }
        pool.resolved("db.example", &ips[1..]);
        assert_eq!(pool.targets().count(), 1);
        pool.enter(at(2));
        assert_eq!(pool.choose(NOW, client(1), &[at(2)]), Err(NoUpstream::AllTried));
        pool.resolved("db.example", &ips);
        assert_eq!(pool.choose(NOW, client(1), &[]), Ok(at(2)), "the other one has three");
        pool.resolved("db.example", &ips[1..]);
        for _ in 0..3 {
            pool.leave(at(1));
        }
        assert_eq!(pool.targets.len(), 1, "nobody has it any more");
    }

    /// A name server that takes turns must not make the counters of metrics fall.
    #[test]
    fn failures_of_an_address_that_comes_back_stay_counted() {
        let mut pool = pool("upstream = 'db.example:1'");
        let ips = [1, 2].map(|host| at(host).ip());
        pool.resolved("db.example", &ips[..1]);
        pool.enter(at(1));
        pool.failed(NOW, at(1));
        pool.leave(at(1));
        for _ in 0..2 {
            pool.resolved("db.example", &ips[1..]);
            pool.resolved("db.example", &ips);
            assert_eq!(pool.targets().next().map(|target| target.failed), Some(1));
            // Now it has a connection while it is not named.
            pool.enter(at(1));
            pool.resolved("db.example", &ips[1..]);
            pool.leave(at(1));
        }
    }

    /// Checks that are switched off must not leave a server down for ever.
    #[test]
    fn what_checks_have_said_goes_with_them() {
        let checked = "check = { fall = 1 }";
        let mut pool = three(checked);
        for host in 1..=3 {
            assert_eq!(pool.checked(at(host), false), Some(false));
        }
        assert_eq!(pool.choose(NOW, client(1), &[]), Err(NoUpstream::AllDown));
        pool.change(three("").config);
        assert!(pool.choose(NOW, client(1), &[]).is_ok());
    }

    /// While one server is left alone and the other one refuses, the first may be back.
    #[test]
    fn who_is_out_is_tried_before_a_connection_is_reset() {
        let mut pool = pool("upstream = ['10.0.0.1:1', '10.0.0.2:1']\neject_after = 1");
        assert!(pool.failed(NOW, at(1)).is_some());
        assert_eq!(pool.choose(NOW, client(1), &[]), Ok(at(2)));
        assert_eq!(pool.choose(NOW, client(1), &[at(2)]), Ok(at(1)));
        assert_eq!(pool.choose(NOW, client(1), &[at(2), at(1)]), Err(NoUpstream::AllTried));
    }

    /// A server that restarts must not be away for longer than it is.
    #[test]
    fn the_last_one_is_always_tried() {
        let mut pool = three("eject_after = 1");
        for host in 1..=3 {
            assert!(pool.failed(NOW, at(host)).is_some());
        }
        let mut tried = Vec::new();
        for _ in 0..3 {
            tried.push(pool.choose(NOW, client(1), &tried).unwrap());
        }
        tried.sort_unstable();
        assert_eq!(tried, [at(1), at(2), at(3)]);
        assert_eq!(pool.choose(NOW, client(1), &tried), Err(NoUpstream::AllTried));
    }

    #[test]
    fn checks_say_who_is_down_and_who_is_back() {
        let mut pool = three("check = { interval = '1s', fall = 2, rise = 2 }");
        assert_eq!(pool.due_checks(NOW), [at(1), at(2), at(3)]);
        assert_eq!(pool.due_checks(NOW), []);
        assert_eq!(pool.poll_timeout(), Some(NOW + Duration::from_secs(1)));
        for host in 1..=3 {
            assert_eq!(pool.checked(at(host), false), None);
            assert_eq!(pool.checked(at(host), false), Some(false));
        }
        assert_eq!(pool.choose(NOW, client(1), &[]), Err(NoUpstream::AllDown));
        let outcomes = [true, false, true, true].map(|answers| pool.checked(at(2), answers));
        assert_eq!(outcomes, [None, None, None, Some(true)]);
        assert_eq!(pool.choose(NOW, client(1), &[]), Ok(at(2)));
    }

    /// What is known of an address outlives the answer of a name server.
    #[test]
    fn names_come_to_mean_other_addresses() {
        let mut pool = pool("upstream = ['db.example:1', '10.0.0.9:1']\neject_after = 1");
        assert_eq!(pool.names().collect::<Vec<_>>(), ["db.example"]);
        assert_eq!(pool.choose(NOW, client(1), &[]), Ok(at(9)));
        assert!(pool.resolved("db.example", &[at(1).ip(), at(2).ip()]));
        assert!(!pool.resolved("db.example", &[at(1).ip(), at(2).ip()]), "that is no news");
        assert!(!pool.resolved("other.example", &[at(3).ip()]));
        pool.failed(NOW, at(2));
        pool.enter(at(1));
        assert!(pool.resolved("db.example", &[at(2).ip(), at(9).ip(), at(3).ip()]));
        let states: Vec<_> = pool.targets().map(|it| (it.address, it.state(NOW))).collect();
        assert_eq!(states, [(at(2), "out"), (at(9), "up"), (at(3), "up")]);
        pool.leave(at(1));
    }

    #[test]
    fn a_name_without_an_address_leads_nowhere() {
        let mut nobody = pool("upstream = 'db.example:1'");
        assert_eq!(nobody.choose(NOW, client(1), &[]), Err(NoUpstream::Unresolved));
    }
}
