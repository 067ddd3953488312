// Plan, Simulate, Train and GPUs: each asks its verb of the server and draws what comes back.
import { STOPPED, Slot, complain, fetchAnswer, notes, tell, tiles } from "/assets/answer.js";
import { choices, legend, lines, shareBar, stack, tradeCurve } from "/assets/charts.js";
import { $, element, money, number, numbers, percent, show, showJoules, table } from "/assets/format.js";
import { commit, config, hallRequest, planRequest, simulateRequest, state, trainRequest } from "/assets/state.js";

const joules = (x) => { const [value, unit] = showJoules(x).split(" "); return { value, of: `${unit}/token` }; };
const split = (text) => { const at = text.indexOf(" "); return at < 0 ? { value: text } : { value: text.slice(0, at), of: text.slice(at + 1) }; };
const cost = (x, per) => (x === null || x === undefined ? { value: "?", of: "name a price" } : { value: money(x), of: per });

// ---- plan: one question for each kind of GPU, so that answers come one by one and none takes long

const plan = { asked: "", results: [], rows: [], chosen: 0, running: false };

export const planKey = () => JSON.stringify(state.plan.gpus.map((gpu) => planRequest(config(), gpu)));

export async function runPlan() {
  const key = planKey(), gpus = [...state.plan.gpus];
  if (!gpus.length) { complain("plan", "Choose at least one kind of GPU."); return; }
  Object.assign(plan, { asked: key, results: [], rows: [], chosen: 0, running: true, stopped: false });
  complain("plan", null);
  const failed = [];
  drawPlan();
  for (const aim of new Set([state.plan.minimise, "energy"])) { // the second search fills the front
    plan.aim = aim;
    for (const gpu of gpus) { // the server runs one large request of a client at a time; others would wait there
      try {
        const found = await fetchAnswer("/api/plan", planRequest(config(), gpu, aim));
        if (plan.asked !== key) return;
        plan.results.push(found);
        collect();
        drawPlan();
      } catch (error) {
        if (plan.asked !== key) return;
        if (aim === state.plan.minimise) failed.push(`${gpu}: ${error.message}`);
        if (error.message === STOPPED) { plan.stopped = true; break; }
      }
    }
    if (!plan.results.length) { complain("plan", failed.join(" ")); break; }
    if (plan.stopped) break;
  }
  plan.running = false;
  plan.failed = failed;
  drawPlan();
}

function collect() {
  const aim = { gpus: "gpus", energy: "energy_j_per_token", cost: "cost_per_million_tokens" }[state.plan.minimise];
  const rank = (row) => [row[aim] ?? Infinity, row.energy_j_per_token];
  const alike = (row) => `${row.gpu} ${row.layout} ${row.power_limit_w}`, was = plan.rows[plan.chosen];
  const all = new Map(plan.results.flatMap((r) => r.plans).map((row) => [alike(row), row]));
  plan.rows = [...all.values()].sort((a, b) => rank(a)[0] - rank(b)[0] || rank(a)[1] - rank(b)[1]);
  plan.chosen = plan.chosen && was ? Math.max(plan.rows.findIndex((row) => alike(row) === alike(was)), 0) : 0;
}

