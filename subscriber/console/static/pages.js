// The two pages, as elements made from the server's documents.

import { actionSection, retryButton, skipButton, taskSection } from "./actions.js";
import { chart, sparkline } from "./charts.js";
import { h } from "./dom.js";
import { bytes, clock, count, moment, percent, plural, seconds } from "./format.js";
import { bar, code, hintWords, quoted, section, summaryWords } from "./parts.js";

const STAGES = [
  ["decoding", "Decoding", "on the publisher, not sent yet"],
  ["network", "Network", "sent, not received yet"],
  ["applying", "Applying", "received, not committed yet"],
  ["flushing", "Flushing", "committed, not on disk yet"],
  ["confirming", "Confirming", "on disk, not confirmed yet"],
];
const TABLE_STATES = ["failed", "copying", "catching up", "copied", "caught up", "waiting", "ready"];

export function linkTo(key, name) {
  return `#/${encodeURIComponent(key)}/${encodeURIComponent(name)}`;
}

// --- the overview -----------------------------------------------------------------------------------

export function overview(seen) {
  const targets = seen.targets ?? [seen];
  const all = targets.flatMap((one) => one.subscriptions);
  const wrong = all.filter((one) => one.tone === "wrong").length;
  if (targets.length === 1 && (seen.error !== null || !all.length)) return targetLines(seen);
  return [
    h("div", { class: "title" }, h("h1", null, "Subscriptions"),
      h("p", { class: wrong ? "tone-wrong" : "quiet", role: "status" }, wrong ? `${plural(wrong, "subscription")} of ${count(all.length)} need${wrong === 1 ? "s" : ""} you` : `${plural(all.length, "subscription")}, no problem`)),
    targets.map((one) => h("section", { id: `target-${one.key}`, "aria-label": one.target },
      targets.length > 1 && h("h2", { class: "target" }, one.target), targetLines(one))),
  ];
}

function targetLines(target) {
  if (target.error !== null) return [notice("wrong", "The target does not answer", target.error, "The page continues as soon as it does.")];
  if (!target.is_read) return [h("p", { class: "quiet" }, "Reading …")];
  if (!target.subscriptions.length) {
    return [h("h1", null, "Subscriptions"), h("p", { class: "quiet" }, "This database has none. Create one with ", code("subscriber exec \"CREATE SUBSCRIPTION …\""), ".")];
  }
  return [h("ul", { class: "lines" }, target.subscriptions.map((one) => summaryLine(target.key, one)))];
}

function summaryLine(key, one) {
  return h("li", { class: `card summary tone-${one.tone}` },
    h("div", { class: "who" },
      h("a", { href: linkTo(key, one.name) }, h("span", { class: "name" }, one.name)),
      h("span", { class: `state tone-${one.tone}` }, stateWords(one))),
    fact("Lag", lagWords(one), one.uncopied ? "" : bytes(one.lag_bytes)),
    fact("Throughput", one.transactions_per_second === null ? "–" : `${count(one.transactions_per_second)} tx/s`, one.bytes_per_second === null ? "" : `${bytes(one.bytes_per_second)}/s`),
    fact("WAL kept", bytes(one.retained_bytes), limitWords(one)),
    h("div", { class: "fact graph" }, sparkline(one.spark, "transactions per second, last minutes")),
    one.uncopied > 0 && copyBar(one),
    one.problems.map(problemLine),
    one.not_subscribed > 0 && h("p", { class: "note" }, `${plural(one.not_subscribed, "published table is", "published tables are")} not subscribed`),
    one.quarantined > 0 && !one.problems.some(({ kind }) => kind === "quarantine") && h("p", { class: "note" }, `${plural(one.quarantined, "transaction")} in quarantine`));
}

function stateWords(one) {
  return one.uncopied && one.state === "streaming" ? "copying tables" : one.state;
}

function lagWords(one) {
  return one.uncopied ? "copying first" : seconds(one.lag_seconds);
}

function limitWords(one) {
  if (one.seconds_until_given_up !== null) return `given up in ${seconds(one.seconds_until_given_up)}`;
  if (one.seconds_until_full !== null) return `lost in ${seconds(one.seconds_until_full)}`;
  if (one.seconds_until_idle !== null) return `lost in ${seconds(one.seconds_until_idle)} without a connection`;
  if (one.wal_budget !== null) return `of a budget of ${bytes(one.wal_budget)}`;
  return one.max_slot_wal_keep_size === null ? "no limit" : `of ${bytes(one.max_slot_wal_keep_size)}`;
}

function fact(label, value, more) {
  return h("div", { class: "fact" }, h("span", { class: "label" }, label), h("strong", null, value), h("span", { class: "quiet" }, more));
}

