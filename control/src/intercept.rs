//! Connections of applications that know nothing of this gateway, led to one of its listeners.
//!
//! Three ways, each for another place:
//!
//! - `"ebpf"`, for applications of this host: programs at `connect`, in a cgroup
//!   (`bpf/intercept.bpf.c`). For clients from outside, one where the kernel looks for a listener
//!   (`bpf/steer.bpf.c`). Nothing is left when the gateway is gone.
//! - `"redirect"`, for the same, and for hosts for which this one is a router: NAT of nftables.
//! - `"tproxy"`, for clients from outside, and hosts for which this one is a router: TPROXY of
//!   nftables and a routing rule. Addresses stay as they are.
//!
//! What is in the kernel for the last two ([`rules`]) stays there if the gateway dies, until it is
//! started again or somebody says `smcgate intercept remove`.

pub mod claim;
pub mod connects;
pub mod rules;
pub mod steering;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::net::sockopt;
use smcr_proto::Instant;

use crate::config::{Intercept, InterceptWay, Listener, Protocol};
use crate::device::Devices;
use crate::ebpf::cgroup::Root;
use crate::listener::{OWN_MARK, local_address};
use claim::{Claim, NoClaim};
use connects::Connects;
use rules::Rules;
use steering::{LeftAlone, Steering};

/// What leads connections to the listeners of one gateway, as long as this is there.
#[derive(Default)]
pub struct Interception {
    connects: Vec<(Lead, Connects)>,
    steering: Vec<(Lead, Steering)>,
    /// What led connections before the configuration changed, oldest first: applications whose
    /// connections it led ask it where they are.
    ceased: Vec<(Lead, Connects)>,
    rules: Option<Rules>,
    /// Nobody else intercepts in this network namespace.
    claim: Option<Claim>,
    /// Where programs are attached, found when it was needed first: a confined process cannot look
    /// for it any more.
    cgroups: Option<Result<Root, String>>,
    /// When they were looked for.
    looked_at: Option<Instant>,
}

/// A listener to which connections may be led.
#[derive(Clone, Copy, Debug)]
pub struct Led<'a> {
    /// Its number.
    pub index: u16,
    /// What the operator wrote.
    pub config: &'a Listener,
    /// Its socket.
    pub socket: BorrowedFd<'a>,
}

/// What leads to where.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Lead {
    index: u16,
    intercept: Intercept,
    bind: SocketAddr,
}

impl Lead {
    fn is_for(&self, led: Led<'_>) -> bool {
        let same = (self.index, self.bind) == (led.index, led.config.bind);
        same && led.config.intercept.as_ref() == Some(&self.intercept)
    }
}