export function drawPlan() {
  const same = plan.asked === planKey();
  $("plan-go").textContent = plan.asked && !same ? "Plan again" : "Find plans";
  $("plan-go").disabled = plan.running && same;
  $("plan-said").textContent = plan.running && same ? (plan.aim === state.plan.minimise ? "Simulating each kind of GPU under your traffic." : "Looking for plans that take less energy.")
    : !same && plan.rows.length ? "The question has changed since." : plan.rows.length ? `${plan.rows.length} plan${plan.rows.length === 1 ? " was" : "s were"} simulated.` : "\u00a0";
  $("p-plan").classList.toggle("stale", !same && plan.rows.length > 0);
  if (!plan.rows.length) {
    tiles($("plan-answer"), ["GPUs", "Energy", "Power in all", "Cost", "First token", "The limit"].map((name) => ({ name, value: plan.running ? "\u2026" : "?", of: "" })));
    return;
  }
  const row = plan.rows[plan.chosen], best = plan.chosen === 0 ? "The plan" : `Plan ${plan.chosen + 1}`, p = state.plan.percentile;
  const ends = p >= 99 ? "p99" : p >= 90 ? "p90" : "p50";
  tiles($("plan-answer"), [
    { name: best, value: `${row.gpus} \u00d7`, of: row.gpu, note: `${row.replicas} ${row.replicas > 1 ? "copies" : "copy"} of the model on ${row.gpus / row.replicas} GPU${row.gpus > row.replicas ? "s" : ""} (${row.layout})${row.replicas > 1 ? " each" : ""}, limit ${show(row.power_limit_w, "W")}` },
    { name: "Energy", ...joules(row.energy_j_per_token), note: `${show(row.energy_j_per_request, "J")} a request, prompts and idle time included` },
    { name: "Power in all", ...split(show(row.power_w, "W")), note: `${number(row.output_tokens_per_s)} tokens/s` },
    { name: "Cost", ...cost(row.cost_per_million_tokens, "per M tokens"), note: `at $${state.money.price_per_h ?? 0} per GPU hour` },
    { name: `First token, ${ends}`, ...split(show(row.ttft_s[ends], "s")), note: `then one every ${show(row.tpot_s[ends], "s")}` },
    { name: "The limit", value: row.binds.split(/[ :]/)[0].replace(/^nothing$/, "Nothing"), of: row.binds.replace(/^\S+\s*/, ""), note: `running at ${percent(row.load_share)} of capacity` },
  ]);
  const axis = $("plan-axis").value, rows = plan.rows.filter((r) => r[axis] !== null);
  const kinds = state.plan.gpus;
  legend($("plan-legend"), [...kinds.map((name, k) => [name, `f${k}`])]);
  const words = (r) => `${r.gpus} ${r.gpu}, ${r.layout} for each copy, limit ${show(r.power_limit_w, "W")}: ${show(r.energy_j_per_token, "J")} per token, ${show(r.power_w, "W")}`;
  if (rows.length) {
    const points = rows.map((r) => ({ x: r.gpus, y: r[axis], kind: r.gpu, name: words(r), row: r }));
    const front = points.filter((p1) => !points.some((q) => q.x <= p1.x && q.y <= p1.y && (q.x < p1.x || q.y < p1.y))).sort((a, b) => a.x - b.x);
    const high = Math.max(...points.map((p1) => p1.y)) * 1.1, wide = Math.max(...points.map((p1) => p1.x)) + 1;
    choices($("plan-chart"), {
      points, front, chosen: rows.indexOf(row), kinds, x: { low: 0, high: wide, whole: true, label: "GPUs" },
      y: { low: 0, high, label: { energy_j_per_token: "Energy (J/token)", cost_per_million_tokens: "Cost ($ per million tokens)", power_w: "Power in all (W)" }[axis] },
      label: `${points.length} plans by GPUs; the dashed line joins those that none beats`, onPick: (i) => { plan.chosen = plan.rows.indexOf(rows[i]); drawPlan(); },
    });
  } else $("plan-chart").replaceChildren(element("p", { class: "dim" }, "No price is known: name one above."));
  numbers($("plan-numbers"), ["Plan", "GPUs", "Limit", "TTFT p99", "TPOT p99", "J/token", "Power", "Limited by"], plan.rows.map((r) => [`${r.gpu}, ${r.layout}`, String(r.gpus), show(r.power_limit_w, "W"), show(r.ttft_s.p99, "s"), show(r.tpot_s.p99, "s"), number(r.energy_j_per_token), show(r.power_w, "W"), r.binds]), "All plans, best first");
  $("plan-title").textContent = best;
  $("plan-detail").replaceChildren(element("p", {}, sentence(row)), row.risk ? element("p", { class: "dim" }, `Careful: ${row.risk}.`) : "",
    row.gpus > row.replicas * row.tp || row.ep > 1 ? "" : element("p", {}, element("button", { type: "button", onclick: () => { commit("use", () => { Object.assign(config(), { gpu: row.gpu, tp: row.tp, power_limit_w: row.power_limit_w, clock_hz: null }); state.sim.replicas = Math.min(row.replicas, 16); state.sim.rate_per_s = state.plan.rate_per_s; state.tab = "simulate"; }); use(); } }, "Simulate this plan")));
  notes($("plan-refused"), [...new Set([...plan.results.flatMap((r) => r.refused), ...(plan.failed || [])])].slice(0, 8).concat(plan.results.some((r) => r.refused.length) || plan.failed?.length ? [] : ["Every kind of GPU has one."]));
  notes($("plan-notes"), plan.results[0].assumptions);
}
let use = () => {};
export const onUsePlan = (callback) => { use = callback; };

