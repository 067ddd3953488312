// The page: controls -> state -> requests -> charts. Everything foreign becomes text, never markup.
import { legend, lines, stackedBars, stackedTime } from "/assets/charts.js";
import { element, percent, scale, show } from "/assets/format.js";
import { Live } from "/assets/live.js";
import { DEFAULTS, MOST, fresh, fromLink, isList, request, toLink } from "/assets/state.js";

const $ = (id) => document.getElementById(id);
const MOST_FILE = 2_000_000;
const CHOICES = {
  phase: ["", "prefill", "decode", "generate", "train", "forward"], head: ["", "none", "last", "all"],
  dtype: ["fp32", "tf32", "bf16", "fp16", "fp8", "int8"], attention: ["flash", "eager"],
  stack: ["", "eager", "compiled", "engine"], data: ["random", "zeros", "ones", "relu"],
};
const NUMBERS = { batch: 1, seq: 1, tokens: 1, tp: 1, temperature: ["temperature_c", 1], host: ["host_launch_s", 1e-6] };

let catalogue = null;
let state = fromLink(location.hash.slice(1)) || { configs: [fresh()], selected: 0 };
const seen = []; // per configuration: {view, error, busy, dirty}
const live = new Live(() => {
  const view = seen[state.selected]?.view;
  return view ? { view, k: state.selected, name: view.name } : null;
});

const config = () => state.configs[state.selected];
const gpuOf = (c) => catalogue.gpus.find((gpu) => gpu.name === c.gpu) || catalogue.gpus[0];
const tell = (text) => { $("told").textContent = text; };

async function post(path, body) {
  const answer = await fetch(path, {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body),
  });
  if (answer.ok) return answer;
  let text = `the server answered ${answer.status}.`;
  try { text = (await answer.json()).error || text; } catch { /* not JSON: keep the plain sentence */ }
  throw new Error(text);
}

// One request a configuration at a time; what changes meanwhile is asked for as soon as it returns.
async function refresh(index) {
  const slot = (seen[index] ||= {});
  if (slot.busy) { slot.dirty = true; return; }
  slot.busy = true;
  document.querySelector(`.set[data-index="${index}"]`)?.classList.add("stale");
  const asked = state.configs[index];
  try {
    slot.view = await (await post("/api/view", request(asked))).json();
    slot.error = null;
  } catch (error) {
    slot.error = error.message;
  }
  slot.busy = false;
  if (slot.dirty && state.configs[index]) { slot.dirty = false; refresh(index); return; }
  if (state.configs[index] === asked) draw();
}

// What a configuration holds does not depend on clocks and limits: asked for when the controls rest, then remembered.
const rooms = new Map();
let roomTimer = 0;

function roomOf(c) {
  const asked = request(c);
  for (const key of ["clock_hz", "power_limit_w", "temperature_c", "host_launch_s", "data"]) delete asked[key];
  return [JSON.stringify(asked), asked];
}

function askRoom() {
  clearTimeout(roomTimer);
  roomTimer = setTimeout(async () => {
    const [key, asked] = roomOf(config());
    if (rooms.has(key)) return;
    try { rooms.set(key, await (await post("/api/room", asked)).json()); } catch { return; }
    if (rooms.size > 64) rooms.delete(rooms.keys().next().value);
    drawTiles();
  }, 350);
}

function changed() {
  complaint = "";
  history.replaceState(null, "", `#${toLink(state).hash}`);
  fill();
  refresh(state.selected);
  askRoom();
}

// ---- controls ------------------------------------------------------------------------------------------------

function options(select, values, names = {}) {
  select.replaceChildren(...values.map((value) => element("option", { value }, names[value] || value || "default")));
}

