//! [`Stats`] as Prometheus text.
//!
//! Every name begins with `smcgate_`; counters end in `_total`; a unit other than a plain count is
//! part of the name. Labels repeat the keys of the JSON.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use crate::stats::{Listener, Poller, Residence, Rnic, Stats};

/// The format of [`text()`], for the HTTP header.
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// All metrics of one moment.
pub(super) fn text(stats: Stats) -> String {
    let mut registry = Registry::with_prefix("smcgate");
    registry.register_collector(Box::new(Snapshot(stats)));
    let mut out = String::new();
    text::encode(&mut out, &registry).expect("writing to a String cannot fail");
    out
}

/// The numbers of one scrape.
#[derive(Debug)]
struct Snapshot(Stats);

impl Collector for Snapshot {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut page = Page(encoder);
        self.process(&mut page)?;
        self.connections(&mut page)?;
        self.guards(&mut page)?;
        self.pollers(&mut page)?;
        self.rnics(&mut page)?;
        self.listeners(&mut page)
    }
}

impl Snapshot {
    fn process(&self, page: &mut Page<'_>) -> fmt::Result {
        let Stats { version, uptime_s, memory, .. } = &self.0;
        let build = [(vec![("version", version.clone())], 1)];
        page.gauge("build_info", "Always 1. The label has the version.", None, build)?;
        page.gauge("uptime", "Time since the start.", Some(Unit::Seconds), plain(*uptime_s))?;
        let kinds = |rmb, send| [(kind("rmb"), rmb), (kind("send"), send)];
        page.gauge(
            "memory_registered",
            "Memory registered with RNICs.",
            Some(Unit::Bytes),
            kinds(memory.rmb_bytes, memory.send_bytes),
        )?;
        let help = "Send chunks that hold data.";
        let unit = Some(Unit::Bytes);
        page.gauge("send_pool_used", help, unit, plain(memory.send_bytes_used))?;
        page.gauge("rmbes", "RMB elements.", None, plain(memory.rmbes))?;
        let help = "RMB elements that belong to a connection.";
        page.gauge("rmbes_used", help, None, plain(memory.rmbes_used))
    }

    fn connections(&self, page: &mut Page<'_>) -> fmt::Result {
        let Stats { totals, active, fallbacks, link_groups, .. } = &self.0;
        let by = |smc, tcp| [(transport("smc-r"), smc), (transport("tcp"), tcp)];
        page.counter(
            "connections",
            "Connections carried, by transport.",
            None,
            by(totals.connections_smc, totals.connections_tcp),
        )?;
        let help = "Connections that a limit kept from a transport.";
        page.counter("refused", help, None, by(totals.refused_smc, totals.refused_tcp))?;
        let help = "Connections now, by transport.";
        page.gauge("connections_active", help, None, by(active.smc, active.tcp))?;
        let help = "Connections in their rendezvous.";
        page.gauge("connections_connecting", help, None, plain(active.connecting))?;
        let help = "Connections that wait for a place among the rendezvous.";
        page.gauge("connections_waiting", help, None, plain(active.waiting))?;
        let help =
            "TCP connections whose SMC-R connection has ended, and which the peer ends first.";
        page.gauge("connections_farewells", help, None, plain(active.farewells))?;
        let help = "TCP connections beside SMC-R that the peer did not end in time.";
        page.counter("tcp_cut_short", help, None, plain(totals.tcp_cut_short))?;
        let help = "Closed connections whose RMB element the peer still holds.";
        page.gauge("connections_parked", help, None, plain(active.parked))?;
        let help = "Rendezvous that broke the protocol or timed out.";
        page.counter("handshakes_failed", help, None, plain(totals.handshakes_failed))?;
        let bytes = Some(Unit::Bytes);
        page.counter("in", "From applications.", bytes.clone(), plain(totals.bytes_in))?;
        page.counter("out", "To applications.", bytes, plain(totals.bytes_out))?;
        let reasons = fallbacks.iter().map(|reason| {
            let code = format!("{:#010x}", reason.code);
            (vec![("code", code), ("name", reason.name.clone())], reason.count)
        });
        page.counter("fallbacks", "Connections that stayed TCP, by reason.", None, reasons)?;
        page.gauge("link_groups", "Link groups.", None, plain(link_groups.len() as u64))?;
        let links = link_groups.iter().map(|group| group.links.len() as u64).sum();
        page.gauge("links", "Links of all link groups.", None, plain(links))
    }

