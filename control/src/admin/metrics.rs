//! [`Stats`] as Prometheus text.
//!
//! Every name begins with `smcgate_`; counters end in `_total`; a unit other than a plain count is
//! part of the name. Labels repeat the keys of the JSON. What labels say comes from the
//! configuration and from name servers, or is a word of ours: no peer and no client can add series.
//! The exception are codes of fallbacks, of which only a few are told apart that have no name.

mod page;

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, text};
use prometheus_client::registry::{Registry, Unit};
use smcr_engine::counters::{DESCRIPTIONS, Description};
use smcr_proto::wire::clc::Diagnosis;

use self::page::{Labels, Page, kind, plain, transport};
use crate::config;
use crate::stats::{Durations, Fallback, Listener, Poller, Rnic, Spread, Stats, Upstream};

/// In which format metrics are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// Prometheus' own text, which every scraper understands.
    Prometheus,
    /// OpenMetrics, for those who ask for it.
    OpenMetrics,
}

impl Format {
    /// The format for a scraper that accepts these media types.
    pub(super) fn for_accept(accept: &str) -> Self {
        match accept.contains("application/openmetrics-text") {
            true => Self::OpenMetrics,
            false => Self::Prometheus,
        }
    }

    /// Its name, for the HTTP header.
    pub(super) const fn content_type(self) -> &'static str {
        match self {
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// All metrics of one moment.
pub(super) fn text(mut stats: Stats, format: Format) -> String {
    stats.listeners = merged(stats.listeners);
    let mut registry = Registry::with_prefix("smcgate");
    registry.register_collector(Box::new(Snapshot(stats)));
    let mut out = String::new();
    text::encode(&mut out, &registry).expect("writing to a String cannot fail");
    match format {
        Format::Prometheus => as_prometheus(&out),
        Format::OpenMetrics => out,
    }
}

/// OpenMetrics in the older format: there counters are described by the names of their samples,
/// units are part of names only, and there is no mark at the end.
fn as_prometheus(open_metrics: &str) -> String {
    let mut out = String::with_capacity(open_metrics.len());
    let mut help = "";
    for line in open_metrics.lines() {
        let Some(comment) = line.strip_prefix("# ") else {
            out.extend([line, "\n"]);
            continue;
        };
        if comment.starts_with("HELP ") {
            help = comment;
        } else if let Some((name, kind)) = comment.strip_prefix("TYPE ").and_then(split_word) {
            let end = if kind == "counter" { "_total" } else { "" };
            let about = help.split_once(name).map_or("", |(_, about)| about);
            out.push_str(&format!("# HELP {name}{end}{about}\n# TYPE {name}{end} {kind}\n"));
        }
    }
    out
}

fn split_word(text: &str) -> Option<(&str, &str)> {
    text.split_once(' ')
}

/// Listeners by name: one whose name another one has now may still have connections.
fn merged(all: Vec<Listener>) -> Vec<Listener> {
    let mut merged: Vec<Listener> = Vec::new();
    for mut one in all {
        let Some(same) = merged.iter_mut().find(|other| other.name == one.name) else {
            merged.push(one);
            continue;
        };
        // Only one of them takes connections; the state and the upstreams are those of that one.
        if one.state != REMOVED {
            std::mem::swap(same, &mut one);
        }
        same.add_counts(&one);
        same.waiting += one.waiting;
        same.active += one.active;
    }
    merged
}

/// The numbers of one scrape.
#[derive(Debug)]
struct Snapshot(Stats);

impl Collector for Snapshot {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut page = Page(encoder);
        self.process(&mut page)?;
        self.connections(&mut page)?;
        self.groups(&mut page)?;
        self.guards(&mut page)?;
        self.pollers(&mut page)?;
        self.rnics(&mut page)?;
        self.listeners(&mut page)?;
        self.upstreams(&mut page)
    }
}

impl Snapshot {
    fn process(&self, page: &mut Page<'_>) -> fmt::Result {
        let Stats { version, uptime_s, memory, totals, .. } = &self.0;
        let build = [(vec![("version", version.clone())], 1)];
        page.gauge("build_info", "Always 1. The label has the version.", None, build)?;
        page.gauge("uptime", "Time since the start.", Some(Unit::Seconds), plain(*uptime_s))?;
        let help = "Panics of threads without which connections go on; each has begun anew.";
        page.counter("panics_survived", help, None, plain(totals.panics_survived))?;
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
        let Stats { totals, active, fallbacks, .. } = &self.0;
        let by = |smc, tcp| [(transport("smc-r"), smc), (transport("tcp"), tcp)];
        page.counter(
            "connections",
            "Connections carried, by transport.",
            None,
            by(totals.connections_smc, totals.connections_tcp),
        )?;
        let help = "Connections that a limit kept from SMC-R, and connections that were closed at \
                    once, because of a limit or because their upstream failed (TCP).";
        page.counter("refused", help, None, by(totals.refused_smc, totals.refused_tcp))?;
        let help = "Connections now, by transport.";
        page.gauge("connections_active", help, None, by(active.smc, active.tcp))?;
        let help = "Connections in their rendezvous.";
        page.gauge("connections_connecting", help, None, plain(active.connecting))?;
        let help = "Connections that wait for a place among the rendezvous, or to be looked at.";
        page.gauge("connections_waiting", help, None, plain(active.waiting))?;
        let help =
            "TCP connections whose SMC-R connection has ended, and which the peer ends first.";
        page.gauge("connections_farewells", help, None, plain(active.farewells))?;
        let help = "SMC-R connections that are kept for other connections to the same address.";
        page.gauge("connections_kept", help, None, plain(active.kept))?;
        let help = "Connections that needed no rendezvous, because one was kept.";
        page.counter("streams_followed", help, None, plain(totals.streams_followed))?;
        let help = "TCP connections beside SMC-R that the peer did not end in time.";
        page.counter("tcp_cut_short", help, None, plain(totals.tcp_cut_short))?;
        let help = "Closed connections whose RMB element the peer still holds.";
        page.gauge("connections_parked", help, None, plain(active.parked))?;
        let help = "Connections of local programs whose bytes go by shared memory.";
        page.gauge("connections_rings", help, None, plain(active.rings))?;
        let help = "Connections of local programs whose bytes went by shared memory.";
        page.counter("rings", help, None, plain(totals.rings))?;
        let help =
            "Ends of connections within this host that pass their bytes without the gateway.";
        page.gauge("connections_shortcuts", help, None, plain(active.shortcuts))?;
        let help =
            "Ends of connections within this host that were to pass bytes without the gateway.";
        page.counter("shortcuts", help, None, plain(totals.shortcuts))?;
        let help = "Rendezvous that broke the protocol or timed out.";
        page.counter("handshakes_failed", help, None, plain(totals.handshakes_failed))?;
        let bytes = Some(Unit::Bytes);
        let help = "Bytes read from applications.";
        page.counter("in", help, bytes.clone(), plain(totals.bytes_in))?;
        page.counter("out", "Bytes written to applications.", bytes, plain(totals.bytes_out))?;
        let help = "Connections that stayed TCP, by reason.";
        page.counter("fallbacks", help, None, reasons(fallbacks))?;
        let slower = self.0.peers.iter().filter(|peer| !peer.slower.is_empty()).count() as u64;
        let help = "Servers towards which SMC-R is slower than TCP.";
        page.gauge("peers_slower", help, None, plain(slower))?;
        let help = "Lines of the access log that were written.";
        page.counter("access_log_written", help, None, plain(totals.access_log_written))?;
        let help = "Lines of the access log that could not be written.";
        page.counter("access_log_dropped", help, None, plain(totals.access_log_dropped))
    }

