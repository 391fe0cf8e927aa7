// What both halves of the page build with.

const SVG = "http://www.w3.org/2000/svg";

export const at = (id) => document.getElementById(id);

export function make(name, className, ...content) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...content);
  return made;
}

export function say(id, text) {
  if (at(id).textContent !== text) at(id).textContent = text;
}

export function announce(text) {
  say("announcement", text);
}

export function drawing(className, width, height) {
  const svg = element("svg", { class: className, viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none" });
  svg.setAttribute("aria-hidden", "true"); // there are words for it beside it
  return svg;
}

export function element(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// Words beside a square of the colour that a drawing uses for them.
export function keyed(className, text) {
  const square = drawing("key", 1, 1);
  square.append(element("rect", { class: className, width: 1, height: 1 }));
  return make("span", "pair", square, text);
}

// Bears the key of this tab, if one was given.
export function authorized(headers = {}) {
  const apiKey = sessionStorage.getItem("key");
  return apiKey ? { ...headers, authorization: `Bearer ${apiKey}` } : headers;
}