    /// How often peers were kept from taking more than their share.
    fn guards(&self, page: &mut Page<'_>) -> fmt::Result {
        let Stats { totals, .. } = &self.0;
        let help = "Claims to be the peer of a link group that another address founded.";
        page.counter("foreign_claims", help, None, plain(totals.foreign_claims))?;
        let help = "Further links refused because the peer's RNIC is not listed.";
        page.counter("links_not_listed", help, None, plain(totals.links_not_listed))?;
        let help = "Times that a client had too many link groups without a connection.";
        page.counter("crowded_sources", help, None, plain(totals.crowded_sources))?;
        let help = "Connections reset before their peers had sent a Proposal.";
        page.counter("silent_cut_short", help, None, plain(totals.silent_cut_short))?;
        let help = "Connections reset because nothing moved on them.";
        page.counter("idle_closed", help, None, plain(totals.idle_closed))?;
        let help =
            "Connections reset because only one direction was left, and nothing moved in it.";
        page.counter("half_closed_closed", help, None, plain(totals.half_closed_closed))?;
        let help = "Connections reset because of their age.";
        page.counter("aged_closed", help, None, plain(totals.aged_closed))
    }

    fn pollers(&self, page: &mut Page<'_>) -> fmt::Result {
        let each = |number: fn(&Poller) -> u64| {
            let pollers = self.0.pollers.iter().enumerate();
            pollers.map(move |(index, it)| (vec![("poller", index.to_string())], number(it)))
        };
        page.counter("poller_turns", "Turns of the loop.", None, each(|it| it.turns))?;
        let help = "Turns in which nothing moved.";
        page.counter("poller_turns_idle", help, None, each(|it| it.turns_idle))?;
        let help = "Whether it is pinned to a core now.";
        page.gauge("poller_pinned", help, None, each(|it| u64::from(it.pinned)))?;
        let help = "Connections it serves.";
        page.gauge("poller_connections", help, None, each(|it| u64::from(it.connections)))?;
        let help = "How long sampled bytes stayed in a stage of their way.";
        let pollers = self.0.pollers.iter().enumerate();
        let stages = pollers.flat_map(|(index, poller)| {
            poller.stages.iter().map(move |(name, stage)| {
                (vec![("poller", index.to_string()), ("stage", name.clone())], stage)
            })
        });
        page.times("poller_stage", help, stages)
    }

    fn rnics(&self, page: &mut Page<'_>) -> fmt::Result {
        let each = |number: fn(&Rnic) -> u64| {
            let rnics = self.0.rnics.iter();
            rnics.map(move |it| (vec![("rnic", it.name.clone())], number(it)))
        };
        page.counter("rnic_packets_in", "Packets received.", None, each(|it| it.packets_in))?;
        page.counter("rnic_packets_out", "Packets sent.", None, each(|it| it.packets_out))?;
        let help = "Packets sent again.";
        page.counter("rnic_retransmits", help, None, each(|it| it.retransmits))?;
        let help = "Times that a path turned out to carry larger packets.";
        page.counter("rnic_path_raised", help, None, each(|it| it.path_raised))?;
        let help = "Times that packets did not pass, and were cut smaller.";
        page.counter("rnic_path_lowered", help, None, each(|it| it.path_lowered))?;
        let help = "Notices of peers that routers have marked our packets.";
        page.counter("rnic_cnps_in", help, None, each(|it| it.cnps_in))?;
        let help = "Notices to peers that routers have marked their packets.";
        page.counter("rnic_cnps_out", help, None, each(|it| it.cnps_out))?;
        let help = "Packets dropped for a wrong ICRC.";
        page.counter("rnic_icrc_errors", help, None, each(|it| it.icrc_errors))?;
        let help = "Packets whose PSN the peer cannot have used.";
        page.counter("rnic_psn_errors", help, None, each(|it| it.psn_errors))?;
        let help = "Packets for no queue pair of their sender.";
        page.counter("rnic_unknown_qp", help, None, each(|it| it.unknown_qp))?;
        let help = "Requests refused for a wrong RKey or bounds.";
        page.counter("rnic_rkey_errors", help, None, each(|it| it.rkey_errors))
    }

