// Elements, and values that say where in /stats they come from.
//
// A figure has the place in /stats (data-path), the exact value (data-value) and the unit that its
// text is in (data-unit). Text goes in as text, never as markup: peers choose some of it.

import { plain, units } from "./units.js";

const DRAWN = new Set(["svg", "path", "line", "rect", "circle"]);

// An element with these attributes and children; strings become text.
export const make = (tag, attributes = {}, ...children) => {
  const element = DRAWN.has(tag)
    ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter(child => child !== undefined && child !== false));
  return element;
};

// The value at `path` of `data`, such as "totals.bytes_in".
const find = (data, path) => path.split(".").reduce((at, key) => at?.[key], data);

// Makes figures of one document: `figures(stats)("totals.bytes_in", "bytes")`.
export const figures = (data, prefix = "") => (path, unit = "text", name = "") => {
  const value = find(data, path);
  const [exact, text] = [plain(value), units[unit](value)];
  return make("span", {
    class: ("figure " + name).trim(),
    title: exact === text ? undefined : exact,
    "data-path": prefix + path, "data-value": exact, "data-unit": unit,
  }, text);
};

// A state, with a colour of its own; the word is there for those who do not see it.
const GOOD = new Set(["active", "up", "open", "smc-r"]);
const BAD = new Set(["down", "out", "removed"]);
export const state = figure => {
  const word = figure.dataset.value;
  const mood = GOOD.has(word) ? "good" : BAD.has(word) ? "bad" : "fair";
  figure.classList.add("pill", mood);
  return figure;
};

// A table: columns are names, or [name, class]; rows are lists of cells.
export const table = (caption, columns, rows) => {
  const names = columns.map(column => [column].flat());
  return make("table", {},
    make("caption", {}, caption),
    make("thead", {}, make("tr", {}, names.map(([name, kind]) =>
      make("th", { scope: "col", class: kind }, name)))),
    make("tbody", {}, rows.map(cells => make("tr", {}, cells.map((cell, index) =>
      make(index ? "td" : "th", { scope: index ? undefined : "row", class: names[index][1] }, cell))))));
};

export const nothing = text => make("p", { class: "nothing" }, text);

// A bar of which `share`, from 0 to 1, is filled.
export const bar = (share, name) => make("svg",
  { class: "bar " + (name ?? ""), viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" },
  make("rect", { class: "rest", width: 100, height: 8 }),
  make("rect", { width: Math.max(0, Math.min(1, share || 0)) * 100, height: 8 }));

// Makes `old` look like `fresh`, and touches only what differs: what somebody has selected, or is
// pointing at, stays as it is.
const morph = (old, fresh) => {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) return old.replaceWith(fresh);
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return undefined;
  }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  children(old, [...fresh.childNodes]);
  return undefined;
};

const children = (parent, fresh) => {
  const old = [...parent.childNodes];
  old.slice(fresh.length).forEach(node => node.remove());
  fresh.forEach((node, index) => index < old.length ? morph(old[index], node) : parent.append(node));
};

// Shows these nodes in the element with this id, in place of what is there.
export const show = (id, ...nodes) => {
  const fresh = make("div", {}, ...nodes);
  children(document.getElementById(id), [...fresh.childNodes]);
};