function copyBar(one) {
  const done = one.tables - one.uncopied;
  const left = one.copy_seconds_left === null ? "" : `, about ${seconds(one.copy_seconds_left)} left`;
  return h("div", { class: "copy" }, bar(one.copied_share ?? 1, `initial copy of ${one.name}`),
    h("span", null, `${count(done)} of ${plural(one.tables, "table")} copied${left}`));
}

function problemLine(problem) {
  return h("div", { class: "problem" }, h("p", null, h("span", { class: "kind" }, problem.kind), " ", problem.message), problem.hint.length > 0 && h("p", { class: "hint" }, hintWords(problem.hint)));
}

function notice(tone, title, ...lines) {
  return h("section", { class: `card notice tone-${tone}` }, h("h1", null, title), lines.filter(Boolean).map((line) => h("p", null, line)));
}

// --- one subscription -------------------------------------------------------------------------------

export function unknown(name) {
  return [notice("off", `There is no subscription “${name}”`), h("p", null, h("a", { href: "#/" }, "All subscriptions"))];
}

export function subscription(seen, history, tables, person) {
  const one = seen.summary;
  return [
    h("nav", { "aria-label": "breadcrumb" }, h("a", { href: "#/" }, "Subscriptions")),
    h("div", { class: "title" }, h("h1", null, one.name), h("span", { class: `state tone-${one.tone}`, role: "status" }, stateWords(one))),
    h("p", { class: "quiet" }, `from ${seen.publications.map((name) => `“${name}”`).join(", ")} through slot `, h("code", null, seen.slot ?? "none"), seen.format ? `, ${seen.format} format` : ""),
    h("div", { id: "problems" }, one.problems.length > 0 && h("section", { class: "card problems", "aria-label": "Problems" }, one.problems.map(problemLine))),
    h("div", { id: "copying" }, one.uncopied > 0 && section("Initial copy", copyBar(one), h("p", { class: "quiet" }, "The lag below is that of the stream. It says nothing about tables that are still being copied."))),
    h("div", { id: "actions" }, actionSection(seen, person), taskSection(seen, person)),
    graphs(one, history),
    stages(seen),
    tableSection(seen, tables),
    h("div", { id: "conflicts" }, conflicts(seen, person)),
    h("div", { id: "transactions" }, transactions(seen)),
    h("div", { id: "quarantine" }, quarantine(seen, person)),
    h("div", { id: "sequences" }, sequences(seen)),
    h("div", { id: "steps" }, steps(seen)),
    h("div", { id: "repairs" }, repairs(seen)),
    h("div", { id: "audit" }, audit(seen)),
    facts(seen),
  ];
}

function graphs(one, history) {
  const times = history.at;
  const perSecond = (value) => (value === null ? "–" : `${count(value)}/s`);
  return h("section", { class: "graphs", "aria-label": "The last hour" },
    chart({ id: "chart-transactions", title: "Transactions", times, values: history.transactions, format: perSecond }),
    chart({ id: "chart-lag", title: one.uncopied ? "Lag of the stream" : "Lag", times, values: history.lag_seconds, format: seconds }),
    chart({ id: "chart-bytes", title: "Received", times, values: history.bytes, format: (value) => (value === null ? "–" : `${bytes(value)}/s`) }),
    chart({ id: "chart-wal", title: "WAL kept on the publisher", times, values: history.retained_bytes, format: bytes, limit: one.wal_budget ?? one.max_slot_wal_keep_size, limitName: one.wal_budget === null ? "max_slot_wal_keep_size" : "wal_budget" }));
}

function stages(seen) {
  const total = seen.summary.lag_bytes ?? 0;
  const known = Object.keys(seen.lag_stages).length > 0;
  return h("section", { class: "card", id: "stages" }, h("h2", null, "Where the lag is"),
    known
      ? h("ol", { class: "stages" }, STAGES.map(([key, name, what]) => {
        const size = seen.lag_stages[key];
        return h("li", { class: size && size >= total / 2 ? "stage main" : "stage", title: what }, h("span", { class: "label" }, name), h("strong", null, bytes(size)), bar(total ? size / total : 0, `${name}: ${bytes(size)}`), h("span", { class: "quiet" }, what));
      }))
      : h("p", { class: "quiet" }, seen.publisher_error ?? "No walsender serves this subscription at the moment."),
    h("dl", { class: "positions" }, pair("publisher", seen.publisher_lsn), pair("received", seen.received_lsn), pair("confirmed", seen.confirmed_lsn)));
}