    fn listeners(&self, page: &mut Page<'_>) -> fmt::Result {
        let each = |number: fn(&Listener) -> u64| {
            let listeners = self.0.listeners.iter();
            listeners.map(move |it| (vec![("listener", it.name.clone())], number(it)))
        };
        let help = "Connections accepted.";
        page.counter("listener_accepted", help, None, each(|it| it.accepted))?;
        let help = "Connections closed at once.";
        page.counter("listener_refused", help, None, each(|it| it.refused))?;
        type Number = fn(&Listener) -> u64;
        let limits: [(&str, Number); 4] = [
            ("connections_max", |it| it.refused_connections),
            ("max_per_source", |it| it.refused_source),
            ("rate_max", |it| it.refused_rate),
            ("rate_per_source", |it| it.refused_source_rate),
        ];
        let refused = self.0.listeners.iter().flat_map(|it| {
            let row = move |(limit, number): (&str, Number)| {
                (vec![("listener", it.name.clone()), ("limit", limit.to_owned())], number(it))
            };
            limits.into_iter().map(row)
        });
        let help = "Connections closed at once because of a limit.";
        page.counter("listener_refused_by_limit", help, None, refused)?;
        let help = "Connections that exceed a limit and wait.";
        page.gauge("listener_waiting", help, None, each(|it| it.waiting))?;
        let help = "Connections that came in after they had waited.";
        page.counter("listener_waited", help, None, each(|it| it.waited))?;
        let help = "Connections that exceeded a limit and came in without SMC-R.";
        page.counter("listener_over_limit_tcp", help, None, each(|it| it.over_limit_tcp))?;
        page.gauge("listener_active", "Connections now.", None, each(|it| it.active))
    }
}

/// How many times are below each power of two of nanoseconds, from 1 us to 17 s, but not below the
/// one before it; then how many are longer.
fn octaves(buckets: &[(u64, u64)]) -> Vec<(f64, u64)> {
    let between = |above: u64, most: u64| {
        let within = buckets.iter().filter(|(end, _)| (above + 1..=most).contains(end));
        within.map(|(_, count)| count).sum()
    };
    let octaves = (10..35).map(|exponent| {
        let least = if exponent == 10 { 0 } else { 1 << (exponent - 1) };
        (seconds(1 << exponent), between(least, 1 << exponent))
    });
    octaves.chain([(f64::MAX, between(1 << 34, u64::MAX))]).collect()
}

/// A time in seconds.
#[allow(clippy::cast_precision_loss, reason = "nobody reads more than 15 digits")]
fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

type Labels = Vec<(&'static str, String)>;

/// A number without labels, as the only sample of its metric.
fn plain(number: u64) -> [(Labels, u64); 1] {
    [(Labels::new(), number)]
}

fn transport(name: &str) -> Labels {
    vec![("transport", name.to_owned())]
}

fn kind(name: &str) -> Labels {
    vec![("kind", name.to_owned())]
}

/// Where the metrics go, one at a time.
struct Page<'a>(DescriptorEncoder<'a>);

impl Page<'_> {
    fn counter(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<Unit>,
        samples: impl IntoIterator<Item = (Labels, u64)>,
    ) -> fmt::Result {
        let help = help.trim_end_matches('.');
        let kind = MetricType::Counter;
        let mut metric = self.0.encode_descriptor(name, help, unit.as_ref(), kind)?;
        for (labels, number) in samples {
            if labels.is_empty() {
                metric.encode_counter::<NoLabelSet, _, u64>(&number, None)?;
            } else {
                let mut sample = metric.encode_family(&labels)?;
                sample.encode_counter::<NoLabelSet, _, u64>(&number, None)?;
            }
        }
        Ok(())
    }

    /// Histograms of times, in seconds.
    fn times<'s>(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Labels, &'s Residence)>,
    ) -> fmt::Result {
        let (help, unit) = (help.trim_end_matches('.'), Some(&Unit::Seconds));
        let mut metric = self.0.encode_descriptor(name, help, unit, MetricType::Histogram)?;
        for (labels, stage) in samples {
            let (sum, buckets) = (seconds(stage.sum_ns), octaves(&stage.buckets));
            metric.encode_family(&labels)?.encode_histogram::<NoLabelSet>(
                sum,
                stage.count,
                &buckets,
                None,
            )?;
        }
        Ok(())
    }

    fn gauge(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<Unit>,
        samples: impl IntoIterator<Item = (Labels, u64)>,
    ) -> fmt::Result {
        let help = help.trim_end_matches('.');
        let kind = MetricType::Gauge;
        let mut metric = self.0.encode_descriptor(name, help, unit.as_ref(), kind)?;
        for (labels, number) in samples {
            if labels.is_empty() {
                metric.encode_gauge(&number)?;
            } else {
                metric.encode_family(&labels)?.encode_gauge(&number)?;
            }
        }
        Ok(())
    }
}
