// Predict and Compare: the answer in six numbers, where the power goes, what a clock trades, and how two runs differ.
import { Slot, complain, fillTile, notes } from "/assets/answer.js";
import { bars, moduleLegend, powerArea, roofline, stack, tradeCurve } from "/assets/charts.js";
import { $, digitsOf, element, money, number, numbers, percent, show, showJoules } from "/assets/format.js";
import { commit, config, isList, kernelRequest, roomRequest, state, viewRequest } from "/assets/state.js";

const MOST_COLUMNS = 6;
let changed = () => {};
export const onChange = (callback) => { changed = callback; };
const view = { now: null, room: null, power: null, kernel: null };
export const currentView = () => view.now;

// What a prediction counts: tokens, pictures or runs, per second and in joules.
export function countable(v) {
  const p = v.prediction, all = (pair) => pair.map((w) => w * p.gpu_count);
  const count = p.tokens ?? p.items ?? 1;
  const word = p.tokens ? { prefill: "prompt token", train: "token" }[v.phase] || "token" : p.items ? v.item : "run";
  const [fast, slow] = [count / p.interval.latency_s[0], count / p.interval.latency_s[1]];
  return {
    count, word, perS: count / p.latency_s, perSEnds: [slow, fast], each: p.total_energy_j / count,
    eachEnds: all(p.interval.energy_j).map((j) => j / count), powerEnds: all(p.interval.power_w),
  };
}

export const predictSlot = new Slot(
  () => ["/api/view", viewRequest(config())],
  (found, error) => {
    complain("view", error);
    $("p-predict").classList.toggle("refused", Boolean(error));
    if (!found) return;
    view.now = found;
    view.room = view.power = view.kernel = null;
    for (const id of ["power", "kernel"]) { // pictures of the question before
      if (inSight) dim(id)(true);
      else $(id).replaceChildren();
    }
    $("answer").classList.remove("stale");
    drawPredict();
    if (!isList(config())) roomSlot.refresh();
    lookInside();
  },
  (busy) => $("answer").classList.toggle("stale", busy),
);
const roomSlot = new Slot(() => ["/api/room", roomRequest(config())], (found) => { view.room = found; if (found) drawAnswer(view.now); }, () => {}, 250);

// ---- power over time and a look into a kernel: asked for once they come into sight

const pictures = (at) => (found, error) => {
  view[at] = found;
  $(`${at}-said`).textContent = error || "\u00a0";
  if (found) ({ power: drawPower, kernel: drawKernel })[at](); else $(at).replaceChildren();
};
const asked = (path, body) => () => (inSight && state.tab === "predict" ? [path, body()] : null);
const dim = (id) => (busy) => $(id).closest(".card").classList.toggle("stale", busy);
const powerSlot = new Slot(asked("/api/power", () => roomless(viewRequest(config()))), pictures("power"), dim("power"), 200);
const kernelSlot = new Slot(asked("/api/kernel", () => kernelRequest(config(), Number($("kernel-which").value) || 1)), pictures("kernel"), dim("kernel"), 200);
const roomless = ({ price_per_h, electricity_per_kwh, ...rest }) => rest;
let inSight = false;
const cardsInSight = new Set();
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) cardsInSight[entry.isIntersecting ? "add" : "delete"](entry.target);
  inSight = cardsInSight.size > 0;
  lookInside();
}, { rootMargin: "200px" });
for (const id of ["over-time", "in-kernel"]) watcher.observe($(id));
$("kernel-which").addEventListener("change", () => kernelSlot.refresh());

function lookInside() {
  if (!view.now || !inSight) return;
  if (!view.power) powerSlot.refresh(); // what is drawn again loses the focus
  if (!view.kernel) kernelSlot.refresh();
}

function openKernel(number) { // of a column that was clicked
  $("kernel-which").value = number;
  view.kernel = null; // asked for as the card comes into sight
  $("in-kernel").scrollIntoView({ block: "nearest" });
  lookInside();
}