function pair(label, value) {
  return h("div", null, h("dt", null, label), h("dd", null, value ?? "–"));
}

function facts(seen) {
  const one = seen.summary;
  const entries = [
    ["Since the worker's start", `${plural(seen.totals.transactions, "transaction")}, ${plural(seen.totals.changes, "change")}, ${bytes(seen.totals.bytes)}`],
    ["Errors so far", `${count(seen.totals.apply_errors)} applying, ${count(seen.totals.sync_errors)} synchronizing`],
    ["WAL kept for the slot", `${bytes(one.retained_bytes)}, ${limitWords(one)}${one.retained_growth ? `, ${one.retained_growth > 0 ? "growing" : "shrinking"} by ${bytes(Math.abs(one.retained_growth))}/s` : ""}`],
    seen.wal_status && ["wal_status", seen.wal_status],
    seen.error && ["Last error", `${seen.error} (${moment(seen.error_time)})`],
    seen.skip_lsn && ["Skipping", `the transaction that finishes at ${seen.skip_lsn}`],
    seen.format_reason && ["Reason for text", seen.format_reason],
    Object.keys(seen.one_by_one).length > 0 && ["Applied row by row", Object.entries(seen.one_by_one).map(([reason, number]) => `${count(number)} (${reason})`).join(", ")],
    ...seen.limits.map((limit) => ["Limit of the target", limit]),
    seen.not_subscribed.length > 0 && ["Published, not subscribed", h("span", null, seen.not_subscribed.join(", "), ". To add them: ", code(`ALTER SUBSCRIPTION ${quoted(one.name)} REFRESH PUBLICATION;`))],
  ];
  return h("section", { class: "card", id: "facts" }, h("h2", null, "Details"), h("dl", { class: "facts" }, entries.filter(Boolean).map(([label, value]) => pair(label, value))));
}

function conflicts(seen, person) {
  const counts = Object.entries(seen.conflict_counts);
  if (!seen.conflicts.length && !counts.length) return null;
  return section("Conflicts",
    counts.length > 0 && h("p", { class: "quiet" }, counts.map(([type, number]) => `${count(number)} ${type}`).join(", ")),
    list(["Time", "Table", "Conflict", "Key", "Transaction", "What was done"], seen.conflicts.map((one) => [
      moment(one.last_detected), one.table, one.index ? `${one.type} (${one.index})` : one.type, keyWords(one),
      `${one.remote_xid} at ${one.finish_lsn}`,
      one.statement === null ? `${one.resolution} (${one.policy})` : h("span", null, `stopped, ${plural(one.occurrences, "attempt")}. To skip it: `, code(one.statement), skipButton(seen, person, one)),
    ])));
}

function keyWords(one) {
  return one.key_columns === null ? "the whole row" : one.key_columns.join(", ");
}

function transactions(seen) {
  const open = seen.open_transactions;
  if (!open.streamed.length && !open.prepared.length && !open.waiting_for) return null;
  return section("Open transactions",
    open.waiting_for && h("p", { class: "tone-busy" }, `The worker waits for ${open.waiting_for}.`),
    list(["Transaction", "Since", "Size", "Where"], [
      ...open.streamed.map((one) => [one.xid, seconds(one.age), `${plural(one.changes, "change")}, ${bytes(one.bytes)}`, one.worker === null ? "kept on disk until it ends" : `applied by parallel worker ${one.worker}`]),
      ...open.prepared.map((one) => [one.gid, seconds(one.age), "–", `prepared, on the publisher “${one.publisher_gid}”`]),
    ]));
}

function quarantine(seen, person) {
  if (!seen.quarantined.length) return null;
  return section("Quarantine", list(["Position", "Since", "Tables", "Changes", "Reason"], seen.quarantined.map((one) => [
    one.finish_lsn, moment(one.parked), one.relations.join(", "), count(one.changes), one.error ?? `depends on ${one.depends_on.join(", ")}`,
  ])), retryButton(seen, person));
}

function sequences(seen) {
  if (!seen.sequences.length) return null;
  return section("Sequences", list(["Sequence", "State", "Position"], seen.sequences.map((one) => [one.sequence, one.problem ?? one.state, one.lsn ?? "–"])));
}

function steps(seen) {
  if (!seen.steps.length) return null;
  return section("Steps of the move", list(["Command", "Step", "Began", "Result"], seen.steps.map((one) => [
    one.command, one.step, moment(one.began), one.error ?? (one.ended === null ? "running" : `done at ${clock(one.ended)}`),
  ])));
}