function sentence(r) {
  const needs = r.gpus > 1 ? `${r.gpus} ${r.gpu}` : `One ${r.gpu}`;
  const binds = r.binds.startsWith("nothing") ? `and ${r.gpus > 1 ? "have" : "has"} room to spare` : r.binds === "throughput" ? "where more traffic would pile up" : `where ${r.binds} would be broken first by more traffic`;
  return `${needs} serve${r.gpus > 1 ? "" : "s"} ${number(state.plan.rate_per_s)} requests a second at ${percent(r.load_share)} of the capacity, ${binds}.`;
}

// ---- simulate

let simulated = null;
export const simulateSlot = new Slot(() => ["/api/simulate", simulateRequest(config())], (found, error) => {
  complain("simulate", error);
  $("p-simulate").classList.toggle("refused", Boolean(error));
  if (found) { simulated = found; drawSimulate(); }
}, (busy) => $("p-simulate").classList.toggle("stale", busy), 350);

export function drawSimulate() {
  const s = simulated;
  if (!s) { tiles($("sim-answer"), ["Speed", "Energy", "Power in all", "Cost", "First token", "Then each"].map((name) => ({ name, value: "\u2026" }))); return; }
  $("p-simulate").classList.remove("stale");
  const target = state.sim.ttft_s || state.sim.tpot_s;
  tiles($("sim-answer"), [
    { name: "Speed", value: number((s.steady ?? s).output_tokens_per_s), of: "tokens/s", note: `${number((s.steady ?? s).requests_per_s)} requests/s${s.steady ? ` in the steady state${s.steady.queue_grows ? `; the queue grows: ${number(s.steady.arrivals_per_s)}/s arrive` : ""}` : ""}; ${number(s.requests, 6)} requests in ${show(s.length_s, "s")} with the drain${target ? `, ${percent(s.good_share)} in time` : ""}` },
    { name: "Energy", ...joules(s.energy_j_per_token), note: `${show(s.energy_j_per_request, "J")} a request; idle time counts` },
    { name: "Power in all", ...split(show(s.power_w, "W")), note: `${s.gpu_count} GPU${s.gpu_count > 1 ? "s" : ""}; peak ${show(s.peak_power_w, "W")}` },
    { name: "Cost", ...cost(s.cost_per_million_tokens, "per M tokens"), note: `at $${state.money.price_per_h ?? 0} per GPU hour` },
    { name: "First token, p99", ...split(show(s.ttft_s.p99, "s")), note: `half come within ${show(s.ttft_s.p50, "s")}` },
    { name: "Then each, p99", ...split(show(s.tpot_s.p99, "s")), note: `busy ${percent(s.busy_share)}; ${number(s.batch.mean)} at once on the mean` },
  ]);
  const t = s.over_time, x = { low: 0, high: s.length_s, label: "Time (s)" };
  lines($("sim-power"), { series: [{ name: "power", k: 0, x: t.start_s, y: t.power_w, fill: true }], levels: [{ y: s.power_w, text: `mean ${show(s.power_w, "W")}` }], x, yLabel: "Power of all GPUs (W)", unit: " W", height: 240, label: `Power over time: mean ${show(s.power_w, "W")}, peak ${show(s.peak_power_w, "W")}` });
  legend($("sim-legend"), [["running", "f2"], ["waiting", "f1"]]);
  lines($("sim-queue"), { series: [{ name: "running", k: 2, x: t.start_s, y: t.decodes, fill: true }, { name: "waiting", k: 1, x: t.start_s, y: t.waiting }], x, yLabel: "Requests in a copy", unit: " ", label: `Requests over time: ${number(s.batch.mean)} running and ${number(s.queue.mean)} waiting on the mean` });
  numbers($("sim-numbers"), ["Time", "Power", "Running", "Waiting", "Cache"], t.start_s.map((at, i) => [show(at, "s"), show(t.power_w[i], "W"), number(t.decodes[i]), number(t.waiting[i]), percent(t.cache_use[i])]).filter((_, i) => i % 20 === 0), "Power and requests over time");
  const row = (name, key) => [name, ...["p50", "p90", "p99", "mean"].map((q) => show(s[key][q], "s"))];
  $("sim-latency").replaceChildren(table(["Wait", "Half", "9 in 10", "99 in 100", "Mean"], [row("First token", "ttft_s"), row("Each token", "tpot_s"), row("Between two tokens", "inter_token_s"), row("Whole request", "latency_s")], "How long requests take"));
  notes($("sim-notes"), [...(s.preemptions ? [`${s.preemptions} requests were thrown out of a full cache and began again`] : []), ...s.assumptions]);
}