function build() {
  const kinds = [...new Set(catalogue.models.map((m) => m.kind))];
  $("model").replaceChildren(...kinds.map((kind) => {
    const group = element("optgroup", { label: kind });
    group.append(...catalogue.models.filter((m) => m.kind === kind).map((m) => element("option", { value: m.name }, m.name)));
    return group;
  }));
  $("gpu").replaceChildren(...catalogue.gpus.map((gpu) =>
    element("option", { value: gpu.name }, gpu.coefficients === "measured" ? `${gpu.name} (measured)` : gpu.name)));
  for (const [id, values] of Object.entries(CHOICES)) {
    options($(id), values);
    $(id).addEventListener("change", () => { config()[id] = $(id).value || null; changed(); });
  }
  $("model").addEventListener("change", () => {
    if ($("model").value === " upload") return;
    delete config().file; delete config().lost;
    config().model = $("model").value;
    changed();
  });
  $("gpu").addEventListener("change", () => {
    Object.assign(config(), { gpu: $("gpu").value, clock_hz: null, power_limit_w: null });
    changed();
  });
  for (const [id, to] of Object.entries(NUMBERS)) {
    const [key, by] = Array.isArray(to) ? to : [id, 1];
    $(id).addEventListener("input", () => {
      if (!$(id).reportValidity()) return;
      config()[key] = $(id).value === "" ? DEFAULTS[key] : Number((Number($(id).value) * by).toPrecision(9));
      changed();
    });
  }
  for (const [id, key] of [["clock", "clock_hz"], ["limit", "power_limit_w"]]) {
    $(id).addEventListener("input", () => { config()[key] = Number($(id).value); changed(); });
    $(`${id}-free`).addEventListener("change", () => {
      config()[key] = $(`${id}-free`).checked ? null : Number($(id).value);
      changed();
    });
  }
  $("controls").addEventListener("submit", (event) => event.preventDefault());
}

function fill() {
  const c = config(), gpu = gpuOf(c), list = isList(c);
  const model = $("model");
  model.querySelector("option[value=' upload']")?.remove();
  if (c.file) {
    model.prepend(element("option", { value: " upload" }, `uploaded: ${c.file.name}`));
    model.value = " upload";
  } else model.value = c.model;
  $("gpu").value = gpu.name;
  for (const id of Object.keys(CHOICES)) $(id).value = c[id] ?? DEFAULTS[id] ?? "";
  for (const [id, to] of Object.entries(NUMBERS)) {
    const [key, by] = Array.isArray(to) ? to : [id, 1];
    const value = c[key] ?? DEFAULTS[key];
    if (document.activeElement !== $(id)) $(id).value = value === null ? "" : Number((value / by).toPrecision(9));
    $(id).disabled = list && !["temperature", "host"].includes(id);
  }
  for (const id of ["phase", "dtype", "attention", "stack", "head"]) $(id).disabled = list;
  const span = (id, low, high, step, value, unit, fallback) => {
    Object.assign($(id), { min: low, max: high, step });
    $(id).value = value ?? fallback;
    $(`${id}-free`).checked = value === null || value === undefined;
    const text = show(value ?? fallback, unit);
    $(`${id}-said`).textContent = text;
    $(id).setAttribute("aria-valuetext", text);
  };
  const settled = seen[state.selected]?.view?.clock_hz ?? gpu.max_clock_hz;
  const step = gpu.step_clock_hz || (gpu.max_clock_hz - gpu.min_clock_hz) / 100;
  span("clock", gpu.min_clock_hz, gpu.max_clock_hz, step, c.clock_hz, "Hz", settled);
  span("limit", gpu.min_limit_w, gpu.max_limit_w, 1, c.power_limit_w, "W", gpu.limit_w);
  tabs();
}