impl Interception {
    /// Begins to lead connections to `listeners`.
    ///
    /// # Errors
    ///
    /// Why not, in one line; then nothing is left behind.
    pub fn begin(listeners: &[Led<'_>]) -> Result<Self, NotLed> {
        let mut interception = Self::default();
        interception.change(listeners)?;
        Ok(interception)
    }

    /// From now on leads connections to `listeners`, and to no others. Those that were intercepted
    /// before go on.
    ///
    /// # Errors
    ///
    /// Why not, in one line; then everything is as before.
    pub fn change(&mut self, listeners: &[Led<'_>]) -> Result<(), NotLed> {
        let rules = Rules::of(listeners.iter().map(|one| one.config));
        if rules.is_some() || listeners.iter().any(|one| one.config.intercept.is_some()) {
            // It is kept to the end: what was intercepted may need what is in the kernel.
            if self.claim.is_none() {
                self.claim = Some(Claim::take()?);
            }
        }
        let (mut connects, mut steering) = (Vec::new(), Vec::new());
        let by_ebpf = |one: &Led<'_>| {
            one.config.intercept.as_ref().is_some_and(|it| it.way == InterceptWay::Ebpf)
        };
        if self.cgroups.is_none() && listeners.iter().any(by_ebpf) {
            self.cgroups = Some(Root::open());
        }
        for one in listeners {
            let Some(intercept) = &one.config.intercept else { continue };
            let (intercept_new, bind) = (intercept.clone(), one.config.bind);
            let lead = Lead { index: one.index, intercept: intercept_new, bind };
            match (intercept.way, one.config.accept) {
                (InterceptWay::Ebpf, Protocol::Tcp) => {
                    if self.connects.iter().all(|(old, _)| !old.is_for(*one)) {
                        let root = self.cgroups.as_ref().expect("a listener is led to by eBPF");
                        connects.push((lead, at_connect(root, one.config, intercept)?));
                    }
                }
                (InterceptWay::Ebpf, Protocol::Smc) => {
                    if self.steering.iter().all(|(old, _)| !old.is_for(*one)) {
                        steering.push((lead, at_lookup(*one, intercept, Devices::read())?));
                    }
                }
                (InterceptWay::Redirect | InterceptWay::Tproxy, _) => {}
            }
        }
        self.rules = exchange(self.rules.as_ref(), rules)?;
        let stays = |lead: &Lead| listeners.iter().any(|one| lead.is_for(*one));
        for (lead, mut old) in self.connects.extract_if(.., |(lead, _)| !stays(lead)) {
            old.release_all();
            self.ceased.push((lead, old));
        }
        self.ceased.drain(..self.ceased.len().saturating_sub(CEASED_MAX));
        self.steering.retain(|(lead, _)| stays(lead));
        self.connects.append(&mut connects);
        self.steering.append(&mut steering);
        Ok(())
    }

    /// Looks for the cgroups whose connections are led: a service that starts again has a new one.
    /// Once a second is enough, and more often costs nothing.
    pub(crate) fn look_again(&mut self, now: Instant) {
        let Some(Ok(root)) = &self.cgroups else { return };
        if self.looked_at.is_some_and(|at| now.since(at) < LOOK_EVERY) {
            return;
        }
        self.looked_at = Some(now);
        self.connects.iter_mut().for_each(|(_, connects)| connects.look_again(root));
    }

    /// This host may have other addresses now: those of `devices`.
    pub(crate) fn addresses_changed(&mut self, devices: &Devices) {
        if self.steering.is_empty() {
            return;
        }
        let here = devices.addresses();
        for (_, steering) in &mut self.steering {
            steering.is_at(&here);
        }
    }

    /// The socket of a listener listens anew.
    pub(crate) fn listens_anew(&self, led: Led<'_>) {
        for (lead, steering) in &self.steering {
            if lead.is_for(led)
                && let Err(error) = steering.listens_anew(led.socket)
            {
                let listener = &led.config.name;
                tracing::warn!(listener, %error, "nothing is intercepted for it; restart");
            }
        }
    }

    /// Where the connection wanted to go that `listener`, whose number is `index`, has accepted
    /// because connections of this `way` are led to it; none if it was not intercepted.
    pub(crate) fn original_of(
        &self,
        (index, listener): (u16, &Listener),
        way: InterceptWay,
        accepted: &OwnedFd,
    ) -> Option<SocketAddr> {
        let here = local_address(accepted)?;
        match (way, listener.accept) {
            (InterceptWay::Ebpf, Protocol::Tcp) => {
                let all = self.connects.iter().chain(self.ceased.iter().rev());
                let mut connects = all.filter(|(lead, _)| lead.index == index);
                connects.find_map(|(_, connects)| connects.original_of(accepted.as_fd()))
            }
            // Otherwise the connection was made to the listener itself.
            (InterceptWay::Redirect, _) => {
                before_nat(accepted, here).filter(|original| *original != canonical(here))
            }
            (InterceptWay::Tproxy, _) | (InterceptWay::Ebpf, Protocol::Smc) => {
                let own_port = listener.bind.port();
                Some(canonical(here)).filter(|original| original.port() != own_port)
            }
        }
    }

    /// We are about to connect from the address of a client to `to`. What is returned must be there
    /// for as long as that connection is.
    pub(crate) fn speaking_for(&self, from: SocketAddr, to: SocketAddr) -> Vec<LeftAlone> {
        self.steering.iter().map(|(_, steering)| steering.leave_alone(from, to)).collect()
    }

    /// From now on new connections go where applications want them to. Those that were intercepted
    /// go on.
    pub fn cease(&mut self) {
        for (_, connects) in &mut self.connects {
            connects.release_all();
        }
        for (_, steering) in &mut self.steering {
            steering.release_all();
        }
        if let Some(rules) = &self.rules
            && let Err(why) = rules.cease()
        {
            tracing::warn!(why, "connections are still intercepted");
        }
    }
}

impl Drop for Interception {
    fn drop(&mut self) {
        if self.rules.is_some()
            && let Err(why) = rules::remove()
        {
            tracing::warn!(why, "rules of the interception are left; say smcgate intercept remove");
        }
    }
}

impl fmt::Debug for Interception {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Interception").field("rules", &self.rules).finish_non_exhaustive()
    }
}