    fn groups(&self, page: &mut Page<'_>) -> fmt::Result {
        let Stats { totals, active, .. } = &self.0;
        page.gauge("link_groups", "Link groups.", None, plain(active.link_groups))?;
        page.gauge("links", "Links of all link groups.", None, plain(active.links))?;
        let help = "Links that went down while another could take their connections.";
        page.counter("links_failed_over", help, None, plain(totals.links_failed_over))?;
        let help = "Links that went down while no other could take their connections.";
        page.counter("links_lost", help, None, plain(totals.links_lost))?;
        let help = "Link groups that ended, but not for being idle.";
        page.counter("groups_lost", help, None, plain(totals.groups_lost))?;
        let help = "Times that a peer did not know its link group.";
        page.counter("groups_out_of_sync", help, None, plain(totals.groups_out_of_sync))?;
        let help = "Connections that went on over another link.";
        page.counter("connections_moved", help, None, plain(totals.connections_moved))?;
        let help = "Connections reset because the peer gave their RMB element to another.";
        page.counter("rmbe_conflicts", help, None, plain(totals.rmbe_conflicts))?;
        let help = "Connections whose set-up waited for the peer's RMB element.";
        page.counter("offers_held", help, None, plain(totals.offers_held))?;
        let help = "RMB elements that rested before another connection got them.";
        page.counter("rmbes_rested", help, None, plain(totals.rmbes_rested))
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

    /// Whatever pollers count, and how long bytes stay in them.
    fn pollers(&self, page: &mut Page<'_>) -> fmt::Result {
        for description in DESCRIPTIONS {
            let (name, unit, is_now) = shape(description);
            let samples = self.0.pollers.iter().filter_map(|poller| {
                let number = poller.counters.get(description.name)?;
                Some((poller_label(poller), *number))
            });
            match is_now {
                true => page.gauge(&name, description.help, unit, samples)?,
                false => page.counter(&name, description.help, unit, samples)?,
            }
        }
        let help = "How long sampled bytes stayed in a stage of their way.";
        let stages = self.0.pollers.iter().flat_map(|poller| {
            poller.stages.iter().map(move |(name, stage)| {
                let mut labels = poller_label(poller);
                labels.push(("stage", name.clone()));
                (labels, stage.into())
            })
        });
        page.times("poller_stage", help, stages)
    }

    fn rnics(&self, page: &mut Page<'_>) -> fmt::Result {
        let each = |number: fn(&Rnic) -> u64| {
            let rnics = self.0.rnics.iter();
            rnics.map(move |it| (vec![("rnic", it.name.clone())], number(it)))
        };
        let is_up = each(|it| u64::from(it.state == UP));
        page.gauge("rnic_up", "Whether new links may use the RNIC.", None, is_up)?;
        page.gauge("rnic_links", "Links on the RNIC.", None, each(|it| it.links.into()))?;
        let help = "Payload of a full packet of the RNIC.";
        page.gauge("rnic_mtu", help, Some(Unit::Bytes), each(|it| it.mtu.into()))?;
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
        let help = "Whether the listener takes connections.";
        page.gauge("listener_open", help, None, each(|it| u64::from(it.state == OPEN)))?;
        let help = "Connections that the listener accepted.";
        page.counter("listener_accepted", help, None, each(|it| it.accepted))?;
        let help = "Connections that the listener closed at once.";
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
        let help = "Connections that the listener has now.";
        page.gauge("listener_active", help, None, each(|it| it.active))?;
        let spreads = |of: fn(&Durations) -> &Spread| {
            self.0.listeners.iter().flat_map(move |it| {
                // A transport that was never used has no series.
                let used = it.durations.each().into_iter().filter(|(_, all)| all.whole.count > 0);
                used.map(move |(name, all)| {
                    let mut labels = vec![("listener", it.name.clone())];
                    labels.extend(transport(name.name()));
                    (labels, of(all).into())
                })
            })
        };
        let help = "How long connections took that are over.";
        page.times("connection_duration", help, spreads(|all| &all.whole))?;
        let help = "How long connections waited for the first byte of the server.";
        page.times("connection_first_byte", help, spreads(|all| &all.first_byte))
    }

    fn upstreams(&self, page: &mut Page<'_>) -> fmt::Result {
        let each = |number: fn(&Upstream) -> u64| {
            self.0.listeners.iter().flat_map(move |it| {
                it.upstreams.iter().map(move |upstream| {
                    let address = ("upstream", upstream.address.clone());
                    (vec![("listener", it.name.clone()), address], number(upstream))
                })
            })
        };
        let onwards = config::Upstream::OriginalDst.to_string();
        let known = self.0.listeners.iter().filter(|it| {
            // The names of one that is removed are not looked up any more.
            it.state != REMOVED && it.upstream != onwards
        });
        let known =
            known.map(|it| (vec![("listener", it.name.clone())], it.upstreams.len() as u64));
        let help = "Addresses that are known of the upstreams of the listener.";
        page.gauge("listener_upstreams", help, None, known)?;
        let help = "Whether connections go to the upstream.";
        page.gauge("upstream_up", help, None, each(|it| u64::from(it.state == UP)))?;
        let help = "Connections that the upstream has now.";
        page.gauge("upstream_active", help, None, each(|it| it.active.into()))?;
        let help = "Connects to the upstream that failed.";
        page.counter("upstream_failed", help, None, each(|it| it.failed))
    }
}

/// What a counter of pollers is called as a metric, without its unit; the unit; and whether it is a
/// gauge.
fn shape(description: &Description) -> (String, Option<Unit>, bool) {
    let (is_bytes, is_now) = match description.unit {
        "bytes" => (true, false),
        "bytes_now" => (true, true),
        unit => (false, unit == "now"),
    };
    let words = description.name.split('_').filter(|word| !is_bytes || *word != "bytes");
    let name = words.fold("poller".to_owned(), |name, word| name + "_" + word);
    (name, is_bytes.then_some(Unit::Bytes), is_now)
}

/// How many connections stayed TCP for each reason. One that has never occurred has a series, too:
/// Prometheus sees no increase in the first value of a series that begins later.
fn reasons(occurred: &[Fallback]) -> impl Iterator<Item = (Labels, u64)> {
    let never = |code: &&Diagnosis| occurred.iter().all(|reason| reason.code != code.0);
    let never = Diagnosis::ALL.iter().filter(never).map(|code| (code.0, format!("{code:?}"), 0));
    let occurred = occurred.iter().map(|it| (it.code, it.name.clone(), it.count));
    occurred
        .chain(never)
        .map(|(code, name, count)| (vec![("code", format!("{code:#010x}")), ("name", name)], count))
}

fn poller_label(poller: &Poller) -> Labels {
    vec![("poller", poller.index.to_string())]
}

// States in `/stats`.
const UP: &str = "up";
const OPEN: &str = "open";
const REMOVED: &str = "removed";
