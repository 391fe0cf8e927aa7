// The chat: messages go to the router's own API, answers stream in with their timing.

import { announce, at, authorized, make, say } from "/dom.js";
import { ms } from "/plot.js";

const messages = [];
let running = null; // what ends the answer that is streaming

export function startChat() {
  at("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = at("prompt").value.trim();
    if (!text || running) return;
    at("prompt").value = "";
    chat(text);
  });
  at("stop").addEventListener("click", () => running?.abort());
  at("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    at("chat-form").requestSubmit();
  });
}

async function chat(text) {
  messages.push({ role: "user", content: text });
  const shown = make("p", "message");
  at("messages").append(make("p", "message user", text), shown);
  scrollDown();
  begin();
  const outcome = await answer(shown).then(() => "", failure);
  if (shown.textContent) messages.push({ role: "assistant", content: shown.textContent });
  else messages.pop();
  end(outcome, shown.textContent);
}

function failure(error) {
  return error.name === "AbortError" ? "Stopped." : `Failed: ${error.message}`;
}

function begin() {
  running = new AbortController();
  at("send").disabled = true;
  at("stop").disabled = false;
  say("chat-status", "The model answers …");
  announce("The model answers.");
}

function end(outcome, text) {
  running = null;
  if (document.activeElement === at("stop")) at("prompt").focus(); // a disabled button would swallow the focus
  at("send").disabled = false;
  at("stop").disabled = true;
  say("chat-status", outcome);
  announce(`${outcome} ${text}`.trim());
}

async function answer(shown) {
  const body = JSON.stringify({ messages, stream: true, timing: true, model: at("model").textContent });
  const headers = authorized({ "content-type": "application/json" });
  const response = await fetch("/v1/chat/completions", { method: "POST", body, headers, signal: running.signal });
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
  const isAtEnd = isScrolledDown();
  shown.append(event.choices[0]?.delta?.content ?? "");
  if (event.pdserve) shown.after(make("p", "timing", timing(event.pdserve)));
  if (isAtEnd) scrollDown();
}

function isScrolledDown() {
  const { scrollTop, clientHeight, scrollHeight } = at("messages");
  return scrollTop + clientHeight > scrollHeight - 4;
}

function scrollDown() {
  at("messages").scrollTop = at("messages").scrollHeight;
}

function timing(block) {
  const times = block.token_times_ms;
  const spent = times.at(-1) - times[0];
  const rate = times.length > 1 && spent > 0 ? `${(1000 * (times.length - 1) / spent).toFixed(1)} tokens/s` : "–";
  return `TTFT ${known(block.ttft_ms)} · ${rate} · hand-off gap ${known(block.handoff_gap_ms)}`;
}

function known(value) {
  return value === null ? "–" : ms(value);
}