export async function takeTrace(file) {
  if (file.size > 1_900_000) { complain("trace", `${file.name}: expected at most 1.9 MB, got ${show(file.size, "byte")}. Use wattcast simulate --trace.`); return false; }
  const text = await file.text(), before = state.sim.trace;
  state.sim.trace = { name: file.name, text };
  try { await fetchAnswer("/api/simulate", simulateRequest(config())); } catch (error) { state.sim.trace = before; complain("trace", error.message); return false; }
  state.sim.trace = before;
  commit("trace", () => { state.sim.trace = { name: file.name, text }; });
  complain("trace", null);
  tell(`${file.name} is read.`);
  return true;
}

// ---- train

let trained = null;
export const trainSlot = new Slot(() => ["/api/train", trainRequest(config())], (found, error) => {
  complain("train", error);
  $("p-train").classList.toggle("refused", Boolean(error));
  if (found) { trained = found; drawTrain(); }
}, (busy) => $("p-train").classList.toggle("stale", busy), 350);

export function drawTrain() {
  const r = trained;
  if (!r) { tiles($("train-answer"), ["Time", "Energy", "Power in all", "Cost", "Speed", "Memory"].map((name) => ({ name, value: "\u2026" }))); return; }
  $("p-train").classList.remove("stale");
  const hours = (h) => (h >= 48 ? `${number(h / 24)} days` : h >= 1 ? `${number(h)} h` : `${number(h * 60)} min`);
  tiles($("train-answer"), [
    { name: "Time", ...split(hours(r.hours)), note: `${hours(r.interval.hours[0])} to ${hours(r.interval.hours[1])}; ${number(r.gpu_hours)} GPU hours` },
    { name: "Energy", ...split(show(r.energy_kwh, "Wh")), note: `${show(r.site_energy_kwh, "Wh")} with hosts; ${show(r.energy_j_per_token, "J")} a token` },
    { name: "Power in all", ...split(show(r.power_w, "W")), note: `${show(r.peak_power_w, "W")} while all compute` },
    { name: "Cost", ...cost(r.cost, "for the job"), note: `at $${state.money.price_per_h ?? 0} per GPU hour` },
    { name: "Speed", value: number(r.tokens_per_s), of: "tokens/s", note: `${percent(r.mfu)} of the peak; ${number(r.tokens_per_s_per_gpu)} a GPU` },
    { name: "Memory", value: r.fits ? "Fits" : "No", of: r.fits ? "" : "does not fit", tone: r.fits ? "good" : "bad", note: `${show(r.memory_byte.total, "byte")} of ${show(r.memory_byte.usable, "byte")} usable` },
  ]);
  const c = [...r.power_limits].reverse(), at = c.length - 1, best = c.findIndex((p) => p.power_limit_w === r.recommended_power_limit_w);
  const pick = c[Math.max(best, 0)], now = c[at];
  $("train-said").textContent = best < 0 || best === at ? "The limit it has costs least within a tenth more time." : `A limit of ${show(pick.power_limit_w, "W")} takes ${percent(pick.hours / now.hours - 1)} longer and ${percent(1 - pick.energy_kwh / now.energy_kwh)} less energy.`;
  if (c.length > 1) {
    tradeCurve($("train-curve"), {
      x: c.map((p) => p.hours), y: c.map((p) => p.energy_kwh), labels: c.map((p) => `${show(p.power_limit_w, "W")}: ${hours(p.hours)}`), at, xLabel: "Time (h)", yLabel: "Energy of the GPUs (kWh)",
      label: "Power limit", notes: best < 0 || best === at ? [] : [{ index: best, text: "recommended" }], onPick: (i) => { commit("limit", () => { config().power_limit_w = c[i].power_limit_w; }); use(); },
    });
  } else $("train-curve").replaceChildren(element("p", { class: "dim" }, "This card knows no other power limit."));
  numbers($("train-numbers"), ["Power limit", "Time", "Energy"], c.map((p) => [show(p.power_limit_w, "W"), hours(p.hours), show(p.energy_kwh, "Wh")]), "Time and energy by power limit");
  const s = r.strategy;
  const ways = [["dp", "data-parallel"], ["tp", "tensor-parallel"], ["pp", "pipeline stages"], ["cp", "context-parallel"], ["ep", "expert-parallel"]].filter(([key]) => s[key] > 1).map(([key, name]) => `${s[key]} ${name}`);
  $("train-strategy").textContent = `${ways.join(" \u00d7 ") || "one GPU"}, ${s.sharding === "none" ? "nothing sharded" : s.sharding}, ${s.recompute === "none" ? "nothing recomputed" : `${s.recompute} recomputation`}; ${s.global_batch} sequences a step, ${s.micro_batch} at a time; ${show(r.step_s, "s")} a step.`;
  shareBar($("train-step"), Object.entries(r.step_parts_s).map(([name, sec], k) => ({ name, value: sec, text: percent(sec / r.step_s), css: `f${k}` })), "Parts of a step");
  const m = r.memory_byte;
  shareBar($("train-memory"), Object.entries(m).filter(([name]) => !["total", "usable"].includes(name)).map(([name, byte], k) => ({ name, value: byte, text: show(byte, "byte"), css: ["f0", "f1", "f2", "f3", "m-l2"][k % 5] })), "Memory by purpose");
  notes($("train-notes"), r.assumptions);
}