function drawPower() {
  const { start_s: start, length_s: end, part_w: parts, state: states } = view.power, names = Object.keys(parts);
  const total = start.map((_, i) => names.reduce((sum, name) => sum + parts[name][i], 0)), mean = total.reduce((a, b) => a + b, 0) / total.length;
  const shown = names.filter((name) => Math.max(...parts[name]) > 0.001 * mean);
  $("power-said").textContent = `One run of ${show(end, "s")}: from ${show(Math.min(...total), "W")} to ${show(Math.max(...total), "W")} in steps of ${show(end / start.length, "s")}. Drag across a chart to zoom in; with keys, the arrows read it and + and \u2212 zoom.`;
  stack($("power"), { start, end, parts: Object.fromEntries(shown.map((name) => [name, parts[name]])), mean, states, yLabel: "Power of all GPUs (W)", label: `Power over one run of ${show(end, "s")}: mean ${show(mean, "W")}` });
  moduleLegend($("power-legend"), shown);
  numbers($("power-numbers"), ["Time", "State", "Power"], start.map((at, i) => [show(at, "s"), states[i], show(total[i], "W")]).filter((_, i) => i % 12 === 0), "Power over time");
}

function drawKernel() {
  const k = view.kernel, parts = Object.keys(k.phases[0].part_w), tile = k.tiles[0];
  const columns = k.phases.map((phase) => ({ name: `${phase.name}, limited by ${phase.bound}`, mark: phase.name, seconds: phase.latency_s, watts: parts.map((part) => phase.part_w[part]) }));
  $("kernel-said").textContent = `${k.operator}: ${show(k.latency_s, "s")} a call, ${number(k.waves)} wave${k.waves === 1 ? "" : "s"} of ${tile ? `${tile.label} tiles` : "blocks"}, ${percent(k.active_share)} of the SMs busy.`;
  powerArea($("kernel"), columns, parts, k.power_w, `Phases of ${k.operator}: ${k.phases.map((phase) => `${phase.name} ${show(phase.latency_s, "s")}`).join(", ")}`);
  numbers($("kernel-numbers"), ["Phase", "Time", "Limited by", "Power"], k.phases.map((phase) => [phase.name, show(phase.latency_s, "s"), phase.bound.replace("_", " "), show(phase.power_w, "W")]), "Phases of the kernel");
  numbers($("kernel-bytes"), ["Level", "Moved", "Operands once"], Object.entries(k.byte).map(([name, byte]) => [name, show(byte, "byte"), k.least_byte[name] === undefined ? "" : show(k.least_byte[name], "byte")]), "Bytes at every level");
}

export function drawPredict() {
  const v = view.now;
  if (!v) return;
  drawAnswer(v);
  drawArea(v);
  drawTrade(v);
  drawRoof(v);
  const which = $("kernel-which").value;
  $("kernel-which").replaceChildren(...v.groups.map((g) => element("option", { value: g.kernel }, `${g.name} (${percent(g.energy_j / v.prediction.energy_j)})`)));
  if (v.groups.some((g) => String(g.kernel) === which)) $("kernel-which").value = which;
  if (view.power) drawPower();
  if (view.kernel) drawKernel();
  const p = v.prediction, from = p.provenance;
  $("support").textContent = `Support: ${p.support.word}: ${p.support.reason}. ${p.support.why}. Intervals are ${percent(p.interval.level)}.`;
  notes($("assumed"), p.assumptions);
  $("source").textContent = `${from.status} coefficients: ${[from.source, from.device, from.date].filter(Boolean).join(", ")}. Wattcast ${v.wattcast}.`;
}

