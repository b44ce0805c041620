// The shell: tabs, theme, state in the URL, calls of the server or recorded answers, and saving.
//
// A panel is a module `panel_NAME.js` that exports {title, defaults, mount(element, state, api, onState)}:
//   defaults   every field of its state with its default; the URL holds only what differs
//   mount      builds the panel for a state; may return {unmount()}
//   api        await api(name, request) gives the answer, or throws an Error with the message to show;
//              api.saved: recorded answers alone; api.has(name, request): whether this one can be given
//   onState    to be called with each new state
import { button, h, refusal } from "lab/kit";

const KEPT = 120; // recorded answers of a page to save, the newest
const SLOW = 250; // milliseconds of an answer after which the page says that it computes

let facts, mounted, shown, slowCalls = 0, writing;
const panels = new Map();
const recorded = new Map();

export async function start() {
  facts = JSON.parse(document.getElementById("facts").textContent);
  for (const [call, request, answer] of facts.answers ?? []) recorded.set(key(call, request), [call, request, answer]);
  const modules = await Promise.all(facts.panels.map((name) => import(`lab/panel_${name}`)));
  facts.panels.forEach((name, i) => panels.set(name, modules[i]));
  setTheme(remembered());
  buildTabs();
  buildTools();
  if (facts.saved) sayHowSaved();
  if (facts.saved && facts.hash && location.hash.length < 2) history.replaceState(null, "", `#${facts.hash}`);
  addEventListener("hashchange", open);
  await open();
}

// ---- panels and state -----------------------------------------------------------------------------------------------

async function open() {
  const [name, query] = readHash();
  const panel = panels.get(name);
  const element = document.getElementById("panel");
  if (mounted?.unmount) mounted.unmount();
  shown = name;
  document.title = `${panel.title} · shoal lab`;
  for (const tab of document.querySelectorAll("#tabs a")) {
    tab.setAttribute("aria-selected", tab.dataset.panel === name);
    tab.tabIndex = tab.dataset.panel === name ? 0 : -1;
    if (tab.dataset.panel === name) tab.parentElement.scrollLeft = tab.offsetLeft - tab.parentElement.offsetLeft - 60; // on a phone
  }
  element.replaceChildren();
  element.className = `panel ${name}`;
  try {
    const state = { ...structuredClone(panel.defaults), ...decode(query, panel.defaults) };
    mounted = await panel.mount(element, state, api, (changed) => writeState(name, changed, panel.defaults));
  } catch (error) {
    element.append(refusal(error));
    if (!error.refused) console.error(error);
  }
}

function readHash() {
  const [name, query = ""] = location.hash.slice(1).split("?");
  return panels.has(name) ? [name, query] : [facts.panels[0], ""];
}

// Waits until the panel has asked for its answer: a browser takes several milliseconds to change the URL.
function writeState(name, state, defaults) {
  clearTimeout(writing);
  writing = setTimeout(() => {
    if (name !== shown) return;
    const query = encode(state, defaults);
    history.replaceState(null, "", `#${name}${query ? `?${query}` : ""}`);
  });
}

// Fields that differ from their default, as name=value; texts as they are, other values as JSON.
export function encode(state, defaults) {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    if (JSON.stringify(value) === JSON.stringify(defaults[name])) continue;
    words.set(name, typeof defaults[name] === "string" ? value : JSON.stringify(value));
  }
  return words.toString();
}

export function decode(query, defaults) {
  const found = {};
  for (const [name, word] of new URLSearchParams(query)) {
    if (!(name in defaults)) continue;
    try { found[name] = typeof defaults[name] === "string" ? word : JSON.parse(word); } catch { /* not of ours */ }
  }
  return found;
}

function buildTabs() {
  const tabs = document.getElementById("tabs");
  tabs.append(...facts.panels.map((name) =>
    h("a", { href: `#${name}`, role: "tab", "data-panel": name, "aria-controls": "panel" }, panels.get(name).title)));
  tabs.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const all = [...tabs.children], to = all[(all.indexOf(event.target) + step + all.length) % all.length];
    to.focus();
    to.click();
  });
}