function tabs() {
  const made = state.configs.map((c, index) => {
    const tab = element("button", { type: "button", class: `k${index}`, "aria-pressed": String(index === state.selected) }, String(index + 1));
    tab.setAttribute("aria-label", `Configuration ${index + 1}: ${c.file ? c.file.name : c.model} on ${c.gpu}`);
    tab.addEventListener("click", () => { state.selected = index; changed(); draw(); $("tabs").children[index]?.focus(); });
    return tab;
  });
  if (state.configs.length < MOST) {
    const add = element("button", { type: "button", id: "add" }, "Compare");
    add.addEventListener("click", () => {
      state.configs.push({ ...config() });
      state.selected = state.configs.length - 1;
      changed();
      $("tabs").children[state.selected]?.focus();
    });
    made.push(add);
  }
  if (state.configs.length > 1) {
    const drop = element("button", { type: "button", id: "remove" }, "Remove");
    drop.addEventListener("click", () => {
      state.configs.splice(state.selected, 1);
      seen.splice(state.selected, 1);
      state.selected = Math.max(0, state.selected - 1);
      changed();
      draw();
      $("tabs").children[state.selected]?.focus();
    });
    made.push(drop);
  }
  $("tabs").replaceChildren(...made);
}

// ---- uploads -------------------------------------------------------------------------------------------------

async function take(file) {
  if (!file) return;
  if (file.size > MOST_FILE) { complain(`${file.name}: expected at most ${MOST_FILE / 1e6} MB, got ${show(file.size, "byte")}.`); return; }
  let content;
  try { content = JSON.parse(await file.text()); } catch { complain(`${file.name}: not valid JSON. Is the file complete?`); return; }
  if (content === null || typeof content !== "object") { complain(`${file.name}: expected a JSON object or list.`); return; }
  const before = config(), tried = { ...before, file: { name: file.name, content } };
  delete tried.lost;
  if (isList(tried)) for (const key of Object.keys(DEFAULTS)) if (!/_/.test(key) && key !== "data") delete tried[key];
  try { await post("/api/view", request(tried)); } catch (error) { complain(error.message); return; }
  state.configs[state.selected] = tried;
  tell(`${file.name} is read.`);
  changed();
}

let complaint = ""; // stays until the user does something else

function complain(text) {
  complaint = text;
  drawErrors();
  tell("");
}

function uploads() {
  $("file").addEventListener("change", async () => { await take($("file").files[0]); $("file").value = ""; });
  const drop = $("drop");
  for (const kind of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(kind, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", kind === "dragover");
      if (kind === "drop") take(event.dataTransfer.files[0]);
    });
  }
}

// ---- results -------------------------------------------------------------------------------------------------

function drawErrors() {
  const several = state.configs.length > 1;
  const problems = state.configs.map((_, i) => seen[i]?.error && (several ? `${i + 1}: ${seen[i].error}` : seen[i].error));
  $("errors").replaceChildren(...[complaint, ...problems].filter(Boolean).map((text) => element("p", {}, text)));
}

function draw() {
  drawErrors();
  const lost = config().lost;
  if (lost) tell(`This link could not carry the file ${lost}: drop it again to see what the sender saw.`);
  drawTiles();
  const view = seen[state.selected]?.view;
  if (!view) return;
  if (config().clock_hz == null) fill();
  drawBreakdown(view);
  drawTime(view);
  drawClocks();
  drawNotes(view);
  live.later();
}

function tile(name, value, below) {
  const box = element("div", {}, element("span", {}, name), element("b", {}, value));
  if (below) box.append(element("span", {}, below));
  return box;
}