function drawAnswer(v) {
  const p = v.prediction, c = countable(v), digits = digitsOf(c.perS, c.perSEnds);
  const between = (pair, text) => `${text(pair[0])} to ${text(pair[1])}`;
  const long = { generate: "an answer takes", decode: "a step takes", train: "a step takes", prefill: "a prompt takes" }[v.phase] || "a run takes";
  fillTile($("a-speed"), { value: number(c.perS, digits), of: `${c.word}s/s`, note: `${between(c.perSEnds, (x) => number(x, 2))}; ${long} ${show(p.latency_s, "s", 2)}` });
  const [joules, unit] = showJoules(c.each, digitsOf(c.each, c.eachEnds)).split(" ");
  fillTile($("a-energy"), { value: joules, of: `${unit}/${c.word}`, note: between(c.eachEnds, (x) => showJoules(x, 2)) });
  const [watts, w] = show(p.total_power_w, "W", digitsOf(p.total_power_w, c.powerEnds)).split(" ");
  const each = p.gpu_count > 1 ? `${p.gpu_count} GPUs of ${show(p.power_w, "W", 2)}` : `${between(c.powerEnds, (x) => show(x, "W", 2))}`;
  fillTile($("a-power"), { value: watts, of: w, note: `${each}${p.capped ? "; the limit holds the clock down" : ""}` });
  const cost = p.cost_per_million_tokens ?? (p.cost === null ? null : (p.cost / c.count) * (p.items ? 1e3 : 1));
  const per = p.tokens ? "per M tokens" : p.items ? `per thousand ${v.item}s` : "per run";
  fillTile($("a-cost"), cost === null ? { value: "?", of: "name a price" } : { value: money(cost), of: per });
  const most = view.room?.largest_batch;
  const held = p.memory_byte === null ? "the file does not say" : `${show(p.memory_byte, "byte")} of ${show(v.capacity_byte, "byte")}${p.gpu_count > 1 ? " each" : ""}`;
  fillTile($("a-fits"), p.fits === null ? { value: "?", of: "unknown", note: held } : {
    value: p.fits ? "Fits" : "No", of: p.fits ? "" : "does not fit", tone: p.fits ? "good" : "bad",
    note: `${held}${Number.isInteger(most) ? `; at most ${number(most, 6)} at once` : ""}`,
  });
  const half = Math.max((c.perSEnds[1] - c.perSEnds[0]) / 2 / c.perS, (c.powerEnds[1] - c.powerEnds[0]) / 2 / p.total_power_w);
  fillTile($("a-sure"), { value: p.support.confidence, of: `\u00b1${percent(half)}`, tone: { good: "good", fair: "", rough: "warn" }[p.support.confidence], note: p.support.why.replace(/^90% intervals reach \d+% either way; /, "") });
}

function drawArea(v) {
  const p = v.prediction, parts = p.modules.map((m) => m.name);
  const shown = v.groups.slice(0, MOST_COLUMNS).map((g, i) => ({ name: g.name, mark: String(i + 1), seconds: g.latency_s, joules: g.energy_j, count: g.count, part_j: g.part_j, open: () => openKernel(g.kernel) }));
  const left = (key, total) => total - shown.reduce((sum, g) => sum + g[key], 0);
  const wait = Math.max(p.latency_s - p.busy_s, 0);
  const rest = left("seconds", p.latency_s);
  if (rest > 0.002 * p.latency_s) {
    const part_j = p.modules.map((m, i) => Math.max(m.power_w * p.latency_s - shown.reduce((sum, g) => sum + g.part_j[i], 0), 0));
    shown.push({ name: wait > 0.5 * rest ? "waiting for the host, and the rest" : "everything else", mark: "\u2026", seconds: rest, joules: left("joules", p.energy_j), count: null, part_j });
  }
  const columns = shown.map((g) => ({ ...g, watts: g.part_j.map((j) => j / g.seconds) }));
  const ranked = p.modules.map((m) => [m.name, m.power_w, m.utilisation]).sort((a, b) => b[1] - a[1]);
  $("area-said").textContent = `Wide is long, high is power, area is energy; click a column to look inside. Most goes to ${ranked[0][0]} (${percent(ranked[0][1] / p.power_w)}) and ${ranked[1][0]} (${percent(ranked[1][1] / p.power_w)}).`;
  powerArea($("area"), columns, parts, p.power_w, `Power by operator and module: mean ${show(p.power_w, "W")}, most of it ${ranked[0][0]}`);
  moduleLegend($("area-legend"), ranked.filter(([, watts]) => watts > 0.001 * p.power_w).map(([name]) => name));
  $("area-list").replaceChildren(...columns.map((g) => element("li", {}, element("b", {}, g.mark), element("span", {}, g.name), element("span", {}, percent(g.joules / p.energy_j)),
    element("span", {}, `${percent(g.seconds / p.latency_s)} of the time at ${show(g.joules / g.seconds, "W", 2)}${g.count ? `, ${number(g.count, 6)} calls` : ""}`))));
  numbers($("area-numbers"), ["Module", "Power", "Share", "Busy"], ranked.map(([name, watts, busy]) => [name, show(watts, "W"), percent(watts / p.power_w), busy === null ? "" : percent(busy)]), "Power by module");
}

