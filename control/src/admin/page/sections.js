// What /stats says, one section for each subject.

import { bar, figures, make, nothing, show, state, table } from "./figures.js";
import { units } from "./units.js";

const pairs = (...entries) => make("dl", { class: "pairs" }, entries.map(([name, ...values]) =>
  make("div", {}, make("dt", {}, name), make("dd", {}, values))));

const about = figure => show("about",
  "version ", figure("version"), " · up ", figure("uptime_s", "duration"));

const now = (stats, figure) => {
  const kinds = [["smc", "SMC-R"], ["tcp", "TCP"], ["connecting", "being set up"],
    ["waiting", "waiting for set-up"], ["farewells", "closing"], ["parked", "parked"]];
  const all = kinds.reduce((sum, [key]) => sum + stats.active[key], 0);
  let x = 0;
  const parts = kinds.map(([key]) => {
    const width = all ? stats.active[key] / all * 100 : 0;
    x += width;
    return make("rect", { class: key, x: x - width, width, height: 8 });
  });
  show("now",
    make("svg", { class: "parts", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" },
      make("rect", { class: "rest", width: 100, height: 8 }), parts),
    make("dl", { class: "legend" }, kinds.map(([key, words]) => make("div", { class: key },
      make("dt", {}, words), make("dd", {}, figure("active." + key, "count"))))),
    make("h3", {}, "Since the start"),
    pairs(["over SMC-R", figure("totals.connections_smc", "count")],
      ["over TCP", figure("totals.connections_tcp", "count")],
      ["from applications", figure("totals.bytes_in", "bytes")],
      ["to applications", figure("totals.bytes_out", "bytes")],
      ["failed set-ups", figure("totals.handshakes_failed", "count")],
      ["refused", figure("totals.refused_tcp", "count")],
      ["no room for SMC-R", figure("totals.refused_smc", "count")],
      ["closed as idle", figure("totals.idle_closed", "count")]));
};

const memory = ({ memory }, figure) => show("memory",
  make("h3", {}, "Receive buffers (RMBs)"),
  bar(memory.rmbes_used / memory.rmbes),
  make("p", {}, figure("memory.rmbes_used", "count"), " of ", figure("memory.rmbes", "count"),
    " elements belong to a connection; ", figure("memory.rmb_bytes", "bytes"), " registered"),
  make("h3", {}, "Send buffers"),
  bar(memory.send_bytes_used / memory.send_bytes),
  make("p", {}, figure("memory.send_bytes_used", "bytes"), " of ", figure("memory.send_bytes", "bytes"),
    " hold data now"));

const fallbacks = (stats, figure) => {
  if (!stats.fallbacks.length) {
    return show("fallbacks", nothing("No connection that could have used SMC-R has stayed TCP since the start."));
  }
  const most = Math.max(...stats.fallbacks.map(row => row.count));
  return show("fallbacks", table("Reasons, the most frequent first",
    ["Reason", ["Connections", "number"], "", "What it means", "What to do"],
    stats.fallbacks.map((row, index) => {
      const at = key => "fallbacks." + index + "." + key;
      return [[figure(at("name"), "text", "name"), " ", figure(at("code"), "code", "faint")],
        figure(at("count"), "count"), bar(row.count / most, "b"), figure(at("meaning")), figure(at("remedy"))];
    })));
};

// A link as a line from our RNIC to the peer's.
const link = (figure, at) => make("li", { class: "link" },
  make("span", { class: "end" }, figure(at + "rnic", "text", "name"),
    make("small", {}, "queue pair ", figure(at + "qpn"))),
  make("span", { class: "wire" },
    make("span", {}, "link ", figure(at + "number"), " ", state(figure(at + "state"))),
    make("small", {}, figure(at + "connections", "count"), " connections · packets of up to ",
      figure(at + "payload", "count"), " bytes · id ", figure(at + "id"))),
  make("span", { class: "end" }, figure(at + "peer_gid", "text", "name"),
    make("small", {}, "queue pair ", figure(at + "peer_qpn"))));

const group = (row, figure, at) => make("article", { class: "group" },
  make("h3", {}, "Group ", figure(at + "id"), row.v2 && row.v2.peer_host
    ? [" with ", figure(at + "v2.peer_host", "text", "name"), " ", figure(at + "v2.peer_os", "text", "faint")]
    : [" with ", figure(at + "peer_id", "text", "name")]),
  make("p", { class: "facts" },
    "we are the ", figure(at + "role"), " · SMC-R version ", figure(at + "version"),
    row.v2 && [".", figure(at + "v2.release"), " · community ", figure(at + "v2.eid")],
    " · ", figure(at + "type"), " · ", figure(at + "connections", "count"), " connections",
    row.v2 && [" of at most ", figure(at + "v2.max_connections", "count")],
    " · ", figure(at + "rmbs", "count"), " RMBs"),
  row.links.length ? make("ul", { class: "links" }, row.links.map((_, index) =>
    link(figure, at + "links." + index + "."))) : nothing("It has no link."));

const groups = (stats, figure) => show("groups",
  pairs(["links that failed over", figure("totals.links_failed_over", "count")],
    ["connections moved", figure("totals.connections_moved", "count")],
    ["links lost", figure("totals.links_lost", "count")],
    ["groups lost", figure("totals.groups_lost", "count")],
    ["links refused, not listed", figure("totals.links_not_listed", "count")]),
  stats.link_groups.length
    ? stats.link_groups.map((row, index) => group(row, figure, "link_groups." + index + "."))
    : nothing("There is no link group: no connection has used SMC-R lately."));

// A measurement, or a dash where too little is known.
const known = (value, figure) => value > 0 ? figure : "–";

const peers = (stats, figure) => show("peers", stats.peers.length
  ? table("How fast each server is over both, as connections of late have shown",
    ["Server", "Slower over SMC-R", ["First answer, SMC-R", "number"], ["TCP", "number"],
      ["Throughput, SMC-R", "number"], ["TCP", "number"], ["Measured, SMC-R", "number"], ["TCP", "number"]],
    stats.peers.map((row, index) => {
      const at = "peers." + index + ".";
      const both = (key, unit) => ["smc", "tcp"].map(over =>
        known(row[over][key], figure(at + over + "." + key, unit)));
      return [figure(at + "address", "text", "name"), figure(at + "slower", "text", row.slower && "alarm"),
        ...both("first_byte_ns", "nanoseconds"), ...both("bytes_per_s", "bits"),
        ...["smc", "tcp"].map(over => figure(at + over + ".samples", "count"))];
    }))
  : nothing("No server has been compared: no connection has used SMC-R yet."));

const upstreams = (row, figure, at) => row.upstreams.length
  ? make("ul", { class: "upstreams" }, row.upstreams.map((_, index) => {
    const inner = key => at + "upstreams." + index + "." + key;
    return make("li", {}, state(figure(inner("state"))), " ", figure(inner("address"), "text", "name"),
      make("small", {}, figure(inner("active"), "count"), " open, ",
        figure(inner("failed"), "count"), " failed"));
  })) : nothing("none known");

const listeners = (stats, figure) => show("listeners", stats.listeners.length
  ? table("Where connections come in, and where they go",
    ["Listener", "State", "Accepts", "Connects", ["Open", "number"], ["Accepted", "number"],
      ["Refused", "number"], "Upstreams"],
    stats.listeners.map((row, index) => {
      const at = "listeners." + index + ".";
      return [figure(at + "name", "text", "name"), state(figure(at + "state")),
        [figure(at + "accept"), " at ", figure(at + "bind")],
        [figure(at + "connect"), " to ", figure(at + "upstream")],
        figure(at + "active", "count"), figure(at + "accepted", "count"),
        figure(at + "refused", "count"), upstreams(row, figure, at)];
    }))
  : nothing("There is no listener."));

// What RNICs count, in words; and whether it is a sign of trouble.
const OF_RNICS = {
  packets_in: "packets received", packets_out: "packets sent", retransmits: "sent again",
  path_raised: "path took larger packets", path_lowered: "path took only smaller ones",
  cnps_in: "congestion notices received", cnps_out: "congestion notices sent",
  icrc_errors: "dropped: wrong checksum", psn_errors: "dropped: impossible PSN",
  unknown_qp: "dropped: no such queue pair", rkey_errors: "refused: wrong key or bounds",
};
const TROUBLE = /^(dropped|refused)/;

const rnics = (stats, figure) => show("rnics", stats.rnics.length
  ? stats.rnics.map((row, index) => {
    const at = "rnics." + index + ".";
    return make("article", { class: "group" },
      make("h3", {}, figure(at + "name", "text", "name"), " ", state(figure(at + "state"))),
      make("p", { class: "facts" }, figure(at + "kind"), " on ", figure(at + "device"), " · address ",
        figure(at + "gid"), " · ", figure(at + "links", "count"), " links · path MTU ",
        figure(at + "mtu", "count"), " bytes"),
      pairs(...Object.entries(OF_RNICS).map(([key, words]) =>
        [words, figure(at + key, "count", TROUBLE.test(words) && row[key] > 0 ? "alarm" : "")])));
  })
  : nothing("No RNIC is in use: every connection stays TCP."));

// The share of turns that moved something, between two readings. It carries what it was made of.
const load = (after, before) => {
  const turns = after.turns - before.turns;
  const busy = turns > 0 ? 1 - (after.turns_idle - before.turns_idle) / turns : 0;
  const made = [after, before].map(it => it.turns + " " + it.turns_idle).join(" ");
  return { busy, figure: make("span", { class: "figure", "data-share": made, title: String(busy) }, units.share(busy)) };
};

const START = { turns: 0, turns_idle: 0 };
let earlier = [];

const pollers = (stats, figure) => {
  if (!stats.pollers.length) return show("pollers", nothing("No poller runs."));
  const rows = stats.pollers.map((row, index) => {
    const at = "pollers." + index + ".";
    const before = earlier[index]?.turns <= row.turns ? earlier[index] : START;
    const [lately, always] = [load(row, before), load(row, START)];
    const stages = Object.keys(row.stages).filter(name => row.stages[name].count > 0);
    return [String(index), [figure(at + "core"), " "], figure(at + "pinned", "yes"),
      [bar(lately.busy), lately.figure, make("small", {}, "since the start ", always.figure)],
      figure(at + "connections", "count"), figure(at + "placement"),
      stages.length ? make("ul", { class: "stages" }, stages.map(name => make("li", {},
        name.replaceAll("_", " "), ": half within ", figure(at + "stages." + name + ".p50_ns", "nanoseconds"),
        ", 99 % within ", figure(at + "stages." + name + ".p99_ns", "nanoseconds")))) : "–"];
  });
  earlier = stats.pollers;
  return show("pollers", table("The threads that carry bytes",
    ["Poller", "Core", "Pinned", "Turns that moved something", ["Connections", "number"], "Why there",
      "How long bytes stay"], rows));
};

const isObject = value => value !== null && typeof value === "object" && !Array.isArray(value);
const isRows = value => Array.isArray(value) && value.every(isObject);

// The place of every value of /stats, whatever it is.
const leaves = (value, at) => {
  if (!isObject(value) && !isRows(value)) return [at];
  return Object.entries(value).flatMap(([key, inner]) => leaves(inner, at ? at + "." + key : key));
};

const all = (stats, figure) => {
  if (!document.getElementById("all").open) return;
  show("all-values", table("Everything that /stats has", ["Place in /stats", ["Value", "number"]],
    leaves(stats, "").map(path => [path, figure(path)])));
};

export const sections = stats => {
  const figure = figures(stats);
  about(figure);
  [now, memory, fallbacks, groups, peers, listeners, rnics, pollers, all].forEach(section => section(stats, figure));
};
