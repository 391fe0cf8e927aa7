// Small SVG plots of percentiles over time.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 60;

// entries: one per slice, {p50, p95} in ms or null where nothing was measured.
export function plot(title, entries) {
  const figure = document.createElement("figure");
  const caption = document.createElement("figcaption");
  caption.textContent = `${title}: ${latest(entries)}`;
  figure.append(caption, drawing(entries));
  return figure;
}

function latest(entries) {
  const last = entries.findLast((entry) => entry !== null);
  return last ? `p50 ${last.p50.toFixed(1)} ms, p95 ${last.p95.toFixed(1)} ms` : "nothing measured";
}

function drawing(entries) {
  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" });
  svg.setAttribute("aria-hidden", "true"); // the caption says it in words
  const top = Math.max(1e-9, ...entries.map((entry) => entry?.p95 ?? 0));
  entries.forEach((entry, index) => {
    for (const name of entry ? ["p95", "p50"] : []) svg.append(bar(name, index, entries.length, entry[name] / top));
  });
  return svg;
}

function bar(name, index, count, share) {
  const width = WIDTH / count;
  const height = Math.max(1, share * HEIGHT);
  return element("rect", {
    class: name, x: index * width + 1, y: HEIGHT - height, width: width - 2, height, "stroke-width": 0,
  });
}

function element(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}
