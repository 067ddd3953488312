// Questions to the server: one at a time for each place on the page, the last one wins, and answers are remembered.
import { element, $ } from "/assets/format.js";

const MOST_KEPT = 60;
const kept = new Map();

// ---- what runs: after a second the page says so, with the time and a way to stop it

const SHOWN_AFTER_MS = 1000;
const WORK = { predict: "Writing", view: "Predicting", room: "Measuring the memory", compare: "Comparing", plan: "Planning", simulate: "Simulating", train: "Searching strategies", hall: "Simulating", power: "Following the power", kernel: "Looking into the kernel", csv: "Writing", figure: "Drawing", report: "Writing the report" };
const running = new Map(); // AbortController -> { name, since }
let ticking = 0;

function showWork() {
  const now = performance.now(), long = [...running.values()].filter((w) => now - w.since > SHOWN_AFTER_MS);
  $("working").hidden = !long.length;
  if (long.length) {
    const names = [...new Set(long.map((w) => w.name))], since = Math.min(...long.map((w) => w.since));
    $("working-said").textContent = `${names.join(", ")}: ${Math.floor((now - since) / 1000)} s`;
  }
  if (!running.size) { clearInterval(ticking); ticking = 0; }
}

export const STOPPED = "Stopped. Change something, or ask again.";
export function stopAll() { for (const controller of running.keys()) controller.abort(); }

export async function post(path, body) {
  const controller = new AbortController();
  running.set(controller, { name: WORK[path.split("/").pop()] || "Working", since: performance.now() });
  ticking ||= setInterval(showWork, 250);
  try {
    return await ask(path, body, controller.signal);
  } catch (error) {
    throw error.name === "AbortError" ? new Error(STOPPED) : error;
  } finally {
    running.delete(controller);
    showWork();
  }
}

async function ask(path, body, signal) {
  const answer = await fetch(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal });
  if (answer.ok) return answer;
  let text = `the server answered ${answer.status}.`;
  try { text = (await answer.json()).error || text; } catch { /* not JSON: keep the plain sentence */ }
  throw new Error(text);
}

export const known = (path, body) => kept.get(path + JSON.stringify(body));

export async function fetchAnswer(path, body) {
  const key = path + JSON.stringify(body);
  if (!kept.has(key)) {
    const found = await (await post(path, body)).json();
    kept.set(key, found);
    if (kept.size > MOST_KEPT) kept.delete(kept.keys().next().value);
  }
  return kept.get(key);
}

export class Slot {
  // ``ask()`` gives [path, body] or null; ``done(answer, error)`` is told when there is one, ``busy(true)`` when one is on its way.
  constructor(ask, done, busy = () => {}, waitMs = 0) {
    Object.assign(this, { ask, done, busy, waitMs, running: false, again: false, timer: 0 });
  }

  refresh() {
    clearTimeout(this.timer);
    const asked = this.ask();
    if (!asked) return;
    const found = known(...asked);
    if (found) { this.done(found, null); return; }
    this.busy(true);
    this.timer = setTimeout(() => this.run(), this.waitMs);
  }

  async run() {
    if (this.running) { this.again = true; return; }
    this.running = true;
    const asked = this.ask();
    let found = null, error = null;
    try { if (asked) found = await fetchAnswer(...asked); } catch (caught) { error = caught.message; }
    this.running = false;
    if (this.again) { this.again = false; this.refresh(); return; }
    const now = this.ask();
    if (!asked || !now || JSON.stringify(now) !== JSON.stringify(asked)) { if (now) this.refresh(); return; }
    this.busy(Boolean(error)); // under a refused question an old answer stays dimmed
    this.done(found, error);
  }
}

export function fillTile(tile, { value, of = "", note, tone = "" }) {
  tile.querySelector("b").textContent = value;
  tile.querySelector("b").classList.toggle("long", value.length > 7);
  tile.querySelector(".of").textContent = of || "\u00a0";
  const below = tile.querySelector("p");
  if (below && note !== undefined) { below.textContent = note || "\u00a0"; below.title = note; }
  tile.classList.remove("good", "bad", "warn");
  if (tone) tile.classList.add(tone);
}

export function tiles(into, rows) {
  into.replaceChildren(...rows.map((row, index) => {
    const tile = element("div", { class: index < 2 ? "tile big" : "tile" }, element("h2", {}, row.name), element("b"), element("span", { class: "of" }), element("p"));
    fillTile(tile, { ...row, note: row.note || "" });
    return tile;
  }));
}

export const notes = (into, lines) => into.replaceChildren(...lines.map((line) => element("li", {}, line)));
let fading = 0;
export function tell(text) {
  clearTimeout(fading);
  $("told").textContent = text;
  if (text) fading = setTimeout(() => { $("told").textContent = ""; }, 8000);
}

const complaints = new Map();
export function complain(place, text) {
  if (text) complaints.set(place, text); else complaints.delete(place);
  const shown = [...new Set(complaints.values())];
  const now = [...$("errors").children].map((p) => p.textContent);
  if (JSON.stringify(shown) !== JSON.stringify(now)) $("errors").replaceChildren(...shown.map((line) => element("p", {}, line)));
  if (text) pointAt(place, text); else clearField(place);
}
export const clearComplaints = () => {
  for (const place of complaints.keys()) clearField(place);
  complaints.clear();
  $("errors").replaceChildren();
};

// ---- the field that a refusal is about

const NAMES = { prompt: "seq", output: "tokens", positions: "seq", "power limit": "power_limit_w", clock: "clock_hz", rate: "rate_per_s", ttft: "ttft_s", tpot: "tpot_s", precision: "precision", memory: "gpu", headroom: "headroom", "site power": "site_power_w" };
const marked = new Map(); // place of a complaint -> the field

function findField(text) {
  for (const [, word] of text.matchAll(/(?:^|[:.] |- `\$\.|\$\.)([A-Za-z_ ]+?)`?(?:: | of )/g)) {
    const name = word.trim().toLowerCase(), key = NAMES[name] || NAMES[name.replaceAll("_", " ")] || name.replaceAll(" ", "_");
    for (const end of ["", "_hz", "_w", "_s", "_per_s", "_c"]) {
      const found = [...document.querySelectorAll("[data-bind]")].find((c) => c.dataset.bind.endsWith(`.${key}${end}`) && !c.closest("[hidden]"));
      if (found) return found;
    }
    if (["model", "gpu"].includes(key) && $(key)) return $(key);
  }
  return null;
}

export function markField(place, field, text) {
  clearField(place);
  if (!field) return;
  const note = element("span", { class: "problem", id: `problem-${place}` }, text);
  const folded = field.closest("details");
  if (folded) folded.open = true;
  field.setAttribute("aria-invalid", "true");
  field.setAttribute("aria-describedby", note.id);
  (field.closest("label") || field.parentElement).append(note);
  marked.set(place, { field, note });
}

function pointAt(place, text) { markField(place, findField(text), text); }

export function clearField(place) {
  const mark = marked.get(place);
  if (!mark) return;
  mark.note.remove();
  mark.field.removeAttribute("aria-invalid");
  mark.field.removeAttribute("aria-describedby");
  marked.delete(place);
}