function drawTrade(v) {
  const p = v.prediction, c = countable(v), k = v.clocks;
  const last = k.clock_hz.findIndex((hz, i) => i && hz === k.clock_hz[i - 1]); // the limit holds all clocks above down
  const upto = last < 0 ? k.clock_hz.length : last;
  const hz = k.clock_hz.slice(0, upto), x = k.latency_s.slice(0, upto).map((s) => c.count / s), y = k.energy_j.slice(0, upto).map((j) => (j * p.gpu_count) / c.count);
  const gap = hz.map((h) => Math.abs(h - p.clock_hz)), at = gap.indexOf(Math.min(...gap)), least = y.indexOf(Math.min(...y));
  const labels = hz.map((h, i) => `${show(h, "Hz")}, ${show(k.power_w[i] * p.gpu_count, "W")}`);
  tradeCurve($("trade"), {
    x, y, labels, at, xLabel: `Speed (${c.word}s/s)`, yLabel: `Energy (J/${c.word})`, label: "Core clock",
    notes: least === at ? [] : [{ index: least, text: "least energy" }],
    onPick: (index) => { commit("clock", () => { config().clock_hz = Math.round(hz[index]); }); changed("trade"); },
  });
  const slower = 1 - x[least] / x[at], saved = 1 - y[least] / y[at];
  $("trade-said").textContent = least === at ? "This is the clock of least energy. Drag the ring, or move it with the arrow keys."
    : `At ${show(hz[least], "Hz")}: ${Math.abs(slower) < 0.005 ? "as fast" : `${percent(Math.abs(slower))} ${slower >= 0 ? "slower" : "faster"}`}, ${percent(saved)} less energy. Drag the ring, or move it with the arrow keys.`;
  numbers($("trade-numbers"), ["Clock", `${c.word}s/s`, "Power", `J/${c.word}`], hz.map((h, i) => [show(h, "Hz"), number(x[i]), show(k.power_w[i] * p.gpu_count, "W"), number(y[i])]).filter((_, i) => i % 4 === 0), "Speed and energy over the clock");
}

function drawRoof(v) {
  const p = v.prediction;
  const marks = v.groups.map((g, i) => ({ name: g.name, mark: i < MOST_COLUMNS ? String(i + 1) : "", x: g.flop_per_byte, y: g.flop_per_s, share: g.energy_j / p.energy_j })).filter((m) => m.x);
  if (!marks.length) { $("roof").replaceChildren(element("p", { class: "dim" }, "No operator of this workload does arithmetic.")); return; }
  const peak = Math.max(...Object.values(v.roofs)), dram = v.byte_per_s.DRAM;
  const byMemory = v.groups.filter((g) => !g.flop_per_byte || g.flop_per_byte * dram < peak).reduce((sum, g) => sum + g.latency_s, 0) / p.latency_s;
  $("roof-said").textContent = `${percent(byMemory)} of the time lies where memory is the roof${p.busy_s < 0.9 * p.latency_s ? `, ${percent(1 - p.busy_s / p.latency_s)} waits for the host` : ""}. Numbers are those of the list above; area is energy.`;
  roofline($("roof"), { marks, roofs: v.roofs, memories: v.byte_per_s, label: `Roofline of ${p.name} on ${p.gpu}` });
  numbers($("roof-numbers"), ["Operators", "FLOP/B", "Speed", "Energy"], marks.map((m) => [m.name, number(m.x), show(m.y, "FLOP/s"), percent(m.share, 1)]), "Operators under the roof");
}

// ---- compare

const cards = [];
let why = null;

function slotOf(index) {
  cards[index] ||= { view: null, slot: new Slot(() => (state.configs[index] && state.tab === "compare" ? ["/api/view", viewRequest(state.configs[index])] : null), (found, error) => {
    complain(`compare${index}`, error && `${"ABCD"[index]}: ${error}`);
    cards[index].view = found;
    cards[index].error = error;
    drawCompare();
  }) };
  return cards[index];
}

const whySlot = new Slot(() => (state.configs.length > 1 ? ["/api/compare", { configurations: state.configs.map(viewRequest) }] : null), (found, error) => {
  why = found;
  if (error) complain("why", error);
  drawCompare();
}, () => {}, 150);

