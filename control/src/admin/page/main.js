// Asks the gateway again and again, and says when it does not answer.

import { connections, names, onChange, query } from "./connections.js";
import { plots } from "./plots.js";
import { sections } from "./sections.js";
import { units } from "./units.js";

const SCHEMA = 1;
const EVERY_MS = 2000;
const PATIENCE_MS = 4000;

// Browsers differ in what they call these.
const failed = error => {
  const isSilent = error.name === "TimeoutError";
  throw new Error(isSilent ? "it has said nothing for " + PATIENCE_MS / 1000 + " seconds" : "nobody listens at its address");
};

const ask = async path => {
  const signal = AbortSignal.timeout(PATIENCE_MS);
  const answer = await fetch(path, { cache: "no-store", signal }).catch(failed);
  const json = await answer.json();
  if (!answer.ok) throw new Error(json.error ?? "status " + answer.status);
  if (json.schema !== SCHEMA) throw new Error("schema " + json.schema + " is not known to this page");
  return json;
};

let seen; // When the last complete answer came.
let why = "";

const sayState = () => {
  const state = document.getElementById("state");
  const banner = document.getElementById("stale");
  const isStale = why !== "";
  const word = isStale ? "stale" : seen ? "live" : "loading";
  if (state.dataset.state !== word) {
    state.dataset.state = word;
    state.textContent = word;
  }
  document.body.classList.toggle("is-stale", isStale);
  banner.hidden = !isStale;
  const age = seen ? "What you see is " + units.duration(Math.floor((Date.now() - seen) / 1000)) + " old."
    : "There is nothing to show yet.";
  const text = isStale ? "The gateway does not answer: " + why + ". " + age : "";
  if (banner.textContent !== text) banner.textContent = text;
};

const listed = async () => {
  // A page that is gone is asked for once more, as the one that is the last now.
  if (!connections(await ask(query()))) connections(await ask(query()));
};

const refresh = async () => {
  try {
    const [stats, history] = await Promise.all([ask("/stats"), ask("/history")]);
    names(stats.listeners);
    sections(stats);
    plots(history);
    await listed();
    [seen, why] = [Date.now(), ""];
    // Tests wait for the next reading by this.
    document.body.dataset.readings = 1 + Number(document.body.dataset.readings ?? 0);
  } catch (error) {
    why = error.message;
  }
  sayState();
};

const forever = async () => {
  // Nobody looks at a page that is hidden, so it does not ask.
  if (!document.hidden) await refresh();
  setTimeout(forever, EVERY_MS);
};

onChange(() => listed().catch(error => { why = error.message; sayState(); }));
document.getElementById("all").addEventListener("toggle", refresh);
setInterval(sayState, 1000);
forever();