/// Loads the programs that lead connections of applications to `listener`.
fn at_connect(
    root: &Result<Root, String>,
    listener: &Listener,
    intercept: &Intercept,
) -> Result<Connects, String> {
    let what = |why: String| impossible(listener, &why);
    let root = root.as_ref().map_err(|why| what(why.clone()))?;
    if intercept.cgroups.is_empty() && !root.is_of_host() {
        let listener = &listener.name;
        tracing::warn!(
            listener,
            "only applications in the cgroups of this container are led to it"
        );
    }
    let mut connects = Connects::load(root, &intercept.cgroups, OWN_MARK).map_err(what)?;
    connects.lead(intercept, listener.bind).map_err(|error| what(error.to_string()))?;
    Ok(connects)
}

/// Loads the program that leads connections from outside to the listener `led`, on a host with
/// these `devices`. If it did not know their addresses, what this host says would be intercepted.
fn at_lookup(
    led: Led<'_>,
    intercept: &Intercept,
    devices: io::Result<Devices>,
) -> Result<Steering, String> {
    let name = &led.config.name;
    let devices = devices.map_err(|error| {
        format!(
            "listener {name}: nothing is intercepted without the addresses of this host: {error}"
        )
    })?;
    Steering::load(intercept, led.socket, led.config.bind, &devices.addresses())
        .map_err(|why| impossible(led.config, &why))
}

/// Brings `after` into force instead of `before`. Returns what is in force now.
fn exchange(before: Option<&Rules>, after: Option<Rules>) -> Result<Option<Rules>, String> {
    match (before, after) {
        (None, None) => Ok(None),
        (None, Some(after)) => {
            after.install()?;
            Ok(Some(after))
        }
        (Some(before), after) => {
            let after = after.map_or_else(|| before.idle(), |after| after.after(before));
            if after != *before {
                after.replace(before)?;
            }
            Ok(Some(after))
        }
    }
}

fn impossible(listener: &Listener, why: &str) -> String {
    let name = &listener.name;
    format!(
        "listener {name}: intercept = \"ebpf\" is not possible here: {why}; run as root or with \
         CAP_BPF and CAP_NET_ADMIN, or write intercept = \"redirect\""
    )
}

/// Why a gateway cannot intercept, and what to do about it: one line.
#[derive(Debug)]
pub struct NotLed {
    why: String,
    may_pass: bool,
}

impl NotLed {
    /// Whether it may pass by itself: another process has the right to intercept, and may end.
    pub fn may_pass(&self) -> bool {
        self.may_pass
    }
}

impl From<String> for NotLed {
    fn from(why: String) -> Self {
        Self { why, may_pass: false }
    }
}

impl From<NoClaim> for NotLed {
    fn from(why: NoClaim) -> Self {
        let may_pass = matches!(why, NoClaim::Taken(_));
        Self { why: format!("{why}{}", why.remedy()), may_pass }
    }
}

impl fmt::Display for NotLed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)
    }
}

/// Where a connection wanted to go before NAT led it to us.
fn before_nat(accepted: &OwnedFd, here: SocketAddr) -> Option<SocketAddr> {
    let accepted = accepted.as_fd();
    match canonical(here) {
        SocketAddr::V4(_) => sockopt::ip_original_dst(accepted).ok().map(SocketAddr::V4),
        SocketAddr::V6(_) => sockopt::ipv6_original_dst(accepted).ok().map(SocketAddr::V6),
    }
}

fn canonical(at: SocketAddr) -> SocketAddr {
    SocketAddr::new(at.ip().to_canonical(), at.port())
}

/// How often cgroups are looked for.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How many of those that lead no more are kept: the kernel takes 64 programs in a cgroup.
const CEASED_MAX: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    /// Connections of a host whose addresses are not known would come to its gateway again and
    /// again: that the kernel does not say them is not that there are none.
    #[test]
    fn a_host_that_cannot_be_read_is_not_one_without_addresses() {
        let text = "[[listener]]\nname='in'\nbind='127.0.0.1:15002'\naccept='smc'\n\
                    connect='tcp'\nupstream='original-dst'\nintercept='ebpf'\n\
                    intercept_ports=[7010]\n[[rnic]]\nname='r0'\ndevice='va'\n";
        let config = &Config::parse(text, "gate.toml").unwrap().listeners[0];
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let led = Led { index: 0, config, socket: socket.as_fd() };
        let unknown = Err(io::Error::from(rustix::io::Errno::NOBUFS));
        let why = at_lookup(led, config.intercept.as_ref().unwrap(), unknown).err().unwrap();
        assert!(why.contains("addresses of this host"), "{why}");
    }
}