export function refreshCompare() {
  state.configs.forEach((_, index) => slotOf(index).slot.refresh());
  cards.length = Math.max(state.configs.length, 1);
  for (let i = 0; i < 4; i += 1) if (!state.configs[i]) complain(`compare${i}`, null);
  why = null;
  drawCompare();
  whySlot.refresh();
}

const CAUSES = { calls: "number of calls", "cycles of a call": "time of a call at the same clock", clock: "clock", "power while running": "power while running", "share of time": "share of the time", "idle gaps": "waiting for the host" };
const causeName = (name) => CAUSES[name] || name;
const METRICS = [
  ["Speed", (v, c) => c.perS, (x, c) => `${number(x)} ${c.word}s/s`, true], ["Energy", (v, c) => c.each, (x, c) => `${showJoules(x)}/${c.word}`, false],
  ["Power in all", (v) => v.prediction.total_power_w, (x) => show(x, "W"), false], ["Cost", (v) => v.prediction.cost_per_million_tokens, (x) => `${money(x)} per M tokens`, false],
  ["Time", (v) => v.prediction.latency_s, (x) => show(x, "s"), false],
];

export function drawCompare() {
  const views = state.configs.map((_, i) => cards[i]?.view);
  const counts = views.map((v) => v && countable(v));
  const best = METRICS.map(([, of, , high]) => {
    const values = views.map((v, i) => (v ? of(v, counts[i]) : null)).filter((x) => x !== null);
    return values.length > 1 ? Math[high ? "max" : "min"](...values) : null;
  });
  $("compare-cards").replaceChildren(...state.configs.map((c, index) => {
    const v = views[index], letter = "ABCD"[index];
    const pick = (name, act, on) => element("button", { type: "button", "aria-pressed": on, "aria-label": `${name} ${letter}`, onclick: act }, name);
    const card = element("article", { class: `k${index}${index === state.selected ? " on" : ""}`, "data-index": index, "aria-label": `Configuration ${letter}` },
      element("h2", {}, `${letter}: ${c.file ? c.file.name : c.model} on ${(c.tp || 1) > 1 ? `${c.tp} \u00d7 ` : ""}${c.gpu}`),
      element("p", { class: "dim" }, v ? v.prediction.name : cards[index]?.error || "predicting"));
    if (v) {
      card.append(element("dl", {}, METRICS.flatMap(([name, of, text], m) => {
        const x = of(v, counts[index]);
        return x === null ? [] : [element("dt", {}, name), element("dd", { class: x === best[m] ? "best" : null }, text(x, counts[index]), x === best[m] ? " \u2713" : "")];
      }), element("dt", {}, "Memory"), element("dd", {}, v.prediction.fits === null ? "unknown" : v.prediction.fits ? "fits" : "does not fit"),
      element("dt", {}, "How sure"), element("dd", {}, v.prediction.support.confidence)));
    }
    const row = element("p", { class: "row" }, pick("Edit", () => { commit("select", () => { state.selected = index; }); changed("select"); }, String(index === state.selected)));
    if (state.configs.length > 1) row.append(pick("Remove", () => { commit("remove", () => { state.configs.splice(index, 1); state.selected = Math.max(0, Math.min(state.selected, state.configs.length - 1)); }); cards.splice(index, 1); changed("remove"); }));
    card.append(row);
    return card;
  }));
  $("add").disabled = state.configs.length >= 4;
  $("compare-charts").hidden = state.configs.length < 2;
  if (state.configs.length < 2) { $("compare-words").replaceChildren(element("p", {}, "Add a second configuration, then change its model, GPU or amount above.")); return; }
  if (views.some((v) => !v)) { // nothing that was said of other configurations stays
    for (const id of ["compare-words", "compare-bars", "why"]) $(id).replaceChildren();
    $("why-said").textContent = "";
    return;
  }
  $("compare-words").replaceChildren(...views.slice(1).map((v, i) => element("p", {}, words(views[0], v, counts[0], counts[i + 1], "ABCD"[i + 1], why?.against_first[i]))));
  $("compare-bars").replaceChildren(...METRICS.map(([name, of, text]) => {
    const values = views.map((v, i) => of(v, counts[i]));
    if (values.some((x) => x === null)) return null;
    const box = element("div", {}, element("h3", {}, name));
    const into = element("div");
    box.append(into);
    queueMicrotask(() => bars(into, values.map((value, i) => ({ name: `${"ABCD"[i]}: ${text(value, counts[i])}`, value, text: i ? times(value / values[0]) : "", css: `f${i}` })), `${name}: ${values.map((x, i) => `${"ABCD"[i]} ${text(x, counts[i])}`).join(", ")}`));
    return box;
  }).filter(Boolean));
  drawWhy();
}