// ---- hall

let hall = null;
export const hallSlot = new Slot(() => ["/api/hall", hallRequest(config())], (found, error) => {
  complain("hall", error);
  if (found) { hall = found; drawHall(); }
}, (busy) => $("p-hall").classList.toggle("stale", busy), 600);

const clock = (s) => new Date(1e3 * s).toISOString().slice(11, 19);

export function drawHall() {
  const h = hall, inside = state.hall.around_s !== null;
  $("hall-zoom").textContent = inside ? "Whole day" : "Highest minute";
  if (!h) return;
  const t = h.over_time, names = Object.keys(t.group_w), more = h.limits.hall?.more_racks, second = h.peaks_w["1s"];
  tiles($("hall-answer"), [
    { name: "Mean", ...split(show(h.mean_w, "W")), note: `${h.gpus} GPUs` },
    { name: "Peak, 1 s", ...split(show(second.max, "W")), note: `p99.9 ${show(second["p99.9"], "W")}` },
    { name: "Energy", ...split(show(h.energy_j / 3.6e6, "Wh")) },
    { name: "Ramp", ...split(show(h.ramp_w_per_min || h.step_w, "W")), note: inside ? "a second" : "a minute" },
    { name: "Diversity", value: number(h.diversity.rack), note: "of racks" },
    { name: "Room", value: more ? names.map((name) => more[name]["1s"]).join(", ") : "?", of: more ? "racks" : "no limit", note: names.join(", ") },
  ]);
  stack($("hall-power"), { start: t.start_s, end: t.length_s, parts: t.group_w, mean: h.mean_w, states: t.start_s.map((s) => clock(t.begin_s + s)), yLabel: "At the plug (W)", label: "Power of the hall" });
  legend($("hall-legend"), names.map((name) => [name, `m-${name}`]));
  numbers($("hall-numbers"), ["Time", ...names], t.start_s.map((s, i) => [clock(t.begin_s + s), ...names.map((name) => show(t.group_w[name][i], "W"))]).filter((_, i) => i % 10 === 0), "Power by group");
  const d = h.load_duration_w;
  lines($("hall-duration"), { series: [{ name: "power", k: 0, x: d.share.map((s) => 100 * s), y: d.power_w, fill: true }], x: { low: 0, high: 100, label: "Time (%)" }, yLabel: "Passed (W)", unit: " W", xUnit: "%", label: "Load duration" });
  $("hall-peaks").replaceChildren(table(["Over", "p50", "p99", "p99.9", "Most"], Object.entries(h.peaks_w).map(([w, p]) => [w, ...["p50", "p99", "p99.9", "max"].map((q) => show(p[q], "W"))]), "Peaks"));
  notes($("hall-notes"), h.assumptions);
}
$("hall-zoom").addEventListener("click", () => {
  commit("zoom", () => { state.hall.around_s = state.hall.around_s === null && hall ? hall.over_time.peak_at_s : null; });
  use();
});

