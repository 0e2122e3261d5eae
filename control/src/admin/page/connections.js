// The table of connections: searched, sorted and cut into pages by the gateway.

import { figures, make, nothing, show, state, table } from "./figures.js";

const control = id => document.getElementById(id);
let page = 1;

export const query = () => {
  const asked = new URLSearchParams({ page, per_page: control("rows").value, sort: control("sort").value });
  for (const id of ["search", "transport", "listener"]) {
    if (control(id).value) asked.set(id, control(id).value);
  }
  return "/connections?" + asked;
};

// Every listener can be chosen, and the choice stays what it is.
export const names = listeners => {
  const wanted = ["", ...listeners.map(row => row.name)];
  const select = control("listener");
  if (wanted.length === select.options.length && wanted.every((name, at) => select.options[at].value === name)) return;
  const chosen = select.value;
  select.replaceChildren(...wanted.map(name => make("option", { value: name }, name || "any")));
  select.value = wanted.includes(chosen) ? chosen : "";
};

const row = (connection, figure, at) => {
  const place = connection.link_group === undefined ? "–"
    : ["group ", figure(at + "link_group"), connection.link !== undefined && [", link ", figure(at + "link")]];
  const reason = connection.fallback
    ? [figure(at + "fallback.name", "text", "name"), " ", figure(at + "fallback.code", "code", "faint")] : "–";
  return [state(figure(at + "transport")), figure(at + "state"), figure(at + "listener"),
    figure(at + "app"), figure(at + "peer"), figure(at + "bytes_in", "bytes"), figure(at + "bytes_out", "bytes"),
    figure(at + "age_s", "duration"), place, reason];
};

export const connections = answer => {
  const { total, per_page, connections: rows } = answer;
  const last = Math.max(1, Math.ceil(total / per_page));
  if (page > last) { // What was on this page has ended.
    page = last;
    return false;
  }
  const first = (page - 1) * per_page;
  show("pages", rows.length ? (first + 1) + "–" + (first + rows.length) + " of " + total : "0 of " + total);
  control("back").disabled = page <= 1;
  control("next").disabled = page >= last;
  const figure = figures(answer, "/connections ");
  show("rows-of-connections", rows.length ? table("Open connections",
    ["Transport", "State", "Listener", "Application", "Peer", ["From application", "number"],
      ["To application", "number"], ["Age", "number"], "Over", "Why TCP"],
    rows.map((connection, index) => row(connection, figure, "connections." + index + ".")))
    : nothing("There is no such connection now."));
  return true;
};

// Calls `again` when somebody wants to see other connections.
export const onChange = again => {
  const anew = () => { page = 1; again(); };
  let typing;
  control("search").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(anew, 200); });
  for (const id of ["transport", "listener", "sort", "rows"]) control(id).addEventListener("change", anew);
  control("back").addEventListener("click", () => { page = Math.max(1, page - 1); again(); });
  control("next").addEventListener("click", () => { page += 1; again(); });
};