// ---- calls ----------------------------------------------------------------------------------------------------------

async function api(name, request = {}) {
  if (facts.saved) {
    const found = recorded.get(key(name, request));
    if (!found) throw refuse("This saved page has no answer for that choice.\nshoal lab computes any other.");
    return structuredClone(found[2]);
  }
  const response = await whileBusy(() => fetch(`api/${name}`, { method: "POST", body: JSON.stringify(request) })).catch(() => {
    throw refuse("The server has stopped.\nRun shoal lab again, and open the URL that it prints.");
  });
  const answer = await response.json().catch(() => ({ error: `${name}: status ${response.status}` }));
  if (!response.ok) throw refuse(answer.error);
  recorded.delete(key(name, request)); // the newest are at the end
  recorded.set(key(name, request), [name, request, answer]);
  if (recorded.size > KEPT) forget();
  return answer;
}

// Says that the server computes, once that takes a moment.
async function whileBusy(call) {
  let counted = 0;
  const timer = setTimeout(() => countSlow(counted = 1), SLOW);
  try { return await call(); } finally {
    clearTimeout(timer);
    countSlow(-counted);
  }
}

function countSlow(more) {
  slowCalls += more;
  document.getElementById("busy").textContent = slowCalls ? "Computing …" : "";
}

function forget() { // answers of an empty request are those of a panel's choices: they stay
  const oldest = [...recorded].find(([, [, request]]) => Object.keys(request).length);
  if (oldest) recorded.delete(oldest[0]);
}

api.has = (name, request) => !facts.saved || recorded.has(key(name, request));
Object.defineProperty(api, "saved", { get: () => facts.saved });

function refuse(message) {
  return Object.assign(new Error(message), { refused: true });
}

// The same text for equal requests, whatever the order of their fields.
function key(name, request) {
  return `${name} ${JSON.stringify(sorted(request))}`;
}

function sorted(value) {
  if (Array.isArray(value)) return value.map(sorted);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.keys(value).sort().map((name) => [name, sorted(value[name])]));
}

// ---- tools ----------------------------------------------------------------------------------------------------------

const THEMES = { auto: "◐", light: "☀", dark: "☾" };

function remembered() {
  try { return localStorage.getItem("theme") in THEMES ? localStorage.getItem("theme") : "auto"; } catch { return "auto"; }
}

function setTheme(theme) {
  document.documentElement.style.colorScheme = theme === "auto" ? "light dark" : theme;
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("theme", theme); } catch { /* no storage in this browser */ }
  dispatchEvent(new Event("themechange"));
}

function buildTools() {
  const names = Object.keys(THEMES);
  const theme = button("", () => {
    setTheme(names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length]);
    label();
  }, { id: "theme" });
  function label() {
    const now = document.documentElement.dataset.theme;
    theme.textContent = THEMES[now];
    theme.title = `Colours: ${now}`;
    theme.setAttribute("aria-label", `Colours: ${now}`);
  }
  label();
  const tools = [theme];
  if (!facts.saved) tools.unshift(button("Save page", save, { id: "save", title: "As one HTML file that opens offline" }));
  document.getElementById("tools").append(...tools);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("themechange")));
}

async function save() {
  const all = [...recorded.values()].map(([call, request, answer]) => ({ call, request, answer }));
  const response = await fetch("api/save", {
    method: "POST", body: JSON.stringify({ hash: location.hash.slice(1), recorded: all }),
  });
  const { html, error } = await response.json();
  if (error) throw refuse(error);
  const url = URL.createObjectURL(new Blob([html], { type: "text/html" }));
  h("a", { href: url, download: `shoal-lab-${shown}.html` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

function sayHowSaved() {
  const note = document.getElementById("saved");
  note.hidden = false;
  note.textContent = `A saved page with ${recorded.size} recorded answers: other choices are not computed here. `
    + "Run shoal lab for every choice.";
}
