// Small plots of percentiles over time.

import { drawing, element, keyed, make } from "/dom.js";

const WIDTH = 300;
const HEIGHT = 60;
const NAMES = ["p95", "p50"]; // the smaller one is drawn over the other

// entries: one per slice, {p50, p95} in ms or null where nothing was measured.
export function plot(title, entries) {
  const top = Math.max(0, ...entries.map((entry) => entry?.p95 ?? 0));
  const axis = make("div", "axis soft small", make("span", "", "5 min ago"), make("span", "", "now"));
  return make(
    "figure", "", caption(title, entries), make("div", "top soft small", top ? `${ms(top)}` : "–"),
    bars(entries, top), axis);
}

export function ms(value) {
  return value < 1000 ? `${value.toFixed(1)} ms` : `${(value / 1000).toFixed(2)} s`;
}

function caption(title, entries) {
  const last = entries.findLast((entry) => entry !== null);
  const values = last
    ? ["p50", "p95"].flatMap((name) => [keyed(name, `${name} ${ms(last[name])}`), " "])
    : ["nothing measured"];
  return make("figcaption", "", make("strong", "", title), ...values);
}

function bars(entries, top) {
  const svg = drawing("plot", WIDTH, HEIGHT);
  entries.forEach((entry, index) => {
    for (const name of entry ? NAMES : []) svg.append(bar(name, index, entries.length, entry[name] / top));
  });
  return svg;
}

function bar(name, index, count, share) {
  const width = WIDTH / count;
  const height = Math.max(1, share * HEIGHT);
  return element("rect", { class: name, x: index * width + 1, y: HEIGHT - height, width: width - 2, height });
}