function repairs(seen) {
  const last = seen.verification;
  if (!seen.repaired.length && last === null) return null;
  return section("Comparisons and repairs",
    last && h("p", { class: "quiet" }, `Last comparison with track_ranges: ${moment(last.began)}, ${last.ended ? `${plural(last.same, "table")} without a difference` : "not ended"}.`),
    seen.repaired.length > 0 && list(["Last change", "Table", "Command", "Rows", "Role"], seen.repaired.map((one) => [moment(one.repaired_at), one.table, one.command, count(one.rows), one.role])));
}

function audit(seen) {
  if (!seen.actions.length) return null;
  return section("Actions", list(["Began", "Who", "Action", "Result"], seen.actions.map((one) => [
    moment(one.began), one.who, [one.action, ...Object.values(one.arguments).flat()].join(" "), one.result === null ? "not ended" : [one.result, summaryWords(one.summary)].filter(Boolean).join(": "),
  ])));
}

function list(headings, rows) {
  return h("div", { class: "scroll" }, h("table", null,
    h("thead", null, h("tr", null, headings.map((heading) => h("th", { scope: "col" }, heading)))),
    h("tbody", null, rows.map((cells) => h("tr", null, cells.map((cell, index) => h("td", { "data-label": headings[index] }, cell)))))));
}

// --- the tables of a subscription -------------------------------------------------------------------

function tableSection(seen, tables) {
  const { page, query } = tables;
  return h("section", { class: "card", id: "tables" }, h("h2", null, "Tables"),
    h("div", { class: "filters" },
      h("input", { type: "search", id: "search", placeholder: "Search tables", "aria-label": "Search tables", oninput: (event) => tables.ask({ search: event.target.value, offset: 0 }) }),
      h("div", { class: "chips", role: "group", "aria-label": "State" },
        chip("all", seen.summary.tables, query.state === "", () => tables.ask({ state: "", offset: 0 })),
        Object.entries(seen.table_counts).sort(([one], [other]) => TABLE_STATES.indexOf(one) - TABLE_STATES.indexOf(other))
          .map(([state, number]) => chip(state, number, query.state === state, () => tables.ask({ state, offset: 0 }))))),
    page === null ? h("p", { class: "quiet" }, "Reading the tables …") : [tableRows(page, tables), pager(page, tables)]);
}

function chip(state, number, pressed, onclick) {
  return h("button", { type: "button", class: "chip", "aria-pressed": String(pressed), onclick }, state, h("span", null, count(number)));
}

function tableRows(page, tables) {
  const { query } = tables;
  const heading = (label, key) => h("th", { scope: "col", "aria-sort": query.sort === key ? (query.descending ? "descending" : "ascending") : "none" },
    h("button", { type: "button", class: "sort", onclick: () => tables.ask({ sort: key, descending: query.sort === key && !query.descending, offset: 0 }) }, label));
  return h("div", { class: "scroll" }, h("table", { class: "tables" },
    h("thead", null, h("tr", null, heading("Table", "name"), heading("State", "state"), h("th", { scope: "col" }, "Progress"), heading("Rows", "rows"), heading("Size", "bytes"))),
    h("tbody", null, page.rows.map((one) => h("tr", { class: one.error ? "failed" : null },
      h("td", { "data-label": "Table" }, one.table),
      h("td", { "data-label": "State" }, h("span", { class: `dot state-${one.state.replaceAll(" ", "-")}` }), one.activity ?? one.state, one.error && h("span", { class: "error" }, one.error, one.error_hint.length > 0 && h("span", { class: "hint" }, hintWords(one.error_hint)))),
      h("td", { "data-label": "Progress" }, typeof one.percent === "number" ? h("span", { class: "progress" }, bar(one.percent / 100, `copy of ${one.table}`), percent(one.percent / 100), one.seconds_left ? `, ${seconds(one.seconds_left)} left` : "") : ""),
      h("td", { "data-label": "Rows", class: "number" }, one.copy_rows ? count(one.copy_rows) : ""),
      h("td", { "data-label": "Size", class: "number" }, one.copy_bytes ? bytes(one.copy_bytes) : ""))))));
}

function pager(page, tables) {
  const last = page.offset + page.rows.length;
  return h("div", { class: "pager" },
    h("span", { class: "quiet", role: "status" }, page.matching ? `${count(page.offset + 1)}–${count(last)} of ${plural(page.matching, "table")}` : "No table matches."),
    h("button", { type: "button", disabled: page.offset === 0, onclick: () => tables.ask({ offset: Math.max(0, page.offset - 50) }) }, "Previous"),
    h("button", { type: "button", disabled: last >= page.matching, onclick: () => tables.ask({ offset: page.offset + 50 }) }, "Next"));
}