function drawTiles() {
  $("tiles").replaceChildren(...state.configs.map((c, index) => {
    const slot = seen[index] || {}, v = slot.view;
    const set = element("div", { class: `set k${index}${slot.busy || slot.error ? " stale" : ""}`, "data-index": index });
    if (!v) { set.append(element("h3", {}, slot.error ? "no prediction" : "predicting")); return set; }
    set.append(element("h3", {}, `${v.name} on ${v.gpu}`));
    const between = (pair, unit) => `${show(pair[0], unit, 3)} to ${show(pair[1], unit, 3)}`;
    set.append(
      tile("latency", show(v.latency_s, "s"), between(v.interval.latency_s, "s")),
      tile("power", show(v.power_w, "W"), between(v.interval.power_w, "W")),
      tile("energy", show(v.energy_j, "J"), between(v.interval.energy_j, "J")),
      tile("clock", show(v.clock_hz, "Hz"), v.capped ? "held down by the power limit" : ""),
      tile("waiting for the host", percent(1 - v.busy_s / v.latency_s), ""),
    );
    const fits = v.fits === null ? "unknown" : v.fits ? "fits" : "does not fit";
    const held = v.memory_byte === null ? "" : `${show(v.memory_byte, "byte", 3)} of ${show(v.capacity_byte, "byte", 3)}`;
    const most = rooms.get(roomOf(c)[0])?.largest_batch;
    set.append(tile("memory", fits, held + (Number.isInteger(most) ? `; largest batch ${most}` : "")));
    return set;
  }));
}

function drawBreakdown(view) {
  const parts = [...new Set(seen.flatMap((slot) => slot?.view?.parts || []))];
  legend($("legend"), parts);
  const of = (v, watts) => parts.map((part) => watts[v.parts.indexOf(part)] || 0);
  const rows = [];
  state.configs.forEach((_, index) => {
    const v = seen[index]?.view;
    if (v) rows.push({ label: `${state.configs.length > 1 ? `${index + 1}: ` : ""}whole workload on ${v.gpu}`, watts: of(v, v.part_w), strong: true });
  });
  for (const op of view.ops.slice(0, 6)) {
    rows.push({ label: `${op.operator}  ${percent(op.energy_j / view.energy_j, 0)} of energy`, watts: of(view, op.part_w) });
  }
  const largest = view.parts[view.part_w.indexOf(Math.max(...view.part_w))];
  stackedBars($("breakdown"), rows, parts, `Power by module of ${view.name} on ${view.gpu}: ${show(view.power_w, "W")}, most of it ${largest}`);
  const head = element("tr", {}, ...["operator", "calls", "time", "power", "energy", "share"].map((h) => element("th", { scope: "col" }, h)));
  const body = view.ops.map((op) => element("tr", {}, element("th", { scope: "row" }, op.operator),
    ...[String(op.count), show(op.latency_s, "s", 3), show(op.power_w, "W", 3), show(op.energy_j, "J", 3), percent(op.energy_j / view.energy_j)].map((cell) => element("td", {}, cell))));
  const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
  $("ops").replaceChildren(table);
  if (view.more_ops) $("ops").append(element("p", { class: "dim" }, `${view.more_ops} smaller operators are in the download.`));
}

function drawTime(view) {
  const close = $("close").checked && view.close;
  $("close").disabled = !view.close;
  const trace = close ? view.close : view.trace;
  const [by, unit] = scale(view.latency_s, "s");
  stackedTime($("timeline"), trace, view.parts, view.power_w, by, unit, `Power over time: ${show(view.latency_s, "s")}, mean ${show(view.power_w, "W")}, peak ${show(view.peak_power_w, "W")}`);
  const how = view.trace.whole ? "" : "; each stretch at its mean";
  $("time-said").textContent = `mean ${show(view.power_w, "W")} (dashed), the busiest kernel ${show(view.peak_power_w, "W")}; marks below: waiting for the host${how}`;
}

function drawClocks() {
  const quantity = $("quantity").value;
  const [unit, name] = { energy_j: ["J", "Energy"], power_w: ["W", "Power"], latency_s: ["s", "Latency"] }[quantity];
  const shown = state.configs.map((_, k) => [k, seen[k]?.view]).filter(([, v]) => v);
  const most = Math.max(...shown.flatMap(([, v]) => v.clocks[quantity]));
  const [by, said] = scale(most, unit);
  const series = shown.map(([k, v]) => ({
    k, name: `${v.name} on ${v.gpu}`, x: v.clocks.asked_hz.map((hz) => hz / 1e6), y: v.clocks[quantity].map((value) => value / by),
    at: [v.clock_hz / 1e6, v[quantity] / by],
  }));
  lines($("clocks"), { series, xLabel: "Clock asked for (MHz)", yLabel: `${name} (${said}); rings: where it settles`, label: `${name} over the clock of ${series.length} configurations` });
}