const times = (ratio) => `${number(ratio, ratio >= 9.95 ? 2 : 3)}\u00d7`;

function words(a, b, ca, cb, letter, pair) {
  const said = [];
  const against = (x, y, more, less) => (Math.abs(y / x - 1) < 0.005 ? null : y > x ? `${times(y / x)} ${more}` : `${percent(1 - y / x)} ${less}`);
  const same = ca.word === cb.word;
  const speed = same && against(ca.perS, cb.perS, `the ${cb.word}s per second`, `fewer ${cb.word}s per second`);
  const energy = same && against(ca.each, cb.each, `the energy per ${cb.word}`, `less energy per ${cb.word}`);
  const power = against(a.prediction.total_power_w, b.prediction.total_power_w, "the power", "less power");
  const cost = a.prediction.cost_per_million_tokens !== null && b.prediction.cost_per_million_tokens !== null && against(a.prediction.cost_per_million_tokens, b.prediction.cost_per_million_tokens, "the cost per token", "less cost per token");
  for (const part of [speed, energy, power, cost]) if (part) said.push(part);
  let text = said.length ? `${letter} against A: ${said.join(", ")}.` : `${letter} and A are alike.`;
  if (pair) {
    const terms = Object.entries(pair.terms.latency_s).sort((x, y) => Math.abs(y[1]) - Math.abs(x[1]));
    if (terms.length && pair.difference.latency_s) text += ` Of the difference in time, most comes from the ${causeName(terms[0][0])} (${percent(Math.abs(terms[0][1] / pair.difference.latency_s))}).`;
  }
  return text;
}

export function drawWhy() {
  if (!why) return;
  const what = $("why-what").value, unit = { total_energy_j: "J", latency_s: "s", total_power_w: "W" }[what];
  const signed = (x) => `${x < 0 ? "\u2212" : "+"}${show(Math.abs(x), unit)}`;
  $("why-said").textContent = "Contributions to the difference from A, for one run on all GPUs; they add up to it.";
  $("why").replaceChildren(...why.against_first.flatMap((pair, i) => {
    const k = i + 1, into = element("div");
    const terms = Object.entries(pair.terms[what]).map(([name, value]) => ({ name: causeName(name), value, text: signed(value), css: `f${k}` }));
    const modules = what === "latency_s" ? [] : pair.modules.map((m) => ({ name: m.name, value: m[what], text: signed(m[what]), css: `m-${m.name}` }));
    const largest = (rows) => rows.filter((row) => Math.abs(row.value) > 0.01 * Math.max(...rows.map((r) => Math.abs(r.value)), 1e-30)).sort((x, y) => Math.abs(y.value) - Math.abs(x.value));
    const table = element("div"), parts = element("div");
    queueMicrotask(() => {
      bars(into, largest(terms), `${"ABCD"[k]} minus A by cause: ${signed(pair.difference[what])}`);
      if (modules.length) bars(parts, largest(modules), `${"ABCD"[k]} minus A by module: ${signed(pair.difference[what])}`);
      numbers(table, ["Operator", "Calls", "Time", "Energy"], pair.operators.map((o) => [o.name, o.calls.map((n) => number(n, 6)).join(" \u2192 "), `${o.latency_s < 0 ? "\u2212" : "+"}${show(Math.abs(o.latency_s), "s")}`, o.total_energy_j === null ? "" : `${o.total_energy_j < 0 ? "\u2212" : "+"}${show(Math.abs(o.total_energy_j), "J")}`]), `Operators that differ between A and ${"ABCD"[k]}`);
    });
    return [element("h3", {}, `${"ABCD"[k]} \u2212 A: ${signed(pair.difference[what])}`), into, modules.length ? element("h3", {}, "By module") : "", parts, table];
  }));
}
