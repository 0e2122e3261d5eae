//! What the running gateways say of themselves, by their `/stats` and `/metrics`.

use std::time::Duration;

use super::super::namespaces::Host;
use super::super::paths::ADMIN;
use super::super::process::Process;
use super::super::totals::{GatewayTotals, parse_active, parse_events, parse_totals};
use super::Bench;
use crate::clock::{now_ns, ns, try_until};
use crate::failure::{Doing as _, Failure, Result};

/// How long gateways may take to end the connections of a measurement that is over.
const SILENCE_LIMIT: Duration = Duration::from_secs(20);

impl Bench {
    /// Has somebody read the metrics of both gateways each second, until what is returned is
    /// dropped.
    ///
    /// # Errors
    ///
    /// When it cannot be started.
    pub(crate) fn scrape(&self) -> Result<Vec<Process>> {
        // One program for all of it: starting one each time would disturb more than the scrape.
        let each_second = ["get", "--target", ADMIN, "--path", "/metrics", "--every", "1"];
        let scraper = |host: Host| {
            let argv = [&[self.myself.as_str()][..], &each_second].concat();
            let argv: Vec<String> = argv.into_iter().map(str::to_owned).collect();
            let command = self.namespaces.command(host, &argv);
            Process::start(&format!("scrape-{host:?}"), command, self.folder.path())
        };
        [Host::A, Host::B].into_iter().map(scraper).collect()
    }

    /// The totals that the gateway in `host` reports since it started.
    ///
    /// # Errors
    ///
    /// When its `/stats` does not answer, or lacks one of them.
    pub(crate) fn gateway_totals(&self, host: Host) -> Result<GatewayTotals> {
        parse_totals(&self.gateway_stats(host)?)
    }

    /// What has happened at the gateway in `host` since it started.
    pub(crate) fn gateway_events(&self, host: Host) -> String {
        let events = self.gateway_stats(host).and_then(|stats| parse_events(&stats));
        events.unwrap_or_else(|why| why.to_string())
    }

    fn gateway_stats(&self, host: Host) -> Result<String> {
        let argv = [&self.myself, "get", "--target", ADMIN, "--path", "/stats"].map(str::to_owned);
        let command = self.namespaces.command(host, &argv);
        let get = Process::start(&format!("stats-{host:?}"), command, self.folder.path())?;
        get.output_within(Duration::from_secs(10))
    }

    /// Waits until the gateways have no connection any more: those of the measurement before would
    /// count towards the limits of the next one. One that is too busy to answer is asked again.
    ///
    /// # Errors
    ///
    /// When some do not end, or a gateway does not say.
    pub(crate) fn await_silence(&self) -> Result<()> {
        let until = now_ns() + ns(SILENCE_LIMIT);
        let left = |host| match parse_active(&self.gateway_stats(host)?)? {
            0 => Ok(()),
            left => Err(Failure::new(format!("{left} are left"))),
        };
        [Host::A, Host::B].into_iter().try_for_each(|host| {
            let ended = try_until(until, Duration::from_millis(50), || left(host));
            ended.doing(|| format!("{host:?}: old connections do not end"))
        })
    }
}