function drawNotes(view) {
  $("support").textContent = `${view.support.inside ? "Inside" : "Outside"} what was measured: ${view.support.reason}. Intervals are ${percent(view.interval.level, 0)}.`;
  $("assumed").replaceChildren(...view.assumptions.map((note) => element("li", {}, note)));
  const p = view.provenance;
  $("source").textContent = `${p.status} coefficients: ${[p.source, p.device, p.date].filter(Boolean).join(", ")}. Wattcast ${view.wattcast}.`;
}

// ---- links and files -----------------------------------------------------------------------------------------

async function download(path, body, name) {
  try {
    const blob = await (await post(path, body)).blob();
    const link = element("a", { href: URL.createObjectURL(blob), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    tell(`${name} is saved.`);
  } catch (error) { complain(error.message); }
}

function files() {
  const all = () => ({ configurations: state.configs.map(request) });
  $("get-json").addEventListener("click", () => download("/api/predict", all(), "wattcast.json"));
  $("get-csv").addEventListener("click", () => download("/api/csv", all(), "wattcast.csv"));
  $("get-report").addEventListener("click", () => { tell("writing the report"); download("/api/report", chosenFirst(), "wattcast-report.html"); });
  $("get-figure").addEventListener("click", () => {
    const figure = $("figure-name").value, format = $("figure-format").value;
    download("/api/figure", { ...chosenFirst(), figure, format }, `wattcast-${figure}.${format}`);
  });
  $("share").addEventListener("click", async () => {
    const { hash, left } = toLink(state);
    history.replaceState(null, "", `#${hash}`);
    const note = left ? " An uploaded file was too large for it." : "";
    try { await navigator.clipboard.writeText(location.href); tell(`The link is copied.${note}`); }
    catch { tell(`Copy it from here: ${location.href}${note}`); }
  });
}

const chosenFirst = () => ({ configurations: [config(), ...state.configs.filter((c) => c !== config())].map(request) });

// ---- theme and start -----------------------------------------------------------------------------------------

function theme() {
  const set = (value) => { if (value) document.documentElement.dataset.theme = value; else delete document.documentElement.dataset.theme; };
  let kept = "";
  try { kept = localStorage.getItem("theme") || ""; } catch { /* storage may be closed */ }
  $("theme").value = kept;
  set(kept);
  $("theme").addEventListener("change", () => {
    set($("theme").value);
    try { localStorage.setItem("theme", $("theme").value); } catch { /* it then lasts as long as the page */ }
  });
}

async function start() {
  theme();
  try {
    const answer = await fetch("/api/catalogue");
    if (!answer.ok) throw new Error((await answer.json()).error);
    catalogue = await answer.json();
  } catch (error) { complain(`the catalogue did not come: ${error.message}`); return; }
  build();
  uploads();
  files();
  fill();
  state.configs.forEach((_, index) => refresh(index));
  askRoom();
  for (const id of ["close", "quantity"]) $(id).addEventListener("change", draw);
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(); live.draw(); } });
  addEventListener("hashchange", () => {
    const linked = fromLink(location.hash.slice(1));
    if (!linked) return;
    state = linked;
    seen.length = 0;
    fill();
    state.configs.forEach((_, index) => refresh(index));
  });
  $("live-same").addEventListener("click", () => {
    const about = live.about;
    state.configs[state.selected] = { gpu: about.gpu || config().gpu, model: config().model, file: { name: "recorded.json", content: about.workload } };
    changed();
  });
  await live.load();
}

start();
