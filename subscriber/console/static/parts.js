// Elements and words that the pages and the actions share.

import { h } from "./dom.js";
import { count, plural } from "./format.js";

export function bar(share, label) {
  return h("progress", { max: 1000, value: Math.round(share * 1000), "aria-label": label });
}

// The words of a hint, and its commands, which can be copied.
export function hintWords(parts) {
  return parts.map(([text, isCommand]) => (isCommand ? code(text) : text === "\n" ? h("br") : text));
}

/** Return the figures of a comparison or a repair in words. */
export function summaryWords(summary) {
  if (!summary) return "";
  const tables = plural(summary.tables, "table");
  const named = summary.shown.map((one) => `${one.table} (${one.note ?? Object.entries(one).filter(([, number]) => typeof number === "number" && number > 0).map(([what, number]) => `${count(number)} ${what}`).join(", ")})`).join("; ");
  const words = "repaired" in summary
    ? `${plural(summary.repaired, "row")} of ${tables} repaired${summary.complete ? "" : ", not all"}`
    : `${summary.different ? `${count(summary.different)} of ${tables} differ${summary.different === 1 ? "s" : ""}` : `${tables} without a difference`} at ${summary.lsn}`;
  return named ? `${words}: ${named}` : words;
}

export function code(text) {
  return h("code", { class: "command", role: "button", title: "copy", tabindex: 0, onclick: copy, onkeydown: press }, text);
}

// A handler that returns false would keep Tab from leaving the element.
function press(event) {
  if (event.key !== "Enter" && event.key !== " ") return;
  event.preventDefault();
  copy(event);
}

function copy(event) {
  navigator.clipboard?.writeText(event.currentTarget.textContent);
}

export function section(title, ...children) {
  return h("section", { class: "card" }, h("h2", null, title), children);
}

export function quoted(name) {
  return /^[a-z_][a-z0-9_]*$/.test(name) ? name : `"${name.replaceAll("\"", "\"\"")}"`;
}
