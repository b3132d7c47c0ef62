// The page: which document it shows, and the stream of events that renews it.

import { Person } from "./actions.js";
import { h, update } from "./dom.js";
import { clock } from "./format.js";
import * as pages from "./pages.js";

const MOST_POINTS = 720;
const SEARCH_DELAY = 200; // ms
const RETRY_DELAY = 2000; // ms

const main = document.getElementById("main");
const live = document.getElementById("live");

let target = null; // the key of the target that is shown; null: the only one, or all of them
let name = null; // the subscription that is shown; null: all of them
let seen = null; // the last document
let history = null;
let stream = null;
let tables = null;
const person = new Person(document.getElementById("dialog"), () => render());

/** The tables of a subscription: the question, and the server's last answer. */
class Tables {
  constructor() {
    this.query = { search: "", state: "", sort: "state", descending: false, offset: 0 };
    this.page = null;
    this.timer = null;
    this.number = 0;
    this.isReading = false;
  }

  ask(change) {
    Object.assign(this.query, change);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.read(), "search" in change ? SEARCH_DELAY : 0);
    render();
  }

  async read() {
    const number = ++this.number;
    this.isReading = true;
    const { search, state, sort, descending, offset } = this.query;
    const query = addressOf({ search, state, sort, descending: descending ? "1" : "0", offset });
    try {
      const answer = await fetch(`/tables.json?${query}`);
      const page = answer.ok ? await answer.json() : this.page;
      if (number !== this.number) return; // somebody has asked for others meanwhile
      this.page = page;
      render();
    } catch {
      // The stream says that the connection is lost.
    } finally {
      if (number === this.number) this.isReading = false;
    }
  }
}

/** Return the parameters of an address about the subscription that is shown. */
function addressOf(more = {}) {
  return new URLSearchParams({ ...(target === null ? {} : { target }), ...(name === null ? {} : { subscription: name }), ...more });
}

function open() {
  const parts = location.hash.slice(2).split("/").map(decodeURIComponent);
  name = parts.at(-1) || null;
  target = parts.length > 1 ? parts[0] : null;
  seen = null;
  history = { at: [], transactions: [], changes: [], bytes: [], lag_bytes: [], lag_seconds: [], retained_bytes: [] };
  tables = name === null ? null : new Tables();
  main.replaceChildren(h("p", { class: "quiet" }, "Reading …"));
  follow();
}

let opened = 0; // the number of the last call of follow()

async function follow() {
  stream?.close();
  const number = ++opened;
  let key;
  try {
    ({ key } = await (await fetch("/key.json")).json());
  } catch {
    key = "";
  }
  if (number !== opened) return;
  const current = new EventSource(`/events?${addressOf({ key })}`);
  stream = current;
  current.onmessage = (event) => {
    if (stream === current) take(JSON.parse(event.data));
  };
  current.onerror = () => {
    if (stream !== current) return;
    setLive("wrong", "no connection to the launcher");
    if (current.readyState === EventSource.CLOSED) setTimeout(() => stream === current && follow(), RETRY_DELAY);
  };
}

function take(document) {
  seen = document;
  if (document.points) {
    // A stream that was opened again sends the whole history.
    const isNew = document.points.at.map((at) => at > (history.at.at(-1) ?? 0));
    for (const [column, values] of Object.entries(document.points)) {
      history[column] = [...history[column], ...values.filter((_, index) => isNew[index])].slice(-MOST_POINTS);
    }
    if (!tables.isReading) tables.read();
  }
  const role = { active: "live", standby: "live, this launcher is a standby", none: "no launcher runs" }[document.launcher] ?? "live";
  const down = document.targets?.filter((one) => one.error !== null).length ?? 0;
  if (down) setLive("wrong", down === 1 ? "one target does not answer" : `${down} targets do not answer`);
  else if (document.subscriptions && document.error !== null) setLive("wrong", "the target does not answer");
  else setLive("good", `${role}, ${clock(document.at ?? new Date())}`);
  render();
}

function setLive(tone, words) {
  live.className = `tone-${tone}`;
  if (live.textContent !== words) live.textContent = words;
}

function render() {
  if (seen === null) return;
  let content;
  if ("unknown" in seen) content = pages.unknown(name);
  else if ("summary" in seen) content = pages.subscription(seen, history, tables, person);
  else content = pages.overview(seen);
  update(main, h("main", null, content));
  document.getElementById("target").textContent = seen.target ?? (seen.targets ? `${seen.targets.length} targets` : "");
  const all = seen.summary ? [seen.summary] : (seen.targets ?? [seen]).flatMap((one) => one.subscriptions ?? []);
  const wrong = all.some((one) => one.tone === "wrong");
  document.title = `${wrong ? "⚠ " : ""}${name ?? "subscriber"}`;
}

addEventListener("hashchange", () => {
  open();
  main.focus();
});
open();
