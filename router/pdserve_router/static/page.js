// The page: a chat on the left, the system on the right. The API key stays in this tab.

import { plot } from "/plot.js";

const POLL_MS = 1000;
const DEADLINE_MS = 5000;
const TITLES = { ttft: "TTFT", itl: "ITL", handoff_gap: "Hand-off gap" };
const at = (id) => document.getElementById(id);
const messages = [];
let model = "";
let running = null;

function headers() {
  const key = sessionStorage.getItem("key");
  return key ? { authorization: `Bearer ${key}` } : {};
}

function make(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}

function say(id, text) {
  if (at(id).textContent !== text) at(id).textContent = text;
}

// ---- system

async function poll() {
  try {
    const response = await fetch("/system", { headers: headers(), signal: AbortSignal.timeout(DEADLINE_MS) });
    if (response.status === 401) return askForKey();
    if (!response.ok) throw new Error(`status ${response.status}`);
    show(await response.json());
    say("system-status", "");
  } catch (error) {
    say("system-status", `The router does not answer: ${error.message}`);
  }
  setTimeout(poll, POLL_MS);
}

function askForKey() {
  say("key-problem", sessionStorage.getItem("key") ? "The router does not know this key." : "");
  at("key-form").hidden = false;
  at("key").focus();
}

function show(system) {
  model = system.model;
  say("model", model);
  const transfers = sum(system.workers.filter((w) => w.role === "decode"), (w) => w.sequences?.reserved ?? 0);
  const { running, waiting } = system.requests;
  say("requests", `Requests: ${running} running, ${waiting} waiting. Transfers in flight: ${transfers}`);
  at("workers").replaceChildren(
    ...system.workers.map(worker), ...system.unresolved.map((name) => make("li", "", `${name} has no address`)));
  at("plots").replaceChildren(
    ...Object.entries(TITLES).map(([kind, title]) => plot(title, system.percentiles_ms[kind])));
}

function sum(items, value) {
  return items.reduce((total, item) => total + value(item), 0);
}

function worker(told) {
  const item = make("li", "", `${told.role} ${told.address} `);
  item.dataset.address = told.address;
  item.append(make("span", `state state-${told.state}`, told.state));
  if (told.problem) item.append(make("div", "soft", told.problem));
  if (told.sequences) item.append(make("div", "soft", `Sequences: ${counts(told.sequences)}`));
  if (told.blocks) item.append(make("div", "soft", `KV blocks: ${counts(told.blocks)}`));
  return item;
}

function counts(byState) {
  return Object.entries(byState).map(([state, count]) => `${count} ${state}`).join(", ");
}

// ---- chat

async function chat(text) {
  messages.push({ role: "user", content: text });
  at("messages").append(make("p", "message user", text));
  const shown = make("p", "message", "");
  at("messages").append(shown);
  running = new AbortController();
  busy(true);
  try {
    await answer(shown);
    say("chat-status", "");
  } catch (error) {
    say("chat-status", error.name === "AbortError" ? "Stopped." : `Failed: ${error.message}`);
  }
  if (shown.textContent) messages.push({ role: "assistant", content: shown.textContent });
  else messages.pop();
  busy(false);
}

function busy(isBusy) {
  at("send").disabled = isBusy;
  at("stop").disabled = !isBusy;
  at("messages").setAttribute("aria-busy", String(isBusy));
  if (isBusy) say("chat-status", "The model answers …");
}

async function answer(shown) {
  const body = JSON.stringify({ model, messages, stream: true, timing: true });
  const response = await fetch("/v1/chat/completions", {
    method: "POST", body, headers: { ...headers(), "content-type": "application/json" }, signal: running.signal,
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  let isWhole = false;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") isWhole = true;
    else take(JSON.parse(data), shown);
  }
  if (!isWhole) throw new Error("the answer was cut off");
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const blocks = (rest + part.value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) if (block.startsWith("data: ")) yield block.slice(6);
  }
}

function take(event, shown) {
  if (event.error) throw new Error(event.error.message);
  shown.textContent += event.choices[0]?.delta?.content ?? "";
  if (event.pdserve) shown.after(make("p", "timing", timing(event.pdserve)));
  at("messages").scrollTop = at("messages").scrollHeight;
}

function timing(block) {
  const times = block.token_times_ms;
  const spent = times.at(-1) - times[0];
  const rate = times.length > 1 && spent > 0 ? `${(1000 * (times.length - 1) / spent).toFixed(1)} tokens/s` : "–";
  return `TTFT ${ms(block.ttft_ms)} · ${rate} · hand-off gap ${ms(block.handoff_gap_ms)}`;
}

function ms(value) {
  return value === null ? "–" : `${value.toFixed(1)} ms`;
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", at("key").value);
  at("key-form").hidden = true;
  at("prompt").focus();
  poll();
});
at("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("prompt").value.trim();
  if (!text || running !== null && !at("stop").disabled) return;
  at("prompt").value = "";
  chat(text);
});
at("stop").addEventListener("click", () => running?.abort());
at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("chat-form").requestSubmit();
});
poll();
