// Numbers and times for people. The server decides what they mean.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const NONE = "–";

export function bytes(size) {
  if (size === null || size === undefined) return NONE;
  let number = Math.abs(size);
  let unit = 0;
  while (number >= 1024 && unit < UNITS.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${size < 0 ? "−" : ""}${unit === 0 || number >= 100 ? Math.round(number) : number.toFixed(1)} ${UNITS[unit]}`;
}

export function count(number) {
  if (number === null || number === undefined) return NONE;
  return Math.abs(number) < 10 && number % 1 !== 0 ? number.toFixed(1) : Math.round(number).toLocaleString("en-US");
}

export function plural(number, thing, things = `${thing}s`) {
  return `${count(number)} ${number === 1 ? thing : things}`;
}

export function seconds(time) {
  if (time === null || time === undefined) return NONE;
  if (time < 1) return time < 0.05 ? "0 s" : `${Math.round(time * 1000)} ms`;
  const whole = Math.round(time);
  const parts = [[Math.floor(whole / 86400), "d"], [Math.floor(whole / 3600) % 24, "h"], [Math.floor(whole / 60) % 60, "min"], [whole % 60, "s"]];
  const first = parts.findIndex(([number]) => number);
  return parts.slice(first, first + 2).filter(([number]) => number).map(([number, unit]) => `${number} ${unit}`).join(" ");
}

export function percent(share) {
  return share === null ? NONE : `${Math.floor(share * 100)} %`;
}

export function clock(time) {
  return time === null ? NONE : new Date(time).toLocaleTimeString("en-GB");
}

export function moment(time) {
  if (time === null) return NONE;
  const date = new Date(time);
  const day = date.toDateString() === new Date().toDateString() ? "" : `${date.toLocaleDateString("en-CA")} `;
  return day + date.toLocaleTimeString("en-GB");
}
