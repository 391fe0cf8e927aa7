// The page: a chat on the left, the system on the right. The API key stays in this tab.

import { startChat } from "/chat.js";
import { announce, at, authorized, say } from "/dom.js";
import { show } from "/system.js";

const POLL_MS = 1000;
const DEADLINE_MS = 5000;

async function poll() {
  let problem = "";
  try {
    const response = await fetch("/system", { headers: authorized(), signal: AbortSignal.timeout(DEADLINE_MS) });
    if (response.status === 401) return askForKey();
    if (!response.ok) throw new Error(`status ${response.status}`);
    show(await response.json());
  } catch (error) {
    problem = `The router does not answer, this is how it was: ${error.message}`;
  }
  report(problem);
  setTimeout(poll, POLL_MS);
}

function report(problem) {
  if (at("system-problem").textContent === problem) return;
  say("system-problem", problem);
  at("system").classList.toggle("stale", problem !== "");
  announce(problem || "The router answers again.");
}

function askForKey() {
  say("key-problem", sessionStorage.getItem("key") ? "The router does not know this key." : "");
  at("key-form").hidden = false;
  at("key").focus(); // which speaks the problem, too
  at("key").select();
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", at("key").value);
  at("key-form").hidden = true;
  at("prompt").focus();
  poll();
});

startChat();
poll();
