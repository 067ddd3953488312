// Questions to the server: one at a time for each place on the page, the last one wins, and answers are remembered.
import { element, $ } from "/assets/format.js";

const MOST_KEPT = 60;
const kept = new Map();

export async function post(path, body) {
  const answer = await fetch(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
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
    this.busy(false);
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
}
export const clearComplaints = () => { complaints.clear(); $("errors").replaceChildren(); };
