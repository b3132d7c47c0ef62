// Line charts as SVG. Points lie on a scale of time, and a value that is not known leaves a gap.

import { h } from "./dom.js";
import { clock } from "./format.js";

const WIDTH = 600;
const HEIGHT = 150;
const TOP = 10;
const BOTTOM = 22;
const HOUR = 3600;

/** Return a small graph without scales. */
export function sparkline(values, label) {
  const most = Math.max(1, ...values.filter((value) => value !== null));
  const step = 100 / Math.max(values.length - 1, 11);
  const points = values.map((value, index) => [100 - (values.length - 1 - index) * step, value === null ? null : 22 - (value / most) * 20]);
  return h("svg", { class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", role: "img", "aria-label": label },
    h("path", { class: "area", d: area(points, 23) }), h("path", { class: "line", d: line(points) }));
}

/**
 * Return a chart of the last hour with its title and its present value.
 * `limit` is a value that is drawn as a line of its own, if it is near enough to be seen.
 */
export function chart({ id, title, times, values, format, limit = null, limitName = "" }) {
  const known = values.filter((value) => value !== null);
  const highest = Math.max(0, ...known);
  const shownLimit = limit !== null && limit < Math.max(highest * 4, 1) ? limit : null;
  const top = nice(Math.max(highest, shownLimit ?? 0), format === "bytes");
  const last = times.at(-1) ?? 0;
  const span = Math.min(HOUR, Math.max(120, last - (times[0] ?? last)));
  const x = (time) => WIDTH - ((last - time) / span) * WIDTH;
  const y = (value) => TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM);
  const points = times.map((time, index) => [x(time), values[index] === null ? null : y(values[index])]).filter(([left]) => left >= 0);
  const now = values.at(-1) ?? null;
  const summary = known.length ? `${title}: now ${format(now)}, highest ${format(highest)}` : `${title}: no values yet`;
  const svg = h("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": summary },
    [0, 0.5, 1].map((share) => h("line", { class: "grid", x1: 0, x2: WIDTH, y1: y(top * share), y2: y(top * share) })),
    shownLimit !== null && h("line", { class: "limit", x1: 0, x2: WIDTH, y1: y(shownLimit), y2: y(shownLimit) }),
    h("path", { class: "area", d: area(points, HEIGHT - BOTTOM) }),
    h("path", { class: "line", d: line(points) }));
  const tip = h("span", { class: "tip", "aria-hidden": "true" });
  const plot = h("div", {
    class: "plot",
    onpointermove: (event) => showTip(event, times, values, last, span, format),
    onpointerleave: (event) => event.currentTarget.removeAttribute("data-tip"),
  }, svg, tip,
    known.length > 0 && [1, 0.5].map((share) => h("span", { class: `scale scale-${share === 1 ? "top" : "middle"}`, "aria-hidden": "true" }, format(top * share))),
    shownLimit !== null && h("span", { class: "scale scale-limit", "aria-hidden": "true" }, limitName),
    h("span", { class: "scale scale-start", "aria-hidden": "true" }, times.length ? clock((last - span) * 1000) : ""),
    h("span", { class: "scale scale-end", "aria-hidden": "true" }, times.length ? clock(last * 1000) : ""));
  return h("figure", { class: "chart", id }, h("figcaption", null, title, h("strong", null, format(now))), plot);
}

function showTip(event, times, values, last, span, format) {
  const plot = event.currentTarget;
  const box = plot.getBoundingClientRect();
  const time = last - (1 - (event.clientX - box.left) / box.width) * span;
  let nearest = -1;
  times.forEach((one, index) => {
    if (nearest < 0 || Math.abs(one - time) < Math.abs(times[nearest] - time)) nearest = index;
  });
  if (nearest < 0) return;
  plot.setAttribute("data-tip", "");
  plot.querySelector(".tip").textContent = `${clock(times[nearest] * 1000)}  ${format(values[nearest])}`;
}

function line(points) {
  let pen = "M";
  const parts = [];
  for (const [x, y] of points) {
    if (y === null) pen = "M";
    else {
      parts.push(`${pen}${x.toFixed(1)} ${y.toFixed(1)}`);
      pen = "L";
    }
  }
  return parts.join("");
}

function area(points, base) {
  const runs = [[]];
  for (const point of points) {
    if (point[1] === null) runs.push([]);
    else runs.at(-1).push(point);
  }
  return runs.filter((run) => run.length > 1).map((run) => `${line(run)}L${run.at(-1)[0].toFixed(1)} ${base}L${run[0][0].toFixed(1)} ${base}Z`).join("");
}

/** Return a round number that is not less than `value`. */
function nice(value) {
  if (value <= 0) return 1;
  const power = value >= 1024 ? 1024 ** Math.floor(Math.log(value) / Math.log(1024)) : 1;
  const scaled = value / power;
  const ten = 10 ** Math.floor(Math.log10(scaled));
  return [1, 2, 4, 5, 10].map((step) => step * ten).find((step) => step >= scaled) * power;
}