// ---- GPUs

const COLUMNS = [
  ["name", "GPU", (g) => g.name], ["architecture", "Kind", (g) => g.architecture], ["memory_byte", "Memory", (g) => `${show(g.memory_byte, "byte")} ${g.memory_kind}`],
  ["byte_per_s", "Bandwidth", (g) => show(g.byte_per_s, "byte/s")], ["flop_per_s", "16-bit peak", (g) => (g.flop_per_s ? show(g.flop_per_s, "FLOP/s") : "none")],
  ["limit_w", "Power limit", (g) => show(g.limit_w, "W")], ["coefficients", "Coefficients", (g) => g.coefficients], ["use", "Use", (g) => g.use.replace("-", " ")],
];
const sorting = { by: "flop_per_s", down: true };

export function drawGpus(gpus) {
  const words = $("gpu-find").value.toLowerCase().split(/\s+/).filter(Boolean), wanted = $("gpu-use").value;
  const shown = gpus.filter((g) => (!wanted || g.use === wanted) && words.every((w) => `${g.title} ${COLUMNS.map(([, , text]) => text(g)).join(" ")}`.toLowerCase().includes(w)));
  shown.sort((a, b) => {
    const [x, y] = [a[sorting.by] ?? 0, b[sorting.by] ?? 0];
    return (sorting.down ? -1 : 1) * (typeof x === "string" ? x.localeCompare(y) : x - y);
  });
  $("gpu-count").textContent = `${shown.length} of ${gpus.length}`;
  const head = element("tr", {}, COLUMNS.map(([key, name]) => element("th", { scope: "col", "aria-sort": sorting.by === key ? (sorting.down ? "descending" : "ascending") : null },
    element("button", { type: "button", "data-key": key, onclick: () => { sorting.down = sorting.by === key ? !sorting.down : !["name", "architecture", "coefficients", "use"].includes(key); sorting.by = key; drawGpus(gpus); $("gpu-table").querySelector(`[data-key=${key}]`).focus(); } }, `${name}${sorting.by === key ? (sorting.down ? " \u2193" : " \u2191") : ""}`))));
  const body = shown.map((g) => element("tr", {}, COLUMNS.map(([key, , text]) => (key === "name"
    ? element("th", { scope: "row" }, element("button", { type: "button", onclick: () => showGpu(g.name) }, g.name)) : element("td", {}, text(g))))));
  $("gpu-table").replaceChildren(element("caption", { class: "hidden" }, "GPUs of the catalogue"), element("thead", {}, head), element("tbody", {}, body));
}

async function showGpu(name) {
  let found;
  try {
    const answer = await fetch(`/api/gpu?name=${encodeURIComponent(name)}`);
    found = await answer.json();
    if (!answer.ok) throw new Error(found.error);
  } catch (error) { complain("gpu", error.message); return; }
  const unit = (field) => [["byte_per_s", "byte/s"], ["_byte", "byte"], ["_byte_per_block", "byte"], ["_hz", "Hz"], ["_w", "W"]].find(([end]) => field.endsWith(end))?.[1];
  const rows = found.numbers.map((n) => [n.field, unit(n.field) ? show(n.value, unit(n.field), 4) : number(n.value, 6), element("span", {}, [n.source, n.note, ...n.disputed.map(([value, by]) => `disputed: ${value} (${by})`)].filter(Boolean).join("; "))]);
  const made = table(["Number", "Value", "Source"], rows, `Every number of ${found.name} with its source`);
  for (const cell of made.querySelectorAll("td:nth-child(3), th:nth-child(3)")) cell.classList.add("text");
  $("gpu-detail").replaceChildren(element("h2", {}, `${found.title}, ${found.process}`),
    element("p", {}, element("button", { type: "button", onclick: () => { commit("gpu", () => { Object.assign(config(), { gpu: found.name, clock_hz: null, power_limit_w: null }); state.tab = "predict"; }); use(); } }, "Predict on it")),
    made, element("h3", {}, "Unknown"), element("ul", {}, Object.entries(found.unknown).map(([field, why]) => element("li", {}, `${field}: ${why}`))));
  $("gpu-detail").hidden = false;
  $("gpu-detail").focus();
}

export const planWasAsked = () => plan.asked !== "";
