// The last 15 minutes as plots, from the sums that /history keeps.

import { make, show } from "./figures.js";
import { units } from "./units.js";

const SPAN_MS = 15 * 60 * 1000;
const [WIDTH, HEIGHT] = [600, 120];

// How much `name` has grown per second between each two samples.
const rates = (history, name) => history.uptime_ms.slice(1).map((ended, index) => {
  const [began, before] = [history.uptime_ms[index], history[name][index]];
  const after = history[name][index + 1];
  const value = Math.max(0, after - before) * 1000 / Math.max(1, ended - began);
  return { at: ended, value, from: [began, before], to: [ended, after] };
});

const levels = (history, name) =>
  history.uptime_ms.map((at, index) => ({ at, value: history[name][index], to: [at, history[name][index]] }));

const PLOTS = [
  { id: "plot-throughput", title: "Throughput", unit: "bits", of: rates,
    lines: [["from applications", "bytes_in", "a"], ["to applications", "bytes_out", "b"]] },
  { id: "plot-new", title: "New connections", unit: "rate", of: rates,
    lines: [["SMC-R", "connections_smc", "a"], ["TCP", "connections_tcp", "b"]] },
  { id: "plot-active", title: "Open connections", unit: "count", of: levels,
    lines: [["SMC-R", "active_smc", "a"], ["TCP", "active_tcp", "b"]] },
  { id: "plot-fallbacks", title: "Stayed TCP, with a reason", unit: "rate", of: rates,
    lines: [["fallbacks", "fallbacks", "b"]] },
];

// The smallest of 1, 2, 5, 10, 20, 50 … that is not below `value`.
const round = value => {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  return power * [1, 2, 5, 10].find(step => step * power >= value * (1 - 1e-9));
};

// Bits are shown, so it is bits that shall be round.
const roof = (plot, most) => plot.unit === "bits" ? round(Math.max(most * 8, 1000)) / 8
  : round(Math.max(most, plot.unit === "count" ? 4 : 1));

// A line through points. Where samples are missing there is a gap, not a guess.
const path = (points, x, y, gap) => points.map((point, index) => {
  const joins = index > 0 && point.at - points[index - 1].at <= gap;
  return (joins ? "L" : "M") + x(point.at).toFixed(1) + " " + y(point.value).toFixed(1);
}).join("");

// Where somebody looks at each plot: how far before the newest sample, in milliseconds.
const looking = new Map();
let last;

// The newest value, in words. It carries the samples that it was made of.
const newest = (plot, [label, name, kind], points) => {
  const point = points.at(-1);
  const text = point ? units[plot.unit](point.value) : "–";
  return make("div", { class: "line " + kind }, make("dt", {}, label), make("dd", point ? {
    "data-history": name, "data-unit": plot.unit, "data-to": point.to.join(" "),
    "data-from": point.from?.join(" "), title: String(point.value),
  } : {}, text));
};

const nearest = (points, at) => points.reduce((best, point) =>
  Math.abs(point.at - at) < Math.abs(best.at - at) ? point : best);

const ago = milliseconds =>
  milliseconds < 1000 ? "now" : units.duration(Math.round(milliseconds / 1000)) + " ago";

// What the plot says of the moment that somebody points at.
const reading = (plot, all, end) => {
  const back = looking.get(plot.id);
  if (back === undefined || !all[0].length) return undefined;
  const found = all.map(points => nearest(points, end - back));
  const values = plot.lines.map(([label], index) =>
    label + " " + units[plot.unit](found[index].value));
  return { at: found[0].at, text: ago(end - found[0].at) + ": " + values.join(", ") };
};

const draw = (plot, history) => {
  const all = plot.lines.map(([, name]) => plot.of(history, name));
  const end = history.uptime_ms.at(-1) ?? 0;
  const top = roof(plot, Math.max(0, ...all.flat().map(point => point.value)));
  const x = at => WIDTH - (end - at) / SPAN_MS * WIDTH;
  const y = value => HEIGHT - value / top * HEIGHT;
  const looked = reading(plot, all, end);
  const grid = [0, 0.5, 1].map(share =>
    make("line", { class: "grid", x1: 0, x2: WIDTH, y1: share * HEIGHT, y2: share * HEIGHT }));
  const areas = plot.lines.map(([, , kind], index) => {
    const points = all[index];
    const line = path(points, x, y, history.period_ms * 2.5);
    return [make("path", { class: "line " + kind, d: line, "data-points": points.length })];
  });
  const cursor = looked && make("line", { class: "cursor", x1: x(looked.at), x2: x(looked.at), y1: 0, y2: HEIGHT });
  const said = plot.lines.map(([label], index) =>
    label + " " + (all[index].length ? units[plot.unit](all[index].at(-1).value) : "–")).join(", ");
  show(plot.id,
    make("figcaption", {}, make("h2", {}, plot.title),
      make("dl", {}, plot.lines.map((line, index) => newest(plot, line, all[index])))),
    make("div", { class: "drawing", tabindex: 0, role: "img", "data-plot": plot.id,
      "aria-label": plot.title + " over the last 15 minutes; now " + said + ". Arrow keys look back." },
      make("svg", { viewBox: "0 0 " + WIDTH + " " + HEIGHT, preserveAspectRatio: "none" }, grid, areas.flat(), cursor),
      make("span", { class: "top" }, units[plot.unit](top))),
    make("div", { class: "axis", "aria-hidden": looked ? undefined : "true" },
      looked ? make("span", { role: "status" }, looked.text)
        : [make("span", {}, "15 min ago"), make("span", {}, "now")]));
};

export const plots = history => {
  last = history;
  PLOTS.forEach(plot => draw(plot, history));
};

const look = (id, back) => {
  if (back === undefined) looking.delete(id);
  else looking.set(id, Math.max(0, Math.min(SPAN_MS, back)));
  if (last) draw(PLOTS.find(plot => plot.id === id), last);
};

for (const { id } of PLOTS) {
  const card = document.getElementById(id);
  const drawing = event => event.target.closest?.(".drawing");
  card.addEventListener("pointermove", event => {
    const box = drawing(event)?.getBoundingClientRect();
    look(id, box && (1 - (event.clientX - box.left) / box.width) * SPAN_MS);
  });
  card.addEventListener("pointerleave", () => look(id, undefined));
  card.addEventListener("focusout", () => look(id, undefined));
  card.addEventListener("keydown", event => {
    const step = { ArrowLeft: 1, ArrowRight: -1, PageUp: 15, PageDown: -15 }[event.key];
    if (!step || !last) return;
    event.preventDefault();
    look(id, (looking.get(id) ?? 0) + step * last.period_ms);
  });
}
