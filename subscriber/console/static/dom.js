// Elements made of text only: no string is ever parsed as HTML, so names and errors of a publisher stay text.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "path", "line", "text", "circle", "rect", "g"]);

// Invisible characters, and those that change the direction of text: as the command does, see display.py.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]/gu;
const NAMED = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };

/** Return text with an escape for each invisible character. */
export function printable(text) {
  return text.replace(UNSEEN, (character) => {
    const code = character.codePointAt(0);
    if (character in NAMED) return NAMED[character];
    return code < 256 ? `\\x${code.toString(16).toUpperCase().padStart(2, "0")}` : `\\u${code.toString(16).toUpperCase().padStart(4, "0")}`;
  });
}

/** Return an element with attributes, properties that begin with "on", and children. null and false are left out. */
export function h(tag, attributes, ...children) {
  const element = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : printable(String(child)));
  }
  return element;
}

const HANDLERS = ["onclick", "oninput", "onchange", "onsubmit", "onpointermove", "onpointerleave", "onkeydown"];

/** Make the children of `live` equal to those of `next`. Elements that stay keep the focus, the selection and the scroll. */
export function update(live, next) {
  const old = [...live.childNodes];
  const wanted = [...next.childNodes];
  wanted.forEach((node, index) => {
    const present = old[index];
    if (present === undefined) live.append(node);
    else if (!isAlike(present, node)) present.replaceWith(node);
    else if (node.nodeType === Node.TEXT_NODE) {
      if (present.data !== node.data) present.data = node.data;
    } else {
      updateElement(present, node);
      update(present, node);
    }
  });
  old.slice(wanted.length).forEach((node) => node.remove());
}

function isAlike(one, other) {
  return one.nodeType === other.nodeType && one.nodeName === other.nodeName && one.id === other.id;
}

function updateElement(live, next) {
  for (const { name } of [...live.attributes]) if (name !== "data-tip" && !next.hasAttribute(name)) live.removeAttribute(name);
  for (const { name, value } of next.attributes) if (live.getAttribute(name) !== value) live.setAttribute(name, value);
  for (const handler of HANDLERS) if (live[handler] !== next[handler]) live[handler] = next[handler];
}
