// The live state of the system, as GET /system tells it.

import { at, drawing, element, keyed, make, say } from "/dom.js";
import { plot } from "/plot.js";

const TITLES = { ttft: "TTFT", itl: "ITL", handoff_gap: "Hand-off gap" };
const TAKEN = ["owned", "quarantined", "cached"];

export function show(system) {
  say("model", system.model);
  const decode = system.workers.filter((one) => one.role === "decode");
  at("totals").replaceChildren(
    total("Requests running", system.requests.running),
    total("Requests waiting", system.requests.waiting),
    total("Hand-offs under way", sum(decode, (one) => one.sequences?.reserved ?? 0)),
  );
  at("workers").replaceChildren(
    ...system.workers.map(worker), ...system.unresolved.map((name) => make("li", "", `${name} has no address`)));
  at("plots").replaceChildren(
    ...Object.entries(TITLES).map(([kind, title]) => plot(title, system.percentiles_ms[kind])));
}

function sum(items, value) {
  return items.reduce((total, item) => total + value(item), 0);
}

function total(name, count) {
  return make("div", "", make("dt", "", name), make("dd", "", String(count)));
}

function worker(told) {
  const state = make("span", `state state-${told.state}`, told.state);
  const item = make("li", "", make("div", "worker", `${told.role} ${told.address} `, state));
  item.dataset.address = told.address;
  if (told.problem) item.append(make("div", "soft small", told.problem));
  if (told.blocks) item.append(bar(told.blocks), words("KV blocks", told.blocks, TAKEN));
  if (told.sequences) item.append(words("Sequences", told.sequences, []));
  return item;
}

function words(title, byState, drawn) {
  const parts = Object.entries(byState).map(([state, count]) => [part(state, count, drawn.includes(state)), " "]);
  return make("div", "soft small", `${title}: `, ...parts.flat());
}

function part(state, count, isDrawn) {
  const text = `${count} ${state}`;
  return isDrawn ? keyed(state, text) : make("span", "pair", text);
}

// Which part of the pool is taken, and for what.
function bar(blocks) {
  const svg = drawing("blocks", sum(Object.values(blocks), (count) => count), 1);
  let x = 0;
  for (const state of TAKEN) {
    svg.append(element("rect", { class: state, x, width: blocks[state], height: 1 }));
    x += blocks[state];
  }
  return svg;
}
